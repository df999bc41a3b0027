package wire

import (
	"encoding/binary"
	"fmt"

	"github.com/kvspray/kvspray/internal/mem"
)

// StridesCell is the size of the cells in which frames name memory. The first of a run says what its pieces are and where the first one is,
// and is the lane's own; those behind it say how the others lie, and are the same for every lane:
//
//	stride u64, count u32, rows u32     rows 0: one row, and that is all
//	outer u64, zero u64
//
// A run has two pieces or more in a row, or two rows or more, so that it takes no more than its pieces would; readers ask for that.
const StridesCell = 16

// MaxStridesCells is how many cells a run has behind its first.
const MaxStridesCells = 2

// AppendStrides appends the cells of s, which is more than one piece.
func AppendStrides(b []byte, s *mem.Strides) []byte {
	b = binary.LittleEndian.AppendUint64(b, s.Stride)
	if s.Rows == 1 {
		return binary.LittleEndian.AppendUint64(b, uint64(s.Count))
	}
	b = binary.LittleEndian.AppendUint64(b, uint64(s.Rows)<<32|uint64(s.Count))
	b = binary.LittleEndian.AppendUint64(b, s.Outer)
	return binary.LittleEndian.AppendUint64(b, 0)
}

// ReadStrides reads what AppendStrides wrote from foreign bytes, and returns the cells behind it. That the counts are within bounds, and the
// pieces within their region, is the caller's to check.
func ReadStrides(b []byte, s *mem.Strides) ([]byte, error) {
	if len(b) < StridesCell {
		return nil, fmt.Errorf("wire: a run without its stride: %w", ErrMalformed)
	}
	c := b[:StridesCell:StridesCell]
	s.Stride, s.Count, s.Rows, s.Outer = binary.LittleEndian.Uint64(c), binary.LittleEndian.Uint32(c[8:]), binary.LittleEndian.Uint32(c[12:]), 0
	if s.Count < 2 {
		return nil, fmt.Errorf("wire: a run of %d pieces in a row, and not two or more: %w", s.Count, ErrMalformed)
	}
	b = b[StridesCell:]
	if s.Rows == 0 {
		s.Rows = 1
		return b, nil
	}
	if len(b) < StridesCell || s.Rows == 1 {
		return nil, fmt.Errorf("wire: a run of %d rows, which are two or more, with %d bytes behind: %w", s.Rows, len(b), ErrMalformed)
	}
	if s.Outer = binary.LittleEndian.Uint64(b); binary.LittleEndian.Uint64(b[8:]) != 0 {
		return nil, fmt.Errorf("wire: a run of %d rows with %x in reserved bytes: %w", s.Rows, b[8:StridesCell], ErrMalformed)
	}
	return b[StridesCell:], nil
}
