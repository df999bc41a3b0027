package placebench

import (
	"math"
	"math/rand/v2"
	"sort"

	"github.com/kvspray/kvspray/store/trace"
)

const (
	pageTokens = 512 // as in package trace
	idBits     = 40  // of page names, below the number of their document or agent
)

// request is one prompt of a trace. Its last page is half full, as on average.
type request struct {
	at     float64
	pages  []uint64
	output int // tokens
}

func (r *request) tokens() int { return len(r.pages)*pageTokens - pageTokens/2 }

// shape makes requests for some seconds, so that prompts have a number of tokens per second.
type shape func(r *rand.Rand, seconds, tokensPerSecond float64) []request

var shapes = map[string]shape{"conversation": conversation, "agent": agent, "fanout": fanout}

// output draws the length of an answer around a mean.
func output(r *rand.Rand, mean float64) int {
	return 1 + int(mean*math.Exp(0.8*r.NormFloat64()-0.32))
}

// conversation is the conversation trace of package trace, which names its source. The means,
// 12,035 tokens a prompt and 343 an answer, are this project's parameters.
func conversation(r *rand.Rand, seconds, tokensPerSecond float64) []request {
	const mean, turns = 12_035, 12_031.0 / 7373
	p := trace.Conversation()
	p.PerSecond = tokensPerSecond / (mean * turns)
	return collect(trace.New(p, r.Uint64()), seconds, func(t trace.Request) request {
		return request{t.Seconds, t.Pages, output(r, 343)}
	})
}

func collect(g *trace.Generator, seconds float64, with func(trace.Request) request) []request {
	var list []request
	for t := g.Next(); t.Seconds < seconds; t = g.Next() {
		list = append(list, with(t))
	}
	return list
}

// agent has means that this project chose: 8,596 tokens a prompt, 182 an answer, 59% of all pages
// seen before. Prompts begin with the pages of one of some agents, of which a few are popular, and
// most have one turn.
func agent(r *rand.Rand, seconds, tokensPerSecond float64) []request {
	const (
		agents, mean = 30, 8596
		prefix       = 7 // pages
	)
	p := trace.Params{First: trace.LogNormal{Median: 4.7, Sigma: 1.1},
		Grow: trace.LogNormal{Median: 1.6, Sigma: 1}, Gap: trace.LogNormal{Median: 30, Sigma: 1},
		Continue: []float64{0.25, 0.5}, MaxPages: 246}
	p.PerSecond = tokensPerSecond / mean / 1.5
	zipf := rand.NewZipf(r, 1.2, 1, agents-1)
	of := map[uint64]uint64{} // a conversation's first page to its agent
	return collect(trace.New(p, r.Uint64()), seconds, func(t trace.Request) request {
		a, ok := of[t.Pages[0]]
		if !ok {
			a = 1 + zipf.Uint64()
			of[t.Pages[0]] = a
		}
		pages := make([]uint64, 0, prefix+len(t.Pages))
		for i := range uint64(prefix) {
			pages = append(pages, a<<idBits|i)
		}
		return request{t.Seconds, append(pages, t.Pages...), output(r, 182)}
	})
}

// fanout has documents that many ask within a minute, each with a question of one page.
func fanout(r *rand.Rand, seconds, tokensPerSecond float64) []request {
	const (
		askers, window = 64, 60.0
		median, sigma  = 40.0, 0.6 // pages of a document
	)
	mean := median*math.Exp(sigma*sigma/2) + 1
	every := askers * mean * pageTokens / tokensPerSecond
	var list []request
	doc := uint64(0)
	for at := r.ExpFloat64() * every; at < seconds; at += r.ExpFloat64() * every {
		doc++
		n := max(1, int(median*math.Exp(sigma*r.NormFloat64())))
		for q := range uint64(askers) {
			pages := make([]uint64, 0, n+1)
			for i := range uint64(n) {
				pages = append(pages, doc<<idBits|i)
			}
			if t := at + r.Float64()*window; t < seconds {
				list = append(list, request{t, append(pages, doc<<idBits|1<<30|q), output(r, 150)})
			}
		}
	}
	sort.SliceStable(list, func(i, j int) bool { return list[i].at < list[j].at })
	return list
}
