// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"bytes"
	"context"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/peer/keys"
	"github.com/kvspray/kvspray/internal/testutil"
)

// What strangers without a key do while members meet.
const (
	strangersHeld  = 8000 // one process of the test holds both ends, and has 20,000 descriptors
	strangersRate  = 2000 // a second
	membersMeet    = 200  // openings that are timed
	strangersTries = 3
	openingP99     = 50 * time.Millisecond
)

// safeBuffer may be written to by a logger and read meanwhile.
type safeBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *safeBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *safeBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// p99 of durations.
func p99(d []time.Duration) time.Duration {
	slices.Sort(d)
	return d[len(d)*99/100]
}

// Strangers without a key hold thousands of connections and open thousands a second: members meet and open lanes as if they were alone.
func TestStrangers(t *testing.T) {
	c, err := keys.NewCluster()
	if err != nil {
		t.Fatal(err)
	}
	for name, from := range map[string]func(int) [4]byte{"one address": testutil.OneStranger, "many addresses": testutil.ManyStrangers} {
		t.Run(name, func(t *testing.T) {
			var log safeBuffer
			sec := secured(t, c)
			victim := start(t, func(o *Options) {
				sec(o)
				slow(o)
				o.Log = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
			})
			honest := start(t, func(o *Options) { sec(o); slow(o) })
			join(t, honest, victim)
			var took time.Duration
			good := false
			for range strangersTries { // a machine that is busy with other things is slow alone, too
				aloneHello, aloneLane := openings(t, honest, victim)
				stop := testutil.Strangers(t, victim.Endpoint(), strangersHeld, strangersRate, from)
				began := time.Now()
				hello, lane := openings(t, honest, victim)
				each := time.Since(began)
				took += each
				t.Logf("%d connections of strangers in %v, %d closed for others; p99 of a hello %v (alone %v), of a new lane %v (alone %v)", stop(), each,
					victim.gate.Evicted(), hello, aloneHello, lane, aloneLane)
				if good = hello <= max(openingP99, 3*aloneHello) && lane <= max(openingP99, 3*aloneLane); good {
					break
				}
			}
			if !good {
				t.Errorf("p99 of an opening was over %v in %d tries", openingP99, strangersTries)
			}
			if held := victim.gate.Held(); held > maxOpening {
				t.Errorf("%d unproved connections held, at most %d", held, maxOpening)
			}
			if n := strings.Count(log.String(), "connection refused"); n > int(took/time.Second)+strangersTries {
				t.Errorf("%d lines about refused connections in %v", n, took)
			}
		})
	}
}

// openings times hellos and new control lanes, and returns the p99 of each.
func openings(t *testing.T, n, to *node) (hello, opened time.Duration) {
	s := n.session(to.opt.Boot)
	var hellos, lanes []time.Duration
	for range membersMeet {
		at := time.Now()
		err := n.call(t.Context(), to.Endpoint(), func(ctx context.Context, c peerv1.PeerClient) error {
			_, err := c.Hello(ctx, helloAs(n.Mesh, n.opt.Boot, n.Endpoint(), 0))
			return err
		})
		hellos = append(hellos, time.Since(at))
		if err != nil {
			t.Fatal(err)
		}
		at = time.Now()
		if err := n.dialLane(t.Context(), s, target{to.Endpoint(), 0}); err != nil {
			t.Fatal(err)
		}
		lanes = append(lanes, time.Since(at))
		s.mu.Lock()
		more := slices.Clone(s.lanes[1:])
		s.mu.Unlock()
		for _, l := range more {
			l.fail(errLinkDown)
		}
		<-time.After(5 * time.Millisecond)
	}
	return p99(hellos), p99(lanes)
}
