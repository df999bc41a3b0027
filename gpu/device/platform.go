package device

import (
	"github.com/kvspray/kvspray/internal/sys/cuda"
)

// Modeler is a Platform that reports what it measures.
type Modeler interface {
	// Model names a GPU and its driver; empty: unknown.
	Model(i int) string
}

// Platform is the GPUs of a host.
type Platform interface {
	UUIDs() ([][16]byte, error)
	Open(i int) (Card, error)
	CanAccess(from, to int) (bool, error)
}

// Card is one GPU in use by this process.
type Card interface {
	NewPacker() (Packer, error)
	// Import maps the whole allocation that h names and returns its real length. The caller keeps
	// fd.
	Import(h *Handle, fd int) (p cuda.Ptr, bytes uint64, err error)
	Unimport(h *Handle, p cuda.Ptr, bytes uint64) error
	// Register makes host memory reachable for every card; Unregister undoes that.
	Register(b []byte) (cuda.Ptr, error)
	Unregister(b []byte) error
	// Reach lets copy engines of this card access the memory of the other one. Idempotent.
	Reach(other Card) error
	// PCI is the address of the card as in sysfs: "0000:1b:00.0".
	PCI() (string, error)
	Close() error
}

// ReadOnlyCard pins memory that is mapped for reading only.
type ReadOnlyCard interface {
	RegisterReadOnly(b []byte) (cuda.Ptr, error)
}

// Exporter is a Card whose memory NICs can access.
type Exporter interface {
	// ExportDMABuf takes whole pages of the host.
	ExportDMABuf(p cuda.Ptr, n uint64) (fd int, err error)
	Attribute(cuda.Attribute) (int, error)
	FlushRDMAWrites() error
}
