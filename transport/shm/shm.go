package shm

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/kvspray/kvspray/internal/admit"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/internal/sys/sock"
	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// Name of the backend and of its only rail.
const Name = "shm"

const (
	// large enough that its four small messages cost nothing beside the copy.
	sliceBytes  = 1 << 20
	maxInFlight = 64 // slices of a lane
	// of a lane, each way: a slice of many small pieces or many bytes takes several.
	maxPulls     = 256
	maxPullBytes = 1 << 20
	// of GPU memory, and the bytes of one pull of it: [measured, 2 H200] 1.6 times the rate of 1
	// MiB.
	deviceSlice     = 4 << 20
	maxRegions      = 1024 // of a lane
	maxOpening      = 16   // connections that have not proved the key yet
	openTimeout     = 5 * time.Second
	sweepEvery      = time.Second // time until a freed region is unmapped at the peer
	maxSocketPath   = 107
	socketSubdir    = "kvspray-shm"
	socketPrefix    = "lane-"
	maxStaleSockets = 64 // checked when the backend opens
	gbps            = 80 // nominal speed of the rail before it is measured
)

// Config of the backend.
type Config struct {
	// holds the 0700 directory of the socket; default $XDG_RUNTIME_DIR, else /tmp/kvspray-<uid>
	Dir     string
	Workers int     // copiers of the whole backend; default the number of processors
	Devices Devices // imports peers' GPU memory; nil: pulls of it are refused
	// carries large copies between host memory and GPUs; nil: all of them go through buffers
	Links Links
	Log   *slog.Logger

	// readers that poll at the same time; default a quarter of the processors
	pollers      int
	hinted, stay time.Duration // default hintedFor and stayFor
	cold         time.Duration // default coldAfter
	look         time.Duration // default sock.DefaultLook
}

// After a wake-up hint a lane's reader polls for pulls for hintedFor, and after each pull for
// stayFor; then it sleeps as usual. If the first pull came later than that, or none came, hints are
// ignored for ignoredFor: an engine whose layers come so late gains nothing. [measured, 16 cores,
// H200] a sleeping processor receives a packet 50 to 300 us late, because the host of its virtual
// machine has to wake it, and every layer after the first one queues. A quarter of the processors
// may poll, and further readers sleep: a poller holds a processor of the runtime, and with few of
// those all other goroutines would be tens of milliseconds late.
const (
	hintedFor  = 20 * time.Millisecond // the previous step may still run
	stayFor    = 300 * time.Microsecond
	ignoredFor = 200 * time.Millisecond
	coldAfter  = 2 * time.Millisecond // without pulls for this long, GPUs are warmed
)

// The number of goroutines for GPU memory, beside a lane's reader, follows the copiers, which are
// half of the cores: a GPU's link outruns one core at either end, and a host with few cores has
// none to spare.
const (
	minMovers = 2 // one batch is on the link while the next is made
	maxMovers = 8 // of a backend: some prepare while the batches of others are on the link
	maxAskers = 8 // of a lane
)

func (c *Config) movers() int { return min(max(c.Workers, minMovers), maxMovers) }
func (c *Config) askers() int { return min(c.Workers/4*4, maxAskers) }

// Devices makes regions of GPU memory from the handles that peers pass.
type Devices interface {
	// Import owns fd, which may be -1, after success.
	Import(id mem.ID, handle []byte, fd int, size uint64) (*mem.Region, error)
}

// Links moves bytes between host memory and GPUs in place, over every PCIe link to a GPU.
type Links interface {
	// Reaches reports whether Carry accepts these lists, which hold equally many bytes. It never
	// waits, neither for the answer nor for preparing memory: a later call may accept.
	Reaches(dst, src []mem.Block) bool
	// Carry moves one or several lists for which Reaches returned true. When it returns, with or
	// without an error, none of their bytes is in flight on any link, so that a guard held around
	// it covers every byte.
	Carry(dst, src []mem.Block) error
	// Forget ends the state for memory that goes away. Nothing of it is being carried, and no list
	// of it will follow.
	Forget([]*mem.Region)
}

// Backend is the shm transport of one process.
type Backend struct {
	cfg  Config
	host transport.Host
	ln   *sock.Listener
	maps mappings
	jobs chan *job
	far  chan *job // jobs with GPU memory on either side
	cold chan mem.Warmer
	stop chan struct{}
	wg   sync.WaitGroup

	refused admit.Log
	faults  admit.Log // of memory: regions and slices

	polling atomic.Int32 // readers

	mu sync.Mutex
	// guarded by mu, which is the last lock: nothing else is taken while it is held
	lanes  map[*lane]struct{}
	reads  map[*transport.Origin]*reading
	closed bool
	opened bool
}

// reading counts the pulls of one origin that the peer may still read.
type reading struct {
	n    int
	done chan struct{}
}

var _ transport.Backend = (*Backend)(nil)

// New returns a backend that does nothing until Open.
func New(cfg Config) *Backend {
	if cfg.Workers <= 0 {
		cfg.Workers = runtime.GOMAXPROCS(0)
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.pollers == 0 {
		cfg.pollers = runtime.GOMAXPROCS(0) / 4
	}
	if cfg.hinted == 0 {
		cfg.hinted, cfg.stay = hintedFor, stayFor
	}
	if cfg.cold == 0 {
		cfg.cold = coldAfter
	}
	b := &Backend{
		cfg: cfg, jobs: make(chan *job, maxPulls), far: make(chan *job, maxPulls),
		cold: make(chan mem.Warmer, maxWarm), stop: make(chan struct{}),
		maps:  mappings{links: cfg.Links, all: map[mapKey]*mapping{}},
		lanes: map[*lane]struct{}{}, reads: map[*transport.Origin]*reading{},
	}
	b.refused.Logger, b.faults.Logger = cfg.Log, cfg.Log
	return b
}

// Name implements transport.Backend.
func (b *Backend) Name() string { return Name }

// Caps implements transport.Backend.
func (b *Backend) Caps() transport.Caps {
	return transport.Caps{Initiator: transport.ByDestination, Evidence: transport.EvidenceRead,
		Fence:    transport.FenceLease,
		SameHost: true, Device: true, SliceBytes: sliceBytes, DeviceSlice: deviceSlice, Guarded: true}
}

// Open implements transport.Backend.
func (b *Backend) Open(ctx context.Context, host transport.Host) ([]transport.Rail, error) {
	dir, err := socketDir(b.cfg.Dir)
	if err != nil {
		return nil, err
	}
	removeStale(dir)
	var id [8]byte
	_, _ = rand.Read(id[:]) // never fails
	path := filepath.Join(dir, socketPrefix+hex.EncodeToString(id[:])+".sock")
	if len(path) > maxSocketPath {
		return nil,
			fmt.Errorf("shm: socket path %q has %d bytes, at most %d; set a shorter directory: %w", path,
				len(path), maxSocketPath,
				transport.ErrNotSupported)
	}
	ln, err := sock.Listen(sock.Options{Network: "unixpacket", Path: path, Mode: 0o600,
		Prepare: func() error { _, err := socketDir(b.cfg.Dir); return err },
		Look:    b.cfg.look, Name: "the socket of shm", Setting: "transports.shm.dir", Log: b.cfg.Log})
	if err != nil {
		return nil, fmt.Errorf("shm: socket %q: %w", path, err)
	}
	b.mu.Lock()
	if b.closed || b.opened {
		b.mu.Unlock()
		_ = ln.Close()
		return nil, fmt.Errorf("shm: open: %w", net.ErrClosed)
	}
	defer b.mu.Unlock()
	b.opened, b.host, b.ln = true, host, ln
	for range b.cfg.Workers {
		b.wg.Go(b.copier)
	}
	for range b.cfg.movers() {
		b.wg.Go(b.mover)
	}
	b.wg.Go(b.accept)
	b.wg.Go(b.sweep)
	return []transport.Rail{{Name: Name, Address: path, Gbps: gbps, NUMA: -1, Tier: 1}}, ctx.Err()
}

// socketDir returns a directory that only this user can enter.
func socketDir(dir string) (string, error) {
	if dir == "" {
		if dir = os.Getenv("XDG_RUNTIME_DIR"); dir == "" {
			dir = filepath.Join(os.TempDir(), fmt.Sprintf("kvspray-%d", os.Getuid()))
		}
	}
	dir = filepath.Join(dir, socketSubdir)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", fmt.Errorf("shm: directory of the socket: %w", err)
	}
	st, err := os.Stat(dir)
	if err != nil {
		return "", fmt.Errorf("shm: directory of the socket: %w", err)
	}
	if sys, ok := st.Sys().(*syscall.Stat_t); !ok || int(sys.Uid) != os.Getuid() {
		return "", fmt.Errorf("shm: directory %q belongs to another user: choose a socket, or "+
			"transports.shm.dir, in a directory of this user's", dir)
	}
	if st.Mode().Perm()&0o077 != 0 {
		return "", fmt.Errorf("shm: directory %q has mode %04o: make it 0700", dir, st.Mode().Perm())
	}
	return dir, nil
}

// removeStale removes sockets of killed sidecars, on which no process listens.
func removeStale(dir string) {
	all, _ := filepath.Glob(filepath.Join(dir, socketPrefix+"*.sock"))
	for _, path := range all[:min(len(all), maxStaleSockets)] {
		c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: path, Net: "unixpacket"})
		if err == nil {
			_ = c.Close()
		} else if errors.Is(err, syscall.ECONNREFUSED) {
			_ = os.Remove(path)
		}
	}
}

func (b *Backend) accept() {
	opening := make(chan struct{}, maxOpening)
	failed := func(err error) { b.refused.Note(slog.LevelWarn, "shm accept failed", "err", err) }
	for c := range admit.Accepted(b.stop, b.ln.AcceptUnix, failed) {
		select {
		case opening <- struct{}{}:
			b.wg.Go(func() {
				defer func() { <-opening }()
				b.welcome(c)
			})
		default:
			_ = c.Close()
		}
	}
}

func (b *Backend) welcome(c *net.UnixConn) {
	stop := b.closeOnStop(c)
	_ = c.SetDeadline(time.Now().Add(openTimeout))
	var remote string
	o, err := wire.Accept(&packetStream{c: c}, wire.AcceptParams{
		Purpose:  wire.PurposeSHM,
		Versions: frames,
		Lookup: func(boot transfer.Boot) ([32]byte, transfer.Boot, bool) {
			p, ok := b.host.PeerKey(boot)
			return p.Key, p.Self, ok
		},
		Attach: func(h *wire.Hello) ([]byte, error) {
			remote = string(h.Attach)
			return []byte(Name), nil
		},
	})
	stop()
	if err == nil {
		_, err = b.newLane(c, o, o.Peer, remote)
	}
	if err != nil {
		_ = c.Close()
		if errors.Is(err, io.EOF) {
			// A starting sidecar connects and closes at once, to find out whether this socket's
			// owner lives.
			b.cfg.Log.Debug("shm lane not opened", "err", err)
			return
		}
		b.refused.Note(slog.LevelWarn, "shm lane refused", "err", err)
	}
}

// closeOnStop ends the opening of c when the backend closes. The result undoes it.
func (b *Backend) closeOnStop(c net.Conn) func() {
	ctx, cancel := context.WithCancel(context.Background())
	b.wg.Go(func() {
		select {
		case <-b.stop:
			_ = c.SetDeadline(time.Unix(1, 0))
		case <-ctx.Done():
		}
	})
	return cancel
}

// Dial implements transport.Backend.
func (b *Backend) Dial(ctx context.Context, peer transport.Peer, local, remote transport.Rail) (
	transport.Lane, error) {
	fail := func(err error) (transport.Lane, error) {
		return nil, fmt.Errorf("shm: dial boot %s at %q: %w", peer.Boot, remote.Address, err)
	}
	b.mu.Lock()
	ok := b.opened && !b.closed
	b.mu.Unlock()
	if !ok {
		return fail(net.ErrClosed)
	}
	nc, err := (&net.Dialer{}).DialContext(ctx, "unixpacket", remote.Address)
	if err != nil {
		if unreachable(err) {
			err = fmt.Errorf("%w: %w; share the socket's directory between the pods of one host",
				transport.ErrNotSupported, err)
		}
		return fail(err)
	}
	c := nc.(*net.UnixConn)
	deadline := time.Now().Add(openTimeout)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	_ = c.SetDeadline(deadline)
	undo := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	o, err := wire.Dial(&packetStream{c: c}, wire.DialParams{Purpose: wire.PurposeSHM, Self: peer.Self,
		Peer: peer.Boot, Key: peer.Key,
		Versions: frames, Attach: []byte(local.Name)})
	if !undo() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		_ = c.Close()
		return fail(err)
	}
	l, err := b.newLane(c, o, peer.Boot, string(o.Attach))
	if err != nil {
		_ = c.Close()
		return fail(err)
	}
	return l, nil
}

// unreachable reports whether a connect failed because the peer's socket is not in this mount
// namespace, or not permitted: retries are useless. A full backlog, a lack of descriptors, and a
// listener that is gone pass, or end with the peer.
func unreachable(err error) bool {
	for _, e := range []error{syscall.ENOENT, syscall.ENOTDIR, syscall.EACCES, syscall.EPERM,
		syscall.ELOOP, syscall.ENAMETOOLONG, syscall.EINVAL,
		syscall.EPROTOTYPE} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// Grant implements transport.Backend: there is nothing to prepare, because the destination copies.
func (b *Backend) Grant(*transport.Grant) ([]byte, error) { return nil, nil }

// Fence implements transport.Backend. Only this process's copiers write, under the guard.
func (b *Backend) Fence(ctx context.Context, g *transport.Grant) error {
	if err := g.Wait(ctx); err != nil {
		return fmt.Errorf("shm: fence of slot %d.%d: %w", g.Slot, g.Gen, err)
	}
	return nil
}

// CloseOrigin implements transport.Backend.
func (b *Backend) CloseOrigin(ctx context.Context, o *transport.Origin) error {
	if !o.Revoked() {
		return fmt.Errorf("shm: close of origin %d.%d: its guard is not revoked; revoke first",
			o.Slot, o.Gen)
	}
	b.mu.Lock()
	r := b.reads[o]
	b.mu.Unlock()
	if r != nil {
		b.waitReads(ctx, o, r)
	}
	// Verdicts are given under the guard: Wait covers those in progress.
	if err := o.Wait(ctx); err != nil {
		return fmt.Errorf("shm: close of origin %d.%d: %w", o.Slot, o.Gen, err)
	}
	return nil
}

// waitReads returns once the peer reads no memory of o. A peer that stays silent until ctx ends
// loses its lanes.
func (b *Backend) waitReads(ctx context.Context, o *transport.Origin, r *reading) {
	select {
	case <-r.done:
		return
	case <-ctx.Done():
	}
	// The peer is silent. Without a lane it can never receive the verdicts that its reads need.
	b.mu.Lock()
	var silent []*lane
	for l := range b.lanes {
		if l.peer == o.Peer {
			silent = append(silent, l)
		}
	}
	b.mu.Unlock()
	for _, l := range silent {
		if l.src.reads(o) {
			l.close(fmt.Errorf("shm: the peer answers no pull of slot %d.%d: %w", o.Slot, o.Gen, ctx.Err()))
		}
	}
	<-r.done // closing a lane ends its pulls at once
}

// startRead counts a pull of o, unless o is closed.
func (b *Backend) startRead(o *transport.Origin) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if o.Revoked() {
		return false
	}
	r := b.reads[o]
	if r == nil {
		r = &reading{done: make(chan struct{})}
		b.reads[o] = r
	}
	r.n++
	return true
}

func (b *Backend) endRead(o *transport.Origin) {
	b.mu.Lock()
	defer b.mu.Unlock()
	r := b.reads[o]
	if r.n--; r.n == 0 {
		delete(b.reads, o)
		close(r.done)
	}
}

// sweep announces regions that were freed here to peers, so that they do not keep a dead engine's
// memory.
func (b *Backend) sweep() {
	t := time.NewTicker(sweepEvery)
	defer t.Stop()
	for {
		select {
		case <-b.stop:
			return
		case <-t.C:
		}
		b.mu.Lock()
		all := make([]*lane, 0, len(b.lanes))
		for l := range b.lanes {
			all = append(all, l)
		}
		b.mu.Unlock()
		for _, l := range all {
			l.src.forgetFreed()
		}
	}
}

// Close implements transport.Backend.
func (b *Backend) Close() error {
	b.mu.Lock()
	if b.closed {
		b.mu.Unlock()
		b.wg.Wait()
		return nil
	}
	b.closed = true
	all := make([]*lane, 0, len(b.lanes))
	for l := range b.lanes {
		all = append(all, l)
	}
	ln := b.ln
	b.mu.Unlock()
	close(b.stop)
	if ln != nil {
		_ = ln.Close() // removes the socket's file
	}
	for _, l := range all {
		l.close(net.ErrClosed)
	}
	b.wg.Wait()
	return nil
}

// packetStream lets the lane opening, which reads a stream, run over packets. It never reads ahead:
// each side of the opening waits for the other's packet.
type packetStream struct {
	c    *net.UnixConn
	rest []byte
	buf  [2048]byte
}

func (s *packetStream) Read(p []byte) (int, error) {
	if len(s.rest) == 0 {
		n, err := s.c.Read(s.buf[:])
		if err != nil {
			return 0, err
		}
		s.rest = s.buf[:n]
	}
	n := copy(p, s.rest)
	s.rest = s.rest[n:]
	return n, nil
}

func (s *packetStream) Write(p []byte) (int, error) { return s.c.Write(p) }

// reopenReadOnly returns a descriptor of a region that its receiver cannot write through.
func reopenReadOnly(r *mem.Region) (int, error) {
	return syscall.Open(fmt.Sprintf("/proc/self/fd/%d", r.FD()), syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
}
