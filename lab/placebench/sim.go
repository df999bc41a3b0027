package placebench

import (
	"container/heap"
	"math"
	"math/rand/v2"

	"github.com/kvspray/kvspray/placement"
	"github.com/kvspray/kvspray/placement/index"
)

// What all simulated engines have.
const (
	prefillFixed = 0.010 // seconds
	stepSeconds  = 0.020 // a decode step alone
	stepEach     = 100e-6
	spread       = 0.15 // of the engines' rates around the nominal one, sigma
	noise        = 0.10 // of one prefill, sigma
	readySeconds = 0.001
	repair       = 30.0 // seconds that a failed node is away
)

// moves are the choices between engines that all prefill and decode. A pair is never better there:
// the queue of its prefill engine is as long as for a run.
const moves = placement.Run | placement.Fetch | placement.Load

// options of one run.
type options struct {
	Shape      string  `json:"shape"`
	Engines    int     `json:"engines"`
	Gbit       float64 `json:"gbit_per_second"`
	Load       float64 `json:"load"` // tokens of prompts over what all engines prefill without a cache
	Seconds    float64 `json:"seconds"`
	Rate       float64 `json:"prefill_tokens_per_second"`
	TokenBytes float64 `json:"token_bytes"`
	CacheSize  int     `json:"cache_tokens"`
	Delay      float64 `json:"transfer_fixed_seconds"`
	Failures   float64 `json:"failures_per_hour"`     // of the whole cluster
	StoreGbit  float64 `json:"store_gbit_per_second"` // of the store's link; 0: there is no store
	StoreReady float64 `json:"store_ready_seconds"`
	StoreSize  int     `json:"store_tokens"`
	Seed       uint64  `json:"seed"`
}

// job is one request in the cluster.
type job struct {
	*request
	choice  placement.Choice
	work    float64 // believed seconds of its prefill at the nominal rate
	loading *flow
	first   float64 // time of the first token
	stalls  float64 // of the node, of which this job's answer has waited for all
}

type node struct {
	up      bool
	slow    float64 // true seconds per believed second, without the noise
	learned placement.Correction
	cache   *cache
	in, out port

	queue   []*job
	queued  float64 // work of queue
	busy    *job
	since   float64 // busy began
	until   float64 // and ends
	life    int     // grows with each failure, so that events of a former life are ignored
	running map[*job]struct{}
	stalls  float64 // seconds of all prefills: running answers wait for them
	arrived placement.Rate
}

type event struct {
	at float64
	n  int // order of events at one time
	do func()
}

type agenda []event

func (a agenda) Len() int { return len(a) }
func (a agenda) Less(i, j int) bool {
	return a[i].at < a[j].at || a[i].at == a[j].at && a[i].n < a[j].n
}
func (a agenda) Swap(i, j int) { a[i], a[j] = a[j], a[i] }
func (a *agenda) Push(x any)   { *a = append(*a, x.(event)) }
func (a *agenda) Pop() any {
	last := (*a)[len(*a)-1]
	*a = (*a)[:len(*a)-1]
	return last
}

// sim is one cluster with one policy.
type sim struct {
	o        options
	r        *rand.Rand
	now      float64
	agenda   agenda
	events   int
	nodes    []*node
	store    *cache // of all nodes' pages; nil: none
	storeOut port
	held     *index.Table // pages in nodes, and in the store
	promised *index.Table // pages that prefills in queues will make
	policy   policy
	turn     int

	hits, soon   []int
	state, truth placement.State
	result       result
}

func newSim(o options, p policy) *sim {
	const pages = 1 << 26
	s := &sim{o: o, r: rand.New(rand.NewPCG(o.Seed, 2)), policy: p,
		held: index.NewTable(pages, o.Engines+1), promised: index.NewTable(pages, o.Engines),
		hits: make([]int, o.Engines), soon: make([]int, o.Engines)}
	for i := range o.Engines {
		rate := o.Gbit * 1e9 / 8
		s.nodes = append(s.nodes, &node{up: true, slow: math.Exp(spread * s.r.NormFloat64()),
			cache: newCache(i, max(1, o.CacheSize/pageTokens), s.held), in: port{rate: rate},
			out: port{rate: rate}, running: map[*job]struct{}{}})
	}
	s.state = placement.State{Engines: make([]placement.Engine, o.Engines), Network: s}
	s.truth = placement.State{Engines: make([]placement.Engine, o.Engines), Network: s}
	if o.StoreGbit > 0 {
		s.store = newCache(o.Engines, max(1, o.StoreSize/pageTokens), s.held)
		s.storeOut.rate = o.StoreGbit * 1e9 / 8
		s.hits = append(s.hits, 0)
		s.state.Stores = []placement.Store{{Ready: o.StoreReady}}
		s.truth.Stores = s.state.Stores
	}
	return s
}

func (s *sim) after(d float64, do func()) {
	s.events++
	heap.Push(&s.agenda, event{s.now + d, s.events, do})
}

// run serves a trace until every request has its first token.
func (s *sim) run(trace []request) *result {
	for i := range trace {
		s.after(trace[i].at, func() { s.dispatch(&job{request: &trace[i]}) })
	}
	if s.o.Failures > 0 {
		for at := s.r.ExpFloat64() * 3600 / s.o.Failures; at < s.o.Seconds; {
			s.after(at, func() { s.fail(s.r.IntN(len(s.nodes))) })
			at += s.r.ExpFloat64() * 3600 / s.o.Failures
		}
	}
	for len(s.agenda) > 0 {
		e := heap.Pop(&s.agenda).(event)
		s.now = e.at
		e.do()
	}
	s.result.requests = len(trace)
	return &s.result
}

// see writes the router's view, and the truth, of all engines.
func (s *sim) see() {
	for i, n := range s.nodes {
		b, t := &s.state.Engines[i], &s.truth.Engines[i]
		*b = placement.Engine{}
		if n.up {
			*b = placement.Engine{Role: placement.Both, PrefillFixed: prefillFixed, Step: stepSeconds,
				StepEach: stepEach, Running: len(n.running), Ready: readySeconds,
				Arrivals: n.arrived.At(s.now)}
		}
		*t = *b
		f := n.learned.Factor()
		b.PrefillRate, t.PrefillRate = s.o.Rate/f, s.o.Rate/n.slow
		b.Wait, t.Wait = f*n.queued, n.slow*n.queued
		if n.busy != nil {
			b.Wait += max(0, f*n.busy.work-(s.now-n.since))
			t.Wait += n.until - s.now
		}
		if s.soon[i] > s.hits[i] { // a prefill in the queue makes them
			s.hits[i] = s.soon[i]
			b.Ready, t.Ready = b.Ready+b.Wait, t.Ready+t.Wait
		}
		s.hits[i] *= pageTokens
	}
	if s.store != nil {
		s.hits[len(s.nodes)] *= pageTokens
	}
}

// dispatch gives a request to engines.
func (s *sim) dispatch(j *job) {
	s.held.Lookup(j.pages, s.hits)
	s.promised.Lookup(j.pages, s.soon)
	s.see()
	s.turn++
	a := placement.Ask{Tokens: j.tokens(), TokenBytes: s.o.TokenBytes, Hits: s.hits,
		Kinds: moves, Block: pageTokens, First: s.turn}
	c, ok := s.policy(s, &a)
	if !ok {
		s.after(1, func() { s.dispatch(j) }) // no node is up
		return
	}
	a.Kinds = moves
	if best, ok := placement.Decide(&s.truth, &a); ok {
		made := placement.Evaluate(&s.truth, &a, c)
		s.result.regret += max(0, made.TTFT()-best.TTFT())
		s.result.decisions++
	}
	j.choice = c
	at := c.Engine
	n := s.nodes[at]
	j.work = prefillFixed + float64(max(1, j.tokens()-s.hits[at]))/s.o.Rate
	if c.Kind == placement.Fetch || c.Kind == placement.Load {
		have := s.hits[at]/pageTokens + c.Moved/pageTokens
		j.work = prefillFixed + float64(max(1, j.tokens()-have*pageTokens))/s.o.Rate
		wait := s.o.StoreReady + s.o.Delay
		if c.Kind == placement.Fetch {
			wait = s.state.Engines[c.Source].Ready + s.o.Delay
		}
		s.fetch(j, n, j.pages[:min(have, len(j.pages))], wait)
	}
	for _, p := range j.pages {
		s.promised.Add(p, at)
	}
	n.arrived.Add(s.now)
	n.queue, n.queued = append(n.queue, j), n.queued+j.work
	s.serve(n)
}

// fetch moves pages to a node; the job is loading until they are there or the source is lost.
func (s *sim) fetch(j *job, n *node, pages []uint64, wait float64) {
	f := &flow{from: &s.storeOut, to: &n.in, source: j.choice.Source,
		left: float64(j.choice.Moved) * s.o.TokenBytes}
	sourceLife := func() int { return 0 }
	if f.source < len(s.nodes) {
		f.from = &s.nodes[f.source].out
		sourceLife = func() int { return s.nodes[f.source].life }
	}
	j.loading = f
	life, lived := n.life, sourceLife()
	f.done = func(ok bool) {
		j.loading = nil
		if n.life != life {
			return
		}
		if ok {
			n.cache.use(pages)
			s.result.moved += float64(j.choice.Moved) * s.o.TokenBytes
		}
		s.serve(n)
	}
	s.after(wait, func() {
		if sourceLife() != lived || n.life != life {
			f.done(false)
			return
		}
		s.start(f)
	})
}

// serve begins the next prefill of a node.
func (s *sim) serve(n *node) {
	if n.busy != nil || !n.up {
		return
	}
	for i, j := range n.queue {
		if j.loading != nil {
			continue
		}
		n.queue = append(n.queue[:i], n.queue[i+1:]...)
		n.queued = max(0, n.queued-j.work)
		hit := 0
		for hit < len(j.pages) && n.cache.has(j.pages[hit]) {
			hit++
		}
		computed := max(1, j.tokens()-hit*pageTokens)
		j.work = prefillFixed + float64(computed)/s.o.Rate
		n.busy, n.since = j, s.now
		n.until = s.now + j.work*n.slow*math.Exp(noise*s.r.NormFloat64())
		s.result.computed += float64(computed)
		life := n.life
		s.after(n.until-s.now, func() {
			if n.life == life {
				s.prefilled(n, j)
			}
		})
		return
	}
}

// prefilled ends a prefill.
func (s *sim) prefilled(n *node, j *job) {
	n.busy = nil
	n.learned.Observe(j.work, s.now-n.since)
	n.stalls += s.now - n.since
	n.cache.use(j.pages)
	if s.store != nil {
		s.store.use(j.pages)
	}
	for _, p := range j.pages {
		s.promised.Remove(p, n.cache.node)
	}
	s.first(n, j)
	s.serve(n)
}

// first gives a request its first token, and decodes the others.
func (s *sim) first(n *node, j *job) {
	step := stepSeconds + stepEach*float64(len(n.running))
	s.result.ttft = append(s.result.ttft, s.now+step-j.at)
	if s.now <= s.o.Seconds {
		s.result.inTime++
	}
	n.running[j] = struct{}{}
	j.first, j.stalls = s.now+step, n.stalls
	s.after(step*float64(j.output), func() { s.decoded(n, j) })
}

// decoded ends an answer, once it has waited for the prefills that came between its tokens.
func (s *sim) decoded(n *node, j *job) {
	if _, ok := n.running[j]; !ok {
		return // its node has failed
	}
	if wait := n.stalls - j.stalls; wait > 0 {
		j.stalls = n.stalls
		s.after(wait, func() { s.decoded(n, j) })
		return
	}
	delete(n.running, j)
	s.result.tpot += (s.now - j.first) / float64(j.output)
	s.result.answers++
}

// fail takes a node away for a while.
func (s *sim) fail(i int) {
	n := s.nodes[i]
	if !n.up {
		return
	}
	n.up = false
	n.life++
	lost := n.queue
	if n.busy != nil {
		lost = append(lost, n.busy)
	}
	// Answers that had begun are lost to their clients: no router can give them twice.
	n.queue, n.queued, n.busy = nil, 0, nil
	clear(n.running)
	n.cache.drop()
	s.promised.RemoveAll(i)
	for _, p := range []*port{&n.out, &n.in} {
		for len(p.flows) > 0 {
			s.end(p.flows[0], false)
		}
	}
	for _, j := range lost {
		s.again(j)
	}
	s.after(repair, func() { n.up = true })
}

// again sends a request to the router after its engine was lost.
func (s *sim) again(j *job) {
	s.result.again++
	s.after(0, func() { s.dispatch(&job{request: j.request}) })
}
