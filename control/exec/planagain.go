package exec

import (
	"bytes"
	"errors"
	"maps"
	"slices"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/lease"
	"github.com/kvspray/kvspray/transfer"
)

// Described reports that the planner has a layout of a peer, or why not. A peer that does not
// answer (ErrNoAnswer) is asked again until the match timeout, or until it is forgotten.
func (e *Exec) Described(now Instant, boot transfer.Boot, geometry [32]byte, err error) {
	name := described{boot, geometry}
	if w := e.layouts.asked[name]; w != nil && errors.Is(err, ErrNoAnswer) && now < w.end &&
		e.peers.byBoot[boot] != nil && e.needed(w) {
		e.agenda.arm(w.retry, now+connectRetry)
		return
	}
	e.planAgain(now, name, err)
	e.assign(now)
}

// needed reports whether a lease or a grant still waits for a layout.
func (e *Exec) needed(w *description) bool {
	for d := range w.dests {
		if d.State == lease.DestWaiting && !d.decided {
			return true
		}
	}
	for c := range w.claims {
		if e.match.grants[c.in.id] == c.in && !c.in.over {
			return true
		}
	}
	return false
}

// planAgain continues what waited for a layout.
func (e *Exec) planAgain(now Instant, name described, err error) {
	boot, w := name.boot, e.layouts.asked[name]
	if w == nil {
		return
	}
	delete(e.layouts.asked, name)
	e.agenda.disarm(w.retry)
	for _, d := range inOrder(maps.Keys(w.dests)) {
		switch {
		case d.State != lease.DestWaiting || d.decided:
		case err != nil && !d.told && d.ep.peer != nil:
			d.ep.peer.ranks = nil // of an engine that is not there any more, or not for this one
			e.dests.grant(now, d)
		case err != nil && d.ep.peer != nil && d.ep.peer.boot == boot:
			e.dests.close(now, d, engines.StatusFailed,
				"the layout of a rank of the prefill engine is not to be had: "+err.Error())
		default:
			e.dests.grant(now, d)
		}
	}
	for _, c := range bindingsInOrder(maps.Keys(w.claims)) {
		c.answered()
		switch {
		case e.match.grants[c.in.id] != c.in || c.in.over || c.src != nil || c.wait != nil:
		case err != nil:
			e.match.refuse(now, c.in, peerv1.GrantReply_PLAN,
				"the layout of the receiver is not to be had: "+err.Error())
		case !e.match.bindClaim(now, c):
			e.match.wait(now, &pending{peer: c.in.peer, key: c.in.key, in: c.in, claim: c},
				c.in.msg.PartnerMs)
		}
	}
}

// undescribed ends the wait for layouts of a forgotten peer.
func (e *Exec) undescribed(now Instant, boot transfer.Boot) {
	var all []described
	for name := range e.layouts.asked {
		if name.boot == boot {
			all = append(all, name)
		}
	}
	slices.SortFunc(all, func(a, b described) int {
		return bytes.Compare(a.geometry[:],
			b.geometry[:])
	})
	for _, name := range all {
		e.planAgain(now, name, ErrNoAnswer)
	}
}
