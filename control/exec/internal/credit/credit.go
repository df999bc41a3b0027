// Package credit limits what several peers have in flight towards one of our rails.
//
// Each of several senders finds its own window right, but together they overflow the queue in front
// of the rail (incast). Then all of them wait for retransmissions, and the rail is idle. So a
// receiver gives each sender a credit: its share of what the rail moves in spray.CreditSpan, at
// least one chunk. Credits follow received bytes, not grants, because a grant may wait for its
// prefill for minutes.
//
// A Ledger is the receiver's side, Limits are the sender's. Both are pure: no clock, no I/O, no
// goroutine.
package credit

import (
	"bytes"
	"cmp"
	"slices"
	"time"

	"github.com/kvspray/kvspray/control/lease"
	"github.com/kvspray/kvspray/control/spray"
	"github.com/kvspray/kvspray/transfer"
)

// Instant is a point in time: the duration since the owner's start.
type Instant = lease.Instant

// Constants of the protocol and bounds of the tables.
const (
	Every      = 5 * time.Millisecond   // between measurements while several peers may send
	Hold       = 20 * time.Millisecond  // a peer is no sender after so long without a byte
	refresh    = 250 * time.Millisecond // until an unchanged credit is sent again
	Age        = time.Second            // a credit that is not sent again expires after this
	rateSpan   = 20 * time.Millisecond  // of one rate: slices count when they have landed completely
	rateHalf   = time.Second            // half-life of a measured rate
	Max        = 1 << 30                // bytes of a valid credit
	MaxInflows = 4096                   // pairs of peer and rail
	MaxNew     = 256                    // inflows that one measurement adds; the others follow
	maxSent    = 256                    // credits that one measurement changes; the others follow
)

// Rail names a rail of one side.
type Rail struct{ Transport, Name string }

// Compare orders rails.
func (r Rail) Compare(o Rail) int {
	return cmp.Or(cmp.Compare(r.Transport, o.Transport), cmp.Compare(r.Name, o.Name))
}

// Credit permits a peer to have Bytes in flight to a rail; 0 lifts the limit.
type Credit struct {
	Rail  Rail
	Peer  transfer.Boot
	Bytes uint64
}

// Inflow is what came from a peer over one of our rails since the last measurement.
type Inflow struct {
	Peer      transfer.Boot
	Transport string
	Rail      string
	Gbps      float64 // nominal speed of the rail; 0: unknown
	Bytes     uint64
}

type inflowID struct {
	rail Rail
	peer transfer.Boot
}

func (a inflowID) compare(b inflowID) int {
	return cmp.Or(a.rail.Compare(b.rail), bytes.Compare(a.peer[:], b.peer[:]))
}

// inflow is a peer that sends over one of our rails, or has a credit for it.
type inflow struct {
	id     inflowID
	rail   *inrail
	moved  Instant // of the last byte
	credit uint64  // that the peer has; 0: none
	sent   Instant // when the credit was sent
}

// inrail is what comes over one of our rails, from all peers.
type inrail struct {
	at      Instant
	rate    float64 // bytes per nanosecond, the recent maximum
	nominal float64
	sum     uint64 // bytes since at
	senders uint64 // peers that send now
	inflows int    // an inrail without any is deleted
}

// credit is what each sender may have in flight; 0: no limit.
func (r *inrail) credit() uint64 {
	if r.senders < 2 {
		return 0
	}
	// The nominal speed of a shaped or virtual rail may be far off, so a measured rate goes first.
	rate := r.rate
	if rate == 0 {
		rate = r.nominal
	}
	budget := uint64(rate * float64(spray.CreditSpan))
	return min(max(budget/r.senders/transfer.ChunkBytes, 1)*transfer.ChunkBytes, Max)
}

// Ledger holds the inflows of this process and the credits of its peers.
type Ledger struct {
	send    func(Credit)
	flowing bool      // something came since the last empty measurement
	inflows []*inflow // in order
	byID    map[inflowID]*inflow
	turn    int // of inflows: where the next measurement begins to send
	rails   map[Rail]*inrail
}

// NewLedger returns an empty ledger, which calls send for each new or repeated credit.
func NewLedger(send func(Credit)) *Ledger {
	return &Ledger{send: send, byID: map[inflowID]*inflow{}, rails: map[Rail]*inrail{}}
}

// Incoming records that something comes after an empty measurement, or for the first time.
func (l *Ledger) Incoming() { l.flowing = true }

// Measures reports whether a measurement is needed: something comes, and several peers may send or
// some peer has a credit that may have to be lifted.
func (l *Ledger) Measures(severalPeers bool) bool {
	return l.flowing && (severalPeers || len(l.inflows) > 0)
}

// Measured takes what came since the last measurement, and sends credits.
func (l *Ledger) Measured(now Instant, grew []Inflow) {
	fresh := 0
	for _, x := range grew {
		id := inflowID{Rail{x.Transport, x.Rail}, x.Peer}
		f := l.byID[id]
		if f == nil {
			if fresh == MaxNew {
				continue
			}
			if f = l.add(now, id); f == nil {
				continue
			}
			fresh++
		}
		f.moved = now
		f.rail.nominal, f.rail.sum = x.Gbps/8, f.rail.sum+x.Bytes // bytes per nanosecond
	}
	for _, in := range l.rails {
		in.senders = 0
	}
	for _, f := range l.inflows {
		if now-f.moved < Hold {
			f.rail.senders++
		}
	}
	for _, in := range l.rails {
		switch d := now - in.at; {
		case in.senders == 0:
			in.rate, in.at, in.sum = 0, now, 0
		case d == 0:
			in.sum = 0 // the rail is new, and the span of these bytes is unknown
		case d >= rateSpan:
			in.rate = max(in.rate*max(0, 1-float64(d)/float64(2*rateHalf)), float64(in.sum)/float64(d))
			in.at, in.sum = now, 0
		}
	}
	l.sendCredits(now)
	l.drop(func(f *inflow) bool { return f.credit == 0 && now-f.moved >= Hold })
	l.flowing = len(grew) > 0 || len(l.inflows) > 0
}

// sendCredits sends credits that have changed much or were sent long ago. It continues where the
// last call reached its limit, so that each peer has its turn.
func (l *Ledger) sendCredits(now Instant) {
	left, n, from := maxSent, len(l.inflows), l.turn
	l.turn = 0
	for k := range n {
		at := (from + k) % n
		f := l.inflows[at]
		want := f.rail.credit()
		// A double is sent at once, and so is a quarter less: with one more sender, the credits of
		// the others are too large. Smaller changes wait for the next refresh.
		if want != f.credit && (want == 0 || f.credit == 0 || want >= 2*f.credit ||
			want <= f.credit/4*3) ||
			want != 0 && now-f.sent >= refresh {
			if left == 0 {
				l.turn = at
				return
			}
			left--
			f.credit, f.sent = want, now
			l.send(Credit{f.id.rail, f.id.peer, want})
		}
	}
}

// add returns a new inflow; nil: there are too many.
func (l *Ledger) add(now Instant, id inflowID) *inflow {
	if len(l.inflows) >= MaxInflows {
		return nil
	}
	in := l.rails[id.rail]
	if in == nil {
		in = &inrail{at: now}
		l.rails[id.rail] = in
	}
	in.inflows++
	f := &inflow{id: id, rail: in}
	i, _ := slices.BinarySearchFunc(l.inflows, id, func(f *inflow,
		id inflowID) int {
		return f.id.compare(id)
	})
	l.inflows = slices.Insert(l.inflows, i, f)
	l.byID[id] = f
	return f
}

// Forget drops the inflows and credits of a peer.
func (l *Ledger) Forget(peer transfer.Boot) {
	l.drop(func(f *inflow) bool { return f.id.peer == peer })
}

// Len counts inflows and the rails that they come over.
func (l *Ledger) Len() (inflows, rails int) { return len(l.inflows), len(l.rails) }

func (l *Ledger) drop(over func(*inflow) bool) {
	l.inflows = slices.DeleteFunc(l.inflows, func(f *inflow) bool {
		if !over(f) {
			return false
		}
		delete(l.byID, f.id)
		if f.rail.inflows--; f.rail.inflows == 0 {
			delete(l.rails, f.id.rail)
		}
		return true
	})
}
