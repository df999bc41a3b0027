package source

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec/internal/index"
	"github.com/kvspray/kvspray/control/exec/internal/lanes"
	"github.com/kvspray/kvspray/control/lease"
	"github.com/kvspray/kvspray/transfer"
)

// A decode engine sends an admission query when a request arrives. It asks for the bytes only when
// the request leaves its queue. In between, the source lease is held while the session that sent
// the query lives. The hold ends earlier at the hold timeout, or if the source's engine needs the
// blocks.

// waiter is the session of a decode engine's scheduler whose query for a key was admitted.
type waiter struct {
	peer    transfer.Boot
	session uint64
}

// waits stores the waiters for the keys of open leases.
type waits struct {
	byKey    index.Sets[transfer.Key, waiter] // at most lease.MaxFanout for each key
	keys     index.Sets[waiter, transfer.Key]
	sessions index.Sets[transfer.Boot, uint64] // of waiters, by peer
}

func newWaits() waits {
	return waits{byKey: index.Sets[transfer.Key, waiter]{}, keys: index.Sets[waiter, transfer.Key]{},
		sessions: index.Sets[transfer.Boot, uint64]{}}
}

// add records a waiter, but not more waiters for a key than a lease can serve. Those that are not
// recorded do not extend the hold: the match timeout applies to them.
func (ws *waits) add(w waiter, k transfer.Key) {
	if len(ws.byKey[k]) < lease.MaxFanout && ws.byKey.Add(k, w) {
		ws.keys.Add(w, k)
		ws.sessions.Add(w.peer, w.session)
	}
}

func (ws *waits) remove(w waiter, k transfer.Key) {
	ws.byKey.Remove(k, w)
	if ws.keys.Remove(w, k); len(ws.keys[w]) == 0 {
		ws.sessions.Remove(w.peer, w.session)
	}
}

func (ws *waits) dropKey(k transfer.Key) {
	for w := range ws.byKey[k] {
		ws.remove(w, k)
	}
}

// of returns the waiters of a peer, sorted by session.
func (ws *waits) of(boot transfer.Boot) (all []waiter) {
	for session := range ws.sessions[boot] {
		all = append(all, waiter{boot, session})
	}
	slices.SortFunc(all, func(a, b waiter) int { return cmp.Compare(a.session, b.session) })
	return all
}

// hold starts the match timeout.
func (ss *Table) hold(now Instant, s *Lease) {
	s.Held, s.MatchBy = true, now+ss.Cfg.MatchTimeout
	s.holdEnd = max(s.MatchBy, now+ss.Cfg.HoldTimeout)
}

// waited reports whether the hold of a lease may continue: the peer of a waiter is up, and neither
// the hold timeout nor the lease's own engine has ended the hold.
func (ss *Table) waited(now Instant, s *Lease) bool {
	if !s.Held || s.MatchBy == lease.Never || s.yielded != "" || now >= s.holdEnd {
		return false
	}
	for w := range ss.waits.byKey[s.Key] {
		if p := ss.peers.Find(w.peer); p != nil && p.Up() {
			return true
		}
	}
	return false
}

// holdOn restarts the match timeout. HeldOn makes the engine restart its deadline, too.
func (ss *Table) holdOn(now Instant, s *Lease) {
	s.MatchBy = min(now+min(ss.Cfg.MatchTimeout, s.span), s.holdEnd)
	s.Deadline = max(s.Deadline, s.MatchBy)
	ss.out.HeldOn(s.ws.Worker, s.ID.ID)
	ss.Agenda.Arm(s.t, min(s.Deadline, s.MatchBy))
}

func (ss *Table) holdAllOn(now Instant, k transfer.Key) {
	for _, s := range ss.byKey[k] {
		if s.Held && s.MatchBy != lease.Never && now < s.holdEnd {
			ss.holdOn(now, s)
		}
	}
}

// placed ends the waits for a key once one of its leases has no room for another receiver: all of
// the receivers that its intent announced have come. For other leases with the same key the match
// timeout restarts. Their requests may never come, because the decode engine then has the prompt in
// its prefix cache.
func (ss *Table) placed(now Instant, s *Lease) {
	if !s.Room(lease.TeamID{}) && len(ss.waits.byKey[s.Key]) > 0 {
		ss.waits.dropKey(s.Key)
		ss.holdAllOn(now, s.Key)
	}
}

// refusedAll ends the waits of a peer for a key. The sidecar has refused a request of the peer's
// engine, and will refuse the other requests of this engine for the same reason.
func (ss *Table) refusedAll(now Instant, boot transfer.Boot, k transfer.Key) {
	waited := false
	for w := range ss.waits.byKey[k] {
		if w.peer == boot {
			ss.waits.remove(w, k)
			waited = true
		}
	}
	if waited { // else refused grants would extend the hold
		ss.holdAllOn(now, k)
	}
}

// unmatched returns the reason why a lease ends without a receiver.
func (ss *Table) unmatched(now Instant, s *Lease) string {
	switch {
	case s.yielded != "":
		return s.yielded
	case len(ss.waits.byKey[s.Key]) == 0:
		return fmt.Sprintf("no receiver came within %v", ss.Cfg.MatchTimeout)
	case now >= s.holdEnd:
		return fmt.Sprintf("the decode engine lives, but fetched nothing within %v "+
			"(transfer.hold_timeout)",
			max(ss.Cfg.HoldTimeout, ss.Cfg.MatchTimeout))
	}
	return fmt.Sprintf("the sidecar of the decode engine that waits was unreachable for %v",
		ss.Cfg.MatchTimeout)
}

// Yield takes engines.Yielded.
func (ss *Table) Yield(now Instant, w *engines.Worker, id uint64) {
	if s := ss.get(w, id); s != nil && s.Held {
		ss.stopWaiting(now, s, "the engine needs the blocks: its pool is nearly full")
	}
}

// stopWaiting makes a lease refuse new receivers. Bound receivers finish.
func (ss *Table) stopWaiting(now Instant, s *Lease, why string) {
	if s.decided || s.yielded != "" {
		return
	}
	s.yielded = why
	if s.MatchBy != lease.Never || !s.Held {
		s.MatchBy = now
		ss.due(now, s)
	}
}

// waiterGone ends the waits of a session. If a key has no other waiter, its leases refuse new
// receivers from then on.
func (ss *Table) waiterGone(now Instant, w waiter, why string) {
	for _, k := range slices.SortedFunc(maps.Keys(ss.waits.keys[w]), compareKeys) {
		ss.waits.remove(w, k)
		if len(ss.waits.byKey[k]) > 0 {
			continue
		}
		for _, s := range slices.Clone(ss.byKey[k]) {
			ss.stopWaiting(now, s, why)
		}
	}
}

// peerDown ends the waits of a peer that has ended (over). For any other peer it restarts the match
// timeout of the leases that its waiters hold.
func (ss *Table) peerDown(now Instant, boot transfer.Boot, over bool) {
	for _, w := range ss.waits.of(boot) {
		if over {
			ss.waiterGone(now, w, "the sidecar of the decode engine is gone")
			continue
		}
		for _, k := range slices.SortedFunc(maps.Keys(ss.waits.keys[w]), compareKeys) {
			ss.holdAllOn(now, k)
		}
	}
}

// OnSessionOver ends the waits and the queries of a session.
func (mt *Matcher) OnSessionOver(now Instant, p *lanes.Peer, m *peerv1.SessionOver) {
	const why = "the decode engine is gone"
	for q := range mt.pending.byPeer[p.Boot] {
		if q.peer != p || q.in != nil || q.decline != nil || q.session != m.Session {
			continue
		}
		// The intent for this query may still arrive. This records that no engine waits for it.
		id := lease.GrantID{Peer: p.Boot, Dest: transfer.LeaseID{Boot: p.Boot, ID: q.token}}
		team := lease.TeamID(p.Boot)
		binary.LittleEndian.PutUint64(team[8:], q.token)
		q.decline = &decline{id: id, team: team, size: 1, why: why, freed: map[string]bool{}}
	}
	mt.sources.waiterGone(now, waiter{p.Boot, m.Session}, why)
}
