package sidecar

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"reflect"
	"runtime"
	"testing"

	"github.com/kvspray/kvspray/control/spray"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/parseblock"
	"github.com/kvspray/kvspray/transfer"
)

// llama8B is one rank of Llama-3.1-8B: 32 layers of 8 heads of 128 bf16, with twice the blocks that
// a prompt of 32,768 tokens takes.
func llama8B(t *testing.T, order string, n uint32, rank, tp int64) *layout.Layout {
	t.Helper()
	a := parseblock.Allocation{Order: order, Layers: 32, Blocks: 2 * 32768 / n, Tokens: n,
		Heads: uint32(8 / tp), Content: 512}
	g, err := a.Group(func(i int) string { return fmt.Sprintf("layers.%d", i) })
	if err != nil {
		t.Fatal(err)
	}
	g.Params["kv_heads"], g.Params["tp_rank"], g.Params["tp_size"] = 8, rank, tp
	return &layout.Layout{Groups: []layout.Group{g}, DType: "bfloat16"}
}

// scattered is a block table in no order.
func scattered(l *layout.Layout, tokens int) [][]uint32 {
	g := &l.Groups[0]
	r := rand.New(rand.NewPCG(1, uint64(tokens)))
	table := make([]uint32, tokens/int(g.TokensPerBlock))
	for i, b := range r.Perm(int(g.NumBlocks))[:len(table)] {
		table[i] = uint32(b)
	}
	return [][]uint32{table}
}

// allocated is what f allocates, the minimum of several tries: whatever else runs in the process
// allocates, too.
func allocated(f func()) uint64 {
	lowest := ^uint64(0)
	var before, after runtime.MemStats
	for range 5 {
		runtime.ReadMemStats(&before)
		f()
		runtime.ReadMemStats(&after)
		lowest = min(lowest, after.TotalAlloc-before.TotalAlloc)
	}
	return lowest
}

// TestListsOfALongPrompt: what exists of a prompt of 32,768 tokens at one time, at either end, in
// lists. The plan is templates beside the engine's own block tables; the scheduler has three bits
// for a chunk of 64 KiB, and the receiver one; a lane has the pieces of the slice that it moves,
// which are as many for a prompt of 4,096 tokens. All of this is less than the prompt's strided
// runs would be, let alone its pieces.
func TestListsOfALongPrompt(t *testing.T) {
	const short, long = 4096, 32768
	cfg := testConfig(t, func(c *config.Config) {
		c.Transports.Order = []string{config.TransSHM, config.TransGDR, config.TransTCP}
	})
	backends, err := newBackends(cfg, nil, func() {}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	slice := uint32(0) // the maximum of chunks that a lane of any transport asks for at once
	for _, b := range backends {
		c := b.Caps()
		slice = max(slice, uint32(max(c.SliceBytes, c.DeviceSlice)/transfer.ChunkBytes))
	}
	reg := parseblock.Default()
	for _, c := range []struct {
		name     string
		from, to *layout.Layout
		piece    uint64 // bytes that lie together, at least, on either side
	}{
		{"alike", llama8B(t, "LBNHC", 16, 0, 1), llama8B(t, "LBNHC", 16, 0, 1), 64 << 10},
		{"TP 2 to 1, heads outside", llama8B(t, "LBHNC", 16, 1, 2), llama8B(t, "LBHNC", 16, 0,
			1), 32 << 10},
		{"TP 2 to 1, tokens outside", llama8B(t, "LBNHC", 16, 1, 2), llama8B(t, "LBNHC", 16, 0,
			1), 2 << 10},
		{"tokens outside to heads outside", llama8B(t, "LBNHC", 16, 0, 1), llama8B(t, "LBHNC", 16,
			0, 1), 512},
		{"blocks of 16 to 64", llama8B(t, "LBNHC", 16, 0, 1), llama8B(t, "LBNHC", 64, 0, 1), 64 << 10},
	} {
		t.Run(c.name, func(t *testing.T) {
			m, err := parseblock.NewMatch(reg, c.from, c.to, nil)
			if err != nil {
				t.Fatal(err)
			}
			var plan *parseblock.Plan
			var sides [2]*parseblock.Resolver
			bind := func(tokens int, tables [2][][]uint32) {
				if plan, err = m.Plan(uint32(tokens), []uint32{0}); err != nil {
					t.Fatal(err)
				}
				for i, l := range []*layout.Layout{c.from, c.to} {
					if sides[i], err = plan.Side(reg, l, tables[i]); err != nil {
						t.Fatal(err)
					}
				}
			}
			var widest [2]int // pieces of a slice, of the short and of the long prompt
			var planned uint64
			for k, tokens := range []int{short, long} {
				tables := [2][][]uint32{scattered(c.from, tokens), scattered(c.to, tokens)}
				planned = allocated(func() { bind(tokens, tables) })
				var buf []layout.Piece
				// a sample, at other places of each layer
				for first := uint32(0); first < plan.Space().NumChunks(); first += 17 * slice {
					for _, s := range sides {
						if buf, err = s.Append(buf[:0], transfer.Range{First: first, Count: min(slice,
							plan.Space().NumChunks()-first)}); err != nil {
							t.Fatal(err)
						}
						widest[k] = max(widest[k], len(buf))
					}
				}
			}
			var runs []layout.Run
			layer := 0 // runs of one
			var pieces uint64
			for l := range c.to.NumLayers() {
				at := len(runs)
				for part := range plan.Parts(l) {
					if runs, _, _, err = plan.Runs(runs, l, part, scattered(c.from, long), scattered(c.to,
						long)); err != nil {
						t.Fatal(err)
					}
				}
				layer = max(layer, len(runs)-at)
			}
			for i := range runs {
				pieces += runs[i].Pieces()
			}
			s := spray.New(spray.Config{})
			peer := s.Peer(transfer.Boot{1}, nil)
			scheduled := allocated(func() { s.Open(peer, 0, 0, plan.Space(), nil) })
			arrived := allocated(func() { transfer.NewBitmap(plan.Space().NumChunks()) })
			list := uint64(widest[1]) * uint64(reflect.TypeFor[mem.Block]().Size())
			strides := uint64(len(runs)) * uint64(reflect.TypeFor[layout.Run]().Size())
			t.Logf("%d MiB: plan %d B, scheduler %d B, bitmap %d B, a slice of %d KiB %d pieces (%d B); "+
				"its %d runs would be %d B, %d of a layer; its pieces %d B",
				plan.Space().TotalBytes()>>20, planned, scheduled, arrived, slice*transfer.ChunkBytes>>10,
				widest[1], list, len(runs), strides, layer,
				pieces*uint64(reflect.TypeFor[layout.IpcBlock]().Size()))
			if planned > 64<<10 {
				t.Errorf("both sides' plans are %d bytes beside the block tables", planned)
			}
			if widest[1] > widest[0] || uint64(widest[1]) > uint64(slice)*transfer.ChunkBytes/c.piece {
				t.Errorf("a slice has %d pieces; of a prompt of %d tokens it has %d, and pieces have %d "+
					"bytes and more", widest[1], short, widest[0], c.piece)
			}
			if chunks := uint64(plan.Space().NumChunks()); scheduled > chunks*3/8+4096 ||
				arrived > chunks/8+4096 {
				t.Errorf("%d chunks are %d bytes to the scheduler and %d to the receiver", chunks,
					scheduled, arrived)
			}
			if all := planned + scheduled + arrived + 2*list; all > strides {
				t.Errorf("a transfer holds %d bytes of lists, its runs would be %d", all, strides)
			}
		})
	}
}

// TestCellsOfASlice: what a slice of 1 MiB takes on the wire of lanes that name memory (a shm pull,
// gdr's GO), in cells of 16 bytes: as pieces and as runs. Those are the most of a prompt's
// slices, which begin anywhere in a page.
func TestCellsOfASlice(t *testing.T) {
	reg := parseblock.Default()
	packed := func(order string, rank, tp int64) *layout.Layout {
		return llama8B(t, order, 16, rank, tp)
	}
	apart := func(tp, rank int64) *layout.Layout { // pools of SGLang: K of a layer, and V of it
		groups := make([]layout.Group, 2)
		for k, strategy := range []string{parseblock.SGLangK, parseblock.SGLangV} {
			g := layout.Group{TokensPerBlock: 16, Strategy: strategy, NumBlocks: 4096, SameTable: k > 0,
				Params: map[string]int64{"kv_heads": 8, "tp_size": tp, "tp_rank": rank}}
			for i := range 32 {
				g.Layers = append(g.Layers, layout.Layer{Name: fmt.Sprintf("layers.%d#%c", i, "kv"[k]),
					Region: layout.RegionIndex(2*i + k), PageBytes: 32 << 10 / uint64(tp),
					BlockStride: 32 << 10 / uint64(tp)})
			}
			groups[k] = g
		}
		return &layout.Layout{Groups: groups, DType: "bfloat16"}
	}
	for _, c := range []struct {
		name     string
		from, to *layout.Layout
		side     int // 0: the source, as a shm pull names it; 1: the receiver, as a GO does
		inOrder  bool
		want     [2]int // cells of pieces, of runs
	}{
		{"alike", packed("LBNHC", 0, 1), packed("LBNHC", 0, 1), 0, false, [2]int{16, 16}},
		{"K and V apart", apart(1, 0), apart(1, 0), 0, false, [2]int{32, 32}},
		{"K and V apart, blocks in order", apart(1, 0), apart(1, 0), 0, true, [2]int{2, 2}},
		{"K and V apart, TP 2 to 1, receiver", apart(2, 1), apart(1, 0), 1, false, [2]int{1024, 96}},
		{"K and V apart, TP 2 to 1, receiver, blocks in order", apart(2, 1), apart(1, 0), 1, true,
			[2]int{1024, 4}},
		{"tokens outside, TP 2 to 1, receiver", packed("LBNHC", 1, 2), packed("LBNHC", 0, 1), 1, false,
			[2]int{512, 48}},
		{"tokens outside, TP 2 to 1, receiver, blocks in order", packed("LBNHC", 1, 2), packed("LBNHC", 0,
			1), 1, true, [2]int{512, 4}},
		{"heads outside for tokens outside, source", packed("LBHNC", 0, 1), packed("LBNHC", 0, 1), 0,
			false, [2]int{2048, 53}},
		{"tokens outside for heads outside, source", packed("LBNHC", 0, 1), packed("LBHNC", 0, 1), 0,
			false, [2]int{2048, 53}},
	} {
		m, err := parseblock.NewMatch(reg, c.from, c.to, nil)
		if err != nil {
			t.Fatal(c.name, err)
		}
		const tokens = 4096
		plan, err := m.Plan(tokens, []uint32{0})
		if err != nil {
			t.Fatal(c.name, err)
		}
		l := []*layout.Layout{c.from, c.to}[c.side]
		table := scattered(l, tokens)
		if c.inOrder {
			for i := range table[0] {
				table[0][i] = uint32(i)
			}
		}
		side, err := plan.Side(reg, l, table)
		if err != nil {
			t.Fatal(c.name, err)
		}
		regions := map[layout.RegionIndex]*mem.Region{}
		var largest [2]int
		const slice = 1 << 20 / transfer.ChunkBytes
		for first := uint32(0); first+slice <= plan.Space().NumChunks(); first += 37 {
			pieces, err := side.Append(nil, transfer.Range{First: first, Count: slice})
			if err != nil {
				t.Fatal(c.name, err)
			}
			var blocks []mem.Block
			for _, p := range pieces {
				if regions[p.Region] == nil {
					regions[p.Region] = new(mem.Region)
				}
				blocks = append(blocks, mem.Block{Region: regions[p.Region], Off: p.Off, Len: p.Len})
			}
			cells := 0
			for rest := blocks; len(rest) > 0; {
				s := mem.Leading(rest)
				cells += 1 + min(int(s.Count)-1, 1) + min(int(s.Rows)-1, 1)
				rest = rest[s.Pieces():]
			}
			largest = [2]int{max(largest[0], len(blocks)), max(largest[1], cells)}
		}
		t.Logf("%s: %d", c.name, largest)
		if largest != c.want {
			t.Errorf("%s: %d cells as pieces, as runs; want %d", c.name, largest, c.want)
		}
	}
}
