package lanes

import (
	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/exec/internal/core"
	"github.com/kvspray/kvspray/control/exec/internal/credit"
	"github.com/kvspray/kvspray/control/exec/internal/frame"
	"github.com/kvspray/kvspray/control/exec/internal/timer"
)

// railID names a rail of one side.
type railID = credit.Rail

// Credits gives credits to peers, for which it asks the driver what came in.
type Credits struct {
	*core.Core
	*credit.Ledger
	next *timer.Timer // of the next measurement
}

// NewCredits returns a ledger without inflows.
func NewCredits(c *core.Core, out Actions) *Credits {
	cs := &Credits{Core: c, next: timer.New(func(Instant) { out.Measure() })}
	cs.Ledger = credit.NewLedger(func(x credit.Credit) {
		out.Send(x.Peer, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Credit{Credit: &peerv1.Credit{
			Transport: x.Rail.Transport, Rail: x.Rail.Name, Bytes: x.Bytes}}})
	})
	return cs
}

// Schedule arms the next measurement where one is needed.
func (cs *Credits) Schedule(now Instant, severalPeers bool) {
	if !cs.next.Queued() && cs.Ledger.Measures(severalPeers) {
		cs.Agenda.Arm(cs.next, now+credit.Every)
	}
}

// OnCredit takes what a peer accepts in flight to one of its rails.
func (dp *Dispatcher) OnCredit(now Instant, p *Peer, m *peerv1.Credit) {
	id := railID{Transport: m.Transport, Name: m.Rail}
	refuse := func(format string, args ...any) {
		dp.peers.logViolation(p, frame.BadCredit, "credit for rail %.64q: "+format, append([]any{m.Rail},
			args...)...)
	}
	if m.Rail == "" {
		return // of receives: the backends' own
	}
	if m.Bytes > credit.Max {
		refuse("%d bytes: at most %d", m.Bytes, credit.Max)
		return
	}
	if _, ok := p.known[id]; p.known != nil && !ok {
		refuse("the peer has named no such rail of %.64q", m.Transport)
		return
	}
	if !dp.Spray.Credit(p.Rails, id.Transport, id.Name, m.Bytes) {
		refuse("too many credits")
		return
	}
	p.limits.Set(now, id, m.Bytes)
	dp.Touch(p)
}
