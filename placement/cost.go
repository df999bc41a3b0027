package placement

import "math"

// Role is what an engine does, as bits.
type Role uint8

// The roles.
const (
	Prefill Role = 1 << iota
	Decode
	Both = Prefill | Decode
)

// Engine is the state of one engine. Times are seconds.
type Engine struct {
	Role Role // 0: the engine takes nothing, for instance because it is down
	Wait float64
	// PrefillFixed is the part of a prefill that does not depend on the prompt.
	PrefillFixed float64
	PrefillRate  float64 // tokens per second
	// Step is one decode step without load. Each running sequence adds StepEach.
	Step, StepEach float64
	Running        int
	// Arrivals is the requests per second that the engine gets. They wait for a prefill there.
	Arrivals float64
	// Ready is the time until the engine can send cached blocks to another engine. For vLLM this
	// is its queue, since a one-token prefill offers the blocks.
	Ready float64
	// Saves is the number, as a holder, of the store that gets the engine's pages; 0: none.
	Saves int
}

// step is the time of the first decode step.
func (e *Engine) step() float64 { return e.Step + e.StepEach*float64(e.Running) }

// last is the time to compute the last token of a prompt whose other tokens another engine sent: a
// decode step or a prefill of one token, of which the state may have only one.
func (e *Engine) last() float64 {
	if e.PrefillRate <= 0 {
		return e.step()
	}
	return max(e.step(), e.prefill(1))
}

// prefill is the time to compute tokens of a prompt. An engine computes at least one token.
func (e *Engine) prefill(tokens float64) float64 {
	return e.PrefillFixed + max(1, tokens)/e.PrefillRate
}

// Path is how bytes get from one place to another now. Its fields come from learned rates.
type Path struct {
	Fixed  float64 // seconds, independent of the bytes
	Rate   float64 // bytes per second of all usable links; 0: no path
	Before float64 // bytes in flight or queued before new ones
}

// Time is the predicted time of a transfer.
func (p Path) Time(bytes float64) float64 { return p.Fixed + (p.Before+bytes)/p.Rate }

// Network gives the path between two holders. Engines have the numbers from 0, stores follow.
type Network interface{ Path(from, to int) Path }

// Store is one tier of a store on one node, as a holder of pages.
type Store struct {
	Ready float64 // seconds until it can send, for instance the latency of a disk
}

// State is what all requests share.
type State struct {
	Engines []Engine
	Stores  []Store
	Network Network // nil: nothing can be moved
	// Overlap is the part of the shorter of prefill and transfer that runs beside the longer one:
	// 1 with layer-wise transfers, 0 if one begins after the other. With a store it is always 0: an
	// engine computes once all that it loads has come.
	Overlap float64
}

// overlap is that of a prefill and a transfer from a holder.
func (s *State) overlap(holder int) float64 {
	if holder < len(s.Engines) {
		return s.Overlap
	}
	return 0
}

// ready is the time until a holder can send.
func (s *State) ready(holder int) float64 {
	if holder < len(s.Engines) {
		return s.Engines[holder].Ready
	}
	return s.Stores[holder-len(s.Engines)].Ready
}

// Kind is how a request gets its cache.
type Kind uint8

// The kinds, as bits of Ask.Kinds.
const (
	// Run computes on one engine everything that its own cache lacks.
	Run Kind = 1 << iota
	// Fetch gets a part of the missing cache from another engine, and computes the rest.
	Fetch
	// Pair computes on one engine, Source, and moves what the decode engine lacks to it.
	Pair
	// Load gets a part of the missing cache from a store, and computes the rest. In Ask.Kinds it is
	// for the engines that Run or Pair compute on.
	Load
	AllKinds = Run | Fetch | Pair | Load
)

func (k Kind) String() string {
	switch k {
	case Run:
		return "run"
	case Fetch:
		return "fetch"
	case Pair:
		return "pair"
	case Load:
		return "load"
	}
	return "none"
}

// Ask is one request.
type Ask struct {
	Tokens     int
	TokenBytes float64 // of KV cache per token, over all layers
	// Hits has, for each engine and then each store, the cached tokens from the prompt's start.
	Hits  []int
	Kinds Kind
	// Next is the tokens of this request's answer that the next turn of its conversation will need:
	// the expected length of the answer, times the probability of a next turn.
	Next float64
	// Block is the tokens that a fetch moves at least, and of which it moves a multiple; 0 is 1.
	Block int
	// First is the engine that wins among equal ones; a router advances it with each request.
	First int
}

// Choice is one way to serve a request. Its parts are seconds.
type Choice struct {
	Kind   Kind
	Engine int // gives the answer
	Source int // of the transfer; -1: none
	// Store is the holder from which the engine that computes loads Loaded of the reused tokens; -1:
	// none.
	Store, Loaded int
	// Reused tokens come from a cache, of which Moved tokens cross the network. The rest, Computed,
	// is prefilled.
	Reused, Moved, Computed int

	Wait, Prefill, Transfer, Hidden, Decode float64
	// Next is the time in which the next turn's engine gets the tokens of this answer.
	Next float64
	// Price is TTFT, Next and the time that other requests wait. Choices are ordered by it.
	Price float64
}

// TTFT is the predicted time to the first token. Hidden is the overlap of prefill and transfer.
func (c *Choice) TTFT() float64 { return c.Wait + c.Prefill + c.Transfer - c.Hidden + c.Decode }

// The weights of a second that others wait. Simulated clusters have the lowest mean TTFT with
// others at 0.25 to 0.5: some requests would have gone elsewhere. With running at 0.1 a simulated
// pair keeps nearly the TTFT that it has without, and half of the time per token. More costs TTFT.
const (
	others  = 0.25 // requests without a first token
	running = 0.1  // answers that the engine is decoding
)

// delay prices what others wait for a prefill. Those that arrive meanwhile wait for half of it, and
// running answers for all of it.
func (e *Engine) delay(prefill float64) float64 {
	return prefill * (running*float64(e.Running) + others*e.Arrivals*prefill/2)
}

// finish sets the price of a choice that computes on engine e.
func (c *Choice) finish(e *Engine) { c.Price = c.TTFT() + c.Next + e.delay(c.Prefill) }

// run is the choice of computing on engine e.
func run(s *State, a *Ask, e int) Choice {
	g := &s.Engines[e]
	hit := min(a.Hits[e], a.Tokens)
	c := Choice{Kind: Run, Engine: e, Source: -1, Store: -1, Reused: hit, Computed: a.Tokens - hit,
		Wait: g.Wait, Prefill: g.prefill(float64(a.Tokens - hit)), Decode: g.step()}
	c.finish(g)
	return c
}

// loaded is the best choice in which engine p loads from a store and computes the rest; ok is false
// if no store has more than the engine.
func loaded(s *State, a *Ask, p int) (best Choice, ok bool) {
	for h := len(s.Engines); h < len(a.Hits); h++ {
		path := s.Network.Path(h, p)
		if path.Rate <= 0 {
			continue
		}
		if c, found := fetch(s, a, h, p, path); found && (!ok || c.Price < best.Price) {
			best, ok = c, true
		}
	}
	return best, ok
}

// pair is the choice in which the engine of choice c computes as c describes, for engine d.
func pair(s *State, a *Ask, c Choice, d int, path Path) Choice {
	p := c.Engine
	from, to := &s.Engines[p], &s.Engines[d]
	c.Kind, c.Engine, c.Source, c.Decode = Pair, d, p, to.last()
	c.Wait += c.Transfer - c.Hidden // of what it loads
	c.Transfer, c.Moved = 0, a.Tokens-min(a.Hits[d], a.Tokens)
	if c.Moved > 0 {
		c.Transfer = path.Time(float64(c.Moved) * a.TokenBytes)
	}
	c.Hidden = s.Overlap * min(c.Prefill, c.Transfer)
	// The decode engine admits the request while the prefill runs.
	if done := c.Wait + c.Prefill + c.Transfer - c.Hidden; to.Wait > done {
		c.Wait += to.Wait - done
	}
	c.Next = s.next(a, p, d)
	c.finish(from)
	return c
}

// next is the time in which engine p gets the answer's tokens, which engine d has, for the next
// turn: it computes them, or loads them from the store that has engine d's pages.
func (s *State) next(a *Ask, p, d int) float64 {
	compute := a.Next / s.Engines[p].PrefillRate
	if h := s.Engines[d].Saves; h > 0 && a.Kinds&Load != 0 {
		if path := s.Network.Path(h, p); path.Rate > 0 {
			return min(compute, a.Next*a.TokenBytes/path.Rate)
		}
	}
	return compute
}

// fetch is the best choice of fetching some tokens of holder h to engine e; ok is false if h has
// nothing that e lacks. Transfer and prefill are linear in the number of tokens, and the price is
// convex: the best number is the largest, or one at which the transfer ends with the queue or with
// the prefill, or at which the price has no slope.
func fetch(s *State, a *Ask, h, e int, path Path) (best Choice, ok bool) {
	own, held := min(a.Hits[e], a.Tokens), min(a.Hits[h], a.Tokens)
	if held <= own {
		return Choice{}, false
	}
	g := &s.Engines[e]
	begin := s.ready(h) + path.Fixed + path.Before/path.Rate // until the first byte
	each := a.TokenBytes / path.Rate                         // seconds per token on the link
	fetchable := held - own
	block := float64(max(1, a.Block))
	best = fetchTokens(s, a, h, e, fetchable, begin+each*float64(fetchable))
	try := func(x float64) {
		// A part of a block is no choice. Both neighbors are.
		low := block * math.Floor(x/block)
		for _, n := range [2]float64{low, low + block} {
			if n >= 1 && n < float64(fetchable) {
				c := fetchTokens(s, a, h, e, int(n), begin+each*n)
				if c.Price < best.Price {
					best = c
				}
			}
		}
	}
	missing := float64(a.Tokens - own)
	try(missing - 1) // an engine computes at least one token
	if each > 0 {
		try((g.Wait - begin) / each)
		// begin + each*x - wait = fixed + (missing - x)/rate
		try((g.Wait - begin + g.PrefillFixed + missing/g.PrefillRate) / (each + 1/g.PrefillRate))
		if g.Arrivals > 0 {
			// The delay of others is quadratic: the slope is 0 at a length of the prefill, with the
			// transfer as the shorter and as the longer part.
			slope := each * g.PrefillRate
			stalls := running * float64(g.Running)
			alone := 1 - s.overlap(h)
			for _, prefill := range [2]float64{slope*alone - 1, slope - alone} {
				try(missing - ((prefill-stalls)/(others*g.Arrivals)-g.PrefillFixed)*g.PrefillRate)
			}
		}
	}
	try(0) // one block is the minimum of a fetch, and the best if the link is slow
	best.from(s, h)
	return best, true
}

// from sets the holder of a fetch.
func (c *Choice) from(s *State, h int) {
	c.Kind, c.Source = Fetch, h
	if h >= len(s.Engines) {
		c.Kind, c.Store, c.Loaded = Load, h, c.Moved
	}
}

// fetchTokens prices a fetch of moved tokens of holder h that ends at a time.
func fetchTokens(s *State, a *Ask, h, e, moved int, ends float64) Choice {
	g := &s.Engines[e]
	reused := min(a.Hits[e], a.Tokens) + moved
	c := Choice{Engine: e, Store: -1, Reused: reused, Moved: moved, Computed: a.Tokens - reused,
		Wait: g.Wait, Prefill: g.prefill(float64(a.Tokens - reused)),
		Transfer: max(0, ends-g.Wait), Decode: g.step()}
	c.Hidden = s.overlap(h) * min(c.Prefill, c.Transfer)
	c.finish(g)
	return c
}
