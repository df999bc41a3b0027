package parseblock

import (
	"encoding/hex"
	"fmt"
	"reflect"
	"slices"
	"testing"
	"unsafe"

	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/transfer"
)

// digestLayout has what digests cover: a full and a sliding group of attention layers, and states.
func digestLayout(tp, rank int64, block uint32) *layout.Layout {
	params := func(more map[string]int64) map[string]int64 {
		p := map[string]int64{"kv_heads": 8, "tp_size": tp, "tp_rank": rank}
		for k, v := range more {
			p[k] = v
		}
		return p
	}
	page := uint64(block) * 8 * 256 / uint64(tp)
	layers := func(page uint64, names ...string) (out []layout.Layer) {
		for i, n := range names {
			out = append(out, layout.Layer{Name: n, Index: i, Base: uint64(i) << 40,
				BlockStride: page, PageBytes: page})
		}
		return out
	}
	state := map[string]int64{"k_heads": 8, "k_dim": 16, "v_heads": 8, "v_dim": 16, "conv_len": 3,
		"tp_size": tp, "tp_rank": rank}
	statePage := (3*(2*8*16+8*16)*2 + 8*16*16*2) / uint64(tp)
	return &layout.Layout{DType: "bfloat16", Groups: []layout.Group{
		{TokensPerBlock: block, Strategy: PackedNHD, Params: params(nil), NumBlocks: 1 << 16,
			Layers: layers(page, "l0", "l1")},
		{TokensPerBlock: block, Strategy: VLLMCPUAttn,
			Params: params(map[string]int64{"window": 40, "k_transposed": 1}), NumBlocks: 1 << 16,
			Layers: layers(page, "l2", "l3")},
		{TokensPerBlock: block, Strategy: GDNState, Params: state, NumBlocks: 1 << 16,
			Layers: layers(statePage, "l4")},
	}}
}

// digestPlan is a plan with a cut page: the source's blocks are smaller than the receiver's.
func digestPlan(t testing.TB, change func(src, dst *layout.Layout)) *Plan {
	src, dst := digestLayout(2, 1, 16), digestLayout(1, 0, 32)
	if change != nil {
		change(src, dst)
	}
	m, err := NewMatch(Default(), src, dst, nil)
	if err != nil {
		t.Fatal(err)
	}
	p, err := m.Plan(1017, []uint32{0, 0, 0})
	if err != nil {
		t.Fatal(err)
	}
	if p.segs[2].cut == nil || p.segs[4].state == false {
		t.Fatal("the plan has no cut page, or no state: the test shows less than it should")
	}
	return p
}

// Fields that the digest omits, each with the reason. A field in neither list is new and needs a
// decision.
var digestLeavesOut = map[string]string{
	"place.off": "where a side keeps its pages", "place.block": "likewise",
	"place.tile": "likewise", "place.row": "likewise", "place.head": "likewise",
	"place.col": "likewise", "place.reg": "likewise",
	"place.tileRows": "kernel blocks of one side: rows come in the order of tokens",
	"place.tiles":    "likewise",
	"pair.step":      "rows that are copied together", "pair.full": "likewise",
	"segment.pairs": "they are those of the match, which the digest covers by its own",
}

// planFields describes how the digest covers the other fields.
var planFields = map[string]string{
	"Plan.Work": "below", "Plan.space": "chunks and bytes of each segment",
	"Plan.match": "its own digest",
	"Work.src":   "its names, by the match", "Work.dst": "its names, by the match",
	"Work.share": "by the pairs that are left", "Work.tokens": "covered",
	"Work.segs": "field by field",
	"Match.src": "its names", "Match.dst": "its names", "Match.share": "by the pairs that are left",
	"Match.links": "field by field",
	"Match.from":  "when bytes may leave, and not where to", "Match.feeds": "likewise",
	"Match.digest": "covered",
	"Space.first":  "covered", "Space.length": "covered", "Space.chunks": "covered",
	"Space.bytes": "covered",
}

// TestDigestCoversEveryField changes each field from which the place of a byte in the transfer
// space follows: no two digests are equal.
func TestDigestCoversEveryField(t *testing.T) {
	p := digestPlan(t, nil)
	seen := map[[32]byte]string{p.Digest(): "nothing"}
	note := func(what string) {
		t.Helper()
		p.match.digest = p.match.sum()
		d := p.Digest()
		if other, ok := seen[d]; ok {
			t.Errorf("the digest is the same where %s differs and where %s does", what, other)
		}
		seen[d] = what
	}
	used := map[string]bool{}
	var walk func(v reflect.Value, name string, top string)
	walk = func(v reflect.Value, name, top string) {
		v = reflect.NewAt(v.Type(), unsafe.Pointer(v.UnsafeAddr())).Elem()
		switch v.Kind() {
		case reflect.Struct:
			for i := range v.NumField() {
				field := v.Type().Name() + "." + v.Type().Field(i).Name
				if _, out := digestLeavesOut[field]; out {
					used[field] = true
					continue
				}
				walk(v.Field(i), field, top+"."+v.Type().Field(i).Name)
			}
		case reflect.Array, reflect.Slice:
			for i := range v.Len() {
				walk(v.Index(i), name, fmt.Sprintf("%s[%d]", top, i))
			}
		case reflect.Pointer:
			old := v.Interface()
			if !v.IsNil() {
				walk(v.Elem(), name, top)
				v.SetZero()
				note(top + " = nil")
				v.Set(reflect.ValueOf(old))
			}
		case reflect.Bool:
			v.SetBool(!v.Bool())
			note(top)
			v.SetBool(!v.Bool())
		case reflect.Int, reflect.Int64:
			old := v.Int()
			v.SetInt(old ^ 1)
			note(top)
			v.SetInt(old)
		case reflect.Uint8, reflect.Uint32, reflect.Uint64:
			old := v.Uint()
			v.SetUint(old ^ 1)
			note(top)
			v.SetUint(old)
		default:
			t.Fatalf("%s is a %s: add how it is changed", top, v.Kind())
		}
	}
	for i := range p.segs {
		if i == 1 || i == 3 {
			continue // like the previous one
		}
		walk(reflect.ValueOf(&p.segs[i]).Elem(), "", fmt.Sprintf("segment %d", i))
		for k := range p.segs[i].pairs {
			walk(reflect.ValueOf(&p.segs[i].pairs[k]).Elem(), "", fmt.Sprintf("segment %d pair %d", i, k))
		}
	}
	for _, v := range []any{Plan{}, Work{}, Match{}, transfer.Space{}} {
		for i := range reflect.TypeOf(v).NumField() {
			f := reflect.TypeOf(v).Name() + "." + reflect.TypeOf(v).Field(i).Name
			if planFields[f] == "" {
				t.Errorf("%s is in no list: add how the digest covers it, or why not", f)
			}
		}
	}
	for field := range digestLeavesOut {
		if !used[field] {
			t.Errorf("%s is no field any more", field)
		}
	}
	swap := func(what string, f func()) {
		f()
		note(what)
		f()
	}
	swap("the order of two segments", func() { p.segs[0], p.segs[2] = p.segs[2], p.segs[0] })
	swap("the order of two layers", func() { m := p.match.links; m[0], m[1] = m[1], m[0] })
	swap("the order of two planes", func() { l := p.match.links[2]; l[0], l[1] = l[1], l[0] })
	swap("the names of two layers", func() {
		l := p.match.dst.Groups[0].Layers
		l[0].Name,
			l[1].Name = l[1].Name, l[0].Name
	})
	swap("the names of two layers of the source",
		func() { l := p.match.src.Groups[0].Layers; l[0].Name, l[1].Name = l[1].Name, l[0].Name })
	p.tokens++
	note("the prompt's length")
	p.tokens--
	for _, r := range []rules{{PlanVersion + 1, ourRules.chunkBytes}, {PlanVersion,
		2 * ourRules.chunkBytes}} {
		if d := p.digest(r); seen[d] != "" {
			t.Errorf("the digest under the rules %v is that where %s differs", r, seen[d])
		}
	}
	p.match.digest = p.match.sum()
	if seen[p.Digest()] != "nothing" {
		t.Error("something was not put back")
	}
}

// Differences between the two engines' layouts change the digest if they affect the plan; local
// choices of one side do not.
func TestDigestFollowsLayouts(t *testing.T) {
	was := digestPlan(t, nil).Digest()
	for name, change := range map[string]func(src, dst *layout.Layout){
		"two layers of the receiver change places": func(_,
			dst *layout.Layout) {
			slices.Reverse(dst.Groups[1].Layers)
		},
		"two groups of both change places": func(src,
			dst *layout.Layout) {
			slices.Reverse(src.Groups)
			slices.Reverse(dst.Groups)
		},
		"heads outside": func(_,
			dst *layout.Layout) {
			dst.Groups[0].Strategy = PackedHND
		},
		"another rank of the source": func(src, _ *layout.Layout) {
			for i := range src.Groups {
				src.Groups[i].Params["tp_rank"] = 0
			}
		},
		"a matrix that the receiver keeps turned, of equal sides": func(_,
			dst *layout.Layout) {
			dst.Groups[2].Params["state_order"] = 1
		},
		"another order of a convolution": func(_,
			dst *layout.Layout) {
			dst.Groups[2].Params["conv_order"] = 1
		},
		"a longer window": func(src, dst *layout.Layout) {
			src.Groups[1].Params["window"], dst.Groups[1].Params["window"] = 90, 90
		},
	} {
		t.Run(name, func(t *testing.T) {
			src, dst := digestLayout(2, 1, 16), digestLayout(1, 0, 32)
			change(src, dst)
			m, err := NewMatch(Default(), src, dst, nil)
			if err != nil {
				t.Fatal(err)
			}
			p, err := m.Plan(1017, []uint32{0, 0, 0})
			if err != nil {
				t.Fatal(err)
			}
			if p.Digest() == was {
				t.Error("the digest is the same")
			}
		})
	}
	for name, change := range map[string]func(src, dst *layout.Layout){
		"pages elsewhere": func(src, dst *layout.Layout) {
			src.Groups[0].Layers[0].Base, dst.Groups[0].Layers[1].Region = 1<<50, 7
			dst.Groups[0].Layers[0].BlockStride *= 2
		},
		"fewer blocks": func(src, dst *layout.Layout) {
			src.Groups[0].NumBlocks,
				dst.Groups[0].NumBlocks = 100, 200
		},
		"the names of models": func(src, dst *layout.Layout) { src.Model, dst.Model = "a", "b" },
	} {
		t.Run(name, func(t *testing.T) {
			if digestPlan(t, change).Digest() != was {
				t.Error("the digest differs, and a byte has no other place")
			}
		})
	}
	m := digestPlan(t, nil).match
	for name, c := range map[string]struct {
		tokens uint32
		skip   []uint32
	}{"a longer prompt": {1018, []uint32{0, 0, 0}}, "a skip": {1017, []uint32{32, 0, 0}},
		"all of a group": {1017, []uint32{0, 1017, 0}}} {
		p, err := m.Plan(c.tokens, c.skip)
		if err != nil {
			t.Fatal(err)
		}
		if p.Digest() == was {
			t.Errorf("%s: the digest is the same", name)
		}
	}
}

// The digest of a plan is equal in successive releases unless PlanVersion was raised. If this
// fails, bytes may have another place than in the previous release: raise PlanVersion, and write
// the new value here.
func TestDigestIsStable(t *testing.T) {
	d := digestPlan(t, nil).Digest()
	const want = "e5672adeb88b128f0ec8eb42649797b2dc326c7dd782af3c64ba4f2305759997"
	if got := hex.EncodeToString(d[:]); got != want {
		t.Errorf("the digest is %s, it was %s", got, want)
	}
}

// Each side computes the digest once per part of a grant, before the first byte: its cost must be
// small beside the plan.
func TestDigestIsCheap(t *testing.T) {
	r := newReshaped()
	m := r.meet(t)
	p := r.plan(t, m)[0]
	if n := testing.AllocsPerRun(10, func() { p.Digest() }); n != 0 {
		t.Errorf("a digest makes %v allocations", n)
	}
	if testutil.Race {
		return
	}
	plan, digest := fastestOf(func() { r.plan(t, m) }), fastestOf(func() { p.Digest() })
	t.Logf("%d tokens through 64 layers from two ranks: planned in %s, a digest in %s", benchTokens,
		plan, digest)
	if digest > plan/4 {
		t.Errorf("a digest takes %s, and the plans of two ranks %s", digest, plan)
	}
}

// BenchmarkDigest is the cost of the digest of a plan of 32,768 tokens through 64 layers, for each
// side, beside the plan itself.
func BenchmarkDigest(b *testing.B) {
	r := newReshaped()
	p := r.plan(b, r.meet(b))[0]
	b.ReportAllocs()
	for b.Loop() {
		p.Digest()
	}
}
