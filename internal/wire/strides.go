package wire

import (
	"encoding/binary"
	"fmt"

	"github.com/kvspray/kvspray/internal/sys/mem"
)

// StridesCell is the size of the cells by which frames describe memory. The lane defines the first
// cell of a run, with its first piece and their length. The cells after it give the distances,
// equally for every lane:
//
//	stride u64, count u32, rows u32     rows 0: one row, and that is all
//	outer u64, zero u64
//
// A run has two pieces or more in a row, or two rows or more, so that it takes no more cells than
// its pieces would; readers require that.
const StridesCell = 16

// MaxStridesCells is the number of cells of a run after its first.
const MaxStridesCells = 2

// AppendStrides appends the cells of s, which has more than one piece.
func AppendStrides(b []byte, s *mem.Strides) []byte {
	b = binary.LittleEndian.AppendUint64(b, s.Stride)
	if s.Rows == 1 {
		return binary.LittleEndian.AppendUint64(b, uint64(s.Count))
	}
	b = binary.LittleEndian.AppendUint64(b, uint64(s.Rows)<<32|uint64(s.Count))
	b = binary.LittleEndian.AppendUint64(b, s.Outer)
	return binary.LittleEndian.AppendUint64(b, 0)
}

// ReadStrides reads foreign bytes in the format of AppendStrides, and returns the cells after them.
// The caller checks the counts against bounds, and the pieces against their region.
func ReadStrides(b []byte, s *mem.Strides) ([]byte, error) {
	if len(b) < StridesCell {
		return nil, fmt.Errorf("wire: a run without its stride: %w", ErrMalformed)
	}
	c := b[:StridesCell:StridesCell]
	s.Stride, s.Count, s.Rows, s.Outer = binary.LittleEndian.Uint64(c),
		binary.LittleEndian.Uint32(c[8:]), binary.LittleEndian.Uint32(c[12:]), 0
	if s.Count < 2 {
		return nil, fmt.Errorf("wire: a run of %d pieces in a row, want two or more: %w", s.Count,
			ErrMalformed)
	}
	b = b[StridesCell:]
	if s.Rows == 0 {
		s.Rows = 1
		return b, nil
	}
	if len(b) < StridesCell || s.Rows == 1 {
		return nil, fmt.Errorf("wire: a run of %d rows, want two or more, before %d bytes: %w",
			s.Rows, len(b), ErrMalformed)
	}
	if s.Outer = binary.LittleEndian.Uint64(b); binary.LittleEndian.Uint64(b[8:]) != 0 {
		return nil, fmt.Errorf("wire: a run of %d rows with %x in reserved bytes: %w", s.Rows,
			b[8:StridesCell], ErrMalformed)
	}
	return b[StridesCell:], nil
}
