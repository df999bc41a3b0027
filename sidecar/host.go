package sidecar

import (
	"errors"
	"io"
	"net"

	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// host implements transport.Host. It is a separate type, because Grant has two meanings in this
// package.
type host struct{ n *Node }

func (h host) PeerKey(boot transfer.Boot) (transport.Peer, bool) { return h.n.peerKey(boot) }

func (h host) Grant(peer transfer.Boot, slot transfer.Slot, gen transfer.Gen) (*transport.Grant, transfer.Reason) {
	d := &h.n.d
	d.bindMu.RLock()
	l := d.grants[bindName{peer, slot}]
	d.bindMu.RUnlock()
	switch {
	case l == nil:
		return nil, transfer.ReasonUnknownSlot
	case l.Grant.Gen != gen:
		return nil, transfer.ReasonStaleGen
	case l.Grant.Revoked():
		return nil, transfer.ReasonRevoked
	}
	return &l.Grant, transfer.ReasonNone
}

func (h host) Origin(peer transfer.Boot, slot transfer.Slot, gen transfer.Gen) (*transport.Origin, transfer.Reason) {
	d := &h.n.d
	d.bindMu.RLock()
	s := d.origins[bindName{peer, slot}]
	d.bindMu.RUnlock()
	switch {
	case s == nil:
		return nil, transfer.ReasonUnknownSlot
	case s.Origin.Gen != gen:
		return nil, transfer.ReasonStaleGen
	case s.Origin.Revoked():
		return nil, transfer.ReasonSourceGone
	}
	return &s.Origin, transfer.ReasonNone
}

func (h host) LaneUp(l transport.Lane) {
	n := h.n
	i, caps := n.backendOf(l.Backend())
	e := &laneEntry{lane: l, backend: i, down: make(chan struct{})}
	r, known := n.rails.find(l.Backend(), l.Local())
	if !caps.SameHost {
		e.inflow = n.d.inflows.of(inflowName{l.Peer(), l.Backend(), l.Local()}, r.Gbps)
	}
	n.d.bindMu.Lock()
	n.d.lanes[l.ID()] = e
	n.d.bindMu.Unlock()
	n.metrics.LaneUp(l.Backend(), l.Local())
	n.log.Debug("lane up", "lane", l.ID(), "peer", l.Peer().String(), "transport", l.Backend(), "rail", l.Local(), "remote", l.Remote())
	in := exec.LaneInfo{ID: l.ID(), Peer: l.Peer(), Backend: l.Backend(), Local: l.Local(), Remote: l.Remote(),
		SliceBytes: caps.SliceBytes, MaxInFlight: l.MaxInFlight(), Apart: caps.SameHost, ReportsAcked: caps.Tells}
	_, in.WakeHints = l.(transport.Rouser)
	if caps.DeviceSlice > 0 && n.gpus.inUse() {
		in.SliceBytes = caps.DeviceSlice
	}
	if known {
		in.Gbps, in.Tier = r.Gbps, r.Tier
	}
	if t, ok := l.(transport.Timed); ok {
		in.RTT = t.Way()
	}
	now := n.enter()
	err := n.d.ex.LaneUp(now, in)
	n.leave()
	if err != nil {
		n.log.Warn("lane refused", "lane", l.ID(), "err", err)
		n.closeLane(e)
	}
}

func (h host) LaneDown(l transport.Lane, err error) {
	n := h.n
	n.d.bindMu.Lock()
	e := n.d.lanes[l.ID()]
	delete(n.d.lanes, l.ID())
	n.d.bindMu.Unlock()
	if e == nil {
		return
	}
	// The dialling end closes lanes that no lease needs.
	meant := err == nil || errors.Is(err, net.ErrClosed) || errors.Is(err, io.EOF) && n.leases(l.Peer()) == 0
	n.metrics.LaneDown(l.Backend(), l.Local(), !meant)
	n.log.Debug("lane down", "lane", l.ID(), "peer", l.Peer().String(), "transport", l.Backend(), "rail", l.Local(), "err", err)
	now := n.enter()
	n.d.ex.LaneDown(now, l.ID())
	n.leave()
	if !n.dial.knows(l.Peer()) {
		n.forgetInflows(l.Peer()) // it was gone before its last lane came up
	}
	close(e.down)
}

func (h host) Done(l transport.Lane, res []transport.Result) {
	n := h.n
	for i := range res {
		r := &res[i]
		var bytes uint64
		if r.Origin != nil && r.Origin.Source != nil {
			if b, err := r.Origin.Source.Bytes(r.Range); err == nil {
				bytes = b
			}
		}
		n.metrics.Slice(l.Backend(), l.Local(), r.Outcome, r.Reason, bytes)
	}
	now := n.enter()
	n.d.ex.Results(now, res)
	n.leave()
}

func (h host) Refused(l transport.Lane, r transfer.Reason) { h.n.metrics.FrameRefused(l.Backend(), r) }
