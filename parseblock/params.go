package parseblock

import (
	"fmt"

	"github.com/kvspray/kvspray/layout"
)

// Bounds of what parameters may ask for.
const (
	maxHeads = 1 << 14
	maxCell  = 1 << 24 // bytes of one head of one token
)

// params reads the parameters of one layer and keeps the first refusal, so that strategies read like their drawings.
type params struct {
	strategy string
	g        *layout.Group
	l        *layout.Layer
	n        uint64 // tokens per block
	err      error
}

func (p *params) refuse(field string, value any, problem string) {
	if p.err == nil {
		p.err = &layout.Error{Field: field, Value: fmt.Sprint(value), Problem: fmt.Sprintf("strategy %q: %s", p.strategy, problem),
			Remedy: "register the bytes of one block and the parameters that the engine uses, or the strategy that fits"}
	}
}

// get is an optional parameter between lo and hi.
func (p *params) get(name string, def, lo, hi uint64) uint64 {
	v, ok := p.g.Params[name]
	if !ok {
		return def
	}
	if v < 0 || uint64(v) < lo || uint64(v) > hi {
		p.refuse("params."+name, v, fmt.Sprintf("it takes %d to %d", lo, hi))
		return max(def, lo)
	}
	return uint64(v)
}

// need is a parameter that must be there.
func (p *params) need(name string, lo, hi uint64) uint64 {
	if _, ok := p.g.Params[name]; !ok {
		p.refuse("params."+name, "missing", fmt.Sprintf("it needs %d to %d", lo, hi))
		return lo
	}
	return p.get(name, lo, lo, hi)
}

// divide is v/by; by that does not divide it is refused.
func (p *params) divide(v, by uint64, name string) uint64 {
	if v == 0 || by == 0 || v%by != 0 {
		p.refuse("page_bytes", p.l.PageBytes, fmt.Sprintf("%d is no multiple of %s = %d", v, name, by))
		return 1
	}
	return v / by
}

func (p *params) even(by uint64) { p.divide(p.l.PageBytes, by, "its halves") }

// HeadShare is the part of all heads that a rank of a tensor parallel group has: from ⌊rank*all/size⌋, and one where there
// are more ranks than heads. Integer division and not modulo: neighbours share a head, so that the queries of a rank find
// theirs.
func HeadShare(all, rank, size uint64) (first, count uint64) {
	first = rank * all / size
	return first, max((rank+1)*all/size, first+1) - first
}

// share applies tp_rank and tp_size.
func (p *params) share(all uint64) (first, count uint64) {
	size := p.get("tp_size", 1, 1, maxHeads)
	rank := p.get("tp_rank", 0, 0, maxHeads)
	if rank >= size {
		p.refuse("params.tp_rank", rank, fmt.Sprintf("there are %d ranks", size))
		return 0, all
	}
	return HeadShare(all, rank, size)
}

// heads are the KV heads of this rank among those of the model.
func (p *params) heads() (first, count, all uint64) {
	_, needed := p.g.Params["kv_heads"]
	own := p.get("heads", 1, 1, maxHeads)
	if !needed {
		if _, ok := p.g.Params["tp_size"]; ok && p.get("tp_size", 1, 1, maxHeads) > 1 {
			p.refuse("params.kv_heads", "missing", "ranks need the KV heads of the model")
		}
		if _, ok := p.g.Params["heads"]; !ok && (p.strategy == PackedHND || p.strategy == QuantInlineHND) {
			p.refuse("params.heads", "missing", fmt.Sprintf("it needs 1 to %d", maxHeads))
		}
		return 0, own, own
	}
	all = p.need("kv_heads", 1, maxHeads)
	first, count = p.share(all)
	if _, ok := p.g.Params["heads"]; ok && own != count {
		p.refuse("params.heads", own, fmt.Sprintf("this rank has %d of %d heads", count, all))
	}
	return first, count, all
}

// cells is a plane of cells of K or V, for each token and head; the order sets its strides.
func (p *params) cells(role layout.Role, cell uint64) layout.Plane {
	first, count, all := p.heads()
	return layout.Plane{Role: role, Unit: layout.UnitToken, CellBytes: cell, Rows: p.g.TokensPerBlock, RowTokens: 1,
		Heads: uint32(count), FirstHead: uint32(first), AllHeads: uint32(all), Cols: 1}
}

// plane is cells that fill so many bytes.
func (p *params) plane(role layout.Role, bytes uint64) layout.Plane {
	pl := p.cells(role, 1)
	pl.CellBytes = p.divide(bytes, uint64(pl.Heads)*p.n, "heads*tokens_per_block")
	return pl
}

// replicated is a plane that all ranks have, one row for each ratio tokens.
func (p *params) replicated(role layout.Role, cell, ratio uint64) layout.Plane {
	return layout.Plane{Role: role, Unit: layout.UnitToken, CellBytes: cell, Rows: uint32(p.divide(p.n, ratio, "compress_ratio")),
		RowTokens: uint32(ratio), RowStride: cell, HeadStride: cell, Heads: 1, AllHeads: 1, Cols: 1}
}

// strides takes the strides of views into allocations of several layers.
func (p *params) strides(pl *layout.Plane) {
	pl.RowStride = p.get("row_stride", pl.RowStride, 1, 1<<48)
	pl.HeadStride = p.get("head_stride", pl.HeadStride, 1, 1<<60)
}
