package parseblock

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvspray/kvspray/layout"
)

// speculating is an engine that serves a model and a draft model: the draft's layers have other
// heads and lie on the last stage. They are in the target's group if both have equally many heads
// (MTP modules, EAGLE heads of the target's shape), else in a group of their own.
type speculating struct {
	stages   int
	tp       uint64
	together bool
	target   string // order of its pages
	draft    string
	n        [2]uint64 // tokens of a block, of the target and of the draft
	tables   [2][]uint32
}

const draftLayer = 100 // the first one

func (e *speculating) ranks(target, draft dims, skips [2]uint32) []*stageOf {
	var out []*stageOf
	for stage := range e.stages {
		for rank := range e.tp {
			s := &stageOf{end: end{l: &layout.Layout{DType: "bfloat16", Identity: identified(IdentitySpec,
				"eagle:draft:2")}}}
			for i, d := range []dims{target, draft} {
				d.n, d.blocks, d.rank, d.size = e.n[i], uint64(len(e.tables[i])), rank, e.tp
				all := d.layers
				d.first = stage * all / e.stages
				d.layers = (stage+1)*all/e.stages - d.first
				kind := e.target
				if i == 1 {
					kind, d.first, d.layers = e.draft, draftLayer, 0
					if stage == e.stages-1 {
						d.layers = all
					}
				}
				none := d.layers == 0
				d.layers = max(d.layers, 1)
				c := kvCache(kind, &d)
				g := c.groups[0]
				if none {
					g.Layers, c = nil, nil
				}
				size := uint64(0)
				if c != nil {
					size = c.size
				}
				for k := range g.Layers {
					g.Layers[k].Region = i
				}
				if i == 1 && e.together {
					s.l.Groups[0].Layers = append(s.l.Groups[0].Layers, g.Layers...)
				} else {
					s.l.Groups = append(s.l.Groups, g)
					s.tables, s.skips = append(s.tables, e.tables[i]), append(s.skips, skips[i])
				}
				s.caches, s.first, s.sizes, s.mem = append(s.caches, c), append(s.first, d.first),
					append(s.sizes, size), append(s.mem, make([]byte, size))
			}
			out = append(out, s)
		}
	}
	return out
}

// TestDraftLaws: the draft's keys and values move with the target's, for all orders, block sizes,
// ranks and stages of the two sides, whether the draft shares the target's group and block table or
// has its own.
func TestDraftLaws(t *testing.T) {
	reg := Default()
	// without parameters that place layers
	kinds := []string{PackedNHD, PackedHND}
	rapid.Check(t, func(t *rapid.T) {
		heads, tps := []uint64{1, 2, 4, 8}, []uint64{1, 2, 4}
		tokens := rapid.Uint64Range(1, 20).Draw(t, "tokens")
		target := dims{layers: rapid.IntRange(2, 4).Draw(t, "layers"),
			kvHeads: rapid.SampledFrom(heads).Draw(t, "heads"), head: rapid.Uint64Range(1,
				4).Draw(t, "head")}
		draft := dims{layers: rapid.IntRange(1, 2).Draw(t, "draft.layers"),
			kvHeads: rapid.SampledFrom(heads).Draw(t, "draft.heads"), head: rapid.Uint64Range(1, 4).Draw(t,
				"draft.head")}
		var es [2]*speculating
		var skips [2]uint32
		together := rapid.Bool().Draw(t, "together")
		if together {
			draft.kvHeads = target.kvHeads
		}
		for i, label := range []string{"from.", "to."} {
			e := &speculating{stages: rapid.IntRange(1, 2).Draw(t, label+"stages"),
				tp: rapid.SampledFrom(tps).Draw(t, label+"tp"), together: together,
				target: rapid.SampledFrom(kinds).Draw(t, label+"target"),
				draft:  rapid.SampledFrom(kinds).Draw(t, label+"draft")}
			for k := range 2 {
				e.n[k] = rapid.Uint64Range(1, 6).Draw(t, label+"n")
				if k == 1 && together {
					e.n[1], e.tables[1], e.draft = e.n[0], e.tables[0], e.target
					continue
				}
				e.tables[k] = genTable(t, label+"table", (tokens-1)/e.n[k]+1+rapid.Uint64Range(0, 2).Draw(t,
					label+"spare"), 99)
			}
			es[i] = e
		}
		for k := range 2 {
			skips[k] = uint32(min(tokens, es[1].n[k]*rapid.Uint64Range(0, (tokens-1)/es[1].n[k]+1).Draw(t,
				"skip")))
		}
		if together {
			skips[1] = skips[0]
		}
		model := func(layer int, role layout.Role, head, e, _, x uint64) byte {
			return byte(uint64(layer)*131 + uint64(role)*17 + head*29 + e*7 + x*3 + 1)
		}
		var sources []*end
		ps := es[0].ranks(target, draft, skips)
		for _, s := range ps {
			for i, c := range s.caches {
				if c != nil {
					fill(c, s.first[i], es[0].tables[i], 0, tokens, s.mem[i], model)
				}
			}
			sources = append(sources, &s.end)
		}
		for _, d := range es[1].ranks(target, draft, skips) {
			want := make([][]byte, 2)
			for i, c := range d.caches {
				if want[i] = make([]byte, len(d.mem[i])); c == nil || uint64(skips[i]) >= tokens {
					continue
				}
				for k := range c.layers {
					fillFrom(c, k, es[1].tables[i], uint64(skips[i]), tokens, want[i], func(layer int,
						role layout.Role, head, e, col, x uint64) byte {
						return model(d.first[i]+layer, role, head, e, col, x)
					})
				}
			}
			ours, err := reg.Fingerprint(d.l)
			if err != nil {
				t.Fatal(err)
			}
			for _, s := range append(slices.Clone(ps), d) {
				if err := reg.Validate(s.l, s.sizes); err != nil {
					t.Fatal(err)
				}
				if theirs, err := reg.Fingerprint(s.l); err != nil || theirs != ours {
					t.Fatalf("the fingerprints of two ranks differ (%v)", err)
				}
			}
			give(t, reg, sources, &d.end, tokens, d.skips, nil)
			for i := range want {
				if !bytes.Equal(d.mem[i], want[i]) {
					t.Fatalf("%s differs", []string{"the target", "the draft"}[i])
				}
			}
		}
	})
}

// TestSpeculationIsCompared: engines with different speculation differ in their fingerprints, and
// the difference is named. A draft that only one side has is not omitted, and a draft of another
// shape is not copied.
func TestSpeculationIsCompared(t *testing.T) {
	reg := Default()
	engine := func(method string, draftHeads uint64) *layout.Layout {
		e := &speculating{stages: 1, tp: 1, target: PackedNHD, draft: PackedNHD, n: [2]uint64{4, 4},
			tables: [2][]uint32{seq(4), seq(4)}}
		l := e.ranks(dims{layers: 2, kvHeads: 4, head: 2}, dims{layers: 1, kvHeads: max(draftHeads, 1),
			head: 2}, [2]uint32{})[0].l
		if draftHeads == 0 {
			l.Groups = l.Groups[:1]
		}
		l.Identity[IdentitySpec] = method
		return l
	}
	base := engine("eagle:draft:2", 2)
	for _, c := range []struct {
		name    string
		b       *layout.Layout
		diff    []string
		refused string // Assign from it to base
	}{
		{"the same", engine("eagle:draft:2", 2), nil, ""},
		{"another method", engine("mtp:draft:2", 2),
			[]string{`identity.speculative: "eagle:draft:2" here, "mtp:draft:2" there`}, ""},
		{"another draft", engine("eagle:other:2", 2), []string{"identity.speculative"}, ""},
		{"more tokens", engine("eagle:draft:3", 2), []string{"identity.speculative"}, ""},
		{"none", engine("", 0), []string{`identity.speculative: "eagle:draft:2" here, "" there`},
			fmt.Sprintf(`layer "layers.%d": k = heads [0, 2): no source has them`, draftLayer)},
		{"other heads of the draft", engine("eagle:draft:2", 1),
			[]string{fmt.Sprintf(`k heads: "2" here, "1" there, in layer "layers.%d"`, draftLayer),
				"v heads"},
			fmt.Sprintf(`layer "layers.%d": kv heads = 1 and 2`, draftLayer)},
	} {
		t.Run(c.name, func(t *testing.T) {
			identity := len(c.diff) > 0 && strings.HasPrefix(c.diff[0], "identity.")
			if got := differ(t, reg, base, c.b, c.diff); got != identity {
				t.Errorf("fingerprints differ: %v, want %v", got, identity)
			}
			_, err := Assign(reg, []*layout.Layout{c.b}, base, nil)
			if (err != nil) != (c.refused != "") || err != nil && !strings.Contains(err.Error(), c.refused) {
				t.Errorf("assigned: %v, want %q", err, c.refused)
			}
		})
	}
}
