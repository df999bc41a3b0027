package sim

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"testing"
	"time"

	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/transport/simfabric"
)

// slack is what lies between a deadline and the end that it causes: fences, and the word of it to the other side.
const slack = 2 * time.Second

// fast is a rail of 25 Gbit/s.
var fast = simfabric.LinkSpec{BitsPerSecond: 25e9, Latency: 5 * time.Microsecond, Jitter: 2 * time.Microsecond, Buffer: 8 << 20}

// scenario is a cluster and its load. The load of a seed is the same whatever the faults are.
type scenario struct {
	nodes, rails, partners int
	transfers              int // per node
	tokens                 uint32
	deadline               time.Duration
	spread                 time.Duration // transfers begin within
	preempted              float64       // share of transfers
	record                 time.Duration // until their engines say so
	alone                  float64       // share of transfers whose prefill never comes
	racks                  int           // 0: one switch without bounds
	link                   simfabric.LinkSpec
	repeats                float64
	sabotage               sabotage
}

// fault is one thing that goes wrong.
type fault struct {
	kind faultKind
	node int
	rail int
	at   time.Duration // after the load began
	last time.Duration
}

type faultKind uint8

const (
	flaps faultKind = iota
	pulled
	deafTx
	deafRx
	slowed
	lossy
	numFaults
)

func (f fault) String() string {
	return fmt.Sprintf("%s of n%d/r%d at %s for %s", [...]string{"flaps", "pulled", "deaf tx", "deaf rx", "slowed", "lossy"}[f.kind], f.node, f.rail, f.at, f.last)
}

// faults draws n of them.
func (s scenario) faults(seed uint64, n int) []fault {
	rng := rand.New(rand.NewPCG(seed, 0xfa))
	out := make([]fault, n)
	for i := range out {
		out[i] = fault{faultKind(rng.IntN(int(numFaults))), rng.IntN(s.nodes), rng.IntN(s.rails), time.Duration(rng.Int64N(int64(s.spread))),
			time.Duration(rng.Int64N(int64(2 * time.Second)))}
	}
	return out
}

func (x fault) schedule(c *Cluster) {
	f, r := c.F, c.Nodes[x.node].Host.Rails()[x.rail]
	begin, end := func() {}, func() {}
	switch x.kind {
	case flaps:
		begin = func() { r.Flap(300*time.Millisecond, f.Now()+x.last) }
	case pulled:
		begin, end = r.Down, r.Up
	case deafTx:
		begin, end = func() { r.Tx().SetDeaf(true) }, func() { r.Tx().SetDeaf(false) }
	case deafRx:
		begin, end = func() { r.Rx().SetDeaf(true) }, func() { r.Rx().SetDeaf(false) }
	case slowed:
		begin, end = func() { r.Tx().SetRate(0.05) }, func() { r.Tx().SetRate(1) }
	case lossy:
		begin, end = func() { r.Rx().SetLoss(0.02) }, func() { r.Rx().SetLoss(0) }
	}
	f.After(x.at, func() {
		begin()
		f.After(x.last, end)
	})
}

// build makes the cluster and everything that will happen to it.
func (s scenario) build(seed uint64, faults []fault) *Cluster {
	c := New(Config{Fabric: simfabric.Config{Seed: seed, UserTimeout: 5 * time.Second}, RepeatResults: s.repeats,
		Record: s.record})
	c.sabotage = s.sabotage
	f := c.F
	var racks []*simfabric.Switch
	for i := range s.racks {
		// Half of what the hosts could send.
		per := float64((s.nodes+s.racks-1)/s.racks*s.rails) * s.link.BitsPerSecond / 2
		racks = append(racks, f.NewSwitch(fmt.Sprintf("rack%d", i), &simfabric.LinkSpec{BitsPerSecond: per, Latency: 2 * time.Microsecond, Buffer: 32 << 20}))
	}
	for i := range s.nodes {
		var rails []simfabric.RailSpec
		for r := range s.rails {
			spec := simfabric.RailSpec{Name: fmt.Sprintf("r%d", r), Link: s.link}
			if s.racks > 0 {
				spec.Switch = racks[i%s.racks]
			}
			rails = append(rails, spec)
		}
		c.AddNode(rails...)
	}
	for i, n := range c.Nodes {
		for p := range s.partners {
			c.Join(n, c.Nodes[(i+1+p)%s.nodes])
		}
	}
	f.Run(f.Now()+settle, nil)
	for _, x := range faults {
		x.schedule(c)
	}
	rng := rand.New(rand.NewPCG(seed, 0x10ad))
	for i, n := range c.Nodes {
		for range s.transfers {
			from, to := n, c.Nodes[(i+1+rng.IntN(s.partners))%s.nodes]
			if rng.IntN(2) == 0 {
				from, to = to, from
			}
			preempt, alone := rng.Float64() < s.preempted, rng.Float64() < s.alone
			at, later := time.Duration(rng.Int64N(int64(s.spread))), time.Duration(rng.Int64N(int64(4*time.Millisecond)))
			f.After(at, func() {
				if alone {
					c.BeginAlone(from, to, s.tokens, s.deadline)
					return
				}
				t := c.Begin(from, to, s.tokens, s.deadline, 2*time.Millisecond)
				if preempt {
					f.After(later, func() { t.Preempt(2 * time.Millisecond) })
				}
			})
		}
	}
	return c
}

// settle is how long a cluster takes until every lane is up.
const settle = 50 * time.Millisecond

// verdict is how a run went.
type verdict struct {
	ok, failed int
	alone      int      // rightly failed
	reasons    []string // of the first that failed
	problems   []string // broken promises
}

// run lets everything happen, and says what was promised and not kept.
func (s scenario) run(c *Cluster) (v verdict) {
	begin := c.F.Now()
	end := begin + s.spread + s.deadline + exec.DefaultGrace + slack
	c.F.Run(begin+s.spread+time.Millisecond, func() bool { return len(c.Violations()) > 0 })
	c.F.Run(end, func() bool { return c.Open() == 0 || len(c.Violations()) > 0 })
	if c.Open() == 0 {
		c.F.Run(end, nil) // what comes late comes now
	}
	v.problems = append(v.problems, c.Violations()...)
	if len(v.problems) > 0 {
		return v
	}
	problem := func(format string, args ...any) {
		if len(v.problems) < maxViolations {
			v.problems = append(v.problems, fmt.Sprintf(format, args...))
		}
	}
	if n := s.nodes * s.transfers; len(c.Transfers()) != n {
		problem("%d transfers of %d began", len(c.Transfers()), n)
	}
	for _, x := range c.Transfers() {
		switch {
		case x.Sent == nil && !x.Alone || x.Received == nil:
			problem("transfer %d from %s to %s never ended", x.ID, x.From.addr, x.To.addr)
		case x.Last() > x.Deadline+slack:
			problem("transfer %d ended after %s, its deadline was %s", x.ID, x.Last(), x.Deadline)
		case x.Alone && x.Received.Status == exec.StatusOK:
			problem("transfer %d came from nowhere", x.ID)
		case x.Alone:
			v.alone++
		case x.Received.Status == exec.StatusOK:
			v.ok++
		default:
			v.failed++
			if len(v.reasons) < 5 {
				v.reasons = append(v.reasons, fmt.Sprintf("transfer %d: received %d %q, sent %d %q", x.ID, x.Received.Status, x.Received.Reason,
					x.Sent.Status, x.Sent.Reason))
			}
		}
	}
	return v
}

// shrink drops faults as long as the run still breaks a promise.
func (s scenario) shrink(seed uint64, faults []fault) []fault {
	broken := func(x []fault) bool { return len(s.run(s.build(seed, x)).problems) > 0 }
	for step := max(1, len(faults)/2); ; {
		smaller := false
		for i := 0; i < len(faults); {
			rest := append(append([]fault(nil), faults[:i]...), faults[min(i+step, len(faults)):]...)
			if broken(rest) {
				faults, smaller = rest, true
			} else {
				i += step
			}
		}
		if step == 1 && !smaller || len(faults) == 0 {
			return faults
		}
		step = max(1, step/2)
	}
}

// slices that ended, of a run.
func slices(c *Cluster) (n uint64) {
	for _, k := range c.F.Stats().Ended {
		n += k
	}
	return n
}

func report(t testing.TB, c *Cluster, wall time.Duration) {
	t.Helper()
	s := c.F.Stats()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	t.Logf("%d events in %.1f s, %.2f million a second; %d slices %v; chunks: %d sent, %d again, %d swallowed, %d overflows; %d results repeated; heap %d MiB; trace %016x",
		s.Events, wall.Seconds(), float64(s.Events)/wall.Seconds()/1e6, slices(c), s.Ended, s.Sent, s.Again, s.Swallowed, s.Overflows, c.Repeated(),
		m.HeapAlloc>>20, c.F.Trace())
}
