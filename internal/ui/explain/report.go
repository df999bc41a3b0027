package explain

import (
	"fmt"
	"strings"

	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/parseblock"
)

// Report is the explanation. Its JSON form is stable within a major version.
type Report struct {
	Model         string  `json:"model"`
	Note          string  `json:"note,omitempty"`
	Tokens        int     `json:"tokens"`
	Prefill       Side    `json:"prefill"`
	Decode        Side    `json:"decode"`
	BytesPerToken float64 `json:"bytes_per_token"` // of the whole model, every head once
	FixedBytes    uint64  `json:"fixed_bytes"`     // state and full windows, once per request
	Pages         []Page  `json:"pages"`           // of rank 0 of each side
	Flows         []Flow  `json:"flows"`
	TotalBytes    uint64  `json:"total_bytes"`
	TotalWrites   uint64  `json:"total_writes"`
}

// Page is one block of one layer of a group.
type Page struct {
	Side     string  `json:"side"`
	Layers   int     `json:"layers"`
	Strategy string  `json:"strategy"`
	Tokens   uint32  `json:"tokens"`
	Bytes    uint64  `json:"bytes"`
	Window   int64   `json:"window,omitempty"`
	Planes   []Plane `json:"planes"`
}

// Plane locates the cells of a page.
type Plane struct {
	Role       string `json:"role"`
	Unit       string `json:"unit"`
	Offset     uint64 `json:"offset"`
	CellBytes  uint64 `json:"cell_bytes"`
	Rows       uint32 `json:"rows"`
	RowTokens  uint32 `json:"row_tokens"`
	RowStride  uint64 `json:"row_stride"`
	Heads      uint32 `json:"heads"`
	FirstHead  uint32 `json:"first_head"`
	AllHeads   uint32 `json:"all_heads"`
	HeadStride uint64 `json:"head_stride"`
	Cols       uint32 `json:"cols"`
	ColStride  uint64 `json:"col_stride"`
	Tiles      uint32 `json:"tiles"` // kernel pages in the page, each with its part of the rows
	TileStride uint64 `json:"tile_stride"`
}

// Flow is the transfer from one prefill rank to one decode rank.
type Flow struct {
	From     int    `json:"from"`
	To       int    `json:"to"`
	Bytes    uint64 `json:"bytes"`
	Runs     uint64 `json:"runs"`           // entries of the strided list
	Writes   uint64 `json:"writes"`         // contiguous pieces
	Shortest uint64 `json:"shortest_bytes"` // of the shortest and the longest piece
	Longest  uint64 `json:"longest_bytes"`
}

// Explain plans a prompt of the given tokens. Block tables are scattered, as in an engine that has
// run for a while.
func Explain(m *Model, prefill, decode Side, tokens int) (*Report, error) {
	if err := prefill.check(m, "--"); err != nil {
		return nil, err
	}
	if err := decode.check(m, "--to-"); err != nil {
		return nil, err
	}
	if tokens < 1 || tokens > MaxTokens {
		return nil, fmt.Errorf("a prompt of %d tokens: ask for 1 to %d", tokens, MaxTokens)
	}
	reg := parseblock.Default()
	r := &Report{Model: m.Name, Tokens: tokens, Prefill: prefill, Decode: decode}
	notes := append(prefill.remarks(m, "prefill"), decode.remarks(m, "decode")...)
	if m.Note != "" {
		notes = append([]string{m.Note}, notes...)
	}
	r.Note = strings.Join(notes, "; ")
	sources, err := build(reg, m, prefill, tokens)
	if err != nil {
		return nil, fmt.Errorf("prefill: %w", err)
	}
	receivers, err := build(reg, m, decode, tokens)
	if err != nil {
		return nil, fmt.Errorf("decode: %w", err)
	}
	return r, r.plan(reg, sources, receivers)
}

// ExplainEngines does the same for the registrations of two running engines.
func ExplainEngines(prefill, decode *Engine, tokens int) (*Report, error) {
	if tokens < 1 || tokens > MaxTokens {
		return nil, fmt.Errorf("a prompt of %d tokens: ask for 1 to %d", tokens, MaxTokens)
	}
	r := &Report{Model: prefill.Layouts[0].Model, Tokens: tokens, Prefill: prefill.side(),
		Decode: decode.side(),
		Note:   fmt.Sprintf("as %s and %s registered", prefill.Name, decode.Name)}
	return r, r.plan(parseblock.Default(), prefill.Layouts, decode.Layouts)
}

// side describes a registered engine like an imagined one.
func (e *Engine) side() Side {
	l := e.Layouts[0]
	return Side{Block: int(l.Groups[0].TokensPerBlock), TP: len(e.Layouts),
		Order: l.Groups[0].Strategy, DType: l.DType}
}

// plan fills in the pages and flows between all ranks of two sides.
func (r *Report) plan(reg *parseblock.Registry, sources, receivers []*layout.Layout) error {
	if err := r.sizes(reg, sources); err != nil {
		return err
	}
	for _, s := range []struct {
		name string
		l    *layout.Layout
	}{{"prefill", sources[0]}, {"decode", receivers[0]}} {
		if err := r.pages(reg, s.name, s.l); err != nil {
			return err
		}
	}
	// bytes that each source already sends: replicas alternate
	given := make([]uint64, len(sources))
	for to, dst := range receivers {
		shares, err := parseblock.Assign(reg, sources, dst, func(i int) uint64 { return given[i] })
		if err == nil {
			err = parseblock.Prove(reg, sources, dst, shares)
		}
		if err != nil {
			return err
		}
		for i := range shares {
			f, err := flow(reg, sources[shares[i].Source], dst, &shares[i], r.Tokens)
			if err != nil {
				return err
			}
			f.From, f.To = shares[i].Source, to
			given[f.From] += f.Bytes
			r.Flows = append(r.Flows, f)
			r.TotalBytes += f.Bytes
			r.TotalWrites += f.Writes
		}
	}
	return nil
}

// build makes the layouts of every rank of a side, and checks them.
func build(reg *parseblock.Registry, m *Model, s Side, tokens int) ([]*layout.Layout, error) {
	out := make([]*layout.Layout, s.TP)
	for rank := range out {
		l, bytes, err := m.Layout(s, rank, tokens)
		if err != nil {
			return nil, err
		}
		if err := reg.Validate(l, []uint64{bytes}); err != nil {
			return nil, err
		}
		out[rank] = l
	}
	return out, nil
}

// sizes adds up the model: every head and every layer once, whichever ranks have them.
func (r *Report) sizes(reg *parseblock.Registry, ranks []*layout.Layout) error {
	seen := map[string]bool{}
	for _, l := range ranks {
		for gi := range l.Groups {
			g := &l.Groups[gi]
			for li := range g.Layers {
				ly := &g.Layers[li]
				if seen[ly.Name] {
					continue // another rank's part of it, or a replica
				}
				seen[ly.Name] = true
				planes, err := reg.Planes(nil, g, ly)
				if err != nil {
					return err
				}
				for i := range planes {
					p := &planes[i]
					page := p.Bytes() / uint64(p.Heads) * uint64(p.AllHeads)
					switch w := g.Params["window"]; {
					case p.Unit == layout.UnitState:
						r.FixedBytes += page
					case w > 0:
						r.FixedBytes += page * uint64(w) / uint64(g.TokensPerBlock)
					default:
						r.BytesPerToken += float64(page) / float64(g.TokensPerBlock)
					}
				}
			}
		}
	}
	return nil
}

func (r *Report) pages(reg *parseblock.Registry, side string, l *layout.Layout) error {
	for gi := range l.Groups {
		g := &l.Groups[gi]
		if len(g.Layers) == 0 {
			continue // a stage without layers of this kind
		}
		planes, err := reg.Planes(nil, g, &g.Layers[0])
		if err != nil {
			return err
		}
		p := Page{Side: side, Layers: len(g.Layers), Strategy: g.Strategy, Tokens: g.TokensPerBlock,
			Bytes: g.Layers[0].PageBytes, Window: g.Params["window"]}
		for _, pl := range planes {
			tiles := uint32(1)
			if pl.TileRows != 0 {
				tiles = pl.Rows / pl.TileRows
			}
			p.Planes = append(p.Planes, Plane{Role: pl.Role.String(), Unit: pl.Unit.String(),
				Offset: pl.Offset, CellBytes: pl.CellBytes, Rows: pl.Rows, RowTokens: pl.RowTokens,
				RowStride: pl.RowStride, Heads: pl.Heads, FirstHead: pl.FirstHead, AllHeads: pl.AllHeads,
				HeadStride: pl.HeadStride, Cols: pl.Cols, ColStride: pl.ColStride,
				Tiles: tiles, TileStride: pl.TileStride})
		}
		r.Pages = append(r.Pages, p)
	}
	return nil
}

func flow(reg *parseblock.Registry, src, dst *layout.Layout, share *parseblock.Share,
	tokens int) (Flow, error) {
	f := Flow{Shortest: 1<<64 - 1}
	match, err := parseblock.NewMatch(reg, src, dst, share)
	if err != nil {
		return f, err
	}
	plan, err := match.Work(uint32(tokens), make([]uint32, dst.Tables()))
	if err != nil {
		return f, err
	}
	from, err := scattered(src, 7, tokens)
	if err != nil {
		return f, err
	}
	to, err := scattered(dst, 11, tokens)
	if err != nil {
		return f, err
	}
	var runs []layout.Run
	for l := range dst.NumLayers() {
		for part := range plan.Parts(l) {
			if runs, _, _, err = plan.Runs(runs[:0], l, part, from, to); err != nil {
				return f, err
			}
			f.Runs += uint64(len(runs))
			for i := range runs {
				f.Bytes += runs[i].Bytes()
				f.Writes += runs[i].Pieces()
				f.Shortest, f.Longest = min(f.Shortest, runs[i].Len), max(f.Longest, runs[i].Len)
			}
		}
	}
	return f, nil
}

// scattered makes block tables in which hardly a block follows its neighbor: ids at a step that is
// prime to their number.
func scattered(l *layout.Layout, step uint64, tokens int) ([][]uint32, error) {
	tables := l.TablesOf()
	out := make([][]uint32, len(tables))
	for ti := range tables {
		gi := tables[ti].First
		g := &l.Groups[gi]
		n := uint64(g.NumBlocks)
		need := (uint64(tokens)-1)/uint64(g.TokensPerBlock) + 1
		if need > n {
			return nil, fmt.Errorf("%d tokens need %d blocks of group %d (%s), and the engine has %d: ask "+
				"for %d tokens at most", tokens, need, gi, g.Strategy, n,
				n*uint64(g.TokensPerBlock))
		}
		s := step
		for gcd(s, n) != 1 {
			s += 2
		}
		table := make([]uint32, need)
		for i := range table {
			table[i] = uint32(uint64(i) * s % n)
		}
		// breaks the even distance, over which runs would merge
		for i := 0; i+4 < len(table); i += 5 {
			table[i], table[i+2] = table[i+2], table[i]
		}
		out[ti] = table
	}
	return out, nil
}

func gcd(a, b uint64) uint64 {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}
