package index

import (
	"slices"
	"testing"
)

// A set without elements is gone, so that tables by peer end with their entries.
func TestSets(t *testing.T) {
	s := Sets[string, int]{}
	if !s.Add("a", 1) || s.Add("a", 1) || !s.Add("a", 2) || s.Remove("b", 1) || s.Remove("a", 3) {
		t.Errorf("%v", s)
	}
	if !s.Remove("a", 1) || s.Remove("a", 1) || len(s["a"]) != 1 {
		t.Errorf("%v", s)
	}
	if !s.Remove("a", 2) || len(s) != 0 {
		t.Errorf("%v: want no set", s)
	}
}

func TestRemove(t *testing.T) {
	if got := Remove([]int{1, 2, 3, 2}, 2); !slices.Equal(got, []int{1, 3, 2}) {
		t.Errorf("%v", got)
	}
	if got := Remove([]int{1}, 2); !slices.Equal(got, []int{1}) {
		t.Errorf("%v", got)
	}
}
