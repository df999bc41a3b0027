package dest

import (
	"fmt"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec/internal/frame"
	"github.com/kvspray/kvspray/control/exec/internal/lanes"
	"github.com/kvspray/kvspray/control/exec/internal/timer"
	"github.com/kvspray/kvspray/control/lease"
)

// An engine limits the wait of its request for the next byte: to about the time in which it would
// compute the missing tokens itself. After half of that time the source's sidecar is asked for a
// sign of life. A source that is still computed restarts the wait, as bytes do. At its end a fence
// ends the lease, as after the deadline, and the engine computes.

// EngineQuiet is the shortest time without a sign of life of the source's engine that ends a wait:
// a step may take so long before its first layer.
const EngineQuiet = 2 * time.Second

// stall is the wait of a lease for its next byte.
type stall struct {
	t      *timer.Timer // nil: it waits until its deadline
	due    Instant
	moved  uint32  // chunks that have landed
	at     Instant // of the last byte or sign of life
	asked  bool    // the sidecar of the source was asked since then
	answer peerv1.Checked_State
}

func (ds *Table) beginStall(now Instant, d *Lease) {
	if d.x.Stall > 0 {
		d.stall.t, d.stall.at = timer.New(func(now Instant) { ds.stallDue(now, d) }), now
		ds.armStall(d, now+d.x.Stall/2)
	}
}

func (ds *Table) endStall(d *Lease) {
	if d.stall.t != nil {
		ds.Agenda.Disarm(d.stall.t)
		d.stall.t = nil
	}
}

func (ds *Table) armStall(d *Lease, due Instant) {
	d.stall.due = due
	ds.Agenda.Arm(d.stall.t, due)
}

// progress restarts the wait.
func (ds *Table) progress(d *Lease, at Instant) {
	d.stall.at, d.stall.asked, d.stall.answer = at, false, peerv1.Checked_UNKNOWN
	ds.armStall(d, at+d.x.Stall/2)
}

// landed counts chunks of the live grant. A part has a record of what landed once it is bound.
func (d *Lease) landed() (n uint32) {
	if d.live == nil {
		return 0
	}
	for _, p := range d.live.parts {
		if p.bound {
			n += p.Grant.Receipt.Landed()
		}
	}
	return n
}

func (ds *Table) stallDue(now Instant, d *Lease) {
	n := d.landed()
	switch {
	case n != d.stall.moved || d.State == lease.DestClosing || now-d.stall.due > d.x.Stall/2:
		// In the last case this process was stopped, and bytes may wait for it.
		d.stall.moved = n
		ds.progress(d, now)
	case now-d.stall.at >= d.x.Stall:
		ds.giveUp(now, d)
	default:
		if live := d.live; live != nil && !d.stall.asked {
			d.stall.asked = true
			ds.out.Send(d.Peer, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Check{
				Check: &peerv1.Check{Destination: frame.Lease(d.ID), Gen: live.gen}}})
		}
		ds.armStall(d, d.stall.at+d.x.Stall)
	}
}

// giveUp ends a lease whose wait is over, and names the silent process.
func (ds *Table) giveUp(now Instant, d *Lease) {
	cause, silent := lease.ByPeerSilent, "the sidecar of the prefill engine does not answer: it "+
		"hangs, or the network to it is down"
	switch {
	case d.stall.answer == peerv1.Checked_SENDING:
		cause, silent = lease.ByLanesSilent, "the sidecar of the prefill engine sends, but its bytes do "+
			"not arrive"
	case d.live == nil:
		silent = "there is no connection to the sidecar of the prefill engine"
	}
	ds.stalled(now, d, cause, now-d.stall.at, silent)
}

func (ds *Table) stalled(now Instant, d *Lease, cause lease.Cause, quiet time.Duration,
	silent string) {
	ds.CloseBy(now, d, cause, engines.StatusExpired, fmt.Sprintf("no byte arrived for %v: %s",
		quiet.Round(time.Millisecond), silent))
}

// OnChecked takes a sign of life.
func (ds *Table) OnChecked(now Instant, p *lanes.Peer, m *peerv1.Checked) error {
	d, err := ds.of(p, m.Destination)
	if d == nil || d.decided || d.live == nil || m.Gen != d.live.gen || !d.stall.asked {
		return err
	}
	quiet := min(time.Duration(m.QuietMs)*time.Millisecond, frame.MaxDeadline)
	switch d.stall.answer = m.State; m.State {
	case peerv1.Checked_COMPUTING:
		if quiet < max(d.x.Stall, EngineQuiet) {
			ds.progress(d, now)
		} else {
			ds.stalled(now, d, lease.BySourceSilent, quiet,
				"the prefill engine hangs, or has put the prompt aside")
		}
	case peerv1.Checked_SENDING:
		// The bytes of the last layer have begun to move only when it was computed.
		d.stall.at = max(d.stall.at, now-quiet)
		ds.armStall(d, d.stall.at+d.x.Stall)
	}
	return nil
}
