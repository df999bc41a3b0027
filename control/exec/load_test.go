package exec

import (
	"testing"

	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/lease"
	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/transfer"
)

// replicas is a planner for engines whose ranks hold the same: the least loaded rank sends, the
// first one of equals.
type replicas struct{ simPlanner }

func (replicas) Divide(_ *engines.Worker, x *engines.Expect, ranks []Rank,
	load func(string) uint64) ([]Part, error) {
	parts, lightest := make([]Part, len(ranks)), 0
	for i, r := range ranks {
		parts[i].Rank = r
		if load(r.Name) < load(ranks[lightest].Name) {
			lightest = i
		}
	}
	plan, err := newSimPlan(x.Tokens, x.Skip)
	parts[lightest].Plan = plan
	return parts, err
}

// The bytes that a rank of the source's engine owes count from its grant to its fence, after
// success and failure alike. The next grant goes to the rank that owes least.
func TestReplicasAreChosenByLoad(t *testing.T) {
	e := New(Config{Boot: transfer.Boot{1}, Planner: replicas{}, Transports: []string{"tcp"}})
	w := &engines.Worker{Boot: transfer.Boot{2},
		Layout: &layout.Layout{Groups: []layout.Group{{TokensPerBlock: simBlock,
			Layers: make([]layout.Layer, simLayers)}}}}
	e.WorkerUp(w)
	p := transfer.Boot{9}
	e.PeerUp(1, "p:1", p)
	e.dests.Engines.SetRanks(e.peers.Find(p), w.Fingerprint, []Rank{
		{Name: "pp0/tp0", Geometry: [32]byte{1}},
		{Name: "pp0/tp1", Geometry: [32]byte{1}}})
	now := Instant(2)
	wants := func(id uint64, tokens uint32, rank string) *ReceivePart {
		t.Helper()
		e.Expect(now, w, engines.Expect{Lease: transfer.LeaseID{Boot: w.Boot, ID: id, Epoch: 1},
			Key: testKey(1, byte(id)), Peer: "p:1", Tokens: tokens,
			Skip: []uint32{0}, Deadline: 30 * sec})
		offers := only(t, drained(e), Offer)
		if len(offers) != 1 || len(offers[0].ReceiveParts) != 1 {
			t.Fatalf("prompt %d: %+v", id, offers)
		}
		l := offers[0].ReceiveParts[0]
		if l.Part.Rank != rank {
			t.Errorf("prompt %d of %d tokens is asked of %s, want %s; owed: %v", id, tokens, l.Part.Rank,
				rank, e.dests.Engines.Owed(e.peers.Find(p)))
		}
		return l
	}
	ends := func(l *ReceivePart, success bool) {
		t.Helper()
		id := l.Expect.Lease
		if success {
			e.dests.Find(id).State = lease.DestLanding // its source is known
			e.Full(now, l)
		} else {
			e.Cancel(now, w, id.ID, "")
		}
		if fences := only(t, drained(e), Fence); len(fences) != 1 || fences[0].ReceivePart != l {
			t.Fatalf("the end of %d: %+v", id.ID, fences)
		}
		e.FenceDone(now, l, nil)
		drained(e)
	}
	a := wants(1, 512, "pp0/tp0")
	b := wants(2, 128, "pp0/tp1")
	c := wants(3, 128, "pp0/tp1") // 512 owed by the one, 128 by the other
	d := wants(4, 320, "pp0/tp1")
	f := wants(5, 64, "pp0/tp0") // 512 and 576
	ends(a, true)
	g := wants(6, 320, "pp0/tp0") // 64 and 576
	ends(d, false)
	ends(b, true)
	h := wants(7, 64, "pp0/tp1") // 384 and 128
	for _, l := range []*ReceivePart{c, f, g, h} {
		ends(l, true)
	}
	if left := e.dests.Engines.Owed(e.peers.Find(p)); len(left) != 0 {
		t.Errorf("all have ended, and it is thought to owe %v", left)
	}
	wants(8, 64, "pp0/tp0")
}
