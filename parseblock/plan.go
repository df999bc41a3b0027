package parseblock

import (
	"fmt"
	"math/bits"
	"slices"

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
func NewShare(reg *Registry, src, dst *layout.Layout, share *Share, tokens uint32,
	skip []uint32) (*Plan, error) {
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
	m := &Match{src: src, dst: dst, share: share, links: links, from: make([][]int, len(links)),
		feeds: make([][]int, src.NumLayers())}
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
		if total += n/transfer.ChunkBytes + min(n%transfer.ChunkBytes, 1); hi != 0 || carry != 0 ||
			total > transfer.MaxSlotChunks {
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
	return &layout.Error{Field: "tokens", Value: fmt.Sprint(tokens),
		Problem: fmt.Sprintf("the KV from one source to one rank exceeds %d chunks of %d bytes (%d "+
			"GiB) at layer %q",
			transfer.MaxSlotChunks, transfer.ChunkBytes, transfer.MaxSlotChunks*transfer.ChunkBytes>>30,
			dst.Groups[g].Layers[l].Name),
		Remedy: "divide the model over more ranks or stages, or let decode compute this prompt"}
}

// Work is Plan without the transfer space.
func (m *Match) Work(tokens uint32, skip []uint32) (*Work, error) {
	dst := m.dst
	if tokens == 0 {
		return nil, &layout.Error{Field: "tokens", Value: "0", Problem: "there is nothing to plan",
			Remedy: "send a prompt of one token or more"}
	}
	if n := dst.Tables(); len(skip) != n {
		return nil, &layout.Error{Field: "skip", Value: fmt.Sprintf("%d entries", len(skip)),
			Problem: fmt.Sprintf("the layout has %d block tables", n), Remedy: "pass the tokens already " +
				"present for each block table"}
	}
	p := &Work{src: m.src, dst: dst, share: m.share, tokens: tokens, segs: make([]segment, 0,
		len(m.links))}
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
			Problem: fmt.Sprintf("the source has the window of %d tokens from token %d on, in blocks of "+
				"%d; the receiver keeps its block of %d for other prompts, which need it from token %d on",
				seen+1, first+lacks, s.pairs[i].from.tokens, n, first+unseen),
			Remedy: "configure prefill blocks that are a multiple of decode's, or turn decode's prefix " +
				"cache off"}
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
	return transfer.Range{First: r.First, Count: uint32(s.start(uint64(blocks-s.block0)) /
		transfer.ChunkBytes)}
}

// Parts is the number of pairs of planes of a layer of the receiver (flattened index), 0 if this
// source has nothing of it.
func (p *Work) Parts(layer int) int { return len(p.segs[layer].pairs) }

// Runs appends the runs of one part of a layer and returns the regions of both sides. Programs that
// count or check a plan use it. Lanes see one side and resolve it piece by piece (Resolver). The
// tables are those of each side.
func (p *Work) Runs(dst []layout.Run, layer, part int, from, to [][]uint32) (runs []layout.Run, src,
	dest layout.RegionIndex, err error) {
	s := &p.segs[layer]
	pr := &s.pairs[part]
	t := layout.TokenRange{Start: min(s.block0*s.n, p.tokens), End: p.tokens}
	if s.cut != nil {
		t.Start += uint32(s.cut.rows[part] * pr.rowTokens)
	}
	if t.Start == t.End || s.page == 0 {
		return dst, pr.from.reg, pr.to.reg, nil
	}
	tpl := Template{pairs: s.pairs[part : part+1], from: &p.src.Groups[pr.from.group],
		to: &p.dst.Groups[pr.to.group]}
	runs, err = tpl.Append(dst, from[pr.from.table], to[pr.to.table], t)
	return runs, pr.from.reg, pr.to.reg, err
}
