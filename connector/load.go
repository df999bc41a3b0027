package connector

import (
	"cmp"
	"errors"
	"fmt"
	"math/bits"
	"slices"

	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/internal/board"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/transfer"
)

// loadFlag is the load flag of a LOAD: value+n once the first n of its parts have arrived.
type loadFlag struct {
	flag  int
	value uint64
}

func (w *worker) decodeLoadLocked(body []byte) (q copyRequest, err error) {
	q.what, q.Load = "LOAD", true
	m, err := msg.DecodeLoad(body)
	if err != nil {
		return q, err
	}
	q.after, q.deadlineMS, q.Req = m.After, m.DeadlineMS, m.Req
	q.flag = loadFlag{int(m.Flag), m.Value}
	if int64(m.Flag) >= int64(w.flags.Layers()) || m.Value >= board.Poison-msg.MaxLoadParts {
		return q, loadError("flag", fmt.Sprintf("%d (value %d), but the flags memory has %d load flags",
			m.Flag, m.Value, w.flags.Layers()), "name a flag below that, with a value below 2^62")
	}
	if n := len(m.Parts) * len(m.Pages); n > msg.MaxLoadBlocks {
		return q, loadError("pages", fmt.Sprintf("%d of %d parts", len(m.Pages), len(m.Parts)),
			fmt.Sprintf("send at most %d of all parts; split the list", msg.MaxLoadBlocks))
	}
	span, err := spanOf(m.Pages)
	if err != nil {
		return q, err
	}
	q.Parts = make([]CopyPart, len(m.Parts))
	spans := make([]partSpan, 0, len(m.Parts))
	for i := range m.Parts {
		p, part, field := &m.Parts[i], &q.Parts[i], fmt.Sprintf("parts[%d]", i)
		part.pages, part.place = m.Pages, *p
		part.Src, part.Dst, err = w.copyRegionsLocked(&q, field+".src", p.Src, field+".dst", p.Dst)
		if err != nil {
			return q, err
		}
		from, to, err := span.check(part)
		if err != nil {
			return q, loadError(field, err.Error(), "send pages of at least a byte, inside both "+
				"regions and apart")
		}
		spans = append(spans, partSpan{part.Dst, from, to, i})
	}
	return q, apart(q.Parts, spans)
}

func loadError(field, problem, remedy string) error {
	return &msg.Error{Message: "LOAD", Field: field, Problem: problem, Remedy: remedy}
}

// pageSpan has the least and the greatest number of a list of pages, on either side.
type pageSpan struct{ srcTo, dstFrom, dstTo uint64 }

// spanOf refuses a list that writes a page twice.
func spanOf(pages []msg.LoadPage) (pageSpan, error) {
	var s pageSpan
	dst := make([]uint32, len(pages))
	for i, p := range pages {
		s.srcTo, dst[i] = max(s.srcTo, uint64(p.Src)), p.Dst
	}
	slices.Sort(dst)
	for i := 1; i < len(dst); i++ {
		if dst[i] == dst[i-1] {
			return s, loadError("pages", fmt.Sprintf("page %d is written twice", dst[i]),
				"write each page once")
		}
	}
	s.dstFrom, s.dstTo = uint64(dst[0]), uint64(dst[len(dst)-1])
	return s, nil
}

// check returns the range of the destination in which the part's pages lie.
func (s pageSpan) check(at *CopyPart) (from, to uint64, err error) {
	p := &at.place
	switch {
	case p.Len == 0:
		return 0, 0, errors.New("its pages have no bytes")
	case p.DstStride < p.Len && s.dstFrom != s.dstTo:
		return 0, 0, fmt.Errorf("pages of %d bytes, %d bytes apart, overlap", p.Len, p.DstStride)
	}
	if _, err = place(at.Src, p.SrcBase, p.SrcStride, s.srcTo, p.Len); err != nil {
		return 0, 0, err
	}
	if to, err = place(at.Dst, p.DstBase, p.DstStride, s.dstTo, p.Len); err != nil {
		return 0, 0, err
	}
	return p.DstBase + s.dstFrom*p.DstStride, to + p.Len, nil
}

// place returns where a page is. It is the last one: those before it are inside, too.
func place(r *mem.Region, base, stride, page, n uint64) (uint64, error) {
	high, low := bits.Mul64(stride, page)
	off, carry := bits.Add64(base, low, 0)
	if high != 0 || carry != 0 {
		return 0, fmt.Errorf("page %d, %d bytes apart from %d on: %w", page, stride, base,
			mem.ErrBounds)
	}
	return off, r.Check(off, n)
}

// partSpan is the range of a region that a part writes into.
type partSpan struct {
	region   *mem.Region
	from, to uint64
	part     int
}

// apart refuses parts of which one writes where another one reads or writes.
func apart(parts []CopyPart, spans []partSpan) error {
	byRegion := func(a, b partSpan) int {
		x, y := a.region.ID(), b.region.ID()
		return cmp.Or(slices.Compare(x[:], y[:]), cmp.Compare(a.from, b.from))
	}
	slices.SortFunc(spans, byRegion)
	written := map[*mem.Region]int{}
	for i, s := range spans {
		written[s.region] = s.part
		if i == 0 || spans[i-1].region != s.region || spans[i-1].to <= s.from {
			continue
		}
		return loadError(fmt.Sprintf("parts[%d]", s.part), fmt.Sprintf("writes between pages of "+
			"parts[%d]", spans[i-1].part), "send two parts of one region as two loads")
	}
	for i, p := range parts {
		if other, ok := written[p.Src]; ok {
			return loadError(fmt.Sprintf("parts[%d].src", i), fmt.Sprintf("parts[%d] writes to this "+
				"region", other), "read and write different regions")
		}
	}
	return nil
}

// Loaded raises the load flag of a LOAD: its first n parts have arrived. A flag below the load's
// value stays: loads before this one have not ended, and their parts are not there.
func (s *Server) Loaded(w *engines.Worker, id transfer.LeaseID, n int) {
	if state, ok := w.Session.(*worker); ok && state.s == s {
		state.loaded(id, n)
	}
}

func (w *worker) loaded(id transfer.LeaseID, n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	l := w.leases[id.ID]
	if w.closed || l == nil || !l.isCopy || w.pub.Boot != id.Boot {
		return
	}
	if f := l.loads; w.flags.Load(f.flag) >= f.value {
		w.flags.SetLoad(f.flag, f.value+uint64(n))
	}
}
