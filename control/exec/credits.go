package exec

import (
	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/exec/credit"
)

// railID names a rail of one side.
type railID = credit.Rail

// Inflow is what has come from a peer over one of our rails since the last measurement.
type Inflow = credit.Inflow

// credits gives credits to peers, for which it asks the driver what came in.
type credits struct {
	*core
	ledger *credit.Ledger
	next   *timer // of the next measurement
}

func newCredits(c *core) *credits {
	cs := &credits{core: c, next: newTimer(func(Instant) { c.emit(Measure) })}
	cs.ledger = credit.NewLedger(func(x credit.Credit) {
		c.send(x.Peer, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Credit{Credit: &peerv1.Credit{
			Transport: x.Rail.Transport, Rail: x.Rail.Name, Bytes: x.Bytes}}})
	})
	return cs
}

// arm schedules the next measurement where one is needed.
func (cs *credits) arm(now Instant, severalPeers bool) {
	if !cs.next.Queued() && cs.ledger.Measures(severalPeers) {
		cs.agenda.arm(cs.next, now+credit.Every)
	}
}

// onCredit takes what a peer accepts in flight to one of its rails.
func (dp *dispatcher) onCredit(now Instant, p *peer, m *peerv1.Credit) {
	id := railID{Transport: m.Transport, Name: m.Rail}
	refuse := func(format string, args ...any) {
		dp.peers.logViolation(p, BadCredit, "credit for rail %.64q: "+format, append([]any{m.Rail},
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
	if !dp.spray.Credit(p.rails, id.Transport, id.Name, m.Bytes) {
		refuse("too many credits")
		return
	}
	p.limits.Set(now, id, m.Bytes)
	dp.touch(p)
}
