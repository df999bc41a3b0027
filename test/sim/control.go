package sim

import (
	"bytes"
	"fmt"
	"maps"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/transfer"
)

// What package peer promises and bounds: frames between two boots come once and in order for as
// long as both live, PeerUp before the first of them, and none once a boot is superseded. Replays
// break the first on purpose.
const (
	maxWaiting  = 8192 // frames to one peer that it has not had
	maxReceived = 32   // frames that may be replayed, of one peer
)

// pipe carries control frames to one boot, in order, as long as any rail gets through and no
// has cut it.
type pipe struct {
	s       *sidecar
	to      *sidecar // nil: its handshake is to come
	boot    transfer.Boot
	waiting []*peerv1.ControlFrame
	last    exec.Instant
	retry   bool
	up      bool // PeerUp was called
	lanes   bool // one of the two opens them
	stuck   time.Duration
	away    time.Duration // since when nothing gets through; -1: it does

	received []*peerv1.ControlFrame // from there
}

func bootsInOrder(m map[transfer.Boot]*pipe) []transfer.Boot {
	return slices.SortedFunc(maps.Keys(m), func(a, b transfer.Boot) int {
		return bytes.Compare(a[:], b[:])
	})
}

func (s *sidecar) pipe(boot transfer.Boot) *pipe {
	p := s.pipes[boot]
	if p == nil {
		p = &pipe{s: s, boot: boot, away: -1}
		s.pipes[boot] = p
	}
	return p
}

// peerUp is a handshake's end. Another boot at an address supersedes the one that was there.
func (s *sidecar) peerUp(y *sidecar) {
	switch {
	case s.dead || y.dead || s.over[y.boot]:
		return
	case s.n.Host.Frozen():
		s.later(0, func() { s.peerUp(y) })
		return
	}
	p := s.pipe(y.boot)
	p.to, p.up, p.away = y, true, -1
	for _, boot := range bootsInOrder(s.pipes) {
		if q := s.pipes[boot]; q.to != nil && q.to.n == y.n && boot != y.boot {
			s.supersede(boot)
		}
	}
	rails := y.n.rails() // they are in the handshake
	s.event(func(now exec.Instant) {
		s.ex.PeerUp(now, y.n.addr, y.boot)
		s.ex.PeerRails(now, y.boot, rails)
	})
	p.pump()
}

// supersede ends a boot.
func (s *sidecar) supersede(boot transfer.Boot) {
	if s.over[boot] {
		return
	}
	s.over[boot] = true
	p := s.pipes[boot]
	delete(s.pipes, boot)
	s.dialed = slices.DeleteFunc(s.dialed, func(d *dial) bool { return d.to.boot == boot })
	p.waiting = nil
	s.event(func(now exec.Instant) { s.ex.PeerDown(now, boot, true) })
	for _, id := range slices.Sorted(maps.Keys(s.lanes)) {
		if s.lanes[id].Peer() == boot {
			_ = s.lanes[id].Close()
		}
	}
}

// cut looks whether control frames get through, and calls the executor when they have not for long.
func (p *pipe) cut() {
	if p.away >= 0 || p.s.dead {
		return
	}
	since := p.s.c.F.Now()
	p.away = since
	p.s.later(controlDown, func() {
		if p.away == since && p.up && !p.s.over[p.boot] {
			p.up = false
			p.s.event(func(now exec.Instant) { p.s.ex.PeerDown(now, p.boot, false) })
		}
	})
}

// back calls the executor when frames get through again.
func (p *pipe) back() {
	p.away = -1
	if !p.up {
		p.up = true
		p.s.event(func(now exec.Instant) { p.s.ex.PeerUp(now, p.to.n.addr, p.boot) })
	}
}

// Cut keeps control frames between two nodes from getting through, for a while.
func (c *Cluster) Cut(a, b *Node, d time.Duration) {
	until := c.F.Now() + d
	for _, x := range [][2]*Node{{a, b}, {b, a}} {
		if s, y := x[0].side, x[1].side; s != nil && y != nil && s.pipes[y.boot] != nil {
			p := s.pipes[y.boot]
			p.stuck = max(p.stuck, until)
			p.cut()
			c.F.After(d, p.pump)
		}
	}
}

// way is what a small message takes now; false: it does not get through.
func (p *pipe) way() (time.Duration, bool) {
	if p.to == nil || p.to.dead || p.s.c.F.Now() < p.stuck {
		return 0, false
	}
	if p.to == p.s {
		return time.Microsecond, true
	}
	return p.s.n.Host.Latency(p.to.n.Host)
}

func (s *sidecar) send(to transfer.Boot, f *peerv1.ControlFrame) {
	if s.over[to] {
		return
	}
	p := s.pipe(to)
	p.waiting = append(p.waiting, proto.Clone(f).(*peerv1.ControlFrame))
	p.pump()
}

func (p *pipe) pump() {
	s, f := p.s, p.s.c.F
	if s.dead || s.n.Host.Frozen() {
		s.later(0, p.pump)
		return
	}
	if _, ok := p.way(); ok && p.away >= 0 {
		p.back()
	}
	for len(p.waiting) > 0 && !p.retry {
		d, ok := p.way()
		if !ok {
			p.cut()
			p.retry = true
			s.later(controlRetry, func() {
				p.retry = false
				p.pump()
			})
			return
		}
		frame := p.waiting[0]
		p.waiting = p.waiting[1:]
		p.last = max(f.Now()+d, p.last+1)
		to := p.to
		to.later(p.last-f.Now(), func() { to.receive(s.boot, frame) })
	}
}

// peerRails takes what a peer reports of its rails.
func (s *sidecar) peerRails(from transfer.Boot, f *peerv1.Rails) {
	var rails []exec.Rail
	for _, r := range f.Rails {
		rails = append(rails, exec.Rail{Transport: r.Transport, Name: r.Name, Down: r.Down})
	}
	s.event(func(now exec.Instant) { s.ex.PeerRails(now, from, rails) })
	s.redial()
}

// receive takes a frame of a peer.
func (s *sidecar) receive(from transfer.Boot, f *peerv1.ControlFrame) {
	if s.over[from] {
		s.c.stats.Stale++
		return
	}
	p := s.pipe(from)
	if r := f.GetRails(); r != nil {
		s.peerRails(from, r)
		return
	}
	s.event(func(now exec.Instant) {
		if err := s.ex.Message(now, from, f); err != nil {
			s.c.violation("%s %s: %v", s.n.addr, brokeWord, err)
		}
	})
	if len(p.received) == maxReceived {
		p.received = append(p.received[:0], p.received[1:]...)
	}
	p.received = append(p.received, f)
	if !s.c.chance(s.c.cfg.Replay) {
		return
	}
	old := proto.Clone(p.received[s.c.F.Rand().IntN(len(p.received))]).(*peerv1.ControlFrame)
	after := s.c.F.Jitter(2 * time.Second)
	if s.c.chance(0.5) {
		after = s.c.F.Jitter(4 * time.Millisecond) // while what it speaks of may still be under way
	}
	s.later(after, func() {
		if s.over[from] {
			s.c.stats.Stale++
			return
		}
		s.c.stats.Replayed++
		s.event(func(now exec.Instant) {
			if err := s.ex.Message(now, from, old); err != nil {
				s.c.stats.Refused++
			}
		})
	})
}

func (s *sidecar) connect(addr string) {
	s.later(s.c.F.Jitter(s.c.cfg.Handshake), func() {
		p := s.c.byAddr[addr]
		var err error
		switch {
		case p == nil || p.side == nil:
			err = fmt.Errorf("sim: connect to %s: %w", addr, exec.ErrNotListening)
		case p.Host.Frozen():
			err = fmt.Errorf("sim: connect to %s: no answer", addr)
		}
		if err != nil {
			s.event(func(now exec.Instant) { s.ex.ConnectFailed(now, addr, err) })
			return
		}
		if q := s.pipes[p.side.boot]; q != nil && q.up {
			s.event(func(now exec.Instant) { s.ex.PeerUp(now, addr, p.side.boot) })
			return
		}
		s.c.meet(s.n, p)
	})
}
