// SPDX-License-Identifier: Apache-2.0

// Package trace writes the sidecar's trace files: a line for each transfer and copy, and the hashes
// of moved pages. No goroutines.
package trace

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"sync"
)

// Lines appends JSON lines to a file, and keeps the last ones. The zero value writes nothing.
type Lines struct {
	recent recent

	mu  sync.Mutex // protects all below
	f   *os.File
	log *slog.Logger
	bad bool
}

// Open opens the file of a configuration key; an empty path writes nothing.
func Open(key, path string, log *slog.Logger) (*Lines, error) {
	if path == "" {
		return &Lines{}, nil
	}
	f, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("sidecar: %s: %w: let this user write there, or name another path", key,
			err)
	}
	return &Lines{f: f, log: log}, nil
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
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, err := l.f.Write(b); err != nil && !l.bad {
		l.bad = true
		l.log.Error("trace file", "path", l.f.Name(), "err", err)
	}
}

// Recent lists the last lines, newest first.
func (l *Lines) Recent() []Ended {
	if l == nil {
		return nil
	}
	return l.recent.newest()
}

// Close closes the file.
func (l *Lines) Close() error {
	if !l.on() {
		return nil
	}
	return l.f.Close()
}
