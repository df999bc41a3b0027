package sidecar

import (
	"log/slog"
	"testing"
	"time"

	"github.com/kvspray/kvspray/control/driver"
	"github.com/kvspray/kvspray/internal/sys/topo"
	"github.com/kvspray/kvspray/internal/testutil"
)

// A start that fails late ends, also where an address was to be bound later: what would do that
// waits for a sidecar that is started, which this one never is. Run joins it before it says why.
func TestLookAgainEndsWithAFailedStart(t *testing.T) {
	testutil.Bubble(t, func(*testing.T) {
		proc := driver.NewGoroutines()
		n := newRailSet(nil, proc, &openBackends{}, make(chan struct{}), slog.New(slog.DiscardHandler))
		n.lookAgain(&topo.Host{})
		time.AfterFunc(2*railRetry, proc.Stop)
		proc.Wait() // it would be for ever: then synctest says that all are blocked
	})
}
