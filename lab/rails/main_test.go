package rails

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/internal/leaktest"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/lab/railsbench"
	"github.com/kvspray/kvspray/lab/railsbench/netrig"
	"github.com/kvspray/kvspray/lab/timeline"
)

// How much is run.
type extent int

const (
	smoke extent = iota
	minute
	long
)

const (
	extentEnv = "KVSPRAY_RAILS"
	attackEnv = "KVSPRAY_ATTACK_RUNS"
	binaryEnv = "KVSPRAY_BINARY"
	// not empty: a tenth of the rates, where the machine has other work.
	tenthEnv = "KVSPRAY_RAILS_TENTH"
)

var (
	kvspray string // the binary
	how     extent
	busy    bool // minute: the processors are not to be had for as long as figures take
	tenth   bool // of the rates that the goals name
)

func TestMain(m *testing.M) {
	if code, ran := testutil.MainInNamespace(); ran {
		os.Exit(code)
	}
	code, err := setUp(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, "lab/rails:", err)
		os.Exit(1)
	}
	os.Exit(code)
}

func setUp(m *testing.M) (int, error) {
	switch v := os.Getenv(extentEnv); v {
	case "":
	case "minute":
		how = minute
	case "long":
		how = long
	default:
		return 0, fmt.Errorf("%s=%q: want minute, long, or nothing", extentEnv, v)
	}
	if how == minute && !quiet(atFirst) {
		fmt.Println("lab/rails: the processors are not to be had for as long as figures take: " +
			"everything is done once, at a tenth of the rates, and no figure is judged")
		busy = true
	}
	tenth = !figures() || os.Getenv(tenthEnv) != ""
	if kvspray = os.Getenv(binaryEnv); kvspray == "" || !exists(kvspray) {
		// What the sidecars are built from must not be older than the tests.
		dir, err := os.MkdirTemp("", "kvspray-rails")
		if err != nil {
			return 0, err
		}
		defer func() { _ = os.RemoveAll(dir) }()
		kvspray = filepath.Join(dir, "kvspray")
		if out, err := exec.Command("go", "build", "-o", kvspray,
			"github.com/kvspray/kvspray/cmd/kvspray").CombinedOutput(); err != nil {
			return 0, fmt.Errorf("build kvspray: %w\n%s", err, out)
		}
	}
	return m.Run(), nil
}

// figures reports whether anything is measured. Failed transfers, content, late writes, and whether
// a rail comes back at all are judged in any case.
func figures() bool { return how != smoke && !busy }

// How often quiet looks: what ran before may take a moment to end, what runs beside these tests
// mostly goes on.
const (
	atFirst = 20
	between = 5
)

// quiet reports whether threads of ours get the processors when they want them.
func quiet(tries int) bool {
	for range tries {
		var wg sync.WaitGroup
		lowest := make([]float64, runtime.GOMAXPROCS(0))
		for i := range lowest {
			wg.Go(func() {
				runtime.LockOSThread()
				defer runtime.UnlockOSThread()
				used, began := threadTime(), time.Now()
				for time.Since(began) < 500*time.Millisecond {
				}
				lowest[i] = float64(threadTime()-used) / float64(time.Since(began))
			})
		}
		wg.Wait()
		if slices.Min(lowest) > 0.9 {
			return true
		}
		<-time.After(time.Second)
	}
	return false
}

// Rounds that make test-rails adds where a figure is missed: what disturbed a few seconds of it
// disturbs no median of three times as many, and what is slower than it should be stays so.
const moreRounds = 6

// patience is what is left of them.
type patience struct {
	left  int
	noisy bool // behind a figure that was missed the processors were not to be had: it proves nothing
}

// again reports whether another round is worth its time.
func (p *patience) again(met bool) bool {
	if how != minute || busy || met || p.left == 0 {
		return false
	}
	if !quiet(between) {
		p.left, p.noisy = 0, true
		return false
	}
	p.left--
	return true
}

// judges is judges of a figure that had more rounds.
func (p *patience) judges(t testing.TB) bool {
	t.Helper()
	if p.noisy {
		t.Log("the processors were not to be had behind it: not judged")
	}
	return !p.noisy && judges(t)
}

// judges reports whether a figure that is missed counts: not where the processors are not to be had
// any more.
func judges(t testing.TB) bool {
	t.Helper()
	if figures() && how == minute && !quiet(between) {
		t.Log("the processors are not to be had any more: not judged")
		return false
	}
	return figures()
}

func threadTime() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts); err != nil {
		panic(err)
	}
	return time.Duration(ts.Nano())
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// only skips what is not of this extent.
func only(t *testing.T, from extent) {
	t.Helper()
	if how < from {
		testutil.Skip(t, "rails-figures", "figures need a quiet machine: "+extentEnv+"=minute or long")
	}
}

// rates reads "2gbit,1gbit".
func rates(t testing.TB, s ...string) (out []timeline.Rate) {
	t.Helper()
	for _, x := range s {
		r, err := timeline.ParseRate(x)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, r)
	}
	return out
}

// goal is the mix that the goals name, or a tenth of it where figures do not count, or the machine
// has no time for more.
func goal(t testing.TB) []timeline.Rate {
	if tenth {
		return rates(t, "200mbit", "100mbit", "50mbit", "50mbit")
	}
	return rates(t, "2gbit", "1gbit", "500mbit", "500mbit")
}

// total is the size of a transfer: half a second over the rails of goal.
func total() int64 {
	if tenth {
		return 24 << 20
	}
	return 256 << 20
}

const kib, mib = 1 << 10, 1 << 20

// open builds a field, or skips where that is not permitted.
func open(t testing.TB, s railsbench.Setup) *railsbench.Field {
	t.Helper()
	leaktest.Check(t)
	s.Kvspray = kvspray
	f, err := railsbench.Open(t.Context(), s)
	if errors.Is(err, netrig.ErrNotPermitted) {
		testutil.Skip(t, "netns", err.Error())
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("%s", f.Logs())
		}
		f.Close()
	})
	return f
}

// engines adds a pair of engines, and lets the sidecars meet.
func engines(t testing.TB, f *railsbench.Field, block int, total int64,
	slots int) *railsbench.Pair {
	t.Helper()
	p, err := f.Engines(t.Context(), block, total, slots)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Meet(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	return p
}

// measured is a result with what plain streams carry.
func measured(t testing.TB, f *railsbench.Field, rr []timeline.Rate) *timeline.Result {
	t.Helper()
	r := &timeline.Result{Bench: "rails"}
	for i, rate := range rr {
		if !figures() {
			r.Rails = append(r.Rails, timeline.Rail{Name: netrig.Name(i), Rate: rate, Alone: rate})
			continue
		}
		alone, err := railsbench.Streams(t.Context(), f.Rig, []int{i}, time.Second)
		if err != nil {
			t.Fatal(err)
		}
		r.Rails = append(r.Rails, timeline.Rail{Name: netrig.Name(i), Rate: rate, Alone: alone[0]})
	}
	r.Together = together(t, f)
	return r
}

// together is what plain streams over all rails at once carry; where nothing is measured, what the
// rails were asked to carry.
func together(t testing.TB, f *railsbench.Field) timeline.Rate {
	t.Helper()
	if !figures() {
		return f.Sum()
	}
	span := 1500 * time.Millisecond
	if how == minute {
		span = 800 * time.Millisecond // medians of a few count there
	}
	r, err := railsbench.Together(t.Context(), f.Rig, span)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// renew heals every rail and replaces the sidecars by new ones, which have no history and meet.
func renew(t testing.TB, f *railsbench.Field, p *railsbench.Pair) {
	t.Helper()
	apply(t, f, "0s:all:heal")
	if err := f.Renew(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := f.Meet(t.Context(), p); err != nil {
		t.Fatal(err)
	}
}

// rejoined moves transfers until the sender has used every rail again and had none of its pairs on
// trial, each at some time: however busy the machine is, that must not take for ever.
func rejoined(t testing.TB, f *railsbench.Field, p *railsbench.Pair) {
	t.Helper()
	const bound = 30 * time.Second
	type rail struct {
		bytes uint64
		ill   string
	}
	look := func() map[string]rail {
		s, err := f.State(t.Context(), netrig.Sender)
		if err != nil {
			t.Fatal(err)
		}
		all := map[string]rail{}
		for _, q := range s.Leases.Rails.Pairs {
			if q.Samples == 0 {
				continue // a sidecar has lanes to itself, too, which nothing uses
			}
			r := all[q.Path.Local]
			r.bytes += q.Counters["bytes"]
			if q.State != "healthy" {
				r.ill += fmt.Sprintf("%s: %s. ", q.State, q.Reason)
			}
			all[q.Path.Local] = r
		}
		return all
	}
	began, before, back := time.Now(), look(), map[string]bool{}
	for {
		transfer(t, p, railsbench.Order{})
		now := look()
		for name, r := range now {
			back[name] = back[name] || r.ill == "" && r.bytes > before[name].bytes
		}
		n := 0
		for _, b := range back {
			if b {
				n++
			}
		}
		switch took := time.Since(began); {
		case n == f.Rig.Rails():
			t.Logf("all rails were used again %v after they were healed", took)
			return
		case took > bound:
			t.Fatalf("%v after the rails were healed %d of %d have been used again: before %v, now %v", took,
				n, f.Rig.Rails(), before, now)
		}
	}
}

// transfer moves one and fails the test if it does not come, or comes wrong.
func transfer(t testing.TB, p *railsbench.Pair, o railsbench.Order) *railsbench.Transfer {
	t.Helper()
	x, err := p.Begin(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	if x.Wait(); x.Err != nil {
		t.Fatal(x.Err)
	}
	return x
}

// rate is what a transfer reached.
func rate(x *railsbench.Transfer) timeline.Rate {
	return timeline.RateOf(x.Bytes, x.Ended.Sub(x.Began))
}

func faults(t testing.TB, s ...string) (out []timeline.Fault) {
	t.Helper()
	for _, x := range s {
		f, err := timeline.ParseFault(x)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, f)
	}
	return out
}

func apply(t testing.TB, f *railsbench.Field, s ...string) {
	t.Helper()
	for _, x := range faults(t, s...) {
		if err := f.Rig.Apply(x); err != nil {
			t.Fatal(err)
		}
	}
}

// after waits; the tests have to let time pass in which nothing may happen, or in which rails are
// dead.
func after(t testing.TB, d time.Duration) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	defer cancel()
	<-ctx.Done()
}

func median[T int | float64 | time.Duration](v []T) T {
	s := slices.Clone(v)
	slices.Sort(s)
	return s[len(s)/2]
}

// quantile is the value that a share of all does not exceed.
func quantile(v []time.Duration, q float64) time.Duration {
	s := slices.Clone(v)
	slices.Sort(s)
	return s[min(int(q*float64(len(s))), len(s)-1)]
}

func runs(t testing.TB, lowest int) int {
	t.Helper()
	v := os.Getenv(attackEnv)
	if v == "" {
		return lowest
	}
	n, err := strconv.Atoi(v)
	if err != nil || n < 1 {
		t.Fatalf("%s=%q: want a number of runs", attackEnv, v)
	}
	return n
}
