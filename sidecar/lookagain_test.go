package sidecar

import (
	"log/slog"
	"testing"
	"time"

	"github.com/kvspray/kvspray/control/driver"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/sys/topo"
	"github.com/kvspray/kvspray/internal/testutil"
)

// A start that fails late ends, also where an address was to be bound later: the goroutine that
// would bind it waits for the end of the start, which never comes. Run joins it before it returns
// the error.
func TestLookAgainEndsWithAFailedStart(t *testing.T) {
	testutil.Bubble(t, func(*testing.T) {
		proc := driver.NewGoroutines()
		n := newRailSet(&config.Config{}, proc, &openBackends{}, make(chan struct{}),
			slog.New(slog.DiscardHandler))
		n.lookAgain(&topo.Host{})
		time.AfterFunc(2*railRetry, proc.Stop)
		proc.Wait() // if it were for ever, synctest would report that all are blocked
	})
}
