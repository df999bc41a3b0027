package device

import (
	"github.com/kvspray/kvspray/internal/sys/cuda"
)

// modeler is a platform that can say what it measures.
type Modeler interface {
	// Model names a GPU and its driver; empty: unknown.
	Model(i int) string
}

// platform is a host's GPUs: CUDA, or a fake of it in tests.
type Platform interface {
	UUIDs() ([][16]byte, error)
	Open(i int) (Card, error)
	CanAccess(from, to int) (bool, error)
}

// card is one GPU in use by this process.
type Card interface {
	NewPacker() (Packer, error)
	// Import maps the whole allocation that h names and returns how long it really is. fd stays the caller's.
	Import(h *Handle, fd int) (p cuda.Ptr, bytes uint64, err error)
	Unimport(h *Handle, p cuda.Ptr, bytes uint64) error
	// Register makes host memory reachable by every card; Unregister undoes it.
	Register(b []byte) (cuda.Ptr, error)
	Unregister(b []byte) error
	// Reach lets this card's copy engines at the other's memory. Idempotent.
	Reach(other Card) error
	// Export names an allocation of ours to other processes.
	Export(p cuda.Ptr) (cuda.IPCHandle, error)
	// PCI is the address of the card, as sysfs writes it: "0000:1b:00.0".
	PCI() (string, error)
	Close() error
}

// readOnlyCard pins memory that is mapped for reading only.
type ReadOnlyCard interface {
	RegisterReadOnly(b []byte) (cuda.Ptr, error)
}

// exporter is a card that lets NICs at its memory.
type Exporter interface {
	// ExportDMABuf takes whole pages of the host.
	ExportDMABuf(p cuda.Ptr, n uint64) (fd int, err error)
	Attribute(cuda.Attribute) (int, error)
	FlushRDMAWrites() error
}
