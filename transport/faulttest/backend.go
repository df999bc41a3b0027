package faulttest

import (
	"context"
	"sync"

	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// Backend is a backend with faults. It passes Name, Caps, Grant and CloseOrigin to the inner
// backend.
type Backend struct {
	transport.Backend
	plan *Plan
	pump *pump

	mu     sync.Mutex
	host   transport.Host
	opened bool
	lanes  map[uint64]*lane // never removed: results may come after LaneDown
}

var _ transport.Backend = (*Backend)(nil)

// Wrap adds the faults of plan to b, which must not be used directly from then on.
func Wrap(b transport.Backend, plan *Plan) *Backend {
	return &Backend{Backend: b, plan: plan, pump: newPump(), lanes: map[uint64]*lane{}}
}

// Open implements transport.Backend.
func (b *Backend) Open(ctx context.Context, host transport.Host) ([]transport.Rail, error) {
	b.mu.Lock()
	b.host = host
	b.mu.Unlock()
	rails, err := b.Backend.Open(ctx, inside{b, host})
	if err != nil {
		return nil, err
	}
	b.mu.Lock()
	b.opened = true
	b.mu.Unlock()
	go b.pump.run()
	return rails, nil
}

// Dial implements transport.Backend.
func (b *Backend) Dial(ctx context.Context, peer transport.Peer, local, remote transport.Rail) (
	transport.Lane, error) {
	l, err := b.Backend.Dial(ctx, peer, local, remote)
	if err != nil {
		return nil, err
	}
	return b.lane(l), nil
}

// Fence implements transport.Backend. After the inner fence it releases the slices held for this
// moment.
func (b *Backend) Fence(ctx context.Context, g *transport.Grant) error {
	if err := b.Backend.Fence(ctx, g); err != nil {
		return err
	}
	b.mu.Lock()
	host := b.host
	b.mu.Unlock()
	if host == nil {
		return nil
	}
	if peer, ok := host.PeerKey(g.Peer); ok {
		b.plan.fenced(peer.Self, g)
	}
	return nil
}

// Close implements transport.Backend. Every lane and its held slices end before the pump stops.
func (b *Backend) Close() error {
	err := b.Backend.Close()
	b.mu.Lock()
	opened := b.opened
	b.mu.Unlock()
	if opened {
		b.pump.close()
	}
	return err
}

// lane returns the decorated lane. LaneUp may come before or after the return of Dial; the first
// one makes it.
func (b *Backend) lane(in transport.Lane) *lane {
	b.mu.Lock()
	defer b.mu.Unlock()
	l := b.lanes[in.ID()]
	if l == nil {
		l = &lane{Lane: in, b: b, open: map[uint64]*entry{}}
		b.lanes[in.ID()] = l
	}
	return l
}

// inside is the Host of the inner backend.
type inside struct {
	b    *Backend
	host transport.Host
}

func (h inside) PeerKey(boot transfer.Boot) (transport.Peer, bool) { return h.host.PeerKey(boot) }

func (h inside) Grant(peer transfer.Boot, slot transfer.Slot, gen transfer.Gen) (*transport.Grant,
	transfer.Reason) {
	return h.host.Grant(peer, slot, gen)
}

func (h inside) Origin(peer transfer.Boot, slot transfer.Slot, gen transfer.Gen) (*transport.Origin,
	transfer.Reason) {
	return h.host.Origin(peer, slot, gen)
}

func (h inside) LaneUp(in transport.Lane) { h.host.LaneUp(h.b.lane(in)) }

func (h inside) LaneDown(in transport.Lane, err error) {
	l := h.b.lane(in)
	l.down()
	h.host.LaneDown(l, err)
}

func (h inside) Done(in transport.Lane, res []transport.Result) { h.b.lane(in).done(res) }

func (h inside) Refused(in transport.Lane, r transfer.Reason) { h.host.Refused(h.b.lane(in), r) }
