package gdr

import (
	"context"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/leaktest"
	"github.com/kvspray/kvspray/internal/verbs/fake"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
	"github.com/kvspray/kvspray/transport/transporttest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// rig returns a fabric that runs by itself, and a factory of backends on it.
func rig(tb testing.TB) (*fake.Fabric, transporttest.Factory) {
	f := fake.New()
	done := make(chan struct{})
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			f.Run()
			select {
			case <-f.Work():
			case <-done:
				return
			}
		}
	}()
	tb.Cleanup(func() { close(done); <-stopped })
	return f, func(testing.TB) transport.Backend { return New(Config{Device: f.Device("fake0")}) }
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
		bind.Sink.Seed.Store(5) // Landed compares every chunk
		for _, r := range []transfer.Range{{Count: 10}, {First: 10, Count: 14}, {First: 5, Count: 8}} {
			if res := from.MoveWait(l, bind.Origin, r, 1); res.Outcome != transfer.Landed {
				t.Fatalf("%v: %s %s: %v", r, res.Outcome, res.Reason, res.Err)
			}
		}
		if !bind.Sink.Full() {
			t.Fatal("not full")
		}
		bind.End(t)
		dst.GapsIntact(t)
	}
}

// TestFenceAgainstLateWrite: bytes are on the wire when the fence returns, and arrive when the engine owns the blocks again.
func TestFenceAgainstLateWrite(t *testing.T) {
	f, factory := rig(t)
	p := transporttest.NewPair(t, factory)
	a, _ := p.Dial()
	src, dst := transporttest.NewMemory(t, shape), transporttest.NewMemory(t, shape)
	src.Write(5)
	bind := transporttest.NewBind(t, p.A, p.B, src, dst, 1, 1)
	qp := a.(*lane).q.Num()
	f.Hold(qp)
	res := p.A.Move(a, bind.Origin, src.All(), 1)
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

// TestSilentNIC: completions never come; closing the origin flushes the queue pair and ends the slices in doubt.
func TestSilentNIC(t *testing.T) {
	f, factory := rig(t)
	p := transporttest.NewPair(t, factory)
	a, _ := p.Dial()
	src, dst := transporttest.NewMemory(t, shape), transporttest.NewMemory(t, shape)
	src.Write(5)
	bind := transporttest.NewBind(t, p.A, p.B, src, dst, 1, 1)
	bind.Sink.Seed.Store(5)
	f.LoseAnswers(a.(*lane).q.Num())
	res := p.A.Move(a, bind.Origin, src.All(), 1)
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

func TestDisowned(t *testing.T) {
	_, factory := rig(t)
	p := transporttest.NewPair(t, factory)
	a, _ := p.Dial()
	src, dst := transporttest.NewMemory(t, shape), transporttest.NewMemory(t, shape)
	src.Write(5)
	bind := transporttest.NewBind(t, p.A, p.B, src, dst, 1, 1)
	bind.Source.Invalid.Store(true)
	if r := p.A.MoveWait(a, bind.Origin, src.All(), 1); r.Outcome != transfer.NotLanded || r.Reason != transfer.ReasonDisowned {
		t.Fatalf("%s %s: %v", r.Outcome, r.Reason, r.Err)
	}
	bind.End(t)
}

func FuzzToken(f *testing.F) {
	f.Add((&token{chunks: [][]remoteBlock{{{1 << 40, 4096, 7}, {2, 3, 4}}, {}}}).encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		tk, err := decodeToken(b)
		if err == nil && string(tk.encode()) != string(b) {
			t.Fatal("the token does not survive the round trip")
		}
	})
}
