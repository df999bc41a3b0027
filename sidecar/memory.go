package sidecar

import (
	"fmt"
	"sync"
	"sync/atomic"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/internal/mem"
	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/parseblock"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// planner makes the executor's plans from registered layouts.
type planner struct{ reg *parseblock.Registry }

// received is a plan with the receiver's own memory bound to it.
type received struct {
	*parseblock.Plan
	side *parseblock.Resolver
}

func (p *planner) Receive(w *connector.Worker, x *connector.Expect) (exec.Plan, error) {
	plan, err := w.Own.Plan(x.Tokens, x.Skip)
	if err != nil {
		return nil, err
	}
	side, err := plan.Side(p.reg, w.Layout, x.Blocks)
	if err != nil {
		return nil, err
	}
	if err := side.Covers(); err != nil {
		return nil, err
	}
	return received{plan, side}, nil
}

func (p *planner) Send(w *connector.Worker, g *peerv1.Grant) (exec.Plan, error) {
	if string(g.Geometry) != string(w.Geometry[:]) {
		return nil, &layout.Error{Field: "geometry", Value: fmt.Sprintf("%.8x at the receiver, %.8x at the source", g.Geometry, w.Geometry),
			Problem: "the cache pages of the two engines have different shapes",
			Remedy:  "run prefill and decode with the same block size, attention backend and parallelism"}
	}
	return w.Own.Plan(g.Tokens, g.Skip)
}

// pieces is a pool of scratch for Resolve: lanes call it concurrently, and it must not allocate.
var pieces = sync.Pool{New: func() any { s := make([]layout.Piece, 0, 256); return &s }}

// resolve appends the memory of chunks r.
func resolve(dst []mem.Block, side *parseblock.Resolver, regions []*mem.Region, r transfer.Range) ([]mem.Block, error) {
	buf := pieces.Get().(*[]layout.Piece)
	got, err := side.Append((*buf)[:0], r)
	if err == nil {
		for _, p := range got {
			dst = append(dst, mem.Block{Region: regions[p.Region], Off: p.Off, Len: p.Len})
		}
	}
	*buf = got[:0]
	pieces.Put(buf)
	return dst, err
}

// maxBackends bounds the transports whose bytes a sink tells apart.
const maxBackends = 8

// sink is the receiving end of one grant: the receiver's memory and the bitmap, which alone says what has landed.
type sink struct {
	node    *Node
	landing *exec.Landing
	side    *parseblock.Resolver
	bitmap  *transfer.Bitmap
	full    atomic.Bool
	bytes   [maxBackends]atomic.Uint64 // landed, by index of the backend; duplicates count once
}

func newSink(n *Node, l *exec.Landing) *sink {
	p := l.Plan.(received)
	return &sink{node: n, landing: l, side: p.side, bitmap: transfer.NewBitmap(p.Space().NumChunks())}
}

func (s *sink) Resolve(dst []mem.Block, r transfer.Range) ([]mem.Block, error) {
	return resolve(dst, s.side, s.landing.Worker.Regions, r)
}

func (s *sink) Bytes(r transfer.Range) (uint64, error) { return s.side.Space().Bytes(r) }

func (s *sink) Landed(lane transport.Lane, r transfer.Range) {
	n, err := s.side.Space().Bytes(r)
	if err != nil {
		return
	}
	fresh := s.bitmap.Set(r)
	s.node.landed(lane, s, n, fresh > 0)
	if s.bitmap.Full() && !s.full.Swap(true) {
		s.node.filled(s.landing)
	}
}

// source is the sending end of one grant.
type source struct {
	sending *exec.Sending
	side    *parseblock.Resolver
}

func (n *Node) newSource(s *exec.Sending) (*source, error) {
	side, err := s.Plan.(*parseblock.Plan).Side(n.reg, s.Worker.Layout, s.Blocks)
	if err != nil {
		return nil, err
	}
	return &source{sending: s, side: side}, nil
}

func (s *source) Resolve(dst []mem.Block, r transfer.Range) ([]mem.Block, error) {
	return resolve(dst, s.side, s.sending.Worker.Regions, r)
}

func (s *source) Bytes(r transfer.Range) (uint64, error) { return s.side.Space().Bytes(r) }

func (s *source) Valid(transfer.Range) bool { return s.sending.Worker.SourceValid(s.sending.Lease) }
