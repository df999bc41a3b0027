package place

import (
	"math"
	"time"

	"github.com/kvspray/kvspray/internal/nodeapi"
	"github.com/kvspray/kvspray/placement"
)

// tier is where a store's page is, as seen from an engine.
type tier uint8

const (
	memory tier = iota
	disk
	object
	peer // memory or disk of another node
	tiers
	gone // no tier has the page any more
)

func (t tier) String() string {
	return [...]string{"memory", "disk", "object", "peer", "", "gone"}[t]
}

// StoreLine begins the names of lines in the calibration file for loads from a store: store-memory,
// store-disk, store-object and store-peer.
const StoreLine = "store-"

// defaultLoads are loads without a measurement: seconds, bytes per second.
var defaultLoads = [tiers]placement.Path{memory: {Fixed: 0.002, Rate: 5e9},
	disk: {Fixed: 0.004, Rate: 1e9}, object: {Fixed: 0.05, Rate: 2e8}, peer: {Fixed: 0.006, Rate: 1e9}}

// Measurements of loads.
const (
	loadShare  = 0.2     // of a new measurement in the mean
	minMeasure = 1 << 20 // bytes
	// Least share of a measured time that counts for the bytes. The rest is the fixed time.
	minBytesShare = 0.25
)

// store is the store of one engine's node, as its sidecar describes it.
type store struct {
	node   string // of the sidecar; empty: the engine uses no store
	shared bool   // other nodes read its pages, and its engines those of other nodes
	has    [tiers]bool
	age    [tiers]float64 // seconds after which a page leaves the tier; 0: it stays
	loads  [tiers]measured
	stored uint64  // pages, in all
	parts  float64 // bytes of a token, as the policy counts them, divided by those of one rank
}

// measured is what loads from one tier have taken.
type measured struct {
	gets, bytes uint64 // in all, as reported last
	seconds     float64
	rate        float64 // bytes of one rank per second; 0: unknown
}

// take updates the measurement from the totals of a tier.
func (m *measured) take(t *nodeapi.StoreTier, fixed float64) {
	gets, bytes, seconds := t.Gets-m.gets, t.GetBytes-m.bytes, t.GetSeconds-m.seconds
	if t.Gets < m.gets || t.GetBytes < m.bytes { // the sidecar has restarted
		gets, bytes, seconds = t.Gets, t.GetBytes, t.GetSeconds
	}
	if gets > 0 && bytes < minMeasure {
		return // the next loads are added: a small one shows the fixed time only
	}
	m.gets, m.bytes, m.seconds = t.Gets, t.GetBytes, t.GetSeconds
	if gets == 0 || !(seconds > 0) {
		return
	}
	rate := float64(bytes) / max(seconds-fixed*float64(gets), minBytesShare*seconds)
	if m.rate == 0 {
		m.rate = rate
	}
	m.rate = math.Exp((1-loadShare)*math.Log(m.rate) + loadShare*math.Log(rate))
}

// Stored takes what the sidecar of an engine reports about its store; nil: it has none, or the
// engine does not use it.
func (p *Placer) Stored(engine int, node string, s *nodeapi.Store) {
	p.mu.Lock()
	defer p.mu.Unlock()
	x := &p.stores[engine]
	pageBytes, pageTokens := 0, 0
	if s != nil {
		for _, ns := range s.Namespaces {
			if ns.Pools > 0 && ns.PageTokens > 0 {
				pageBytes, pageTokens = ns.PageBytes, ns.PageTokens
			}
		}
	}
	if pageBytes <= 0 || s.Drained {
		p.stores[engine] = store{}
		p.homesLocked()
		return
	}
	if x.node != node {
		*x = store{node: node}
	}
	if s.Stored < x.stored { // it has restarted
		p.forgetStoreLocked(engine)
	}
	x.shared, x.stored, x.has = s.Directory != nil, s.Stored, [tiers]bool{}
	for i := range s.Tiers {
		t := &s.Tiers[i]
		for k := range tiers {
			if k.String() == t.Name {
				x.has[k], x.age[k] = true, t.EvictionAge
				x.loads[k].take(t, p.loads[k].Fixed)
			}
		}
	}
	// A rank loads its own part of a token; the policy counts those of all ranks.
	x.parts = p.cfg.TokenBytes * float64(pageTokens) / float64(pageBytes)
	p.homesLocked()
}

func (p *Placer) forgetStoreLocked(engine int) {
	p.young.RemoveAll(storeOf(engine))
	p.old.RemoveAll(storeOf(engine))
}

// homesLocked numbers the stores: engines with one sidecar share one.
func (p *Placer) homesLocked() {
	p.homes = p.homes[:0]
	first := map[string]int{}
	for i := range p.stores {
		p.home[i] = -1
		if s := &p.stores[i]; s.node != "" && p.accounts[i].used {
			if _, ok := first[s.node]; !ok {
				first[s.node] = len(p.homes)
				p.homes = append(p.homes, i)
			}
			p.home[i] = first[s.node]
		}
	}
	n := len(p.accounts)
	p.state.Stores = make([]placement.Store, len(p.homes))
	p.at = make([]tier, len(p.homes))
	p.hits = make([]int, n+len(p.homes))
}

// engineOf and storeOf are the holders of an engine, and of its store, in the index.
func engineOf(engine int) int { return 2 * engine }
func storeOf(engine int) int  { return 2*engine + 1 }

// network has the paths of a decision: between engines, and from stores to engines.
type network struct{ p *Placer }

func (n network) Path(from, to int) placement.Path {
	p := n.p
	if from < len(p.accounts) {
		return p.paths.Path(from, to)
	}
	from -= len(p.accounts)
	at, mine, its := p.at[from], &p.stores[to], &p.stores[p.homes[from]]
	switch {
	case p.home[to] < 0 || at == gone:
		return placement.Path{}
	case p.home[to] == from:
	case at == object:
		if !mine.has[object] {
			return placement.Path{}
		}
	case !mine.shared || !its.shared:
		return placement.Path{}
	default:
		at = peer
	}
	path := p.loads[at]
	if m := mine.loads[at].rate; m > 0 {
		path.Rate = m * mine.parts
	}
	return path
}

// tierAt is the tier that has a page whose last use was age seconds ago.
func (s *store) tierAt(age float64) tier {
	for _, t := range [...]tier{memory, disk, object} {
		if s.has[t] && (s.age[t] == 0 || age < s.age[t]) {
			return t
		}
	}
	return gone
}

// maxTurns bounds each of the two generations of turns.
const maxTurns = 1 << 15

// turn is the end of an answer.
type turn struct {
	at     time.Time
	engine int // that gave it
}

// turns are the last turns of conversations, by the hash of the prompt up to its last message.
type turns struct{ young, old map[uint64]turn }

func (t *turns) put(key uint64, x turn) {
	if len(t.young) >= maxTurns {
		t.old, t.young = t.young, nil
	}
	if t.young == nil {
		t.young = map[uint64]turn{}
	}
	t.young[key] = x
}

func (t *turns) get(key uint64) (turn, bool) {
	x, ok := t.young[key]
	if !ok {
		x, ok = t.old[key]
	}
	return x, ok
}

// Answers are those of earlier turns that a prompt contains, in bytes of its text.
type Answers struct {
	Count    int
	From, To int // the last one
	Bytes    int // of all
}

// continues is the chance of another turn after turn 1, 2 ...: those of package store/trace, which
// names its source.
var continues = [...]float64{0.306, 0.419, 0.510, 0.587, 0.63, 0.677}

// Bounds and assumptions about answers.
const (
	firstAnswer = 256.0 // tokens, before any was seen
	answerShare = 0.05  // of a new one in the mean
)

// next is the expected tokens of the answer that a next turn needs.
func (p *Placer) next(r *Request) float64 {
	if r.End == 0 {
		return 0 // it is no conversation
	}
	tokens := p.answer
	if n := r.Answers.Count; n > 0 {
		tokens = float64(r.Answers.Bytes) / tokenText / float64(n)
		last := float64(r.Answers.To-r.Answers.From) / tokenText
		p.answer += answerShare * (last - p.answer)
	}
	if r.MaxAnswer > 0 {
		tokens = min(tokens, float64(r.MaxAnswer))
	}
	if r.Continues {
		return tokens
	}
	return tokens * continues[min(r.Answers.Count, len(continues)-1)]
}

// stored sets the hits of stores, and the tiers of their pages. chunk is the tokens of a chunk.
func (p *Placer) stored(chunks []int, chunk float64, reported []hit, age float64) {
	n := len(p.accounts)
	for s, home := range p.homes {
		p.hits[n+s] = 0
		p.at[s] = p.stores[home].tierAt(age)
	}
	for i, s := range p.home {
		if s >= 0 && p.at[s] != gone {
			at := &p.hits[n+s]
			*at = max(*at, int(float64(chunks[storeOf(i)])*chunk), hitOf(reported, i).any)
		}
	}
}

// goesOn finds the turn before a request. age is how long ago that turn has ended, in seconds; 0:
// unknown.
func (p *Placer) goesOn(r *Request, keys []uint64, now time.Time) (t turn, age float64, ok bool) {
	if c := min(r.Answers.From/chunkBytes, len(keys)); c > 0 {
		if t, ok = p.turns.get(keys[c-1]); ok {
			age = max(0, now.Sub(t.at).Seconds())
		}
	}
	return t, age, ok
}

// answered adds the answer of the turn before to the hits of its engine and of that engine's store.
func (p *Placer) answered(r *Request, t turn, chunk float64) {
	from := int(float64(r.Answers.From/chunkBytes) * chunk)
	to := int(float64(r.Answers.To) / chunkBytes * chunk)
	if t.engine >= len(p.accounts) {
		return
	}
	if h := &p.hits[t.engine]; *h >= from {
		*h = max(*h, to)
	}
	if s := p.home[t.engine]; s >= 0 {
		if h := &p.hits[len(p.accounts)+s]; *h >= from && *h > 0 {
			*h = max(*h, to)
		}
	}
}

// Stores counts the stores that engines use, and these engines.
func (p *Placer) Stores() (stores, engines int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, home := range p.home {
		if home >= 0 {
			engines++
		}
	}
	return len(p.homes), engines
}
