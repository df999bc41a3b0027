package blocks

import "github.com/kvspray/kvspray/connector/msg"

// Piece is where a part of every block lies: block i has Len bytes at Base + i*Stride of a region.
// A worker never uses a region's number twice, and its regions share no memory, so that a number
// and an offset name memory.
type Piece = msg.PagePiece

// maxPairs bounds the pairs of pieces that relation compares, some milliseconds. Two pools with
// more count as sharing each block with all others.
const maxPairs = 1 << 17

// relation reports whether two numberings share memory, and whether only blocks of the same number
// do. All of their blocks lie inside their regions.
func relation(a []Piece, blocksOfA uint32, b []Piece, blocksOfB uint32) (shares, same bool) {
	switch {
	case blocksOfA == 0 || blocksOfB == 0:
		return false, true
	case len(a)*len(b) > maxPairs:
		return true, false
	}
	same = true
	for i := range a {
		for k := range b {
			x, y, blocks := &a[i], &b[k], blocksOfA
			if x.Base > y.Base {
				x, y, blocks = y, x, blocksOfB
			}
			d := y.Base - x.Base
			if x.Region != y.Region || d >= uint64(blocks-1)*x.Stride+x.Len {
				continue
			}
			if x.Stride != y.Stride || d >= x.Stride || y.Len > x.Stride-d {
				return true, false
			}
			// Block i of y lies in the stride of block i of x, perhaps behind its bytes.
			shares = shares || d < x.Len
		}
	}
	return shares, same
}
