// Package fake is RDMA verbs inside one process, deterministic: nothing moves until Step or Run is
// called, and each hop of a message is a step of its own: the sender's NIC reads, the receiver's
// takes the message in and acknowledges it, the bytes are in memory, the receiver has its
// completion, the sender has its completion. So a test can stop time between any two of them, lose
// some, deliver a message long after its sender gave up on it, give a port another address, and
// pull a device out.
//
// Without a seed everything goes on in the order in which it was posted. With one (Shuffle), the
// next step is drawn among all that hardware leaves open: queue pairs overtake each other, bytes
// come into memory in any order and long after the sender had the completion of its write. What
// hardware promises is kept: a queue pair's messages arrive in order, and neither an immediate nor
// a flush completes before the bytes of what arrived ahead of it on the same queue pair are there.
// Between queue pairs nothing is promised, and an Unordered port does not even promise that.
//
// A Fabric owns everything under one mutex. Only Serve starts a goroutine, which its result joins.
package fake

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"

	"github.com/kvspray/kvspray/internal/sys/verbs"
)

// Bounds of a fabric, so that a test that leaks fails instead of growing.
const (
	maxObjects = 1 << 16
	maxQueue   = 1 << 14
	inline     = 64 // bytes
	maxLagging = 64 // writes of a queue pair
)

// step is a hop of one queue pair.
type step struct {
	qp  uint32
	hop Hop
}

// Fabric is the network between devices.
type Fabric struct {
	mu sync.Mutex
	// guarded by mu
	next    uint32 // queue pair numbers and keys; never reused
	address uint64 // of the next registration
	work    chan struct{}
	qps     map[uint32]*queuePair
	mrs     map[uint32]*memory // by key
	order   []*queuePair       // with sends or messages, oldest first
	lost    map[uint32]bool    // queue pairs whose answers are lost
	// queue pairs whose bytes come into memory when something forces them
	lags    map[uint32]bool
	held    map[step]bool
	rng     *rand.Rand // nil: everything in order
	arrived uint64     // messages
	timers  bool       // Timers was called
	devices []*device  // as they were opened
	ports   map[string]*port
	dmabufs map[int][]byte    // by descriptor
	peers   map[uint64][]byte // by address
	limits  verbs.Limits
	inline  int // bytes of an inline request
}

// New returns an empty fabric.
func New() *Fabric {
	return &Fabric{next: 100, address: 1 << 32, work: make(chan struct{}, 1),
		qps: map[uint32]*queuePair{}, mrs: map[uint32]*memory{},
		lost: map[uint32]bool{}, lags: map[uint32]bool{}, held: map[step]bool{},
		ports: map[string]*port{}, dmabufs: map[int][]byte{}, peers: map[uint64][]byte{},
		inline: inline,
		limits: verbs.Limits{MaxRegistration: 1 << 40, MaxRegistrations: maxObjects,
			MaxQueuePairs: maxObjects, MaxMessage: 1 << 20, MaxWork: maxQueue, MaxCompletions: 2 * maxQueue}}
}

// Shuffle draws the order of steps from a seed from now on.
func (f *Fabric) Shuffle(seed uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.rng = rand.New(rand.NewPCG(seed, 1))
}

// Unordered makes a port one of a fabric without order, as EFA's: messages of one queue pair
// overtake each other, and an immediate waits for the bytes of its own message alone.
func (f *Fabric) Unordered(name string) {
	f.Device(name)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ports[name].unordered = true
}

// Still runs look while nothing moves.
func (f *Fabric) Still(look func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	look()
}

// Lock sets how many bytes the process behind a device may lock.
func (f *Fabric) Lock(name string, bytes uint64) {
	f.Device(name)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ports[name].lock = verbs.LockedMemory{Limit: bytes}
}

// Limit sets what devices report and enforce, for tests of limits.
func (f *Fabric) Limit(l verbs.Limits) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.limits = l
}

// Inline sets the largest inline request, in bytes.
func (f *Fabric) Inline(bytes int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.inline = bytes
}

// Device returns the device of that name that was opened last, which is made on first use.
func (f *Fabric) Device(name string) verbs.Device {
	f.mu.Lock()
	defer f.mu.Unlock()
	for i := len(f.devices) - 1; i >= 0; i-- {
		if f.devices[i].name == name {
			return f.devices[i]
		}
	}
	return f.openLocked(name)
}

func (f *Fabric) openLocked(name string) *device {
	if _, ok := f.ports[name]; !ok {
		n := len(f.ports) + 1
		f.ports[name] = &port{gid: gid(netip.AddrFrom4([4]byte{10, 0, byte(n >> 8), byte(n)})),
			lock: verbs.LockedMemory{Free: true}}
	}
	if len(f.devices) >= maxObjects {
		f.devices = slices.DeleteFunc(f.devices, func(d *device) bool { return d.closed })
	}
	d := &device{f: f, name: name, gid: f.ports[name].gid, events: make(chan verbs.Event, maxEvents)}
	f.devices = append(f.devices, d)
	return d
}

// port is what devices of one name have in common.
type port struct {
	gid       verbs.GID
	down      bool
	removed   bool
	unordered bool
	lock      verbs.LockedMemory
}

var errRemoved = errors.New("fake: the device is not there")

// Open opens the device of that name, as the library does: each time anew, with events of its own.
func (f *Fabric) Open(name string) (verbs.Device, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if p := f.ports[name]; p != nil && p.removed {
		return nil, errRemoved
	} else if p != nil && p.gid.Type == 0 {
		return nil, fmt.Errorf("fake: %s has no GID", name)
	}
	return f.openLocked(name), nil
}

func gid(a netip.Addr) verbs.GID {
	return verbs.GID{Raw: a.As16(), Type: verbs.GIDRoCEv2}
}

// SetGID gives a port another address, and reports it. The zero Addr takes the only one away.
func (f *Fabric) SetGID(name string, a netip.Addr) {
	f.Device(name)
	f.mu.Lock()
	f.ports[name].gid = verbs.GID{}
	if a.IsValid() {
		f.ports[name].gid = gid(a)
	}
	f.mu.Unlock()
	f.Emit(name, verbs.Event{Kind: verbs.GIDChange})
}

// Remove pulls a device out: its last event is DeviceFatal, its queue pairs neither flush nor move
// anything, and what belonged to it can only be closed. It cannot be opened until Insert.
func (f *Fabric) Remove(name string) {
	f.Device(name)
	f.Emit(name, verbs.Event{Kind: verbs.DeviceFatal})
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ports[name].removed = true
	for _, d := range f.devices {
		if d.name == name {
			d.dead = true
			d.closeLocked()
		}
	}
	for _, q := range f.qps {
		if q.d.name == name {
			q.state, q.dead = verbs.Error, true
			q.wire = nil
			q.forgetLocked()
		}
	}
}

// Insert puts a device back.
func (f *Fabric) Insert(name string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ports[name].removed, f.ports[name].down = false, false
}

// maxEvents that wait to be taken; later ones are lost.
const maxEvents = 64

// Emit makes a device report an event to all that have opened it. PortDown and PortUp also
// change what Active reports; what is on the wire stays there.
func (f *Fabric) Emit(name string, e verbs.Event) {
	f.Device(name)
	f.mu.Lock()
	defer f.mu.Unlock()
	switch e.Kind {
	case verbs.PortDown, verbs.DeviceFatal:
		f.ports[name].down = true
	case verbs.PortUp:
		f.ports[name].down = false
	}
	for _, d := range f.devices {
		if d.name != name || d.closed {
			continue
		}
		select {
		case d.events <- e:
		default:
		}
	}
}
