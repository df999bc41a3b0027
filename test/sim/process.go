package sim

import (
	"context"
	"slices"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec"
	ends "github.com/kvspray/kvspray/control/lease"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// What the production driver of a simulated sidecar works with.

// later runs fn in the sidecar's process, if it still lives then.
func (s *sidecar) later(d time.Duration, fn func()) {
	s.n.Host.After(d, func() {
		if !s.dead {
			fn()
		}
	})
}

// run does something in the sidecar's process, which may be stopped now.
func (s *sidecar) run(fn func()) {
	if s.dead {
		return
	}
	if s.n.Host.Frozen() {
		s.later(0, func() { s.run(fn) })
		return
	}
	fn()
}

// event brings an event to the executor, and performs what follows.
func (s *sidecar) event(fn func(now exec.Instant)) {
	s.run(func() { s.drv.Do(func(_ *exec.Exec, now exec.Instant) { fn(now) }) })
}

// engine brings an event of the node's engine to the executor, and performs what follows.
func (s *sidecar) engine(ev engines.Event) {
	s.run(func() { s.drv.Handle([]engines.Event{ev}) })
}

// process is virtual time.
type process struct{ s *sidecar }

func (p process) Now() exec.Instant { return p.s.n.now() }

// Idle comes after every round of actions: what must hold then is checked.
func (p process) Idle(next exec.Instant, _ func()) {
	p.s.lock.pause(func() {
		p.s.arm(next)
		p.s.check()
	})
}

// Fired implements driver.Process: arm's own event forgets the instant.
func (p process) Fired() {}

// Go has work take its time; its event may be repeated.
func (p process) Go(work func(context.Context) func()) {
	s := p.s
	s.later(s.c.F.Jitter(s.c.cfg.Fence), func() {
		event := work(context.Background())
		s.run(event)
		s.twice(func() { s.run(event) })
	})
}

// arm has Tick called at an instant.
func (s *sidecar) arm(at exec.Instant) {
	if at >= 1<<62 || s.tickAt >= 0 && s.tickAt <= at {
		return
	}
	s.tickAt = at
	s.later(max(at-s.n.now(), 0), func() {
		if s.tickAt != at {
			return // an earlier one was armed since
		}
		s.tickAt = -1
		s.run(s.drv.Tick)
	})
}

// twice does something again a little later, now and then.
func (s *sidecar) twice(fn func()) {
	if s.c.chance(s.c.cfg.Twice) {
		s.c.stats.Twice++
		s.later(s.c.F.Jitter(10*time.Millisecond), fn)
	}
}

// lock measures for how long it is held. There is one goroutine.
type lock struct {
	n    *Node
	from time.Duration
}

func (l *lock) Lock() {
	if h := l.n.held; h != nil {
		l.from = h.Clock()
	}
}

func (l *lock) Unlock() {
	if h := l.n.held; h != nil {
		d := h.Clock() - l.from
		h.Sum, h.Max, h.Times = h.Sum+d, max(h.Max, d), h.Times+1
	}
}

// pause does what the simulator does while the lock is held, which does not count.
func (l *lock) pause(f func()) {
	h := l.n.held
	if h == nil {
		f()
		return
	}
	from := h.Clock()
	f()
	l.from += h.Clock() - from
}

func (l *lock) TryLock() bool {
	l.Lock()
	return true
}

// Held is for how long a sidecar's driver holds the lock of its executor.
type Held struct {
	Clock    func() time.Duration
	Sum, Max time.Duration
	Times    int
}

// Measure has the node's driver count in h from now on.
func (n *Node) Measure(h *Held) { n.held = h }

// peers is the conversation with other sidecars.
type peers struct{ s *sidecar }

func (p peers) PeerKey(boot transfer.Boot) (transport.Peer, bool) { return host(p).PeerKey(boot) }
func (p peers) Known(transfer.Boot) bool                          { return true }
func (p peers) Connect(endpoint string)                           { p.s.connect(endpoint) }
func (p peers) Send(to transfer.Boot, f *peerv1.ControlFrame)     { p.s.send(to, f) }
func (p peers) Describe(peer transfer.Boot, geometry [32]byte)    { p.s.describe(peer, geometry) }
func (p peers) Compare(exec.Comparison)                           {} // all engines are of one model

// simEngines is the way back to the played engines.
type simEngines struct{ s *sidecar }

func (e simEngines) Complete(a *exec.Action) { e.s.complete(a) }
func (e simEngines) Forget(*engines.Worker)  {}

// session implements engines.Session.
type session struct{}

func (session) Follow(bool)   {}
func (session) HeldOn(uint64) {}

// memory is modeled: one word stands for a chunk's bytes.
type memory struct{ s *sidecar }

func (m memory) Receiver(land *exec.ReceivePart) transport.Memory {
	s := m.s
	if _, why := s.drv.Grant(land.Grant.Peer, land.Grant.Slot, land.Grant.Gen); why !=
		transfer.ReasonUnknownSlot {
		s.c.violation("%s: slot %d %s", s.n.addr, land.Grant.Slot, brokeSlot)
	}
	l := s.owner(land.Lease())
	if !slices.ContainsFunc(l.sinks, func(k *sink) bool { return k.s == s && !k.fenced }) {
		// The first part of a new grant, whose bitmaps are empty: earlier chunks do not count.
		own := held(l.rank, len(l.e.boots))
		l.content = make([]uint64, uint32(own.hi-own.lo)*l.t.perLayer())
	}
	k := &sink{s: s, l: l, land: land, plan: land.Plan.(*plan)}
	l.sinks = append(l.sinks, k)
	s.sinks[&land.Grant] = k
	return k
}

func (m memory) Sender(x *exec.SendPart) (transport.Memory, error) {
	s := m.s
	l := s.owner(x.Lease)
	src := &source{s: s, l: l, plan: x.Plan.(*plan)}
	l.sources = append(l.sources, src)
	s.sources[&x.Origin] = src
	return src, nil
}

// Extend implements driver.Memory: words have no tables.
func (m memory) Extend(*exec.SendPart, [][]uint32) error { return nil }

// local describes the local rails.
type local struct{ s *sidecar }

func (l local) Rail(_, name string) (transport.Rail, bool) {
	for _, r := range l.s.rails {
		if r.Name == name {
			return r, true
		}
	}
	return transport.Rail{}, false
}

func (l local) DeviceSlices() bool { return false }

// observer watches for what the driver should not report.
type observer struct{ s *sidecar }

func (o observer) LaneUp(transport.Lane)                           {}
func (o observer) LaneDown(transport.Lane, bool)                   {}
func (o observer) Slice(transport.Lane, *transport.Result, uint64) {}
func (o observer) Landed(string, string, int, uint64)              {}
func (o observer) Fenced(ends.Cause, time.Duration)                {}
func (o observer) Quarantined(int)                                 {}
func (o observer) Sent(*exec.SendPart)                             {}

func (o observer) LaneRefused(l transport.Lane, err error) {
	o.s.c.violation("%s: lane %d is refused: %v", o.s.n.addr, l.ID(), err)
}

func (o observer) FrameRefused(_ transport.Lane, why transfer.Reason) {
	switch why {
	case transfer.ReasonUnknownSlot, transfer.ReasonStaleGen, transfer.ReasonRevoked:
		o.s.c.stats.Late++
	}
}
