// Package fake is RDMA verbs inside one process, deterministic: nothing moves until Step or Run is
// called, and each hop of a message is a step of its own: the sender's NIC reads, the receiver's
// takes the message in and acknowledges it, the bytes are in memory, the receiver is told, the
// sender is told. So a test can stop time between any two of them, lose some, deliver a message
// long after its sender gave up on it, give a port another address, and pull a device out.
//
// Without a seed everything goes on in the order in which it was posted. With one (Shuffle), the
// next step is drawn among all that hardware leaves open: queue pairs overtake each other, bytes
// come into memory in any order and long after the sender was told that its write is complete. What
// hardware promises is kept: a queue pair's messages arrive in order, and neither an immediate nor
// a flush is told before the bytes of what arrived ahead of it on the same queue pair are there.
// Between queue pairs nothing is promised, and an Unordered port does not even promise that.
//
// A Fabric owns everything under one mutex. Only Serve starts a goroutine, which its result joins.
package fake

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/kvspray/kvspray/internal/sys/verbs"
)

// Bounds of a fabric, so that a test that leaks fails instead of growing.
const (
	maxObjects = 1 << 16
	maxQueue   = 1 << 14
	maxInline  = 64 // bytes
	maxLagging = 64 // writes of a queue pair
)

// lagLasts is how long Serve leaves bytes out of memory that nothing forces there, once nothing
// else moves.
const lagLasts = time.Millisecond

// Hop is a step of a message's way.
type Hop uint8

// The hops, from the sender to the receiver and back. The first two and the last are of the sending
// queue pair, Show and Tell of the receiving one.
const (
	Read Hop = iota // the sender's NIC reads the bytes: they are on the wire
	// the receiver's NIC takes the message in, looks at its key, and acknowledges it
	Arrive
	Show   // its bytes are in the receiver's memory
	Tell   // the receiver's completion
	Answer // the sender's completion
	numHops
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
	devices []*device  // as they were opened
	ports   map[string]*port
	dmabufs map[int][]byte    // by descriptor
	peers   map[uint64][]byte // by address
	limits  verbs.Limits
}

// New returns an empty fabric.
func New() *Fabric {
	return &Fabric{next: 100, address: 1 << 32, work: make(chan struct{}, 1), qps: map[uint32]*queuePair{}, mrs: map[uint32]*memory{},
		lost: map[uint32]bool{}, lags: map[uint32]bool{}, held: map[step]bool{}, ports: map[string]*port{}, dmabufs: map[int][]byte{}, peers: map[uint64][]byte{},
		limits: verbs.Limits{MaxRegistration: 1 << 40, MaxRegistrations: maxObjects, MaxQueuePairs: maxObjects, MaxMessage: 1 << 20, MaxWork: maxQueue, MaxCompletions: 2 * maxQueue}}
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

// Limit sets what devices say and enforce, for tests of limits.
func (f *Fabric) Limit(l verbs.Limits) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.limits = l
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
		f.ports[name] = &port{gid: gid(netip.AddrFrom4([4]byte{10, 0, byte(n >> 8), byte(n)})), lock: verbs.LockedMemory{Free: true}}
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

// SetGID gives a port another address, and says so. The zero Addr takes the only one away.
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

// Remove pulls a device out: its last word is DeviceFatal, its queue pairs neither flush nor move
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

// maxEvents that nobody has taken; later ones are lost.
const maxEvents = 64

// Emit makes a device say something, to everybody who has opened it. PortDown and PortUp also
// change what Active says; what is on the wire stays there.
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

type device struct {
	f      *Fabric
	name   string
	gid    verbs.GID // as it was opened
	events chan verbs.Event
	dead   bool // guarded by f.mu
	closed bool // guarded by f.mu
}

func (d *device) GID() verbs.GID { return d.gid }

func (d *device) Name() string               { return d.name }
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

// DMABuf says what lies behind a descriptor that RegisterDMABuf will be given; nil: nothing any
// more.
func (f *Fabric) DMABuf(fd int, b []byte) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.dmabufs[fd] = b
}

// Peer says what a GPU has at an address that RegisterPeer will be given, as far as its module is
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
	if n == 0 || n > f.limits.MaxRegistration || own >= f.limits.MaxRegistrations || !lock.Free && lock.Locked+n > lock.Limit {
		return nil, verbs.RefuseRegistration(fmt.Errorf("fake: register %d bytes with %s: %w", n, p.d.name, syscall.ENOMEM), p.d.name, n, own, f.limits, lock)
	}
	f.next++
	m := &memory{f: f, p: p, b: b, addr: f.address, key: f.next, remote: remote}
	f.address += uint64(len(b)) + 1<<20 // a gap, so that an overrun never hits a neighbour
	f.mrs[m.key] = m
	return m, nil
}

func (m *memory) Addr() uint64      { return m.addr }
func (m *memory) Len() uint64       { return uint64(len(m.b)) }
func (m *memory) LocalKey() uint32  { return m.key }
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
	if m == nil || m.p != p || remote && !m.remote || addr < m.addr || addr-m.addr > uint64(len(m.b)) || uint64(n) > uint64(len(m.b))-(addr-m.addr) {
		return nil
	}
	off := addr - m.addr
	return m.b[off : off+uint64(n) : off+uint64(n)]
}

type completionQueue struct {
	f     *Fabric
	depth int
	q     []verbs.Completion
	ready chan struct{}
}

func (d *device) NewCompletionQueue(depth int) (verbs.CompletionQueue, error) {
	if depth < 1 || depth > 2*maxQueue {
		return nil, fmt.Errorf("fake: completion queue of depth %d: 1 to %d", depth, 2*maxQueue)
	}
	return &completionQueue{f: d.f, depth: depth, ready: make(chan struct{}, 1)}, nil
}

func (c *completionQueue) Ready() <-chan struct{} { return c.ready }
func (c *completionQueue) Close() error           { return nil }

func (c *completionQueue) Poll(dst []verbs.Completion) (int, error) {
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	n := copy(dst, c.q)
	c.q = append(c.q[:0], c.q[n:]...)
	if len(c.q) > c.depth {
		return n, fmt.Errorf("fake: completion queue overran its depth of %d: %w", c.depth, verbs.ErrFull)
	}
	return n, nil
}

func (c *completionQueue) addLocked(v verbs.Completion) {
	c.q = append(c.q, v)
	select {
	case c.ready <- struct{}{}:
	default:
	}
}

// message is a write on the wire: the sender's memory was read already.
type message struct {
	w    verbs.Work
	data []byte
	life uint32 // of the sender's connection
	to   uint32
	// life of the receiver's connection: in another one its sequence numbers are others
	expected uint32
}

// request is what a sender waits for.
type request struct {
	w      verbs.Work
	acked  bool
	status verbs.Status // where it is acked
}

// arrival is what a queue pair has taken in and its host does not see yet: bytes, or a completion.
type arrival struct {
	from uint32
	at   uint64 // number of its message; 0: of none
	key  uint32
	addr uint64
	to   []byte // what lies there; nil: this is a completion
	data []byte
	lags bool // its bytes come when something forces them
	tell verbs.Completion
}

func (a *arrival) overlaps(b *arrival) bool {
	return a.addr < b.addr+uint64(len(b.to)) && b.addr < a.addr+uint64(len(a.to))
}

type queuePair struct {
	f        *Fabric
	d        *device
	p        *domain
	cq       *completionQueue
	num      uint32
	life     uint32 // counts its connections
	dead     bool   // with its device
	refused  bool   // a request of its was: those behind it are not read, nor taken in
	state    verbs.State
	remote   uint32
	maxSend  int
	maxRecv  int
	sends    []verbs.Work       // posted, not read yet
	wire     []message          // read, not taken in yet; survives an error of its sender
	unacked  []request          // read, and the sender does not know how it ended
	answers  []verbs.Completion // of sends, that its host does not see yet
	inbound  []arrival          // in the order of arrival
	receives []uint64
}

// forgetLocked drops what is posted, and what the host was not told.
func (q *queuePair) forgetLocked() {
	q.sends, q.unacked, q.answers, q.inbound, q.receives = nil, nil, nil, nil, nil
}

// showAllLocked puts the bytes of arrivals into memory at once.
func (q *queuePair) showAllLocked(which func(*arrival) bool) {
	q.inbound = slices.DeleteFunc(q.inbound, func(a arrival) bool {
		if a.to == nil || !which(&a) {
			return false
		}
		copy(a.to, a.data)
		return true
	})
}

func everything(*arrival) bool { return true }

func (p *domain) NewQueuePair(cq verbs.CompletionQueue, sends, receives int) (verbs.QueuePair, error) {
	d := p.d
	c, ok := cq.(*completionQueue)
	if !ok || c.f != d.f {
		return nil, fmt.Errorf("fake: queue pair: the completion queue is of another fabric")
	}
	f := d.f
	f.mu.Lock()
	defer f.mu.Unlock()
	own := 0
	for _, q := range f.qps {
		if q.d.name == d.name {
			own++
		}
	}
	if own >= f.limits.MaxQueuePairs {
		return nil, verbs.RefuseQueuePair(fmt.Errorf("fake: create a queue pair with %s: %w", d.name, syscall.ENOMEM), d.name, own, f.limits)
	}
	if sends < 0 || sends > maxQueue || receives < 0 || receives > maxQueue {
		return nil, fmt.Errorf("fake: queue pair of %d sends and %d receives with %s: %w", sends, receives, d.name, verbs.ErrFull)
	}
	if d.dead {
		return nil, errRemoved
	}
	if p.closed {
		return nil, net.ErrClosed
	}
	f.next++
	q := &queuePair{f: f, d: d, p: p, cq: c, num: f.next, maxSend: sends, maxRecv: receives}
	f.qps[q.num] = q
	f.order = append(f.order, q)
	return q, nil
}

func (q *queuePair) Num() uint32    { return q.num }
func (q *queuePair) MaxInline() int { return maxInline }

func (q *queuePair) Address() verbs.Address {
	return verbs.Address{GID: q.d.gid.Raw, QP: q.num, MTU: verbs.MTU4096, Type: q.d.gid.Type}
}

func (q *queuePair) State() verbs.State {
	q.f.mu.Lock()
	defer q.f.mu.Unlock()
	return q.state
}

func (q *queuePair) move(to verbs.State, from ...verbs.State) error {
	for _, s := range from {
		if q.state == s {
			q.state = to
			return nil
		}
	}
	return fmt.Errorf("fake: queue pair %d: %s cannot follow %s: %w", q.num, to, q.state, verbs.ErrState)
}

func (q *queuePair) ToInit() error {
	q.f.mu.Lock()
	defer q.f.mu.Unlock()
	return q.move(verbs.Init, verbs.Reset)
}

func (q *queuePair) ToReadyToReceive(remote verbs.Address) error {
	if err := verbs.CheckPeer(q.Address(), remote); err != nil {
		return err
	}
	q.f.mu.Lock()
	defer q.f.mu.Unlock()
	if err := q.move(verbs.ReadyToReceive, verbs.Init); err != nil {
		return err
	}
	q.remote = remote.QP
	return nil
}

func (q *queuePair) ToReadyToSend() error {
	q.f.mu.Lock()
	defer q.f.mu.Unlock()
	return q.move(verbs.ReadyToSend, verbs.ReadyToReceive)
}

func (q *queuePair) ToError() error {
	q.f.mu.Lock()
	defer q.f.mu.Unlock()
	if q.dead {
		return errRemoved
	}
	if q.state == verbs.Reset {
		return fmt.Errorf("fake: queue pair %d: ERR cannot follow RESET: %w", q.num, verbs.ErrState)
	}
	q.failLocked()
	return nil
}

// failLocked flushes. What is on the wire stays there: the network does not know of the sender's
// state. Whether what it was not told of has arrived a flush does not say.
func (q *queuePair) failLocked() {
	q.state = verbs.Error
	for i := range q.unacked {
		q.flushSendLocked(q.unacked[i].w.ID)
	}
	for i := range q.sends {
		q.flushSendLocked(q.sends[i].ID)
	}
	for _, id := range q.receives {
		q.flushReceiveLocked(id)
	}
	q.unacked, q.sends, q.receives = nil, nil, nil
	q.f.wakeLocked()
}

func (q *queuePair) flushSendLocked(id uint64) {
	q.answers = append(q.answers, verbs.Completion{ID: id, QP: q.num, Status: verbs.Flushed})
}

// flushReceiveLocked puts the flush behind the bytes of what was taken in.
func (q *queuePair) flushReceiveLocked(id uint64) {
	q.inbound = append(q.inbound, arrival{tell: verbs.Completion{ID: id, QP: q.num, Status: verbs.Flushed}})
}

func (q *queuePair) ToReset() error {
	q.f.mu.Lock()
	defer q.f.mu.Unlock()
	q.state, q.remote, q.refused = verbs.Reset, 0, false
	q.life++
	q.showAllLocked(everything)
	q.forgetLocked()
	return nil
}

func (q *queuePair) Close() error {
	q.f.mu.Lock()
	defer q.f.mu.Unlock()
	q.state = verbs.Reset
	q.showAllLocked(everything)
	q.forgetLocked()
	delete(q.f.qps, q.num)
	return nil
}

func (q *queuePair) PostSend(batch []verbs.Work) (taken int, err error) {
	q.f.mu.Lock()
	defer q.f.mu.Unlock()
	switch {
	case q.dead:
		return 0, errRemoved
	case q.state == verbs.Error: // as hardware does: taken, and flushed at once
		for i := range batch {
			q.flushSendLocked(batch[i].ID)
		}
		q.f.wakeLocked()
		return len(batch), nil
	case q.state != verbs.ReadyToSend:
		return 0, fmt.Errorf("fake: queue pair %d: post send in %s: %w", q.num, q.state, verbs.ErrState)
	}
	room := q.maxSend - len(q.sends) - len(q.unacked)
	if taken = min(len(batch), room); taken < len(batch) {
		err = fmt.Errorf("fake: queue pair %d: %d of %d sends taken: %w", q.num, taken, len(batch), verbs.ErrFull)
	}
	q.sends = append(q.sends, batch[:taken]...)
	q.f.wakeLocked()
	return taken, err
}

func (q *queuePair) PostReceive(ids []uint64) error {
	q.f.mu.Lock()
	defer q.f.mu.Unlock()
	switch {
	case q.dead:
		return errRemoved
	case q.state == verbs.Reset:
		return fmt.Errorf("fake: queue pair %d: post receive in %s: %w", q.num, q.state, verbs.ErrState)
	case q.state == verbs.Error:
		for _, id := range ids {
			q.flushReceiveLocked(id)
		}
		q.f.wakeLocked()
		return nil
	case len(q.receives)+len(ids) > q.maxRecv:
		return fmt.Errorf("fake: queue pair %d: %d receives of %d: %w", q.num, len(q.receives)+len(ids), q.maxRecv, verbs.ErrFull)
	}
	q.receives = append(q.receives, ids...)
	return nil
}

// Hold stops a queue pair at some of its hops until Release; without any, its messages stay on the
// wire.
func (f *Fabric) Hold(qp uint32, hops ...Hop) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(hops) == 0 {
		hops = []Hop{Arrive}
	}
	for _, h := range hops {
		f.held[step{qp, h}] = true
	}
}

// Lag keeps bytes that a sending queue pair's messages bring out of the receiver's memory, until
// Release or until something forces them there: a completion of the receiver's behind them, or the
// end of its key or queue pair.
func (f *Fabric) Lag(qp uint32) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lags[qp] = true
}

// Release lets a queue pair go on.
func (f *Fabric) Release(qp uint32) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.lags, qp)
	for _, q := range f.order {
		for i := range q.inbound {
			if a := &q.inbound[i]; a.from == qp {
				a.lags = false
			}
		}
	}
	for h := range numHops {
		delete(f.held, step{qp, h})
	}
	f.wakeLocked()
}

// Held counts the messages of a sending queue pair that have left it, and whose bytes are not in
// the receiver's memory.
func (f *Fabric) Held(qp uint32) (n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, q := range f.order {
		if q.num == qp {
			n += len(q.wire)
		}
		for i := range q.inbound {
			if a := &q.inbound[i]; a.from == qp && a.to != nil {
				n++
			}
		}
	}
	return n
}

// Serve runs the fabric whenever there may be something to do, until the result is called; for
// tests that do not drive it themselves.
func (f *Fabric) Serve() (stop func()) {
	done, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		var due <-chan time.Time
		for {
			for f.step(false) {
			}
			if due == nil && f.lagging() {
				due = time.After(lagLasts)
			}
			select {
			case <-f.work:
			case <-due:
				due = nil
				f.Run()
			case <-done:
				return
			}
		}
	}()
	return func() { close(done); <-stopped }
}

func (f *Fabric) wakeLocked() {
	select {
	case f.work <- struct{}{}:
	default:
	}
}

// LoseAnswers makes completions of a sending queue pair never come; its writes take effect.
func (f *Fabric) LoseAnswers(qp uint32) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lost[qp] = true
}

// TimeOut is the sender's retry counter running out: its oldest request fails, the rest is flushed.
// What is on the wire still arrives.
func (f *Fabric) TimeOut(qp uint32) {
	f.mu.Lock()
	defer f.mu.Unlock()
	q := f.qps[qp]
	if q == nil || q.state == verbs.Error {
		return
	}
	if len(q.unacked) > 0 {
		q.answers = append(q.answers, verbs.Completion{ID: q.unacked[0].w.ID, QP: q.num, Status: verbs.RetryExceeded})
		q.unacked = q.unacked[1:]
	}
	q.failLocked()
}

// Run steps until nothing moves any more and returns how many steps that took.
func (f *Fabric) Run() int {
	for n := 0; ; n++ {
		if !f.Step() {
			return n
		}
	}
}

// Step makes one hop of one queue pair. Without a seed they take turns in the order in which they
// were made. False: nothing can move.
func (f *Fabric) Step() bool { return f.step(true) }

// step is Step. settle: where nothing else moves, bytes that lag do.
func (f *Fabric) step(settle bool) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	first := f.drawLocked(len(f.order))
	for i := range f.order {
		at := (first + i) % len(f.order)
		if q := f.order[at]; f.moveLocked(q) {
			if f.rng == nil {
				f.order = append(slices.Delete(f.order, at, at+1), q)
			}
			return true
		}
	}
	// Nothing moves: what is closed and has nothing on the wire is forgotten.
	f.order = slices.DeleteFunc(f.order, func(q *queuePair) bool { return f.qps[q.num] == nil && len(q.wire) == 0 })
	if !settle {
		return false
	}
	for _, q := range f.order {
		for i := range q.inbound {
			a := &q.inbound[i]
			a.lags = f.lags[a.from]
		}
		if f.moveLocked(q) {
			return true
		}
	}
	return false
}

func (f *Fabric) lagging() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.ContainsFunc(f.order, func(q *queuePair) bool {
		return slices.ContainsFunc(q.inbound, func(a arrival) bool { return a.lags && !f.lags[a.from] })
	})
}

func (q *queuePair) lagging() (n int) {
	for i := range q.inbound {
		if q.inbound[i].lags {
			n++
		}
	}
	return n
}

// drawLocked is a number below n; 0 without a seed.
func (f *Fabric) drawLocked(n int) int {
	if f.rng == nil || n < 2 {
		return 0
	}
	return f.rng.IntN(n)
}

// moveLocked makes one hop of a queue pair. Without a seed, what is furthest on its way goes first.
func (f *Fabric) moveLocked(q *queuePair) bool {
	if len(q.sends)+len(q.wire)+len(q.answers)+len(q.inbound) == 0 {
		return false
	}
	order := [numHops]Hop{Show, Tell, Answer, Arrive, Read}
	first := f.drawLocked(len(order))
	for i := range order {
		if h := order[(first+i)%len(order)]; !f.held[step{q.num, h}] && f.hopLocked(q, h) {
			return true
		}
	}
	return false
}

func (f *Fabric) hopLocked(q *queuePair, h Hop) bool {
	switch h {
	case Read:
		return f.readLocked(q)
	case Arrive:
		return f.arriveLocked(q)
	case Show:
		return f.showLocked(q)
	case Tell:
		return f.tellLocked(q)
	}
	if len(q.answers) == 0 {
		return false
	}
	q.cq.addLocked(q.answers[0])
	q.answers = q.answers[1:]
	return true
}

func (f *Fabric) readLocked(q *queuePair) bool {
	if len(q.sends) == 0 || q.state != verbs.ReadyToSend || q.refused {
		return false
	}
	w := q.sends[0]
	q.sends = q.sends[1:]
	b := f.sliceLocked(q.p, w.LocalKey, w.LocalAddr, w.Len, false)
	if b == nil && w.Len > 0 {
		q.refused = true // what is ahead of it ends first
		q.unacked = append(q.unacked, request{w: w, acked: true, status: verbs.LocalAccess})
		f.settleLocked(q)
		return true
	}
	m := message{w: w, data: append([]byte(nil), b...), life: q.life, to: q.remote}
	if to := f.qps[q.remote]; to != nil {
		m.expected = to.life
	}
	q.unacked = append(q.unacked, request{w: w})
	q.wire = append(q.wire, m)
	return true
}

func (f *Fabric) arriveLocked(q *queuePair) bool {
	if len(q.wire) == 0 {
		return false
	}
	at := 0
	if f.unorderedLocked(q) {
		at = f.drawLocked(len(q.wire))
	}
	m := q.wire[at]
	// which clears: whoever keeps a queue pair does not keep what it sent
	q.wire = slices.Delete(q.wire, at, at+1)
	to := f.qps[m.to]
	if to == nil || (to.state != verbs.ReadyToReceive && to.state != verbs.ReadyToSend) || to.remote != q.num || to.life != m.expected || q.refused && q.life == m.life {
		return true // nobody there; the sender's time-out will say so
	}
	b := f.sliceLocked(to.p, m.w.RemoteKey, m.w.RemoteAddr, m.w.Len, true)
	switch {
	case b == nil && m.w.Len > 0:
		f.ackLocked(q, &m, verbs.RemoteAccess)
		to.failLocked() // an access error takes both ends down
	case m.w.Op == verbs.WriteImm && len(to.receives) == 0:
		f.ackLocked(q, &m, verbs.ReceiverNotReady)
	default:
		f.arrived++
		if m.w.Len > 0 {
			lags := f.drawLocked(2) == 1 && to.lagging() < maxLagging || f.lags[q.num]
			to.inbound = append(to.inbound, arrival{from: q.num, at: f.arrived, key: m.w.RemoteKey, addr: m.w.RemoteAddr, to: b, data: m.data, lags: lags})
		}
		if m.w.Op == verbs.WriteImm {
			to.inbound = append(to.inbound, arrival{from: q.num, at: f.arrived,
				tell: verbs.Completion{ID: to.receives[0], QP: to.num, Op: verbs.Receive, Imm: m.w.Imm}})
			to.receives = to.receives[1:]
		}
		f.ackLocked(q, &m, verbs.OK)
	}
	return true
}

func (f *Fabric) unorderedLocked(q *queuePair) bool { return f.ports[q.d.name].unordered }

// waitsLocked reports whether a completion has to wait for bytes that arrived ahead of it.
func (f *Fabric) waitsLocked(q *queuePair, tell, bytes *arrival) bool {
	return !f.unorderedLocked(q) || tell.at == 0 || tell.at == bytes.at
}

// showLocked puts the bytes of one arrival into memory: any, but where two lie over each other the
// earlier one first. What lags waits for a completion that waits for it.
func (f *Fabric) showLocked(q *queuePair) bool {
	first := f.drawLocked(len(q.inbound))
	for i := range q.inbound {
		at := (first + i) % len(q.inbound)
		a := &q.inbound[at]
		if a.to == nil || a.lags && !slices.ContainsFunc(q.inbound[at:], func(b arrival) bool { return b.to == nil && f.waitsLocked(q, &b, a) }) {
			continue
		}
		for earlier := 0; earlier < at; earlier++ {
			if b := &q.inbound[earlier]; b.to != nil && b.overlaps(&q.inbound[at]) {
				at, earlier = earlier, -1
			}
		}
		a = &q.inbound[at]
		copy(a.to, a.data)
		q.inbound = slices.Delete(q.inbound, at, at+1)
		return true
	}
	return false
}

func (f *Fabric) tellLocked(q *queuePair) bool {
	// What has failed is told before what is flushed because of it.
	failing := slices.ContainsFunc(q.answers, func(c verbs.Completion) bool { return c.Status != verbs.OK && c.Status != verbs.Flushed })
	for at := range q.inbound {
		a := &q.inbound[at]
		if a.to != nil || failing && a.tell.Status == verbs.Flushed {
			continue
		}
		if !slices.ContainsFunc(q.inbound[:at], func(b arrival) bool { return b.to != nil && f.waitsLocked(q, a, &b) }) {
			q.cq.addLocked(a.tell)
			q.inbound = slices.Delete(q.inbound, at, at+1)
			return true
		}
		if !f.unorderedLocked(q) {
			return false // nor those behind it
		}
	}
	return false
}

// ackLocked lets the sender's NIC know how a message ended.
func (f *Fabric) ackLocked(q *queuePair, m *message, s verbs.Status) {
	if q.life != m.life {
		return
	}
	q.refused = q.refused || s != verbs.OK
	if f.lost[q.num] {
		return
	}
	for i := range q.unacked { // or the sender gave up on it
		if r := &q.unacked[i]; r.w.ID == m.w.ID && !r.acked {
			r.acked, r.status = true, s
			break
		}
	}
	f.settleLocked(q)
}

// settleLocked makes answers of what has ended, in the order of posting.
func (f *Fabric) settleLocked(q *queuePair) {
	for len(q.unacked) > 0 && q.unacked[0].acked {
		r := q.unacked[0]
		q.unacked = q.unacked[1:]
		switch {
		case r.status != verbs.OK:
			q.answers = append(q.answers, verbs.Completion{ID: r.w.ID, QP: q.num, Status: r.status})
			q.failLocked()
		case r.w.Signaled:
			q.answers = append(q.answers, verbs.Completion{ID: r.w.ID, QP: q.num, Op: r.w.Op})
		}
	}
}
