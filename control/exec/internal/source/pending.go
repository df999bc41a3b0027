package source

import (
	"fmt"
	"maps"
	"slices"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/exec/internal/frame"
	"github.com/kvspray/kvspray/control/exec/internal/lanes"
	"github.com/kvspray/kvspray/control/exec/internal/timer"
	"github.com/kvspray/kvspray/transfer"
)

// wait keeps a grant, a part of one, a query or a decline until its intent comes.
func (mt *Matcher) wait(now Instant, q *pending, ms uint32) {
	p := q.peer
	found, dead := mt.sources.ended.Find(now, q.key)
	graceEnd := found.At + mt.Cfg.TombstoneGrace
	switch {
	case dead && (!found.Served || now >= graceEnd):
		mt.refusePending(now, q, peerv1.GrantReply_GONE, "the source lease of this key is over")
		return
	case mt.Draining:
		mt.refusePending(now, q, peerv1.GrantReply_DRAINING, "the sidecar is draining")
		return
	case !dead && q.in != nil && mt.sources.hopeless(q.key):
		mt.refusePending(now, q, peerv1.GrantReply_MISMATCH, mismatch)
		return
	case p.Pending >= mt.Cfg.MaxPending:
		mt.refusePending(now, q, peerv1.GrantReply_LIMIT,
			fmt.Sprintf("%d grants and queries wait already", p.Pending))
		return
	}
	end := now + mt.Cfg.MatchTimeout
	if ms > 0 {
		end = now + min(Instant(ms)*1e6, frame.MaxDeadline)
	}
	if q.decline == nil && mt.vacant(q) {
		if now >= mt.workers.Vacated+VacantWait {
			mt.refusePending(now, q, peerv1.GrantReply_NO_SOURCE, noEngine)
			return
		}
		end = min(end, mt.workers.Vacated+VacantWait)
	}
	if dead && graceEnd < end {
		// In a list of equal prompts another intent may follow.
		end, q.gone = graceEnd, true
	}
	q.t = timer.New(func(now Instant) { mt.pendingDue(now, q) })
	q.end = end
	mt.pending.add(q)
	mt.Agenda.Arm(q.t, end)
}

const (
	// An engine that lost its session begins another within VacantWait: several of the longest pauses
	// between two tries of the shim.
	VacantWait = 3 * time.Second

	noEngine = "no engine is connected to the sidecar there: is the prefill's up, and does its " +
		"socket setting name that sidecar's?"
)

// vacant reports that no worker is here that could have what q waits for.
func (mt *Matcher) vacant(q *pending) bool {
	if q.in != nil {
		return mt.workers.VacantFor(q.in.msg.Fingerprint)
	}
	return mt.workers.Vacant()
}

const mismatch = "the prefill has this transfer id with another prefix hash: prompt, LoRA, salt " +
	"or multimodal items differ"

func (mt *Matcher) pendingDue(now Instant, q *pending) {
	switch {
	case q.gone:
		mt.refusePending(now, q, peerv1.GrantReply_GONE, "the source lease of this key is over")
	case mt.sources.byXfer[q.key.Xfer].open > 0 && len(mt.sources.byKey[q.key]) == 0:
		mt.refusePending(now, q, peerv1.GrantReply_MISMATCH, mismatch)
	case q.binding != nil && len(mt.sources.byKey[q.key]) > 0:
		mt.refusePending(now, q, peerv1.GrantReply_NO_SOURCE, fmt.Sprintf("rank %s of the prefill "+
			"engine has not come", q.binding.part.Rank))
	case len(mt.sources.byKey[q.key]) > 0:
		mt.refusePending(now, q, peerv1.GrantReply_LIMIT, "the source leases of this key serve all the "+
			"grants that they were made for")
	case mt.vacant(q):
		mt.refusePending(now, q, peerv1.GrantReply_NO_SOURCE, noEngine)
	default:
		mt.refusePending(now, q, peerv1.GrantReply_NO_SOURCE, "the prefill never had this transfer")
	}
}

func (mt *Matcher) refusePending(now Instant, q *pending, code peerv1.GrantReply_Code,
	message string) {
	mt.pending.drop(q)
	if q.decline != nil {
		return // a decline has no answer
	}
	if q.in != nil {
		if mt.grants[q.in.id] == q.in { // else it committed without this rank
			mt.refuse(now, q.in, code, message)
		}
		return
	}
	state := peerv1.Admitted_GONE
	if code == peerv1.GrantReply_MISMATCH || code == peerv1.GrantReply_DRAINING ||
		code == peerv1.GrantReply_LIMIT {
		state = peerv1.Admitted_REFUSED
	}
	mt.out.Send(q.peer.Boot, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Admitted{
		Admitted: &peerv1.Admitted{
			Token: q.token, State: state, Message: message}}})
}

func (mt *Matcher) sourceOpened(now Instant, k transfer.Key) {
	mt.wake(now, k)
	mt.wake(now, transfer.Key{Xfer: k.Xfer}) // declines of every prompt
}

func (mt *Matcher) allHeld(now Instant, x transfer.XferID) {
	for _, k := range keysInOrder(maps.Keys(mt.pending.byKey), x) {
		for _, q := range slices.Clone(mt.pending.byKey[k]) {
			if q.t != nil && !q.gone && q.in != nil && mt.sources.hopeless(q.key) {
				mt.refusePending(now, q, peerv1.GrantReply_MISMATCH, mismatch)
			}
		}
	}
}

func (mt *Matcher) keyGone(now Instant, k transfer.Key, reason string) {
	for _, q := range slices.Clone(mt.pending.byKey[k]) {
		if q.t != nil {
			mt.refusePending(now, q, peerv1.GrantReply_GONE, reason)
		}
	}
}

// wake looks again at what waits for a key.
func (mt *Matcher) wake(now Instant, k transfer.Key) {
	for _, q := range slices.Clone(mt.pending.byKey[k]) {
		switch {
		case q.t == nil: // settled by one before it
		case q.binding != nil:
			if mt.bindPart(now, q.binding) {
				mt.pending.drop(q)
			}
		case q.in != nil:
			if mt.settle(now, q.in) {
				mt.pending.drop(q)
			}
		case q.decline != nil:
			if mt.settleDecline(now, q) {
				mt.pending.drop(q)
			}
		case len(mt.sources.byKey[k]) > 0:
			mt.pending.drop(q)
			mt.admit(q, mt.sources.byKey[k][0])
		}
	}
}

func (mt *Matcher) OnAwait(now Instant, p *lanes.Peer, m *peerv1.Await) error {
	k, err := frame.Key(m.Xfer, m.Hash)
	if err != nil {
		return fmt.Errorf("await: %w", err)
	}
	q := &pending{peer: p, key: k, token: m.Token, session: m.Session}
	if l := mt.sources.byKey[k]; len(l) > 0 {
		mt.admit(q, l[0])
		return nil
	}
	mt.wait(now, q, m.TtlMs)
	return nil
}

func (mt *Matcher) admit(q *pending, s *Lease) {
	mt.sources.waits.add(waiter{q.peer.Boot, q.session}, q.key)
	mt.out.Send(q.peer.Boot, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Admitted{
		Admitted: &peerv1.Admitted{
			Token: q.token, State: peerv1.Admitted_ADMITTED, Tokens: s.in.Tokens}}})
}
