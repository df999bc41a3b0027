package layout

import (
	"cmp"
	"fmt"
	"math/bits"
	"slices"
)

// Role is the kind of content of a plane. Planes of two layouts are matched by role.
type Role uint8

// The roles.
const (
	RoleK           Role = iota + 1
	RoleV                // beside RoleK
	RoleKV               // K and V packed in each cell, K in its first half
	RoleLatent           // MLA: one vector for all heads
	RoleLatentScale      // its scales, if separate
	RoleKScale           // scales of quantised K
	RoleVScale           // scales of quantised V
	RoleIndex            // keys of a sparse attention's indexer
	RoleIndexScale       // their scales
	RoleCompressor       // state of a compressing attention, by token
	// history of the projection of q, k or v (Mamba: C, B and x) in a convolution.
	RoleConvQ
	RoleConvK
	RoleConvV
	RoleRecurrent // recurrent state, a matrix for each head
	RolePage      // opaque: only whole pages have a meaning
)

var roleNames = [...]string{RoleK: "k", RoleV: "v", RoleKV: "kv", RoleLatent: "latent",
	RoleLatentScale: "latent_scale", RoleKScale: "k_scale",
	RoleVScale: "v_scale", RoleIndex: "index", RoleIndexScale: "index_scale",
	RoleCompressor: "compressor", RoleConvQ: "conv_q",
	RoleConvK: "conv_k", RoleConvV: "conv_v", RoleRecurrent: "recurrent", RolePage: "page"}

func (r Role) String() string {
	if int(r) < len(roleNames) && roleNames[r] != "" {
		return roleNames[r]
	}
	return fmt.Sprintf("role(%d)", uint8(r))
}

// Unit is the smallest addressable part of a plane.
type Unit uint8

// The units.
const (
	UnitToken Unit = iota + 1 // rows follow the tokens: any range of rows can be selected
	// opaque: only whole blocks can be selected, and a started block counts as whole
	UnitBlock
	UnitState // one per request, in the block that holds its last token
)

func (u Unit) String() string {
	switch u {
	case UnitToken:
		return "token"
	case UnitBlock:
		return "block"
	case UnitState:
		return "state"
	}
	return fmt.Sprintf("unit(%d)", uint8(u))
}

// Plane is one part of a page: cells of CellBytes on three axes, each with its own stride.
//
//	offset of cell (row, head, col) of block b, from the start of the region:
//	  Base + b*BlockStride + Offset + tile*TileStride + (row mod TileRows)*RowStride + head*HeadStride + col*ColStride
//	where tile = row / TileRows, 0 if the plane has no tiles
//
// Rows follow the tokens (or the history of a convolution, or one side of a state's matrix). Tensor
// parallelism divides heads. Columns exist if a matrix may be stored in either order. The strides
// alone give the order: a dense plane of NHD pages has RowStride Heads*HeadStride, one of HND pages
// has HeadStride Rows*RowStride.
type Plane struct {
	Role      Role
	Unit      Unit
	Format    string // encoding of a cell's bytes, if the cache's dtype does not determine it
	HeadMajor bool   // heads come before rows in the transfer space
	// columns come before rows, inside each head: a cell is one element, and a row's elements lie
	// far apart
	ColMajor   bool
	Transposed bool // rows and columns of a state's matrix are exchanged
	Offset     uint64

	CellBytes                        uint64
	KeyBytes                         uint64 // of a cell of RoleKV, the size of K; 0: half
	Rows, Heads, Cols                uint32
	RowStride, HeadStride, ColStride uint64

	// tokens of one row: more than 1 in a compressed cache, whose row is complete with its last
	// token
	RowTokens uint32
	FirstHead uint32 // the first of this rank's heads among those of the model
	AllHeads  uint32 // heads of the model: Heads if every rank has all of them
	// rows of a kernel block, if a page of the block table holds several; else Rows
	TileRows   uint32
	TileStride uint64 // from one kernel block to the next
}

// Bytes is the size of the plane in one block.
func (p *Plane) Bytes() uint64 {
	return p.CellBytes * uint64(p.Rows) * uint64(p.Heads) * uint64(p.Cols)
}

// PlaneFunc appends the planes of a layer to dst, as the group's strategy defines them. Without a
// layer (nil) it only checks the group.
type PlaneFunc func(dst []Plane, g *Group, l *Layer) ([]Plane, error)

// axis is count elements at distance stride.
type axis struct {
	count, stride uint64
	name          string // of the stride
}

// place appends the bytes of one plane over all blocks. It refuses a plane that leaves its region
// or overlaps itself.
func place(dst []progression, field string, g *Group, ly *Layer, p *Plane,
	regionBytes uint64) ([]progression, error) {
	bad := func(problem string) error {
		return refuse(field+".page_bytes", ly.PageBytes, fmt.Sprintf("plane %s: %s", p.Role, problem),
			"register the page bytes and params that the engine uses")
	}
	tileRows := p.TileRows
	if tileRows == 0 || tileRows > p.Rows {
		tileRows = p.Rows
	}
	if p.CellBytes == 0 || p.Rows == 0 || p.Heads == 0 || p.Cols == 0 || p.Rows%tileRows != 0 {
		return dst, bad(fmt.Sprintf("%d rows in tiles of %d, %d heads, %d columns of %d bytes", p.Rows,
			tileRows, p.Heads, p.Cols, p.CellBytes))
	}
	if p.Unit == UnitToken && (p.RowTokens == 0 || uint64(p.Rows)*uint64(p.RowTokens) !=
		uint64(g.TokensPerBlock)) {
		return dst, bad(fmt.Sprintf("%d rows of %d tokens in a block of %d tokens", p.Rows, p.RowTokens,
			g.TokensPerBlock))
	}
	if uint64(p.FirstHead)+uint64(p.Heads) > uint64(p.AllHeads) {
		return dst, bad(fmt.Sprintf("heads [%d, +%d) of %d", p.FirstHead, p.Heads, p.AllHeads))
	}
	axes := [5]axis{{uint64(p.Cols), p.ColStride, "col_stride"}, {uint64(p.Heads), p.HeadStride,
		"head_stride"}, {uint64(tileRows), p.RowStride, "row_stride"},
		{uint64(p.Rows / tileRows), p.TileStride, "tile_stride"}, {uint64(g.NumBlocks), ly.BlockStride,
			"block_stride"}}
	all, inBlock := p.CellBytes, uint64(0)
	for i := range axes {
		a := &axes[i]
		inBlock = all // bytes inside this axis; after the loop, of a block
		var ok bool
		if all, ok = extent(all, axes[i:i+1]); !ok {
			return dst, refuse(field+"."+a.name, a.stride, fmt.Sprintf("plane %s: the offsets of %d "+
				"overflow 64 bits", p.Role, a.count), "register the distance between two neighbours")
		}
	}
	start, ok := addAll(ly.Base, p.Offset)
	if !ok {
		return dst, refuse(field+".base", ly.Base, "its offsets overflow 64 bits", "register offsets "+
			"from the start of the region")
	}
	end, ok := addAll(start, all)
	if !ok {
		return dst, refuse(field+".base", ly.Base, "its offsets overflow 64 bits", "register offsets "+
			"from the start of the region")
	}
	if end > regionBytes {
		return dst, refuse(field+".base", ly.Base,
			fmt.Sprintf("plane %s ends at byte %d of a region of %d", p.Role, end, regionBytes),
			"check base, block_stride, page_bytes and num_blocks against the region")
	}
	pr := progression{start: start, stride: 1, count: 1, size: p.CellBytes, region: ly.Region,
		lo: start, hi: start + inBlock, block: ly.BlockStride}
	return spread(dst, field, ly, p, pr, axes[:])
}

// extent returns the distance from the first cell's start to the last cell's end.
func extent(size uint64, axes []axis) (uint64, bool) {
	for _, a := range axes {
		hi, span := bits.Mul64(a.count-1, a.stride)
		var ok bool
		if size, ok = addAll(size, span); hi != 0 || !ok {
			return 0, false
		}
	}
	return size, true
}

// spread turns the axes into as few progressions as possible: one if all of them merge, as in every
// dense cache and in interleaved allocations; else the blocks of each piece of a page.
func spread(dst []progression, field string, ly *Layer, p *Plane, pr progression,
	axes []axis) ([]progression, error) {
	blocks := axes[len(axes)-1]
	sorted := [5]axis{}
	in := sorted[:copy(sorted[:], axes)]
	slices.SortStableFunc(in, func(a, b axis) int { return cmp.Compare(a.stride, b.stride) })
	reach := pr.size // of the inner axes
	size, outer := pr.size, make([]axis, 0, len(axes))
	merged := pr // with every axis
	whole := true
	for _, a := range in {
		if a.count == 1 {
			continue
		}
		if a.stride < reach {
			return dst, refuse(field+"."+a.name, a.stride, fmt.Sprintf("plane %s: %d pieces of %d bytes "+
				"would overlap", p.Role, a.count, reach),
				"register the strides that the engine uses")
		}
		reach += (a.count - 1) * a.stride
		switch {
		case merged.count == 1 && a.stride == merged.size:
			merged.size *= a.count
		case merged.count == 1:
			merged.count, merged.stride = a.count, a.stride
		case a.stride == merged.count*merged.stride:
			merged.count *= a.count
		default:
			whole = false
		}
		switch {
		case a == blocks:
		case len(outer) == 0 && a.stride == size:
			size *= a.count
		default:
			outer = append(outer, a)
		}
	}
	if whole {
		if merged.count == 1 {
			merged.stride = merged.size
		}
		return append(dst, merged), nil
	}
	pieces := uint64(1)
	for _, a := range outer {
		if pieces *= a.count; pieces > maxScattered {
			break
		}
	}
	if pieces+uint64(len(dst)) > maxScattered {
		return dst, refuse(field+".page_bytes", ly.PageBytes, fmt.Sprintf("plane %s: pages lie in more "+
			"than %d pieces", p.Role, maxScattered),
			"register layers with evenly spaced blocks or heads")
	}
	if pr.size, pr.count, pr.stride = size, blocks.count, blocks.stride; pr.count == 1 {
		pr.stride = size
	}
	for i := range pieces {
		q := pr
		for _, a := range outer {
			q.start += i % a.count * a.stride
			i /= a.count
		}
		dst = append(dst, q)
	}
	return dst, nil
}
