package parseblock

import (
	"strings"
	"testing"

	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/transfer"
)

// FuzzForeign: any layouts that two peers or engines send are refused, or pass through every use of
// a layout, with each other and each with itself: nothing panics, no offset leaves the checked
// range, and memory is bounded by the sent bytes and by named bounds.
func FuzzForeign(f *testing.F) {
	reg := Default()
	for _, fam := range families {
		var all [][]byte
		for i, k := range fam.kinds {
			d := dims{layers: 2, n: 4, blocks: 3, kvHeads: 2, head: 2, value: 2, scale: 1, size: 1,
				kHeads: 1, kDim: 1, vHeads: 1, vDim: 1, histor: 1, elem: 2, ratio: 1, tile: 4}
			if i%2 == 1 {
				d.size, d.rank = 1+uint64(i)%3/2, 0
			}
			l := fam.make(k, &d).layout()
			l.Identity = map[string]string{IdentityWeights: "1"}
			b, err := l.Marshal()
			if err != nil {
				f.Fatal(err)
			}
			all = append(all, b)
		}
		for i := range all {
			f.Add(all[i], all[(i+1)%len(all)], uint32(7))
		}
	}
	f.Fuzz(func(t *testing.T, a, b []byte, tokens uint32) {
		var ls []*layout.Layout
		for _, in := range [][]byte{a, b} {
			// The check may make 65,536 intervals of a layout, and sort them twice.
			testutil.AllocatesAtMost(t, 48<<20+64*uint64(len(in)), "parsed", func() {
				l, err := layout.Unmarshal(in)
				if err == nil {
					err = layout.ValidateForeign(l, reg.Planes)
				}
				if err == nil {
					ls = append(ls, l)
				}
			})
		}
		for _, l := range ls {
			testutil.AllocatesAtMost(t, planesOf(t, reg, l)*(8<<10), "described", func() {
				if _, err := reg.Describe(l); err != nil {
					t.Fatalf("it is valid, and cannot be described: %v", err)
				}
			})
			foreignPair(t, reg, l, l, tokens)
		}
		if len(ls) == 2 {
			foreignPair(t, reg, ls[0], ls[1], tokens)
			foreignPair(t, reg, ls[1], ls[0], tokens)
		}
	})
}

func planesOf(t *testing.T, reg *Registry, l *layout.Layout) (n uint64) {
	for gi := range l.Groups {
		for li := range l.Groups[gi].Layers {
			ps, err := reg.Planes(nil, &l.Groups[gi], &l.Groups[gi].Layers[li])
			if err != nil {
				t.Fatal(err)
			}
			n += uint64(len(ps))
		}
	}
	return n
}

// foreignPair plans from one foreign layout to another, or to itself.
func foreignPair(t *testing.T, reg *Registry, src, dst *layout.Layout, tokens uint32) {
	planes := planesOf(t, reg, src) + planesOf(t, reg, dst)
	var m *Match
	var err error
	testutil.AllocatesAtMost(t, planes*(4<<10), "paired", func() {
		m, err = NewMatch(reg, src, dst, nil)
	})
	// Prove examines at most maxExtents pieces of each side, in growing lists; one run per head.
	testutil.AllocatesAtMost(t, planes*(16<<10)+8*maxExtents*16+4*maxHeads*64, "divided", func() {
		shares, err := Assign(reg, []*layout.Layout{src, src}, dst,
			func(i int) uint64 { return uint64(i) })
		if err == nil {
			err = Prove(reg, []*layout.Layout{src, src}, dst, shares)
		}
		if m != nil && src == dst && err != nil && !strings.Contains(err.Error(), "too fine") {
			t.Fatalf("it cannot be moved to where it is: %v", err)
		}
	})
	if err != nil {
		return // such as two layers of the model with one name
	}
	// As many tokens as there are blocks for, bounded by the test's time.
	tokens = max(tokens, 1)
	for _, l := range []*layout.Layout{src, dst} {
		for gi := range l.Groups {
			g := &l.Groups[gi]
			tokens = uint32(min(uint64(tokens), uint64(min(g.NumBlocks, 300))*uint64(g.TokensPerBlock)))
		}
	}
	var p *Plan
	var sides [2]*Resolver
	testutil.AllocatesAtMost(t, planes*(2<<10)+(4<<10)*(layout.MaxGroups), "planned", func() {
		if p, err = m.Plan(tokens, make([]uint32, len(dst.Groups))); err != nil {
			return // larger than a transfer
		}
		for i, l := range []*layout.Layout{src, dst} {
			tables := make([][]uint32, len(l.Groups))
			for gi := range l.Groups {
				tables[gi] = seq((uint64(tokens)-1)/uint64(l.Groups[gi].TokensPerBlock) + 1)
			}
			if sides[i], err = p.Side(reg, l, tables); err != nil {
				t.Fatal(err)
			}
		}
	})
	if err != nil {
		return
	}
	sp := p.Space()
	for seg := range sp.NumSegments() {
		r, bytes := sp.Segment(seg)
		if bytes == 0 {
			continue
		}
		for _, c := range []uint32{r.First, r.End() - 1} {
			one := transfer.Range{First: c, Count: 1}
			for _, side := range sides {
				var pieces []layout.Piece
				// At worst pieces of one byte each, in a list that doubles.
				testutil.AllocatesAtMost(t, 3*24*transfer.ChunkBytes, "resolved", func() {
					pieces,
						err = side.Append(nil, one)
				})
				if err != nil {
					t.Fatal(err)
				}
				var n uint64
				for _, x := range pieces {
					if n += x.Len; x.Off+x.Len < x.Off || x.Off+x.Len > 1<<63 {
						t.Fatalf("%+v", x)
					}
				}
				if want, err := sp.Bytes(one); err != nil || n != want {
					t.Fatalf("chunk %d: %d bytes of %d, %v", c, n, want, err)
				}
			}
		}
	}
}
