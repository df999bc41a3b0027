package shm

import (
	"bytes"
	"fmt"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/internal/mem"
	"github.com/kvspray/kvspray/transfer"
)

// mapping is a peer's region: mapped read-only, or imported where it is memory of a GPU. Shared by all lanes of that peer, so that
// its pages are faulted in once.
type mapping struct {
	key    mapKey
	bytes  []byte      // of the host
	region *mem.Region // of a GPU
	refs   int         // guarded by mappings.mu
}

func (m *mapping) size() uint64 {
	if m.region != nil {
		return m.region.Size()
	}
	return uint64(len(m.bytes))
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
	if mp, err := m.foundLocked(key, size); mp != nil || err != nil {
		return mp, err
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

// openDevice imports memory of a GPU, or finds that it is imported already. It always takes fd.
func (m *mappings) openDevice(key mapKey, devices Devices, handle []byte, fd int, size uint64) (*mapping, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	mp, err := m.foundLocked(key, size)
	if mp != nil || err != nil {
		closeFD(fd)
		return mp, err
	}
	if devices == nil {
		closeFD(fd)
		return nil, fmt.Errorf("region %s: memory of a GPU, and this sidecar uses none: see 'kvspray doctor'", key.id)
	}
	r, err := devices.Import(key.id, bytes.Clone(handle), fd, size)
	if err != nil {
		closeFD(fd)
		return nil, err
	}
	mp = &mapping{key: key, region: r, refs: 1}
	m.all[key] = mp
	return mp, nil
}

// foundLocked takes a reference to what is there already.
func (m *mappings) foundLocked(key mapKey, size uint64) (*mapping, error) {
	mp, ok := m.all[key]
	if !ok {
		return nil, nil
	}
	if mp.size() != size {
		return nil, fmt.Errorf("region %s: %d bytes, but %d before", key.id, size, mp.size())
	}
	mp.refs++
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
		if mp.region != nil {
			mp.region.Release()
			return
		}
		_ = unix.Munmap(mp.bytes)
	}
}
