// Package workers has the engine workers of a sidecar and the ids of their open leases.
package workers

import (
	"bytes"
	"iter"
	"maps"
	"slices"

	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec/internal/lanes"
	"github.com/kvspray/kvspray/control/exec/internal/timer"
	"github.com/kvspray/kvspray/transfer"
)

// Table has the workers.
type Table struct {
	Vacated timer.Instant // when the last worker left; the start if none was here

	all    map[*engines.Worker]*Worker
	fenced func(w *engines.Worker, done func())
}

// New returns an empty table. It calls fenced for each departed worker whose last lease has ended.
func New(fenced func(w *engines.Worker, done func())) *Table {
	return &Table{all: map[*engines.Worker]*Worker{}, fenced: fenced}
}

// Worker is one engine worker with its leases.
type Worker struct {
	*engines.Worker
	Gone      bool
	Fault     string           // why its memory must not be used; empty: it may be
	Fenced    func()           // of its WorkerGone
	Distances lanes.Distances  // of our rails for its memory
	Leases    map[uint64]Lease // open ones, source and destination
	Sends     int              // open parts that are sent from its memory
}

// Lease is an open lease of a worker.
type Lease interface{ LeaseID() transfer.LeaseID }

// Up adds an engine worker.
func (t *Table) Up(w *engines.Worker) { t.all[w] = &Worker{Worker: w, Leases: map[uint64]Lease{}} }

// Find returns the entry of a worker; nil: there is none.
func (t *Table) Find(w *engines.Worker) *Worker { return t.all[w] }

// InOrder returns the workers by boot id.
func (t *Table) InOrder() []*Worker {
	return slices.SortedFunc(maps.Values(t.all), func(a, b *Worker) int {
		return bytes.Compare(a.Boot[:], b.Boot[:])
	})
}

// All returns the workers in no order.
func (t *Table) All() iter.Seq[*Worker] { return maps.Values(t.all) }

// Idle reports a departed worker whose last lease has ended.
func (t *Table) Idle(w *Worker) {
	if w.Gone && len(w.Leases) == 0 && t.all[w.Worker] == w {
		delete(t.all, w.Worker)
		t.fenced(w.Worker, w.Fenced)
	}
}

// Vacant reports that no engine is connected. An engine that lost its session begins another within
// seconds and presents its intents again.
func (t *Table) Vacant() bool { return t.VacantFor(nil) }

// VacantFor reports that no engine is connected, and no worker of the sidecar itself has the
// fingerprint.
func (t *Table) VacantFor(fingerprint []byte) bool {
	for _, w := range t.all {
		if !w.Gone && (!w.Internal || bytes.Equal(fingerprint, w.Fingerprint[:])) {
			return false
		}
	}
	return true
}
