package parseblock

import (
	"bytes"
	"errors"
	"testing"

	"github.com/kvspray/kvspray/layout"
)

// sparseSide is an engine of DeepSeek-V3.2: per layer rows of 656 bytes and the indexer's keys,
// under one block table of blocks of n tokens, which have kernel pages of 64.
func sparseSide(n uint32, layers int, sameTable bool) (*layout.Layout, uint64) {
	const blocks = 5
	rows := layout.Group{TokensPerBlock: n, NumBlocks: blocks, Strategy: FP8DSMLA}
	keys := layout.Group{TokensPerBlock: n, NumBlocks: blocks, Strategy: DSAIndexer,
		SameTable: sameTable}
	var at uint64
	for i := range layers {
		for _, g := range []struct {
			of   *layout.Group
			name string
			page uint64
		}{{&rows, "attn", 656 * uint64(n)}, {&keys, "keys", 132 * uint64(n)}} {
			name := string(rune('0'+i)) + "." + g.name
			g.of.Layers = append(g.of.Layers, layout.Layer{Name: name, Index: i, Base: at,
				BlockStride: g.page, PageBytes: g.page})
			at += blocks * g.page
		}
	}
	return &layout.Layout{DType: "fp8", Groups: []layout.Group{rows, keys}}, at
}

// TestOneTableForSeveralGroups: groups that share a block table have one table and one skip; each
// byte has the same place as with separate tables.
func TestOneTableForSeveralGroups(t *testing.T) {
	reg := Default()
	const tokens, layers = 150, 2
	src, size := sparseSide(128, layers, true)
	dst, room := sparseSide(64, layers, true)
	if err := reg.Validate(src, []uint64{size}); err != nil {
		t.Fatal(err)
	}
	from, to := []uint32{3, 1}, []uint32{2, 0, 4}
	for _, skip := range []uint32{0, 64} {
		plan, err := NewPlan(reg, src, dst, tokens, []uint32{skip})
		if err != nil {
			t.Fatal(err)
		}
		one := end{l: src, tables: [][]uint32{from}, mem: [][]byte{random(size, 1)}}
		got := end{l: dst, tables: [][]uint32{to}, mem: [][]byte{make([]byte, room)}}
		carry(t, reg, plan, &one, &got)

		apart, _ := sparseSide(128, layers, false)
		dstApart, _ := sparseSide(64, layers, false)
		plan, err = NewPlan(reg, apart, dstApart, tokens, []uint32{skip, skip})
		if err != nil {
			t.Fatal(err)
		}
		two := end{l: apart, tables: [][]uint32{from, from}, mem: one.mem}
		want := end{l: dstApart, tables: [][]uint32{to, to}, mem: [][]byte{make([]byte, room)}}
		carry(t, reg, plan, &two, &want)
		if !bytes.Equal(got.mem[0], want.mem[0]) {
			t.Fatalf("skip %d: other bytes than with a table for each group", skip)
		}
	}
	m, err := NewMatch(reg, src, dst, nil)
	if err != nil {
		t.Fatal(err)
	}
	if first, last := m.Written(0, tokens, 64); first != 1 || last != 3 {
		t.Fatalf("written [%d, %d)", first, last)
	}
	if _, err := m.Plan(tokens, []uint32{0, 0}); !errors.As(err, new(*layout.Error)) {
		t.Fatalf("a skip for each group: %v", err)
	}
	plan, err := m.Plan(tokens, []uint32{0})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := plan.Side(reg, dst, [][]uint32{to, to}); err == nil {
		t.Fatal("a table for each group was taken")
	}
	short, err := plan.Side(reg, dst, [][]uint32{to[:2]})
	if err != nil {
		t.Fatal(err)
	}
	if err := short.Covers(); err == nil {
		t.Fatal("two blocks of three cover the prompt")
	}
}
