package fake

import (
	"errors"
	"fmt"
	"net"
	"syscall"

	"github.com/kvspray/kvspray/internal/sys/verbs"
)

type device struct {
	f      *Fabric
	name   string
	gid    verbs.GID // as it was opened
	events chan verbs.Event
	dead   bool // guarded by f.mu
	closed bool // guarded by f.mu
}

func (d *device) GID() verbs.GID { return d.gid }

func (d *device) Name() string { return d.name }

func (d *device) Events() <-chan verbs.Event { return d.events }

func (d *device) Limits() verbs.Limits {
	d.f.mu.Lock()
	defer d.f.mu.Unlock()
	return d.f.limits
}

func (d *device) Active() (bool, error) {
	d.f.mu.Lock()
	defer d.f.mu.Unlock()
	if d.dead {
		return false, errRemoved
	}
	if d.f.ports[d.name].gid != d.gid {
		return false, fmt.Errorf("fake: the GID of %s was %s and has changed", d.name, d.gid.Addr())
	}
	return !d.f.ports[d.name].down, nil
}

func (d *device) Close() error {
	d.f.mu.Lock()
	defer d.f.mu.Unlock()
	d.closeLocked()
	return nil
}

func (d *device) closeLocked() {
	if !d.closed {
		d.closed = true
		close(d.events)
	}
}

// domain keeps keys of one from queue pairs of another.
type domain struct {
	d      *device
	closed bool // guarded by d.f.mu
}

var errInDomain = errors.New("fake: something of the domain is still there")

func (d *device) NewDomain() (verbs.Domain, error) {
	d.f.mu.Lock()
	defer d.f.mu.Unlock()
	if d.dead {
		return nil, errRemoved
	}
	return &domain{d: d}, nil
}

// Close of what belonged to a device that was pulled out succeeds: the kernel has taken it down
// already.
func (p *domain) Close() error {
	f := p.d.f
	f.mu.Lock()
	defer f.mu.Unlock()
	if !p.d.dead {
		for _, m := range f.mrs {
			if m.p == p {
				return errInDomain
			}
		}
		for _, q := range f.qps {
			if q.p == p {
				return errInDomain
			}
		}
	}
	p.closed = true
	return nil
}

type memory struct {
	f    *Fabric
	p    *domain
	b    []byte
	addr uint64
	key  uint32

	remote bool
}

// DMABuf sets what lies behind a descriptor that RegisterDMABuf will be given; nil: nothing any
// more.
func (f *Fabric) DMABuf(fd int, b []byte) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.dmabufs[fd] = b
}

// Peer sets what a GPU has at an address that RegisterPeer will be given, as far as its module is
// loaded.
func (f *Fabric) Peer(addr uint64, b []byte) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.peers[addr] = b
}

func (p *domain) RegisterDMABuf(fd int, off, n uint64, remote bool) (verbs.Memory, error) {
	p.d.f.mu.Lock()
	defer p.d.f.mu.Unlock()
	b := p.d.f.dmabufs[fd]
	if b == nil {
		return nil, fmt.Errorf("fake: dma-buf %d: %w", fd, verbs.ErrNotSupported)
	}
	if off > uint64(len(b)) || n > uint64(len(b))-off {
		return nil, fmt.Errorf("fake: [%d, +%d) of a dma-buf of %d bytes", off, n, len(b))
	}
	return p.registerLocked(b[off:off+n], remote)
}

func (p *domain) RegisterPeer(addr, n uint64, remote bool) (verbs.Memory, error) {
	p.d.f.mu.Lock()
	defer p.d.f.mu.Unlock()
	for base, b := range p.d.f.peers {
		if addr >= base && addr-base <= uint64(len(b)) && n <= uint64(len(b))-(addr-base) {
			return p.registerLocked(b[addr-base:][:n], remote)
		}
	}
	return nil, fmt.Errorf("fake: nothing at %#x: %w", addr, verbs.ErrNotSupported)
}

func (p *domain) Register(b []byte, remote bool) (verbs.Memory, error) {
	p.d.f.mu.Lock()
	defer p.d.f.mu.Unlock()
	return p.registerLocked(b, remote)
}

func (p *domain) registerLocked(b []byte, remote bool) (verbs.Memory, error) {
	f := p.d.f
	if p.d.dead {
		return nil, errRemoved
	}
	if p.closed {
		return nil, net.ErrClosed
	}
	own, lock := 0, f.ports[p.d.name].lock
	for _, m := range f.mrs {
		if m.p.d.name == p.d.name {
			own++
			lock.Locked += uint64(len(m.b))
		}
	}
	n := uint64(len(b))
	if n == 0 || n > f.limits.MaxRegistration || own >= f.limits.MaxRegistrations || !lock.Free &&
		lock.Locked+n > lock.Limit {
		return nil, verbs.RefuseRegistration(fmt.Errorf("fake: register %d bytes with %s: %w", n,
			p.d.name, syscall.ENOMEM), p.d.name, n, own, f.limits, lock)
	}
	f.next++
	m := &memory{f: f, p: p, b: b, addr: f.address, key: f.next, remote: remote}
	f.address += uint64(len(b)) + 1<<20 // a gap, so that an overrun never hits a neighbor
	f.mrs[m.key] = m
	return m, nil
}

func (m *memory) Addr() uint64 { return m.addr }

func (m *memory) Len() uint64 { return uint64(len(m.b)) }

func (m *memory) LocalKey() uint32 { return m.key }

func (m *memory) RemoteKey() uint32 { return m.key }

func (m *memory) Close() error {
	m.f.mu.Lock()
	defer m.f.mu.Unlock()
	// what was taken in under the key is there before the key has ended
	for _, q := range m.f.order {
		q.showAllLocked(func(a *arrival) bool { return a.key == m.key })
	}
	delete(m.f.mrs, m.key)
	return nil
}

// sliceLocked is the memory behind a key of a domain, or nil.
func (f *Fabric) sliceLocked(p *domain, key uint32, addr uint64, n uint32, remote bool) []byte {
	m := f.mrs[key]
	if m == nil || m.p != p || remote && !m.remote || addr < m.addr ||
		addr-m.addr > uint64(len(m.b)) || uint64(n) > uint64(len(m.b))-(addr-m.addr) {
		return nil
	}
	off := addr - m.addr
	return m.b[off : off+uint64(n) : off+uint64(n)]
}
