package faulttest

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// ErrInjected is wrapped by every result that a fault made.
var ErrInjected = errors.New("faulttest: injected")

// Kind is a fault.
type Kind uint8

// The faults. After is Rule.After.
const (
	Error       Kind = iota + 1 // ends NotLanded at once; nothing leaves
	Delay                       // leaves After later
	DelayResult                 // leaves at once; its result comes After later
	// never leaves; ends InDoubt after After, with no After only with its lane.
	Drop
	DropResult      // leaves; its result is lost and it ends as with Drop
	Partial         // ends InDoubt; only the first half of its chunks leaves
	Duplicate       // after landing it leaves a second time
	DuplicateResult // its result comes twice
	FalseLanded     // ends Landed; nothing leaves
	LateWrite       // ends NotLanded at once, and leaves later: see Rule.AfterFence
	// the lane moves nothing, in either direction, for After, or without After until its end.
	Stuck
	// in flight for its sender; leaves when its grant has been fenced, or at Plan.Release.
	Hold
	numKinds
)

var kindNames = [numKinds]string{"none", "error", "delay", "delay result", "drop", "drop result",
	"partial", "duplicate", "duplicate result",
	"false landed", "late write", "stuck", "hold"}

func (k Kind) String() string {
	if k < numKinds {
		return kindNames[k]
	}
	return fmt.Sprintf("kind(%d)", uint8(k))
}

// Kinds lists all faults.
func Kinds() []Kind {
	var all []Kind
	for k := Error; k < numKinds; k++ {
		all = append(all, k)
	}
	return all
}

// Rule selects the slices that suffer a fault. The first rule that fires decides.
type Rule struct {
	Kind Kind
	// Only restricts the rule; nil: every slice matches. It is called under the plan's lock, so it
	// must not use the plan or wait for code that does.
	Only func(transport.Lane, transport.Slice) bool
	// At scripts the rule: the n-th matching slices, from 1.
	At []int
	// Prob draws from the plan's seed if there is no script; 0 without a script means always.
	Prob float64
	// Max bounds how often it fires; 0: no bound.
	Max int
	// After is the delay, for kinds that have one.
	After time.Duration
	// AfterFence holds a LateWrite until a backend under the same plan has fenced its grant, when
	// the blocks have another owner. Otherwise a LateWrite leaves after After.
	AfterFence bool
	// Reason of an Error; it decides whether a retry counts against the transport.
	Reason transfer.Reason
}

// Plan decides and counts. Both ends of a pair may share one, and must for AfterFence and Hold.
// Safe for concurrent use.
type Plan struct {
	mu       sync.Mutex
	rng      *rand.Rand
	rules    []Rule
	matched  []int
	fired    []int
	injected [numKinds]int
	extras   [numKinds]map[transfer.Outcome]int
	unsent   [numKinds]int // extra slices whose lane was gone or full
	live     int           // extra slices that have not ended, including held ones
	held     []*extra      // until a fence: late writes, and slices of Hold
}

// maxExtra bounds the slices that a plan itself sends at one time.
const maxExtra = 4096

// New returns a plan. The same seed and the same order of slices give the same faults.
func New(seed uint64, rules ...Rule) *Plan {
	p := &Plan{rng: rand.New(rand.NewPCG(seed, 0xfa17)), rules: rules, matched: make([]int,
		len(rules)), fired: make([]int, len(rules))}
	for i := range p.extras {
		p.extras[i] = map[transfer.Outcome]int{}
	}
	return p
}

// draw returns the rule that applies to a slice; nil: none.
func (p *Plan) draw(l transport.Lane, s transport.Slice) *Rule {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range p.rules {
		r := &p.rules[i]
		if r.Kind == Partial && s.Range.Count < 2 || r.Only != nil && !r.Only(l, s) {
			continue
		}
		p.matched[i]++
		switch {
		case r.Max > 0 && p.fired[i] >= r.Max:
			continue
		case len(r.At) > 0 && !slices.Contains(r.At, p.matched[i]):
			continue
		case len(r.At) == 0 && r.Prob > 0 && p.rng.Float64() >= r.Prob:
			continue
		case (r.Kind == LateWrite || r.Kind == Duplicate) && p.live >= maxExtra:
			continue
		}
		p.fired[i]++
		return r
	}
	return nil
}

func (p *Plan) count(k Kind) {
	p.mu.Lock()
	p.injected[k]++
	p.mu.Unlock()
}

// Injected counts the slices that suffered a fault.
func (p *Plan) Injected(k Kind) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.injected[k]
}

// Extra counts the slices sent by a fault that ended with an outcome. Refused extra slices of
// LateWrite are writes that came too late.
func (p *Plan) Extra(k Kind, o transfer.Outcome) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.extras[k][o]
}

// Unsent counts the extra slices that never left because their lane was gone or full.
func (p *Plan) Unsent(k Kind) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.unsent[k]
}

// Quiet reports whether every extra slice has ended.
func (p *Plan) Quiet() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.live == 0
}

// Held counts the slices that wait for a fence or for Release.
func (p *Plan) Held() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.held)
}

// extra is a slice for which the host has received a result; of kind Hold, one whose result the
// host awaits.
type extra struct {
	l    *lane
	s    transport.Slice
	kind Kind
	id   uint64 // of Hold: its entry
}

func (p *Plan) extraBegun() {
	p.mu.Lock()
	p.live++
	p.mu.Unlock()
}

func (p *Plan) extraEnded(k Kind, o transfer.Outcome) {
	p.mu.Lock()
	p.live--
	p.extras[k][o]++
	p.mu.Unlock()
}

func (p *Plan) extraUnsent(k Kind) {
	p.mu.Lock()
	p.live--
	p.unsent[k]++
	p.mu.Unlock()
}

func (p *Plan) hold(g *extra) {
	p.mu.Lock()
	p.held = append(p.held, g)
	p.mu.Unlock()
}

// fenced releases the slices held for a grant of `self` that is now fenced.
func (p *Plan) fenced(self transfer.Boot, g *transport.Grant) {
	p.free(func(h *extra) bool {
		o := h.s.Origin
		return o.Peer == self && o.Slot == g.Slot && o.Gen == g.Gen
	})
}

// Release releases everything that waits for a fence.
func (p *Plan) Release() { p.free(func(*extra) bool { return true }) }

func (p *Plan) free(which func(*extra) bool) {
	var gone []*extra
	p.mu.Lock()
	p.held = slices.DeleteFunc(p.held, func(h *extra) bool {
		if which(h) {
			gone = append(gone, h)
			return true
		}
		return false
	})
	p.mu.Unlock()
	for _, h := range gone {
		if h.kind == Hold {
			h.l.b.pump.after(0, func() { h.l.leave(h.id) })
		} else {
			h.l.sendExtra(h)
		}
	}
}
