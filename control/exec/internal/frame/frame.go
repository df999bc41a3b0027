// Package frame converts fields of control frames to values and back, and checks them: no correct
// peer sends an invalid field. The log has each kind of protocol violation once for each peer;
// metrics count all.
package frame

import (
	"fmt"
	"slices"
	"strings"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/exec/internal/agreement"
	"github.com/kvspray/kvspray/control/lease"
	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/transfer"
)

// Bounds of what peers send.
const (
	MaxDeadline  = 10 * time.Minute
	MaxParts     = 256 // ranks of an engine, and so parts of a grant
	MaxRankBytes = 64  // of a rank's name
)

// Millis is a duration as frames have it.
func Millis(d time.Duration) uint32 {
	return uint32(min(max(d, 0), MaxDeadline) / time.Millisecond)
}

// Key checks the key of a transfer.
func Key(xfer, hash []byte) (k transfer.Key, err error) {
	if len(xfer) != len(k.Xfer) || len(hash) != len(k.Hash) {
		return k, Wrong(BadKey, "key: xfer has %d bytes and hash %d: want %d and %d", len(xfer),
			len(hash), len(k.Xfer), len(k.Hash))
	}
	copy(k.Xfer[:], xfer)
	copy(k.Hash[:], hash)
	return k, nil
}

// LeaseID checks an id of a lease.
func LeaseID(l *peerv1.Lease) (id transfer.LeaseID, err error) {
	if len(l.GetBoot()) != len(id.Boot) {
		return id, Wrong(BadLease, "lease: boot has %d bytes: want %d", len(l.GetBoot()), len(id.Boot))
	}
	copy(id.Boot[:], l.Boot)
	id.ID, id.Epoch = l.Id, l.Epoch
	return id, nil
}

// Lease is the form of an id in frames.
func Lease(id transfer.LeaseID) *peerv1.Lease {
	return &peerv1.Lease{Boot: append([]byte(nil), id.Boot[:]...), Id: id.ID, Epoch: id.Epoch}
}

// CheckGrant checks what every grant has.
func CheckGrant(m *peerv1.Grant) error {
	switch n := len(m.Parts); {
	case m.Gen == 0:
		return Wrong(BadGeneration, "generation 0: they count from 1")
	case len(m.Fingerprint) != 32:
		return Wrong(BadFingerprint, "fingerprint of %d bytes: want 32", len(m.Fingerprint))
	case n < 1 || n > MaxParts:
		return Wrong(BadParts, "%d parts: want 1 to %d", n, MaxParts)
	}
	if err := CheckTeam(m.Team, m.TeamSize); err != nil {
		return err
	}
	ranks, slots := make(map[string]bool, len(m.Parts)), make(map[uint32]bool, len(m.Parts))
	for i, p := range m.Parts {
		bad := func(what Violation, v string) error {
			return Wrong(what, "parts[%d].%s = %s", i, what, v)
		}
		switch {
		case p.GetRank() == "" || len(p.Rank) > MaxRankBytes || ranks[p.Rank]:
			return bad(BadRank, fmt.Sprintf("%.80q: want each rank once, in 1 to %d bytes", p.GetRank(),
				MaxRankBytes))
		case len(p.Geometry) == 0 && (p.Slot != 0 || p.Gen != 0 || p.Chunks != 0 || p.Bytes != 0 ||
			len(p.Share) != 0):
			return bad(BadGeometry, "empty: a rank that gives nothing has no slot, chunks or share")
		case len(p.Geometry) != 0 && len(p.Geometry) != 32:
			return bad(BadGeometry, fmt.Sprintf("%d bytes: want 32", len(p.Geometry)))
		case len(p.Geometry) != 0 && (p.Slot > 1<<16-1 || p.Gen == 0 || slots[p.Slot]):
			return bad(BadSlot, fmt.Sprintf("%d, generation %d: want 16 bits, each slot once, and "+
				"generations from 1", p.Slot, p.Gen))
		case len(p.Share) > 2*layout.MaxLayers:
			return bad(BadShare, fmt.Sprintf("%d numbers: want at most %d", len(p.Share),
				2*layout.MaxLayers))
		}
		ranks[p.Rank] = true
		if len(p.Geometry) > 0 {
			slots[p.Slot] = true
		}
	}
	return nil
}

// CheckTeam checks the receivers of one request.
func CheckTeam(team []byte, size uint32) error {
	if len(team) != len(lease.TeamID{}) || size < 1 || size > lease.MaxTeam {
		return Wrong(BadTeam, "team of %d bytes and %d receivers: want %d, and 1 to %d", len(team), size,
			len(lease.TeamID{}), lease.MaxTeam)
	}
	return nil
}

// Ranks checks the ranks that a peer reports of its engine.
func Ranks(m *peerv1.GrantReply) ([]agreement.Rank, error) {
	if n := len(m.Ranks); n < 1 || n > MaxParts {
		return nil, Wrong(BadRanks, "%d of them: want 1 to %d", n, MaxParts)
	}
	out := make([]agreement.Rank, 0, len(m.Ranks))
	for i, r := range m.Ranks {
		if r.GetRank() == "" || len(r.Rank) > MaxRankBytes || len(r.Geometry) != 32 ||
			slices.ContainsFunc(out, func(o agreement.Rank) bool { return o.Name == r.Rank }) {
			return nil, Wrong(BadRanks, "ranks[%d] = %.80q with a geometry of %d bytes: want each name "+
				"once, in 1 to %d bytes, and 32", i, r.GetRank(),
				len(r.GetGeometry()), MaxRankBytes)
		}
		out = append(out, agreement.Rank{Name: r.Rank, Geometry: [32]byte(r.Geometry)})
	}
	return out, nil
}

// CodeName is for messages.
func CodeName(c peerv1.GrantReply_Code) string { return strings.ToLower(c.String()) }
