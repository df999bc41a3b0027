package lease

import (
	"fmt"

	"github.com/kvspray/kvspray/transfer"
)

// SourceState is the state of a source lease.
type SourceState uint8

// The states of a source lease.
const (
	SourceOpen      SourceState = iota // serves grants
	SourceClosing                      // refuses new grants; its origins are being closed
	SourceCompleted                    // the engine has received the result, once
)

var sourceNames = [...]string{"open", "closing", "completed"}

func (s SourceState) String() string {
	if int(s) < len(sourceNames) {
		return sourceNames[s]
	}
	return fmt.Sprintf("state(%d)", uint8(s))
}

// GrantID is the peer's name of a destination lease.
type GrantID struct {
	Peer transfer.Boot
	Dest transfer.LeaseID
}

// TeamID names the receivers of one decode request: the ranks of its engine, each with its own
// destination lease.
type TeamID [16]byte

// MaxTeam bounds the receivers of one request.
const MaxTeam = 1024

// team is the receivers of one decode request that have come so far.
type team struct {
	size      int // number of receivers, from the first one's grant
	members   int // receivers that came
	ended     int // receivers that are finished
	committed int // finished receivers that committed
}

// Source is one source lease: blocks of an engine that hold, or will hold, a prompt's KV.
type Source struct {
	ID       transfer.LeaseID
	Key      transfer.Key
	Fanout   int  // decode requests that it serves
	Held     bool // the request is finished, and the engine keeps the blocks only for receivers
	Deadline Instant
	MatchBy  Instant // when the receivers must have come, counted from Hold; Never before
	Attempt  uint32

	State   SourceState
	serving map[GrantID]TeamID // bound now, or their grant is lost and may come again
	over    map[GrantID]bool   // ended; they get no place again
	teams   map[TeamID]*team
	ended   int // finished teams: committed, revoked, or their process died
	Served  int // finished teams whose receivers all committed
	origins int // open origins: memory that a backend may read
}

// Room reports whether a receiver of the team may bind.
func (s *Source) Room(id TeamID) bool {
	if s.State != SourceOpen {
		return false
	}
	if t := s.teams[id]; t != nil {
		return t.members < t.size
	}
	return len(s.teams) < s.Fanout
}

// Has reports whether the grant of that destination lease is bound, or was lost and may come again.
func (s *Source) Has(g GrantID) bool {
	_, ok := s.serving[g]
	return ok
}

// Over reports whether the grant's destination lease has ended here. Later messages of it are
// replays, and would take the place of another receiver of its request.
func (s *Source) Over(g GrantID) bool { return s.over[g] }

// Serving counts the bound destination leases, including those whose lost grant may come again.
func (s *Source) Serving() int { return len(s.serving) }

// Bind binds a destination lease, one of size receivers of its team. Binding one again takes the
// same place.
func (s *Source) Bind(g GrantID, id TeamID, size int) error {
	if s.State != SourceOpen {
		return &StateError{s.ID, "bind", s.State}
	}
	if s.Has(g) {
		return nil
	}
	if size < 1 || size > MaxTeam {
		return fmt.Errorf("source lease %s: a team of %d receivers: want 1 to %d", s.ID, size, MaxTeam)
	}
	if !s.Room(id) {
		return fmt.Errorf("source lease %s: all places of its %d requests are taken: %w", s.ID,
			s.Fanout, ErrLimit)
	}
	if s.serving == nil {
		s.serving, s.teams = make(map[GrantID]TeamID, s.Fanout), make(map[TeamID]*team, s.Fanout)
	}
	t := s.teams[id]
	if t == nil {
		t = &team{size: size}
		s.teams[id] = t
	}
	t.members++
	s.serving[g] = id
	return nil
}

// Rename keeps the place of a destination lease for its next life under another sidecar.
func (s *Source) Rename(old, g GrantID) {
	if id, ok := s.serving[old]; ok {
		delete(s.serving, old)
		s.serving[g] = id
	}
}

// End records that a destination lease is finished. It returns whether it was the last one.
func (s *Source) End(g GrantID, committed bool) (last bool) {
	if id, ok := s.serving[g]; ok {
		delete(s.serving, g)
		if s.over == nil {
			s.over = map[GrantID]bool{}
		}
		s.over[g] = true
		t := s.teams[id]
		t.ended++
		if committed {
			t.committed++
		}
		s.close(t)
	}
	return s.Done()
}

// close counts a team whose last receiver has ended.
func (s *Source) close(t *team) {
	if t.ended != t.size {
		return
	}
	s.ended++
	if t.committed == t.size {
		s.Served++
	}
}

// Done reports whether all requests of the intent have ended.
func (s *Source) Done() bool { return s.ended >= s.Fanout }

// OriginOpened counts memory that a backend may read from now on.
func (s *Source) OriginOpened() { s.origins++ }

// OriginClosed counts a CloseOrigin that every backend has acknowledged.
func (s *Source) OriginClosed() {
	if s.origins > 0 {
		s.origins--
	}
}

// Origins counts the open origins.
func (s *Source) Origins() int { return s.origins }

// Close stops serving. Idempotent until the lease is complete.
func (s *Source) Close() error {
	if s.State == SourceCompleted {
		return &StateError{s.ID, "close", s.State}
	}
	s.State = SourceClosing
	return nil
}

// Complete records that the engine receives the result. It succeeds once, and only if the release
// rule permits.
func (s *Source) Complete() error {
	if s.State != SourceClosing || !MayRelease(Exposure{Granted: true, Fenced: s.origins == 0}) {
		return &StateError{s.ID, "complete", s.State}
	}
	s.State = SourceCompleted
	return nil
}

// Narrow refuses new receivers, and returns whether none is left to serve. Missing receivers of a
// team count as absent.
func (s *Source) Narrow() bool {
	s.Fanout = len(s.teams)
	for _, t := range s.teams {
		if t.ended != t.size && t.members != t.size {
			t.size = t.members
			s.close(t)
		}
	}
	return len(s.serving) == 0
}
