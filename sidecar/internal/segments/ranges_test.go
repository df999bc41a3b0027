package segments

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/sidecar/internal/plans"
	"github.com/kvspray/kvspray/transfer"
)

func testRegion(t testing.TB, bytes uint64) *mem.Region {
	t.Helper()
	r, err := mem.NewAnonymous("segments", bytes)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Release)
	return r
}

// Random claims, checked byte by byte: no two that are open share a byte that one of them writes,
// each that waits opens once nothing before it excludes it, and in the end nothing is left.
func TestClaimsAgainstAModel(t *testing.T) {
	const bytes = 256
	region := testRegion(t, 4096)
	for seed := range uint64(300) {
		testutil.Bubble(t, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 3))
			r := &ranges{}
			readers, writer := [bytes]int{}, [bytes]bool{}
			var mu sync.Mutex // guards the model
			each := func(runs []plans.Run, f func(b uint64)) {
				mu.Lock()
				defer mu.Unlock()
				for _, x := range runs {
					for i := range uint64(x.Count) {
						for b := range x.Len {
							f(x.Off + i*x.Stride + b)
						}
					}
				}
			}
			for range 40 {
				var runs []plans.Run
				for range 1 + rng.IntN(4) {
					x := plans.Run{Region: region, Len: 1 + rng.Uint64N(10), Count: 1 + rng.Uint32N(3),
						Stride: rng.Uint64N(30)}
					x.Off = rng.Uint64N(bytes - x.Len - uint64(x.Count-1)*x.Stride)
					runs = append(runs, x)
				}
				write := rng.IntN(2) == 0
				c, err := newClaim(runs, nil, write, transfer.Boot{byte(rng.IntN(3))})
				seen := map[uint64]bool{}
				twice := false
				each(runs, func(b uint64) { twice = twice || seen[b]; seen[b] = true })
				if (err != nil) != (write && twice) {
					t.Fatalf("seed %d: %v of %+v", seed, err, runs)
				}
				if err != nil {
					continue
				}
				wait, hold := rng.IntN(2) == 0, time.Duration(rng.IntN(50))
				go func() {
					ctx, stop := context.WithTimeout(t.Context(), 200)
					defer stop()
					if err := r.take(ctx, c, wait); err != nil {
						var refusal *msg.Error
						if !errors.Is(err, context.DeadlineExceeded) && !errors.As(err, &refusal) {
							t.Errorf("seed %d: %v", seed, err)
						}
						return
					}
					each(runs, func(b uint64) {
						if writer[b] || write && readers[b] > 0 {
							t.Errorf("seed %d: byte %d is in two claims", seed, b)
						}
						if write {
							writer[b] = true
						} else {
							readers[b]++
						}
					})
					time.Sleep(hold)
					each(runs, func(b uint64) {
						if write {
							writer[b] = false
						} else {
							readers[b]--
						}
					})
					r.release(c)
				}()
				synctest.Wait()
				time.Sleep(time.Duration(rng.IntN(10)))
			}
			time.Sleep(time.Second)
			synctest.Wait()
			if len(r.all) > 0 || r.spans != 0 || r.waiting != 0 {
				t.Fatalf("seed %d: %d claims, %d spans, %d that wait are left", seed, len(r.all), r.spans,
					r.waiting)
			}
		})
	}
}

// The spans and the waits of all batches have bounds.
func TestClaimsAreBounded(t *testing.T) {
	region := testRegion(t, 4096)
	r := &ranges{}
	first, err := newClaim([]plans.Run{{Region: region, Len: 1, Count: 1}}, nil, true,
		transfer.Boot{})
	if err != nil {
		t.Fatal(err)
	}
	if err := r.enter(first, false); err != nil {
		t.Fatal(err)
	}
	for i := range maxWaiting + 1 {
		c, err := newClaim([]plans.Run{{Region: region, Len: 1, Count: 1}}, nil, false,
			transfer.Boot{})
		if err != nil {
			t.Fatal(err)
		}
		if err := r.enter(c, true); (err != nil) != (i == maxWaiting) {
			t.Fatalf("claim %d that waits: %v", i, err)
		}
	}
	big := &claim{count: maxSpans, open: make(chan struct{})}
	if err := r.enter(big, true); err == nil {
		t.Error("more spans than the bound")
	}
}

// One peer leaves spans and waits for others.
func TestClaimsOfOnePeerAreBounded(t *testing.T) {
	region := testRegion(t, 4096)
	r := &ranges{}
	enter := func(off uint64, count int, peer transfer.Boot) error {
		c, err := newClaim([]plans.Run{{Region: region, Off: off, Len: 1, Count: 1}}, nil, true,
			peer)
		if err != nil {
			t.Fatal(err)
		}
		c.count = count
		return r.enter(c, true)
	}
	one, two := transfer.Boot{1}, transfer.Boot{2}
	for i := range maxPeerWaiting + 2 {
		if err := enter(0, 1, one); (err != nil) != (i == maxPeerWaiting+1) {
			t.Fatalf("claim %d: %v", i, err)
		}
	}
	if err := enter(1, maxPeerSpans, one); err == nil {
		t.Error("more spans of a peer than the bound")
	}
	if err := enter(1, maxPeerSpans-1, two); err != nil {
		t.Errorf("another peer: %v", err)
	}
	if err := enter(0, 1, two); err != nil {
		t.Errorf("another peer waits: %v", err)
	}
}
