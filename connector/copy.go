package connector

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/internal/board"
	"github.com/kvspray/kvspray/transfer"
)

// CopyBlock is a piece of a Copy, in bytes from the start of either region.
type CopyBlock = msg.CopyBlock

// Copy is a lease for a copy between two regions of one worker. It ends like a destination lease.
type Copy struct {
	Lease    transfer.LeaseID
	Src, Dst int // indices into Worker.Regions
	// Blocks lie inside the regions. A written block overlaps no other block of the list, read or
	// written.
	Blocks   []CopyBlock
	Deadline time.Duration
	Req      string
}

func (w *worker) copyLocked(rec board.Record) error {
	l, err := w.openLocked(rec, false)
	if err != nil {
		return err
	}
	m, err := msg.DecodeCopy(rec.Body)
	if err == nil {
		err = w.checkCopy(m)
	}
	if err == nil {
		err = w.checkMark("COPY", m.After)
	}
	if err != nil {
		w.refuseLocked(rec, false, err)
		return err
	}
	if w.copies >= w.s.opt.Limits.Copies {
		err = fmt.Errorf("%d copies are open, at most %d: wait for one to complete", w.copies,
			w.s.opt.Limits.Copies)
	} else {
		err = w.admitLocked(l, 0)
	}
	if err != nil {
		w.refuseLocked(rec, false, err)
		return nil
	}
	l.isCopy = true
	w.copies++
	c := Copy{Lease: w.leaseID(l), Src: int(m.Src), Dst: int(m.Dst), Blocks: m.Blocks,
		Deadline: w.s.duration(m.DeadlineMS, w.s.opt.Deadline), Req: m.Req}
	w.beginLocked(l, m.After, c.Deadline, func(left time.Duration) func(Events) {
		c.Deadline = left
		return func(e Events) { e.Copy(w.pub, c) }
	})
	return nil
}

// checkCopy refuses blocks outside their regions, and lists whose result would depend on the order
// of copying.
func (w *worker) checkCopy(m *msg.Copy) error {
	for _, r := range []struct {
		field string
		index uint32
	}{{"src", m.Src}, {"dst", m.Dst}} {
		if int64(r.index) >= int64(len(w.pub.Regions)) {
			return &msg.Error{Message: "COPY", Field: r.field, Problem: fmt.Sprintf("region %d, %d are "+
				"registered", r.index, len(w.pub.Regions)),
				Remedy: "name regions by their index in REGISTER, from 0"}
		}
	}
	src, dst := w.pub.Regions[m.Src], w.pub.Regions[m.Dst]
	spans := make([]copySpan, 0, 2*len(m.Blocks))
	for i, b := range m.Blocks {
		err := errors.Join(src.Check(b.SrcOff, b.Len), dst.Check(b.DstOff, b.Len))
		if b.Len == 0 {
			err = errors.New("has no bytes")
		}
		if err != nil {
			return &msg.Error{Message: "COPY", Field: fmt.Sprintf("blocks[%d]", i), Problem: err.Error(),
				Remedy: "send {src_off, dst_off, len} inside both regions"}
		}
		spans = append(spans, copySpan{b.DstOff, b.DstOff + b.Len, i, true})
		if m.Src == m.Dst {
			spans = append(spans, copySpan{b.SrcOff, b.SrcOff + b.Len, i, false})
		}
	}
	if a, b := clash(spans); a >= 0 {
		return &msg.Error{Message: "COPY", Field: fmt.Sprintf("blocks[%d]", b),
			Problem: fmt.Sprintf("overlaps bytes that blocks[%d] reads or writes", a),
			Remedy:  "write each byte once, and no byte that the same copy reads"}
	}
	return nil
}

// copySpan is the range of a region that one block reads or writes.
type copySpan struct {
	from, to uint64
	block    int
	write    bool
}

// clash finds two blocks of which one writes bytes that the other reads or writes; -1: none.
func clash(spans []copySpan) (a, b int) {
	byFrom := func(x, y copySpan) int { return cmp.Compare(x.from, y.from) }
	if !slices.IsSortedFunc(spans, byFrom) { // most lists are in order
		slices.SortFunc(spans, byFrom)
	}
	var read, written copySpan // those that reach furthest so far
	for _, s := range spans {
		if s.from < written.to {
			return written.block, s.block
		}
		if s.write && s.from < read.to {
			return read.block, s.block
		}
		furthest := &read
		if s.write {
			furthest = &written
		}
		if s.to > furthest.to {
			*furthest = s
		}
	}
	return -1, -1
}
