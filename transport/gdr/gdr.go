package gdr

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/kvspray/kvspray/internal/mem"
	"github.com/kvspray/kvspray/internal/verbs"
	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// Name of the backend.
const Name = "gdr"

const (
	purpose      = "gdr-data"
	sliceBytes   = 1 << 20
	maxInFlight  = 16   // slices of a lane
	maxChunks    = 512  // in flight on a lane; as many receives are posted ahead at the other end
	maxSends     = 8192 // work requests of a lane
	maxOpening   = 16
	openTimeout  = 5 * time.Second
	addressBytes = 16 + 4 + 4 + 2 + 1 + 1
	maxRailName  = 64
)

// Config of the backend. Listen is where lanes are opened; payload goes through Device.
type Config struct {
	Device verbs.Device
	Listen string // default 127.0.0.1:0
	Log    *slog.Logger
}

// Backend is the RDMA transport of one process, over one device.
type Backend struct {
	cfg  Config
	host transport.Host
	ln   net.Listener
	wg   sync.WaitGroup

	mu sync.Mutex
	// guarded by mu; taken after lane.mu
	closed bool
	lanes  map[*lane]struct{}
	grants map[grantKey]*granted
	local  map[*mem.Region]verbs.Memory // regions that this process sends from
	use    map[*transport.Origin]*using
}

type grantKey struct {
	peer transfer.Boot
	slot transfer.Slot
}

// granted is a grant with the registrations that only it uses.
type granted struct {
	g    *transport.Grant
	regs map[*mem.Region]verbs.Memory
}

// using counts the slices of an origin whose writes have not completed.
type using struct {
	n    int
	done chan struct{}
}

var _ transport.Backend = (*Backend)(nil)

// New returns a backend over cfg.Device.
func New(cfg Config) *Backend {
	if cfg.Listen == "" {
		cfg.Listen = "127.0.0.1:0"
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return &Backend{cfg: cfg, lanes: map[*lane]struct{}{}, grants: map[grantKey]*granted{}, local: map[*mem.Region]verbs.Memory{},
		use: map[*transport.Origin]*using{}}
}

// Name implements transport.Backend.
func (b *Backend) Name() string { return Name }

// Caps implements transport.Backend.
func (b *Backend) Caps() transport.Caps {
	return transport.Caps{Initiator: transport.BySource, Evidence: transport.EvidenceImmediate, Fence: transport.FenceLease, NeedsTokens: true,
		Credits: maxChunks, SliceBytes: sliceBytes}
}

// Open implements transport.Backend.
func (b *Backend) Open(ctx context.Context, host transport.Host) ([]transport.Rail, error) {
	if b.cfg.Device == nil {
		return nil, fmt.Errorf("gdr: no RDMA device: %w", transport.ErrNotSupported)
	}
	ln, err := (&net.ListenConfig{}).Listen(ctx, "tcp", b.cfg.Listen)
	if err != nil {
		return nil, fmt.Errorf("gdr: listen on %q: %w", b.cfg.Listen, err)
	}
	b.host, b.ln = host, ln
	b.wg.Go(b.accept)
	return []transport.Rail{{Name: b.cfg.Device.Name(), Address: ln.Addr().String(), NUMA: -1}}, nil
}

func (b *Backend) accept() {
	opening := make(chan struct{}, maxOpening)
	for {
		c, err := b.ln.Accept()
		if err != nil {
			return
		}
		select {
		case opening <- struct{}{}:
			b.wg.Go(func() {
				defer func() { <-opening }()
				if err := b.welcome(c); err != nil {
					_ = c.Close()
					b.cfg.Log.Warn("gdr lane refused", "err", err)
				}
			})
		default:
			_ = c.Close()
		}
	}
}

func (b *Backend) welcome(c net.Conn) error {
	l, err := b.prepare(c)
	if err != nil {
		return err
	}
	_ = c.SetDeadline(time.Now().Add(openTimeout))
	o, err := wire.Accept(c, wire.AcceptParams{Purpose: purpose,
		Lookup: func(boot transfer.Boot) ([32]byte, transfer.Boot, bool) {
			p, ok := b.host.PeerKey(boot)
			return p.Key, p.Self, ok
		},
		Attach: func(*wire.Hello) ([]byte, error) { return l.attach(), nil },
	})
	if err != nil {
		return errors.Join(err, l.q.Close())
	}
	// The dialer is ready to receive before it sends its proof is checked; we connect only to one that is proved.
	return l.start(o)
}

// Dial implements transport.Backend.
func (b *Backend) Dial(ctx context.Context, peer transport.Peer, _, remote transport.Rail) (transport.Lane, error) {
	fail := func(err error) (transport.Lane, error) {
		return nil, fmt.Errorf("gdr: dial boot %s at %q: %w", peer.Boot, remote.Address, err)
	}
	c, err := (&net.Dialer{}).DialContext(ctx, "tcp", remote.Address)
	if err != nil {
		return fail(err)
	}
	l, err := b.prepare(c)
	if err != nil {
		_ = c.Close()
		return fail(err)
	}
	_ = c.SetDeadline(time.Now().Add(openTimeout))
	undo := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	o, err := wire.Dial(c, wire.DialParams{Purpose: purpose, Self: peer.Self, Peer: peer.Boot, Key: peer.Key, Attach: l.attach()})
	if !undo() && err == nil {
		err = ctx.Err()
	}
	if err == nil {
		err = l.start(o)
	}
	if err != nil {
		_ = c.Close()
		return fail(errors.Join(err, l.q.Close()))
	}
	return l, nil
}

// Grant implements transport.Backend: it registers the grant's regions under keys of their own and describes its memory.
func (b *Backend) Grant(g *transport.Grant) ([]byte, error) {
	gr := &granted{g: g, regs: map[*mem.Region]verbs.Memory{}}
	fail := func(err error) ([]byte, error) {
		return nil, errors.Join(fmt.Errorf("gdr: grant %d.%d: %w", g.Slot, g.Gen, err), closeAll(gr.regs))
	}
	var t token
	var blocks []mem.Block
	for c := uint32(0); c < transfer.MaxSlotChunks; c++ {
		r := transfer.Range{First: c, Count: 1}
		if _, err := g.Sink.Bytes(r); err != nil {
			break // past the end
		}
		var err error
		if blocks, err = g.Sink.Resolve(blocks[:0], r); err != nil {
			return fail(err)
		}
		if len(blocks) > maxChunkBlocks {
			return fail(fmt.Errorf("chunk %d has %d blocks, at most %d: %w", c, len(blocks), maxChunkBlocks, transport.ErrNotSupported))
		}
		rs := make([]remoteBlock, 0, len(blocks))
		for _, bl := range blocks {
			m, err := register(b.cfg.Device, gr.regs, bl.Region)
			if err != nil {
				return fail(err)
			}
			rs = append(rs, remoteBlock{m.Addr() + bl.Off, uint32(bl.Len), m.RemoteKey()})
		}
		t.chunks = append(t.chunks, rs)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return fail(net.ErrClosed)
	}
	k := grantKey{g.Peer, g.Slot}
	if _, taken := b.grants[k]; taken {
		return fail(fmt.Errorf("slot %d is bound: fence it first", g.Slot))
	}
	b.grants[k] = gr
	return t.encode(), nil
}

func register(d verbs.Device, regs map[*mem.Region]verbs.Memory, r *mem.Region) (verbs.Memory, error) {
	if m := regs[r]; m != nil {
		return m, nil
	}
	p, ok := r.Bytes()
	if !ok {
		return nil, fmt.Errorf("region %s is %s memory: %w", r.ID(), r.Kind(), transport.ErrNotSupported)
	}
	m, err := d.Register(p, true)
	if err == nil {
		regs[r] = m
	}
	return m, err
}

func closeAll(regs map[*mem.Region]verbs.Memory) (err error) {
	for _, m := range regs {
		err = errors.Join(err, m.Close())
	}
	return err
}

// Fence implements transport.Backend: the grant's keys are invalid when it returns.
func (b *Backend) Fence(ctx context.Context, g *transport.Grant) error {
	if !g.Revoked() {
		return fmt.Errorf("gdr: fence of slot %d.%d: its guard is not revoked; revoke first", g.Slot, g.Gen)
	}
	b.mu.Lock()
	k := grantKey{g.Peer, g.Slot}
	gr := b.grants[k]
	if gr != nil && gr.g == g {
		delete(b.grants, k)
	} else {
		gr = nil
	}
	b.mu.Unlock()
	if gr != nil {
		if err := closeAll(gr.regs); err != nil {
			return fmt.Errorf("gdr: fence of slot %d.%d: %w", g.Slot, g.Gen, err)
		}
	}
	if err := g.Wait(ctx); err != nil {
		return fmt.Errorf("gdr: fence of slot %d.%d: %w", g.Slot, g.Gen, err)
	}
	return nil
}

// CloseOrigin implements transport.Backend.
func (b *Backend) CloseOrigin(ctx context.Context, o *transport.Origin) error {
	if !o.Revoked() {
		return fmt.Errorf("gdr: close of origin %d.%d: its guard is not revoked; revoke first", o.Slot, o.Gen)
	}
	b.mu.Lock()
	u := b.use[o]
	var peers []*lane
	for l := range b.lanes {
		if l.peer == o.Peer {
			peers = append(peers, l)
		}
	}
	b.mu.Unlock()
	if u != nil {
		select {
		case <-u.done:
		case <-ctx.Done():
			for _, l := range peers {
				l.close(ctx.Err()) // flushes its work requests: the NIC reads no more
			}
			<-u.done
		}
	}
	if err := o.Wait(ctx); err != nil {
		return fmt.Errorf("gdr: close of origin %d.%d: %w", o.Slot, o.Gen, err)
	}
	return nil
}

// Close implements transport.Backend.
func (b *Backend) Close() error {
	b.mu.Lock()
	b.closed = true
	all := make([]*lane, 0, len(b.lanes))
	for l := range b.lanes {
		all = append(all, l)
	}
	b.mu.Unlock()
	if b.ln != nil {
		_ = b.ln.Close()
	}
	for _, l := range all {
		l.close(net.ErrClosed)
	}
	b.wg.Wait()
	b.mu.Lock()
	defer b.mu.Unlock()
	err := closeAll(b.local)
	b.local = nil
	for _, gr := range b.grants {
		err = errors.Join(err, closeAll(gr.regs))
	}
	b.grants = nil
	return err
}

func encodeAddress(a verbs.Address) []byte {
	b := append([]byte(nil), a.GID[:]...)
	b = binary.LittleEndian.AppendUint32(b, a.QP)
	b = binary.LittleEndian.AppendUint32(b, a.PSN)
	b = binary.LittleEndian.AppendUint16(b, a.LID)
	return append(b, byte(a.MTU), byte(a.Type))
}

// decodeAddress reads what attach made: the queue pair's address and the name of the peer's rail.
func decodeAddress(b []byte) (a verbs.Address, rail string, err error) {
	if len(b) < addressBytes || len(b) > addressBytes+maxRailName {
		return a, "", fmt.Errorf("gdr: an address of %d bytes, not %d and a rail's name of at most %d", len(b), addressBytes, maxRailName)
	}
	copy(a.GID[:], b)
	a.QP, a.PSN = binary.LittleEndian.Uint32(b[16:]), binary.LittleEndian.Uint32(b[20:])
	a.LID, a.MTU, a.Type = binary.LittleEndian.Uint16(b[24:]), verbs.MTU(b[26]), verbs.GIDType(b[27])
	return a, string(b[addressBytes:]), nil
}
