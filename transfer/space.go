package transfer

import (
	"fmt"
	"sort"
)

// Space is the logical space of one transfer's bytes: segments one after another, each starting at
// a chunk. Both sides compute the same one. Read-only once made.
type Space struct {
	first  []uint32 // first chunk of each segment; an empty segment shares it with the next
	length []uint64 // bytes of each segment
	chunks uint32
	bytes  uint64
}

// NewSpace lays out segments of the given lengths. Empty segments are allowed. It refuses a space
// that one slot cannot name.
func NewSpace(segmentBytes []uint64) (*Space, error) {
	s := &Space{first: make([]uint32, len(segmentBytes)), length: make([]uint64, len(segmentBytes))}
	var chunks uint64
	for i, n := range segmentBytes {
		s.first[i] = uint32(chunks)
		s.length[i] = n
		chunks += n / ChunkBytes
		if n%ChunkBytes != 0 {
			chunks++
		}
		if chunks > MaxSlotChunks {
			return nil, fmt.Errorf("transfer: space of %d segments passes %d chunks of %d bytes at "+
				"segment %d; move fewer tokens at once",
				len(segmentBytes), MaxSlotChunks, ChunkBytes, i)
		}
		s.bytes += n
	}
	s.chunks = uint32(chunks)
	return s, nil
}

// NumChunks counts the chunks of the space.
func (s *Space) NumChunks() uint32 { return s.chunks }

// NumSegments counts the segments, empty ones included.
func (s *Space) NumSegments() int { return len(s.first) }

// TotalBytes is the content of the whole space; padding of a segment's last chunk is no content.
func (s *Space) TotalBytes() uint64 { return s.bytes }

// All is the range of every chunk.
func (s *Space) All() Range { return Range{Count: s.chunks} }

// SegmentOf returns the segment that chunk c belongs to; c must be inside the space.
func (s *Space) SegmentOf(c uint32) int {
	// The last segment that starts at or before c; empty ones that start there come earlier.
	return sort.Search(len(s.first), func(i int) bool { return s.first[i] > c }) - 1
}

// Segment returns the chunks and the bytes of segment i.
func (s *Space) Segment(i int) (Range, uint64) {
	return Range{First: s.first[i], Count: uint32((s.length[i] + ChunkBytes - 1) / ChunkBytes)},
		s.length[i]
}

// ChunkBytes is the content of chunk c: a full chunk, or what is left of its segment. 0 outside the
// space.
func (s *Space) ChunkBytes(c uint32) uint64 {
	if c >= s.chunks {
		return 0
	}
	seg := s.SegmentOf(c)
	return min(ChunkBytes, s.length[seg]-uint64(c-s.first[seg])*ChunkBytes)
}

// Check refuses ranges that are empty or reach outside the space.
func (s *Space) Check(r Range) error {
	if r.Count == 0 || r.First >= s.chunks || r.Count > s.chunks-r.First {
		return fmt.Errorf("transfer: chunks [%d, +%d) are outside a space of %d", r.First,
			r.Count, s.chunks)
	}
	return nil
}

// Bytes is the content of chunks r.
func (s *Space) Bytes(r Range) (uint64, error) {
	if err := s.Check(r); err != nil {
		return 0, err
	}
	n := uint64(r.Count) * ChunkBytes
	// Only the last chunk of a segment is short.
	for seg := s.SegmentOf(r.First); seg < len(s.first); seg++ {
		end := s.first[seg] + uint32((s.length[seg]+ChunkBytes-1)/ChunkBytes)
		if end > r.End() {
			break
		}
		if rest := s.length[seg] % ChunkBytes; rest != 0 {
			n -= ChunkBytes - rest
		}
	}
	return n, nil
}
