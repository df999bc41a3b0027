// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"net/netip"
	"testing"
)

// The address that is preferred decides between lanes that are equally good, whatever came last on
// them; against a lane that is doubted, or has something waiting before it, it does not help.
func TestPreferredAddress(t *testing.T) {
	a, b := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.1.1")
	lanes := func() (x, y *lane) {
		x, y = &lane{local: a}, &lane{local: b}
		x.heard.Store(100)
		y.heard.Store(200)
		return x, y
	}
	for _, c := range []struct {
		name   string
		prefer netip.Addr
		change func(x, y *lane)
		first  bool // the lane from a is chosen
	}{
		{"nothing is preferred", netip.Addr{}, nil, false},
		{"the one on which something came earlier", a, nil, true},
		{"the one on which something came last", b, nil, false},
		{"an address that no lane has", netip.MustParseAddr("10.0.2.1"), nil, false},
		{"something waits", a, func(x, _ *lane) { x.backlog = []byte{1} }, false},
		{"doubted", a, func(x, _ *lane) { x.doubted.Store(150) }, false},
		{"the other is doubted", b, func(_, y *lane) { y.doubted.Store(250) }, true},
	} {
		for _, turned := range []bool{false, true} {
			x, y := lanes()
			if c.change != nil {
				c.change(x, y)
			}
			s := &session{lanes: []*lane{x, y}, prefer: c.prefer}
			if turned {
				s.lanes = []*lane{y, x}
			}
			if got := s.bestLocked(); (got == x) != c.first {
				t.Errorf("%s, turned %v: the lane from %v", c.name, turned, got.local)
			}
		}
	}
}
