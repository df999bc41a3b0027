package sim

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/kvspray/kvspray/control/engines"
)

// TestRestartsLoseNothing: sidecars die in mid transfer, at either end and at both, and come again
// within a second. Their engines present their leases again, and every transfer comes: the source
// keeps the blocks of a receiver that is away, and the receiver waits.
func TestRestartsLoseNothing(t *testing.T) {
	for seed := range uint64(8) {
		s := scenario{nodes: 4, rails: 2, peers: 2, transfers: 8, tokens: 1024,
			deadline: 15 * time.Second, spread: time.Second, link: slow, twice: 0.01}
		if seed%2 == 1 {
			s.ranks, s.link = []int{1, 2, 4}, fast
		}
		x := s.draw(seed, 6, 1)
		for i := range x.faults {
			f := &x.faults[i]
			f.kind = restart
			f.last %= time.Second
			// Two lives of one process do not overlap.
			f.node, f.at = i%s.nodes, time.Duration(i/s.nodes)*2*time.Second+f.at%time.Second
		}
		c := s.build(x)
		v := s.run(c, x)
		v.check(t)
		if v.failed > 0 {
			t.Errorf("seed %d: %d transfers %s, %d did not: %q", seed, v.failed, brokePath, v.ok, v.reasons)
		}
		if c.Stats().Restarts == 0 {
			t.Errorf("seed %d: nothing died", seed)
		}
	}
}

// TestRestarts: a sidecar of either side dies in mid transfer and another comes. The engines live,
// and present what they have open: what was being sent comes.
func TestRestarts(t *testing.T) {
	for seed := range uint64(40) {
		rng := rand.New(rand.NewPCG(seed, 0x4e57))
		s := scenario{nodes: 3, rails: 2, peers: 2, link: slow, ranks: [][]int{{1}, {1, 2}}[seed%2]}
		c := s.build(schedule{seed: seed})
		x := c.Begin(c.Nodes[0], c.Nodes[1], 512, 20*time.Second, 2*time.Millisecond)
		victim := c.Nodes[rng.IntN(2)]
		c.F.After(time.Duration(rng.Int64N(int64(60*time.Millisecond))), func() {
			victim.Kill()
			c.F.After(time.Duration(rng.Int64N(int64(500*time.Millisecond))), victim.Restart)
		})
		c.F.Run(c.F.Now()+30*time.Second, func() bool { return c.Open() == 0 || len(c.Violations()) > 0 })
		if c.Open() > 0 {
			t.Errorf("seed %d: %d leases %s", seed, c.Open(), brokeEnd)
		}
		if x.Received == nil || x.Received.Status != engines.StatusOK {
			t.Errorf("seed %d: the sidecar of %s died and came again, and the transfer %s: %+v", seed,
				victim.addr, brokePath, x.Received)
		}
		for _, v := range c.Violations() {
			t.Errorf("seed %d: %s", seed, v)
		}
	}
}
