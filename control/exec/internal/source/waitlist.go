package source

import (
	"github.com/kvspray/kvspray/control/exec/internal/core"
	"github.com/kvspray/kvspray/control/exec/internal/index"
	"github.com/kvspray/kvspray/control/exec/internal/lanes"
	"github.com/kvspray/kvspray/control/exec/internal/timer"
	"github.com/kvspray/kvspray/transfer"
)

// pending waits for an intent: an admission query, a grant, a part of one, or a decline.
type pending struct {
	peer    *lanes.Peer
	key     transfer.Key
	in      *inboundGrant // nil: a query, or a decline
	binding *partBinding  // nil: the grant waits for any intent of its key
	decline *decline
	token   uint64
	session uint64       // of the scheduler that asks
	end     Instant      // of its wait
	gone    bool         // the key has a tombstone: the answer when the time is over
	t       *timer.Timer // nil: it does not wait
}

// waitlist holds everything that waits for an intent. Its entries count towards the limit of their
// peer, and the grant or part that waits points back at its entry.
type waitlist struct {
	*core.Core
	byKey  map[transfer.Key][]*pending
	byPeer index.Sets[transfer.Boot, *pending]
}

func newWaitlist(c *core.Core) *waitlist {
	return &waitlist{Core: c, byKey: map[transfer.Key][]*pending{}, byPeer: index.Sets[transfer.Boot,
		*pending]{}}
}

func (wl *waitlist) add(q *pending) {
	q.peer.Pending++
	wl.byPeer.Add(q.peer.Boot, q)
	wl.byKey[q.key] = append(wl.byKey[q.key], q)
	q.setWait(q)
}

func (q *pending) setWait(w *pending) {
	switch {
	case q.binding != nil:
		q.binding.wait = w
	case q.in != nil:
		q.in.wait = w
	}
}

// drop ends the wait of an entry; nothing is answered.
func (wl *waitlist) drop(q *pending) {
	if q.t == nil {
		return
	}
	wl.Agenda.Disarm(q.t)
	q.t = nil
	q.peer.Pending--
	wl.byPeer.Remove(q.peer.Boot, q)
	q.setWait(nil)
	if l := index.Remove(wl.byKey[q.key], q); len(l) > 0 {
		wl.byKey[q.key] = l
	} else {
		delete(wl.byKey, q.key)
	}
}

// dropOf drops the entries of a peer.
func (wl *waitlist) dropOf(p *lanes.Peer) {
	for q := range wl.byPeer[p.Boot] {
		if q.peer == p {
			wl.drop(q)
		}
	}
}
