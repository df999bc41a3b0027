package source

import (
	"fmt"
	"maps"
	"slices"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec/internal/frame"
	"github.com/kvspray/kvspray/control/exec/internal/lanes"
	"github.com/kvspray/kvspray/control/lease"
	"github.com/kvspray/kvspray/transfer"
)

// A receiver that cannot plan, or is canceled before its grant, declines: else the source's engine
// would keep its blocks for the match timeout.

// decline cancels one receiver before it has a lease: its place at each rank of our engine stays
// empty.
type decline struct {
	id     lease.GrantID
	team   lease.TeamID
	size   int
	why    string
	engine string
	world  int             // its ranks; 0: none of its intents has come
	freed  map[string]bool // ranks whose place is free
}

// onDecline takes a decline: a Revoke of a lease that has no grant here.
func (mt *Matcher) onDecline(now Instant, p *lanes.Peer, g lease.GrantID, m *peerv1.Revoke) error {
	if len(m.Xfer) == 0 {
		return nil // of a grant that is over
	}
	k, err := frame.Key(m.Xfer, m.Hash)
	if err != nil {
		return fmt.Errorf("revoke %s: %w", g.Dest, err)
	}
	if err := frame.CheckTeam(m.Team, m.TeamSize); err != nil {
		return fmt.Errorf("revoke %s: %w", g.Dest, err)
	}
	why := gaveUp + m.Reason
	if old := mt.absents[engineLease{g.Dest.Boot, g.Dest.ID}]; old != nil && old.key == k {
		mt.endInbound(now, old, engines.StatusCancelled, why)
		return nil
	}
	q := &pending{peer: p, key: k, decline: &decline{id: g, team: lease.TeamID(m.Team),
		size: int(m.TeamSize), why: why, freed: map[string]bool{}}}
	if !mt.settleDecline(now, q) {
		mt.wait(now, q, mt.queried(now, p, k))
	}
	return nil
}

// queried is for how many milliseconds queries of a peer for a key still wait for its intent, if
// that is longer than the match timeout: the decline of their request has to be there, too.
func (mt *Matcher) queried(now Instant, p *lanes.Peer, k transfer.Key) uint32 {
	last := now + mt.Cfg.MatchTimeout
	for q := range mt.pending.byPeer[p.Boot] {
		if q.in == nil && q.decline == nil && q.key.Xfer == k.Xfer && (q.key == k || whole(k)) {
			last = max(last, q.end)
		}
	}
	return uint32((last - now) / time.Millisecond)
}

// whole reports whether a key stands for every prompt of its transfer: no prompt has a hash of
// zeros.
func whole(k transfer.Key) bool { return k.Hash == transfer.PrefixHash{} }

// settleWhole frees a place at every source lease of a transfer. The decline stays: other prompts
// of the transfer may follow.
func (mt *Matcher) settleWhole(now Instant, q *pending) {
	d := q.decline
	for _, k := range keysInOrder(maps.Keys(mt.sources.byKey), q.key.Xfer) {
		for _, s := range slices.Clone(mt.sources.byKey[k]) {
			if !s.Over(d.id) && s.Bind(d.id, d.team, d.size) == nil {
				s.trouble = d.why
				mt.sources.served(now, s, s.End(d.id, false), engines.StatusCancelled, d.why)
			}
		}
	}
}

// settleDecline frees the receiver's place on every rank that has come. It returns false while
// other ranks may come.
func (mt *Matcher) settleDecline(now Instant, q *pending) bool {
	d := q.decline
	if whole(q.key) {
		mt.settleWhole(now, q)
		return false
	}
	for _, s := range slices.Clone(mt.sources.byKey[q.key]) {
		at := s.ws.Place
		switch {
		case d.world > 0 && d.engine != at.Engine || d.freed[at.Rank()]:
			continue
		case s.Over(d.id): // its place is free already
		case s.Bind(d.id, d.team, d.size) != nil:
			continue // of another request
		default:
			mt.sources.placed(now, s)
			s.trouble = d.why
			mt.sources.served(now, s, s.End(d.id, false), engines.StatusCancelled, d.why)
		}
		d.engine, d.world = at.Engine, at.World()
		d.freed[at.Rank()] = true
	}
	return d.world > 0 && len(d.freed) >= d.world
}
