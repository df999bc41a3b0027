package sim

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/control/spray"
	"github.com/kvspray/kvspray/transport/simfabric"
)

// slack is what lies between a deadline and the end that it causes: fences, and the word of it to
// the other side.
const slack = 500 * time.Millisecond

// userTimeout is how long lanes are patient with silence.
const userTimeout = 5 * time.Second

// forever is longer than any run.
const forever = time.Hour

// fast is a rail of 25 Gbit/s, slow one of 200 Mbit/s on which everything takes long enough to be
// caught in the middle.
var (
	fast = simfabric.LinkSpec{BitsPerSecond: 25e9, Latency: 5 * time.Microsecond,
		Jitter: 2 * time.Microsecond, Buffer: 8 << 20}
	slow = simfabric.LinkSpec{BitsPerSecond: 200e6, Latency: 100 * time.Microsecond,
		Jitter: 300 * time.Microsecond, Buffer: 256 << 10}
)

// scenario is a cluster and the kind of its load. The load of a seed is the same whatever the
// faults are.
type scenario struct {
	nodes, rails, peers    int
	transfers              int // per node
	tokens                 uint32
	deadline               time.Duration
	spread                 time.Duration // transfers begin within
	preempted              float64       // share of transfers
	canceled               float64       // share of transfers, by either side
	record                 time.Duration // until engines report that they took blocks back
	alone                  float64       // share of transfers whose prefill never comes
	racks                  int           // 0: one switch without bounds
	link                   simfabric.LinkSpec
	twice, replay, unfence float64
	lies, errors           float64
	slices                 int   // in flight to one peer at most; 0: the default
	ranks                  []int // of the nodes' engines, in turn; nil: one
	// write by themselves, also where the process is stopped
	nics bool
	skew time.Duration // between clocks; 0: minutes
	// one promise more, for tests of what looks after promises
	broke func(*Cluster) []string
}

// load is one transfer and what its engines do to it.
type load struct {
	from, to int
	at       time.Duration
	alone    bool
	preempt  time.Duration // after it began; 0: never
	cancel   time.Duration // after it began; 0: never
	receiver bool          // the side that cancels
	prio     engines.Priority
}

// fault is one thing that goes wrong.
type fault struct {
	kind fkind
	node int
	rail int // control cut: the other node is that much further
	at   time.Duration
	last time.Duration
}

type fkind uint8

const (
	flaps fkind = iota
	pulled
	silentTx
	silentRx
	slowed
	lossy
	numRailFaults
)

const (
	// the sidecar dies, and another comes, whose clock is behind.
	restart   fkind = iota + numRailFaults
	newEngine       // the engine dies, and another comes
	frozen          // the sidecar is stopped and goes on
	cut             // control frames do not get through
	// the clock is late: time has passed unseen; it is monotonic, and never goes back in a
	// life.
	leap
	allRails // nothing gets through on any rail of the node
	numFaults
)

var faultNames = [numFaults]string{"flaps", "pulled", "silentTx", "silentRx", "slowed", "lossy",
	"restart", "newEngine", "frozen", "cut", "leap", "allRails"}

// GoString is the fault as this package's tests write it.
func (x fault) GoString() string {
	return fmt.Sprintf("{%s, %d, %d, %d, %d}", faultNames[x.kind], x.node, x.rail, x.at, x.last)
}

func (l load) GoString() string {
	return fmt.Sprintf("{%d, %d, %d, %v, %d, %d, %v, %d}", l.from, l.to, l.at, l.alone, l.preempt,
		l.cancel, l.receiver, l.prio)
}

// schedule is all that happens to a cluster.
type schedule struct {
	seed   uint64
	loads  []load
	faults []fault
}

// GoString is what to add to TestRegressions.
func (x schedule) GoString() string {
	var b strings.Builder
	fmt.Fprintf(&b, "{seed: %d,\n\tloads: []load{", x.seed)
	for _, l := range x.loads {
		fmt.Fprintf(&b, "%#v, ", l)
	}
	b.WriteString("},\n\tfaults: []fault{")
	for _, f := range x.faults {
		fmt.Fprintf(&b, "%#v, ", f)
	}
	b.WriteString("}},")
	return b.String()
}

// draw makes the schedule of a seed: its load, and n faults of which share `processes` meet
// processes and not rails.
func (s scenario) draw(seed uint64, n int, processes float64) schedule {
	x := schedule{seed: seed}
	rng := rand.New(rand.NewPCG(seed, 0x10ad))
	for i := range s.nodes {
		for range s.transfers {
			l := load{from: i, to: (i + 1 + rng.IntN(s.peers)) % s.nodes,
				at: time.Duration(rng.Int64N(int64(s.spread)))}
			if rng.IntN(2) == 0 {
				l.from, l.to = l.to, l.from
			}
			if rng.Float64() < s.preempted {
				l.preempt = 1 + time.Duration(rng.Int64N(int64(4*time.Millisecond)))
			}
			if rng.Float64() < s.canceled {
				l.cancel, l.receiver = 1+time.Duration(rng.Int64N(int64(20*time.Millisecond))), rng.IntN(2) == 0
			}
			l.alone = rng.Float64() < s.alone
			x.loads = append(x.loads, l)
		}
	}
	rng = rand.New(rand.NewPCG(seed, 0x9410))
	for i := range x.loads {
		x.loads[i].prio = engines.Priority(rng.IntN(spray.Priorities))
	}
	rng = rand.New(rand.NewPCG(seed, 0xfa))
	for range n {
		f := fault{fkind(rng.IntN(int(numRailFaults))), rng.IntN(s.nodes), rng.IntN(s.rails),
			time.Duration(rng.Int64N(int64(s.spread))),
			time.Duration(rng.Int64N(int64(2 * time.Second)))}
		if rng.Float64() < processes {
			f.kind = numRailFaults + fkind(rng.IntN(int(numFaults-numRailFaults)))
			if f.kind == allRails && rng.IntN(2) == 0 {
				f.last = forever
			}
		}
		x.faults = append(x.faults, f)
	}
	return x
}

func (x fault) schedule(c *Cluster) {
	f, n := c.F, c.Nodes[x.node]
	begin, end := func() {}, func() {}
	r := n.Host.Rails()[x.rail]
	switch x.kind {
	case flaps:
		begin = func() { r.Flap(300*time.Millisecond, f.Now()+x.last) }
	case pulled:
		begin, end = r.Down, r.Up
	case silentTx:
		begin, end = func() { r.Tx().SetSilent(true) }, func() { r.Tx().SetSilent(false) }
	case silentRx:
		begin, end = func() { r.Rx().SetSilent(true) }, func() { r.Rx().SetSilent(false) }
	case slowed:
		begin, end = func() { r.Tx().SetRate(0.05) }, func() { r.Tx().SetRate(1) }
	case lossy:
		begin, end = func() { r.Rx().SetLoss(0.02) }, func() { r.Rx().SetLoss(0) }
	case restart:
		begin, end = n.Kill, n.Restart
	case newEngine:
		begin, end = n.KillEngine, n.StartEngine
	case frozen:
		begin = func() { n.Freeze(x.last) }
	case cut:
		begin = func() { c.Cut(n, c.Nodes[(x.node+1+x.rail)%len(c.Nodes)], x.last) }
	case leap:
		begin = func() { n.Leap(x.last) }
	case allRails:
		set := func(silent bool) func() {
			return func() {
				for _, r := range n.Host.Rails() {
					r.Tx().SetSilent(silent)
					r.Rx().SetSilent(silent)
				}
			}
		}
		begin, end = set(true), set(false)
	}
	f.After(x.at, func() {
		begin()
		f.After(x.last, end)
	})
}

// build makes the cluster and everything that will happen to it.
func (s scenario) build(x schedule) *Cluster {
	c := New(Config{Fabric: simfabric.Config{Seed: x.seed, UserTimeout: userTimeout, OneSided: s.nics},
		Exec: exec.Config{MaxSlices: s.slices}, Twice: s.twice, Replay: s.replay,
		FenceFails: s.unfence, Lies: s.lies, Errors: s.errors, Record: s.record, Skew: s.skew})
	f := c.F
	var racks []*simfabric.Switch
	for i := range s.racks {
		// Half of what the hosts could send.
		per := float64((s.nodes+s.racks-1)/s.racks*s.rails) * s.link.BitsPerSecond / 2
		racks = append(racks, f.NewSwitch(fmt.Sprintf("rack%d", i),
			&simfabric.LinkSpec{BitsPerSecond: per, Latency: 2 * time.Microsecond, Buffer: 32 << 20}))
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
		ranks := 1
		if len(s.ranks) > 0 {
			ranks = s.ranks[i%len(s.ranks)]
		}
		c.AddRanks(ranks, rails...)
	}
	for i, n := range c.Nodes {
		for p := range s.peers {
			c.Join(n, c.Nodes[(i+1+p)%s.nodes])
		}
	}
	f.Run(f.Now()+settle, nil)
	for _, y := range x.faults {
		y.schedule(c)
	}
	for _, l := range x.loads {
		f.After(l.at, func() {
			from, to := c.Nodes[l.from], c.Nodes[l.to]
			if l.alone {
				c.BeginAlone(from, to, s.tokens, s.deadline)
				return
			}
			t := c.BeginAs(l.prio, from, to, s.tokens, s.deadline, 2*time.Millisecond)
			if t == nil {
				return
			}
			if l.preempt > 0 {
				f.After(l.preempt, func() { t.Preempt(2 * time.Millisecond) })
			}
			if l.cancel > 0 {
				f.After(l.cancel, func() { t.Cancel(l.receiver) })
			}
		})
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

// patience is how much later than its deadline a transfer may end.
func (s scenario) patience(x schedule) time.Duration {
	d := slack
	if s.unfence > 0 {
		d += 3 * exec.DefaultGrace // a fence may fail, and fail again
	}
	for _, f := range x.faults {
		if f.kind >= numRailFaults && f.last < forever {
			d += f.last
		}
	}
	return d
}

// run lets everything happen, and returns the broken promises.
func (s scenario) run(c *Cluster, x schedule) (v verdict) {
	begin := c.F.Now()
	end := begin + s.spread + s.deadline + s.patience(x)
	broken := func() bool { return len(c.Violations()) > 0 }
	c.F.Run(begin+s.spread+time.Millisecond, broken)
	c.F.Run(end, func() bool { return c.Open() == 0 || broken() })
	if c.Open() == 0 && !broken() {
		// what comes late comes now, and what was stuck on lanes is given up
		c.F.Run(end+2*userTimeout, broken)
	}
	if !broken() {
		c.Settle(s.patience(x))
	}
	v.problems = append(v.problems, c.Violations()...)
	if s.broke != nil {
		v.problems = append(v.problems, s.broke(c)...)
	}
	if len(v.problems) > 0 {
		return v
	}
	for _, t := range c.Transfers() {
		switch {
		case t.Alone && t.Received.Status == engines.StatusOK:
			v.problems = append(v.problems, fmt.Sprintf("transfer %d came from nowhere", t.ID))
		case t.Alone:
			v.alone++
		case t.Received.Status == engines.StatusOK:
			v.ok++
		default:
			v.failed++
			if len(v.reasons) < 5 {
				v.reasons = append(v.reasons, fmt.Sprintf("transfer %d: received %d %q, sent %d %q", t.ID,
					t.Received.Status, t.Received.Reason,
					t.Sent.Status, t.Sent.Reason))
			}
		}
	}
	return v
}

// shrink drops faults and transfers for as long as the run still breaks a promise.
func (s scenario) shrink(x schedule) schedule {
	broken := func(x schedule) bool { return len(s.run(s.build(x), x).problems) > 0 }
	x.faults = shrink(x.faults, func(f []fault) bool {
		y := x
		y.faults = f
		return broken(y)
	})
	x.loads = shrink(x.loads, func(l []load) bool {
		y := x
		y.loads = l
		return broken(y)
	})
	// With fewer transfers some of the faults may have nothing left to do.
	x.faults = shrink(x.faults, func(f []fault) bool {
		y := x
		y.faults = f
		return broken(y)
	})
	return x
}

// shrink drops items, in halves first, for as long as what is left is broken.
func shrink[T any](items []T, broken func([]T) bool) []T {
	for step := max(1, len(items)/2); len(items) > 0; {
		smaller := false
		for i := 0; i < len(items); {
			rest := append(append([]T(nil), items[:i]...), items[min(i+step, len(items)):]...)
			if broken(rest) {
				items, smaller = rest, true
			} else {
				i += step
			}
		}
		if step == 1 && !smaller {
			break
		}
		step = max(1, step/2)
	}
	return items
}

// ended counts slices of a run.
func ended(c *Cluster) (n uint64) {
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
	t.Logf("%d events in %.1f s, %.2f million a second; %d slices %v; chunks: %d sent, %d again, %d "+
		"swallowed, %d overflows; %+v; heap %d MiB; trace %016x",
		s.Events, wall.Seconds(), float64(s.Events)/wall.Seconds()/1e6, ended(c), s.Ended, s.Sent,
		s.Again, s.Swallowed, s.Overflows, c.Stats(),
		m.HeapAlloc>>20, c.F.Trace())
}
