package tcp

import (
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// outBytes holds a trailer, a full message of confirmations and a header, twice.
const (
	outBytes    = 4 << 10
	gatherBytes = 2*wire.HeaderBytes + (wire.MaxConfirms-1)*wire.EntryBytes + wire.TrailerBytes
)

// zeros pads frames whose source was lost in between: a header has promised their length.
var zeros = make([]byte, transfer.ChunkBytes)

// sender is the write side of a lane: the frame under way, and the bytes in front of its payload.
type sender struct {
	l   *lane
	seq uint32

	out    []byte // trailer of the last frame, confirmations, header of this one
	outAt  int
	active bool // a frame is under way
	cur    entry
	next   uint32 // first chunk that is not in p
	todo   uint64 // payload bytes that are in no fragment yet
	lost   bool   // the source is lost: the rest is padding, and the trailer invalidates all of it
	sum    uint32
	summed bool // sum covers the fragment
	p      fragment

	box *outbox // sealed records on their way; nil: the lane is not sealed

	results []transport.Result // of slices that never began, for the writer to deliver
	acks    []wire.Entry

	// For the closure below, which is made once.
	fn    func(fd uintptr) bool
	vecs  []iovec
	msg   unix.Msghdr
	flags int
	park  bool
	n     int
	errno unix.Errno
	shut  bool // the guard did not let us in
}

func (t *sender) init(l *lane) {
	t.l = l
	t.out = make([]byte, 0, outBytes)
	t.vecs = make([]iovec, 0, iovMax)
	t.acks = make([]wire.Entry, 0, wire.MaxConfirms)
	t.fn = t.send
}

func (t *sender) release() {
	t.p.reset()
	t.l.stage.releaseBuffer(&t.cur)
	t.results, t.cur = nil, entry{}
}

// pump writes until there is nothing left to write, or until it would have to wait; inline, it also
// stops at everything that should not happen on a caller's time. It gives the write side up and
// returns true, or passes it on; the writer, which cannot pass it on, keeps it where the
// lane has failed.
func (l *lane) pump(inline bool) (released bool) {
	t := &l.tx
	for {
		if !inline && len(t.results) > 0 {
			t.deliver()
		}
		if !t.active && t.room() {
			if done := t.gather(inline); done {
				return true
			}
			if inline && (len(t.results) > 0 || t.active && t.todo+uint64(t.p.left) > inlineBytes) {
				l.wake <- struct{}{}
				return false
			}
		}
		ok := t.step(!inline)
		if !ok || l.failed() {
			if inline {
				l.wake <- struct{}{}
			}
			return false
		}
	}
}

// room reports whether out can take what gather and finishFrame add.
func (t *sender) room() bool {
	return cap(t.out)-len(t.out) >= gatherBytes ||
		t.outAt == len(t.out)
}

// gather collects what goes out next: confirmations first, then the next slice. It gives the write
// side up and returns true if there is nothing.
func (t *sender) gather(inline bool) bool {
	l := t.l
	l.mu.Lock()
	if n := min(len(l.confirms), wire.MaxConfirms); n > 0 {
		t.acks = append(t.acks[:0], l.confirms[:n]...)
		l.confirms = append(l.confirms[:0], l.confirms[n:]...)
	}
	var e entry
	have := l.queue.n > 0
	if have {
		e = l.queue.pop()
		e.seq = t.seq
		l.flight.push(e)          // before its first byte can be confirmed
		l.flight.last().buf = nil // the frame's, not the confirmation's
	}
	if !have && len(t.acks) == 0 && len(t.out) == t.outAt && t.box.empty() && len(t.results) == 0 &&
		l.err == nil {
		l.writing = false
		l.mu.Unlock()
		return true
	}
	l.mu.Unlock()
	if t.outAt == len(t.out) {
		t.out, t.outAt = t.out[:0], 0
	}
	if len(t.acks) > 0 {
		t.out = wire.AppendConfirms(t.out, t.acks)
		t.acks = t.acks[:0]
	}
	if have {
		t.begin(e)
	}
	return false
}

// begin opens a frame, or ends its slice here if its source is lost already.
func (t *sender) begin(e entry) {
	n, err := e.Origin.Memory.Bytes(e.Range)
	why := transfer.ReasonRange
	if err == nil && n > uint64(e.Range.Count)*transfer.ChunkBytes {
		err = fmt.Errorf("tcp: chunks %d+%d have %d bytes", e.Range.First, e.Range.Count, n)
	}
	if err == nil && e.err != nil {
		err, why = e.err, e.why
	}
	if err == nil && e.Origin.Revoked() {
		err, why = errSourceClosed, transfer.ReasonSourceGone
	}
	if err != nil {
		l := t.l
		l.stage.releaseBuffer(&e)
		l.mu.Lock()
		l.flight.drop() // the last one: nothing of it left this end
		l.mu.Unlock()
		t.results = append(t.results, transport.Result{Slice: e.Slice, Outcome: transfer.NotLanded,
			Reason: why, Err: err,
			Took: time.Since(e.began)})
		return
	}
	t.active, t.cur, t.next, t.todo, t.lost, t.sum = true, e, e.Range.First, n, false, 0
	t.p.reset()
	if e.buf != nil { // no memory of the origin is read any more: no guard is needed
		t.p.fixed(e.buf)
		t.p.staged, t.summed = true, true
		t.todo, t.next, t.sum = 0, e.Range.End(), e.sum
	}
	t.seq++
	h := wire.Header{Kind: wire.KindData, Slot: e.Origin.Slot, Gen: e.Origin.Gen, Range: e.Range,
		Attempt: e.Attempt, Seq: e.seq, Length: n}
	if t.l.crc {
		h.Flags |= wire.FlagCRC32C
	}
	at := len(t.out)
	t.out = t.out[:at+wire.HeaderBytes]
	wire.PutHeader(t.out[at:], &h)
}

// Why this end gives a slice up.
var (
	errSourceClosed = errors.New("tcp: the source lease was closed")
	errInvalidated  = errors.New("tcp: the source was no longer valid after it was read")
	errUneven       = errors.New("tcp: the chunks of a slice do not add up to the bytes of the slice")
)

// deliver ends slices that never began.
func (t *sender) deliver() {
	l := t.l
	l.mu.Lock()
	l.taken -= len(t.results)
	l.mu.Unlock()
	l.b.host.Done(l, t.results)
	clear(t.results)
	t.results = t.results[:0]
}

// step makes one system call's worth of progress. It returns false if the call would have to wait
// and may not, or if the lane failed.
func (t *sender) step(park bool) bool {
	if t.box != nil {
		return t.stepSealed(park)
	}
	if t.active && t.p.left == 0 && t.todo > 0 {
		t.load()
	}
	if t.active && t.p.left == 0 && t.todo == 0 {
		t.finishFrame()
		return true
	}
	if t.outAt == len(t.out) && t.p.left == 0 {
		return true
	}
	t.flags = unix.MSG_NOSIGNAL | unix.MSG_DONTWAIT
	if t.active {
		t.flags |= unix.MSG_MORE // at least the trailer follows at once
	}
	t.park, t.shut = park, false
	err := t.l.raw.Write(t.fn)
	switch {
	case err != nil:
		t.l.fail(fmt.Errorf("tcp: write: %w", err))
		return false
	case t.shut:
		t.lose(transfer.ReasonSourceGone, errSourceClosed)
		return true
	case t.errno == unix.EAGAIN:
		return false
	case t.errno == unix.EFAULT && t.p.left > 0:
		// Memory that cannot be read: only the slice is lost. The kernel reports what it took before the
		// fault first.
		t.lose(transfer.ReasonMemory, fmt.Errorf("tcp: read source: %w", t.errno))
		return true
	case t.errno != 0:
		t.l.fail(fmt.Errorf("tcp: write: %w", t.errno))
		return false
	}
	n := t.n
	if k := min(n, len(t.out)-t.outAt); k > 0 {
		t.outAt += k
		n -= k
		if t.outAt == len(t.out) {
			t.out, t.outAt = t.out[:0], 0
		}
	}
	t.p.advance(n, nil)
	return true
}

// load makes the next fragment.
func (t *sender) load() {
	if !t.lost {
		r := transfer.Range{First: t.next, Count: min(fragmentChunks, t.cur.Range.End()-t.next)}
		err := errUneven
		if r.Count > 0 {
			err = t.p.load(t.cur.Origin.Memory, r)
		}
		if err == nil && uint64(t.p.left) > t.todo {
			err = errUneven
		}
		if err == nil {
			t.next = r.End()
			t.todo -= uint64(t.p.left)
			t.summed = false
			return
		}
		t.p.reset()
		t.lose(transfer.ReasonRange, err)
	}
	t.pad()
}

func (t *sender) pad() {
	n := int(min(t.todo, uint64(len(zeros))))
	t.p.fixed(zeros[:n])
	t.todo -= uint64(n)
	t.summed = true
}

// lose gives up the source in mid frame: the frame goes on with padding, and its trailer
// invalidates it.
func (t *sender) lose(why transfer.Reason, err error) {
	t.todo += uint64(t.p.left)
	t.p.reset()
	t.lost = true
	t.cur.why, t.cur.err = why, err
}

// send is one sendmsg under the origin's guard. Called by the netpoller's loop.
func (t *sender) send(fd uintptr) bool {
	var g *transport.Guard
	t.n, t.errno = 0, 0
	if t.p.left > 0 && !t.lost && !(t.p.staged && t.p.mapped) {
		if g = &t.cur.Origin.Guard; !g.Enter() {
			t.shut = true
			return true
		}
		if err := t.fill(); err != nil {
			g.Leave()
			t.errno = unix.EFAULT
			return true
		}
	}
	v := t.vecs[:0]
	if t.outAt < len(t.out) {
		v = append(v, vec(t.out[t.outAt:]))
	}
	v, _ = t.p.vecs(v, 0)
	t.n, t.errno = sendmsg(fd, &t.msg, v, t.flags)
	if g != nil {
		g.Leave()
	}
	return t.errno != unix.EAGAIN || !t.park
}

// fill maps a new fragment, or copies it to the stage where it cannot be mapped, and sums it up, or
// else prefetches what the sum would have read. Under the guard.
//
// The sum is taken just before the kernel reads the same bytes, so that memory is read from DRAM
// once. Sum and payload can then differ if the engine writes in between; but the engine may do that
// only after it has moved the source's epoch, and then Valid, asked after the last read,
// invalidates the frame whatever its sum is. Where the epoch stands, no engine writes, and a
// difference at the receiver is damage on the way.
func (t *sender) fill() error {
	t.p.enter()
	if t.p.staged {
		at := 0
		for _, b := range t.p.blocks {
			if err := b.Region.ReadAt(t.p.stage[at:at+int(b.Len)], b.Off); err != nil {
				return err
			}
			at += int(b.Len)
		}
	}
	if !t.summed {
		for _, s := range t.p.segs {
			switch {
			case t.l.crc:
				t.sum = mem.CRC32C(t.sum, s)
			case t.box == nil:
				mem.Prefetch(s)
			}
		}
	}
	t.summed = true
	return nil
}

// finishFrame adds the trailer. The kernel has read every byte of the payload by now, so the answer
// of Valid holds for all.
func (t *sender) finishFrame() {
	tr := wire.Trailer{Status: wire.StatusValid, Seq: t.cur.seq, CRC32C: t.sum}
	if !t.lost && (t.cur.Origin.Revoked() || !t.cur.Origin.Valid(t.cur.Origin.Lease)) {
		t.lose(transfer.ReasonInvalidated, errInvalidated)
	}
	if t.lost {
		tr.Status = wire.StatusInvalidated
	}
	t.l.mu.Lock()
	// Only now a confirmation can be true. The entry is still the last one, because only the write
	// side adds any.
	e := t.l.flight.last()
	e.sent, e.why, e.err = true, t.cur.why, t.cur.err
	t.l.mu.Unlock()
	at := len(t.out)
	t.out = t.out[:at+wire.TrailerBytes]
	wire.PutTrailer(t.out[at:], &tr)
	t.p.reset()
	t.l.stage.releaseBuffer(&t.cur) // the kernel has its own copy
	t.active, t.cur = false, entry{}
}
