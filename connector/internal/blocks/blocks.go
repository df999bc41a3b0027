// Package blocks reserves the blocks of an engine that open destination leases will write.
//
// Two leases that write one block would each report bytes that the other has replaced. Skipped
// blocks and blocks that are only read may be shared. Pure: the caller serializes calls.
package blocks

import (
	"fmt"
	"slices"

	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/layout"
)

// Reserved is the set of reserved blocks of one worker.
type Reserved struct {
	pools  []int                 // block table -> one table on the same pages
	set    map[uint64]uint64     // bit set, see bitOf
	leases map[uint64][][]uint32 // per lease and block table, the blocks that it will write
}

// New returns an empty set for a layout with these block tables.
func New(l *layout.Layout, tables []layout.Table) *Reserved {
	return &Reserved{pools: poolsOf(l, tables), set: map[uint64]uint64{},
		leases: map[uint64][][]uint32{}}
}

// Reserve reserves for a lease the blocks with index [first, end) of each table, as written returns
// them. If one of them is reserved already, it reserves none, and the error names the other use.
func (r *Reserved) Reserve(lease uint64, tables [][]uint32, written func(table int) (first,
	end int)) error {
	var writes [][]uint32
	for ti, table := range tables {
		first, end := written(ti)
		first, end = min(first, len(table)), min(end, len(table))
		writes = append(writes, table[first:first])
		r.leases[lease] = writes
		for i := first; i < end; i++ {
			word, bit := bitOf(r.pools[ti], table[i])
			if r.set[word]&bit != 0 {
				err := r.conflict(lease, ti, table, first, i)
				r.Release(lease)
				return err
			}
			r.set[word] |= bit
			writes[ti] = table[first : i+1]
		}
	}
	return nil
}

// conflict names the use of the block at index i of a table.
func (r *Reserved) conflict(lease uint64, ti int, table []uint32, first, i int) error {
	id := table[i]
	e := &msg.Error{Message: "EXPECT", Field: fmt.Sprintf("blocks[%d][%d]", ti, i),
		Problem: fmt.Sprintf("block %d is written for another open lease", id),
		Remedy:  "wait for its completion: nothing writes the block after that"}
	if j := slices.Index(table[first:i], id); j >= 0 {
		e.Problem = fmt.Sprintf("block %d is also at index %d, and both would be written", id, first+j)
		e.Remedy = "allocate a separate block for each part of the prompt"
		return e
	}
	for other, writes := range r.leases {
		for oi, blocks := range writes {
			if other != lease && r.pools[oi] == r.pools[ti] && slices.Contains(blocks, id) {
				e.Problem = fmt.Sprintf("block %d is written for lease %d, which is open", id, other)
			}
		}
	}
	for oi, blocks := range r.leases[lease][:ti] {
		if r.pools[oi] == r.pools[ti] && slices.Contains(blocks, id) {
			e.Problem = fmt.Sprintf(
				"block %d is also written for table %d, whose layers lie on the same pages", id, oi)
			e.Remedy = "allocate the blocks of both tables from one pool"
		}
	}
	return e
}

// Release releases the blocks of a lease, which may have none.
func (r *Reserved) Release(lease uint64) {
	for ti, table := range r.leases[lease] {
		for _, id := range table {
			word, bit := bitOf(r.pools[ti], id)
			if r.set[word] &^= bit; r.set[word] == 0 {
				delete(r.set, word)
			}
		}
	}
	delete(r.leases, lease)
}

// bitOf is the position of a block in Reserved.set.
func bitOf(pool int, id uint32) (word, bit uint64) {
	return uint64(pool)<<32 | uint64(id>>6), 1 << (id & 63)
}
