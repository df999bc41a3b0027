package exec

import (
	"errors"
	"fmt"
	"testing"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec/internal/frame"
	"github.com/kvspray/kvspray/control/exec/internal/layouts"
	"github.com/kvspray/kvspray/control/lease"
	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/transfer"
)

// A peer that does not answer the question for its layout may have died: it is asked again until it
// is forgotten, and then its successor is asked. An answer that there is no such layout ends the
// lease.
func TestDescribingAPeerThatIsAway(t *testing.T) {
	for _, gone := range []bool{true, false} {
		e := New(Config{Boot: transfer.Boot{1}, Planner: asking{}, Transports: []string{"tcp"}})
		w := &engines.Worker{Boot: transfer.Boot{2},
			Layout: &layout.Layout{Groups: []layout.Group{{TokensPerBlock: simBlock,
				Layers: make([]layout.Layer, simLayers)}}}}
		e.WorkerUp(w)
		p := transfer.Boot{9}
		e.PeerUp(1, "p:1", p)
		id := transfer.LeaseID{Boot: w.Boot, ID: 1, Epoch: 1}
		e.Expect(2, w, engines.Expect{Lease: id, Key: testKey(1, 1), Peer: "p:1", Tokens: 64,
			Skip: []uint32{0}, Deadline: 30 * sec})
		// The engine there has another cache.
		if err := e.Message(2, p, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_GrantReply{
			GrantReply: &peerv1.GrantReply{Destination: frame.Lease(id), Code: peerv1.GrantReply_RANKS,
				Gen: e.dests.Generation, Ranks: []*peerv1.Rank{{Rank: "pp0/tp0",
					Geometry: append([]byte{1}, make([]byte, 31)...)}}}}}); err != nil {
			t.Fatal(err)
		}
		for _, f := range only(t, drained(e), Fence) {
			e.FenceDone(2, f.ReceivePart, nil)
		}
		away := fmt.Errorf("call: %w", ErrNoAnswer)
		now := Instant(2)
		for range 5 {
			if asked := only(t, drained(e), Describe); len(asked) != 1 {
				t.Fatalf("asked %d times", len(asked))
			}
			e.Described(now, p, [32]byte{1}, away)
			if all := drained(e); len(all) != 0 {
				t.Fatalf("not answered, and so: %+v", all)
			}
			now += layouts.Retry
			e.Tick(now)
		}
		drained(e)
		if !gone {
			e.Described(now, p, [32]byte{1}, errors.New("no layout with that geometry"))
			if done := only(t, drained(e), Complete); len(done) != 1 || done[0].Completion.Status !=
				engines.StatusFailed {
				t.Errorf("%+v", done)
			}
			continue
		}
		e.Described(now, p, [32]byte{1}, away)
		e.PeerDown(now, p, true)
		if all := drained(e); len(only(t, all, Connect)) != 1 || len(only(t, all, Complete)) != 0 ||
			e.dests.Find(id).State != lease.DestWaiting || e.layouts.Len() != 0 {
			t.Errorf("its peer is gone: %+v, %d are described", all, e.layouts.Len())
		}
	}
}
