package exec

import (
	"time"

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
type DestView struct {
	Lease   string        `json:"lease"`
	Key     string        `json:"key"`
	Req     string        `json:"req"`
	State   string        `json:"state"`
	Grants  int           `json:"grants"`
	Age     time.Duration `json:"age_ns"`
	Left    time.Duration `json:"left_ns"`
	Trouble string        `json:"trouble,omitempty"`
}

// SourceView is one source lease.
type SourceView struct {
	Lease   string        `json:"lease"`
	Key     string        `json:"key"`
	Req     string        `json:"req"`
	State   string        `json:"state"`
	Serving int           `json:"serving"`
	Served  int           `json:"served"`
	Origins int           `json:"origins"`
	Age     time.Duration `json:"age_ns"`
	Left    time.Duration `json:"left_ns"`
}

// View describes the open leases, some of them where there are very many.
func (e *Exec) View(now Instant) View {
	v := View{Open: [2]int{len(e.dests.byID), e.sources.count}, Flights: e.spray.Flights(),
		Rails: e.spray.View(now)}
	for _, l := range e.match.pending.byKey {
		v.Pending += len(l)
	}
	for _, d := range e.dests.byID {
		if len(v.Dests) == maxView {
			break
		}
		v.Dests = append(v.Dests, DestView{d.ID.String(), d.Key.String(), d.x.Req, d.State.String(),
			d.Grants, now - d.began, d.Deadline - now,
			d.trouble})
	}
	for _, ws := range e.workers.all {
		for _, s := range ws.sources {
			if len(v.Sources) == maxView {
				return v
			}
			v.Sources = append(v.Sources, SourceView{s.ID.String(), s.Key.String(), s.in.Req,
				s.State.String(), s.Serving(), s.Served, s.Origins(),
				now - s.began, s.Deadline - now})
		}
	}
	return v
}

// Rails describes every local rail, for metrics.
func (e *Exec) Rails(now Instant) []spray.RailView { return e.spray.Rails(now) }

// Load counts what the executor holds. It is cheap enough to be read after every event.
type Load struct {
	Dests, Sources   int // leases that are open
	Inbound          int // grants of peers
	Pending, Asked   int // keys that wait for an intent; our own questions
	Describing       int // layouts that peers were asked for
	Endpoints, Peers int
	Lanes, Flights   int // lanes; slices given to them
	Timers           int
}

// Waiting counts the chunks that are ready for a peer and wait for a lane, by priority.
func (e *Exec) Waiting(boot transfer.Boot) (chunks [spray.Priorities]int) {
	if p := e.peers.byBoot[boot]; p != nil {
		chunks = p.rails.Waiting()
	}
	return chunks
}

// Links describes each rail pair to a peer, and the bytes that wait for a lane, by priority. The
// bytes are an upper bound: the last chunk of a layer is not full.
func (e *Exec) Links(now Instant, boot transfer.Boot) (links []spray.Link,
	waiting [spray.Priorities]uint64) {
	p := e.peers.byBoot[boot]
	if p == nil {
		return nil, waiting
	}
	for i, chunks := range p.rails.Waiting() {
		waiting[i] = uint64(chunks) * transfer.ChunkBytes
	}
	return p.rails.Links(now), waiting
}

// Shares reports whether any lease or grant involves the peer, even one without a lane: a grant
// that waits for its intent would be lost with the peer.
func (e *Exec) Shares(boot transfer.Boot) bool {
	return len(e.dests.byPeer[boot])+len(e.match.grantsOf[boot])+len(e.match.pending.byPeer[boot]) > 0
}

// Load returns the counts.
func (e *Exec) Load() Load {
	return Load{len(e.dests.byID), e.sources.count, len(e.match.grants), len(e.match.pending.byKey),
		len(e.queries.byToken), len(e.layouts.asked), len(e.endpoints.byAddr), len(e.peers.byBoot),
		len(e.dispatch.lanes), e.spray.Flights(), e.agenda.Len()}
}
