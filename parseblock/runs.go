package parseblock

import (
	"slices"

	"github.com/kvspray/kvspray/layout"
)

// maxCount bounds the pieces of one axis of a run.
const maxCount = 1 << 31

// maxSteps bounds the steps of a pair that are processed together: the offsets of one side, the
// offsets of the other, which steps touch, which are evenly spaced. Each question has its own loop,
// and the data between the loops stays in the first-level cache.
const maxSteps = 128

// runWriter coalesces the steps of pairs into runs. A row is one contiguous piece, or equally
// spaced pieces. It grows while the next step touches it on both sides. Equally spaced rows of
// equal size become one run.
type runWriter struct {
	runs []layout.Run
	base int // earlier runs belong to the caller
	kind rowKind

	// Rows that are not in a run yet. Between calls there is at most one, which may still grow.
	rows           int
	src, dst, size [1 + maxSteps]uint64 // size is in bytes or pieces
}

// rowKind is the unit of rows: bytes, or pieces.
type rowKind struct {
	len      uint64 // of a piece; 0: the unit is a byte
	src, dst uint64 // distance between pieces; 1 for bytes
}

// maxSize is the largest size of a row.
func (k *rowKind) maxSize() uint64 {
	if k.len == 0 {
		return 1 << 63
	}
	return maxCount
}

// walk adds rows [r, end) of a pair of token planes, or whole opaque blocks.
func (w *runWriter) walk(p *pair, from, to []uint32, r, end uint64) {
	if in := r % p.step; in != 0 {
		n := min(p.step-in, end-r)
		s := p.shape(n)
		w.one(p.from.at(from, r), p.to.at(to, r), &s)
		r += n
	}
	if n := (end - r) / p.step; n > 0 {
		w.steps(p, from, to, r/p.step, n)
		r += n * p.step
	}
	if r < end {
		s := p.shape(end - r)
		w.one(p.from.at(from, r), p.to.at(to, r), &s)
	}
}

// steps adds n whole steps of a pair, starting at the given one.
func (w *runWriter) steps(p *pair, from, to []uint32, first, n uint64) {
	w.begin(&p.full)
	f, t := p.from.cursor(from, first, p.step), p.to.cursor(to, first, p.step)
	for n > 0 {
		k := min(n, maxSteps)
		end := uint64(w.rows) + k
		f.next(w.src[w.rows:end])
		t.next(w.dst[w.rows:end])
		w.add(int(k), &p.full)
		n -= k
	}
}

// one adds a shape at one position.
func (w *runWriter) one(src, dst uint64, s *shape) {
	w.begin(s)
	w.src[w.rows], w.dst[w.rows] = src, dst
	w.add(1, s)
}

// begin prepares for rows of a shape; rows of another kind can no longer grow.
func (w *runWriter) begin(s *shape) {
	kind := rowKind{src: 1, dst: 1}
	if s.dims > 0 {
		kind = rowKind{len: s.len, src: s.src[0], dst: s.dst[0]}
	}
	if kind != w.kind || s.dims > 1 {
		w.flush()
		w.kind = kind
	}
}

// add appends n shapes at the offsets that were set after the rows.
func (w *runWriter) add(n int, s *shape) {
	switch s.dims {
	case 0:
		w.join(n, s.len)
	case 1:
		w.join(n, s.n[0])
	default:
		w.grids(n, s)
	}
}

// join adds n rows of one size and merges adjacent ones.
func (w *runWriter) join(n int, size uint64) {
	src, dst, sizes := w.src[:w.rows+n], w.dst[:w.rows+n], w.size[:w.rows+n]
	k := w.rows - 1 // the row that may grow
	if k < 0 {
		sizes[0] = size
		k = 0
		n--
	}
	bySrc, byDst := size*w.kind.src, size*w.kind.dst
	endSrc, endDst := src[k]+sizes[k]*w.kind.src, dst[k]+sizes[k]*w.kind.dst
	limit := w.kind.maxSize() - size
	for i := len(src) - n; i < len(src); i++ {
		s, d := src[i], dst[i]
		if s == endSrc && d == endDst && sizes[k] <= limit {
			sizes[k] += size
			endSrc += bySrc
			endDst += byDst
			continue
		}
		k++
		src[k], dst[k], sizes[k] = s, d, size
		endSrc, endDst = s+bySrc, d+byDst
	}
	w.write(k)
	w.src[0], w.dst[0], w.size[0], w.rows = src[k], dst[k], sizes[k], 1
}

// flush writes the row that could still grow.
func (w *runWriter) flush() {
	w.write(w.rows)
	w.rows = 0
}

// write makes runs of the first n rows.
func (w *runWriter) write(n int) {
	src, dst, sizes := w.src[:n], w.dst[:n], w.size[:n]
	i := w.resume(src, dst, sizes)
	for i < n {
		size := sizes[i]
		var bySrc, byDst uint64
		j := i + 1
		if j < n && sizes[j] == size {
			bySrc, byDst = src[j]-src[i], dst[j]-dst[i]
			for j++; j < n && sizes[j] == size && src[j]-src[j-1] == bySrc && dst[j]-dst[j-1] == byDst; {
				j++
			}
		}
		r := w.more()
		r.SrcOff, r.DstOff = src[i], dst[i]
		if w.kind.len == 0 {
			r.SrcStride, r.DstStride, r.Count, r.Len = bySrc, byDst, uint32(j-i), size
			r.SrcOuter, r.DstOuter, r.Outer = 0, 0, 1
		} else {
			r.SrcStride, r.DstStride, r.Count, r.Len = w.kind.src, w.kind.dst, uint32(size), w.kind.len
			r.SrcOuter, r.DstOuter, r.Outer = bySrc, byDst, uint32(j-i)
		}
		i = j
	}
}

// resume adds rows to the last run while they continue it, and returns their number.
func (w *runWriter) resume(src, dst, sizes []uint64) int {
	k := len(w.runs) - 1
	if k < w.base {
		return 0
	}
	r := &w.runs[k]
	count, bySrc, byDst, size := &r.Count, &r.SrcStride, &r.DstStride, r.Len
	if w.kind.len == 0 {
		if r.Outer != 1 {
			return 0
		}
	} else {
		if w.kind != (rowKind{r.Len, r.SrcStride, r.DstStride}) || r.Count == 1 {
			return 0
		}
		count, bySrc, byDst, size = &r.Outer, &r.SrcOuter, &r.DstOuter, uint64(r.Count)
	}
	for i := range src {
		c := uint64(*count)
		switch {
		case sizes[i] != size || c >= maxCount:
			return i
		case c == 1:
			*bySrc, *byDst = src[i]-r.SrcOff, dst[i]-r.DstOff
		case src[i] != r.SrcOff+c**bySrc || dst[i] != r.DstOff+c**byDst:
			return i
		}
		*count++
	}
	return len(src)
}

// grids adds n shapes of two or three axes, each as its own run.
func (w *runWriter) grids(n int, s *shape) {
	outer := uint64(1)
	if s.dims == 3 {
		outer = s.n[2]
	}
	for i := range n {
		for k := range outer {
			r := w.more()
			r.SrcOff, r.DstOff, r.Len = w.src[i]+k*s.src[2], w.dst[i]+k*s.dst[2], s.len
			r.SrcStride, r.DstStride, r.Count = s.src[0], s.dst[0], uint32(s.n[0])
			r.SrcOuter, r.DstOuter, r.Outer = s.src[1], s.dst[1], uint32(s.n[1])
		}
	}
}

// more appends an empty run. The caller sets its fields one by one, because a copy of 64 bytes
// would take longer than the rest.
func (w *runWriter) more() *layout.Run {
	n := len(w.runs)
	if n == cap(w.runs) {
		w.runs = slices.Grow(w.runs, 1)
	}
	w.runs = w.runs[:n+1]
	return &w.runs[n]
}

// cursor returns the offsets of successive steps on one side.
type cursor struct {
	*place
	table []uint32 // from the current block on
	step  uint64   // bytes from a step to the next, in a kernel block
	per   uint64   // steps of a kernel block
	unit  uint64   // passed steps of the kernel block
	tile  uint64   // passed kernel blocks of the block
}

func (p *place) cursor(table []uint32, first, rows uint64) cursor {
	per := p.tileRows / rows
	tile := first / per
	return cursor{place: p, table: table[tile/p.tiles:], step: rows * p.row, per: per,
		unit: first % per, tile: tile % p.tiles}
}

// next sets the offsets of the next steps.
func (c *cursor) next(out []uint64) {
	off, block := c.off, c.block
	if c.per == 1 && c.tiles == 1 {
		for i, b := range c.table[:len(out)] {
			out[i] = off + uint64(b)*block
		}
		c.table = c.table[len(out):]
		return
	}
	for len(out) > 0 {
		n := min(uint64(len(out)), c.per-c.unit)
		at := off + uint64(c.table[0])*block + c.tile*c.place.tile + c.unit*c.step
		for i := range out[:n] {
			out[i] = at
			at += c.step
		}
		out = out[n:]
		if c.unit += n; c.unit < c.per {
			continue
		}
		c.unit = 0
		if c.tile++; c.tile == c.tiles {
			c.tile, c.table = 0, c.table[1:]
		}
	}
}
