package connectortest

import (
	"context"
	"crypto/rand"
	"fmt"
	"sync"

	"github.com/kvspray/kvspray/connector/internal/session"
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
	flagsMem *mem.Region
	flags    *board.Flags

	subMu sync.Mutex
	rings *session.Rings // guarded by subMu, with Poll and Wait
	lease uint64         // the last id given; guarded by subMu
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
	w.flagsMem, w.flags, err = session.NewFlags(w.boot, cfg.Layers)
	return w, err
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
	c, err := session.Dial(ctx, w.cfg.Socket)
	if err != nil {
		return nil, err
	}
	reg, err := w.register(ctx, c)
	if err != nil {
		c.Close()
		return nil, err
	}
	return reg, nil
}

func (w *Worker) register(ctx context.Context, c *session.Conn) (*msg.Registered, error) {
	welcome, err := c.Hello(ctx, msg.Hello{Min: w.cfg.Min, Max: w.cfg.Max, Role: msg.RoleWorker,
		Boot: w.boot, Release: w.cfg.Release, Engine: w.cfg.Engine, Ranks: w.cfg.Ranks})
	if err != nil {
		return nil, err
	}
	rings, err := session.NewRings(w.cfg.SubmissionBytes, w.cfg.CompletionBytes)
	if err != nil {
		return nil, err
	}
	w.subMu.Lock()
	w.closeRingsLocked()
	w.rings = rings
	w.subMu.Unlock()
	w.mu.Lock()
	w.welcome = welcome
	w.mu.Unlock()

	if w.cfg.Before != nil {
		if err := w.cfg.Before(func(first uint32, all []msg.Region, fds ...int) error {
			_, err := session.Ask[*msg.Done](ctx, c, func(id uint64) msg.Message {
				return &msg.AddRegions{ID: id, First: first, Regions: all}
			}, fds...)
			return err
		}); err != nil {
			return nil, err
		}
	}
	m, fds := rings.Register(w.flagsMem)
	if w.cfg.Layout != nil {
		if m.Layout, err = w.cfg.Layout.Marshal(); err != nil {
			return nil, err
		}
	}
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
	reg, err := session.Ask[*msg.Registered](ctx, c, func(id uint64) msg.Message {
		m.ID = id
		return m
	}, fds...)
	if err != nil {
		return nil, err
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
	w.rings.Close()
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
	return w.rings.Push(typ, lease, w.flags.SourceEpoch(), body)
}

// PushEpoch writes a record with any source epoch, for tests that lie about it.
func (w *Worker) PushEpoch(typ uint16, lease, epoch uint64, body []byte) error {
	w.subMu.Lock()
	defer w.subMu.Unlock()
	if w.rings == nil {
		return errDisconnected
	}
	return w.rings.Push(typ, lease, epoch, body)
}

// RawRings is the rings memory as mapped here, for tests that break it.
func (w *Worker) RawRings() []byte { return w.rings.Bytes() }

// WakeConsumer signals the SQ eventfd, whether the sidecar's consumer sleeps or not.
func (w *Worker) WakeConsumer() error {
	w.subMu.Lock()
	defer w.subMu.Unlock()
	if w.rings == nil {
		return errDisconnected
	}
	return w.rings.Wake()
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
	if w.rings == nil {
		return Completion{}, false, errDisconnected
	}
	rec, ok, err := w.rings.Poll()
	if err != nil || !ok {
		return Completion{}, false, err
	}
	c, err := completion(rec)
	return c, err == nil, err
}

func completion(rec board.Record) (c Completion, err error) {
	c = Completion{Lease: rec.Lease, Status: rec.Status, Seq: rec.Seq}
	switch rec.Type {
	case board.RecReceived:
		c.Received, err = msg.DecodeReceived(rec.Body)
	case board.RecSent:
		c.Sent, err = msg.DecodeSent(rec.Body)
	default:
		err = fmt.Errorf("record of type %d on the completion ring", rec.Type)
	}
	return c, err
}

// Wait takes the next completion. It waits on the CQ eventfd until there is one.
func (w *Worker) Wait(ctx context.Context) (Completion, error) {
	rec, err := w.rings.Wait(ctx)
	if err != nil {
		return Completion{}, err
	}
	return completion(rec)
}

// Close ends the session and frees the board. Regions stay.
func (w *Worker) Close() error {
	w.Disconnect()
	w.subMu.Lock()
	defer w.subMu.Unlock()
	w.closeRingsLocked()
	if w.flagsMem != nil {
		w.flagsMem.Release()
		w.flagsMem = nil
	}
	return nil
}
