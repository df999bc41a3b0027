package hello

import (
	"errors"
	"strings"
	"testing"

	"github.com/kvspray/kvspray/internal/wire"
)

// Without a common version the error names the older sidecar, on either side.
func TestChoose(t *testing.T) {
	side := func(name string, lowest, highest uint16) Side {
		return Side{Versions: wire.Versions{Min: wire.V(1, lowest), Max: wire.V(1, highest)},
			Address: name + ":1", Release: name}
	}
	old, middle, late := side("old", 0, 1), side("middle", 1, 2), side("new", 2, 3)
	for _, x := range []struct {
		here, there Side
		version     wire.Version
		upgrade     string // empty: there is a common version
	}{
		{old, middle, wire.V(1, 1), ""}, {middle, old, wire.V(1, 1), ""},
		{late, middle, wire.V(1, 2), ""}, {old, late, 0, "old:1"}, {late, old, 0, "old:1"},
	} {
		got, err := Choose(x.here, x.there)
		if got != x.version || (err == nil) != (x.upgrade == "") {
			t.Errorf("%s with %s: %s, %v", x.here, x.there, got, err)
		}
		if err != nil && (!errors.Is(err, ErrRelease) ||
			!strings.Contains(err.Error(), "upgrade the sidecar at "+x.upgrade)) {
			t.Errorf("%s with %s: %v, want the remedy for %s", x.here, x.there, err, x.upgrade)
		}
	}
}
