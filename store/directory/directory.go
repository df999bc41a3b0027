// Package directory has the interface between a store and what remembers which nodes hold which
// pages. Packages embedded and redis implement it.
//
// A directory has hints only. A hint that is lost costs a miss; one that is stale, or that a
// hostile member made, costs a question to a node that has no such page. The node that gets a page
// compares its checksum. So no directory needs to be consistent, or durable.
//
// The boot of a hint ends with its process, so no pointer to an earlier life of a node is followed.
package directory

import (
	"context"
	"encoding/binary"
	"errors"

	"github.com/kvspray/kvspray/store/page"
	"github.com/kvspray/kvspray/transfer"
)

// Bounds.
const (
	MaxHolders = 4             // of one page that a lookup returns
	MaxBatch   = page.MaxBatch // keys of one call
)

// ErrDown marks an error of a call if the service behind a directory refused the call, or cannot be
// reached: a retry does not help. Other errors may be transient.
var ErrDown = errors.New("the directory is down")

// Directory maps pages to their holders. Its methods can be called from any goroutine.
type Directory interface {
	// Announce reports pages that this process holds. It has to be repeated: hints end by their time.
	Announce(ctx context.Context, held []page.Key) error
	// Withdraw reports pages that this process no longer holds.
	Withdraw(ctx context.Context, gone []page.Key) error
	// Lookup adds the holders of keys to found, which is of these keys. With an error it has what was
	// learned until then.
	Lookup(ctx context.Context, keys []page.Key, found *Found) error
	// Close ends the directory. Calls under way end early.
	Close() error
}

// Short is how a directory names a page: the beginning of its key. Two pages that share it are
// mistaken for each other, which costs a miss.
type Short [16]byte

// ShortOf is the name of a page.
func ShortOf(k *page.Key) Short { return Short(k[:len(Short{})]) }

// Word is a part of the name, which is a hash.
func (s *Short) Word() uint64 { return binary.LittleEndian.Uint64(s[:8]) }

// Found is the result of a lookup.
type Found struct {
	Holders []transfer.Boot      // processes that reported pages
	at      [][MaxHolders]uint16 // positions in Holders, from 1 on
	index   map[transfer.Boot]uint16
}

// maxHolders bounds Found.Holders, so that a position fits.
const maxHolders = 1<<16 - 2

// NewFound makes a result for n keys.
func NewFound(n int) *Found {
	return &Found{at: make([][MaxHolders]uint16, n), index: map[transfer.Boot]uint16{}}
}

// Len is the number of keys.
func (f *Found) Len() int { return len(f.at) }

// Add adds a holder of key i. More than MaxHolders are left out.
func (f *Found) Add(i int, h transfer.Boot) {
	n := f.index[h]
	if n == 0 {
		if len(f.Holders) == maxHolders {
			return
		}
		f.Holders = append(f.Holders, h)
		n = uint16(len(f.Holders))
		f.index[h] = n
	}
	for j := range f.at[i] {
		switch f.at[i][j] {
		case n:
			return
		case 0:
			f.at[i][j] = n
			return
		}
	}
}

// Of calls yield with each holder of key i.
func (f *Found) Of(i int) func(yield func(transfer.Boot) bool) {
	return func(yield func(transfer.Boot) bool) {
		for _, n := range f.at[i] {
			if n == 0 || !yield(f.Holders[n-1]) {
				return
			}
		}
	}
}
