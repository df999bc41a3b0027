package sim

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/transport/simfabric"
)

const fewAttacks = 100 // where nobody asks for more; 1,000 in make test-sim

func attacks(t testing.TB) int {
	if _, full := runs(t); full {
		return 1000
	}
	return fewAttacks
}

// TestLateWriteAttack: slices stall on rails that swallow everything, their retries elsewhere complete, the commit comes, the engine has
// its blocks back, and then the rails heal and bring what they kept. Not one chunk is written.
func TestLateWriteAttack(t *testing.T) {
	late, n := 0, attacks(t)
	for seed := range uint64(n) {
		rng := rand.New(rand.NewPCG(seed, 0x1a7e))
		s := scenario{nodes: 2, rails: 4, partners: 1, link: slow}
		c := s.build(schedule{seed: seed})
		x := c.Begin(c.Nodes[0], c.Nodes[1], 256, 10*time.Second, time.Millisecond)
		rails := c.Nodes[0].Host.Rails()
		stalled := rng.Perm(len(rails))[:1+rng.IntN(3)]
		c.F.After(time.Duration(rng.Int64N(int64(20*time.Millisecond))), func() {
			for _, r := range stalled {
				rails[r].Tx().SetDeaf(true)
			}
		})
		c.F.Run(c.F.Now()+5*time.Second, func() bool { return x.Received != nil })
		if x.Received == nil || x.Received.Status != exec.StatusOK {
			t.Fatalf("seed %d: did not come with %d of 4 rails: %+v", seed, 4-len(stalled), x.Received)
		}
		// The blocks go to another prompt at once, which may get the very slot, over rails that are about to heal.
		y := c.Begin(c.Nodes[0], c.Nodes[1], 256, 10*time.Second, time.Millisecond)
		for _, r := range stalled {
			c.F.After(time.Duration(rng.Int64N(int64(300*time.Millisecond))), func() { rails[r].Tx().SetDeaf(false) })
		}
		c.F.Run(c.F.Now()+20*time.Second, func() bool { return len(c.Violations()) > 0 })
		c.Settle(slack)
		for _, v := range c.Violations() {
			t.Errorf("seed %d: %s", seed, v)
		}
		if y.Received == nil || y.Received.Status != exec.StatusOK {
			t.Errorf("seed %d: the next transfer did not come", seed)
		}
		late += c.Stats().Late
	}
	t.Logf("%d attacks: %d slices came after their grant was over", n, late)
	if late < n/4 {
		t.Error("hardly anything came late: this is no attack")
	}
}

// TestDoubtOnThreeRails: one slice goes out on three rails that die one after the other, and arrives on the fourth. Rails that
// come back, as links or as silence that ends, change nothing about the fence.
func TestDoubtOnThreeRails(t *testing.T) {
	n, three, late := attacks(t), 0, 0
	for seed := range uint64(n) {
		rng := rand.New(rand.NewPCG(seed, 0xd0b7))
		s := scenario{nodes: 2, rails: 4, partners: 1, link: slow, unfence: 0.1}
		c := s.build(schedule{seed: seed})
		from, to := c.Nodes[0], c.Nodes[1]
		for _, r := range rng.Perm(4)[:3] {
			rail, back := from.Host.Rails()[r], time.Duration(rng.Int64N(int64(time.Second)))
			switch rng.IntN(3) {
			case 0: // what is sent is lost
				rail.Tx().SetDeaf(true)
				c.F.After(back, func() { rail.Tx().SetDeaf(false) })
			case 1: // what is sent arrives, and nobody hears of it
				rail.Rx().SetDeaf(true)
				c.F.After(back, func() { rail.Rx().SetDeaf(false) })
			default: // the link goes once something is on it, and comes again
				c.F.After(time.Duration(rng.Int64N(int64(100*time.Millisecond))), rail.Down)
				c.F.After(100*time.Millisecond+back, rail.Up)
			}
		}
		x := c.Begin(from, to, 16, 10*time.Second, time.Millisecond) // four chunks
		c.F.Run(c.F.Now()+20*time.Second, func() bool { return x.Received != nil })
		if x.Received == nil || x.Received.Status != exec.StatusOK {
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
	t.Logf("%d runs: in %d three or more slices were in doubt when the commit came; %d came after it", n, three, late)
	if three < n/20 || late == 0 {
		t.Error("there was no such doubt")
	}
}

// TestManyLeases: thousands open towards many peers at once, with deadlines that pass, sources that are renewed by their engines' signs
// of life, and clocks that agree about nothing. Memory and time do not grow with what was open before.
func TestManyLeases(t *testing.T) {
	const peers, each = 64, 64 // 4096 open at one node
	c := New(Config{Fabric: simfabric.Config{Seed: 1}})
	link := fast
	hub := c.AddNode(simfabric.RailSpec{Name: "r0", Link: link})
	for range peers {
		c.Join(c.AddNode(simfabric.RailSpec{Name: "r0", Link: link}), hub)
	}
	c.F.Run(settle, nil)
	for round := range 3 {
		var all []*Transfer
		begin := c.F.Now()
		for i, n := range c.Nodes[1:] {
			for k := range each {
				switch {
				case k%4 == 3: // never comes
					all = append(all, c.BeginAlone(n, hub, 16, time.Second))
				case i%2 == 0: // computes for longer than its deadline would allow, were it not for its layers
					all = append(all, c.Begin(n, hub, 16, time.Second, 700*time.Millisecond))
				default:
					all = append(all, c.Begin(hub, n, 16, time.Second, 100*time.Millisecond))
				}
			}
			if i%8 == 0 {
				c.F.After(50*time.Millisecond, func() { n.Leap(30 * time.Minute); n.Leap(-30 * time.Minute) })
			}
		}
		most := 0
		c.F.Run(begin+10*time.Second, func() bool {
			d, s := hub.side.ex.Open()
			most = max(most, d+s)
			return c.Open() == 0 || len(c.Violations()) > 0
		})
		if most < peers*each*3/4 {
			t.Errorf("round %d: %d leases were open at one node at a time", round, most)
		}
		came, expired := 0, 0
		for _, x := range all {
			switch {
			case x.Received == nil:
			case x.Received.Status == exec.StatusOK:
				came++
			case x.Alone && x.Received.Status == exec.StatusExpired:
				expired++
			default:
				t.Errorf("round %d: transfer %d: %+v", round, x.ID, x.Received)
			}
		}
		if came != peers*each*3/4 || expired != peers*each/4 {
			t.Errorf("round %d: %d came, %d expired, of %d", round, came, expired, len(all))
		}
		c.F.Run(c.F.Now()+5*time.Second, nil)
	}
	c.Settle(slack)
	for _, v := range c.Violations() {
		t.Error(v)
	}
}
