package parseblock

import (
	"fmt"
	"strings"

	"github.com/kvspray/kvspray/layout"
)

// The reference: every cache as an engine defines it, by the shape of its tensor and the index of
// one byte in it. It uses no plane, no stride parameter and no strategy; only its registration
// (group) uses the tested terms.

// part is a kind of content: rows of a given number of bytes for each head.
type content struct {
	role       layout.Role
	bytes      uint64 // of a cell
	first, own uint64 // heads of this rank; in a state, channels or heads
	rows, cols uint64 // of a state
}

// cache is one engine rank's memory.
type cache struct {
	groups   []layout.Group
	n        uint64 // tokens per block
	ratio    uint64 // tokens of an entry
	blocks   uint64
	layers   int
	size     uint64
	opaque   bool
	state    bool
	contents []content
	// at is the address of a byte. row is of the block, head of this rank.
	at func(layer int, block, row uint64, role layout.Role, head, col, x uint64) uint64
}

func (c *cache) layout() *layout.Layout {
	return &layout.Layout{Groups: c.groups,
		DType: "bfloat16"}
}

// tensor is a row-major tensor with axes of the letters K (0 K, 1 V), L, B, H, N, D.
type tensor struct {
	axes  string
	sizes map[byte]uint64
	base  uint64
	pad   uint64 // bytes more in each step of the outermost axis
	by    *[6]uint64
}

const axisLetters = "KLBHND"

func (t *tensor) stride(axis byte) uint64 {
	i := strings.IndexByte(axisLetters, axis)
	if t.by == nil {
		t.by = &[6]uint64{}
		s := uint64(1)
		for k := len(t.axes) - 1; k >= 0; k-- {
			if k == 0 {
				s += t.pad
			}
			t.by[strings.IndexByte(axisLetters, t.axes[k])] = s
			s *= t.sizes[t.axes[k]]
		}
	}
	return t.by[i]
}

func (t *tensor) bytes() uint64 { return t.base + t.sizes[t.axes[0]]*t.stride(t.axes[0]) }

func (t *tensor) at(k, l, b, h, n, x uint64) uint64 {
	t.stride('K')
	s := t.by
	return t.base + k*s[0] + l*s[1] + b*s[2] + h*s[3] + n*s[4] + x*s[5]
}

// dims are the dimensions common to two engines, and the rank of one.
type dims struct {
	layers               int
	first                int // layer of the model that layer 0 is
	n, blocks            uint64
	kvHeads, head        uint64 // of the model; bytes of K of a head of a token
	value, scale         uint64 // of head, in quantised caches
	rank, size           uint64
	kHeads, kDim         uint64 // of linear attention
	vHeads, vDim, histor uint64
	elem                 uint64
	ratio, tile          uint64
	base, pad            uint64
}

func (d *dims) name(i int) string { return fmt.Sprintf("layers.%d", d.first+i) }

// shard returns the rank's heads by assigning each head to a rank. Engines have equally many heads
// on each rank, or share one; otherwise each head goes to the rank with most of it.
func (d *dims) shard(params map[string]int64, heads uint64) (first, own uint64) {
	if d.size > 1 {
		params["tp_rank"], params["tp_size"] = int64(d.rank), int64(d.size)
	}
	if d.size >= heads {
		return d.rank * heads / d.size, 1
	}
	for h := range heads {
		switch of := ((h+1)*d.size - 1) / heads; {
		case of < d.rank:
			first++
		case of == d.rank:
			own++
		}
	}
	return first, own
}

// kvShapes are the caches of K and V: axes K (0 K, 1 V), L, B, H, N, D.
var kvShapes = map[string]string{
	PackedHND:           "LBHNKD",
	PackedNHD:           "LBNHKD",
	"LBNHC":             "LBNHKD",
	"LBHNC":             "LBHNKD",
	"LHBNC":             "LHBNKD",
	"BLNHC":             "BLNHKD",
	"BLHNC":             "BLHNKD",
	"BHLNC":             "BHLNKD",
	SGLangK:             "KLBNHD", // two lists of tensors
	"hnd in nhd memory": "LBNHKD", // a view: HND words, NHD strides
}

func kvCache(kind string, d *dims) *cache {
	params := map[string]int64{"kv_heads": int64(d.kvHeads)}
	first, own := d.shard(params, d.kvHeads)
	params["heads"] = int64(own)
	t := &tensor{axes: kvShapes[kind], base: d.base, pad: d.pad,
		sizes: map[byte]uint64{'K': 2, 'L': uint64(d.layers), 'B': d.blocks, 'H': own, 'N': d.n,
			'D': d.head}}
	c := &cache{n: d.n, ratio: 1, blocks: d.blocks, layers: d.layers, size: t.bytes(),
		contents: []content{{role: layout.RoleK, bytes: d.head, first: first, own: own, rows: 1, cols: 1},
			{role: layout.RoleV, bytes: d.head, first: first, own: own, rows: 1, cols: 1}},
		at: func(layer int, block, row uint64, role layout.Role, head, _, x uint64) uint64 {
			kv := uint64(0)
			if role == layout.RoleV {
				kv = 1
			}
			return t.at(kv, uint64(layer), block, head, row, x)
		}}
	g := layout.Group{TokensPerBlock: uint32(d.n), NumBlocks: uint32(d.blocks), Strategy: kind,
		Params: params}
	page := 2 * d.n * own * d.head
	layer := func(i int, name string, base, bytes uint64) {
		g.Layers = append(g.Layers, layout.Layer{Name: name, Index: i, Base: base,
			BlockStride: t.stride('B'), PageBytes: bytes})
	}
	switch {
	case kind == SGLangK:
		v := g
		v.Strategy = SGLangV
		for i := range d.layers {
			layer(i, d.name(i)+"#k", t.at(0, uint64(i), 0, 0, 0, 0), page/2)
			v.Layers = append(v.Layers, g.Layers[i])
			v.Layers[i].Name, v.Layers[i].Base = d.name(i)+"#v", t.at(1, uint64(i), 0, 0, 0, 0)
		}
		c.groups = []layout.Group{g, v}
		return c
	case len(kind) == 5 && strings.HasSuffix(kind, "C"):
		d.pad = 0
		a := Allocation{Order: kind, Layers: d.layers, Blocks: uint32(d.blocks), Tokens: uint32(d.n),
			Heads: uint32(own), Content: 2 * d.head, Base: d.base}
		made, err := a.Group(d.name)
		if err != nil {
			panic(err)
		}
		for k, v := range params {
			made.Params[k] = v
		}
		t.pad, t.by = 0, nil
		c.size = t.bytes()
		c.groups = []layout.Group{made}
		return c
	}
	if kind == "hnd in nhd memory" {
		g.Strategy = PackedHND
		params["row_stride"], params["head_stride"] = int64(t.stride('N')), int64(t.stride('H'))
	}
	for i := range d.layers {
		layer(i, d.name(i), t.at(0, uint64(i), 0, 0, 0, 0), page)
	}
	c.groups = []layout.Group{g}
	return c
}

// paged is a cache of successive layers whose pages the function addresses.
func paged(kind string, d *dims, params map[string]int64, page uint64, contents []content,
	in func(row uint64, role layout.Role, head, col, x uint64) uint64) *cache {
	stride := page + d.pad
	g := layout.Group{TokensPerBlock: uint32(d.n), NumBlocks: uint32(d.blocks), Strategy: kind,
		Params: params}
	for i := range d.layers {
		g.Layers = append(g.Layers, layout.Layer{Name: d.name(i), Index: i, Base: d.base +
			uint64(i)*d.blocks*stride, BlockStride: stride, PageBytes: page})
	}
	return &cache{groups: []layout.Group{g}, n: d.n, ratio: 1, blocks: d.blocks, layers: d.layers,
		size:     d.base + uint64(d.layers)*d.blocks*stride,
		contents: contents, at: func(layer int, block, row uint64, role layout.Role, head, col,
			x uint64) uint64 {
			return d.base + (uint64(layer)*d.blocks+block)*stride + in(row, role, head, col, x)
		}}
}

// diffKV is K and V packed, K of d.head bytes and V of d.value; "hnd in kernel pages" has blocks of
// several kernel pages, of d.tile tokens each.
func diffKV(kind string, d *dims) *cache {
	params := map[string]int64{"kv_heads": int64(d.kvHeads), "head_bytes": int64(d.head)}
	first, own := d.shard(params, d.kvHeads)
	cell, strategy := d.head+d.value, kind
	tile := d.n
	if kind == "hnd in kernel pages" {
		strategy, tile = PackedHND, d.tile
		params["kernel_tokens"] = int64(tile)
	}
	if d.size == 1 && kind == PackedHND {
		params["heads"] = int64(own)
	}
	cs := []content{{layout.RoleK, d.head, first, own, 1, 1}, {layout.RoleV, d.value,
		first, own, 1, 1}}
	return paged(strategy, d, params, d.n*own*cell, cs, func(row uint64, role layout.Role, head, _,
		x uint64) uint64 {
		at := (row*own + head) * cell
		if strategy == PackedHND {
			at = (row/tile*tile*own + head*tile + row%tile) * cell
		}
		if role == layout.RoleV {
			at += d.head
		}
		return at + x
	})
}

func quantInline(kind string, d *dims) *cache {
	params := map[string]int64{"kv_heads": int64(d.kvHeads), "value_bytes": int64(d.value),
		"scale_bytes": int64(d.scale)}
	first, own := d.shard(params, d.kvHeads)
	cell := d.value + d.scale
	if d.tile != d.n && kind == QuantInlineHND {
		params["kernel_tokens"] = int64(d.tile)
	}
	cs := []content{{layout.RoleK, cell, first, own, 1, 1}, {layout.RoleV, cell, first, own, 1, 1}}
	return paged(kind, d, params, d.n*own*2*cell, cs, func(row uint64, role layout.Role, head, _,
		x uint64) uint64 {
		at := (row/d.tile*d.tile*own + head*d.tile + row%d.tile) * 2 * cell
		if kind == QuantInlineNHD {
			at = (row*own + head) * 2 * cell
		}
		if role == layout.RoleV {
			at += cell
		}
		return at + x
	})
}

func quantPlane(kind string, d *dims) *cache {
	params := map[string]int64{"kv_heads": int64(d.kvHeads), "value_bytes": int64(d.value),
		"scale_bytes": int64(d.scale)}
	first, own := d.shard(params, d.kvHeads)
	v, s := d.value, d.scale
	if d.tile != d.n {
		params["kernel_tokens"] = int64(d.tile)
	}
	cs := []content{{layout.RoleK, v, first, own, 1, 1}, {layout.RoleKScale, s, first, own, 1, 1},
		{layout.RoleV, v, first, own, 1, 1}, {layout.RoleVScale, s, first, own, 1, 1}}
	return paged(kind, d, params, 2*d.n*own*(v+s), cs, func(row uint64, role layout.Role, head, _,
		x uint64) uint64 {
		i := head*d.tile + row%d.tile
		if kind == QuantPlanarNHD {
			i = row%d.tile*own + head
		}
		half := d.tile * own * (v + s)
		at := row / d.tile * 2 * half // of the kernel page
		switch role {
		case layout.RoleK:
			return at + i*v + x
		case layout.RoleKScale:
			return at + d.tile*own*v + i*s + x
		case layout.RoleV:
			return at + half + i*v + x
		}
		return at + half + d.tile*own*v + i*s + x
	})
}

// rowCache is one row a token: MLA and its like.
func rowCache(role layout.Role) func(string, *dims) *cache {
	return func(kind string, d *dims) *cache {
		row := d.head
		if kind == FP8DSMLA {
			row = 656
		}
		params := map[string]int64{}
		d.shard(params, 1)
		if d.ratio != 1 && kind != KimiK3 {
			params["compress_ratio"] = int64(d.ratio)
		}
		c := paged(kind, d, params, d.n/d.ratio*row, []content{{role, row, 0, 1, 1, 1}},
			func(r uint64, _ layout.Role, _, _, x uint64) uint64 { return r*row + x })
		c.ratio = d.ratio
		return c
	}
}

// mlaPageFirst is SGLang's page_first host pool of an MLA model: (size, L, 1, D).
func mlaPageFirst(_ string, d *dims) *cache {
	t := &tensor{axes: "BNLD", base: d.base, sizes: map[byte]uint64{'B': d.blocks, 'N': d.n,
		'L': uint64(d.layers), 'D': d.head}}
	c := rowCache(layout.RoleLatent)(MLA, d)
	c.groups[0].Params["row_stride"] = int64(t.stride('N'))
	for i := range c.groups[0].Layers {
		l := &c.groups[0].Layers[i]
		l.BlockStride, l.Base = t.stride('B'), t.at(0, uint64(i), 0, 0, 0, 0)
	}
	c.size = t.bytes()
	c.at = func(layer int, block, row uint64, _ layout.Role, _, _, x uint64) uint64 {
		return t.at(0, uint64(layer), block, 0, row, x)
	}
	return c
}

func indexer(kind string, d *dims) *cache {
	tile := d.tile / d.ratio // entries of a kernel page
	params := map[string]int64{"kernel_tokens": int64(d.tile), "value_bytes": int64(d.value),
		"scale_bytes": int64(d.scale), "compress_ratio": int64(d.ratio)}
	c := paged(kind, d, params, d.n/d.ratio*(d.value+d.scale), []content{{layout.RoleIndex, d.value, 0,
		1, 1, 1}, {layout.RoleIndexScale, d.scale, 0, 1, 1, 1}},
		func(row uint64, role layout.Role, _, _, x uint64) uint64 {
			page, t := row/tile, row%tile
			if role == layout.RoleIndex {
				return page*tile*(d.value+d.scale) + t*d.value + x
			}
			return page*tile*(d.value+d.scale) + tile*d.value + t*d.scale + x
		})
	c.ratio = d.ratio
	return c
}

func v4(kind string, d *dims) *cache {
	entries := d.n / d.ratio
	c := paged(kind, d, map[string]int64{"compress_ratio": int64(d.ratio)}, entries*584,
		[]content{{layout.RoleLatent, 576, 0, 1, 1, 1}, {layout.RoleLatentScale, 8, 0, 1, 1, 1}},
		func(row uint64, role layout.Role, _, _, x uint64) uint64 {
			if role == layout.RoleLatent {
				return row*576 + x
			}
			return entries*576 + row*8 + x
		})
	c.ratio = d.ratio
	return c
}

func whole(kind string, d *dims) *cache {
	c := paged(kind, d, map[string]int64{}, d.n*d.head, []content{{layout.RolePage, d.head, 0, 1, 1,
		1}}, func(r uint64, _ layout.Role, _, _, x uint64) uint64 { return r*d.head + x })
	c.opaque = true
	return c
}

// vecCache is K of which each number has a place of its own, or side by side with the others of its
// head.
func vecCache(kind string, d *dims) *cache {
	if kind == "vec" {
		return cpuCache(kind, d)
	}
	e := *d
	e.head = d.head * d.elem
	return kvCache(kind, &e)
}

// cpuCache is [B, H, K then V, ...]: opaque, or with K stored [D, N] and V [N, D].
func cpuCache(kind string, d *dims) *cache {
	params := map[string]int64{"kv_heads": int64(d.kvHeads), "number_bytes": int64(d.elem)}
	first, own := d.shard(params, d.kvHeads)
	params["heads"] = int64(own)
	row := d.head * d.elem
	page := own * 2 * d.n * row
	if kind == VLLMCPUAttn {
		c := paged(kind, d, params, page, []content{{layout.RolePage, 2 * row, first, own, 1, 1}},
			func(r uint64, _ layout.Role, head, _, x uint64) uint64 {
				return (head*d.n+r)*2*row + x
			})
		c.opaque = true
		return c
	}
	params["k_transposed"] = 1
	cs := []content{{layout.RoleK, row, first, own, 1, 1}, {layout.RoleV, row, first, own, 1, 1}}
	return paged(VLLMCPUAttn, d, params, page, cs, func(r uint64, role layout.Role, head, _,
		x uint64) uint64 {
		at := head * 2 * d.n * row
		if role == layout.RoleV {
			return at + d.n*row + r*row + x
		}
		return at + x/d.elem*d.n*d.elem + r*d.elem + x%d.elem
	})
}
