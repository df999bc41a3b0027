package simfabric

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"

	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// Name is the backend's.
const Name = "sim"

// WordSource is the memory of an origin that is modeled: one word per chunk stands for its bytes.
type WordSource interface {
	transport.Memory
	ReadWord(chunk uint32) uint64
}

// WordMemory is the memory of a grant that is modeled.
type WordMemory interface {
	transport.Memory
	WriteWord(chunk uint32, word uint64)
}

// Backend is the transport of one host.
type Backend struct {
	h      *Host
	host   transport.Host
	ends   []*end
	closed bool
}

var (
	_ transport.Backend = (*Backend)(nil)
	_ transport.Meter   = (*end)(nil)
	_ transport.Device  = (*end)(nil)
)

// Backend returns the transport of h. A host that dies and comes back gets a new one.
func (h *Host) Backend() *Backend { return &Backend{h: h} }

// Name implements transport.Backend.
func (b *Backend) Name() string { return Name }

// Caps implements transport.Backend.
func (b *Backend) Caps() transport.Caps {
	return transport.Caps{Initiator: transport.BySource, Evidence: transport.EvidenceRead,
		Fence: transport.FenceLease, ReportsAcked: true,
		SliceBytes: b.h.f.cfg.SliceBytes / transfer.ChunkBytes * transfer.ChunkBytes}
}

// Open implements transport.Backend.
func (b *Backend) Open(_ context.Context, host transport.Host) ([]transport.Rail, error) {
	if b.closed {
		return nil, fmt.Errorf("simfabric: open: %w", net.ErrClosed)
	}
	b.host = host
	var out []transport.Rail
	for _, r := range b.h.rails {
		r.listener = b
		out = append(out, transport.Rail{Name: r.Name, Address: r.address(),
			Gbps: r.tx.spec.BitsPerSecond / 1e9, NUMA: -1})
	}
	return out, nil
}

var (
	errUnreachable = errors.New("no way there")
	errRefused     = errors.New("refused")
)

// Dial implements transport.Backend. It takes no time; a driver that models the handshake's time
// calls it later. LaneUp follows in Step.
func (b *Backend) Dial(ctx context.Context, peer transport.Peer, local, remote transport.Rail) (
	transport.Lane, error) {
	fail := func(err error) (transport.Lane, error) {
		return nil, fmt.Errorf("simfabric: dial %s from %s: %w", remote.Address, local.Name, err)
	}
	if err := ctx.Err(); err != nil {
		return fail(err)
	}
	if b.closed {
		return fail(net.ErrClosed)
	}
	f := b.h.f
	from, to := f.byAddr[b.h.Name+"/"+local.Name], f.byAddr[remote.Address]
	if from == nil || to == nil || to.listener == nil || to.listener.closed || to.host.frozen {
		return fail(errUnreachable)
	}
	there, back := path(from, to), path(to, from)
	var latency Time
	for _, l := range there {
		if l.dead() {
			return fail(errUnreachable)
		}
		latency += l.spec.Latency
	}
	for _, l := range back {
		if l.dead() {
			return fail(errUnreachable)
		}
	}
	known, ok := to.listener.host.PeerKey(peer.Self)
	if !ok || known.Key != peer.Key || known.Self != peer.Boot {
		return fail(errRefused)
	}
	f.lanes += 2
	x := newEnd(f, b, f.lanes-1, from, to, peer.Boot, there)
	y := newEnd(f, to.listener, f.lanes, to, from, peer.Self, back)
	x.other, y.other = y, x
	b.h.After(0, x.announce)
	to.host.After(latency, y.announce)
	return x, nil
}

// Grant implements transport.Backend.
func (b *Backend) Grant(*transport.Grant) ([]byte, error) { return nil, nil }

// Fence implements transport.Backend. Chunks are written within one event, under the guard: once
// the guard is empty, no write is in progress. A NIC ignores the guard: lanes on which it may still
// write for the grant are stopped.
func (b *Backend) Fence(ctx context.Context, g *transport.Grant) error {
	if err := idle(ctx, &g.Guard); err != nil {
		return err
	}
	for _, e := range b.ends {
		if slices.ContainsFunc(e.claimed, func(fl *flight) bool { return fl.grant == g }) {
			e.Stop()
		}
	}
	return nil
}

// CloseOrigin implements transport.Backend.
func (b *Backend) CloseOrigin(ctx context.Context, o *transport.Origin) error {
	return idle(ctx, &o.Guard)
}

func idle(ctx context.Context, g *transport.Guard) error {
	if err := g.Wait(ctx); err != nil {
		return fmt.Errorf("simfabric: %w", err)
	}
	return nil
}

// Close implements transport.Backend. Its lanes end before it returns.
func (b *Backend) Close() error {
	if b.closed {
		return nil
	}
	b.closed = true
	for _, r := range b.h.rails {
		if r.listener == b {
			r.listener = nil
		}
	}
	for _, e := range append([]*end(nil), b.ends...) {
		e.die(net.ErrClosed)
	}
	return nil
}
