package exec

import (
	"maps"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/lease"
	"github.com/kvspray/kvspray/transfer"
)

// described names a layout of a peer.
type described struct {
	boot     transfer.Boot
	geometry [32]byte
}

// description is who waits for it.
type description struct {
	dests  map[*dest]struct{}
	claims map[*claim]struct{}
}

// describe asks for layouts that a plan needs; d or c goes on when they come.
func (e *Exec) describe(p *peer, u *UnknownLayout, d *dest, c *claim) {
	for _, g := range u.Geometries {
		name := described{p.boot, g}
		w := e.describing[name]
		if w == nil {
			if len(e.describing) >= maxDescribing {
				continue // those who wait for nothing else end by their time
			}
			w = &description{dests: map[*dest]struct{}{}, claims: map[*claim]struct{}{}}
			e.describing[name] = w
			a := e.emit(Describe)
			a.Peer, a.Geometry = p.boot, g
		}
		if d != nil {
			w.dests[d] = struct{}{}
		}
		if c != nil {
			w.claims[c] = struct{}{}
		}
	}
}

// Described says that the planner knows a layout of a peer now, or why it cannot.
func (e *Exec) Described(now Instant, boot transfer.Boot, geometry [32]byte, err error) {
	name := described{boot, geometry}
	w := e.describing[name]
	delete(e.describing, name)
	if w == nil {
		return
	}
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
		c.asked = false
		switch {
		case e.inbound[c.in.id] != c.in || c.in.over || c.src != nil || c.wait != nil:
		case err != nil:
			e.refuse(now, c.in, peerv1.GrantReply_PLAN, "the layout of the receiver is not to be had: "+err.Error())
		case !e.bindClaim(now, c):
			e.wait(now, &pending{peer: c.in.peer, key: c.in.key, in: c.in, claim: c}, c.in.msg.PartnerMs)
		}
	}
	e.assign(now)
}
