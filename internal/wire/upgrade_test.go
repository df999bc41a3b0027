package wire

import (
	"errors"
	"strings"
	"testing"
)

// Two ends without a common version each name the one that is older.
func TestWhichEndToUpgrade(t *testing.T) {
	old, next := Versions{V(1, 0), V(1, 4)}, Versions{V(2, 0), V(2, 1)}
	for _, x := range []struct {
		ours, theirs Versions
		want         string
	}{{old, next, "upgrade this sidecar"}, {next, old, "upgrade the peer"}} {
		_, err := Choose(x.ours, x.theirs)
		if !errors.Is(err, ErrVersion) || !strings.HasSuffix(err.Error(), x.want) {
			t.Errorf("%v: want %q", err, x.want)
		}
	}
}
