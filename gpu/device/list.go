package device

import (
	"encoding/binary"

	"github.com/kvspray/kvspray/internal/sys/cuda"
	"github.com/kvspray/kvspray/internal/sys/mem"
)

// strided is how many blocks a run has on average, at least, where blocks of one length go to the kernels as runs and not as addresses, which
// are a fifth as long.
const Strided = 8

// Part is a contiguous piece of what CopyParts moves.
type Piece struct {
	Host, Dev cuda.Ptr
	Len       uint64
	// Shift has for each link, the target's first, what it adds to Dev to reach the same byte in its own context: memory of another process
	// has an address of its own in each. nil: nothing.
	Shift []cuda.Ptr
}

// Lists of the kernels.
const (
	Align    = 16 // addresses and lengths are multiples of it
	RunBytes = 40 // sizeof(struct kvs_run)
	RunOuter = 16 // offset of outer in it
)

// putRun writes a struct kvs_run.
func PutRun(b []byte, base, dense, size uint64, s *mem.Strides) {
	b = b[:RunBytes]
	binary.LittleEndian.PutUint64(b, base)
	binary.LittleEndian.PutUint64(b[8:], s.Stride)
	binary.LittleEndian.PutUint64(b[RunOuter:], s.Outer)
	binary.LittleEndian.PutUint64(b[24:], dense)
	binary.LittleEndian.PutUint32(b[32:], uint32(size))
	binary.LittleEndian.PutUint32(b[36:], s.Count)
}
