package proxy

import (
	"container/list"
	"net"
	"net/http"
	"sync"
	"syscall"
)

const (
	maxConns       = 32768 // of clients
	reservedFiles  = 32    // descriptors for listeners, logs, spans, the resolver
	filesPerEngine = 4     // the same for checks and events of one engine
	// expectedEngines may come while the router runs.
	expectedEngines = 64
)

// connLimit is how many connections of clients fit into the process's descriptors. A request needs
// two: another one leads to an engine.
func connLimit(engines int) int {
	var lim syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &lim); err != nil {
		return maxConns
	}
	free := int64(min(lim.Cur, 4*maxConns)) - reservedFiles - int64(engines)*filesPerEngine
	return int(min(max(free/2, 8), maxConns))
}

// limitedListener bounds the connections of clients. At the bound the one that has been idle for
// longest gives its place to a new one; without an idle one the new one waits.
type limitedListener struct {
	net.Listener
	limit int

	mu     sync.Mutex // guards all below
	room   *sync.Cond
	open   int
	wanted bool // Accept waits
	closed bool
	idle   list.List // of *limitedConn, the longest idle first
}

func newLimitedListener(l net.Listener, limit int) *limitedListener {
	x := &limitedListener{Listener: l, limit: limit}
	x.room = sync.NewCond(&x.mu)
	return x
}

// Accept implements net.Listener.
func (l *limitedListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	if !l.wait() {
		_ = c.Close() // nothing was read from it
		return nil, net.ErrClosed
	}
	return &limitedConn{Conn: c, l: l}, nil
}

// wait takes a place; false: the listener is closed.
func (l *limitedListener) wait() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for l.open >= l.limit && !l.closed {
		if e := l.idle.Front(); e != nil {
			c := e.Value.(*limitedConn)
			c.leaveIdleLocked()
			l.mu.Unlock()
			_ = c.Close() // no request waits for it
			l.mu.Lock()
			continue
		}
		l.wanted = true
		l.room.Wait()
	}
	l.wanted = false
	if l.closed {
		return false
	}
	l.open++
	return true
}

func (l *limitedListener) release() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.open--
	l.room.Signal()
}

// Close implements net.Listener.
func (l *limitedListener) Close() error {
	l.mu.Lock()
	l.closed = true
	l.room.Broadcast()
	l.mu.Unlock()
	return l.Listener.Close()
}

// state is http.Server.ConnState. A new connection is not idle: it has headerTimeout for a request.
func (l *limitedListener) state(conn net.Conn, s http.ConnState) {
	c, ok := conn.(*limitedConn)
	if !ok {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	c.leaveIdleLocked()
	if s == http.StateIdle {
		c.idle = l.idle.PushBack(c)
		if l.wanted {
			l.room.Signal()
		}
	}
}

// limitedConn releases its place once.
type limitedConn struct {
	net.Conn
	l    *limitedListener
	once sync.Once
	idle *list.Element // guarded by l.mu; nil: it has a request
}

func (c *limitedConn) leaveIdleLocked() {
	if c.idle != nil {
		c.l.idle.Remove(c.idle)
		c.idle = nil
	}
}

// Close implements net.Conn.
func (c *limitedConn) Close() error {
	err := c.Conn.Close()
	c.once.Do(c.l.release)
	return err
}
