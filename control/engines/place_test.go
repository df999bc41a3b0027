package engines

import (
	"slices"
	"testing"
)

// The ranks of an engine are named stage by stage; an engine without sizes has one rank.
func TestPlace(t *testing.T) {
	for _, x := range []struct {
		place Place
		rank  string
		ranks []string
	}{
		{Place{}, "pp0/tp0", []string{"pp0/tp0"}},
		{Place{PP: 1, TP: 0, PPSize: 2, TPSize: 2}, "pp1/tp0",
			[]string{"pp0/tp0", "pp0/tp1", "pp1/tp0", "pp1/tp1"}},
	} {
		if got := x.place.Rank(); got != x.rank {
			t.Errorf("%+v: rank %s, want %s", x.place, got, x.rank)
		}
		if got := x.place.Ranks(); !slices.Equal(got, x.ranks) || x.place.World() != len(x.ranks) {
			t.Errorf("%+v: ranks %v of %d, want %v", x.place, got, x.place.World(), x.ranks)
		}
	}
}
