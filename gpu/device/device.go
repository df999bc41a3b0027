package device

import (
	"github.com/kvspray/kvspray/internal/sys/cuda"
)

// MPS says whether kernels of ours run at the same time as those of other processes.
type MPS uint8

const (
	MPSUnknown MPS = iota // to the driver; it may be on
	MPSOff
	MPSOn
)

func (m MPS) String() string { return [...]string{"unknown", "off", "on"}[m] }

// sharer is a Packer that knows.
type Sharer interface {
	MPS() MPS
}

// packSizer is a Packer whose kernels can be made narrower.
type PackSizer interface {
	// PackBlocks is how many thread blocks its kernels run on, and SetPackBlocks changes that.
	PackBlocks() int
	SetPackBlocks(n int)
}

// Queue is an in-order queue of device work: a CUDA stream.
type Queue interface {
	Copy(dst, src cuda.Ptr, n uint64) error
	// CopyBatch enqueues many copies at once, in no order among each other.
	CopyBatch(dst, src []cuda.Ptr, n []uint64) error
	// CopyRows enqueues copies of rows, at least one, in no order among each other.
	CopyRows(rows []cuda.Rows) error
	// CopySync is Copy and Sync in one call into the driver; it spins.
	CopySync(dst, src cuda.Ptr, n uint64) error
	// Record marks the queue's present end in e; Wait makes its later work wait for e's last mark.
	Record(e Event) error
	Wait(e Event) error
	// Sync returns when no work of the queue can touch memory any more: all of it is done, or the device has given up.
	Sync() error
}

// Event marks a point in a queue. Sync blocks until the marked work is done, and Done tells whether it is; an event never recorded is done.
type Event interface {
	Sync() error
	Done() (bool, error)
}

// Device is what a link needs of its GPU.
type Device interface {
	Alloc(n uint64) (cuda.Ptr, error)
	Free(cuda.Ptr) error
	NewQueue() (Queue, error)
	NewEvent() (Event, error)
	// NewPromptEvent is NewEvent for short waits: Sync returns sooner, and looks more often.
	NewPromptEvent() (Event, error)
	// Close frees queues and events made here.
	Close() error
}

// Direction of a copy.
type Direction uint8

// The directions.
const (
	HostToDevice Direction = iota
	DeviceToHost
)

// Packer is a Device with the two kernels that rearrange bytes inside its GPU's memory.
type Packer interface {
	Device
	// AllocHost gives pinned host memory that the device's copy engines reach; freed by Close.
	AllocHost(n int) ([]byte, cuda.Ptr, error)
	// Pack gathers, Unpack scatters: n runs at runs (kernels.cu, kvs_run), with the counts of pieces before each at first.
	Pack(q Queue, runs, first cuda.Ptr, n int) error
	Unpack(q Queue, runs, first cuda.Ptr, n int) error
	// The same for n pieces of len bytes each, whose addresses stand at bases; piece i lies at dense + i*len.
	PackUniform(q Queue, bases cuda.Ptr, n int, dense cuda.Ptr, len uint64) error
	UnpackUniform(q Queue, bases cuda.Ptr, n int, dense cuda.Ptr, len uint64) error
}
