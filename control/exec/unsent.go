// SPDX-License-Identifier: Apache-2.0

package exec

import (
	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/transfer"
)

// Unsent says that a frame of Send or Offer did not go out and never will: too much waits for the
// peer, or the frame is longer than one may be. What only that frame could have begun ends now,
// with err as its reason: an engine that computes by itself is sooner done than one that waits for
// a deadline.
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
			e.queries.answer(w, connector.Admission{State: "gone",
				Message: "the question was not sent to the sidecar of the prefill engine: " +
					err.Error()})
		}
	}
	e.assign(now)
}

// closeUnsent ends a lease whose last grant did not reach the source. A Revoke that names only the
// grant would mean nothing there. This one has the key, so the source stops waiting for a grant.
func (ds *dests) closeUnsent(now Instant, d *dest, why string) {
	if d.decided {
		return
	}
	d.decided, d.status, d.reason = true, StatusFailed, why
	fence, err := d.Close(true)
	if err != nil {
		return
	}
	ds.agenda.disarm(d.t)
	if fence {
		ds.fence(d.live, ByRefusal)
	}
	ds.decline(now, d.ep.addr, d.x, d.team, d.ws.w.Place.World(), d.live.gen, why, true)
}
