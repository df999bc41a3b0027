package sim

import (
	"context"
	"fmt"
	"slices"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
	"github.com/kvspray/kvspray/transport/simfabric"
)

// rails as they are now.
func (n *Node) rails() (out []exec.Rail) {
	for _, r := range n.Host.Rails() {
		out = append(out, exec.Rail{Transport: simfabric.Name, Name: r.Name, Down: !r.HasCarrier()})
	}
	return out
}

// sendRails sends what the rails are, to the executor and to every peer.
func (s *sidecar) sendRails() {
	rails := s.n.rails()
	s.event(func(now exec.Instant) { s.ex.SetRails(now, rails) })
	s.redial()
	f := &peerv1.Rails{}
	for _, r := range rails {
		f.Rails = append(f.Rails, &peerv1.Rail{Transport: r.Transport, Name: r.Name, Down: r.Down})
	}
	for _, boot := range bootsInOrder(s.pipes) {
		s.send(boot, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Rails{Rails: f}})
	}
}

// describe fetches a layout from a peer, which may be gone.
func (s *sidecar) describe(peer transfer.Boot, geometry [32]byte) {
	s.later(s.c.cfg.Handshake+s.c.F.Jitter(s.c.cfg.Handshake), func() {
		var err error
		if p := s.pipes[peer]; p == nil || p.to == nil || p.to.dead {
			err = fmt.Errorf("sim: describe: %w", exec.ErrNoAnswer)
		} else {
			s.planner.known[geometry] = true
		}
		s.event(func(now exec.Instant) { s.ex.Described(now, peer, geometry, err) })
	})
}

// dial keeps one lane open between two processes, as long as both live.
type dial struct {
	s, to         *sidecar
	local, remote transport.Rail
	wait          time.Duration
	tries         int
	waiting       bool
}

func (d *dial) again() {
	f := d.s.c.F
	d.tries++
	try := d.tries
	d.waiting = true
	d.s.later(d.s.c.cfg.Handshake+f.Jitter(d.s.c.cfg.Handshake)+d.wait, func() {
		if d.tries != try || d.s.over[d.to.boot] {
			return
		}
		d.waiting = false
		l, err := d.s.backend.Dial(context.Background(), transport.Peer{Boot: d.to.boot, Self: d.s.boot},
			d.local, d.remote)
		if err != nil {
			d.wait = min(max(2*d.wait, redialFirst), redialMax)
			d.again()
			return
		}
		d.wait = 0
		d.s.dials[l.ID()] = d
	})
}

// redial tries at once what waits to be tried again: a rail, here or there, has come back.
func (s *sidecar) redial() {
	for _, d := range s.dialed {
		if d.waiting && d.wait > 0 {
			d.wait = 0
			d.again()
		}
	}
}

// host is the transport.Host of a sidecar: it leads into its process, if that lives.
type host struct{ s *sidecar }

// PeerKey has the boots that a handshake named, and this one by all of its names but one: a sidecar
// that dials names the boot that he means, and is refused by another life at the same address.
func (h host) PeerKey(boot transfer.Boot) (transport.Peer, bool) {
	p := h.s.pipes[boot]
	return transport.Peer{Boot: boot, Self: h.s.boot}, p != nil && !h.s.over[boot]
}

func (h host) Grant(peer transfer.Boot, slot transfer.Slot, gen transfer.Gen) (*transport.Grant,
	transfer.Reason) {
	return h.s.drv.Grant(peer, slot, gen)
}

func (h host) Origin(peer transfer.Boot, slot transfer.Slot, gen transfer.Gen) (*transport.Origin,
	transfer.Reason) {
	return h.s.drv.Origin(peer, slot, gen)
}

func (h host) LaneUp(l transport.Lane) {
	s := h.s
	if s.dead || s.over[l.Peer()] {
		_ = l.Close()
		return
	}
	s.lanes[l.ID()] = l
	s.run(func() { s.drv.LaneUp(lane{l.(transport.Meter), s}) })
}

func (h host) LaneDown(l transport.Lane, err error) {
	s := h.s
	if s.dead {
		return
	}
	delete(s.lanes, l.ID())
	s.run(func() { s.drv.LaneDown(l, err) })
	if d := s.dials[l.ID()]; d != nil {
		delete(s.dials, l.ID())
		d.again()
	}
}

func (h host) Done(_ transport.Lane, res []transport.Result) {
	s := h.s
	if s.dead {
		return
	}
	if s.c.cfg.Lies > 0 {
		res = slices.DeleteFunc(slices.Clone(res),
			func(r transport.Result) bool { return r.Cookie&over != 0 })
	} else if s.n.Host.Frozen() {
		res = slices.Clone(res)
	}
	s.results(res)
	if s.c.chance(s.c.cfg.Twice) {
		s.c.stats.Twice++
		again := append([]transport.Result(nil), res...)
		s.later(s.c.F.Jitter(10*time.Millisecond), func() { s.run(func() { s.drv.Results(again) }) })
	}
}

func (h host) Refused(l transport.Lane, why transfer.Reason) { h.s.drv.Refused(l, why) }
