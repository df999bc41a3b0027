package placement

import (
	"math"
	"testing"

	"pgregory.net/rapid"
)

// world is a random state with the hits of one prompt.
type world struct {
	s State
	a Ask
	m *Matrix
}

func draw(t *rapid.T) *world {
	w := &world{}
	n := rapid.IntRange(1, 5).Draw(t, "engines")
	stores := rapid.IntRange(0, 2).Draw(t, "stores")
	some := func(name string, limit float64) float64 {
		if rapid.Bool().Draw(t, name+" is 0") {
			return 0
		}
		return rapid.Float64Range(0, limit).Draw(t, name)
	}
	w.a = Ask{Tokens: rapid.IntRange(1, 200_000).Draw(t, "tokens"),
		TokenBytes: rapid.Float64Range(1, 1e6).Draw(t, "bytes"), Kinds: AllKinds,
		Next:  some("next", 2000),
		First: rapid.IntRange(0, 9).Draw(t, "first")}
	for range n {
		w.s.Engines = append(w.s.Engines, Engine{
			Role: rapid.SampledFrom([]Role{Both, Both, Prefill, Decode, 0}).Draw(t, "role"),
			Wait: some("wait", 20), PrefillFixed: some("fixed", 0.1),
			PrefillRate: rapid.Float64Range(100, 1e5).Draw(t, "rate"), Step: some("step", 0.1),
			StepEach: some("each", 0.01), Running: rapid.IntRange(0, 99).Draw(t, "running"),
			Ready: some("ready", 20), Arrivals: some("arrivals", 5)})
		if stores > 0 && rapid.Bool().Draw(t, "saves") {
			w.s.Engines[len(w.s.Engines)-1].Saves = n
		}
	}
	for range stores {
		w.s.Stores = append(w.s.Stores, Store{some("ready", 1)})
	}
	w.m = NewMatrix(n + stores)
	for from := range n + stores {
		w.a.Hits = append(w.a.Hits, min(w.a.Tokens, rapid.IntRange(0, 200_000).Draw(t, "hit")))
		for to := range n {
			if to != from && rapid.IntRange(0, 3).Draw(t, "linked") > 0 {
				w.m.Set(from, to, Path{some("delay", 0.1), rapid.Float64Range(1e6, 5e10).Draw(t, "bw"),
					some("before", 1e9)})
			}
		}
	}
	w.s.Network, w.s.Overlap = w.m, rapid.SampledFrom([]float64{0, 0.3, 0.9, 1}).Draw(t, "overlap")
	return w
}

func (w *world) best() float64 {
	c, ok := Decide(&w.s, &w.a)
	if !ok {
		return math.Inf(1)
	}
	return c.Price
}

// atMost allows for rounding.
func atMost(x, y float64) bool { return x <= y || x-y <= 1e-9*math.Abs(y) }

// laws are the kinds of choices for which the laws hold. A pair that loads from a store takes the
// number of tokens that is best without the pair's own transfer, and so it may miss the best price.
func laws(t *rapid.T) Kind {
	return rapid.SampledFrom([]Kind{Run | Fetch | Pair, Run | Fetch | Load}).Draw(t, "lawful")
}

// A change of one value of the state must not move the best price in the wrong direction.
func TestLawsOfPrice(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := draw(t)
		w.a.Kinds = laws(t)
		was := w.best()
		e := &w.s.Engines[rapid.IntRange(0, len(w.s.Engines)-1).Draw(t, "engine")]
		cheaper := true
		switch law := rapid.IntRange(0, 9).Draw(t, "law"); law {
		case 0: // a longer hit
			h := rapid.IntRange(0, len(w.a.Hits)-1).Draw(t, "holder")
			w.a.Hits[h] = rapid.IntRange(w.a.Hits[h], w.a.Tokens).Draw(t, "longer")
		case 1, 2: // a better link, a link with fewer bytes before
			from := rapid.IntRange(0, len(w.a.Hits)-1).Draw(t, "from")
			to := rapid.IntRange(0, len(w.s.Engines)-1).Draw(t, "to")
			p := w.m.Path(from, to)
			p.Rate *= 2
			if law == 2 {
				p.Before, p.Fixed = p.Before/2, p.Fixed/2
			}
			w.m.Set(from, to, p)
		case 3:
			e.Wait /= 2
		case 4:
			e.PrefillRate *= 2
		case 5:
			e.Running, e.PrefillFixed, e.Ready = e.Running/2, e.PrefillFixed/2, e.Ready/2
			e.Arrivals /= 2
		case 6: // more overlap
			w.s.Overlap = min(1, w.s.Overlap+0.2)
		case 7: // a longer prompt
			w.a.Tokens, cheaper = w.a.Tokens*2, false
		case 8: // fewer kinds of choices
			w.a.Kinds &= rapid.SampledFrom([]Kind{Run, Fetch, Pair, Load, Run | Pair}).Draw(t, "kinds")
			cheaper = false
		case 9: // a shorter answer
			w.a.Next /= 2
		}
		is := w.best()
		if cheaper && !atMost(is, was) || !cheaper && !atMost(was, is) {
			t.Fatalf("the best price was %v and is %v", was, is)
		}
	})
}

// A link that gets slower, or an engine that gets busier, attracts no request that chose otherwise.
func TestLawsOfAttraction(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := draw(t)
		w.a.Kinds = laws(t)
		was, ok := Decide(&w.s, &w.a)
		if !ok {
			return
		}
		from := rapid.IntRange(0, len(w.a.Hits)-1).Draw(t, "from")
		to := rapid.IntRange(0, len(w.s.Engines)-1).Draw(t, "to")
		link := rapid.Bool().Draw(t, "link")
		if link {
			p := w.m.Path(from, to)
			p.Rate, p.Before, p.Fixed = p.Rate/3, p.Before+1e6, p.Fixed+0.001
			if w.m.Path(from, to).Rate > 0 {
				w.m.Set(from, to, p)
			}
		} else {
			e := &w.s.Engines[to]
			e.Wait, e.PrefillRate, e.Running = e.Wait+1, e.PrefillRate/2, e.Running+3
		}
		is, _ := Decide(&w.s, &w.a)
		uses := func(c Choice) bool {
			if link {
				return c.Source == from && c.Engine == to
			}
			return c.Engine == to || c.Kind == Pair && c.Source == to
		}
		// Rounding may change which of two equal choices is first.
		if uses(is) && !uses(was) && !atMost(was.Price, is.Price) {
			t.Fatalf("was %+v, is %+v", was, is)
		}
	})
}

// Decide returns the first of Rank, whose choices are in order and add up.
func TestDecideIsTheFirstOfRank(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := draw(t)
		w.a.Kinds = rapid.SampledFrom([]Kind{AllKinds, Run, Fetch, Pair, Load, Run | Pair,
			Pair | Load}).Draw(t, "kinds")
		best, ok := Decide(&w.s, &w.a)
		list := Rank(&w.s, &w.a, nil)
		if ok != (len(list) > 0) || ok && best != list[0] {
			t.Fatalf("Decide %+v %v, Rank %+v", best, ok, list)
		}
		for i, c := range list {
			if i > 0 && list[i-1].Price > c.Price {
				t.Errorf("choice %d is cheaper than the one before it", i)
			}
			if c.Wait < 0 || c.Prefill <= 0 || c.Transfer < 0 || c.Hidden < 0 || c.Decode < 0 ||
				c.Hidden > min(c.Prefill, c.Transfer) || c.Reused+c.Computed != w.a.Tokens ||
				c.Moved < 0 || c.Kind == Run && (c.Moved != 0 || c.Source != -1) ||
				(c.Kind == Fetch || c.Kind == Load) && c.Moved > c.Reused ||
				c.Loaded < 0 || c.Loaded > c.Reused || (c.Store < 0) != (c.Loaded == 0) ||
				c.Kind == Load && (c.Store != c.Source || c.Loaded != c.Moved) ||
				c.Price < c.TTFT() {
				t.Errorf("%+v", c)
			}
			again := Evaluate(&w.s, &w.a, c)
			if !atMost(again.Price, c.Price) || !atMost(c.Price, again.Price) ||
				again.Source != c.Source || again.Store != c.Store || again.Loaded != c.Loaded ||
				again.Moved != c.Moved {
				t.Errorf("%+v is %+v when it is priced again", c, again)
			}
			if w.s.Engines[c.Engine].Role&Decode == 0 {
				t.Errorf("an engine that does not decode gives the answer: %+v", c)
			}
		}
	})
}

// No number of fetched tokens is better than the one that fetch chose.
func TestFetchTakesTheBestNumberOfTokens(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := draw(t)
		w.a.Tokens = rapid.IntRange(2, 3000).Draw(t, "few tokens")
		w.a.Hits[0] = rapid.IntRange(0, w.a.Tokens).Draw(t, "own")
		h := len(w.a.Hits) - 1
		if h == 0 {
			return
		}
		w.a.Hits[h] = rapid.IntRange(0, w.a.Tokens).Draw(t, "held")
		p := Path{rapid.Float64Range(0, 0.1).Draw(t, "fixed"),
			rapid.Float64Range(1e6, 5e10).Draw(t, "bw"), rapid.Float64Range(0, 1e9).Draw(t, "before")}
		w.a.Block = rapid.IntRange(0, 40).Draw(t, "block")
		best, ok := fetch(&w.s, &w.a, h, 0, p)
		if ok != (w.a.Hits[h] > w.a.Hits[0]) {
			t.Fatalf("hits %v: %v", w.a.Hits, ok)
		}
		ready := p.Time(0) + w.s.ready(h)
		missing := w.a.Hits[h] - w.a.Hits[0]
		for n := 1; n <= missing; n++ {
			if n%max(1, w.a.Block) != 0 && n != missing {
				continue
			}
			c := fetchTokens(&w.s, &w.a, h, 0, n, ready+float64(n)*w.a.TokenBytes/p.Rate)
			if !atMost(best.Price, c.Price) {
				t.Fatalf("%d tokens cost %v, the chosen %d cost %v", n, c.Price, best.Moved, best.Price)
			}
		}
	})
}
