package transport

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
)

// Guard counts the current holders of a lease's memory, and closes for good. Enter and Leave
// bracket only non-blocking work (one readv, one bounded copy), so Wait is short.
//
// The zero Guard is open.
type Guard struct {
	state atomic.Int64 // count of holders; guardRevoked is added once
	once  sync.Once
	mu    sync.Mutex
	idle  chan struct{} // closed when revoked and empty; made by the first of Revoke and Wait
	shut  bool
}

const guardRevoked = int64(1) << 62

// Enter takes a hold unless the guard is revoked.
func (g *Guard) Enter() bool {
	if g.state.Add(1) >= guardRevoked {
		g.Leave()
		return false
	}
	return true
}

// Leave releases a hold.
func (g *Guard) Leave() {
	if g.state.Add(-1) == guardRevoked {
		g.emptied()
	}
}

// Revoke closes the guard: no Enter succeeds after it returns. Idempotent.
func (g *Guard) Revoke() {
	g.once.Do(func() {
		if g.state.Add(guardRevoked) == guardRevoked {
			g.emptied()
		}
	})
}

// Revoked reports whether Revoke was called.
func (g *Guard) Revoked() bool { return g.state.Load() >= guardRevoked }

// Idle returns a channel that is closed once the guard is revoked and has no holder.
func (g *Guard) Idle() <-chan struct{} {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.idleLocked()
}

// Empty reports whether the guard is revoked and has no holder: Wait then waits only for the last
// holder's signal.
func (g *Guard) Empty() bool { return g.state.Load() == guardRevoked }

var errOpen = errors.New("the guard is not revoked; revoke first")

// Wait returns once the guard is revoked and has no holder, even if ctx has ended by then.
func (g *Guard) Wait(ctx context.Context) error {
	if !g.Revoked() {
		return errOpen
	}
	select {
	case <-g.Idle():
		return nil
	default:
	}
	select {
	case <-g.Idle():
		return nil
	case <-ctx.Done():
		return fmt.Errorf("the guard still has a holder: %w", ctx.Err())
	}
}

func (g *Guard) emptied() {
	g.mu.Lock()
	defer g.mu.Unlock()
	// A failed Enter passes through here too; the channel closes once.
	if !g.shut {
		g.shut = true
		close(g.idleLocked())
	}
}

func (g *Guard) idleLocked() chan struct{} {
	if g.idle == nil {
		g.idle = make(chan struct{})
	}
	return g.idle
}
