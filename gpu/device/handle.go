package device

import (
	"encoding/binary"
	"fmt"

	"github.com/kvspray/kvspray/internal/sys/cuda"
	"github.com/kvspray/kvspray/internal/sys/mem"
)

// HandleKind is the way in which an allocation is named to another process.
type HandleKind uint8

// The kinds of a handle.
const (
	HandleIPC HandleKind = iota + 1 // CUDA IPC: cudaMalloc, as in torch's caching allocator
	HandleFD                        // POSIX descriptor: cuMemCreate, as in cumem allocators
)

// Handle names a part of a GPU allocation of another process. An engine's shim makes it
// (kvs_region_gpu in kvspray.h), REGISTER and shm lanes carry it. It is HandleBytes long: kind, 7
// zero bytes, UUID of the GPU, offset, length of the allocation (little-endian), IPC handle.
type Handle struct {
	Kind  HandleKind
	GPU   [16]byte // UUID
	Off   uint64   // of the part in the allocation
	Alloc uint64   // bytes of the allocation, as its owner reports
	IPC   cuda.IPCHandle
}

// HandleBytes is the length of an encoded Handle.
const HandleBytes = 8 + 16 + 8 + 8 + 64

// Append encodes h.
func (h *Handle) Append(b []byte) []byte {
	b = append(b, byte(h.Kind), 0, 0, 0, 0, 0, 0, 0)
	b = append(b, h.GPU[:]...)
	b = binary.LittleEndian.AppendUint64(b, h.Off)
	b = binary.LittleEndian.AppendUint64(b, h.Alloc)
	return append(b, h.IPC[:]...)
}

// ParseHandle decodes a handle. The bytes are foreign input.
func ParseHandle(b []byte) (h Handle, err error) {
	if len(b) != HandleBytes {
		return h, fmt.Errorf("gpu: a GPU handle of %d bytes, want %d: the engine's libkvspray and this "+
			"sidecar differ in version", len(b), HandleBytes)
	}
	h.Kind = HandleKind(b[0])
	if h.Kind != HandleIPC && h.Kind != HandleFD || binary.LittleEndian.Uint64(b) != uint64(h.Kind) {
		return h, fmt.Errorf("gpu: a GPU handle of kind %#x, want 1 (IPC) or 2 (descriptor)",
			binary.LittleEndian.Uint64(b))
	}
	copy(h.GPU[:], b[8:])
	h.Off, h.Alloc = binary.LittleEndian.Uint64(b[24:]), binary.LittleEndian.Uint64(b[32:])
	copy(h.IPC[:], b[40:])
	if h.Alloc == 0 || h.Alloc > mem.MaxRegionBytes || h.Off >= h.Alloc {
		return h, fmt.Errorf("gpu: a GPU handle with offset %d in an allocation of %d bytes",
			h.Off, h.Alloc)
	}
	return h, nil
}
