package lease

import (
	"fmt"

	"github.com/kvspray/kvspray/transfer"
)

// SourceState is where a source lease stands.
type SourceState uint8

// The states of a source lease.
const (
	SourceOpen      SourceState = iota // serves grants
	SourceClosing                      // serves nobody new; its origins are being closed
	SourceCompleted                    // the engine was told, once
)

var sourceNames = [...]string{"open", "closing", "completed"}

func (s SourceState) String() string {
	if int(s) < len(sourceNames) {
		return sourceNames[s]
	}
	return fmt.Sprintf("state(%d)", uint8(s))
}

// GrantID names a destination lease as its peer calls it.
type GrantID struct {
	Peer transfer.Boot
	Dest transfer.LeaseID
}

// Source is one source lease: blocks of an engine that hold, or will hold, a prompt's KV.
type Source struct {
	ID       transfer.LeaseID
	Key      transfer.Key
	Fanout   int
	Held     bool // the request is finished, the engine keeps the blocks only for us
	Deadline Instant
	Partner  Instant // when the partners must have come, counted from Hold; Never before
	Attempt  uint32

	State   SourceState
	serving map[GrantID]bool // bound now; the value says whether the grant is lost and may come again
	ended   int              // destination leases that need us no more: committed, revoked, or their process died
	Served  int              // those of them that committed
	origins int              // open origins: memory that a backend may read
}

// Capacity is how many more destination leases may bind.
func (s *Source) Capacity() int {
	if s.State != SourceOpen {
		return 0
	}
	return s.Fanout - s.ended - len(s.serving)
}

// Has reports whether the grant of that destination lease is bound, or was lost and may come again.
func (s *Source) Has(g GrantID) bool {
	_, ok := s.serving[g]
	return ok
}

// Serving counts the destination leases bound, those included that lost their grant and may come again.
func (s *Source) Serving() int { return len(s.serving) }

// Bind binds a destination lease; binding one again after Lost is the same place taken once more.
func (s *Source) Bind(g GrantID) error {
	if s.State != SourceOpen {
		return &StateError{s.ID, "bind", s.State}
	}
	if !s.Has(g) && s.Capacity() <= 0 {
		return fmt.Errorf("source lease %s: all %d grants are taken: %w", s.ID, s.Fanout, ErrLimit)
	}
	if s.serving == nil {
		s.serving = make(map[GrantID]bool, s.Fanout)
	}
	s.serving[g] = false
	return nil
}

// Lost says that the grant lost its source blocks; its place is kept for when it is offered again.
func (s *Source) Lost(g GrantID) {
	if s.Has(g) {
		s.serving[g] = true
	}
}

// End says that a destination lease needs nothing more from us. It reports whether it was the last one.
func (s *Source) End(g GrantID, committed bool) (last bool) {
	if s.Has(g) {
		delete(s.serving, g)
		s.ended++
		if committed {
			s.Served++
		}
	}
	return s.Done()
}

// Done reports whether all the grants that the intent is for have ended.
func (s *Source) Done() bool { return s.ended >= s.Fanout }

// OriginOpened counts memory that a backend may read from now on.
func (s *Source) OriginOpened() { s.origins++ }

// OriginClosed counts a CloseOrigin that every backend has acknowledged.
func (s *Source) OriginClosed() {
	if s.origins > 0 {
		s.origins--
	}
}

// Origins counts those open.
func (s *Source) Origins() int { return s.origins }

// Close stops serving. Idempotent until the lease is complete.
func (s *Source) Close() error {
	if s.State == SourceCompleted {
		return &StateError{s.ID, "close", s.State}
	}
	s.State = SourceClosing
	return nil
}

// Complete says that the engine is being told. It succeeds once, and only as the release rule allows.
func (s *Source) Complete() error {
	if s.State != SourceClosing || !MayRelease(Exposure{Granted: true, Fenced: s.origins == 0}) {
		return &StateError{s.ID, "complete", s.State}
	}
	s.State = SourceCompleted
	return nil
}

// Narrow lets nobody new bind, and reports whether nobody is left to serve.
func (s *Source) Narrow() bool {
	s.Fanout = s.ended + len(s.serving)
	return len(s.serving) == 0
}
