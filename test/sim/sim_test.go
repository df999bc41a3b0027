package sim

import (
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/transport/simfabric"
)

// slack is what lies between a deadline and the end that it causes: fences, and the word of it to the other side.
const slack = 2 * time.Second

type scenario struct {
	nodes, rails, partners int
	transfers              int // per node
	tokens                 uint32
	deadline               time.Duration
	spread                 time.Duration // transfers begin within
	flapping               float64       // share of rails
	preempted              float64       // share of transfers
	racks                  int           // 0: one switch without bounds
	link                   simfabric.LinkSpec
	repeats                float64
}

var gigabit = simfabric.LinkSpec{BitsPerSecond: 25e9, Latency: 5 * time.Microsecond, Jitter: 2 * time.Microsecond, Buffer: 8 << 20}

// build makes the cluster and everything that will happen to it.
func (s scenario) build(seed uint64) *Cluster {
	c := New(Config{Fabric: simfabric.Config{Seed: seed, UserTimeout: 5 * time.Second}, RepeatResults: s.repeats})
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
	f.Run(f.Now()+50*time.Millisecond, nil) // every lane is up
	rng := f.Rand()
	for range int(s.flapping * float64(s.nodes*s.rails)) {
		r := c.Nodes[rng.IntN(s.nodes)].Host.Rails()[rng.IntN(s.rails)]
		until := f.Now() + s.spread + s.deadline
		switch rng.IntN(4) {
		case 0: // one direction only, and silently
			link := r.Tx()
			if rng.IntN(2) == 0 {
				link = r.Rx()
			}
			f.After(f.Jitter(s.spread), func() {
				link.SetDeaf(true)
				f.After(f.Jitter(time.Second), func() { link.SetDeaf(false) })
			})
		case 1:
			f.After(f.Jitter(s.spread), func() {
				r.Tx().SetRate(0.05)
				f.After(f.Jitter(time.Second), func() { r.Tx().SetRate(1) })
			})
		default:
			f.After(f.Jitter(s.spread), func() { r.Flap(300*time.Millisecond, until) })
		}
	}
	for i, n := range c.Nodes {
		for range s.transfers {
			to := c.Nodes[(i+1+rng.IntN(s.partners))%s.nodes]
			preempt := rng.Float64() < s.preempted
			from := n
			if rng.IntN(2) == 0 {
				from, to = to, from
			}
			f.After(f.Jitter(s.spread), func() {
				t := c.Begin(from, to, s.tokens, s.deadline, 2*time.Millisecond)
				if preempt {
					f.After(f.Jitter(4*time.Millisecond), func() { t.Preempt(2 * time.Millisecond) })
				}
			})
		}
	}
	return c
}

// finish runs until all is over, and checks what was promised.
func (s scenario) finish(t testing.TB, c *Cluster) (ok, failed int) {
	t.Helper()
	begin := c.F.Now()
	c.F.Run(begin+s.spread+10*time.Millisecond, nil)
	c.F.Run(begin+s.spread+s.deadline+exec.DefaultGrace+slack, func() bool { return c.Open() == 0 || len(c.Violations()) > 0 })
	for _, v := range c.Violations() {
		t.Error(v)
	}
	if n := s.nodes * s.transfers; len(c.Transfers()) != n {
		t.Errorf("%d transfers of %d began", len(c.Transfers()), n)
	}
	for _, x := range c.Transfers() {
		switch {
		case x.Sent == nil || x.Received == nil:
			t.Errorf("transfer %d from %s to %s never ended", x.ID, x.From.addr, x.To.addr)
		case x.Last() > x.Deadline+slack:
			t.Errorf("transfer %d ended after %s, its deadline was %s", x.ID, x.Last(), x.Deadline)
		case x.Received.Status == exec.StatusOK:
			ok++
		default:
			failed++
			if failed <= 5 {
				t.Logf("transfer %d: received %d %q, sent %d %q", x.ID, x.Received.Status, x.Received.Reason, x.Sent.Status, x.Sent.Reason)
			}
		}
		if t.Failed() && c.Open() > 0 {
			return ok, failed
		}
	}
	return ok, failed
}

func report(t testing.TB, c *Cluster, wall time.Duration) {
	s := c.F.Stats()
	var slices uint64
	for _, n := range s.Ended {
		slices += n
	}
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	t.Logf("%d events in %.1f s: %.2f million a second; %d slices %v; chunks: %d sent, %d again, %d swallowed, %d overflows; %d results repeated; heap %d MiB; trace %016x",
		s.Events, wall.Seconds(), float64(s.Events)/wall.Seconds()/1e6, slices, s.Ended, s.Sent, s.Again, s.Swallowed, s.Overflows, c.Repeated(),
		m.HeapAlloc>>20, c.F.Trace())
}

// TestFlapping: rails die, come back, swallow one direction, collapse; engines preempt; results come twice; and no transfer
// fails while there is a path.
func TestFlapping(t *testing.T) {
	s := scenario{nodes: 64, rails: 4, partners: 3, transfers: 8, tokens: 256, deadline: 10 * time.Second, spread: time.Second, flapping: 0.1,
		preempted: 0.05, racks: 4, link: gigabit, repeats: 0.01}
	for seed := range uint64(4) {
		began := time.Now()
		c := s.build(seed)
		ok, failed := s.finish(t, c)
		report(t, c, time.Since(began))
		if failed > 0 {
			t.Errorf("seed %d: %d transfers failed, %d did not", seed, failed, ok)
		}
		if st := c.F.Stats(); st.Swallowed == 0 || c.Repeated() == 0 {
			t.Errorf("seed %d: nothing was swallowed, or no result repeated: there was no fault", seed)
		}
	}
}
