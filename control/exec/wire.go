package exec

import (
	"fmt"
	"slices"
	"strings"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/lease"
	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/transfer"
)

// Fields of control frames: to values, from values, and what is valid.

func millis(d time.Duration) uint32 {
	return uint32(min(max(d, 0), MaxDeadline) / time.Millisecond)
}

func key(xfer, hash []byte) (k transfer.Key, err error) {
	if len(xfer) != len(k.Xfer) || len(hash) != len(k.Hash) {
		return k, wrong(BadKey, "key: xfer has %d bytes and hash %d: want %d and %d", len(xfer),
			len(hash), len(k.Xfer), len(k.Hash))
	}
	copy(k.Xfer[:], xfer)
	copy(k.Hash[:], hash)
	return k, nil
}

func leaseID(l *peerv1.Lease) (id transfer.LeaseID, err error) {
	if len(l.GetBoot()) != len(id.Boot) {
		return id, wrong(BadLease, "lease: boot has %d bytes: want %d", len(l.GetBoot()), len(id.Boot))
	}
	copy(id.Boot[:], l.Boot)
	id.ID, id.Epoch = l.Id, l.Epoch
	return id, nil
}

func leaseMsg(id transfer.LeaseID) *peerv1.Lease {
	return &peerv1.Lease{Boot: append([]byte(nil), id.Boot[:]...), Id: id.ID, Epoch: id.Epoch}
}

func checkGrant(m *peerv1.Grant) error {
	switch n := len(m.Parts); {
	case m.Gen == 0:
		return wrong(BadGeneration, "generation 0: they count from 1")
	case len(m.Fingerprint) != 32:
		return wrong(BadFingerprint, "fingerprint of %d bytes: want 32", len(m.Fingerprint))
	case n < 1 || n > MaxParts:
		return wrong(BadParts, "%d parts: want 1 to %d", n, MaxParts)
	}
	if err := checkTeam(m.Team, m.TeamSize); err != nil {
		return err
	}
	ranks, slots := make(map[string]bool, len(m.Parts)), make(map[uint32]bool, len(m.Parts))
	for i, p := range m.Parts {
		bad := func(what Violation, v string) error {
			return wrong(what, "parts[%d].%s = %s",
				i, what, v)
		}
		switch {
		case p.GetRank() == "" || len(p.Rank) > maxRankBytes || ranks[p.Rank]:
			return bad(BadRank, fmt.Sprintf("%.80q: want each rank once, in 1 to %d bytes", p.GetRank(),
				maxRankBytes))
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

func checkTeam(team []byte, size uint32) error {
	if len(team) != len(lease.TeamID{}) || size < 1 || size > lease.MaxTeam {
		return wrong(BadTeam, "team of %d bytes and %d receivers: want %d, and 1 to %d", len(team), size,
			len(lease.TeamID{}), lease.MaxTeam)
	}
	return nil
}

// ranksOf checks the ranks that a peer reports of its engine.
func ranksOf(m *peerv1.GrantReply) ([]Rank, error) {
	if n := len(m.Ranks); n < 1 || n > MaxParts {
		return nil, wrong(BadRanks, "%d of them: want 1 to %d", n, MaxParts)
	}
	out := make([]Rank, 0, len(m.Ranks))
	for i, r := range m.Ranks {
		if r.GetRank() == "" || len(r.Rank) > maxRankBytes || len(r.Geometry) != 32 ||
			slices.ContainsFunc(out, func(o Rank) bool { return o.Name == r.Rank }) {
			return nil, wrong(BadRanks, "ranks[%d] = %.80q with a geometry of %d bytes: want each name "+
				"once, in 1 to %d bytes, and 32", i, r.GetRank(),
				len(r.GetGeometry()), maxRankBytes)
		}
		out = append(out, Rank{r.Rank, [32]byte(r.Geometry)})
	}
	return out, nil
}

func codeName(c peerv1.GrantReply_Code) string { return strings.ToLower(c.String()) }
