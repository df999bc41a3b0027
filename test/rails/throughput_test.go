// SPDX-License-Identifier: Apache-2.0

package rails

import (
	"slices"
	"testing"
	"time"

	"github.com/kvspray/kvspray/bench/railsbench"
	"github.com/kvspray/kvspray/bench/timeline"
)

// Shares of what plain streams over all rails at once carry.
const (
	warmGoal      = 0.97
	coldGoal      = 0.93
	liarsColdGoal = 0.90
)

// mix is a set of rails.
type mix struct {
	name   string
	rates  []string
	claims []string
}

// add moves transfers over a mix, cold and warm in turns with plain streams, judges the shares, and
// returns them.
func add(t *testing.T, m mix, policy string, block int, n int, coldLeast, warmLeast float64) (cold,
	warm []float64) {
	t.Helper()
	rr := rates(t, m.rates...)
	f := open(t, railsbench.Setup{Rates: rr, Claims: rates(t, m.claims...), Policy: policy})
	var sum timeline.Rate
	for _, r := range rr {
		sum += r
	}
	size := total()
	for size > 16*mib && sum.Over(time.Second) < float64(size) {
		size /= 2 // half a second to a second each
	}
	p := engines(t, f, block, size, 2)
	more := patience{left: moreRounds}
	if busy {
		n = 1
	}
	before := together(t, f)
	for i := 0; i < n || more.again(median(cold) >= coldLeast && median(warm) >= warmLeast); i++ {
		if i > 0 {
			// The sidecars of the last round know the rails. These do not.
			renew(t, f, p)
		}
		c := rate(transfer(t, p, railsbench.Order{}))
		w := rate(transfer(t, p, railsbench.Order{}))
		after := together(t, f)
		plain := (before + after) / 2
		before = after
		cold, warm = append(cold, float64(c/plain)), append(warm, float64(w/plain))
	}
	verdict(t, "cold", cold, coldLeast, &more)
	verdict(t, "warm", warm, warmLeast, &more)
	return cold, warm
}

func verdict(t *testing.T, what string, v []float64, least float64, more *patience) {
	t.Helper()
	worst := slices.Min(v)
	t.Logf("%s: worst %.3f, median %.3f of plain streams in %d runs", what, worst, median(v), len(v))
	judged := median(v)
	if how == long {
		judged = worst
	}
	if judged < least && more.judges(t) {
		t.Errorf("%s: %.3f of what plain streams carry, want %.2f: %.3f", what, judged, least, v)
	}
}

// Unequal rails add up, cold and warm, whatever the blocks.
func TestRailsAddUp(t *testing.T) {
	only(t, minute)
	n := 3
	if how == long {
		n = 10
	}
	for _, block := range []int{16 * kib, 64 * kib, 1 * mib} {
		t.Run(timeline.FormatSize(int64(block)), func(t *testing.T) {
			m := mix{rates: []string{"2gbit", "1gbit", "500mbit", "500mbit"}}
			if tenth {
				m.rates = []string{"200mbit", "100mbit", "50mbit", "50mbit"}
			}
			add(t, m, "", block, n, coldGoal, warmGoal)
		})
	}
}

// Any other mix, and rails that are not what they claim.
func TestOtherMixes(t *testing.T) {
	only(t, minute)
	mixes := []mix{{"one in a hundred", []string{"1gbit", "50mbit"}, nil}}
	n := 2
	if how == long {
		n = 10
		// Two cores that the shapers of eight rails keep busy are late by more than a window of 2 ms now
		// and then.
		mixes = append(mixes, mix{"eight", []string{"1gbit", "500mbit", "300mbit", "200mbit", "100mbit",
			"100mbit", "50mbit", "50mbit"}, nil},
			mix{"two equal", []string{"1gbit", "1gbit"}, nil}, mix{"three", []string{"2gbit", "200mbit",
				"50mbit"}, nil},
			mix{"eight, one fast", []string{"2gbit", "500mbit", "300mbit", "200mbit", "100mbit", "100mbit",
				"50mbit", "50mbit"}, nil},
			mix{"slow", []string{"100mbit", "70mbit", "50mbit"}, nil},
			mix{"five", []string{"1gbit", "800mbit", "600mbit", "400mbit", "200mbit"}, nil})
	}
	for _, m := range mixes {
		t.Run(m.name, func(t *testing.T) {
			add(t, m, "", 16*kib, n, coldGoal, warmGoal)
		})
	}
	t.Run("a tenth of its claim", func(t *testing.T) {
		liar := mix{rates: []string{"200mbit", "1gbit", "500mbit", "500mbit"}, claims: []string{"2gbit",
			"1gbit", "500mbit", "500mbit"}}
		// at these rates two cores are late for its windows: two builds of which neither is slower had
		// 0.90 to 0.99 in turns
		if how != long {
			liar = mix{rates: []string{"20mbit", "100mbit", "50mbit", "50mbit"}, claims: []string{"200mbit",
				"100mbit", "50mbit", "50mbit"}}
		}
		add(t, liar, "", 16*kib, n, liarsColdGoal, warmGoal)
	})
}

// What other engines do, beside it: each slice to the next rail, or shares by what links claim.
// They are here to be compared with; where a link lies, or claims nothing, they are as slow as that
// link makes them: the slowest rail sets the pace of all four (2 of 4 Gbit/s, or 0.8 of 2.2), or
// the liar that of all that it claims.
func TestFixedPolicies(t *testing.T) {
	only(t, long)
	const unbounded = 2 // more than all rails carry
	type bounds struct{ least, most float64 }
	spray, paced, lied := bounds{liarsColdGoal, unbounded}, bounds{0.35, 0.60}, bounds{0.10, 0.60}
	unequal := []string{"2gbit", "1gbit", "500mbit", "500mbit"}
	for _, x := range []struct {
		mix
		want map[string]bounds // by policy
	}{
		{mix{"claims nothing", unequal, nil}, map[string]bounds{"spray": spray, "round-robin": paced,
			"weighted": paced}},
		{mix{"claims are true", unequal, unequal}, map[string]bounds{"spray": spray, "round-robin": paced,
			"weighted": {paced.most, unbounded}}},
		{mix{"one lies", []string{"200mbit", "1gbit", "500mbit", "500mbit"}, unequal},
			map[string]bounds{"spray": spray, "round-robin": lied, "weighted": lied}},
	} {
		for policy, want := range x.want {
			t.Run(policy+"/"+x.name, func(t *testing.T) {
				cold, warm := add(t, x.mix, policy, 16*kib, 3, want.least, want.least)
				for what, v := range map[string][]float64{"cold": cold, "warm": warm} {
					if best := slices.Max(v); best > want.most && judges(t) {
						t.Errorf("%s: %.3f of what plain streams carry, no more than %.2f is possible that way: %.3f",
							what, best, want.most, v)
					}
				}
			})
		}
	}
}
