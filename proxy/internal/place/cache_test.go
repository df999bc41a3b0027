package place

import (
	"context"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/placement/index"
	"github.com/kvspray/kvspray/proxy/internal/kvevents"
)

const size = 16 // tokens of a block

func tokens(n int, salt uint32) []uint32 {
	out := make([]uint32, n)
	for i := range out {
		out[i] = uint32(i)*7 + salt
	}
	return out
}

// name is an engine's hash of a block: of its tokens and all before them.
func name(toks []uint32) kvevents.Name {
	h := uint64(14695981039346656037)
	for _, t := range toks {
		h = (h ^ uint64(t+1)) * 1099511628211
	}
	return kvevents.Name(h)
}

// stored is an event about the blocks of a prompt from one on.
func stored(toks []uint32, from int) kvevents.Event {
	e := kvevents.Event{Kind: kvevents.Stored, BlockSize: size, Tier: kvevents.GPU,
		Tokens: toks[from*size : len(toks)/size*size]}
	for i := from; i < len(toks)/size; i++ {
		e.Blocks = append(e.Blocks, name(toks[:(i+1)*size]))
	}
	if from > 0 {
		e.Parent, e.HasParent = name(toks[:from*size]), true
	}
	e.Plain = len(e.Blocks)
	return e
}

func removed(toks []uint32, blocks ...int) kvevents.Event {
	e := kvevents.Event{Kind: kvevents.Removed, Tier: kvevents.GPU}
	for _, b := range blocks {
		e.Blocks = append(e.Blocks, name(toks[:(b+1)*size]))
	}
	return e
}

func apply(h *Holder, events ...kvevents.Event) {
	h.Apply(context.Background(), &kvevents.Batch{Events: events})
}

func newTestCache(engines int) *cache {
	c := newCache()
	for i := range engines {
		c.holder(i).Live(true)
	}
	return c
}

func (c *cache) lookup(tokens []uint32, about []bool) []hit { return c.find(c.keys(tokens, about)) }

func (c *cache) wantHit(t *testing.T, what string, toks []uint32, engine, gpu, any int) {
	t.Helper()
	got := c.lookup(toks, slices.Repeat([]bool{true}, len(c.holders)))[engine]
	if !got.known || got.gpu != gpu*size || got.any != any*size {
		t.Errorf("%s: %+v, want %d and %d blocks", what, got, gpu, any)
	}
}

func TestReportedBlocks(t *testing.T) {
	c := newTestCache(2)
	a, b := c.holders[0], c.holders[1]
	toks := tokens(10*size+3, 0)
	c.wantHit(t, "nothing reported", toks, 0, 0, 0)
	apply(a, stored(toks[:6*size], 0), stored(toks, 6))
	c.wantHit(t, "all", toks, 0, 10, 10)
	c.wantHit(t, "the last token is computed", toks[:10*size], 0, 9, 9)
	c.wantHit(t, "of another engine", toks, 1, 0, 0)
	c.wantHit(t, "another prompt", tokens(100, 1), 0, 0, 0)
	host := stored(toks[:8*size], 2)
	host.Tier = kvevents.Host
	apply(a, host, removed(toks, 4))
	c.wantHit(t, "a block is in the host's memory only", toks, 0, 4, 10)
	gone := removed(toks, 4)
	gone.Tier = kvevents.AllTiers
	apply(a, gone)
	c.wantHit(t, "a block is gone", toks, 0, 4, 4)
	apply(a, stored(toks[:5*size], 4))
	c.wantHit(t, "a block is back", toks, 0, 10, 10)
	apply(b, stored(toks[:3*size], 0))
	apply(a, kvevents.Event{Kind: kvevents.Cleared, Tier: kvevents.GPU})
	c.wantHit(t, "the GPU's blocks are gone", toks, 0, 0, 0)
	apply(a, stored(toks[:3*size], 0))
	c.wantHit(t, "those in the host's memory remain", toks, 0, 3, 4)
	apply(a, kvevents.Event{Kind: kvevents.Cleared, Tier: kvevents.AllTiers})
	c.wantHit(t, "the other engine", toks, 1, 3, 3)
	b.Void()
	c.wantHit(t, "void", toks, 1, 0, 0)
	if n := c.table.Blocks(); n != 0 {
		t.Errorf("%d blocks remain", n)
	}
	b.Live(false)
	if h := c.lookup(toks, []bool{true, true}); h[1].known || !h[0].known {
		t.Error("old reports are used")
	}
	if h := c.lookup(toks, []bool{false, true}); h[0].known {
		t.Error("reports of another model are used")
	}
}

// What could be another request's block is left out, and so is all that follows it.
func TestLeftOut(t *testing.T) {
	c := newTestCache(1)
	h := c.holders[0]
	toks := tokens(6*size, 0)
	plain := stored(toks[:size], 0)
	salted := stored(toks[:3*size], 0)
	salted.Plain = 0
	salted.Blocks = []kvevents.Name{1, 2, 3}
	after := stored(toks, 3)
	after.Parent = 3
	adapter := stored(toks, 0)
	adapter.Adapter = true
	remote := stored(toks, 0)
	remote.Remote = true
	small := stored(toks, 0)
	small.BlockSize, small.Tokens = 8, small.Tokens[:len(small.Blocks)*8]
	apply(h, plain, salted, after, adapter, remote, small)
	c.wantHit(t, "the plain block only", toks, 0, 1, 1)
	left := h.Stats().Left
	for reason, want := range map[string]uint64{"extra_keys": 3, "orphan": 3, "adapter": 6,
		"remote": 6, LeftSize: 6} {
		if left[reason] != want {
			t.Errorf("%s: %d, want %d", reason, left[reason], want)
		}
	}
	partial := stored(toks, 1)
	partial.Partial = true
	apply(h, partial, stored(toks, 0))
	if got := c.lookup(toks, []bool{true})[0]; got.known || h.Stats().Blocks != 0 {
		t.Errorf("a model with several caches: %+v", got)
	}
	h.Void()
	apply(h, stored(toks, 0))
	c.wantHit(t, "another model after a restart", toks, 0, 5, 5)
}

// An engine's first blocks may be parts of blocks: the size of the others counts.
func TestFirstBlockIsAPart(t *testing.T) {
	c := newTestCache(1)
	h := c.holders[0]
	toks := tokens(5*size+1, 0)
	part := kvevents.Event{Kind: kvevents.Stored, Tier: kvevents.GPU, BlockSize: size / 4,
		Tokens: toks[:size/4], Blocks: []kvevents.Name{77}, Plain: 1}
	apply(h, part, stored(toks, 0), part)
	c.wantHit(t, "whole blocks", toks, 0, 5, 5)
	if s := h.Stats(); s.Blocks != 5 || s.Left[LeftSize] != 1 || c.table.Blocks() != 5 {
		t.Errorf("%+v, %d in the table", s, c.table.Blocks())
	}
	other := stored(toks, 0)
	other.BlockSize, other.Tokens = size+1, tokens(5*(size+1), 0)
	apply(h, other)
	c.wantHit(t, "a size that is no multiple", toks, 0, 5, 5)
}

// Metrics and decisions are made while an engine reports many blocks. Reports end with their
// context.
func TestReportsHoldUpNothing(t *testing.T) { besideReports(t, 20) }

// Decisions do not wait for the reports.
func TestMeasureDecisionsBesideReports(t *testing.T) {
	testutil.Measures(t)
	if worst := besideReports(t, 2000); worst > time.Second {
		t.Errorf("%v", worst)
	}
}

// besideReports returns the longest time of a decision.
func besideReports(t *testing.T, decisions int) (worst time.Duration) {
	p := newPlacer(t, Config{Policy: Cache}, 0, 1)
	h := p.Holder(0)
	h.held = index.NewHeld(1 << 12) // full soon
	h.Live(true)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := uint32(0); ctx.Err() == nil; i++ {
			h.Apply(ctx, &kvevents.Batch{Events: []kvevents.Event{stored(tokens(64<<10, i), 0)}})
		}
	}()
	toks := tokens(10*size, 0)
	for range decisions {
		began := time.Now()
		p.Stats()
		h.Stats()
		p.Ended(decide(t, p, &Request{Text: text(4*len(toks), 'a'), Tokens: toks,
			About: []bool{true}}, 0), began)
		worst = max(worst, time.Since(began))
	}
	cancel()
	<-done
	before := h.Stats()
	h.Apply(ctx, &kvevents.Batch{Events: []kvevents.Event{stored(tokens(size, 99), 0)}})
	if after := h.Stats(); after.Blocks != before.Blocks ||
		after.Left[LeftFull] != before.Left[LeftFull] {
		t.Errorf("%+v and %+v: events are taken after the end", before, after)
	}
	return worst
}

// Against a plain model of a cache, with random events: never a hit that the engine does not have.
func TestRandomReports(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	c := newTestCache(1)
	h := c.holders[0]
	var prompts [][]uint32
	for i := range 8 {
		p := tokens(12*size, 0)
		for j := i * size; j < len(p); j++ {
			p[j] += uint32(i) * 1000
		}
		prompts = append(prompts, p)
	}
	have := map[kvevents.Name]bool{}
	exact := 0
	const rounds = 20000
	for range rounds {
		p := prompts[r.IntN(len(prompts))]
		first := 0
		for first < 12 && have[name(p[:(first+1)*size])] {
			first++
		}
		switch {
		case r.IntN(3) == 0 && first < 12:
			end := first + 1 + r.IntN(12-first)
			apply(h, stored(p[:end*size], first))
			for i := first; i < end; i++ {
				have[name(p[:(i+1)*size])] = true
			}
		case r.IntN(500) == 0:
			apply(h, kvevents.Event{Kind: kvevents.Cleared, Tier: kvevents.GPU})
			clear(have)
		default:
			b := r.IntN(12)
			apply(h, removed(p, b))
			delete(have, name(p[:(b+1)*size]))
		}
		p = prompts[r.IntN(len(prompts))]
		want := 0
		for want < 11 && have[name(p[:(want+1)*size])] {
			want++
		}
		got := c.lookup(p, []bool{true})[0].gpu / size
		if got > want {
			t.Fatalf("%d blocks, the engine has %d", got, want)
		}
		if got == want {
			exact++
		}
	}
	if exact != rounds {
		t.Errorf("%d of %d are exact", exact, rounds)
	}
	if n := h.Stats().Blocks; n != len(have) || n != c.table.Blocks() {
		t.Errorf("%d and %d blocks, want %d", n, c.table.Blocks(), len(have))
	}
}

// Reports replace what the router remembers, but for requests in flight.
func TestReportsDecide(t *testing.T) {
	p := newPlacer(t, Config{Policy: Cache}, 0, 2)
	for i := range 2 {
		p.Holder(i).Live(true)
	}
	toks := tokens(100*size, 0)
	r := &Request{Text: text(4*len(toks), 'a'), Tokens: toks, About: []bool{true, true}}
	first := decide(t, p, r, 0)
	if first.Choice.Reused != 0 || !first.Reported || first.Tokens != len(toks) {
		t.Errorf("%+v", first)
	}
	if d := decide(t, p, r, 0); d.Decode != first.Decode || d.Choice.Reused == 0 || d.Cached != 0 {
		t.Errorf("a prompt in flight is no hit: %+v", d)
	} else {
		p.Ended(d, began)
	}
	p.Ended(first, began)
	if d := decide(t, p, r, 0); d.Choice.Reused != 0 {
		t.Errorf("nothing is reported, and yet: %+v", d)
	} else {
		p.Ended(d, began)
	}
	other := 1 - first.Decode
	apply(p.Holder(other), stored(toks, 0))
	d := decide(t, p, r, 0)
	if d.Decode != other || d.Cached != 99*size || d.Choice.Reused != 99*size {
		t.Errorf("%+v", d)
	}
	p.Ended(d, began)
	r.Tokens = nil // the prompt's text is known at the first engine
	d = decide(t, p, r, 0)
	if d.Choice.Reused == 0 || d.Reported {
		t.Errorf("%+v", d)
	}
	p.Ended(d, began)
	p.Remove(other)
	if n := p.cache.table.Blocks(); n != 0 {
		t.Errorf("%d blocks of an engine that has ended", n)
	}
	if n := len(p.flying[0]) + len(p.flying[1]); n != 0 {
		t.Errorf("%d requests in flight", n)
	}
	if p.Stats().Bytes == 0 {
		t.Error("no memory")
	}
}

func BenchmarkStored(b *testing.B) {
	c := newTestCache(1)
	toks := tokens(32<<10, 0)
	e := stored(toks, 0)
	for b.Loop() {
		apply(c.holders[0], e)
	}
}

func BenchmarkLookup(b *testing.B) {
	c := newTestCache(64)
	toks := tokens(32<<10, 0)
	for _, h := range c.holders {
		apply(h, stored(toks, 0))
	}
	about := slices.Repeat([]bool{true}, 64)
	for b.Loop() {
		c.lookup(toks, about)
	}
}
