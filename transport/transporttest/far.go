package transporttest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/rpc"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/leaktest"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// The suite between two hosts. It runs on the first host, with end A. End B, its memory and its
// grants are on the other host, run by ServeFar. Here a shadow stands for them, whose methods are
// calls over a connection. Only the calls differ: the other host has an ordinary End, Memory and
// Dest with the same checks, and the test here that caused a finding reports it.

// far is the other host.
type far struct {
	c    *rpc.Client
	name string // of its backend

	mu   sync.Mutex
	last uint64 // id of a memory or a bind
	// *transport.Grant or *transport.Origin of this host: the bind on the other host
	binds map[any]uint64
}

// otherHost plays end B of the running suite. Suites do not run in parallel.
var otherHost atomic.Pointer[far]

// ConformanceBetween runs the contract suite with end B on the host at the other end of c, which
// runs ServeFar. It closes c.
func ConformanceBetween(t *testing.T, f Factory, c net.Conn) {
	x := &far{c: rpc.NewClient(c)}
	otherHost.Store(x)
	defer func() {
		otherHost.Store(nil)
		if err := x.c.Close(); err != nil {
			t.Error(err)
		}
	}()
	Conformance(t, f)
}

// ServeFar plays end B, with backends of f, until the suite at the other end of c has ended.
func ServeFar(t testing.TB, f Factory, c net.Conn) {
	s := rpc.NewServer()
	p := &farPlayer{t: t, factory: f}
	if err := s.RegisterName("Far", p); err != nil {
		t.Fatal(err)
	}
	s.ServeConn(c)
	if p.suites == 0 {
		t.Error("the suite never asked for an end")
	}
}

// farOp is the operation of a FarCall.
type farOp uint8

const (
	opOpen farOp = iota + 1
	opClose
	opIntroduce
	opRefusedFor
	opDial
	opUp
	opDown
	opAnyUp
	opCloseLane
	opMove
	opMemory
	opWrite
	opFill
	opFilled
	opHolds
	opGapsIntact
	opGrant
	opOrigin
	opExpect
	opRefuse
	opCount
	opEnter
	opLeave
	opFence
	opCloseOrigin
	opForget
)

// FarCall is a call to the other host, and FarAnswer its answer. They are exported for net/rpc
// only.
type FarCall struct {
	Op            farOp
	ID            uint64 // of a memory, a bind or a lane
	On            uint64 // the memory of a new bind, or the bind that a lane moves
	Peer          transport.Peer
	Local, Remote transport.Rail
	Reason        transfer.Reason
	Shape         Shape
	Slot          transfer.Slot
	Gen           transfer.Gen
	Token         []byte
	Range         transfer.Range
	Attempt       uint32
	Within        time.Duration
	Seed          uint64
	Byte          byte
	N             int
	OK            bool
	What          string
}

// FarAnswer answers a FarCall.
type FarAnswer struct {
	N    int
	OK   bool
	Boot transfer.Boot
	Name string
	Caps transport.Caps

	Rails []transport.Rail
	Token []byte
	Lane  farLane

	Outcome transfer.Outcome
	Reason  transfer.Reason
	Took    time.Duration

	Err   string // of the call
	Kind  farErr
	Wrong []string // findings of its checks since the last call
	Fatal bool     // the last of them ends the test
}

// farErr is the kind of an error of the other host.
type farErr uint8

const (
	errPlain farErr = iota
	errClosed
	errDeadline
)

func (a *FarAnswer) fail(err error) {
	if err == nil {
		return
	}
	a.Err = err.Error()
	switch {
	case errors.Is(err, net.ErrClosed):
		a.Kind = errClosed
	case errors.Is(err, context.DeadlineExceeded):
		a.Kind = errDeadline
	}
}

func (a FarAnswer) err() error {
	switch {
	case a.Err == "":
		return nil
	case a.Kind == errClosed:
		return fmt.Errorf("%s (there): %w", a.Err, net.ErrClosed)
	case a.Kind == errDeadline:
		return fmt.Errorf("%s (there): %w", a.Err, context.DeadlineExceeded)
	}
	return errors.New(a.Err)
}

func (a FarAnswer) lane(f *far) (transport.Lane, error) {
	l := a.Lane
	l.far = f
	return &l, a.err()
}

// try calls the other host, and reports its findings.
func (f *far) try(tb testing.TB, c FarCall) (a FarAnswer, err error) {
	tb.Helper()
	call := f.c.Go("Far.Do", c, &a, make(chan *rpc.Call, 1))
	select {
	case <-call.Done:
		err = call.Error
	case <-time.After(2 * patience): // patience bounds every call on the other host
		err = fmt.Errorf("no answer within %s", 2*patience)
	}
	for _, w := range a.Wrong {
		tb.Errorf("on the other host: %s", w)
	}
	if err == nil && a.Fatal {
		err = errors.New("the other host cannot go on")
	}
	return a, err
}

func (f *far) do(tb testing.TB, c FarCall) FarAnswer {
	tb.Helper()
	a, err := f.try(tb, c)
	if err != nil {
		tb.Fatalf("call %d of the other host: %v", c.Op, err)
	}
	return a
}

// newEnd opens an end on the other host, until the end of the test.
func (f *far) newEnd(tb testing.TB) *End {
	tb.Helper()
	a := f.do(tb, FarCall{Op: opOpen})
	f.mu.Lock()
	f.name, f.binds = a.Name, map[any]uint64{}
	f.mu.Unlock()
	e := bareEnd(tb)
	e.far, e.Boot, e.Rails = f, a.Boot, a.Rails
	tb.Cleanup(func() { f.do(tb, FarCall{Op: opClose}) })
	return e
}

func (f *far) newID() uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.last++
	return f.last
}

// farMemory is a Memory on the other host.
type farMemory struct {
	*far
	tb testing.TB
	id uint64
}

func (m *farMemory) do(c FarCall) FarAnswer {
	m.tb.Helper()
	c.ID = m.id
	return m.far.do(m.tb, c)
}

func (f *far) newMemory(tb testing.TB, s Shape) *Memory {
	tb.Helper()
	m := &farMemory{far: f, tb: tb, id: f.newID()}
	m.do(FarCall{Op: opMemory, Shape: s})
	return &Memory{far: m, length: s.lengths()}
}

// farBind is half of a Bind there.
type farBind farMemory

func (b *farBind) do(c FarCall) FarAnswer {
	b.tb.Helper()
	return (*farMemory)(b).do(c)
}

func (b *farBind) within(ctx context.Context, op farOp) error {
	until, _ := ctx.Deadline()
	return b.do(FarCall{Op: op, Within: time.Until(until)}).err()
}

func (f *far) newBind(tb testing.TB, half any) *farBind {
	b := &farBind{far: f, tb: tb, id: f.newID()}
	f.mu.Lock()
	f.binds[half] = b.id
	f.mu.Unlock()
	return b
}

func (f *far) newGrant(tb testing.TB, b *Bind) []byte {
	tb.Helper()
	x := f.newBind(tb, b.Grant)
	b.Dest.far = x
	return x.do(FarCall{Op: opGrant, On: b.Dest.Memory.far.id,
		Peer: transport.Peer{Boot: b.Grant.Peer}, Slot: b.Grant.Slot, Gen: b.Grant.Gen}).Token
}

func (f *far) newOrigin(tb testing.TB, b *Bind) {
	tb.Helper()
	o := b.Origin
	f.newBind(tb, o).do(FarCall{Op: opOrigin, On: b.Source.Memory.far.id,
		Peer: transport.Peer{Boot: o.Peer}, Slot: o.Slot, Gen: o.Gen, Token: o.Token})
}

func (f *far) bindOf(tb testing.TB, half any) *farBind {
	f.mu.Lock()
	defer f.mu.Unlock()
	return &farBind{far: f, tb: tb, id: f.binds[half]}
}

func (f *far) forget(tb testing.TB, half any) { f.bindOf(tb, half).do(FarCall{Op: opForget}) }

// move waits for the end of a slice whose source is on the other host.
func (f *far) move(tb testing.TB, l transport.Lane, o *transport.Origin, r transfer.Range,
	attempt uint32) transport.Result {
	a, err := f.try(tb, FarCall{Op: opMove, ID: l.ID(), On: f.bindOf(tb, o).id, Range: r,
		Attempt: attempt})
	if err == nil {
		err = a.err()
	}
	return transport.Result{Slice: transport.Slice{Origin: o, Range: r, Attempt: attempt},
		Outcome: a.Outcome, Reason: a.Reason, Took: a.Took, Err: err}
}

// farLane is the other host's end of a lane.
type farLane struct {
	far *far

	Ident       uint64
	To          transfer.Boot
	Of          string
	Here, There string
	Window      int
}

func (l *farLane) ID() uint64          { return l.Ident }
func (l *farLane) Peer() transfer.Boot { return l.To }
func (l *farLane) Backend() string     { return l.Of }
func (l *farLane) Local() string       { return l.Here }
func (l *farLane) Remote() string      { return l.There }
func (l *farLane) MaxInFlight() int    { return l.Window }

// Move implements transport.Lane. The suite uses End.Move on the other host instead.
func (l *farLane) Move([]transport.Slice) error {
	return fmt.Errorf("transporttest: lane %d is of another host: %w", l.Ident, errors.ErrUnsupported)
}

// Close implements transport.Lane.
func (l *farLane) Close() error {
	var a FarAnswer
	if err := l.far.c.Call("Far.Do", FarCall{Op: opCloseLane, ID: l.Ident}, &a); err != nil {
		return err
	}
	return a.err()
}

// farPlayer plays end B for the suite of another host.
type farPlayer struct {
	t       testing.TB
	factory Factory
	suites  int // ends that were requested; one at a time

	mu sync.Mutex
	// guarded by mu
	tb     *farTB
	end    *End
	memory map[uint64]*Memory
	binds  map[uint64]*Bind // of which this host has a half
	lanes  map[uint64]transport.Lane
}

// Do answers one call. Calls come concurrently.
func (p *farPlayer) Do(c FarCall, a *FarAnswer) (err error) {
	if c.Op == opOpen {
		p.open()
	}
	p.mu.Lock()
	tb := p.tb
	p.mu.Unlock()
	if tb == nil {
		return fmt.Errorf("call %d without an end", c.Op)
	}
	defer func() {
		if r := recover(); r != nil && r != any(errFatal) {
			panic(r)
		} else if r != nil {
			a.Fatal = true
		}
		a.Wrong = tb.take()
		for _, w := range a.Wrong {
			p.t.Error(w)
		}
	}()
	if c.Op == opOpen {
		leaktest.Check(tb)
		e := newEnd(tb, p.factory)
		p.mu.Lock()
		p.end = e
		p.mu.Unlock()
		a.Boot, a.Rails, a.Name, a.Caps = e.Boot, e.Rails, e.Backend.Name(), e.Backend.Caps()
		return nil
	}
	p.answer(tb, c, a)
	return nil
}

func (p *farPlayer) open() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.suites++
	p.tb = &farTB{TB: p.t}
	p.memory, p.binds, p.lanes = map[uint64]*Memory{}, map[uint64]*Bind{}, map[uint64]transport.Lane{}
}

// look finds the object of a call.
func look[T any](p *farPlayer, in map[uint64]T, id uint64) T {
	p.mu.Lock()
	defer p.mu.Unlock()
	x, ok := in[id]
	if !ok {
		p.tb.Fatalf("no %T %d", x, id)
	}
	return x
}

func keep[T any](p *farPlayer, in map[uint64]T, id uint64, x T) {
	p.mu.Lock()
	defer p.mu.Unlock()
	in[id] = x
}

func (p *farPlayer) answer(tb *farTB, c FarCall, a *FarAnswer) {
	p.mu.Lock()
	e := p.end
	p.mu.Unlock()
	lane := func(l transport.Lane) {
		keep(p, p.lanes, l.ID(), l)
		a.OK = true
		a.Lane = farLane{Ident: l.ID(), To: l.Peer(), Of: l.Backend(), Here: l.Local(), There: l.Remote(),
			Window: l.MaxInFlight()}
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	if c.Within != 0 {
		cancel()
		ctx, cancel = context.WithTimeout(context.Background(), c.Within)
	}
	defer cancel()
	switch c.Op {
	case opClose:
		tb.clean()
	case opIntroduce:
		e.Introduce(c.Peer.Boot, c.Peer.Key)
	case opRefusedFor:
		a.N = e.RefusedFor(c.Reason)
	case opDial:
		l, err := e.dial(ctx, c.Peer, c.Local, c.Remote)
		if err == nil {
			lane(l)
		}
		a.fail(err)
	case opUp:
		lane(e.up(c.What))
	case opDown:
		lane(e.down(c.What))
	case opAnyUp:
		if l := e.anyUp(); l != nil {
			lane(l)
		}
	case opCloseLane:
		a.fail(look(p, p.lanes, c.ID).Close())
	case opMove:
		r := e.MoveWait(look(p, p.lanes, c.ID), look(p, p.binds, c.On).Origin, c.Range, c.Attempt)
		a.Outcome, a.Reason, a.Took = r.Outcome, r.Reason, r.Took
		a.fail(r.Err)
	case opMemory:
		keep(p, p.memory, c.ID, NewMemory(tb, c.Shape))
	case opWrite:
		look(p, p.memory, c.ID).Write(c.Seed)
	case opFill:
		look(p, p.memory, c.ID).Fill(c.Byte)
	case opFilled:
		a.N, a.OK = look(p, p.memory, c.ID).Filled(c.Byte)
	case opHolds:
		a.N, a.OK = look(p, p.memory, c.ID).Holds(c.Seed, c.N)
	case opGapsIntact:
		look(p, p.memory, c.ID).GapsIntact(tb)
	case opGrant:
		b := &Bind{to: e}
		a.Token = b.bindGrant(tb, look(p, p.memory, c.On), c.Peer.Boot, c.Slot, c.Gen)
		keep(p, p.binds, c.ID, b)
	case opOrigin:
		b := &Bind{from: e}
		b.bindOrigin(look(p, p.memory, c.On), c.Peer.Boot, c.Slot, c.Gen, c.Token)
		keep(p, p.binds, c.ID, b)
	case opExpect:
		look(p, p.binds, c.ID).Dest.Expect(c.Seed)
	case opRefuse:
		look(p, p.binds, c.ID).Dest.Refuse(c.OK)
	case opCount:
		a.N = look(p, p.binds, c.ID).Dest.Count()
	case opEnter:
		a.OK = look(p, p.binds, c.ID).enter()
	case opLeave:
		look(p, p.binds, c.ID).leave()
	case opFence:
		a.fail(look(p, p.binds, c.ID).fence(ctx))
	case opCloseOrigin:
		a.fail(look(p, p.binds, c.ID).closeOrigin(ctx))
	case opForget:
		if b := look(p, p.binds, c.ID); b.Grant != nil {
			e.forgetGrant(tb, b.Grant)
		} else {
			e.forgetOrigin(tb, b.Origin)
		}
	default:
		tb.Fatalf("call %d is unknown here: both hosts have to run the same build", c.Op)
	}
}

// farTB is the testing.TB of one test of the other host, to which its findings go.
type farTB struct {
	testing.TB

	mu sync.Mutex
	// guarded by mu
	wrong    []string
	cleanups []func()
}

// errFatal ends a call, as a fatal error ends a test.
var errFatal = errors.New("fatal")

func (t *farTB) add(s string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.wrong = append(t.wrong, s)
}

func (t *farTB) take() (all []string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	all, t.wrong = t.wrong, nil
	return all
}

func (t *farTB) Error(args ...any)            { t.add(fmt.Sprint(args...)) }
func (t *farTB) Errorf(f string, args ...any) { t.add(fmt.Sprintf(f, args...)) }
func (t *farTB) Fatal(args ...any)            { t.add(fmt.Sprint(args...)); panic(errFatal) }
func (t *farTB) Fatalf(f string, args ...any) { t.add(fmt.Sprintf(f, args...)); panic(errFatal) }
func (t *farTB) Skip(args ...any)             { t.Fatal(args...) }
func (t *farTB) Skipf(f string, args ...any)  { t.Fatalf(f, args...) }

func (t *farTB) Cleanup(f func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.cleanups = append(t.cleanups, f)
}

func (t *farTB) clean() {
	for {
		t.mu.Lock()
		n := len(t.cleanups)
		if n == 0 {
			t.mu.Unlock()
			return
		}
		f := t.cleanups[n-1]
		t.cleanups = t.cleanups[:n-1]
		t.mu.Unlock()
		f()
	}
}
