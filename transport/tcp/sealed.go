package tcp

import (
	"errors"
	"fmt"
	"io"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// On a sealed lane the same bytes go as records of internal/wire. The sender seals from the
// source's memory into a box that stays in a near cache, and sends that; the receiver reads records
// into a box of its own and opens them into place where a record fits what comes next in memory,
// else within the box, from where the bytes are copied. A record that is not what the peer sealed
// ends the lane before its frame has landed; of the memory under it nothing is left but zeros.
const (
	boxBytes    = 4 * (wire.RecordBytes + wire.RecordOverhead)
	longBytes   = 4 * boxBytes // of a lane that has filled a box: the ends wake each other less often
	directBytes = 4 << 10      // of consecutive memory from which a record of its own is worth it
)

// sealWith makes a lane's boxes.
func (l *lane) sealWith(a *agreed) error {
	seal, err := wire.NewSealer(a.secret, a.us)
	if err != nil {
		return fmt.Errorf("tcp: seal: %w", err)
	}
	open, err := wire.NewOpener(a.secret, a.them)
	if err != nil {
		return fmt.Errorf("tcp: seal: %w", err)
	}
	l.tx.box = &outbox{seal: seal}
	l.tx.box.fn = l.tx.sendBox
	l.rx.box = &inbox{open: open}
	l.rx.box.fn = l.rx.readBox
	return nil
}

// outbox is what is sealed and not sent.
type outbox struct {
	seal  *wire.Sealer
	b     []byte
	at    int
	plain []byte // small pieces of memory on their way into one record
	long  bool   // a box was not enough
	fn    func(fd uintptr) bool
}

func (b *outbox) empty() bool { return b == nil || b.at == len(b.b) }

// stepSealed is step for a sealed lane: it sends what is sealed, and seals more where that is all
// gone.
func (t *sender) stepSealed(park bool) bool {
	b := t.box
	if b.empty() {
		switch {
		case b.b == nil:
			b.b = make([]byte, 0, boxBytes)
		case b.long && cap(b.b) < longBytes:
			b.b = make([]byte, 0, longBytes)
		}
		b.b, b.at = b.b[:0], 0
		if err := t.sealMore(); err != nil {
			t.l.fail(err)
			return false
		}
		if b.empty() {
			return true
		}
	}
	t.flags = unix.MSG_NOSIGNAL | unix.MSG_DONTWAIT
	if t.active || t.outAt < len(t.out) {
		t.flags |= unix.MSG_MORE
	}
	t.park = park
	err := t.l.raw.Write(b.fn)
	switch {
	case err != nil:
		t.l.fail(fmt.Errorf("tcp: write: %w", err))
		return false
	case t.errno == unix.EAGAIN:
		return false
	case t.errno != 0:
		t.l.fail(fmt.Errorf("tcp: write: %w", t.errno))
		return false
	}
	b.at += t.n
	return true
}

// sendBox is one sendmsg. No memory of the origin is read by it.
func (t *sender) sendBox(fd uintptr) bool {
	t.n, t.errno = sendmsg(fd, &t.msg, append(t.vecs[:0], vec(t.box.b[t.box.at:])), t.flags)
	if t.errno != 0 {
		t.n = 0
	}
	return t.errno != unix.EAGAIN || !t.park
}

// sealMore fills the box, at most to the end of the frame: its trailer goes with what follows.
func (t *sender) sealMore() error {
	b := t.box
	for cap(b.b)-len(b.b) >= wire.RecordBytes+wire.RecordOverhead {
		switch {
		case t.outAt < len(t.out):
			n := min(len(t.out)-t.outAt, wire.RecordBytes)
			if err := t.sealBytes(t.out[t.outAt : t.outAt+n]); err != nil {
				return err
			}
			if t.outAt += n; t.outAt == len(t.out) {
				t.out, t.outAt = t.out[:0], 0
			}
		case !t.active:
			return nil
		case t.p.left == 0 && t.todo > 0:
			t.load()
		case t.p.left == 0:
			t.finishFrame()
			return nil
		default:
			if err := t.sealPiece(); err != nil {
				return err
			}
		}
	}
	b.long = true
	return nil
}

func (t *sender) sealBytes(p []byte) (err error) {
	t.box.b, err = t.box.seal.Seal(t.box.b, p)
	return err //nolint:wrapcheck // of wire, with its context
}

// sealPiece seals one record of the payload, under the origin's guard.
func (t *sender) sealPiece() error {
	var g *transport.Guard
	if !t.lost && !(t.p.staged && t.p.mapped) {
		if g = &t.cur.Origin.Guard; !g.Enter() {
			t.lose(transfer.ReasonSourceGone, errSourceClosed)
			return nil
		}
		if err := t.fill(); err != nil {
			g.Leave()
			t.lose(transfer.ReasonMemory, fmt.Errorf("tcp: read source: %w", err))
			return nil
		}
	}
	p := t.p.segs[t.p.at][t.p.off:]
	if len(p) < directBytes && t.p.at+1 < len(t.p.segs) {
		p = t.gatherSmall()
	}
	p = p[:min(len(p), wire.RecordBytes)]
	err := t.sealBytes(p)
	if g != nil {
		g.Leave()
	}
	t.p.advance(len(p), nil)
	return err
}

// gatherSmall copies pieces of memory that are too small for records of their own.
func (t *sender) gatherSmall() []byte {
	if t.box.plain == nil {
		t.box.plain = make([]byte, 0, wire.RecordBytes)
	}
	p, off := t.box.plain[:0], t.p.off
	for i := t.p.at; i < len(t.p.segs) && len(p) < cap(p); i++ {
		s := t.p.segs[i][off:]
		p = append(p, s[:min(len(s), cap(p)-len(p))]...)
		off = 0
	}
	return p
}

// inbox is what has come and is not opened, or not taken.
type inbox struct {
	open  *wire.Opener
	b     []byte
	at, n int
	plain []byte // opened within b, and not taken
	fn    func(fd uintptr) bool
}

// reason is why a sealed lane ended, if an attacker on the path touched it.
func (b *inbox) reason(err error) transfer.Reason {
	switch {
	case b == nil:
	case errors.Is(err, wire.ErrForged), errors.Is(err, wire.ErrSealed):
		return transfer.ReasonForged
	case errors.Is(err, wire.ErrReplayed):
		return transfer.ReasonReplayed
	case errors.Is(err, wire.ErrReordered):
		return transfer.ReasonReordered
	case errors.Is(err, io.ErrUnexpectedEOF):
		return transfer.ReasonTruncated
	}
	return transfer.ReasonNone
}

// readSealed is read for a sealed lane.
func (r *receiver) readSealed() error {
	b := r.box
	for len(b.plain) == 0 {
		have := b.b[b.at:b.n]
		n, err := b.open.Length(have)
		if err != nil {
			return err //nolint:wrapcheck // of wire, with its context
		}
		if n == 0 || len(have) < n+wire.RecordOverhead {
			if err := r.fillBox(); err != nil {
				return err
			}
			continue
		}
		done, err := r.openInto(have, n)
		if err != nil || done {
			return err
		}
		plain := wire.InPlace(have, n)
		if err := b.open.Open(plain, have, n); err != nil {
			return err //nolint:wrapcheck // as above
		}
		b.at += n + wire.RecordOverhead
		b.plain = plain
	}
	return r.takePlain()
}

// enterFragment makes the memory of the fragment ready to be written; leave must follow. False: it
// may not be written any more, and the rest of the frame is discarded.
func (r *receiver) enterFragment() (guarded, ok bool) {
	if !r.open || r.p.left == 0 {
		return false, true
	}
	if why := r.claim.Enter(); why != transfer.ReasonNone {
		r.why = why
		r.discardRest()
		return false, false
	}
	r.p.enter()
	return true, true
}

func (r *receiver) leaveFragment() {
	if r.p.staged && r.p.left == 0 {
		r.unstage()
	}
	r.claim.Leave()
}

// openInto opens a record straight into the fragment, where that has room for it in one run. False:
// it has not.
func (r *receiver) openInto(rec []byte, n int) (bool, error) {
	if r.p.left < n {
		return false, nil
	}
	guarded, ok := r.enterFragment()
	if !ok {
		return true, nil
	}
	if r.p.at >= len(r.p.segs) || len(r.p.segs[r.p.at])-r.p.off < n {
		if guarded {
			r.leaveFragment()
		}
		return false, nil
	}
	err := r.box.open.Open(r.p.segs[r.p.at][r.p.off:r.p.off+n:r.p.off+n], rec, n)
	if err == nil {
		r.box.at += n + wire.RecordOverhead
		r.p.advance(n, nil)
	}
	if guarded {
		r.leaveFragment()
	}
	return true, err //nolint:wrapcheck // of wire, with its context
}

// takePlain copies opened bytes to the fragment and the tail.
func (r *receiver) takePlain() error {
	b := r.box
	guarded, ok := r.enterFragment()
	if !ok {
		return nil
	}
	for r.p.left > 0 && len(b.plain) > 0 {
		k := copy(r.p.segs[r.p.at][r.p.off:], b.plain)
		r.p.advance(k, nil)
		b.plain = b.plain[k:]
	}
	if guarded {
		r.leaveFragment()
	}
	if r.p.left == 0 && r.tailN < r.want {
		k := copy(r.tail[r.tailN:r.want], b.plain)
		r.tailN += k
		b.plain = b.plain[k:]
	}
	return nil
}

// fillBox reads more records. It waits if it must, and confirms what is due before it does.
func (r *receiver) fillBox() error {
	b := r.box
	switch {
	case b.b == nil:
		b.b = make([]byte, boxBytes)
	case b.n == len(b.b) && len(b.b) < longBytes: // it was not enough
		long := make([]byte, longBytes)
		b.n = copy(long, b.b[b.at:b.n])
		b.b, b.at = long, 0
	}
	if b.at > 0 && len(b.b)-b.at < wire.RecordBytes+wire.RecordOverhead || b.at == b.n {
		b.n = copy(b.b, b.b[b.at:b.n])
		b.at = 0
	}
	for {
		r.park = len(r.acks) == 0
		err := r.l.raw.Read(b.fn)
		switch {
		case err != nil:
			return err
		case r.errno == unix.EAGAIN:
			if err := r.flush(); err != nil {
				return err
			}
			continue
		case r.errno != 0:
			return fmt.Errorf("tcp: read: %w", r.errno)
		case r.n == 0 && b.n > b.at:
			return io.ErrUnexpectedEOF
		case r.n == 0:
			return io.EOF
		}
		b.n += r.n
		return nil
	}
}

// readBox is one readv into the box. Called by the netpoller's loop.
func (r *receiver) readBox(fd uintptr) bool {
	b := r.box
	r.n, r.errno = readv(fd, append(r.vecs[:0], vec(b.b[b.n:])))
	if r.errno != 0 {
		r.n = 0
	}
	if r.errno != unix.EAGAIN || !r.park {
		return true
	}
	left := r.todo + uint64(r.p.left)
	r.expect(fd, left-min(left, uint64(b.n-b.at))) // what is in the box does not come again
	return false
}
