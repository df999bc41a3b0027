package parseblock

import (
	"bytes"
	"fmt"
	"slices"
	"testing"

	"github.com/kvspray/kvspray/layout"
)

// DeepSeek-V4 as vLLM stores it in memory, written from the engine's definitions without any code
// of this package: one slab of equal blocks for all groups, each layer at an offset in the block.
//
//   - The main cache has an entry for every 4 tokens (CSA) or 128 (HCA) of a block: 576 bytes each,
//     448 fp8 and 64 bf16, then 8 scale bytes each. Pages are padded to 576 bytes. The sliding
//     cache of every layer is the same with an entry for each token, and sees 128.
//   - The indexer of a CSA layer has 128 bytes an entry, then 4 bytes of scale each.
//   - The compressor keeps fp32 of the tokens that are not in an entry yet: 4 x 2048 numbers a
//     block with CSA, looking back 8 tokens, 8 x 1024 with HCA, looking back 128.
type v4Engine struct {
	main, sliding      int // tokens of a block
	state4, state128   int
	csa, hca           []int // layers of the model
	slab, blocks, lead int   // bytes of a block; blocks; bytes in front of the slab
	reverse            bool  // the caches of a block lie in the other order
}

// v4Cache is one group: the same kind of cache of some layers.
type v4Cache struct {
	kind   string
	layers []int
	n      int // tokens of a block
	ratio  int // tokens of an entry
	window int
	entry  int // bytes of an entry
	scale  int // bytes of its scale, behind all entries of the block
	at     map[int]int
	table  []uint32
}

func (c *v4Cache) entries() int { return c.n / c.ratio }

// page is what the engine allocates for a block of a layer.
func (c *v4Cache) page() int {
	bytes := c.entries() * (c.entry + c.scale)
	return (bytes + 575) / 576 * 576
}

func (e *v4Engine) caches() []*v4Cache {
	every := append(append([]int{}, e.csa...), e.hca...)
	all := []*v4Cache{
		{kind: "csa", layers: e.csa, n: e.main, ratio: 4, entry: 576, scale: 8},
		{kind: "indexer", layers: e.csa, n: e.main, ratio: 4, entry: 128, scale: 4},
		{kind: "hca", layers: e.hca, n: e.main, ratio: 128, entry: 576, scale: 8},
		{kind: "sliding", layers: every, n: e.sliding, ratio: 1, window: 128, entry: 576, scale: 8},
		{kind: "state4", layers: e.csa, n: e.state4, ratio: 1, window: 8, entry: 4 * 2048},
		{kind: "state128", layers: e.hca, n: e.state128, ratio: 1, window: 128, entry: 4 * 1024},
	}
	for _, c := range all {
		c.at = map[int]int{}
		// every group begins at the front of a block: a block belongs to one group at a time
		off := 0
		for i := range c.layers {
			l := c.layers[i]
			if e.reverse {
				l = c.layers[len(c.layers)-1-i]
			}
			c.at[l] = off
			off += c.page()
		}
		e.slab = max(e.slab, off)
	}
	return all
}

// address returns the address of byte x of the entry that contains token t of the sequence; x
// continues into the scale.
func (e *v4Engine) address(c *v4Cache, layer, t, x int) int {
	slot := t % c.n / c.ratio
	in := slot*c.entry + x
	if x >= c.entry {
		in = c.entries()*c.entry + slot*c.scale + x - c.entry
	}
	return e.lead + int(c.table[t/c.n])*e.slab + c.at[layer] + in
}

// byteOf is the model's value of that byte.
func (c *v4Cache) byteOf(layer, t, x int) byte {
	h := uint32(layer)*2654435761 + uint32(t/c.ratio)*2246822519 + uint32(x)*3266489917 +
		uint32(c.kind[0])*668265263 + uint32(len(c.kind))*374761393
	h = (h ^ h>>15) * 2246822519
	return byte(h >> 16)
}

// write fills in the engine's content for the tokens from first(layer) on: the complete entries.
func (e *v4Engine) write(mem []byte, c *v4Cache, first func(layer int) int, tokens int) (n int) {
	for _, l := range c.layers {
		for t := first(l); t+c.ratio <= tokens; t += c.ratio {
			for x := range c.entry + c.scale {
				mem[e.address(c, l, t, x)] = c.byteOf(l, t, x)
				n++
			}
		}
	}
	return n
}

// layout returns the layout that a shim would register.
func (e *v4Engine) layout(caches []*v4Cache) *layout.Layout {
	out := &layout.Layout{DType: "fp8"}
	for _, c := range caches {
		g := layout.Group{TokensPerBlock: uint32(c.n), NumBlocks: uint32(e.blocks), Strategy: DeepSeekV4,
			Params: map[string]int64{"compress_ratio": int64(c.ratio)}}
		switch c.kind {
		case "indexer":
			g.Strategy = DSAIndexer
			g.Params["kernel_tokens"] = int64(c.n)
		case "state4", "state128":
			g.Strategy, g.Params = DeepSeekV4Compressor, map[string]int64{}
		}
		if c.window > 0 {
			g.Params["window"] = int64(c.window)
		}
		for _, l := range c.layers {
			g.Layers = append(g.Layers, layout.Layer{Name: fmt.Sprintf("layers.%d.%s", l, c.kind),
				Base: uint64(e.lead + c.at[l]), BlockStride: uint64(e.slab),
				PageBytes: uint64(c.entries() * (c.entry + c.scale))})
		}
		out.Groups = append(out.Groups, g)
	}
	return out
}

// TestDeepSeekV4Moves: main caches of both ratios, indexer, sliding caches and the compressor's
// state of one prompt, from slab to slab. Every byte of the receiver's memory is compared, other
// prompts' bytes included.
func TestDeepSeekV4Moves(t *testing.T) {
	reg := Default()
	csa, hca := []int{0, 2}, []int{1, 3}
	base := v4Engine{main: 256, sliding: 64, state4: 4, state128: 8, csa: csa, hca: hca}
	small := v4Engine{main: 128, sliding: 32, state4: 4, state128: 8, csa: csa, hca: hca,
		reverse: true, lead: 4096}
	odd := v4Engine{main: 384, sliding: 48, state4: 12, state128: 4, csa: csa, hca: hca, lead: 64}
	onlyHCA, onlyCSA := base, small
	onlyHCA.csa, onlyCSA.hca = nil, nil
	if p := (&v4Cache{n: 256, ratio: 4, entry: 576, scale: 8}).page(); p != 37440 {
		t.Fatalf("a page of 64 entries is %d bytes, and not the engine's 37440", p)
	}
	for name, c := range map[string]struct{ from, to []v4Engine }{
		"alike":              {[]v4Engine{base}, []v4Engine{base}},
		"to smaller blocks":  {[]v4Engine{base}, []v4Engine{small}},
		"to larger blocks":   {[]v4Engine{small}, []v4Engine{base}},
		"no multiples":       {[]v4Engine{base}, []v4Engine{odd}},
		"and back":           {[]v4Engine{odd}, []v4Engine{base}},
		"a stage of each":    {[]v4Engine{onlyHCA, onlyCSA}, []v4Engine{base}},
		"to a stage of each": {[]v4Engine{small}, []v4Engine{onlyHCA, onlyCSA}},
	} {
		for _, tokens := range []int{3, 4, 127, 128, 131, 300} {
			t.Run(fmt.Sprint(name, ", ", tokens), func(t *testing.T) {
				t.Parallel()
				var from []*v4Side
				for i := range c.from {
					s := v4SideOf(c.from[i], tokens, 3)
					for _, k := range s.caches {
						s.e.write(s.mem[0], k, func(int) int { return k.kept(tokens) }, tokens)
					}
					from = append(from, s)
				}
				for i := range c.to {
					v4Move(t, reg, from, v4SideOf(c.to[i], tokens, 5), tokens)
				}
			})
		}
	}
}

// kept is the first token of the block in which the window begins.
func (c *v4Cache) kept(tokens int) int {
	if c.window == 0 || tokens < c.window {
		return 0
	}
	return (tokens - c.window + 1) / c.n * c.n
}

// v4Side is an engine with memory that is full of other content.
type v4Side struct {
	end    // of one region
	e      *v4Engine
	caches []*v4Cache
}

// v4SideOf draws the block tables of all groups from one pool, like the engine, in steps that are
// prime to its blocks.
func v4SideOf(e v4Engine, tokens, step int) *v4Side {
	s := &v4Side{e: &e, caches: e.caches()}
	need := 0
	for _, c := range s.caches {
		need += (tokens-1)/c.n + 1
	}
	e.blocks = need + 2
	for e.blocks%step == 0 {
		e.blocks++
	}
	id := 1
	for _, c := range s.caches {
		for range (tokens-1)/c.n + 1 {
			c.table = append(c.table, uint32(id*step%e.blocks))
			id++
		}
		s.tables = append(s.tables, c.table)
	}
	s.l = e.layout(s.caches)
	s.mem = [][]byte{random(uint64(e.lead+e.blocks*e.slab), uint64(step))}
	return s
}

func v4Move(t *testing.T, reg *Registry, from []*v4Side, d *v4Side, tokens int) {
	if err := reg.Validate(d.l, []uint64{uint64(len(d.mem[0]))}); err != nil {
		t.Fatal(err)
	}
	want, byRuns, bytesOf := bytes.Clone(d.mem[0]), bytes.Clone(d.mem[0]), 0
	for _, c := range d.caches {
		// Blocks of a window that the source has partly freed arrive without that part.
		first := func(layer int) int {
			n := c.kept(tokens)
			for _, s := range from {
				for _, o := range s.caches {
					if o.kind == c.kind && slices.Contains(o.layers, layer) {
						n = max(n, o.kept(tokens))
					}
				}
			}
			return n
		}
		bytesOf += d.e.write(want, c, first, tokens)
	}
	var ends []*end
	for _, s := range from {
		ends = append(ends, &s.end)
	}
	give(t, reg, ends, &d.end, uint64(tokens), make([]uint32, len(d.l.Groups)),
		func(plan *Plan, s *end) {
			bytesOf -= int(plan.Space().TotalBytes())
			for l := range d.l.NumLayers() {
				for part := range plan.Parts(l) {
					runs, _, _, err := plan.Runs(nil, l, part, s.tables, d.tables)
					if err != nil {
						t.Fatal(err)
					}
					for p := range layout.Explode(runs) {
						copy(byRuns[p.DstOff:p.DstOff+p.Len], s.mem[0][p.SrcOff:])
					}
				}
			}
		})
	if bytesOf != 0 {
		t.Errorf("the plans move %d bytes less than the engine has", bytesOf)
	}
	for what, got := range map[string][]byte{"chunks": d.mem[0], "runs": byRuns} {
		if !bytes.Equal(got, want) {
			at := 0
			for got[at] == want[at] {
				at++
			}
			t.Fatalf("%s: byte %d of %d, in block %d at %d, is %#x and not %#x", what, at, len(want),
				(at-d.e.lead)/d.e.slab, (at-d.e.lead)%d.e.slab, got[at], want[at])
		}
	}
}
