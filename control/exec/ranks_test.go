package exec

import (
	"slices"
	"testing"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec/internal/frame"
	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/transfer"
)

// divider is a planner that records for which ranks it divides each prompt.
type divider struct {
	replicas
	ranks map[uint64][]Rank // by lease
}

func (d divider) Divide(w *engines.Worker, x *engines.Expect, ranks []Rank,
	load func(string) uint64) ([]Part, error) {
	d.ranks[x.Lease.ID] = ranks
	return d.replicas.Divide(w, x, ranks, load)
}

// TestRanksOfTwoEnginesBehindAPeer: each lease uses its own engine's ranks, if the engines have two
// models, or one model with unequal tensor parallelism.
func TestRanksOfTwoEnginesBehindAPeer(t *testing.T) {
	for _, model := range []byte{1, 2} {
		plans := divider{ranks: map[uint64][]Rank{}}
		e := New(Config{Boot: transfer.Boot{1}, Planner: plans, Transports: []string{"tcp"}})
		p := transfer.Boot{9}
		e.PeerUp(1, "p:1", p)
		now := Instant(2)
		theirs := [][]Rank{{{Name: "pp0/tp0", Geometry: [32]byte{7}}},
			{{Name: "pp0/tp0", Geometry: [32]byte{8}}, {Name: "pp0/tp1", Geometry: [32]byte{8}}}}
		var ids []transfer.LeaseID
		for i := range uint64(2) {
			w := &engines.Worker{Boot: transfer.Boot{2, byte(i)}, Geometry: [32]byte{1 + byte(i)},
				Fingerprint: [32]byte{1 + byte(i)*(model-1)},
				Layout: &layout.Layout{Groups: []layout.Group{{TokensPerBlock: simBlock,
					Layers: make([]layout.Layer, simLayers)}}}}
			e.WorkerUp(w)
			id := transfer.LeaseID{Boot: w.Boot, ID: 1 + i, Epoch: 1}
			e.Expect(now, w, engines.Expect{Lease: id, Key: testKey(1, byte(i)), Peer: "p:1", Tokens: 128,
				Skip: []uint32{0}, Deadline: 30 * sec})
			ids = append(ids, id)
		}
		offers := only(t, drained(e), Offer)
		if len(offers) != 2 {
			t.Fatalf("offers %+v, want 2", offers)
		}
		for i, id := range ids {
			reply := &peerv1.GrantReply{Destination: frame.Lease(id), Code: peerv1.GrantReply_RANKS,
				Gen: offers[i].Frame.GetGrant().Gen}
			for _, r := range theirs[i] {
				reply.Ranks = append(reply.Ranks, &peerv1.Rank{Rank: r.Name, Geometry: r.Geometry[:]})
			}
			if err := e.Message(now, p, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_GrantReply{
				GrantReply: reply}}); err != nil {
				t.Fatal(err)
			}
		}
		for _, a := range only(t, drained(e), Fence) {
			e.FenceDone(now, a.ReceivePart, nil)
		}
		for i, id := range ids {
			if got := plans.ranks[id.ID]; !slices.Equal(got, theirs[i]) {
				t.Errorf("%d models: lease %d is divided among %v, want %v", model, id.ID, got, theirs[i])
			}
		}
	}
}
