package parseblock

import (
	"fmt"
	"sync/atomic"

	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/transfer"
)

// Plan is the transfer space of one receiving rank for one prompt: a segment for each (group, layer), in the flattened order
// of layers, each starting at a chunk. The content of a segment is the receiver's pages in token order, plane after plane in
// each page, from the first token that it lacks to the end of the prompt. A tail block holds just the tokens of the prompt,
// or the whole page where its strategy moves only whole pages.
//
// Source and receiver compute the same plan from their own layouts alone. A Plan is read-only and safe for concurrent use.
type Plan struct {
	dst    *layout.Layout
	tokens uint32
	space  *transfer.Space
	segs   []segment
}

// segment is the template of one layer.
type segment struct {
	group, layer int
	block0       uint32 // first block of the table that moves
	full         uint32 // blocks that move as full pages
	page         uint64 // bytes of a full page
	pageParts    []part
	tail         uint64 // bytes of the tail page, 0 where there is none
	tailParts    []part
}

// part is a contiguous part of a page, in transfer-space order. Offsets are from Base + block*BlockStride.
type part struct {
	plane int // whose offset the side adds: it differs between sides in K/V-first layouts
	off   uint64
	len   uint64
}

// NewPlan computes the space of a prompt of the given tokens. dst is the receiver's layout, src the source's; a receiver passes
// its own for both. skip holds, for each group, how many tokens the receiver has already: a multiple of the block size, or all.
func NewPlan(reg *Registry, src, dst *layout.Layout, tokens uint32, skip []uint32) (*Plan, error) {
	if err := sameShape(src, dst); err != nil {
		return nil, err
	}
	if tokens == 0 {
		return nil, &layout.Error{Field: "tokens", Value: "0", Problem: "there is nothing to plan", Remedy: "send a prompt of one token or more"}
	}
	if len(skip) != len(dst.Groups) {
		return nil, &layout.Error{Field: "skip", Value: fmt.Sprintf("%d groups", len(skip)),
			Problem: fmt.Sprintf("the layout has %d", len(dst.Groups)), Remedy: "give the tokens already present for each cache group"}
	}
	p := &Plan{dst: dst, tokens: tokens, segs: make([]segment, 0, dst.NumLayers())}
	bytes := make([]uint64, 0, dst.NumLayers())
	for gi := range dst.Groups {
		g := &dst.Groups[gi]
		n := g.TokensPerBlock
		if skip[gi]%n != 0 && skip[gi] < tokens {
			return nil, &layout.Error{Field: fmt.Sprintf("skip[%d]", gi), Value: fmt.Sprint(skip[gi]),
				Problem: fmt.Sprintf("is inside a block of %d tokens", n), Remedy: "skip whole blocks"}
		}
		for li := range g.Layers {
			s, err := newSegment(reg, g, gi, li, tokens, min(skip[gi], tokens))
			if err != nil {
				return nil, fmt.Errorf("groups[%d].layers[%d]: %w", gi, li, err)
			}
			p.segs = append(p.segs, s)
			bytes = append(bytes, uint64(s.full)*s.page+s.tail)
		}
	}
	var err error
	if p.space, err = transfer.NewSpace(bytes); err != nil {
		return nil, err
	}
	return p, nil
}

// sameShape refuses two layouts whose pages differ inside: their bytes would have to be rearranged on the way.
func sameShape(src, dst *layout.Layout) error {
	if src == dst || src.Geometry() == dst.Geometry() {
		return nil
	}
	e := &layout.Error{Field: "geometry", Value: "differs", Problem: "the cache pages of the two engines have different shapes",
		Remedy: "run prefill and decode with the same block size, attention backend and parallelism"}
	a, b := *src, *dst
	a.DType, b.DType, a.Identity, b.Identity = "", "", nil, nil // the fingerprint's concern
	if diffs := layout.Diff(&a, &b); len(diffs) > 0 {
		e.Value = fmt.Sprintf("%q", diffs)
	}
	return e
}

func newSegment(reg *Registry, g *layout.Group, gi, li int, tokens, skip uint32) (segment, error) {
	planes, err := reg.Planes(nil, g, &g.Layers[li])
	if err != nil {
		return segment{}, err
	}
	n := g.TokensPerBlock
	s := segment{group: gi, layer: li, block0: skip / n}
	if skip >= tokens {
		return s, nil
	}
	s.full = tokens/n - s.block0
	rest := tokens % n
	for i, pl := range planes {
		s.pageParts = appendPart(s.pageParts, part{plane: i, len: pl.Bytes()})
		s.page += pl.Bytes()
		if rest == 0 {
			continue
		}
		switch pl.Unit {
		case layout.UnitToken:
			s.tailParts = appendPart(s.tailParts, part{plane: i, len: uint64(rest) * pl.UnitBytes})
		case layout.UnitHead:
			for h := range pl.Units {
				s.tailParts = appendPart(s.tailParts,
					part{plane: i, off: uint64(h) * pl.UnitBytes, len: pl.UnitBytes / uint64(n) * uint64(rest)})
			}
		default:
			s.tailParts = appendPart(s.tailParts, part{plane: i, len: pl.Bytes()})
		}
	}
	for _, t := range s.tailParts {
		s.tail += t.len
	}
	return s, nil
}

func appendPart(parts []part, p part) []part {
	if k := len(parts) - 1; k >= 0 && parts[k].plane == p.plane && parts[k].off+parts[k].len == p.off {
		parts[k].len += p.len
		return parts
	}
	return append(parts, p)
}

// Space is the transfer space.
func (p *Plan) Space() *transfer.Space { return p.space }

// Tokens is the length of the prompt that the plan is for.
func (p *Plan) Tokens() uint32 { return p.tokens }

// BlocksNeeded is how many entries the block table of a group must have to cover the plan.
func (p *Plan) BlocksNeeded(group int) int {
	n := p.dst.Groups[group].TokensPerBlock
	return int((p.tokens-1)/n) + 1
}

// Ready returns the chunks of a layer (flattened index) that are complete once it holds tokens [0, tokens). A block that is not
// full waits for final. The range starts at the front of the segment and only grows with tokens; Count may be 0.
func (p *Plan) Ready(layer int, tokens uint32, final bool) transfer.Range {
	if layer < 0 || layer >= len(p.segs) {
		return transfer.Range{}
	}
	r, bytes := p.space.Segment(layer)
	s := &p.segs[layer]
	if bytes == 0 {
		return transfer.Range{First: r.First}
	}
	blocks := min(tokens, p.tokens) / p.dst.Groups[s.group].TokensPerBlock
	if final && tokens >= p.tokens || s.tail == 0 && blocks >= s.block0+s.full {
		return r
	}
	if blocks <= s.block0 {
		return transfer.Range{First: r.First}
	}
	return transfer.Range{First: r.First, Count: uint32(uint64(blocks-s.block0) * s.page / transfer.ChunkBytes)}
}

// Resolver is one engine's memory behind a plan: it turns chunks into pieces of that engine's regions. Append may run
// concurrently with itself and with SetTables.
type Resolver struct {
	plan   *Plan
	layout *layout.Layout
	segs   []sideSegment
	tables atomic.Pointer[[][]uint32]
}

// sideSegment is what one side adds to the template: where its planes lie.
type sideSegment struct {
	region   layout.RegionIndex
	stride   uint64
	planeOff [layout.MaxPlanes]uint64 // from the start of the region to the plane in block 0
}

// Side binds the plan to one engine's layout and block tables, one per group. A source's tables may still be short: what they
// do not cover cannot be resolved until SetTables brings longer ones.
func (p *Plan) Side(reg *Registry, l *layout.Layout, tables [][]uint32) (*Resolver, error) {
	if err := sameShape(l, p.dst); err != nil {
		return nil, err
	}
	s := &Resolver{plan: p, layout: l, segs: make([]sideSegment, len(p.segs))}
	var planes []layout.Plane
	for i := range p.segs {
		g := &l.Groups[p.segs[i].group]
		ly := &g.Layers[p.segs[i].layer]
		var err error
		if planes, err = reg.Planes(planes[:0], g, ly); err != nil {
			return nil, err
		}
		s.segs[i].region, s.segs[i].stride = ly.Region, ly.BlockStride
		for k, pl := range planes {
			s.segs[i].planeOff[k] = ly.Base + pl.Offset
		}
	}
	if err := s.SetTables(tables); err != nil {
		return nil, err
	}
	return s, nil
}

// SetTables replaces the block tables; the caller must not change them afterwards. Every id is checked against the layout.
func (s *Resolver) SetTables(tables [][]uint32) error {
	if len(tables) != len(s.layout.Groups) {
		return &layout.Error{Field: "blocks", Value: fmt.Sprintf("%d tables", len(tables)),
			Problem: fmt.Sprintf("the layout has %d groups", len(s.layout.Groups)), Remedy: "pass one block table per cache group"}
	}
	for gi, t := range tables {
		if i := outOfTable(t, s.layout.Groups[gi].NumBlocks); i >= 0 {
			return &layout.Error{Field: fmt.Sprintf("blocks[%d][%d]", gi, i), Value: fmt.Sprint(t[i]),
				Problem: fmt.Sprintf("the group has %d blocks", s.layout.Groups[gi].NumBlocks), Remedy: "pass the engine's own block ids"}
		}
	}
	s.tables.Store(&tables)
	return nil
}

// Covers reports whether the tables reach to the end of the plan; a receiver's must.
func (s *Resolver) Covers() error {
	for gi, t := range *s.tables.Load() {
		if n := s.plan.BlocksNeeded(gi); len(t) < n {
			return &layout.Error{Field: fmt.Sprintf("blocks[%d]", gi), Value: fmt.Sprintf("%d blocks", len(t)),
				Problem: fmt.Sprintf("%d tokens need %d", s.plan.tokens, n), Remedy: "allocate the whole prompt before asking for it"}
		}
	}
	return nil
}

// Append adds the memory of chunks r to dst, in transfer-space order, adjacent pieces joined. On an error dst comes back as it
// was. It allocates nothing while dst has room.
func (s *Resolver) Append(dst []layout.Piece, r transfer.Range) ([]layout.Piece, error) {
	p := s.plan
	if err := p.space.Check(r); err != nil {
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
		t := &p.segs[si]
		table := tables[t.group]
		last := uint64(t.block0) + t.blockOf(hi-1)
		if last >= uint64(len(table)) {
			return dst[:base], &layout.Error{Field: fmt.Sprintf("blocks[%d]", t.group), Value: fmt.Sprintf("%d blocks", len(table)),
				Problem: fmt.Sprintf("chunks [%d, +%d) need block %d of the table", r.First, r.Count, last),
				Remedy:  "ask for what the table covers"}
		}
		dst = s.appendSegment(dst, base, t, &s.segs[si], table, lo, hi)
	}
	return dst, nil
}

// blockOf is the block of the segment, counted from block0, that holds byte off; page is not 0 where a segment has bytes.
func (t *segment) blockOf(off uint64) uint64 {
	return min(off/t.page, uint64(t.full))
}

func (s *Resolver) appendSegment(dst []layout.Piece, base int, t *segment, side *sideSegment, table []uint32, lo, hi uint64) []layout.Piece {
	for lo < hi {
		k := t.blockOf(lo)
		at := side.stride * uint64(table[uint64(t.block0)+k])
		parts := t.pageParts
		if k == uint64(t.full) {
			parts = t.tailParts
		}
		pos := k * t.page // of the current part, in the segment
		for i := range parts {
			pt := &parts[i]
			end := pos + pt.len
			if end <= lo {
				pos = end
				continue
			}
			n := min(end, hi) - lo
			dst = appendPiece(dst, base, side.region, at+side.planeOff[pt.plane]+pt.off+(lo-pos), n)
			lo += n
			pos = end
			if lo >= hi {
				return dst
			}
		}
	}
	return dst
}

func appendPiece(dst []layout.Piece, base int, region layout.RegionIndex, off, n uint64) []layout.Piece {
	if k := len(dst) - 1; k >= base && dst[k].Region == region && dst[k].Off+dst[k].Len == off {
		dst[k].Len += n
		return dst
	}
	return append(dst, layout.Piece{Region: region, Off: off, Len: n})
}

// Space is the plan's space, so that a Resolver alone can serve as a sink or a source.
func (s *Resolver) Space() *transfer.Space { return s.plan.space }
