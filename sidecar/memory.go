package sidecar

import (
	"sync"
	"sync/atomic"

	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/parseblock"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// pieces is a pool of buffers for Resolve: lanes call it concurrently, and it must not allocate.
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

// deviceOf is the device of a worker's cache. A worker has one GPU; some of its regions may be host
// memory, which the device accepts too.
func deviceOf(regions []*mem.Region) mem.Device {
	for _, r := range regions {
		if d := r.Device(); d != nil {
			return d
		}
	}
	return nil
}

// maxBackends bounds the transports that a sink distinguishes.
const maxBackends = 8

// sink is the receiving end of one grant: the receiver's memory and the bitmap, the only record of
// landed chunks.
type sink struct {
	node    *Node
	landing *exec.ReceivePart
	side    *parseblock.Resolver
	bitmap  *transfer.Bitmap
	full    atomic.Bool
	bytes   [maxBackends]atomic.Uint64 // landed, by index of the backend; duplicates count once

	quarantined atomic.Bool // its fence failed, and is retried
}

func newSink(n *Node, l *exec.ReceivePart) *sink {
	p := l.Plan.(received)
	return &sink{node: n, landing: l, side: p.side, bitmap: transfer.NewBitmap(p.Space().NumChunks())}
}

func (s *sink) Resolve(dst []mem.Block, r transfer.Range) ([]mem.Block, error) {
	return resolve(dst, s.side, s.landing.Worker.Regions, r)
}

// Device implements transport.OnDevice.
func (s *sink) Device() mem.Device { return deviceOf(s.landing.Worker.Regions) }

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
	sending *exec.SendPart
	side    *parseblock.Resolver

	quarantined atomic.Bool // its origin could not be closed, and the close is retried
}

func (n *Node) newSource(s *exec.SendPart) (*source, error) {
	side, err := s.Plan.(*parseblock.Plan).Side(n.reg, s.Worker.Layout, s.Blocks)
	if err != nil {
		return nil, err
	}
	return &source{sending: s, side: side}, nil
}

func (s *source) Resolve(dst []mem.Block, r transfer.Range) ([]mem.Block, error) {
	return resolve(dst, s.side, s.sending.Worker.Regions, r)
}

// Device implements transport.OnDevice.
func (s *source) Device() mem.Device { return deviceOf(s.sending.Worker.Regions) }

func (s *source) Bytes(r transfer.Range) (uint64, error) { return s.side.Space().Bytes(r) }

func (s *source) Valid(transfer.Range) bool { return s.sending.Worker.SourceValid(s.sending.Lease) }
