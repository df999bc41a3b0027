package layout

import (
	"fmt"
	"math/bits"
)

// Bounds of a registered layout. A layout past them is refused, so that a bad engine cannot make us hold unbounded memory.
const (
	MaxGroups         = 16
	MaxLayers         = 1024 // of all groups together
	MaxRegions        = 1024
	MaxParams         = 32 // per group
	MaxIdentity       = 64 // pairs
	MaxStringBytes    = 1024
	MaxTokensPerBlock = 1 << 20
	MaxBlocks         = 1 << 31
	MaxPlanes         = 8 // per layer
)

// RegionIndex is the place of a region in the list that an engine registered with its layout.
type RegionIndex = int

// Layout is what one engine worker registered: where the KV cache of each layer lies.
type Layout struct {
	Model    string
	DType    string
	Groups   []Group
	Identity map[string]string // what must be equal between prefill and decode
}

// Group is a cache group: layers that share one block table.
type Group struct {
	TokensPerBlock uint32
	Strategy       string           // names the ParseBlock strategy that knows the inside of a page
	Params         map[string]int64 // of the strategy
	NumBlocks      uint32
	Layers         []Layer
}

// Layer is the cache of one layer: NumBlocks pages, one block stride apart.
type Layer struct {
	Name        string
	Index       int // of its flag on the board
	Region      RegionIndex
	Base        uint64 // of block 0, bytes from the start of the region
	BlockStride uint64 // bytes from one block to the next
	PageBytes   uint64 // bytes that one block holds of this layer, all planes together
}

// Role says what a plane holds.
type Role uint8

// The roles.
const (
	RoleK Role = iota + 1
	RoleV
	RoleKV     // K and V packed in each unit
	RoleLatent // MLA
	RolePage   // opaque: only whole pages mean anything
)

func (r Role) String() string {
	switch r {
	case RoleK:
		return "k"
	case RoleV:
		return "v"
	case RoleKV:
		return "kv"
	case RoleLatent:
		return "latent"
	case RolePage:
		return "page"
	}
	return fmt.Sprintf("role(%d)", uint8(r))
}

// Unit is the granule in which a plane is laid out.
type Unit uint8

// The units.
const (
	UnitToken Unit = iota + 1 // tokens one after another, UnitBytes each
	UnitHead                  // heads one after another, UnitBytes each; inside, tokens one after another
	UnitBlock                 // one opaque piece of UnitBytes; only whole blocks can be addressed
)

func (u Unit) String() string {
	switch u {
	case UnitToken:
		return "token"
	case UnitHead:
		return "head"
	case UnitBlock:
		return "block"
	}
	return fmt.Sprintf("unit(%d)", uint8(u))
}

// Plane is one contiguous part of a page. A page's content, in the transfer space, is its planes in order.
type Plane struct {
	Role      Role
	Offset    uint64 // bytes from Base + block*BlockStride; may lie past the stride (K/V-first layouts)
	Unit      Unit
	UnitBytes uint64
	Units     uint32 // tokens per block, heads, or 1
}

// Bytes is the length of the plane in one block.
func (p Plane) Bytes() uint64 { return p.UnitBytes * uint64(p.Units) }

// PlaneFunc appends the planes of a layer to dst; the strategy of the group knows them.
type PlaneFunc func(dst []Plane, g *Group, l *Layer) ([]Plane, error)

// TokenRange is tokens [Start, End) of a sequence.
type TokenRange struct {
	Start, End uint32
}

// Run is Count pieces of Len bytes, SrcStride apart on one side and DstStride on the other. Offsets are from the start of the
// layer's region.
type Run struct {
	SrcOff, DstOff       uint64
	SrcStride, DstStride uint64 // modulo 2^64: a run may step backwards; meaningless where Count is 1
	Count                uint32
	Len                  uint64
}

// Bytes is what the run moves.
func (r Run) Bytes() uint64 { return uint64(r.Count) * r.Len }

// IpcBlock is one contiguous piece of a run.
type IpcBlock struct {
	SrcOff, DstOff, Len uint64
}

// At returns piece i of the run.
func (r Run) At(i uint32) IpcBlock {
	return IpcBlock{SrcOff: r.SrcOff + uint64(i)*r.SrcStride, DstOff: r.DstOff + uint64(i)*r.DstStride, Len: r.Len}
}

// Explode yields the pieces of runs one by one, so that they never exist at once.
func Explode(runs []Run) func(yield func(IpcBlock) bool) {
	return func(yield func(IpcBlock) bool) {
		for _, r := range runs {
			for i := range r.Count {
				if !yield(r.At(i)) {
					return
				}
			}
		}
	}
}

// Piece is a contiguous part of one side's memory.
type Piece struct {
	Region   RegionIndex
	Off, Len uint64
}

// Error is a refusal of a layout, a block table or a token range: what is wrong, where, and what would be right.
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

// LayerAt returns the group and the place in it of a flattened layer.
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

// progression is the bytes of one plane over all blocks: count pieces of size bytes, stride apart.
type progression struct {
	start, stride, count, size uint64
	region                     int
	group, layer, plane        int
}

func (p progression) end() uint64 { return p.start + (p.count-1)*p.stride + p.size }

// Validate checks every bound of the layout against the sizes of the registered regions. planes is the registry's.
func (l *Layout) Validate(regionBytes []uint64, planes PlaneFunc) error {
	if err := l.checkShape(len(regionBytes)); err != nil {
		return err
	}
	var all []progression
	for gi := range l.Groups {
		g := &l.Groups[gi]
		for li := range g.Layers {
			ly := &g.Layers[li]
			field := fmt.Sprintf("groups[%d].layers[%d]", gi, li)
			ps, err := planes(nil, g, ly)
			if err != nil {
				return fmt.Errorf("%s (%q): %w", field, ly.Name, err)
			}
			if len(ps) == 0 || len(ps) > MaxPlanes {
				return refuse(field+".planes", len(ps), "a layer has 1 to 8 planes", "mend strategy "+g.Strategy)
			}
			var sum uint64
			for pi, p := range ps {
				pr, err := place(field, g, ly, p, regionBytes[ly.Region])
				if err != nil {
					return err
				}
				pr.group, pr.layer, pr.plane = gi, li, pi
				sum += pr.size // each at most a region's size, at most 8 of them, checked against PageBytes below
				all = append(all, pr)
			}
			if sum != ly.PageBytes {
				return refuse(field+".page_bytes", ly.PageBytes, fmt.Sprintf("the planes of strategy %q hold %d bytes", g.Strategy, sum),
					"register the bytes of all planes of one block")
			}
		}
	}
	return l.checkOverlap(all)
}

func (l *Layout) checkShape(regions int) error {
	if regions > MaxRegions {
		return refuse("regions", regions, fmt.Sprintf("at most %d", MaxRegions), "register fewer, larger regions")
	}
	if n := len(l.Groups); n < 1 || n > MaxGroups {
		return refuse("groups", n, fmt.Sprintf("a layout has 1 to %d groups", MaxGroups), "register each cache group once")
	}
	if n := l.NumLayers(); n < 1 || n > MaxLayers {
		return refuse("layers", n, fmt.Sprintf("a layout has 1 to %d layers in all groups", MaxLayers), "register each layer once")
	}
	if n := len(l.Identity); n > MaxIdentity {
		return refuse("identity", n, fmt.Sprintf("at most %d pairs", MaxIdentity), "hash what is long into one value")
	}
	names := make(map[string]struct{}, l.NumLayers())
	for gi := range l.Groups {
		g := &l.Groups[gi]
		field := fmt.Sprintf("groups[%d]", gi)
		if g.TokensPerBlock < 1 || g.TokensPerBlock > MaxTokensPerBlock {
			return refuse(field+".tokens_per_block", g.TokensPerBlock, fmt.Sprintf("must be 1 to %d", MaxTokensPerBlock),
				"register the block size of the group's block table")
		}
		if g.NumBlocks < 1 || g.NumBlocks > MaxBlocks {
			return refuse(field+".num_blocks", g.NumBlocks, fmt.Sprintf("must be 1 to %d", MaxBlocks), "register the number of blocks allocated")
		}
		if len(g.Params) > MaxParams {
			return refuse(field+".params", len(g.Params), fmt.Sprintf("at most %d", MaxParams), "pass only what the strategy reads")
		}
		if len(g.Layers) == 0 {
			return refuse(field+".layers", 0, "a group has a layer", "leave empty groups out")
		}
		for li := range g.Layers {
			ly := &g.Layers[li]
			lf := fmt.Sprintf("%s.layers[%d]", field, li)
			if _, dup := names[ly.Name]; dup || ly.Name == "" {
				return refuse(lf+".name", fmt.Sprintf("%q", ly.Name), "names must be set and unique", "use the engine's layer names")
			}
			names[ly.Name] = struct{}{}
			if ly.Region < 0 || ly.Region >= regions {
				return refuse(lf+".region", ly.Region, fmt.Sprintf("%d regions are registered", regions), "use an index into regions")
			}
			if ly.Index < 0 || ly.Index >= MaxLayers {
				return refuse(lf+".index", ly.Index, fmt.Sprintf("flag indices are 0 to %d", MaxLayers-1), "use the layer's flag on the board")
			}
			if ly.PageBytes == 0 {
				return refuse(lf+".page_bytes", 0, "a page holds something", "register the bytes of one block")
			}
		}
	}
	return nil
}

func place(field string, g *Group, ly *Layer, p Plane, regionBytes uint64) (progression, error) {
	hi, size := bits.Mul64(p.UnitBytes, uint64(p.Units))
	if hi != 0 || size == 0 {
		return progression{}, refuse(field+".page_bytes", ly.PageBytes, fmt.Sprintf("a plane of %d units of %d bytes", p.Units, p.UnitBytes),
			"register the page bytes and params that the engine uses")
	}
	pr := progression{stride: ly.BlockStride, count: uint64(g.NumBlocks), size: size, region: ly.Region}
	if pr.count > 1 && size > ly.BlockStride {
		return progression{}, refuse(field+".block_stride", ly.BlockStride, fmt.Sprintf("blocks of %d bytes would overlap", size),
			"register the distance from one block to the next")
	}
	end, ok := addAll(ly.Base, p.Offset, size)
	pr.start = ly.Base + p.Offset
	hi, span := bits.Mul64(pr.count-1, ly.BlockStride)
	if ok && hi == 0 {
		end, ok = addAll(end, span)
	}
	if !ok || hi != 0 {
		return progression{}, refuse(field+".base", ly.Base, "its offsets overflow 64 bits", "register offsets from the start of the region")
	}
	if end > regionBytes {
		return progression{}, refuse(field+".base", ly.Base,
			fmt.Sprintf("plane %s ends at byte %d of a region of %d", p.Role, end, regionBytes),
			"check base, block_stride, page_bytes and num_blocks against the region")
	}
	return pr, nil
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

// Hash names: what geometry leaves out because it says where pages are and not what they are.
var placementParams = map[string]bool{"v_offset": true}
