// Package index stores which holders have which blocks of prompts, and counts how much of a prompt
// each holder has. A holder is one tier of one engine or store, as a number.
//
// A key names a block's tokens and all tokens before them. It has 64 bits: two blocks with one key
// are a wrong hint, after which the engine computes what it lacks. The table has a bound; blocks
// beyond it are dropped and counted.
//
// The package is pure: no lock, no clock, no goroutine. Its owner excludes writers from readers.
// Lookup allocates nothing.
package index

import (
	"math/bits"
	"slices"
)

// Bounds.
const (
	MaxHolders = 1 << 14
	inline     = 4 // holders of a block in its slot; more are in a bitmap
	minSlots   = 1 << 10
)

// slot is one block. In a free slot holders[0] is 0. With wide in the last place, the first two
// are the number of a bitmap.
type slot struct {
	key     uint64
	holders [inline]uint16 // holder+1; the used ones are first
}

const (
	wide      = 0xffff
	slotBytes = 8 + 2*inline
)

// Table has blocks and their holders.
type Table struct {
	slots   []slot // a power of two; linear probing
	blocks  int
	limit   int
	holders int
	bitmaps [][]uint64
	unused  []uint32 // of bitmaps
	dropped uint64
}

// NewTable makes a table for a number of blocks and of holders.
func NewTable(blocks, holders int) *Table {
	return &Table{slots: make([]slot, minSlots), limit: max(1, blocks),
		holders: min(holders, MaxHolders)}
}

// Grow raises the number of holders.
func (t *Table) Grow(holders int) {
	t.holders = max(t.holders, min(holders, MaxHolders))
	for i, b := range t.bitmaps {
		t.bitmaps[i] = append(b, make([]uint64, (t.holders+63)/64-len(b))...)
	}
}

// Blocks is the number of blocks in the table.
func (t *Table) Blocks() int { return t.blocks }

// Dropped counts blocks that had no place.
func (t *Table) Dropped() uint64 { return t.dropped }

// Bytes is the memory of the table.
func (t *Table) Bytes() int {
	return len(t.slots)*slotBytes + len(t.bitmaps)*8*((t.holders+63)/64)
}

func (t *Table) home(key uint64) int {
	const mix = 0x9e3779b97f4a7c15
	return int((key * mix) >> (64 - bits.TrailingZeros(uint(len(t.slots)))))
}

// find returns the slot of a key, or the free one in which it would be.
func (t *Table) find(key uint64) int {
	i := t.home(key)
	for t.slots[i].holders[0] != 0 && t.slots[i].key != key {
		i = (i + 1) & (len(t.slots) - 1)
	}
	return i
}

func (s *slot) isWide() bool { return s.holders[inline-1] == wide }
func (s *slot) bitmap() uint32 {
	return uint32(s.holders[0]-1) | uint32(s.holders[1])<<15
}

// setBitmap stores 31 bits of a number so that the first place is not 0.
func (s *slot) setBitmap(n uint32) {
	s.holders = [inline]uint16{uint16(n&0x7fff) + 1, uint16(n >> 15), 0, wide}
}

// Add records that a holder has a block; false: the table is full, or there is no such holder.
func (t *Table) Add(key uint64, holder int) bool {
	if holder < 0 || holder >= t.holders {
		return false
	}
	i := t.find(key)
	s := &t.slots[i]
	if s.holders[0] == 0 {
		if t.blocks >= t.limit {
			t.dropped++
			return false
		}
		if (t.blocks+1)*4 > len(t.slots)*3 {
			t.grow()
			s = &t.slots[t.find(key)]
		}
		t.blocks++
		*s = slot{key: key, holders: [inline]uint16{uint16(holder) + 1}}
		return true
	}
	if s.isWide() {
		t.bitmaps[s.bitmap()][holder/64] |= 1 << (holder % 64)
		return true
	}
	for j, h := range s.holders {
		if int(h) == holder+1 {
			return true
		}
		if h == 0 {
			s.holders[j] = uint16(holder) + 1
			return true
		}
	}
	n := t.newBitmap()
	for _, h := range append(s.holders[:inline:inline], uint16(holder)+1) {
		t.bitmaps[n][(h-1)/64] |= 1 << ((h - 1) % 64)
	}
	s.setBitmap(n)
	return true
}

func (t *Table) newBitmap() uint32 {
	if n := len(t.unused); n > 0 {
		b := t.unused[n-1]
		t.unused = t.unused[:n-1]
		clear(t.bitmaps[b])
		return b
	}
	t.bitmaps = append(t.bitmaps, make([]uint64, (t.holders+63)/64))
	return uint32(len(t.bitmaps) - 1)
}

func (t *Table) grow() {
	old := t.slots
	t.slots = make([]slot, 2*len(old))
	for _, s := range old {
		if s.holders[0] != 0 {
			t.slots[t.find(s.key)] = s
		}
	}
}

// Remove records that a holder lost a block.
func (t *Table) Remove(key uint64, holder int) {
	if holder < 0 || holder >= t.holders {
		return
	}
	i := t.find(key)
	s := &t.slots[i]
	switch {
	case s.holders[0] == 0:
	case s.isWide():
		n := s.bitmap()
		t.bitmaps[n][holder/64] &^= 1 << (holder % 64)
		t.narrow(i, n)
	default:
		j := slices.Index(s.holders[:], uint16(holder)+1)
		if j < 0 {
			return
		}
		copy(s.holders[j:], s.holders[j+1:])
		s.holders[inline-1] = 0
		if s.holders[0] == 0 {
			t.free(i)
		}
	}
}

// narrow moves the holders of a bitmap back into the slot if they are few.
func (t *Table) narrow(i int, bitmap uint32) {
	n := 0
	for _, w := range t.bitmaps[bitmap] {
		n += bits.OnesCount64(w)
	}
	if n > inline/2 { // not at the limit, where one holder would move it back and forth
		return
	}
	s := &t.slots[i]
	s.holders = [inline]uint16{}
	n = 0
	for w, x := range t.bitmaps[bitmap] {
		for ; x != 0; x &= x - 1 {
			s.holders[n] = uint16(w*64+bits.TrailingZeros64(x)) + 1
			n++
		}
	}
	t.unused = append(t.unused, bitmap)
	if n == 0 {
		t.free(i)
	}
}

// free empties a slot and moves later ones up, so that no search stops before its key.
func (t *Table) free(i int) {
	t.blocks--
	mask := len(t.slots) - 1
	for j := (i + 1) & mask; t.slots[j].holders[0] != 0; j = (j + 1) & mask {
		if h := t.home(t.slots[j].key); (j-h)&mask >= (j-i)&mask {
			t.slots[i] = t.slots[j]
			i = j
		}
	}
	t.slots[i] = slot{}
}

// RemoveAll records that a holder lost everything.
func (t *Table) RemoveAll(holder int) {
	var keys []uint64
	for i := range t.slots {
		if s := &t.slots[i]; s.holders[0] != 0 && t.has(s, holder) {
			keys = append(keys, s.key)
		}
	}
	for _, k := range keys {
		t.Remove(k, holder)
	}
}

func (t *Table) has(s *slot, holder int) bool {
	if s.isWide() {
		return t.bitmaps[s.bitmap()][holder/64]&(1<<(holder%64)) != 0
	}
	return slices.Contains(s.holders[:], uint16(holder)+1)
}

// Lookup sets for each holder the number of a prompt's blocks that it has, from the first one on
// without a gap. hits has a place for each holder.
func (t *Table) Lookup(keys []uint64, hits []int) {
	clear(hits)
	n := min(len(hits), t.holders)
	var lefts, fews [MaxHolders / 64]uint64
	left, few := lefts[:(n+63)/64], fews[:(n+63)/64] // left: the holders without a gap so far
	for h := range n {
		left[h/64] |= 1 << (h % 64)
	}
	for i, key := range keys {
		s := &t.slots[t.find(key)]
		has := few
		if s.isWide() {
			has = t.bitmaps[s.bitmap()]
		} else {
			clear(few)
			for _, h := range s.holders {
				if h > 0 && int(h) <= n {
					few[(h-1)/64] |= 1 << ((h - 1) % 64)
				}
			}
		}
		var some uint64
		for w, x := range left {
			for lost := x &^ has[w]; lost != 0; lost &= lost - 1 {
				hits[w*64+bits.TrailingZeros64(lost)] = i
			}
			left[w] = x & has[w]
			some |= left[w]
		}
		if some == 0 {
			return
		}
	}
	for w, x := range left {
		for ; x != 0; x &= x - 1 {
			hits[w*64+bits.TrailingZeros64(x)] = len(keys)
		}
	}
}
