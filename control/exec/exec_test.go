package exec

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

func pair(t testing.TB, seed uint64, faults float64) (s *sim, p, d *simNode, pw, dw *connector.Worker) {
	s = newSim(t, seed, faults)
	cfg := Config{Transports: []string{"shm", "tcp"}}
	p, d = s.node("p:1", cfg), s.node("d:1", cfg)
	return s, p, d, p.worker(), d.worker()
}

func (s *sim) until(what string, limit time.Duration, ok func() bool) {
	s.t.Helper()
	s.run(s.now+limit, ok)
	if !ok() {
		s.fatalf("%s: not within %v", what, limit)
	}
}

func wantStatus(t *testing.T, l *simLease, status uint16) {
	t.Helper()
	if l.done == nil {
		t.Fatalf("lease %v is not complete", l.id)
	}
	if l.done.Status != status {
		t.Fatalf("lease %v: status %d (%s): want %d", l.id, l.done.Status, l.done.Reason, status)
	}
}

const sec = time.Second

// The order in which the three words come does not matter: intent, grant, progress.
func TestMatchInAnyOrder(t *testing.T) {
	k := testKey(1, 1)
	for _, order := range []string{"IPE", "IEP", "EIP"} {
		t.Run(order, func(t *testing.T) {
			s, p, d, pw, dw := pair(t, 1, 0)
			var src, dst *simLease
			for _, c := range order {
				switch c {
				case 'I':
					src = p.intent(pw, 1, k, 300, 1, 30*sec)
				case 'P':
					p.steps(src)
				case 'E':
					dst = d.expect(dw, 1, k, "p:1", 300, 32, 30*sec)
				}
				s.run(s.now+100*time.Millisecond, func() bool { return false })
			}
			s.until("transfer", sec, func() bool { return src.done != nil && dst.done != nil })
			wantStatus(t, src, StatusOK)
			wantStatus(t, dst, StatusOK)
			if dst.done.Bytes != (300-32)*simUnit*simLayers || src.done.Bytes != dst.done.Bytes || src.done.Grants != 1 {
				t.Errorf("received %d, sent %d in %d grants", dst.done.Bytes, src.done.Bytes, src.done.Grants)
			}
		})
	}
}

// Nothing moves that is not ready, and the front of each layer moves as soon as it is.
func TestStreamsByLayer(t *testing.T) {
	s, p, d, pw, dw := pair(t, 2, 0)
	src := p.intent(pw, 1, testKey(1, 1), 256, 1, 30*sec)
	dst := d.expect(dw, 1, testKey(1, 1), "p:1", 256, 0, 30*sec)
	s.run(s.now+sec, func() bool { return false })
	landed := func() (n int) {
		for _, c := range dst.content {
			if c != "" {
				n++
			}
		}
		return n
	}
	if landed() != 0 {
		t.Fatal("chunks moved before any flag")
	}
	p.step(src, 0, 128) // 128 KiB of layer 0: two chunks
	s.until("front of layer 0", sec, func() bool { return landed() == 2 })
	p.step(src, 1, 70) // 4 full blocks of layer 1: 64 KiB
	s.until("front of layer 1", sec, func() bool { return landed() == 3 })
	p.steps(src)
	s.until("end", sec, func() bool { return dst.done != nil && src.done != nil })
	wantStatus(t, dst, StatusOK)
}

func TestFanoutAndEqualKeys(t *testing.T) {
	s, p, d, pw, dw := pair(t, 3, 0)
	k := testKey(2, 2)
	a := p.intent(pw, 1, k, 64, 2, 30*sec)
	b := p.intent(pw, 2, k, 64, 1, 30*sec)
	p.steps(a)
	p.steps(b)
	var dst []*simLease
	for i := range 3 {
		dst = append(dst, d.expect(dw, uint64(i+1), k, "p:1", 64, 0, 30*sec))
	}
	s.until("three", sec, func() bool {
		return a.done != nil && b.done != nil && dst[0].done != nil && dst[1].done != nil && dst[2].done != nil
	})
	for _, l := range append(dst, a, b) {
		wantStatus(t, l, StatusOK)
	}
	if a.done.Grants != 2 || b.done.Grants != 1 {
		t.Errorf("grants served: %d and %d, want 2 and 1", a.done.Grants, b.done.Grants)
	}
	late := d.expect(dw, 9, k, "p:1", 64, 0, 30*sec)
	s.until("late grant", 3*sec, func() bool { return late.done != nil })
	wantStatus(t, late, StatusFailed)
}

func TestMismatchAndNoPartner(t *testing.T) {
	s, p, d, pw, dw := pair(t, 4, 0)
	src := p.intent(pw, 1, testKey(3, 1), 64, 1, 60*sec)
	p.steps(src)
	other := d.expect(dw, 1, testKey(3, 2), "p:1", 64, 0, 8*sec)
	none := d.expect(dw, 2, testKey(4, 2), "p:1", 64, 0, 8*sec)
	s.until("refusals", 9*sec, func() bool { return other.done != nil && none.done != nil })
	if other.done.Status == StatusOK || none.done.Status != StatusExpired {
		t.Errorf("mismatch %d (%s), no partner %d (%s)", other.done.Status, other.done.Reason, none.done.Status, none.done.Reason)
	}
}

// A wrong address costs the first request two seconds, not all the time that a partner has: a sidecar that starts anew meanwhile is waited
// for. Those that come after it are told at once, until somebody listens there.
func TestNobodyListens(t *testing.T) {
	s, _, d, _, dw := pair(t, 4, 0)
	dst := d.expect(dw, 1, testKey(3, 1), "q:1", 64, 0, 20*sec)
	d.event(func() { d.ex.Await(s.now, 1, connector.Await{Key: testKey(3, 2), Peer: "q:1", TTL: 8 * sec}) })
	s.run(s.now+sec, func() bool { return false })
	if dst.done != nil || len(d.answer) != 0 {
		t.Fatal("gave up at once")
	}
	s.until("the end", 2*sec, func() bool { return dst.done != nil && len(d.answer) == 1 })
	wantStatus(t, dst, StatusExpired)
	if !strings.Contains(dst.done.Reason, "refused") || d.answer[1].State != "gone" {
		t.Errorf("reason %q, answer %+v", dst.done.Reason, d.answer[1])
	}
	next := d.expect(dw, 3, testKey(5, 1), "q:1", 64, 0, 20*sec)
	d.event(func() { d.ex.Await(s.now, 2, connector.Await{Key: testKey(5, 2), Peer: "q:1", TTL: 8 * sec}) })
	s.until("the word to the next ones", connectRetry+sec/100, func() bool { return next.done != nil && len(d.answer) == 2 })
	wantStatus(t, next, StatusExpired)
	s.run(s.now+breakAfter+2*breakMost, func() bool { return false })
	if ep := d.ex.endpoints.byAddr["q:1"]; ep != nil {
		t.Errorf("the address is still known: %+v", ep)
	}
	late := d.expect(dw, 2, testKey(4, 1), "q:1", 64, 0, 20*sec)
	s.run(s.now+sec, func() bool { return false })
	q := s.node("q:1", Config{Transports: []string{"shm", "tcp"}})
	qw := q.worker()
	src := q.intent(qw, 1, testKey(4, 1), 64, 1, 60*sec)
	q.steps(src)
	s.until("transfer", 2*sec, func() bool { return late.done != nil })
	wantStatus(t, late, StatusOK)
	if ep := d.ex.endpoints.byAddr["q:1"]; ep == nil || ep.refused != 0 {
		t.Errorf("somebody answers there, and the next failure of a connect counts as the last: %+v", ep)
	}
}

// A sidecar whose engine is not there says so once the engine has had time to connect, and at once to those who ask later.
func TestNoEngine(t *testing.T) {
	s, _, d, _, dw := pair(t, 4, 0)
	q := s.node("q:1", Config{Transports: []string{"shm", "tcp"}})
	dst := d.expect(dw, 1, testKey(3, 1), "q:1", 64, 0, 20*sec)
	ask := func(id uint64) {
		d.event(func() { d.ex.Await(s.now, id, connector.Await{Key: testKey(3, 2), Peer: "q:1", TTL: 8 * sec}) })
	}
	ask(1)
	s.run(s.now+vacantWait/2, func() bool { return false })
	if dst.done != nil || len(d.answer) != 0 {
		t.Fatal("gave up at once")
	}
	s.until("the end", vacantWait, func() bool { return dst.done != nil && len(d.answer) == 1 })
	ask(2)
	late := d.expect(dw, 2, testKey(4, 1), "q:1", 64, 0, 20*sec)
	s.until("the word to the next ones", sec/10, func() bool { return late.done != nil && len(d.answer) == 2 })
	for _, x := range []*simLease{dst, late} {
		if x.done.Status != StatusExpired || !strings.Contains(x.done.Reason, "no engine is connected") {
			t.Errorf("status %d, %s", x.done.Status, x.done.Reason)
		}
	}
	if a := d.answer[2]; a.State != "gone" || !strings.Contains(a.Message, "no engine is connected") {
		t.Errorf("answer %+v", a)
	}
	q.steps(q.intent(q.worker(), 1, testKey(5, 1), 64, 1, 60*sec))
	next := d.expect(dw, 3, testKey(5, 1), "q:1", 64, 0, 20*sec)
	s.until("transfer", 2*sec, func() bool { return next.done != nil })
	wantStatus(t, next, StatusOK)
}

// Once every request of a transfer id is finished no other hash can come, and the decode need not wait to learn it. A question
// may be early: a prompt list is admitted one by one.
func TestMismatchIsKnownOnceAllAreHeld(t *testing.T) {
	s, p, d, pw, dw := pair(t, 4, 0)
	for id := range uint64(2) {
		p.steps(p.intent(pw, id+1, testKey(3, byte(id)), 64, 1, 60*sec))
	}
	early := d.expect(dw, 1, testKey(3, 9), "p:1", 64, 0, 8*sec)
	p.event(func() { p.ex.Hold(s.now, pw, 1) })
	s.run(s.now+sec, func() bool { return false })
	if early.done != nil {
		t.Fatalf("refused while a request of the list was under way: %s", early.done.Reason)
	}
	p.event(func() { p.ex.Hold(s.now, pw, 2) })
	s.until("refusal of the one that waits", sec, func() bool { return early.done != nil })
	wantStatus(t, early, StatusRefused)
	late := d.expect(dw, 2, testKey(3, 8), "p:1", 64, 0, 8*sec)
	s.until("refusal of a later one", sec, func() bool { return late.done != nil })
	wantStatus(t, late, StatusRefused)
}

// A prefill may compute for longer than the deadline; what must not last is the silence.
func TestProgressExtendsTheSource(t *testing.T) {
	s, p, d, pw, dw := pair(t, 4, 0)
	src := p.intent(pw, 1, testKey(1, 1), 512, 1, 5*sec)
	for tokens := uint32(64); tokens <= 512; tokens += 64 {
		s.run(s.now+4*sec, func() bool { return false })
		for l := range simLayers {
			p.step(src, l, tokens)
		}
	}
	dst := d.expect(dw, 1, testKey(1, 1), "p:1", 512, 0, 5*sec)
	s.until("transfer", sec, func() bool { return dst.done != nil && src.done != nil })
	wantStatus(t, src, StatusOK)
	wantStatus(t, dst, StatusOK)

	silent := p.intent(pw, 2, testKey(2, 1), 512, 1, 5*sec)
	p.step(silent, 0, 64)
	s.until("expiry", 6*sec, func() bool { return silent.done != nil })
	wantStatus(t, silent, StatusExpired)
}

// A source's sidecar that cannot be reached and is not known to be dead is waited for as any missing partner; one that comes back
// in time carries on.
func TestSourceSidecarOutOfReach(t *testing.T) {
	for _, back := range []bool{false, true} {
		s, p, d, pw, dw := pair(t, 12, 0)
		src := p.intent(pw, 1, testKey(1, 1), 512, 1, 60*sec)
		dst := d.expect(dw, 1, testKey(1, 1), "p:1", 512, 0, 20*sec) // a partner has 10 s
		s.run(s.now+50*time.Millisecond, func() bool { return false })
		d.hangs = map[string]bool{"p:1": true}
		d.event(func() { d.ex.PeerDown(s.now, p.boot, false) })
		s.run(s.now+9*sec, func() bool { return false })
		if dst.done != nil {
			t.Fatalf("gave up after 9 s: %s", dst.done.Reason)
		}
		if back {
			d.event(func() { d.ex.PeerUp(s.now, "p:1", p.boot) })
			s.run(s.now+5*sec, func() bool { return false })
			p.steps(src)
			s.until("transfer", sec, func() bool { return dst.done != nil })
			wantStatus(t, dst, StatusOK)
			continue
		}
		s.until("expiry", 2*sec, func() bool { return dst.done != nil })
		wantStatus(t, dst, StatusExpired)
	}
}

func TestFingerprint(t *testing.T) {
	s, p, d, pw, dw := pair(t, 5, 0)
	pw.Fingerprint[0] = 1
	src := p.intent(pw, 1, testKey(3, 1), 64, 1, 60*sec)
	p.steps(src)
	dst := d.expect(dw, 1, testKey(3, 1), "p:1", 64, 0, 8*sec)
	s.until("refusal", sec, func() bool { return dst.done != nil })
	wantStatus(t, dst, StatusRefused)
	const want = "fingerprint: dtype: a at prefill, b at decode"
	if dst.done.Reason != want {
		t.Errorf("reason %q, want %q", dst.done.Reason, want)
	}
	p.event(func() { p.ex.Hold(s.now, pw, 1) })
	s.until("the source's expiry", 11*sec, func() bool { return src.done != nil })
	if wantStatus(t, src, StatusExpired); !strings.HasSuffix(src.done.Reason, "; last: "+want) {
		t.Errorf("reason %q, want one that ends with %q", src.done.Reason, want)
	}
	if s.compared != 1 || dst.chunksIn() > 0 {
		t.Errorf("%d comparisons, %d chunks written", s.compared, dst.chunksIn())
	}
}

func TestPreemptInMidTransfer(t *testing.T) {
	s, p, d, pw, dw := pair(t, 6, 0)
	src := p.intent(pw, 1, testKey(1, 1), 512, 1, 30*sec)
	dst := d.expect(dw, 1, testKey(1, 1), "p:1", 512, 0, 30*sec)
	s.run(s.now+50*time.Millisecond, func() bool { return false })
	p.step(src, 0, 512)
	p.step(src, 1, 512)
	s.run(s.now+time.Millisecond, func() bool { return false })
	p.preempt(src)
	s.run(s.now+sec, func() bool { return false })
	if dst.done != nil || src.done != nil {
		t.Fatal("a preempted transfer ended")
	}
	p.steps(src)
	s.until("second attempt", sec, func() bool { return dst.done != nil && src.done != nil })
	wantStatus(t, dst, StatusOK)
	wantStatus(t, src, StatusOK)
}

// What is announced has its origin, and peers that wake up slowly are roused, before the first layer is there: once the grant is, whichever comes
// first, again for each step, and not for what is finished.
func TestAnnounced(t *testing.T) {
	for _, first := range []string{"announced", "expected"} {
		t.Run(first, func(t *testing.T) {
			s, p, d, pw, dw := pair(t, 9, 0)
			s.join(p, d)
			s.until("lanes", sec, func() bool { return len(p.lanes) == 3 && len(d.lanes) == 3 })
			src := p.intent(pw, 1, testKey(1, 1), 512, 1, 30*sec)
			var dst *simLease
			pause := func() { s.run(s.now+100*time.Millisecond, func() bool { return false }) }
			want := func(when string, bound, roused int) {
				t.Helper()
				if p.bound != bound || p.roused != roused {
					t.Fatalf("%s: %d origins and %d lanes roused, want %d and %d", when, p.bound, p.roused, bound, roused)
				}
			}
			for _, what := range []string{first, map[string]string{"announced": "expected", "expected": "announced"}[first]} {
				want("before both", 0, 0)
				if what == "announced" {
					p.announce(src)
				} else {
					dst = d.expect(dw, 1, testKey(1, 1), "p:1", 512, 0, 30*sec)
				}
				pause()
			}
			shm := 0
			for _, l := range p.lanes {
				if l.backend == "shm" {
					shm++
				}
			}
			if shm == 0 {
				t.Fatal("no lane of shm")
			}
			want("announced", 1, shm)
			p.step(src, 0, 64)
			pause()
			p.announce(src)
			want("a second step", 1, 2*shm)
			if p.updated != 1 {
				t.Errorf("the origin was given %d tables behind that of its intent, want 1", p.updated)
			}
			p.preempt(src)
			pause()         // it is granted anew
			p.announce(src) // its blocks come with the first layer
			want("after a preemption", 1, 3*shm)
			p.steps(src)
			p.announce(src)
			want("finished", 2, 3*shm)
			s.until("transfer", sec, func() bool { return src.done != nil && dst.done != nil })
			wantStatus(t, src, StatusOK)
			wantStatus(t, dst, StatusOK)
		})
	}
}

func TestCancelBothSides(t *testing.T) {
	s, p, d, pw, dw := pair(t, 7, 0)
	a, b := p.intent(pw, 1, testKey(1, 1), 512, 1, 30*sec), p.intent(pw, 2, testKey(2, 1), 512, 1, 30*sec)
	x, y := d.expect(dw, 1, testKey(1, 1), "p:1", 512, 0, 30*sec), d.expect(dw, 2, testKey(2, 1), "p:1", 512, 0, 30*sec)
	s.run(s.now+50*time.Millisecond, func() bool { return false })
	p.step(a, 0, 512)
	p.step(b, 0, 512)
	s.run(s.now+500*time.Microsecond, func() bool { return false })
	p.event(func() { p.ex.Cancel(s.now, pw, 1, "") })
	d.event(func() { d.ex.Cancel(s.now, dw, 2, "") })
	s.until("ends", sec, func() bool { return a.done != nil && b.done != nil && x.done != nil && y.done != nil })
	wantStatus(t, a, StatusCancelled)
	wantStatus(t, x, StatusFailed)
	wantStatus(t, y, StatusCancelled)
	wantStatus(t, b, StatusFailed)
}

func TestAwait(t *testing.T) {
	s, p, d, pw, _ := pair(t, 8, 0)
	ask := func(id uint64, k transfer.Key) {
		d.event(func() { d.ex.Await(s.now, id, connector.Await{Key: k, Peer: "p:1", TTL: 2 * sec}) })
	}
	ask(1, testKey(1, 1))
	ask(2, testKey(1, 2))
	ask(3, testKey(7, 7))
	s.run(s.now+sec, func() bool { return false })
	if len(d.answer) != 0 {
		t.Fatalf("answers before the intent: %v", d.answer)
	}
	src := p.intent(pw, 1, testKey(1, 1), 64, 1, 30*sec)
	s.run(s.now+100*time.Millisecond, func() bool { return false })
	if got := d.answer[1]; got.State != "admitted" || got.Tokens != 64 {
		t.Errorf("answer %+v, want admitted", got)
	}
	s.run(s.now+3*sec, func() bool { return false })
	if d.answer[2].State != "refused" || d.answer[3].State != "gone" {
		t.Errorf("mismatch %+v, nobody %+v", d.answer[2], d.answer[3])
	}
	p.event(func() { p.ex.Cancel(s.now, pw, 1, "") })
	ask(4, testKey(1, 1))
	s.run(s.now+100*time.Millisecond, func() bool { return false })
	if d.answer[4].State != "gone" || src.done == nil {
		t.Errorf("after the end: %+v", d.answer[4])
	}
}

// A router that names the decode engine's own sidecar by mistake is told at once; two engines that share one are not.
func TestOwnSidecarIsNoPartner(t *testing.T) {
	s, _, d, _, dw := pair(t, 8, 0)
	dw.Place.Engine = "vllm/d/dp0"
	ask := func(id uint64, peer string) {
		d.event(func() {
			d.ex.Await(s.now, id, connector.Await{Engine: "vllm/d", Key: testKey(1, 1), Peer: peer, TTL: 2 * sec})
		})
		s.run(s.now+100*time.Millisecond, func() bool { return false })
	}
	ask(1, "d:1")
	if got := d.answer[1]; got.State != "refused" || !strings.Contains(got.Message, "own sidecar") || !strings.Contains(got.Message, "--prefill-peer") {
		t.Errorf("asked itself: %+v", got)
	}
	ask(2, "p:1")
	pw := d.worker()
	pw.Place.Engine = "vllm/p"
	ask(3, "d:1")
	if len(d.answer) != 1 {
		t.Errorf("a partner may still come: %+v", d.answer)
	}
	d.intent(pw, 3, testKey(1, 1), 64, 1, 30*sec)
	s.until("engines of one sidecar", sec, func() bool { return d.answer[3].State == "admitted" })
}

func TestHoldWithoutPartner(t *testing.T) {
	s, p, _, pw, _ := pair(t, 9, 0)
	src := p.intent(pw, 1, testKey(1, 1), 64, 1, 30*sec)
	p.steps(src)
	p.event(func() { p.ex.Hold(s.now, pw, 1) })
	s.run(s.now+9900*time.Millisecond, func() bool { return false })
	if src.done != nil {
		t.Fatal("released before the partner's time was over")
	}
	s.until("expiry", 200*time.Millisecond, func() bool { return src.done != nil })
	wantStatus(t, src, StatusExpired)
}

// A sidecar may be its own peer.
func TestSelf(t *testing.T) {
	s, p, _, pw, _ := pair(t, 10, 0)
	w2 := p.worker()
	s.join(p, p)
	src := p.intent(pw, 1, testKey(1, 1), 300, 1, 30*sec)
	dst := p.expect(w2, 1, testKey(1, 1), "p:1", 300, 0, 30*sec)
	p.steps(src)
	s.until("transfer", sec, func() bool { return src.done != nil && dst.done != nil })
	wantStatus(t, dst, StatusOK)
}

// When every lane of the preferred transport is gone, the next one carries on.
func TestTransportSubstitution(t *testing.T) {
	s, p, d, pw, dw := pair(t, 11, 0)
	src := p.intent(pw, 1, testKey(1, 1), 2048, 1, 30*sec)
	dst := d.expect(dw, 1, testKey(1, 1), "p:1", 2048, 0, 30*sec)
	s.run(s.now+50*time.Millisecond, func() bool { return false })
	p.steps(src)
	s.run(s.now+time.Millisecond, func() bool { return false })
	for _, l := range p.lanes {
		if l.backend == "shm" {
			l.hung = true
		}
	}
	s.until("transfer", 3*sec, func() bool { return dst.done != nil })
	wantStatus(t, dst, StatusOK)
}

// chunksIn counts what is in place of a lease.
func (l *simLease) chunksIn() (n int) {
	for _, v := range l.content {
		if v == l.key {
			n++
		}
	}
	return n
}

// A lane that goes silent in mid transfer costs less than 100 ms, also where it is the preferred transport's only one.
func TestSilentLaneCostsLittle(t *testing.T) {
	s, p, d, pw, dw := pair(t, 11, 0)
	src := p.intent(pw, 1, testKey(1, 1), 8192, 1, 30*sec)
	dst := d.expect(dw, 1, testKey(1, 1), "p:1", 8192, 0, 30*sec)
	s.run(s.now+50*time.Millisecond, func() bool { return false })
	p.steps(src)
	s.until("a part", sec, func() bool { return dst.chunksIn() > 100 })
	if dst.done != nil {
		t.Fatal("it is over already")
	}
	var silent []*simLane
	for _, l := range p.lanes {
		if l.backend == "shm" || l.rail == "tcp1" {
			l.hung = true
			silent = append(silent, l)
		}
	}
	from, held := s.now, 0
	s.until("transfer", sec, func() bool { return dst.done != nil })
	wantStatus(t, dst, StatusOK)
	for _, l := range silent {
		held += len(l.held)
	}
	// 400 chunks remain, and the healthy lane moves two in a millisecond at least.
	if took := s.now - from; took > 350*time.Millisecond || held == 0 {
		t.Errorf("%v after two lanes of three fell silent with %d slices", took, held)
	}
	s.run(s.now+100*time.Millisecond, func() bool { return false })
	v := p.ex.View(s.now).Rails
	suspect := 0
	for _, r := range v.Pairs {
		if r.State == "suspect" {
			suspect++
		}
	}
	if suspect != 2 {
		t.Errorf("%d of 2 silent rails are shown as suspect: %+v", suspect, v.Pairs)
	}
}

// A receiver that must not wait goes before a background transfer that came first.
func TestPriorities(t *testing.T) {
	s, p, d, pw, dw := pair(t, 2, 0)
	var src, dst [2]*simLease
	open := func(i int, prio connector.Priority) {
		k := testKey(byte(i), 1)
		src[i] = p.intent(pw, uint64(i+1), k, 8192, 1, 30*sec)
		lid := transfer.LeaseID{Boot: dw.Boot, ID: uint64(i + 1)}
		dst[i] = &simLease{id: lid, w: dw, receive: true, opened: s.now, deadline: 30 * sec, key: k.String(), tokens: 8192}
		d.leases[lid] = dst[i]
		d.event(func() {
			d.ex.Expect(s.now, dw, connector.Expect{Lease: lid, Key: k, Peer: "p:1", Tokens: 8192, Skip: []uint32{0}, Deadline: 30 * sec,
				Partner: 10 * sec, Priority: prio})
		})
	}
	open(0, connector.Background)
	s.run(s.now+50*time.Millisecond, func() bool { return false })
	p.steps(src[0])
	s.until("a start", sec, func() bool { return dst[0].chunksIn() > 10 })
	open(1, connector.DecodeWaits)
	p.steps(src[1])
	s.until("the urgent one", sec, func() bool { return dst[1].done != nil })
	if dst[0].done != nil {
		t.Error("background was over first")
	}
	s.until("background", sec, func() bool { return dst[0].done != nil })
	wantStatus(t, dst[0], StatusOK)
}

// Nothing is sent after the deadline that the receiver named with its grant.
func TestNothingIsSentPastTheDeadline(t *testing.T) {
	s, p, d, pw, dw := pair(t, 3, 0)
	src := p.intent(pw, 1, testKey(1, 1), 8192, 1, 30*sec)
	dst := d.expect(dw, 1, testKey(1, 1), "p:1", 8192, 0, 2*sec)
	s.run(s.now+50*time.Millisecond, func() bool { return false })
	p.step(src, 0, 1024)
	s.run(s.now+sec, func() bool { return false })
	d.kill() // so that no revoke comes, and no proof of its death
	flow := func() *SendPart {
		for _, in := range p.ex.match.grants {
			return in.claims[0].snd
		}
		return nil
	}
	if flow() == nil || dst.done != nil {
		t.Fatal("no sending is open")
	}
	s.queue = nil
	p.ex.Tick(s.now + 2*sec)
	s.now += 2 * sec
	before := p.ex.spray.Flights()
	p.step(src, 1, 8192)
	if n := p.ex.spray.Flights(); n > before {
		t.Errorf("%d slices were sent after the deadline", n-before)
	}
}

// Lanes past the bound are refused by name, and the others carry on.
func TestLanesAreBounded(t *testing.T) {
	s, p, _, _, _ := pair(t, 3, 0)
	var boot transfer.Boot
	boot[0] = 9
	var refused error
	for i := range 2000 {
		rail := fmt.Sprint("rail", i)
		if err := p.ex.LaneUp(s.now, LaneInfo{ID: uint64(1000 + i), Peer: boot, Backend: "tcp", Local: rail, Remote: rail}); err != nil {
			refused = err
		}
	}
	if n := p.ex.Lanes(boot); n == 0 || n > 1024 || refused == nil || !strings.Contains(refused.Error(), "rail1999") {
		t.Errorf("%d lanes; refused: %v", n, refused)
	}
}

func TestSourceSidecarDies(t *testing.T) {
	s, p, d, pw, dw := pair(t, 12, 0)
	p.intent(pw, 1, testKey(1, 1), 512, 1, 30*sec)
	dst := d.expect(dw, 1, testKey(1, 1), "p:1", 512, 0, 30*sec)
	s.run(s.now+50*time.Millisecond, func() bool { return false })
	p.kill()
	s.run(s.now+2*sec, func() bool { return false })
	if dst.done != nil {
		t.Fatalf("gave up at once: %s", dst.done.Reason)
	}
	// A new sidecar at the same place, to which the shim presents its lease again.
	p2 := s.node("p:1", Config{Transports: []string{"shm", "tcp"}})
	w2 := p2.worker()
	src := p2.intent(w2, 1, testKey(1, 1), 512, 1, 30*sec)
	p2.steps(src)
	s.until("transfer", 5*sec, func() bool { return dst.done != nil && src.done != nil })
	wantStatus(t, dst, StatusOK)
}

func TestWorkerGone(t *testing.T) {
	s, p, d, pw, dw := pair(t, 13, 0)
	src := p.intent(pw, 1, testKey(1, 1), 512, 1, 30*sec)
	dst := d.expect(dw, 1, testKey(1, 1), "p:1", 512, 0, 30*sec)
	s.run(s.now+50*time.Millisecond, func() bool { return false })
	p.step(src, 0, 512)
	p.event(func() { p.ex.WorkerGone(s.now, pw, true, "exited") })
	s.until("both", sec, func() bool { return p.fenced[pw] && dst.done != nil })
	wantStatus(t, dst, StatusFailed)
	d.event(func() { d.ex.WorkerGone(s.now, dw, true, "exited") })
	if !d.fenced[dw] {
		t.Error("a worker without leases is not fenced at once")
	}
}

// TestRandomSchedules attacks the executors with everything at once.
func TestRandomSchedules(t *testing.T) {
	runs := uint64(400)
	if testing.Short() {
		runs = 60
	}
	for seed := range runs {
		randomSchedule(t, seed)
	}
}

func randomSchedule(t *testing.T, seed uint64) {
	faults := []float64{0, 0.02, 0.1, 0.3}[seed%4]
	s, p, d, pw, dw := pair(t, seed, faults)
	q := s.node("q:1", Config{Transports: []string{"shm", "tcp"}})
	qw := q.worker()
	type side struct {
		n *simNode
		w *connector.Worker
	}
	receivers := []side{{d, dw}, {q, qw}, {p, pw}}
	var all []*simLease
	gone := false
	for i := range 24 {
		k := testKey(byte(s.rng.IntN(8)), byte(s.rng.IntN(8)/7))
		deadline := time.Duration(1+s.rng.IntN(20)) * sec
		tokens := uint32(1 + int(k.Xfer[0])*97) // equal for equal keys, as prompts are
		fanout := 1 + s.rng.IntN(2)
		id := uint64(i + 1)
		r := receivers[s.rng.IntN(len(receivers))]
		skip := uint32(s.rng.IntN(int(tokens)/simBlock+1)) * simBlock
		s.after(s.delay(5*sec), func() {
			if p.dead {
				return
			}
			l := p.intent(pw, id, k, tokens, fanout, deadline)
			all = append(all, l)
			if s.chance(0.5) {
				s.after(s.delay(20*time.Millisecond), func() { p.announce(l) })
			}
			for st := uint32(64); st < tokens+64; st += 64 {
				for layer := range simLayers {
					s.after(time.Duration(st)*200*time.Microsecond+s.delay(10*time.Millisecond), func() {
						if l.done == nil && l.version == 0 && l.layers[layer] < st {
							p.step(l, layer, st)
						}
					})
				}
			}
			if s.chance(faults) {
				s.after(s.delay(100*time.Millisecond), func() {
					if l.done == nil {
						p.preempt(l)
						if s.chance(0.5) {
							s.after(s.delay(2*time.Millisecond), func() { p.announce(l) })
						}
						v := l.version
						s.after(s.delay(sec)+time.Millisecond, func() {
							if l.done == nil && l.version == v {
								p.steps(l)
							}
						})
					}
				})
			}
			if s.chance(faults) {
				s.after(s.delay(sec), func() { p.event(func() { p.ex.Cancel(s.now, pw, id, "") }) })
			} else {
				s.after(s.delay(sec), func() { p.event(func() { p.ex.Hold(s.now, pw, id) }) })
			}
		})
		s.after(s.delay(5*sec), func() {
			if r.n.dead || gone && r.n == d {
				return
			}
			l := r.n.expect(r.w, id+100, k, "p:1", tokens, skip, deadline)
			all = append(all, l)
			if s.chance(faults) {
				s.after(s.delay(sec), func() { r.n.event(func() { r.n.ex.Cancel(s.now, r.w, id+100, "") }) })
			}
		})
	}
	s.join(p, p)
	if faults > 0 && s.chance(0.3) {
		s.after(s.delay(5*sec), q.kill)
	}
	if faults > 0 && s.chance(0.2) {
		s.after(s.delay(5*sec), func() { gone = true; d.event(func() { d.ex.WorkerGone(s.now, dw, true, "exited") }) })
	}
	s.run(5*time.Minute, func() bool { return false })
	good := 0
	for _, n := range []*simNode{p, d, q} {
		if n.dead {
			continue
		}
		for _, l := range n.leases {
			if l.done == nil {
				s.fatalf("seed %d: lease %v (receive %v) never ended", seed, l.id, l.receive)
			}
			if l.done != nil && l.receive && l.done.Status == StatusOK {
				good++
			}
		}
		if dests, sources := n.ex.Open(); dests+sources != 0 {
			s.fatalf("seed %d: %s has %d and %d leases open", seed, n.addr, dests, sources)
		}
		if len(n.ex.match.grants)+len(n.ex.layouts.asked)+len(n.ex.match.comparing)+len(n.ex.match.pending.byKey)+len(n.ex.sources.byKey)+len(n.ex.sources.byXfer) != 0 || n.ex.spray.Flights() != 0 && faults == 0 {
			s.fatalf("seed %d: %s keeps %d grants, %d descriptions, %d pending, %d keys, %d flights", seed, n.addr, len(n.ex.match.grants), len(n.ex.layouts.asked),
				len(n.ex.match.pending.byKey), len(n.ex.sources.byKey), n.ex.spray.Flights())
		}
	}
	if faults == 0 && good == 0 {
		s.fatalf("seed %d: nothing was ever received", seed)
	}
}

// A slice costs no allocation once the tables have their size.
func TestSlicesDoNotAllocate(t *testing.T) {
	s, p, d, pw, dw := pair(t, 1, 0)
	src := p.intent(pw, 1, testKey(1, 1), 60000, 1, 30*sec)
	d.expect(dw, 1, testKey(1, 1), "p:1", 60000, 0, 30*sec)
	s.run(s.now+100*time.Millisecond, func() bool { return false })
	// From here on the lanes are the test's.
	var b Batch
	var flying []transport.Result
	collect := func() {
		for p.ex.Drain(&b) {
			for _, a := range b.Actions {
				for _, sl := range a.Slices {
					flying = append(flying, transport.Result{Slice: sl, Outcome: transfer.Landed})
				}
			}
		}
	}
	p.ex.Progress(s.now, pw, []connector.Progress{{Lease: src.id, Layer: 0, Tokens: 60000, Final: true}})
	collect()
	if len(flying) == 0 {
		t.Fatal("nothing was sent")
	}
	done := make([]transport.Result, 1)
	step := func() {
		if len(flying) == 0 {
			t.Fatal("ran out of slices")
		}
		done[0] = flying[0]
		flying = append(flying[:0], flying[1:]...)
		p.ex.Results(s.now, done)
		collect()
	}
	for range 50 {
		step()
	}
	if n := testing.AllocsPerRun(200, step); n != 0 {
		t.Errorf("%v allocations per slice", n)
	}
}

// A prompt that the receiver has already commits without a byte.
func TestNothingToMove(t *testing.T) {
	s, p, d, pw, dw := pair(t, 1, 0)
	src := p.intent(pw, 1, testKey(1, 1), 64, 1, 30*sec)
	dst := d.expect(dw, 1, testKey(1, 1), "p:1", 64, 64, 30*sec)
	s.until("transfer", sec, func() bool { return src.done != nil && dst.done != nil })
	wantStatus(t, src, StatusOK)
	wantStatus(t, dst, StatusOK)
}

func TestDrain(t *testing.T) {
	s, p, d, pw, dw := pair(t, 1, 0)
	src := p.intent(pw, 1, testKey(1, 1), 64, 1, 30*sec)
	p.event(func() { p.ex.DrainLeases() })
	late := p.intent(pw, 2, testKey(2, 1), 64, 1, 30*sec)
	wantStatus(t, late, StatusRefused)
	dst := d.expect(dw, 1, testKey(1, 1), "p:1", 64, 0, 30*sec)
	other := d.expect(dw, 2, testKey(2, 1), "p:1", 64, 0, 30*sec)
	p.steps(src)
	s.until("what runs", sec, func() bool { return src.done != nil && dst.done != nil && other.done != nil })
	wantStatus(t, dst, StatusOK)
	wantStatus(t, other, StatusFailed)
}
