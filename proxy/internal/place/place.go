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
	ByLoad Policy = "least-loaded" // the fewest requests in flight; no prediction
	Auto   Policy = "auto"         // the lowest predicted time to the first token
	Cache  Policy = "cache"        // the longest hit, then the prediction
	Fetch  Policy = "fetch"        // as Auto, but always a prefill engine
	Local  Policy = "local"        // as Auto, but never a prefill engine
)

// Policies lists all.
func Policies() []Policy { return []Policy{ByLoad, Auto, Cache, Fetch, Local} }

// Bounds and assumptions.
const (
	chunkBytes   = 512     // of a prompt's JSON
	tokenText    = 4       // bytes of text per token
	maxChunks    = 1 << 16 // of one prompt: 32 MiB
	generation   = 1 << 20 // chunks of one generation of the index
	maxEngines   = index.MaxHolders / 2
	defaultRate  = 4000.0 // tokens per second
	defaultFixed = 0.010  // seconds
	defaultLink  = 1e9    // bytes per second
	defaultDelay = 0.006  // seconds
	defaultKV    = 131072 // bytes per token
	minObserved  = 64     // computed tokens of a prefill that is an outcome
	overlap      = 0.8    // of prefill and transfer, dispatched at once

	// DefaultReplicate is how many requests in flight at each engine that has a prefix make another
	// engine get it.
	DefaultReplicate = 16
	minHot           = 512 // tokens of a prefix that is worth another copy
)

// Names of lines in the calibration file.
const (
	PrefillLine = "prefill"
	LinkLine    = "link"
)

// Config configures a Placer.
type Config struct {
	Policy      Policy
	TokenBytes  float64 // of KV cache; 0: 131072
	Concurrent  bool    // prefill and decode are dispatched at once
	Calibration *placement.Calibration
	Replicate   int // 0: DefaultReplicate; negative: never
}

// account is the work of one engine that has no first token yet.
type account struct {
	used     bool        // an engine has it
	prefills bool        // its engine sends caches to others
	queue    []*Decision // the oldest one is computed
	work     float64     // predicted seconds of queue
	running  int         // requests from the first token on
	progress time.Time   // when the oldest one became that
	learned  placement.Correction
	arrived  placement.Rate
}

// wait is the time until a new request begins. One that takes longer than predicted does not make
// those behind it faster.
func (a *account) wait(now time.Time) float64 {
	if len(a.queue) == 0 {
		return 0
	}
	return max(0, a.work-min(a.queue[0].work, now.Sub(a.progress).Seconds()))
}

// Placer decides for requests. Add numbers the engines.
type Placer struct {
	cfg  Config
	kind placement.Kind
	fit  placement.Fabric // of a prefill
	link placement.Path   // without a learned rate
	seed maphash.Seed

	start time.Time // of the times of rates
	size  int       // of one generation of the index, in chunks

	mu       sync.Mutex // guards all below
	accounts []account
	paths    *placement.Matrix
	young    *index.Table
	old      *index.Table
	forgot   uint64
	turn     int
	flying   [][]*Decision // for each engine, requests that have not ended

	state  placement.State // of one decision
	hits   []int           // of each engine, then each store
	chunks [2][]int        // holders' hits in both generations
	at     []tier          // of each store's pages

	loads  [tiers]placement.Path // from a store without a measurement
	stores []store               // of each engine's node
	home   []int                 // of each engine: the number of its store; -1: none
	homes  []int                 // of each store: its first engine
	turns  turns
	answer float64 // tokens of a mean answer

	cache *cache // what engines report
}

// New checks the configuration; ByLoad has no Placer.
func New(cfg Config) (*Placer, error) {
	p := &Placer{cfg: cfg, seed: maphash.MakeSeed(), start: time.Now(),
		size: generation, answer: firstAnswer, loads: defaultLoads,
		kind: placement.Run | placement.Pair,
		fit:  placement.Fabric{Fixed: defaultFixed, Rate: defaultRate},
		link: placement.Path{Fixed: defaultDelay, Rate: defaultLink}}
	switch cfg.Policy {
	case "", ByLoad:
		return nil, nil
	case Auto, Cache:
	case Fetch:
		p.kind = placement.Pair
	case Local:
		p.kind = placement.Run
	default:
		return nil, fmt.Errorf("policy %q is not one of %v", cfg.Policy, Policies())
	}
	if p.cfg.Replicate == 0 {
		p.cfg.Replicate = DefaultReplicate
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
		for t := range tiers {
			if f, ok := c.Find(StoreLine + t.String()); ok {
				p.loads[t] = placement.Path{Fixed: f.Fixed, Rate: f.Rate}
			}
		}
	}
	p.young, p.old = index.NewTable(p.size, 0), index.NewTable(p.size, 0)
	if cfg.Concurrent {
		p.state.Overlap = overlap
	}
	p.growLocked(0)
	p.cache = newCache()
	return p, nil
}

// Add takes new engines, and returns their numbers. prefills has for each whether it sends caches
// to other engines.
func (p *Placer) Add(prefills ...bool) ([]int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var list []int
	for i := range p.accounts {
		a := &p.accounts[i]
		// A request may still be in flight at the engine that had this number before.
		if !a.used && len(a.queue)+a.running+len(p.flying[i]) == 0 && len(list) < len(prefills) {
			list = append(list, i)
			p.forgetLocked(i)
			p.forgetStoreLocked(i)
		}
	}
	n := len(p.accounts) + len(prefills) - len(list)
	if n > maxEngines {
		return nil, fmt.Errorf("%d engines: a policy takes at most %d", n, maxEngines)
	}
	for i := len(p.accounts); i < n; i++ {
		list = append(list, i)
	}
	p.growLocked(n)
	for i, e := range list {
		p.accounts[e] = account{used: true, prefills: prefills[i]}
		p.stores[e] = store{}
	}
	p.homesLocked()
	for _, e := range list {
		for i := range p.accounts {
			p.setPathLocked(e, i, p.link)
			p.setPathLocked(i, e, p.link)
		}
	}
	return list, nil
}

// Remove takes the end of an engine. Requests in flight there still end as those of others. The
// holder's feed has ended.
func (p *Placer) Remove(engine int) {
	p.cache.remove(engine)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.accounts[engine].used = false
	p.homesLocked()
}

// growLocked makes places for n engines.
func (p *Placer) growLocked(n int) {
	old, paths := len(p.accounts), placement.NewMatrix(n)
	for from := range old {
		for to := range old {
			paths.Set(from, to, p.paths.Path(from, to))
		}
	}
	p.paths, p.state.Network = paths, network{p}
	p.accounts = append(p.accounts, make([]account, n-old)...)
	p.flying = append(p.flying, make([][]*Decision, n-old)...)
	p.stores = append(p.stores, make([]store, n-old)...)
	p.state.Engines, p.home = make([]placement.Engine, n), make([]int, n)
	for i := range p.chunks {
		p.chunks[i] = make([]int, 2*n)
	}
	p.young.Grow(2 * n)
	p.old.Grow(2 * n)
	p.homesLocked()
}

// setPathLocked sets a path between two engines; that from one that sends nothing has no rate.
func (p *Placer) setPathLocked(from, to int, path placement.Path) {
	if !p.accounts[from].prefills {
		path = placement.Path{}
	}
	p.paths.Set(from, to, path)
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
	// Of a conversation: the end of its last message, in bytes of Text; 0: it is none.
	End       int
	Answers   Answers
	MaxAnswer int  // tokens; 0: unknown
	Continues bool // the client has hinted at a next turn
	// Ahead: the prompt is wanted in the cache of the engine that will compute the next turn's.
	Ahead bool
}

// Holder takes the reports of an engine.
func (p *Placer) Holder(engine int) *Holder { return p.cache.holder(engine) }

// Decision is a choice for one request, until Answered and Ended.
type Decision struct {
	Decode  int
	Prefill int // -1: the decode engine computes alone
	Tokens  int // estimated, unless the request has them
	Choice  placement.Choice
	// Other is the prediction of the best choice whose answer another engine gives; 0: none.
	Other float64
	// Reported: the engine that computes reports its cache, and has these tokens on its GPU.
	Reported bool
	Cached   int
	// Replica: the decode engine gets a copy of Hot tokens, for which Askers requests are in flight at
	// an engine that has them.
	Replica     bool
	Hot, Askers int
	// Load is how many tokens the engine that computes may have without computing them, from its cache
	// or its store; -1: all that there are.
	Load int
	Tier string // of the store that it loads from; empty: it does not

	at      time.Time
	compute int     // engine that prefills
	work    float64 // its predicted seconds
	factor  float64 // its correction at the time
	keys    []uint64
	end     int // of keys: those of the prompt up to its last message; 0: it is no conversation
	stage   stage
	arrived bool // the decode engine answers
	ok      bool // it has answered
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

// Decide chooses engines and takes the request into their accounts. roles has what each engine can
// do for it: an engine that decodes can always prefill for itself. false: the policy has no choice,
// for instance because no prefill engine is up.
func (p *Placer) Decide(r *Request, roles []placement.Role, now time.Time) (*Decision, bool) {
	return p.decide(r, p.hash(r), roles, now)
}

// hashes are those of a prompt's chunks, and of its blocks for each block size.
type hashes struct {
	chunks []uint64
	blocks []blockKeys
}

func (p *Placer) hash(r *Request) hashes {
	h := hashes{chunks: p.keys(r)}
	if len(r.Tokens) > 0 && r.About != nil {
		h.blocks = p.cache.keys(r.Tokens, r.About)
	}
	return h
}

func (p *Placer) decide(r *Request, h hashes, roles []placement.Role, now time.Time) (*Decision,
	bool) {
	d := &Decision{keys: h.chunks, at: now, Tokens: max(1, len(r.Text)/tokenText), Load: -1}
	d.end = min(r.End/chunkBytes, len(d.keys))
	chunk := float64(chunkBytes) / tokenText // tokens
	var reported []hit
	if len(r.Tokens) > 0 {
		d.Tokens = len(r.Tokens)
		chunk = chunkBytes * float64(d.Tokens) / float64(max(1, len(r.Text)))
		if h.blocks != nil {
			reported = p.cache.find(h.blocks)
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if r.Ahead {
		roles = computing(roles)
	}
	p.see(roles, now)
	p.lookup(r, d.keys, chunk, reported, now)
	p.turn++
	a := placement.Ask{Tokens: d.Tokens, TokenBytes: p.cfg.TokenBytes, Hits: p.hits, Kinds: p.kind,
		First: p.turn, Next: p.next(r), Block: max(1, int(chunk))}
	if r.Alone || r.Ahead {
		a.Kinds = placement.Run
	}
	if len(p.homes) > 0 {
		a.Kinds |= placement.Load
	}
	c, ok := p.choose(&a)
	if !ok {
		return nil, false
	}
	if copied, ok := p.replicate(d, &a, c, chunk, roles); ok {
		c = copied
	}
	d.Choice, d.Decode, d.Prefill, d.compute = c, c.Engine, -1, c.Engine
	if c.Kind == placement.Pair {
		d.Prefill, d.compute = c.Source, c.Source
	}
	p.loading(d, int(math.Ceil(chunk)))
	e := p.state.Engines[c.Engine].Role
	p.state.Engines[c.Engine].Role = 0
	if other, ok := placement.Decide(&p.state, &a); ok {
		d.Other = other.TTFT()
	}
	p.state.Engines[c.Engine].Role = e

	if reported != nil {
		x := hitOf(reported, d.compute)
		d.Reported, d.Cached = x.known, x.gpu
	}
	acc := &p.accounts[d.compute]
	d.work, d.factor = c.Prefill, acc.learned.Factor()
	if len(acc.queue) == 0 {
		acc.progress, acc.work = now, 0
	}
	acc.work, acc.queue = acc.work+d.work, append(acc.queue, d)
	acc.arrived.Add(now.Sub(p.start).Seconds())
	p.promise(d)
	return d, true
}

// computing has the engines that compute the prompts of pairs; all, if there is none.
func computing(roles []placement.Role) []placement.Role {
	if !slices.Contains(roles, placement.Prefill) {
		return roles
	}
	list := make([]placement.Role, len(roles))
	for i, role := range roles {
		if role == placement.Prefill {
			list[i] = placement.Both
		}
	}
	return list
}

// loading sets what the engine that computes may load. Without a bound its connector loads all that
// the store has, however long that takes.
func (p *Placer) loading(d *Decision, chunk int) {
	n := len(p.accounts)
	if s := d.Choice.Store; s >= 0 {
		at := p.at[s-n]
		if p.home[d.compute] != s-n && at != object {
			at = peer
		}
		d.Tier = at.String()
	}
	for s := range p.homes {
		if p.hits[n+s] > d.Choice.Reused+chunk && (network{p}).Path(n+s, d.compute).Rate > 0 {
			d.Load = d.Choice.Reused
		}
	}
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
func (p *Placer) see(roles []placement.Role, now time.Time) {
	clear(p.state.Engines)
	for i, role := range roles[:min(len(roles), len(p.accounts))] {
		acc := &p.accounts[i]
		if role == 0 || !acc.used {
			continue
		}
		f := acc.learned.Factor()
		p.state.Engines[i] = placement.Engine{Role: role, Wait: acc.wait(now),
			PrefillFixed: f * p.fit.Fixed, PrefillRate: p.fit.Rate / f, Running: acc.running,
			Arrivals: acc.arrived.At(now.Sub(p.start).Seconds())}
		if s := p.home[i]; s >= 0 {
			p.state.Engines[i].Saves = len(p.accounts) + s
		}
	}
}

// lookup sets hits, in tokens. A chunk has some tokens.
func (p *Placer) lookup(r *Request, keys []uint64, chunk float64, reported []hit, now time.Time) {
	chunks := p.chunks[0]
	p.young.Lookup(keys, chunks)
	p.old.Lookup(keys, p.chunks[1])
	for i, n := range p.chunks[1] {
		chunks[i] = max(chunks[i], n)
	}
	t, age, ok := p.goesOn(r, keys, now)
	p.stored(chunks, chunk, reported, age)
	for i := range p.accounts {
		n := chunks[engineOf(i)]
		x := hitOf(reported, i)
		if x.known {
			n = p.inFlight(keys, i)
		}
		has := x.any
		if p.home[i] >= 0 {
			has = x.gpu // the rest is in the store
		}
		p.hits[i] = max(int(float64(n)*chunk), has)
	}
	if ok && reported == nil {
		p.answered(r, t, chunk)
	}
}

// inFlight returns how many chunks of a prompt an engine has in flight.
func (p *Placer) inFlight(keys []uint64, engine int) int {
	longest := 0
	for _, d := range p.flying[engine] {
		if !d.moves(engine) {
			longest = max(longest, shared(keys, d))
		}
	}
	return longest
}

// shared returns how many chunks of a prompt a request in flight has.
func shared(keys []uint64, d *Decision) int {
	n := min(len(keys), len(d.keys))
	// A key stands for all chunks up to it: those that agree are first.
	return sort.Search(n, func(i int) bool { return keys[i] != d.keys[i] })
}

// askers counts the requests in flight at an engine that have at least a number of chunks of a
// prompt.
func (p *Placer) askers(keys []uint64, engine, chunks int) int {
	n := 0
	for _, d := range p.flying[engine] {
		if len(d.keys) >= chunks && d.keys[chunks-1] == keys[chunks-1] {
			n++
		}
	}
	return n
}

// hot returns the longest prefix of a prompt, in chunks, that enough requests in flight at an
// engine have; 0: none is that long.
func (p *Placer) hot(keys []uint64, engine, shortest int) int {
	if shortest > len(keys) || p.askers(keys, engine, shortest) < p.cfg.Replicate {
		return 0
	}
	all := make([]int, 0, len(p.flying[engine]))
	for _, d := range p.flying[engine] {
		all = append(all, shared(keys, d))
	}
	slices.Sort(all)
	return all[len(all)-p.cfg.Replicate]
}

// replicate replaces a choice if enough requests in flight at its engine have a prefix of the
// prompt. The request goes to an engine that has the prefix and fewer askers. If there is none,
// another engine gets a copy with this request, and until the copy is there no other is made.
// A copy ends when its engine evicts it. The request waits at most as long as an idle engine
// computes.
func (p *Placer) replicate(d *Decision, a *placement.Ask, c placement.Choice,
	chunk float64, roles []placement.Role) (placement.Choice, bool) {
	if p.cfg.Replicate < 0 {
		return c, false
	}
	chunks := p.hot(d.keys, c.Engine, max(1, int(math.Ceil(minHot/chunk))))
	// Reported hits are whole blocks, and may end a little before the last shared chunk.
	hot := int(float64(chunks) * chunk)
	near := max(hot-int(2*chunk), hot/2)
	if chunks == 0 || p.hits[c.Engine] < near {
		return c, false
	}
	const lacks, crowded, free = 0, 1, 2
	engines := p.state.Engines
	is, want := make([]uint8, len(engines)), uint8(lacks)
	for i := range engines {
		switch {
		case engines[i].Role&placement.Decode == 0:
			is[i] = crowded
		case p.hits[i] < near:
			if p.coming(d.keys, i, chunks) && want == lacks {
				want = crowded
			}
		case p.askers(d.keys, i, chunks) < p.cfg.Replicate:
			is[i], want = free, free
		default:
			is[i] = crowded
		}
	}
	if want == crowded {
		return c, false // until the copy is there the price decides
	}
	for i := range engines {
		if is[i] != want {
			engines[i].Role &= placement.Prefill
		}
	}
	x, ok := placement.Decide(&p.state, a)
	for i := range engines {
		if engines[i].Role != 0 {
			engines[i].Role = roles[i]
		}
	}
	if !ok {
		return c, false
	}
	if e := &engines[x.Engine]; x.TTFT() > e.PrefillFixed+float64(a.Tokens)/e.PrefillRate+e.Step {
		return c, false
	}
	if want == lacks {
		d.Replica, d.Hot, d.Askers = true, hot, p.askers(d.keys, c.Engine, chunks)
	}
	return x, true
}

// coming reports whether blocks of a number of chunks of a prompt are on their way to an engine.
func (p *Placer) coming(keys []uint64, engine, chunks int) bool {
	return slices.ContainsFunc(p.flying[engine], func(d *Decision) bool {
		return d.moves(engine) && len(d.keys) >= chunks && d.keys[chunks-1] == keys[chunks-1]
	})
}

// moves reports whether a request's blocks are on their way to an engine: it has none of them yet.
func (d *Decision) moves(engine int) bool {
	return d.Choice.Kind == placement.Pair && d.Choice.Engine == engine && !d.arrived
}

// promise adds the prompt to the engines that will have it. One that gets it from another engine
// has it once it answers: a request that came earlier would compute it.
func (p *Placer) promise(d *Decision) {
	if p.young.Blocks()+len(d.keys) > p.size {
		p.forgot += uint64(p.old.Blocks())
		p.old, p.young = p.young, index.NewTable(p.size, 2*len(p.accounts))
	}
	for _, e := range d.engines() {
		if !d.moves(e) {
			p.add(d.keys, e)
		}
		p.flying[e] = append(p.flying[e], d)
	}
}

func (p *Placer) add(keys []uint64, engine int) {
	for _, k := range keys {
		p.young.Add(k, engineOf(engine))
		if p.home[engine] >= 0 {
			p.young.Add(k, storeOf(engine))
		}
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
	at := slices.Index(acc.queue, d)
	if at == 0 {
		acc.progress = now
	}
	acc.work, acc.queue = max(0, acc.work-d.work), slices.Delete(acc.queue, at, at+1)
	p.accounts[d.Choice.Engine].running++
	if ok && d.Choice.Computed >= minObserved {
		predicted := d.Choice.Wait + d.Choice.Prefill
		if d.Choice.Kind == placement.Load {
			predicted += d.Choice.Transfer - d.Choice.Hidden
		}
		acc.learned.Observe(predicted/d.factor, now.Sub(d.at).Seconds())
	}
}

// Answered takes the first byte of the answer. ok: it is the decode engine's, and no error.
// measured: it shows the first token, as that of a streamed answer does.
func (p *Placer) Answered(d *Decision, ok, measured bool, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	d.ok = ok
	if d.stage == prefilling {
		p.computed(d, ok && measured && d.Prefill < 0, now)
	}
	if ok && d.stage == decoding && d.moves(d.Choice.Engine) {
		d.arrived = true
		p.add(d.keys, d.Choice.Engine)
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
	if d.stage != over && d.ok && d.end > 0 {
		p.turns.put(d.keys[d.end-1], turn{now, d.Choice.Engine})
	}
	d.stage = over
}

// Lost takes the loss of an engine: its cache is gone.
func (p *Placer) Lost(engine int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.forgetLocked(engine)
}

func (p *Placer) forgetLocked(engine int) {
	p.young.RemoveAll(engineOf(engine))
	p.old.RemoveAll(engineOf(engine))
}

// Learned takes the path from an engine that prefills to another one.
func (p *Placer) Learned(from, to int, path placement.Path) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if path.Rate <= 0 {
		path = p.link
	}
	p.setPathLocked(from, to, path)
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
	s.Bytes = p.cache.bytes()
	return s
}
