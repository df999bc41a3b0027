package wire

import (
	"encoding/binary"

	"github.com/kvspray/kvspray/transfer"
)

// ChunksBytes is the size of encoded Chunks.
const ChunksBytes = 16

// Chunks names chunks of one generation of a slot in one attempt. The frames of shm and gdr have
// them in this form:
//
//	gen u32, first u32, count u32, attempt u32
type Chunks struct {
	Gen     transfer.Gen
	Range   transfer.Range
	Attempt uint32
}

// AppendChunks appends ChunksBytes.
func AppendChunks(b []byte, c Chunks) []byte {
	b = binary.LittleEndian.AppendUint32(b, uint32(c.Gen))
	b = binary.LittleEndian.AppendUint32(b, c.Range.First)
	b = binary.LittleEndian.AppendUint32(b, c.Range.Count)
	return binary.LittleEndian.AppendUint32(b, c.Attempt)
}

// ReadChunks reads ChunksBytes from the front of b. The caller looks the range up in its grant.
func ReadChunks(b []byte) Chunks {
	b = b[:ChunksBytes]
	return Chunks{
		Gen: transfer.Gen(binary.LittleEndian.Uint32(b)),
		Range: transfer.Range{First: binary.LittleEndian.Uint32(b[4:]),
			Count: binary.LittleEndian.Uint32(b[8:])},
		Attempt: binary.LittleEndian.Uint32(b[12:]),
	}
}

// RunFlag in the length of a cell announces the cells of AppendStrides. Lengths are smaller.
const RunFlag = 1 << 31
