package placebench

import "github.com/kvspray/kvspray/placement"

// policy chooses for a request; false: no engine is up.
type policy func(s *sim, a *placement.Ask) (placement.Choice, bool)

// named is a policy of the table.
type named struct {
	name   string
	choose policy
}

// policies are the rows of the table. The rules of SGLang and llm-d are this project's models of
// their documents.
func policies() []named {
	return []named{
		{"least-loaded", lowestLoad},
		{"cache-aware (SGLang's rule)", cacheAware},
		{"weighted (llm-d's rule)", weighted},
		{"predict: run only", predict(placement.Run)},
		{"predict: run, fetch", predict(placement.Run | placement.Fetch)},
		{"predict: run, load", predict(placement.Run | placement.Load)},
		{"predict: run, fetch, load", predict(moves)},
		{"oracle", oracle},
	}
}

// predict is package placement with the router's view.
func predict(kinds placement.Kind) policy {
	return func(s *sim, a *placement.Ask) (placement.Choice, bool) {
		a.Kinds = kinds
		return placement.Decide(&s.state, a)
	}
}

// oracle is package placement with true rates and queues.
func oracle(s *sim, a *placement.Ask) (placement.Choice, bool) {
	return placement.Decide(&s.truth, a)
}

func (s *sim) run1(a *placement.Ask, engine int) (placement.Choice, bool) {
	if engine < 0 {
		return placement.Choice{}, false
	}
	return placement.Evaluate(&s.state, a, placement.Choice{Kind: placement.Run, Engine: engine}), true
}

// best returns the engine with the highest score among those that are up; the first in turn wins.
func (s *sim) best(score func(i int) float64) int {
	best, high := -1, 0.0
	for k := range s.nodes {
		i := (k + s.turn) % len(s.nodes)
		if !s.nodes[i].up {
			continue
		}
		if x := score(i); best < 0 || x > high {
			best, high = i, x
		}
	}
	return best
}

// inFlight is the requests of an engine.
func (n *node) inFlight() int {
	f := len(n.queue) + len(n.running)
	if n.busy != nil {
		f++
	}
	return f
}

func lowestLoad(s *sim, a *placement.Ask) (placement.Choice, bool) {
	return s.run1(a, s.best(func(i int) float64 { return -float64(s.nodes[i].inFlight()) }))
}

// cacheAware takes the engine with the longest hit if that is at least 0.3 of the prompt, unless
// the loads are unequal.
func cacheAware(s *sim, a *placement.Ask) (placement.Choice, bool) {
	const threshold, absolute, relative = 0.3, 64, 1.5
	lowest, highest := -1, 0
	for _, n := range s.nodes {
		if f := n.inFlight(); n.up {
			if lowest < 0 || f < lowest {
				lowest = f
			}
			highest = max(highest, f)
		}
	}
	if highest-lowest > absolute && float64(highest) > relative*float64(lowest) {
		return lowestLoad(s, a)
	}
	e := s.best(func(i int) float64 { return float64(a.Hits[i]) })
	if e < 0 || float64(a.Hits[e]) < threshold*float64(a.Tokens) {
		return lowestLoad(s, a)
	}
	return s.run1(a, e)
}

// weighted adds the hit as a share of the prompt, three times, and the free part of the longest
// queue, twice.
func weighted(s *sim, a *placement.Ask) (placement.Choice, bool) {
	const prefix, queue = 3, 2
	lowest, highest := -1, 0
	for _, n := range s.nodes {
		if n.up {
			if lowest < 0 || len(n.queue) < lowest {
				lowest = len(n.queue)
			}
			highest = max(highest, len(n.queue))
		}
	}
	return s.run1(a, s.best(func(i int) float64 {
		score := prefix * float64(a.Hits[i]) / float64(a.Tokens)
		if highest > lowest {
			return score + queue*float64(highest-len(s.nodes[i].queue))/float64(highest-lowest)
		}
		return score + queue
	}))
}
