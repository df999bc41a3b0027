package parseblock

import (
	"fmt"
	"math/bits"
	"slices"
	"sync/atomic"

	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/transfer"
)

// Plan is the transfer space from one source to one receiving rank for one prompt: a segment for
// each (group, layer) of the receiver, in the flattened order of layers, each starting at a chunk.
// A segment contains the receiver's pages in token order, plane after plane in each page, from the
// first missing token to the end of the prompt. A tail block contains only the tokens of the
// prompt, or the whole page if its strategy moves only whole pages. Of a sliding window, only the
// blocks that the next token sees move; of a recurrent state, the one block that holds it. The
// first block of a window is cut if the source, whose blocks are smaller or begin elsewhere, has
// already freed its front; the source still has every token that is seen. Heads and layers that the
// source does not have are omitted: several sources have several plans, which Assign chooses so
// that together they cover everything.
//
// Source and receiver compute the same plan from the two layouts. If their geometry is equal, each
// can pass its own layout for both. A Plan is read-only and safe for concurrent use.
type Plan struct {
	Work
	space *transfer.Space
	match *Match
}

// Work is a plan without a transfer space, of any size. Read-only.
type Work struct {
	src, dst *layout.Layout
	share    *Share
	tokens   uint32
	segs     []segment
}

// segment is the template of one layer of the receiver.
type segment struct {
	state  bool
	n      uint32 // tokens of a block
	block0 uint32 // first block of the table that moves
	// blocks that move as full pages, after a cut page that reaches the end of its block
	full  uint32
	page  uint64 // bytes of a full page
	tail  uint64 // bytes of the tail page, 0 without one
	pairs []pair
	tails []uint64 // rows of each pair in the tail page
	cut   *cut     // nil: the first page is not cut
}

// cut is a first page, possibly the tail page, whose front the source has freed.
type cut struct {
	rows  []uint64 // missing rows of each pair
	lacks uint64   // bytes of those rows
	pages uint32   // 0: it is the tail page
	bytes uint64   // of the page; 0 where it is the tail page
}

// lead returns the number of pages (0 or 1) before the full ones, and their bytes.
func (s *segment) lead() (pages uint32, bytes uint64) {
	if s.cut == nil {
		return 0, 0
	}
	return s.cut.pages, s.cut.bytes
}

// NewPlan computes the space of a prompt of the given tokens. dst is the receiver's layout, src the
// source's, which must contain all of dst. skip holds the number of tokens that the receiver
// already has, for each block table of dst: a multiple of the block size, or all tokens.
func NewPlan(reg *Registry, src, dst *layout.Layout, tokens uint32, skip []uint32) (*Plan, error) {
	all, err := Assign(reg, []*layout.Layout{src}, dst, nil)
	if err != nil {
		return nil, err
	}
	return NewShare(reg, src, dst, &all[0], tokens, skip)
}

// NewShare is NewPlan for the part of the receiver's cache that Assign chose for this source.
func NewShare(reg *Registry, src, dst *layout.Layout, share *Share, tokens uint32, skip []uint32) (*Plan, error) {
	m, err := NewMatch(reg, src, dst, share)
	if err != nil {
		return nil, err
	}
	return m.Plan(tokens, skip)
}

// Match is the part of a receiver's cache that a source has: the pairs of planes of every layer. It
// depends on the two layouts alone, so one Match serves every prompt between them. Read-only and
// safe for concurrent use.
type Match struct {
	src, dst *layout.Layout
	share    *Share
	links    [][]pair // by layer of the receiver
	from     [][]int  // layers of the source from which a layer of the receiver is made
	feeds    [][]int  // layers of the receiver to which a layer of the source contributes
	digest   [32]byte // of the inputs of plans
}

// NewMatch pairs the planes of two layouts, limited to the share; nil: everything that both have.
func NewMatch(reg *Registry, src, dst *layout.Layout, share *Share) (*Match, error) {
	links, err := link(reg, src, dst, share)
	if err != nil {
		return nil, err
	}
	m := &Match{src: src, dst: dst, share: share, links: links, from: make([][]int, len(links)), feeds: make([][]int, src.NumLayers())}
	for flat, pairs := range links {
		for i := range pairs {
			l := pairs[i].from.flat
			if !slices.Contains(m.from[flat], l) {
				m.from[flat] = append(m.from[flat], l)
				m.feeds[l] = append(m.feeds[l], flat)
			}
		}
	}
	m.digest = m.sum()
	return m, nil
}

// Plan is the transfer space of one prompt; tokens and skip are those of NewPlan.
func (m *Match) Plan(tokens uint32, skip []uint32) (*Plan, error) {
	w, err := m.Work(tokens, skip)
	if err != nil {
		return nil, err
	}
	segments := make([]uint64, len(w.segs))
	var total uint64
	for i := range w.segs {
		s := &w.segs[i]
		_, lead := s.lead() // less than a page
		hi, n := bits.Mul64(uint64(s.full), s.page)
		n, carry := bits.Add64(n, s.tail, 0)
		n, more := bits.Add64(n, lead, 0)
		carry |= more
		segments[i] = n
		if total += n/transfer.ChunkBytes + min(n%transfer.ChunkBytes, 1); hi != 0 || carry != 0 || total > transfer.MaxSlotChunks {
			return nil, tooLarge(tokens, m.dst, i)
		}
	}
	space, err := transfer.NewSpace(segments)
	if err != nil {
		return nil, err
	}
	return &Plan{Work: *w, space: space, match: m}, nil
}

// tooLarge refuses a prompt that needs more chunks for one rank than a transfer can address.
func tooLarge(tokens uint32, dst *layout.Layout, flat int) error {
	g, l, _ := dst.LayerAt(flat)
	return &layout.Error{Field: "tokens", Value: fmt.Sprint(tokens), Problem: fmt.Sprintf("the KV from one source to one rank exceeds %d chunks of %d bytes (%d GiB) at layer %q",
		transfer.MaxSlotChunks, transfer.ChunkBytes, transfer.MaxSlotChunks*transfer.ChunkBytes>>30, dst.Groups[g].Layers[l].Name),
		Remedy: "divide the model over more ranks or stages, or let decode compute this prompt"}
}

// Work is Plan without the transfer space.
func (m *Match) Work(tokens uint32, skip []uint32) (*Work, error) {
	dst := m.dst
	if tokens == 0 {
		return nil, &layout.Error{Field: "tokens", Value: "0", Problem: "there is nothing to plan", Remedy: "send a prompt of one token or more"}
	}
	if n := dst.Tables(); len(skip) != n {
		return nil, &layout.Error{Field: "skip", Value: fmt.Sprintf("%d entries", len(skip)),
			Problem: fmt.Sprintf("the layout has %d block tables", n), Remedy: "pass the tokens already present for each block table"}
	}
	p := &Work{src: m.src, dst: dst, share: m.share, tokens: tokens, segs: make([]segment, 0, len(m.links))}
	n := 0
	for _, pairs := range m.links {
		n += len(pairs)
	}
	tails := make([]uint64, n)
	table := -1
	for gi := range dst.Groups {
		g := &dst.Groups[gi]
		if !g.SameTable {
			table++
		}
		n := g.TokensPerBlock
		if skip[table]%n != 0 && skip[table] < tokens {
			return nil, &layout.Error{Field: fmt.Sprintf("skip[%d]", table), Value: fmt.Sprint(skip[table]),
				Problem: fmt.Sprintf("is inside a block of %d tokens", n), Remedy: "skip whole blocks"}
		}
		for range g.Layers {
			pairs := m.links[len(p.segs)]
			s := newSegment(g, pairs, tails[:len(pairs):len(pairs)], tokens, min(skip[table], tokens))
			tails = tails[len(pairs):]
			if err := s.checkKept(g, tokens); err != nil {
				return nil, err
			}
			p.segs = append(p.segs, s)
		}
	}
	return p, nil
}

// newSegment makes the template of one layer. The segment owns tails, one for each pair, and fills
// it.
func newSegment(g *layout.Group, pairs []pair, tails []uint64, tokens, skip uint32) segment {
	n := g.TokensPerBlock
	s := segment{n: n, block0: skip / n, pairs: pairs, tails: tails}
	if skip >= tokens || len(pairs) == 0 {
		return s
	}
	if s.state = pairs[0].unit == layout.UnitState; s.state {
		s.block0 = (tokens - 1) / n
		for i := range pairs {
			s.tails[i] = pairs[i].rows
			s.tail += pairs[i].bytes()
		}
		s.page = s.tail
		return s
	}
	window := WindowStart(g, tokens)
	s.block0 = max(s.block0, window/n)
	s.full = tokens/n - s.block0
	rest := uint64(tokens % n)
	for i := range pairs {
		// The source has whole blocks of its own, from the block in which the window begins.
		has := uint64(window) / pairs[i].from.tokens * pairs[i].from.tokens
		if first := uint64(s.block0) * uint64(n); has > first {
			if s.cut == nil {
				s.cut = &cut{rows: make([]uint64, len(pairs))}
			}
			s.cut.rows[i] = (has - first) / pairs[i].rowTokens
			s.cut.lacks += s.cut.rows[i] * pairs[i].heads * pairs[i].cols * pairs[i].cell
		}
	}
	if s.cut != nil && s.full > 0 {
		s.cut.pages, s.full = 1, s.full-1
	}
	for i := range pairs {
		p := &pairs[i]
		s.page += p.bytes()
		switch {
		case rest == 0:
		case p.unit == layout.UnitBlock:
			s.tails[i] = p.rows
		default:
			s.tails[i] = rest / p.rowTokens
		}
		s.tail += s.tails[i] * p.heads * p.cols * p.cell
	}
	switch {
	case s.cut == nil:
	case s.cut.pages > 0:
		s.cut.bytes = s.page - s.cut.lacks
	default:
		s.tail -= s.cut.lacks
	}
	return s
}

// checkKept refuses a cut page if the receiver keeps its blocks for other prompts ("prefix_cache")
// and one of those prompts could see the missing part. A prompt that ends with block h of the
// window sees back to the block that begins ceil((window-1)/n) blocks earlier, but not its first
// tokens if window-1 is not a multiple of n.
func (s *segment) checkKept(g *layout.Group, tokens uint32) error {
	if s.cut == nil || paramPrefixCache.of(g) == 0 {
		return nil
	}
	n, seen := uint64(s.n), paramWindow.of(g)-1
	unseen := (seen+n-1)/n*n - seen
	for i := range s.pairs {
		lacks := s.cut.rows[i] * s.pairs[i].rowTokens
		if seen == 0 || lacks <= unseen {
			continue
		}
		first := uint64(s.block0) * n
		return &layout.Error{Field: "tokens", Value: fmt.Sprint(tokens),
			Problem: fmt.Sprintf("the source has the window of %d tokens from token %d on, in blocks of %d; the receiver keeps its block of %d for other prompts, which need it from token %d on",
				seen+1, first+lacks, s.pairs[i].from.tokens, n, first+unseen),
			Remedy: "configure prefill blocks that are a multiple of decode's, or turn decode's prefix cache off"}
	}
	return nil
}

// WindowStart returns the first token that the token after a prompt still sees: 0 without a sliding
// window.
func WindowStart(g *layout.Group, tokens uint32) uint32 {
	w := paramWindow.of(g)
	if w == 0 || w > uint64(tokens) {
		return 0
	}
	return tokens - uint32(w) + 1
}

// Written returns the entries of a block table whose blocks the transfer of a prompt writes at its
// receiver: [first, end). The receiver already has the earlier blocks, or no longer sees them.
func (m *Match) Written(table int, tokens, skip uint32) (first, end int) {
	at, of := 0, -1
	for gi := range m.dst.Groups {
		g := &m.dst.Groups[gi]
		links := m.links[at : at+len(g.Layers)]
		at += len(links)
		if !g.SameTable {
			of++
		}
		if of != table || tokens == 0 || skip >= tokens || len(links) == 0 || len(links[0]) == 0 {
			continue
		}
		s := newSegment(g, links[0], make([]uint64, len(links[0])), tokens, skip)
		if end == 0 || int(s.block0) < first {
			first = int(s.block0)
		}
		end = int((tokens-1)/g.TokensPerBlock) + 1
	}
	return first, end
}

// Space returns the transfer space.
func (p *Plan) Space() *transfer.Space { return p.space }

// Tokens is the length of the prompt.
func (p *Work) Tokens() uint32 { return p.tokens }

// BlocksNeeded is the number of entries that the group's block table needs to cover the plan.
func (p *Work) BlocksNeeded(group int) int {
	n := p.dst.Groups[group].TokensPerBlock
	return int((p.tokens-1)/n) + 1
}

// Lacks counts the bytes of the receiver's blocks that the source has freed: those of a window's
// first block that no token sees any more.
func (p *Work) Lacks() (bytes uint64) {
	for i := range p.segs {
		if c := p.segs[i].cut; c != nil {
			bytes += c.lacks
		}
	}
	return bytes
}

// Feeds lists the segments (layers of the receiver) to which a layer of the source (flattened
// index) contributes.
func (p *Plan) Feeds(layer int) []int { return p.match.feeds[layer] }

// From lists the layers of the source from which a segment is made.
func (p *Plan) From(segment int) []int { return p.match.from[segment] }

// Receiver is the receiving side's layout.
func (p *Work) Receiver() *layout.Layout { return p.dst }

// Page locates the page of a segment that contains byte off: its block in the table, and the part
// of it that moves.
func (p *Work) Page(segment int, off uint64) (block uint32, bytes uint64) {
	s := &p.segs[segment]
	k := s.pageOf(off)
	pages, lead := s.lead()
	switch {
	case k < uint64(pages):
		bytes = lead
	case k == uint64(pages+s.full):
		bytes = s.tail
	default:
		bytes = s.page
	}
	return s.block0 + uint32(k), bytes
}

// Ready returns the chunks of a segment that are complete once its source layers hold tokens [0,
// tokens). A block that is not full waits for final. The range starts at the front of the segment
// and only grows with tokens; Count may be 0.
func (p *Plan) Ready(segment int, tokens uint32, final bool) transfer.Range {
	if segment < 0 || segment >= len(p.segs) {
		return transfer.Range{}
	}
	r, bytes := p.space.Segment(segment)
	s := &p.segs[segment]
	if bytes == 0 {
		return transfer.Range{First: r.First}
	}
	blocks := min(tokens, p.tokens) / s.n
	pages, _ := s.lead()
	if final && tokens >= p.tokens || s.tail == 0 && blocks >= s.block0+pages+s.full {
		return r
	}
	if s.state || blocks <= s.block0 {
		return transfer.Range{First: r.First}
	}
	return transfer.Range{First: r.First, Count: uint32(s.start(uint64(blocks-s.block0)) / transfer.ChunkBytes)}
}

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
	s := &Resolver{plan: p, layout: l, segs: make([][]sideTrack, len(p.segs)), plain: make([]bool, len(p.segs))}
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
	e := &layout.Error{Field: "geometry", Value: "differs", Problem: "the layout is neither the plan's source nor its receiver",
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
			Problem: fmt.Sprintf("the layout has %d", len(of)), Remedy: "pass every block table of the engine, in the layout's order"}
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
			return &layout.Error{Field: fmt.Sprintf("blocks[%d]", ti), Value: fmt.Sprintf("%d blocks", len(t)),
				Problem: fmt.Sprintf("%d tokens need %d", s.plan.tokens, n), Remedy: "allocate the whole prompt before asking for it"}
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

func (s *Resolver) appendSegment(dst []layout.Piece, base, si int, tables [][]uint32, lo, hi uint64) ([]layout.Piece, error) {
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
			w := walk{p: p, side: side, table: tables[side.table], row0: (uint64(t.block0)+k)*p.rows + first, rows: rows, dense: dense}
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
func (s *Resolver) appendPages(dst []layout.Piece, base, si int, tables [][]uint32, lo, hi uint64) ([]layout.Piece, uint64, error) {
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
	return &layout.Error{Field: fmt.Sprintf("blocks[%d]", t.table), Value: fmt.Sprintf("%d blocks", len(table)),
		Problem: fmt.Sprintf("block %d of the table is needed", need), Remedy: "request only blocks that the table covers"}
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

func appendPiece(dst []layout.Piece, base int, region layout.RegionIndex, off, n uint64) []layout.Piece {
	if k := len(dst) - 1; k >= base && dst[k].Region == region && dst[k].Off+dst[k].Len == off {
		dst[k].Len += n
		return dst
	}
	return append(dst, layout.Piece{Region: region, Off: off, Len: n})
}

// Space returns the plan's space, so that a Resolver alone can serve as a sink or a source.
func (s *Resolver) Space() *transfer.Space { return s.plan.space }

// Parts is the number of pairs of planes of a layer of the receiver (flattened index), 0 if this
// source has nothing of it.
func (p *Work) Parts(layer int) int { return len(p.segs[layer].pairs) }

// Runs appends the runs of one part of a layer and returns the regions of both sides. Programs that
// count or check a plan use it. Lanes see one side and resolve it piece by piece (Resolver). The
// tables are those of each side.
func (p *Work) Runs(dst []layout.Run, layer, part int, from, to [][]uint32) (runs []layout.Run, src, dest layout.RegionIndex, err error) {
	s := &p.segs[layer]
	pr := &s.pairs[part]
	t := layout.TokenRange{Start: min(s.block0*s.n, p.tokens), End: p.tokens}
	if s.cut != nil {
		t.Start += uint32(s.cut.rows[part] * pr.rowTokens)
	}
	if t.Start == t.End || s.page == 0 {
		return dst, pr.from.reg, pr.to.reg, nil
	}
	tpl := Template{pairs: s.pairs[part : part+1], from: &p.src.Groups[pr.from.group], to: &p.dst.Groups[pr.to.group]}
	runs, err = tpl.Append(dst, from[pr.from.table], to[pr.to.table], t)
	return runs, pr.from.reg, pr.to.reg, err
}
