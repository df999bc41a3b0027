package pages

import (
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/internal/metrics"
	"github.com/kvspray/kvspray/internal/testutil"
)

// Requests that all fail, as those of a disk that is gone, leave a line of the log in a second.
func TestALogOfFailures(t *testing.T) {
	m, err := metrics.NewStore(prometheus.NewRegistry(), func() (s metrics.StoreSample) { return s })
	if err != nil {
		t.Fatal(err)
	}
	testutil.Bubble(t, func(t *testing.T) {
		var logs testutil.Log
		s := New(Options{Metrics: m, Log: slog.New(slog.NewTextHandler(&logs, nil))})
		for range 2 {
			for range 1000 {
				s.ended(&engines.Worker{}, &connector.Pages{},
					&engines.Completion{Status: engines.StatusFailed})
			}
			time.Sleep(2 * time.Second)
		}
		if n := strings.Count(logs.String(), "store request"); n != 2 ||
			!strings.Contains(logs.String(), "left_out=999") {
			t.Errorf("%d lines for 2,000 failures:\n%s", n, &logs)
		}
	})
}
