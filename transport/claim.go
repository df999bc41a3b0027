package transport

import (
	"sync"
	"sync/atomic"

	"github.com/kvspray/kvspray/transfer"
)

// Claim is the right of one attempt to write some chunks of a grant. Every backend whose own CPU
// writes takes one per slice and writes only between Enter and Leave.
//
// The guard alone is not enough: a slice that was retried on another lane may still arrive on the
// first lane. Its bytes may have been read after the source was invalidated (its trailer will
// report that), or be padding. If they arrived after the retry had landed, they would damage chunks
// that a full bitmap then commits. With claims, landed chunks are never written again, and chunks
// in flight have one writer: a later attempt takes them over, and from then on the earlier one
// writes nothing.
//
// The zero Claim is ready and may be used again after Land or Release. It belongs to one goroutine,
// except for the fields guarded by mu.
type Claim struct {
	g       *Grant
	r       transfer.Range
	attempt uint32

	device Device // the writer; nil: the CPU

	mu     sync.Mutex // held while memory is written; below Grant.claims.mu
	lost   bool
	landed bool
}

// claims is the part of a Grant that its Claims share.
type claims struct {
	mu     sync.Mutex
	active []*Claim      // at most one per lane and slice in flight
	ended  chan struct{} // closed when the next device's claim ends; made by ClaimDevice
}

// Claim takes chunks r for an attempt. With ReasonNone c holds them; with ReasonSuperseded a later
// attempt holds some of them. Earlier attempts have lost their chunks when it returns: it waits for
// a write in progress, which is bounded.
func (g *Grant) Claim(c *Claim, r transfer.Range, attempt uint32) transfer.Reason {
	g.claims.mu.Lock()
	defer g.claims.mu.Unlock()
	return g.claimLocked(c, r, attempt, nil)
}

// Device is the writer under a claim of ClaimDevice.
type Device interface {
	// Stop makes the device write no more, and never again, under any of its claims. True: it has
	// stopped. The code that takes over chunks calls it; it must not call Grant or Claim, and is
	// bounded in time.
	Stop() bool
}

// ClaimDevice is Claim for chunks that a device writes, between this call and Land or Release,
// without calling Enter.
//
// If another device holds some of the chunks and force is not set, nothing is claimed: holder is
// that device, and ended is closed when a device's claim has ended. Waiting a little for an active
// device is cheaper than stopping it. With force the device is stopped, as in Claim; if that fails
// its claim stays, and the later attempt is superseded by the earlier one.
func (g *Grant) ClaimDevice(c *Claim, r transfer.Range, attempt uint32, d Device,
	force bool) (why transfer.Reason, holder Device, ended <-chan struct{}) {
	s := &g.claims
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, o := range s.active {
		if force || !overlaps(o.r, r) || o.device == nil {
			continue
		}
		if o.attempt > attempt {
			return transfer.ReasonSuperseded, nil, nil
		}
		if s.ended == nil {
			s.ended = make(chan struct{})
		}
		return transfer.ReasonNone, o.device, s.ended
	}
	return g.claimLocked(c, r, attempt, d), nil, nil
}

func (g *Grant) claimLocked(c *Claim, r transfer.Range, attempt uint32, d Device) transfer.Reason {
	s := &g.claims
	for _, o := range s.active {
		if overlaps(o.r, r) && o.attempt > attempt {
			return transfer.ReasonSuperseded
		}
	}
	kept, held := s.active[:0], false
	for _, o := range s.active {
		if overlaps(o.r, r) {
			if o.takeOver() {
				continue
			}
			held = true
		}
		kept = append(kept, o)
	}
	if s.active = kept; held {
		return transfer.ReasonSuperseded
	}
	s.active = append(s.active, c)
	c.g, c.r, c.attempt, c.device, c.lost, c.landed = g, r, attempt, d, false, false
	return transfer.ReasonNone
}

// takeOver ends the claim; its owner notices at the next Enter. False: a device holds it and could
// not be stopped. Called with the grant's claims locked.
func (c *Claim) takeOver() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.device != nil && !c.landed && !c.device.Stop() {
		return false
	}
	c.lost = true
	return true
}

// Fresh returns the number of chunks of r, from r.First on, that are in one state, and whether that
// state is "to be written". Landed chunks are read and discarded, not written. r must lie within
// the claim.
func (c *Claim) Fresh(r transfer.Range) (count uint32, fresh bool) {
	b := c.g.Receipt.chunks
	fresh = !b.Has(r.First)
	for count = 1; count < r.Count && b.Has(r.First+count) != fresh; count++ {
	}
	return count, fresh
}

// Enter permits one bounded, non-blocking write, until Leave. With any result but ReasonNone
// nothing of the slice may be written any more, and Leave must not be called.
func (c *Claim) Enter() transfer.Reason {
	c.mu.Lock()
	if c.lost {
		c.mu.Unlock()
		return transfer.ReasonSuperseded
	}
	if !c.g.Enter() {
		c.mu.Unlock()
		return transfer.ReasonRevoked
	}
	return transfer.ReasonNone
}

// Leave ends the write that Enter permitted.
func (c *Claim) Leave() {
	c.g.Leave()
	c.mu.Unlock()
}

// Land records and reports all chunks of the claim as landed, unless the grant was revoked or the
// claim taken over, and releases the claim. ReasonNone: the chunks have landed.
func (c *Claim) Land(lane Lane) transfer.Reason {
	why := c.Enter()
	if why == transfer.ReasonNone {
		c.g.Landed(lane, c.r, c.g.Receipt.Set(c.r))
		c.landed = true
		c.Leave()
	}
	c.Release()
	return why
}

// Release gives up the claim. Chunks that it has written without landing stay fresh. Idempotent.
func (c *Claim) Release() {
	if c.g == nil {
		return
	}
	s := &c.g.claims
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, o := range s.active {
		if o == c {
			last := len(s.active) - 1
			s.active[i] = s.active[last]
			s.active[last] = nil
			s.active = s.active[:last]
			break
		}
	}
	if c.device != nil && s.ended != nil {
		close(s.ended)
		s.ended = nil
	}
	c.g, c.device = nil, nil
}

func overlaps(a, b transfer.Range) bool { return a.First < b.End() && b.First < a.End() }

var laneIDs atomic.Uint64

// NextLaneID returns an id that no other lane of this process has, in any backend.
func NextLaneID() uint64 { return laneIDs.Add(1) }
