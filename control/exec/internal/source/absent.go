package source

import (
	"fmt"

	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec/internal/timer"
	"github.com/kvspray/kvspray/transfer"
)

// A receiver's sidecar may die during a transfer, or its engine may begin a new session. The engine
// then presents the lease again, and the sidecar there grants it under its own boot id and another
// epoch. Until then our engine's blocks are kept for it, for the match timeout at most.

// engineLease names a lease as its engine does, whichever sidecar grants it.
type engineLease struct {
	boot transfer.Boot
	id   uint64
}

func (in *inboundGrant) lease() engineLease { return engineLease{in.id.Dest.Boot, in.id.Dest.ID} }

// absent keeps the places of a grant whose sidecar is unreachable, or gone (over).
func (mt *Matcher) absent(now Instant, in *inboundGrant, over bool) {
	if over {
		in.over = true
		mt.suspend(now, in)
	}
	held := false
	for _, c := range in.bindings {
		held = held || c.src != nil
	}
	switch old := mt.absents[in.lease()]; {
	case held && in.absent == nil:
		if old != nil {
			mt.endInbound(now, old, engines.StatusFailed,
				"its lease was granted again by another sidecar, which is gone, too")
		}
		in.absent = timer.New(func(now Instant) { mt.absentDue(now, in) })
		mt.Agenda.Arm(in.absent, now+mt.Cfg.MatchTimeout)
		mt.absents[in.lease()] = in
	case !held && over:
		mt.drop(in)
	}
	mt.wake(now, in.key) // its successor may be here already
}

// present ends the absence of a grant: its sidecar is back, or the grant is over.
func (mt *Matcher) present(in *inboundGrant) {
	if in.absent != nil {
		mt.Agenda.Disarm(in.absent)
		in.absent = nil
		delete(mt.absents, in.lease())
	}
}

func (mt *Matcher) absentDue(now Instant, in *inboundGrant) {
	why := fmt.Sprintf("the destination's sidecar is gone, and no sidecar presented the lease again "+
		"within %v", mt.Cfg.MatchTimeout)
	for _, c := range in.bindings {
		if c.snd != nil {
			// the sidecar may be alive, and gets this when it is reached
			mt.sources.lose(now, c.snd, true, why)
		}
	}
	mt.endInbound(now, in, engines.StatusFailed, why)
}

// succeed gives a grant the places of an absent grant of the same lease.
func (mt *Matcher) succeed(now Instant, in *inboundGrant) {
	if old := mt.absents[in.lease()]; old != nil && old != in && old.key == in.key {
		mt.replace(now, old, in.id)
	}
}
