package engines

import (
	"sync"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/parseblock"
	"github.com/kvspray/kvspray/transfer"
)

// Memory finds the chunks of a plan in a worker's memory. It implements transport.Memory.
type Memory struct {
	*transfer.Space
	side    *parseblock.Resolver
	regions []*mem.Region
}

// Memory returns the worker's memory of a plan. side binds the plan to the worker's layout.
func (w *Worker) Memory(side *parseblock.Resolver) *Memory {
	return &Memory{Space: side.Space(), side: side, regions: w.Regions}
}

// pieces is a pool of buffers for Resolve: lanes call it concurrently, and it must not allocate.
var pieces = sync.Pool{New: func() any { s := make([]layout.Piece, 0, 256); return &s }}

// Resolve implements transport.Memory.
func (m *Memory) Resolve(dst []mem.Block, r transfer.Range) ([]mem.Block, error) {
	buf := pieces.Get().(*[]layout.Piece)
	got, err := m.side.Append((*buf)[:0], r)
	if err == nil {
		for _, p := range got {
			dst = append(dst, mem.Block{Region: m.regions[p.Region], Off: p.Off, Len: p.Len})
		}
	}
	*buf = got[:0]
	pieces.Put(buf)
	return dst, err
}

// SetTables replaces the block tables by longer ones.
func (m *Memory) SetTables(blocks [][]uint32) error { return m.side.SetTables(blocks) }

// Device implements transport.Memory. A worker has one GPU; some of its regions may be host memory,
// which the device accepts too.
func (m *Memory) Device() mem.Device {
	for _, r := range m.regions {
		if d := r.Device(); d != nil {
			return d
		}
	}
	return nil
}
