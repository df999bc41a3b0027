package parseblock

import (
	"fmt"
	"maps"
	"math"
	"slices"

	"github.com/kvspray/kvspray/layout"
)

// Bounds of parameters.
const (
	maxHeads = 1 << 14
	maxCell  = 1 << 24 // bytes of one head of one token
)

// param is a parameter that some strategy reads.
type param uint8

// The parameters of all strategies. Each is described at the strategies that read it.
const (
	paramHeads param = iota
	paramKVHeads
	paramTPRank
	paramTPSize
	paramHeadBytes
	paramRowStride
	paramHeadStride
	paramValueBytes
	paramScaleBytes
	paramTokenBytes
	paramCompressRatio
	paramKernelTokens
	paramKTransposed
	paramNumberBytes
	paramKHeads
	paramKDim
	paramVHeads
	paramVDim
	paramConvLen
	paramConvBytes
	paramStateBytes
	paramPart
	paramConvOrder
	paramStateOrder
	paramStateOffset
	paramWindow
	paramPrefixCache
	numParams
)

var _ [32 - numParams]struct{} // params.read has a bit for each

// known holds names and ranges of parameters. Strategies check combinations of parameters.
var known = [numParams]struct {
	name   string
	lo, hi uint64
}{
	paramHeads:         {"heads", 1, maxHeads},
	paramKVHeads:       {"kv_heads", 1, maxHeads},
	paramTPRank:        {"tp_rank", 0, maxHeads},
	paramTPSize:        {"tp_size", 1, maxHeads},
	paramHeadBytes:     {"head_bytes", 1, maxCell},
	paramRowStride:     {"row_stride", 1, 1 << 48},
	paramHeadStride:    {"head_stride", 1, 1 << 60},
	paramValueBytes:    {"value_bytes", 1, maxCell},
	paramScaleBytes:    {"scale_bytes", 1, maxCell},
	paramTokenBytes:    {"token_bytes", 1, maxCell},
	paramCompressRatio: {"compress_ratio", 1, layout.MaxTokensPerBlock},
	paramKernelTokens:  {"kernel_tokens", 1, layout.MaxTokensPerBlock},
	paramKTransposed:   {"k_transposed", 0, 1},
	paramNumberBytes:   {"number_bytes", 1, 8},
	paramKHeads:        {"k_heads", 1, maxHeads},
	paramKDim:          {"k_dim", 1, maxHeads},
	paramVHeads:        {"v_heads", 1, maxHeads},
	paramVDim:          {"v_dim", 1, maxHeads},
	paramConvLen:       {"conv_len", 1, 256},
	paramConvBytes:     {"conv_bytes", 1, 8},
	paramStateBytes:    {"state_bytes", 1, 8},
	paramPart:          {"part", 0, 2},
	paramConvOrder:     {"conv_order", 0, 1},
	paramStateOrder:    {"state_order", 0, 1},
	paramStateOffset:   {"state_offset", 0, 1 << 40},
	paramWindow:        {"window", 0, math.MaxUint32},
	paramPrefixCache:   {"prefix_cache", 0, 1},
}

// of returns the parameter of a group whose planes exist and which is therefore valid; 0 if
// omitted.
func (n param) of(g *layout.Group) uint64 { return uint64(g.Params[known[n].name]) }

// params reads the parameters of one layer and keeps the first refusal, so that a strategy reads
// like its drawing. It records the parameters that were read: an unread parameter would describe an
// address that the strategy ignores.
type params struct {
	strategy string
	g        *layout.Group
	l        *layout.Layer
	n        uint64 // tokens per block
	read     uint32 // a bit for each parameter that the strategy has read
	err      error
}

func (p *params) refuse(field string, value any, problem string) {
	if p.err == nil {
		p.err = &layout.Error{Field: field, Value: fmt.Sprint(value),
			Problem: fmt.Sprintf("strategy %q: %s", p.strategy, problem),
			Remedy: "register the bytes of one block and the parameters that the engine uses, or the " +
				"strategy that fits"}
	}
}

func (p *params) refuseParam(n param, value any, problem string) {
	p.refuse("params."+known[n].name, value, problem)
}

// has reports whether the parameter was given.
func (p *params) has(n param) bool {
	p.read |= 1 << n
	_, ok := p.g.Params[known[n].name]
	return ok
}

// get returns an optional parameter.
func (p *params) get(n param, def uint64) uint64 {
	p.read |= 1 << n
	v, ok := p.g.Params[known[n].name]
	if !ok {
		return def
	}
	k := &known[n]
	if v < 0 || uint64(v) < k.lo || uint64(v) > k.hi {
		p.refuseParam(n, v, fmt.Sprintf("must be from %d to %d", k.lo, k.hi))
		return max(def, k.lo)
	}
	return uint64(v)
}

// need returns a required parameter.
func (p *params) need(n param) uint64 {
	if !p.has(n) {
		p.refuseParam(n, "missing", fmt.Sprintf("needs a value from %d to %d", known[n].lo, known[n].hi))
		return known[n].lo
	}
	return p.get(n, known[n].lo)
}

// nothingElse refuses parameters that the strategy has not read: misspelled ones, and those of
// another strategy or of a newer engine.
func (p *params) nothingElse() {
	given := 0
	for n := range numParams {
		if _, ok := p.g.Params[known[n].name]; ok && p.read&(1<<n) != 0 {
			given++
		}
	}
	if given == len(p.g.Params) || p.err != nil {
		return
	}
	var reads []string
	for n := range numParams {
		if p.read&(1<<n) != 0 {
			reads = append(reads, known[n].name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(p.g.Params)) {
		if slices.Contains(reads, name) {
			continue
		}
		p.err = &layout.Error{Field: fmt.Sprintf("params.%.64s", name),
			Value:   fmt.Sprint(p.g.Params[name]),
			Problem: fmt.Sprintf("strategy %q does not read it here; it reads %q", p.strategy, reads),
			Remedy: "omit it, name the strategy that reads it, or run a sidecar as new as the " +
				"engine's plug-in"}
		return
	}
}

// windowed reads the parameters that the plan uses for caches of tokens, whatever the page's
// content.
func (p *params) windowed() {
	p.get(paramWindow, 0)
	p.get(paramPrefixCache, 0)
}

// divide returns v/by and refuses a remainder.
func (p *params) divide(v, by uint64, name string) uint64 {
	if v == 0 || by == 0 || v%by != 0 {
		p.refuse("page_bytes", p.l.PageBytes, fmt.Sprintf("%d is not a multiple of %s = %d", v, name, by))
		return 1
	}
	return v / by
}

// divides returns v/by for a parameter by, and refuses a remainder.
func (p *params) divides(n param, by, v uint64, what string) uint64 {
	if v == 0 || by == 0 || v%by != 0 {
		p.refuseParam(n, by, fmt.Sprintf("it does not divide %s = %d", what, v))
		return 1
	}
	return v / by
}

// HeadShare returns the heads of one rank of a tensor parallel group: from ⌊rank*all/size⌋ on, and
// one head if there are more ranks than heads. Integer division, not modulo, because neighboring
// ranks share a head, so that the queries of a rank find theirs.
func HeadShare(all, rank, size uint64) (first, count uint64) {
	first = rank * all / size
	return first, max((rank+1)*all/size, first+1) - first
}

// rank returns this rank and the size of its tensor parallel group.
func (p *params) rank() (rank, size uint64) {
	rank, size = p.get(paramTPRank, 0), p.get(paramTPSize, 1)
	if rank >= size {
		p.refuseParam(paramTPRank, rank, fmt.Sprintf("there are %d ranks", size))
		return 0, 1
	}
	return rank, size
}

// share applies tp_rank and tp_size.
func (p *params) share(all uint64) (first, count uint64) {
	rank, size := p.rank()
	return HeadShare(all, rank, size)
}

// heads returns the KV heads of this rank among those of the model.
func (p *params) heads() (first, count, all uint64) {
	own := p.get(paramHeads, 1)
	_, size := p.rank()
	if !p.has(paramKVHeads) {
		if size > 1 {
			p.refuseParam(paramKVHeads, "missing", "ranks need the KV heads of the model")
		}
		if !p.has(paramHeads) && (p.strategy == PackedHND || p.strategy == QuantInlineHND) {
			p.refuseParam(paramHeads, "missing", fmt.Sprintf("needs a value from 1 to %d", maxHeads))
		}
		return 0, own, own
	}
	all = p.need(paramKVHeads)
	first, count = p.share(all)
	if p.has(paramHeads) && own != count {
		p.refuseParam(paramHeads, own, fmt.Sprintf("this rank has %d of %d heads", count, all))
	}
	return first, count, all
}

// cells returns a plane of K or V with a cell for each token and head; the order sets its strides.
func (p *params) cells(role layout.Role, cell uint64) layout.Plane {
	first, count, all := p.heads()
	p.windowed()
	return layout.Plane{Role: role, Unit: layout.UnitToken, CellBytes: cell, Rows: p.g.TokensPerBlock,
		RowTokens: 1,
		Heads:     uint32(count), FirstHead: uint32(first), AllHeads: uint32(all), Cols: 1}
}

// plane returns a plane whose cells fill the given bytes.
func (p *params) plane(role layout.Role, bytes uint64) layout.Plane {
	pl := p.cells(role, 1)
	pl.CellBytes = p.divide(bytes, uint64(pl.Heads)*p.n, "heads*tokens_per_block")
	return pl
}

// replicated returns a plane that all ranks have, one row per ratio tokens.
func (p *params) replicated(role layout.Role, cell, ratio uint64) layout.Plane {
	p.rank()
	p.windowed()
	return layout.Plane{Role: role, Unit: layout.UnitToken, CellBytes: cell,
		Rows:      uint32(p.divides(paramCompressRatio, ratio, p.n, "tokens_per_block")),
		RowTokens: uint32(ratio), RowStride: cell, HeadStride: cell, Heads: 1, AllHeads: 1, Cols: 1}
}

// tile divides a plane into the kernel pages of "kernel_tokens", which are adjacent in a block. It
// reports whether there are several.
func (p *params) tile(pl *layout.Plane) bool {
	t := p.get(paramKernelTokens, p.n)
	p.divides(paramKernelTokens, t, p.n, "tokens_per_block")
	if t == p.n || p.err != nil {
		return false
	}
	for _, n := range [...]param{paramRowStride, paramHeadStride} {
		if p.has(n) {
			p.refuseParam(n, p.get(n, 0), "kernel pages must be adjacent and dense")
		}
	}
	pl.TileRows = uint32(t)
	return true
}

// strides reads the strides of views into allocations of several layers.
func (p *params) strides(pl *layout.Plane) {
	pl.RowStride = p.get(paramRowStride, pl.RowStride)
	pl.HeadStride = p.get(paramHeadStride, pl.HeadStride)
}
