package exec

import (
	"fmt"
	"slices"
	"testing"

	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/transfer"
)

// Ranks of a decode engine whose sidecars refuse a load decline it, and the others receive it. The
// source's blocks are free once the ranks that asked have ended, and no earlier, whatever the order
// and however often a decline comes. Each rank of the engine has its own sidecar.
func TestRanksDecline(t *testing.T) {
	// A, B: rank 0 or 1 asks; a, b: it declines; *: all ranks decline.
	for _, order := range []string{"Ab", "bA", "Ba", "aB", "Abb", "bAb", "bbA", "ab", "ba", "aab", "*",
		"*a", "A*", "AB", "AaB", "aAB", "ABa", "AB*"} {
		for sources := 1; sources <= 2; sources++ {
			t.Run(fmt.Sprintf("%s, %d sources", order, sources), func(t *testing.T) {
				ranksDecline(t, order, sources)
			})
		}
	}
}

func ranksDecline(t *testing.T, order string, sources int) {
	const deadline = 300 * sec
	key := testKey(1, 1)
	s, p, d, pw, dw := pair(t, 5, 0)
	nodes := []*simNode{d, s.node("d:2", Config{Transports: []string{"shm", "tcp"}})}
	ranks := []*engines.Worker{dw, nodes[1].worker()}
	for r, w := range ranks {
		nodes[r].ex.core.Cfg.Planner = replicas{}
		w.Geometry = [32]byte{2}
		w.Place = engines.Place{Engine: "vllm/d", TP: r, TPSize: len(ranks)}
	}
	var srcs, asked []*simLease
	for r := range sources {
		if r > 0 {
			pw = p.worker()
		}
		pw.Geometry = [32]byte{1}
		pw.Place = engines.Place{Engine: "vllm/p", TP: r, TPSize: sources}
		srcs = append(srcs, p.intent(pw, uint64(r+1), key, 512, 1, deadline))
	}
	free := func() bool {
		return !slices.ContainsFunc(srcs, func(l *simLease) bool { return l.done == nil })
	}
	for i, c := range order {
		if r := int(c - 'A'); c == 'A' || c == 'B' {
			l := &simLease{id: transfer.LeaseID{Boot: ranks[r].Boot, ID: 1}, w: ranks[r], receive: true,
				opened: s.now, deadline: deadline, key: key.String(), tokens: 512}
			nodes[r].leases[l.id] = l
			nodes[r].event(func() {
				nodes[r].ex.Expect(s.now, ranks[r], engines.Expect{Lease: l.id, Key: key, Peer: "p:1",
					Tokens: 512, Skip: []uint32{0}, Deadline: deadline, Req: "r"})
			})
			asked = append(asked, l)
		} else {
			x := engines.Decline{Boot: transfer.Boot{99}, ID: uint64(i), Engine: "vllm/d",
				World: len(ranks), Key: key, Peer: "p:1", Reason: "no room", Req: "r"}
			if c != '*' {
				x.Ranks = []uint32{uint32(c - 'a')}
			}
			d.event(func() { d.ex.Decline(s.now, x) })
		}
		s.rest(sec / 10)
	}
	if len(asked) > 0 {
		s.rest(sec)
		if free() {
			t.Fatalf("the blocks are free, and a rank that asked may read them: %+v", srcs[0].done)
		}
	}
	for _, l := range srcs {
		p.steps(l)
	}
	s.until("the source's blocks", sec, free)
	if len(asked) > 0 {
		wantStatus(t, asked[0], engines.StatusOK)
	}
}
