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

// Copy is a lease for copies between regions of one worker. It ends like a destination lease.
type Copy struct {
	Lease    transfer.LeaseID
	Parts    []CopyPart // a COPY has one
	Load     bool       // a LOAD: the sidecar calls [Server.Loaded] as parts arrive
	Deadline time.Duration
	Req      string
}

// CopyPart is the part of a copy from one region to another. Its blocks lie inside the regions. A
// written block overlaps no other block of the copy, read or written.
type CopyPart struct {
	Src, Dst *mem.Region
	blocks   []CopyBlock    // of a COPY
	pages    []msg.LoadPage // of a LOAD: those of all parts
	tensor   msg.LoadPart
}

// Len is the number of blocks.
func (p *CopyPart) Len() int { return len(p.blocks) + len(p.pages) }

// Block returns block i.
func (p *CopyPart) Block(i int) CopyBlock {
	if p.pages == nil {
		return p.blocks[i]
	}
	x, at := p.pages[i], &p.tensor
	return CopyBlock{SrcOff: at.SrcBase + uint64(x.Src)*at.SrcStride,
		DstOff: at.DstBase + uint64(x.Dst)*at.DstStride, Len: at.Len}
}

// copyRequest is a decoded COPY or LOAD.
type copyRequest struct {
	Copy
	what       string
	after      uint64
	deadlineMS uint64
	added      []*addedRegion // that it accesses
	flag       *loadFlag      // of a LOAD
}

func (w *worker) copyLocked(rec board.Record) error {
	l, err := w.openLocked(rec, false)
	if err != nil {
		return err
	}
	decode := w.decodeCopyLocked
	if rec.Type == board.RecLoad {
		decode = w.decodeLoadLocked
	}
	q, err := decode(rec.Body)
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
	l.isCopy, l.load = true, q.flag
	w.copies++
	l.useLocked(q.added)
	q.Lease, q.Deadline = w.leaseID(l), w.s.duration(q.deadlineMS, w.s.opt.Deadline)
	w.beginLocked(l, q.after, q.Deadline, func(left time.Duration) {
		q.Deadline = left
		w.starts = append(w.starts, func() { w.s.opt.Copy(w.pub, q.Copy) })
	})
	return nil
}

func (w *worker) decodeCopyLocked(body []byte) (q copyRequest, err error) {
	q.what = "COPY"
	m, err := msg.DecodeCopy(body)
	if err != nil {
		return q, err
	}
	q.after, q.deadlineMS, q.Req = m.StreamMark, m.DeadlineMS, m.Req
	part := CopyPart{blocks: m.Blocks}
	if part.Src, part.Dst, err = w.copyRegionsLocked(&q, "src", m.Src, "dst", m.Dst); err != nil {
		return q, err
	}
	q.Parts = []CopyPart{part}
	return q, checkBlocks(&part)
}

// copyRegionsLocked returns the two regions of a part, and adds those that may be dropped to the
// request's.
func (w *worker) copyRegionsLocked(q *copyRequest, srcField string, srcNumber uint32,
	dstField string, dstNumber uint32) (src, dst *mem.Region, err error) {
	for _, r := range []struct {
		field  string
		number uint32
		to     **mem.Region
	}{{srcField, srcNumber, &src}, {dstField, dstNumber, &dst}} {
		region, a, err := w.regionLocked(uint64(r.number))
		if err != nil {
			return nil, nil, &msg.Error{Message: q.what, Field: r.field, Problem: err.Error(),
				Remedy: "name regions by their numbers, as in REGISTER and ADD_REGIONS"}
		}
		if *r.to = region; a != nil && !slices.Contains(q.added, a) {
			q.added = append(q.added, a)
		}
	}
	return src, dst, nil
}

// checkBlocks refuses blocks outside their regions, and lists whose result would depend on the
// order of copying.
func checkBlocks(p *CopyPart) error {
	refused := func(block int, problem, remedy string) error {
		return &msg.Error{Message: "COPY", Field: fmt.Sprintf("blocks[%d]", block), Problem: problem,
			Remedy: remedy}
	}
	spans := make([]copySpan, 0, 2*len(p.blocks))
	for i, b := range p.blocks {
		err := errors.Join(p.Src.Check(b.SrcOff, b.Len), p.Dst.Check(b.DstOff, b.Len))
		if b.Len == 0 {
			err = errors.New("has no bytes")
		}
		if err != nil {
			return refused(i, err.Error(), "send {src_off, dst_off, len} inside both regions")
		}
		spans = append(spans, copySpan{b.DstOff, b.DstOff + b.Len, i, true})
		if p.Src == p.Dst {
			spans = append(spans, copySpan{b.SrcOff, b.SrcOff + b.Len, i, false})
		}
	}
	if a, b := clash(spans); a >= 0 {
		return refused(b, fmt.Sprintf("overlaps bytes that blocks[%d] reads or writes", a),
			"write each byte once, and no byte that the same copy reads")
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
