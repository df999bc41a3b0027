package plans

import (
	"sync"

	"github.com/kvspray/kvspray/control/driver"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/parseblock"
	"github.com/kvspray/kvspray/transfer"
)

// pieces is a pool of buffers for Resolve: lanes call it concurrently, and it must not allocate.
var pieces = sync.Pool{New: func() any { s := make([]layout.Piece, 0, 256); return &s }}

// resolve appends the memory of chunks r.
func resolve(dst []mem.Block, side *parseblock.Resolver, regions []*mem.Region,
	r transfer.Range) ([]mem.Block, error) {
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

// receiveMemory is the memory that a part is received into.
type receiveMemory struct {
	worker *engines.Worker
	side   *parseblock.Resolver
}

// Receiver implements driver.Memory.
func (p *Planner) Receiver(l *exec.ReceivePart) driver.ReceiveMemory {
	return &receiveMemory{worker: l.Worker, side: receivedPlan(l).side}
}

// Resolve implements driver.ReceiveMemory.
func (m *receiveMemory) Resolve(dst []mem.Block, r transfer.Range) ([]mem.Block, error) {
	return resolve(dst, m.side, m.worker.Regions, r)
}

// Device implements transport.OnDevice.
func (m *receiveMemory) Device() mem.Device { return deviceOf(m.worker.Regions) }

// source is the sending end of one grant.
type source struct {
	sending *exec.SendPart
	side    *parseblock.Resolver
}

// Source implements driver.Memory.
func (p *Planner) Source(s *exec.SendPart) (driver.Source, error) {
	side, err := Sent(s).Side(p.reg, s.Worker.Layout, s.Blocks)
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

// SetTables implements driver.Source.
func (s *source) SetTables(blocks [][]uint32) error { return s.side.SetTables(blocks) }

func (s *source) Valid(transfer.Range) bool { return s.sending.Worker.SourceValid(s.sending.Lease) }
