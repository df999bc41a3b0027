package connector

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/internal/board"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/transfer"
)

// CopyBlock is a piece of a Copy, in bytes from the start of either region.
type CopyBlock = msg.CopyBlock

// Copy is a lease for a copy between two regions of one worker. It ends like a destination lease.
type Copy struct {
	Lease    transfer.LeaseID
	Src, Dst *mem.Region
	// Blocks lie inside the regions. A written block overlaps no other block of the list, read or
	// written.
	Blocks   []CopyBlock
	Deadline time.Duration
	Req      string
}

// loadFlag is a load flag that a copy sets once every byte of it has arrived.
type loadFlag struct {
	flag  int
	value uint64 // 0: the copy sets no flag
}

func (w *worker) copyLocked(rec board.Record) error {
	l, err := w.openLocked(rec, false)
	if err != nil {
		return err
	}
	m, err := msg.DecodeCopy(rec.Body)
	var c Copy
	var added []*addedRegion
	if err == nil {
		c, added, err = w.checkCopyLocked(m)
	}
	if err == nil {
		err = w.checkMark("COPY", m.After)
	}
	if err == nil {
		err = w.checkLoad(m)
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
	l.isCopy, l.loads = true, loadFlag{int(m.Flag), m.Value}
	w.copies++
	l.useLocked(added)
	c.Lease, c.Deadline = w.leaseID(l), w.s.duration(m.DeadlineMS, w.s.opt.Deadline)
	w.beginLocked(l, m.After, c.Deadline, func(left time.Duration) func(Events) {
		c.Deadline = left
		return func(e Events) { e.Copy(w.pub, c) }
	})
	return nil
}

// checkLoad refuses a load flag that the flags memory does not have.
func (w *worker) checkLoad(m *msg.Copy) error {
	if m.Value == 0 || int64(m.Flag) < int64(w.flags.Layers()) && m.Value < board.Poison {
		return nil
	}
	return &msg.Error{Message: "COPY", Field: "flag", Problem: fmt.Sprintf("%d (value %d), but the "+
		"flags memory has %d load flags", m.Flag, m.Value, w.flags.Layers()),
		Remedy: "name a flag below that, with a value below 2^63-1"}
}

// checkCopyLocked refuses blocks outside their regions, and lists whose result would depend on the
// order of copying. It returns the regions among the two that may be dropped.
func (w *worker) checkCopyLocked(m *msg.Copy) (c Copy, added []*addedRegion, err error) {
	refused := func(field, problem, remedy string) (Copy, []*addedRegion, error) {
		return Copy{}, nil, &msg.Error{Message: "COPY", Field: field, Problem: problem, Remedy: remedy}
	}
	c = Copy{Blocks: m.Blocks, Req: m.Req}
	for _, r := range []struct {
		field string
		index uint32
		to    **mem.Region
	}{{"src", m.Src, &c.Src}, {"dst", m.Dst, &c.Dst}} {
		region, a, err := w.regionLocked(uint64(r.index))
		if err != nil {
			return refused(r.field, err.Error(), "name regions by their numbers, as in REGISTER and "+
				"ADD_REGIONS")
		}
		if *r.to = region; a != nil && !slices.Contains(added, a) {
			added = append(added, a)
		}
	}
	spans := make([]copySpan, 0, 2*len(m.Blocks))
	for i, b := range m.Blocks {
		err := errors.Join(c.Src.Check(b.SrcOff, b.Len), c.Dst.Check(b.DstOff, b.Len))
		if b.Len == 0 {
			err = errors.New("has no bytes")
		}
		if err != nil {
			return refused(fmt.Sprintf("blocks[%d]", i), err.Error(),
				"send {src_off, dst_off, len} inside both regions")
		}
		spans = append(spans, copySpan{b.DstOff, b.DstOff + b.Len, i, true})
		if m.Src == m.Dst {
			spans = append(spans, copySpan{b.SrcOff, b.SrcOff + b.Len, i, false})
		}
	}
	if a, b := clash(spans); a >= 0 {
		return refused(fmt.Sprintf("blocks[%d]", b),
			fmt.Sprintf("overlaps bytes that blocks[%d] reads or writes", a),
			"write each byte once, and no byte that the same copy reads")
	}
	return c, added, nil
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
