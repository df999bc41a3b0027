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
	rateSpan      = 20 * time.Millisecond  // a rate is measured over so long: slices are counted when they have landed whole
	rateHalf      = time.Second            // a measured rate halves in so long
	maxCredit     = 1 << 30                // bytes that anybody may say
	maxInflows    = 4096                   // pairs of peer and rail that are told apart
	maxNewInflows = 256                    // of these, that one answer adds: the others come again
	maxTold       = 256                    // credits that one answer changes; the others wait
)

// Inflow is what has come from a peer over one of our rails since Measured was told last.
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

func (a inflowID) compare(b inflowID) int {
	return cmp.Or(cmp.Compare(a.rail.transport, b.rail.transport), cmp.Compare(a.rail.name, b.rail.name),
		bytes.Compare(a.peer[:], b.peer[:]))
}

// inflow is a peer that sends over one of our rails, or has a credit for it.
type inflow struct {
	id    inflowID
	rail  *inrail
	moved Instant // when something came last
	told  uint64  // the credit that the peer has; 0: none
	at    Instant // when it was told
}

// inrail is what comes over one of our rails, from all peers.
type inrail struct {
	at      Instant
	rate    float64 // bytes per nanosecond, the most of late
	claim   float64
	sum     uint64 // bytes that came now
	senders uint64 // peers that send now
	inflows int    // of it; with none, it is forgotten
}

// credit is what each of its senders may have in flight; 0: as much as it likes.
func (r *inrail) credit() uint64 {
	if r.senders < 2 {
		return 0
	}
	// A claim may be far from what a shaped or a virtual rail does; what was measured is what is there.
	rate := r.rate
	if rate == 0 {
		rate = r.claim
	}
	budget := uint64(rate * float64(spray.CreditSpan))
	return min(max(budget/r.senders/transfer.ChunkBytes, 1)*transfer.ChunkBytes, maxCredit)
}

// creditDue asks the driver what has come.
func (e *Exec) creditDue(Instant) { e.emit(Measure) }

// Incoming says that something has come after a time in which nothing did: since the start, or
// since Measured was told of nothing.
func (e *Exec) Incoming(now Instant) {
	e.flowing = true
	e.assign(now)
}

// armCredits sees to it that Measure comes as long as several peers may send to us and something
// comes, or somebody has a credit that may have to be lifted.
func (e *Exec) armCredits(now Instant) {
	if e.flowing && !e.credit.Queued() && (e.slots.Peers() > 1 || len(e.inflows) > 0) {
		e.agenda.arm(e.credit, now+creditEvery)
	}
}

// Measured answers Measure with what has come since the last one. After an answer of nothing,
// Incoming must say when something comes again.
func (e *Exec) Measured(now Instant, grew []Inflow) {
	fresh := 0
	for _, x := range grew {
		id := inflowID{railID{x.Transport, x.Rail}, x.Peer}
		f := e.inflowOf[id]
		if f == nil {
			if fresh == maxNewInflows {
				continue
			}
			if f = e.newInflow(now, id); f == nil {
				continue
			}
			fresh++
		}
		f.moved = now
		f.rail.claim, f.rail.sum = x.Gbps/8, f.rail.sum+x.Bytes // bytes per nanosecond
	}
	for _, in := range e.inrails {
		in.senders = 0
	}
	for _, f := range e.inflows {
		if now-f.moved < creditHold {
			f.rail.senders++
		}
	}
	for _, in := range e.inrails {
		switch d := now - in.at; {
		case in.senders == 0:
			in.rate, in.at, in.sum = 0, now, 0
		case d == 0:
			in.sum = 0 // it is new, and nobody can tell since when that came
		case d >= rateSpan:
			in.rate = max(in.rate*max(0, 1-float64(d)/float64(2*rateHalf)), float64(in.sum)/float64(d))
			in.at, in.sum = now, 0
		}
	}
	e.tellCredits(now)
	e.dropInflows(func(f *inflow) bool { return f.told == 0 && now-f.moved >= creditHold })
	e.flowing = len(grew) > 0 || len(e.inflows) > 0
	e.armCredits(now)
	e.assign(now)
}

// tellCredits tells peers what they may have in flight where that is news, or was told long ago. It
// goes on where the last call had to end, so that each has its turn.
func (e *Exec) tellCredits(now Instant) {
	left, n, from := maxTold, len(e.inflows), e.creditAt
	e.creditAt = 0
	for k := range n {
		at := (from + k) % n
		f := e.inflows[at]
		want := f.rail.credit()
		// A double is news, and so is a quarter less: where a sender more comes, what the others may
		// have in flight is too much. A little more or less waits until it is told again anyway.
		if want != f.told && (want == 0 || f.told == 0 || want >= 2*f.told || want <= f.told/4*3) ||
			want != 0 && now-f.at >= creditRefresh {
			if left == 0 {
				e.creditAt = at
				return
			}
			left--
			f.told, f.at = want, now
			e.send(f.id.peer, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Credit{Credit: &peerv1.Credit{
				Transport: f.id.rail.transport, Rail: f.id.rail.name, Bytes: want}}})
		}
	}
}

// newInflow adds an inflow; nil: there are too many.
func (e *Exec) newInflow(now Instant, id inflowID) *inflow {
	if len(e.inflows) >= maxInflows {
		return nil
	}
	in := e.inrails[id.rail]
	if in == nil {
		in = &inrail{at: now}
		e.inrails[id.rail] = in
	}
	in.inflows++
	f := &inflow{id: id, rail: in}
	i, _ := slices.BinarySearchFunc(e.inflows, id, func(f *inflow, id inflowID) int { return f.id.compare(id) })
	e.inflows = slices.Insert(e.inflows, i, f)
	e.inflowOf[id] = f
	return f
}

// dropInflows forgets those of which over is true.
func (e *Exec) dropInflows(over func(*inflow) bool) {
	e.inflows = slices.DeleteFunc(e.inflows, func(f *inflow) bool {
		if !over(f) {
			return false
		}
		delete(e.inflowOf, f.id)
		if f.rail.inflows--; f.rail.inflows == 0 {
			delete(e.inrails, f.id.rail)
		}
		return true
	})
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
	e.dropInflows(func(f *inflow) bool { return f.id.peer == p.boot })
}
