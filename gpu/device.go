package gpu

import "github.com/kvspray/kvspray/internal/sys/cuda"

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
