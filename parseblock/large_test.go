package parseblock

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/transfer"
)

// large is an engine's rank of 80 layers of 8 KV heads, as Llama-3.1-70B has them: 320 KiB a token.
func large(strategy string, tokensPerBlock, tokens uint32, rank, size uint64) *layout.Layout {
	_, own := HeadShare(8, rank, size)
	page := uint64(tokensPerBlock) * own * 512
	blocks := (tokens-1)/tokensPerBlock + 1
	g := layout.Group{TokensPerBlock: tokensPerBlock, NumBlocks: blocks, Strategy: strategy,
		Params: map[string]int64{"kv_heads": 8, "tp_size": int64(size), "tp_rank": int64(rank)}}
	for i := range 80 {
		g.Layers = append(g.Layers, layout.Layer{Name: fmt.Sprint("layers.", i), Index: i,
			Base: uint64(i) * uint64(blocks) * page, BlockStride: page, PageBytes: page})
	}
	return &layout.Layout{Groups: []layout.Group{g}}
}

// TestMoreThan32Bits plans prompts of more than 4 GiB for one rank: a chunk's content is where
// multiplication puts it, on both sides, and runs move every byte. Only the plan allocates.
func TestMoreThan32Bits(t *testing.T) {
	reg := Default()
	const tokens = 131072 - 5
	for _, c := range []struct {
		name     string
		src, dst *layout.Layout
		gib      uint64
	}{
		{"as it is", large(PackedNHD, 16, tokens, 0, 1), large(PackedNHD, 16, tokens, 0, 1), 40},
		{"one of two ranks, other blocks", large(PackedNHD, 16, tokens, 1, 2), large(PackedHND, 64,
			tokens, 0, 1), 20},
		{"one of eight ranks", large(PackedHND, 16, tokens, 5, 8), large(PackedHND, 16, tokens, 5, 8), 5},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, l := range []*layout.Layout{c.src, c.dst} {
				if err := layout.ValidateForeign(l, reg.Planes); err != nil {
					t.Fatal(err)
				}
			}
			m, err := NewMatch(reg, c.src, c.dst, nil)
			if err != nil {
				t.Fatal(err)
			}
			p, err := m.Plan(tokens, []uint32{0})
			if err != nil {
				t.Fatal(err)
			}
			sp := p.Space()
			if sp.TotalBytes()>>30 != c.gib-1 || sp.NumChunks() <= 1<<16 {
				t.Fatalf("%d bytes in %d chunks, a little less than %d GiB expected", sp.TotalBytes(),
					sp.NumChunks(), c.gib)
			}
			from, to := evenly(c.src), evenly(c.dst)
			src, err := p.Side(reg, c.src, from)
			if err != nil {
				t.Fatal(err)
			}
			dst, err := p.Side(reg, c.dst, to)
			if err != nil {
				t.Fatal(err)
			}
			var moved uint64
			for l := range c.dst.NumLayers() {
				for part := range p.Parts(l) {
					runs, _, _, err := p.Runs(nil, l, part, from, to)
					if err != nil {
						t.Fatal(err)
					}
					for i := range runs {
						moved += runs[i].Bytes()
					}
				}
			}
			if moved != sp.TotalBytes() {
				t.Errorf("runs move %d bytes of %d", moved, sp.TotalBytes())
			}
			// A chunk of every layer, and those around the limits of 16 and 32 bits.
			chunks := []uint32{0, 1<<16 - 1, 1 << 16, 1<<16 + 1, sp.NumChunks() - 1}
			for l := range sp.NumSegments() {
				r, _ := sp.Segment(l)
				chunks = append(chunks, r.First, r.First+r.Count/2, r.End()-1)
			}
			for _, chunk := range chunks {
				r := transfer.Range{First: chunk, Count: 1}
				want, err := sp.Bytes(r)
				if err != nil {
					t.Fatal(err)
				}
				for _, side := range []*Resolver{src, dst} {
					pieces, err := side.Append(nil, r)
					if err != nil {
						t.Fatal(err)
					}
					var n uint64
					l := &side.layout.Groups[0].Layers[sp.SegmentOf(chunk)]
					end := l.Base + uint64(side.layout.Groups[0].NumBlocks)*l.BlockStride
					for _, x := range pieces {
						n += x.Len
						if x.Off < l.Base || x.Off+x.Len > end {
							t.Fatalf("chunk %d: bytes [%d, +%d) are not of layer %q", chunk, x.Off, x.Len, l.Name)
						}
					}
					if n != want {
						t.Fatalf("chunk %d: %d bytes of %d", chunk, n, want)
					}
				}
				if seg := sp.SegmentOf(chunk); c.src.Geometry() == c.dst.Geometry() {
					// Tables in order: the segment is the layer.
					first, _ := sp.Segment(seg)
					l := &c.dst.Groups[0].Layers[seg]
					at := l.Base + uint64(chunk-first.First)*transfer.ChunkBytes
					if got, err := dst.Append(nil, r); err != nil || got[0].Off != at {
						t.Fatalf("chunk %d begins at %v (%v), want %d", chunk, got, err, at)
					}
				}
			}
			if r := p.Ready(79, tokens, true); r.End() != sp.NumChunks() {
				t.Errorf("all that is ready of the last layer is %+v of %d chunks", r, sp.NumChunks())
			}
		})
	}
}

// evenly is a table of all blocks in order.
func evenly(l *layout.Layout) [][]uint32 {
	return [][]uint32{seq(uint64(l.Groups[0].NumBlocks))}
}

// TestTooLarge: beyond the limit of a transfer, the refusal names the field and the remedy, also if
// the product exceeds 64 bits.
func TestTooLarge(t *testing.T) {
	reg := Default()
	mla := func(page uint64) *layout.Layout {
		return &layout.Layout{Groups: []layout.Group{{TokensPerBlock: 1, NumBlocks: 1 << 31,
			Strategy: MLA,
			Layers: []layout.Layer{{Name: "a", PageBytes: page, BlockStride: page},
				{Name: "b", PageBytes: page, BlockStride: page}}}}}
	}
	const maxBytes = transfer.MaxSlotChunks * transfer.ChunkBytes
	for _, c := range []struct {
		page   uint64
		tokens uint32
		layer  string // the layer that exceeds the limit; "": none
	}{
		{1 << 16, transfer.MaxSlotChunks / 2, ""},
		{1 << 16, transfer.MaxSlotChunks/2 + 1, "b"},
		{maxBytes / 2, 1, ""},
		{maxBytes/2 + 1, 1, "b"},
		{maxBytes, 1, "b"},
		{maxBytes + 1, 1, "a"},
		{1 << 40, math.MaxUint32, "a"},
		{1 << 62, math.MaxUint32, "a"},
		{1 << 62, 4, "a"}, // 2^64 and nothing else
	} {
		l := mla(c.page)
		p, err := NewPlan(reg, l, l, c.tokens, []uint32{0})
		switch {
		case c.layer == "" && (err != nil || p.Space().TotalBytes() != 2*uint64(c.tokens)*c.page):
			t.Errorf("%d tokens of %d bytes: %v", c.tokens, c.page, err)
		case c.layer != "" && (p != nil || err == nil || !strings.Contains(err.Error(),
			fmt.Sprintf("tokens = %d: ", c.tokens)) ||
			!strings.Contains(err.Error(), fmt.Sprintf("(256 GiB) at layer %q; divide", c.layer))):
			t.Errorf("%d tokens of %d bytes: got %v, want it refused at layer %q", c.tokens, c.page,
				err, c.layer)
		}
	}
}
