package sim

import (
	"os"
	"runtime"
	"strconv"
	"testing"
	"time"

	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport/simfabric"
)

// Environment of these tests.
const (
	// RunsEnv sets how many random schedules run, and makes the big cluster move a million slices.
	RunsEnv = "KVSPRAY_SIM_RUNS"
	// SeedEnv is the first of their seeds: a schedule that failed is run alone with this and one run.
	SeedEnv = "KVSPRAY_SIM_SEED"
)

const fewRuns = 100 // of schedules, the default

func number(t testing.TB, env string, low int) (n int, set bool) {
	s := os.Getenv(env)
	if s == "" {
		return 0, false
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < low {
		t.Fatalf("%s=%q: must be a number from %d", env, s, low)
	}
	return n, true
}

func runs(t testing.TB) (n int, full bool) {
	if n, full = number(t, RunsEnv, 1); !full {
		n = fewRuns
	}
	return n, full
}

func (v verdict) check(t testing.TB) {
	t.Helper()
	for _, p := range v.problems {
		t.Error(p)
	}
}

// TestFlapping: rails die, come back, swallow one direction, collapse, lose packets; backends give
// slices back; engines preempt; results come twice, and so do control frames, out of their order;
// and no transfer fails while there is a path.
func TestFlapping(t *testing.T) {
	s := scenario{nodes: 64, rails: 4, peers: 3, transfers: 8, tokens: 256,
		deadline: 10 * time.Second, spread: time.Second,
		preempted: 0.05, racks: 4, link: fast, twice: 0.01, replay: 0.2, errors: 0.01}
	for seed, ranks := range [][]int{{1}, {2}, {1, 2, 4}} {
		began, seed := time.Now(), uint64(seed)
		s.ranks = ranks
		x := s.draw(seed, 24, 0)
		c := s.build(x)
		v := s.run(c, x)
		report(t, c, time.Since(began))
		v.check(t)
		if v.failed > 0 {
			t.Errorf("seed %d: %d transfers %s, %d did not: %q", seed, v.failed, brokePath, v.ok, v.reasons)
		}
		if st := c.F.Stats(); st.Swallowed == 0 || c.Stats().Twice == 0 ||
			st.Ended[transfer.InDoubt] == 0 {
			t.Errorf("seed %d: nothing was swallowed, repeated, or in doubt: there was no fault", seed)
		}
	}
}

// TestTrace: the same seed gives the same events, down to the last, on however many processors;
// sidecars and engines that die included.
func TestTrace(t *testing.T) {
	s := scenario{nodes: 24, rails: 4, peers: 3, transfers: 6, tokens: 256,
		deadline: 10 * time.Second, spread: 500 * time.Millisecond,
		preempted: 0.1, canceled: 0.1, racks: 3, link: fast, twice: 0.01, replay: 0.1}
	seen := map[uint64]uint64{}
	var all Stats
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(0))
	for seed := range uint64(4) {
		var first uint64
		for i, procs := range []int{1, 2, 8} {
			runtime.GOMAXPROCS(procs)
			x := s.draw(seed, 30, 0.5)
			c := s.build(x)
			s.run(c, x).check(t)
			switch trace := c.F.Trace(); {
			case i == 0:
				first = trace
			case trace != first:
				t.Fatalf("seed %d: trace %016x with 1 processor, %016x with %d", seed, first, trace, procs)
			}
			all.add(c.Stats())
		}
		if other, ok := seen[first]; ok {
			t.Errorf("seeds %d and %d have one trace", seed, other)
		}
		seen[first] = seed
	}
	if all.Restarts == 0 || all.EngineDeaths == 0 || all.Replayed == 0 || all.Canceled == 0 ||
		all.Preempted == 0 {
		t.Errorf("something never happened: %+v", all)
	}
}

// TestThousandNodes: a thousand nodes of eight rails, one in a hundred of which flaps. In full also
// once more, with the same trace.
func TestThousandNodes(t *testing.T) {
	s := scenario{nodes: 1000, rails: 8, peers: 4, transfers: 1, tokens: 256,
		deadline: 20 * time.Second, spread: time.Second,
		preempted: 0.01, racks: 20, link: fast, twice: 0.001}
	if _, full := runs(t); full {
		s.transfers, s.spread = 63, 2*time.Second
	}
	began := time.Now()
	x := s.draw(7, s.nodes*s.rails/100, 0)
	for i := range x.faults {
		x.faults[i].kind = flaps
	}
	c := s.build(x)
	v := s.run(c, x)
	report(t, c, time.Since(began))
	v.check(t)
	if v.failed > 0 {
		t.Errorf("%d transfers %s, %d did not: %q", v.failed, brokePath, v.ok, v.reasons)
	}
	if s.transfers != 63 {
		return
	}
	if n := ended(c); n < 1e6 {
		t.Errorf("%d slices", n)
	}
	first := c.F.Trace()
	c = nil // two of them are much memory
	c = s.build(x)
	s.run(c, x)
	if again := c.F.Trace(); again != first {
		t.Errorf("the same seed gave trace %016x, and %016x", first, again)
	}
}

// small is one of the clusters that random schedules run on.
func small(seed uint64) scenario {
	s := scenario{nodes: 3 + int(seed%4), rails: 1 + int(seed%3), peers: 2, transfers: 6,
		tokens: 64 << (seed % 3), deadline: 3 * time.Second,
		spread: time.Second, preempted: 0.4, canceled: 0.1, alone: 0.05, record: time.Duration(seed%3) *
			20 * time.Millisecond, link: fast, twice: 0.02}
	if seed%2 == 1 {
		s.link = slow
	}
	switch seed % 5 {
	case 2, 3:
		s.replay = 0.02
	case 4:
		s.replay = 0.2
	}
	switch seed % 11 {
	case 3, 4:
		s.ranks = []int{2} // rank by rank
	case 5, 6:
		s.ranks = []int{1, 2, 4} // several ranks feed one, and one feeds several
	}
	s.nics = seed%6 == 5
	if seed%13 == 7 {
		s.lies, s.errors = 0.05, 0.05
	}
	if seed%8 == 3 {
		// Long transfers at the same time on slow rails: all priorities wait for one peer, and for long.
		s.tokens, s.peers, s.spread, s.deadline = 1024, 1, 100*time.Millisecond, 8*time.Second
	}
	if seed%7 > 3 {
		s.unfence, s.slices = 0.01, 6
	}
	return s
}

// schedules runs small clusters under random faults, many more than there are rails. Transfers may
// fail there, promises may not.
func schedules(t *testing.T, n int) (c Stats) {
	first, _ := number(t, SeedEnv, 0)
	var ok, failed, alone int
	var events uint64
	var unattended [2]uint64 // by kernels, by NICs
	for seed := uint64(first); seed < uint64(first+n); seed++ {
		s := small(seed)
		x := s.draw(seed, 2+int(seed%17), 0.4)
		run := s.build(x)
		v := s.run(run, x)
		ok, failed, alone, events = ok+v.ok, failed+v.failed, alone+v.alone, events+run.F.Stats().Events
		c.add(run.Stats())
		if n := run.F.Stats().Unattended; s.nics {
			unattended[1] += n
		} else {
			unattended[0] += n
		}
		if len(v.problems) > 0 {
			short := s.shrink(x)
			t.Fatalf("seed %d (%s=%d %s=1): %q\nof %d faults and %d transfers these are left; in "+
				"TestRegressions they are run again:\n%#v\nwhich breaks %q",
				seed, SeedEnv, seed, RunsEnv, v.problems, len(x.faults), len(x.loads), short,
				s.run(s.build(short), short).problems)
		}
	}
	t.Logf("%d schedules, %d events: %d transfers came, %d did not, %d had no prefill; kernels took "+
		"%d chunks for stopped processes, NICs wrote %d; %+v",
		n, events, ok, failed, alone, unattended[0], unattended[1], c)
	if n >= fewRuns && (ok == 0 || failed == 0 || alone == 0 || unattended[0] == 0 ||
		unattended[1] == 0) {
		t.Error("the faults are too strong, or too weak, to show anything")
	}
	return c
}

func (s *Stats) add(x Stats) {
	s.Twice += x.Twice
	s.Replayed += x.Replayed
	s.Stale += x.Stale
	s.Refused += x.Refused
	s.FencesFailed += x.FencesFailed
	s.Late += x.Late
	s.Lies += x.Lies
	s.Restarts += x.Restarts
	s.EngineDeaths += x.EngineDeaths
	s.Canceled += x.Canceled
	s.Preempted += x.Preempted
	s.Leases += x.Leases
	s.Overtook, s.Lacked = max(s.Overtook, x.Overtook), max(s.Lacked, x.Lacked)
}

// TestSchedules: whatever happens, in whatever order, no promise is broken.
func TestSchedules(t *testing.T) {
	n, _ := runs(t)
	c := schedules(t, n)
	if n >= fewRuns && (c.Twice == 0 || c.Replayed == 0 || c.Restarts == 0 || c.EngineDeaths == 0 ||
		c.FencesFailed == 0 || c.Lies == 0 || c.Canceled == 0 || c.Preempted == 0 ||
		c.Overtook == 0 || c.Lacked == 0) {
		t.Errorf("something never happened: %+v", c)
	}
}

// TestRegressions runs what once broke a promise.
func TestRegressions(t *testing.T) {
	for _, x := range []schedule{
		// Everything that a lane carried is in the buffers of a process that was stopped, and no way
		// leads back: the lane has to end.
		{seed: 271,
			loads: []load{{0, 1, 60328357, false, 0, 0, false, 0}, {2, 4, 249716643, false, 0, 0, false, 0},
				{4, 3, 182688041, false, 0, 0, false, 0},
				{3, 4, 247433357, false, 0, 0, false, 0}, {5, 4, 273497720, false, 3955085, 0, false, 0},
				{1, 5, 12197360, false, 0, 0, false, 0}},
			faults: []fault{{allRails, 3, 1, 478659025, forever}, {frozen, 4, 0, 370717643, 224664337}}},
	} {
		s := small(x.seed)
		s.run(s.build(x), x).check(t)
	}
}

// TestShrink: of a hundred things the three are left that matter together.
func TestShrink(t *testing.T) {
	var all []int
	for i := range 100 {
		all = append(all, i)
	}
	left := shrink(all, func(some []int) bool {
		n := 0
		for _, x := range some {
			if x == 3 || x == 50 || x == 97 {
				n++
			}
		}
		return n == 3
	})
	if len(left) != 3 {
		t.Errorf("%v are left", left)
	}
	if left := shrink(all, func([]int) bool { return true }); len(left) != 0 {
		t.Errorf("%v are left where nothing matters", left)
	}
}

// TestShrinkSchedule: of a schedule that breaks a promise as soon as two sidecars have died and an
// engine has canceled what is left is that, which breaks it still.
func TestShrinkSchedule(t *testing.T) {
	s := small(5)
	s.broke = func(c *Cluster) (out []string) {
		if st := c.Stats(); st.Restarts >= 2 && st.Canceled > 0 {
			out = append(out, "two sidecars died, and an engine cancelled")
		}
		return out
	}
	x := s.draw(5, 17, 0.8)
	if p := s.run(s.build(x), x).problems; len(p) != 1 {
		t.Fatalf("%d faults, %d transfers: %q: not what this test is about", len(x.faults),
			len(x.loads), p)
	}
	faults, loads := len(x.faults), len(x.loads)
	short := s.shrink(x)
	if len(x.faults) != faults || len(x.loads) != loads {
		t.Error("the schedule itself was changed")
	}
	t.Logf("of %d faults and %d transfers are left: %#v", faults, loads, short)
	if len(short.faults) != 2 || short.faults[0].kind != restart || short.faults[1].kind != restart ||
		len(short.loads) != 1 || short.loads[0].cancel == 0 {
		t.Errorf("of %d faults and %d transfers are left: %#v", faults, loads, short)
	}
	if p := s.run(s.build(short), short).problems; len(p) != 1 || p[0] != "two sidecars died, and "+
		"an engine cancelled" {
		t.Errorf("what is left breaks %q", p)
	}
	// Each item of it is needed.
	for i := range short.faults {
		y := short
		y.faults = append(append([]fault(nil), short.faults[:i]...), short.faults[i+1:]...)
		if p := s.run(s.build(y), y).problems; len(p) != 0 {
			t.Errorf("without fault %d it breaks %q still", i, p)
		}
	}
}

// TestAllRailsDead: three seconds without any path. A transfer with a later deadline arrives,
// another fails in time.
func TestAllRailsDead(t *testing.T) {
	for _, silent := range []bool{false, true} {
		s := scenario{nodes: 6, rails: 4, peers: 2, tokens: 2048, deadline: 12 * time.Second,
			spread: time.Second, link: fast}
		s.link.BitsPerSecond = 1e9
		x := schedule{seed: 1}
		c := s.build(x)
		for i, n := range c.Nodes {
			to := c.Nodes[(i+1)%s.nodes]
			c.Begin(n, to, s.tokens, s.deadline, time.Millisecond)
			c.Begin(n, to, s.tokens, 2*time.Second, time.Millisecond)
			for _, r := range n.Host.Rails() {
				c.F.After(20*time.Millisecond, func() {
					if silent {
						r.Tx().SetSilent(true)
					} else {
						r.Down()
					}
				})
				c.F.After(3020*time.Millisecond, func() {
					r.Tx().SetSilent(false)
					r.Up()
				})
			}
		}
		s.run(c, x).check(t)
		for _, x := range c.Transfers() {
			if x.Sent == nil || x.Received == nil {
				continue // reported above
			}
			if came := x.Received.Status == engines.StatusOK; came != (x.Deadline == s.deadline) {
				t.Errorf("silent %v: a transfer with a deadline of %s: came %v after %s: %q", silent,
					x.Deadline, came, x.Took(), x.Received.Reason)
			}
		}
	}
}

// TestFrozenReceiver: a receiver's process stops in mid transfer while its machine goes on: its
// kernel takes what fits into its buffers, its NIC writes what it was allowed to write. One that
// goes on before the deadline has its transfer; one that does not fails it in time, and nothing of
// it is written once its engine has the blocks back. Transfers to others are none the wiser.
func TestFrozenReceiver(t *testing.T) {
	for _, nics := range []bool{false, true} {
		for _, stopped := range []time.Duration{100 * time.Millisecond, time.Second, 6 * time.Second} {
			var unattended uint64
			for seed := range uint64(20) {
				s := scenario{nodes: 3, rails: 2, peers: 2, link: slow, nics: nics,
					deadline: 4 * time.Second}
				c := s.build(schedule{seed: seed})
				from, to, other := c.Nodes[0], c.Nodes[1], c.Nodes[2]
				x := c.Begin(from, to, 2048, s.deadline, time.Millisecond)
				c.F.After(5*time.Millisecond+c.F.Jitter(100*time.Millisecond), func() { to.Freeze(stopped) })
				y := c.Begin(from, other, 512, s.deadline, time.Millisecond)
				c.F.Run(c.F.Now()+30*time.Second, func() bool { return len(c.Violations()) > 0 })
				c.Settle(stopped + slack)
				for _, v := range c.Violations() {
					t.Errorf("NICs %v, stopped for %v, seed %d: %s", nics, stopped, seed, v)
				}
				if x.Received == nil || y.Received == nil {
					continue // reported above
				}
				if came := x.Received.Status == engines.StatusOK; came != (stopped < s.deadline) {
					t.Errorf("NICs %v, stopped for %v of %v, seed %d: came %v: %q", nics, stopped, s.deadline,
						seed, came, x.Received.Reason)
				}
				if y.Received.Status != engines.StatusOK || y.Took() > s.deadline/2 {
					t.Errorf("NICs %v, stopped for %v, seed %d: a transfer to another: status %d after %v", nics,
						stopped, seed, y.Received.Status, y.Took())
				}
				unattended += c.F.Stats().Unattended
			}
			t.Logf("NICs %v, stopped for %v: %d chunks taken or written meanwhile", nics,
				stopped, unattended)
			if unattended == 0 {
				t.Errorf("NICs %v, stopped for %v: nothing came meanwhile: this tests nothing", nics, stopped)
			}
		}
	}
}

// TestIncast: sixteen senders, one receiver of one rail. All of it comes, and the receiver's link
// is not left idle.
func TestIncast(t *testing.T) {
	const senders = 16
	link := simfabric.LinkSpec{BitsPerSecond: 10e9, Latency: 10 * time.Microsecond,
		Jitter: 2 * time.Microsecond, Buffer: 4 << 20}
	c := New(Config{Fabric: simfabric.Config{Seed: 1}})
	to := c.AddNode(simfabric.RailSpec{Name: "r0", Link: link})
	for range senders {
		c.Join(c.AddNode(simfabric.RailSpec{Name: "r0", Link: link}), to)
	}
	c.F.Run(settle, nil)
	began := c.F.Now()
	var bytes uint64
	for _, n := range c.Nodes[1:] {
		for range 4 {
			bytes += c.Begin(n, to, 2048, 30*time.Second, time.Millisecond).Bytes()
		}
	}
	c.F.Run(began+40*time.Second, func() bool { return c.Open() == 0 })
	took := c.F.Now() - began
	rx := to.Host.Rails()[0].Rx()
	share := float64(bytes) * 8 / took.Seconds() / link.BitsPerSecond
	t.Logf("%d MiB in %s: %.3f of the link; %d overflows, deepest queue %d KiB", bytes>>20, took,
		share, rx.Overflows(), rx.Deepest()>>10)
	for _, v := range c.Violations() {
		t.Error(v)
	}
	if c.Open() > 0 {
		t.Errorf("%d leases are open", c.Open())
	}
	if share < 0.75 {
		t.Errorf("%.3f of the link: it collapsed", share)
	}
}
