package transporttest

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// pusher keeps slices of an origin in flight on several lanes until stop.
type pusher struct {
	wg   sync.WaitGroup
	halt atomic.Bool
	// ended counts the results.
	ended atomic.Int64
}

func push(from *End, lanes []transport.Lane, o *transport.Origin, chunks uint32,
	attempt uint32) *pusher {
	p := &pusher{}
	for _, l := range lanes {
		for range 2 {
			p.wg.Go(func() {
				for n := attempt; !p.halt.Load(); n++ {
					r := transfer.Range{First: rand.Uint32N(chunks)}
					r.Count = 1 + rand.Uint32N(min(8, chunks-r.First))
					from.MoveWait(l, o, r, n)
					p.ended.Add(1)
				}
			})
		}
	}
	return p
}

func (p *pusher) stop() {
	p.halt.Store(true)
	p.wg.Wait()
}

// until waits for a condition that other goroutines fulfill.
func until(tb testing.TB, what string, ok func() bool) {
	tb.Helper()
	deadline := time.Now().Add(patience)
	for !ok() {
		if time.Now().After(deadline) {
			tb.Fatalf("not within %s: %s", patience, what)
		}
		yield()
	}
}

// testFenceAttack: after Fence has returned the memory has another owner, and the sender still
// pushes.
func testFenceAttack(t *testing.T, f Factory, success bool) {
	p := NewPair(t, f)
	var lanes []transport.Lane
	for range 2 {
		a, _ := p.Dial()
		lanes = append(lanes, a)
	}
	s := Shape{Chunks: 24, BlockBytes: 8 << 10, Shuffle: true, TailBytes: 4096}
	src, dst := p.A.Memory(s), p.B.Memory(s)
	src.Write(5)
	runs := attackRuns(t)
	for run := range runs {
		dst.Fill(gapByte)
		b := NewBind(t, p.A, p.B, src, dst, 1, transfer.Gen(run+1))
		push := push(p.A, lanes, b.Origin, src.Chunks(), 1)
		if success {
			// Retries are still in flight when the last chunk lands.
			until(t, "all chunks landed", func() bool {
				p.A.usable(lanes...)
				return b.Dest.Full()
			})
		} else {
			n := 1 + rand.Int64N(6)
			until(t, "some slices ended", func() bool { return push.ended.Load() >= n })
		}
		b.Fence(t)
		if success {
			for c := range src.Chunks() {
				if at, ok := dst.Holds(5, int(c)); !ok {
					t.Fatalf("run %d: chunk %d is wrong at byte %d after the fence", run, c, at)
				}
			}
		}
		const engine = 0x3c // written by the engine's next request
		dst.Fill(engine)
		before := push.ended.Load()
		until(t, "slices ended after the fence", func() bool {
			return push.ended.Load() >= before+int64(
				4*len(lanes))
		})
		push.stop()
		if at, ok := dst.Filled(engine); !ok {
			t.Fatalf("run %d: byte %d was written after the fence", run, at)
		}
		b.End(t)
	}
	t.Logf("%d runs", runs)
}

func testFenceContext(t *testing.T, f Factory) {
	p := NewPair(t, f)
	src, dst := p.A.Memory(shapes[0]), p.B.Memory(shapes[0])
	b := NewBind(t, p.A, p.B, src, dst, 1, 1)
	if !b.enter() || !b.Origin.Enter() {
		t.Fatal("a fresh guard is revoked")
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	if err := b.fence(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("fence under a held guard: %v", err)
	}
	if err := b.closeOrigin(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("close under a held guard: %v", err)
	}
	b.leave()
	b.Origin.Leave()
	// B's Caps are the same; B may be on another host
	if err := b.fence(ctx); p.A.Backend.Caps().Guarded && err != nil {
		t.Errorf("the guard is all that a fence of this backend takes, it is empty, and yet: %v", err)
	}
	b.End(t)
	b.End(t) // idempotent
}

// testSourceAttack: bytes that the engine writes into source blocks after the end of the lease
// never count as landed.
func testSourceAttack(t *testing.T, f Factory, closed bool) {
	p := NewPair(t, f)
	var lanes []transport.Lane
	for range 2 {
		a, _ := p.Dial()
		lanes = append(lanes, a)
	}
	s := Shape{Chunks: 24, BlockBytes: 8 << 10, Shuffle: true}
	src, dst := p.A.Memory(s), p.B.Memory(s)
	runs := attackRuns(t)
	for run := range runs {
		src.Write(5)
		b := NewBind(t, p.A, p.B, src, dst, 1, transfer.Gen(run+1))
		b.Dest.Expect(5) // Landed checks each chunk against it
		push := push(p.A, lanes, b.Origin, src.Chunks(), 1)
		n := 1 + rand.Int64N(6)
		until(t, "some slices ended", func() bool { return push.ended.Load() >= n })
		if closed {
			b.CloseOrigin(t)
		} else {
			b.Source.Invalid.Store(true) // the epoch moves first
		}
		src.Write(666)
		before := push.ended.Load()
		until(t, "slices ended after the source was lost",
			func() bool { return push.ended.Load() >= before+int64(4*len(lanes)) })
		push.stop()
		b.End(t)
	}
	t.Logf("%d runs", runs)
}
