package placement

import (
	"cmp"
	"math"
	"slices"
)

// before orders choices: by price, then fewer moved and loaded tokens, then the engine after First,
// then the source. Equal choices are the same choice, so the order is total.
func before(s *State, a *Ask, x, y *Choice) int {
	return cmp.Or(cmp.Compare(x.Price, y.Price), cmp.Compare(x.Moved, y.Moved),
		cmp.Compare(x.Loaded, y.Loaded),
		cmp.Compare(turn(s, a, x.Engine), turn(s, a, y.Engine)), cmp.Compare(x.Kind, y.Kind),
		cmp.Compare(turn(s, a, x.Source), turn(s, a, y.Source)))
}

// turn is the place of an engine in the order that begins with First.
func turn(s *State, a *Ask, engine int) int {
	n := len(s.Engines)
	if engine < 0 || engine >= n {
		return engine
	}
	return (engine - a.First%n + n) % n
}

// Decide returns the choice with the lowest price; false: no engine takes the request.
func Decide(s *State, a *Ask) (best Choice, ok bool) {
	q := search{s: s, a: a, best: Choice{Price: math.Inf(1)}}
	for _, h := range a.Hits {
		q.longest = max(q.longest, min(h, a.Tokens))
	}
	q.stores()
	q.engines()
	return q.best, q.found
}

// Rank appends all choices to list, the cheapest first.
func Rank(s *State, a *Ask, list []Choice) []Choice {
	q := search{s: s, a: a, all: true, list: list}
	q.stores()
	q.engines()
	slices.SortFunc(q.list, func(x, y Choice) int { return before(s, a, &x, &y) })
	return q.list
}

// search goes through all choices.
type search struct {
	s       *State
	a       *Ask
	longest int // hit of all holders
	stored  int // hit of all stores that the request may load from

	all   bool // keep every choice in list; otherwise only the best
	list  []Choice
	best  Choice
	found bool
}

// stores finds the longest hit of stores.
func (q *search) stores() {
	if q.a.Kinds&Load != 0 && len(q.a.Hits) > len(q.s.Engines) {
		for _, h := range q.a.Hits[len(q.s.Engines):] {
			q.stored = max(q.stored, min(h, q.a.Tokens))
		}
	}
}

func (q *search) add(c *Choice) {
	if q.all {
		q.list = append(q.list, *c)
		return
	}
	if !q.found || before(q.s, q.a, c, &q.best) < 0 {
		q.best, q.found = *c, true
	}
}

// hopeless reports whether choices that cost at least bound need not be made. A sum of the same
// parts in another order differs by the rounding.
func (q *search) hopeless(bound float64) bool {
	const rounding = 1e-9
	return !q.all && bound*(1-rounding) > q.best.Price
}

// engines makes the choices without a transfer first: they are few, and rule most others out.
func (q *search) engines() {
	s, a := q.s, q.a
	for e := range s.Engines {
		if s.Engines[e].Role == Both && a.Kinds&Run != 0 {
			c := run(s, a, e)
			q.add(&c)
		}
	}
	if s.Network == nil {
		return
	}
	for e := range s.Engines {
		g := &s.Engines[e]
		if g.Role&Decode == 0 || q.hopeless(g.Wait+g.step()) {
			continue
		}
		if a.Kinds&(Fetch|Load) != 0 && g.Role == Both && !q.hopeless(q.minPrice(e, q.longest)) {
			q.holders(e)
		}
	}
	if a.Kinds&Pair != 0 {
		for p := range s.Engines {
			if s.Engines[p].Role&Prefill != 0 {
				q.pairs(p)
			}
		}
	}
}

// minPrice is the price of engine e with a hit that is there.
func (q *search) minPrice(e, hit int) float64 {
	g := &q.s.Engines[e]
	prefill := g.prefill(float64(q.a.Tokens - min(hit, q.a.Tokens)))
	return g.Wait + g.step() + prefill + g.delay(prefill)
}

// holders makes the choices of fetching to engine e.
func (q *search) holders(e int) {
	own := q.a.Hits[e]
	for h, hit := range q.a.Hits {
		if hit <= own || h == e || q.hopeless(q.minPrice(e, hit)) ||
			!q.mayFetch(h) {
			continue
		}
		path := q.s.Network.Path(h, e)
		if path.Rate <= 0 {
			continue
		}
		if c, ok := fetch(q.s, q.a, h, e, path); ok {
			q.add(&c)
		}
	}
}

// mayFetch reports whether the request may get pages from a holder. An engine without a role may be
// down.
func (q *search) mayFetch(h int) bool {
	if h >= len(q.s.Engines) {
		return q.a.Kinds&(Load|Run) == Load|Run
	}
	return q.a.Kinds&Fetch != 0 && q.s.Engines[h].Role != 0
}

// pairs makes the choices of computing on engine p for others.
func (q *search) pairs(p int) {
	g, hit := &q.s.Engines[p], max(q.a.Hits[p], q.stored)
	low := q.minPrice(p, hit) - g.step()
	var at, from Choice // with nothing loaded, and with the best load
	made, loads := false, false
	for d := range q.s.Engines {
		to := &q.s.Engines[d]
		if p == d || to.Role&Decode == 0 || q.hopeless(to.Wait+to.step()) ||
			q.hopeless(low+to.last()) {
			continue
		}
		path := q.s.Network.Path(p, d)
		if path.Rate <= 0 {
			continue
		}
		if !made {
			at, made = run(q.s, q.a, p), true
			if q.stored > q.a.Hits[p] {
				from, loads = loaded(q.s, q.a, p)
			}
		}
		c := pair(q.s, q.a, at, d, path)
		q.add(&c)
		if loads {
			c = pair(q.s, q.a, from, d, path)
			q.add(&c)
		}
	}
}
