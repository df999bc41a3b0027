// Package index has the small tables that the parts of an executor keep beside their own.
//
// Go walks maps in random order. An event that concerns many leases takes them in the order of
// their ids, so that equal events have equal consequences and a failure can be repeated.
package index

import (
	"bytes"
	"cmp"
	"slices"

	"github.com/kvspray/kvspray/transfer"
)

// Sets has a set of T for each K, for example the leases of each peer, so that the loss of a peer
// costs what concerns that peer.
type Sets[K, T comparable] map[K]map[T]struct{}

// Add puts x into the set of k. It reports whether x is new.
func (s Sets[K, T]) Add(k K, x T) (added bool) {
	if s[k] == nil {
		s[k] = map[T]struct{}{}
	}
	before := len(s[k])
	s[k][x] = struct{}{}
	return len(s[k]) > before
}

// Remove takes x out of the set of k. It reports whether x was there.
func (s Sets[K, T]) Remove(k K, x T) (removed bool) {
	all := s[k]
	if _, removed = all[x]; removed {
		if delete(all, x); len(all) == 0 {
			delete(s, k)
		}
	}
	return removed
}

// Remove deletes the first v of s.
func Remove[T comparable](s []T, v T) []T {
	if i := slices.Index(s, v); i >= 0 {
		return slices.Delete(s, i, i+1)
	}
	return s
}

// CompareLeases orders leases by id.
func CompareLeases(a, b transfer.LeaseID) int {
	return cmp.Or(bytes.Compare(a.Boot[:], b.Boot[:]), cmp.Compare(a.ID, b.ID))
}
