package exec

import (
	"fmt"
	"strings"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/transfer"
)

// await is a question of one of our engines.
type await struct {
	id   uint64
	a    connector.Await
	ep   *endpoint
	sent transfer.Boot // whom we asked
	end  Instant
	t    *timer
}

// Await asks the sidecar at a.Peer; Answer with that id follows.
func (e *Exec) Await(now Instant, id uint64, a connector.Await) {
	if e.draining || len(e.asked) >= e.cfg.MaxPending {
		x := e.emit(Answer)
		x.Await, x.Admission = id, connector.Admission{State: "refused", Message: "sidecar is draining, or has too many questions open"}
		return
	}
	if why := e.unreachable(now, a.Peer); why != "" {
		x := e.emit(Answer)
		x.Await, x.Admission = id, connector.Admission{State: "gone", Message: why}
		return
	}
	ttl := a.TTL
	if ttl <= 0 {
		ttl = e.cfg.Partner
	}
	w := &await{id: id, a: a, end: now + min(ttl, MaxDeadline)}
	w.t = newTimer(func(Instant) {
		e.answer(w, connector.Admission{State: "gone", Message: "no answer from " + a.Peer + " in time"})
	})
	// Ours is the second clock: the peer answers at the ttl itself.
	e.agenda.arm(w.t, w.end+e.cfg.Grace/4)
	e.asked[id] = w
	w.ep = e.endpoint(a.Peer)
	w.ep.refs++
	w.ep.awaits[w] = struct{}{}
	e.ask(now, w)
}

func (e *Exec) ask(now Instant, w *await) {
	if !w.ep.reached() {
		e.reach(now, w.ep)
		return
	}
	if w.sent == w.ep.peer.boot {
		return
	}
	if e.alone(w.ep.peer, w.a.Engine, w.a.Key) {
		e.answer(w, connector.Admission{State: "refused", Message: "it is this engine's own sidecar, and no other engine is registered there: name " +
			"the prefill engine's (--prefill-peer of kvspray proxy, which arrives as kv_transfer_params.kvspray.peer)"})
		return
	}
	w.sent = w.ep.peer.boot
	e.send(w.sent, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Await{Await: &peerv1.Await{
		Xfer: w.a.Key.Xfer[:], Hash: w.a.Key.Hash[:], Token: w.id, TtlMs: millis(w.end - now)}}})
}

// alone reports whether a peer is ourselves with no engine but the one that asks. Two engines may share a sidecar; but a router that names a
// decode's own one by mistake would cost each request the time of a partner who never comes.
func (e *Exec) alone(p *peer, engine string, k transfer.Key) bool {
	if p.boot != e.cfg.Boot || len(e.byKey[k]) > 0 {
		return false
	}
	for w := range e.workers {
		if name := w.Place.Engine; name != engine && !strings.HasPrefix(name, engine+"/dp") {
			return false
		}
	}
	return true
}

func (e *Exec) answer(w *await, ad connector.Admission) {
	if e.asked[w.id] != w {
		return
	}
	delete(e.asked, w.id)
	delete(w.ep.awaits, w)
	e.agenda.disarm(w.t)
	x := e.emit(Answer)
	x.Await, x.Admission = w.id, ad
	w.ep.refs--
	e.dropEndpoint(w.ep)
}

// onAdmitted takes the answer of the peer that was asked last. Tokens count up, so any member could
// guess one: an answer of another peer would have a decode engine wait for a prefill that never
// began, or refuse one that did.
func (e *Exec) onAdmitted(p *peer, m *peerv1.Admitted) error {
	w := e.asked[m.Token]
	if w == nil {
		return nil // it is late
	}
	if w.sent != p.boot {
		return wrong(BadAnswer, "admitted: question %d was put to another peer, or to none yet",
			m.Token)
	}
	ad := connector.Admission{Tokens: m.Tokens, Message: m.Message, State: "gone"}
	switch m.State {
	case peerv1.Admitted_ADMITTED:
		ad.State = "admitted"
	case peerv1.Admitted_REFUSED:
		ad.State = "refused"
	}
	e.answer(w, ad)
	return nil
}

func (e *Exec) onAwait(now Instant, p *peer, m *peerv1.Await) error {
	k, err := key(m.Xfer, m.Hash)
	if err != nil {
		return fmt.Errorf("await: %w", err)
	}
	q := &pending{peer: p, key: k, token: m.Token}
	if l := e.byKey[k]; len(l) > 0 {
		e.admit(q, l[0])
		return nil
	}
	e.wait(now, q, m.TtlMs)
	return nil
}

func (e *Exec) admit(q *pending, s *source) {
	e.send(q.peer.boot, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Admitted{Admitted: &peerv1.Admitted{
		Token: q.token, State: peerv1.Admitted_ADMITTED, Tokens: s.in.Tokens}}})
}
