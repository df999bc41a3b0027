package parseblock

import (
	"fmt"

	"github.com/kvspray/kvspray/layout"
)

// The names of the strategies; what a shim registers.
const (
	PackedHND       = "packed_hnd"        // [B,H,N,2D], K|V packed in each row; params: heads
	PackedNHD       = "packed_nhd"        // [B,N,H,2D]
	FlashKVFirst    = "flash_kv_first"    // [2,B,N,H,D]; params: v_offset, by default num_blocks*block_stride
	FlashBlockFirst = "flash_block_first" // [B,2,N,H,D]
	MLA             = "mla"               // [B,N,C]
	// VLLMCPUAttn is vLLM's CPU backend: [B,H,N,2D] seen as [B,H,2N,D], K rows and then V rows of each head, packed for the
	// host's vector units. Only whole pages mean anything, and only between equal block sizes.
	VLLMCPUAttn = "vllm_cpu_attn"
)

type form uint8

const (
	formHeads  form = iota + 1 // one plane, heads outside, tokens inside
	formTokens                 // one plane, tokens outside
	formKVFar                  // K and V planes, V far away
	formKVNear                 // K and V planes, V behind K in the page
	formPage                   // one opaque page
)

type builtin struct {
	name string
	form form
	role layout.Role
}

var builtins = []*builtin{
	{PackedHND, formHeads, layout.RoleKV},
	{PackedNHD, formTokens, layout.RoleKV},
	{FlashKVFirst, formKVFar, layout.RoleK},
	{FlashBlockFirst, formKVNear, layout.RoleK},
	{MLA, formTokens, layout.RoleLatent},
	{VLLMCPUAttn, formPage, layout.RolePage},
}

// maxHeads bounds the pieces of a partly filled page.
const maxHeads = 1 << 14

func (s *builtin) Name() string { return s.name }

func (s *builtin) Planes(dst []layout.Plane, g *layout.Group, l *layout.Layer) ([]layout.Plane, error) {
	ps, n, err := s.planes(g, l)
	if err != nil {
		return dst, err
	}
	return append(dst, ps[:n]...), nil
}

// planes returns by value, so that the hot path needs no scratch.
func (s *builtin) planes(g *layout.Group, l *layout.Layer) (ps [2]layout.Plane, n int, err error) {
	tokens := g.TokensPerBlock
	page := l.PageBytes
	switch s.form {
	case formPage:
		return [2]layout.Plane{{Role: s.role, Unit: layout.UnitBlock, UnitBytes: page, Units: 1}}, 1, nil
	case formTokens:
		if err := divides(s.name, "page_bytes", page, "tokens_per_block", uint64(tokens)); err != nil {
			return ps, 0, err
		}
		return [2]layout.Plane{{Role: s.role, Unit: layout.UnitToken, UnitBytes: page / uint64(tokens), Units: tokens}}, 1, nil
	case formHeads:
		heads := g.Params["heads"]
		if heads < 1 || heads > maxHeads {
			return ps, 0, &layout.Error{Field: "params.heads", Value: fmt.Sprint(heads),
				Problem: fmt.Sprintf("strategy %q needs 1 to %d", s.name, maxHeads), Remedy: "register the KV heads of this rank"}
		}
		if err := divides(s.name, "page_bytes", page, "heads*tokens_per_block", uint64(heads)*uint64(tokens)); err != nil {
			return ps, 0, err
		}
		return [2]layout.Plane{{Role: s.role, Unit: layout.UnitHead, UnitBytes: page / uint64(heads), Units: uint32(heads)}}, 1, nil
	}
	if err := divides(s.name, "page_bytes", page, "2*tokens_per_block", 2*uint64(tokens)); err != nil {
		return ps, 0, err
	}
	token := page / 2 / uint64(tokens)
	ps = [2]layout.Plane{
		{Role: layout.RoleK, Unit: layout.UnitToken, UnitBytes: token, Units: tokens},
		{Role: layout.RoleV, Unit: layout.UnitToken, UnitBytes: token, Units: tokens, Offset: page / 2},
	}
	if s.form == formKVFar {
		ps[1].Offset, err = s.vOffset(g, l)
	}
	return ps, 2, err
}

func (s *builtin) vOffset(g *layout.Group, l *layout.Layer) (uint64, error) {
	if v, ok := g.Params["v_offset"]; ok {
		if v <= 0 {
			return 0, &layout.Error{Field: "params.v_offset", Value: fmt.Sprint(v), Problem: "must be above 0",
				Remedy: "register the bytes from K of block 0 to V of block 0, or leave it out"}
		}
		return uint64(v), nil
	}
	if l.BlockStride > 1<<62/layout.MaxBlocks {
		return 0, &layout.Error{Field: "block_stride", Value: fmt.Sprint(l.BlockStride), Problem: "its offsets overflow 64 bits",
			Remedy: "register the distance from one block to the next"}
	}
	return uint64(g.NumBlocks) * l.BlockStride, nil
}

func divides(strategy, field string, v uint64, by string, n uint64) error {
	if n != 0 && v != 0 && v%n == 0 {
		return nil
	}
	return &layout.Error{Field: field, Value: fmt.Sprint(v),
		Problem: fmt.Sprintf("strategy %q needs a multiple of %s = %d", strategy, by, n),
		Remedy:  "register the bytes of one block, or the strategy that fits"}
}

// ParseBlock implements Strategy.
func (s *builtin) ParseBlock(dst []layout.Run, from, to Side, tokens layout.TokenRange) ([]layout.Run, error) {
	if err := s.check(from, to, tokens); err != nil {
		return dst, err
	}
	pf, n, err := s.planes(from.Group, from.Layer)
	if err != nil {
		return dst, err
	}
	pt, _, err := s.planes(to.Group, to.Layer)
	if err != nil {
		return dst, err
	}
	w := runWriter{runs: dst, base: len(dst)}
	for i := range n {
		if pf[i].Unit == layout.UnitHead {
			w.heads(from, to, pf[i], pt[i], tokens)
		} else {
			w.tokens(from, to, pf[i], pt[i], tokens)
		}
	}
	w.flush()
	return w.runs, nil
}

func (s *builtin) check(from, to Side, t layout.TokenRange) error {
	if t.End <= t.Start {
		return &layout.Error{Field: "tokens", Value: fmt.Sprintf("[%d, %d)", t.Start, t.End), Problem: "is empty", Remedy: "ask for one token or more"}
	}
	if err := checkSide("from", from, t, s.name); err != nil {
		return err
	}
	if err := checkSide("to", to, t, s.name); err != nil {
		return err
	}
	nf, nt := from.Group.TokensPerBlock, to.Group.TokensPerBlock
	if s.form == formPage {
		if nf != nt {
			return &layout.Error{Field: "tokens_per_block", Value: fmt.Sprintf("%d and %d", nf, nt),
				Problem: fmt.Sprintf("pages of strategy %q only move whole", s.name), Remedy: "use equal block sizes on both sides"}
		}
		if from.Layer.PageBytes != to.Layer.PageBytes {
			return &layout.Error{Field: "page_bytes", Value: fmt.Sprintf("%d and %d", from.Layer.PageBytes, to.Layer.PageBytes),
				Problem: fmt.Sprintf("pages of strategy %q only move whole", s.name), Remedy: "use equal models and dtypes on both sides"}
		}
		if t.Start%nf != 0 {
			return &layout.Error{Field: "tokens.start", Value: fmt.Sprint(t.Start),
				Problem: fmt.Sprintf("pages of strategy %q only move whole, %d tokens each", s.name, nf), Remedy: "start at a block boundary"}
		}
		return nil
	}
	// What one token (of one head) takes must agree; planes of equal form then agree in everything but the block size.
	if a, b := from.Layer.PageBytes*uint64(nt), to.Layer.PageBytes*uint64(nf); a != b {
		return &layout.Error{Field: "page_bytes", Value: fmt.Sprintf("%d and %d", from.Layer.PageBytes, to.Layer.PageBytes),
			Problem: fmt.Sprintf("a token takes %d and %d bytes", from.Layer.PageBytes/uint64(nf), to.Layer.PageBytes/uint64(nt)),
			Remedy:  "use equal models and dtypes on both sides"}
	}
	if s.form == formHeads && from.Group.Params["heads"] != to.Group.Params["heads"] {
		return &layout.Error{Field: "params.heads", Value: fmt.Sprintf("%d and %d", from.Group.Params["heads"], to.Group.Params["heads"]),
			Problem: "the two sides hold different heads", Remedy: "use equal tensor parallel sizes on both sides"}
	}
	return nil
}

func checkSide(name string, s Side, t layout.TokenRange, strategy string) error {
	if s.Group == nil || s.Layer == nil || s.Group.TokensPerBlock == 0 {
		return &layout.Error{Field: name, Value: "unset", Problem: "has no group, layer or block size", Remedy: "pass a validated layout"}
	}
	if s.Group.Strategy != strategy {
		return &layout.Error{Field: name + ".strategy", Value: fmt.Sprintf("%q", s.Group.Strategy),
			Problem: fmt.Sprintf("is not %q", strategy), Remedy: "use the same strategy on both sides"}
	}
	n := s.Group.TokensPerBlock
	first, last := t.Start/n, (t.End-1)/n
	if uint64(last) >= uint64(len(s.Table)) {
		return &layout.Error{Field: name + ".table", Value: fmt.Sprintf("%d blocks", len(s.Table)),
			Problem: fmt.Sprintf("tokens [%d, %d) need %d of %d tokens", t.Start, t.End, last+1, n), Remedy: "pass the whole block table"}
	}
	if i := outOfTable(s.Table[first:last+1], s.Group.NumBlocks); i >= 0 {
		return &layout.Error{Field: fmt.Sprintf("%s.table[%d]", name, int(first)+i), Value: fmt.Sprint(s.Table[int(first)+i]),
			Problem: fmt.Sprintf("the group has %d blocks", s.Group.NumBlocks), Remedy: "pass the engine's own block ids"}
	}
	return nil
}

// outOfTable returns the index of the first block id that the group does not have, or -1.
func outOfTable(table []uint32, blocks uint32) int {
	for i, b := range table {
		if b >= blocks {
			return i
		}
	}
	return -1
}
