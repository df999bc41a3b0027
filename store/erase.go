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

// eraseRemoved overwrites what removed pages have left on the disk, until Close. Overwriting a
// segment moves the pages of others, so a tenant that removes its pages all the time must not have
// it done each time. For a third of the time that it has, it waits for more removals; then it
// overwrites the segments that these have left, in another third. Pages that are removed meanwhile
// come next, and are overwritten in time, too.
func (s *Store) eraseRemoved() {
	part := s.eraseWithin / 3
	for wait := time.Duration(0); ; wait = part { // what earlier starts have left waits no more
		select {
		case <-s.noErase:
			return
		case <-s.erase:
		}
		if !s.eraseLater(wait) {
			return
		}
		select {
		case <-s.erase: // it has waited long enough, too
		default:
		}
		until := time.Now().Add(part)
		for segments := -1; segments != 0; {
			left, err := s.disk.Wipe()
			next := eraseRetry
			if err == nil {
				if segments--; segments < 0 || left < segments {
					segments = left
				}
				next = time.Until(until) / time.Duration(segments+1)
			}
			if segments != 0 && !s.eraseLater(next) {
				return
			}
		}
	}
}

// eraseLater waits; false: the store is closed.
func (s *Store) eraseLater(wait time.Duration) bool {
	select {
	case <-s.noErase:
		return false
	case <-time.After(max(0, wait)):
		return true
	}
}
