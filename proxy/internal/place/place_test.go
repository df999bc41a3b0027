package place

import (
	"bytes"
	"fmt"
	"runtime"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/placement"
)

var began = time.Unix(1_000_000, 0)

// fleet is a placer of engines that are all up.
type fleet struct {
	*Placer
	roles []placement.Role
}

// newPlacer has engines that only prefill, and then others that only decode.
func newPlacer(t testing.TB, cfg Config, prefill, decode int) *fleet {
	t.Helper()
	p, err := New(cfg)
	if err != nil || p == nil {
		t.Fatal(err)
	}
	f := &fleet{p, slices.Concat(slices.Repeat([]placement.Role{placement.Prefill}, prefill),
		slices.Repeat([]placement.Role{placement.Both}, decode))}
	prefills := make([]bool, prefill+decode)
	for i := range prefill {
		prefills[i] = true
	}
	f.add(t, prefills...)
	return f
}

func (f *fleet) add(t testing.TB, prefills ...bool) []int {
	t.Helper()
	list, err := f.Add(prefills...)
	if err != nil {
		t.Fatal(err)
	}
	return list
}

func text(n int, fill byte) []byte { return bytes.Repeat([]byte{fill}, n) }

func decide(t *testing.T, p *fleet, r *Request, at time.Duration) *Decision {
	t.Helper()
	d, ok := p.Decide(r, p.roles, began.Add(at))
	if !ok {
		t.Fatal("no choice")
	}
	return d
}

// A second turn runs where the first one did, until that engine's queue costs more than the hit.
func TestAutoWeighsHitsAgainstQueues(t *testing.T) {
	p := newPlacer(t, Config{Policy: Auto}, 0, 4)
	first := decide(t, p, &Request{Text: text(40_000, 'a')}, 0)
	p.Answered(first, true, true, began.Add(2*time.Second))
	p.Ended(first, began.Add(3*time.Second))
	again := &Request{Text: append(text(40_000, 'a'), text(2000, 'b')...)}
	second := decide(t, p, again, 4*time.Second)
	if second.Decode != first.Decode || second.Choice.Reused < 9000 || second.Other <= 0 {
		t.Errorf("%+v after %+v", second, first)
	}
	other := decide(t, p, &Request{Text: again.Text, Scope: "another model"}, 4*time.Second)
	if other.Choice.Reused != 0 || other.Decode == first.Decode {
		t.Errorf("a hit of another scope: %+v", other)
	}
	// Long prompts of others fill the engine's queue.
	for range 40 {
		decide(t, p, &Request{Text: text(400_000, 'c'), Scope: "others"}, 4*time.Second)
	}
	if p.accounts[first.Decode].wait(began.Add(4*time.Second)) == 0 {
		t.Fatal("no queue")
	}
	p.Lost(first.Decode)
	if d := decide(t, p, again, 4*time.Second); d.Decode == first.Decode && d.Choice.Reused > 0 {
		t.Errorf("a hit of an engine that was lost: %+v", d)
	}
}

// Those who wait behind a request that takes longer than predicted still wait for each other.
func TestWaitBehindALongRequest(t *testing.T) {
	p := newPlacer(t, Config{Policy: Auto}, 0, 1)
	wait := func(at time.Duration) float64 { return p.accounts[0].wait(began.Add(at)) }
	first := decide(t, p, &Request{Text: text(16_000, 'a')}, 0) // a second
	second := decide(t, p, &Request{Text: text(8000, 'b')}, 0)
	if w := wait(500 * time.Millisecond); w < 1 || w > 1.05 {
		t.Errorf("%v, want half of the first and all of the second", w)
	}
	if w := wait(5 * time.Second); w < 0.5 || w > 0.55 {
		t.Errorf("%v, want the second", w)
	}
	p.Answered(first, true, true, began.Add(5*time.Second))
	if w := wait(5200 * time.Millisecond); w < 0.3 || w > 0.35 {
		t.Errorf("%v, want the rest of the second", w)
	}
	third := decide(t, p, &Request{Text: text(8000, 'c')}, 5200*time.Millisecond)
	p.Ended(third, began.Add(5300*time.Millisecond)) // out of turn
	if w := wait(5400 * time.Millisecond); w < 0.1 || w > 0.15 {
		t.Errorf("%v, want the rest of the second", w)
	}
	p.Ended(second, began.Add(6*time.Second))
	if w := wait(6 * time.Second); w != 0 {
		t.Errorf("%v, want nothing", w)
	}
}

func TestPolicies(t *testing.T) {
	for policy, want := range map[Policy]placement.Kind{Fetch: placement.Pair, Local: placement.Run} {
		p := newPlacer(t, Config{Policy: policy, Concurrent: true}, 2, 2)
		d := decide(t, p, &Request{Text: text(9000, 'a')}, 0)
		if d.Choice.Kind != want || (d.Prefill >= 0) != (want == placement.Pair) {
			t.Errorf("%s: %+v", policy, d)
		}
		if d := decide(t, p, &Request{Text: text(9000, 'a'), Alone: true}, 0); d.Prefill >= 0 {
			t.Errorf("%s: a request that cannot be split is: %+v", policy, d)
		}
	}
	p := newPlacer(t, Config{Policy: Cache}, 0, 2)
	first := decide(t, p, &Request{Text: text(9000, 'a')}, 0)
	for i := range 5 { // however long the queue is
		if d := decide(t, p, &Request{Text: text(9000, 'a')}, 0); d.Decode != first.Decode {
			t.Errorf("request %d goes to %d, the cache is at %d", i, d.Decode, first.Decode)
		}
	}
	if p, err := New(Config{Policy: ByLoad}); p != nil || err != nil {
		t.Errorf("%v, %v", p, err)
	}
	for _, bad := range []Config{{Policy: "best"}, {Policy: Auto, TokenBytes: -1}} {
		if p, err := New(bad); err == nil {
			t.Errorf("%+v: %v", bad, p)
		}
	}
	x := newPlacer(t, Config{Policy: Auto}, 0, 1)
	if list, err := x.Add(make([]bool, maxEngines)...); err == nil {
		t.Errorf("%d more engines", len(list))
	}
	if _, ok := x.Decide(&Request{}, []placement.Role{0}, began); ok {
		t.Error("a choice of an engine that is down")
	}
}

// An engine that comes has no hit of the one that had its number. That number is not free while a
// request is in flight there, and other engines keep what they have.
func TestEnginesComeAndGo(t *testing.T) {
	p := newPlacer(t, Config{Policy: Cache}, 1, 1)
	first := decide(t, p, &Request{Text: text(9000, 'a'), Alone: true}, 0)
	p.Answered(first, true, true, began)
	p.Remove(1)
	p.roles[1] = 0
	if d, ok := p.Decide(&Request{Text: text(9000, 'b')}, p.roles, began); ok {
		t.Errorf("%+v", d)
	}
	if list := p.add(t, false); list[0] != 2 {
		t.Errorf("a number in use: %v", list)
	}
	p.roles = append(p.roles, placement.Both)
	second := decide(t, p, &Request{Text: text(9000, 'c'), Alone: true}, 0)
	if second.Decode != 2 {
		t.Errorf("%+v", second)
	}
	p.Ended(second, began)
	p.Ended(first, began)
	if list := p.add(t, false); list[0] != 1 {
		t.Errorf("a number that is free: %v", list)
	}
	p.roles[1] = placement.Both
	if d := decide(t, p, &Request{Text: text(9000, 'a'), Alone: true}, 0); d.Choice.Reused != 0 {
		t.Errorf("a hit of another engine: %+v", d)
	}
	if d := decide(t, p, &Request{Text: text(9000, 'c'), Alone: true}, 0); d.Decode != 2 ||
		d.Choice.Reused == 0 {
		t.Errorf("no hit: %+v", d)
	}
	if p.paths.Path(0, 1) != p.link || p.paths.Path(0, 2) != p.link || p.paths.Path(1, 2).Rate != 0 {
		t.Error("only the engine that prefills sends, and to all others")
	}
}

// Accounts return to zero whatever becomes of requests, and outcomes correct predictions.
func TestAccountsAndOutcomes(t *testing.T) {
	p := newPlacer(t, Config{Policy: Auto}, 1, 1)
	for i := range 60 {
		d := decide(t, p, &Request{Text: text(40_000, byte(i)), Alone: i%3 == 0}, 0)
		took := time.Duration(2 * (d.Choice.Wait + d.Choice.Prefill) / d.factor * 1e9)
		switch i % 4 {
		case 0, 1:
			p.Prefilled(d, true, began.Add(took))
			p.Answered(d, true, true, began.Add(took))
		case 2:
			p.Prefilled(d, false, began.Add(took))
		}
		p.Ended(d, began.Add(took))
		p.Ended(d, began.Add(took)) // a second end changes nothing
	}
	for i, a := range p.accounts {
		if len(a.queue) != 0 || a.running != 0 || a.work > 1e-9 {
			t.Errorf("engine %d: %+v", i, a)
		}
		if f := a.learned.Factor(); f < 1.3 || f > 2.01 {
			t.Errorf("engine %d takes twice as long as predicted; factor %v", i, f)
		}
	}
}

// A slow link makes a pair dear, and the calibration file sets what is not learned.
func TestLearnedPathsDecide(t *testing.T) {
	p := newPlacer(t, Config{Policy: Auto, Concurrent: true,
		Calibration: &placement.Calibration{Fabrics: []placement.Fabric{
			{Name: PrefillLine, Fixed: 0.01, Rate: 2000}, {Name: LinkLine, Fixed: 0.001, Rate: 1e10}}}},
		1, 1)
	if p.fit.Rate != 2000 || p.link.Rate != 1e10 {
		t.Errorf("%+v %+v", p.fit, p.link)
	}
	r := &Request{Text: text(40_000, 'x')}
	pairs := func() bool {
		p.Lost(0)
		p.Lost(1)
		d := decide(t, p, r, 0)
		p.Ended(d, began)
		return d.Prefill >= 0
	}
	// The prefill engine computes three times as fast.
	for range 30 {
		p.accounts[1].learned.Observe(1, 3)
	}
	if !pairs() {
		t.Error("a faster prefill engine with a fast link is not used")
	}
	p.Learned(0, 1, placement.Path{Rate: 1e6})
	if pairs() {
		t.Error("a slow link is used")
	}
	p.Learned(0, 1, placement.Path{})
	if !pairs() {
		t.Error("a link without a rate keeps the former one")
	}
}

// The index is bounded, and forgets what was not used.
func TestIndexForgets(t *testing.T) {
	p := newPlacer(t, Config{Policy: Auto}, 0, 1)
	const chunks = 100
	p.size = 8 * chunks
	r := &Request{Text: make([]byte, chunks*chunkBytes)}
	for i := range 25 {
		r.Text[0] = byte(i)
		d := decide(t, p, r, 0)
		p.Ended(d, began)
		if n := p.Stats().Blocks; n > 2*p.size {
			t.Fatalf("%d blocks", n)
		}
	}
	if p.Stats().Forgot == 0 {
		t.Error("nothing was forgotten")
	}
	r.Text[0] = 0
	if d := decide(t, p, r, 0); d.Choice.Reused != 0 {
		t.Errorf("%+v", d.Choice)
	}
}

// threadTime is the processor's time of this thread in microseconds.
func threadTime(b *testing.B) float64 {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t); err != nil {
		b.Fatal(err)
	}
	return float64(t.Nano()) / 1e3
}

// BenchmarkDecide64 is a decision for a prompt of 32k tokens among 64 engines that report their
// caches, and of which half have a part of it. The time after hashing is reported apart.
func BenchmarkDecide64(b *testing.B) {
	for _, reports := range []bool{false, true} {
		b.Run(fmt.Sprintf("reports=%v", reports), func(b *testing.B) {
			r := &Request{Text: text(32<<10*tokenText, 'a')}
			if reports {
				r.Tokens, r.About = tokens(32<<10, 1), slices.Repeat([]bool{true}, 64)
			}
			p := newPlacer(b, Config{Policy: Auto, Concurrent: true}, 32, 32)
			for i := range r.About {
				p.Holder(i).Live(true)
				apply(p.Holder(i), stored(r.Tokens[:512*(i+1)], 0))
			}
			// Time of the processor: other work on the machine does not count.
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			var took, hashed []float64
			for i := 0; b.Loop(); i++ {
				r.Text[len(r.Text)/2] = byte(i)
				start := threadTime(b)
				h := p.hash(r)
				at := threadTime(b)
				d, _ := p.decide(r, h, p.roles, began)
				took = append(took, threadTime(b)-at)
				hashed = append(hashed, at-start)
				p.Ended(d, began)
			}
			slices.Sort(took)
			slices.Sort(hashed)
			b.ReportMetric(took[len(took)/2], "p50-us")
			b.ReportMetric(took[len(took)*99/100], "p99-us")
			b.ReportMetric(hashed[len(hashed)/2], "hash-p50-us")
		})
	}
}
