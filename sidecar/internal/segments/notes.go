package segments

import (
	"time"

	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/control/engines"
)

// fetch is a NOTES that waits.
type fetch struct {
	reply func([]connector.Note)
	timer *time.Timer
}

// Notes implements connector.Segments.
func (s *Segments) Notes(w *engines.Worker, wait time.Duration, reply func([]connector.Note)) {
	s.mu.Lock()
	o := s.ownerLocked(w)
	if len(o.notes) == 0 && wait > 0 && len(o.fetches) < maxFetches && !s.over {
		f := &fetch{reply: reply}
		f.timer = time.AfterFunc(wait, func() { s.fetchLate(o, f) })
		o.fetches = append(o.fetches, f)
		s.mu.Unlock()
		return
	}
	out := o.takeLocked()
	s.mu.Unlock()
	reply(out)
}

// takeLocked removes and returns as many notifications as one answer may have.
func (o *owner) takeLocked() []connector.Note {
	n := min(len(o.notes), msg.MaxNotes)
	out := o.notes[:n:n]
	if o.notes = o.notes[n:]; len(o.notes) == 0 {
		o.notes = nil
	}
	return out
}

func (s *Segments) fetchLate(o *owner, f *fetch) {
	s.mu.Lock()
	waits := o.dropLocked(f)
	s.mu.Unlock()
	if waits {
		f.reply(nil)
	}
}

// dropLocked removes a fetch, and reports whether it was there.
func (o *owner) dropLocked(f *fetch) bool {
	for i, x := range o.fetches {
		if x == f {
			o.fetches = append(o.fetches[:i], o.fetches[i+1:]...)
			return true
		}
	}
	return false
}

// note frees the place that was reserved for the notification of a batch, and delivers the
// notification. n is nil if the bytes have not arrived: then it delivers nothing.
func (s *Segments) note(o *owner, n *connector.Note) {
	s.mu.Lock()
	o.reserved--
	if n == nil || s.owners[o.w] != o {
		s.mu.Unlock()
		return
	}
	o.notes = append(o.notes, *n)
	var f *fetch
	var out []connector.Note
	if len(o.fetches) > 0 {
		f = o.fetches[0]
		o.dropLocked(f)
		out = o.takeLocked()
	}
	s.mu.Unlock()
	if f != nil {
		f.timer.Stop()
		f.reply(out)
	}
}
