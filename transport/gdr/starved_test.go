package gdr

import (
	"sync"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/sys/verbs/fake"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
	"github.com/kvspray/kvspray/transport/transporttest"
)

// A process that gets no processor for a while finds all of its lanes silent, and what their NICs
// have done meanwhile waiting. None of them may be given up for that.

// stale makes a lane look as if nothing had happened on it for long.
func stale(l *lane) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.activity.progress = time.Now().Add(-2 * time.Hour)
}

// under begins to move chunks over a lane of its own, whose messages stay on the wire once they are
// there.
func under(t *testing.T, f *fake.Fabric, p *transporttest.Pair, b *transporttest.Bind,
	r transfer.Range) (here, there *lane, res <-chan transport.Result) {
	t.Helper()
	x, y := p.Dial()
	here, there = x.(*lane), y.(*lane)
	f.Hold(here.q.Num())
	res = p.A.Move(here, b.Origin, r, 1)
	until(t, "messages are on the wire", func() bool { return f.Held(here.q.Num()) > 0 })
	return here, there, res
}

// asks makes a later attempt at everything, and returns once it waits for others.
func asks(t *testing.T, p *transporttest.Pair, b *transporttest.Bind,
	attempt uint32) <-chan transport.Result {
	t.Helper()
	x, y := p.Dial()
	res := p.A.Move(x, b.Origin, transfer.Range{Count: b.Source.Chunks()}, attempt)
	l := y.(*lane)
	until(t, "the later attempt has asked", func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.dst.in[0].state == asked
	})
	return res
}

// TestLaterAttemptLooksFirst: before a later attempt stops a lane that has not moved for long, what
// has come on it is looked at.
func TestLaterAttemptLooksFirst(t *testing.T) {
	f, p, _, there := oddPair(t, func(c *Config) { c.Patience = time.Hour })
	src, dst := transporttest.NewMemory(t, shape), transporttest.NewMemory(t, shape)
	src.Write(seedOld)
	b := transporttest.NewBind(t, p.A, p.B, src, dst, 1, 1)
	b.Dest.Seed.Store(seedOld)
	x, far, first := under(t, f, p, b, src.All())
	wake := make(chan struct{})
	awake := sync.OnceFunc(func() { close(wake) })
	defer awake()
	there.set(func(d *oddDevice) { d.asleep = wake })
	f.Release(x.q.Num())
	until(t, "the receiver is about to look",
		func() bool { return there.is(func(d *oddDevice) bool { return d.polls > 0 }) })
	stale(far)
	there.set(func(d *oddDevice) { d.asleep = nil }) // a sleeping end sleeps until it is woken
	later := asks(t, p, b, 2)
	until(t, "the lane is to be looked at", func() bool {
		far.mu.Lock()
		defer far.mu.Unlock()
		return far.looked != nil || far.err != nil
	})
	awake()
	for i, c := range []<-chan transport.Result{first, later} {
		if r := <-c; r.Outcome != transfer.Landed {
			t.Errorf("attempt %d: %s %s: %v", i+1, r.Outcome, r.Reason, r.Err)
		}
	}
	if err := far.failure(); err != nil {
		t.Errorf("a healthy lane was lost: %v", err)
	}
	b.End(t)
}

// TestLaterAttemptStopsNoOther: of two lanes in the way of a later attempt one does not move. It is
// stopped, once the other one is through.
func TestLaterAttemptStopsNoOther(t *testing.T) {
	f, p, _, _ := oddPair(t, func(c *Config) { c.Patience = time.Hour })
	src, dst := transporttest.NewMemory(t, shape), transporttest.NewMemory(t, shape)
	src.Write(seedOld)
	b := transporttest.NewBind(t, p.A, p.B, src, dst, 1, 1)
	b.Dest.Seed.Store(seedOld)
	_, deadEnd, dead := under(t, f, p, b, transfer.Range{Count: 4})
	x, farEnd, alive := under(t, f, p, b, transfer.Range{First: 4, Count: 4})
	stale(deadEnd)
	began := time.Now()
	later := asks(t, p, b, 2)
	// It has looked at the one, and has had the time to stop both.
	until(t, "a while has passed", func() bool {
		deadEnd.mu.Lock()
		defer deadEnd.mu.Unlock()
		return deadEnd.err != nil || time.Since(began) > 200*time.Millisecond
	})
	f.Release(x.q.Num())
	if r := <-dead; r.Outcome != transfer.InDoubt {
		t.Errorf("the lane that does not move: %s %s: %v", r.Outcome, r.Reason, r.Err)
	}
	for what, c := range map[string]<-chan transport.Result{"the lane that moves": alive,
		"the later attempt": later} {
		if r := <-c; r.Outcome != transfer.Landed {
			t.Errorf("%s: %s %s: %v", what, r.Outcome, r.Reason, r.Err)
		}
	}
	if err := farEnd.failure(); err != nil {
		t.Errorf("a healthy lane was lost: %v", err)
	}
	if deadEnd.failure() == nil {
		t.Error("the lane that does not move was not stopped")
	}
	b.End(t)
}

// TestSilenceIsDoubtedFirst: a lane is given up as silent at the second look in a row, and not
// where something came between them.
func TestSilenceIsDoubtedFirst(t *testing.T) {
	f, p, _, _ := oddPair(t, nil)
	l, _, b, _, res := underWay(t, f, p)
	later := func() time.Time { return time.Now().Add(time.Hour) } // a look that was due long ago
	l.checkProgress(later())
	if err := l.failure(); err != nil {
		t.Fatalf("given up at the first look: %v", err)
	}
	l.mu.Lock()
	l.activity.progress = time.Now() // a completion that had waited
	l.mu.Unlock()
	l.checkProgress(later())
	if err := l.failure(); err != nil {
		t.Fatalf("given up at the first look after something had come: %v", err)
	}
	l.checkProgress(later())
	if l.failure() == nil {
		t.Error("silent at two looks, and not given up")
	}
	if r := <-res; r.Outcome != transfer.InDoubt {
		t.Errorf("%s %s", r.Outcome, r.Reason)
	}
	f.Release(l.q.Num())
	b.End(t)
}

// TestSlowLaneIsWaitedFor: slices that take long teach how long the next one is waited for, and a
// later attempt does not stop a lane that is no slower than it was.
func TestSlowLaneIsWaitedFor(t *testing.T) {
	const slow = 20 * time.Millisecond
	f, p, _, _ := oddPair(t, func(c *Config) { c.Patience, c.Silence = time.Millisecond, time.Hour })
	src, dst := transporttest.NewMemory(t, shape), transporttest.NewMemory(t, shape)
	src.Write(seedOld)
	x, y := p.Dial()
	here, there := x.(*lane), y.(*lane)
	gen := transfer.Gen(0)
	slice := func() (b *transporttest.Bind, res <-chan transport.Result) {
		gen++
		b = transporttest.NewBind(t, p.A, p.B, src, dst, 1, gen)
		b.Dest.Seed.Store(seedOld)
		f.Hold(here.q.Num())
		res = p.A.Move(here, b.Origin, src.All(), 1)
		until(t, "messages are on the wire", func() bool { return f.Held(here.q.Num()) > 0 })
		began := time.Now()
		until(t, "a while has passed", func() bool { return time.Since(began) > slow })
		return b, res
	}
	landed := func(what string, res <-chan transport.Result) {
		t.Helper()
		if r := <-res; r.Outcome != transfer.Landed {
			t.Errorf("%s: %s %s: %v", what, r.Outcome, r.Reason, r.Err)
		}
	}
	for range 3 * paceWeight {
		b, res := slice()
		f.Release(here.q.Num())
		landed("a slow slice", res)
		b.End(t)
	}
	patience := func() time.Duration {
		there.mu.Lock()
		defer there.mu.Unlock()
		return there.activity.patience(&there.b.cfg)
	}
	if got, want := patience(), patiencePaces*slow*9/10; got < want {
		t.Errorf("slices come every %v or slower, and the next one is waited for %v, want %v at least",
			slow, got, want)
	}
	there.mu.Lock()
	there.activity.pace = time.Hour // however busy this machine is
	there.mu.Unlock()
	b, first := slice()
	later := asks(t, p, b, 2)
	began := time.Now()
	until(t, "the later attempt has had the time to stop it",
		func() bool { return there.failure() != nil || time.Since(began) > 50*time.Millisecond })
	f.Release(here.q.Num())
	landed("the slow lane", first)
	landed("the later attempt", later)
	if err := there.failure(); err != nil {
		t.Errorf("a healthy lane was lost: %v", err)
	}
	b.End(t)
	there.mu.Lock()
	there.activity.pace = 30 * time.Minute
	there.mu.Unlock()
	if got := patience(); got != time.Hour {
		t.Errorf("it is waited for %v: longer than the silence that ends it", got)
	}
	there.mu.Lock()
	there.activity.sliceAt = there.activity.progress.Add(-2 * time.Hour) // this process was stopped
	there.activity.arrived(1, there.b.cfg.Silence)
	got := there.activity.pace
	there.mu.Unlock()
	if got != 30*time.Minute {
		t.Errorf("a pause of this process made it %v", got)
	}
}
