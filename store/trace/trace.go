// Package trace makes conversations as a store sees them: requests, each a list of pages of which
// the first ones have been seen before. It is pure; one seed gives one trace.
//
// The parameters of Conversation were measured in the conversation trace that the Mooncake project
// published with its FAST '25 paper (github.com/kvcache-ai/Mooncake,
// FAST25-release/traces/conversation_trace.jsonl: 12,031 requests of an hour, blocks of 512
// tokens). A request is taken for a later turn if it shares more than one block with an earlier
// request. There, 36.6% of all blocks had been seen before, in one unbounded cache; here, 36 to
// 40%.
package trace

import (
	"container/heap"
	"math"
	"math/rand/v2"
)

// LogNormal is a distribution of which the logarithm is normal.
type LogNormal struct{ Median, Sigma float64 }

func (d LogNormal) draw(r *rand.Rand) float64 {
	return d.Median * math.Exp(d.Sigma*r.NormFloat64())
}

// Params describes conversations.
type Params struct {
	PerSecond float64   // new conversations
	System    int       // pages that all conversations begin with
	First     LogNormal // pages of a first turn
	Grow      LogNormal // pages that a later turn adds
	Gap       LogNormal // seconds between two turns
	// the chance of another turn after turn 1, 2 ...; the last one holds for all later ones
	Continue []float64
	MaxPages int // the longest prompt
}

// Conversation is the shape of Mooncake's conversation trace. In the trace, first turns have 11
// blocks (median), 50 (90%), 21.5 (mean); later ones add 2, 20 and 6.8; gaps have 123 s, 483 s and
// 215 s.
func Conversation() Params {
	return Params{
		PerSecond: 7373.0 / 3537, System: 1,
		First: LogNormal{11, 1.156}, Grow: LogNormal{2.6, 1.4}, Gap: LogNormal{123, 1.055},
		Continue: []float64{0.306, 0.419, 0.510, 0.587, 0.63, 0.677},
		MaxPages: 246, // of 512 tokens: 126,000 tokens, the longest prompt of the trace
	}
}

// Request is one prompt.
type Request struct {
	Seconds float64
	Pages   []uint64 // names of its pages, first page first
}

type turn struct {
	Request
	number int
}

type queue []turn

func (q queue) Len() int           { return len(q) }
func (q queue) Less(i, j int) bool { return q[i].Seconds < q[j].Seconds }
func (q queue) Swap(i, j int)      { q[i], q[j] = q[j], q[i] }
func (q *queue) Push(x any)        { *q = append(*q, x.(turn)) }
func (q *queue) Pop() any {
	last := (*q)[len(*q)-1]
	*q = (*q)[:len(*q)-1]
	return last
}

// Generator makes one trace.
type Generator struct {
	p     Params
	r     *rand.Rand
	turns queue   // those that are to come; as many as conversations are open
	next  float64 // when the next conversation begins
	names uint64
}

// New makes a generator.
func New(p Params, seed uint64) *Generator {
	g := &Generator{p: p, r: rand.New(rand.NewPCG(seed, 1)), names: uint64(p.System)}
	g.next = g.r.ExpFloat64() / p.PerSecond
	return g
}

// Next is the next request. The trace has no end.
func (g *Generator) Next() Request {
	for len(g.turns) == 0 || g.next < g.turns[0].Seconds {
		t := turn{Request{Seconds: g.next}, 1}
		for i := range g.p.System {
			t.Pages = append(t.Pages, uint64(i))
		}
		t.Pages = g.grow(t.Pages, g.p.First)
		heap.Push(&g.turns, t)
		g.next += g.r.ExpFloat64() / g.p.PerSecond
	}
	t := heap.Pop(&g.turns).(turn)
	if g.r.Float64() < g.p.Continue[min(t.number, len(g.p.Continue))-1] &&
		len(t.Pages) < g.p.MaxPages {
		later := turn{Request{Seconds: t.Seconds + g.p.Gap.draw(g.r)}, t.number + 1}
		later.Pages = g.grow(t.Pages[:len(t.Pages):len(t.Pages)], g.p.Grow)
		heap.Push(&g.turns, later)
	}
	return t.Request
}

// grow adds new pages, at least one, up to the longest prompt.
func (g *Generator) grow(pages []uint64, by LogNormal) []uint64 {
	n := max(1, int(math.Round(by.draw(g.r))))
	for range min(n, max(1, g.p.MaxPages-len(pages))) {
		pages = append(pages, g.names)
		g.names++
	}
	return pages
}
