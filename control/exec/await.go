package exec

import (
	"strings"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/transfer"
)

// queries are the open admission queries of our engines.
type queries struct {
	*core
	endpoints *endpoints
	sources   *sources
	workers   *workers
	byToken   map[uint64]*query
}

// query is one admission query of an engine.
type query struct {
	id   uint64
	a    engines.Await
	ep   *endpoint
	sent transfer.Boot // the peer that was asked last
	end  Instant
	t    *timer
}

// open is Exec.Await.
func (qs *queries) open(now Instant, id uint64, a engines.Await) {
	if qs.draining || len(qs.byToken) >= qs.cfg.MaxPending {
		x := qs.emit(Answer)
		x.Await, x.Admission = id, engines.Admission{State: "refused",
			Message: "sidecar is draining, or has too many questions open"}
		return
	}
	if why := qs.endpoints.unreachable(now, a.Peer); why != "" {
		x := qs.emit(Answer)
		x.Await, x.Admission = id, engines.Admission{State: "gone", Message: why}
		return
	}
	ttl := a.TTL
	if ttl <= 0 {
		ttl = qs.cfg.MatchTimeout
	}
	w := &query{id: id, a: a, end: now + min(ttl, MaxDeadline)}
	w.t = newTimer(func(Instant) {
		qs.answer(w, engines.Admission{State: "gone", Message: "no answer from " + a.Peer + " in time"})
	})
	// The peer answers at the TTL; this timer is for a lost answer.
	qs.agenda.arm(w.t, w.end+qs.cfg.Grace/4)
	qs.byToken[id] = w
	w.ep = qs.endpoints.get(a.Peer)
	w.ep.refs++
	w.ep.queries[w] = struct{}{}
	qs.ask(now, w)
}

func (qs *queries) ask(now Instant, w *query) {
	if !w.ep.reached() {
		qs.endpoints.reach(now, w.ep)
		return
	}
	if w.sent == w.ep.peer.boot {
		return
	}
	if qs.alone(w.ep.peer, w.a.Engine, w.a.Key) {
		qs.answer(w, engines.Admission{State: "refused", Message: "it is this engine's own sidecar, " +
			"and no other engine is registered there: name " +
			"the prefill engine's (--prefill-peer of kvspray proxy, which arrives as " +
			"kv_transfer_params.kvspray.peer)"})
		return
	}
	w.sent = w.ep.peer.boot
	qs.send(w.sent, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Await{Await: &peerv1.Await{
		Xfer: w.a.Key.Xfer[:], Hash: w.a.Key.Hash[:], Token: w.id, TtlMs: millis(w.end - now)}}})
}

// alone reports whether a peer is this process and serves no other engine. Two engines may share a
// sidecar, but a router that names a decode engine's own sidecar by mistake would cost each
// request its match timeout.
func (qs *queries) alone(p *peer, engine string, k transfer.Key) bool {
	if p.boot != qs.cfg.Boot || len(qs.sources.byKey[k]) > 0 {
		return false
	}
	for w := range qs.workers.all {
		if name := w.Place.Engine; name != engine && !strings.HasPrefix(name, engine+"/dp") {
			return false
		}
	}
	return true
}

func (qs *queries) answer(w *query, ad engines.Admission) {
	if qs.byToken[w.id] != w {
		return
	}
	delete(qs.byToken, w.id)
	delete(w.ep.queries, w)
	qs.agenda.disarm(w.t)
	x := qs.emit(Answer)
	x.Await, x.Admission = w.id, ad
	w.ep.refs--
	qs.endpoints.drop(w.ep)
}

// onAdmitted takes the answer of the peer that was asked last. Tokens count up, so another peer
// could guess one: with a forged answer a decode engine would wait for a prefill that never began,
// or refuse one that did.
func (qs *queries) onAdmitted(p *peer, m *peerv1.Admitted) error {
	w := qs.byToken[m.Token]
	if w == nil {
		return nil // it is late
	}
	if w.sent != p.boot {
		return wrong(BadAnswer, "admitted: question %d was put to another peer, or to none yet",
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
