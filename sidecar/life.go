// SPDX-License-Identifier: Apache-2.0

package sidecar

import (
	"sync"
	"sync/atomic"
)

// life is how far a node has come between its start and its end, and its addresses.
type life struct {
	serving  atomic.Bool
	draining atomic.Bool
	leaving  atomic.Bool
	drain    chan struct{} // closed by the first Drain
	once     sync.Once
	started  chan struct{} // closed once every address is known, or Run has failed

	mu       sync.Mutex // protects the addresses below, which are known once Run has started
	endpoint string
	http     string
}

func newLife() *life {
	return &life{drain: make(chan struct{}), started: make(chan struct{})}
}

// Started is closed once the addresses are known, or Run has failed.
func (l *life) Started() <-chan struct{} { return l.started }

// Endpoint is the address that peers dial; known once started.
func (l *life) Endpoint() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.endpoint
}

// HTTPAddr is the address of health and metrics; empty without one.
func (l *life) HTTPAddr() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.http
}

// Ready reports whether the node serves engines and peers, and is not draining.
func (l *life) Ready() bool { return l.serving.Load() && !l.draining.Load() }

// Drain starts the orderly stop: no new leases, open leases continue, and Run returns when they
// have ended or the time is over.
func (l *life) Drain() { l.once.Do(func() { close(l.drain) }) }

// Draining reports whether the orderly stop has begun.
func (l *life) Draining() bool { return l.draining.Load() }

// Leave sets whether routers have to choose other engines than those of this node.
func (l *life) Leave(on bool) { l.leaving.Store(on) }

// Leaving reports the last Leave. Nothing else depends on it: leases are served as before.
func (l *life) Leaving() bool { return l.leaving.Load() }

func (l *life) setEndpoint(s string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.endpoint = s
}

func (l *life) setHTTP(s string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.http = s
}
