package exec

import (
	"bytes"
	"cmp"
	"slices"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/lease"
	"github.com/kvspray/kvspray/control/spray"
	"github.com/kvspray/kvspray/transfer"
)

// Incast. Where several peers send to one of our rails, each of them finds its own window right, and together they overflow whatever
// is in front of us; then all of them wait for a retransmission, and the rail is idle. So we tell each of them what it may have in
// flight: its share of what the rail moves in spray.CreditSpan, a chunk at least. It is counted by what has landed, not by what was granted: a
// grant may wait for its prefill for minutes.
const (
	creditEvery   = 5 * time.Millisecond   // between looks while several peers may send
	creditHold    = 20 * time.Millisecond  // a peer that brought nothing for so long does not send now
	creditRefresh = 250 * time.Millisecond // a credit is said again after this
	creditAge     = time.Second            // and holds for this
	rateHalf      = time.Second            // a measured rate halves in so long
	maxCredit     = 1 << 30                // bytes that anybody may say
	maxInflows    = 4096                   // pairs of peer and rail that are told apart
)

// Inflow is what has come from a peer over one of our rails. Bytes only grow.
type Inflow struct {
	Peer      transfer.Boot
	Transport string
	Rail      string
	Gbps      float64 // what the rail claims; 0: unknown
	Bytes     uint64
}

type inflowID struct {
	rail railID
	peer transfer.Boot
}

type inflow struct {
	id    inflowID
	bytes uint64
	moved Instant // when they grew last
	told  uint64  // the credit that the peer has; 0: none
	at    Instant // when it was told
}

// inrail is what comes over one of our rails, from all peers.
type inrail struct {
	at   Instant
	rate float64 // bytes per nanosecond, the most of late
}

// creditDue asks the driver what has come.
func (e *Exec) creditDue(Instant) { e.emit(Measure) }

// armCredits sees to it that Measure comes as long as several peers may send to us, or have credits that may have to be lifted.
func (e *Exec) armCredits(now Instant) {
	if !e.credit.Queued() && (e.slots.Peers() > 1 || e.limited > 0) {
		e.agenda.arm(e.credit, now+creditEvery)
	}
}

// Measured answers Measure.
func (e *Exec) Measured(now Instant, all []Inflow) {
	claims := map[railID]float64{}
	sums := map[railID]uint64{}
	for _, x := range all {
		id := inflowID{railID{x.Transport, x.Rail}, x.Peer}
		claims[id.rail] = max(claims[id.rail], x.Gbps/8) // bytes per nanosecond
		f := e.inflows[id]
		if f == nil {
			if len(e.inflows) >= maxInflows {
				continue
			}
			f = &inflow{id: id, bytes: x.Bytes, moved: now - 2*creditHold}
			e.inflows[id] = f
		}
		if x.Bytes > f.bytes {
			sums[id.rail] += x.Bytes - f.bytes
			f.bytes, f.moved = x.Bytes, now
		}
	}
	senders := map[railID][]*inflow{}
	for id, f := range e.inflows {
		if now-f.moved < creditHold {
			senders[id.rail] = append(senders[id.rail], f)
		} else if now-f.moved > creditAge && f.told == 0 {
			delete(e.inflows, id) // it is counted from here on if it comes again
		}
	}
	budget := map[railID]uint64{}
	for r := range senders {
		in := e.inrails[r]
		if in == nil {
			in = &inrail{at: now}
			e.inrails[r] = in
		}
		if d := now - in.at; d > 0 {
			in.rate = max(in.rate*max(0, 1-float64(d)/float64(2*rateHalf)), float64(sums[r])/float64(d))
			in.at = now
		}
		// A claim may be far from what a shaped or a virtual rail does; what was measured is what is there.
		rate := in.rate
		if rate == 0 {
			rate = claims[r]
		}
		budget[r] = uint64(rate * float64(spray.CreditSpan))
	}
	for r := range e.inrails {
		if len(senders[r]) == 0 {
			delete(e.inrails, r)
		}
	}
	list := make([]*inflow, 0, len(e.inflows))
	for _, f := range e.inflows {
		list = append(list, f)
	}
	slices.SortFunc(list, func(a, b *inflow) int {
		return cmp.Or(cmp.Compare(a.id.rail.transport, b.id.rail.transport), cmp.Compare(a.id.rail.name, b.id.rail.name), bytes.Compare(a.id.peer[:], b.id.peer[:]))
	})
	e.limited = 0
	for _, f := range list {
		var want uint64
		if n := uint64(len(senders[f.id.rail])); n > 1 {
			want = min(max(budget[f.id.rail]/n/transfer.ChunkBytes, 1)*transfer.ChunkBytes, maxCredit)
		}
		if want > 0 {
			e.limited++
		}
		// Halves and doubles are news; a chunk more or less is not, until it has to be said again anyway.
		if want == f.told && (want == 0 || now-f.at < creditRefresh) || want != 0 && f.told != 0 && want < 2*f.told && f.told < 2*want && now-f.at < creditRefresh {
			continue
		}
		f.told, f.at = want, now
		e.send(f.id.peer, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Credit{Credit: &peerv1.Credit{
			Transport: f.id.rail.transport, Rail: f.id.rail.name, Bytes: want}}})
	}
	e.armCredits(now)
	e.assign(now)
}

// onCredit takes what a peer wants in flight to one of its rails.
func (e *Exec) onCredit(now Instant, p *peer, m *peerv1.Credit) {
	id := railID{m.Transport, m.Rail}
	refuse := func(format string, args ...any) {
		e.complain(p, BadCredit, "credit for rail %.64q: "+format, append([]any{m.Rail}, args...)...)
	}
	if m.Rail == "" {
		return // of receives: the backends' own
	}
	if m.Bytes > maxCredit {
		refuse("%d bytes: at most %d", m.Bytes, maxCredit)
		return
	}
	if _, ok := p.known[id]; p.known != nil && !ok {
		refuse("the peer has named no such rail of %.64q", m.Transport)
		return
	}
	if !e.spray.Credit(p.rails, id.transport, id.name, m.Bytes) {
		refuse("too many credits")
		return
	}
	if m.Bytes == 0 {
		delete(p.credits, id)
	} else {
		if p.credits == nil {
			p.credits = map[railID]Instant{}
		}
		p.credits[id] = now + creditAge
	}
	p.expiry = lease.Never
	for _, end := range p.credits {
		p.expiry = min(p.expiry, end)
	}
	e.touch(p)
}

// expire lifts credits that their receiver has not said again: it has forgotten them, or us. Called before slices are given out: where none
// are, a credit does no harm.
func (e *Exec) expire(now Instant, p *peer) {
	p.expiry = lease.Never
	for id, end := range p.credits {
		if end > now {
			p.expiry = min(p.expiry, end)
			continue
		}
		delete(p.credits, id)
		e.spray.Credit(p.rails, id.transport, id.name, 0)
	}
}

// forgetCredits drops what was agreed with a peer that is gone.
func (e *Exec) forgetCredits(p *peer) {
	for id := range e.inflows {
		if id.peer == p.boot {
			delete(e.inflows, id)
		}
	}
}
