// Package admit bounds the accepted connections that have proved nothing yet, and all connections
// of HTTP, whose clients never do. Each of them costs a descriptor and a goroutine, and any host
// may open one. A listener that refuses the newest one lets strangers shut out members. So a Gate
// takes every connection, and where there are too many it closes another one: first those that have
// sent nothing, then those that have, both only from addresses where no member was; and of these
// one from the source with the most, the oldest first.
//
// A source is an IPv4 address, or an IPv6 /64, of which one host may have every address. A member
// is a source of its own, so that strangers in the same /64 take no place from it.
//
// Invariants: a Gate holds at most Limits.Unproved connections, and at most Limits.PerSource of
// one source. It closes a connection from the address of a member only where no other is left, or
// for another one of that address. An arrival takes a time that is logarithmic in the
// number of connections. No goroutines; the methods may be called from any.
package admit

import (
	"container/list"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/internal/heap"
	"github.com/kvspray/kvspray/internal/sys/limits"
)

// Limits of a Gate.
type Limits struct {
	Unproved  int // connections
	PerSource int // of these, from one source
}

// within scales the limits down to the gate's part of the process's descriptors.
func (l Limits) within(descriptors uint64) Limits {
	part := max(minUnproved, descriptors/descriptorPart)
	if uint64(l.Unproved) <= part {
		return l
	}
	return Limits{Unproved: int(part), PerSource: max(1, l.PerSource*int(part)/l.Unproved)}
}

const (
	maxUnread  = 8    // connections that one arrival looks at
	maxMembers = 8192 // addresses that are remembered as those of members
	sourceBits = 64   // of an IPv6 address: one host may have all that share them

	// A gate has at most one in descriptorPart descriptors of the process. A sidecar has a dozen
	// gates or less, so the rest is for members' lanes, engines and files.
	descriptorPart = 16
	minUnproved    = 8 // connections, however few descriptors there are
)

// The state of a connection in a Gate. It closes those of a lower class first.
const (
	silent       = iota // nothing of a protocol that is served here has come
	speaking            // its first message is of such a protocol
	memberSilent        // the same two, from the address of a member
	memberSpeaking
	classes
)

// Members are the addresses where members proved themselves. Several gates may share them.
type Members struct {
	mu  sync.Mutex // protects all
	all map[netip.Addr]struct{}
}

// NewMembers makes an empty set.
func NewMembers() *Members { return &Members{all: map[netip.Addr]struct{}{}} }

func (m *Members) has(a netip.Addr) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	_, ok := m.all[a]
	return ok
}

func (m *Members) add(a netip.Addr) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, known := m.all[a]; known {
		return
	}
	for other := range m.all {
		if len(m.all) < maxMembers {
			break
		}
		delete(m.all, other) // any: one that is forgotten is let in as strangers are
	}
	m.all[a] = struct{}{}
}

// Gate holds the connections of one or more listeners.
type Gate struct {
	limits  Limits
	members *Members

	mu      sync.Mutex // protects all below
	held    int
	entered uint64
	sources map[netip.Prefix]*source
	crowds  [classes]heap.Heap[*crowd] // of all sources
	evicted uint64
}

// source is the connections of one source; it lives as long as there are any.
type source struct {
	crowds [classes]crowd
	held   int
}

// crowd is the connections of one class of one source.
type crowd struct {
	row
	place heap.Item[*crowd] // in Gate.crowds
	// The same connections by address. Nil for a source that is one address.
	addresses map[netip.Addr]*address
	order     heap.Heap[*address]
}

// address is the connections of a crowd from one address.
type address struct {
	row
	place heap.Item[*address] // in crowd.order
}

// row is connections, the oldest first.
type row struct{ list.List } // of *Visit

func (r *row) oldest() *Visit { return r.Front().Value.(*Visit) }

// key orders rows: the longest first, and of equal ones that with the oldest connection.
func (r *row) key() heap.Key {
	return heap.Key{At: -time.Duration(r.Len()), Seq: r.oldest().age}
}

// Visit is one connection in a gate.
type Visit struct {
	gate   *Gate
	conn   net.Conn
	from   netip.Addr
	key    netip.Prefix // its source
	age    uint64       // of two, the one with the lower number is older
	class  int          // -1: it has left
	known  bool
	at     *list.Element // in its crowd
	atAddr *list.Element // in the crowd's address, if it has addresses
}

// New makes a gate. A nil set is one of its own. A process with few descriptors has a smaller one.
func New(l Limits, members *Members) *Gate {
	if n, err := limits.Descriptors(); err == nil {
		l = l.within(n)
	}
	if members == nil {
		members = NewMembers()
	}
	return &Gate{limits: l, members: members, sources: map[netip.Prefix]*source{}}
}

// Enter takes a connection that was just accepted, and closes another one where there are too many.
func (g *Gate) Enter(c net.Conn) *Visit {
	v := &Visit{gate: g, conn: c, from: Source(c)}
	class := silent
	if v.key = SourceOf(v.from); g.members.has(v.from) {
		v.known = true
		class, v.key = memberSilent, netip.PrefixFrom(v.from, v.from.BitLen())
	}
	g.mu.Lock()
	out := g.victimLocked(v.key)
	for range maxUnread {
		// Its first bytes may wait for a goroutine that has not run yet: it is another one's turn.
		if out == nil || out.class%2 == speaking || !unread(out.conn) {
			break
		}
		class := out.class
		g.removeLocked(out)
		g.addLocked(out, class)
		out = g.victimLocked(v.key)
	}
	if out != nil {
		g.removeLocked(out)
		g.evicted++
	}
	g.addLocked(v, class)
	g.mu.Unlock()
	if out != nil {
		_ = out.conn.Close()
	}
	return v
}

// victimLocked is the connection that makes room for one of a source; nil: there is room.
func (g *Gate) victimLocked(key netip.Prefix) *Visit {
	if s := g.sources[key]; s != nil && s.held >= g.limits.PerSource {
		for class := range s.crowds {
			if c := &s.crowds[class]; c.Len() > 0 {
				return c.victim()
			}
		}
	}
	if g.held < g.limits.Unproved {
		return nil
	}
	for class := range g.crowds {
		if h := &g.crowds[class]; h.Len() > 0 {
			_, it := h.At(0)
			return it.Value.victim()
		}
	}
	return nil
}

// victim is the oldest connection of the address that has the most of them.
func (c *crowd) victim() *Visit {
	if c.order.Len() == 0 {
		return c.oldest()
	}
	_, it := c.order.At(0)
	return it.Value.oldest()
}

func (c *crowd) add(v *Visit) {
	v.at = c.PushBack(v)
	if v.key.IsSingleIP() {
		return
	}
	a := c.addresses[v.from]
	if a == nil {
		if c.addresses == nil {
			c.addresses = map[netip.Addr]*address{}
		}
		a = &address{}
		a.place.Value = a
		c.addresses[v.from] = a
	}
	v.atAddr = a.PushBack(v)
	c.order.Set(&a.place, a.key())
}

func (c *crowd) remove(v *Visit) {
	c.Remove(v.at)
	a := c.addresses[v.from]
	if a == nil {
		return
	}
	a.Remove(v.atAddr)
	if a.Len() > 0 {
		c.order.Set(&a.place, a.key())
		return
	}
	c.order.Remove(&a.place)
	delete(c.addresses, v.from)
}

// unread reports whether bytes of the other end wait to be read.
func unread(c net.Conn) bool {
	sc, ok := c.(syscall.Conn)
	if !ok {
		return false
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return false
	}
	n := 0
	if raw.Control(func(fd uintptr) { n, err = unix.IoctlGetInt(int(fd), unix.TIOCINQ) }) != nil ||
		err != nil {
		return false
	}
	return n > 0
}

func (g *Gate) addLocked(v *Visit, class int) {
	s := g.sources[v.key]
	if s == nil {
		s = &source{}
		for class := range s.crowds {
			c := &s.crowds[class]
			c.place.Value = c
		}
		g.sources[v.key] = s
	}
	g.entered++
	v.class, v.age = class, g.entered
	c := &s.crowds[class]
	c.add(v)
	g.crowds[class].Set(&c.place, c.key())
	s.held++
	g.held++
}

func (g *Gate) removeLocked(v *Visit) {
	if v.class < 0 {
		return
	}
	s := g.sources[v.key]
	c := &s.crowds[v.class]
	c.remove(v)
	if c.Len() > 0 {
		g.crowds[v.class].Set(&c.place, c.key())
	} else {
		g.crowds[v.class].Remove(&c.place)
	}
	v.class = -1
	g.held--
	if s.held--; s.held == 0 {
		delete(g.sources, v.key)
	}
}

// Known reports whether a member was at the address before the connection came.
func (v *Visit) Known() bool { return v.known }

// In reports whether the connection is in the gate still: it has not left, and was not closed for
// another one.
func (v *Visit) In() bool {
	v.gate.mu.Lock()
	defer v.gate.mu.Unlock()
	return v.class >= 0
}

// Spoke records that the connection's first message is of a protocol served here. The caller
// has read all of that message: a few bytes that look like its beginning are not enough.
func (v *Visit) Spoke() {
	g := v.gate
	g.mu.Lock()
	defer g.mu.Unlock()
	if v.class == silent || v.class == memberSilent {
		class := v.class + 1
		g.removeLocked(v)
		g.addLocked(v, class)
	}
}

// Waits reports that the other end has to send its next message, which may never come. The
// connection counts again as one that has sent nothing, and as the newest of these.
func (v *Visit) Waits() {
	g := v.gate
	g.mu.Lock()
	defer g.mu.Unlock()
	if v.class >= 0 {
		class := v.class - v.class%2
		g.removeLocked(v)
		g.addLocked(v, class)
	}
}

// Proved records that a member is at the other end. The connection leaves the gate. False:
// it was closed for another one before.
func (v *Visit) Proved() bool {
	g := v.gate
	g.mu.Lock()
	in := v.class >= 0
	g.removeLocked(v)
	g.mu.Unlock()
	if in {
		g.members.add(v.from)
	}
	return in
}

// Leave ends the visit of a connection that proved nothing, or was refused. Idempotent; the caller
// closes the connection. False: it was closed for another one, or had left, before.
func (v *Visit) Leave() bool {
	v.gate.mu.Lock()
	defer v.gate.mu.Unlock()
	was := v.class >= 0
	v.gate.removeLocked(v)
	return was
}

// Evicted is how many connections were closed for others.
func (g *Gate) Evicted() uint64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.evicted
}

// Held is how many connections are in the gate.
func (g *Gate) Held() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.held
}

// Source is the address that a connection came from; the zero address where it has none.
func Source(c net.Conn) netip.Addr { return Address(c.RemoteAddr()) }

// Address is the address without its port; the zero address where it has none.
func Address(a net.Addr) netip.Addr {
	if t, ok := a.(*net.TCPAddr); ok {
		return t.AddrPort().Addr().Unmap().WithZone("")
	}
	return netip.Addr{}
}

// SourceOf is the source that an address belongs to.
func SourceOf(a netip.Addr) netip.Prefix {
	bits := a.BitLen()
	if a.Is6() {
		bits = sourceBits
	}
	p, _ := a.Prefix(bits) // of an address that is none: the zero prefix
	return p
}
