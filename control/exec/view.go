package exec

import (
	"github.com/kvspray/kvspray/control/exec/internal/dest"
	"github.com/kvspray/kvspray/control/exec/internal/source"
	"github.com/kvspray/kvspray/control/spray"
	"github.com/kvspray/kvspray/transfer"
)

// maxView bounds how many leases a View shows.
const maxView = 256

// View describes the executor for people.
type View struct {
	Dests   []DestView   `json:"destinations"`
	Sources []SourceView `json:"sources"`
	Open    [2]int       `json:"open"` // all of them: destinations, sources
	Pending int          `json:"waiting_for_intent"`
	Flights int          `json:"slices_in_flight"`
	Rails   spray.View   `json:"rails"`
}

// DestView is one destination lease.
type DestView = dest.View

// SourceView is one source lease.
type SourceView = source.View

// View describes the open leases, some of them where there are very many.
func (e *Exec) View(now Instant) View {
	return View{Open: [2]int{e.dests.Len(), e.sources.Len()}, Flights: e.core.Spray.Flights(),
		Rails: e.core.Spray.View(now), Pending: e.match.Counts().Waiting,
		Dests:   e.dests.View(now, maxView),
		Sources: e.sources.View(now, maxView)}
}

// Rails describes every local rail, for metrics.
func (e *Exec) Rails(now Instant) []spray.RailView { return e.core.Spray.Rails(now) }

// Load counts what the executor holds. It is cheap enough to be read after every event.
type Load struct {
	Dests, Sources   int // leases that are open
	Inbound          int // grants of peers
	Pending, Asked   int // keys that wait for an intent; our own queries
	Describing       int // layouts that peers were asked for
	Endpoints, Peers int
	Lanes, Flights   int // lanes; slices given to them
	Timers           int
}

// Waiting counts the chunks that are ready for a peer and wait for a lane, by priority.
func (e *Exec) Waiting(boot transfer.Boot) (chunks [spray.Priorities]int) {
	if p := e.peers.Find(boot); p != nil {
		chunks = p.Rails.Waiting()
	}
	return chunks
}

// Links describes each rail pair to a peer, and the bytes that wait for a lane, by priority. The
// bytes are an upper bound: the last chunk of a layer is not full.
func (e *Exec) Links(now Instant, boot transfer.Boot) (links []spray.Link,
	waiting [spray.Priorities]uint64) {
	p := e.peers.Find(boot)
	if p == nil {
		return nil, waiting
	}
	for i, chunks := range p.Rails.Waiting() {
		waiting[i] = uint64(chunks) * transfer.ChunkBytes
	}
	return p.Rails.Links(now), waiting
}

// Shares reports whether any lease or grant involves the peer, even one without a lane: a grant
// that waits for its intent would be lost with the peer.
func (e *Exec) Shares(boot transfer.Boot) bool {
	return e.dests.Shares(boot) || e.match.Shares(boot)
}

// Load returns the counts.
func (e *Exec) Load() Load {
	match := e.match.Counts()
	return Load{Dests: e.dests.Len(), Sources: e.sources.Len(), Inbound: match.Grants,
		Pending: match.WaitingKeys, Asked: e.queries.Len(), Describing: e.layouts.Len(),
		Endpoints: e.endpoints.Len(), Peers: e.peers.Len(), Lanes: e.dispatch.Len(),
		Flights: e.core.Spray.Flights(), Timers: e.core.Agenda.Len()}
}
