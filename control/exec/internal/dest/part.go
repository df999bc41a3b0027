package dest

import (
	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec/internal/agreement"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// Cause is the reason of a fence.
type Cause uint8

// The causes.
const (
	ByCommit Cause = iota + 1
	ByCancel
	ByDeadline
	ByRefusal    // the source's sidecar will not serve the grant
	BySourceLost // preempted, aborted, or its engine is dead
	ByPeerLost   // the source's sidecar is dead, or could not be reached until the time was over
	ByEngineGone // the receiver's
	ByDrain
	ByPeerSilent   // the source's sidecar answers nothing
	BySourceSilent // the source's engine shows no sign of life, its sidecar does
	ByLanesSilent  // the source's sidecar answers, but bytes do not arrive
)

// causeOf is the cause of a fence where only the status is known.
func causeOf(status uint16) Cause {
	switch status {
	case engines.StatusOK:
		return ByCommit
	case engines.StatusCancelled:
		return ByCancel
	case engines.StatusExpired:
		return ByDeadline
	case engines.StatusRefused:
		return ByRefusal
	}
	return BySourceLost
}

// Part is one part of a grant on the receiver: one (peer, slot, generation) of a
// destination lease.
type Part struct {
	Grant  transport.Grant // Memory and Landed are the driver's
	Worker *engines.Worker
	Expect *engines.Expect
	Plan   agreement.Plan
	Part   *peerv1.Part // as it is offered; what backends add goes into it

	offer  *outboundGrant
	source transfer.LeaseID // that gives it
	bound  bool
	full   bool
	fenced bool
}

// Lease names the destination lease of the part.
func (l *Part) Lease() transfer.LeaseID { return l.Expect.Lease }
