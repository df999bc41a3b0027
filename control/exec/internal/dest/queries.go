package dest

import (
	"bytes"
	"cmp"
	"maps"
	"slices"
	"strings"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec/internal/core"
	"github.com/kvspray/kvspray/control/exec/internal/endpoint"
	"github.com/kvspray/kvspray/control/exec/internal/frame"
	"github.com/kvspray/kvspray/control/exec/internal/index"
	"github.com/kvspray/kvspray/control/exec/internal/lanes"
	"github.com/kvspray/kvspray/control/exec/internal/timer"
	"github.com/kvspray/kvspray/control/exec/internal/workers"
	"github.com/kvspray/kvspray/transfer"
)

// Queries are the open admission queries of our engines.
type Queries struct {
	*core.Core
	out       Actions
	endpoints *endpoint.Table
	workers   *workers.Table
	sourceOf  func(transfer.Key) bool // whether a source lease of this process has a key
	byToken   map[uint64]*query
	at        index.Sets[*endpoint.Endpoint, *query]
	byXfer    index.Sets[transfer.XferID, *query]
	asked     index.Sets[uint64, transfer.Boot] // the peers that each session has asked
}

// NewQueries returns a table without queries. sourceOf reports whether a source lease of this
// process has a key.
func NewQueries(c *core.Core, out Actions, endpoints *endpoint.Table, workers *workers.Table,
	sourceOf func(transfer.Key) bool) *Queries {
	return &Queries{Core: c, out: out, endpoints: endpoints, workers: workers, sourceOf: sourceOf,
		byToken: map[uint64]*query{}, at: index.Sets[*endpoint.Endpoint, *query]{},
		byXfer: index.Sets[transfer.XferID, *query]{},
		asked:  index.Sets[uint64, transfer.Boot]{}}
}

// Len counts the open queries.
func (qs *Queries) Len() int { return len(qs.byToken) }

// query is one admission query of an engine.
type query struct {
	a    *engines.Await
	ep   *endpoint.Endpoint
	sent transfer.Boot // the peer that was asked last
	over bool          // a request of it is over
	end  Instant
	t    *timer.Timer
}

// Open takes a query. An Answer follows.
func (qs *Queries) Open(now Instant, a *engines.Await) {
	if qs.Draining || len(qs.byToken) >= qs.Cfg.MaxPending {
		qs.out.Answer(a, engines.Admission{State: "refused",
			Message: "sidecar is draining, or has too many queries open"})
		return
	}
	if why := qs.endpoints.Unreachable(now, a.Peer); why != "" {
		qs.out.Answer(a, engines.Admission{State: "gone", Message: why})
		return
	}
	ttl := a.TTL
	if ttl <= 0 {
		ttl = qs.Cfg.MatchTimeout
	}
	w := &query{a: a, end: now + min(ttl, frame.MaxDeadline)}
	w.t = timer.New(func(Instant) {
		qs.answer(w, engines.Admission{State: "gone", Message: "no answer from " + a.Peer + " in time"})
	})
	// The peer answers at the TTL; this timer is for a lost answer.
	qs.Agenda.Arm(w.t, w.end+qs.Cfg.Grace/4)
	qs.byToken[a.Token] = w
	w.ep = qs.endpoints.Get(a.Peer)
	w.ep.Hold()
	w.ep.Wait()
	qs.at.Add(w.ep, w)
	qs.byXfer.Add(a.Key.Xfer, w)
	qs.ask(now, w)
}

func (qs *Queries) ask(now Instant, w *query) {
	if !w.ep.Reached() {
		qs.endpoints.Reach(now, w.ep)
		return
	}
	if w.sent == w.ep.Peer().Boot {
		return
	}
	if w.over {
		qs.withdraw(w)
		return
	}
	if qs.alone(w.ep.Peer(), w.a.Engine, w.a.Key) {
		qs.answer(w, engines.Admission{State: "refused", Message: "it is this engine's own sidecar, " +
			"and no other engine is registered there: name " +
			"the prefill engine's (peer of an engine of kvspray proxy, which arrives as " +
			"kv_transfer_params.kvspray.peer)"})
		return
	}
	w.sent = w.ep.Peer().Boot
	qs.asked.Add(w.a.Session, w.sent)
	qs.out.Send(w.sent, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Await{Await: &peerv1.Await{
		Xfer: w.a.Key.Xfer[:], Hash: w.a.Key.Hash[:], Token: w.a.Token, TtlMs: frame.Millis(w.end - now),
		Session: w.a.Session}}})
}

// SessionOver ends a scheduler's session, and with it all its queries.
func (qs *Queries) SessionOver(session uint64) {
	for _, id := range slices.Sorted(maps.Keys(qs.byToken)) {
		if w := qs.byToken[id]; w.a.Session == session {
			qs.answer(w, engines.Admission{State: "gone", Message: "the scheduler's session is over"})
		}
	}
	for _, boot := range slices.SortedFunc(maps.Keys(qs.asked[session]),
		func(a, b transfer.Boot) int { return bytes.Compare(a[:], b[:]) }) {
		qs.out.Send(boot, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_SessionOver{
			SessionOver: &peerv1.SessionOver{Session: session}}})
	}
	delete(qs.asked, session)
}

// RequestOver follows the end of a request for a key at an address. A hash of zeros stands for
// every prompt of the transfer. No further peer gets its query: only a decline would end the hold
// there before the hold timeout, and that of this request may be lost. A query that a peer has got
// stays, since another sample of the request may share it.
func (qs *Queries) RequestOver(addr string, k transfer.Key) {
	for _, w := range byID(qs.byXfer[k.Xfer]) {
		if w.a.Peer != addr || w.a.Key != k && k.Hash != (transfer.PrefixHash{}) {
			continue
		}
		if w.over = true; w.sent == (transfer.Boot{}) {
			qs.withdraw(w)
		}
	}
}

func (qs *Queries) withdraw(w *query) {
	qs.answer(w, engines.Admission{State: "gone",
		Message: "a request of this prompt has ended, and no prefill was asked for it"})
}

// PeerGone removes a peer whose process has ended.
func (qs *Queries) PeerGone(boot transfer.Boot) {
	for session := range qs.asked {
		qs.asked.Remove(session, boot)
	}
}

// alone reports whether a peer is this process and serves no other engine. Two engines may share a
// sidecar, but a router that names a decode engine's own sidecar by mistake would cost each
// request its match timeout.
func (qs *Queries) alone(p *lanes.Peer, engine string, k transfer.Key) bool {
	if p.Boot != qs.Cfg.Boot || qs.sourceOf(k) {
		return false
	}
	for w := range qs.workers.All() {
		name := w.Place.Engine
		if !w.Internal && name != engine && !strings.HasPrefix(name, engine+"/dp") {
			return false
		}
	}
	return true
}

// byID are the queries of a set, in order.
func byID(set map[*query]struct{}) []*query {
	return slices.SortedFunc(maps.Keys(set),
		func(a, b *query) int { return cmp.Compare(a.a.Token, b.a.Token) })
}

// Connected asks what waited for an endpoint.
func (qs *Queries) Connected(now Instant, ep *endpoint.Endpoint) {
	for _, w := range byID(qs.at[ep]) {
		qs.ask(now, w)
	}
}

// Forget puts the queries of an endpoint to the next peer there: the last one is forgotten.
func (qs *Queries) Forget(ep *endpoint.Endpoint) {
	for w := range qs.at[ep] {
		w.sent = transfer.Boot{}
	}
}

// NoListener answers the queries of an endpoint where no process listens.
func (qs *Queries) NoListener(ep *endpoint.Endpoint, why string) {
	for _, w := range byID(qs.at[ep]) {
		qs.answer(w, engines.Admission{State: "gone", Message: why})
	}
}

// Unsent answers a query that was not sent to a peer and never will be.
func (qs *Queries) Unsent(boot transfer.Boot, token uint64, err error) {
	if w := qs.byToken[token]; w != nil && w.sent == boot {
		qs.answer(w, engines.Admission{State: "gone",
			Message: "the query was not sent to the sidecar of the prefill engine: " + err.Error()})
	}
}

func (qs *Queries) answer(w *query, ad engines.Admission) {
	if qs.byToken[w.a.Token] != w {
		return
	}
	delete(qs.byToken, w.a.Token)
	qs.at.Remove(w.ep, w)
	qs.byXfer.Remove(w.a.Key.Xfer, w)
	w.ep.Waited()
	qs.Agenda.Disarm(w.t)
	qs.out.Answer(w.a, ad)
	qs.endpoints.Release(w.ep)
}

// OnAdmitted takes the answer of the peer that was asked last. Tokens count up, so another peer
// could guess one: with a forged answer a decode engine would wait for a prefill that never began,
// or refuse one that did.
func (qs *Queries) OnAdmitted(p *lanes.Peer, m *peerv1.Admitted) error {
	w := qs.byToken[m.Token]
	if w == nil {
		return nil // it is late
	}
	if w.sent != p.Boot {
		return frame.Wrong(frame.BadAnswer, "admitted: query %d was put to another peer, or to none yet",
			m.Token)
	}
	ad := engines.Admission{Tokens: m.Tokens, Message: m.Message, State: "gone"}
	switch m.State {
	case peerv1.Admitted_ADMITTED:
		ad.State = "admitted"
	case peerv1.Admitted_REFUSED:
		ad.State = "refused"
	}
	qs.answer(w, ad)
	return nil
}
