// SPDX-License-Identifier: Apache-2.0

// Package place is the router's policy: it has what package placement needs for a decision, and
// learns from outcomes.
//
// A prompt is known by the text of its JSON, in chunks, each with the hash of everything before it.
// The index has the chunks of prompts that this router gave to an engine. It is a hint: an engine
// that lost them computes them. The index has two generations; when the newer one is full, the
// older one is forgotten, so that unused chunks leave it.
//
// Invariants: decisions, engines and chunks are bounded. A nil Placer is no policy. One mutex
// guards everything; no call waits for an engine. No goroutines.
package place

import (
	"fmt"
	"hash/maphash"
	"math"
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
	maxEngines    = index.MaxHolders
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

	state      placement.State // of one decision
	hits, more []int
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
	return p, nil
}

// Request is what a decision needs of a request.
type Request struct {
	Text  []byte // the JSON of its prompt or messages
	Scope string // requests of other scopes share no cache: model, adapter, salt
	Alone bool   // it cannot be split between engines
}

// Decision is a choice for one request, until Answered and Ended.
type Decision struct {
	Decode  int // number among the decode engines
	Prefill int // among the prefill engines; -1: the decode engine computes alone
	Tokens  int // estimated
	Choice  placement.Choice
	// Other is the prediction of the best choice whose answer another engine gives; 0: none.
	Other float64

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
	p.mu.Lock()
	defer p.mu.Unlock()
	p.see(up, now)
	p.lookup(d.keys)
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

// lookup sets hits, in tokens.
func (p *Placer) lookup(keys []uint64) {
	p.young.Lookup(keys, p.hits)
	p.old.Lookup(keys, p.more)
	for i := range p.hits {
		p.hits[i] = max(p.hits[i], p.more[i]) * chunkBytes / tokenText
	}
}

// promise adds the prompt to the engines that will have it.
func (p *Placer) promise(d *Decision) {
	if p.young.Blocks()+len(d.keys) > p.most {
		p.forgot += uint64(p.old.Blocks())
		p.old, p.young = p.young, index.NewTable(p.most, len(p.accounts))
	}
	for _, k := range d.keys {
		p.young.Add(k, d.Choice.Engine)
		if d.Choice.Kind == placement.Pair {
			p.young.Add(k, d.Choice.Source)
		}
	}
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
}

// Stats returns them.
func (p *Placer) Stats() Stats {
	p.mu.Lock()
	defer p.mu.Unlock()
	return Stats{p.young.Blocks() + p.old.Blocks(), p.forgot}
}
