package parseblock

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"

	"pgregory.net/rapid"

	"github.com/kvspray/kvspray/layout"
)

// The reference: every cache as an engine defines it, by the shape of its tensor and the index of
// one byte in it. It uses no plane, no stride parameter and no strategy; only its registration
// (group) uses the tested terms.

// part is a kind of content: rows of so many bytes for each head.
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

func (c *cache) layout() *layout.Layout { return &layout.Layout{Groups: c.groups, DType: "bfloat16"} }

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
	PackedHND:             "LBHNKD",
	PackedNHD:             "LBNHKD",
	FlashKVFirst:          "LKBNHD",
	FlashKVFirstHND:       "LKBHND",
	FlashBlockFirst:       "LBKNHD",
	FlashBlockFirstHND:    "LBKHND",
	FlashToken:            "LBNKHD",
	SGLangLayerFirst:      "KLBNHD",
	SGLangPageFirst:       "KBNLHD",
	SGLangPageFirstDirect: "KBLNHD",
	SGLangPageHead:        "KBHNLD",
	"LBNHC":               "LBNHKD",
	"LBHNC":               "LBHNKD",
	"LHBNC":               "LHBNKD",
	"BLNHC":               "BLNHKD",
	"BLHNC":               "BLHNKD",
	"BHLNC":               "BHLNKD",
	SGLangK:               "KLBNHD", // two lists of tensors
	"hnd in nhd memory":   "LBNHKD", // a view: HND words, NHD strides
}

func kvCache(kind string, d *dims) *cache {
	params := map[string]int64{"kv_heads": int64(d.kvHeads)}
	first, own := d.shard(params, d.kvHeads)
	params["heads"] = int64(own)
	t := &tensor{axes: kvShapes[kind], base: d.base, pad: d.pad,
		sizes: map[byte]uint64{'K': 2, 'L': uint64(d.layers), 'B': d.blocks, 'H': own, 'N': d.n, 'D': d.head}}
	c := &cache{n: d.n, ratio: 1, blocks: d.blocks, layers: d.layers, size: t.bytes(),
		contents: []content{{role: layout.RoleK, bytes: d.head, first: first, own: own, rows: 1, cols: 1}, {role: layout.RoleV, bytes: d.head, first: first, own: own, rows: 1, cols: 1}},
		at: func(layer int, block, row uint64, role layout.Role, head, _, x uint64) uint64 {
			kv := uint64(0)
			if role == layout.RoleV {
				kv = 1
			}
			return t.at(kv, uint64(layer), block, head, row, x)
		}}
	g := layout.Group{TokensPerBlock: uint32(d.n), NumBlocks: uint32(d.blocks), Strategy: kind, Params: params}
	page := 2 * d.n * own * d.head
	layer := func(i int, name string, base, bytes uint64) {
		g.Layers = append(g.Layers, layout.Layer{Name: name, Index: i, Base: base, BlockStride: t.stride('B'), PageBytes: bytes})
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
		a := Allocation{Order: kind, Layers: d.layers, Blocks: uint32(d.blocks), Tokens: uint32(d.n), Heads: uint32(own), Content: 2 * d.head, Base: d.base}
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
	switch kind {
	case FlashKVFirst, FlashKVFirstHND:
		params["v_offset"] = int64(t.stride('K'))
	case SGLangLayerFirst, SGLangPageFirst, SGLangPageFirstDirect, SGLangPageHead:
		params["layers"] = int64(d.layers)
		if d.pad != 0 {
			params["v_offset"] = int64(t.stride('K'))
		}
	case "hnd in nhd memory":
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
func paged(kind string, d *dims, params map[string]int64, page uint64, contents []content, in func(row uint64, role layout.Role, head, col, x uint64) uint64) *cache {
	stride := page + d.pad
	g := layout.Group{TokensPerBlock: uint32(d.n), NumBlocks: uint32(d.blocks), Strategy: kind, Params: params}
	for i := range d.layers {
		g.Layers = append(g.Layers, layout.Layer{Name: d.name(i), Index: i, Base: d.base + uint64(i)*d.blocks*stride, BlockStride: stride, PageBytes: page})
	}
	return &cache{groups: []layout.Group{g}, n: d.n, ratio: 1, blocks: d.blocks, layers: d.layers, size: d.base + uint64(d.layers)*d.blocks*stride,
		contents: contents, at: func(layer int, block, row uint64, role layout.Role, head, col, x uint64) uint64 {
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
	cs := []content{{layout.RoleK, d.head, first, own, 1, 1}, {layout.RoleV, d.value, first, own, 1, 1}}
	return paged(strategy, d, params, d.n*own*cell, cs, func(row uint64, role layout.Role, head, _, x uint64) uint64 {
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
	params := map[string]int64{"kv_heads": int64(d.kvHeads), "value_bytes": int64(d.value), "scale_bytes": int64(d.scale)}
	first, own := d.shard(params, d.kvHeads)
	cell := d.value + d.scale
	if d.tile != d.n && kind == QuantInlineHND {
		params["kernel_tokens"] = int64(d.tile)
	}
	cs := []content{{layout.RoleK, cell, first, own, 1, 1}, {layout.RoleV, cell, first, own, 1, 1}}
	return paged(kind, d, params, d.n*own*2*cell, cs, func(row uint64, role layout.Role, head, _, x uint64) uint64 {
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
	params := map[string]int64{"kv_heads": int64(d.kvHeads), "value_bytes": int64(d.value), "scale_bytes": int64(d.scale)}
	first, own := d.shard(params, d.kvHeads)
	v, s := d.value, d.scale
	if d.tile != d.n {
		params["kernel_tokens"] = int64(d.tile)
	}
	cs := []content{{layout.RoleK, v, first, own, 1, 1}, {layout.RoleKScale, s, first, own, 1, 1}, {layout.RoleV, v, first, own, 1, 1}, {layout.RoleVScale, s, first, own, 1, 1}}
	return paged(kind, d, params, 2*d.n*own*(v+s), cs, func(row uint64, role layout.Role, head, _, x uint64) uint64 {
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

func scaleTensor(kind string, d *dims) *cache {
	params := map[string]int64{"kv_heads": int64(d.kvHeads)}
	first, own := d.shard(params, d.kvHeads)
	params["heads"] = int64(own)
	t := &tensor{axes: "LKBNHD", base: d.base, sizes: map[byte]uint64{'L': uint64(d.layers), 'K': 2, 'B': d.blocks, 'N': d.n, 'H': own, 'D': d.scale}}
	params["v_offset"] = int64(t.stride('K'))
	c := paged(kind, d, params, 2*d.n*own*d.scale, []content{{layout.RoleKScale, d.scale, first, own, 1, 1}, {layout.RoleVScale, d.scale, first, own, 1, 1}}, nil)
	for i := range c.groups[0].Layers {
		l := &c.groups[0].Layers[i]
		l.Name, l.BlockStride, l.Base = l.Name+"#scale", t.stride('B'), t.at(0, uint64(i), 0, 0, 0, 0)
	}
	c.size = t.bytes()
	c.at = func(layer int, block, row uint64, role layout.Role, head, _, x uint64) uint64 {
		kv := uint64(0)
		if role == layout.RoleVScale {
			kv = 1
		}
		return t.at(kv, uint64(layer), block, head, row, x)
	}
	return c
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
		c := paged(kind, d, params, d.n/d.ratio*row, []content{{role, row, 0, 1, 1, 1}}, func(r uint64, _ layout.Role, _, _, x uint64) uint64 { return r*row + x })
		c.ratio = d.ratio
		return c
	}
}

// mlaPageFirst is SGLang's page_first host pool of an MLA model: (size, L, 1, D).
func mlaPageFirst(_ string, d *dims) *cache {
	t := &tensor{axes: "BNLD", base: d.base, sizes: map[byte]uint64{'B': d.blocks, 'N': d.n, 'L': uint64(d.layers), 'D': d.head}}
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
	params := map[string]int64{"kernel_tokens": int64(d.tile), "value_bytes": int64(d.value), "scale_bytes": int64(d.scale), "compress_ratio": int64(d.ratio)}
	c := paged(kind, d, params, d.n/d.ratio*(d.value+d.scale), []content{{layout.RoleIndex, d.value, 0, 1, 1, 1}, {layout.RoleIndexScale, d.scale, 0, 1, 1, 1}},
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
	c := paged(kind, d, map[string]int64{"compress_ratio": int64(d.ratio)}, entries*584, []content{{layout.RoleLatent, 576, 0, 1, 1, 1}, {layout.RoleLatentScale, 8, 0, 1, 1, 1}},
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
	c := paged(kind, d, map[string]int64{}, d.n*d.head, []content{{layout.RolePage, d.head, 0, 1, 1, 1}}, func(r uint64, _ layout.Role, _, _, x uint64) uint64 { return r*d.head + x })
	c.opaque = true
	return c
}

// cpuCache is [B, H, K then V, ...]: opaque, or with K stored [D, N] and V [N, D].
func cpuCache(kind string, d *dims) *cache {
	params := map[string]int64{"kv_heads": int64(d.kvHeads), "number_bytes": int64(d.elem)}
	first, own := d.shard(params, d.kvHeads)
	params["heads"] = int64(own)
	row := d.head * d.elem
	page := own * 2 * d.n * row
	if kind == VLLMCPUAttn {
		c := paged(kind, d, params, page, []content{{layout.RolePage, 2 * row, first, own, 1, 1}}, func(r uint64, _ layout.Role, head, _, x uint64) uint64 {
			return (head*d.n+r)*2*row + x
		})
		c.opaque = true
		return c
	}
	params["k_transposed"] = 1
	cs := []content{{layout.RoleK, row, first, own, 1, 1}, {layout.RoleV, row, first, own, 1, 1}}
	return paged(VLLMCPUAttn, d, params, page, cs, func(r uint64, role layout.Role, head, _, x uint64) uint64 {
		at := head * 2 * d.n * row
		if role == layout.RoleV {
			return at + d.n*row + r*row + x
		}
		return at + x/d.elem*d.n*d.elem + r*d.elem + x%d.elem
	})
}

// stateCache: kind is strategy, then s or d (conv order), then v or k (order of the recurrent
// state).
func stateCache(kind string, d *dims) *cache {
	strategy, form, _ := strings.Cut(kind, " ")
	dimFirst, kOutside := form[0] == 'd', form[1] == 'k'
	params := map[string]int64{"k_heads": int64(d.kHeads), "k_dim": int64(d.kDim), "v_heads": int64(d.vHeads), "v_dim": int64(d.vDim), "conv_len": int64(d.histor),
		"conv_bytes": 2, "state_bytes": int64(d.elem)}
	if dimFirst {
		params["conv_order"] = 1
	}
	if kOutside {
		params["state_order"] = 1
	}
	k0, kn := d.shard(params, d.kHeads)
	v0, vn := d.shard(params, d.vHeads)
	kc, vc := kn*d.kDim, vn*d.vDim
	dim := 2*kc + vc
	conv := dim * d.histor * 2
	base := map[layout.Role]uint64{layout.RoleConvQ: 0, layout.RoleConvK: kc, layout.RoleConvV: 2 * kc}
	if strategy == Mamba2State { // x, B, C
		base = map[layout.Role]uint64{layout.RoleConvV: 0, layout.RoleConvK: vc, layout.RoleConvQ: vc + kc}
	}
	cs := []content{{layout.RoleConvQ, 2, k0 * d.kDim, kc, d.histor, 1}, {layout.RoleConvK, 2, k0 * d.kDim, kc, d.histor, 1}, {layout.RoleConvV, 2, v0 * d.vDim, vc, d.histor, 1},
		{layout.RoleRecurrent, d.elem, v0, vn, d.vDim, d.kDim}}
	c := paged(strategy, d, params, conv+vn*d.vDim*d.kDim*d.elem, cs, func(row uint64, role layout.Role, head, col, x uint64) uint64 {
		if role == layout.RoleRecurrent {
			if kOutside {
				return conv + ((head*d.kDim+col)*d.vDim+row)*d.elem + x
			}
			return conv + ((head*d.vDim+row)*d.kDim+col)*d.elem + x
		}
		ch := base[role] + head
		if dimFirst {
			return (ch*d.histor+row)*2 + x
		}
		return (row*dim+ch)*2 + x
	})
	c.state = true
	return c
}

// slots is SGLang's hybrid pool: (layers, slots, ...) of conv and of recurrent state apart.
func slots(kind string, d *dims) *cache {
	c := stateCache(kind, d)
	g := c.groups[0]
	inner := c.at
	conv, rec := g, g
	conv.Params, rec.Params = map[string]int64{"part": 1}, map[string]int64{"part": 2}
	for k, v := range g.Params {
		conv.Params[k], rec.Params[k] = v, v
	}
	var dim uint64
	for _, p := range c.contents[:3] {
		dim += p.own
	}
	convBytes := dim * d.histor * 2
	recBytes := g.Layers[0].PageBytes - convBytes
	second := d.base + uint64(d.layers)*d.blocks*convBytes
	conv.Layers, rec.Layers = nil, nil
	for i := range g.Layers {
		conv.Layers = append(conv.Layers, layout.Layer{Name: g.Layers[i].Name + "#conv", Index: i, Base: d.base + uint64(i)*d.blocks*convBytes, BlockStride: convBytes, PageBytes: convBytes})
		rec.Layers = append(rec.Layers, layout.Layer{Name: g.Layers[i].Name + "#ssm", Index: i, Base: second + uint64(i)*d.blocks*recBytes, BlockStride: recBytes, PageBytes: recBytes})
	}
	c.groups = []layout.Group{conv, rec}
	c.size = second + uint64(d.layers)*d.blocks*recBytes
	stride := g.Layers[0].BlockStride
	c.at = func(layer int, block, row uint64, role layout.Role, head, col, x uint64) uint64 {
		in := inner(layer, block, row, role, head, col, x) - d.base - (uint64(layer)*d.blocks+block)*stride
		if role == layout.RoleRecurrent {
			return second + (uint64(layer)*d.blocks+block)*recBytes + in - convBytes
		}
		return d.base + (uint64(layer)*d.blocks+block)*convBytes + in
	}
	return c
}

// family is caches that hold the same content, so that each can be copied to each.
type family struct {
	name  string
	kinds []string
	make  func(kind string, d *dims) *cache
	fixed bool // block sizes must be equal
}

func keys(m map[string]string) []string {
	var out []string
	for k := range m {
		out = append(out, k)
	}
	// In one order, so that a failing case can be repeated.
	for i := range out {
		for k := i; k > 0 && out[k] < out[k-1]; k-- {
			out[k], out[k-1] = out[k-1], out[k]
		}
	}
	return out
}

// stateKinds are the states of a linear attention in both orders of the convolution and of the
// matrix, in a page and in slots.
func stateKinds(strategy string) (kinds []string) {
	for _, form := range []string{" sv", " dv", " sk", " dk"} {
		kinds = append(kinds, strategy+form, strategy+form+" slots")
	}
	return kinds
}

func states(kind string, d *dims) *cache {
	if kind, ok := strings.CutSuffix(kind, " slots"); ok {
		return slots(kind, d)
	}
	return stateCache(kind, d)
}

var families = []family{
	{name: "kv", kinds: keys(kvShapes), make: kvCache},
	{name: "k and v of unlike width", kinds: []string{PackedHND, PackedNHD, "hnd in kernel pages"}, make: diffKV},
	{name: "quant inline", kinds: []string{QuantInlineHND, QuantInlineNHD}, make: quantInline},
	{name: "quant planar", kinds: []string{QuantPlanarHND, QuantPlanarNHD}, make: quantPlane},
	{name: "scales", kinds: []string{ScalesKVFirst}, make: scaleTensor},
	{name: "mla", kinds: []string{MLA, "mla page_first"}, make: func(kind string, d *dims) *cache {
		if kind == MLA {
			return rowCache(layout.RoleLatent)(kind, d)
		}
		return mlaPageFirst(kind, d)
	}},
	{name: "fp8 mla", kinds: []string{FP8DSMLA}, make: rowCache(layout.RoleLatent)},
	{name: "compressor", kinds: []string{DeepSeekV4Compressor}, make: rowCache(layout.RoleCompressor)},
	{name: "rows of several tokens", kinds: []string{MLA}, make: rowCache(layout.RoleLatent)},
	{name: "index keys", kinds: []string{IndexKeys}, make: rowCache(layout.RoleIndex)},
	{name: "indexer", kinds: []string{DSAIndexer}, make: indexer},
	{name: "deepseek v4", kinds: []string{DeepSeekV4}, make: v4},
	{name: "gdn", kinds: stateKinds(GDNState), make: states},
	{name: "kda", kinds: stateKinds(KDAState), make: states},
	{name: "mamba2", kinds: stateKinds(Mamba2State), make: states},
	{name: "cpu", kinds: []string{VLLMCPUAttn}, make: cpuCache, fixed: true},
	{name: "cpu vec", kinds: []string{"vec"}, make: cpuCache},
	{name: "page", kinds: []string{Page}, make: whole, fixed: true},
	kimiK3Family,
}

// compressed reports whether caches of the family may have rows of several tokens.
func compressed(f *family) bool {
	return slices.Contains([]string{"rows of several tokens", "index keys", "indexer", "deepseek v4"}, f.name)
}

func genDims(t *rapid.T, f *family, label string, common *dims) *dims {
	d := *common
	if !f.fixed {
		d.n = rapid.Uint64Range(1, 6).Draw(t, label+"n")
	}
	d.tile = d.n
	switch f.name {
	case "k and v of unlike width", "quant inline", "quant planar":
		d.tile = rapid.Uint64Range(1, 3).Draw(t, label+"tile")
		d.n = d.tile * rapid.Uint64Range(1, 3).Draw(t, label+"tiles")
	case "rows of several tokens", "index keys":
		d.n = d.ratio * rapid.Uint64Range(1, 3).Draw(t, label+"rows")
	case "indexer", "deepseek v4":
		d.tile = d.ratio * rapid.Uint64Range(1, 3).Draw(t, label+"tile")
		d.n = d.tile * rapid.Uint64Range(1, 3).Draw(t, label+"tiles")
		if f.name == "indexer" && rapid.Bool().Draw(t, label+"aligned") {
			d.n = d.tile
		}
	}
	if !compressed(f) {
		d.ratio = 1
	}
	d.base = rapid.Uint64Range(0, 60).Draw(t, label+"base")
	d.pad = rapid.SampledFrom([]uint64{0, 0, 16, 7}).Draw(t, label+"pad")
	return &d
}

func genCommon(t *rapid.T, f *family) *dims {
	d := &dims{layers: rapid.IntRange(1, 3).Draw(t, "layers"), n: rapid.Uint64Range(1, 6).Draw(t, "n"), size: 1}
	d.kvHeads = rapid.SampledFrom([]uint64{1, 2, 3, 4, 6, 8}).Draw(t, "kvHeads")
	d.head = rapid.Uint64Range(1, 5).Draw(t, "head")
	d.value, d.scale = rapid.Uint64Range(1, 4).Draw(t, "value"), rapid.Uint64Range(1, 3).Draw(t, "scale")
	d.kHeads, d.kDim = rapid.SampledFrom([]uint64{1, 2, 4}).Draw(t, "kHeads"), rapid.Uint64Range(1, 3).Draw(t, "kDim")
	d.vHeads, d.vDim = d.kHeads*rapid.SampledFrom([]uint64{1, 2}).Draw(t, "ratioHeads"), rapid.Uint64Range(1, 3).Draw(t, "vDim")
	d.histor, d.elem = rapid.Uint64Range(1, 4).Draw(t, "history"), rapid.SampledFrom([]uint64{2, 4}).Draw(t, "elem")
	d.ratio = rapid.SampledFrom([]uint64{1, 1, 2, 4}).Draw(t, "ratio")
	return d
}

// sizesOf are the tensor parallel sizes that the laws try: divisors of the heads, multiples of
// them, and others. No engine serves the last kind, and the copy must be right all the same. An
// opaque page has no ranks.
func sizesOf(f *family) []uint64 {
	if f.name == "page" {
		return []uint64{1}
	}
	return []uint64{1, 2, 3, 4, 5, 6, 8}
}

func genTable(t *rapid.T, label string, blocks uint64, n int) []uint32 {
	ids := seq(blocks)
	if rapid.Bool().Draw(t, label+"shuffled") {
		ids = rapid.Permutation(ids).Draw(t, label)
	}
	return ids[:min(n, len(ids))]
}

func seq(n uint64) []uint32 {
	s := make([]uint32, n)
	for i := range s {
		s[i] = uint32(i)
	}
	return s
}

func random(n uint64, seed uint64) []byte {
	b := make([]byte, n)
	c := rand.NewChaCha8([32]byte{byte(seed)})
	_, _ = c.Read(b)
	return b
}

// moved calls fn for every byte that a copy of the tokens [start, end) moves between layer lf of
// one cache and lt of the other.
func moved(from, to *cache, lf, lt int, ft, tt []uint32, start, end uint64, fn func(role layout.Role, src, dst uint64)) {
	for i := range to.contents {
		ct, cf := &to.contents[i], &from.contents[0]
		for k := range from.contents {
			if from.contents[k].role == ct.role {
				cf = &from.contents[k]
			}
		}
		first, stop := max(cf.first, ct.first), min(cf.first+cf.own, ct.first+ct.own)
		for h := first; h < stop; h++ {
			cell := func(fb, tb uint32, fr, tr, col uint64) {
				for x := range ct.bytes {
					fn(ct.role, from.at(lf, uint64(fb), fr, ct.role, h-cf.first, col, x), to.at(lt, uint64(tb), tr, ct.role, h-ct.first, col, x))
				}
			}
			if to.state {
				for r := range ct.rows {
					for c := range ct.cols {
						cell(ft[(end-1)/from.n], tt[(end-1)/to.n], r, r, c)
					}
				}
				continue
			}
			last := end
			if to.opaque {
				last = (end + to.n - 1) / to.n * to.n
			}
			for e := start / to.ratio; e < last/to.ratio; e++ {
				tok := e * to.ratio
				cell(ft[tok/from.n], tt[tok/to.n], tok%from.n/from.ratio, tok%to.n/to.ratio, 0)
			}
		}
	}
}
