package hello

import (
	"fmt"
	"math"
	"strings"
	"testing"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
)

// Each invalid value of a rail is refused with a message that names it, and all else is kept.
func TestCheckRails(t *testing.T) {
	rail := func(name string, change func(*peerv1.Rail)) *peerv1.Rail {
		r := &peerv1.Rail{Transport: "tcp", Name: name, Address: "10.0.0.1:1", Gbps: 100}
		if change != nil {
			change(r)
		}
		return r
	}
	for _, x := range []struct {
		rails   []*peerv1.Rail
		good    string
		message string
	}{
		{nil, "", ""},
		{[]*peerv1.Rail{rail("a", nil), rail("b", nil)}, "a:100 b:100", ""},
		{[]*peerv1.Rail{rail("a", func(r *peerv1.Rail) { r.Gbps = 1e9 }), rail("b", nil)}, "a:0 b:100",
			"rail a: a speed of 1e+09"},
		{[]*peerv1.Rail{rail("a", func(r *peerv1.Rail) { r.Gbps = -1 })}, "a:0", "rail a: a speed of -1"},
		{[]*peerv1.Rail{rail("a", func(r *peerv1.Rail) { r.Gbps = math.NaN() })}, "a:0",
			"rail a: a speed of NaN"},
		{[]*peerv1.Rail{rail("a", func(r *peerv1.Rail) { r.Gbps = math.Inf(1) })}, "a:0",
			"rail a: a speed of +Inf"},
		{[]*peerv1.Rail{rail("a", nil), rail("a", nil)}, "a:100", "rail a: named twice"},
		{[]*peerv1.Rail{rail("", nil), nil, rail("b", nil)}, "b:100", "rail 0"},
		{[]*peerv1.Rail{rail(strings.Repeat("x", MaxText+1), nil)}, "", "rail 0"},
		{[]*peerv1.Rail{rail("a\nb", nil)}, "", "not printable"},
		{[]*peerv1.Rail{rail("a", func(r *peerv1.Rail) { r.Address = "\x1b[2J:1" })}, "",
			"not printable"},
		{[]*peerv1.Rail{rail("a", func(r *peerv1.Rail) { r.Address = "/run/a b/ü" }),
			rail("b", func(r *peerv1.Rail) { r.Address = "" })}, "a:100 b:100", ""},
		{[]*peerv1.Rail{rail("a", func(r *peerv1.Rail) { r.Address = strings.Repeat("x", MaxText+1) })},
			"", "rail 0"},
	} {
		good, refused := CheckRails(x.rails)
		var got []string
		for _, r := range good {
			got = append(got, fmt.Sprintf("%s:%g", r.Name, r.Gbps))
		}
		if s := strings.Join(got, " "); s != x.good {
			t.Errorf("kept %q, want %q", s, x.good)
		}
		if s := strings.Join(refused, "; "); !strings.Contains(s, x.message) ||
			x.message == "" && s != "" {
			t.Errorf("message %q, want %q", s, x.message)
		}
	}
	var many []*peerv1.Rail
	for i := range 10000 {
		many = append(many, rail(fmt.Sprint("r", i), func(r *peerv1.Rail) { r.Gbps = 1e12 }))
	}
	good, refused := CheckRails(many)
	if len(good) != MaxRails || len(refused) > maxRailMessages {
		t.Errorf("%d of 10000 rails kept, %d messages", len(good), len(refused))
	}
}
