package shm

import (
	"fmt"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/internal/mem"
	"github.com/kvspray/kvspray/transfer"
)

// mapping is a peer's region, mapped read-only. Shared by all lanes of that peer, so that its pages are faulted in once.
type mapping struct {
	key   mapKey
	bytes []byte
	refs  int // guarded by mappings.mu
}

type mapKey struct {
	peer transfer.Boot
	id   mem.ID
}

// mappings holds every foreign region of the backend.
type mappings struct {
	mu  sync.Mutex
	all map[mapKey]*mapping
}

// open maps fd, or finds that it is mapped already. It always takes fd.
func (m *mappings) open(key mapKey, fd int, size uint64) (*mapping, error) {
	defer func() { _ = unix.Close(fd) }()
	m.mu.Lock()
	defer m.mu.Unlock()
	if mp, ok := m.all[key]; ok {
		if uint64(len(mp.bytes)) != size {
			return nil, fmt.Errorf("region %s: %d bytes, but %d before", key.id, size, len(mp.bytes))
		}
		mp.refs++
		return mp, nil
	}
	if size == 0 || size > mem.MaxRegionBytes {
		return nil, fmt.Errorf("region %s: size %d: must be 1 to %d bytes", key.id, size, uint64(mem.MaxRegionBytes))
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, fmt.Errorf("region %s: fstat: %w", key.id, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || st.Size < 0 || uint64(st.Size) < size {
		return nil, fmt.Errorf("region %s: a file of mode %#o with %d bytes, %d were announced", key.id, st.Mode, st.Size, size)
	}
	// Without both seals a truncation by the peer would kill this process with SIGBUS in the middle of a copy.
	const need = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW
	if seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0); err != nil || seals&need != need {
		return nil, fmt.Errorf("region %s: %w (seals %#x, %v)", key.id, mem.ErrUnsealed, seals, err)
	}
	b, err := unix.Mmap(fd, 0, int(size), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("region %s: mmap of %d bytes: %w", key.id, size, err)
	}
	mp := &mapping{key: key, bytes: b, refs: 1}
	m.all[key] = mp
	return mp, nil
}

func (m *mappings) acquire(mp *mapping) {
	m.mu.Lock()
	defer m.mu.Unlock()
	mp.refs++
}

func (m *mappings) release(mp *mapping) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if mp.refs--; mp.refs == 0 {
		delete(m.all, mp.key)
		_ = unix.Munmap(mp.bytes)
	}
}
