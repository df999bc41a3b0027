package health

import (
	"fmt"
	"time"
)

// Bounds of links. A link that is out of use gets no traffic, and so shows no errors. It is used
// again after a hold. The hold doubles each time, so that a bad link rarely changes the routes.
const (
	// flapLimit losses of the carrier within flapWindow are flaps. After fewer losses, a link is used
	// as soon as its carrier is back.
	flapLimit  = 3
	flapWindow = time.Minute
	// A reading is bad if it has at least minErrors errors, and at least errorShare of the packets
	// have one. With 1 lost packet in 10,000, TCP's rate on a fast link drops to a fraction, and
	// RDMA resends all packets behind the lost one.
	minErrors  = 10
	errorShare = 1e-4
	// resendShare is higher, because the other end or a switch can also cause retransmissions.
	resendShare = 1e-2
	badLooks    = 2 // bad readings in a row
	minLook     = 500 * time.Millisecond
	firstHold   = 30 * time.Second
	longestHold = 15 * time.Minute
	forgiven    = 4 // after this many times the doubled hold without a fault, the next is firstHold
)

// Sample has the counters of a link since the start of its driver.
type Sample struct {
	Up      bool   // it has a carrier
	Losses  uint64 // of the carrier
	Packets uint64
	Errors  uint64
	Sent    uint64 // packets of RDMA
	Resent  uint64 // times that RDMA had to send again
}

// Link is the verdict of one network interface.
type Link struct {
	known  bool
	last   Sample
	at     time.Time
	losses []time.Time // at most flapLimit, the newest
	bad    int
	fault  Fault
	until  time.Time // of fault; the link must also be up
	hold   time.Duration
	ended  time.Time // the last fault
}

// Look takes the counters.
func (l *Link) Look(now time.Time, s Sample) {
	was, first := l.last, !l.known
	// A counter falls when the driver restarts.
	first = first || s.Losses < was.Losses || s.Packets < was.Packets || s.Errors < was.Errors ||
		s.Sent < was.Sent || s.Resent < was.Resent
	if first {
		l.known, l.last, l.at, l.bad = true, s, now, 0
		l.settle(now, s.Up)
		return
	}
	l.flaps(now, s.Losses-was.Losses)
	if now.Sub(l.at) >= minLook {
		l.errors(now, s, was)
		l.at, l.last = now, s
	}
	l.last.Losses, l.last.Up = s.Losses, s.Up
	l.settle(now, s.Up)
}

func (l *Link) flaps(now time.Time, n uint64) {
	for range min(n, flapLimit) {
		l.losses = append(l.losses, now)
	}
	for len(l.losses) > flapLimit || len(l.losses) > 0 && now.Sub(l.losses[0]) > flapWindow {
		l.losses = l.losses[1:]
	}
	if n > 0 && len(l.losses) == flapLimit {
		l.exclude(now, Flaps, fmt.Sprintf("its link lost the carrier %d times or more within %v",
			flapLimit, flapWindow))
	}
}

func (l *Link) errors(now time.Time, s, was Sample) {
	e, p := s.Errors-was.Errors, s.Packets-was.Packets
	r, sent := s.Resent-was.Resent, s.Sent-was.Sent
	kind, text := Kind(""), ""
	switch {
	case e >= minErrors && float64(e) >= errorShare*float64(e+p):
		kind, text = Errors, fmt.Sprintf("%d errors in %d packets", e, e+p)
	case r >= minErrors && float64(r) >= resendShare*float64(sent):
		kind, text = Resends, fmt.Sprintf("%d retransmissions in %d packets", r, sent)
	}
	if kind == "" {
		l.bad = 0
		return
	}
	if l.bad++; l.bad >= badLooks {
		l.exclude(now, kind, text)
	}
}

// exclude begins a fault, or prolongs it.
func (l *Link) exclude(now time.Time, kind Kind, text string) {
	if l.fault.Kind == "" {
		l.hold = min(2*l.hold, longestHold)
		if l.hold == 0 || now.Sub(l.ended) >= forgiven*l.hold {
			l.hold = firstHold
		}
		l.fault = Fault{Kind: kind, Level: Degraded, Text: text, Since: now}
	}
	l.until = now.Add(l.hold)
}

func (l *Link) settle(now time.Time, up bool) {
	if l.fault.Kind != "" && up && !now.Before(l.until) {
		l.fault, l.ended, l.losses, l.bad = Fault{}, now, nil, 0
	}
}

// Fault is the reason not to use the link; with an empty Kind it may be used.
func (l *Link) Fault() Fault { return l.fault }
