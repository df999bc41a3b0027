package sidecar

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	mrand "math/rand/v2"
	"testing"

	"github.com/kvspray/kvspray/connector/connectortest"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/parseblock"
)

// kind is one group of caches of a model, and how an engine lays it out.
type kind struct {
	strategy string
	n        uint32 // tokens of a block
	layers   int
	params   map[string]int64
	page     func(tp, rank int) uint64
	suffix   string // of the layers' names
	stages   []int  // of each layer, where they are not divided evenly
}

// on divides the layers of a kind over the stages of an engine as given; a stage may have none.
func (k kind) on(stages ...int) kind {
	k.stages = stages
	return k
}

// shape is how an engine serves a model: its stages, its ranks, its caches.
type fleetShape struct {
	pp, tp int
	kinds  []kind
}

const (
	fleetHeads = 4
	headBytes  = 32 // of K, and of V
	fleetN     = 4  // layers of each kind, as many as stages at most
)

func attention(strategy string, n uint32, heads int) kind {
	return kind{strategy: strategy, n: n, layers: fleetN,
		params: map[string]int64{"kv_heads": int64(heads)}, page: func(tp, rank int) uint64 {
			_, own := parseblock.HeadShare(uint64(heads), uint64(rank), uint64(tp))
			return uint64(n) * own * 2 * headBytes
		}}
}

// half is SGLang's pool of K or of V.
func half(strategy, suffix string, n uint32, heads int) kind {
	k := attention(strategy, n, heads)
	whole := k.page
	k.page, k.suffix = func(tp, rank int) uint64 { return whole(tp, rank) / 2 }, suffix
	return k
}

func latent(n uint32) kind {
	return kind{strategy: parseblock.MLA, n: n, layers: fleetN, params: map[string]int64{},
		page: func(int, int) uint64 { return uint64(n) * 128 }}
}

// within gives a kind a sliding window.
func (k kind) within(tokens int) kind {
	k.params = maps.Clone(k.params)
	k.params["window"] = int64(tokens)
	return k
}

// more adds layers to a kind.
func (k kind) more(n int) kind {
	k.layers += n
	return k
}

// named gives layers of a kind names beside those of another.
func (k kind) named(suffix string) kind {
	k.suffix = suffix
	return k
}

func state(n uint32) kind {
	const kh, kd, vh, vd, conv = 4, 16, 4, 32, 3
	return kind{strategy: parseblock.GDNState, n: n, layers: fleetN, suffix: ".linear",
		params: map[string]int64{"k_heads": kh, "k_dim": kd, "v_heads": vh, "v_dim": vd,
			"conv_len": conv, "state_bytes": 2},
		page: func(tp, _ int) uint64 { return uint64((2*kh*kd+vh*vd)*conv*2+vh*vd*kd*2) / uint64(tp) }}
}

// fleetRank is one worker, with its memory.
type fleetRank struct {
	*engine
	layout *layout.Layout
	region *mem.Region
	table  [][]uint32
}

const fleetBlocks = 32 // of each group

func (s fleetShape) layoutOf(pp, rank int) (*layout.Layout, uint64) {
	l := &layout.Layout{Model: "m", DType: "bfloat16", Identity: connectortest.Identity()}
	var at uint64
	index := 0
	for _, k := range s.kinds {
		g := layout.Group{TokensPerBlock: k.n, Strategy: k.strategy, NumBlocks: fleetBlocks,
			Params: maps.Clone(k.params)}
		g.Params["tp_size"], g.Params["tp_rank"] = int64(s.tp), int64(rank)
		page := k.page(s.tp, rank)
		for i := range k.layers {
			stage := i * s.pp / k.layers
			if k.stages != nil {
				stage = k.stages[i]
			}
			if stage != pp {
				continue
			}
			g.Layers = append(g.Layers, layout.Layer{Name: fmt.Sprintf("layers.%d%s", i, k.suffix),
				Index: index, Base: at, BlockStride: page, PageBytes: page})
			index++
			at += fleetBlocks * page
		}
		l.Groups = append(l.Groups, g)
	}
	return l, at
}

// fleet starts an engine's workers at a sidecar. Their regions hold noise.
func fleet(t testing.TB, r *running, id string, s fleetShape) []*fleetRank {
	t.Helper()
	var out []*fleetRank
	for pp := range s.pp {
		for rank := range s.tp {
			l, size := s.layoutOf(pp, rank)
			reg, err := mem.NewAnonymous("kv", size)
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			w, err := connectortest.DialWorker(ctx, connectortest.Config{Socket: r.cfg.Engine.Socket,
				Layout: l, Regions: []*mem.Region{reg},
				Engine: msg.Engine{Name: "test", Version: "1", ID: id},
				Ranks: msg.Ranks{PP: msg.Rank{Rank: uint32(pp), Size: uint32(s.pp)},
					TP: msg.Rank{Rank: uint32(rank), Size: uint32(s.tp)}}})
			cancel()
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				_ = w.Close()
				reg.Release()
			})
			e := &engine{Worker: w, t: t, region: reg, done: map[uint64]connectortest.Completion{}}
			e.random()
			out = append(out, &fleetRank{engine: e, layout: l, region: reg})
		}
	}
	return out
}

// cell is the content of one byte of the model's cache, which follows from its place in the model.
func cell(seed byte, layer string, role layout.Role, head, row, col, x uint64) byte {
	h := uint64(seed) + uint64(role)*7919 + head*104729 + row*1299709 + col*15485863 + x*179424673
	for _, c := range []byte(layer) {
		h = h*31 + uint64(c)
	}
	return byte(h ^ h>>8 ^ h>>16 ^ h>>24)
}

// write puts the content of tokens [from, to) into an image of the rank's memory, or with check
// compares it.
func (r *fleetRank) write(t testing.TB, image []byte, seed byte, from []uint32, to uint32) {
	reg := parseblock.Default()
	for gi := range r.layout.Groups {
		g := &r.layout.Groups[gi]
		for li := range g.Layers {
			l := &g.Layers[li]
			planes, err := reg.Planes(nil, g, l)
			if err != nil {
				t.Fatal(err)
			}
			for i := range planes {
				r.writePlane(image, seed, g, l, &planes[i], r.table[gi], from[gi], to)
			}
		}
	}
}

func (r *fleetRank) writePlane(image []byte, seed byte, g *layout.Group, l *layout.Layer,
	p *layout.Plane, table []uint32, from, to uint32) {
	first, end := uint64(from)/uint64(max(p.RowTokens, 1)), uint64(to)/uint64(max(p.RowTokens, 1))
	if p.Unit == layout.UnitState {
		if from >= to {
			return
		}
		first, end = 0, uint64(p.Rows)
	}
	for row := first; row < end; row++ {
		block, in := uint64(table[row/uint64(p.Rows)%uint64(len(table))]), row%uint64(p.Rows)
		if p.Unit == layout.UnitState {
			block, in = uint64(table[(to-1)/g.TokensPerBlock]), row
		}
		for head := range uint64(p.Heads) {
			for col := range uint64(p.Cols) {
				off := l.Base + block*l.BlockStride + p.Offset + in*p.RowStride + head*p.HeadStride +
					col*p.ColStride
				for x := range p.CellBytes {
					role, y := p.Role, x
					if role == layout.RoleKV {
						role = layout.RoleK
						if y >= p.CellBytes/2 {
							role, y = layout.RoleV, y-p.CellBytes/2
						}
					}
					image[off+x] = cell(seed, parseblock.Part(l.Name), role, uint64(p.FirstHead)+head, row, col, y)
				}
			}
		}
	}
}

// from is the first token of each group that comes: of a window, the first of the block that it
// begins in, or of the source's where that is later. Whatever the source has before is not the
// prompt's any more.
func (r *fleetRank) from(ps []*fleetRank, skip []uint32, tokens uint32) []uint32 {
	out := append([]uint32(nil), skip...)
	for gi := range r.layout.Groups {
		w := uint32(r.layout.Groups[gi].Params["window"])
		if w == 0 || w > tokens {
			continue
		}
		for _, l := range []*layout.Layout{r.layout, ps[0].layout} {
			n := l.Groups[gi].TokensPerBlock
			out[gi] = max(out[gi], (tokens-w+1)/n*n)
		}
	}
	return out
}

// lacking is how many bytes the rank has of tokens [from, to).
func (r *fleetRank) lacking(from []uint32, to uint32) (n uint64) {
	for gi := range r.layout.Groups {
		g := &r.layout.Groups[gi]
		for li := range g.Layers {
			switch page := g.Layers[li].PageBytes; {
			case from[gi] >= to:
			case g.Strategy == parseblock.GDNState:
				n += page
			default:
				n += page / uint64(g.TokensPerBlock) * uint64(to-from[gi])
			}
		}
	}
	return n
}

// tables draws the same block table for every rank of a fleet, as engines do.
func tables(rng *mrand.Rand, all []*fleetRank, tokens uint32) {
	var out [][]uint32
	for gi := range all[0].layout.Groups {
		out = append(out, table(rng, fleetBlocks, blocksFor(tokens,
			all[0].layout.Groups[gi].TokensPerBlock)))
	}
	for _, r := range all {
		r.table = out
	}
}

// move sends one prompt from every rank of ps to every rank of ds, streamed in two steps, and
// compares all memory of all receivers.
func move(t *testing.T, p *running, ps, ds []*fleetRank, rng *mrand.Rand, tokens uint32,
	seed byte) {
	t.Helper()
	pr := newPrompt(tokens)
	tables(rng, ps, tokens)
	tables(rng, ds, tokens)
	var skip []uint32
	common := uint32(1)
	for _, g := range ds[0].layout.Groups {
		common = max(common, g.TokensPerBlock) // all block sizes here divide the largest
	}
	first := rng.Uint32N(tokens/common+1) * common
	if first >= tokens {
		first = 0
	}
	for range ds[0].layout.Groups {
		skip = append(skip, first)
	}
	zero := make([]uint32, len(ps[0].layout.Groups))
	half := rng.Uint32N(tokens + 1)
	req := fmt.Sprintf("req-%x", pr.xfer[:4])
	want := make([][]byte, len(ds))
	for i, d := range ds {
		b, _ := d.region.Bytes()
		want[i] = bytes.Clone(b)
		d.write(t, want[i], seed, d.from(ps, skip, tokens), tokens)
	}
	var calls []func() error
	src, dst := make([]uint64, len(ps)), make([]uint64, len(ds))
	for i, s := range ps {
		calls = append(calls, func() (err error) {
			in := msg.Intent{Xfer: pr.xfer, Hash: pr.hash, Tokens: tokens, Fanout: 1, Blocks: s.table,
				DeadlineMS: deadlineMS, Req: req}
			if half > 0 {
				in.Steps = append(in.Steps, msg.PendingStep{Step: uint64(seed)*2 + 1, End: half})
			}
			if half < tokens {
				in.Steps = append(in.Steps, msg.PendingStep{Step: uint64(seed)*2 + 2, End: tokens})
			}
			src[i], err = s.Intent(in)
			return err
		})
	}
	for i, d := range ds {
		calls = append(calls, func() (err error) {
			dst[i], err = d.Expect(msg.Expect{Xfer: pr.xfer, Hash: pr.hash, Tokens: tokens,
				Peer: p.Endpoint(), Skip: skip, Blocks: d.table,
				DeadlineMS: deadlineMS, MatchTimeoutMS: matchMS, Req: req})
			return err
		})
	}
	rng.Shuffle(len(calls), func(i, j int) { calls[i], calls[j] = calls[j], calls[i] })
	for _, c := range calls {
		if err := c(); err != nil {
			t.Fatal(err)
		}
	}
	for step, end := range []uint32{half, tokens} {
		for _, i := range rng.Perm(len(ps)) {
			s := ps[i]
			b, _ := s.region.Bytes()
			s.write(t, b, seed, zero, end)
			for l := range s.layout.NumLayers() {
				s.SignalLayer(l, uint64(seed)*2+uint64(step)+1)
			}
			s.SignalStep(uint64(seed)*2 + uint64(step) + 1)
		}
	}
	for i, d := range ds {
		c := d.ok(dst[i])
		b, _ := d.region.Bytes()
		if n := d.lacking(d.from(ps, skip, tokens), tokens); c.Received.Bytes != n {
			t.Errorf("prompt of %d tokens: rank %d received %d bytes, and lacked %d", tokens, i,
				c.Received.Bytes, n)
		}
		if !bytes.Equal(b, want[i]) {
			at := 0
			for b[at] == want[i][at] {
				at++
			}
			t.Fatalf("prompt of %d tokens (the receiver had %d): byte %d of rank %d holds %#x, want %#x",
				tokens, first, at, i, b[at], want[i][at])
		}
	}
	for i, s := range ps {
		if c := s.ok(src[i]); c.Sent.Grants != 1 {
			t.Errorf("source rank %d served %d requests, want 1", i, c.Sent.Grants)
		}
	}
}

// Any parallelism, block size and order to any other: every byte of every receiver is the model's,
// and none beside them is touched.
func TestReshapes(t *testing.T) {
	nhd, hnd := parseblock.PackedNHD, parseblock.PackedHND
	one := func(k ...kind) []kind { return k }
	sg := one(half(parseblock.SGLangK, "#k", 16, fleetHeads), half(parseblock.SGLangV, "#v", 16,
		fleetHeads))
	for _, c := range []struct {
		name     string
		from, to fleetShape
	}{
		{"equal ranks", fleetShape{1, 2, one(attention(nhd, 16, fleetHeads))}, fleetShape{1, 2,
			one(attention(nhd, 16, fleetHeads))}},
		{"TP 2 to 1", fleetShape{1, 2, one(attention(nhd, 16, fleetHeads))}, fleetShape{1, 1,
			one(attention(nhd, 16, fleetHeads))}},
		{"TP 1 to 2", fleetShape{1, 1, one(attention(nhd, 16, fleetHeads))}, fleetShape{1, 2,
			one(attention(nhd, 16, fleetHeads))}},
		{"TP 4 to 3, uneven", fleetShape{1, 4, one(attention(nhd, 16, fleetHeads))}, fleetShape{1, 3,
			one(attention(nhd, 16, fleetHeads))}},
		{"TP 4 to 1, replicated heads", fleetShape{1, 4, one(attention(hnd, 16, 2))}, fleetShape{1, 1,
			one(attention(hnd, 16, 2))}},
		{"TP 1 to 4, replicated heads", fleetShape{1, 1, one(attention(hnd, 16, 2))}, fleetShape{1, 4,
			one(attention(hnd, 16, 2))}},
		{"block 16 to 64, HND to NHD", fleetShape{1, 1, one(attention(hnd, 16, fleetHeads))},
			fleetShape{1, 1, one(attention(nhd, 64, fleetHeads))}},
		{"block 64 to 16, NHD to HND, TP 2 to 1", fleetShape{1, 2, one(attention(nhd, 64, fleetHeads))},
			fleetShape{1, 1, one(attention(hnd, 16, fleetHeads))}},
		{"PP 2 to 1", fleetShape{2, 1, one(attention(nhd, 16, fleetHeads))}, fleetShape{1, 1,
			one(attention(nhd, 16, fleetHeads))}},
		{"PP 1 to 2", fleetShape{1, 1, one(attention(nhd, 16, fleetHeads))}, fleetShape{2, 1,
			one(attention(nhd, 16, fleetHeads))}},
		{"PP 2 TP 2 to PP 4 TP 1, block 16 to 32", fleetShape{2, 2, one(attention(nhd, 16, fleetHeads))},
			fleetShape{4, 1, one(attention(hnd, 32, fleetHeads))}},
		{"packed to K and V apart, TP 2 to 1", fleetShape{1, 2, one(attention(nhd, 16, fleetHeads))},
			fleetShape{1, 1, sg}},
		{"K and V apart to packed, TP 1 to 2", fleetShape{1, 1, sg}, fleetShape{1, 2,
			one(attention(nhd, 16, fleetHeads))}},
		{"MLA TP 4 to 2", fleetShape{1, 4, one(latent(16))}, fleetShape{1, 2, one(latent(64))}},
		{"MLA TP 2 to 2", fleetShape{1, 2, one(latent(16))}, fleetShape{1, 2, one(latent(16))}},
		{"hybrid TP 2 to 1", fleetShape{1, 2, one(attention(nhd, 16, fleetHeads), state(16))},
			fleetShape{1, 1, one(attention(nhd, 16, fleetHeads), state(16))}},
		// Windows: of the first block a receiver with other blocks gets what the source still has.
		{"window, block 16 to 32", fleetShape{1, 1, one(attention(nhd, 16, fleetHeads).within(100))},
			fleetShape{1, 1, one(attention(nhd, 32, fleetHeads).within(100))}},
		{"window beside all, block 64 to 16, TP 2 to 1", fleetShape{1, 2,
			one(attention(nhd, 64, fleetHeads), attention(nhd, 64, fleetHeads).named(".w").within(70))},
			fleetShape{1, 1, one(attention(nhd, 16, fleetHeads), attention(hnd, 16,
				fleetHeads).named(".w").within(70))}},
		{"window beside all, block 16 to 64, TP 1 to 2, PP 2 to 1", fleetShape{2, 1,
			one(attention(nhd, 16, fleetHeads).on(0, 0, 0, 0), attention(nhd, 16,
				fleetHeads).named(".w").within(70).on(1, 1, 1, 1))},
			fleetShape{1, 2, one(attention(nhd, 64, fleetHeads), attention(hnd, 64,
				fleetHeads).named(".w").within(70))}},
		// Draft models: a module like the target's layers, in their group, and one with other heads
		// and a table of its own, on the last stage.
		{"MTP in the target's group, PP 2 TP 1 to TP 2", fleetShape{2, 1,
			one(attention(nhd, 16, fleetHeads).more(1).on(0, 0, 0, 1, 1))},
			fleetShape{1, 2, one(attention(hnd, 32, fleetHeads).more(1))}},
		{"draft with other heads, TP 4 to 1", fleetShape{1, 4, one(attention(nhd, 16, fleetHeads),
			attention(nhd, 16, 2).named(".draft"))},
			fleetShape{1, 1, one(attention(nhd, 16, fleetHeads), attention(nhd, 64, 2).named(".draft"))}},
		{"draft of an MLA model, PP 1 to 2", fleetShape{1, 2, one(latent(16), attention(hnd, 16,
			fleetHeads).named(".draft"))},
			fleetShape{2, 1, one(latent(64), attention(nhd, 16, fleetHeads).named(".draft").on(1,
				1, 1, 1))}},
		// Of a hybrid, a stage that lacks a kind of layer has its group without layers.
		{"hybrid PP 2 to 1, a kind each", fleetShape{2, 1, one(attention(nhd, 16, fleetHeads).on(0, 0, 0,
			0), state(16).on(1, 1, 1, 1))},
			fleetShape{1, 1, one(attention(nhd, 16, fleetHeads), state(16))}},
		{"hybrid PP 1 to 2, a kind each", fleetShape{1, 1, one(attention(nhd, 16, fleetHeads),
			state(16))},
			fleetShape{2, 1, one(attention(hnd, 16, fleetHeads).on(1, 1, 1, 1), state(16).on(0, 0, 0, 0))}},
		{"hybrid PP 3 to 2, block 16 to 32", fleetShape{3, 1, one(attention(nhd, 16, fleetHeads).on(0, 0,
			1, 1), state(16).on(1, 1, 2, 2))},
			fleetShape{2, 1, one(attention(nhd, 32, fleetHeads).on(0, 0, 0, 0), state(32).on(0, 0, 0, 1))}},
		{"hybrid PP 3 TP 2 to PP 2 TP 1, three kinds", fleetShape{3, 2,
			one(attention(nhd, 16, fleetHeads).on(0, 0, 0, 0), latent(16).named(".mla").on(1, 1, 1, 1),
				state(16).on(0, 1, 2, 2))},
			fleetShape{2, 1, one(attention(nhd, 16, fleetHeads).on(1, 1, 1, 1),
				latent(16).named(".mla").on(0, 0, 0, 1), state(16).on(0, 0, 0, 0))}},
		{"hybrid TP 1 to 2, block 32 to 16", fleetShape{1, 1, one(attention(nhd, 32, fleetHeads),
			state(32))}, fleetShape{1, 2, one(attention(hnd, 16, fleetHeads), state(16))}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			for i, transport := range []string{"tcp", "shm"} {
				p, d := pairOf(t, transport)
				ps, ds := fleet(t, p, "p", c.from), fleet(t, d, "d", c.to)
				rng := newRand(uint64(i))
				for k, tokens := range []uint32{1, 100, 64, 333, 500} {
					move(t, p, ps, ds, rng, tokens, byte(k))
				}
				for _, n := range []*running{p, d} {
					if err := n.stop(); err != nil {
						t.Fatal(err)
					}
				}
				equalHashes(t, p, d)
			}
		})
	}
}

// Replicas are chosen by load: of four ranks with one latent, four receivers take four.
func TestReplicasShareTheLoad(t *testing.T) {
	p, d := pairOf(t, "tcp")
	ps := fleet(t, p, "p", fleetShape{1, 4, []kind{latent(16)}})
	ds := fleet(t, d, "d", fleetShape{1, 4, []kind{latent(64)}})
	move(t, p, ps, ds, newRand(1), 500, 0)
	w := make([]exec.Rank, 4)
	for i := range w {
		w[i] = exec.Rank{Name: fmt.Sprintf("pp0/tp%d", i), Geometry: ps[i].layout.Geometry()}
	}
	load := map[string]uint64{}
	for _, r := range d.engine.Workers() {
		x := expectOf(ds[0], 500)
		parts, err := d.plans.Divide(r, x, w, func(rank string) uint64 { return load[rank] })
		if err != nil {
			t.Fatal(err)
		}
		for _, part := range parts {
			if part.Plan != nil {
				load[part.Name] += part.Plan.Space().TotalBytes()
			}
		}
	}
	if len(load) != 4 {
		t.Errorf("four receivers of a replicated cache drew on %v: want every rank once", load)
	}
}

func expectOf(r *fleetRank, tokens uint32) *engines.Expect {
	x := &engines.Expect{Tokens: tokens, Skip: make([]uint32, len(r.layout.Groups))}
	for gi := range r.layout.Groups {
		t := make([]uint32, blocksFor(tokens, r.layout.Groups[gi].TokensPerBlock))
		for i := range t {
			t[i] = uint32(i)
		}
		x.Blocks = append(x.Blocks, t)
	}
	return x
}

// Two engines of unlike kinds behind one sidecar: what is known of the one is no answer about the
// other.
func TestTwoEnginesAtOnePeer(t *testing.T) {
	p, d := pairOf(t, "tcp")
	dense := fleetShape{1, 2, []kind{attention(parseblock.PackedNHD, 16, fleetHeads)}}
	mla := fleetShape{1, 1, []kind{latent(16)}}
	p1, d1 := fleet(t, p, "p1", dense), fleet(t, d, "d1", fleetShape{1, 1, dense.kinds})
	p2, d2 := fleet(t, p, "p2", mla), fleet(t, d, "d2", mla)
	p3, d3 := fleet(t, p, "p3", fleetShape{1, 4, dense.kinds}), fleet(t, d, "d3", fleetShape{1, 2,
		dense.kinds})
	rng := newRand(3)
	for i := range 3 {
		move(t, p, p1, d1, rng, 200, byte(3*i))
		move(t, p, p2, d2, rng, 200, byte(3*i+1))
		move(t, p, p3, d3, rng, 200, byte(3*i+2))
	}
}
