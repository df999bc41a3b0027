// SPDX-License-Identifier: Apache-2.0

package store

import (
	"errors"

	"github.com/kvspray/kvspray/store/catalog"
	"github.com/kvspray/kvspray/store/disk"
	"github.com/kvspray/kvspray/store/memory"
	"github.com/kvspray/kvspray/store/page"
)

// getPage loads page i of a batch from the nearest tier that has it.
func (s *Store) getPage(b *Batch, i int, w *worker) Result {
	if b.guard.Revoked() {
		return Result{Outcome: Cancelled}
	}
	sp, k := b.space, &b.keys[i]
	var damaged bool
	if p, ok := s.memory.Pin(sp.number, k); ok {
		r := s.deliver(b, i, p.Bytes, p.CRC, Memory)
		if r.Outcome != Damaged {
			s.memory.Unpin(p)
			return r
		}
		s.memory.Drop(p)
		damaged = true
	}
	if s.disk != nil {
		r := s.fromDisk(b, i, w)
		if r.Outcome != Miss || !damaged {
			return r
		}
	}
	if damaged {
		return Result{Outcome: Damaged}
	}
	return Result{Outcome: Miss}
}

// fromDisk reads a page into a slot of memory, where the next get finds it, and copies it from there. Without a slot it goes
// through the worker's own buffer.
func (s *Store) fromDisk(b *Batch, i int, w *worker) Result {
	sp, k := b.space, &b.keys[i]
	var found [1]uint64
	s.disk.Exists(sp.number, b.keys[i:i+1], found[:])
	if found[0] == 0 {
		return Result{Outcome: Miss}
	}
	p, err := s.memory.Reserve(sp.number, k, b.before(i))
	if err != nil { // it is being stored by somebody else, or nothing can be given up
		buf, err := w.room(disk.PaddedBytes(sp.pageBytes))
		if err != nil {
			return Result{Outcome: Failed, Err: err}
		}
		crc, err := s.disk.Read(sp.number, k, buf)
		if err != nil {
			return unread(err)
		}
		return s.deliver(b, i, buf[:sp.pageBytes], crc, Disk)
	}
	crc, err := s.disk.Read(sp.number, k, p.Slot)
	if err != nil {
		s.memory.Drop(p)
		return unread(err)
	}
	s.memory.Commit(p, crc)
	r := s.deliver(b, i, p.Bytes, crc, Disk)
	if r.Outcome == Damaged {
		s.memory.Drop(p)
	} else {
		s.memory.Unpin(p)
	}
	return r
}

func unread(err error) Result {
	switch {
	case errors.Is(err, disk.ErrMissing): // it went since
		return Result{Outcome: Miss}
	case errors.Is(err, disk.ErrDamaged):
		return Result{Outcome: Damaged}
	}
	return Result{Outcome: Failed, Err: err}
}

// deliver copies a page to its placement, under the guard.
func (s *Store) deliver(b *Batch, i int, bytes []byte, crc uint32, from Tier) Result {
	if !b.guard.Enter() {
		return Result{Outcome: Cancelled}
	}
	sum, err := copyOut(b.places[i], bytes)
	b.guard.Leave()
	switch {
	case err != nil:
		return Result{Outcome: Failed, Err: err}
	case sum != crc:
		return Result{Outcome: Damaged}
	}
	return Result{Outcome: Hit, Tier: from}
}

// before is the key of the page before page i in its prompt. A get names a prompt's pages in their order, too.
func (b *Batch) before(i int) *page.Key {
	if i > 0 {
		return &b.keys[i-1]
	}
	return b.after
}

// putPages stores pages [from, to) of a batch: each in a slot of memory, and then all in one group on the disk.
func (s *Store) putPages(b *Batch, from, to int) {
	sp := b.space
	sp.mu.RLock()
	removals := sp.removals
	sp.mu.RUnlock()
	pinned := make([]memory.Page, 0, to-from)
	which := make([]int, 0, to-from)
	for i := from; i < to; i++ {
		p, r := s.fill(b, i)
		b.results[i] = r
		if p.Bytes != nil {
			pinned, which = append(pinned, p), append(which, i)
		}
	}
	if s.disk == nil || len(pinned) == 0 {
		s.release(pinned)
		s.finishPut(b, from, to)
		return
	}
	if s.writeBack {
		s.writing.Add(int64(len(pinned)))
		s.finishPut(b, from, to)
	}
	errs := s.toDisk(b, which, pinned, removals)
	s.release(pinned)
	if s.writeBack {
		s.wrote(len(pinned))
		return
	}
	for j, i := range which {
		r := &b.results[i]
		if r.Durable = errs[j] == nil || errors.Is(errs[j], catalog.ErrExists); !r.Durable {
			r.Err = errs[j]
		}
	}
	s.finishPut(b, from, to)
}

func (s *Store) finishPut(b *Batch, from, to int) {
	for i := from; i < to; i++ {
		s.count(&b.results[i])
	}
	s.finish(b, to-from)
}

func (s *Store) release(pages []memory.Page) {
	for _, p := range pages {
		s.memory.Unpin(p)
	}
}

// fill copies a page from its placement into a slot of memory. A page that was in memory already is pinned, so that it can be
// made durable if it is not.
func (s *Store) fill(b *Batch, i int) (memory.Page, Result) {
	if b.guard.Revoked() {
		return memory.Page{}, Result{Outcome: Cancelled}
	}
	sp, k := b.space, &b.keys[i]
	p, err := s.memory.Reserve(sp.number, k, b.before(i))
	switch {
	case err == nil:
	case errors.Is(err, catalog.ErrExists):
		p, _ := s.memory.Pin(sp.number, k) // if it went in this moment it is not made durable, and that is said
		return p, Result{Outcome: Existed}
	case errors.Is(err, catalog.ErrBusy):
		return memory.Page{}, Result{Outcome: Busy}
	default:
		return memory.Page{}, Result{Outcome: Full, Err: err}
	}
	if !b.guard.Enter() {
		s.memory.Drop(p)
		return memory.Page{}, Result{Outcome: Cancelled}
	}
	crc, err := copyIn(p.Bytes, b.places[i])
	b.guard.Leave()
	if err != nil {
		s.memory.Drop(p)
		return memory.Page{}, Result{Outcome: Failed, Err: err}
	}
	s.memory.Commit(p, crc)
	p.CRC = crc
	return p, Result{Outcome: Stored}
}

// toDisk writes pages that are pinned in memory, unless their namespace was removed since they were put.
func (s *Store) toDisk(b *Batch, which []int, pinned []memory.Page, removals int) []error {
	sp := b.space
	sp.mu.RLock()
	defer sp.mu.RUnlock()
	if sp.removals != removals {
		errs := make([]error, len(which))
		for i := range errs {
			errs[i] = disk.ErrRemoved
		}
		return errs
	}
	records := make([]disk.Record, len(which))
	for j, i := range which {
		records[j] = disk.Record{Key: b.keys[i], After: b.before(i), Data: pinned[j].Slot, CRC: pinned[j].CRC}
	}
	errs := s.disk.Write(sp.number, records)
	for j, err := range errs {
		if errors.Is(err, disk.ErrDamaged) { // what is in memory is no longer what was put
			s.memory.Doom(pinned[j])
		}
	}
	return errs
}

func (s *Store) count(r *Result) {
	c := &s.counters
	switch r.Outcome {
	case Hit:
		c.hits[r.Tier].Add(1)
	case Miss:
		c.misses.Add(1)
	case Damaged:
		c.damaged.Add(1)
	case Stored:
		c.stored.Add(1)
	case Existed:
		c.existed.Add(1)
	case Full:
		c.refused.Add(1)
	}
}
