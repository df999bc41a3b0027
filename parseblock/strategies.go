package parseblock

import (
	"fmt"

	"github.com/kvspray/kvspray/layout"
)

// The names of the strategies, as shims register them. The drawings show a page from left to right;
// the last axis is contiguous. B counts blocks, N tokens of a block, H heads of this rank, D
// elements of a head, s bytes of an element, C bytes of a latent. Engines change their tensors'
// shapes more often than their bytes; the versions given are those whose source was read: vLLM 0.27
// to 0.32, SGLang 0.5.17 to 0.5.23. A strategy refuses parameters that it
// does not read; known has their ranges. Common parameters:
//
//	kernel_tokens       tokens of a kernel page, if a block holds several; each is laid out like a block
//	heads               KV heads of this rank; default 1 (a token cannot be cut between ranks then)
//	kv_heads            KV heads of the model; tp_rank, tp_size: this rank's (HeadShare). Not of Page
//	head_bytes          bytes of K of a head of a token: packed pages and CPU_ATTN (opaque: only size)
//	token_bytes         bytes of a token that is one row
//	row_stride          bytes between tokens, if other layers lie between and the order does not show it
//	head_stride         bytes from one head to the next, likewise
//	window              tokens that a sliding window looks back; only the visible tail moves. Not of states
//	prefix_cache        1: the engine keeps blocks for other prompts; a window's first block must hold
const (
	// PackedHND is K|V packed in each cell, heads outside: vLLM 0.27 to 0.32 (FLASH_ATTN,
	// FLASHINFER, TRITON_ATTN with an HND layout), and with head_stride also the cross-layer orders
	// LHBNC, BLHNC and BHLNC of 0.28 and later (Allocation). V may be wider or narrower than K
	// (FLASH_ATTN_DIFFKV, TRITON_ATTN_DIFFKV): head_bytes is the size of K in a cell, by default
	// half.
	//
	//	[B, H, N, 2D]  | h0: k0 v0 k1 v1 ... | h1: k0 v0 k1 v1 ... |
	PackedHND = "packed_hnd"
	// PackedNHD is the same with tokens outside: the default of vLLM 0.27 to 0.32 (LBNHC), and
	// BLNHC of 0.28 and later.
	//
	//	[B, N, H, 2D]  | t0: h0(k v) h1(k v) ... | t1: ... |
	PackedNHD = "packed_nhd"

	// QuantInlineHND is packed pages whose values carry their scales: TRITON_ATTN of vLLM 0.27 to
	// 0.32 with an HND layout and a scale per token and head (int8_per_token_head,
	// fp8_per_token_head: D' = D; int4_per_token_head: D' = D/2). value_bytes and scale_bytes: of K
	// or of V of one head of one token.
	//
	//	[B, H, N, 2(D'+4)]  | h0: k0 scale v0 scale, k1 scale v1 scale, ... | h1: ... |
	QuantInlineHND = "quant_inline_hnd"
	// QuantInlineNHD is the same with tokens outside, the default of vLLM 0.27 to 0.32.
	//
	//	[B, N, H, 2(D'+4)]  | t0: h0(k scale v scale) h1(...) ... | t1: ... |
	QuantInlineNHD = "quant_inline_nhd"
	// QuantPlanarHND keeps scales after the values in each half of a page: FLASHINFER of vLLM 0.27
	// to 0.32 with nvfp4 and an HND layout (value_bytes D/2, scale_bytes D/16). A part of a page is
	// four pieces: without its two pieces of scales the values are useless.
	//
	//	| k values: h0(t0 t1 ...) h1(...) | k scales: h0(t0 t1 ...) h1(...) | v values: ... | v scales: ... |
	QuantPlanarHND = "quant_planar_hnd"
	// QuantPlanarNHD is the same with tokens outside in each of the four: nvfp4 of vLLM 0.27 to
	// 0.32 with an NHD layout.
	//
	//	| k values: t0(h0 h1 ...) t1(...) | k scales: t0(h0 h1 ...) t1(...) | v values: ... | v scales: ... |
	QuantPlanarNHD = "quant_planar_nhd"
	// MLA is one latent per token (or per compress_ratio tokens: DeepSeek-V4 in bf16), replicated
	// on all ranks: DeepSeek-V2/V3, Kimi; vLLM to 0.32 and SGLang to 0.5.23. Pages may be wider
	// (block_stride) than their tokens, as with Kimi-K3, whose pages are as wide as a KDA state.
	//
	//	[B, N, C]  | latent: t0 t1 ... |
	MLA = "mla"
	// FP8DSMLA is the fp8 cache of DeepSeek-V3.2 (kv_cache_dtype fp8_ds_mla of vLLM 0.27 to 0.32,
	// fp8 of SGLang 0.5.17 to 0.5.23): 656 bytes per token in one row that must not be divided.
	//
	//	| latent: t0(512 fp8, 4 fp32 scales, 64 bf16 rope) t1(...) ... |
	FP8DSMLA = "fp8_ds_mla"
	// DSAIndexer is the indexer's cache of DeepSeek-V3.2, GLM-5 and DeepSeek-V4 in vLLM 0.27 to
	// 0.32 and, for the first two models, in SGLang 0.5.17 to 0.5.23: planar in each *kernel* page,
	// 64 tokens by default (kernel_tokens), of which a block may hold several. A part of a page is
	// two pieces, values and scales. Defaults: value_bytes 128, scale_bytes 4 (64 and 4 with
	// mxfp4). compress_ratio: tokens per entry. Not divided by tensor parallelism.
	//
	//	| index: t0 t1 ... t63 | index scales: t0 t1 ... t63 | index: t64 ... t127 | index scales: t64 ... t127 |
	DSAIndexer = "dsa_indexer"
	// IndexKeys is an indexer's cache without scales, replicated on all ranks: MiniMax-M3 and, with
	// compress_ratio, QSA of vLLM 0.32.
	//
	//	[B, N, D]  | index: t0 t1 ... |
	IndexKeys = "index_keys"
	// DeepSeekV4 is the main and the sliding cache of DeepSeek-V4 in the slab of vLLM 0.27 to 0.32:
	// N/compress_ratio entries of 576 bytes (448 fp8 and 64 bf16), then 8 scale bytes for each;
	// padded to 576 bytes by block_stride.
	//
	//	| latent: e0(576) e1(576) ... | latent scales: e0(8) e1(8) ... | pad |
	//
	// The slab is one pool of equal blocks for all groups. A block belongs to one group at a time.
	// The group's layers are adjacent in the block from its front, each page padded to 576 bytes:
	//
	//	slab                      | block 0 | block 1 | block 2 | ... |
	//	main, ratio 4             | l0: latent, latent scales, pad | l2: ... | ... |      the layers of that ratio
	//	indexer of the same       | l0: index, index scales, pad | l2: ... | ... |
	//	main, ratio 128           | l1: latent, latent scales, pad | l3: ... | ... |
	//	sliding, window 128       | l0: latent, latent scales, pad | l1: ... | l2: ... | ... |   every layer, an entry for each token
	//	compressor, window 8      | l0: compressor: t0 .. t3 of 2048 fp32 | l2: ... | ... |      of ratio 4
	//	compressor, window 128    | l1: compressor: t0 .. t7 of 1024 fp32 | l3: ... | ... |      of ratio 128
	DeepSeekV4 = "deepseek_v4"
	// DeepSeekV4Compressor is the fp32 state of its compressors in vLLM 0.27 to 0.32, one row a
	// token (sliding: window 8 or 128): the token's part of an entry and its score, both twice
	// where entries overlap (ratio 4).
	//
	//	[B, N, row]  | compressor: t0(kv score) t1(kv score) ... |
	DeepSeekV4Compressor = "deepseek_v4_compressor"

	// GDNState is the state of a gated delta net (Qwen3-Next, Qwen3.5): in vLLM 0.27 to 0.32 a page
	// of [conv | recurrent], in SGLang 0.5.17 to 0.5.23 slots of two tensors (part 1 and 2). It
	// moves once per request, from the block that holds its last token. Parameters, all of the
	// model: k_heads, k_dim, v_heads, v_dim, conv_len (K-1, and one more per speculated token),
	// conv_bytes and state_bytes (of an element), tp_rank, tp_size, conv_order (0: SD, 1: DS, as
	// VLLM_SSM_CONV_STATE_LAYOUT), state_order (0: V outside, 1: K outside), part (0: both, 1: only
	// conv, 2: only recurrent), state_offset (if padding lies between).
	//
	//	SD [len, dim]: | t0: conv q, conv k, conv v | t1: conv q, conv k, conv v | ...          three pieces for each row of history
	//	DS [dim, len]: | conv q: c0(t0 t1 ..) c1 .. | conv k: c0 .. | conv v: c0 .. |            three pieces
	//	behind either: | recurrent: h0(v0(k0 k1 ..) v1 ..) h1 .. |   [v_heads, v_dim, k_dim]; with state_order 1 [v_heads, k_dim, v_dim]
	//	in slots     : part 1 | slot 0: conv | slot 1: conv | ...    part 2 | slot 0: recurrent | slot 1: recurrent | ...
	GDNState = "gdn_state"
	// KDAState is the state of Kimi Delta Attention (Kimi-Linear, Kimi-K3) in vLLM 0.27 to 0.32 and
	// SGLang 0.5.17 to 0.5.23: like GDNState with as many k as v heads and an fp32 recurrent state.
	//
	//	SD: | t0: conv q, conv k, conv v | t1: ... | then | recurrent: h0(v0(k0 k1 ..) v1 ..) h1 .. |
	//	DS: | conv q: c0(t0 t1 ..) c1 .. | conv k: c0 .. | conv v: c0 .. | then the same
	KDAState = "kda_state"
	// Mamba2State is the state of Mamba-2 (Nemotron-H and others) in vLLM 0.27 to 0.32 and SGLang
	// 0.5.17 to 0.5.23, like GDNState: k_heads are its groups, k_dim its state size; the
	// convolution's history has x, B, C in this order. Ranks beyond the number of groups share
	// them.
	//
	//	SD: | t0: conv v (x), conv k (B), conv q (C) | t1: ... | then | recurrent: h0(x0(s0 s1 ..) x1 ..) h1 .. |
	//	DS: | conv v: c0(t0 t1 ..) c1 .. | conv k: c0 .. | conv q: c0 .. | then the same
	Mamba2State = "mamba2_state"
	// Mamba1State is the state of Mamba-1 (Jamba, Falcon-Mamba) in vLLM 0.33, like GDNState: the
	// convolution's history has x alone. Its channels are v_heads * v_dim, and k_dim is the state
	// size.
	//
	//	SD: | t0: conv v (x) | t1: ... | then | recurrent: c0(s0 s1 ..) c1 .. |
	//	DS: | conv v: c0(t0 t1 ..) c1 .. | then the same
	Mamba1State = "mamba1_state"
	// ShortConvState is the history of a short convolution (LFM2) in vLLM 0.33, like GDNState without
	// a recurrent state. Its channels are v_heads * v_dim.
	//
	//	SD: | t0: conv v | t1: ... |
	//	DS: | conv v: c0(t0 t1 ..) c1 .. |
	ShortConvState = "short_conv_state"

	// SGLangK is the K half of SGLang's device pools (0.5.17 to 0.5.23), which keep K and V in
	// tensors of their own for each layer: layers "name#k" and "name#v". A page is page_size token
	// slots.
	//
	//	(size+page, H, D)  | k: t0(h0 h1 ...) t1(...) ... |
	SGLangK = "sglang_k"
	// SGLangV is the V half, of SGLang 0.5.17 to 0.5.23.
	//
	//	(size+page, H, D)  | v: t0(h0 h1 ...) t1(...) ... |
	SGLangV = "sglang_v"

	// VLLMCPUAttn is CPU_ATTN of vLLM 0.27 to 0.32: [B,H,N,2D] seen as [B,H,2N,D], K and then V of
	// each head, packed for the host's vector units. With k_transposed = 1 (vec and vec16: AVX2,
	// AVX-512) K has its elements outside and its tokens inside, and V has rows; number_bytes is
	// the size of an element, 2 by default. Without it (AMX, NEON and others) a head's part of a
	// page is opaque: it moves whole, between equal block sizes.
	//
	//	k_transposed  | h0: k: d0(t0 t1 ...) d1(t0 t1 ...) ... | v: t0 t1 ... | h1: ... |
	//	else          | h0: page, of all its tokens | h1: page ... |
	VLLMCPUAttn = "vllm_cpu_attn"
	// Page is a page of unknown content: it moves whole or not at all. SGLang to 0.5.23: an indexer's
	// keys and recurrent states, in prefill and decode.
	//
	//	| page: whatever the engine has there |
	Page = "page"
)

// builtin is a strategy of this package: a name, and the function from a layer's parameters to
// planes.
type builtin struct {
	name string
	make func(p *params) []layout.Plane
}

var builtins = []*builtin{
	{PackedHND, packed(hnd, false)},
	{PackedNHD, packed(nhd, false)},
	{QuantInlineHND, packed(hnd, true)},
	{QuantInlineNHD, packed(nhd, true)},
	{QuantPlanarHND, quantPlanar(hnd)},
	{QuantPlanarNHD, quantPlanar(nhd)},
	{MLA, rows(layout.RoleLatent, "", 0)},
	{FP8DSMLA, rows(layout.RoleLatent, FP8DSMLA, 656)},
	{DSAIndexer, dsaIndexer},
	{IndexKeys, rows(layout.RoleIndex, "", 0)},
	{DeepSeekV4, deepseekV4},
	{DeepSeekV4Compressor, rows(layout.RoleCompressor, "", 0)},
	{GDNState, linearState(true, layout.RoleConvQ, layout.RoleConvK, layout.RoleConvV)},
	{KDAState, linearState(true, layout.RoleConvQ, layout.RoleConvK, layout.RoleConvV)},
	{Mamba2State, linearState(true, layout.RoleConvV, layout.RoleConvK, layout.RoleConvQ)},
	{Mamba1State, linearState(true, layout.RoleConvV)},
	{ShortConvState, linearState(false, layout.RoleConvV)},
	{SGLangK, one(layout.RoleK)},
	{SGLangV, one(layout.RoleV)},
	{VLLMCPUAttn, cpuAttn},
	{Page, opaque},
	{KimiK3, kimiK3},
}

func (s *builtin) Name() string { return s.name }

func (s *builtin) Planes(dst []layout.Plane, g *layout.Group, l *layout.Layer) ([]layout.Plane,
	error) {
	if l == nil {
		return dst, s.checkGroup(g)
	}
	p := params{strategy: s.name, g: g, l: l, n: uint64(g.TokensPerBlock)}
	planes := s.make(&p)
	p.nothingElse()
	if p.err != nil {
		return dst, p.err
	}
	return append(dst, planes...), nil
}

// checkGroup checks the parameters of a group without layers here: each given parameter must be
// read and in range. A contradiction with a page cannot be detected.
func (s *builtin) checkGroup(g *layout.Group) error {
	p := params{strategy: s.name, g: g, l: &layout.Layer{}, n: uint64(g.TokensPerBlock)}
	s.make(&p)
	p.err = nil
	for n := range numParams {
		if p.read&(1<<n) != 0 {
			p.get(n, 0)
		}
	}
	p.nothingElse()
	return p.err
}

// order sets the strides of a plane of K or V whose cells are set.
type order func(p *params, pl *layout.Plane)

func nhd(p *params, pl *layout.Plane) {
	pl.HeadStride = pl.CellBytes
	pl.RowStride = uint64(pl.Heads) * pl.CellBytes
	p.strides(pl)
}

func hnd(p *params, pl *layout.Plane) {
	pl.HeadMajor = true
	pl.RowStride = pl.CellBytes
	rows := pl.Rows
	if pl.TileRows != 0 {
		rows = pl.TileRows
	}
	pl.HeadStride = uint64(rows) * pl.CellBytes
	p.strides(pl)
}

// packed returns one plane of K and V. Scaled pages must give the content of their cells.
func packed(o order, scaled bool) func(*params) []layout.Plane {
	return func(p *params) []layout.Plane {
		pl := p.plane(layout.RoleKV, p.l.PageBytes)
		if p.has(paramHeadBytes) {
			if pl.KeyBytes = p.need(paramHeadBytes); pl.KeyBytes >= pl.CellBytes {
				p.refuseParam(paramHeadBytes, pl.KeyBytes,
					fmt.Sprintf("K and V of a head of a token have %d bytes", pl.CellBytes))
			}
		}
		if scaled {
			v, s := p.need(paramValueBytes), p.need(paramScaleBytes)
			if p.err == nil && pl.CellBytes != 2*(v+s) {
				p.refuse("page_bytes", p.l.PageBytes, fmt.Sprintf("a head of a token has %d bytes, not "+
					"2*(%d+%d)", pl.CellBytes, v, s))
			}
			pl.Format = fmt.Sprintf("inline %d+%d", v, s)
		}
		o(p, &pl)
		if pl.HeadMajor && p.tile(&pl) { // with tokens outside, adjacent kernel pages are one page
			pl.HeadStride = uint64(pl.TileRows) * pl.CellBytes
			pl.TileStride = uint64(pl.Heads) * pl.HeadStride
		}
		return []layout.Plane{pl}
	}
}

func one(role layout.Role) func(*params) []layout.Plane {
	return func(p *params) []layout.Plane {
		pl := p.plane(role, p.l.PageBytes)
		nhd(p, &pl)
		return []layout.Plane{pl}
	}
}

func quantPlanar(o order) func(*params) []layout.Plane {
	return func(p *params) []layout.Plane {
		v, s := p.need(paramValueBytes), p.need(paramScaleBytes)
		var out []layout.Plane
		var at uint64 // in a kernel page
		for _, c := range []struct {
			role layout.Role
			cell uint64
		}{{layout.RoleK, v}, {layout.RoleKScale, s}, {layout.RoleV, v}, {layout.RoleVScale, s}} {
			pl := p.cells(c.role, c.cell)
			pl.Offset, pl.Format = at, fmt.Sprintf("scaled %d+%d", v, s)
			rows := pl.Rows
			if p.tile(&pl) {
				rows = pl.TileRows
			}
			o(p, &pl)
			at += uint64(rows) * uint64(pl.Heads) * pl.CellBytes
			out = append(out, pl)
		}
		for i := range out {
			if out[i].TileRows != 0 {
				out[i].TileStride = at
			}
		}
		return out
	}
}

// rows returns one row per token, or per compress_ratio tokens, equal on all ranks. cell is the
// only permitted size, or 0.
func rows(role layout.Role, format string, cell uint64) func(*params) []layout.Plane {
	return func(p *params) []layout.Plane {
		ratio := p.get(paramCompressRatio, 1)
		rows := p.divides(paramCompressRatio, ratio, p.n, "tokens_per_block")
		pl := p.replicated(role, p.divide(p.l.PageBytes, rows, "the rows of a block"), ratio)
		if own := p.get(paramTokenBytes, pl.CellBytes); own != pl.CellBytes {
			p.refuseParam(paramTokenBytes, own, fmt.Sprintf("a row has %d bytes", pl.CellBytes))
		}
		if cell != 0 && pl.CellBytes != cell && p.err == nil {
			p.refuse("page_bytes", p.l.PageBytes, fmt.Sprintf("a row has %d bytes, not %d",
				pl.CellBytes, cell))
		}
		pl.Format = format
		p.strides(&pl)
		return []layout.Plane{pl}
	}
}

func dsaIndexer(p *params) []layout.Plane {
	v, s := p.get(paramValueBytes, 128), p.get(paramScaleBytes, 4)
	ratio := p.get(paramCompressRatio, 1)
	values, scales := p.replicated(layout.RoleIndex, v, ratio),
		p.replicated(layout.RoleIndexScale, s, ratio)
	tile := p.get(paramKernelTokens, min(64, p.n))
	p.divides(paramKernelTokens, tile, p.n, "tokens_per_block")
	tile = p.divides(paramCompressRatio, ratio, tile, "kernel_tokens")
	if p.err != nil {
		return nil
	}
	scales.Offset = tile * v
	for _, pl := range []*layout.Plane{&values, &scales} {
		pl.Format = fmt.Sprintf("scaled %d+%d", v, s)
		pl.TileRows, pl.TileStride = uint32(tile), tile*(v+s)
	}
	return []layout.Plane{values, scales}
}

func deepseekV4(p *params) []layout.Plane {
	const data, scale = 576, 8
	ratio := p.get(paramCompressRatio, 1)
	d, s := p.replicated(layout.RoleLatent, data, ratio), p.replicated(layout.RoleLatentScale,
		scale, ratio)
	d.Format, s.Format = DeepSeekV4, DeepSeekV4
	s.Offset = uint64(d.Rows) * data
	return []layout.Plane{d, s}
}

func opaque(p *params) []layout.Plane {
	p.windowed()
	return []layout.Plane{{Role: layout.RolePage, Unit: layout.UnitBlock, CellBytes: p.l.PageBytes,
		Rows: 1, RowTokens: p.g.TokensPerBlock,
		Heads: 1, Cols: 1, AllHeads: 1, Format: p.strategy}}
}

func cpuAttn(p *params) []layout.Plane {
	k := p.cells(layout.RoleK, 1)
	k.HeadMajor = true
	k.HeadStride = p.divide(p.l.PageBytes, uint64(k.Heads), "heads")
	number, own := p.get(paramNumberBytes, 2), p.get(paramHeadBytes, 0)
	if p.get(paramKTransposed, 0) == 0 {
		k.Role, k.Unit, k.Format, k.CellBytes, k.Rows, k.RowTokens = layout.RolePage, layout.UnitBlock,
			p.strategy, k.HeadStride, 1, p.g.TokensPerBlock
		return []layout.Plane{k}
	}
	row := p.divide(k.HeadStride, 2*p.n, "tokens_per_block, K and V,")
	if own != 0 && own != row {
		p.refuseParam(paramHeadBytes, own, fmt.Sprintf("K of a head of a token has %d bytes", row))
	}
	v := k
	k.CellBytes, k.RowStride, k.ColStride = number, number, p.n*number
	k.Cols, k.ColMajor = uint32(p.divides(paramNumberBytes, number, row, "the bytes of K of a head "+
		"of a token")), true
	v.Role, v.CellBytes, v.RowStride, v.Offset = layout.RoleV, row, row, k.HeadStride/2
	return []layout.Plane{k, v}
}

// linearState is the state of a linear attention: a convolution whose history holds the given parts
// in this order and, if recurrent, a matrix for each head of v.
func linearState(recurrent bool, history ...layout.Role) func(*params) []layout.Plane {
	return func(p *params) []layout.Plane {
		vHeads, vDim := p.need(paramVHeads), p.need(paramVDim)
		length, conv := p.need(paramConvLen), p.get(paramConvBytes, 2)
		dimFirst := p.get(paramConvOrder, 0) == 1
		var kHeads, kDim, elem, part uint64
		var kOutside bool
		if recurrent {
			kDim, elem, part = p.need(paramKDim), p.get(paramStateBytes, 2), p.get(paramPart, 0)
			kOutside = p.get(paramStateOrder, 0) == 1
		} else {
			part = 1
		}
		v0, vn := p.share(vHeads)
		dim := vn * vDim
		var k0, kn uint64
		if len(history) > 1 {
			kHeads = p.need(paramKHeads)
			k0, kn = p.share(kHeads)
			dim += 2 * kn * kDim
		}
		if p.err != nil {
			return nil
		}
		state := layout.Plane{Unit: layout.UnitState, Cols: 1, RowTokens: 1}
		var out []layout.Plane
		var at uint64
		if part == 2 {
			dim = 0
		} else {
			for _, role := range history {
				heads, from, all, width := kn, k0, kHeads, kDim
				if role == layout.RoleConvV {
					heads, from, all, width = vn, v0, vHeads, vDim
				}
				pl := state
				pl.Role, pl.CellBytes, pl.Rows, pl.HeadMajor = role, conv, uint32(length), dimFirst
				pl.Heads, pl.FirstHead, pl.AllHeads = uint32(heads*width), uint32(from*width), uint32(all*width)
				pl.RowStride, pl.HeadStride, pl.Offset = dim*conv, conv, at*conv
				if dimFirst {
					pl.RowStride, pl.HeadStride, pl.Offset = conv, length*conv, at*length*conv
				}
				at += heads * width
				out = append(out, pl)
			}
		}
		if part != 1 {
			pl := state
			pl.Role, pl.CellBytes, pl.HeadMajor, pl.Transposed = layout.RoleRecurrent, elem, true, kOutside
			pl.Heads, pl.FirstHead, pl.AllHeads = uint32(vn), uint32(v0), uint32(vHeads)
			r, c := vDim, kDim
			if kOutside {
				r, c = c, r
			}
			pl.Rows, pl.Cols = uint32(r), uint32(c)
			pl.ColStride, pl.RowStride, pl.HeadStride = elem, c*elem, r*c*elem
			pl.Offset = p.get(paramStateOffset, dim*length*conv)
			if pl.Offset < dim*length*conv {
				p.refuseParam(paramStateOffset, pl.Offset, fmt.Sprintf("the convolution takes %d bytes",
					dim*length*conv))
			}
			out = append(out, pl)
		}
		return out
	}
}
