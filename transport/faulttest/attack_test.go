package faulttest

import (
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
	"github.com/kvspray/kvspray/transport/transporttest"
)

const (
	attackRuns   = 12
	attackChunks = 24
	sliceChunks  = 3
	hedgeAfter   = 25 * time.Millisecond // a slice that has not ended goes out on the other lane
	// then each waits twice as long: it may be the machine that has not got to it.
	quickTries = 6
	maxTries   = 14
	patience   = time.Minute // of a test that is about to fail
)

func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !ok(); runtime.Gosched() {
		if time.Now().After(end) {
			t.Fatalf("not within %s: %s", patience, what)
		}
	}
}

// spread moves all chunks of a bind over lanes as a sender with hedging and retries does, and
// reports whether every slice ended as landed. Slices that never end are left behind; their
// lanes are closed later. As a sender does, it gives no lane more than that takes at once: one that
// is stuck keeps what it has.
func spread(p *transporttest.Pair, lanes []transport.Lane, b *transporttest.Bind) bool {
	var wg sync.WaitGroup
	all := make([]bool, attackChunks/sliceChunks)
	room := make([]chan struct{}, len(lanes))
	for i, l := range lanes {
		room[i] = make(chan struct{}, l.MaxInFlight())
	}
	move := func(lane int, r transfer.Range, attempt uint32) <-chan transport.Result {
		out := make(chan transport.Result, 1)
		select {
		case room[lane] <- struct{}{}:
			go func() { // ends with its lane at the latest
				res := <-p.A.Move(lanes[lane], b.Origin, r, attempt)
				<-room[lane]
				out <- res
			}()
		default:
		}
		return out
	}
	for i := range all {
		wg.Go(func() {
			r := transfer.Range{First: uint32(i) * sliceChunks, Count: sliceChunks}
			for try := range maxTries {
				c := move((i+try)%len(lanes), r, uint32(try)+1)
				hedge := time.NewTimer(hedgeAfter << max(0, try-quickTries))
				select {
				case res := <-c:
					all[i] = res.Outcome == transfer.Landed
				case <-hedge.C:
				}
				hedge.Stop()
				if all[i] {
					return
				}
			}
		})
	}
	wg.Wait()
	for _, ok := range all {
		if !ok {
			return false
		}
	}
	return true
}

// TestNoFaultCommits attacks the two promises with each fault alone: a full sink holds every byte,
// and after the fence the blocks have another owner, whatever still arrives.
func TestNoFaultCommits(t *testing.T) {
	for _, base := range bases {
		for _, kind := range Kinds() {
			t.Run(base.name+"/"+kind.String(), func(t *testing.T) {
				var victim atomic.Uint64 // the lane that gets stuck, or holds what it has
				rule := Rule{Kind: kind, Prob: 0.4, AfterFence: true, After: time.Millisecond}
				switch kind {
				case Drop, DropResult:
					rule.After = 0 // ends with its lane only
				case Stuck, Hold:
					rule.After = 0
					rule.Only = func(l transport.Lane, _ transport.Slice) bool { return l.ID() == victim.Load() }
				}
				plan := New(uint64(kind), rule)
				repeats := &retrier{}
				p := transporttest.NewPair(t, func(tb testing.TB) transport.Backend {
					r := &retrier{Backend: Wrap(base.make(tb), plan)}
					if repeats.Backend == nil {
						repeats = r // the sender's
					}
					return r
				})
				commits, lies := 0, 0
				for run := range attackRuns {
					lanes := make([]transport.Lane, 3)
					for i := range lanes {
						lanes[i], _ = p.Dial()
					}
					victim.Store(lanes[0].ID())
					shape := transporttest.Shape{Chunks: attackChunks, BlockBytes: 8 << 10, Shuffle: true,
						TailBytes: 4096}
					src, dst := transporttest.NewMemory(t, shape), transporttest.NewMemory(t, shape)
					seed := uint64(run + 1)
					src.Write(seed)
					b := transporttest.NewBind(t, p.A, p.B, src, dst, 1, transfer.Gen(run+1))
					b.Dest.Seed.Store(seed) // each Landed is checked against it
					landed := spread(p, lanes, b)
					full := b.Dest.Full()
					if kind == Duplicate && plan.Extra(kind, transfer.Landed) == 0 {
						// before the fence, once: all others race with it
						until(t, "duplicates are gone", plan.Quiet)
					}
					b.Fence(t)
					switch {
					case full:
						commits++
						for c := range attackChunks {
							if at, ok := dst.Holds(seed, c); !ok {
								t.Fatalf("run %d: committed, and chunk %d is wrong at byte %d", run, c, at)
							}
						}
					case landed && kind != FalseLanded:
						t.Fatalf("run %d: every slice landed, the sink is not full", run)
					case landed:
						lies++
					}
					engine := byte(run + 1)
					mem.Fill(bytesOf(t, dst), engine)
					plan.Release() // the fence let most of them go already
					b.CloseOrigin(t)
					for _, l := range lanes {
						if err := l.Close(); err != nil {
							t.Error(err)
						}
					}
					until(t, "extra slices have ended", plan.Quiet)
					if at, ok := dst.Filled(engine); !ok {
						t.Fatalf("run %d: byte %d was written after the fence", run, at)
					}
					b.End(t)
				}
				repeats.mu.Lock()
				repeated := repeats.repeated
				repeats.mu.Unlock()
				t.Logf("%d injected; %d of %d runs committed, %d had only landed results and were incomplete; "+
					"extra slices: %d landed, %d refused, %d unsent; %d repeated results",
					plan.Injected(kind), commits, attackRuns, lies, plan.Extra(kind, transfer.Landed),
					plan.Extra(kind, transfer.Rejected)+plan.Extra(kind, transfer.NotLanded),
					plan.Unsent(kind), repeated)
				if plan.Injected(kind) == 0 {
					t.Error("never injected")
				}
				switch kind {
				case FalseLanded:
					if lies == 0 {
						t.Error("no run had only false successes")
					}
				case LateWrite:
					if plan.Extra(kind, transfer.Rejected)+plan.Extra(kind, transfer.NotLanded) == 0 {
						t.Error("no late write came after the fence")
					}
				case Duplicate:
					if plan.Extra(kind, transfer.Landed) == 0 {
						t.Error("no duplicate landed")
					}
				case DuplicateResult:
					if repeated == 0 {
						t.Error("no result came twice")
					}
				}
				if kind != FalseLanded && commits != attackRuns {
					t.Errorf("%d of %d runs committed", commits, attackRuns)
				}
			})
		}
	}
}

func bytesOf(t *testing.T, m *transporttest.Memory) []byte {
	t.Helper()
	b, ok := m.Region.Bytes()
	if !ok {
		t.Fatal("test memory is not mapped")
	}
	return b
}
