// Package parseblock knows the inside of pages: strategies that turn (layouts, block tables, token range) into runs of bytes,
// and the plan of a transfer space made from them.
//
// A strategy only says which planes a page has (layout.Plane: offset, cells, strides on three axes). Everything else is one
// mechanism: planes of two layouts with the same role are paired, cut to the heads that both ranks have, and walked block by
// block. So two layouts of different order, block size, tensor or pipeline parallelism are the general case, and equal ones
// the special case that merges into long pieces. What would have to be converted (another dtype, another quantisation, an
// opaque page of another backend) is refused by name, with every field that differs.
//
// What is copied comes in two forms. Runs are of both sides, two axes each, for as many tokens as one likes (Template, Work.Runs): they count,
// prove and explain a plan. Pieces are of one side and a few chunks (Resolver): what lanes move. Neither is ever made of a whole prompt.
//
// A model has several groups of layers, each with a block table of its own. Of three such models, what lies where, and what moves:
//
//	hybrid   pool        | block 0 | block 1 | block 2 | block 3 | ...       equal blocks; each is one group's at a time
//	         attention   | 0: l0 l1 of t0 .. t15 |   | 3: l0 l1 of t16 .. t31 |          table [0 3]: all of them move
//	         states      |   | 1: l2 l3 of t31 |                                       table [- 1]: the block of the last token
//	         sliding     |   |   | 2: l4 l5 of t16 .. t31 |                              table [- 2]: see window
//
//	window   table       | b0: t0 .. | b1: t16 .. | b2: t32 .. | b3: t48 .. | b4: t64 .. t69 |     70 tokens, a window of 40
//	         seen next   |           |        t31 ......................................... t69 |
//	         moves       |           | b1: t16 .. | b2         | b3         | b4: t64 .. t69 |     whole blocks from that of t31 on
//	         or, cut     |           | b1: t24 .. | b2         | b3         | b4: t64 .. t69 |     where the source has blocks of 8
//
//	draft    alike       | l0 | l1 | ... | l31 | draft 0 |                   a layer more of the target's group and table, on the last stage
//	         else        | l0 | l1 | ... | l31 |   and   | draft 0 |         a group and a table of its own: other heads, other blocks
//
// Laws, tested by property against a naive byte copy: exactly the chosen tokens move, no two runs overlap, every byte lies
// inside the layer's pages, and nothing is planned when anything is wrong. Appending allocates nothing while the caller's
// slice has room.
//
// Invariants: layouts given to this package have passed Registry.Validate; block ids are checked against them here, each time
// that a table arrives. It is pure: no clock, no I/O, no goroutine.
package parseblock

import (
	"fmt"
	"slices"

	"github.com/kvspray/kvspray/layout"
)

// Strategy is one kind of page. Implementations are pure and safe for concurrent use.
type Strategy interface {
	Name() string
	// Planes appends the planes of one page, in the order of the transfer space. They follow from the group and the layer's page
	// bytes and block stride alone: layers that agree in these have the same planes. With no layer (nil) nothing is appended, and the
	// parameters of the group are checked as far as they can be.
	Planes(dst []layout.Plane, g *layout.Group, l *layout.Layer) ([]layout.Plane, error)
}

// Registry holds the strategies by name. Filled by main, read-only afterwards.
type Registry struct {
	byName map[string]Strategy
}

// NewRegistry returns a registry of the given strategies; two of one name are an error.
func NewRegistry(all ...Strategy) (*Registry, error) {
	r := &Registry{byName: make(map[string]Strategy, len(all))}
	for _, s := range all {
		if _, dup := r.byName[s.Name()]; dup {
			return nil, fmt.Errorf("parseblock: strategy %q is registered twice", s.Name())
		}
		r.byName[s.Name()] = s
	}
	return r, nil
}

// Default returns a fresh registry of every strategy of this package.
func Default() *Registry {
	r := &Registry{byName: make(map[string]Strategy, len(builtins))}
	for _, s := range builtins {
		r.byName[s.name] = s
	}
	return r
}

// Get returns the strategy of that name.
func (r *Registry) Get(name string) (Strategy, bool) {
	s, ok := r.byName[name]
	return s, ok
}

// Names lists the strategies, sorted.
func (r *Registry) Names() []string {
	names := make([]string, 0, len(r.byName))
	for n := range r.byName {
		names = append(names, n)
	}
	slices.Sort(names)
	return names
}

// Planes is a layout.PlaneFunc over all strategies.
func (r *Registry) Planes(dst []layout.Plane, g *layout.Group, l *layout.Layer) ([]layout.Plane, error) {
	s, ok := r.byName[g.Strategy]
	if !ok {
		return nil, &layout.Error{Field: "strategy", Value: fmt.Sprintf("%q", g.Strategy), Problem: "is unknown here",
			Remedy: fmt.Sprintf("use one of %q, or a sidecar that knows it", r.Names())}
	}
	return s.Planes(dst, g, l)
}

// Validate checks a layout against the regions that it was registered with.
func (r *Registry) Validate(l *layout.Layout, regionBytes []uint64) error {
	return l.Validate(regionBytes, r.Planes)
}

// Side is one end of a template: a layer of a group.
type Side struct {
	Group *layout.Group
	Layer *layout.Layer
}

// Template is the copy from one layer to another, without block tables: what is computed once per pair of layouts. It is
// read-only and safe for concurrent use.
type Template struct {
	pairs    []pair
	from, to *layout.Group
}

// Template compiles the copy of a layer. The sides may have other strategies, block sizes and ranks; a template of ranks that
// share no head is empty.
func (r *Registry) Template(from, to Side) (*Template, error) {
	var planes [2][]sited
	for i, s := range [2]Side{from, to} {
		if s.Group == nil || s.Layer == nil || s.Group.TokensPerBlock == 0 {
			return nil, &layout.Error{Field: [2]string{"from", "to"}[i], Value: "unset", Problem: "has no group, layer or block size",
				Remedy: "pass a validated layout"}
		}
		all, err := r.Planes(nil, s.Group, s.Layer)
		if err != nil {
			return nil, err
		}
		planes[i] = make([]sited, len(all))
		for k := range all {
			planes[i][k] = sited{Plane: all[k], g: s.Group, l: s.Layer}
		}
	}
	var unlike differences
	pairs, err := pairUp(planes[0], planes[1], &unlike)
	if err == nil {
		err = unlike.err()
	}
	if err != nil {
		return nil, err
	}
	return &Template{pairs: pairs, from: from.Group, to: to.Group}, nil
}

// Bytes is what the template moves of each full block of the receiver, or of a state.
func (t *Template) Bytes() uint64 {
	var n uint64
	for i := range t.pairs {
		n += t.pairs[i].bytes()
	}
	return n
}

// Append adds the runs that copy tokens from the blocks of one table to those of the other, coalesced, in token order within
// each plane. from[i] holds tokens [i*TokensPerBlock, (i+1)*TokensPerBlock). Of a compressed cache it moves the entries that are
// complete with a token of the range; of a state, what is in the block of the last token. On an error dst comes back as it was.
func (t *Template) Append(dst []layout.Run, from, to []uint32, tokens layout.TokenRange) ([]layout.Run, error) {
	if tokens.End <= tokens.Start {
		return dst, &layout.Error{Field: "tokens", Value: fmt.Sprintf("[%d, %d)", tokens.Start, tokens.End), Problem: "is empty",
			Remedy: "ask for one token or more"}
	}
	if err := checkTable("from", from, t.from, tokens); err != nil {
		return dst, err
	}
	if err := checkTable("to", to, t.to, tokens); err != nil {
		return dst, err
	}
	w := runWriter{runs: dst, base: len(dst)}
	for i := range t.pairs {
		p := &t.pairs[i]
		if p.unit == layout.UnitState {
			last := uint64(tokens.End - 1)
			w.one(p.from.off+uint64(from[last/p.from.tokens])*p.from.block, p.to.off+uint64(to[last/p.to.tokens])*p.to.block, &p.full)
			continue
		}
		first, end, err := p.span(tokens)
		if err != nil {
			return dst, err
		}
		if first < end {
			w.walk(p, from, to, first, end)
		}
	}
	w.flush()
	return w.runs, nil
}

func checkTable(name string, table []uint32, g *layout.Group, t layout.TokenRange) error {
	n := g.TokensPerBlock
	first, last := t.Start/n, (t.End-1)/n
	if uint64(last) >= uint64(len(table)) {
		return &layout.Error{Field: name + ".table", Value: fmt.Sprintf("%d blocks", len(table)),
			Problem: fmt.Sprintf("tokens [%d, %d) need %d of %d tokens", t.Start, t.End, last+1, n), Remedy: "pass the whole block table"}
	}
	if i := outOfTable(table[first:last+1], g.NumBlocks); i >= 0 {
		return &layout.Error{Field: fmt.Sprintf("%s.table[%d]", name, int(first)+i), Value: fmt.Sprint(table[int(first)+i]),
			Problem: fmt.Sprintf("the group has %d blocks", g.NumBlocks), Remedy: "pass the engine's own block ids"}
	}
	return nil
}

// outOfTable returns the index of the first block id that the group does not have, or -1.
func outOfTable(table []uint32, blocks uint32) int {
	for i, b := range table {
		if b >= blocks {
			return i
		}
	}
	return -1
}
