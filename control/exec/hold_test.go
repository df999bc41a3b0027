package exec

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec/internal/core"
	"github.com/kvspray/kvspray/transfer"
)

const decodeSession = 7 // of the decode engine's scheduler

// ask sends an admission query of a session.
func (n *simNode) ask(id, session uint64, k transfer.Key, peer string) {
	n.event(func() {
		n.ex.Await(n.s.now, id, engines.Await{Session: session, Key: k, Peer: peer, TTL: 10 * sec})
	})
}

func (n *simNode) hold(w *engines.Worker, id uint64) {
	n.event(func() { n.ex.Hold(n.s.now, w, id) })
}

// waiting is a finished prefill that is held for a request in the queue of a decode engine.
func waiting(t *testing.T) (s *sim, p, d *simNode, pw, dw *engines.Worker, src *simLease) {
	s, p, d, pw, dw = pair(t, 21, 0)
	d.ask(1, decodeSession, testKey(1, 1), "p:1")
	s.rest(100 * time.Millisecond)
	src = p.intent(pw, 1, testKey(1, 1), 64, 1, 30*sec)
	p.steps(src)
	p.hold(pw, 1)
	s.rest(100 * time.Millisecond)
	if d.answer[1].State != "admitted" {
		t.Fatalf("answer %+v", d.answer[1])
	}
	return s, p, d, pw, dw, src
}

// The queue of a decode engine may be longer than the match timeout, and than the deadline of a
// lease: while the engine lives, the source keeps what was computed for it.
func TestHeldForALongQueue(t *testing.T) {
	for _, queue := range []time.Duration{5 * sec, 12 * sec, 30 * sec} {
		for _, concurrent := range []bool{true, false} {
			t.Run(fmt.Sprintf("%v, concurrent %v", queue, concurrent), func(t *testing.T) {
				const requests = 200
				s, p, d, pw, dw := pair(t, 21, 0)
				var src, dst []*simLease
				for i := range uint64(requests) {
					k := testKey(byte(i), 1)
					if concurrent {
						d.ask(i+1, decodeSession, k, "p:1")
					}
					s.rest(5 * time.Millisecond)
					l := p.intent(pw, i+1, k, 64, 1, 30*sec)
					p.steps(l)
					p.hold(pw, i+1)
					src = append(src, l)
					if !concurrent {
						d.ask(i+1, decodeSession, k, "p:1")
					}
					s.after(queue, func() { dst = append(dst, d.expect(dw, i+1, k, "p:1", 64, 0, 30*sec)) })
				}
				s.rest(queue + sec)
				if len(d.answer) != requests || len(dst) != requests {
					t.Fatalf("%d answers, %d loads", len(d.answer), len(dst))
				}
				for _, l := range append(dst, src...) {
					wantStatus(t, l, engines.StatusOK)
				}
				if n := p.ex.sources.Waits(); n != 0 {
					t.Errorf("%d waits are left", n)
				}
			})
		}
	}
}

// The queue of a prefill engine may be longer than the match timeout, too. An engine that waits so
// long for its admission gets the bytes; one that gives up computes the prompt itself, and what is
// computed for it then is held for the match timeout at most.
func TestQueueOfThePrefillEngine(t *testing.T) {
	const queue = 25 * sec
	for _, patience := range []time.Duration{core.DefaultMatchTimeout, queue + 5*sec} {
		t.Run(patience.String(), func(t *testing.T) {
			s, p, d, pw, dw := pair(t, 21, 0)
			d.event(func() {
				d.ex.Await(s.now, 1, engines.Await{Session: decodeSession, Key: testKey(1, 1), Peer: "p:1",
					TTL: patience})
			})
			s.rest(queue)
			waits := patience > queue
			if _, answered := d.answer[1]; answered == waits {
				t.Fatalf("after %v: %+v", queue, d.answer[1])
			}
			src := p.intent(pw, 1, testKey(1, 1), 64, 1, 30*sec)
			p.steps(src)
			p.hold(pw, 1)
			s.rest(sec)
			if !waits {
				if d.answer[1].State != "gone" {
					t.Errorf("answer %+v", d.answer[1])
				}
				s.until("the source's end", core.DefaultMatchTimeout, func() bool { return src.done != nil })
				wantStatus(t, src, engines.StatusExpired)
				return
			}
			dst := d.expect(dw, 1, testKey(1, 1), "p:1", 64, 0, 30*sec)
			s.until("the load", sec, func() bool { return src.done != nil && dst.done != nil })
			wantStatus(t, dst, engines.StatusOK)
		})
	}
}

// An engine that lives and does not come costs the hold timeout, and no more.
func TestHoldIsBounded(t *testing.T) {
	s, p, _, _, _, src := waiting(t)
	s.rest(core.DefaultHoldTimeout - 500*time.Millisecond)
	if src.done != nil {
		t.Fatalf("the hold ended early: %s", src.done.Reason)
	}
	s.until("the end of the hold", sec, func() bool { return src.done != nil })
	wantStatus(t, src, engines.StatusExpired)
	if !strings.Contains(src.done.Reason, "transfer.hold_timeout") {
		t.Errorf("reason %q", src.done.Reason)
	}
	// Its engine would end the session of a sidecar that holds it past its deadline without a sign.
	last := src.opened
	for _, at := range append(p.heldOn, s.now) {
		if at-last > 11*sec {
			t.Errorf("no sign to the engine from %v to %v", last, at)
		}
		last = at
	}
}

// A sidecar that comes and goes does not extend the hold, and the engine gets its signs: also one
// whose deadline is shorter than the match timeout.
func TestHoldIsBoundedForAPeerThatComesAndGoes(t *testing.T) {
	for _, deadline := range []time.Duration{4 * sec, 30 * sec} {
		s, p, d, pw, _ := pair(t, 21, 0)
		d.ask(1, decodeSession, testKey(1, 1), "p:1")
		s.rest(100 * time.Millisecond)
		src := p.intent(pw, 1, testKey(1, 1), 64, 1, deadline)
		p.steps(src)
		p.hold(pw, 1)
		began := s.now
		for src.done == nil && s.now-began < core.DefaultHoldTimeout+sec {
			s.rest(3 * sec)
			p.peerDown(d.boot, false)
			p.event(func() { p.ex.PeerUp(s.now, "d:1", d.boot) })
		}
		if src.done == nil || s.now-began < core.DefaultHoldTimeout {
			t.Errorf("deadline %v: %+v after %v", deadline, src.done, s.now-began)
		}
		last := began
		for _, at := range append(p.heldOn, s.now) {
			if at-last > min(deadline, core.DefaultMatchTimeout)+sec {
				t.Errorf("deadline %v: no sign to the engine from %v to %v", deadline, last, at)
			}
			last = at
		}
	}
}

// A decode engine that dies in its queue frees the source as soon as its sidecar, or the source's,
// notices it: before and after the match timeout, before and after the end of the prefill.
func TestDeadDecodeEngineFreesTheSource(t *testing.T) {
	const soon = 100 * time.Millisecond
	for _, after := range []time.Duration{sec, 25 * sec} {
		s, _, d, _, _, src := waiting(t)
		s.rest(after)
		d.event(func() { d.ex.SchedulerGone(s.now, decodeSession+1) }) // of another engine
		s.rest(soon)
		if src.done != nil {
			t.Fatalf("after %v: ended with another engine's session: %s", after, src.done.Reason)
		}
		d.event(func() { d.ex.SchedulerGone(s.now, decodeSession) })
		s.until("the end after the engine's death", soon, func() bool { return src.done != nil })
		wantStatus(t, src, engines.StatusExpired)

		s, p, d, _, _, src := waiting(t)
		s.rest(after)
		d.dead = true
		p.peerDown(d.boot, true)
		s.until("the end after the sidecar's death", soon, func() bool { return src.done != nil })
		wantStatus(t, src, engines.StatusExpired)
	}

	// It dies before its prompt is computed, and before the prefill has the request at all.
	s, p, d, pw, _ := pair(t, 21, 0)
	d.ask(1, decodeSession, testKey(1, 1), "p:1")
	d.ask(2, decodeSession, testKey(2, 1), "p:1")
	s.rest(100 * time.Millisecond)
	early := p.intent(pw, 1, testKey(1, 1), 64, 1, 30*sec)
	s.rest(100 * time.Millisecond)
	d.event(func() { d.ex.SchedulerGone(s.now, decodeSession) })
	s.until("the end in mid prefill", soon, func() bool { return early.done != nil })
	late := p.intent(pw, 2, testKey(2, 1), 64, 1, 30*sec)
	s.until("the end of a late prefill", soon, func() bool { return late.done != nil })
	if l := p.ex.Load(); l.Pending != 0 || l.Sources != 0 || p.ex.sources.Waits() != 0 {
		t.Errorf("left: %+v, %d waits", l, p.ex.sources.Waits())
	}
}

// A request that is canceled before the source's sidecar is reached leaves nothing held there,
// although its query arrives then and its engine lives.
func TestCanceledBeforeTheSourceIsReached(t *testing.T) {
	s, p, _, pw, _ := pair(t, 21, 0)
	n := s.node("x:1", Config{Transports: []string{"tcp"}})
	w := n.worker()
	src := p.intent(pw, 1, testKey(1, 1), 64, 1, 30*sec)
	p.steps(src)
	p.hold(pw, 1)
	n.hangs = map[string]bool{"p:1": true}
	n.ask(1, decodeSession, testKey(1, 1), "p:1")
	dst := n.expect(w, 1, testKey(1, 1), "p:1", 64, 0, 30*sec)
	s.rest(100 * time.Millisecond)
	n.event(func() { n.ex.Cancel(s.now, w, 1, "the client left") })
	wantStatus(t, dst, engines.StatusCancelled)
	n.event(func() { n.ex.PeerUp(s.now, "p:1", p.boot) })
	s.join(n, p)
	s.until("the source's end", 100*time.Millisecond, func() bool { return src.done != nil })
	wantStatus(t, src, engines.StatusCancelled)
	if p.ex.sources.Waits() != 0 || p.ex.match.Counts().WaitingKeys != 0 {
		t.Errorf("left: %d waits, %+v", p.ex.sources.Waits(), p.ex.match.Counts())
	}
}

// A sidecar that starts again has no trace of a request that was canceled meanwhile, whose decline
// went to the process before it or to none. Nothing of the request reaches the new process, so that
// the source which its engine presents there again ends with the match timeout.
func TestCanceledWhileTheSourceRestarts(t *testing.T) {
	const soon = 100 * time.Millisecond
	for _, loads := range []bool{false, true} {
		for _, early := range []bool{false, true} {
			t.Run(fmt.Sprintf("loads %v, early %v", loads, early), func(t *testing.T) {
				s, p, d, pw, dw := pair(t, 21, 0)
				d.ask(1, decodeSession, testKey(1, 1), "p:1")
				var dst *simLease
				if loads {
					dst = d.expect(dw, 1, testKey(1, 1), "p:1", 64, 0, 30*sec)
				}
				s.rest(soon)
				cancel := func() {
					if loads {
						d.event(func() { d.ex.Cancel(s.now, dw, 1, "the client left") })
						return
					}
					d.event(func() {
						d.ex.Decline(s.now, engines.Decline{Boot: transfer.Boot{99}, World: 1,
							Key: testKey(1, 1), Peer: "p:1", Reason: "the client left"})
					})
				}
				if early {
					cancel()
				}
				p.dead = true
				d.peerDown(p.boot, true)
				if s.rest(soon); !early {
					cancel()
				}
				s.rest(sec / 2) // no process listens
				again := s.node("p:1", Config{Transports: []string{"shm", "tcp"}})
				again.event(func() { again.ex.WorkerUp(pw) })
				src := again.intent(pw, 1, testKey(1, 1), 64, 1, 30*sec)
				again.steps(src)
				again.hold(pw, 1)
				s.until("the source's end", core.DefaultMatchTimeout+sec, func() bool {
					return src.done != nil
				})
				if loads {
					wantStatus(t, dst, engines.StatusCancelled)
				}
				if d.answer[1].State != "gone" {
					t.Errorf("answer %+v", d.answer[1])
				}
				if l := d.ex.Load(); l.Asked != 0 || again.ex.sources.Waits() != 0 {
					t.Errorf("left: %+v, %d waits", l, again.ex.sources.Waits())
				}
			})
		}
	}
}

// A query may wait for its prefill for longer than the match timeout, and so does the decline of
// its request.
func TestDeclineOutlastsItsQuery(t *testing.T) {
	s, p, d, pw, _ := pair(t, 21, 0)
	d.event(func() {
		d.ex.Await(s.now, 1, engines.Await{Session: decodeSession, Key: testKey(1, 1), Peer: "p:1",
			TTL: 60 * sec})
	})
	s.rest(sec)
	d.event(func() {
		d.ex.Decline(s.now, engines.Decline{Boot: transfer.Boot{99}, World: 1, Key: testKey(1, 1),
			Peer: "p:1", Reason: "the client left"})
	})
	s.rest(20 * sec)
	src := p.intent(pw, 1, testKey(1, 1), 64, 1, 30*sec)
	p.steps(src)
	p.hold(pw, 1)
	s.until("the source's end", sec, func() bool { return src.done != nil })
	wantStatus(t, src, engines.StatusCancelled)
}

// Samples of one request share a query: the end of one leaves it to the others.
func TestOneSampleOfTwoIsCanceled(t *testing.T) {
	s, p, d, pw, dw := pair(t, 21, 0)
	d.ask(1, decodeSession, testKey(1, 1), "p:1")
	s.rest(100 * time.Millisecond)
	d.event(func() {
		d.ex.Decline(s.now, engines.Decline{Boot: transfer.Boot{99}, World: 1, Key: testKey(1, 1),
			Peer: "p:1", Reason: "the sample ended"})
	})
	s.rest(sec)
	src := p.intent(pw, 1, testKey(1, 1), 64, 2, 30*sec)
	p.steps(src)
	p.hold(pw, 1)
	s.rest(15 * sec)
	if d.answer[1].State != "admitted" {
		t.Fatalf("answer %+v", d.answer[1])
	}
	dst := d.expect(dw, 1, testKey(1, 1), "p:1", 64, 0, 30*sec)
	s.until("the other's load", sec, func() bool { return src.done != nil && dst.done != nil })
	wantStatus(t, dst, engines.StatusOK)
}

// Of equal prompts, the decode engine fetches one and finds the others in its prefix cache: what
// was computed for those is held for the match timeout, whether the engine lives or not.
func TestEqualPromptsThatAreNotFetched(t *testing.T) {
	s, p, d, pw, dw, first := waiting(t)
	d.ask(2, decodeSession, testKey(1, 1), "p:1")
	second := p.intent(pw, 2, testKey(1, 1), 64, 1, 30*sec)
	p.steps(second)
	p.hold(pw, 2)
	s.rest(15 * sec)
	dst := d.expect(dw, 1, testKey(1, 1), "p:1", 64, 0, 30*sec)
	s.until("the load", sec, func() bool { return first.done != nil && dst.done != nil })
	wantStatus(t, dst, engines.StatusOK)
	s.until("the other's end", core.DefaultMatchTimeout, func() bool { return second.done != nil })
	wantStatus(t, second, engines.StatusExpired)
}

// Samples of a request share a lease, and each may stand in the queue for long.
func TestSamplesOfALongQueue(t *testing.T) {
	for _, sessions := range []uint64{1, 2} {
		s, p, d, pw, dw := pair(t, 21, 0)
		for i := range sessions {
			d.ask(1+i, decodeSession+i, testKey(1, 1), "p:1")
		}
		s.rest(100 * time.Millisecond)
		src := p.intent(pw, 1, testKey(1, 1), 64, 2, 30*sec)
		p.steps(src)
		p.hold(pw, 1)
		s.rest(sec)
		first := d.expect(dw, 1, testKey(1, 1), "p:1", 64, 0, 30*sec)
		s.rest(15 * sec)
		second := d.expect(dw, 2, testKey(1, 1), "p:1", 64, 0, 30*sec)
		s.until("both", sec, func() bool { return src.done != nil && second.done != nil })
		wantStatus(t, first, engines.StatusOK)
		wantStatus(t, second, engines.StatusOK)
		wantStatus(t, src, engines.StatusOK)
	}
}

// A request that is refused waits for nothing.
func TestRefusedRequestsWaitForNothing(t *testing.T) {
	s, p, d, pw, dw := pair(t, 21, 0)
	pw.Fingerprint[0] = 1
	d.ask(1, decodeSession, testKey(1, 1), "p:1")
	s.rest(100 * time.Millisecond)
	src := p.intent(pw, 1, testKey(1, 1), 64, 1, 30*sec)
	p.steps(src)
	dst := d.expect(dw, 1, testKey(1, 1), "p:1", 64, 0, 30*sec)
	p.hold(pw, 1)
	s.until("the refusal", sec, func() bool { return dst.done != nil })
	wantStatus(t, dst, engines.StatusRefused)
	s.until("the source's end", core.DefaultMatchTimeout+sec, func() bool { return src.done != nil })
	wantStatus(t, src, engines.StatusExpired)
}

// A load completes before its query is answered, and the source's sidecar dies before it sends that
// answer. The engine presents the source to the next sidecar, where it waits for the match timeout,
// because the query goes to no other process.
func TestLoadedBeforeTheAnswer(t *testing.T) {
	s, p, d, pw, dw := pair(t, 21, 0)
	k := testKey(1, 1)
	src := p.intent(pw, 1, k, 64, 1, 30*sec)
	dst := d.expect(dw, 1, k, "p:1", 64, 0, 30*sec)
	s.rest(100 * time.Millisecond)   // the grant is bound, and no layer is ready
	p.links[d.boot] = s.now + 60*sec // the source's control lanes send nothing more
	d.ask(1, decodeSession, k, "p:1")
	s.rest(100 * time.Millisecond)
	p.steps(src)
	s.until("the load", sec, func() bool { return dst.done != nil })
	wantStatus(t, dst, engines.StatusOK)
	if d.answer[1].State != "" {
		t.Fatalf("answer %+v", d.answer[1])
	}
	p.dead = true
	d.peerDown(p.boot, true)
	again := s.node("p:1", Config{Transports: []string{"shm", "tcp"}})
	again.event(func() { again.ex.WorkerUp(pw) })
	src = again.intent(pw, 1, k, 64, 1, 30*sec)
	again.steps(src)
	again.hold(pw, 1)
	s.until("the source's end", core.DefaultMatchTimeout+sec, func() bool { return src.done != nil })
	if l := d.ex.Load(); l.Asked != 0 || again.ex.sources.Waits() != 0 || d.answer[1].State != "gone" {
		t.Errorf("left: %+v, %d waits, answer %+v", l, again.ex.sources.Waits(), d.answer[1])
	}
}

// A sidecar that is only out of reach has the match timeout, and a dead engine of two frees
// nothing that the other waits for.
func TestHoldOutOfReach(t *testing.T) {
	s, p, d, _, _, src := waiting(t)
	s.rest(25 * sec)
	p.peerDown(d.boot, false)
	s.rest(9 * sec)
	p.event(func() { p.ex.PeerUp(s.now, "d:1", d.boot) })
	s.rest(12 * sec)
	if src.done != nil {
		t.Fatalf("ended although the sidecar is back: %s", src.done.Reason)
	}
	p.peerDown(d.boot, false)
	s.until("the end", core.DefaultMatchTimeout+100*time.Millisecond, func() bool {
		return src.done != nil
	})
	if !strings.Contains(src.done.Reason, "unreachable") {
		t.Errorf("reason %q", src.done.Reason)
	}

	s, _, d, _, dw, src := waiting(t)
	d.ask(2, decodeSession+1, testKey(1, 1), "p:1")
	s.rest(sec)
	d.event(func() { d.ex.SchedulerGone(s.now, decodeSession) })
	s.rest(20 * sec)
	dst := d.expect(dw, 1, testKey(1, 1), "p:1", 64, 0, 30*sec)
	s.until("the other's load", sec, func() bool { return src.done != nil && dst.done != nil })
	wantStatus(t, dst, engines.StatusOK)
}

// The engine of the source takes the blocks of a hold back: at once if nothing reads them, else
// after the receiver.
func TestYield(t *testing.T) {
	s, p, _, pw, _, src := waiting(t)
	s.rest(15 * sec)
	p.event(func() { p.ex.Yield(s.now, pw, 1) })
	s.until("the end", 100*time.Millisecond, func() bool { return src.done != nil })
	wantStatus(t, src, engines.StatusExpired)
	if !strings.Contains(src.done.Reason, "needs the blocks") {
		t.Errorf("reason %q", src.done.Reason)
	}

	s, p, d, pw, dw := pair(t, 21, 0)
	src = p.intent(pw, 1, testKey(1, 1), 512, 2, 30*sec)
	p.event(func() { p.ex.Yield(s.now, pw, 1) }) // it is not held
	dst := d.expect(dw, 1, testKey(1, 1), "p:1", 512, 0, 30*sec)
	s.until("the binding", sec, func() bool {
		return src.done == nil && p.ex.match.Counts().Grants == 1
	})
	p.hold(pw, 1)
	p.event(func() { p.ex.Yield(s.now, pw, 1) })
	p.steps(src)
	s.until("the receiver's end", sec, func() bool { return src.done != nil && dst.done != nil })
	wantStatus(t, dst, engines.StatusOK)
	wantStatus(t, src, engines.StatusOK)
}
