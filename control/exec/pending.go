package exec

import (
	"fmt"
	"slices"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/transfer"
)

// pending waits for an intent: a question, a grant, a part of one, or the word that there will be none.
type pending struct {
	peer    *peer
	key     transfer.Key
	in      *inbound // nil: a question, or a decline
	claim   *claim   // nil: the grant waits for any intent of its key
	decline *decline
	token   uint64
	gone    bool // the key has a tombstone: this is what to say when the time is over
	t       *timer
}

// wait keeps a grant, a part of one or a question until its intent comes.
func (e *Exec) wait(now Instant, q *pending, ms uint32) {
	p := q.peer
	tomb, dead := e.tombs.Find(now, q.key)
	hush := tomb.At + e.cfg.TombstoneHush
	switch {
	case dead && (!tomb.Served || now >= hush):
		e.refusePending(now, q, peerv1.GrantReply_GONE, "the source lease of this key is over")
		return
	case e.draining:
		e.refusePending(now, q, peerv1.GrantReply_DRAINING, "the sidecar is draining")
		return
	case !dead && e.hopeless(q):
		e.refusePending(now, q, peerv1.GrantReply_MISMATCH, mismatch)
		return
	case p.pending >= e.cfg.MaxPending:
		e.refusePending(now, q, peerv1.GrantReply_LIMIT, fmt.Sprintf("%d grants and questions wait already", p.pending))
		return
	}
	end := now + e.cfg.Partner
	if ms > 0 {
		end = now + min(Instant(ms)*1e6, MaxDeadline)
	}
	if q.decline == nil && e.vacant() {
		if now >= e.vacated+vacantWait {
			e.refusePending(now, q, peerv1.GrantReply_NO_PARTNER, noEngine)
			return
		}
		end = min(end, e.vacated+vacantWait)
	}
	if dead && hush < end {
		// A prompt list with equal prompts: another intent may be about to come.
		end, q.gone = hush, true
	}
	p.pending++
	e.with(p.boot).pending[q] = struct{}{}
	e.pending[q.key] = append(e.pending[q.key], q)
	switch {
	case q.claim != nil:
		q.claim.wait = q
	case q.in != nil:
		q.in.wait = q
	}
	q.t = newTimer(func(now Instant) { e.pendingDue(now, q) })
	e.agenda.arm(q.t, end)
}

// vacant reports that no engine is connected. One that has just lost its session begins another, and its intents come with it; those who ask
// later than vacantWait need not wait.
func (e *Exec) vacant() bool {
	for _, w := range e.workers {
		if !w.gone {
			return false
		}
	}
	return true
}

const (
	vacantWait = 3 * time.Second // several of the longest pauses between two tries of the shim

	noEngine = "no engine is connected to the sidecar there: is the prefill's up, and does its socket setting name that sidecar's?"
)

const mismatch = "the prefill has this transfer id with another prefix hash: prompt, LoRA, salt or multimodal items differ"

// hopeless reports that no intent for q will come: every request of its transfer id is finished, and none has its hash. Only a grant
// says so: it follows an admission, or a prefill that is done. A question may be early, for a prompt list is admitted one by one.
func (e *Exec) hopeless(q *pending) bool {
	n := e.byXfer[q.key.Xfer]
	return q.in != nil && n.open > 0 && n.open == n.held && len(e.byKey[q.key]) == 0
}

func (e *Exec) pendingDue(now Instant, q *pending) {
	switch {
	case q.gone:
		e.refusePending(now, q, peerv1.GrantReply_GONE, "the source lease of this key is over")
	case e.byXfer[q.key.Xfer].open > 0 && len(e.byKey[q.key]) == 0:
		e.refusePending(now, q, peerv1.GrantReply_MISMATCH, mismatch)
	case q.claim != nil && len(e.byKey[q.key]) > 0:
		e.refusePending(now, q, peerv1.GrantReply_NO_PARTNER, fmt.Sprintf("rank %s of the prefill engine has not come", q.claim.part.Rank))
	case len(e.byKey[q.key]) > 0:
		e.refusePending(now, q, peerv1.GrantReply_LIMIT, "the source leases of this key serve all the grants that they were made for")
	case e.vacant():
		e.refusePending(now, q, peerv1.GrantReply_NO_PARTNER, noEngine)
	default:
		e.refusePending(now, q, peerv1.GrantReply_NO_PARTNER, "the prefill never had this transfer")
	}
}

func (e *Exec) refusePending(now Instant, q *pending, code peerv1.GrantReply_Code, message string) {
	e.dropPending(q)
	if q.decline != nil {
		return // nobody waits for an answer
	}
	if q.in != nil {
		if e.inbound[q.in.id] == q.in { // else it has committed without this rank
			e.refuse(now, q.in, code, message)
		}
		return
	}
	state := peerv1.Admitted_GONE
	if code == peerv1.GrantReply_MISMATCH || code == peerv1.GrantReply_DRAINING || code == peerv1.GrantReply_LIMIT {
		state = peerv1.Admitted_REFUSED
	}
	e.send(q.peer.boot, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Admitted{Admitted: &peerv1.Admitted{
		Token: q.token, State: state, Message: message}}})
}

func (e *Exec) dropPending(q *pending) {
	if q.t == nil {
		return
	}
	e.agenda.disarm(q.t)
	q.t = nil
	q.peer.pending--
	delete(e.with(q.peer.boot).pending, q)
	e.without(q.peer.boot)
	switch {
	case q.claim != nil:
		q.claim.wait = nil
	case q.in != nil:
		q.in.wait = nil
	}
	if l := remove(e.pending[q.key], q); len(l) > 0 {
		e.pending[q.key] = l
	} else {
		delete(e.pending, q.key)
	}
}

// wake looks again at what waits for a key.
func (e *Exec) wake(now Instant, k transfer.Key) {
	for _, q := range slices.Clone(e.pending[k]) {
		switch {
		case q.t == nil: // settled by one before it
		case q.claim != nil:
			if e.bindClaim(now, q.claim) {
				e.dropPending(q)
			}
		case q.in != nil:
			if e.settle(now, q.in) {
				e.dropPending(q)
			}
		case q.decline != nil:
			if e.settleDecline(now, q) {
				e.dropPending(q)
			}
		case len(e.byKey[k]) > 0:
			e.dropPending(q)
			e.admit(q, e.byKey[k][0])
		}
	}
}
