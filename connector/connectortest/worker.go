package connectortest

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/internal/board"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/layout"
)

func randomID() (id [16]byte) {
	_, _ = rand.Read(id[:]) // never fails: crypto/rand aborts the process instead
	return id
}

// Config describes a worker and its registration.
type Config struct {
	Socket  string
	Engine  msg.Engine
	Ranks   msg.Ranks
	Layout  *layout.Layout // nil: none
	Regions []*mem.Region  // sealed memfds (mem.NewAnonymous); they stay the caller's
	Layers  int            // flags on the board; 0: as many as the layout has layers
	// Ring sizes, powers of two. 0: 1 MiB and 256 KiB.
	SubmissionBytes, CompletionBytes int
	Boot                             [16]byte    // random when zero
	Min, Max                         msg.Version // version in HELLO; 0: the supported one
	Release                          string
	// Before may add regions before REGISTER, whose First and Regions Tamper then changes.
	Before func(add func(first uint32, all []msg.Region, fds ...int) error) error
	// Tamper may change the REGISTER message and its descriptors before it is sent.
	Tamper func(*msg.Register, []int) []int
}

// Completion is a RECEIVED or SENT as the engine sees it.
type Completion struct {
	Lease    uint64
	Status   uint16
	Seq      uint64
	Received *msg.Received // one of the two
	Sent     *msg.Sent
}

// Worker is a worker session: its memory, board and socket.
type Worker struct {
	Session
	cfg      Config
	boot     [16]byte
	flagsMem *memory
	flags    *board.Flags

	subMu   sync.Mutex
	rings   *memory         // guarded by subMu
	sub     *board.Producer // guarded by subMu
	sqEvent *os.File        // wakes the sidecar; guarded by subMu
	lease   uint64          // the last id given; guarded by subMu

	comp    *board.Consumer // with Poll and Wait
	cqEvent *os.File        // wakes us
}

// memory is a sealed memfd, mapped.
type memory struct {
	fd int
	b  []byte
}

func newMemory(name string, size int) (*memory, error) {
	size = (size + 4095) &^ 4095
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("memfd_create: %w", err)
	}
	m := &memory{fd: fd}
	if err := unix.Ftruncate(fd, int64(size)); err != nil {
		m.close()
		return nil, fmt.Errorf("ftruncate: %w", err)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS,
		unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL); err != nil {
		m.close()
		return nil, fmt.Errorf("seal: %w", err)
	}
	if m.b, err = unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		m.close()
		return nil, fmt.Errorf("mmap: %w", err)
	}
	return m, nil
}

func (m *memory) close() {
	if m == nil {
		return
	}
	if m.b != nil {
		_ = unix.Munmap(m.b)
	}
	_ = unix.Close(m.fd)
}

func eventfd() (*os.File, error) {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("eventfd: %w", err)
	}
	return os.NewFile(uintptr(fd), "eventfd"), nil
}

// fdOf returns the number without taking the file out of the netpoller.
func fdOf(f *os.File) int {
	n := -1
	if rc, err := f.SyscallConn(); err == nil {
		_ = rc.Control(func(fd uintptr) { n = int(fd) })
	}
	return n
}

// NewWorker makes the worker's flags; Connect registers it.
func NewWorker(cfg Config) (*Worker, error) {
	if cfg.Layers == 0 && cfg.Layout != nil {
		cfg.Layers = cfg.Layout.NumLayers()
	}
	cfg.Layers = max(cfg.Layers, 1)
	if cfg.SubmissionBytes == 0 {
		cfg.SubmissionBytes = 1 << 20
	}
	if cfg.CompletionBytes == 0 {
		cfg.CompletionBytes = 256 << 10
	}
	if cfg.Min == 0 && cfg.Max == 0 {
		cfg.Min, cfg.Max = msg.VersionMin, msg.VersionMax
	}
	w := &Worker{cfg: cfg, boot: cfg.Boot}
	if w.boot == ([16]byte{}) {
		w.boot = randomID()
	}
	var err error
	if w.flagsMem, err = newMemory("flags", board.FlagsBytes(cfg.Layers)); err != nil {
		return nil, err
	}
	if w.flags, err = board.InitFlags(w.flagsMem.b, w.boot, cfg.Layers); err != nil {
		w.flagsMem.close()
		return nil, err
	}
	return w, nil
}

// DialWorker is NewWorker and Connect.
func DialWorker(ctx context.Context, cfg Config) (*Worker, error) {
	w, err := NewWorker(cfg)
	if err != nil {
		return nil, err
	}
	if _, err := w.Connect(ctx); err != nil {
		_ = w.Close()
		return nil, err
	}
	return w, nil
}

// Connect opens a session with fresh rings and registers. The earlier session, if one is open, is
// dropped first; no goroutine reads its rings from then on.
func (w *Worker) Connect(ctx context.Context) (*msg.Registered, error) {
	w.Disconnect()
	c, err := dial(ctx, w.cfg.Socket)
	if err != nil {
		return nil, err
	}
	reg, err := w.register(ctx, c)
	if err != nil {
		c.close()
		return nil, err
	}
	return reg, nil
}

func (w *Worker) register(ctx context.Context, c *conn) (*msg.Registered, error) {
	welcome, err := c.hello(ctx, msg.Hello{Min: w.cfg.Min, Max: w.cfg.Max, Role: msg.RoleWorker,
		Boot: w.boot, Release: w.cfg.Release,
		Engine: w.cfg.Engine, Ranks: w.cfg.Ranks, PID: uint32(os.Getpid())})
	if err != nil {
		return nil, err
	}
	session := randomID()
	rings, err := newMemory("rings", board.RingsBytes(w.cfg.SubmissionBytes, w.cfg.CompletionBytes))
	if err != nil {
		return nil, err
	}
	view, err := board.InitRings(rings.b, session, w.cfg.SubmissionBytes, w.cfg.CompletionBytes)
	if err != nil {
		rings.close()
		return nil, err
	}
	sqEvent, err := eventfd()
	if err != nil {
		rings.close()
		return nil, err
	}
	cqEvent, err := eventfd()
	if err != nil {
		rings.close()
		_ = sqEvent.Close()
		return nil, err
	}
	w.subMu.Lock()
	w.closeRingsLocked()
	w.rings, w.sub, w.sqEvent = rings, view.SubmissionProducer(), sqEvent
	w.comp, w.cqEvent = view.CompletionConsumer(), cqEvent
	w.subMu.Unlock()
	w.mu.Lock()
	w.welcome = welcome
	w.mu.Unlock()

	if w.cfg.Before != nil {
		if err := w.cfg.Before(func(first uint32, all []msg.Region, fds ...int) error {
			_, err := askOn[*msg.Done](ctx, c, func(id uint64) msg.Message {
				return &msg.AddRegions{ID: id, First: first, Regions: all}
			}, fds...)
			return err
		}); err != nil {
			return nil, err
		}
	}
	id, ch := c.expect()
	m := &msg.Register{ID: id, Session: session, FDs: msg.FDs{Flags: 0, Rings: 1,
		SQEventfd: 2, CQEventfd: 3}}
	if w.cfg.Layout != nil {
		if m.Layout, err = w.cfg.Layout.Marshal(); err != nil {
			return nil, err
		}
	}
	fds := []int{w.flagsMem.fd, rings.fd, fdOf(sqEvent), fdOf(cqEvent)}
	for _, r := range w.cfg.Regions {
		kind := msg.KindMemfd
		if r.Kind() == mem.KindProcess {
			kind = msg.KindProcess
		}
		m.Regions = append(m.Regions, msg.Region{Region: r.ID(), Kind: kind, Bytes: r.Size(),
			Addr: r.Base(), FD: uint32(len(fds))})
		fds = append(fds, r.FD())
	}
	if w.cfg.Tamper != nil {
		fds = w.cfg.Tamper(m, fds)
	}
	if err := c.send(m, fds...); err != nil {
		return nil, err
	}
	a, err := c.answer(ctx, ch)
	if err != nil {
		return nil, err
	}
	reg, ok := a.(*msg.Registered)
	if !ok {
		return nil, fmt.Errorf("%s answers REGISTER", a.Type())
	}
	w.mu.Lock()
	w.c = c
	w.mu.Unlock()
	return reg, nil
}

func (w *Worker) closeRingsLocked() {
	if w.rings == nil {
		return
	}
	_ = w.sqEvent.Close()
	_ = w.cqEvent.Close()
	w.rings.close()
	w.rings = nil
}

// Boot is the engine worker's boot id.
func (w *Worker) Boot() [16]byte { return w.boot }

// Layout is what it registers.
func (w *Worker) Layout() *layout.Layout { return w.cfg.Layout }

// Regions are what it registers.
func (w *Worker) Regions() []*mem.Region { return w.cfg.Regions }

// Flags is the engine's end of the flags.
func (w *Worker) Flags() *board.Flags { return w.flags }

// NewLease returns a lease id that this worker has not used.
func (w *Worker) NewLease() uint64 {
	w.subMu.Lock()
	defer w.subMu.Unlock()
	w.lease++
	return w.lease
}

// Push writes any record; epoch is the source epoch as of now. bump moves it first, and together
// with the record.
func (w *Worker) Push(typ uint16, lease uint64, body []byte, bump bool) error {
	w.subMu.Lock()
	defer w.subMu.Unlock()
	if w.rings == nil {
		return errDisconnected
	}
	if bump {
		w.flags.BumpSourceEpoch()
	}
	return w.pushLocked(typ, lease, w.flags.SourceEpoch(), body)
}

// PushEpoch writes a record with any source epoch, for tests that lie about it.
func (w *Worker) PushEpoch(typ uint16, lease, epoch uint64, body []byte) error {
	w.subMu.Lock()
	defer w.subMu.Unlock()
	if w.rings == nil {
		return errDisconnected
	}
	return w.pushLocked(typ, lease, epoch, body)
}

func (w *Worker) pushLocked(typ uint16, lease, epoch uint64, body []byte) error {
	wake, err := w.sub.Push(typ, 0, lease, epoch, body)
	if err != nil {
		return err
	}
	if wake {
		return ring(w.sqEvent)
	}
	return nil
}

// RawRings is the rings memory as mapped here, for tests that break it.
func (w *Worker) RawRings() []byte { return w.rings.b }

// WakeConsumer signals the SQ eventfd, whether the sidecar's consumer sleeps or not.
func (w *Worker) WakeConsumer() error {
	w.subMu.Lock()
	defer w.subMu.Unlock()
	if w.rings == nil {
		return errDisconnected
	}
	return ring(w.sqEvent)
}

func ring(f *os.File) error {
	one := binary.NativeEndian.AppendUint64(nil, 1)
	if _, err := f.Write(one); err != nil && !errors.Is(err, unix.EAGAIN) {
		return fmt.Errorf("ring: %w", err)
	}
	return nil
}

// Intent opens a source lease.
func (w *Worker) Intent(m msg.Intent) (lease uint64, err error) {
	lease = w.NewLease()
	return lease, w.IntentAs(lease, m)
}

// IntentAs opens, or presents again, a source lease of this id.
func (w *Worker) IntentAs(lease uint64, m msg.Intent) error {
	if m.Fanout == 0 {
		m.Fanout = 1
	}
	return w.Push(board.RecIntent, lease, m.Append(nil), false)
}

// Expect opens a destination lease.
func (w *Worker) Expect(m msg.Expect) (lease uint64, err error) {
	lease = w.NewLease()
	return lease, w.Push(board.RecExpect, lease, m.Append(nil), false)
}

// Copy opens a copy between two regions.
func (w *Worker) Copy(m msg.Copy) (lease uint64, err error) {
	lease = w.NewLease()
	return lease, w.Push(board.RecCopy, lease, m.Append(nil), false)
}

// Load opens a copy of the same pages of several tensors.
func (w *Worker) Load(m msg.Load) (lease uint64, err error) {
	lease = w.NewLease()
	return lease, w.Push(board.RecLoad, lease, m.Append(nil), false)
}

// Step begins a step.
func (w *Worker) Step(m msg.Step) error { return w.Push(board.RecStep, 0, m.Append(nil), false) }

// Cancel gives a lease back. source moves the source epoch first.
func (w *Worker) Cancel(lease uint64, reason string, source bool) error {
	return w.Push(board.RecCancel, lease, (&msg.Cancel{Reason: reason}).Append(nil), source)
}

// Preempt moves the source epoch, then names the lease that has lost its blocks.
func (w *Worker) Preempt(lease uint64) error {
	return w.Push(board.RecPreempt, lease, (&msg.Empty{}).Append(nil), true)
}

// Yield reports that the engine needs the blocks of a held lease.
func (w *Worker) Yield(lease uint64) error {
	return w.Push(board.RecYield, lease, (&msg.Empty{}).Append(nil), false)
}

// Hold reports that the blocks are kept only for the transfer.
func (w *Worker) Hold(lease uint64) error {
	return w.Push(board.RecHold, lease, (&msg.Empty{}).Append(nil), false)
}

// BumpEpoch moves the source epoch and writes no record, as a thread that is just about to preempt
// has done.
func (w *Worker) BumpEpoch() uint64 { return w.flags.BumpSourceEpoch() }

// SignalLayer reports that layer l (a flag index) of the step is complete.
func (w *Worker) SignalLayer(l int, step uint64) { w.flags.SetLayer(l, step) }

// StartReplay begins a step whose layers come by SignalReplay, as those of a captured graph do.
func (w *Worker) StartReplay(step uint64) { w.flags.StartReplay(step) }

// SignalReplay reports that layer l (a flag index) of the step of StartReplay is complete. It is
// forgotten with the next StartReplay.
func (w *Worker) SignalReplay(l int) { w.flags.SetReplayed(l) }

// SignalStep reports that all layers of the step are complete.
func (w *Worker) SignalStep(step uint64) { w.flags.SetLayer(w.flags.Layers(), step) }

// Poll takes one completion if there is one.
func (w *Worker) Poll() (Completion, bool, error) {
	if w.comp == nil {
		return Completion{}, false, errDisconnected
	}
	rec, ok, err := w.comp.Next()
	if err != nil || !ok {
		return Completion{}, false, err
	}
	c := Completion{Lease: rec.Lease, Status: rec.Status, Seq: rec.Seq}
	switch rec.Type {
	case board.RecReceived:
		c.Received, err = msg.DecodeReceived(rec.Body)
	case board.RecSent:
		c.Sent, err = msg.DecodeSent(rec.Body)
	default:
		err = fmt.Errorf("record of type %d on the completion ring", rec.Type)
	}
	return c, err == nil, err
}

// Wait takes the next completion. It waits on the CQ eventfd until there is one.
func (w *Worker) Wait(ctx context.Context) (Completion, error) {
	stop := context.AfterFunc(ctx, func() { _ = w.cqEvent.SetReadDeadline(longAgo) })
	defer func() {
		if !stop() {
			_ = w.cqEvent.SetReadDeadline(never)
		}
	}()
	var count [8]byte
	for {
		c, ok, err := w.Poll()
		if err != nil || ok {
			return c, err
		}
		if !w.comp.Sleep() {
			continue
		}
		if _, err := w.cqEvent.Read(count[:]); err != nil {
			if ctx.Err() != nil {
				return Completion{}, ctx.Err()
			}
			if errors.Is(err, os.ErrDeadlineExceeded) {
				_ = w.cqEvent.SetReadDeadline(never) // left by an earlier Wait whose context ended
				continue
			}
			return Completion{}, fmt.Errorf("CQ eventfd: %w", err)
		}
	}
}

// Close ends the session and frees the board. Regions stay.
func (w *Worker) Close() error {
	w.Disconnect()
	w.subMu.Lock()
	defer w.subMu.Unlock()
	w.closeRingsLocked()
	w.flagsMem.close()
	w.flagsMem = nil
	return nil
}
