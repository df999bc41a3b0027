package tcp

import (
	"fmt"
	"io"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// ackBytes bounds what a receiver leaves unconfirmed while more keeps coming; it confirms at once
// when nothing more is there.
const ackBytes = 512 << 10

// receiver is the read side of a lane.
type receiver struct {
	l *lane

	h     wire.Header
	grant *transport.Grant
	claim transport.Claim
	why   transfer.Reason // not none: the rest of the frame is discarded
	next  uint32          // first chunk that is in no fragment yet
	todo  uint64          // payload bytes that are in no fragment yet
	sum   uint32
	open  bool     // the fragment is the grant's memory: read under the claim
	place *landing // not nil: the frame is of device memory, and goes to its buffer first
	p     fragment

	// What follows a payload: its trailer, and the next header, if that is there already. While a
	// header is read, tail holds its beginning.
	tail  [wire.TrailerBytes + wire.HeaderBytes]byte
	tailN int

	box *inbox // sealed records that have come; nil: the lane is not sealed

	more    [(wire.MaxConfirms - 1) * wire.EntryBytes]byte
	discard []byte // buffer
	entries []wire.Entry
	results []transport.Result
	acks    []wire.Entry
	unacked uint64 // bytes

	// For the closure below, which is made once.
	fn     func(fd uintptr) bool
	vecs   []iovec
	want   int // bytes of tail wanted at most
	park   bool
	n      int
	errno  unix.Errno
	barred transfer.Reason
	lowat  int // SO_RCVLOWAT as it is set
}

func (r *receiver) init(l *lane) {
	r.l, r.lowat = l, 1
	r.vecs = make([]iovec, 0, iovMax)
	r.entries = make([]wire.Entry, 0, wire.MaxConfirms)
	r.results = make([]transport.Result, 0, wire.MaxConfirms)
	r.acks = make([]wire.Entry, 0, wire.MaxConfirms)
	r.fn = r.readv
}

// readLoop is the reader. Its end ends the lane.
func (l *lane) readLoop() {
	defer l.b.wg.Done()
	defer close(l.rdDone)
	r := &l.rx
	err := r.run()
	if why := r.box.reason(err); why != transfer.ReasonNone {
		l.b.host.Refused(l, why)
	}
	r.claim.Release()
	l.land.drop(r.place)
	r.place = nil
	r.p.reset()
	l.fail(err)
	l.land.end()
}

func (r *receiver) run() error {
	for {
		for r.tailN < wire.HeaderBytes {
			if err := r.read(wire.HeaderBytes); err != nil {
				if err == io.EOF && r.tailN > 0 {
					return io.ErrUnexpectedEOF
				}
				return err
			}
		}
		if err := wire.ParseHeader(r.tail[:], &r.h); err != nil {
			return err
		}
		r.tailN = 0
		var err error
		if r.h.Kind == wire.KindConfirm {
			err = r.confirmed()
		} else {
			err = r.frame()
		}
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		if err != nil {
			return err
		}
	}
}

// frame receives one data frame, whose header is in h, and leaves its confirmation in acks.
func (r *receiver) frame() error {
	h := &r.h
	r.begin()
	for r.todo > 0 || r.p.left > 0 {
		if r.p.left == 0 {
			r.load()
		}
		if err := r.read(wire.TrailerBytes + wire.HeaderBytes); err != nil {
			return err
		}
	}
	for r.tailN < wire.TrailerBytes {
		if err := r.read(wire.TrailerBytes + wire.HeaderBytes); err != nil {
			return err
		}
	}
	var t wire.Trailer
	if err := wire.ParseTrailer(r.tail[:], &t); err != nil {
		return err
	}
	if t.Seq != h.Seq {
		return fmt.Errorf("tcp: frame %d has the trailer of frame %d: %w", h.Seq, t.Seq,
			wire.ErrMalformed)
	}
	r.tailN = copy(r.tail[:], r.tail[wire.TrailerBytes:r.tailN])
	r.p.reset()
	switch {
	case r.why != transfer.ReasonNone:
	case t.Status != wire.StatusValid:
		r.why = transfer.ReasonInvalidated
	case h.Flags&wire.FlagCRC32C != 0 && t.CRC32C != r.sum:
		r.why = transfer.ReasonChecksum
	case r.place != nil:
		// Confirmations keep the order of the frames: those before this one go first.
		err := r.flush()
		r.l.land.put(r.place, h)
		r.place, r.grant = nil, nil
		return err
	default:
		r.why = r.claim.Land(r.l)
	}
	if r.why != transfer.ReasonNone {
		r.claim.Release()
		r.l.land.drop(r.place)
	}
	r.place, r.grant = nil, nil
	e := r.l.verdict(h, r.why)
	if r.l.land.busy() {
		r.l.land.follow(e)
		return nil
	}
	r.acks = append(r.acks, e)
	if r.unacked += h.Length; r.unacked >= ackBytes || len(r.acks) == wire.MaxConfirms {
		return r.flush()
	}
	return nil
}

// verdict is the confirmation of a frame.
func (l *lane) verdict(h *wire.Header, why transfer.Reason) wire.Entry {
	e := wire.Entry{Slot: h.Slot, Outcome: transfer.Landed, Reason: why, Gen: h.Gen, Range: h.Range,
		Attempt: h.Attempt, Seq: h.Seq}
	if why != transfer.ReasonNone {
		e.Outcome = transfer.Rejected
		l.b.host.Refused(l, why)
	}
	return e
}

// begin decides whether a frame is written or discarded.
func (r *receiver) begin() {
	h := &r.h
	r.todo, r.next, r.sum = h.Length, h.Range.First, 0
	r.p.reset()
	r.grant, r.why = r.l.b.host.Grant(r.l.peer, h.Slot, h.Gen)
	if r.grant == nil {
		if r.why == transfer.ReasonNone {
			r.why = transfer.ReasonUnknownSlot
		}
		return
	}
	n, err := r.grant.Memory.Bytes(h.Range)
	switch {
	case err != nil:
		r.why = transfer.ReasonRange
	case n != h.Length:
		r.why = transfer.ReasonLength
	case r.l.crc && h.Flags&wire.FlagCRC32C == 0:
		r.why = transfer.ReasonChecksum
	default:
		claim := &r.claim
		if r.place = r.l.land.take(r.grant, n); r.place != nil {
			claim = &r.place.claim
		}
		r.why = r.grant.Claim(claim, h.Range, h.Attempt)
	}
}

// load makes the next fragment: memory of the grant, or a buffer for bytes to discard.
func (r *receiver) load() {
	if r.why == transfer.ReasonNone && r.place != nil {
		r.p.fixed(r.place.buf)
		r.open, r.todo = false, 0
		return
	}
	if r.why == transfer.ReasonNone {
		c := transfer.Range{First: r.next, Count: min(fragmentChunks, r.h.Range.End()-r.next)}
		if c.Count == 0 {
			r.why = transfer.ReasonLength // Bytes of the parts is less than Bytes of the whole
		} else {
			var fresh bool
			c.Count, fresh = r.claim.Fresh(c)
			switch err := r.p.load(r.grant.Memory, c); {
			case err != nil || uint64(r.p.left) > r.todo:
				r.why = transfer.ReasonRange
			case fresh:
				r.open = true
				r.next = c.End()
				r.todo -= uint64(r.p.left)
				return
			default: // landed already: read past it
				n := r.p.left
				r.open = false
				r.next = c.End()
				r.todo -= uint64(n)
				r.p.fixed(r.scratch()[:n])
				return
			}
		}
	}
	r.discardRest()
}

// discardRest makes the reader discard the rest of the frame.
func (r *receiver) discardRest() {
	r.todo += uint64(r.p.left)
	n := int(min(r.todo, fragmentBytes))
	r.open = false
	r.p.fixed(r.scratch()[:n])
	r.todo -= uint64(n)
}

func (r *receiver) scratch() []byte {
	if r.discard == nil {
		r.discard = make([]byte, fragmentBytes)
	}
	return r.discard
}

// read makes one call's worth of progress on the fragment, and on the tail, of which it reads at
// most up to want bytes, where all of the payload came before. It waits if it must, and confirms
// what is due before it does.
func (r *receiver) read(want int) error {
	r.want = want
	if r.todo > 0 {
		r.want = 0
	}
	if r.box != nil {
		return r.readSealed()
	}
	for {
		r.park, r.barred = len(r.acks) == 0, transfer.ReasonNone
		err := r.l.raw.Read(r.fn)
		switch {
		case err != nil:
			return err
		case r.barred != transfer.ReasonNone:
			// Revoked or superseded since: the rest is discarded.
			r.why = r.barred
			r.discardRest()
			return nil
		case r.errno == unix.EAGAIN:
			if err := r.flush(); err != nil {
				return err
			}
			continue
		case r.errno == unix.EFAULT && r.open:
			r.why = transfer.ReasonMemory
			r.discardRest()
			return nil
		case r.errno != 0:
			return fmt.Errorf("tcp: read: %w", r.errno)
		case r.n == 0:
			return io.EOF
		}
		return nil
	}
}

// readv is one readv under the claim. Called by the netpoller's loop. What it read is checked and
// counted here, while the memory is sure to be there.
func (r *receiver) readv(fd uintptr) bool {
	guarded := r.open && r.p.left > 0
	r.n, r.errno = 0, 0
	if guarded {
		if r.barred = r.claim.Enter(); r.barred != transfer.ReasonNone {
			return true
		}
		r.p.enter()
	}
	v, all := r.p.vecs(r.vecs[:0], 1)
	if all && r.want > r.tailN {
		v = append(v, vec(r.tail[r.tailN:r.want]))
	}
	r.n, r.errno = readv(fd, v)
	if r.errno == 0 {
		var sum *uint32
		if r.h.Flags&wire.FlagCRC32C != 0 && r.why == transfer.ReasonNone {
			sum = &r.sum
		}
		r.tailN += r.p.advance(r.n, sum)
		if guarded && r.p.staged && r.p.left == 0 {
			r.unstage()
		}
	}
	if guarded {
		r.claim.Leave()
	}
	if r.errno != unix.EAGAIN || !r.park {
		return true
	}
	r.expect(fd, r.todo+uint64(r.p.left))
	return false
}

// lowatBytes is what a receiver in mid payload lets gather before it is woken. Waking it for every
// segment costs the sender more than copying the segment does.
const lowatBytes = 128 << 10

// expect sets how much the kernel waits for: never more than what is left of the payload, whose
// sender has it ready. Setting it makes the kernel look at what is there already, so nothing that
// came before is slept through.
func (r *receiver) expect(fd uintptr, left uint64) {
	want := 1
	if left >= lowatBytes/2 {
		want = int(min(left, lowatBytes))
	}
	if want != r.lowat && unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVLOWAT, want) == nil {
		r.lowat = want
	}
}

// unstage writes a fragment that could not be mapped.
func (r *receiver) unstage() {
	at := 0
	for _, b := range r.p.blocks {
		if err := b.Region.WriteAt(r.p.stage[at:at+int(b.Len)], b.Off); err != nil {
			r.why = transfer.ReasonMemory
			return
		}
		at += int(b.Len)
	}
}

// flush confirms everything that is due. It does not wait: what does not fit in the socket is the
// writer's.
func (r *receiver) flush() error {
	r.unacked = 0
	if len(r.acks) == 0 {
		return nil
	}
	err := r.l.confirm(r.acks...)
	r.acks = r.acks[:0]
	return err
}

// confirm hands confirmations to the write side.
func (l *lane) confirm(e ...wire.Entry) error {
	l.mu.Lock()
	if len(l.confirms)+len(e) > maxInFlight+wire.MaxConfirms {
		l.mu.Unlock()
		return fmt.Errorf("tcp: the peer sends and does not read: over %d confirmations wait: %w",
			maxInFlight, wire.ErrMalformed)
	}
	l.confirms = append(l.confirms, e...)
	mine := !l.writing
	l.writing = true
	l.mu.Unlock()
	if mine {
		l.pump(true)
	}
	return nil
}

// confirmed takes a message of confirmations, whose header is in h.
func (r *receiver) confirmed() error {
	r.entries = append(r.entries[:0], r.h.Entry())
	if n := int(r.h.Length); n > 0 {
		r.open, r.todo = false, 0
		r.h.Flags = 0
		r.p.fixed(r.more[:n])
		for r.p.left > 0 {
			if err := r.read(wire.HeaderBytes); err != nil {
				return err
			}
		}
		for at := 0; at < n; at += wire.EntryBytes {
			var e wire.Entry
			if err := wire.ParseEntry(r.more[at:], &e); err != nil {
				return err
			}
			r.entries = append(r.entries, e)
		}
		r.p.reset()
	}
	l := r.l
	now := time.Now()
	res := r.results[:0]
	var bad error
	l.mu.Lock()
	for i := range r.entries {
		c := &r.entries[i]
		if l.flight.n == 0 {
			bad = fmt.Errorf("tcp: the peer confirms frame %d, nothing is under way: %w", c.Seq,
				wire.ErrMalformed)
			break
		}
		e := l.flight.first()
		if !e.sent || e.seq != c.Seq || e.Range != c.Range || e.Origin.Slot != c.Slot ||
			e.Origin.Gen != c.Gen {
			bad = fmt.Errorf("tcp: the peer confirms frame %d, frame %d is next: %w", c.Seq, e.seq,
				wire.ErrMalformed)
			break
		}
		res = append(res, outcome(l.flight.pop(), c, now))
		l.taken--
	}
	l.mu.Unlock()
	if len(res) > 0 {
		l.b.host.Done(l, res)
		clear(res)
	}
	return bad
}

// outcome is how a slice ended: by the receiver's answer, except that what this end invalidated has
// not landed.
func outcome(e entry, c *wire.Entry, now time.Time) transport.Result {
	res := transport.Result{Slice: e.Slice, Outcome: c.Outcome, Reason: c.Reason,
		Took: now.Sub(e.began)}
	switch {
	case c.Outcome == transfer.Landed:
		res.Reason = transfer.ReasonNone
	case e.why != transfer.ReasonNone:
		res.Outcome, res.Reason, res.Err = transfer.NotLanded, e.why, e.err
	case c.Reason == transfer.ReasonSuperseded:
		res.Outcome = transfer.NotLanded
		fallthrough
	default:
		res.Err = fmt.Errorf("tcp: chunks %d+%d, attempt %d: the receiver rejected it: %s", e.Range.First,
			e.Range.Count, e.Attempt, c.Reason)
	}
	return res
}
