// Package core has what the parts of an executor share: configuration, timers and the slice
// scheduler.
package core

import (
	"time"

	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec/internal/frame"
	"github.com/kvspray/kvspray/control/exec/internal/timer"
	"github.com/kvspray/kvspray/control/spray"
	"github.com/kvspray/kvspray/transfer"
)

// Core is what every part of an executor uses.
type Core struct {
	Cfg      Config
	Agenda   timer.Agenda
	Spray    *spray.Scheduler
	Draining bool // no new leases
}

// Span is the time of a lease that asks for d.
func (c *Core) Span(d time.Duration) time.Duration {
	if d <= 0 {
		return c.Cfg.Deadline
	}
	return min(d, frame.MaxDeadline)
}

// WithTrouble is the reason of a lease whose time is over, with the last trouble that it had.
func WithTrouble(reason, trouble string) string {
	if trouble == "" {
		return reason
	}
	return reason + "; last: " + trouble
}

// Trace describes a finished transfer, for one line of the log.
type Trace struct {
	Key         transfer.Key
	Req         string
	Source      transfer.LeaseID
	Dest        transfer.LeaseID
	Peer        transfer.Boot
	Slot        transfer.Slot
	Gen         transfer.Gen
	Queue       time.Duration // from the engine's request to the match
	Wire        time.Duration // from there to the full bitmap
	Commit      time.Duration // from there to the fence's end
	Grants      int
	Parts       int                    // destination: ranks that gave something
	Flag        time.Duration          // source: from the last flag to the commit
	BytesBefore uint64                 // source: bytes that were sent before the final step's flag
	Moved       [spray.MaxRanks]uint64 // source: bytes confirmed, by index in Config.Transports

	// Instants are 0 where the lease did not get so far.
	Span   engines.Trace
	Began  timer.Instant // the engine's request
	Bound  timer.Instant // the last part was bound (destination), or the first grant (source)
	Filled timer.Instant // destination: the bitmap was full
	Ended  timer.Instant // destination: after the fence; source: no backend reads the blocks
	Sends  []Send        // source: at most MaxSends
}

// MaxSends bounds the sends that a Trace lists.
const MaxSends = 32

// Send is what a source lease sent for one grant.
type Send struct {
	Traceparent string // the grant's; empty: the receiver named none
	Dest        transfer.LeaseID
	Peer        transfer.Boot
	Bound       timer.Instant
	First       timer.Instant // the first slice was given to a lane; 0: none was
	Last        timer.Instant // the last slice was confirmed, or the commit came before that
	Ended       timer.Instant
	Committed   bool
	Bytes       uint64     // of what was committed
	Rails       []RailSend // at most MaxRailSends
}

// MaxRailSends bounds the rail pairs that a Send lists.
const MaxRailSends = 16

// RailSend is what a rail pair carried of a Send.
type RailSend struct {
	Path        spray.Path
	First, Last timer.Instant
	// Bytes of slices that brought something new. A retransmission may bring a part of its slice
	// only, or be on its way at the commit, so the sum may be more than the send's bytes.
	Bytes  uint64
	Slices uint32
	Failed uint32 // of these

	rank  int    // of the transport, in Config.Transports
	doubt uint64 // bytes of slices that may have brought them, and were not counted
}

// Slice counts a slice that has ended. A retransmission that was not needed has no bytes.
func (s *Send) Slice(now timer.Instant, f spray.Flight, bytes uint64, landed bool) {
	if s.First == 0 || f.Posted < s.First {
		s.First = f.Posted
	}
	if landed {
		s.Last = max(s.Last, now)
	}
	for i := range s.Rails {
		if r := &s.Rails[i]; r.Path == *f.Path {
			r.slice(now, f, bytes, landed)
			return
		}
	}
	if len(s.Rails) < MaxRailSends {
		s.Rails = append(s.Rails, RailSend{Path: *f.Path, First: f.Posted})
		s.Rails[len(s.Rails)-1].slice(now, f, bytes, landed)
	}
}

// Doubt notes a slice that may have brought bytes for which no slice was counted.
func (s *Send) Doubt(path *spray.Path, rank int, bytes uint64) {
	for i := range s.Rails {
		if r := &s.Rails[i]; r.Path == *path {
			r.rank = rank
			r.doubt += bytes
			return
		}
	}
}

// Settle counts, at the commit, rest bytes of which no slice was confirmed: slices in doubt have
// brought them. Which rail brought a byte is not known if several rails had it.
func (s *Send) Settle(rest uint64, yield func(rank int, bytes uint64)) {
	for i := range s.Rails {
		r := &s.Rails[i]
		n := min(rest, r.doubt)
		if n > 0 {
			r.Bytes += n
			yield(r.rank, n)
		}
		rest -= n
	}
}

func (r *RailSend) slice(now timer.Instant, f spray.Flight, bytes uint64, landed bool) {
	r.First, r.Last = min(r.First, f.Posted), max(r.Last, now)
	r.Bytes += bytes
	if r.Slices++; !landed {
		r.Failed++
	}
}
