// Package index is the table of the pages that one tier holds: key to node, off Go's heap.
//
// Invariants: a key has at most one node; a node's number is reused only after Delete; node 0 is
// none. The table takes 52 bytes per page, and with links and history of store/evict at most 80,
// so 10 million pages take 800 MB that the garbage collector does not walk. It does not lock: the
// tier that owns it does. No I/O but for the memory, no goroutines.
package index

import (
	"errors"
	"fmt"
	"hash/maphash"
	"math/bits"

	"github.com/kvspray/kvspray/store/offheap"
	"github.com/kvspray/kvspray/store/page"
)

// MaxPages bounds a table: what fits into the numbers of nodes.
const MaxPages = 1<<32 - 2

// ErrFull is returned by Insert when all nodes are taken.
var ErrFull = errors.New("the index has no room for another page")

// Node numbers an entry. 0 is none.
type Node uint32

// State is what an entry stands for.
type State uint8

// The states of an entry.
const (
	Free    State = iota
	Filling       // its bytes are being written, and are not read
	Live          // its bytes are whole
	Gone          // its bytes are gone, and the policy still needs its number
)

// Entry is what is known of one page. Key is written by Insert only.
type Entry struct {
	Key    page.Key
	CRC    uint32 // CRC-32C of the page
	Loc    uint32 // where the page is; its tier gives the number its meaning
	chain  Node   // the next in the bucket, or the next that is free
	Pins   uint16 // how many readers and holders keep the bytes where they are
	State  State
	Doomed bool // it is removed when the last pin goes
}

// Table holds entries. Its owner locks.
type Table struct {
	entries *offheap.Array[Entry]
	buckets *offheap.Array[Node]
	seed    maphash.Seed // keys come from others, and cannot be chosen to share a bucket
	free    Node         // head of the list of deleted nodes
	fresh   Node         // nodes from here on were never used
	used    int
}

// New makes a table for up to pages pages.
func New(pages int) (*Table, error) {
	if pages < 1 || pages > MaxPages {
		return nil, fmt.Errorf("index: %d pages: must be 1 to %d", pages, uint64(MaxPages))
	}
	entries, err := offheap.New[Entry](pages + 1)
	if err != nil {
		return nil, fmt.Errorf("index of %d pages: %w", pages, err)
	}
	buckets, err := offheap.New[Node](pages)
	if err != nil {
		entries.Free()
		return nil, fmt.Errorf("index of %d pages: %w", pages, err)
	}
	return &Table{entries: entries, buckets: buckets, seed: maphash.MakeSeed(), fresh: 1}, nil
}

// Close frees the table.
func (t *Table) Close() {
	t.entries.Free()
	t.buckets.Free()
}

// Cap is how many entries fit.
func (t *Table) Cap() int { return len(t.buckets.Elems()) }

// Len is how many entries there are, those of state Gone among them.
func (t *Table) Len() int { return t.used }

// Bytes is the memory that a full table takes.
func (t *Table) Bytes() int { return t.entries.Bytes() + t.buckets.Bytes() }

// Last is the highest node that was ever used: what a walk over all entries has to visit.
func (t *Table) Last() Node { return t.fresh - 1 }

// At is the entry of a node.
func (t *Table) At(n Node) *Entry { return &t.entries.Elems()[n] }

// Hash is the hash of a key in this table.
func (t *Table) Hash(k *page.Key) uint64 { return maphash.Bytes(t.seed, k[:]) }

// bucket maps a hash to [0, buckets) by its high bits, so that any number of buckets will do.
func (t *Table) bucket(hash uint64) *Node {
	b := t.buckets.Elems()
	i, _ := bits.Mul64(hash, uint64(len(b)))
	return &b[i]
}

// Find returns the node of a key; 0: there is none.
func (t *Table) Find(k *page.Key) Node { return t.find(k, *t.bucket(t.Hash(k))) }

func (t *Table) find(k *page.Key, n Node) Node {
	entries := t.entries.Elems()
	for n != 0 && entries[n].Key != *k {
		n = entries[n].chain
	}
	return n
}

// lookAhead is how many keys FindAll has under way at once.
const lookAhead = 64

// FindAll stores the node of each key in nodes, which is as long. It first reads the buckets of
// many keys and then their entries, so that the misses of many keys wait for memory at the same
// time.
func (t *Table) FindAll(keys []page.Key, nodes []Node) {
	for len(keys) > 0 {
		n := min(len(keys), lookAhead)
		for i := range n {
			nodes[i] = *t.bucket(t.Hash(&keys[i]))
		}
		for i := range n {
			nodes[i] = t.find(&keys[i], nodes[i])
		}
		keys, nodes = keys[n:], nodes[n:]
	}
}

// Insert makes an entry of state Filling for a key that has none.
func (t *Table) Insert(k *page.Key) (Node, error) {
	n := t.free
	switch {
	case n != 0:
		t.free = t.At(n).chain
	case int(t.fresh) <= t.Cap():
		n = t.fresh
		t.fresh++
	default:
		return 0, ErrFull
	}
	head := t.bucket(t.Hash(k))
	*t.At(n) = Entry{Key: *k, State: Filling, chain: *head}
	*head = n
	t.used++
	return n, nil
}

// Delete frees the entry of a node.
func (t *Table) Delete(n Node) {
	e := t.At(n)
	at := t.bucket(t.Hash(&e.Key))
	for *at != n {
		if *at == 0 {
			panic("index: delete of an entry that is in no bucket")
		}
		at = &t.At(*at).chain
	}
	*at = e.chain
	*e = Entry{chain: t.free}
	t.free = n
	t.used--
}
