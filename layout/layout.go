package layout

import (
	"fmt"
	"math"
	"math/bits"
)

// Bounds of a registered layout. A larger one is refused, so that a faulty engine cannot make the
// sidecar use unbounded memory.
const (
	MaxTables         = 16   // block tables of an engine
	MaxGroups         = 64   // of all tables together
	MaxLayers         = 1024 // of all groups together
	MaxRegions        = 1024
	MaxParams         = 32 // per group
	MaxIdentity       = 64 // pairs
	MaxStringBytes    = 1024
	MaxTokensPerBlock = 1 << 20
	MaxBlocks         = 1 << 31
	MaxPlanes         = 8 // per layer
)

// RegionIndex is the position of a region in the list that an engine registered with its layout.
type RegionIndex = int

// Layout is the registration of one engine worker: the position of each layer's KV cache.
type Layout struct {
	Model    string
	DType    string
	Groups   []Group
	Identity map[string]string // properties that must be equal on prefill and decode
}

// Group is a cache group: layers of one strategy and equal parameters that share one block table. A
// pipeline stage may have none of its layers; the empty group then stands for its table, so that
// every stage has equally many tables.
type Group struct {
	TokensPerBlock uint32
	Strategy       string           // ParseBlock strategy of the group's pages
	Params         map[string]int64 // of the strategy
	NumBlocks      uint32
	// it shares the block table of the previous group, whose strategy or parameters differ
	SameTable bool
	Layers    []Layer
}

// Layer is the cache of one layer: NumBlocks pages at a distance of one block stride.
type Layer struct {
	Name        string
	Index       int // index of its flag on the board
	Region      RegionIndex
	Base        uint64 // of block 0, bytes from the start of the region
	BlockStride uint64 // bytes from one block to the next
	PageBytes   uint64 // bytes of this layer in one block, all planes together
}

// Piece is a contiguous part of one side's memory.
type Piece struct {
	Region   RegionIndex
	Off, Len uint64
}

// Error is a refusal of a layout, a block table or a token range, with field, value, problem and
// remedy.
type Error struct {
	Field   string // path into the layout: "groups[0].layers[3].base"
	Value   string
	Problem string
	Remedy  string
}

func (e *Error) Error() string {
	return fmt.Sprintf("layout: %s = %s: %s; %s", e.Field, e.Value, e.Problem, e.Remedy)
}

func refuse(field string, value any, problem, remedy string) *Error {
	return &Error{Field: field, Value: fmt.Sprint(value), Problem: problem, Remedy: remedy}
}

// NumLayers counts the flattened layers, all groups in order.
func (l *Layout) NumLayers() int {
	n := 0
	for i := range l.Groups {
		n += len(l.Groups[i].Layers)
	}
	return n
}

// Tables counts the block tables of the engine: INTENT, STEP and EXPECT have one entry per table,
// and so does a skip.
func (l *Layout) Tables() int {
	n := 0
	for i := range l.Groups {
		if i == 0 || !l.Groups[i].SameTable {
			n++
		}
	}
	return n
}

// Table is one block table with the groups that read it.
type Table struct {
	First, End int // groups [First, End)
}

// TablesOf lists the block tables in order.
func (l *Layout) TablesOf() []Table {
	out := make([]Table, 0, len(l.Groups))
	for i := range l.Groups {
		if i > 0 && l.Groups[i].SameTable {
			out[len(out)-1].End = i + 1
			continue
		}
		out = append(out, Table{i, i + 1})
	}
	return out
}

// LayerAt returns the group of a flattened layer and its position in the group.
func (l *Layout) LayerAt(flat int) (group, layer int, ok bool) {
	if flat < 0 {
		return 0, 0, false
	}
	for g := range l.Groups {
		if flat < len(l.Groups[g].Layers) {
			return g, flat, true
		}
		flat -= len(l.Groups[g].Layers)
	}
	return 0, 0, false
}

// Validate checks every bound of the layout against the sizes of the registered regions. planes is
// the registry's.
func (l *Layout) Validate(regionBytes []uint64, planes PlaneFunc) error {
	if err := l.checkShape(len(regionBytes)); err != nil {
		return err
	}
	var all []progression
	table := -1
	for gi := range l.Groups {
		g := &l.Groups[gi]
		if !g.SameTable {
			table++
		}
		if len(g.Layers) == 0 { // its windows and block tables still count
			if _, err := planes(nil, g, nil); err != nil {
				return fmt.Errorf("groups[%d]: %w", gi, err)
			}
		}
		for li := range g.Layers {
			ly := &g.Layers[li]
			field := fmt.Sprintf("groups[%d].layers[%d]", gi, li)
			ps, err := planes(nil, g, ly)
			if err != nil {
				return fmt.Errorf("%s (%q): %w", field, ly.Name, err)
			}
			if len(ps) == 0 || len(ps) > MaxPlanes {
				return refuse(field+".planes", len(ps), fmt.Sprintf("a layer has 1 to %d planes", MaxPlanes),
					"fix strategy "+g.Strategy)
			}
			var sum uint64
			for pi := range ps {
				n := len(all)
				if all, err = place(all, field, g, ly, &ps[pi], regionBytes[ly.Region]); err != nil {
					return err
				}
				for i := range all[n:] {
					all[n+i].group, all[n+i].table, all[n+i].layer = gi, table, li
				}
				sum += ps[pi].Bytes() // each at most a region's size, at most MaxPlanes of them
			}
			if sum != ly.PageBytes {
				return refuse(field+".page_bytes", ly.PageBytes,
					fmt.Sprintf("the planes of strategy %q hold %d bytes", g.Strategy, sum),
					"register the bytes of all planes of one block")
			}
		}
	}
	return l.checkOverlap(all)
}

// ValidateForeign checks a layout of memory elsewhere: like Validate, except that region sizes are
// unknown.
func ValidateForeign(l *Layout, planes PlaneFunc) error {
	regions := 0
	for gi := range l.Groups {
		for li := range l.Groups[gi].Layers {
			if r := l.Groups[gi].Layers[li].Region; r >= 0 && r < MaxRegions {
				regions = max(regions, r+1)
			}
		}
	}
	sizes := make([]uint64, regions)
	for i := range sizes {
		sizes[i] = math.MaxInt64
	}
	return l.Validate(sizes, planes)
}

func (l *Layout) checkShape(regions int) error {
	if regions > MaxRegions {
		return refuse("regions", regions, fmt.Sprintf("at most %d", MaxRegions), "register fewer, "+
			"larger regions")
	}
	if n := len(l.Groups); n < 1 || n > MaxGroups {
		return refuse("groups", n, fmt.Sprintf("a layout has 1 to %d groups", MaxGroups),
			"register each cache group once")
	}
	if n := l.Tables(); n > MaxTables {
		return refuse("groups", fmt.Sprintf("%d block tables", n),
			fmt.Sprintf("an engine has at most %d", MaxTables),
			"register the groups of one block table in sequence, with same_table")
	}
	if n := l.NumLayers(); n < 1 || n > MaxLayers {
		return refuse("layers", n, fmt.Sprintf("a layout has 1 to %d layers in all groups", MaxLayers),
			"register each layer once")
	}
	if n := len(l.Identity); n > MaxIdentity {
		return refuse("identity", n, fmt.Sprintf("at most %d pairs", MaxIdentity), "hash long values")
	}
	names := make(map[string]struct{}, l.NumLayers())
	for gi := range l.Groups {
		g := &l.Groups[gi]
		field := fmt.Sprintf("groups[%d]", gi)
		if g.TokensPerBlock < 1 || g.TokensPerBlock > MaxTokensPerBlock {
			return refuse(field+".tokens_per_block", g.TokensPerBlock, fmt.Sprintf("must be 1 to %d",
				MaxTokensPerBlock),
				"register the block size of the group's block table")
		}
		if g.NumBlocks < 1 || g.NumBlocks > MaxBlocks {
			return refuse(field+".num_blocks", g.NumBlocks, fmt.Sprintf("must be 1 to %d", MaxBlocks),
				"register the number of blocks allocated")
		}
		if g.SameTable {
			if gi == 0 {
				return refuse(field+".same_table", true, "the first group has no group before it",
					"set it from the second group of a block table on")
			}
			if o := &l.Groups[gi-1]; o.TokensPerBlock != g.TokensPerBlock || o.NumBlocks != g.NumBlocks {
				return refuse(field+".same_table", true, fmt.Sprintf("the group has %d blocks of %d tokens, "+
					"the group before it %d of %d",
					g.NumBlocks, g.TokensPerBlock, o.NumBlocks, o.TokensPerBlock), "register groups of one "+
					"block table with equal tokens_per_block and num_blocks")
			}
		}
		if len(g.Params) > MaxParams {
			return refuse(field+".params", len(g.Params), fmt.Sprintf("at most %d", MaxParams),
				"pass only the strategy's parameters")
		}
		for li := range g.Layers {
			ly := &g.Layers[li]
			lf := fmt.Sprintf("%s.layers[%d]", field, li)
			if _, dup := names[ly.Name]; dup || ly.Name == "" {
				return refuse(lf+".name", fmt.Sprintf("%q", ly.Name), "names must be set and unique",
					"use the engine's layer names")
			}
			names[ly.Name] = struct{}{}
			if ly.Region < 0 || ly.Region >= regions {
				return refuse(lf+".region", ly.Region, fmt.Sprintf("%d regions are registered", regions),
					"use an index into regions")
			}
			if ly.Index < 0 || ly.Index >= MaxLayers {
				return refuse(lf+".index", ly.Index, fmt.Sprintf("flag indices are 0 to %d", MaxLayers-1),
					"use the layer's flag on the board")
			}
			if ly.PageBytes == 0 {
				return refuse(lf+".page_bytes", 0, "a page must not be empty",
					"register the bytes of one block")
			}
		}
	}
	return nil
}

func addAll(v uint64, more ...uint64) (uint64, bool) {
	for _, m := range more {
		s, carry := bits.Add64(v, m, 0)
		if carry != 0 {
			return 0, false
		}
		v = s
	}
	return v, true
}
