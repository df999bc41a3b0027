// Package parseblock describes the inside of pages: strategies that turn (layouts, block tables,
// token range) into runs of bytes, and the plan of a transfer space made from them.
//
// A strategy only returns the planes of a page (layout.Plane: offset, cells, strides on three
// axes). One mechanism does the rest: it pairs planes of two layouts with the same role, cuts them
// to the heads that both ranks have, and walks them block by block. Layouts of different order,
// block size, tensor or pipeline parallelism are therefore the general case, and equal layouts the
// special case that merges into long pieces. A transfer that would need a conversion (another
// dtype, another quantisation, an opaque page of another backend) is refused with the name of every
// differing field.
//
// Copies have two forms. Runs cover both sides, two axes each, for any number of tokens (Template,
// Work.Runs): they count, prove and explain a plan. Pieces cover one side and a few chunks
// (Resolver): lanes move them. Neither is ever made for a whole prompt.
//
// A model has several groups of layers, each with its own block table. Three such models, with the
// position of their data and the parts that move:
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
// Laws, tested by property against a naive byte copy: exactly the chosen tokens move, no two runs
// overlap, every byte lies inside the layer's pages, and no plan results from an invalid input.
// Appending allocates nothing while the caller's slice has room.
//
// Invariants: layouts given to this package have passed Registry.Validate. Block ids are checked
// against the layout here whenever a table arrives. The package is pure: no clock, no I/O, no
// goroutine.
package parseblock

import (
	"fmt"
	"slices"

	"github.com/kvspray/kvspray/layout"
)

// Strategy is one kind of page. Implementations are pure and safe for concurrent use.
type Strategy interface {
	Name() string
	// Planes appends the planes of one page, in the order of the transfer space. They depend only
	// on the group and the layer's page bytes and block stride: layers with equal values have the
	// same planes. If the layer is nil, nothing is appended, and the group's parameters are checked
	// as far as possible.
	Planes(dst []layout.Plane, g *layout.Group, l *layout.Layer) ([]layout.Plane, error)
}

// Registry holds the strategies by name. Main fills it; it is read-only afterwards.
type Registry struct {
	byName map[string]Strategy
}

// NewRegistry returns a registry of the given strategies. Two strategies of one name are an error.
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
func (r *Registry) Planes(dst []layout.Plane, g *layout.Group, l *layout.Layer) ([]layout.Plane,
	error) {
	s, ok := r.byName[g.Strategy]
	if !ok {
		return nil, &layout.Error{Field: "strategy", Value: fmt.Sprintf("%q", g.Strategy),
			Problem: "is unknown here",
			Remedy:  fmt.Sprintf("use one of %q, or a newer sidecar", r.Names())}
	}
	return s.Planes(dst, g, l)
}

// Validate checks a layout against its registered regions.
func (r *Registry) Validate(l *layout.Layout, regionBytes []uint64) error {
	return l.Validate(regionBytes, r.Planes)
}

// Side is one end of a template: a layer of a group.
type Side struct {
	Group *layout.Group
	Layer *layout.Layer
}

// Template is the copy from one layer to another without block tables. It is computed once per pair
// of layouts, read-only and safe for concurrent use.
type Template struct {
	pairs    []pair
	from, to *layout.Group
}

// Template compiles the copy of a layer. The sides may differ in strategy, block size and ranks. A
// template of ranks that share no head is empty.
func (r *Registry) Template(from, to Side) (*Template, error) {
	var planes [2][]sited
	for i, s := range [2]Side{from, to} {
		if s.Group == nil || s.Layer == nil || s.Group.TokensPerBlock == 0 {
			return nil, &layout.Error{Field: [2]string{"from", "to"}[i], Value: "unset",
				Problem: "has no group, layer or block size",
				Remedy:  "pass a validated layout"}
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

// Bytes is the number of bytes that the template moves for each full block of the receiver, or for
// a state.
func (t *Template) Bytes() uint64 {
	var n uint64
	for i := range t.pairs {
		n += t.pairs[i].bytes()
	}
	return n
}

// Append adds the runs that copy tokens from the blocks of one table to those of the other,
// coalesced, in token order within each plane. from[i] holds tokens [i*TokensPerBlock,
// (i+1)*TokensPerBlock). In a compressed cache, the entries completed by a token of the range move;
// in a state cache, the state in the block of the last token. On an error dst is returned
// unchanged.
func (t *Template) Append(dst []layout.Run, from, to []uint32, tokens layout.TokenRange) (
	[]layout.Run, error) {
	if tokens.End <= tokens.Start {
		return dst, &layout.Error{Field: "tokens", Value: fmt.Sprintf("[%d, %d)", tokens.Start,
			tokens.End), Problem: "is empty",
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
			w.one(p.from.off+uint64(from[last/p.from.tokens])*p.from.block,
				p.to.off+uint64(to[last/p.to.tokens])*p.to.block, &p.full)
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
			Problem: fmt.Sprintf("tokens [%d, %d) need %d of %d tokens", t.Start, t.End, last+1, n),
			Remedy:  "pass the whole block table"}
	}
	if i := outOfTable(table[first:last+1], g.NumBlocks); i >= 0 {
		return &layout.Error{Field: fmt.Sprintf("%s.table[%d]", name, int(first)+i),
			Value:   fmt.Sprint(table[int(first)+i]),
			Problem: fmt.Sprintf("the group has %d blocks", g.NumBlocks), Remedy: "pass the engine's own " +
				"block ids"}
	}
	return nil
}

// outOfTable returns the index of the first block id outside the group, or -1.
func outOfTable(table []uint32, blocks uint32) int {
	for i, b := range table {
		if b >= blocks {
			return i
		}
	}
	return -1
}
