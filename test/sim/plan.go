package sim

import (
	"crypto/sha256"
	"fmt"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/transfer"
)

// MaxRanks of an engine: each has the same number of the layers, in their order.
const MaxRanks = Layers

// span is a run of layers.
type span struct{ lo, hi int }

// held are the layers of one rank of an engine.
func held(rank, ranks int) span { return span{rank * Layers / ranks, (rank + 1) * Layers / ranks} }

func (a span) and(b span) span {
	return span{max(a.lo, b.lo), max(min(a.hi, b.hi),
		max(a.lo, b.lo))}
}

// geometry is the shape of a rank's cache, which here is all of it.
func geometry(rank, ranks int) (g [32]byte) {
	g[0], g[1] = byte(rank), byte(ranks)
	return g
}

func heldBy(g []byte) span { return held(int(g[0]), int(g[1])) }

// plan is a transfer space of some layers, a segment for each. source are the layers of the rank
// that gives them.
type plan struct {
	span
	space  *transfer.Space
	tokens uint32
	source span
}

func newPlan(tokens uint32, layers, source span) (*plan, error) {
	bytes := make([]uint64, layers.hi-layers.lo)
	for i := range bytes {
		bytes[i] = uint64(tokens) * unitBytes
	}
	sp, err := transfer.NewSpace(bytes)
	return &plan{layers, sp, tokens, source}, err
}

// place returns which layer a chunk of the space belongs to, and which of that layer's it is.
func (p *plan) place(chunk uint32) (layer int, i uint32) {
	seg := p.space.SegmentOf(chunk)
	r, _ := p.space.Segment(seg)
	return p.lo + seg, chunk - r.First
}

func (p *plan) Space() *transfer.Space { return p.space }

func (p *plan) Digest() [32]byte {
	return sha256.Sum256(fmt.Append(nil, p.span, p.source, p.tokens))
}

func (p *plan) Ready(segment int, tokens uint32, final bool) transfer.Range {
	r, _ := p.space.Segment(segment)
	if final && tokens >= p.tokens {
		return r
	}
	full := min(tokens, p.tokens) / blockTokens * blockTokens
	return transfer.Range{First: r.First, Count: full * unitBytes / transfer.ChunkBytes}
}

var each = func() (all [Layers]int) {
	for i := range all {
		all[i] = i
	}
	return all
}()

func (p *plan) Feeds(layer int) []int {
	seg := p.source.lo + layer - p.lo
	if seg < 0 || seg >= p.hi-p.lo {
		return nil
	}
	return each[seg : seg+1]
}

func (p *plan) From(segment int) []int {
	layer := p.lo + segment - p.source.lo
	return each[layer : layer+1]
}

// planner plans for one sidecar. Of other engines it has what they sent.
type planner struct{ known map[[32]byte]bool }

// unknown asks for the layouts among these that have no description.
func (p planner) unknown(all ...[]byte) error {
	var u exec.UnknownLayout
	for _, b := range all {
		if g := [32]byte(b); !p.known[g] {
			u.Geometries = append(u.Geometries, g)
		}
	}
	if len(u.Geometries) > 0 {
		return &u
	}
	return nil
}

func (p planner) Version() uint32 { return 1 }

func (p planner) Receive(w *engines.Worker, x *engines.Expect) (exec.Plan, error) {
	s := heldBy(w.Geometry[:])
	return newPlan(x.Tokens, s, s)
}

func (p planner) Divide(w *engines.Worker, x *engines.Expect, ranks []exec.Rank,
	_ func(string) uint64) ([]exec.Part, error) {
	for _, r := range ranks {
		if err := p.unknown(r.Geometry[:]); err != nil {
			return nil, err
		}
	}
	var parts []exec.Part
	for _, r := range ranks {
		part := exec.Part{Rank: r}
		if s := heldBy(w.Geometry[:]).and(heldBy(r.Geometry[:])); s.lo < s.hi {
			sub, err := newPlan(x.Tokens, s, heldBy(r.Geometry[:]))
			if err != nil {
				return nil, err
			}
			part.Plan = sub
		}
		parts = append(parts, part)
	}
	return parts, nil
}

func (p planner) Send(w *engines.Worker, g *peerv1.Grant, part *peerv1.Part) (exec.Plan, error) {
	if string(g.Geometry) != string(w.Geometry[:]) {
		if err := p.unknown(g.Geometry); err != nil {
			return nil, err
		}
	}
	s := heldBy(w.Geometry[:]).and(heldBy(g.Geometry))
	if s.lo >= s.hi {
		return nil, fmt.Errorf("sim: rank %s has none of the layers", part.Rank)
	}
	return newPlan(g.Tokens, s, heldBy(w.Geometry[:]))
}
