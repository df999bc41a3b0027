package admit

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// logEvery is the least time between two lines of a Log.
const logEvery = time.Second

// Log writes at most one line a second of what strangers can cause at will. A line counts those
// that were left out since the one before.
type Log struct {
	Logger *slog.Logger

	mu      sync.Mutex // protects the fields below
	last    time.Time
	dropped uint64
}

// Note writes a line, or counts it. One of a level that is switched off takes no turn from others.
func (l *Log) Note(level slog.Level, msg string, args ...any) {
	if !l.Logger.Enabled(context.Background(), level) {
		return
	}
	now := time.Now()
	l.mu.Lock()
	if !l.last.IsZero() && now.Sub(l.last) < logEvery {
		l.dropped++
		l.mu.Unlock()
		return
	}
	dropped := l.dropped
	l.last, l.dropped = now, 0
	l.mu.Unlock()
	if dropped > 0 {
		args = append(args, "left_out", dropped)
	}
	l.Logger.Log(context.Background(), level, msg, args...)
}
