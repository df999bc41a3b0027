package parseblock

import (
	"testing"

	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/transfer"
)

// TestWritten: Written returns exactly the entries of a block table in which a plan's memory lies.
func TestWritten(t *testing.T) {
	const n, blocks, page = 16, 8, 16 * 512
	for name, g := range map[string]layout.Group{
		"full":   {Strategy: PackedNHD, Params: map[string]int64{"heads": 2}},
		"window": {Strategy: PackedNHD, Params: map[string]int64{"heads": 2, "window": 40}},
		"latent": {Strategy: MLA, Params: map[string]int64{}},
		"state": {Strategy: ShortConvState, Params: map[string]int64{"v_heads": 1024, "v_dim": 1,
			"conv_len": 4}},
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
					t.Fatalf("%s: %d tokens, %d skipped: want [%d, %d), %v is written", name, tokens, skip,
						first, end, touched)
				}
			}
		}
	}
}

// TestPiecesStayApart: memory that continues at the same offset of another region, or at the end of
// a caller's piece, is a separate piece.
func TestPiecesStayApart(t *testing.T) {
	const page = transfer.ChunkBytes
	for _, strategy := range []string{MLA, DSAIndexer} { // plain pages, and others
		params := map[string]int64{}
		if strategy == DSAIndexer {
			params = map[string]int64{"value_bytes": page / 16 / 2, "scale_bytes": page / 16 / 2,
				"kernel_tokens": 8}
		}
		l := &layout.Layout{Groups: []layout.Group{{TokensPerBlock: 16, NumBlocks: 2, Strategy: strategy,
			Params: params, Layers: []layout.Layer{
				{Name: "a", BlockStride: page, PageBytes: page},
				{Name: "b", Index: 1, Region: 1, Base: page, BlockStride: page, PageBytes: page},
			}}}}
		if err := Default().Validate(l, []uint64{2 * page, 3 * page}); err != nil {
			t.Fatal(err)
		}
		p, err := NewPlan(Default(), l, l, 16, []uint32{0})
		if err != nil {
			t.Fatal(err)
		}
		side, err := p.Side(Default(), l, [][]uint32{{0}})
		if err != nil {
			t.Fatal(err)
		}
		callers := layout.Piece{Region: 1, Off: 1, Len: page - 1}
		both, err := side.Append([]layout.Piece{callers}, p.Space().All())
		if err != nil {
			t.Fatal(err)
		}
		second, _ := p.Space().Segment(1)
		one, err := side.Append([]layout.Piece{callers}, second)
		if err != nil {
			t.Fatal(err)
		}
		for what, got := range map[string][]layout.Piece{"both layers": both, "the second": one} {
			var bytes [2]uint64
			for _, x := range got[1:] {
				bytes[x.Region] += x.Len
			}
			want := [2]uint64{page, page}
			if what == "the second" {
				want[0] = 0
			}
			if got[0] != callers || bytes != want {
				t.Errorf("%s, %s: %+v", strategy, what, got)
			}
		}
	}
}
