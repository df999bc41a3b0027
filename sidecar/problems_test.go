package sidecar

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/testutil"
)

// An optional part that fails is logged once, and once more when it works again, however often its
// error changes.
func TestProblemsAreLoggedOnce(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		var logs testutil.Log
		var fails atomic.Bool
		n := 0
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			logProblems(ctx, slog.New(slog.NewTextHandler(&logs, nil)), func() []problem {
				if n++; fails.Load() {
					return []problem{{"store directory", fmt.Sprint("NOAUTH ", n)}, {"x", "y"}}
				}
				return []problem{{"x", "y"}}
			})
		}()
		for range 2 {
			time.Sleep(time.Minute)
			fails.Store(!fails.Load())
		}
		time.Sleep(time.Minute)
		stop()
		<-done
		for text, want := range map[string]int{"a part fails": 2, "a part works again": 1,
			"NOAUTH": 1, "\n": 3} {
			if got := strings.Count(logs.String(), text); got != want {
				t.Errorf("%q is %d times in the log, want %d:\n%s", text, got, want, &logs)
			}
		}
	})
}
