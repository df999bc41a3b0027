package client

import (
	"slices"
	"testing"

	"github.com/kvspray/kvspray/connector/msg"
)

// Lists of open batches never overlap, a list that has ended makes room, and what does not fit is
// refused.
func TestListsDoNotOverlap(t *testing.T) {
	c := &Client{}
	const full = msg.MaxBatchEntries * msg.EntryBytes
	take := func(n uint64) (span, bool) {
		s, ok := c.takeLocked(n)
		if ok {
			c.useLocked(s)
		}
		for i := 1; i < len(c.used); i++ {
			if c.used[i-1].to > c.used[i].from {
				t.Fatalf("lists overlap, or are out of order: %v", c.used)
			}
		}
		return s, ok
	}
	var all []span
	for range listBytes / full {
		s, ok := take(full)
		if !ok {
			t.Fatalf("no room for list %d", len(all))
		}
		all = append(all, s)
	}
	if _, ok := take(1); ok {
		t.Error("a list has room in full memory")
	}
	c.used = slices.DeleteFunc(c.used, func(s span) bool { return s == all[1] })
	first, ok1 := take(48)
	second, ok2 := take(full - 48)
	if !ok1 || !ok2 || first.from != all[1].from || second.to != all[1].to {
		t.Errorf("%v %v, want the place of %v", first, second, all[1])
	}
	if _, ok := take(1); ok {
		t.Error("a list has room in full memory")
	}
}
