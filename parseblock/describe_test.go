package parseblock

import (
	"fmt"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvspray/kvspray/layout"
)

// TestFingerprintIgnores: order, strides, block size, tensor and pipeline parallelism do not change
// the fingerprint, in every family of caches that can be copied into one another.
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
			d.size = rapid.SampledFrom(sizesOf(f)).Draw(t, label+"tp")
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

// TestFingerprintSees: a change of the meaning of bytes changes the fingerprint, and the difference
// is named.
func TestFingerprintSees(t *testing.T) {
	reg := Default()
	mk := func(strategy string, n uint32, page uint64, params map[string]int64,
		edit func(*layout.Layout)) *layout.Layout {
		if params == nil {
			params = map[string]int64{}
		}
		l := &layout.Layout{DType: "bfloat16", Identity: map[string]string{IdentityWeights: "w.1",
			IdentityRope: "1e6", IdentityLayers: "32", IdentityHeadSize: "128"},
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
	identity := func(k, v string) *layout.Layout {
		return with(func(l *layout.Layout) {
			l.Identity[k] = v
		})
	}
	for name, c := range map[string]struct {
		a, b *layout.Layout
		want []string // parts of each difference; none: they are equal
	}{
		"itself":     {base, with(nil), nil},
		"block size": {base, mk(PackedNHD, 32, 32*8*512, map[string]int64{"heads": 8}, nil), nil},
		"order": {base, mk(PackedHND, 16, 16*8*512, map[string]int64{"heads": 8}, nil),
			nil},
		"rank": {base, mk(PackedNHD, 16, 16*2*512, map[string]int64{"heads": 2,
			"kv_heads": 8, "tp_size": 4, "tp_rank": 3}, nil), nil},
		"little order": {base, identity(IdentityOrder, "little"), nil},
		"byte order": {base, identity(IdentityOrder, "big"),
			[]string{`byte_order: "little" here, "big" there`}},
		"reload": {base, identity(IdentityWeights, "w.2"),
			[]string{`identity.weights: "w.1" here, "w.2" there`}},
		"rope": {base, identity(IdentityRope, "2e6"),
			[]string{`identity.rope: "1e6" here, "2e6" there`}},
		"whole model": {base, identity(IdentityLayers, "31"), []string{`identity.layers`}},
		"head size": {base, identity(IdentityHeadSize, "64"),
			[]string{`identity.head_size: "128" here, "64" there`}},
		"back-off": {base, identity(IdentityBackoff, "1"),
			[]string{`identity.backoff: missing here, "1" there`}},
		"speculation": {base, identity(IdentitySpec, "mtp.1"), []string{`identity.speculative`}},
		"dtype": {base, with(func(l *layout.Layout) { l.DType = "float16" }),
			[]string{`dtype: "bfloat16" here, "float16" there`}},
		"two at once": {base, with(func(l *layout.Layout) {
			l.DType,
				l.Identity[IdentityRope] = "float16", "2"
		}), []string{"dtype", "identity.rope"}},
		"groups": {base, identity(IdentityGroups, "full, state"),
			[]string{`identity.groups: missing here, "full, state" there`}},
		// refused by the plan
		"opaque block size": {mk(VLLMCPUAttn, 16, 4096, nil, nil), mk(VLLMCPUAttn, 32, 8192, nil, nil),
			nil},
		"opaque packing": {mk(VLLMCPUAttn, 16, 4096, nil, nil), mk(VLLMCPUAttn, 16, 4096, nil,
			func(l *layout.Layout) { l.Identity[IdentityPacking] = "amx" }), []string{"identity.packing"}},
	} {
		t.Run(name, func(t *testing.T) {
			if got := differ(t, reg, c.a, c.b, c.want); got != (len(c.want) > 0) {
				t.Errorf("fingerprints differ: %v", got)
			}
		})
	}
	// A difference in the cache of a layer that both have is named, and no plan is made; the
	// fingerprint covers only the model.
	for name, c := range map[string]struct {
		a, b *layout.Layout
		want []string // differences of K's, V's or the page's cells
		plan string   // a part of the plan's refusal
	}{
		"head size": {base, mk(PackedNHD, 16, 16*8*256, map[string]int64{"heads": 8}, nil),
			[]string{`k bytes of a head of a token: "256" here, "128" there, in layer "l0"`,
				`v bytes of a head of a token: "256" here, "128" there, in layer "l0"`}, "kv bytes of a head " +
				"of a token = 512 and 256"},
		"heads and their size": {base, mk(PackedNHD, 16, 16*8*512, map[string]int64{"heads": 4}, nil),
			[]string{`k bytes of a head of a token: "256"`, `k heads: "8" here, "4" there`,
				`v bytes of a head of a token: "256"`, `v heads: "8" here, "4" there`},
			`kv heads = 8 and 4; layer "l0": kv bytes of a head of a token = 512 and 1024`},
		"window": {base, mk(PackedNHD, 16, 16*8*512, map[string]int64{"heads": 8, "window": 128}, nil),
			[]string{`k params.window: "0" here, "128" there`, `v params.window`},
			"kv params.window = 0 and 128"},
		"quantised inline": {base, mk(QuantInlineNHD, 16, 16*8*512, map[string]int64{"heads": 8,
			"value_bytes": 252, "scale_bytes": 4}, nil),
			[]string{`k format: "plain" here, "inline 252+4" there`, `v format`}, "kv format = plain and " +
				"inline 252+4"},
		"opaque pages": {mk(VLLMCPUAttn, 16, 4096, nil, nil), mk(VLLMCPUAttn, 16, 8192, nil, nil),
			[]string{`page bytes of a head of a token: "256" here, "512" there`}, "page bytes of a head " +
				"of a token = 256 and 512"},
		"opaque params": {mk(VLLMCPUAttn, 16, 4096, map[string]int64{"head_bytes": 64}, nil),
			mk(VLLMCPUAttn, 16, 4096, nil, nil), []string{`page params: "[head_bytes=64]" here, "[]" there`},
			"page params = [head_bytes=64] and []"},
	} {
		t.Run("cache, "+name, func(t *testing.T) {
			if differ(t, reg, c.a, c.b, c.want) {
				t.Error("the fingerprint depends on a layer's cache")
			}
			if _, err := NewMatch(reg, c.a, c.b, nil); err == nil || !strings.Contains(err.Error(), c.plan) {
				t.Errorf("planned: %v, want %q", err, c.plan)
			}
		})
	}
	// Other layers belong to another stage; layers without a source have no share.
	other := with(func(l *layout.Layout) {
		l.Groups = append(l.Groups, mk(MLA, 16, 16*1152, nil,
			func(l *layout.Layout) { l.Groups[0].Layers[0].Name = "l1" }).Groups...)
	})
	if differ(t, reg, base, other, nil) {
		t.Error("a stage without a kind of layer has another fingerprint than one that has it")
	}
	if _, err := Assign(reg, []*layout.Layout{base}, other, nil); err == nil ||
		!strings.Contains(err.Error(), `layer "l1": latent = heads [0, 1): no source has them`) {
		t.Errorf("assigned: %v", err)
	}
}

// TestDifferencesAreBounded: a model with many differing layers reports each field once, in a text
// of bounded length.
func TestDifferencesAreBounded(t *testing.T) {
	reg := Default()
	mk := func(heads func(i int) int64) *layout.Layout {
		l := &layout.Layout{}
		for i := range layout.MaxTables {
			g := layout.Group{TokensPerBlock: 16, NumBlocks: 4, Strategy: PackedNHD,
				Params: map[string]int64{"heads": heads(i)}}
			for k := range layout.MaxLayers / layout.MaxTables {
				g.Layers = append(g.Layers, layout.Layer{Name: fmt.Sprintf("%d.%d", i, k),
					PageBytes: 16 * 64 * 512, BlockStride: 16 * 64 * 512})
			}
			l.Groups = append(l.Groups, g)
		}
		return l
	}
	a, b, c := mk(func(int) int64 { return 8 }), mk(func(int) int64 { return 4 }),
		mk(func(i int) int64 { return 1 << (i%2 + i/8) })
	da, err := reg.Describe(a)
	if err != nil {
		t.Fatal(err)
	}
	db, err := reg.Describe(b)
	if err != nil {
		t.Fatal(err)
	}
	if d := da.Diff(db); len(d) != 4 || !strings.Contains(d[0], `in layer "0.0" and 1023 more`) {
		t.Errorf("%q", d)
	}
	_, err = NewMatch(reg, a, b, nil)
	if err == nil || !strings.Contains(err.Error(), `layer "0.0" and 1023 more: kv heads = 8 and 4`) {
		t.Errorf("%v", err)
	}
	if _, err = NewMatch(reg, a, c, nil); err == nil || len(err.Error()) > 4096 ||
		strings.Count(err.Error(), "kv heads") != 3 {
		t.Errorf("%v", err)
	}
	var d differences
	for i := range 3 * maxDifferences {
		d.add("l", fmt.Sprint(i), "1", "2")
	}
	if err := d.err(); !strings.Contains(err.Error(), fmt.Sprintf("and %d more: the two",
		2*maxDifferences)) {
		t.Error(err)
	}
}

// identified returns an identity with every required pair, and other values for the given pairs of
// key and value.
func identified(pairs ...string) map[string]string {
	id := map[string]string{IdentityPacking: "vec"}
	for _, n := range needed {
		id[n.key] = "1"
	}
	for i := 0; i < len(pairs); i += 2 {
		id[pairs[i]] = pairs[i+1]
	}
	return id
}

// TestFingerprintNeeds: two engines that omit the dtype, a head's size or another invisible
// property have no fingerprint. An empty value counts as given.
func TestFingerprintNeeds(t *testing.T) {
	reg := Default()
	// The properties that a fingerprint must distinguish, beside dtype and byte order.
	goals := []string{IdentityGroups, IdentityHeadSize, IdentityLayers, IdentityRope, IdentityBackoff,
		IdentitySpec, IdentityWeights}
	l := &layout.Layout{Groups: []layout.Group{{TokensPerBlock: 16, NumBlocks: 4, Strategy: MLA,
		Layers: []layout.Layer{{Name: "l0", PageBytes: 1600, BlockStride: 1600}}}}}
	refused := func(what string, want ...string) {
		t.Helper()
		sum, err := reg.Fingerprint(l)
		if err == nil || sum != [32]byte{} {
			t.Errorf("%s: %x, %v", what, sum, err)
			return
		}
		for _, w := range want {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%s: %v lacks %q", what, err, w)
			}
		}
	}
	l.Identity = identified()
	refused("no dtype", `dtype = ""`)
	l.DType, l.Identity = "bfloat16", nil
	refused("no identity", append(goals, IdentityModel, "identity = without ")...)
	seen := map[[32]byte]string{}
	fingerprint := func(what string) {
		t.Helper()
		sum, err := reg.Fingerprint(l)
		if other, twice := seen[sum]; err != nil || twice {
			t.Errorf("%s: %v, or the fingerprint is that of %s", what, err, other)
		}
		seen[sum] = what
	}
	l.Identity = identified()
	fingerprint("all")
	for _, key := range append(goals, IdentityModel) {
		l.Identity = identified()
		delete(l.Identity, key)
		refused(key, "identity = without "+key+":", "register", key+" (")
		l.Identity[key] = ""
		fingerprint(key + " empty")
		l.Identity[key] = "2"
		fingerprint(key + " 2")
	}
	// The packing is required only for opaque pages.
	l.Identity = identified()
	delete(l.Identity, IdentityPacking)
	fingerprint("no packing of plain pages")
	for _, strategy := range []string{VLLMCPUAttn, Page} {
		l.Groups[0].Strategy, l.Groups[0].Layers[0].PageBytes = strategy, 4096
		l.Groups[0].Layers[0].BlockStride = 4096
		refused(strategy, "identity = without "+IdentityPacking+":")
	}
	l.Groups[0].Strategy, l.Groups[0].Params = VLLMCPUAttn, map[string]int64{"k_transposed": 1}
	if _, err := reg.Fingerprint(l); err != nil {
		t.Errorf("K and V of CPU_ATTN that are known: %v", err)
	}
}

// TestFingerprintIsStable: the hash of the description below never changes within a version of its
// domain. It excludes the description of layers.
func TestFingerprintIsStable(t *testing.T) {
	d := Description{{Name: "dtype", Value: "bfloat16"}, {Name: "byte_order", Value: "little"},
		{Layer: "l0", Name: "k heads", Value: "8"}}
	const want = "a7730f0673bd77de24acf2fa99d967a24aa99e6b219d53af902a07c4fee10fd3"
	if got := fmt.Sprintf("%x", d.Hash()); got != want {
		t.Fatalf("got %s, want %s: change the domain with the meaning", got, want)
	}
}

// TestNumbersOfKApart: a CPU page of vLLM and a pool of SGLang differ in the order of numbers
// alone, which a plan bridges, so a comparison names no difference. Heads of another width differ.
func TestNumbersOfKApart(t *testing.T) {
	d := dims{layers: 2, n: 4, blocks: 3, kvHeads: 2, head: 8, size: 1, elem: 4}
	vllm, sglang := vecCache("vec", &d).layout(), vecCache(SGLangK, &d).layout()
	e := d
	e.head = 6
	narrow := vecCache(SGLangK, &e).layout()
	var ds [3]Description
	for i, l := range []*layout.Layout{vllm, sglang, narrow} {
		l.DType = "float32"
		var err error
		if ds[i], err = Default().Describe(l); err != nil {
			t.Fatal(err)
		}
	}
	if got := append(ds[0].Diff(ds[1]), ds[1].Diff(ds[0])...); len(got) != 0 {
		t.Errorf("two caches of one content differ: %q", got)
	}
	if got := ds[0].Diff(ds[2]); len(got) != 2 || !strings.HasPrefix(got[0],
		`k bytes of a head of a token: "32" here, "24" there`) {
		t.Errorf("heads of 8 and of 6 numbers: %q", got)
	}
	for _, pair := range [][2]*layout.Layout{{vllm, narrow}, {narrow, vllm}} {
		skip := make([]uint32, pair[1].Tables())
		if _, err := NewPlan(Default(), pair[0], pair[1], 9, skip); err == nil {
			t.Error("a plan between heads of 8 and of 6 numbers")
		}
	}
}
