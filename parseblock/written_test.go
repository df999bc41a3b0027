package parseblock

import (
	"testing"

	"github.com/kvspray/kvspray/layout"
)

// TestWritten: the entries of a block table that are said to be written are those that a plan's memory is in, and no others.
func TestWritten(t *testing.T) {
	const n, blocks, page = 16, 8, 16 * 512
	for name, g := range map[string]layout.Group{
		"full":   {Strategy: PackedNHD, Params: map[string]int64{"heads": 2}},
		"window": {Strategy: PackedNHD, Params: map[string]int64{"heads": 2, "window": 40}},
		"latent": {Strategy: MLA, Params: map[string]int64{}},
	} {
		g.TokensPerBlock, g.NumBlocks = n, blocks
		g.Layers = []layout.Layer{{Name: "l0", BlockStride: page, PageBytes: page}}
		l := &layout.Layout{DType: "bfloat16", Groups: []layout.Group{g}}
		if err := Default().Validate(l, []uint64{blocks * page}); err != nil {
			t.Fatal(name, err)
		}
		m, err := NewMatch(Default(), l, l, nil)
		if err != nil {
			t.Fatal(name, err)
		}
		table := []uint32{0, 1, 2, 3, 4, 5, 6, 7}
		for tokens := uint32(1); tokens <= n*blocks; tokens++ {
			for skip := uint32(0); skip <= tokens+n; skip += n {
				p, err := m.Plan(tokens, []uint32{skip})
				if err != nil {
					t.Fatal(name, tokens, skip, err)
				}
				side, err := p.Side(Default(), l, [][]uint32{table})
				if err != nil {
					t.Fatal(err)
				}
				var touched, want [blocks]bool
				if sp := p.Space(); sp.NumChunks() > 0 {
					r, _ := sp.Segment(0)
					pieces, err := side.Append(nil, r)
					if err != nil {
						t.Fatal(err)
					}
					for _, x := range pieces {
						for at := x.Off / page; at <= (x.Off+x.Len-1)/page; at++ {
							touched[at] = true
						}
					}
				}
				first, end := m.Written(0, tokens, skip)
				for i := first; i < end; i++ {
					want[i] = true
				}
				if touched != want {
					t.Fatalf("%s: %d tokens, %d skipped: [%d, %d) is said, %v is written", name, tokens, skip, first, end, touched)
				}
			}
		}
	}
}
