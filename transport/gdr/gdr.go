package gdr

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/kvspray/kvspray/internal/admit"
	"github.com/kvspray/kvspray/internal/sys/usertimeout"
	"github.com/kvspray/kvspray/internal/sys/verbs"
	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// Name of the backend.
const Name = "gdr"

const (
	purpose    = "gdr-data"
	sliceBytes = 1 << 20
	// maxSliceChunks bounds one slice: 64 MiB. A peer's request is resolved before it is written.
	maxSliceChunks = 1024
	maxInFlight    = 16   // slices of a lane, each way
	maxSends       = 2048 // work requests of a lane; fewer if the device's limit is lower
	// maxWrite is the size of one write, limited by the device. An acknowledgement comes with the
	// end of a message, and counters between two acknowledgements (soft-RoCE: its tries) overflow
	// with messages of many packets. A NIC reaches its full rate with far smaller writes.
	maxWrite = 256 << 10

	// DefaultOpening bounds the opening of a connected lane.
	DefaultOpening = 5 * time.Second
	// DefaultPatience is the time that a later attempt, or a fence, waits for a slice in flight
	// before it stops the lane. An attempt waits longer, up to the silence after which a lane is
	// given up, if the lane's slices come at longer intervals.
	DefaultPatience = 100 * time.Millisecond
	patiencePaces   = 4 // of those intervals
	paceWeight      = 8 // the newest interval has this fraction of the weight
	// DefaultSilence is the time without progress after which a lane with slices in flight is given
	// up. The device's own timers detect a dead path sooner; this covers other failures.
	DefaultSilence = 3 * time.Second
	// DefaultDrain is the time that a device has to flush a queue pair before it is destroyed
	// instead.
	DefaultDrain  = 2 * time.Second
	watchInterval = 250 * time.Millisecond
)

// Rail is one port under one GID. Lanes are opened at Listen; payload goes through the device.
type Rail struct {
	Name string
	// called again after the device was lost, or its GID has changed
	Open   func() (verbs.Device, error)
	Listen string // host and port; empty: a port of the GID's address
	Gbps   float64
	NUMA   int // -1: unknown
}

// RailState is a rail's current state. After a change of its GID its address is different. Down:
// its port is down, or the device is lost.
type RailState struct {
	transport.Rail
	Down bool
}

// Config of the backend. Zero durations mean the defaults.
type Config struct {
	Rails    func() ([]Rail, error) // called by Open
	Opening  time.Duration
	Patience time.Duration
	Silence  time.Duration
	Drain    time.Duration
	// HostSilence is the time without an acknowledgement on a lane's socket after which the peer's
	// host is considered lost and the lane given up. 0 is usertimeout.Default.
	HostSilence time.Duration
	Changed     func() // the result of Backend.Rails has changed; must not block
	Log         *slog.Logger
}

// Backend is the RDMA transport of one process.
type Backend struct {
	cfg     Config
	host    transport.Host
	rails   []*rail
	refused admit.Log
	faults  admit.Log       // of memory: slices
	life    context.Context // ended by Close
	finish  context.CancelFunc
	wg      sync.WaitGroup

	once     sync.Once
	closeErr error // of the only Close

	mu sync.Mutex
	// guarded by mu, which is taken after lane.mu
	closed bool
	lanes  map[*lane]struct{}
	use    map[*transport.Origin]using
}

// using counts the slices of an origin whose writes have not completed.
type using struct {
	n    int
	done chan struct{} // closed at 0; made by the waiter
}

var _ transport.Backend = (*Backend)(nil)

// New returns a backend over the configured rails.
func New(cfg Config) *Backend {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Opening == 0 {
		cfg.Opening = DefaultOpening
	}
	if cfg.Patience == 0 {
		cfg.Patience = DefaultPatience
	}
	if cfg.Silence == 0 {
		cfg.Silence = DefaultSilence
	}
	if cfg.Drain == 0 {
		cfg.Drain = DefaultDrain
	}
	b := &Backend{cfg: cfg, lanes: map[*lane]struct{}{}, use: map[*transport.Origin]using{}}
	b.refused.Logger = cfg.Log.With("transport", Name)
	b.faults.Logger = b.refused.Logger
	b.life, b.finish = context.WithCancel(context.Background())
	return b
}

// Name implements transport.Backend.
func (b *Backend) Name() string { return Name }

// Caps implements transport.Backend.
func (b *Backend) Caps() transport.Caps {
	return transport.Caps{Initiator: transport.BySource, Evidence: transport.EvidenceImmediate,
		Fence:  transport.FenceLease,
		Device: true, Credits: maxInFlight, SliceBytes: sliceBytes}
}

// Open implements transport.Backend. It omits rails that do not open, with a log line, as long as
// one does.
func (b *Backend) Open(ctx context.Context, host transport.Host) ([]transport.Rail, error) {
	b.host = host
	found, errs := b.cfg.Rails()
	var rails []transport.Rail
	if errs != nil && len(found) > 0 {
		b.cfg.Log.Warn("ports that are not rails", "transport", Name, "err", errs)
	}
	for _, cfg := range found {
		r, err := b.openRail(ctx, cfg)
		if err != nil {
			err = fmt.Errorf("gdr: rail %s: %w", cfg.Name, err)
			b.cfg.Log.Warn("rail not available", "transport", Name, "err", err)
			errs = errors.Join(errs, err)
			continue
		}
		b.rails = append(b.rails, r)
		rails = append(rails, r.state().Rail)
	}
	if len(rails) == 0 {
		return nil, fmt.Errorf("gdr: %w: %w", transport.ErrNotSupported, errs)
	}
	b.wg.Go(b.watch)
	return rails, nil
}

// Rails returns the current state of the rails of Open.
func (b *Backend) Rails() (all []RailState) {
	for _, r := range b.rails {
		all = append(all, r.state())
	}
	return all
}

func (b *Backend) changed() {
	if b.cfg.Changed != nil && b.life.Err() == nil {
		b.cfg.Changed()
	}
}

// Dial implements transport.Backend.
func (b *Backend) Dial(ctx context.Context, peer transport.Peer, local, remote transport.Rail) (
	transport.Lane, error) {
	fail := func(err error) (transport.Lane, error) {
		return nil, fmt.Errorf("gdr: dial boot %s at %q from rail %s: %w", peer.Boot, remote.Address,
			local.Name, err)
	}
	if b.life.Err() != nil {
		return fail(net.ErrClosed)
	}
	var r *rail
	for _, x := range b.rails {
		if x.cfg.Name == local.Name {
			r = x
		}
	}
	if r == nil {
		return fail(fmt.Errorf("no such rail: %w", net.ErrClosed))
	}
	if err := r.ready(); err != nil {
		return fail(err)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(b.life, cancel)()
	// From the rail's own address, so that the socket fails together with the rail.
	dialer := usertimeout.Dialer(b.cfg.HostSilence)
	r.mu.Lock()
	from := r.ln.Addr()
	r.mu.Unlock()
	if a, ok := from.(*net.TCPAddr); ok && !a.IP.IsUnspecified() {
		dialer.LocalAddr = &net.TCPAddr{IP: a.IP, Zone: a.Zone}
	}
	c, err := dialer.DialContext(ctx, "tcp", remote.Address)
	if err != nil {
		return fail(err)
	}
	// Only now: a hanging connection must not hold a place.
	if err := r.dials.enter(ctx); err != nil {
		_ = c.Close()
		return fail(err)
	}
	defer r.dials.leave()
	dev, err := r.usable()
	if err != nil {
		_ = c.Close()
		return fail(err)
	}
	l, err := b.prepare(c, r, dev, peer.Boot)
	if err != nil {
		_ = c.Close()
		return fail(err)
	}
	_ = c.SetDeadline(time.Now().Add(b.cfg.Opening))
	undo := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	defer b.whileAlive(c)()
	o, err := wire.Dial(c, wire.DialParams{Purpose: purpose, Self: peer.Self, Peer: peer.Boot,
		Key: peer.Key, Versions: frames, Attach: l.attach()})
	if err == nil {
		err = l.connect(o)
	}
	if err == nil && l.remote != remote.Name {
		err = fmt.Errorf("rail %q answers at this address, not %q", l.remote, remote.Name)
	}
	if !undo() && err == nil {
		err = ctx.Err()
	}
	if err == nil {
		err = l.start()
	}
	if err != nil {
		return fail(errors.Join(err, l.abandon()))
	}
	return l, nil
}

// Grant implements transport.Backend. The receiver decides what may be written when a slice asks.
// Grant only begins to register the memory, which takes long the first time. A cache is one region,
// or one per layer: the other regions follow with their slices.
func (b *Backend) Grant(g *transport.Grant) ([]byte, error) {
	blocks, err := g.Memory.Resolve(nil, transfer.Range{Count: 1})
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return nil, fmt.Errorf("gdr: grant: %w", net.ErrClosed)
	}
	if err != nil || len(blocks) == 0 {
		return nil, nil // nothing to write, or nothing that will be permitted
	}
	for _, r := range b.rails {
		if dev, _ := r.current(); dev != nil {
			dev.keys.begin(&b.wg, keyName{blocks[0].Region, g.Peer, true})
		}
	}
	return nil, nil
}

// Fence implements transport.Backend: when it returns, no claimed chunk of the grant can be
// written.
func (b *Backend) Fence(ctx context.Context, g *transport.Grant) error {
	fail := func(err error) error {
		return fmt.Errorf("gdr: fence of slot %d.%d: %w", g.Slot, g.Gen, err)
	}
	// Slices are armed under the guard, so no further one can be armed after this.
	if err := g.Wait(ctx); err != nil {
		return fail(err)
	}
	patience := time.NewTimer(b.cfg.Patience)
	defer patience.Stop()
	for _, l := range b.lanesOf(g.Peer) {
		for waiting := true; waiting; {
			change := l.dst.armedFor(g)
			if change == nil {
				break
			}
			select {
			case <-change:
			case <-patience.C:
				patience.Reset(0) // the others have waited as long
				waiting = false
			case <-ctx.Done():
				waiting = false
			}
		}
		if l.dst.armedFor(g) == nil {
			continue
		}
		l.fail(fmt.Errorf("gdr: fence of slot %d.%d: %w", g.Slot, g.Gen, net.ErrClosed))
		if !l.stopped(ctx) {
			if err := l.dst.invalidate(g); err != nil {
				return fail(fmt.Errorf("lane %d on rail %s was not drained (%w), nor its keys invalidated: %w",
					l.id, l.rail.cfg.Name, context.Cause(ctx), err))
			}
		}
	}
	return nil
}

// CloseOrigin implements transport.Backend.
func (b *Backend) CloseOrigin(ctx context.Context, o *transport.Origin) error {
	fail := func(err error) error {
		return fmt.Errorf("gdr: close of origin %d.%d: %w", o.Slot, o.Gen, err)
	}
	if err := o.Wait(ctx); err != nil {
		return fail(err)
	}
	b.mu.Lock()
	u, used := b.use[o]
	if used && u.done == nil {
		u.done = make(chan struct{})
		b.use[o] = u
	}
	b.mu.Unlock()
	if !used {
		return nil
	}
	patience := time.NewTimer(b.cfg.Silence)
	defer patience.Stop()
	select {
	case <-u.done:
		return nil
	case <-patience.C:
	case <-ctx.Done():
	}
	// Stopping its lanes flushes their work requests: the NIC stops reading.
	for _, l := range b.lanesOf(o.Peer) {
		if l.src.reads(o) {
			l.fail(fmt.Errorf("gdr: close of origin %d.%d: %w", o.Slot, o.Gen, net.ErrClosed))
		}
	}
	// Twice the time: a queue pair that is not flushed in time is then destroyed.
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*b.cfg.Drain)
	defer cancel()
	select {
	case <-u.done:
		return nil
	case <-last.Done():
		return fail(fmt.Errorf("the device still reads: %w", last.Err()))
	}
}

// Close implements transport.Backend.
func (b *Backend) Close() error {
	b.once.Do(func() { b.closeErr = b.close() })
	return b.closeErr
}

func (b *Backend) close() error {
	b.mu.Lock()
	b.closed = true
	b.mu.Unlock()
	b.finish()
	for _, r := range b.rails {
		r.shut()
	}
	b.failLanes(net.ErrClosed, func(*lane) bool { return true })
	b.wg.Wait()
	for _, l := range b.allLanes() {
		l.reap() // one last time
	}
	var err error
	for _, r := range b.rails {
		err = errors.Join(err, r.close())
	}
	return err
}

// whileAlive ends the set-up of a lane when the backend closes. The result undoes it.
func (b *Backend) whileAlive(c net.Conn) func() bool {
	return context.AfterFunc(b.life, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
}

func (b *Backend) allLanes() (all []*lane) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for l := range b.lanes {
		all = append(all, l)
	}
	return all
}

func (b *Backend) failLanes(err error, which func(*lane) bool) {
	for _, l := range b.allLanes() {
		if which(l) {
			l.fail(err)
		}
	}
}

func (b *Backend) lanesOf(peer transfer.Boot) (all []*lane) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for l := range b.lanes {
		if l.peer == peer {
			all = append(all, l)
		}
	}
	return all
}

// startUse holds an origin while the NIC may read it. CloseOrigin revokes the origin before it
// checks.
func (b *Backend) startUse(o *transport.Origin) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if o.Revoked() {
		return false
	}
	u := b.use[o]
	u.n++
	b.use[o] = u
	return true
}

func (b *Backend) endUse(o *transport.Origin) {
	b.mu.Lock()
	defer b.mu.Unlock()
	u := b.use[o]
	if u.n--; u.n > 0 {
		b.use[o] = u
		return
	}
	delete(b.use, o)
	if u.done != nil {
		close(u.done)
	}
}

// interval is the time between two checks for silent lanes and idle keys.
func (b *Backend) interval() time.Duration { return min(watchInterval, b.cfg.Silence/2) }

// watch gives up silent lanes.
func (b *Backend) watch() {
	tick := time.NewTicker(b.interval())
	defer tick.Stop()
	for {
		select {
		case <-b.life.Done():
			return
		case now := <-tick.C:
			for _, l := range b.allLanes() {
				l.checkProgress(now)
			}
		}
	}
}
