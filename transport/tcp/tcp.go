// Package tcp is the transport that works everywhere: payload goes from registered memory by
// sendmsg and into registered memory by readv, without a Go buffer in between.
//
// A rail is a local address with a listener; a lane is one connection between two rails, opened and
// proved by internal/wire, and carries slices in both directions. A frame is header, payload,
// trailer; the receiver confirms each frame on the same connection.
//
// Invariants:
//   - memory of a grant is written only inside transport.Claim's Enter and Leave, around one
//     non-blocking readv of at most fragmentBytes; no goroutine waits for the network with a guard
//     held. So a fence has to wait for the guard alone, and kernel buffers and frozen peers are
//     harmless: what comes after a revoke is discarded, and the lane stays up.
//   - memory of an origin is read only inside its guard, around one non-blocking sendmsg.
//   - a reader never waits for a writer: confirmations that do not fit are left to the writer. So
//     two full directions cannot block each other.
//   - each slice that Move took ends exactly once: by its confirmation, before it began, or with
//     its lane.
//
// Goroutines: one accept loop per rail, one short-lived opener per connection, and a reader and a
// writer per lane. All of them are joined by Close. An idle lane waits in the netpoller and costs
// nothing.
package tcp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/internal/admit"
	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// Name is what the backend is called in configuration, logs and metrics.
const Name = "tcp"

// Bounds and defaults.
const (
	openTimeout     = 5 * time.Second // of the opening of an accepted connection
	connectFirst    = 150 * time.Millisecond
	connectTries    = 5       // the last of 2.4 s
	maxOpening      = 1024    // accepted connections without a proof, of all rails
	maxSource       = 512     // of these, from one source
	maxLanes        = 4096    // of one backend
	defaultSlice    = 1 << 20 // bytes
	defaultInFlight = 16      // slices per lane
	maxInFlight     = 1024    // slices per lane
	defaultNotSent  = 1 << 20 // bytes that wait unsent in a socket
	// milliseconds between two retransmissions: the minimum of the kernel.
	rtoMax            = 1000
	maxRails          = 64
	defaultRailListen = "127.0.0.1:0"
)

// Rail configures one local address.
type Rail struct {
	Name      string  // default: the interface's name
	Listen    string  // host:port; port 0 takes a free one
	Advertise string  // what peers dial; default: the address listened on
	Gbps      float64 // 0: the kernel's, if it has one
	Tier      int     // 1..3; 0: decided by the pair
}

// Config configures the backend. The zero value is one rail on loopback, without checksums.
type Config struct {
	Rails       []Rail
	Empty       bool         // no rail until AddRail
	CRC32C      bool         // checksum over each payload; a lane has it when either end wants it
	AEAD        bool         // all of a lane sealed by AES-128-GCM, instead of checksums; likewise
	SliceBytes  int          // suggested slice; default 1 MiB
	MaxInFlight int          // slices per lane; default 16
	SendBuffer  int          // bytes; 0 leaves it to the kernel
	RecvBuffer  int          // bytes; 0 leaves it to the kernel
	NotSent     int          // TCP_NOTSENT_LOWAT in bytes; default 1 MiB
	Log         *slog.Logger // default: none
}

// Backend implements transport.Backend.
type Backend struct {
	cfg Config
	log *slog.Logger

	host transport.Host // set by Open

	gate    *admit.Gate // accepted connections that are being opened
	refused admit.Log
	faults  admit.Log // of memory: slices
	wg      sync.WaitGroup
	ctx     context.Context // ends with Close
	cancel  context.CancelFunc

	mu     sync.Mutex // protects all below
	opened bool
	closed bool
	rails  []rail // in the order in which they came
	lanes  map[*lane]struct{}
	conns  map[net.Conn]struct{} // being opened

	reserved int // places for lanes that are being opened
}

var _ transport.Backend = (*Backend)(nil)

// rail is one that is open.
type rail struct {
	transport.Rail
	listen *net.TCPListener
}

// New checks the configuration.
func New(cfg Config) (*Backend, error) {
	if len(cfg.Rails) == 0 && !cfg.Empty {
		cfg.Rails = []Rail{{Name: "lo", Listen: defaultRailListen}}
	}
	if len(cfg.Rails) > maxRails {
		return nil, fmt.Errorf("tcp: %d rails, at most %d", len(cfg.Rails), maxRails)
	}
	if cfg.SliceBytes == 0 {
		cfg.SliceBytes = defaultSlice
	}
	if cfg.SliceBytes < transfer.ChunkBytes || cfg.SliceBytes%transfer.ChunkBytes != 0 {
		return nil, fmt.Errorf("tcp: slice of %d bytes: must be a positive multiple of %d",
			cfg.SliceBytes, transfer.ChunkBytes)
	}
	if cfg.MaxInFlight == 0 {
		cfg.MaxInFlight = defaultInFlight
	}
	if cfg.MaxInFlight < 1 || cfg.MaxInFlight > maxInFlight {
		return nil, fmt.Errorf("tcp: %d slices in flight: must be 1 to %d", cfg.MaxInFlight, maxInFlight)
	}
	if cfg.NotSent == 0 {
		cfg.NotSent = defaultNotSent
	}
	if cfg.SendBuffer < 0 || cfg.RecvBuffer < 0 || cfg.NotSent < 0 {
		return nil, fmt.Errorf("tcp: buffers of %d, %d and %d bytes: must not be negative",
			cfg.SendBuffer, cfg.RecvBuffer, cfg.NotSent)
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	b := &Backend{cfg: cfg, log: cfg.Log.With("transport", Name),
		gate:  admit.New(admit.Limits{Unproved: maxOpening, PerSource: maxSource}, nil),
		lanes: map[*lane]struct{}{}, conns: map[net.Conn]struct{}{}}
	b.refused.Logger, b.faults.Logger = b.log, b.log
	b.ctx, b.cancel = context.WithCancel(context.Background())
	return b, nil
}

// Name returns "tcp".
func (b *Backend) Name() string { return Name }

// Caps describes the backend.
func (b *Backend) Caps() transport.Caps {
	return transport.Caps{Initiator: transport.BySource, Evidence: transport.EvidenceRead,
		Fence:      transport.FenceLease,
		SliceBytes: b.cfg.SliceBytes, ReportsAcked: true, Guarded: true}
}

// Open listens on every rail of the configuration.
func (b *Backend) Open(ctx context.Context, host transport.Host) ([]transport.Rail, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return nil, fmt.Errorf("tcp: open: %w", net.ErrClosed)
	}
	if b.opened {
		return nil, errors.New("tcp: open: called twice")
	}
	b.opened, b.host = true, host
	var all []rail
	for _, rc := range b.cfg.Rails {
		r, err := listen(ctx, rc, all)
		if err != nil {
			for _, r := range all {
				_ = r.listen.Close()
			}
			return nil, err
		}
		all = append(all, r)
	}
	var out []transport.Rail
	for _, r := range all {
		b.startLocked(r)
		out = append(out, r.Rail)
	}
	return out, nil
}

// listen opens one rail beside others.
func listen(ctx context.Context, rc Rail, others []rail) (rail, error) {
	addr := rc.Listen
	if addr == "" {
		addr = defaultRailListen
	}
	ln, err := (&net.ListenConfig{}).Listen(ctx, "tcp", addr)
	if err != nil {
		return rail{}, fmt.Errorf("tcp: rail %q: listen on %q: %w; name an address of this host with a "+
			"free port", rc.Name, addr, err)
	}
	l, ok := ln.(*net.TCPListener)
	if !ok {
		_ = ln.Close()
		return rail{}, fmt.Errorf("tcp: rail %q: listen on %q: not a TCP listener", rc.Name, addr)
	}
	r := rail{describe(rc, l.Addr().(*net.TCPAddr)), l}
	for _, o := range others {
		if o.Name == r.Name {
			_ = l.Close()
			return rail{}, fmt.Errorf("tcp: two rails are called %q: give each its own name", r.Name)
		}
	}
	return r, nil
}

func (b *Backend) startLocked(r rail) {
	b.rails = append(b.rails, r)
	b.wg.Add(1)
	go b.acceptLoop(r.listen, r.Rail)
}

// AddRail opens one more rail after Open.
func (b *Backend) AddRail(ctx context.Context, rc Rail) (transport.Rail, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.closed || !b.opened:
		return transport.Rail{}, fmt.Errorf("tcp: add rail %q: %w", rc.Name, net.ErrClosed)
	case len(b.rails) >= maxRails:
		return transport.Rail{}, fmt.Errorf("tcp: add rail %q: %d rails are open, at most that many",
			rc.Name, maxRails)
	}
	r, err := listen(ctx, rc, b.rails)
	if err != nil {
		return transport.Rail{}, err
	}
	b.startLocked(r)
	return r.Rail, nil
}

var errRailGone = errors.New("tcp: the rail was taken away")

// RemoveRail ends a rail and its lanes; false: there is none of that name. What the lanes carry
// ends as with every lane that is lost.
func (b *Backend) RemoveRail(name string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	i := slices.IndexFunc(b.rails, func(r rail) bool { return r.Name == name })
	if i < 0 {
		return false
	}
	_ = b.rails[i].listen.Close()
	b.rails = slices.Delete(b.rails, i, i+1)
	for l := range b.lanes {
		if l.local == name {
			l.fail(errRailGone)
		}
	}
	return true
}

func (b *Backend) acceptLoop(l *net.TCPListener, rail transport.Rail) {
	defer b.wg.Done()
	failed := func(err error) {
		b.refused.Note(slog.LevelWarn, "accept failed", "rail", rail.Name, "err", err)
	}
	for c := range admit.Accepted(b.ctx.Done(), l.AcceptTCP, failed) {
		v := b.gate.Enter(c)
		b.wg.Add(1)
		go func() {
			defer b.wg.Done()
			err := b.accept(c, v, rail)
			open := v.Leave() // false: closed for another one, or a lane now
			if err != nil {
				_ = c.Close()
				// While Close runs, the error is that of its own close of the connection.
				if b.ctx.Err() == nil && (open || errors.Is(err, errTooMany)) {
					b.refused.Note(slog.LevelWarn, "lane refused", "rail", rail.Name, "remote",
						c.RemoteAddr().String(), "err", err)
				}
			}
		}()
	}
}

var errTooMany = errors.New("tcp: as many lanes are open as may be")

func (b *Backend) accept(c *net.TCPConn, v *admit.Visit, rail transport.Rail) error {
	if !b.track(c) {
		return net.ErrClosed
	}
	defer b.untrack(c)
	_ = c.SetDeadline(time.Now().Add(openTimeout))
	var theirs attachment
	var peer transport.Peer
	var reserved bool
	a := agreed{us: wire.AcceptorEnd, them: wire.DialerEnd}
	o, err := wire.Accept(c, wire.AcceptParams{
		Purpose: wire.PurposeTCPData,
		Lookup: func(boot transfer.Boot) ([32]byte, transfer.Boot, bool) {
			p, ok := b.host.PeerKey(boot)
			if ok {
				v.Spoke()
			}
			peer = p
			return p.Key, p.Self, ok
		},
		Attach: func(h *wire.Hello) ([]byte, error) {
			var err error
			if theirs, err = parseAttachment(h.Attach); err != nil {
				return nil, err
			}
			ours := b.attachment(rail.Name, theirs.local)
			a.crc, a.aead = agree(ours, theirs)
			return ours.encode(), nil
		},
		// Before the dialer learns that the lane is open: it would take a lane that ends at once for
		// one that was lost.
		Admit: func() error {
			if reserved = b.reserve(); !reserved {
				return errTooMany
			}
			return nil
		},
	})
	if err == nil && !v.Proved() {
		err = net.ErrClosed
	}
	if err != nil {
		if reserved {
			b.unreserve()
		}
		return fmt.Errorf("tcp: accept: %w", err)
	}
	peer.Boot, a.secret = o.Peer, o.Secret
	_, err = b.start(c, peer, rail.Name, theirs.local, a)
	return err
}

func (b *Backend) attachment(local, remote string) attachment {
	return attachment{crc: b.cfg.CRC32C, aead: b.cfg.AEAD, local: local, remote: remote}
}

// agreed is what the ends of a lane agreed on when it opened.
type agreed struct {
	crc, aead bool
	secret    [32]byte
	us, them  wire.End
}

// connect opens a connection. The kernel repeats a lost SYN after a second, which
// no option shortens. So it is given up sooner, and a new one sent.
func connect(ctx context.Context, d net.Dialer, address string) (c net.Conn, err error) {
	d.Timeout = connectFirst
	for range connectTries {
		if c, err = d.DialContext(ctx, "tcp", address); err == nil || ctx.Err() != nil {
			return c, err
		}
		if late := net.Error(nil); !errors.As(err, &late) || !late.Timeout() {
			return nil, err
		}
		d.Timeout *= 2
	}
	return nil, err
}

// Dial opens a lane from a local rail to a peer's.
func (b *Backend) Dial(ctx context.Context, peer transport.Peer, local, remote transport.Rail) (
	transport.Lane, error) {
	wrap := func(err error) (transport.Lane, error) {
		return nil, fmt.Errorf("tcp: dial %s from rail %q to rail %q at %s: %w", peer.Boot, local.Name,
			remote.Name, remote.Address, err)
	}
	if !b.reserve() {
		return wrap(errTooMany)
	}
	started := false
	defer func() {
		if !started {
			b.unreserve()
		}
	}()
	nc, err := connect(ctx, net.Dialer{LocalAddr: b.sourceAddr(local)}, remote.Address)
	if err != nil {
		return wrap(err)
	}
	c := nc.(*net.TCPConn)
	if !b.track(c) {
		_ = c.Close()
		return wrap(net.ErrClosed)
	}
	defer b.untrack(c)
	deadline := time.Now().Add(openTimeout)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	_ = c.SetDeadline(deadline)
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	o, err := wire.Dial(c, wire.DialParams{Purpose: wire.PurposeTCPData, Self: peer.Self,
		Peer: peer.Boot, Key: peer.Key,
		Attach: b.attachment(local.Name, remote.Name).encode()})
	stop()
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		_ = c.Close()
		return wrap(err)
	}
	theirs, err := parseAttachment(o.Attach)
	if err != nil {
		_ = c.Close()
		return wrap(err)
	}
	a := agreed{us: wire.DialerEnd, them: wire.AcceptorEnd, secret: o.Secret}
	a.crc, a.aead = agree(b.attachment(local.Name, remote.Name), theirs)
	started = true
	l, err := b.start(c, peer, local.Name, remote.Name, a)
	if err != nil {
		_ = c.Close()
		return wrap(err)
	}
	return l, nil
}

// reserve takes a place for a lane, which start or unreserve releases. False: all are taken.
func (b *Backend) reserve() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.lanes)+b.reserved >= maxLanes {
		return false
	}
	b.reserved++
	return true
}

func (b *Backend) unreserve() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.reserved--
}

// sourceAddr binds a dialed connection to its rail, unless the rail listens on every address.
func (b *Backend) sourceAddr(local transport.Rail) net.Addr {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, r := range b.rails {
		if r.Name == local.Name {
			a := r.listen.Addr().(*net.TCPAddr)
			if a.IP.IsUnspecified() {
				return nil
			}
			return &net.TCPAddr{IP: a.IP, Zone: a.Zone}
		}
	}
	return nil
}

// start makes a lane of a proved connection for which a place was reserved.
func (b *Backend) start(c *net.TCPConn, peer transport.Peer, local, remote string,
	a agreed) (*lane, error) {
	_ = c.SetDeadline(time.Time{})
	l, err := newLane(b, c, peer.Boot, local, remote, a)
	b.mu.Lock()
	b.reserved--
	switch {
	case err != nil:
	case b.closed:
		err = net.ErrClosed
	default:
		b.lanes[l] = struct{}{}
		b.wg.Add(2)
	}
	b.mu.Unlock()
	if err != nil {
		return nil, err
	}
	b.host.LaneUp(l)
	go l.readLoop()
	go l.writeLoop()
	return l, nil
}

func (b *Backend) drop(l *lane) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.lanes, l)
}

func (b *Backend) track(c net.Conn) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed || !b.opened {
		return false
	}
	b.conns[c] = struct{}{}
	return true
}

func (b *Backend) untrack(c net.Conn) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.conns, c)
}

// Grant needs no preparation: a lane finds the grant by its slot, and its writers are local.
func (b *Backend) Grant(*transport.Grant) ([]byte, error) { return nil, nil }

// Fence waits for the guard: only readers of this process write, and only while they hold it.
func (b *Backend) Fence(ctx context.Context, g *transport.Grant) error {
	return wait(ctx, "fence", &g.Guard)
}

// CloseOrigin waits for the guard: only writers of this process read, and only while they hold it.
func (b *Backend) CloseOrigin(ctx context.Context, o *transport.Origin) error {
	return wait(ctx, "close origin", &o.Guard)
}

func wait(ctx context.Context, op string, g *transport.Guard) error {
	if err := g.Wait(ctx); err != nil {
		return fmt.Errorf("tcp: %s: %w", op, err)
	}
	return nil
}

// Close ends all lanes and joins every goroutine. Not to be called from a callback.
func (b *Backend) Close() error {
	b.cancel()
	b.mu.Lock()
	b.closed = true
	for _, r := range b.rails {
		_ = r.listen.Close()
	}
	for c := range b.conns {
		_ = c.Close()
	}
	for l := range b.lanes {
		l.fail(net.ErrClosed)
	}
	b.mu.Unlock()
	b.wg.Wait()
	return nil
}

// tune sets the kernel's options of a lane. Buffers are hints; an old kernel without one
// of them still works.
func tune(c *net.TCPConn, raw interface {
	Control(func(fd uintptr)) error
}, cfg *Config) error {
	if err := c.SetNoDelay(true); err != nil {
		return err
	}
	if cfg.SendBuffer > 0 {
		if err := c.SetWriteBuffer(cfg.SendBuffer); err != nil {
			return err
		}
	}
	if cfg.RecvBuffer > 0 {
		if err := c.SetReadBuffer(cfg.RecvBuffer); err != nil {
			return err
		}
	}
	var err error
	if cerr := raw.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, cfg.NotSent)
		// A rail that heals after seconds of silence would be silent for as long again, while its
		// retransmissions back off. Kernels before 6.15 lack the option: there it takes that long.
		_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_RTO_MAX_MS, rtoMax)
	}); cerr != nil {
		return cerr
	}
	return err
}
