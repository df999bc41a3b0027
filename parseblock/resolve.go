package parseblock

import (
	"fmt"
	"sync/atomic"

	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/transfer"
)

// Resolver binds a plan to one engine's memory: it turns chunks into pieces of that engine's
// regions. Append may run concurrently with itself and with SetTables.
type Resolver struct {
	plan   *Plan
	layout *layout.Layout
	segs   [][]sideTrack // of each pair of each segment
	// of each segment: every full page is one piece per pair, in its own block of the table
	plain  []bool
	tables atomic.Pointer[[][]uint32]
}

// sideTrack locates a pair's cells on one side.
type sideTrack struct {
	place
	// a full page or a tail page is one piece of memory, in the order of the space
	full, tail bool
	page       uint64 // bytes of the pair in a full page
}

// Side binds the plan to one engine's layout and block tables. A source's tables may still be
// short: blocks beyond them cannot be resolved until SetTables brings longer tables.
func (p *Plan) Side(reg *Registry, l *layout.Layout, tables [][]uint32) (*Resolver, error) {
	var links [][]pair // nil: the plan's own
	var err error
	receives := true
	switch {
	case l == p.dst:
	case l == p.src:
		receives = false
	case l.Geometry() == p.dst.Geometry():
		links, err = link(reg, p.src, l, p.share)
	case l.Geometry() == p.src.Geometry():
		receives = false
		links, err = link(reg, l, p.dst, p.share)
	default:
		err = refuseGeometry(l, p.dst)
	}
	if err != nil {
		return nil, err
	}
	n := 0
	for i := range p.segs {
		n += len(p.segs[i].pairs)
	}
	s := &Resolver{plan: p, layout: l, segs: make([][]sideTrack, len(p.segs)), plain: make([]bool,
		len(p.segs))}
	all := make([]sideTrack, n)
	for i := range p.segs {
		seg := &p.segs[i]
		pairs := seg.pairs
		if links != nil {
			pairs = links[i]
		}
		s.segs[i], all = all[:len(pairs):len(pairs)], all[len(pairs):]
		s.plain[i] = !seg.state
		for k := range pairs {
			t := &s.segs[i][k]
			if t.place = pairs[k].from; receives {
				t.place = pairs[k].to
			}
			t.full, t.tail = t.dense(&seg.pairs[k], seg.pairs[k].rows), t.dense(&seg.pairs[k], seg.tails[k])
			t.page = seg.pairs[k].bytes()
			s.plain[i] = s.plain[i] && t.full && t.tiles == 1 && t.tileRows == seg.pairs[k].rows
		}
	}
	if err := s.SetTables(tables); err != nil {
		return nil, err
	}
	return s, nil
}

// dense reports whether the given rows from the start of a block of the receiver are one piece
// here.
func (t *sideTrack) dense(p *pair, rows uint64) bool {
	if p.unit != layout.UnitState && t.tileRows%p.rows != 0 && rows > p.step {
		return false
	}
	s := p.ordered(rows, &t.place, &t.place)
	return s.dims == 0
}

func refuseGeometry(l, dst *layout.Layout) error {
	e := &layout.Error{Field: "geometry", Value: "differs", Problem: "the layout is neither the " +
		"plan's source nor its receiver",
		Remedy: "bind the layouts that the plan was made from"}
	if diffs := layout.DiffGeometry(l, dst); len(diffs) > 0 {
		e.Value = fmt.Sprintf("%q", diffs)
	}
	return e
}

// SetTables replaces the block tables, which the caller must not change afterwards. It checks every
// id against the layout.
func (s *Resolver) SetTables(tables [][]uint32) error {
	of := s.layout.TablesOf()
	if len(tables) != len(of) {
		return &layout.Error{Field: "blocks", Value: fmt.Sprintf("%d tables", len(tables)),
			Problem: fmt.Sprintf("the layout has %d", len(of)), Remedy: "pass every block table of the " +
				"engine, in the layout's order"}
	}
	for ti, t := range tables {
		n := s.layout.Groups[of[ti].First].NumBlocks
		if i := outOfTable(t, n); i >= 0 {
			return &layout.Error{Field: fmt.Sprintf("blocks[%d][%d]", ti, i), Value: fmt.Sprint(t[i]),
				Problem: fmt.Sprintf("the group has %d blocks", n), Remedy: "pass the engine's own block ids"}
		}
	}
	s.tables.Store(&tables)
	return nil
}

// Covers reports whether the tables reach the end of the plan, as a receiver's must.
func (s *Resolver) Covers() error {
	of := s.plan.dst.TablesOf()
	for ti, t := range *s.tables.Load() {
		if n := s.plan.BlocksNeeded(of[ti].First); len(t) < n {
			return &layout.Error{Field: fmt.Sprintf("blocks[%d]", ti),
				Value:   fmt.Sprintf("%d blocks", len(t)),
				Problem: fmt.Sprintf("%d tokens need %d", s.plan.tokens, n), Remedy: "allocate the whole " +
					"prompt before asking for it"}
		}
	}
	return nil
}

// Append adds the memory of chunks r to dst, in transfer-space order, with adjacent pieces joined.
// On an error dst is returned unchanged. It allocates nothing while dst has room.
func (s *Resolver) Append(dst []layout.Piece, r transfer.Range) ([]layout.Piece, error) {
	p := s.plan
	err := p.space.Check(r)
	if err != nil {
		return dst, err
	}
	tables := *s.tables.Load()
	base := len(dst)
	for si := p.space.SegmentOf(r.First); si < len(p.segs); si++ {
		seg, bytes := p.space.Segment(si)
		if seg.First >= r.End() {
			break
		}
		lo := uint64(max(r.First, seg.First)-seg.First) * transfer.ChunkBytes
		hi := min(bytes, uint64(r.End()-seg.First)*transfer.ChunkBytes)
		if lo >= hi {
			continue
		}
		if dst, err = s.appendSegment(dst, base, si, tables, lo, hi); err != nil {
			return dst[:base], fmt.Errorf("chunks [%d, +%d): %w", r.First, r.Count, err)
		}
	}
	return dst, nil
}

// pageOf returns the page of the segment, counted from block0, that holds byte off. page is not 0
// if the segment has bytes.
func (s *segment) pageOf(off uint64) uint64 {
	pages, lead := s.lead()
	if off < lead {
		return 0
	}
	return uint64(pages) + min((off-lead)/s.page, uint64(s.full))
}

// start is the offset of page k in the segment.
func (s *segment) start(k uint64) uint64 {
	pages, lead := s.lead()
	if k < uint64(pages) {
		return 0
	}
	return lead + (k-uint64(pages))*s.page
}

func (s *Resolver) appendSegment(dst []layout.Piece, base, si int, tables [][]uint32, lo,
	hi uint64) ([]layout.Piece, error) {
	t := &s.plan.segs[si]
	if s.plain[si] {
		var err error
		if dst, lo, err = s.appendPages(dst, base, si, tables, lo, hi); err != nil {
			return dst, err
		}
	}
	lead, _ := t.lead()
	for lo < hi {
		k := t.pageOf(lo)
		last := k == uint64(lead+t.full)
		pos := t.start(k) // of the current pair, in the segment
		for i := range t.pairs {
			p, side := &t.pairs[i], &s.segs[si][i]
			first, rows, dense := uint64(0), p.rows, side.full
			if last {
				rows, dense = t.tails[i], side.tail
			}
			if k == 0 && t.cut != nil {
				first, dense = t.cut.rows[i], false
				rows -= first
			}
			end := pos + rows*p.heads*p.cols*p.cell
			if end <= lo {
				pos = end
				continue
			}
			n := min(end, hi) - lo
			w := walk{p: p, side: side, table: tables[side.table], row0: (uint64(t.block0)+k)*p.rows + first,
				rows: rows, dense: dense}
			if t.state {
				w.row0 = uint64(s.plan.tokens-1) / side.tokens
			}
			if err := w.reaches(); err != nil {
				return dst, err
			}
			dst = w.appendTo(dst, base, lo-pos, lo-pos+n)
			lo += n
			pos = end
			if lo >= hi {
				break
			}
		}
	}
	return dst, nil
}

// appendPages adds the pieces of bytes [lo, hi) of a plain segment that lie in full pages, and
// returns the start of the rest. Most caches, and most of their bytes, are plain: they need one
// division in all instead of several per page.
func (s *Resolver) appendPages(dst []layout.Piece, base, si int, tables [][]uint32, lo,
	hi uint64) ([]layout.Piece, uint64, error) {
	t, sides := &s.plan.segs[si], s.segs[si]
	pages, lead := t.lead()
	hi = min(hi, lead+uint64(t.full)*t.page)
	if lo < lead || lo >= hi {
		return dst, lo, nil
	}
	block := uint64(t.block0+pages) + (lo-lead)/t.page
	in, i := (lo-lead)%t.page, 0
	for ; in >= sides[i].page; i++ {
		in -= sides[i].page
	}
	for lo < hi {
		side := &sides[i]
		table := tables[side.table]
		if block >= uint64(len(table)) {
			return dst, lo, side.short(table, block)
		}
		n := min(side.page-in, hi-lo)
		dst = appendPiece(dst, base, side.reg, side.off+uint64(table[block])*side.block+in, n)
		lo, in = lo+n, 0
		if i++; i == len(sides) {
			i = 0
			block++
		}
	}
	return dst, lo, nil
}

// walk is the memory of one pair in one block of the receiver.
type walk struct {
	p     *pair
	side  *sideTrack
	table []uint32
	row0  uint64 // first row of the sequence; for a state, the block of the table
	rows  uint64
	dense bool
}

func (w *walk) reaches() error {
	need := w.row0
	if w.p.unit != layout.UnitState {
		need = (w.row0 + w.rows - 1) / (w.side.tileRows * w.side.tiles)
	}
	if need < uint64(len(w.table)) {
		return nil
	}
	return w.side.short(w.table, need)
}

// short is the error for a table that ends before a needed block.
func (t *sideTrack) short(table []uint32, need uint64) error {
	return &layout.Error{Field: fmt.Sprintf("blocks[%d]", t.table), Value: fmt.Sprintf("%d blocks",
		len(table)),
		Problem: fmt.Sprintf("block %d of the table is needed", need), Remedy: "request only blocks " +
			"that the table covers"}
}

// appendTo adds bytes [lo, hi) of the pair's content in the block.
func (w *walk) appendTo(dst []layout.Piece, base int, lo, hi uint64) []layout.Piece {
	p, side := w.p, w.side
	if w.dense {
		return appendPiece(dst, base, side.reg, w.at(0)+lo, hi-lo)
	}
	width := p.cols * p.cell // of a row of a head
	for lo < hi {
		c, b := lo/p.cell, lo%p.cell
		if p.colMajor {
			n := min(w.column(c)-b, hi-lo)
			dst = appendPiece(dst, base, side.reg, w.cellAt(c)+b, n)
			lo += n
			continue
		}
		col := uint64(0)
		if p.cols > 1 {
			c, col = c/p.cols, c%p.cols
		}
		row, head := c/p.heads, c%p.heads
		if p.headMajor {
			head, row = c/w.rows, c%w.rows
		}
		off := w.at(row) + head*side.head + col*side.col + b
		// Bytes over which memory and space advance together: the cell, the row, the adjacent heads
		// or rows.
		n := p.cell - b
		if p.cols == 1 || side.col == p.cell {
			n += (p.cols - 1 - col) * p.cell
			if p.headMajor {
				if side.row == width {
					n += w.more(row) * width
				}
			} else if p.heads == 1 || side.head == width {
				n += (p.heads - 1 - head) * width
				if side.row == p.heads*width {
					n += w.more(row) * side.row
				}
			}
		}
		n = min(n, hi-lo)
		dst = appendPiece(dst, base, side.reg, off, n)
		lo += n
	}
	return dst
}

// cellAt returns the offset of cell c of the block, counted in the order of a plane whose columns
// come before its rows.
func (w *walk) cellAt(c uint64) uint64 {
	col, row := c/w.rows, c%w.rows
	return w.at(row) + col/w.p.cols*w.side.head + col%w.p.cols*w.side.col
}

// column returns the number of bytes from cell c on that have the same order in memory and in the
// space: the rest of its column, and the following columns if they are adjacent.
func (w *walk) column(c uint64) uint64 {
	p, row := w.p, c%w.rows
	if w.side.row != p.cell {
		return p.cell
	}
	n := (1 + w.more(row)) * p.cell
	if whole := w.rows * p.cell; w.side.col == whole && w.more(0) == w.rows-1 {
		n += (p.cols - 1 - c/w.rows%p.cols) * whole
	}
	return n
}

func (w *walk) at(row uint64) uint64 {
	if w.p.unit == layout.UnitState {
		return w.side.off + uint64(w.table[w.row0])*w.side.block + row*w.side.row
	}
	return w.side.at(w.table, w.row0+row)
}

// more counts the following rows in the same kernel block.
func (w *walk) more(row uint64) uint64 {
	n := w.rows - 1 - row
	if w.p.unit != layout.UnitState {
		n = min(n, w.side.tileRows-1-(w.row0+row)%w.side.tileRows)
	}
	return n
}

func appendPiece(dst []layout.Piece, base int, region layout.RegionIndex, off,
	n uint64) []layout.Piece {
	if k := len(dst) - 1; k >= base && dst[k].Region == region && dst[k].Off+dst[k].Len == off {
		dst[k].Len += n
		return dst
	}
	return append(dst, layout.Piece{Region: region, Off: off, Len: n})
}

// Space returns the plan's space, so that a Resolver alone can serve as a sink or a source.
func (s *Resolver) Space() *transfer.Space { return s.plan.space }
