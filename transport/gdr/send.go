package gdr

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"time"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/internal/sys/verbs"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// state of a slice, on either side.
type state uint8

const (
	idle   state = iota
	asked        // the source has sent ASK; at the destination: it is being processed
	failed       // at the source: it never left; the follower reports it
	gone         // the source prepares to write
	flight       // posted, as far as the queue has room
	judged       // the verdict is posted
	armed        // at the destination: the source may write
)

// sending is a slice in flight from this end.
type sending struct {
	state state
	seq   uint16
	s     transport.Slice
	at    time.Time
	bytes uint64
	src   []run
	dst   []run
	from  cursor // in src
	to    cursor // in dst
	// largest write that is copied into the request; 0 if the CPU cannot reach the memory
	inline  int
	last    uint64 // its last work request
	reading bool   // the origin is held
	keys    []*key
	slab    *slab // of a staged slice
	trip    trip
	blocks  []mem.Block
	why     transfer.Reason // if set, this end gave the slice up
	err     error
}

// release gives up what the slice held while the NIC read.
func (s *sending) release(b *Backend) {
	s.trip.drop()
	if s.slab != nil {
		s.slab.release()
		s.slab = nil
	}
	s.endRead(b)
}

// endRead ends the use of the origin's memory.
func (s *sending) endRead(b *Backend) {
	for i, k := range s.keys {
		k.put()
		s.keys[i] = nil
	}
	s.keys = s.keys[:0]
	if s.reading {
		s.reading = false
		b.endUse(s.s.Origin)
	}
}

// source is the sending half of a lane: the slices of its Move, and the requests posted for them.
// Its fields are guarded by lane.mu; a slice in the state gone belongs to the goroutine that
// prepares it.
type source struct {
	l      *lane
	depth  uint64 // of the send queue, without the entries for verdicts
	limit  uint64 // bytes of one write
	seq    uint16
	out    [maxInFlight]sending
	going  ring // slices with writes to post
	flying ring // slices whose writes are all posted
	posted uint64
	done   uint64 // requests that have ended: all up to this one
	good   uint64 // requests that have ended well
	works  [batchWorks]verbs.Work
	one    [1]verbs.Work
}

func (src *source) init(l *lane, sends int) {
	src.l, src.depth = l, uint64(sends-maxInFlight)
	src.limit = min(maxWrite, uint64(l.dev.Limits().MaxMessage))
}

// Move implements transport.Lane.
func (l *lane) Move(batch []transport.Slice) error { return l.src.move(batch) }

// move accepts the slices of Move, or none of them.
func (src *source) move(batch []transport.Slice) error {
	src.l.mu.Lock()
	defer src.l.mu.Unlock()
	if src.l.err != nil {
		return fmt.Errorf("gdr: move on lane %d: %w", src.l.id, errors.Join(net.ErrClosed, src.l.err))
	}
	free := 0
	for i := range src.out {
		if src.out[i].state == idle {
			free++
		}
	}
	if len(batch) > free {
		return fmt.Errorf("gdr: move on lane %d: %d slices, and %d of %d are in flight: %w", src.l.id,
			len(batch), maxInFlight-free, maxInFlight, verbs.ErrFull)
	}
	id := 0
	for i := range batch {
		for src.out[id].state != idle {
			id++
		}
		s := &src.out[id]
		src.seq++
		s.state, s.s, s.seq, s.at = asked, batch[i], src.seq, time.Now()
		s.why, s.err = transfer.ReasonNone, nil
		if s.s.Range.Count > maxSliceChunks {
			s.err = fmt.Errorf("gdr: a slice of %d chunks: at most %d", s.s.Range.Count, maxSliceChunks)
		} else {
			s.bytes, s.err = s.s.Origin.Memory.Bytes(s.s.Range)
		}
		if s.err != nil {
			s.state, s.why = failed, transfer.ReasonRange
			src.l.wake()
			continue
		}
		src.l.send(&head{kind: kindAsk, id: uint8(id), seq: s.seq, slot: s.s.Origin.Slot,
			gen: s.s.Origin.Gen, r: s.s.Range, attempt: s.s.Attempt,
			bytes: s.bytes}, nil)
	}
	return nil
}

var errLost = errors.New("gdr: the source lease was closed")

// proceed prepares a slice that the receiver permits. Called by the reader; an error ends the lane.
func (src *source) proceed(h *head, cells []byte) error {
	src.l.mu.Lock()
	s := &src.out[h.id]
	ok := s.state == asked && s.seq == h.seq
	if ok {
		s.state = gone // only this goroutine touches it from here
	}
	src.l.mu.Unlock()
	if !ok {
		return fmt.Errorf("%w: GO for slice %d.%d, which did not ask", errFrame, h.id, h.seq)
	}
	var err error
	if s.dst, err = appendRuns(s.dst[:0], cells); err != nil {
		return err
	}
	if _, n := total(s.dst); n != s.bytes {
		return fmt.Errorf("%w: GO for %d bytes of a slice of %d", errFrame, n, s.bytes)
	}
	s.to.begin(s.dst)
	s.trip = src.l.dev.trip(s.s.Origin.Memory.Device(), false, s.bytes)
	if err = src.launch(h.id, false); errors.Is(err, errLater) {
		id := h.id
		src.l.asks.Go(func() {
			if err := src.launch(id, true); err != nil {
				src.l.fail(err)
			}
		})
		return nil
	}
	return err
}

// launch makes a slice's source readable for the NIC and begins to write. errLater: it would have
// to wait for a registration or a copy.
func (src *source) launch(id uint8, wait bool) error {
	s := &src.out[id]
	o := s.s.Origin
	if !s.reading && !src.l.b.startUse(o) {
		return src.giveUp(id, transfer.ReasonSourceGone, errLost)
	}
	s.reading = true
	why, err := src.find(s, wait)
	if errors.Is(err, errUnreachable) {
		s.trip.detour(err)
		why, err = transfer.ReasonNone, nil
	}
	if err == nil && s.trip.way == staged {
		if !wait {
			return errLater
		}
		why, err = s.fill(src.l)
		s.endRead(src.l.b)
	}
	if why != transfer.ReasonNone {
		return src.giveUp(id, why, err)
	} else if err != nil {
		return err
	}
	s.from.begin(s.src)
	s.inline = src.l.q.MaxInline()
	if slices.ContainsFunc(s.keys, func(k *key) bool { return k.gpu }) {
		s.inline = 0
	}
	src.l.mu.Lock()
	defer src.l.mu.Unlock()
	if src.l.err != nil {
		return nil
	}
	s.state = flight
	src.going.push(id)
	src.pumpLocked()
	return nil
}

// find lists the memory of a slice that the NIC reads itself.
func (src *source) find(s *sending, wait bool) (why transfer.Reason, err error) {
	if s.trip.way == staged {
		return transfer.ReasonNone, nil
	}
	if s.blocks, err = s.s.Origin.Memory.Resolve(s.blocks[:0], s.s.Range); err != nil {
		return transfer.ReasonRange, err
	}
	if s.src, s.keys, err = src.l.runs(s.src[:0], s.keys, s.blocks, access{wait: wait}); err != nil {
		return transfer.ReasonNone, err
	}
	if _, n := total(s.src); n != s.bytes {
		return transfer.ReasonRange, fmt.Errorf("gdr: chunks %d+%d resolve to %d bytes of %d",
			s.s.Range.First, s.s.Range.Count, n, s.bytes)
	}
	if !wait { // else the time includes a registration
		s.trip.start(time.Now())
	}
	return transfer.ReasonNone, nil
}

// access is the purpose of a lookup of keys.
type access struct {
	remote bool // for the peer's writes; else for reads by the own NIC
	wait   bool // for registrations that do not exist yet; else errLater
}

// runs appends blocks as memory under keys, and adds to held the keys that it acquired.
func (l *lane) runs(dst []run, held []*key, blocks []mem.Block, how access) ([]run, []*key, error) {
	for len(blocks) > 0 {
		b := &blocks[0]
		var k *key
		for _, h := range held {
			if h.name.region == b.Region {
				k = h
			}
		}
		if k == nil {
			var err error
			if k, err = l.dev.keys.get(keyName{b.Region, l.peer, how.remote}, how.wait); err != nil {
				return dst, held, err
			}
			held = append(held, k)
		}
		s := mem.Single
		if mem.Regular(blocks) {
			s = mem.Leading(blocks)
		}
		if !s.Inside(b.Off, b.Len, b.Region.Size()) {
			return dst, held, fmt.Errorf("gdr: region %s: pieces of %d bytes from %d on, %+v, of %d "+
				"bytes: %w", b.Region.ID(), b.Len, b.Off, s, b.Region.Size(), mem.ErrBounds)
		}
		blocks = blocks[s.Pieces():]
		joined, n := s.Joined(b.Len) // for the device, a row without gaps is one piece
		dst = k.runs(dst, b.Off, n, &joined, how.remote)
	}
	return dst, held, nil
}

// pumpLocked posts writes as far as the send queue has room.
func (src *source) pumpLocked() {
	for src.going.n > 0 && src.l.err == nil {
		id := src.going.first()
		s := &src.out[id]
		room := src.depth - min(src.posted-src.done, src.depth)
		n := s.plan(src.works[:min(room, batchWorks)], src.posted, src.limit)
		if n > 0 {
			taken, err := src.l.q.PostSend(src.works[:n])
			src.posted += uint64(taken)
			if err != nil {
				src.l.failLocked(fmt.Errorf("gdr: lane %d: %w", src.l.id, err))
				return
			}
		}
		if len(s.to.runs) > 0 {
			if room == uint64(n) {
				return // a completion makes room
			}
			continue
		}
		s.last = src.posted
		src.going.pop()
		src.flying.push(id)
		if s.last <= src.good {
			src.l.wake() // nothing to write
		}
	}
}

// plan fills works with the next writes of a slice by walking both sides' spans together. It moves
// the cursors.
func (s *sending) plan(works []verbs.Work, posted, limit uint64) (n int) {
	for len(s.to.runs) > 0 {
		a, d := &s.from, &s.to
		if d.skip() { // to its end: a part of it would be an address to write to
			for left := d.len; left > 0; {
				k := min(a.len, left)
				a.take(k)
				left -= k
			}
			d.take(d.len)
			continue
		}
		if n == len(works) {
			break
		}
		k := uint32(min(uint64(min(a.len, d.len)), limit))
		works[n] = verbs.Work{ID: posted + uint64(n) + 1, Op: verbs.Write, LocalAddr: a.addr,
			LocalKey: a.key, Len: k, RemoteAddr: d.addr,
			RemoteKey: d.key, Inline: int(k) <= s.inline}
		n++
		a.take(k)
		d.take(k)
	}
	if n > 0 {
		works[n-1].Signaled = true
	}
	return n
}

// giveUp sends a negative verdict on a slice of which nothing was written.
func (src *source) giveUp(id uint8, why transfer.Reason, err error) error {
	s := &src.out[id]
	s.why, s.err = why, err
	s.release(src.l.b)
	src.l.mu.Lock()
	defer src.l.mu.Unlock()
	src.verdictLocked(id)
	return nil
}

func (src *source) verdictLocked(id uint8) {
	s := &src.out[id]
	if src.l.err != nil {
		return
	}
	src.one[0] = verbs.Work{ID: src.posted + 1, Op: verbs.WriteImm, Imm: verdictOf(id, s.why, s.seq),
		Signaled: true}
	taken, err := src.l.q.PostSend(src.one[:])
	src.posted += uint64(taken)
	if err != nil {
		src.l.failLocked(fmt.Errorf("gdr: lane %d: %w", src.l.id, err))
		return
	}
	s.state = judged
}

// judge decides for each slice with completed writes whether its bytes count, and reports slices
// that never left. Called by the follower.
func (src *source) judge() {
	for {
		src.l.mu.Lock()
		src.reportLocked()
		if src.l.err != nil || src.flying.n == 0 || src.out[src.flying.first()].last > src.good {
			src.l.mu.Unlock()
			return
		}
		id := src.flying.first()
		src.flying.pop()
		s := &src.out[id]
		src.l.mu.Unlock()
		// The NIC has read all of it. From here only the follower and, after it, end touch the
		// slice.
		o := s.s.Origin
		valid := o.Enter()
		if valid {
			valid = o.Valid(o.Lease)
			o.Leave()
		}
		if !valid {
			s.why, s.err = transfer.ReasonInvalidated,
				errors.New("gdr: the source was invalidated while it was read")
		}
		s.trip.ended(s.bytes)
		s.release(src.l.b)
		src.l.mu.Lock()
		src.verdictLocked(id)
		src.l.mu.Unlock()
	}
}

// reportLocked ends slices that never left. It releases the lock meanwhile.
func (src *source) reportLocked() {
	for i := range src.out {
		s := &src.out[i]
		if s.state != failed {
			continue
		}
		res := [1]transport.Result{{Slice: s.s, Outcome: transfer.NotLanded, Reason: s.why, Err: s.err,
			Took: time.Since(s.at)}}
		s.state, s.s = idle, transport.Slice{}
		src.l.mu.Unlock()
		src.l.b.host.Done(src.l, res[:])
		src.l.mu.Lock()
	}
}

// ended processes the receiver's END of a slice. Called by the reader.
func (src *source) ended(h *head, results []transport.Result) error {
	src.l.mu.Lock()
	s := &src.out[h.id]
	if s.seq != h.seq || s.state != asked && s.state != judged || s.state == asked &&
		h.reason == transfer.ReasonNone {
		src.l.mu.Unlock()
		return fmt.Errorf("%w: END of slice %d.%d, which is not at its end", errFrame, h.id, h.seq)
	}
	src.l.activity.progress = time.Now()
	r := transport.Result{Slice: s.s, Outcome: transfer.Landed,
		Took: src.l.activity.progress.Sub(s.at)}
	switch {
	case s.why != transfer.ReasonNone:
		r.Outcome, r.Reason, r.Err = transfer.NotLanded, s.why, s.err
	case h.reason == transfer.ReasonSuperseded:
		r.Outcome, r.Reason = transfer.NotLanded, h.reason
	case h.reason != transfer.ReasonNone:
		r.Outcome, r.Reason = transfer.Rejected, h.reason
	}
	if r.Outcome != transfer.Landed && r.Err == nil {
		r.Err = fmt.Errorf("gdr: chunks %d+%d, attempt %d: the receiver reports %s", s.s.Range.First,
			s.s.Range.Count, s.s.Attempt, h.reason)
	}
	s.state, s.s = idle, transport.Slice{}
	src.l.mu.Unlock()
	results[0] = r
	src.l.b.host.Done(src.l, results[:1])
	results[0] = transport.Result{}
	return nil
}

// reads reports whether the NIC may read an origin through this lane.
func (src *source) reads(o *transport.Origin) bool {
	src.l.mu.Lock()
	defer src.l.mu.Unlock()
	for i := range src.out {
		if s := &src.out[i]; s.state != idle && s.s.Origin == o {
			return true
		}
	}
	return false
}
