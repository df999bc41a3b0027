package gdr

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/sys/verbs"
	"github.com/kvspray/kvspray/internal/sys/verbs/fake"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
	"github.com/kvspray/kvspray/transport/transporttest"
)

// oddPair is a pair whose devices are odd: here is the sender's, there the receiver's.
func oddPair(t *testing.T, change func(*Config)) (f *fake.Fabric, p *transporttest.Pair, here,
	there *oddDevice) {
	t.Helper()
	f, _ = rig(t)
	here, there = odd(f.Device("here")), odd(f.Device("there"))
	next := []*oddDevice{here, there}
	// a backend that is closed does not wait for a device that a test left behind
	t.Cleanup(func() {
		for _, d := range []*oddDevice{here, there} {
			d.set(func(d *oddDevice) {
				d.noFlush, d.keepsQPs, d.keepsKeys, d.slow = false, false, false, nil
			})
		}
	})
	p = transporttest.NewPair(t, func(testing.TB) transport.Backend {
		d := next[0]
		next = next[1:]
		rails := []Rail{{Name: d.Name(), Open: func() (verbs.Device, error) { return d, nil },
			Listen: "127.0.0.1:0", NUMA: -1}}
		c := Config{Rails: func() ([]Rail, error) { return rails, nil }, Patience: time.Millisecond,
			Silence: time.Minute, Drain: 50 * time.Millisecond}
		if change != nil {
			change(&c)
		}
		return New(c)
	})
	return f, p, here, there
}

// underWay opens a lane and moves a slice whose messages stay on the wire: the receiver has armed
// it, nothing has arrived.
func underWay(t *testing.T, f *fake.Fabric, p *transporttest.Pair) (here, there *lane,
	b *transporttest.Bind, dst *transporttest.Memory, res <-chan transport.Result) {
	t.Helper()
	x, y := p.Dial()
	here, there = x.(*lane), y.(*lane)
	src, dst := transporttest.NewMemory(t, shape), transporttest.NewMemory(t, shape)
	src.Write(seedOld)
	b = transporttest.NewBind(t, p.A, p.B, src, dst, 1, 1)
	b.Dest.Seed.Store(seedOld)
	f.Hold(here.q.Num())
	res = p.A.Move(here, b.Origin, src.All(), 1)
	until(t, "messages are on the wire", func() bool { return f.Held(here.q.Num()) > 0 })
	return here, there, b, dst, res
}

// within runs what must not wait for a device.
func within(t *testing.T, what string, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() { defer close(done); f() }()
	select {
	case <-done:
	case <-time.After(20 * time.Second):
		t.Fatalf("%s waits for the device", what)
	}
}

// TestCloseWithStuckLane: a queue pair that is neither flushed nor destroyed keeps its memory, and
// no waiter.
func TestCloseWithStuckLane(t *testing.T) {
	f, p, here, there := oddPair(t, nil)
	_, _, b, _, res := underWay(t, f, p)
	here.set(func(d *oddDevice) { d.noFlush, d.keepsQPs = true, true })
	there.set(func(d *oddDevice) { d.noFlush, d.keepsQPs = true, true })
	within(t, "Close", func() {
		if err := p.A.Backend.Close(); err == nil {
			t.Error("a queue pair that is still there is no error")
		}
	})
	if r := <-res; r.Outcome != transfer.InDoubt {
		t.Errorf("%s %s", r.Outcome, r.Reason)
	}
	if !here.is(func(d *oddDevice) bool { return d.registered > 0 }) {
		t.Error("memory was given back under a queue pair that may still read it")
	}
	here.set(func(d *oddDevice) { d.noFlush, d.keepsQPs = false, false })
	there.set(func(d *oddDevice) { d.noFlush, d.keepsQPs = false, false })
	b.Fence(t)
}

// TestStuckLaneIsTriedAgain: objects that a device did not destroy at first are destroyed when it
// obeys.
func TestStuckLaneIsTriedAgain(t *testing.T) {
	f, p, here, there := oddPair(t, nil)
	l, _, b, _, res := underWay(t, f, p)
	here.set(func(d *oddDevice) { d.noFlush, d.keepsQPs = true, true })
	_ = l.Close()
	if r := <-res; r.Outcome != transfer.InDoubt {
		t.Errorf("%s %s", r.Outcome, r.Reason)
	}
	b.Origin.Revoke()
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if err := p.A.Backend.CloseOrigin(ctx, b.Origin); err == nil {
		t.Error("the origin counts as closed, and a queue pair still reads it")
	}
	here.set(func(d *oddDevice) { d.noFlush, d.keepsQPs = false, false })
	until(t, "the queue pair is given back",
		func() bool { return len(p.A.Backend.(*Backend).allLanes()) == 0 })
	b.End(t)
	_ = there
}

// TestLaterAttemptPastStuckLane: chunks that a queue pair holds which does not obey are taken from
// it by ending its keys.
func TestLaterAttemptPastStuckLane(t *testing.T) {
	f, p, _, there := oddPair(t, nil)
	first, _, b, dst, res := underWay(t, f, p)
	there.set(func(d *oddDevice) { d.noFlush, d.keepsQPs = true, true })
	next, _ := p.Dial()
	if r := p.A.MoveWait(next, b.Origin, transfer.Range{Count: dst.Chunks()}, 2); r.Outcome !=
		transfer.Landed {
		t.Fatalf("%s %s: %v", r.Outcome, r.Reason, r.Err)
	}
	b.Fence(t)
	dst.Write(seedNew)
	f.Release(first.q.Num())
	until(t, "the held messages arrive", func() bool { return f.Held(first.q.Num()) == 0 })
	<-res
	for c := range dst.Chunks() {
		if at, ok := dst.Holds(seedNew, int(c)); !ok {
			t.Fatalf("chunk %d: byte %d was written after the fence", c, at)
		}
	}
	there.set(func(d *oddDevice) { d.noFlush, d.keepsQPs = false, false })
	b.End(t)
}

// TestLaterAttemptWaits: an attempt that holds chunks and is about to be armed is waited for like
// one that is. Else it may be armed in the very moment in which it is stopped, and a healthy lane
// is lost.
func TestLaterAttemptWaits(t *testing.T) {
	_, p, _, there := oddPair(t, func(c *Config) { c.Patience = time.Hour })
	x, _ := p.Dial()
	y, other := p.Dial()
	gate := make(chan struct{})
	free := sync.OnceFunc(func() { close(gate) })
	defer free()
	// the first attempt waits for the registration of what it may write
	there.set(func(d *oddDevice) { d.slow = gate })
	src, dst := transporttest.NewMemory(t, shape), transporttest.NewMemory(t, shape)
	src.Write(seedOld)
	b := transporttest.NewBind(t, p.A, p.B, src, dst, 1, 1)
	b.Dest.Seed.Store(seedOld)
	first := p.A.Move(x, b.Origin, src.All(), 1)
	until(t, "the first attempt holds the chunks", func() bool {
		var probe transport.Claim
		why, _, _ := b.Grant.ClaimDevice(&probe, src.All(), 0, harmless{}, false)
		if why == transfer.ReasonNone {
			probe.Release()
		}
		return why == transfer.ReasonSuperseded
	})
	second := p.A.Move(y, b.Origin, src.All(), 2)
	until(t, "the later attempt has asked", func() bool {
		l := other.(*lane)
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.dst.in[0].state == asked
	})
	free()
	for i, c := range []<-chan transport.Result{first, second} {
		if r := <-c; r.Outcome != transfer.Landed {
			t.Errorf("attempt %d: %s %s: %v", i+1, r.Outcome, r.Reason, r.Err)
		}
	}
	for _, l := range []transport.Lane{x, y} {
		if err := l.(*lane).failure(); err != nil {
			t.Errorf("a healthy lane was lost: %v", err)
		}
	}
	b.End(t)
}

// harmless is a device that writes nothing.
type harmless struct{}

func (harmless) Stop() bool { return true }

// TestDeviceThatDoesNotAnswer: a command that a device sits on holds up no caller that only wants
// the state, or to use another lane.
func TestDeviceThatDoesNotAnswer(t *testing.T) {
	f, p, here, there := oddPair(t, nil)
	l, _, b, _, res := underWay(t, f, p)
	gate := make(chan struct{})
	free := sync.OnceFunc(func() { close(gate) })
	defer free()
	here.set(func(d *oddDevice) { d.slow = gate })
	there.set(func(d *oddDevice) { d.slow = gate })
	backend := p.A.Backend.(*Backend)
	within(t, "Close of a lane", func() { _ = l.Close() })
	within(t, "Move", func() {
		if err := l.Move(nil); !errors.Is(err, net.ErrClosed) {
			t.Errorf("move on a lane that was closed: %v", err)
		}
	})
	dialed := make(chan struct{})
	go func() { // asks whether the port is active, and waits for that
		defer close(dialed)
		peer, _ := p.A.PeerKey(p.B.Boot)
		_, _ = backend.Dial(t.Context(), peer, p.A.Rails[0], p.B.Rails[0])
	}()
	until(t, "the lane's end and the dialler wait for the device",
		func() bool { return here.is(func(d *oddDevice) bool { return d.waiting >= 2 }) })
	src := transporttest.NewMemory(t, shape)
	grant := &transport.Grant{Peer: p.B.Boot, Slot: 7, Gen: 1,
		Memory: transporttest.NewBind(t, p.B, p.A, src, transporttest.NewMemory(t, shape), 7, 1).Dest}
	for range 100 { // whenever the dialler takes its locks
		within(t, "Grant", func() {
			if _, err := backend.Grant(grant); err != nil {
				t.Error(err)
			}
		})
	}
	within(t, "Fence with a context that is over", func() {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		grant.Revoke()
		if err := backend.Fence(ctx, grant); err != nil {
			t.Error(err)
		}
	})
	free()
	<-dialed
	<-res
	b.End(t)
}

// TestNICThatDoesNotFlush: a NIC that does not flush is made to forget the queue pair, and that
// counts as stopped.
func TestNICThatDoesNotFlush(t *testing.T) {
	// Between the end of its patience and the verdict there is as much time again, which a busy
	// machine needs.
	f, p, here, _ := oddPair(t, func(c *Config) { c.Drain = 3 * time.Second })
	l, _, b, _, res := underWay(t, f, p)
	here.set(func(d *oddDevice) { d.noFlush = true })
	b.Origin.Revoke()
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if err := p.A.Backend.CloseOrigin(ctx, b.Origin); err != nil {
		t.Error(err)
	}
	if r := <-res; r.Outcome != transfer.InDoubt {
		t.Errorf("%s %s", r.Outcome, r.Reason)
	}
	_ = l
	b.End(t)
}

// TestKeysEndUnderOthers: keys are invalidated for one grant while slices of other lanes resolve
// and use the same ones.
func TestKeysEndUnderOthers(t *testing.T) {
	_, p, _, there := oddPair(t, nil)
	src, dst := transporttest.NewMemory(t, shape), transporttest.NewMemory(t, shape)
	x, y := p.Dial()
	_ = x
	l := y.(*lane)
	_ = there
	blocks, err := transporttest.NewBind(t, p.A, p.B, src, dst, 1, 1).Dest.Resolve(nil, dst.All())
	if err != nil {
		t.Fatal(err)
	}
	k, err := l.dev.keys.get(keyName{dst.Region, p.A.Boot, true}, true)
	if err != nil {
		t.Fatal(err)
	}
	if err := k.invalidate(); err != nil {
		t.Fatal(err)
	}
	// A slice that holds the key goes on with it: its writes will be refused by the device.
	runs, held, err := l.runs(nil, []*key{k}, blocks, access{remote: true, wait: true})
	if err != nil || len(runs) == 0 || len(held) != 1 {
		t.Errorf("%d runs under %d keys: %v", len(runs), len(held), err)
	}
	k.put()
}

// TestFenceWhileSlicesEnd: a fence whose context is over invalidates keys while the lander gives
// them back.
func TestFenceWhileSlicesEnd(t *testing.T) {
	_, p, _, _ := oddPair(t, nil)
	src, dst := transporttest.NewMemory(t, shape), transporttest.NewMemory(t, shape)
	src.Write(seedOld)
	for gen := range transfer.Gen(200) {
		a := open(t, p, 0)
		b := transporttest.NewBind(t, p.A, p.B, src, dst, 1, gen+1)
		var all []<-chan transport.Result
		for c := range uint32(8) {
			all = append(all, p.A.Move(a, b.Origin, transfer.Range{First: c, Count: 1}, 1))
		}
		b.Grant.Revoke()
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := p.B.Backend.Fence(ctx, b.Grant); err != nil && !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		for _, c := range all {
			<-c
		}
		_ = a.Close()
		b.End(t)
	}
}

// TestKeysThatStay: a registration that the device did not end is tried again, and counts as
// long.
func TestKeysThatStay(t *testing.T) {
	f := fake.New()
	d := odd(f.Device("x"))
	s := newDomains(d)
	k := newKeys(s, slog.New(slog.DiscardHandler))
	m := transporttest.NewMemory(t, shape)
	e, err := k.get(keyName{m.Region, transfer.Boot{1}, true}, true)
	if err != nil {
		t.Fatal(err)
	}
	e.put()
	d.set(func(d *oddDevice) { d.keepsKeys = true })
	later := time.Now().Add(2 * idleKeys)
	if err := k.sweep(later); !errors.Is(err, errOdd) {
		t.Errorf("sweep: %v", err)
	}
	d.set(func(d *oddDevice) { d.keepsKeys = false })
	if d.is(func(d *oddDevice) bool { return d.domains != 1 }) {
		t.Error("its domain was given back, or forgotten")
	}
	if err := k.sweep(later); err != nil {
		t.Error(err)
	}
	if d.is(func(d *oddDevice) bool { return d.registered != 0 || d.domains != 0 }) {
		t.Error("the registration, or its domain, was forgotten, and is still there")
	}
	if err := k.close(false); err != nil {
		t.Error(err)
	}
}

// TestFloodOfAsks: a peer that asks and never reads the answers costs bounded memory, and its lane.
func TestFloodOfAsks(t *testing.T) {
	_, factory := rig(t)
	p := transporttest.NewPair(t, factory)
	a, b := p.Dial()
	here, there := a.(*lane), b.(*lane)
	// It goes past its own lane, which reads.
	var ask []byte
	for range 4096 {
		ask = appendHead(ask, &head{kind: kindAsk, id: 3, seq: 1, slot: 99, gen: 1,
			r: transfer.Range{Count: 1}, attempt: 1})
	}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				here.frames.mu.Lock()
				if len(here.frames.buf) < 1<<20 {
					here.frames.buf = append(here.frames.buf, ask...)
				}
				here.frames.mu.Unlock()
				select {
				case here.frames.wake <- struct{}{}:
				default:
				}
			}
		}
	})
	here.mu.Lock() // its reader gets as far as the first answer
	until(t, "the flooded end gives the lane up, or grows", func() bool {
		there.frames.mu.Lock()
		grown := cap(there.frames.buf)
		there.frames.mu.Unlock()
		if grown > 64<<20 {
			t.Errorf("%d MiB of answers that nothing reads", grown>>20)
			return true
		}
		return there.failure() != nil
	})
	here.mu.Unlock()
	close(stop)
	wg.Wait()
	if err := there.failure(); err == nil || !strings.Contains(err.Error(), "does not read") {
		t.Errorf("the lane ended with %v", err)
	}
}

// TestPartialPost: a device takes a part of a batch. The lane ends, and waits for what was taken
// and for nothing else.
func TestPartialPost(t *testing.T) {
	f, p, here, _ := oddPair(t, nil)
	a, _ := p.Dial()
	src, dst := transporttest.NewMemory(t, shape), transporttest.NewMemory(t, shape)
	b := transporttest.NewBind(t, p.A, p.B, src, dst, 1, 1)
	f.Hold(a.(*lane).q.Num()) // what was taken is flushed
	here.set(func(d *oddDevice) { d.takes = 3 })
	r := p.A.MoveWait(a, b.Origin, src.All(), 1)
	if r.Outcome != transfer.InDoubt {
		t.Errorf("a part of it was posted, and it ended %s %s: %v", r.Outcome, r.Reason, r.Err)
	}
	l := a.(*lane)
	l.mu.Lock()
	posted, done, recvs, recvsDone := l.src.posted, l.src.done, l.dst.recvs, l.dst.recvsDone
	l.mu.Unlock()
	if posted != 1+3 || done != posted || recvs != recvsDone {
		t.Errorf("%d posted, %d ended, %d of %d receives", posted, done, recvsDone, recvs)
	}
	b.End(t)
}

// TestBadCompletionQueue: one with nothing but errors is given up, not asked again and again.
func TestBadCompletionQueue(t *testing.T) {
	f, p, here, _ := oddPair(t, nil)
	l, _, b, _, res := underWay(t, f, p)
	here.set(func(d *oddDevice) { d.badCQ = true })
	l.wake()
	if r := <-res; r.Outcome != transfer.InDoubt {
		t.Errorf("%s %s", r.Outcome, r.Reason)
	}
	if n := 0; !here.is(func(d *oddDevice) bool { n = d.polls; return n < 100 }) {
		t.Errorf("asked %d times", n)
	}
	b.End(t)
}

// TestEventsEnd: a device whose events end by themselves is gone, whatever its events before.
func TestEventsEnd(t *testing.T) {
	f, p, _, _ := oddPair(t, nil)
	a, _ := p.Dial()
	if err := f.Device("here").Close(); err != nil {
		t.Fatal(err)
	}
	until(t, "the lane is down", func() bool { return a.(*lane).failure() != nil })
}

// foreignKey: a peer that has learned the key of another writes nothing with it: its queue pairs
// are of another domain. With its own it does.
func foreignKey(t *testing.T, factory transporttest.Factory) {
	p := transporttest.NewPair(t, factory)
	src, dst := transporttest.NewMemory(t, shape), transporttest.NewMemory(t, shape)
	src.Write(seedOld)
	memory, _ := dst.Region.Bytes()
	before := bytes.Clone(memory)
	for _, c := range []struct {
		whose  transfer.Boot
		writes bool
	}{{transfer.Boot{77}, false}, {p.A.Boot, true}} {
		x, y := p.Dial()
		here, there := x.(*lane), y.(*lane)
		mine, err := here.dev.keys.get(keyName{src.Region, here.peer, false}, true)
		if err != nil {
			t.Fatal(err)
		}
		theirs, err := there.dev.keys.get(keyName{dst.Region, c.whose, true}, true)
		if err != nil {
			t.Fatal(err)
		}
		here.mu.Lock()
		here.src.posted++
		id := here.src.posted
		_, err = here.q.PostSend([]verbs.Work{{ID: id, Op: verbs.Write, LocalAddr: mine.parts[0].Addr(),
			LocalKey: mine.parts[0].LocalKey(), Len: 64 << 10,
			RemoteAddr: theirs.parts[0].Addr(), RemoteKey: theirs.parts[0].RemoteKey(), Signaled: true}})
		here.mu.Unlock()
		if err != nil {
			t.Fatal(err)
		}
		until(t, "the write ends", func() bool {
			here.mu.Lock()
			defer here.mu.Unlock()
			return here.src.done >= id
		})
		if !c.writes {
			// One packet takes both ends down. The end that learns of it from its socket receives it from
			// the other, whose NIC had the reason.
			until(t, "both ends are down", func() bool {
				return here.failure() != nil &&
					there.failure() != nil
			})
			if h, o := here.failure(), there.failure(); !strings.Contains(h.Error(), "remote access") &&
				!strings.Contains(o.Error(), "flushed") {
				t.Errorf("%v, and at the other end %v", h, o)
			}
		}
		// That the write is complete to the sender does not prove that its bytes are there; the end
		// of the key does.
		if err := theirs.invalidate(); err != nil {
			t.Fatal(err)
		}
		if same := bytes.Equal(memory, before); same == c.writes {
			t.Errorf("under a key of boot %s: memory unchanged: %v", c.whose, same)
		}
		mine.put()
		theirs.put()
	}
}

func TestForeignKey(t *testing.T) {
	_, factory := rig(t)
	foreignKey(t, factory)
}

// TestDeviceForeignKey is the same on real queue pairs, in the guest.
func TestDeviceForeignKey(t *testing.T) { foreignKey(t, ends(t)) }
