// SPDX-License-Identifier: Apache-2.0

// Package place is the router's policy: it has what package placement needs for a decision, and
// learns from outcomes.
//
// A prompt is known by the text of its JSON, in chunks, each with the hash of everything before it.
// The index has the chunks of prompts that this router gave to an engine. It is a hint: an engine
// that lost them computes them. The index has two generations; when the newer one is full, the
// older one is forgotten, so that unused chunks leave it.
//
// An engine may report its cache itself. Then blocks of tokens, in a second index, replace the
// chunks as that engine's hits, if the prompt's tokens are known. Of the chunks, those of requests
// in flight stay: the engine has not reported them yet.
//
// Invariants: decisions, engines, chunks and blocks are bounded. A nil Placer is no policy. One
// mutex guards everything but the second index; no call waits for an engine. No goroutines.
package place

import (
	"fmt"
	"hash/maphash"
	"math"
	"slices"
	"sort"
	"sync"
	"time"

	"github.com/kvspray/kvspray/placement"
	"github.com/kvspray/kvspray/placement/index"
)

// Policy is how a router chooses engines.
type Policy string

// The policies.
const (
	LeastLoaded Policy = "least-loaded" // the fewest requests in flight; no prediction
	Auto        Policy = "auto"         // the lowest predicted time to the first token
	Cache       Policy = "cache"        // the longest hit, then the prediction
	Fetch       Policy = "fetch"        // as Auto, but always a prefill engine
	Local       Policy = "local"        // as Auto, but never a prefill engine
)

// Policies lists all.
func Policies() []Policy { return []Policy{LeastLoaded, Auto, Cache, Fetch, Local} }

// Bounds and assumptions.
const (
	chunkBytes    = 512     // of a prompt's JSON
	tokenText     = 4       // bytes of text per token
	maxChunks     = 1 << 16 // of one prompt: 32 MiB
	generation    = 1 << 20 // chunks of one generation of the index
	maxEngines    = index.MaxHolders / 2
	defaultRate   = 4000.0 // tokens per second
	defaultFixed  = 0.010  // seconds
	defaultLink   = 1e9    // bytes per second
	defaultDelay  = 0.006  // seconds
	defaultKV     = 131072 // bytes per token
	leastObserved = 64     // computed tokens of a prefill that is an outcome
	overlap       = 0.8    // of prefill and transfer, dispatched at once
)

// Names of lines in the calibration file.
const (
	PrefillLine = "prefill"
	LinkLine    = "link"
)

// Config configures a Placer.
type Config struct {
	Policy          Policy
	Prefill, Decode int     // engines
	TokenBytes      float64 // of KV cache; 0: 131072
	Concurrent      bool    // prefill and decode are dispatched at once
	Calibration     *placement.Calibration
	Reports         []bool // engines that report their caches, first those that prefill; nil: none
}

// account is the work of one engine that has no first token yet.
type account struct {
	work     float64   // predicted seconds
	requests int       // of work
	running  int       // requests from the first token on
	progress time.Time // the last time that work began or ended
	learned  placement.Correction
	arrived  placement.Rate
}

// wait is the time until a new request begins.
func (a *account) wait(now time.Time) float64 {
	if a.requests == 0 {
		return 0
	}
	return max(0, a.work-now.Sub(a.progress).Seconds())
}

// Placer decides for requests. Prefill engines have the numbers from 0, decode engines follow.
type Placer struct {
	cfg  Config
	kind placement.Kind
	fit  placement.Fabric // of a prefill
	link placement.Path   // without a learned rate
	seed maphash.Seed

	start time.Time // of the times of rates
	most  int       // chunks of one generation of the index

	mu       sync.Mutex // guards all below
	accounts []account
	paths    *placement.Matrix
	young    *index.Table
	old      *index.Table
	forgot   uint64
	turn     int
	flying   [][]*Decision // for each engine, requests that have not ended

	state      placement.State // of one decision
	hits, more []int

	cache *cache // what engines report; nil: none does
}

// New checks the configuration; LeastLoaded has no Placer.
func New(cfg Config) (*Placer, error) {
	p := &Placer{cfg: cfg, seed: maphash.MakeSeed(), start: time.Now(),
		most: generation,
		kind: placement.Run | placement.Pair,
		fit:  placement.Fabric{Fixed: defaultFixed, Rate: defaultRate},
		link: placement.Path{Fixed: defaultDelay, Rate: defaultLink}}
	switch cfg.Policy {
	case "", LeastLoaded:
		return nil, nil
	case Auto, Cache:
	case Fetch:
		p.kind = placement.Pair
	case Local:
		p.kind = placement.Run
	default:
		return nil, fmt.Errorf("policy %q is not one of %v", cfg.Policy, Policies())
	}
	n := cfg.Prefill + cfg.Decode
	if n > maxEngines {
		return nil, fmt.Errorf("%d engines: a policy takes at most %d", n, maxEngines)
	}
	if p.cfg.TokenBytes == 0 {
		p.cfg.TokenBytes = defaultKV
	}
	if p.cfg.TokenBytes < 0 || math.IsInf(p.cfg.TokenBytes, 0) || math.IsNaN(p.cfg.TokenBytes) {
		return nil, fmt.Errorf("token bytes %v: want a number above 0", p.cfg.TokenBytes)
	}
	if c := cfg.Calibration; c != nil {
		if f, ok := c.Find(PrefillLine); ok {
			p.fit = f
		}
		if f, ok := c.Find(LinkLine); ok {
			p.link = placement.Path{Fixed: f.Fixed, Rate: f.Rate}
		}
	}
	p.accounts = make([]account, n)
	p.paths = placement.NewMatrix(n)
	for from := range cfg.Prefill {
		for to := cfg.Prefill; to < n; to++ {
			p.paths.Set(from, to, p.link)
		}
	}
	p.young, p.old = index.NewTable(p.most, n), index.NewTable(p.most, n)
	p.state = placement.State{Engines: make([]placement.Engine, n), Network: p.paths}
	if cfg.Concurrent {
		p.state.Overlap = overlap
	}
	p.hits, p.more = make([]int, n), make([]int, n)
	p.flying = make([][]*Decision, n)
	if cfg.Reports != nil {
		p.cache = newCache(cfg.Reports)
	}
	return p, nil
}

// Request is what a decision needs of a request.
type Request struct {
	Text  []byte // the JSON of its prompt or messages
	Scope string // requests of other scopes share no cache: model, adapter, salt
	Alone bool   // it cannot be split between engines
	// Tokens are those of the prompt; nil: unknown. About has the engines whose model the request
	// names, of which Tokens then are blocks.
	Tokens []uint32
	About  []bool
}

// Holder takes the reports of an engine; nil: it makes none.
func (p *Placer) Holder(engine int) *Holder {
	if p.cache == nil {
		return nil
	}
	return p.cache.holders[engine]
}

// Decision is a choice for one request, until Answered and Ended.
type Decision struct {
	Decode  int // number among the decode engines
	Prefill int // among the prefill engines; -1: the decode engine computes alone
	Tokens  int // estimated, unless the request has them
	Choice  placement.Choice
	// Other is the prediction of the best choice whose answer another engine gives; 0: none.
	Other float64
	// Reported: the engine that computes reports its cache, and has these tokens on its GPU.
	Reported bool
	Cached   int

	at      time.Time
	compute int     // engine that prefills
	work    float64 // its predicted seconds
	factor  float64 // its correction at the time
	keys    []uint64
	stage   stage
}

type stage uint8

const (
	prefilling stage = iota
	decoding
	over
)

// keys are the hashes of the chunks of a prompt, each with all chunks before it.
func (p *Placer) keys(r *Request) []uint64 {
	n := min(len(r.Text)/chunkBytes, maxChunks)
	keys := make([]uint64, n)
	var h maphash.Hash
	h.SetSeed(p.seed)
	_, _ = h.WriteString(r.Scope) // never fails
	for i := range keys {
		_, _ = h.Write(r.Text[i*chunkBytes : (i+1)*chunkBytes])
		keys[i] = h.Sum64()
	}
	return keys
}

// Decide chooses engines and takes the request into their accounts. up has a value for each prefill
// engine, then for each decode engine. false: the policy has no choice, for instance because no
// prefill engine is up.
func (p *Placer) Decide(r *Request, up []bool, now time.Time) (*Decision, bool) {
	d := &Decision{keys: p.keys(r), at: now, Tokens: max(1, len(r.Text)/tokenText)}
	chunk := float64(chunkBytes) / tokenText // tokens
	var reported []hit
	if len(r.Tokens) > 0 {
		d.Tokens = len(r.Tokens)
		chunk = chunkBytes * float64(d.Tokens) / float64(max(1, len(r.Text)))
		if p.cache != nil && len(r.About) == len(p.accounts) {
			reported = p.cache.lookup(r.Tokens, r.About)
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.see(up, now)
	p.lookup(d.keys, chunk, reported)
	p.turn++
	a := placement.Ask{Tokens: d.Tokens, TokenBytes: p.cfg.TokenBytes, Hits: p.hits, Kinds: p.kind,
		First: p.turn}
	if r.Alone {
		a.Kinds = placement.Run
	}
	c, ok := p.choose(&a)
	if !ok {
		return nil, false
	}
	d.Choice, d.Decode, d.Prefill, d.compute = c, c.Engine-p.cfg.Prefill, -1, c.Engine
	if c.Kind == placement.Pair {
		d.Prefill, d.compute = c.Source, c.Source
	}
	e := p.state.Engines[c.Engine].Role
	p.state.Engines[c.Engine].Role = 0
	if other, ok := placement.Decide(&p.state, &a); ok {
		d.Other = other.TTFT()
	}
	p.state.Engines[c.Engine].Role = e

	if reported != nil {
		d.Reported, d.Cached = reported[d.compute].known, reported[d.compute].gpu
	}
	acc := &p.accounts[d.compute]
	d.work, d.factor = c.Prefill, acc.learned.Factor()
	if acc.requests == 0 {
		acc.progress, acc.work = now, 0
	}
	acc.work, acc.requests = acc.work+d.work, acc.requests+1
	acc.arrived.Add(now.Sub(p.start).Seconds())
	p.promise(d)
	return d, true
}

// choose applies the policy.
func (p *Placer) choose(a *placement.Ask) (placement.Choice, bool) {
	if p.cfg.Policy != Cache {
		return placement.Decide(&p.state, a)
	}
	list := placement.Rank(&p.state, a, nil)
	best := -1
	for i := range list {
		if best < 0 || list[i].Reused > list[best].Reused {
			best = i
		}
	}
	if best < 0 {
		return placement.Choice{}, false
	}
	return list[best], true
}

// see writes the state of all engines.
func (p *Placer) see(up []bool, now time.Time) {
	for i := range p.accounts {
		acc, e := &p.accounts[i], &p.state.Engines[i]
		*e = placement.Engine{}
		if !up[i] {
			continue
		}
		f := acc.learned.Factor()
		*e = placement.Engine{Role: placement.Prefill, Wait: acc.wait(now),
			PrefillFixed: f * p.fit.Fixed, PrefillRate: p.fit.Rate / f, Running: acc.running,
			Arrivals: acc.arrived.At(now.Sub(p.start).Seconds())}
		if i >= p.cfg.Prefill {
			e.Role = placement.Both
		}
	}
}

// lookup sets hits, in tokens. A chunk has some tokens.
func (p *Placer) lookup(keys []uint64, chunk float64, reported []hit) {
	p.young.Lookup(keys, p.hits)
	p.old.Lookup(keys, p.more)
	for i := range p.hits {
		n := max(p.hits[i], p.more[i])
		if reported != nil && reported[i].known {
			n = p.inFlight(keys, i)
		}
		p.hits[i] = int(float64(n) * chunk)
		if reported != nil && reported[i].known {
			p.hits[i] = max(p.hits[i], reported[i].any)
		}
	}
}

// inFlight returns how many chunks of a prompt an engine has in flight.
func (p *Placer) inFlight(keys []uint64, engine int) int {
	most := 0
	for _, d := range p.flying[engine] {
		n := min(len(keys), len(d.keys))
		// A key stands for all chunks up to it: those that agree are first.
		most = max(most, sort.Search(n, func(i int) bool { return keys[i] != d.keys[i] }))
	}
	return most
}

// promise adds the prompt to the engines that will have it.
func (p *Placer) promise(d *Decision) {
	if p.young.Blocks()+len(d.keys) > p.most {
		p.forgot += uint64(p.old.Blocks())
		p.old, p.young = p.young, index.NewTable(p.most, len(p.accounts))
	}
	for _, e := range d.engines() {
		for _, k := range d.keys {
			p.young.Add(k, e)
		}
		p.flying[e] = append(p.flying[e], d)
	}
}

// engines are those that will have the prompt.
func (d *Decision) engines() []int {
	if d.Choice.Kind == placement.Pair {
		return []int{d.Choice.Engine, d.Choice.Source}
	}
	return []int{d.Choice.Engine}
}

// Prefilled takes the end of a prefill engine's part.
func (p *Placer) Prefilled(d *Decision, ok bool, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if d.stage != prefilling || d.Prefill < 0 {
		return
	}
	p.computed(d, ok, now)
}

// computed ends the prefill of a decision. The outcome of one that computed little depends on other
// things, and that of a failed one on none.
func (p *Placer) computed(d *Decision, ok bool, now time.Time) {
	d.stage = decoding
	acc := &p.accounts[d.compute]
	acc.work, acc.requests, acc.progress = max(0, acc.work-d.work), acc.requests-1, now
	p.accounts[d.Choice.Engine].running++
	if ok && d.Choice.Computed >= leastObserved {
		acc.learned.Observe((d.Choice.Wait+d.Choice.Prefill)/d.factor, now.Sub(d.at).Seconds())
	}
}

// Answered takes the first byte of the decode engine's answer. measured: it shows the first token,
// as that of a streamed answer does.
func (p *Placer) Answered(d *Decision, measured bool, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if d.stage == prefilling {
		p.computed(d, measured && d.Prefill < 0, now)
	}
}

// Ended takes the end of a request, whatever became of it.
func (p *Placer) Ended(d *Decision, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if d.stage == prefilling {
		p.computed(d, false, now)
	}
	if d.stage == decoding {
		p.accounts[d.Choice.Engine].running--
		for _, e := range d.engines() {
			p.flying[e] = slices.DeleteFunc(p.flying[e], func(x *Decision) bool { return x == d })
		}
	}
	d.stage = over
}

// Lost takes the loss of an engine: its cache is gone.
func (p *Placer) Lost(engine int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.young.RemoveAll(engine)
	p.old.RemoveAll(engine)
}

// Learned takes the path from a prefill engine to a decode engine, by their numbers.
func (p *Placer) Learned(prefill, decode int, path placement.Path) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if path.Rate <= 0 {
		path = p.link
	}
	p.paths.Set(prefill, p.cfg.Prefill+decode, path)
}

// Stats are for metrics.
type Stats struct {
	Blocks int    // in the index
	Forgot uint64 // that left it
	Bytes  int    // of the memory of reported blocks, about
}

// Stats returns them.
func (p *Placer) Stats() Stats {
	p.mu.Lock()
	s := Stats{Blocks: p.young.Blocks() + p.old.Blocks(), Forgot: p.forgot}
	p.mu.Unlock()
	if p.cache != nil {
		s.Bytes = p.cache.bytes()
	}
	return s
}
