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

// maxLoadValue keeps every value of a load below [board.FlagLimit].
const maxLoadValue = board.FlagLimit - msg.MaxLoadParts - 1

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
	q.after, q.deadlineMS, q.Req = m.StreamMark, m.DeadlineMS, m.Req
	q.flag = &loadFlag{int(m.Flag), m.Value}
	if int64(m.Flag) >= int64(w.flags.Layers()) {
		return q, loadError("flag", fmt.Sprintf("%d, but the flags memory has %d load flags", m.Flag,
			w.flags.Layers()), "name a flag below that")
	}
	if m.Value > maxLoadValue {
		return q, loadError("value", fmt.Sprint(m.Value), fmt.Sprintf("send at most %d",
			uint64(maxLoadValue)))
	}
	if n := len(m.Parts) * len(m.Pages); n > msg.MaxLoadBlocks {
		return q, loadError("pages", fmt.Sprintf("%d pages of each of %d parts", len(m.Pages),
			len(m.Parts)), fmt.Sprintf("send at most %d of all parts; split the list", msg.MaxLoadBlocks))
	}
	span, err := spanOf(m.Pages)
	if err != nil {
		return q, err
	}
	q.Parts = make([]CopyPart, len(m.Parts))
	spans := make([]partSpan, 0, len(m.Parts))
	for i := range m.Parts {
		p, part, field := &m.Parts[i], &q.Parts[i], fmt.Sprintf("parts[%d]", i)
		part.pages, part.tensor = m.Pages, *p
		part.Src, part.Dst, err = w.copyRegionsLocked(&q, field+".src", p.Src, field+".dst", p.Dst)
		if err != nil {
			return q, err
		}
		if first := &q.Parts[0]; part.Src.Device() != first.Src.Device() ||
			part.Dst.Device() != first.Dst.Device() {
			return q, loadError(field, "is on another device than parts[0]",
				"send the parts of two devices as two loads")
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

// pageSpan has numbers of a list of pages.
type pageSpan struct{ srcLast, dstFirst, dstLast uint64 }

// spanOf refuses a list that writes a page twice.
func spanOf(pages []msg.LoadPage) (pageSpan, error) {
	var s pageSpan
	dst := make([]uint32, len(pages))
	for i, p := range pages {
		s.srcLast, dst[i] = max(s.srcLast, uint64(p.Src)), p.Dst
	}
	slices.Sort(dst)
	for i := 1; i < len(dst); i++ {
		if dst[i] == dst[i-1] {
			return s, loadError("pages", fmt.Sprintf("page %d is written twice", dst[i]),
				"write each page once")
		}
	}
	s.dstFirst, s.dstLast = uint64(dst[0]), uint64(dst[len(dst)-1])
	return s, nil
}

// check returns the range of the destination in which the part's pages lie.
func (s pageSpan) check(part *CopyPart) (from, to uint64, err error) {
	p := &part.tensor
	switch {
	case p.Len == 0:
		return 0, 0, errors.New("its pages have no bytes")
	case p.DstStride < p.Len && s.dstFirst != s.dstLast:
		return 0, 0, fmt.Errorf("pages of %d bytes, %d bytes apart, overlap", p.Len, p.DstStride)
	}
	if _, err = pageAt(part.Src, p.SrcBase, p.SrcStride, s.srcLast, p.Len); err != nil {
		return 0, 0, err
	}
	if to, err = pageAt(part.Dst, p.DstBase, p.DstStride, s.dstLast, p.Len); err != nil {
		return 0, 0, err
	}
	return p.DstBase + s.dstFirst*p.DstStride, to + p.Len, nil
}

// pageAt returns the offset of a tensor's last page, and refuses it outside the region. The pages
// before it are then inside, too.
func pageAt(r *mem.Region, base, stride, page, n uint64) (uint64, error) {
	high, low := bits.Mul64(stride, page)
	off, carry := bits.Add64(base, low, 0)
	if high != 0 || carry != 0 {
		return 0, fmt.Errorf("page %d, %d bytes apart from %d on: %w", page, stride, base, mem.ErrBounds)
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
	if w.closed || l == nil || l.load == nil || w.pub.Boot != id.Boot {
		return
	}
	if f := l.load; w.flags.Load(f.flag) >= f.value {
		w.flags.SetLoad(f.flag, f.value+uint64(n))
	}
}
