package device

import (
	"encoding/binary"

	"github.com/kvspray/kvspray/internal/sys/cuda"
	"github.com/kvspray/kvspray/internal/sys/mem"
)

// Strided is the least average number of pieces per run for which pieces of one length are listed
// as runs. A list of addresses takes a fifth of the bytes per entry.
const Strided = 8

// Piece is contiguous on both sides of a copy between host memory and a GPU.
type Piece struct {
	Host, Dev cuda.Ptr
	Len       uint64
	// Shift has an entry for each link, the target's first: what is added to Dev to reach the same
	// byte in the link's context, because memory of another process has another address in each
	// context. nil: nothing.
	Shift []cuda.Ptr
}

// Lists of the kernels.
const (
	Align    = 16 // addresses and lengths are multiples of it
	RunBytes = 40 // sizeof(struct kvs_run)
	RunOuter = 16 // offset of outer in it

	MoveBytes = 40 // sizeof(struct kvs_move)
)

// PutRun encodes a struct kvs_run.
func PutRun(b []byte, base, dense, size uint64, s *mem.Strides) {
	b = b[:RunBytes]
	binary.LittleEndian.PutUint64(b, base)
	binary.LittleEndian.PutUint64(b[8:], s.Stride)
	binary.LittleEndian.PutUint64(b[RunOuter:], s.Outer)
	binary.LittleEndian.PutUint64(b[24:], dense)
	binary.LittleEndian.PutUint32(b[32:], uint32(size))
	binary.LittleEndian.PutUint32(b[36:], s.Count)
}

// Move is one strided run between two GPUs, or within one: Count pieces of Len bytes, piece i from
// Src + i*SrcStride to Dst + i*DstStride.
type Move struct {
	Src, Dst             cuda.Ptr
	SrcStride, DstStride uint64
	Len                  uint64
	Count                uint64
}

// PutMove encodes a struct kvs_move, whose pieces are shorter than 4 GiB.
func PutMove(b []byte, m *Move) {
	b = b[:MoveBytes]
	binary.LittleEndian.PutUint64(b, uint64(m.Src))
	binary.LittleEndian.PutUint64(b[8:], uint64(m.Dst))
	binary.LittleEndian.PutUint64(b[16:], m.SrcStride)
	binary.LittleEndian.PutUint64(b[24:], m.DstStride)
	binary.LittleEndian.PutUint32(b[32:], uint32(m.Len))
	binary.LittleEndian.PutUint32(b[36:], uint32(m.Count))
}
