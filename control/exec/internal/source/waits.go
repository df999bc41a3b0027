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

// A decode engine asks for admission when a request comes, and for the bytes once its queue has a
// place for it. In between the session of the query is the sign of life: the source is held while
// the session lives, up to the hold timeout, and not when the source's engine needs the blocks.

// waiter is a scheduler's session that was admitted for a key.
type waiter struct {
	peer    transfer.Boot
	session uint64
}

// waits has the waiters of the keys of open leases.
type waits struct {
	byKey    index.Sets[transfer.Key, waiter] // at most lease.MaxFanout of a key
	keys     index.Sets[waiter, transfer.Key]
	sessions index.Sets[transfer.Boot, uint64] // of waiters, by peer
}

func newWaits() waits {
	return waits{byKey: index.Sets[transfer.Key, waiter]{}, keys: index.Sets[waiter, transfer.Key]{},
		sessions: index.Sets[transfer.Boot, uint64]{}}
}

// add records a waiter. One more than a lease can serve is not recorded: the match timeout counts
// for it.
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

// of are the waiters of a peer, in order.
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

// waited reports whether a lease is still held, for an engine that lives.
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

// holdOn starts the match timeout anew. The engine, too, counts the deadline anew.
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

// placed ends the waits for a key once one lease of it has a receiver in every place: the requests
// that its intent stands for have come. For other leases of the same prompt, whose requests find it
// in their engine's prefix cache, the match timeout starts.
func (ss *Table) placed(now Instant, s *Lease) {
	if !s.Room(lease.TeamID{}) && len(ss.waits.byKey[s.Key]) > 0 {
		ss.waits.dropKey(s.Key)
		ss.holdAllOn(now, s.Key)
	}
}

// refusedAll ends the waits of a peer for a key: its engine was refused, and so will be all of its
// requests.
func (ss *Table) refusedAll(now Instant, boot transfer.Boot, k transfer.Key) {
	for w := range ss.waits.byKey[k] {
		if w.peer == boot {
			ss.waits.remove(w, k)
		}
	}
	ss.holdAllOn(now, k)
}

// unmatched is why a lease ends that served no receiver.
func (ss *Table) unmatched(now Instant, s *Lease) string {
	switch {
	case s.yielded != "":
		return s.yielded
	case len(ss.waits.byKey[s.Key]) == 0:
		return fmt.Sprintf("no partner came within %v", ss.Cfg.MatchTimeout)
	case now >= s.holdEnd:
		return fmt.Sprintf("the decode engine lives, but fetched nothing within %v (transfer.hold)",
			max(ss.Cfg.HoldTimeout, ss.Cfg.MatchTimeout))
	}
	return fmt.Sprintf("the sidecar of the decode engine that waits was unreachable for %v",
		ss.Cfg.MatchTimeout)
}

// Yield is Exec.Yield.
func (ss *Table) Yield(now Instant, w *engines.Worker, id uint64) {
	if s := ss.get(w, id); s != nil && s.Held {
		ss.stopWaiting(now, s, "the engine needs the blocks: its pool is nearly full")
	}
}

// stopWaiting takes no receiver any more; bound ones finish.
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

// waiterGone ends the wait of a session. A lease that nothing else waits for ends.
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

// peerDown ends the waits of a peer that is gone (over), or starts their match timeout.
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
		// Its intent may come yet, and then nothing waits for it.
		id := lease.GrantID{Peer: p.Boot, Dest: transfer.LeaseID{Boot: p.Boot, ID: q.token}}
		team := lease.TeamID(p.Boot)
		binary.LittleEndian.PutUint64(team[8:], q.token)
		q.decline = &decline{id: id, team: team, size: 1, why: why, freed: map[string]bool{}}
	}
	mt.sources.waiterGone(now, waiter{p.Boot, m.Session}, why)
}
