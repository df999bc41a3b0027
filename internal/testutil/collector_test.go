// SPDX-License-Identifier: Apache-2.0

package testutil

import (
	"sync/atomic"
	"testing"
)

// quietTB takes the verdict on what is meant to fail.
type quietTB struct {
	testing.TB
	failed bool
}

func (q *quietTB) Helper()               {}
func (q *quietTB) Logf(string, ...any)   {}
func (q *quietTB) Errorf(string, ...any) { q.failed = true }

// One long copy cannot be preempted, and holds the collector; the same in pieces does not.
func TestLetsCollectorIn(t *testing.T) {
	if testing.Short() {
		Skip(t, "long", "copies gigabytes; run without -short")
	}
	src, dst := make([]byte, 1<<29), make([]byte, 1<<29)
	for _, c := range []struct {
		name  string
		piece int
		held  bool
	}{{"whole", len(src), true}, {"pieces", 64 << 10, false}} {
		var stop atomic.Bool
		done := make(chan struct{})
		go func() {
			defer close(done)
			for at := 0; !stop.Load(); at = (at + c.piece) % len(src) {
				copy(dst[at:at+c.piece], src[at:at+c.piece])
			}
		}()
		q := &quietTB{TB: t}
		LetsCollectorIn(q)
		stop.Store(true)
		<-done
		if q.failed != c.held {
			t.Errorf("%s: found held: %v, want %v", c.name, q.failed, c.held)
		}
	}
}
