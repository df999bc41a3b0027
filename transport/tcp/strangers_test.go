package tcp

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transport/transporttest"
)

// dials opens and closes lanes over the second rail, and returns the p99 of the time that one
// takes.
func dials(t *testing.T, p *transporttest.Pair) time.Duration {
	var took []time.Duration
	for range 200 {
		took = append(took, p.Redial(1))
		<-time.After(5 * time.Millisecond)
	}
	slices.Sort(took)
	return took[len(took)*99/100]
}

// Strangers without a key hold thousands of connections to one rail and open thousands a second:
// lanes over another rail open as if they were alone.
func TestMeasureLanesAmongStrangers(t *testing.T) {
	testutil.Measures(t)
	for name, from := range map[string]func(int) [4]byte{"one address": testutil.OneStranger,
		"many addresses": testutil.ManyStrangers} {
		t.Run(name, func(t *testing.T) {
			var log testutil.Buffer
			p := transporttest.NewPair(t, factory(Config{Rails: []Rail{{Name: "a", Listen: "127.0.0.1:0"},
				{Name: "b", Listen: "127.0.0.2:0"}},
				Log: slog.New(slog.NewTextHandler(&log, nil))}))
			b := p.B.Backend.(*Backend)
			var took time.Duration
			good := false
			const tries = 3
			for range tries { // a machine that is busy with other things is slow alone, too
				alone := dials(t, p)
				stop := testutil.Strangers(t, p.B.Rails[0].Address, 10_000, 2000, from, nil)
				began := time.Now()
				beside := dials(t, p)
				each := time.Since(began)
				took += each
				t.Logf(
					"%d connections of strangers in %v, %d closed for others; p99 of a new lane %v, alone %v",
					stop(), each, b.gate.Evicted(), beside, alone)
				if good = beside <= max(50*time.Millisecond, 3*alone); good {
					break
				}
			}
			if !good {
				t.Errorf("p99 of a new lane was over 50ms in %d tries", tries)
			}
			if n := strings.Count(log.String(), "\n"); n > int(took/time.Second)+tries+1 {
				t.Errorf("%d lines of log in %v", n, took)
			}
			if held := b.gate.Held(); held > maxOpening {
				t.Errorf("%d unproved connections, at most %d", held, maxOpening)
			}
		})
	}
}

// A receiver that has as many lanes as may be refuses one more before it is open; with room it
// opens again.
func TestOneLaneTooMany(t *testing.T) {
	p := transporttest.NewPair(t, factory(Config{}))
	b := p.B.Backend.(*Backend)
	b.mu.Lock()
	b.reserved += maxLanes
	b.mu.Unlock()
	peer, _ := p.A.PeerKey(p.B.Boot)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if _, err := p.A.Backend.Dial(ctx, peer, p.A.Rails[0], p.B.Rails[0]); !errors.Is(err,
		wire.ErrRefused) {
		t.Fatalf("one lane too many: %v", err)
	}
	b.mu.Lock()
	if len(b.lanes) > 0 || b.reserved != maxLanes {
		t.Errorf("%d lanes, %d reserved", len(b.lanes), b.reserved)
	}
	b.reserved = 0
	b.mu.Unlock()
	if _, err := p.A.Backend.Dial(ctx, peer, p.A.Rails[0], p.B.Rails[0]); err != nil {
		t.Fatal(err)
	}
	a := p.A.Backend.(*Backend)
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.reserved != 0 || len(a.lanes) != 1 {
		t.Errorf("the dialer has %d lanes, %d reserved", len(a.lanes), a.reserved)
	}
}
