package sim

import (
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport/simfabric"
)

// RunsEnv names the variable that says how many random schedules run, and makes the big cluster move a million slices.
const RunsEnv = "KVSPRAY_SIM_RUNS"

func runs(t testing.TB) (n int, full bool) {
	s := os.Getenv(RunsEnv)
	if s == "" {
		return 100, false
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < 1 {
		t.Fatalf("%s=%q: must be a positive number of runs", RunsEnv, s)
	}
	return n, true
}

func (v verdict) check(t testing.TB) {
	t.Helper()
	for _, p := range v.problems {
		t.Error(p)
	}
}

// TestFlapping: rails die, come back, swallow one direction, collapse, lose packets; engines preempt; results come twice; and no
// transfer fails while there is a path.
func TestFlapping(t *testing.T) {
	s := scenario{nodes: 64, rails: 4, partners: 3, transfers: 8, tokens: 256, deadline: 10 * time.Second, spread: time.Second,
		preempted: 0.05, racks: 4, link: fast, repeats: 0.01}
	for seed := range uint64(3) {
		began := time.Now()
		c := s.build(seed, s.faults(seed, 24))
		v := s.run(c)
		report(t, c, time.Since(began))
		v.check(t)
		if v.failed > 0 {
			t.Errorf("seed %d: %d transfers failed, %d did not: %q", seed, v.failed, v.ok, v.reasons)
		}
		if st := c.F.Stats(); st.Swallowed == 0 || c.Repeated() == 0 || st.Ended[transfer.InDoubt] == 0 {
			t.Errorf("seed %d: nothing was swallowed, repeated, or in doubt: there was no fault", seed)
		}
	}
}

// TestTrace: the same seed gives the same events, down to the last.
func TestTrace(t *testing.T) {
	s := scenario{nodes: 24, rails: 4, partners: 3, transfers: 6, tokens: 256, deadline: 10 * time.Second, spread: 500 * time.Millisecond,
		preempted: 0.1, racks: 3, link: fast, repeats: 0.01}
	seen := map[uint64]uint64{}
	for seed := range uint64(4) {
		var first uint64
		for again := range 3 {
			c := s.build(seed, s.faults(seed, 10))
			s.run(c).check(t)
			switch trace := c.F.Trace(); {
			case again == 0:
				first = trace
			case trace != first:
				t.Fatalf("seed %d: traces %016x and %016x", seed, first, trace)
			}
		}
		if other, ok := seen[first]; ok {
			t.Errorf("seeds %d and %d have one trace", seed, other)
		}
		seen[first] = seed
	}
}

// TestThousandNodes: a thousand nodes of eight rails, one in a hundred of which flaps.
func TestThousandNodes(t *testing.T) {
	s := scenario{nodes: 1000, rails: 8, partners: 4, transfers: 1, tokens: 256, deadline: 20 * time.Second, spread: time.Second,
		preempted: 0.01, racks: 20, link: fast, repeats: 0.001}
	if _, full := runs(t); full {
		s.transfers, s.spread = 63, 2*time.Second
	}
	began := time.Now()
	faults := s.faults(7, 80)
	for i := range faults {
		faults[i].kind = flaps
	}
	c := s.build(7, faults)
	v := s.run(c)
	report(t, c, time.Since(began))
	v.check(t)
	if v.failed > 0 {
		t.Errorf("%d transfers failed, %d did not: %q", v.failed, v.ok, v.reasons)
	}
	if n := slices(c); s.transfers == 63 && n < 1e6 {
		t.Errorf("%d slices", n)
	}
}

// TestSchedules runs small clusters under random faults, many more than there are rails. Transfers may fail there, promises
// may not.
func TestSchedules(t *testing.T) {
	n, _ := runs(t)
	var ok, failed, alone int
	var events uint64
	for seed := range uint64(n) {
		s := scenario{nodes: 3 + int(seed%4), rails: 1 + int(seed%3), partners: 2, transfers: 6, tokens: 64 << (seed % 3), deadline: 3 * time.Second,
			spread: time.Second, preempted: 0.4, alone: 0.05, record: time.Duration(seed%3) * 20 * time.Millisecond, link: fast, repeats: 0.02}
		if seed%2 == 1 {
			s.link = simfabric.LinkSpec{BitsPerSecond: 200e6, Latency: 100 * time.Microsecond, Jitter: 300 * time.Microsecond, Buffer: 256 << 10}
		}
		faults := s.faults(seed, 2+int(seed%17))
		c := s.build(seed, faults)
		v := s.run(c)
		ok, failed, alone, events = ok+v.ok, failed+v.failed, alone+v.alone, events+c.F.Stats().Events
		if len(v.problems) > 0 {
			for _, x := range s.shrink(seed, faults) {
				t.Log(x)
			}
			t.Fatalf("seed %d, with the faults above: %q", seed, v.problems)
		}
	}
	t.Logf("%d schedules, %d events: %d transfers came, %d did not, %d had no prefill", n, events, ok, failed, alone)
	if ok == 0 || failed == 0 || alone == 0 {
		t.Error("the faults are too strong, or too weak, to show anything")
	}
}

// TestAllRailsDead: three seconds without any path. Who has longer to live comes, who has not fails in time.
func TestAllRailsDead(t *testing.T) {
	for _, silent := range []bool{false, true} {
		s := scenario{nodes: 6, rails: 4, partners: 2, transfers: 0, tokens: 2048, deadline: 12 * time.Second, spread: time.Second, link: fast}
		s.link.BitsPerSecond = 1e9
		c := s.build(1, nil)
		for i, n := range c.Nodes {
			to := c.Nodes[(i+1)%s.nodes]
			c.Begin(n, to, s.tokens, s.deadline, time.Millisecond)
			c.Begin(n, to, s.tokens, 2*time.Second, time.Millisecond)
			for _, r := range n.Host.Rails() {
				c.F.After(20*time.Millisecond, func() {
					if silent {
						r.Tx().SetDeaf(true)
					} else {
						r.Down()
					}
				})
				c.F.After(3020*time.Millisecond, func() {
					r.Tx().SetDeaf(false)
					r.Up()
				})
			}
		}
		s.transfers = 2
		s.run(c).check(t)
		for _, x := range c.Transfers() {
			if x.Sent == nil || x.Received == nil {
				continue // said above
			}
			if came := x.Received.Status == exec.StatusOK; came != (x.Deadline == s.deadline) {
				t.Errorf("silent %v: a transfer with a deadline of %s: came %v after %s: %q", silent, x.Deadline, came, x.Took(), x.Received.Reason)
			}
		}
	}
}

// TestIncast: sixteen senders, one receiver of one rail. All of it comes, and the receiver's link is not left idle.
func TestIncast(t *testing.T) {
	const senders = 16
	link := simfabric.LinkSpec{BitsPerSecond: 10e9, Latency: 10 * time.Microsecond, Jitter: 2 * time.Microsecond, Buffer: 4 << 20}
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
	t.Logf("%d MiB in %s: %.3f of the link; %d overflows, deepest queue %d KiB", bytes>>20, took, share, rx.Overflows(), rx.Deepest()>>10)
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

// TestSabotage: where a line is missing, a promise is broken and the watching says which.
func TestSabotage(t *testing.T) {
	for _, x := range []struct {
		what sabotage
		name string
		want string
	}{
		{fenceNothing, "fence nothing", "written after"},
		{commitEarly, "commit early", "committed, and chunk"},
		{alwaysValid, "always valid", "committed, and chunk"},
		{closeNothing, "close nothing", "is read after"},
		{neverTick, "never tick", "never ended"},
	} {
		t.Run(x.name, func(t *testing.T) {
			s := scenario{nodes: 6, rails: 3, partners: 2, transfers: 20, tokens: 256, deadline: 2 * time.Second, spread: time.Second, preempted: 1,
				record: 20 * time.Millisecond, link: fast, repeats: 0.02, sabotage: x.what}
			s.link.BitsPerSecond = 1e9
			const n, seeds = 24, 20 // some take a coincidence
			var seed uint64
			var faults []fault
			var v verdict
			for ; seed < seeds && len(v.problems) == 0; seed++ {
				honestly := s
				honestly.sabotage = honest
				faults = s.faults(seed, n)
				honestly.run(honestly.build(seed, faults)).check(t)
				v = s.run(s.build(seed, faults))
			}
			seed--
			if !strings.Contains(strings.Join(v.problems, "\n"), x.want) {
				t.Fatalf("%d came, %d did not; problems: %q, want one that says %q", v.ok, v.failed, v.problems, x.want)
			}
			short := s.shrink(seed, faults)
			t.Logf("%s; %d of %d faults are left: %v", v.problems[0], len(short), n, short)
			if len(short) > n/4 {
				t.Errorf("%d faults are left of %d", len(short), n)
			}
			if len(s.run(s.build(seed, short)).problems) == 0 {
				t.Error("what is left breaks nothing")
			}
		})
	}
}
