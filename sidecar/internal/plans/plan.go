// Package plans makes the executor's plans from the layouts of engines, and binds them to the
// memory of workers. A Planner belongs to one process; all of its plans come from it.
package plans

import (
	"fmt"
	"maps"
	"sync"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/parseblock"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// Bounds of a planner's caches. A full cache is emptied, and its content computed again.
const (
	maxLayouts   = 256 // of peers
	maxDivisions = 256
	maxMatches   = 1024
	maxProofs    = 4096
)

// Planner makes the executor's plans from registered layouts. Results that depend on layouts alone
// are computed once and kept: after the first contact of two engines a prompt costs only a plan
// from its template, for any reshape.
type Planner struct {
	reg *parseblock.Registry
	// Lists has the plans of batches. Set once, before the first lease.
	Lists Lists

	// protects layouts; the rest belongs to the executor's goroutine
	mu      sync.Mutex
	layouts map[[32]byte]*layout.Layout // of peers, by geometry

	divisions map[string]*parseblock.Division // by the geometries of receiver and ranks
	proofs    map[string]struct{}             // divisions with the shares that were proved for them
	matches   map[matchKey]*parseblock.Match
}

// matchKey identifies a match of a local worker with a peer's layout.
type matchKey struct {
	w        *engines.Worker
	geometry [32]byte
	share    string
	receives bool
}

// New makes a planner.
func New(reg *parseblock.Registry) *Planner {
	return &Planner{reg: reg, layouts: map[[32]byte]*layout.Layout{},
		divisions: map[string]*parseblock.Division{}, proofs: map[string]struct{}{},
		matches: map[matchKey]*parseblock.Match{}}
}

// received is a plan with the receiver's own memory bound to it.
type received struct {
	*parseblock.Plan
	memory *engines.Memory
}

// The executor keeps plans as interfaces. All plans of a process come from its planner, and these
// functions are the only ones that look behind the interface.

// Received is the plan of a part that is received; Receive or Divide made it. nil: it is a List.
func Received(l *exec.ReceivePart) *parseblock.Plan {
	r, _ := l.Plan.(received)
	return r.Plan
}

// Sent is the plan of a part that is sent; Send made it. nil: it is a List.
func Sent(s *exec.SendPart) *parseblock.Plan {
	p, _ := s.Plan.(*parseblock.Plan)
	return p
}

// Receiver implements driver.Memory.
func (p *Planner) Receiver(l *exec.ReceivePart) transport.Memory {
	if list, ok := l.Plan.(*List); ok {
		return list
	}
	return l.Plan.(received).memory
}

// Sender implements driver.Memory.
func (p *Planner) Sender(s *exec.SendPart) (transport.Memory, error) {
	if list, ok := s.Plan.(*List); ok {
		return list, nil
	}
	side, err := Sent(s).Side(p.reg, s.Worker.Layout, s.Blocks)
	if err != nil {
		return nil, err
	}
	return s.Worker.Memory(side), nil
}

// Extend implements driver.Memory.
func (p *Planner) Extend(s *exec.SendPart, blocks [][]uint32) error {
	return s.Origin.Memory.(*engines.Memory).SetTables(blocks)
}

// Registry has the strategies of the planner.
func (p *Planner) Registry() *parseblock.Registry { return p.reg }

// Version is the version of the plans.
func (p *Planner) Version() uint32 { return parseblock.PlanVersion }

// Receive plans everything that x requests, as sent by an engine of equal geometry.
func (p *Planner) Receive(w *engines.Worker, x *engines.Expect) (exec.Plan, error) {
	if w.Internal && p.Lists != nil {
		if l := p.Lists.List(w, x.Key, true); l != nil {
			return l, nil
		}
	}
	plan, err := p.receive(w, x, w.Own)
	if err != nil {
		return nil, err
	}
	return plan, nil
}

func (p *Planner) receive(w *engines.Worker, x *engines.Expect, m *parseblock.Match) (received,
	error) {
	plan, err := m.Plan(x.Tokens, x.Skip)
	if err != nil {
		return received{}, err
	}
	side, err := plan.Side(p.reg, w.Layout, x.Blocks)
	if err != nil {
		return received{}, err
	}
	if err := side.Covers(); err != nil {
		return received{}, err
	}
	return received{plan, w.Memory(side)}, nil
}

// Divide plans x from the ranks of another engine.
func (p *Planner) Divide(w *engines.Worker, x *engines.Expect, ranks []exec.Rank,
	load func(rank string) uint64) ([]exec.Part, error) {
	sources := make([]*layout.Layout, len(ranks))
	var unknown exec.UnknownLayout
	name := string(w.Geometry[:])
	for i := range ranks {
		if sources[i] = p.known(ranks[i].Geometry, w.Layout); sources[i] == nil {
			unknown.Geometries = append(unknown.Geometries, ranks[i].Geometry)
		}
		name += string(ranks[i].Geometry[:])
	}
	if len(unknown.Geometries) > 0 {
		return nil, &unknown
	}
	d := p.divisions[name]
	if d == nil {
		var err error
		if d, err = parseblock.NewDivision(p.reg, sources, w.Layout); err != nil {
			return nil, err
		}
		makeRoom(p.divisions, maxDivisions)
		p.divisions[name] = d
	}
	shares, err := d.Assign(func(i int) uint64 { return load(ranks[i].Name) })
	if err != nil {
		return nil, err
	}
	parts := make([]exec.Part, len(ranks))
	for i := range parts {
		parts[i].Rank = ranks[i]
	}
	for i := range shares {
		part := &parts[shares[i].Source]
		part.Share = shares[i].Encode()
		name += fmt.Sprint(shares[i].Source, part.Share)
	}
	if _, proved := p.proofs[name]; !proved {
		if err := parseblock.Prove(p.reg, sources, w.Layout, shares); err != nil {
			return nil, err
		}
		makeRoom(p.proofs, maxProofs)
		p.proofs[name] = struct{}{}
	}
	for i := range shares {
		part := &parts[shares[i].Source]
		m, err := p.match(matchKey{w, part.Geometry, fmt.Sprint(part.Share), true},
			sources[shares[i].Source], w.Layout, &shares[i])
		if err != nil {
			return nil, err
		}
		plan, err := p.receive(w, x, m)
		if err != nil {
			return nil, err
		}
		part.Plan, part.Lacks = plan, plan.Lacks()
	}
	return parts, nil
}

// Send plans a part of a grant from w.
func (p *Planner) Send(w *engines.Worker, g *peerv1.Grant, part *peerv1.Part) (exec.Plan, error) {
	if len(g.Geometry) != 32 {
		return nil, &layout.Error{Field: "geometry", Value: fmt.Sprintf("%d bytes", len(g.Geometry)),
			Problem: "want a hash of 32 bytes", Remedy: "run sidecars of one version"}
	}
	if w.Internal && p.Lists != nil && len(g.Xfer) == len(transfer.XferID{}) &&
		len(g.Hash) == len(transfer.PrefixHash{}) {
		k := transfer.Key{Xfer: transfer.XferID(g.Xfer), Hash: transfer.PrefixHash(g.Hash)}
		if l := p.Lists.List(w, k, false); l != nil {
			return l, nil
		}
	}
	geometry := [32]byte(g.Geometry)
	if len(part.Share) == 0 {
		if geometry != w.Geometry {
			return nil, &layout.Error{Field: "share", Value: "empty", Problem: "the two layouts differ, " +
				"so the share is required",
				Remedy: "run sidecars of one version"}
		}
		return w.Own.Plan(g.Tokens, g.Skip)
	}
	dst := p.known(geometry, w.Layout)
	if dst == nil {
		return nil, &exec.UnknownLayout{Geometries: [][32]byte{geometry}}
	}
	share, err := parseblock.DecodeShare(part.Share, dst.NumLayers())
	if err != nil {
		return nil, err
	}
	m, err := p.match(matchKey{w, geometry, fmt.Sprint(part.Share), false}, w.Layout, dst, share)
	if err != nil {
		return nil, err
	}
	return m.Plan(g.Tokens, g.Skip)
}

func (p *Planner) match(k matchKey, src, dst *layout.Layout, share *parseblock.Share) (
	*parseblock.Match, error) {
	if m := p.matches[k]; m != nil {
		return m, nil
	}
	m, err := parseblock.NewMatch(p.reg, src, dst, share)
	if err == nil {
		makeRoom(p.matches, maxMatches)
		p.matches[k] = m
	}
	return m, err
}

// Forget drops the results for a worker that is gone, which would keep its memory.
func (p *Planner) Forget(w *engines.Worker) {
	maps.DeleteFunc(p.matches, func(k matchKey, _ *parseblock.Match) bool { return k.w == w })
}

// known returns a peer's layout. Both sides compare fingerprints, which cover the meaning of
// caches, before a byte moves. A geometry does not cover it, so the dtype counts as equal.
func (p *Planner) known(geometry [32]byte, ours *layout.Layout) *layout.Layout {
	p.mu.Lock()
	l := p.layouts[geometry]
	p.mu.Unlock()
	if l == nil || l.DType == ours.DType {
		return l
	}
	as := *l
	as.DType = ours.DType
	return &as
}

// Learn accepts a peer's layout for a geometry.
func (p *Planner) Learn(geometry [32]byte, encoded []byte) error {
	l, err := p.Verify(geometry, encoded)
	if err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	makeRoom(p.layouts, maxLayouts)
	p.layouts[geometry] = l
	return nil
}

// Verify decodes a peer's layout, which is foreign: its hash must match, and no offset of it may
// overflow.
func (p *Planner) Verify(geometry [32]byte, encoded []byte) (*layout.Layout, error) {
	l, err := layout.Unmarshal(encoded)
	if err != nil {
		return nil, err
	}
	if err := layout.ValidateForeign(l, p.reg.Planes); err != nil {
		return nil, err
	}
	if got := l.Geometry(); got != geometry {
		return nil, fmt.Errorf("the layout has geometry %.8x: %.8x was asked for", got, geometry)
	}
	return l, nil
}

// makeRoom empties a full map.
func makeRoom[K comparable, V any](m map[K]V, limit int) {
	if len(m) >= limit {
		clear(m)
	}
}
