package exec

import (
	"testing"

	"github.com/kvspray/kvspray/internal/testutil"
)

// A hundred transfers of 256 MiB are open, and each slice that lands is followed by the next one.
func TestMeasureCollectorDelayOfExec(t *testing.T) {
	testutil.Measures(t)
	x := newLoaded(t, 100, 1<<16)
	testutil.LetsCollectorInWhile(t, func() {
		if dst, full := x.slice(); full {
			x.end(dst)
		}
	})
}
