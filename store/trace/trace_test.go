package trace

import (
	"reflect"
	"sort"
	"testing"
)

// The generated trace has the figures of the published one.
func TestConversationHasTheShapeOfMooncakes(t *testing.T) {
	const requests = 12_031
	g := New(Conversation(), 1)
	seen := map[uint64]bool{}
	var blocks, hits, first int
	var lengths []int
	for range requests {
		r := g.Next()
		n := 0
		for n < len(r.Pages) && seen[r.Pages[n]] {
			n++
		}
		if n <= 1 {
			first++
			lengths = append(lengths, len(r.Pages))
		}
		hits, blocks = hits+n, blocks+len(r.Pages)
		for _, p := range r.Pages {
			seen[p] = true
		}
	}
	sort.Ints(lengths)
	t.Logf("%d requests, %d first turns, %d blocks, %d unique, hits %.1f%%, first turns median %d",
		requests, first, blocks, len(seen), 100*float64(hits)/float64(blocks),
		lengths[len(lengths)/2])
	within := func(what string, got, want, tolerance float64) {
		if got < want*(1-tolerance) || got > want*(1+tolerance) {
			t.Errorf("%s: %.3g, the published trace has %.3g", what, got, want)
		}
	}
	within("first turns", float64(first), 7373, 0.1)
	within("unique blocks", float64(len(seen)), 182_790, 0.1)
	within("share of blocks seen before", float64(hits)/float64(blocks), 0.366, 0.1)
	within("median of first turns", float64(lengths[len(lengths)/2]), 11, 0.15)
}

func TestOneSeedGivesOneTrace(t *testing.T) {
	a, b, c := New(Conversation(), 3), New(Conversation(), 3), New(Conversation(), 4)
	same := true
	for range 500 {
		x := a.Next()
		if !reflect.DeepEqual(x, b.Next()) {
			t.Fatal("two traces of one seed differ")
		}
		same = same && reflect.DeepEqual(x, c.Next())
	}
	if same {
		t.Error("two seeds give one trace")
	}
}
