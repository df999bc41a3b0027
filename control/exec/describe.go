package exec

import (
	"bytes"
	"errors"
	"maps"
	"slices"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/lease"
	"github.com/kvspray/kvspray/transfer"
)

// described names a layout of a peer.
type described struct {
	boot     transfer.Boot
	geometry [32]byte
}

// ErrAway is wrapped by what Described is told where the peer did not answer, which says nothing about the layout.
var ErrAway = errors.New("no answer")

// description is who waits for it.
type description struct {
	dests  map[*dest]struct{}
	claims map[*claim]struct{}
	end    Instant // of asking a peer that does not answer
	retry  *timer
}

// describe asks for layouts that a plan needs; d or c goes on when they come. False: too many are asked for already.
func (e *Exec) describe(now Instant, p *peer, u *UnknownLayout, d *dest, c *claim) (asked bool) {
	for _, g := range u.Geometries {
		name := described{p.boot, g}
		w := e.describing[name]
		if w == nil {
			if len(e.describing) >= maxDescribing {
				continue
			}
			w = &description{dests: map[*dest]struct{}{}, claims: map[*claim]struct{}{}, end: now + e.cfg.Partner}
			w.retry = newTimer(func(Instant) { e.askLayout(name) })
			e.describing[name] = w
			e.askLayout(name)
		}
		if d != nil {
			w.dests[d] = struct{}{}
		}
		if c != nil {
			w.claims[c] = struct{}{}
			c.ask()
		}
		asked = true
	}
	return asked
}

func (e *Exec) askLayout(name described) {
	a := e.emit(Describe)
	a.Peer, a.Geometry = name.boot, name.geometry
}

// Described says that the planner knows a layout of a peer now, or why it cannot. A peer that does not answer (ErrAway) may only have died:
// it is asked again for as long as a partner may be missing, or until it is known to be gone.
func (e *Exec) Described(now Instant, boot transfer.Boot, geometry [32]byte, err error) {
	name := described{boot, geometry}
	if w := e.describing[name]; w != nil && errors.Is(err, ErrAway) && now < w.end && e.peers[boot] != nil && e.needed(w) {
		e.agenda.arm(w.retry, now+connectRetry)
		return
	}
	e.planAgain(now, name, err)
	e.assign(now)
}

// needed reports whether anybody waits still.
func (e *Exec) needed(w *description) bool {
	for d := range w.dests {
		if d.State == lease.DestWaiting && !d.decided {
			return true
		}
	}
	for c := range w.claims {
		if e.inbound[c.in.id] == c.in && !c.in.over {
			return true
		}
	}
	return false
}

// planAgain goes on with what a description was needed for.
func (e *Exec) planAgain(now Instant, name described, err error) {
	boot, w := name.boot, e.describing[name]
	if w == nil {
		return
	}
	delete(e.describing, name)
	e.agenda.disarm(w.retry)
	for _, d := range inOrder(maps.Keys(w.dests)) {
		switch {
		case d.State != lease.DestWaiting || d.decided:
		case err != nil && !d.told && d.ep.peer != nil:
			d.ep.peer.ranks = nil // of an engine that is not there any more, or not for this one
			e.grant(now, d)
		case err != nil && d.ep.peer != nil && d.ep.peer.boot == boot:
			e.closeDest(now, d, StatusFailed, "the layout of a rank of the prefill engine is not to be had: "+err.Error())
		default:
			e.grant(now, d)
		}
	}
	for _, c := range claimsInOrder(maps.Keys(w.claims)) {
		c.answered()
		switch {
		case e.inbound[c.in.id] != c.in || c.in.over || c.src != nil || c.wait != nil:
		case err != nil:
			e.refuse(now, c.in, peerv1.GrantReply_PLAN, "the layout of the receiver is not to be had: "+err.Error())
		case !e.bindClaim(now, c):
			e.wait(now, &pending{peer: c.in.peer, key: c.in.key, in: c.in, claim: c}, c.in.msg.PartnerMs)
		}
	}
}

// undescribed ends the wait for a peer that is gone.
func (e *Exec) undescribed(now Instant, boot transfer.Boot) {
	var all []described
	for name := range e.describing {
		if name.boot == boot {
			all = append(all, name)
		}
	}
	slices.SortFunc(all, func(a, b described) int { return bytes.Compare(a.geometry[:], b.geometry[:]) })
	for _, name := range all {
		e.planAgain(now, name, ErrAway)
	}
}
