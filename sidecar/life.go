package sidecar

import (
	"sync"
	"sync/atomic"
	"time"
)

const (
	// leaveFor is how long routers choose other engines after the last Leave. A mark without an end
	// would outlive its reason: an engine that stays, or one that comes back.
	leaveFor = 30 * time.Second
	// renewed is the longest time between two calls of a drain that goes on.
	renewed = 10 * time.Second
)

// life is how far a node has come between its start and its end, and its addresses.
type life struct {
	serving  atomic.Bool
	draining atomic.Bool
	sources  atomic.Int64  // open source leases of engines
	drain    chan struct{} // closed by the first Drain
	once     sync.Once
	started  chan struct{} // closed once every address is known, or Run has failed

	now func() time.Time // replaced by tests
	// unreachable is why engines cannot connect; empty: they can. It is set before serving is.
	unreachable func() string

	leaves chan struct{} // wakes the publisher: the mark, or a role, has changed

	mu   sync.Mutex // protects what is below
	left time.Time  // of the last Leave; zero: none, or it was taken back
	// addresses, which are known once Run has started
	endpoint string
	http     string
}

func newLife() *life {
	return &life{drain: make(chan struct{}), started: make(chan struct{}), now: time.Now,
		leaves:      make(chan struct{}, 1),
		unreachable: func() string { return "" }}
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

// Ready reports whether the node serves engines and peers, engines can connect, and it is not
// draining.
func (l *life) Ready() bool {
	return l.serving.Load() && !l.draining.Load() && l.unreachable() == ""
}

// Drain starts the orderly stop: no new leases, open leases continue, and Run returns when they
// have ended or the time is over.
func (l *life) Drain() { l.once.Do(func() { close(l.drain) }) }

// Draining reports whether the orderly stop has begun.
func (l *life) Draining() bool { return l.draining.Load() }

// Leave sets whether routers have to choose other engines than those of this node, for leaveFor.
func (l *life) Leave(on bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.left = time.Time{}
	if on {
		l.left = l.now()
	}
	l.wakePublisher()
}

// wakePublisher makes members and routers get what has changed at once.
func (l *life) wakePublisher() {
	select {
	case l.leaves <- struct{}{}:
	default:
	}
}

// Leaving is how long routers still have to choose other engines; 0: they need not. Nothing else
// depends on it: leases are served as before.
func (l *life) Leaving() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.left.IsZero() {
		return 0
	}
	return max(0, leaveFor-l.now().Sub(l.left))
}

// registered ends the mark if the worker is of a new engine. While a drain goes on, it is of the
// engine that drains, which returns to a sidecar that has restarted.
func (l *life) registered() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.left.IsZero() && l.now().Sub(l.left) >= renewed {
		l.left = time.Time{}
	}
}

// SourceLeases counts the open source leases of engines: blocks that wait to be fetched.
func (l *life) SourceLeases() int { return int(l.sources.Load()) }

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
