package placement

import "math"

// Correction learns how much longer something takes than was predicted. Its zero value corrects
// nothing.
type Correction struct{ log float64 }

// Bounds of corrections.
const (
	// MaxCorrection bounds the factor and its inverse, so that a few odd outcomes cannot take an
	// engine out of use, or attract everything to it.
	MaxCorrection = 4
	learning      = 0.1 // weight of the newest outcome
)

// Factor is what a prediction is multiplied by.
func (c Correction) Factor() float64 { return math.Exp(c.log) }

// Observe takes one outcome. The prediction is without the correction. A mean of logarithms weighs
// twice and half as long equally.
func (c *Correction) Observe(predicted, actual float64) {
	if !(predicted > 0) || !(actual > 0) || math.IsInf(actual, 0) || math.IsInf(predicted, 0) {
		return
	}
	limit := math.Log(MaxCorrection)
	seen := min(limit, max(-limit, math.Log(actual/predicted)))
	c.log += learning * (seen - c.log)
}

// Rate learns how often something happens, over about half a minute. Its zero value is 0. Times are
// seconds; one that decreases counts as the last one.
type Rate struct{ rate, at float64 }

const rateSpan = 30 // seconds

// Add takes one event.
func (r *Rate) Add(now float64) { *r = Rate{r.At(now) + 1.0/rateSpan, now} }

// At is the rate per second.
func (r *Rate) At(now float64) float64 { return r.rate * math.Exp(min(0, r.at-now)/rateSpan) }

// Evaluate prices the same choice in another state, for instance the one that turned out.
func Evaluate(s *State, a *Ask, c Choice) Choice {
	switch c.Kind {
	case Pair:
		at := run(s, a, c.Source)
		if c.Store >= 0 {
			at = again(s, a, c.Store, c.Source, c.Loaded)
		}
		return pair(s, a, at, c.Engine, s.Network.Path(c.Source, c.Engine))
	case Fetch, Load:
		return again(s, a, c.Source, c.Engine, c.Moved)
	}
	return run(s, a, c.Engine)
}

// again prices a fetch, or a load, of some tokens from holder h to engine e.
func again(s *State, a *Ask, h, e, moved int) Choice {
	moved = min(moved, a.Tokens-min(a.Hits[e], a.Tokens))
	path := s.Network.Path(h, e)
	c := fetchTokens(s, a, h, e, moved, s.ready(h)+path.Time(float64(moved)*a.TokenBytes))
	c.from(s, h)
	return c
}
