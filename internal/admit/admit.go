// SPDX-License-Identifier: Apache-2.0

// Package admit bounds the accepted connections that have proved nothing yet. Each of them costs a
// descriptor and a goroutine, and anybody may open one, so a listener that refuses the newest lets
// strangers shut out members. A Gate takes every connection, and closes another one instead where there
// are too many: first those that said nothing, from addresses where no member was, the oldest first.
//
// Invariants: at most Limits.Unproved connections are held, and at most Limits.PerSource of one
// address. A connection from an address where a member proved itself is closed only when no other is
// left, or for another of its own address. No goroutines; a Gate's methods may be called from any.
package admit

import (
	"container/list"
	"net"
	"net/netip"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// Limits of a Gate.
type Limits struct {
	Unproved  int // connections
	PerSource int // of these, from one address
}

// maxUnread is how many connections one arrival looks at.
const maxUnread = 8

// maxMembers bounds the addresses that are remembered as those of members.
const maxMembers = 8192

// What is known of a connection; those of a lower class are closed first.
const (
	silent       = iota // it said nothing
	speaking            // its first bytes are those of a protocol served here
	memberSilent        // the same two, from the address of a member
	memberSpeaking
	classes
)

// Gate holds the connections of one or more listeners.
type Gate struct {
	limits Limits

	mu      sync.Mutex // protects all below
	held    int
	lists   [classes]list.List // of *Visit, the oldest first
	sources map[netip.Addr]*source
	members map[netip.Addr]struct{}
	evicted uint64
}

// source is the connections of one address; it lives as long as there are any.
type source struct {
	lists [2]list.List // silent and speaking
	held  int
}

// Visit is one connection in a gate.
type Visit struct {
	gate   *Gate
	conn   net.Conn
	from   netip.Addr
	class  int // -1: it has left
	all    *list.Element
	source *list.Element
}

// New makes a gate.
func New(l Limits) *Gate {
	return &Gate{limits: l, sources: map[netip.Addr]*source{}, members: map[netip.Addr]struct{}{}}
}

// Enter takes a connection that was just accepted, and closes another one where there are too many.
func (g *Gate) Enter(c net.Conn) *Visit {
	v := &Visit{gate: g, conn: c, from: Source(c)}
	g.mu.Lock()
	out := g.victimLocked(v.from)
	for range maxUnread {
		// Its first bytes may wait for a goroutine that has not run yet.
		if out == nil || out.class%2 == speaking || !unread(out.conn) {
			break
		}
		class := out.class + 1
		g.removeLocked(out)
		g.addLocked(out, class)
		out = g.victimLocked(v.from)
	}
	if out != nil {
		g.removeLocked(out)
		g.evicted++
	}
	class := silent
	if _, ok := g.members[v.from]; ok {
		class = memberSilent
	}
	g.addLocked(v, class)
	g.mu.Unlock()
	if out != nil {
		_ = out.conn.Close()
	}
	return v
}

// victimLocked is the connection that makes room for one from an address; nil: there is room.
func (g *Gate) victimLocked(from netip.Addr) *Visit {
	s := g.sources[from]
	switch {
	case s != nil && s.held >= g.limits.PerSource:
		return first(&s.lists[silent], &s.lists[speaking])
	case g.held >= g.limits.Unproved:
		return first(&g.lists[silent], &g.lists[speaking], &g.lists[memberSilent], &g.lists[memberSpeaking])
	}
	return nil
}

// unread reports whether the other end said something that nobody has read.
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
	if raw.Control(func(fd uintptr) { n, err = unix.IoctlGetInt(int(fd), unix.TIOCINQ) }) != nil || err != nil {
		return false
	}
	return n > 0
}

// first is the oldest of the first list that is not empty.
func first(lists ...*list.List) *Visit {
	for _, l := range lists {
		if e := l.Front(); e != nil {
			return e.Value.(*Visit)
		}
	}
	return nil
}

func (g *Gate) addLocked(v *Visit, class int) {
	s := g.sources[v.from]
	if s == nil {
		s = &source{}
		g.sources[v.from] = s
	}
	v.class = class
	v.all = g.lists[class].PushBack(v)
	v.source = s.lists[class%2].PushBack(v)
	s.held++
	g.held++
}

func (g *Gate) removeLocked(v *Visit) {
	if v.class < 0 {
		return
	}
	s := g.sources[v.from]
	g.lists[v.class].Remove(v.all)
	s.lists[v.class%2].Remove(v.source)
	v.class = -1
	g.held--
	if s.held--; s.held == 0 {
		delete(g.sources, v.from)
	}
}

// Spoke says that the connection's first bytes are those of a protocol served here.
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

// Proved says that a member is at the other end. The connection leaves the gate. False: it was closed
// for another one before.
func (v *Visit) Proved() bool {
	g := v.gate
	g.mu.Lock()
	defer g.mu.Unlock()
	if v.class < 0 {
		return false
	}
	g.removeLocked(v)
	if _, known := g.members[v.from]; !known {
		for a := range g.members {
			if len(g.members) < maxMembers {
				break
			}
			delete(g.members, a) // any: a member that is forgotten is taken for a stranger, and is let in too
		}
		g.members[v.from] = struct{}{}
	}
	return true
}

// Leave ends the visit of a connection that proved nothing, or was refused. Idempotent; the caller closes
// the connection. False: it was closed for another one, or had left, before.
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
func Source(c net.Conn) netip.Addr {
	if a, ok := c.RemoteAddr().(*net.TCPAddr); ok {
		return a.AddrPort().Addr().Unmap()
	}
	return netip.Addr{}
}
