package mem

import "math/bits"

// Strides is how the pieces of a run lie, each as long as the others: Rows rows of Count pieces,
// the pieces of a row Stride apart and the rows Outer. With the address of the first one it
// describes in a few bytes what would be any number of blocks.
type Strides struct {
	// modulo 2^64: a run may step backwards. 0 where there is one piece in a row, or one row
	Stride, Outer uint64
	Count, Rows   uint32 // 1 or more
}

// Single is one piece.
var Single = Strides{Count: 1, Rows: 1}

// Pieces is how many pieces there are.
func (s *Strides) Pieces() uint64 { return uint64(s.Count) * uint64(s.Rows) }

// Inside reports whether all pieces of n bytes lie in a region of size bytes when the first one is
// at off, in a time that does not depend on how many there are. The pieces farthest apart are a sum
// of both axes, which is what has to fit before the first piece and behind it.
func (s *Strides) Inside(off, n, size uint64) bool {
	if off > size || n > size-off {
		return false
	}
	before, behind := off, size-off-n
	return reach(&before, &behind, s.Stride, s.Count-1) && reach(&before, &behind, s.Outer, s.Rows-1)
}

// reach takes what an axis needs off the room on its side, if there is as much.
func reach(before, behind *uint64, stride uint64, steps uint32) bool {
	room, step := behind, stride
	if int64(stride) < 0 {
		room, step = before, -stride
	}
	hi, span := bits.Mul64(uint64(steps), step)
	if hi != 0 || span > *room {
		return false
	}
	*room -= span
	return true
}

// Joined describes the same pieces of n bytes with a row whose pieces touch as one piece, and how
// long its pieces are then. Rows apart whose ends touch stay as they are.
func (s Strides) Joined(n uint64) (Strides, uint64) {
	for s.Count > 1 && s.Stride == n {
		n *= uint64(s.Count)
		s = Strides{Stride: s.Outer, Count: s.Rows, Rows: 1}
	}
	return s, n
}

// Offsets goes over the pieces of a run one by one, so that they never exist at once.
type Offsets struct {
	Off  uint64 // of the current piece
	row  uint64 // of the first piece of its row
	left uint32 // pieces of the row, with the current one
	rows uint32 // with the current one
}

// Start goes to the first piece of a run, at off.
func (o *Offsets) Start(off uint64, s *Strides) {
	o.Off, o.row, o.left, o.rows = off, off, s.Count, s.Rows
}

// Next goes to the next piece of the run that Start was given. False: there is none.
func (o *Offsets) Next(s *Strides) bool {
	if o.left--; o.left > 0 {
		o.Off += s.Stride
		return true
	}
	if o.rows--; o.rows == 0 {
		return false
	}
	o.row += s.Outer
	o.Off, o.left = o.row, s.Count
	return true
}

// Leading is how the first blocks lie, as far as they make one run of one region and one length.
//
// Two blocks have a distance by chance and take as much by themselves, so that a row by itself has
// three or more. Rows are joined where they are whole: a slice may begin within one, and what is
// left of it must not cut all that follow in the same way.
func Leading(blocks []Block) Strides {
	if !Regular(blocks) {
		return Single
	}
	return leading(blocks)
}

// Regular is whether the first blocks may make a run, for who asks about many that lie anywhere:
// then neither three of them nor two pairs are a distance apart.
func Regular(b []Block) bool {
	if len(b) < 3 {
		return false
	}
	d := b[1].Off - b[0].Off
	return b[2].Off-b[1].Off == d || len(b) > 3 && b[3].Off-b[2].Off == d
}

func leading(blocks []Block) Strides {
	stride := blocks[1].Off - blocks[0].Off
	n := row(blocks, &blocks[0], stride)
	s := Strides{Stride: stride, Count: uint32(n), Rows: 1}
	if n > 1 {
		for at := n; len(blocks)-at >= n; at += n {
			outer := blocks[at].Off - blocks[at-n].Off
			if s.Rows > 1 && outer != s.Outer || row(blocks[at:min(at+n+1, len(blocks))], &blocks[0],
				stride) != n {
				break
			}
			s.Outer = outer
			s.Rows++
		}
	}
	if n < 3 && s.Rows == 1 {
		return Single
	}
	return s
}

// row is how many blocks from the first on are a stride apart, and like a.
func row(blocks []Block, a *Block, stride uint64) int {
	off := blocks[0].Off
	for k := range blocks {
		b := &blocks[k]
		if b.Off != off || b.Len != a.Len || b.Region != a.Region {
			return k
		}
		off += stride
	}
	return len(blocks)
}
