package shm

import (
	"bytes"
	"fmt"
	"sync"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/transfer"
)

// mapping is a peer's region: mapped read-only, or imported if it is GPU memory. All lanes of that
// peer share it, so that its pages are faulted in once.
type mapping struct {
	key    mapKey
	bytes  []byte      // of the host, or of a push, which has no region
	region *mem.Region // readable by this process
	refs   int         // guarded by mappings.mu
}

func (m *mapping) size() uint64 {
	if m.region != nil {
		return m.region.Size()
	}
	return uint64(len(m.bytes))
}

// far reports whether it is GPU memory.
func (m *mapping) far() bool { return m.region != nil && m.region.Device() != nil }

type mapKey struct {
	peer transfer.Boot
	id   mem.ID
}

// mappings holds every foreign region of the backend.
type mappings struct {
	links Links // nil: none

	mu  sync.Mutex
	all map[mapKey]*mapping
}

// open maps fd, or finds its mapping. It always takes ownership of fd.
func (m *mappings) open(key mapKey, fd int, size uint64) (*mapping, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	mp, err := m.foundLocked(key, size)
	if mp != nil || err != nil {
		closeFD(fd)
		return mp, err
	}
	// Seals are required: a truncation by the peer would kill this process with SIGBUS during a
	// copy.
	r, err := mem.MapMemfd(key.id, fd, size, mem.ReadOnly())
	if err != nil {
		closeFD(fd)
		return nil, err
	}
	b, _ := r.Bytes()
	mp = &mapping{key: key, bytes: b, region: r, refs: 1}
	m.all[key] = mp
	return mp, nil
}

// openDevice imports GPU memory, or finds its import. It always takes ownership of fd.
func (m *mappings) openDevice(key mapKey, devices Devices, handle []byte, fd int,
	size uint64) (*mapping, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	mp, err := m.foundLocked(key, size)
	if mp != nil || err != nil {
		closeFD(fd)
		return mp, err
	}
	if devices == nil {
		closeFD(fd)
		return nil,
			fmt.Errorf("region %s: memory of a GPU, and this sidecar uses none: see 'kvspray doctor'",
				key.id)
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

// foundLocked takes a reference to an existing mapping.
func (m *mappings) foundLocked(key mapKey, size uint64) (*mapping, error) {
	mp, ok := m.all[key]
	if !ok {
		return nil, nil
	}
	if mp.size() != size {
		return nil, fmt.Errorf("region %s: %d bytes, but it had %d", key.id, size, mp.size())
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
	if mp.refs--; mp.refs > 0 {
		m.mu.Unlock()
		return
	}
	delete(m.all, mp.key)
	if !mp.far() { // the driver takes long to unpin it
		m.mu.Unlock()
	} else { // the import must be gone before a new one
		defer m.mu.Unlock()
	}
	if m.links != nil {
		m.links.Forget([]*mem.Region{mp.region})
	}
	mp.region.Release()
}
