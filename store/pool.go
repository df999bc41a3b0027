package store

import (
	"fmt"
	"math/bits"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/store/page"
)

// Bounds of a pool.
const (
	MaxPieces = 4096
	MaxBlocks = 1 << 28
)

// Piece is where a part of every block lies: block i has Len bytes at Base + i*Stride of Region.
type Piece struct {
	Region            *mem.Region
	Base, Stride, Len uint64
}

// Pool is the memory in which an engine keeps pages: numbered blocks, each of which holds one page,
// in pieces of regular strides. It describes every layout that engines use: one buffer with whole
// pages (one piece), or one or two tensors for each layer (a piece for each). No two blocks share a
// byte, so that requests for different blocks never write the same memory.
type Pool struct {
	pieces    []Piece
	blocks    int
	pageBytes int
	device    bool          // on a GPU
	readOnly  *mem.Region   // one that can be put from only; nil: none
	regions   []*mem.Region // each once
}

// NewPool checks a pool. The regions stay the caller's: a batch holds them while it runs.
func NewPool(pieces []Piece, blocks int) (*Pool, error) {
	if blocks < 1 || blocks > MaxBlocks {
		return nil, &RequestError{"blocks", fmt.Sprint(blocks), fmt.Sprintf("send 1 to %d", MaxBlocks)}
	}
	if len(pieces) < 1 || len(pieces) > MaxPieces {
		return nil, &RequestError{"pieces", fmt.Sprint(len(pieces)),
			fmt.Sprintf("send 1 to %d", MaxPieces)}
	}
	p := &Pool{pieces: pieces, blocks: blocks}
	seen := map[*mem.Region]bool{}
	total := uint64(0)
	for i := range pieces {
		c := &pieces[i]
		if err := c.check(blocks); err != nil {
			return nil, &RequestError{fmt.Sprintf("pieces[%d]", i), err.Error(),
				"send pieces inside registered regions"}
		}
		for j := range i {
			if c.overlaps(&pieces[j], uint64(blocks)) {
				return nil, &RequestError{fmt.Sprintf("pieces[%d]", i),
					fmt.Sprintf("shares bytes with pieces[%d]", j), "send pieces that are apart"}
			}
		}
		if c.Region.Device() != pieces[0].Region.Device() {
			return nil, &RequestError{fmt.Sprintf("pieces[%d]", i),
				"lies in memory of another kind, or of another GPU, than pieces[0]",
				"open a pool for each GPU, and one for host memory"}
		}
		if c.Region.ReadOnly() {
			p.readOnly = c.Region
		}
		if !seen[c.Region] {
			seen[c.Region] = true
			p.regions = append(p.regions, c.Region)
		}
		total += c.Len // at most MaxPieces regions' sizes: no overflow
	}
	if total > page.MaxBytes {
		return nil, &RequestError{"pieces", fmt.Sprintf("%d bytes a page", total),
			fmt.Sprintf("a page has at most %d", page.MaxBytes)}
	}
	p.pageBytes, p.device = int(total), pieces[0].Region.Device() != nil
	return p, nil
}

func (c *Piece) check(blocks int) error {
	if c.Region == nil || c.Len == 0 {
		return fmt.Errorf("has no region or no bytes")
	}
	if blocks > 1 && c.Stride < c.Len {
		return fmt.Errorf("stride %d is less than length %d, so its blocks overlap", c.Stride, c.Len)
	}
	n, ok := c.span(uint64(blocks))
	if !ok {
		return fmt.Errorf("%d blocks with stride %d exceed every region", blocks, c.Stride)
	}
	return c.Region.Check(c.Base, n)
}

// span is from the first byte of the first block to the end of the last block.
func (c *Piece) span(blocks uint64) (n uint64, ok bool) {
	high, n := bits.Mul64(blocks-1, c.Stride)
	n, carry := bits.Add64(n, c.Len, 0)
	return n, high == 0 && carry == 0
}

// overlaps reports whether a block of c and a block of d share a byte. Pieces of different strides
// must lie behind one another.
func (c *Piece) overlaps(d *Piece, blocks uint64) bool {
	if c.Region != d.Region {
		return false
	}
	if d.Base < c.Base {
		c, d = d, c
	}
	span, _ := c.span(blocks)
	distance := d.Base - c.Base
	if distance >= span {
		return false
	}
	if c.Stride != d.Stride {
		return true
	}
	if blocks == 1 {
		return true
	}
	// d's block 0 lies in or behind c's block k, which exists, as distance is less than span.
	k, r := distance/c.Stride, distance%c.Stride
	if r < c.Len {
		return true
	}
	return k+1 < blocks && c.Stride-r < d.Len
}

// Blocks is the number of blocks.
func (p *Pool) Blocks() int { return p.blocks }

// PageBytes is the sum of the pieces of a block.
func (p *Pool) PageBytes() int { return p.pageBytes }

// place appends the memory of a block.
func (p *Pool) place(to []mem.Block, block uint32) []mem.Block {
	for i := range p.pieces {
		c := &p.pieces[i]
		to = append(to, mem.Block{Region: c.Region, Off: c.Base + uint64(block)*c.Stride, Len: c.Len})
	}
	return to
}
