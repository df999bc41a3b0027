package exec

import (
	"bytes"
	"cmp"
	"iter"
	"slices"

	"github.com/kvspray/kvspray/transfer"
)

// Go walks maps in random order. An event that concerns many leases takes them in the order of
// their ids, so that equal events have equal consequences and a failure can be repeated.

func compareLeases(a, b transfer.LeaseID) int {
	return cmp.Or(bytes.Compare(a.Boot[:], b.Boot[:]), cmp.Compare(a.ID, b.ID))
}

func inOrder(all iter.Seq[*dest]) []*dest {
	return slices.SortedFunc(all, func(a, b *dest) int { return compareLeases(a.ID, b.ID) })
}

func sourcesInOrder(all iter.Seq[*source]) []*source {
	return slices.SortedFunc(all, func(a, b *source) int { return compareLeases(a.ID, b.ID) })
}

func queriesInOrder(all iter.Seq[*query]) []*query {
	return slices.SortedFunc(all, func(a, b *query) int { return cmp.Compare(a.id, b.id) })
}

func workersInOrder(all iter.Seq[*worker]) []*worker {
	return slices.SortedFunc(all, func(a, b *worker) int {
		return bytes.Compare(a.w.Boot[:],
			b.w.Boot[:])
	})
}

func endpointsInOrder(all iter.Seq[*endpoint]) []*endpoint {
	return slices.SortedFunc(all, func(a, b *endpoint) int { return cmp.Compare(a.addr, b.addr) })
}

func bindingsInOrder(all iter.Seq[*partBinding]) []*partBinding {
	return slices.SortedFunc(all, func(a, b *partBinding) int {
		return cmp.Or(compareLeases(a.in.id.Dest, b.in.id.Dest), cmp.Compare(a.part.Rank, b.part.Rank))
	})
}

// keysInOrder are the keys of one transfer.
func keysInOrder(all iter.Seq[transfer.Key], x transfer.XferID) (out []transfer.Key) {
	for k := range all {
		if k.Xfer == x {
			out = append(out, k)
		}
	}
	slices.SortFunc(out, func(a, b transfer.Key) int { return bytes.Compare(a.Hash[:], b.Hash[:]) })
	return out
}

func remove[T comparable](s []T, v T) []T {
	if i := slices.Index(s, v); i >= 0 {
		return slices.Delete(s, i, i+1)
	}
	return s
}
