package exec

import "github.com/kvspray/kvspray/transfer"

// pending waits for an intent: an admission query, a grant, a part of one, or a decline.
type pending struct {
	peer    *peer
	key     transfer.Key
	in      *inboundGrant // nil: a query, or a decline
	claim   *partBinding  // nil: the grant waits for any intent of its key
	decline *decline
	token   uint64
	gone    bool   // the key has a tombstone: the answer when the time is over
	t       *timer // nil: it does not wait
}

// waitlist holds everything that waits for an intent. Its entries count towards the limit of their
// peer, and the grant or part that waits points back at its entry.
type waitlist struct {
	*core
	byKey  map[transfer.Key][]*pending
	byPeer byPeer[*pending]
}

func newWaitlist(c *core) *waitlist {
	return &waitlist{core: c, byKey: map[transfer.Key][]*pending{}, byPeer: byPeer[*pending]{}}
}

func (wl *waitlist) add(q *pending) {
	q.peer.pending++
	wl.byPeer.add(q.peer.boot, q)
	wl.byKey[q.key] = append(wl.byKey[q.key], q)
	q.setWait(q)
}

func (q *pending) setWait(w *pending) {
	switch {
	case q.claim != nil:
		q.claim.wait = w
	case q.in != nil:
		q.in.wait = w
	}
}

// drop ends the wait of an entry; nothing is answered.
func (wl *waitlist) drop(q *pending) {
	if q.t == nil {
		return
	}
	wl.agenda.disarm(q.t)
	q.t = nil
	q.peer.pending--
	wl.byPeer.remove(q.peer.boot, q)
	q.setWait(nil)
	if l := remove(wl.byKey[q.key], q); len(l) > 0 {
		wl.byKey[q.key] = l
	} else {
		delete(wl.byKey, q.key)
	}
}

// dropOf drops the entries of a peer.
func (wl *waitlist) dropOf(p *peer) {
	for q := range wl.byPeer[p.boot] {
		if q.peer == p {
			wl.drop(q)
		}
	}
}
