package frame

import (
	"testing"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/transfer"
)

func good() *peerv1.Grant {
	return &peerv1.Grant{Gen: 1, Fingerprint: make([]byte, 32), Team: make([]byte, 16), TeamSize: 1,
		Parts: []*peerv1.Part{{Rank: "pp0/tp0", Geometry: make([]byte, 32), Gen: 1, Chunks: 1},
			{Rank: "pp0/tp1"}}}
}

// Each check of a grant names the field that is invalid.
func TestCheckGrant(t *testing.T) {
	if err := CheckGrant(good()); err != nil {
		t.Fatal(err)
	}
	for what, change := range map[Violation]func(*peerv1.Grant){
		BadGeneration:  func(g *peerv1.Grant) { g.Gen = 0 },
		BadFingerprint: func(g *peerv1.Grant) { g.Fingerprint = nil },
		BadParts:       func(g *peerv1.Grant) { g.Parts = make([]*peerv1.Part, MaxParts+1) },
		BadTeam:        func(g *peerv1.Grant) { g.TeamSize = 0 },
		BadRank:        func(g *peerv1.Grant) { g.Parts[1].Rank = g.Parts[0].Rank },
		BadGeometry:    func(g *peerv1.Grant) { g.Parts[1].Slot = 1 },
		BadSlot:        func(g *peerv1.Grant) { g.Parts[0].Gen = 0 },
		BadShare:       func(g *peerv1.Grant) { g.Parts[0].Share = make([]uint32, 1<<20) },
	} {
		g := good()
		change(g)
		if err := CheckGrant(g); err == nil || KindOf(err) != what {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// Ids survive the way through a frame; ids of another length are violations.
func TestIDs(t *testing.T) {
	id := transfer.LeaseID{Boot: transfer.Boot{1, 2}, ID: 3, Epoch: 4}
	if got, err := LeaseID(Lease(id)); err != nil || got != id {
		t.Errorf("%v, %v", got, err)
	}
	if _, err := LeaseID(nil); KindOf(err) != BadLease {
		t.Errorf("no lease: %v", err)
	}
	k := transfer.Key{Xfer: transfer.XferID{1}, Hash: transfer.PrefixHash{2}}
	if got, err := Key(k.Xfer[:], k.Hash[:]); err != nil || got != k {
		t.Errorf("%v, %v", got, err)
	}
	if _, err := Key(nil, k.Hash[:]); KindOf(err) != BadKey {
		t.Errorf("no transfer id: %v", err)
	}
}

func TestMillis(t *testing.T) {
	for d, want := range map[time.Duration]uint32{-1: 0, 1500 * time.Microsecond: 1,
		2 * MaxDeadline: uint32(MaxDeadline / time.Millisecond)} {
		if got := Millis(d); got != want {
			t.Errorf("%v: %d, want %d", d, got, want)
		}
	}
}
