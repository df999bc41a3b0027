package parseblock

import (
	"fmt"
	"maps"

	"github.com/kvspray/kvspray/layout"
)

// place locates the cells of a pair on one side. Offsets are from the start of the region.
type place struct {
	off uint64 // of the first row and the first common head in block 0
	// strides between blocks of the table, and between kernel blocks of one block
	block, tile      uint64
	row, head, col   uint64 // strides of cells
	tileRows, tiles  uint64 // rows of a kernel block; kernel blocks of a block
	tokens           uint64 // of a block
	group, flat, reg int    // of the layer
	table            int    // block table of the group
}

// at returns the offset of a row of the sequence; the table must reach that row.
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

// pair is one plane of the receiver and the plane of the source with the same cells, cut to the
// heads that both have. It contains no block table: it is the template to which tables are applied.
type pair struct {
	from, to  place
	role      layout.Role
	unit      layout.Unit
	headMajor bool
	colMajor  bool
	turned    bool // the receiver keeps a state's matrix with exchanged axes
	cell      uint64
	heads     uint64
	cols      uint64
	rows      uint64 // of a block of the receiver, or of the whole state
	rowTokens uint64
	// rows that lie in one kernel block on both sides, counted from any multiple of step
	step    uint64
	full    shape       // of one step
	head0   uint64      // first head, counted in the model
	headsOf [2]headSpan // heads of the model in the source's plane and in the receiver's
}

// headSpan is a range of a model's heads.
type headSpan struct{ first, count uint32 }

// bytes is the number of bytes that the pair moves for a full block of the receiver, or for a
// state.
func (p *pair) bytes() uint64 { return p.rows * p.heads * p.cols * p.cell }

// shape describes the pieces of some rows: up to three strided axes, innermost first, around
// contiguous bytes.
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

// span returns the rows of tokens [start, end) of the sequence. An incomplete row does not count;
// an incomplete opaque block does.
func (p *pair) span(t layout.TokenRange) (first, end uint64, err error) {
	first, end = uint64(t.Start)/p.rowTokens, uint64(t.End)/p.rowTokens
	if p.unit == layout.UnitBlock {
		if uint64(t.Start)%p.rowTokens != 0 {
			return 0, 0, &layout.Error{Field: "tokens.start", Value: fmt.Sprint(t.Start),
				Problem: fmt.Sprintf("opaque pages only move whole, %d tokens each", p.rowTokens),
				Remedy:  "start at a block boundary"}
		}
		end = (uint64(t.End)-1)/p.rowTokens + 1
	}
	return first, end, nil
}

// sited is a plane with its layer.
type sited struct {
	layout.Plane
	g        *layout.Group
	l        *layout.Layer
	gi, flat int
	table    int
}

// halve replaces a plane of packed K and V by two planes.
func halve(in []sited) ([]sited, error) {
	out := make([]sited, 0, len(in)+1)
	for _, s := range in {
		if s.Role != layout.RoleKV {
			out = append(out, s)
			continue
		}
		key := keyBytes(&s.Plane)
		if key == 0 || s.Cols != 1 {
			return nil, refusePair(&s, nil, "cell_bytes", s.CellBytes, "cannot be divided into K and V",
				"use the same packing on both sides")
		}
		k, v := s, s
		k.Role, k.CellBytes, k.KeyBytes = layout.RoleK, key, 0
		v.Role, v.CellBytes, v.KeyBytes, v.Offset = layout.RoleV, s.CellBytes-key, 0, s.Offset+key
		out = append(out, k, v)
	}
	return out, nil
}

// keyBytes is the size of K in a cell of packed K and V: half by default, 0 if there is no half.
func keyBytes(p *layout.Plane) uint64 {
	switch {
	case p.Role != layout.RoleKV:
		return 0
	case p.KeyBytes != 0:
		return p.KeyBytes
	case p.CellBytes%2 == 0:
		return p.CellBytes / 2
	}
	return 0
}

func has(in []sited, r layout.Role) bool {
	for i := range in {
		if in[i].Role == r {
			return true
		}
	}
	return false
}

// pairUp matches the planes of one layer of the model, possibly several layers of a layout, in the
// receiver's order. Each side must have all planes of the other: a plane without a counterpart
// would silently stay behind. Mismatches are added to unlike.
func pairUp(from, to []sited, unlike *differences) ([]pair, error) {
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
	for i := range to {
		t := &to[i]
		var f *sited
		for k := range from {
			if from[k].Role != t.Role {
				continue
			}
			if f != nil {
				return nil, refusePair(f, t, t.Role.String(), "in two layers", "the source registers it twice",
					"register it once")
			}
			f = &from[k]
		}
		switch {
		case f == nil:
			unlike.add(Part(t.l.Name), t.Role.String(), "missing", "present")
			continue
		}
		f, t = alike(f, t)
		if unlike.compare(f, t) {
			continue
		}
		if p := newPair(f, t); p.heads > 0 {
			out = append(out, p)
		}
	}
	for i := range from {
		if !has(to, from[i].Role) {
			unlike.add(Part(from[i].l.Name), from[i].Role.String(), "present", "missing")
		}
	}
	return out, nil
}

// alike gives both planes cells of one number if one side keeps the numbers of K of a token apart
// (K transposed, as vLLM has it on CPUs) and the other side by side: the numbers are the same ones,
// in the same order.
func alike(f, t *sited) (from, to *sited) {
	switch {
	case t.Cols > 1 && f.Cols == 1:
		return numbers(f, t), t
	case f.Cols > 1 && t.Cols == 1:
		return f, numbers(t, f)
	}
	return f, t
}

// numbers is the plane p with the cells of other, if both have rows of as many bytes.
func numbers(p, other *sited) *sited {
	if p.Unit != layout.UnitToken || other.Unit != layout.UnitToken ||
		p.CellBytes != uint64(other.Cols)*other.CellBytes {
		return p
	}
	out := *p
	out.Cols, out.CellBytes, out.ColStride = other.Cols, other.CellBytes, other.CellBytes
	return &out
}

func refusePair(f, t *sited, field string, value any, problem, remedy string) error {
	s := t
	if s == nil {
		s = f
	}
	return &layout.Error{Field: fmt.Sprintf("layer %q: %s", s.l.Name, field), Value: fmt.Sprint(value),
		Problem: problem, Remedy: remedy}
}

// compare adds the reasons against copying one plane to another and reports whether there are any:
// the cells differ in meaning, or are opaque and differ in size.
func (d *differences) compare(f, t *sited) bool {
	a, b := kindOf(f), kindOf(t)
	if a == b && (t.Unit != layout.UnitBlock || f.g.TokensPerBlock == t.g.TokensPerBlock) {
		return false
	}
	if t.Unit == layout.UnitBlock && f.Unit == layout.UnitBlock &&
		f.g.TokensPerBlock != t.g.TokensPerBlock {
		d.add(Part(t.l.Name), t.Role.String()+" tokens_per_block", fmt.Sprint(f.g.TokensPerBlock),
			fmt.Sprint(t.g.TokensPerBlock))
	}
	for _, x := range a.fields() {
		for _, y := range b.fields() {
			if x.Name == y.Name && x.Value != y.Value {
				d.add(Part(t.l.Name), t.Role.String()+" "+x.Name, x.Value, y.Value)
			}
		}
	}
	return true
}

// err is nil without differences.
func (d *differences) err() error {
	if len(d.all) == 0 {
		return nil
	}
	first := d.all[0]
	rest := differences{all: d.all[1:], left: d.left}
	e := &layout.Error{Field: first.name(), Value: first.a + " and " + first.b}
	for _, more := range rest.text(func(f *difference) string {
		return fmt.Sprintf("%s = %s and %s", f.name(), f.a, f.b)
	}) {
		e.Value += "; " + more
	}
	e.Problem, e.Remedy = "the two sides differ, and transfers copy bytes without conversion",
		"use equal models, cache dtypes and speculation on both sides, and equal block sizes "+
			"if pages are opaque"
	return e
}

// name is the field with its layers.
func (f *difference) name() string {
	if f.more == 0 {
		return fmt.Sprintf("layer %q: %s", f.layer, f.field)
	}
	return fmt.Sprintf("layer %q and %d more: %s", f.layer, f.more, f.field)
}

// newPair returns the copy of a plane to one of its kind. Heads is 0 if the ranks share no head.
func newPair(f, t *sited) pair {
	if f.Transposed != t.Transposed {
		f.Plane.Rows, f.Plane.Cols = f.Cols, f.Rows
		f.RowStride, f.ColStride = f.ColStride, f.RowStride
	}
	first := max(f.FirstHead, t.FirstHead)
	end := min(f.FirstHead+f.Heads, t.FirstHead+t.Heads)
	p := pair{from: placeOf(f, first), to: placeOf(t, first), role: t.Role, unit: t.Unit,
		headMajor: t.HeadMajor, colMajor: t.ColMajor, cell: t.CellBytes,
		cols: uint64(t.Cols), rows: uint64(t.Rows), rowTokens: uint64(max(t.RowTokens, 1)),
		head0:  uint64(first),
		turned: t.Transposed, headsOf: [2]headSpan{{f.FirstHead, f.Heads}, {t.FirstHead, t.Heads}}}
	if end > first {
		p.heads = uint64(end - first)
	}
	p.step = gcd(p.from.tileRows, p.to.tileRows)
	if t.Unit == layout.UnitState {
		p.step = p.rows
	}
	p.full = p.shape(p.step)
	return p
}

// packingParams returns the parameters that describe the packing of an opaque page, not its heads
// or tokens: a head is as opaque as a page.
func packingParams(g *layout.Group) map[string]int64 {
	out := maps.Clone(g.Params)
	for _, n := range [...]param{paramHeads, paramKVHeads, paramTPRank, paramTPSize, paramWindow,
		paramPrefixCache} {
		delete(out, known[n].name)
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
	p := place{block: s.l.BlockStride, tile: s.TileStride, row: s.RowStride, head: s.HeadStride,
		col:      s.ColStride,
		tileRows: uint64(s.TileRows), tiles: 1, tokens: uint64(s.g.TokensPerBlock), group: s.gi,
		table: s.table, flat: s.flat, reg: s.l.Region}
	// If the ranks share no head the difference wraps, and the pair is dropped.
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
