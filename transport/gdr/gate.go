package gdr

import (
	"context"
	"sync"
	"time"
)

// Bounds of set-ups, of each rail and each way. A set-up is from the first command to the device until the lane is up or refused: four
// commands that a NIC's firmware does one after the other, and three round trips. Dialled and accepted ones have gates of their own: who
// dials holds a place while the other end takes one, so with one gate for both two ends could wait for each other.
const (
	maxSetUps     = 8    // at a time
	setUpRate     = 250  // a second: a mesh of 64 nodes with 4 queue pairs for each pair of rails is there within 2 s
	setUpBurst    = 8    // that may begin at once
	maxHalfOpen   = 1024 // accepted connections that wait for the dialer's word or for a place; more are closed, and dialled again
	setUpInterval = time.Second / setUpRate
)

// gate lets set-ups begin: so many at a time, and so many a second.
type gate struct {
	places chan struct{}

	mu  sync.Mutex
	due time.Time // when the next one may begin, were there no burst; guarded by mu
}

func newGate() *gate { return &gate{places: make(chan struct{}, maxSetUps)} }

// enter waits for a place and for its turn, in the order of arrival. leave gives the place back.
func (g *gate) enter(ctx context.Context) error {
	select {
	case g.places <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	wait := g.turn(time.Now())
	if wait <= 0 {
		return nil
	}
	turn := time.NewTimer(wait)
	defer turn.Stop()
	select {
	case <-turn.C:
		return nil
	case <-ctx.Done():
		g.leave()
		return ctx.Err()
	}
}

func (g *gate) leave() { <-g.places }

// turn takes the next turn and says how long it is until then: maxSetUps intervals at most, since whoever waits holds a place.
func (g *gate) turn(now time.Time) time.Duration {
	g.mu.Lock()
	defer g.mu.Unlock()
	if earliest := now.Add(-(setUpBurst - 1) * setUpInterval); g.due.Before(earliest) {
		g.due = earliest
	}
	wait := g.due.Sub(now)
	g.due = g.due.Add(setUpInterval)
	return wait
}
