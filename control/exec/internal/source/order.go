package source

import (
	"bytes"
	"cmp"
	"iter"
	"slices"

	"github.com/kvspray/kvspray/control/exec/internal/index"
	"github.com/kvspray/kvspray/transfer"
)

func bindingsInOrder(all iter.Seq[*partBinding]) []*partBinding {
	return slices.SortedFunc(all, func(a, b *partBinding) int {
		return cmp.Or(index.CompareLeases(a.in.id.Dest, b.in.id.Dest), cmp.Compare(a.part.Rank,
			b.part.Rank))
	})
}

func compareKeys(a, b transfer.Key) int {
	return cmp.Or(bytes.Compare(a.Xfer[:], b.Xfer[:]), bytes.Compare(a.Hash[:], b.Hash[:]))
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
