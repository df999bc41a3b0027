package disk

import (
	"fmt"

	"github.com/kvspray/kvspray/store/offheap"
)

// wipeBytes is what is overwritten at once. Others get the device in between.
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
	lowest := uint64(1<<64 - 1)
	t.mu.Lock()
	for _, of := range t.logs {
		for i := range of.segments {
			s := &of.segments[i]
			if s.state == wiped || !t.mayHaveRemovedLocked(s) {
				continue
			}
			// The oldest is the first, so that it does not wait for those that removals make in a loop;
			// one that has failed is the last.
			key := s.seq
			if s.bad {
				key |= 1 << 63
			}
			if left++; key < lowest {
				l, seg, lowest = of, uint32(i), key
			}
		}
	}
	t.mu.Unlock()
	if l == nil {
		return 0, nil
	}
	err = l.wipe(seg)
	t.mu.Lock()
	defer t.mu.Unlock()
	s := &l.segments[seg]
	if s.bad = err != nil; err != nil {
		t.stats.Failed++
		return left, fmt.Errorf("store.disk path %s: overwrite removed pages: %w", l.path, err)
	}
	if !t.mayHaveRemovedLocked(s) { // it has, if it was taken again meanwhile
		left--
	}
	return left, nil
}

// wipe overwrites a segment. Its footer is the first, so that a start after a crash compares what
// is left of each page. Its header is the last: after a crash it still shows that pages are left.
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
	zero := func(from, to uint32) error {
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.zero(seg, from, to)
	}
	if err := zero(t.segb-1, t.segb); err != nil { // the footer's end
		return err
	}
	for at := uint32(1); at < t.segb-1; at += wipeBytes / block {
		if err := zero(at, min(t.segb-1, at+wipeBytes/block)); err != nil {
			return err
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.zero(seg, 0, 1); err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	s.seq, s.eras = neverUsed, nil
	return nil
}

// zero overwrites the blocks [from, to) of a segment, durably.
func (l *log) zero(seg, from, to uint32) error {
	if from >= to {
		return nil
	}
	zeros, err := offheap.New[byte](int(min(to-from, wipeBytes/block)) * block)
	if err != nil {
		return err
	}
	defer zeros.Free()
	for at := from; at < to; {
		n := min(to-at, wipeBytes/block)
		if err := l.durably([][]byte{zeros.Elems()[:n*block]}, l.offset(seg, at)); err != nil {
			return err
		}
		at += n
	}
	return nil
}

// vacate moves the pages of a segment, and keeps it from being taken; false: it has been cleaned
// meanwhile.
func (l *log) vacate(seg uint32) (took bool, err error) {
	t := l.t
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.at == int(seg) {
		l.end()
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
