package parseblock

import (
	"fmt"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvspray/kvspray/layout"
)

// TestFingerprintIgnores: order, strides, block size, tensor and pipeline parallelism leave the fingerprint as it is, in every
// family of caches that can be copied into one another.
func TestFingerprintIgnores(t *testing.T) {
	reg := Default()
	rapid.Check(t, func(t *rapid.T) {
		f := &families[rapid.IntRange(0, len(families)-1).Draw(t, "family")]
		common := genCommon(t, f)
		var hashes [2][32]byte
		var descriptions [2]Description
		var kinds [2]string
		for i, label := range []string{"a.", "b."} {
			d := genDims(t, f, label, common)
			d.blocks, d.layers = 2, rapid.IntRange(1, 3).Draw(t, label+"stage")
			d.size = rapid.SampledFrom(sizesOf(f, d)).Draw(t, label+"tp")
			d.rank = rapid.Uint64Range(0, d.size-1).Draw(t, label+"rank")
			kinds[i] = rapid.SampledFrom(f.kinds).Draw(t, label+"kind")
			l := f.make(kinds[i], d).layout()
			l.Identity = map[string]string{IdentityWeights: "1"}
			var err error
			if descriptions[i], err = reg.Describe(l); err != nil {
				t.Fatal(err)
			}
			hashes[i] = descriptions[i].Hash()
		}
		if hashes[0] != hashes[1] || len(descriptions[0].Diff(descriptions[1])) != 0 {
			t.Fatalf("%s and %s differ: %q", kinds[0], kinds[1], descriptions[0].Diff(descriptions[1]))
		}
	})
}

// TestFingerprintSees: what changes the meaning of bytes changes the fingerprint, and the difference is named.
func TestFingerprintSees(t *testing.T) {
	reg := Default()
	mk := func(strategy string, n uint32, page uint64, params map[string]int64, edit func(*layout.Layout)) *layout.Layout {
		if params == nil {
			params = map[string]int64{}
		}
		l := &layout.Layout{DType: "bfloat16", Identity: map[string]string{IdentityWeights: "w.1", IdentityRope: "1e6", IdentityLayers: "32"},
			Groups: []layout.Group{{TokensPerBlock: n, NumBlocks: 4, Strategy: strategy, Params: params,
				Layers: []layout.Layer{{Name: "l0", PageBytes: page, BlockStride: page}}}}}
		if edit != nil {
			edit(l)
		}
		return l
	}
	base := mk(PackedNHD, 16, 16*8*512, map[string]int64{"heads": 8}, nil)
	with := func(edit func(*layout.Layout)) *layout.Layout {
		return mk(PackedNHD, 16, 16*8*512, map[string]int64{"heads": 8}, edit)
	}
	identity := func(k, v string) *layout.Layout { return with(func(l *layout.Layout) { l.Identity[k] = v }) }
	for name, c := range map[string]struct {
		a, b *layout.Layout
		want []string // parts of each difference; none: they are equal
	}{
		"itself":           {base, with(nil), nil},
		"block size":       {base, mk(PackedNHD, 32, 32*8*512, map[string]int64{"heads": 8}, nil), nil},
		"order":            {base, mk(FlashKVFirst, 16, 16*8*512, map[string]int64{"heads": 8}, nil), nil},
		"rank":             {base, mk(PackedNHD, 16, 16*2*512, map[string]int64{"heads": 2, "kv_heads": 8, "tp_size": 4, "tp_rank": 3}, nil), nil},
		"said little":      {base, identity(IdentityOrder, "little"), nil},
		"byte order":       {base, identity(IdentityOrder, "big"), []string{`byte_order: "little" here, "big" there`}},
		"reload":           {base, identity(IdentityWeights, "w.2"), []string{`identity.weights: "w.1" here, "w.2" there`}},
		"rope":             {base, identity(IdentityRope, "2e6"), []string{`identity.rope: "1e6" here, "2e6" there`}},
		"whole model":      {base, identity(IdentityLayers, "31"), []string{`identity.layers`}},
		"back-off":         {base, identity(IdentityBackoff, "1"), []string{`identity.backoff: missing here, "1" there`}},
		"speculation":      {base, identity(IdentitySpec, "mtp.1"), []string{`identity.speculative`}},
		"dtype":            {base, with(func(l *layout.Layout) { l.DType = "float16" }), []string{`dtype: "bfloat16" here, "float16" there`}},
		"two at once":      {base, with(func(l *layout.Layout) { l.DType, l.Identity[IdentityRope] = "float16", "2" }), []string{"dtype", "identity.rope"}},
		"head size":        {base, mk(PackedNHD, 16, 16*8*256, map[string]int64{"heads": 8}, nil), []string{`cache.k+v: "k plain of 256 bytes, 8 heads; v plain of 256 bytes, 8 heads" here, "k plain of 128 bytes`}},
		"heads":            {base, mk(PackedNHD, 16, 16*8*512, map[string]int64{"heads": 4}, nil), []string{"cache.k+v"}},
		"window":           {base, mk(PackedNHD, 16, 16*8*512, map[string]int64{"heads": 8, "window": 128}, nil), []string{"window 128"}},
		"quantised inline": {base, mk(QuantInlineNHD, 16, 16*8*512, map[string]int64{"heads": 8, "value_bytes": 252, "scale_bytes": 4}, nil), []string{"inline 252+4"}},
		"other groups": {base, with(func(l *layout.Layout) {
			l.Groups = append(l.Groups, mk(MLA, 16, 16*1152, nil, func(l *layout.Layout) { l.Groups[0].Layers[0].Name = "l1" }).Groups...)
		}), []string{`cache.latent: missing here, "latent plain of 1152 bytes, 1 heads" there`}},
		"opaque block size": {mk(VLLMCPUAttn, 16, 4096, nil, nil), mk(VLLMCPUAttn, 32, 8192, nil, nil), nil}, // the plan's concern
		"opaque pages":      {mk(VLLMCPUAttn, 16, 4096, nil, nil), mk(VLLMCPUAttn, 16, 8192, nil, nil), []string{"cache.page"}},
		"opaque packing":    {mk(VLLMCPUAttn, 16, 4096, nil, nil), mk(VLLMCPUAttn, 16, 4096, nil, func(l *layout.Layout) { l.Identity[IdentityPacking] = "amx" }), []string{"identity.packing"}},
	} {
		t.Run(name, func(t *testing.T) {
			a, err := reg.Describe(c.a)
			if err != nil {
				t.Fatal(err)
			}
			b, err := reg.Describe(c.b)
			if err != nil {
				t.Fatal(err)
			}
			diff := a.Diff(b)
			if (a.Hash() == b.Hash()) != (len(diff) == 0) || len(diff) != len(c.want) {
				t.Fatalf("equal %v, differences %q, want %q", a.Hash() == b.Hash(), diff, c.want)
			}
			for i, w := range c.want {
				if !strings.Contains(diff[i], w) {
					t.Errorf("difference %q, want %q", diff[i], w)
				}
			}
		})
	}
}

// TestFingerprintIsStable: the hash of a description that is written down here never changes within a version of its domain.
func TestFingerprintIsStable(t *testing.T) {
	d := Description{{"dtype", "bfloat16"}, {"byte_order", "little"}}
	const want = "328ef38dfdd86a185dc5e18fd4fb54b73ad8dc4b4fd0cd9ea79f634847d63d11"
	if got := fmt.Sprintf("%x", d.Hash()); got != want {
		t.Fatalf("got %s, want %s: change the domain with the meaning", got, want)
	}
}
