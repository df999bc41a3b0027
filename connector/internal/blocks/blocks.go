// Package blocks reserves the blocks of an engine that open leases read or write.
//
// Two leases that write one block would each report bytes that the other has replaced, and a lease
// that reads a block while another one writes it stores bytes under a wrong name. Blocks are
// reserved as memory: an engine numbers one memory in several ways, by the block tables of its
// layout and by each pool that it opens. Skipped blocks may be shared. Pure: the caller serializes
// calls.
package blocks

import (
	"fmt"
	"slices"

	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/layout"
)

// Guard reserves the blocks of one worker.
type Guard struct {
	tables  []*numbering // of each block table
	all     []*numbering
	next    uint32
	written map[uint64]uint64 // bit set, see bitOf
	read    map[uint64]int    // by place: how many leases read a block
	leases  map[uint64][]span
}

// numbering is one way in which an engine numbers memory.
type numbering struct {
	number uint32
	pieces []Piece
	blocks uint32
	users  int // pools
	near   []neighbor
	writes int // blocks that open leases write
	reads  int // the same, read: a block counts for each of them
}

// neighbor is a numbering that shares memory. same: a block of one shares bytes with the block of
// the same number only. Otherwise any of its blocks may share bytes with any block.
type neighbor struct {
	*numbering
	same bool
}

// span is what a lease uses of one numbering.
type span struct {
	of     *numbering
	blocks []uint32
	writes bool
}

// New returns a guard for a layout with these block tables; nil: there is none.
func New(l *layout.Layout, tables []layout.Table) *Guard {
	g := &Guard{written: map[uint64]uint64{}, read: map[uint64]int{}, leases: map[uint64][]span{}}
	if l == nil {
		return g
	}
	pools := poolsOf(l, tables)
	g.tables = make([]*numbering, len(tables))
	for t, pool := range pools {
		if pool != t {
			continue
		}
		n := g.newNumbering()
		for o := range tables {
			if pools[o] != t {
				continue
			}
			g.tables[o] = n
			for _, group := range l.Groups[tables[o].First:tables[o].End] {
				n.blocks = max(n.blocks, group.NumBlocks)
				for _, x := range group.Layers {
					n.pieces = append(n.pieces, Piece{Region: uint64(x.Region), Base: x.Base,
						Stride: x.BlockStride, Len: x.PageBytes})
				}
			}
		}
	}
	// Tables of unlike memory share none, and poolsOf has joined the others: no neighbors.
	return g
}

func (g *Guard) newNumbering() *numbering {
	n := &numbering{number: g.next}
	g.next++
	g.all = append(g.all, n)
	return n
}

// Pool is a pool's numbering.
type Pool struct{ of *numbering }

// Open adds a pool. Close follows, when no lease uses it.
func (g *Guard) Open(pieces []Piece, blocks uint32) Pool {
	for _, n := range g.all {
		if n.users > 0 && n.blocks == blocks && slices.Equal(n.pieces, pieces) {
			n.users++
			return Pool{n}
		}
	}
	var near []neighbor
	for _, o := range g.all {
		if shares, same := relation(pieces, blocks, o.pieces, o.blocks); shares {
			near = append(near, neighbor{o, same})
		}
	}
	n := g.newNumbering()
	n.pieces, n.blocks, n.users, n.near = pieces, blocks, 1, near
	for _, o := range near {
		o.near = append(o.near, neighbor{n, o.same})
	}
	return Pool{n}
}

// Close ends the use of a pool that no lease uses.
func (g *Guard) Close(p Pool) {
	n := p.of
	if n.users--; n.users > 0 {
		return
	}
	for _, o := range n.near {
		o.near = slices.DeleteFunc(o.near, func(x neighbor) bool { return x.numbering == n })
	}
	g.all = slices.DeleteFunc(g.all, func(x *numbering) bool { return x == n })
}

// Reserve reserves for a lease the blocks with index [first, end) of each table, as written returns
// them. If one of them is in use, it reserves none, and the error names the other use.
func (g *Guard) Reserve(lease uint64, tables [][]uint32, written func(table int) (first,
	end int)) error {
	spans := make([]span, 0, len(tables))
	for ti, table := range tables {
		first, end := written(ti)
		first, end = min(first, len(table)), min(end, len(table))
		spans = append(spans, span{g.tables[ti], table[first:first], true})
		g.leases[lease] = spans
		for i := first; i < end; i++ {
			if err := g.take(&spans[ti], table[i]); err != nil {
				err.Message, err.Field = "EXPECT", fmt.Sprintf("blocks[%d][%d]", ti, i)
				if !isTwice(err, table[first:i], first, table[i]) {
					g.inTable(err, lease, ti, table[i])
				}
				g.Release(lease)
				return err
			}
			spans[ti].blocks = table[first : i+1]
		}
	}
	return nil
}

// isTwice corrects an error if the block is also in the list before it. first is the index of the
// list's first block.
func isTwice(e *msg.Error, before []uint32, first int, id uint32) bool {
	j := slices.Index(before, id)
	if j >= 0 {
		e.Problem = fmt.Sprintf("block %d is also at index %d, and both would be written", id, first+j)
		e.Remedy = "allocate a separate block for each part of the prompt"
	}
	return j >= 0
}

// inTable corrects an error where an earlier table of the lease has the block.
func (g *Guard) inTable(e *msg.Error, lease uint64, ti int, id uint32) {
	for oi, s := range g.leases[lease][:ti] {
		if s.of == g.tables[ti] && slices.Contains(s.blocks, id) {
			e.Problem = fmt.Sprintf(
				"block %d is also written for table %d, whose layers lie on the same pages", id, oi)
			e.Remedy = "allocate the blocks of both tables from one pool"
		}
	}
}

// Use reserves blocks of a pool for a lease that writes or reads them. If one of them is in use, it
// reserves none, and the error names the other use.
func (g *Guard) Use(what string, lease uint64, p Pool, blocks []uint32, writes bool) error {
	s := span{p.of, blocks[:0], writes}
	for i, b := range blocks {
		if err := g.take(&s, b); err != nil {
			err.Message, err.Field = what, fmt.Sprintf("blocks[%d]", i)
			if writes {
				isTwice(err, blocks[:i], 0, b)
			}
			g.leases[lease] = []span{s}
			g.Release(lease)
			return err
		}
		s.blocks = blocks[:i+1]
	}
	g.leases[lease] = []span{s}
	return nil
}

// take reserves one block of a span. The error lacks message and field.
func (g *Guard) take(s *span, id uint32) *msg.Error {
	n := s.of
	if e := g.clash(n, true, id, s.writes); e != nil {
		return e
	}
	for _, o := range n.near {
		if o.writes+o.reads == 0 {
			continue
		}
		if e := g.clash(o.numbering, o.same, id, s.writes); e != nil {
			return e
		}
	}
	if s.writes {
		word, bit := bitOf(n, id)
		g.written[word] |= bit
		n.writes++
		return nil
	}
	g.read[placeOf(n, id)]++
	n.reads++
	return nil
}

// clash finds a use of a numbering that excludes that of a block, or of one that shares bytes with
// it.
func (g *Guard) clash(n *numbering, same bool, id uint32, writes bool) *msg.Error {
	written, read := n.writes > 0, writes && n.reads > 0
	if same {
		word, bit := bitOf(n, id)
		written = written && g.written[word]&bit != 0
		read = read && g.read[placeOf(n, id)] > 0
	}
	if !written && !read {
		return nil
	}
	does := "read"
	if written {
		does = "written"
	}
	lease := uint64(0)
	for other, spans := range g.leases {
		if slices.ContainsFunc(spans, func(s span) bool {
			return s.of == n && s.writes == written && (!same || slices.Contains(s.blocks, id))
		}) {
			lease = other
		}
	}
	return &msg.Error{Problem: fmt.Sprintf("the memory of block %d is %s for lease %d, which is open",
		id, does, lease), Remedy: "wait for its completion: nothing uses the block after that"}
}

// Release releases the blocks of a lease, which may have none.
func (g *Guard) Release(lease uint64) {
	for _, s := range g.leases[lease] {
		for _, id := range s.blocks {
			if s.writes {
				s.of.writes--
				word, bit := bitOf(s.of, id)
				if g.written[word] &^= bit; g.written[word] == 0 {
					delete(g.written, word)
				}
				continue
			}
			s.of.reads--
			at := placeOf(s.of, id)
			if g.read[at]--; g.read[at] == 0 {
				delete(g.read, at)
			}
		}
	}
	delete(g.leases, lease)
}

// bitOf is the position of a block in Guard.written.
func bitOf(n *numbering, id uint32) (word, bit uint64) {
	return uint64(n.number)<<32 | uint64(id>>6), 1 << (id & 63)
}

// placeOf is the position of a block in Guard.read.
func placeOf(n *numbering, id uint32) uint64 { return uint64(n.number)<<32 | uint64(id) }
