package faulttest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/leaktest"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
	"github.com/kvspray/kvspray/transport/shm"
	"github.com/kvspray/kvspray/transport/tcp"
	"github.com/kvspray/kvspray/transport/transporttest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// bases are the backends that faults are put into.
var bases = []struct {
	name string
	make transporttest.Factory
}{
	{"tcp", func(tb testing.TB) transport.Backend { return newTCP(tb, tcp.Config{}) }},
	{"tcp crc32c", func(tb testing.TB) transport.Backend {
		return newTCP(tb, tcp.Config{CRC32C: true})
	}},
	{"shm", func(tb testing.TB) transport.Backend {
		return shm.New(shm.Config{Dir: testutil.ShortDir(tb), Workers: 2})
	}},
}

func newTCP(tb testing.TB, cfg tcp.Config) transport.Backend {
	tb.Helper()
	b, err := tcp.New(cfg)
	if err != nil {
		tb.Fatal(err)
	}
	return b
}

// retrier is the minimum of an executor: it sends again what a fault ended, and receives the
// first result of a slice only. It lets the contract suite, whose slices must land, run over
// faults.
type retrier struct {
	transport.Backend
	max int // attempts at one slice

	mu       sync.Mutex
	ended    map[uint64]bool // by cookie; the suite uses each once
	tries    map[uint64]int
	repeated int
}

type retrierHost struct {
	transport.Host
	r *retrier
}

func (r *retrier) Open(ctx context.Context, h transport.Host) ([]transport.Rail, error) {
	r.ended, r.tries = map[uint64]bool{}, map[uint64]int{}
	return r.Backend.Open(ctx, retrierHost{h, r})
}

func (h retrierHost) Done(l transport.Lane, res []transport.Result) {
	for _, x := range res {
		h.r.mu.Lock()
		if h.r.ended[x.Cookie] {
			h.r.repeated++
			h.r.mu.Unlock()
			continue
		}
		n := h.r.tries[x.Cookie]
		again := errors.Is(x.Err, ErrInjected) && n < h.r.max
		if again {
			h.r.tries[x.Cookie]++
		} else {
			h.r.ended[x.Cookie] = true
			delete(h.r.tries, x.Cookie)
		}
		h.r.mu.Unlock()
		if again {
			s := x.Slice
			s.Attempt++
			err := l.Move([]transport.Slice{s})
			if err == nil {
				continue
			}
			h.r.mu.Lock()
			h.r.ended[x.Cookie] = true
			h.r.mu.Unlock()
			x.Outcome, x.Reason, x.Err = transfer.InDoubt, transfer.ReasonLaneLost, errors.Join(err,
				net.ErrClosed)
		}
		x.Attempt -= uint32(n)
		h.Host.Done(l, []transport.Result{x})
	}
}

// survivable are faults that break no promise to the suite, given a retrier. FalseLanded is none:
// only the receiver can detect that such a slice is missing, and the attack test looks at that.
func survivable(p float64) []Rule {
	return []Rule{
		{Kind: Error, Prob: p},
		{Kind: Delay, Prob: p, After: 2 * time.Millisecond},
		{Kind: DelayResult, Prob: p, After: 2 * time.Millisecond},
		{Kind: Drop, Prob: p, After: 3 * time.Millisecond},
		{Kind: DropResult, Prob: p, After: 3 * time.Millisecond},
		{Kind: Partial, Prob: p},
		{Kind: Duplicate, Prob: p},
		{Kind: DuplicateResult, Prob: p},
		{Kind: LateWrite, Prob: p, AfterFence: true},
		{Kind: LateWrite, Prob: p, After: time.Millisecond},
		{Kind: Stuck, Prob: p / 4, After: 5 * time.Millisecond},
	}
}

// addsFrames are faults that put more frames on the wire than slices were moved; a test that counts
// refused frames cannot have them.
func addsFrames(k Kind) bool {
	switch k {
	case Duplicate, LateWrite, DropResult, Partial:
		return true
	}
	return false
}

// TestContractUnderFaults runs the whole contract suite through backends with faults.
func TestContractUnderFaults(t *testing.T) {
	for _, base := range bases {
		t.Run(base.name, func(t *testing.T) {
			var mu sync.Mutex
			plans := map[string]*Plan{} // one for both ends of a test
			seed := uint64(0)
			transporttest.Conformance(t, func(tb testing.TB) transport.Backend {
				mu.Lock()
				defer mu.Unlock()
				plan := plans[tb.Name()]
				if plan == nil {
					seed++
					var rules []Rule
					for _, r := range survivable(0.05) {
						if !strings.HasSuffix(tb.Name(), "/Refusals") || !addsFrames(r.Kind) {
							rules = append(rules, r)
						}
					}
					plan = New(seed, rules...)
					plans[tb.Name()] = plan
				}
				return &retrier{Backend: Wrap(base.make(tb), plan), max: 20}
			})
			var counts []string
			for _, k := range Kinds() {
				n, landed, refused, unsent := 0, 0, 0, 0
				for _, p := range plans {
					n += p.Injected(k)
					landed += p.Extra(k, transfer.Landed)
					refused += p.Extra(k, transfer.Rejected) + p.Extra(k, transfer.NotLanded) + p.Extra(k,
						transfer.InDoubt)
					unsent += p.Unsent(k)
				}
				counts = append(counts, fmt.Sprintf("%s %d", k, n))
				if landed+refused+unsent > 0 {
					counts = append(counts, fmt.Sprintf("(extra: %d landed, %d did not, %d never left)", landed,
						refused, unsent))
				}
				// the suite waits for slices before it fences
				if n == 0 && k != FalseLanded && k != Hold {
					t.Errorf("%s was never injected", k)
				}
				if k == LateWrite && refused == 0 {
					t.Error("no late write came too late")
				}
			}
			t.Log(strings.Join(counts, ", "))
		})
	}
}

// TestContractLate runs the suite with nothing but delays, and with no retrier: they keep the
// contract by themselves. Sums change nothing about what comes late, so one tcp is enough.
func TestContractLate(t *testing.T) {
	for _, base := range bases {
		if base.name == "tcp" {
			continue
		}
		t.Run(base.name, func(t *testing.T) {
			plan := New(1, Rule{Kind: Delay, Prob: 0.1, After: time.Millisecond}, Rule{Kind: DelayResult,
				Prob: 0.1, After: time.Millisecond},
				Rule{Kind: Stuck, Prob: 0.01, After: 3 * time.Millisecond})
			transporttest.Conformance(t, func(tb testing.TB) transport.Backend {
				return Wrap(base.make(tb), plan)
			})
			for _, k := range []Kind{Delay, DelayResult, Stuck} {
				if plan.Injected(k) == 0 {
					t.Errorf("%s was never injected", k)
				}
			}
		})
	}
}
