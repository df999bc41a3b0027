package source

import (
	"fmt"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/exec/internal/frame"
	"github.com/kvspray/kvspray/control/exec/internal/lanes"
	"github.com/kvspray/kvspray/control/lease"
)

// OnCheck answers the receiver of a grant of which nothing has landed for a while.
func (mt *Matcher) OnCheck(now Instant, p *lanes.Peer, m *peerv1.Check) error {
	id, err := frame.LeaseID(m.Destination)
	if err != nil {
		return fmt.Errorf("check: %w", err)
	}
	in := mt.grants[lease.GrantID{Peer: p.Boot, Dest: id}]
	if in == nil || in.msg.Gen != m.Gen {
		return nil // its end, or its successor, is on the way
	}
	state, quiet := in.sign(now)
	mt.out.Send(p.Boot, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Checked{
		Checked: &peerv1.Checked{Destination: frame.Lease(id), Gen: m.Gen, State: state,
			QuietMs: frame.Millis(quiet)}}})
	return nil
}

// sign returns the state of a grant's source, and the time since its last sign of life: of the
// slowest rank while a rank computes, else of the rank that was the last to complete.
func (in *inboundGrant) sign(now Instant) (state peerv1.Checked_State, quiet time.Duration) {
	state, slowest, last := peerv1.Checked_SENDING, now, in.came
	for _, c := range in.bindings {
		seen, done := in.came, c.ended
		if c.src != nil {
			seen, done = c.src.seen, c.src.prefill == prefillComplete
		}
		if last = max(last, seen); !done {
			state, slowest = peerv1.Checked_COMPUTING, min(slowest, seen)
		}
	}
	switch {
	case len(in.bindings) == 0: // it waits for its intent
		return peerv1.Checked_COMPUTING, now - in.came
	case state == peerv1.Checked_COMPUTING:
		return state, now - slowest
	}
	return state, now - last
}
