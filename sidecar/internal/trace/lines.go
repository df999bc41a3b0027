// Package trace writes the sidecar's trace files: a line for each transfer and copy, and the hashes
// of moved pages.
package trace

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync/atomic"
	"time"

	"github.com/kvspray/kvspray/internal/lines"
	"github.com/kvspray/kvspray/internal/nodeapi"
)

// patience is how long Put waits for the file, so that a transfer's line is usually in the file
// when its engine continues. A file that stalls is not waited for until it has taken every line.
const patience = 100 * time.Millisecond

// Lines appends JSON lines to a file, and keeps the last ones. The zero value writes nothing.
type Lines struct {
	recent  recent
	f       *os.File
	w       *lines.Writer
	stalled atomic.Bool
}

// Open opens the file of a configuration key, before the first line; an empty path writes nothing.
func (l *Lines) Open(key, path string, log *slog.Logger) (err error) {
	if path == "" {
		return nil
	}
	if l.f, err = os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600); err != nil {
		return fmt.Errorf("sidecar: %s: %w: let this user write there, or name another path", key, err)
	}
	log = log.With("path", path)
	l.w = lines.New(l.f,
		func(n int) { log.Error("lines are missing in a trace file: the disk stalled", "lines", n) },
		func(err error) { log.Error("trace file", "err", err) })
	return nil
}

func (l *Lines) on() bool { return l != nil && l.f != nil }

// Put writes whole lines in one call, so that readers never see half a batch between lines of
// others.
func (l *Lines) Put(all ...any) {
	if l == nil {
		return
	}
	for _, v := range all {
		l.recent.put(v)
	}
	if !l.on() {
		return
	}
	var b []byte
	for _, v := range all {
		j, err := json.Marshal(v)
		if err != nil {
			continue
		}
		b = append(append(b, j...), '\n')
	}
	if len(b) == 0 {
		return
	}
	_, _ = l.w.Write(b)
	if l.stalled.Load() {
		l.stalled.Store(!l.w.Flush(0))
		return
	}
	l.stalled.Store(!l.w.Flush(patience))
}

// Recent lists the last records, newest first.
func (l *Lines) Recent() []nodeapi.Record {
	all, _ := l.recent.newest(maxRecent, func(*nodeapi.Record) bool { return true })
	return all
}

// Find lists the records that fit, newest first. All that ended after since are kept; zero: all.
func (l *Lines) Find(fits func(*nodeapi.Record) bool) (all []nodeapi.Record, since time.Time) {
	return l.recent.newest(maxKept, fits)
}

// Close closes the file.
func (l *Lines) Close() error {
	if !l.on() {
		return nil
	}
	return errors.Join(l.w.Close(), l.f.Close())
}
