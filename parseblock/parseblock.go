// Package parseblock knows the inside of pages: strategies that turn (layouts, block tables, token range) into runs of bytes,
// and the plan of a transfer space made from them.
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

// Side is one end of a copy: a layer of a group, and the block table of a sequence in it. Table[i] holds tokens
// [i*TokensPerBlock, (i+1)*TokensPerBlock).
type Side struct {
	Group *layout.Group
	Layer *layout.Layer
	Table []uint32
}

// Strategy is one kind of page. Implementations are pure and safe for concurrent use.
type Strategy interface {
	Name() string
	// Planes appends the planes of one page, in the order of the transfer space.
	Planes(dst []layout.Plane, g *layout.Group, l *layout.Layer) ([]layout.Plane, error)
	// ParseBlock appends the runs that copy tokens from src to dst, coalesced, in token order within each plane. Both sides
	// name this strategy. On an error dst comes back as it was.
	ParseBlock(dst []layout.Run, from, to Side, tokens layout.TokenRange) ([]layout.Run, error)
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
