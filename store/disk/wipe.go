// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"fmt"

	"github.com/kvspray/kvspray/store/offheap"
)

// wipeBytes is what Wipe writes before others get the device again.
const wipeBytes = 1 << 20

// mayHaveRemovedLocked reports whether a segment may have bytes of pages that count no more: those
// of eras that have ended and, once this start has removed anything, whatever is behind a header
// that could not be read. Until then the next start may read it.
func (t *Tier) mayHaveRemovedLocked(s *segment) bool {
	if s.seq == unknownLife {
		return t.removes
	}
	for _, e := range s.eras {
		if !t.ledger.count[e] {
			return true
		}
	}
	return false
}

// Wipe overwrites one segment that may have bytes of removed pages, after it has moved the pages
// that count, and returns how many such segments are left.
func (t *Tier) Wipe() (left int, err error) {
	var l *log
	var seg uint32
	least := uint64(1<<64 - 1)
	t.mu.Lock()
	for _, of := range t.logs {
		for i := range of.segments {
			s := &of.segments[i]
			if s.state == wiped || !t.mayHaveRemovedLocked(s) {
				continue
			}
			// The one with the fewest bytes to move is the first, and one that has failed the last.
			key := s.live
			if s.bad {
				key += 1 << 62
			}
			if left++; key < least {
				l, seg, least = of, uint32(i), key
			}
		}
	}
	t.mu.Unlock()
	if l == nil {
		return 0, nil
	}
	err = l.wipe(seg)
	t.mu.Lock()
	if l.segments[seg].bad = err != nil; err != nil {
		t.stats.Failed++
	}
	t.mu.Unlock()
	if err != nil {
		return left, fmt.Errorf("store.disk path %s: overwrite removed pages: %w", l.path, err)
	}
	return left - 1, nil
}

// wipe overwrites a segment, its header last: after a crash the header still shows that pages are
// left.
func (l *log) wipe(seg uint32) error {
	took, err := l.vacate(seg)
	if !took || err != nil {
		return err
	}
	t, s := l.t, &l.segments[seg]
	defer func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		s.state = free
	}()
	zeros, err := offheap.New[byte](min(wipeBytes, int(t.segb)*block))
	if err != nil {
		return err
	}
	defer zeros.Free()
	for at := uint32(1); at < t.segb; {
		n := min(t.segb-at, uint32(len(zeros.Elems())/block))
		if err := l.overwrite(zeros.Elems()[:n*block], seg, at); err != nil {
			return err
		}
		at += n
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.file.Sync(); err != nil {
		return err
	}
	if err := l.file.WriteAt([][]byte{zeros.Elems()[:block]}, l.offset(seg, 0)); err != nil {
		return err
	}
	if err := l.file.Sync(); err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	s.seq, s.eras = neverUsed, nil
	return nil
}

func (l *log) overwrite(zeros []byte, seg, at uint32) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.file.WriteAt([][]byte{zeros}, l.offset(seg, at))
}

// vacate moves the pages of a segment, and keeps it from being taken; false: it has been cleaned
// meanwhile.
func (l *log) vacate(seg uint32) (took bool, err error) {
	t := l.t
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.at == int(seg) {
		l.close()
	}
	look := func() (seq uint64, isFull bool) {
		t.mu.Lock()
		defer t.mu.Unlock()
		return l.segments[seg].seq, l.segments[seg].state == full
	}
	seq, isFull := look()
	if isFull {
		if err := l.makeFree(); err != nil {
			return false, err
		}
		var now uint64
		if now, isFull = look(); now != seq {
			return false, nil // making room has used it
		}
	}
	if isFull {
		if err := l.empty(seg, seq, false); err != nil {
			return false, err
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	s := &l.segments[seg]
	if s.state != free || !t.mayHaveRemovedLocked(s) {
		return false, nil
	}
	s.state = wiped
	for s.readers > 0 { // of pages that were given up
		t.drained.Wait()
	}
	return true, nil
}
