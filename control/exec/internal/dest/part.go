package dest

import (
	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec/internal/agreement"
	"github.com/kvspray/kvspray/control/lease"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// causeOf is the cause of a fence where only the status is known.
func causeOf(status uint16) lease.Cause {
	switch status {
	case engines.StatusOK:
		return lease.ByCommit
	case engines.StatusCancelled:
		return lease.ByCancel
	case engines.StatusExpired:
		return lease.ByDeadline
	case engines.StatusRefused:
		return lease.ByRefusal
	}
	return lease.BySourceLost
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
