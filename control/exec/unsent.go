// SPDX-License-Identifier: Apache-2.0

package exec

import (
	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/transfer"
)

// Unsent reports that a frame of Send or Offer was not sent and never will be: too many frames
// wait for the peer, or this one is too long. Whatever depends on the frame ends now with err as
// its reason: the engine recomputes sooner than by a deadline.
func (e *Exec) Unsent(now Instant, boot transfer.Boot, f *peerv1.ControlFrame, err error) {
	switch b := f.Body.(type) {
	case *peerv1.ControlFrame_Grant:
		id, bad := leaseID(b.Grant.Destination)
		if d := e.dests.byID[id]; bad == nil && d != nil && d.Peer == boot && d.live != nil &&
			d.live.gen == b.Grant.Gen {
			e.dests.closeUnsent(now, d,
				"the grant was not sent to the sidecar of the prefill engine: "+err.Error())
		}
	case *peerv1.ControlFrame_Await:
		if w := e.queries.byToken[b.Await.Token]; w != nil && w.sent == boot {
			e.queries.answer(w, engines.Admission{State: "gone",
				Message: "the question was not sent to the sidecar of the prefill engine: " +
					err.Error()})
		}
	}
	e.assign(now)
}

// closeUnsent ends a lease whose last grant did not reach the source. The source does not have the
// grant, so a Revoke of it would mean nothing there; this one carries the key, and the source
// stops its wait.
func (ds *dests) closeUnsent(now Instant, d *dest, why string) {
	if d.decided {
		return
	}
	d.decided, d.status, d.reason = true, engines.StatusFailed, why
	fence, err := d.Close(true)
	if err != nil {
		return
	}
	ds.agenda.disarm(d.t)
	if fence {
		ds.fence(d.live, ByRefusal)
	}
	ds.decline(now, d.ep.addr, declined{id: d.x.Lease, key: d.x.Key, team: d.team,
		size: d.ws.w.Place.World(), gen: d.live.gen, reason: why, far: true})
}
