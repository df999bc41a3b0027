package parseblock

import (
	"math/rand/v2"
	"slices"
	"strings"

	"pgregory.net/rapid"

	"github.com/kvspray/kvspray/layout"
)

// stateCache: kind is strategy, then s or d (conv order), then v or k (order of the recurrent
// state).
func stateCache(kind string, d *dims) *cache {
	strategy, form, _ := strings.Cut(kind, " ")
	dimFirst, kOutside := form[0] == 'd', form[1] == 'k'
	params := map[string]int64{"v_heads": int64(d.vHeads), "v_dim": int64(d.vDim),
		"conv_len": int64(d.histor), "conv_bytes": 2}
	recurrent, parted := strategy != ShortConvState, strategy != ShortConvState &&
		strategy != Mamba1State
	if recurrent {
		params["k_dim"], params["state_bytes"] = int64(d.kDim), int64(d.elem)
	}
	if parted {
		params["k_heads"] = int64(d.kHeads)
	}
	if dimFirst {
		params["conv_order"] = 1
	}
	if kOutside {
		params["state_order"] = 1
	}
	k0, kn := d.shard(params, d.kHeads)
	v0, vn := d.shard(params, d.vHeads)
	kc, vc := kn*d.kDim, vn*d.vDim
	if !parted {
		kc = 0
	}
	dim := 2*kc + vc
	conv := dim * d.histor * 2
	base := map[layout.Role]uint64{layout.RoleConvQ: 0, layout.RoleConvK: kc, layout.RoleConvV: 2 * kc}
	if strategy == Mamba2State { // x, B, C
		base = map[layout.Role]uint64{layout.RoleConvV: 0, layout.RoleConvK: vc,
			layout.RoleConvQ: vc + kc}
	}
	cs := []content{{layout.RoleConvV, 2, v0 * d.vDim, vc, d.histor, 1}}
	if parted {
		cs = append([]content{{layout.RoleConvQ, 2, k0 * d.kDim, kc, d.histor, 1}, {layout.RoleConvK, 2,
			k0 * d.kDim, kc, d.histor, 1}}, cs...)
	}
	page := conv
	if recurrent {
		page += vn * d.vDim * d.kDim * d.elem
		cs = append(cs, content{layout.RoleRecurrent, d.elem, v0, vn, d.vDim, d.kDim})
	}
	c := paged(strategy, d, params, page, cs, func(row uint64,
		role layout.Role, head, col, x uint64) uint64 {
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
		conv.Layers = append(conv.Layers, layout.Layer{Name: g.Layers[i].Name + "#conv", Index: i,
			Base: d.base + uint64(i)*d.blocks*convBytes, BlockStride: convBytes, PageBytes: convBytes})
		rec.Layers = append(rec.Layers, layout.Layer{Name: g.Layers[i].Name + "#ssm", Index: i,
			Base: second + uint64(i)*d.blocks*recBytes, BlockStride: recBytes, PageBytes: recBytes})
	}
	c.groups = []layout.Group{conv, rec}
	c.size = second + uint64(d.layers)*d.blocks*recBytes
	stride := g.Layers[0].BlockStride
	c.at = func(layer int, block, row uint64, role layout.Role, head, col, x uint64) uint64 {
		in := inner(layer, block, row, role, head, col, x) - d.base -
			(uint64(layer)*d.blocks+block)*stride
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
	{name: "k and v of unlike width", kinds: []string{PackedHND, PackedNHD, "hnd in kernel pages"},
		make: diffKV},
	{name: "quant inline", kinds: []string{QuantInlineHND, QuantInlineNHD}, make: quantInline},
	{name: "quant planar", kinds: []string{QuantPlanarHND, QuantPlanarNHD}, make: quantPlane},
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
	{name: "mamba1", kinds: []string{Mamba1State + " sv", Mamba1State + " dv", Mamba1State + " sk"},
		make: stateCache},
	{name: "short conv", kinds: []string{ShortConvState + " sv", ShortConvState + " dv"},
		make: stateCache},
	{name: "cpu", kinds: []string{VLLMCPUAttn}, make: cpuCache, fixed: true},
	{name: "cpu vec", kinds: []string{"vec", PackedHND, PackedNHD, SGLangK}, make: vecCache},
	{name: "page", kinds: []string{Page}, make: whole, fixed: true},
	kimiK3Family,
}

// compressed reports whether caches of the family may have rows of several tokens.
func compressed(f *family) bool {
	return slices.Contains([]string{"rows of several tokens", "index keys", "indexer", "deepseek v4"},
		f.name)
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
	d := &dims{layers: rapid.IntRange(1, 3).Draw(t, "layers"), n: rapid.Uint64Range(1, 6).Draw(t,
		"n"), size: 1}
	d.kvHeads = rapid.SampledFrom([]uint64{1, 2, 3, 4, 6, 8}).Draw(t, "kvHeads")
	d.head = rapid.Uint64Range(1, 5).Draw(t, "head")
	d.value, d.scale = rapid.Uint64Range(1, 4).Draw(t, "value"), rapid.Uint64Range(1,
		3).Draw(t, "scale")
	d.kHeads, d.kDim = rapid.SampledFrom([]uint64{1, 2, 4}).Draw(t, "kHeads"), rapid.Uint64Range(1,
		3).Draw(t, "kDim")
	d.vHeads, d.vDim = d.kHeads*rapid.SampledFrom([]uint64{1, 2}).Draw(t, "ratioHeads"),
		rapid.Uint64Range(1, 3).Draw(t, "vDim")
	d.histor, d.elem = rapid.Uint64Range(1, 4).Draw(t, "history"),
		rapid.SampledFrom([]uint64{2, 4}).Draw(t, "elem")
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
func moved(from, to *cache, lf, lt int, ft, tt []uint32, start, end uint64,
	fn func(role layout.Role, src, dst uint64)) {
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
					fn(ct.role, from.at(lf, uint64(fb), fr, ct.role, h-cf.first, col, x), to.at(lt, uint64(tb), tr,
						ct.role, h-ct.first, col, x))
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
