package agreement

import (
	"fmt"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/transfer"
)

// Plan is the transfer space of one part of a grant. Both sides compute it: a segment for each
// layer of the receiver. Immutable.
type Plan interface {
	Space() *transfer.Space
	// Ready returns the front of a segment that may be sent once its layers of the source hold tokens
	// [0, tokens); final: no later step writes to them. The result only grows.
	Ready(segment int, tokens uint32, final bool) transfer.Range
	// Feeds lists the segments that a layer of the source contributes to, From the layers of the
	// source that contribute to a segment.
	Feeds(layer int) []int
	From(segment int) []int
	// Digest is equal on two sides where every byte has the same place in the transfer space.
	Digest() [32]byte
}

// Rank is a rank of a peer's engine: its name there, and the geometry of its cache.
type Rank struct {
	Name     string
	Geometry [32]byte
}

// Part is what one rank of a peer's engine sends for a destination lease. Plan is nil if the rank
// sends nothing.
type Part struct {
	Rank
	Share []uint32 // as it travels; empty: all that both have
	Plan  Plan
	// bytes of the receiver's blocks outside its attention window, which the rank has dropped
	Lacks uint64
}

// Planner makes plans. Implemented by the driver over parseblock.
type Planner interface {
	// Version counts the changes to how plans order bytes, of all that this planner makes. From 1.
	Version() uint32
	// Receive plans all that the engine of w wants.
	Receive(w *engines.Worker, x *engines.Expect) (Plan, error)
	// Divide plans the same from the ranks of another engine, each byte from exactly one of them; load
	// is the bytes that a rank owes. The result has a part for every rank. If a layout is unknown, the
	// error is an *UnknownLayout.
	Divide(w *engines.Worker, x *engines.Expect, ranks []Rank, load func(rank string) uint64) (
		[]Part, error)
	// Send plans a part of a grant, and checks that the layout of w can serve it. The error may be an
	// *UnknownLayout.
	Send(w *engines.Worker, g *peerv1.Grant, part *peerv1.Part) (Plan, error)
}

// UnknownLayout asks for layouts of a peer. A Describe follows for each geometry, and then the
// same call again.
type UnknownLayout struct{ Geometries [][32]byte }

func (u *UnknownLayout) Error() string {
	return fmt.Sprintf("%d layouts of the peer are not known yet", len(u.Geometries))
}
