// Package device is a GPU as the copy code uses it: queues, events, copies, the kernels pack,
// unpack and move with their lists, and memory of other processes. The interfaces have two
// implementations: CUDA here, and package gputest for tests.
//
// The package owns no goroutine.
package device

import (
	"github.com/kvspray/kvspray/internal/sys/cuda"
)

// MPS reports whether kernels of several processes run on the GPU at the same time.
type MPS uint8

const (
	MPSUnknown MPS = iota // the driver does not report it
	MPSOff
	MPSOn
)

func (m MPS) String() string { return [...]string{"unknown", "off", "on"}[m] }

// Sharer is a Packer that reports MPS.
type Sharer interface {
	MPS() MPS
}

// PackSizer is a Packer whose number of thread blocks can be changed.
type PackSizer interface {
	// PackBlocks is the number of thread blocks of the kernels.
	PackBlocks() int
	SetPackBlocks(n int)
}

// Queue is an in-order queue of device work: a CUDA stream.
type Queue interface {
	Copy(dst, src cuda.Ptr, n uint64) error
	// CopyBatch enqueues many copies, in no order among each other.
	CopyBatch(dst, src []cuda.Ptr, n []uint64) error
	// CopyRows enqueues copies of rows, at least one, in no order among each other.
	CopyRows(rows []cuda.Rows) error
	// CopySync is Copy and Sync in one call of the driver; it spins.
	CopySync(dst, src cuda.Ptr, n uint64) error
	// Record marks the present end of the queue in e. Wait makes later work of the queue wait for
	// the last mark of e.
	Record(e Event) error
	Wait(e Event) error
	// Sync returns when no work of the queue can touch memory any more: all work is done, or the
	// device has failed.
	Sync() error
}

// Event marks a point in a queue. Sync blocks until the marked work is done, and Done reports
// whether it is. An event that was never recorded is done.
type Event interface {
	Sync() error
	Done() (bool, error)
}

// Device is the part of a GPU that copies without kernels use.
type Device interface {
	Alloc(n uint64) (cuda.Ptr, error)
	Free(cuda.Ptr) error
	NewQueue() (Queue, error)
	NewEvent() (Event, error)
	// NewPromptEvent is NewEvent for short waits: Sync polls more often.
	NewPromptEvent() (Event, error)
	// Close frees all queues and events of the device.
	Close() error
}

// Direction is the direction of a copy.
type Direction uint8

// The directions.
const (
	HostToDevice Direction = iota
	DeviceToHost
)

// Packer is a Device with the kernels that rearrange bytes inside the GPU's memory.
type Packer interface {
	Device
	// AllocHost allocates pinned host memory that copy engines and kernels reach. Close frees it.
	AllocHost(n int) ([]byte, cuda.Ptr, error)
	// Pack gathers and Unpack scatters n runs (struct kvs_run of kernels.cu) at runs. first has the
	// number of pieces before each run.
	Pack(q Queue, runs, first cuda.Ptr, n int) error
	Unpack(q Queue, runs, first cuda.Ptr, n int) error
	// PackUniform and UnpackUniform move n pieces of len bytes, whose addresses are at bases. Piece
	// i is at dense + i*len.
	PackUniform(q Queue, bases cuda.Ptr, n int, dense cuda.Ptr, len uint64) error
	UnpackUniform(q Queue, bases cuda.Ptr, n int, dense cuda.Ptr, len uint64) error
	// Move copies n runs (struct kvs_move) at moves within the GPU's memory. first has the number of
	// pieces before each run.
	Move(q Queue, moves, first cuda.Ptr, n int) error
}
