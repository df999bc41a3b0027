package layout

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vmihailenco/msgpack/v5"
	"pgregory.net/rapid"

	"github.com/kvspray/kvspray/internal/testutil"
)

func opaque(n uint64) Plane {
	return Plane{Role: RolePage, Unit: UnitBlock, CellBytes: n, Rows: 1, Heads: 1, Cols: 1,
		AllHeads: 1}
}

// onePlane stands for a strategy with one opaque plane; parseblock tests the real ones.
func onePlane(dst []Plane, _ *Group, l *Layer) ([]Plane, error) {
	if l == nil {
		return dst, nil
	}
	return append(dst, opaque(l.PageBytes)), nil
}

func sample() *Layout {
	return &Layout{
		Model: "tiny", DType: "bfloat16",
		Groups: []Group{{
			TokensPerBlock: 16, Strategy: "vllm_cpu_attn", NumBlocks: 10,
			Params: map[string]int64{"heads": 2, "neg": -5},
			Layers: []Layer{{Name: "l0", PageBytes: 100, BlockStride: 100}, {Name: "l1", Index: 1,
				Base: 1000, PageBytes: 100, BlockStride: 100}},
		}},
		Identity: map[string]string{"rope": "1e6", "weights": "abc"},
	}
}

func TestValidate(t *testing.T) {
	for name, c := range map[string]struct {
		edit func(*Layout)
		want string // "": valid
	}{
		"as it is": {func(*Layout) {}, ""},
		"interleaved layers": {func(l *Layout) {
			for i := range 2 {
				g := &l.Groups[0].Layers[i]
				g.BlockStride, g.Base = 200, uint64(100*i)
			}
		}, ""},
		"interleaved, touching": {func(l *Layout) {
			for i := range 2 {
				g := &l.Groups[0].Layers[i]
				g.BlockStride, g.Base = 200, uint64(99*i)
			}
		}, "shares bytes"},
		"no groups":   {func(l *Layout) { l.Groups = nil }, "groups = 0"},
		"many groups": {func(l *Layout) { l.Groups = slices.Repeat(l.Groups, 65) }, "groups = 65"},
		"many tables": {func(l *Layout) { l.Groups = slices.Repeat(l.Groups, 17) }, "groups = 17 block " +
			"tables: an engine has at most 16"},
		"of one table": {func(l *Layout) {
			l.Groups = append(l.Groups, Group{TokensPerBlock: 16, NumBlocks: 10, SameTable: true,
				Layers: l.Groups[0].Layers[1:]})
			l.Groups[0].Layers = l.Groups[0].Layers[:1]
		}, ""},
		"of one table, on one page": {func(l *Layout) {
			l.Groups = append(l.Groups, Group{TokensPerBlock: 16, NumBlocks: 10, SameTable: true,
				Layers: []Layer{{Name: "m0", PageBytes: 100, BlockStride: 100}}})
		}, `groups[1].layers[0].base = 0: layer "m0" shares bytes of region 0 with layer "l0" (base 0)`},
		"of no table": {func(l *Layout) { l.Groups[0].SameTable = true }, "groups[0].same_table = true"},
		"of unlike blocks": {func(l *Layout) {
			l.Groups = append(l.Groups, Group{TokensPerBlock: 32, NumBlocks: 10, SameTable: true})
		}, "groups[1].same_table = true"},
		"of unlike numbers": {func(l *Layout) {
			l.Groups = append(l.Groups, Group{TokensPerBlock: 16, NumBlocks: 11, SameTable: true})
		}, "groups[1].same_table = true"},
		"many layers": {func(l *Layout) { l.Groups[0].Layers = make([]Layer, 1025) }, "layers = 1025"},
		"no layers": {func(l *Layout) {
			l.Groups = []Group{{TokensPerBlock: 1, NumBlocks: 1}, {TokensPerBlock: 1, NumBlocks: 1}}
		}, "layers = 0"},
		"none of a kind": {func(l *Layout) {
			l.Groups = append([]Group{{TokensPerBlock: 1,
				NumBlocks: 1}}, l.Groups...)
		}, ""},
		"none, no blocks": {func(l *Layout) { l.Groups = append(l.Groups, Group{TokensPerBlock: 1}) },
			"groups[1].num_blocks = 0"},
		"no block size": {func(l *Layout) { l.Groups[0].TokensPerBlock = 0 }, "tokens_per_block = 0"},
		"no blocks":     {func(l *Layout) { l.Groups[0].NumBlocks = 0 }, "num_blocks = 0"},
		"empty page": {func(l *Layout) { l.Groups[0].Layers[1].PageBytes = 0 },
			"layers[1].page_bytes = 0"},
		"same name": {func(l *Layout) { l.Groups[0].Layers[1].Name = "l0" },
			`layers[1].name = "l0"`},
		"no such region": {func(l *Layout) { l.Groups[0].Layers[1].Region = 1 },
			"region = 1: 1 regions are registered"},
		"negative region": {func(l *Layout) { l.Groups[0].Layers[1].Region = -1 }, "region = -1"},
		"negative index":  {func(l *Layout) { l.Groups[0].Layers[1].Index = -1 }, "index = -1"},
		"past the region": {func(l *Layout) { l.Groups[0].Layers[1].Base = 1001 }, "ends at byte 2001 " +
			"of a region of 2000"},
		"stride too small": {func(l *Layout) { l.Groups[0].Layers[0].BlockStride = 99 },
			"block_stride = 99"},
		"overlap":    {func(l *Layout) { l.Groups[0].Layers[1].Base = 999 }, "shares bytes"},
		"same pages": {func(l *Layout) { l.Groups[0].Layers[1].Base = 0 }, "shares bytes"},
		"base overflows": {func(l *Layout) { l.Groups[0].Layers[0].Base = math.MaxUint64 - 10 },
			"overflow"},
		"stride overflows": {func(l *Layout) { l.Groups[0].Layers[0].BlockStride = math.MaxUint64 / 4 },
			"overflow"},
		"span overflows": {func(l *Layout) {
			l.Groups[0].Layers[0].BlockStride = math.MaxUint64 / 10
			l.Groups[0].Layers[0].Base = math.MaxUint64 / 5
		}, "overflow"},
		"identity": {func(l *Layout) {
			for i := range 65 {
				l.Identity[fmt.Sprint(i)] = ""
			}
		}, "identity = 67"},
		"hybrid groups share a pool": {func(l *Layout) {
			g := l.Groups[0]
			g.Layers = []Layer{{Name: "m0", PageBytes: 100, BlockStride: 100}}
			l.Groups = append(l.Groups, g)
		}, ""},
		"hybrid groups, shifted": {func(l *Layout) {
			g := l.Groups[0]
			g.NumBlocks = 5
			g.Layers = []Layer{{Name: "m0", PageBytes: 100, BlockStride: 100, Base: 50}}
			l.Groups = append(l.Groups, g)
		}, "shares bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			l := sample()
			c.edit(l)
			err := l.Validate([]uint64{2000}, onePlane)
			if c.want == "" {
				if err != nil {
					t.Fatal(err)
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Fatalf("got %v, want %q", err, c.want)
			}
			var e *Error
			if !errors.As(err, &e) || e.Field == "" || e.Value == "" || e.Remedy == "" {
				t.Fatalf("%v lacks field, value or remedy", err)
			}
		})
	}
	l := sample()
	wrong := func(dst []Plane, _ *Group, l *Layer) ([]Plane, error) {
		return append(dst, opaque(l.PageBytes-1)), nil
	}
	if err := l.Validate([]uint64{2000}, wrong); err == nil || !strings.Contains(err.Error(),
		"hold 99 bytes") {
		t.Fatal(err)
	}
}

// TestOverlapModel compares the arithmetic with marking bytes. For unequal strides the arithmetic
// may report an overlap wrongly, never miss one.
func TestOverlapModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		gen := func(l string) progression {
			p := progression{start: rapid.Uint64Range(0, 60).Draw(t, l+"start"), size: rapid.Uint64Range(1,
				12).Draw(t, l+"size"),
				count: rapid.Uint64Range(1, 8).Draw(t, l+"count")}
			p.stride = p.size + rapid.Uint64Range(0, 20).Draw(t, l+"gap")
			return p
		}
		a, b := gen("a"), gen("b")
		if rapid.Bool().Draw(t, "equal") {
			b.size = min(b.size, a.stride)
			b.stride = a.stride
		}
		var mark [1024]bool
		want := false
		for i := range a.count {
			for x := range a.size {
				mark[a.start+i*a.stride+x] = true
			}
		}
		for i := range b.count {
			for x := range b.size {
				want = want || mark[b.start+i*b.stride+x]
			}
		}
		got, back := overlap(a, b), overlap(b, a)
		if got != back {
			t.Fatalf("overlap is not symmetric: %v and %v", got, back)
		}
		if want && !got || got && !want && a.stride == b.stride {
			t.Fatalf("%+v and %+v: got %v, want %v", a, b, got, want)
		}
	})
}

func TestMsgpackRoundTrip(t *testing.T) {
	l := sample()
	l.Groups = append(l.Groups, Group{TokensPerBlock: 16, Strategy: "mla", NumBlocks: 10,
		SameTable: true, Params: map[string]int64{}, Layers: []Layer{}})
	b, err := l.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	got, err := Unmarshal(b)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(l, got); d != "" {
		t.Fatal(d)
	}
	again, err := got.Marshal()
	if err != nil || !bytes.Equal(b, again) {
		t.Fatalf("not canonical: %v", err)
	}
	// Nested, as in REGISTER.
	type register struct {
		Layout *Layout `msgpack:"layout"`
	}
	nb, err := msgpack.Marshal(register{l})
	if err != nil {
		t.Fatal(err)
	}
	var r register
	if err := msgpack.Unmarshal(nb, &r); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(l, r.Layout); d != "" {
		t.Fatal(d)
	}
}

// TestMsgpackForeign decodes what another encoder, a newer version and an attacker would write.
func TestMsgpackForeign(t *testing.T) {
	enc := func(v any) []byte {
		b, err := msgpack.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	layer := map[string]any{"name": "a", "index": 3, "region": uint64(1), "base": int64(7),
		"block_stride": uint16(9), "page_bytes": 5, "new": []any{1, map[string]any{"x": 2.5}, "long",
			[]byte("bytes"), &msgpack.RawMessage{0xd6, 1, 1, 2, 3, 4}}}
	group := map[string]any{"tokens_per_block": int32(16), "strategy": "mla",
		"params": map[string]int{"heads": -1}, "num_blocks": 2, "layers": []any{layer}}
	ok := map[string]any{"model": "m", "dtype": "d", "groups": []any{group},
		"identity": map[string]string{"a": "b"}, "future": map[string]any{"deep": nil}}
	l, err := Unmarshal(enc(ok))
	if err != nil {
		t.Fatal(err)
	}
	want := &Layout{Model: "m", DType: "d", Identity: map[string]string{"a": "b"},
		Groups: []Group{{TokensPerBlock: 16, Strategy: "mla",
			Params: map[string]int64{"heads": -1}, NumBlocks: 2, Layers: []Layer{{Name: "a", Index: 3,
				Region: 1, Base: 7, BlockStride: 9, PageBytes: 5}}}}}
	if d := cmp.Diff(want, l); d != "" {
		t.Fatal(d)
	}
	deep := any(1)
	for range 40 {
		deep = []any{deep}
	}
	for name, c := range map[string]struct {
		b    []byte
		want string
	}{
		"negative base": {
			enc(map[string]any{"groups": []any{map[string]any{"layers": []any{
				map[string]any{"base": -1}}}}}), "groups[0].layers[0].base = -1: is negative"},
		"float": {enc(map[string]any{"groups": []any{map[string]any{"num_blocks": 1.5}}}),
			"is not an integer"},
		"no boolean": {enc(map[string]any{"groups": []any{map[string]any{"same_table": 1}}}),
			"groups[0].same_table = msgpack code 0x01: is not a boolean"},
		"wide": {
			enc(map[string]any{"groups": []any{map[string]any{"num_blocks": uint64(1) << 40}}}),
			"does not fit 32 bits"},
		"wrong type":  {enc(map[string]any{"model": 5}), "model = msgpack code"},
		"deep":        {enc(map[string]any{"zzz": deep}), "deeper than 16"},
		"many groups": {enc(map[string]any{"groups": make([]int, 65)}), "groups = 65 entries"},
		"long unknown": {append([]byte{0x81, 0xa1, 'x'}, "\xdb\xff\xff\xff\xff"...),
			"layout.x = 4294967295 entries: at most"},
		"cut unknown": {append([]byte{0x81, 0xa1, 'x'}, "\xc6\x00\x0f\xff\xff"...), "layout.x: decode"},
		"unknown ext": {append([]byte{0x81, 0xa1, 'x'}, "\xc9\xff\xff\xff\xff\x01"...),
			"layout.x = 4294967295 entries: at most"},
		"huge array":  {append([]byte{0x81, 0xa6}, "groups\xdd\xff\xff\xff\xff"...), "at most 64"},
		"long string": {enc(map[string]any{"model": strings.Repeat("x", 1025)}), "1025 entries"},
		"cut":         {enc(ok)[:40], "decode"},
		"trailing":    {append(enc(ok), 1), "follow the encoded layout"},
		"twice":       {[]byte("\x82\xa5model\xa1a\xa5model\xa1b"), "comes once"},
		"empty":       {nil, "EOF"},
	} {
		if _, err := Unmarshal(c.b); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v, want %q", name, err, c.want)
		}
	}
}

func FuzzUnmarshal(f *testing.F) {
	b, err := sample().Marshal()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add([]byte("\x81\xa6groups\xdd\xff\xff\xff\xff"))
	f.Fuzz(func(t *testing.T, b []byte) {
		var l *Layout
		var err error
		// 1,024 layers and 64 pairs of three bytes each, and some multiples of the bytes that were
		// sent.
		testutil.AllocatesAtMost(t, uint64(192<<10+64*len(b)), fmt.Sprintf("a layout of %d bytes",
			len(b)), func() { l, err = Unmarshal(b) })
		if err != nil {
			return
		}
		_ = l.Validate([]uint64{1 << 20, 1 << 62}, onePlane)
		again, err := l.Marshal()
		if err != nil {
			t.Fatal(err)
		}
		back, err := Unmarshal(again)
		if err != nil {
			t.Fatalf("what we encode we cannot decode: %v", err)
		}
		if back.Geometry() != l.Geometry() {
			t.Fatal("the hash changed on the way")
		}
	})
}

func TestHashes(t *testing.T) {
	base := sample()
	for name, c := range map[string]struct {
		edit     func(*Layout)
		geometry bool // must differ
		diff     string
	}{
		"identity value": {func(l *Layout) { l.Identity["rope"] = "2e6" }, false,
			`identity.rope: "1e6" here, "2e6" there`},
		"identity key": {func(l *Layout) { delete(l.Identity, "rope") }, false,
			`identity.rope: "1e6" here, missing there`},
		"dtype": {func(l *Layout) { l.DType = "float16" }, false, "dtype: bfloat16 here, " +
			"float16 there"},
		"block size": {func(l *Layout) { l.Groups[0].TokensPerBlock = 32 }, true,
			"groups[0].tokens_per_block: 16 here, 32 there"},
		"strategy": {func(l *Layout) { l.Groups[0].Strategy = "mla" }, true,
			"groups[0].strategy: vllm_cpu_attn here, mla there"},
		"params": {func(l *Layout) {
			l.Groups[0].Params = map[string]int64{"heads": 4,
				"neg": -5}
		}, true, `groups[0].params.heads: "2" here, "4" there`},
		"same table": {func(l *Layout) { l.Groups[0].SameTable = true }, true,
			"groups[0].same_table: false here, true there"},
		"page bytes": {func(l *Layout) { l.Groups[0].Layers[1].PageBytes = 50 }, true,
			"groups[0].layers[1].page_bytes: 100 here, 50 there"},
		"layers": {func(l *Layout) { l.Groups[0].Layers = l.Groups[0].Layers[:1] }, true,
			"groups[0].layers: 2 here, 1 there"},
		"model path": {func(l *Layout) { l.Model = "/elsewhere" }, false, ""},
		"pool size":  {func(l *Layout) { l.Groups[0].NumBlocks = 99 }, false, ""},
		"placement": {func(l *Layout) {
			l.Groups[0].Layers[0].Base,
				l.Groups[0].Layers[0].BlockStride = 5, 200
		}, false, ""},
		"placement param": {func(l *Layout) { l.Groups[0].Params["row_stride"] = 4096 }, false, ""},
	} {
		t.Run(name, func(t *testing.T) {
			l := sample()
			c.edit(l)
			if (l.Geometry() != base.Geometry()) != c.geometry {
				t.Fatalf("geometry differs: %v", !c.geometry)
			}
			var want []string
			if c.diff != "" {
				want = []string{c.diff}
			}
			if d := cmp.Diff(want, Diff(base, l)); d != "" {
				t.Fatal(d)
			}
		})
	}
	many := sample()
	for i := range 60 {
		many.Identity[fmt.Sprint(i)] = "x"
	}
	if d := Diff(base, many); len(d) != maxDiffs+1 || d[maxDiffs] != "and 28 more" {
		t.Fatalf("%d diffs, last %q", len(d), d[len(d)-1])
	}
}

func TestLayerAt(t *testing.T) {
	l := &Layout{Groups: []Group{{Layers: make([]Layer, 2)}, {}, {Layers: make([]Layer, 1)}}}
	for flat, want := range [][2]int{{0, 0}, {0, 1}, {2, 0}} {
		if g, i, ok := l.LayerAt(flat); !ok || g != want[0] || i != want[1] {
			t.Errorf("layer %d is %d of group %d, %v", flat, i, g, ok)
		}
	}
	for _, flat := range []int{-1, 3} {
		if _, _, ok := l.LayerAt(flat); ok {
			t.Errorf("there is a layer %d", flat)
		}
	}
}
