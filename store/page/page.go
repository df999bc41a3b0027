// Package page owns the names of what the store holds: pages, their namespaces and their keys.
//
// A page is the KV cache of a fixed number of tokens on one rank of an engine. Its key is a hash of
// everything that its bytes depend on, so two pages with one key have the same bytes. Hence a page
// is immutable, and a second put of a key changes nothing.
//
// Invariants: a Key is H(namespace ‖ page hash), and HMAC of the same under the tenant's secret
// where there is one; all pages of a namespace have one size; two namespaces that differ in any
// field have different ids. The package holds plain values, does no I/O and starts no goroutine.
package page

import (
	"crypto/rand"
	"encoding/hex"
	"math/bits"
)

// MaxBatch is how many keys one request may name.
const MaxBatch = 10_000

// MaxBytes bounds the size of a page. A larger one is a mistake in a unit, not a page: 512 tokens
// of a model with 1 MiB of cache per token have 512 MiB, and engines use pages of 16 to 128 tokens.
const MaxBytes = 64 << 20

// KeyBytes is the length of a Key.
const KeyBytes = 32

// Key names one page, in all stores and for ever.
type Key [KeyBytes]byte

func (k Key) String() string { return hex.EncodeToString(k[:]) }

// Era is a random name of the pages that one tier takes of a namespace from one removal to the
// next. Each page on a medium has its era, and the tier's ledger has the present era of each
// namespace. A removal deletes the era from the ledger. A page of another era never counts, and a
// namespace that the ledger lacks has no pages.
type Era [16]byte

// NewEra returns one that no other namespace or time has.
func NewEra() (e Era) {
	_, _ = rand.Read(e[:]) // never fails
	return e
}

// Bitmap has one bit for each key of a batch, in the batch's order.
type Bitmap []uint64

// NewBitmap returns a bitmap of n bits that are all 0.
func NewBitmap(n int) Bitmap { return make(Bitmap, (n+63)/64) }

// Set sets bit i.
func (b Bitmap) Set(i int) { b[i>>6] |= 1 << (i & 63) }

// Get reports bit i.
func (b Bitmap) Get(i int) bool { return b[i>>6]>>(i&63)&1 == 1 }

// Count is the number of bits that are 1.
func (b Bitmap) Count() (n int) {
	for _, w := range b {
		n += bits.OnesCount64(w)
	}
	return n
}

// Leading is the number of bits that are 1 before the first one that is 0: of a prompt's pages,
// those that an engine can use.
func (b Bitmap) Leading() (n int) {
	for _, w := range b {
		ones := bits.TrailingZeros64(^w)
		n += ones
		if ones < 64 {
			break
		}
	}
	return n
}
