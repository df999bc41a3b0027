// Package cuda is the small part of the CUDA driver API that kvspray calls, opened at run time: on
// a host without it, or in a build without cgo, Open returns the reason and everything else works.
//
// It owns contexts (the devices' primary ones), streams, events, modules, its own allocations and
// imports of other processes' allocations. Every call names its context, because a goroutine may
// change threads between two calls. No Go pointer is kept by C. Handles are not reference-counted:
// the owner of a Context frees what it made in it.
package cuda

import (
	"errors"
	"fmt"
)

// ErrNotSupported is wrapped by Open where CUDA cannot be used; the text gives the reason.
var ErrNotSupported = errors.New("cuda: not supported")

// Error is a failed driver call.
type Error struct {
	Op   string // the driver's entry point, without "cu"
	Code int    // CUresult
	Name string // CUDA_ERROR_...
}

func (e *Error) Error() string { return fmt.Sprintf("cuda: %s: %s (%d)", e.Op, e.Name, e.Code) }

// Ptr is a device address; host memory that is mapped or pinned has one too.
type Ptr uint64

// Rows is Height rows of Width bytes, pitches apart: struct kvc_rows.
type Rows struct{ Dst, Src, DstPitch, SrcPitch, Width, Height uint64 }

// MaxPitch is the greatest pitch (CU_DEVICE_ATTRIBUTE_MAX_PITCH of every GPU so far).
const MaxPitch = 1<<31 - 1

// IPCHandle names a whole allocation to another process.
type IPCHandle [64]byte

// Attribute is a CUdevice_attribute.
type Attribute int

// The attributes that kvspray asks for (CUDA driver API, CUdevice_attribute).
const (
	MultiprocessorCount         Attribute = 16
	AsyncEngineCount            Attribute = 40
	PCIDomain                   Attribute = 50
	PCIBus                      Attribute = 33
	PCIDevice                   Attribute = 34
	ComputeMajor                Attribute = 75
	ComputeMinor                Attribute = 76
	StreamMemOps64              Attribute = 93
	GPUDirectRDMASupported      Attribute = 116
	GPUDirectRDMAFlushOptions   Attribute = 117
	GPUDirectRDMAWriteOrdering  Attribute = 118
	DMABufSupported             Attribute = 124
	HostRegisterUsesHostPointer Attribute = 91
	PosixFDHandles              Attribute = 103
	IPCEvents                   Attribute = 125
	// contexts are shared with those of other processes; older drivers lack it.
	MPSEnabled Attribute = 133
)

// Values of GPUDirectRDMAWriteOrdering, and a bit of GPUDirectRDMAFlushOptions.
const (
	WritesOrderedForOwner = 100 // for the context that owns the memory; more: for other devices, too
	FlushByHost           = 1   // FlushRDMAWrites works
)

// Device is one GPU by its ordinal.
type Device int
