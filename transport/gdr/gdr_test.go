package gdr

import (
	"context"
	"math/rand/v2"
	"runtime"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/leaktest"
	"github.com/kvspray/kvspray/internal/sys/verbs"
	"github.com/kvspray/kvspray/internal/sys/verbs/fake"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
	"github.com/kvspray/kvspray/transport/transporttest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// rig returns a fabric that runs by itself, in an order of its own each time, and a factory of
// backends on it.
func rig(tb testing.TB) (*fake.Fabric, transporttest.Factory) {
	return rigWith(tb, rand.Uint64())
}

// rigWith is rig with the fabric's order. What the goroutines around it do is not in the seed.
func rigWith(tb testing.TB, seed uint64) (*fake.Fabric, transporttest.Factory) {
	f := fake.New()
	f.Shuffle(seed)
	tb.Cleanup(func() {
		if tb.Failed() {
			tb.Logf("the fabric's seed was %d", seed)
		}
	})
	tb.Cleanup(f.Serve())
	return f, func(testing.TB) transport.Backend { return New(config(f)) }
}

func config(f *fake.Fabric) Config { return configOf(f, "fake0") }

// configOf is of a sidecar with one rail. Where several share a processor, a slice may take long.
func configOf(f *fake.Fabric, device string) Config {
	open := func() (verbs.Device, error) { return f.Open(device) }
	rails := []Rail{{Name: device, Open: open, Listen: "127.0.0.1:0", NUMA: -1}}
	return Config{Rails: func() ([]Rail, error) { return rails, nil }, Opening: time.Minute,
		Patience: time.Minute, Silence: time.Minute}
}

func TestConformance(t *testing.T) {
	_, factory := rig(t)
	transporttest.Conformance(t, factory)
}

// until waits for a condition that other goroutines bring about.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !ok(); {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
		runtime.Gosched()
	}
}

// writing reports whether work requests of a lane are under way.
func writing(l transport.Lane) func() bool {
	return func() bool {
		x := l.(*lane)
		x.mu.Lock()
		defer x.mu.Unlock()
		return x.src.posted > x.src.done
	}
}

var shape = transporttest.Shape{Chunks: 24, BlockBytes: 16 << 10, Shuffle: true, TailBytes: 4096}

func TestContent(t *testing.T) {
	_, factory := rig(t)
	p := transporttest.NewPair(t, factory)
	a, b := p.Dial()
	other := shape
	other.BlockBytes = 4 << 10
	for i, l := range []transport.Lane{a, b} {
		from, to := p.A, p.B
		if i == 1 { // the accepted end moves, too
			from, to = p.B, p.A
		}
		src, dst := transporttest.NewMemory(t, shape), transporttest.NewMemory(t, other)
		src.Write(5)
		bind := transporttest.NewBind(t, from, to, src, dst, 3, 9)
		bind.Dest.Seed.Store(5) // Landed compares every chunk
		for _, r := range []transfer.Range{{Count: 10}, {First: 10, Count: 14}, {First: 5, Count: 8}} {
			if res := from.MoveWait(l, bind.Origin, r, 1); res.Outcome != transfer.Landed {
				t.Fatalf("%v: %s %s: %v", r, res.Outcome, res.Reason, res.Err)
			}
		}
		if !bind.Dest.Full() {
			t.Fatal("not full")
		}
		bind.End(t)
		dst.GapsIntact(t)
	}
}

// TestFenceAgainstLateWrite: bytes are on the wire when the fence returns, and arrive when the
// engine owns the blocks again.
func TestFenceAgainstLateWrite(t *testing.T) {
	f, _ := rig(t)
	p := transporttest.NewPair(t, func(testing.TB) transport.Backend {
		c := config(f)
		c.Patience = 20 * time.Millisecond // the fence waits it out
		return New(c)
	})
	a, _ := p.Dial()
	src, dst := transporttest.NewMemory(t, shape), transporttest.NewMemory(t, shape)
	src.Write(5)
	bind := transporttest.NewBind(t, p.A, p.B, src, dst, 1, 1)
	qp := a.(*lane).q.Num()
	f.Hold(qp)
	res := p.A.Move(a, bind.Origin, src.All(), 1)
	until(t, "messages are on the wire", func() bool { return f.Held(qp) > 0 })
	bind.Fence(t)
	dst.Write(99) // the engine's own bytes
	f.Release(qp)
	select {
	case r := <-res:
		if r.Outcome != transfer.InDoubt {
			t.Fatalf("%s %s", r.Outcome, r.Reason)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("the slice never ended")
	}
	for c := range dst.Chunks() {
		if at, ok := dst.Holds(99, int(c)); !ok {
			t.Fatalf("chunk %d: byte %d was written after the fence", c, at)
		}
	}
	bind.End(t)
}

// TestSilentNIC: completions never come; closing the origin flushes the queue pair and ends the
// slices in doubt.
func TestSilentNIC(t *testing.T) {
	f, factory := rig(t)
	p := transporttest.NewPair(t, factory)
	a, _ := p.Dial()
	src, dst := transporttest.NewMemory(t, shape), transporttest.NewMemory(t, shape)
	src.Write(5)
	bind := transporttest.NewBind(t, p.A, p.B, src, dst, 1, 1)
	bind.Dest.Seed.Store(5)
	f.LoseAnswers(a.(*lane).q.Num())
	res := p.A.Move(a, bind.Origin, src.All(), 1)
	until(t, "writes are under way", writing(a))
	bind.Origin.Revoke()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := p.A.Backend.CloseOrigin(ctx, bind.Origin); err != nil {
		t.Fatal(err)
	}
	select {
	case r := <-res:
		if r.Outcome != transfer.InDoubt {
			t.Fatalf("%s %s", r.Outcome, r.Reason)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("the slice never ended")
	}
	bind.End(t)
}

func TestInvalidated(t *testing.T) {
	_, factory := rig(t)
	p := transporttest.NewPair(t, factory)
	a, _ := p.Dial()
	src, dst := transporttest.NewMemory(t, shape), transporttest.NewMemory(t, shape)
	src.Write(5)
	bind := transporttest.NewBind(t, p.A, p.B, src, dst, 1, 1)
	bind.Source.Invalid.Store(true)
	if r := p.A.MoveWait(a, bind.Origin, src.All(), 1); r.Outcome != transfer.NotLanded ||
		r.Reason != transfer.ReasonInvalidated {
		t.Fatalf("%s %s: %v", r.Outcome, r.Reason, r.Err)
	}
	bind.End(t)
}

func FuzzHead(f *testing.F) {
	f.Add(appendHead(nil, &head{kind: kindGo, id: 3, seq: 9, slot: 7, gen: 1 << 30,
		r: transfer.Range{First: 4, Count: 16}, attempt: 2, cells: 5, bytes: 1 << 20}))
	f.Add(appendHead(nil, &head{kind: kindEnd, reason: transfer.ReasonRevoked}))
	f.Add(make([]byte, headBytes))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) != headBytes {
			return
		}
		var h head
		if parseHead((*[headBytes]byte)(b), &h) == nil && string(appendHead(nil, &h)) != string(b) {
			t.Fatal("the head does not survive the round trip")
		}
	})
}
