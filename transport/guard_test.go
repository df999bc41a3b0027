package transport

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/leaktest"
	"github.com/kvspray/kvspray/transfer"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

const patience = time.Minute // until a test fails

func idle(g *Guard) bool {
	select {
	case <-g.Idle():
		return true
	default:
		return false
	}
}

func TestGuard(t *testing.T) {
	var g Guard
	over, cancel := context.WithCancel(context.Background())
	cancel()
	if err := g.Wait(context.Background()); err == nil {
		t.Error("Wait for an open guard is no error: it may never be revoked")
	}
	if g.Revoked() || g.Empty() || idle(&g) || !g.Enter() || !g.Enter() {
		t.Fatal("a fresh guard is not open")
	}
	g.Leave()
	g.Revoke()
	g.Revoke()
	if !g.Revoked() || g.Enter() || g.Empty() || idle(&g) {
		t.Fatal("revoked and held: must be closed and not idle")
	}
	if err := g.Wait(over); !errors.Is(err, context.Canceled) {
		t.Errorf("the wait for a held guard ended with %v", err)
	}
	g.Leave()
	if err := g.Wait(over); err != nil {
		t.Errorf("the guard is idle already, and Wait failed with the context: %v", err)
	}
	if !g.Empty() || !idle(&g) || g.Enter() || !g.Empty() || !idle(&g) {
		t.Fatal("revoked and empty: must stay idle")
	}
	var h Guard
	h.Revoke()
	if !idle(&h) {
		t.Fatal("revoked while empty: must be idle at once")
	}
}

// Each successful Enter has its Leave before Idle is closed, and no Enter succeeds that began after
// Revoke returned.
func TestGuardConcurrently(t *testing.T) {
	for range 300 {
		var g Guard
		var inside, entered atomic.Int64
		var revoked, closed atomic.Bool
		var wg sync.WaitGroup
		start := make(chan struct{})
		for range 4 {
			wg.Go(func() {
				<-start
				for range 200 {
					late := revoked.Load()
					if !g.Enter() {
						continue
					}
					if late {
						t.Error("Enter succeeded after Revoke had returned")
					}
					entered.Add(1)
					inside.Add(1)
					if closed.Load() {
						t.Error("inside after Idle")
					}
					runtime.Gosched()
					if closed.Load() {
						t.Error("still inside after Idle")
					}
					inside.Add(-1)
					g.Leave()
				}
			})
		}
		for range 2 {
			wg.Go(func() {
				<-start
				runtime.Gosched()
				g.Revoke()
				revoked.Store(true)
				select {
				case <-g.Idle():
				case <-time.After(patience):
					t.Error("never idle")
				}
				closed.Store(true)
				if n := inside.Load(); n != 0 {
					t.Errorf("%d inside at Idle", n)
				}
			})
		}
		close(start)
		wg.Wait()
	}
}

func BenchmarkGuard(b *testing.B) {
	var g Guard
	b.ReportAllocs()
	for b.Loop() {
		if g.Enter() {
			g.Leave()
		}
	}
}

// counter counts what lands.
type counter struct{ landed [64]atomic.Int32 }

func (c *counter) Landed(_ Lane, r transfer.Range, _ uint32) {
	for i := r.First; i < r.End(); i++ {
		c.landed[i].Add(1)
	}
}

func newGrant(landed func(Lane, transfer.Range, uint32)) *Grant {
	g := &Grant{Landed: landed}
	g.Receipt.Reset(64)
	return g
}

func span(first, count uint32) transfer.Range { return transfer.Range{First: first, Count: count} }

func TestClaim(t *testing.T) {
	var sink counter
	g := newGrant(sink.Landed)
	var a, b, c Claim
	want := func(what string, got, want transfer.Reason) {
		t.Helper()
		if got != want {
			t.Fatalf("%s: %s, want %s", what, got, want)
		}
	}
	want("claim", g.Claim(&a, span(0, 8), 2), transfer.ReasonNone)
	want("an earlier attempt", g.Claim(&b, span(4, 8), 1), transfer.ReasonSuperseded)
	want("beside it", g.Claim(&b, span(8, 8), 1), transfer.ReasonNone)
	want("enter", a.Enter(), transfer.ReasonNone)
	a.Leave()
	want("a later attempt", g.Claim(&c, span(6, 4), 3), transfer.ReasonNone)
	want("taken over", a.Enter(), transfer.ReasonSuperseded)
	want("taken over too", b.Land(nil), transfer.ReasonSuperseded)
	a.Release()
	a.Release()
	if n, fresh := c.Fresh(span(6, 4)); n != 4 || !fresh {
		t.Fatalf("%d fresh %v", n, fresh)
	}
	want("land", c.Land(nil), transfer.ReasonNone)
	want("again", g.Claim(&a, span(4, 8), 9), transfer.ReasonNone)
	for at, states := uint32(4), []struct {
		n     uint32
		fresh bool
	}{{2, true}, {4, false}, {2, true}}; len(states) > 0; states = states[1:] {
		n, fresh := a.Fresh(span(at, 12-at))
		if n != states[0].n || fresh != states[0].fresh {
			t.Fatalf("from %d: %d fresh %v, want %+v", at, n, fresh, states[0])
		}
		at += n
	}
	g.Revoke()
	want("revoked", a.Enter(), transfer.ReasonRevoked)
	want("revoked", a.Land(nil), transfer.ReasonRevoked)
	for i := range sink.landed {
		if n := sink.landed[i].Load(); (n == 1) != (i >= 6 && i < 10) {
			t.Errorf("chunk %d landed %d times", i, n)
		}
	}
}

// The law of claims: the last writer of a landed chunk is the attempt that landed it. Each chunk is
// a variable in which writers store their attempt. Its value when the chunk first landed must be
// its value at the end.
func TestClaimsConcurrently(t *testing.T) {
	for round := range 60 {
		var words, final [64]atomic.Uint32
		g := newGrant(func(_ Lane, r transfer.Range, _ uint32) {
			for i := r.First; i < r.End(); i++ {
				final[i].CompareAndSwap(0, words[i].Load())
			}
		})
		var wg sync.WaitGroup
		for w := range uint32(4) {
			wg.Go(func() {
				var c Claim
				seed := w*7919 + uint32(round)
				for i := range uint32(60) {
					seed = seed*1664525 + 1013904223
					first := seed >> 16 % 56
					r := span(first, 1+seed>>24%8)
					me := 1 + i*4 + w
					if g.Claim(&c, r, me) != transfer.ReasonNone {
						continue
					}
					lost := false
					for at := r.First; at < r.End() && !lost; {
						n, fresh := c.Fresh(span(at, r.End()-at))
						if fresh {
							if lost = c.Enter() != transfer.ReasonNone; lost {
								break
							}
							for k := at; k < at+n; k++ {
								words[k].Store(me)
							}
							runtime.Gosched()
							c.Leave()
						}
						at += n
					}
					if !lost && seed>>20&1 == 0 {
						c.Land(nil)
					} else {
						c.Release()
					}
				}
			})
		}
		wg.Wait()
		g.Revoke()
		if !idle(&g.Guard) {
			t.Fatal("not idle")
		}
		for i := range words {
			if f := final[i].Load(); f != 0 && words[i].Load() != f {
				t.Fatalf("round %d: chunk %d landed with %d and holds %d", round, i, f, words[i].Load())
			}
		}
	}
}

func TestClaimDoesNotAllocate(t *testing.T) {
	g := newGrant(new(counter).Landed)
	var c Claim
	if n := testing.AllocsPerRun(100, func() {
		g.Claim(&c, span(3, 8), 1)
		c.Fresh(span(3, 8))
		if c.Enter() == transfer.ReasonNone {
			c.Leave()
		}
		c.Land(nil)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func TestRegistry(t *testing.T) {
	if _, ok := (Registry{}).Get("tcp"); ok {
		t.Error("an empty registry has tcp")
	}
	if a, b := NextLaneID(), NextLaneID(); a == b || a == 0 {
		t.Error("lane ids repeat")
	}
}
