package parseblock

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/layout"
)

// stages returns the ranks of engines with 4 KV heads, two layers, and the given stages and ranks.
func stages(strategy string, pp, tp int, n uint32) (out []*layout.Layout) {
	for stage := range pp {
		for rank := range tp {
			_, own := HeadShare(4, uint64(rank), uint64(tp))
			g := layout.Group{TokensPerBlock: n, NumBlocks: 4, Strategy: strategy,
				Params: map[string]int64{"kv_heads": 4, "tp_rank": int64(rank), "tp_size": int64(tp)}}
			for i := stage * 2 / pp; i < (stage+1)*2/pp; i++ {
				page := uint64(n) * own * 64
				g.Layers = append(g.Layers, layout.Layer{Name: fmt.Sprint("layers.", i), Index: len(g.Layers),
					Base: uint64(len(g.Layers)) * 4 * page, BlockStride: page, PageBytes: page})
			}
			out = append(out, &layout.Layout{Groups: []layout.Group{g}})
		}
	}
	return out
}

// Prove finds every mistake in a set of shares: each byte has exactly one source, or nothing is
// planned.
func TestProveRefusesWrongShares(t *testing.T) {
	reg := Default()
	for _, c := range []struct {
		name    string
		sources []*layout.Layout
		dst     *layout.Layout
	}{
		{"TP 2 to 1", stages(PackedNHD, 1, 2, 16), stages(PackedHND, 1, 1, 32)[0]},
		{"TP 1 to 2", stages(PackedNHD, 1, 1, 16), stages(PackedNHD, 1, 2, 16)[1]},
		{"TP 8, replicated", stages(PackedNHD, 1, 8, 16), stages(PackedNHD, 1, 1, 16)[0]},
		{"PP 2 TP 2", stages(PackedHND, 2, 2, 16), stages(PackedNHD, 1, 1, 16)[0]},
		{"opaque heads", stages(VLLMCPUAttn, 1, 2, 16), stages(VLLMCPUAttn, 1, 1, 16)[0]},
	} {
		t.Run(c.name, func(t *testing.T) {
			shares, err := Assign(reg, c.sources, c.dst, nil)
			if err != nil {
				t.Fatal(err)
			}
			if err := Prove(reg, c.sources, c.dst, shares); err != nil {
				t.Fatal(err)
			}
			clone := func() []Share {
				out := slices.Clone(shares)
				for i := range out {
					out[i].roles = slices.Clone(out[i].roles)
				}
				return out
			}
			refused := func(what string, bad []Share) {
				t.Helper()
				if err := Prove(reg, c.sources, c.dst, bad); err == nil {
					t.Errorf("%s: proved", what)
				}
			}
			for i := range shares {
				refused(fmt.Sprintf("share %d is missing", i), slices.Delete(clone(), i, i+1))
				refused(fmt.Sprintf("share %d comes twice", i), append(clone(), shares[i]))
				for l, roles := range shares[i].roles {
					if roles == 0 {
						continue
					}
					bad := clone()
					bad[i].roles[l] = 0
					refused(fmt.Sprintf("share %d without layer %d", i, l), bad)
					for other := range c.sources {
						if other == shares[i].Source {
							continue
						}
						bad := clone()
						bad[i].Source = other
						if err := Prove(reg, c.sources, c.dst, bad); err == nil && !replicas(reg, c.sources, c.dst,
							other, shares[i].Source) {
							t.Errorf("share %d given by %d: proved", i, other)
						}
					}
				}
			}
			bad := clone()
			bad[0].Source = len(c.sources)
			refused("a source that is not there", bad)
		})
	}
}

// replicas reports whether two sources hold the same heads and layers of the receiver.
func replicas(reg *Registry, sources []*layout.Layout, dst *layout.Layout, a, b int) bool {
	x, err1 := link(reg, sources[a], dst, nil)
	y, err2 := link(reg, sources[b], dst, nil)
	if err1 != nil || err2 != nil {
		return false
	}
	for i := range x {
		if len(x[i]) != len(y[i]) {
			return false
		}
		for k := range x[i] {
			if x[i][k].head0 != y[i][k].head0 || x[i][k].heads != y[i][k].heads {
				return false
			}
		}
	}
	return true
}

func TestDecodeShareRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		in     []uint32
		layers int
		err    string
	}{
		"an odd number":       {[]uint32{1}, 4, "share = 1 numbers"},
		"too many":            {make([]uint32, 10), 4, "share = 10 numbers"},
		"no layers in a pair": {[]uint32{0, 2}, 4, "share[0]"},
		"more than there are": {[]uint32{5, 2}, 4, "4 layers are left"},
		"a huge count":        {[]uint32{1, 2, ^uint32(0), 2}, 4, "share[2]"},
		"fewer":               {[]uint32{3, 2}, 4, "share = 3 layers"},
		"an unknown role":     {[]uint32{4, 1 << 31}, 4, "roles 0x80000000"},
		"role 0":              {[]uint32{4, 1}, 4, "roles 0x1"},
		"none":                {nil, 4, "share = 0 layers"},
	} {
		t.Run(name, func(t *testing.T) {
			s, err := DecodeShare(c.in, c.layers)
			if err == nil || !strings.Contains(err.Error(), c.err) {
				t.Errorf("got %v, %v; want %q", s, err, c.err)
			}
		})
	}
}

// FuzzDecodeShare: a peer's encoded share is a share of the given layers, or is refused; decoding
// inverts encoding.
func FuzzDecodeShare(f *testing.F) {
	f.Add([]byte{2, 6, 2, 0}, uint16(4))
	f.Add([]byte{255, 255, 255, 255}, uint16(1024))
	f.Fuzz(func(t *testing.T, b []byte, layers uint16) {
		in := make([]uint32, len(b))
		for i, v := range b {
			in[i] = uint32(v) << (v % 25)
		}
		n := int(layers) % (layout.MaxLayers + 1)
		s, err := DecodeShare(in, n)
		if err != nil {
			return
		}
		if len(s.roles) != n || cap(s.roles) > n {
			t.Fatalf("%d layers in memory for %d, want %d", len(s.roles), cap(s.roles), n)
		}
		back, err := DecodeShare(s.Encode(), n)
		if err != nil || !slices.Equal(back.roles, s.roles) {
			t.Fatalf("%v came back as %v: %v", s.roles, back, err)
		}
	})
}

// Encode is small: a share of equal layers is one pair.
func TestEncodeIsShort(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := Share{roles: rapid.SliceOfN(rapid.SampledFrom([]uint32{0, 6, 2}), 1, 64).Draw(t, "roles")}
		enc := s.Encode()
		changes := 1
		for i := 1; i < len(s.roles); i++ {
			if s.roles[i] != s.roles[i-1] {
				changes++
			}
		}
		if len(enc) != 2*changes {
			t.Fatalf("%v is %v", s.roles, enc)
		}
	})
}

// TestProveIsBounded: an invented layout with as many pieces as parameters allow is refused before
// the pieces exist.
func TestProveIsBounded(t *testing.T) {
	reg := Default()
	mk := func(strategy string, n uint32, page uint64, params map[string]int64) *layout.Layout {
		l := &layout.Layout{Groups: []layout.Group{{TokensPerBlock: n, NumBlocks: 2, Strategy: strategy,
			Params: params,
			Layers: []layout.Layer{{Name: "a", BlockStride: 1 << 50, PageBytes: page}}}}}
		if err := layout.ValidateForeign(l, reg.Planes); err != nil {
			t.Fatal(err)
		}
		return l
	}
	const heads = maxHeads
	vec := func(n uint32, row uint64) *layout.Layout {
		return mk(VLLMCPUAttn, n, uint64(n)*heads*2*row, map[string]int64{"heads": heads,
			"k_transposed": 1})
	}
	for name, c := range map[string][2]*layout.Layout{"half a block, whose columns lie apart": {
		vec(1024, 256), vec(1024, 256)}, "blocks that hardly divide one another": {vec(510, 4),
		vec(512, 4)}} {
		shares, err := Assign(reg, c[:1], c[1], nil)
		if err != nil {
			t.Fatal(name, err)
		}
		testutil.AllocatesAtMost(t, 8*maxExtents*16, name, func() {
			err = Prove(reg, c[:1], c[1], shares)
		})
		if err == nil || !strings.Contains(err.Error(), `layer "a" = more than 1048576 pieces`) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
