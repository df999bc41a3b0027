package parseblock

import (
	"fmt"
	"maps"

	"github.com/kvspray/kvspray/layout"
)

// place is where one side has the cells of a pair. Offsets are from the start of the region.
type place struct {
	off              uint64 // of the first row and the first common head in block 0
	block, tile      uint64 // strides between blocks of the table, and between kernel blocks of one block
	row, head, col   uint64 // strides of cells
	tileRows, tiles  uint64 // rows of a kernel block; kernel blocks of a block
	tokens           uint64 // of a block
	group, flat, reg int    // of the layer
}

// at is the offset of a row of the sequence; the table must reach to it.
func (p *place) at(table []uint32, row uint64) uint64 {
	t := row / p.tileRows
	b := t
	off := p.off + (row-t*p.tileRows)*p.row
	if p.tiles != 1 {
		b = t / p.tiles
		off += (t - b*p.tiles) * p.tile
	}
	return off + uint64(table[b])*p.block
}

// pair is one plane of the receiver and the plane of the source that holds the same cells, cut to the heads that both have.
// It knows no block table: it is the template that tables are put through.
type pair struct {
	from, to  place
	role      layout.Role
	unit      layout.Unit
	headMajor bool
	colMajor  bool
	cell      uint64
	heads     uint64
	cols      uint64
	rows      uint64 // of a block of the receiver; of the whole state
	rowTokens uint64
	step      uint64 // rows that lie in one kernel block on both sides, counted from any multiple of it
	full      shape  // of a step
	head0     uint64 // the first of the heads in the model
}

// bytes is what the pair moves of a full block of the receiver, or of a state.
func (p *pair) bytes() uint64 { return p.rows * p.heads * p.cols * p.cell }

// shape is the pieces of some rows: up to three strided axes, innermost first, around contiguous bytes.
type shape struct {
	len      uint64
	dims     int
	n        [3]uint64
	src, dst [3]uint64
}

func (s *shape) add(n, src, dst uint64) {
	switch k := s.dims - 1; {
	case n == 1:
	case k < 0 && src == s.len && dst == s.len:
		s.len *= n
	case k >= 0 && src == s.n[k]*s.src[k] && dst == s.n[k]*s.dst[k] && s.n[k]*n < maxCount:
		s.n[k] *= n
	default:
		s.n[s.dims], s.src[s.dims], s.dst[s.dims] = n, src, dst
		s.dims++
	}
}

func (p *pair) shape(rows uint64) shape {
	return p.ordered(rows, &p.from, &p.to)
}

// ordered puts the axes of some rows in the order of the transfer space.
func (p *pair) ordered(rows uint64, from, to *place) shape {
	s := shape{len: p.cell}
	switch {
	case p.colMajor:
		s.add(rows, from.row, to.row)
		s.add(p.cols, from.col, to.col)
		s.add(p.heads, from.head, to.head)
	case p.headMajor:
		s.add(p.cols, from.col, to.col)
		s.add(rows, from.row, to.row)
		s.add(p.heads, from.head, to.head)
	default:
		s.add(p.cols, from.col, to.col)
		s.add(p.heads, from.head, to.head)
		s.add(rows, from.row, to.row)
	}
	return s
}

// span is the rows that tokens [start, end) of the sequence stand for. A row that is begun and not complete is none, but an
// opaque block that is begun is one.
func (p *pair) span(t layout.TokenRange) (first, end uint64, err error) {
	first, end = uint64(t.Start)/p.rowTokens, uint64(t.End)/p.rowTokens
	if p.unit == layout.UnitBlock {
		if uint64(t.Start)%p.rowTokens != 0 {
			return 0, 0, &layout.Error{Field: "tokens.start", Value: fmt.Sprint(t.Start),
				Problem: fmt.Sprintf("opaque pages only move whole, %d tokens each", p.rowTokens), Remedy: "start at a block boundary"}
		}
		end = (uint64(t.End)-1)/p.rowTokens + 1
	}
	return first, end, nil
}

// sited is a plane and the layer that has it.
type sited struct {
	layout.Plane
	g        *layout.Group
	l        *layout.Layer
	gi, flat int
}

// halve replaces a plane of packed K and V by its two halves.
func halve(in []sited) ([]sited, error) {
	out := make([]sited, 0, len(in)+1)
	for _, s := range in {
		if s.Role != layout.RoleKV {
			out = append(out, s)
			continue
		}
		if s.CellBytes%2 != 0 || s.Cols != 1 {
			return nil, refusePair(&s, nil, "cell_bytes", s.CellBytes, "has no halves of K and V", "use the same packing on both sides")
		}
		k := s
		k.Role, k.CellBytes = layout.RoleK, s.CellBytes/2
		v := k
		v.Role, v.Offset = layout.RoleV, s.Offset+k.CellBytes
		out = append(out, k, v)
	}
	return out, nil
}

func has(in []sited, r layout.Role) bool {
	for i := range in {
		if in[i].Role == r {
			return true
		}
	}
	return false
}

// pairUp matches the planes of one layer of the model, which may be several layers of a layout, in the receiver's order. All
// that one side has the other must have too: what has no counterpart would stay behind silently.
func pairUp(from, to []sited) ([]pair, error) {
	var err error
	if has(from, layout.RoleKV) != has(to, layout.RoleKV) {
		if from, err = halve(from); err != nil {
			return nil, err
		}
		if to, err = halve(to); err != nil {
			return nil, err
		}
	}
	out := make([]pair, 0, len(to))
	used := 0
	for i := range to {
		t := &to[i]
		var f *sited
		for k := range from {
			if from[k].Role != t.Role {
				continue
			}
			if f != nil {
				return nil, refusePair(f, t, t.Role.String(), "twice", "the source has it in two layers", "register it once")
			}
			f = &from[k]
		}
		if f == nil {
			return nil, refusePair(nil, t, t.Role.String(), "missing", "the source has no such plane", "use caches of one kind on both sides")
		}
		used++
		p, err := newPair(f, t)
		if err != nil {
			return nil, err
		}
		if p.heads > 0 {
			out = append(out, p)
		}
	}
	if used != len(from) {
		for i := range from {
			if !has(to, from[i].Role) {
				return nil, refusePair(&from[i], nil, from[i].Role.String(), "missing", "the receiver has no place for it",
					"use caches of one kind on both sides")
			}
		}
	}
	return out, nil
}

func refusePair(f, t *sited, field string, value any, problem, remedy string) error {
	s := t
	if s == nil {
		s = f
	}
	return &layout.Error{Field: fmt.Sprintf("layer %q: %s", s.l.Name, field), Value: fmt.Sprint(value), Problem: problem, Remedy: remedy}
}

// newPair checks that the cells of two planes mean the same, byte for byte. Heads is 0 where the ranks have none in common.
func newPair(f, t *sited) (pair, error) {
	differ := func(field string, a, b any, remedy string) (pair, error) {
		return pair{}, refusePair(f, t, fmt.Sprintf("%s %s", t.Role, field), fmt.Sprintf("%v and %v", a, b),
			"the two sides differ; what moves is copied, never converted", remedy)
	}
	const same = "use equal models and cache dtypes on both sides"
	if f.Transposed != t.Transposed {
		f.Plane.Rows, f.Plane.Cols = f.Cols, f.Rows
		f.RowStride, f.ColStride = f.ColStride, f.RowStride
	}
	switch {
	case f.Unit != t.Unit:
		return differ("unit", f.Unit, t.Unit, "use caches of one kind on both sides")
	case f.Format != t.Format:
		return differ("format", orPlain(f.Format), orPlain(t.Format), same)
	case f.AllHeads != t.AllHeads:
		return differ("heads", f.AllHeads, t.AllHeads, "register the KV heads of the model (kv_heads) and this rank on both sides")
	case f.CellBytes != t.CellBytes || f.Cols != t.Cols:
		return differ("bytes of a head of a token", uint64(f.Cols)*f.CellBytes, uint64(t.Cols)*t.CellBytes, same)
	case f.RowTokens != t.RowTokens && t.Unit != layout.UnitBlock:
		return differ("tokens of a row", f.RowTokens, t.RowTokens, same)
	case t.Unit == layout.UnitState && f.Rows != t.Rows:
		return differ("rows of state", f.Rows, t.Rows, "use the same convolution and the same speculation on both sides")
	case t.Unit == layout.UnitBlock && f.g.TokensPerBlock != t.g.TokensPerBlock:
		return differ("tokens_per_block", f.g.TokensPerBlock, t.g.TokensPerBlock, "opaque pages only move whole: use equal block sizes on both sides")
	case t.Unit == layout.UnitBlock && !maps.Equal(packingParams(f.g), packingParams(t.g)):
		return differ("params", f.g.Params, t.g.Params, "opaque pages only move whole: use equal backends and parallelism on both sides")
	}
	if a, b := f.g.Params["window"], t.g.Params["window"]; a != 0 && (b == 0 || b > a) {
		return differ("params.window", a, b, "the source has only its own window: use equal models on both sides")
	}
	// The receiver's first block must not begin before the source's first one that is still there.
	if f.g.Params["window"] != 0 && f.g.TokensPerBlock%t.g.TokensPerBlock != 0 {
		return differ("tokens_per_block", f.g.TokensPerBlock, t.g.TokensPerBlock,
			"a sliding window needs blocks at the source that are as large as the receiver's, or a multiple")
	}
	first := max(f.FirstHead, t.FirstHead)
	end := min(f.FirstHead+f.Heads, t.FirstHead+t.Heads)
	p := pair{from: placeOf(f, first), to: placeOf(t, first), role: t.Role, unit: t.Unit, headMajor: t.HeadMajor, colMajor: t.ColMajor, cell: t.CellBytes,
		cols: uint64(t.Cols), rows: uint64(t.Rows), rowTokens: uint64(max(t.RowTokens, 1)), head0: uint64(first)}
	if end > first {
		p.heads = uint64(end - first)
	}
	p.step = gcd(p.from.tileRows, p.to.tileRows)
	if t.Unit == layout.UnitState {
		p.step = p.rows
	}
	p.full = p.shape(p.step)
	return p, nil
}

// packingParams are those that say how an opaque page is packed, and not which heads it holds: a head is as opaque as a page.
func packingParams(g *layout.Group) map[string]int64 {
	out := maps.Clone(g.Params)
	for _, k := range [...]string{"heads", "kv_heads", "tp_rank", "tp_size"} {
		delete(out, k)
	}
	return out
}

func orPlain(format string) string {
	if format == "" {
		return "plain"
	}
	return format
}

func placeOf(s *sited, firstHead uint32) place {
	p := place{block: s.l.BlockStride, tile: s.TileStride, row: s.RowStride, head: s.HeadStride, col: s.ColStride,
		tileRows: uint64(s.TileRows), tiles: 1, tokens: uint64(s.g.TokensPerBlock), group: s.gi, flat: s.flat, reg: s.l.Region}
	// Where the ranks share no head the difference wraps, and the pair is dropped.
	p.off = s.l.Base + s.Offset + uint64(firstHead-s.FirstHead)*s.HeadStride
	if p.tileRows == 0 || p.tileRows >= uint64(s.Rows) {
		p.tileRows = uint64(s.Rows)
	} else {
		p.tiles = uint64(s.Rows) / p.tileRows
	}
	return p
}

func gcd(a, b uint64) uint64 {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}
