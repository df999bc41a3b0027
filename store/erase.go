// SPDX-License-Identifier: Apache-2.0

package store

import "time"

// Times of the eraser.
const (
	defaultEraseWithin = time.Hour
	eraseRetry         = time.Minute // after a segment that could not be overwritten
)

func (s *Store) eraseSoon() {
	select {
	case s.erase <- struct{}{}:
	default:
	}
}

// eraseRemoved overwrites what removed pages have left on the disk, until Close. It spreads its
// work over the time that it has.
func (s *Store) eraseRemoved() {
	var next <-chan time.Time
	var until time.Time
	for {
		asked := s.erase
		if next != nil {
			asked = nil // the segments that are left are counted again each time
		}
		select {
		case <-s.noErase:
			return
		case <-asked:
			until = time.Now().Add(s.eraseWithin)
		case <-next:
		}
		next = nil
		switch left, err := s.disk.Wipe(); {
		case err != nil:
			next = time.After(eraseRetry)
		case left > 0:
			next = time.After(max(0, time.Until(until)/time.Duration(left+1)))
		}
	}
}
