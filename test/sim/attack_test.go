package sim

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/transport/simfabric"
)

const fewAttacks = 100 // the default; 1,000 in make test-sim

func attacks(t testing.TB) int {
	if _, full := runs(t); full {
		return 1000
	}
	return fewAttacks
}

// TestLateWriteAttack: slices stall on rails that swallow everything, their retries elsewhere
// complete, the commit comes, the engine has its blocks back, and then the rails heal and bring
// what they kept. Not one chunk is written.
func TestLateWriteAttack(t *testing.T) {
	late, n := 0, attacks(t)
	for seed := range uint64(n) {
		rng := rand.New(rand.NewPCG(seed, 0x1a7e))
		s := scenario{nodes: 2, rails: 4, peers: 1, link: slow}
		c := s.build(schedule{seed: seed})
		x := c.Begin(c.Nodes[0], c.Nodes[1], 256, 10*time.Second, time.Millisecond)
		rails := c.Nodes[0].Host.Rails()
		stalled := rng.Perm(len(rails))[:1+rng.IntN(3)]
		c.F.After(time.Duration(rng.Int64N(int64(20*time.Millisecond))), func() {
			for _, r := range stalled {
				rails[r].Tx().SetSilent(true)
			}
		})
		c.F.Run(c.F.Now()+5*time.Second, func() bool { return x.Received != nil })
		if x.Received == nil || x.Received.Status != engines.StatusOK {
			t.Fatalf("seed %d: did not come with %d of 4 rails: %+v", seed, 4-len(stalled), x.Received)
		}
		// The blocks go to another prompt at once, which may get the very slot, over rails that are about
		// to heal.
		y := c.Begin(c.Nodes[0], c.Nodes[1], 256, 10*time.Second, time.Millisecond)
		for _, r := range stalled {
			c.F.After(time.Duration(rng.Int64N(int64(300*time.Millisecond))),
				func() { rails[r].Tx().SetSilent(false) })
		}
		c.F.Run(c.F.Now()+20*time.Second, func() bool { return len(c.Violations()) > 0 })
		c.Settle(slack)
		for _, v := range c.Violations() {
			t.Errorf("seed %d: %s", seed, v)
		}
		if y.Received == nil || y.Received.Status != engines.StatusOK {
			t.Errorf("seed %d: the next transfer did not come", seed)
		}
		late += c.Stats().Late
	}
	t.Logf("%d attacks: %d slices came after their grant was over", n, late)
	if late < n/4 {
		t.Error("hardly anything came late: this is no attack")
	}
}

// TestDoubtOnThreeRails: one slice goes out on three rails that die one after the other, and
// arrives on the fourth. Rails that come back, as links or as silence that ends, change nothing
// about the fence.
func TestDoubtOnThreeRails(t *testing.T) {
	n, three, late := attacks(t), 0, 0
	for seed := range uint64(n) {
		rng := rand.New(rand.NewPCG(seed, 0xd0b7))
		s := scenario{nodes: 2, rails: 4, peers: 1, link: slow, unfence: 0.1}
		c := s.build(schedule{seed: seed})
		from, to := c.Nodes[0], c.Nodes[1]
		for _, r := range rng.Perm(4)[:3] {
			rail, back := from.Host.Rails()[r], time.Duration(rng.Int64N(int64(time.Second)))
			switch rng.IntN(3) {
			case 0: // what is sent is lost
				rail.Tx().SetSilent(true)
				c.F.After(back, func() { rail.Tx().SetSilent(false) })
			case 1: // what is sent arrives, and no confirmation comes
				rail.Rx().SetSilent(true)
				c.F.After(back, func() { rail.Rx().SetSilent(false) })
			default: // the link goes once something is on it, and comes again
				c.F.After(time.Duration(rng.Int64N(int64(100*time.Millisecond))), rail.Down)
				c.F.After(100*time.Millisecond+back, rail.Up)
			}
		}
		x := c.Begin(from, to, 16, 10*time.Second, time.Millisecond) // four chunks
		c.F.Run(c.F.Now()+20*time.Second, func() bool { return x.Received != nil })
		if x.Received == nil || x.Received.Status != engines.StatusOK {
			t.Fatalf("seed %d: did not come: %+v", seed, x.Received)
		}
		if len(from.side.moving) >= 3 {
			three++
		}
		c.F.Run(c.F.Now()+20*time.Second, func() bool { return len(c.Violations()) > 0 })
		c.Settle(3*exec.DefaultGrace + slack)
		for _, v := range c.Violations() {
			t.Errorf("seed %d: %s", seed, v)
		}
		late += c.Stats().Late
	}
	t.Logf("%d runs: in %d three or more slices were in doubt when the commit came; %d came after it",
		n, three, late)
	if three < n/20 || late == 0 {
		t.Error("there was no such doubt")
	}
}

// TestManyLeases: thousands open towards many peers at once, with deadlines that pass, sources that
// are renewed by their engines' signs of life, and clocks that agree about nothing. In mid round
// some clocks leap half an hour, in a life that goes on; others fall back to zero, with a new one.
// Where a clock leaps, what that sidecar has open is over at once and the other side's is in its
// time; everything else ends when it would have: nothing is over early or lives on. Memory and time
// do not grow with what was open before.
func TestManyLeases(t *testing.T) {
	const peers, each = 64, 64 // 4096 open at one node
	const deadline, moved = time.Second, 50 * time.Millisecond
	c := New(Config{Fabric: simfabric.Config{Seed: 1}})
	link := fast
	hub := c.AddNode(simfabric.RailSpec{Name: "r0", Link: link})
	for range peers {
		c.Join(c.AddNode(simfabric.RailSpec{Name: "r0", Link: link}), hub)
	}
	c.F.Run(settle, nil)
	leapt := func(i, round int) bool { return i%8 == round }
	fell := func(i, round int) bool { return i%8 == 4+round }
	for round := range 3 {
		var all []*Transfer
		at := map[*Transfer]int{}
		begin := c.F.Now()
		forth, back := 0, 0
		for i, n := range c.Nodes[1:] {
			for k := range each {
				var x *Transfer
				switch {
				case k%4 == 3: // never comes
					x = c.BeginAlone(n, hub, 16, deadline)
				case i%2 == 0: // computes for longer than its deadline would allow, were it not for its layers
					x = c.Begin(n, hub, 16, deadline, 700*time.Millisecond)
				default:
					x = c.Begin(hub, n, 16, deadline, 300*time.Millisecond)
				}
				all = append(all, x)
				at[x] = i
			}
			switch {
			case leapt(i, round):
				c.F.After(moved, func() {
					before := n.now()
					n.Leap(30 * time.Minute)
					if _, s := n.side.ex.Open(); n.now()-before == 30*time.Minute && (i%2 == 1 || s == each*3/4) {
						forth++
					}
				})
			case fell(i, round):
				c.F.After(moved, func() {
					before := n.now()
					n.Kill()
					c.F.After(10*time.Millisecond, func() {
						if n.Restart(); n.now() < before {
							back++
						}
					})
				})
			}
		}
		peak := 0
		c.F.Run(begin+10*time.Second, func() bool {
			d, s := hub.side.ex.Open()
			peak = max(peak, d+s)
			return c.Open() == 0 || len(c.Violations()) > 0
		})
		if forth != peers/8 || back != peers/8 {
			t.Errorf("round %d: %d clocks leapt with what they had open, %d fell back: want %d each", round,
				forth, back, peers/8)
		}
		if peak < peers*each*3/4 {
			t.Errorf("round %d: %d leases were open at one node at a time", round, peak)
		}
		came, expired, over := 0, 0, 0
		for _, x := range all {
			i := at[x]
			in := func(what string, d, low, high time.Duration) {
				t.Helper()
				if d < low || d > high {
					t.Errorf("round %d: transfer %d of node %d: %s ended after %s: want %s to %s", round, x.ID, i,
						what, d, low, high)
				}
			}
			switch {
			case x.Received == nil || x.Sent == nil && !x.Alone: // reported below
			case x.Alone && x.Received.Status == engines.StatusExpired:
				low := deadline
				if leapt(i, round) {
					low = moved // the other side waits for its source no longer, and reports it
				}
				in("the one that is never sent", x.Took(), low, deadline+slack)
				expired++
			case !x.Alone && leapt(i, round):
				end, what := x.sentAt-x.Began, x.Sent
				if x.To != hub {
					end, what = x.receivedAt-x.Began, x.Received
				}
				if what.Status != engines.StatusExpired {
					t.Errorf("round %d: transfer %d of node %d, whose clock leapt: %+v", round, x.ID, i, what)
				}
				in("the side whose clock leapt", end, moved, moved+20*time.Millisecond)
				in("the other side", x.Last(), moved, deadline+slack)
				over++
			case !x.Alone && x.Received.Status == engines.StatusOK && x.Sent.Status == engines.StatusOK:
				came++
			default:
				t.Errorf("round %d: transfer %d of node %d: %+v, %+v", round, x.ID, i, x.Received, x.Sent)
			}
			if t.Failed() {
				break
			}
		}
		if came != peers*each*3/4*7/8 || over != peers*each*3/4/8 || expired != peers*each/4 {
			t.Errorf("round %d: %d came, %d were over with their clock, %d expired, of %d", round, came,
				over, expired, len(all))
		}
		c.F.Run(c.F.Now()+5*time.Second, nil)
	}
	c.Settle(slack)
	for _, v := range c.Violations() {
		t.Error(v)
	}
}

// TestClocksAgreeAboutNothing: the same run, with clocks that are a nanosecond apart, minutes, or
// three hours, takes the same course down to the last event, also where clocks leap and processes
// begin again: between hosts there are durations only.
func TestClocksAgreeAboutNothing(t *testing.T) {
	s := scenario{nodes: 8, rails: 2, peers: 3, transfers: 6, tokens: 256,
		deadline: 3 * time.Second, spread: 500 * time.Millisecond,
		preempted: 0.1, canceled: 0.1, alone: 0.05, link: slow, twice: 0.01, replay: 0.1}
	for seed := range uint64(4) {
		x := s.draw(seed, 16, 0.5)
		x.faults = append(x.faults, fault{leap, 0, 0, 100 * time.Millisecond, 400 * time.Millisecond},
			fault{restart, 1, 0, 100 * time.Millisecond, 100 * time.Millisecond})
		var first *Cluster
		for _, skew := range []time.Duration{time.Nanosecond, 0, 3 * time.Hour} {
			s.skew = skew
			c := s.build(x)
			s.run(c, x).check(t)
			if first == nil {
				first = c
			}
			if a, b := first.F.Trace(), c.F.Trace(); a != b || first.Stats() != c.Stats() {
				t.Errorf(
					"seed %d, clocks %v apart: trace %016x, %+v; with clocks a nanosecond apart %016x, %+v", seed,
					skew, b, c.Stats(), a, first.Stats())
			}
			for i, x := range c.Transfers() {
				if y := first.Transfers()[i]; x.receivedAt != y.receivedAt || x.sentAt != y.sentAt {
					t.Errorf("seed %d, clocks %v apart: transfer %d ended at %v and %v, else at %v and %v", seed,
						skew, x.ID, x.receivedAt, x.sentAt, y.receivedAt, y.sentAt)
				}
			}
		}
	}
}
