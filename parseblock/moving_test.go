package parseblock

import (
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/transfer"
)

// end is one side of a plan: a layout, a block table for each of its groups, and memory by region.
type end struct {
	l      *layout.Layout
	tables [][]uint32
	mem    [][]byte
}

// carry moves a plan from one side's memory to the other's, a chunk at a time, like lanes: each
// side resolves its own pieces.
func carry(t rapid.TB, reg *Registry, plan *Plan, src, dst *end) {
	t.Helper()
	from, err := plan.Side(reg, src.l, src.tables)
	if err != nil {
		t.Fatal(err)
	}
	to, err := plan.Side(reg, dst.l, dst.tables)
	if err != nil {
		t.Fatal(err)
	}
	for c := range plan.Space().NumChunks() {
		r := transfer.Range{First: c, Count: 1}
		ps, err := from.Append(nil, r)
		if err != nil {
			t.Fatal(err)
		}
		pd, err := to.Append(nil, r)
		if err != nil {
			t.Fatal(err)
		}
		var flat []byte
		for _, p := range ps {
			flat = append(flat, src.mem[p.Region][p.Off:p.Off+p.Len]...)
		}
		for _, p := range pd {
			flat = flat[copy(dst.mem[p.Region][p.Off:p.Off+p.Len], flat):]
		}
		if len(flat) != 0 {
			t.Fatalf("%d bytes of chunk %d have no place", len(flat), c)
		}
	}
}

// give divides the receiver's missing bytes over the sources, proves the division, and moves each
// share; it calls moved, if set, for each.
func give(t rapid.TB, reg *Registry, sources []*end, dst *end, tokens uint64, skips []uint32,
	moved func(*Plan, *end)) {
	t.Helper()
	var ls []*layout.Layout
	for _, s := range sources {
		ls = append(ls, s.l)
	}
	shares, err := Assign(reg, ls, dst.l, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := Prove(reg, ls, dst.l, shares); err != nil {
		t.Fatal(err)
	}
	for i := range shares {
		src := sources[shares[i].Source]
		plan, err := NewShare(reg, src.l, dst.l, &shares[i], uint32(tokens), skips)
		if err != nil {
			t.Fatal(err)
		}
		carry(t, reg, plan, src, dst)
		if moved != nil {
			moved(plan, src)
		}
	}
}

// differ checks the differences of two layouts' descriptions and whether their fingerprints differ.
func differ(t *testing.T, reg *Registry, a, b *layout.Layout, want []string) (fingerprints bool) {
	t.Helper()
	da, err := reg.Describe(a)
	if err != nil {
		t.Fatal(err)
	}
	db, err := reg.Describe(b)
	if err != nil {
		t.Fatal(err)
	}
	diff := da.Diff(db)
	if len(diff) != len(want) {
		t.Fatalf("differences %q, want %q", diff, want)
	}
	for i, w := range want {
		if !strings.Contains(diff[i], w) {
			t.Errorf("difference %q, want %q", diff[i], w)
		}
	}
	return da.Hash() != db.Hash()
}
