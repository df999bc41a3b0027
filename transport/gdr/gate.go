package gdr

import (
	"context"
	"sync"
	"time"
)

// Bounds of set-ups, per rail and direction. A set-up lasts from the first command to the device
// until the lane is up or refused: four commands, which a NIC's firmware executes one after
// another, and three round trips. Dialed and accepted set-ups have separate gates: a dialler holds
// a place while the other end takes one, so with one gate two ends could wait for each other.
const (
	maxSetUps = 8 // at a time
	// setUpRate is per second: a mesh of 64 nodes with 4 queue pairs per rail pair is up within 2 s.
	setUpRate     = 250
	setUpBurst    = 8 // that may begin at once
	setUpInterval = time.Second / setUpRate
)

// Bounds of accepted connections.
const (
	maxUnproved = 1024 // of one rail; where one more comes, another one is closed
	maxSource   = 512  // of these, from one source
)

// gate limits set-ups: a number at a time, and a rate.
type gate struct {
	places chan struct{}

	mu  sync.Mutex
	due time.Time // time of the next set-up without a burst; guarded by mu
}

func newGate() *gate { return &gate{places: make(chan struct{}, maxSetUps)} }

// enter waits for a place and for its turn, in the order of arrival. leave releases the place.
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

// turn takes the next turn and returns the time until then: maxSetUps intervals at most, since
// every waiter holds a place.
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
