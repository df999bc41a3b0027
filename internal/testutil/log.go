package testutil

import (
	"bytes"
	"sync"
)

// Log is a log that a test reads while it is written.
type Log struct {
	mu sync.Mutex
	b  bytes.Buffer // guarded by mu
}

func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}
