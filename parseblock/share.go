package parseblock

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/kvspray/kvspray/layout"
)

// knownRoles has the bit of every role.
const knownRoles = 1<<(layout.RolePage+1) - 2

// Encode returns the share in the form that sidecars exchange: pairs (layers, roles) over the
// receiver's flattened layers.
func (s *Share) Encode() []uint32 {
	var out []uint32
	for i, r := range s.roles {
		if k := len(out); i > 0 && out[k-1] == r {
			out[k-2]++
			continue
		}
		out = append(out, 1, r)
	}
	return out
}

// DecodeShare reads the output of Encode, for a receiver with the given layers. It checks every
// length before it allocates memory.
func DecodeShare(in []uint32, layers int) (*Share, error) {
	if len(in)%2 != 0 || len(in) > 2*layers {
		return nil, &layout.Error{Field: "share", Value: fmt.Sprintf("%d numbers", len(in)),
			Problem: fmt.Sprintf("pairs for at most %d layers", layers),
			Remedy:  "use the share that Encode wrote for this receiver"}
	}
	s := &Share{roles: make([]uint32, 0, layers)}
	for i := 0; i < len(in); i += 2 {
		n, roles := in[i], in[i+1]
		if n == 0 || uint64(n) > uint64(layers-len(s.roles)) || roles&^knownRoles != 0 {
			return nil, &layout.Error{Field: fmt.Sprintf("share[%d]", i),
				Value: fmt.Sprintf("%d layers, roles %#x", n, roles),
				Problem: fmt.Sprintf("%d layers are left, roles are bits of %#x", layers-len(s.roles),
					knownRoles), Remedy: "use the share that Encode wrote for this receiver"}
		}
		for range n {
			s.roles = append(s.roles, roles)
		}
	}
	if len(s.roles) != layers {
		return nil, &layout.Error{Field: "share", Value: fmt.Sprintf("%d layers", len(s.roles)),
			Problem: fmt.Sprintf("the receiver has %d", layers),
			Remedy:  "use the share that Encode wrote for this receiver"}
	}
	return s, nil
}

// Bounds of Prove.
const (
	maxProved  = 512     // tokens of a block. Rows repeat, so the result for these holds for all
	maxExtents = 1 << 20 // pieces of these tokens; an engine's largest layouts have some 100,000
)

// Prove checks the result of Assign by bytes, not by the heads that Assign uses: in a block of each
// layer of the receiver, the runs of all shares write every byte of every plane exactly once. A
// caller that plans from several sources runs it once for each set of layouts, because no later
// check would notice a wrong share.
func Prove(reg *Registry, sources []*layout.Layout, dst *layout.Layout, shares []Share) error {
	matches := make([]*Match, len(shares))
	for i := range shares {
		if n := shares[i].Source; n < 0 || n >= len(sources) {
			return &layout.Error{Field: fmt.Sprintf("shares[%d].source", i), Value: fmt.Sprint(n),
				Problem: fmt.Sprintf("there are %d sources", len(sources)),
				Remedy:  "pass the sources that Assign was given"}
		}
		var err error
		if matches[i], err = NewMatch(reg, sources[shares[i].Source], dst, &shares[i]); err != nil {
			return err
		}
	}
	flat := -1
	var got, want []extent
	var planes []layout.Plane
	var b buffers
	seen := map[string]bool{}
	for gi := range dst.Groups {
		g := &dst.Groups[gi]
		for li := range g.Layers {
			flat++
			// One of several layers that differ only in their position is enough.
			l := &g.Layers[li]
			name := fmt.Sprint(gi, l.PageBytes, l.BlockStride)
			for _, m := range matches {
				for i := range m.links[flat] {
					pr := &m.links[flat][i]
					name += fmt.Sprint("|", pr.role, pr.head0, pr.heads, pr.to.off-l.Base)
				}
				name += ";"
			}
			if seen[name] {
				continue
			}
			seen[name] = true
			var err error
			if planes, err = reg.Planes(planes[:0], g, l); err != nil {
				return err
			}
			tokens := g.TokensPerBlock
			switch planes[0].Unit {
			case layout.UnitToken:
				tokens = provedTokens(tokens, planes)
			case layout.UnitState:
				tokens = 1 // with any number of tokens, the state is in the last block
			}
			want, got = want[:0], got[:0]
			for i := range planes {
				if want, err = appendCells(want, l, &planes[i], tokens); err != nil {
					return err
				}
			}
			if n := int(tokens) + 1; len(b.zeros) < n {
				b.zeros = make([]uint32, n)
			}
			for _, m := range matches {
				if got, err = m.writes(got, flat, g, l, tokens, &b); err != nil {
					return err
				}
			}
			if err := tile(l.Name, got, want); err != nil {
				return err
			}
		}
	}
	return nil
}

func provedTokens(tokens uint32, planes []layout.Plane) uint32 {
	if tokens <= maxProved {
		return tokens
	}
	step := uint32(1)
	for i := range planes {
		step = max(step, planes[i].RowTokens)
	}
	return min(tokens, max(maxProved/step, 1)*step)
}

// buffers are reused by Prove from layer to layer.
type buffers struct {
	zeros []uint32 // block tables
	runs  []layout.Run
}

// extent is bytes [off, end).
type extent struct{ off, end uint64 }

// appendCells adds the bytes of the given tokens' rows in block 0.
func appendCells(dst []extent, l *layout.Layer, p *layout.Plane, tokens uint32) ([]extent, error) {
	rows := uint64(p.Rows)
	if p.Unit == layout.UnitToken {
		rows = uint64(tokens / p.RowTokens)
	}
	tile := uint64(p.TileRows)
	if tile == 0 || tile >= uint64(p.Rows) {
		tile = uint64(p.Rows)
	}
	var err error
	for first := uint64(0); first < rows; first += tile {
		if dst, err = appendAxes(dst, l, l.Base+p.Offset+first/tile*p.TileStride, p.CellBytes,
			[]axis{{min(tile, rows-first), p.RowStride},
				{uint64(p.Heads), p.HeadStride}, {uint64(p.Cols), p.ColStride}}); err != nil {
			break
		}
	}
	return dst, err
}

// axis is count elements at distance stride.
type axis struct{ count, stride uint64 }

// appendAxes adds the cells of some axes; cells that are adjacent in memory form one extent.
func appendAxes(dst []extent, l *layout.Layer, at, cell uint64, axes []axis) ([]extent, error) {
	slices.SortFunc(axes, func(a, b axis) int { return cmp.Compare(a.stride, b.stride) })
	for len(axes) > 0 && (axes[0].stride == cell || axes[0].count == 1) {
		cell *= axes[0].count
		axes = axes[1:]
	}
	n, room := uint64(1), uint64(maxExtents-len(dst))
	for _, a := range axes {
		if n <= room { // prevents overflow: counts are below 1 << 32
			n *= a.count
		}
	}
	if n > room {
		return dst, tooFine(l)
	}
	for i := range n {
		off := at
		for _, a := range axes {
			off += i % a.count * a.stride
			i /= a.count
		}
		dst = append(dst, extent{off, off + cell})
	}
	return dst, nil
}

// tooFine refuses a layer with too many pieces to check.
func tooFine(l *layout.Layer) error {
	return &layout.Error{Field: fmt.Sprintf("layer %q", l.Name),
		Value: fmt.Sprintf("more than %d pieces", maxExtents),
		Problem: fmt.Sprintf("a block (at most %d tokens of it) has too many pieces to prove that all "+
			"of them arrive", maxProved),
		Remedy: "use the same order on both sides, block sizes that divide one another, or fewer " +
			"tokens in a block"}
}

// writes adds the bytes that the match writes to a layer of block 0. Every table names block 0,
// because the written bytes of the receiver's block do not depend on the source's block.
func (m *Match) writes(dst []extent, flat int, g *layout.Group, l *layout.Layer, tokens uint32,
	b *buffers) ([]extent, error) {
	var err error
	for i := range m.links[flat] {
		pr := &m.links[flat][i]
		one := Template{pairs: m.links[flat][i : i+1], from: &m.src.Groups[pr.from.group], to: g}
		if b.runs, err = one.Append(b.runs[:0], b.zeros, b.zeros[:1],
			layout.TokenRange{End: tokens}); err != nil {
			return dst, err
		}
		for k := range b.runs {
			r := &b.runs[k]
			if dst, err = appendAxes(dst, l, r.DstOff, r.Len, []axis{{uint64(r.Count), r.DstStride},
				{uint64(r.Outer), r.DstOuter}}); err != nil {
				return dst, err
			}
		}
	}
	return dst, nil
}

// tile reports the first byte that is written twice, outside the layer, or not at all.
func tile(layer string, got, want []extent) error {
	bad := func(off uint64, problem string) error {
		return &layout.Error{Field: fmt.Sprintf("layer %q", layer),
			Value: fmt.Sprintf("byte %d of the region", off), Problem: problem,
			Remedy: "report this: the shares of several sources would corrupt the cache, so nothing " +
				"was planned"}
	}
	byOffset := func(a, b extent) int { return cmp.Compare(a.off, b.off) }
	slices.SortFunc(got, byOffset)
	slices.SortFunc(want, byOffset)
	for i := 1; i < len(got); i++ {
		if got[i].off < got[i-1].end {
			return bad(got[i].off, "two sources would write it")
		}
	}
	got, want = joined(got), joined(want)
	for i := range want {
		switch {
		case i >= len(got) || got[i].off > want[i].off:
			return bad(want[i].off, "no source would write it")
		case got[i].off < want[i].off:
			return bad(got[i].off, "a source would write it, and it is outside the layer")
		case got[i].end < want[i].end:
			return bad(got[i].end, "no source would write it")
		case got[i].end > want[i].end:
			return bad(want[i].end, "a source would write it, and it is outside the layer")
		}
	}
	if len(got) > len(want) {
		return bad(got[len(want)].off, "a source would write it, and it is outside the layer")
	}
	return nil
}

// joined merges neighbors of a sorted list, in place.
func joined(in []extent) []extent {
	out := in[:0]
	for _, e := range in {
		if k := len(out) - 1; k >= 0 && out[k].end == e.off {
			out[k].end = e.end
			continue
		}
		out = append(out, e)
	}
	return out
}
