package exec

import (
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec/internal/endpoint"
	"github.com/kvspray/kvspray/control/exec/internal/source"
	"github.com/kvspray/kvspray/transfer"
)

func pair(t testing.TB, seed uint64, faults float64) (s *sim, p, d *simNode, pw,
	dw *engines.Worker) {
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

// Intent, grant and progress may come in any order.
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
			wantStatus(t, src, engines.StatusOK)
			wantStatus(t, dst, engines.StatusOK)
			if dst.done.Bytes != (300-32)*simUnit*simLayers || src.done.Bytes != dst.done.Bytes ||
				src.done.Grants != 1 {
				t.Errorf("received %d, sent %d in %d grants", dst.done.Bytes, src.done.Bytes, src.done.Grants)
			}
		})
	}
}

// addFields adds a field of a later release to a message and to all in it.
func addFields(m protoreflect.Message) {
	field := protowire.AppendTag(nil, 1000, protowire.VarintType)
	m.SetUnknown(protowire.AppendVarint(field, 1))
	m.Range(func(d protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case d.Message() == nil || d.IsMap():
		case d.IsList():
			for i := range v.List().Len() {
				addFields(v.List().Get(i).Message())
			}
		default:
			addFields(v.Message())
		}
		return true
	})
}

// Unknown fields of a later release in grants, their replies and all other frames are ignored.
func TestLaterFrames(t *testing.T) {
	s, p, d, pw, dw := pair(t, 1, 0)
	s.later = true
	dst := d.expect(dw, 1, testKey(1, 1), "p:1", 300, 32, 30*sec)
	src := p.intent(pw, 1, testKey(1, 1), 300, 1, 30*sec)
	p.steps(src)
	s.until("transfer", sec, func() bool { return src.done != nil && dst.done != nil })
	wantStatus(t, src, engines.StatusOK)
	wantStatus(t, dst, engines.StatusOK)
}

// No chunk is sent before it is ready, and the front of each layer is sent as soon as it is.
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
	wantStatus(t, dst, engines.StatusOK)
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
		return a.done != nil && b.done != nil && dst[0].done != nil && dst[1].done != nil &&
			dst[2].done != nil
	})
	for _, l := range append(dst, a, b) {
		wantStatus(t, l, engines.StatusOK)
	}
	if a.done.Grants != 2 || b.done.Grants != 1 {
		t.Errorf("grants served: %d and %d, want 2 and 1", a.done.Grants, b.done.Grants)
	}
	late := d.expect(dw, 9, k, "p:1", 64, 0, 30*sec)
	s.until("late grant", 3*sec, func() bool { return late.done != nil })
	wantStatus(t, late, engines.StatusFailed)
}

func TestMismatchAndNoMatch(t *testing.T) {
	s, p, d, pw, dw := pair(t, 4, 0)
	src := p.intent(pw, 1, testKey(3, 1), 64, 1, 60*sec)
	p.steps(src)
	other := d.expect(dw, 1, testKey(3, 2), "p:1", 64, 0, 8*sec)
	none := d.expect(dw, 2, testKey(4, 2), "p:1", 64, 0, 8*sec)
	s.until("refusals", 9*sec, func() bool { return other.done != nil && none.done != nil })
	if other.done.Status == engines.StatusOK || none.done.Status != engines.StatusExpired {
		t.Errorf("mismatch %d (%s), no match %d (%s)", other.done.Status, other.done.Reason,
			none.done.Status, none.done.Reason)
	}
}

// A wrong address costs the first request two seconds instead of its match timeout: enough for a
// sidecar to restart. Later requests are refused at once until a process listens there.
func TestNoListener(t *testing.T) {
	s, _, d, _, dw := pair(t, 4, 0)
	dst := d.expect(dw, 1, testKey(3, 1), "q:1", 64, 0, 20*sec)
	d.event(func() {
		d.ex.Await(s.now, 1, engines.Await{Key: testKey(3, 2), Peer: "q:1",
			TTL: 8 * sec})
	})
	s.run(s.now+sec, func() bool { return false })
	if dst.done != nil || len(d.answer) != 0 {
		t.Fatal("gave up at once")
	}
	s.until("the end", 2*sec, func() bool { return dst.done != nil && len(d.answer) == 1 })
	wantStatus(t, dst, engines.StatusExpired)
	if !strings.Contains(dst.done.Reason, "refused") || d.answer[1].State != "gone" {
		t.Errorf("reason %q, answer %+v", dst.done.Reason, d.answer[1])
	}
	next := d.expect(dw, 3, testKey(5, 1), "q:1", 64, 0, 20*sec)
	d.event(func() {
		d.ex.Await(s.now, 2, engines.Await{Key: testKey(5, 2), Peer: "q:1",
			TTL: 8 * sec})
	})
	s.until("the answer to the next ones", endpoint.Retry+sec/100, func() bool {
		return next.done != nil &&
			len(d.answer) == 2
	})
	wantStatus(t, next, engines.StatusExpired)
	s.run(s.now+endpoint.BreakAfter+2*endpoint.BreakMax, func() bool { return false })
	if ep := d.ex.endpoints.Find("q:1"); ep != nil {
		t.Errorf("the address is still known: %+v", ep)
	}
	late := d.expect(dw, 2, testKey(4, 1), "q:1", 64, 0, 20*sec)
	s.run(s.now+sec, func() bool { return false })
	q := s.node("q:1", Config{Transports: []string{"shm", "tcp"}})
	qw := q.worker()
	src := q.intent(qw, 1, testKey(4, 1), 64, 1, 60*sec)
	q.steps(src)
	s.until("transfer", 2*sec, func() bool { return late.done != nil })
	wantStatus(t, late, engines.StatusOK)
	if d.ex.endpoints.Find("q:1") == nil {
		t.Error("a sidecar answers there, and the address is forgotten")
	}
}

// A sidecar without an engine refuses grants and queries once an engine has had time to connect,
// and later ones at once.
func TestNoEngine(t *testing.T) {
	s, _, d, _, dw := pair(t, 4, 0)
	q := s.node("q:1", Config{Transports: []string{"shm", "tcp"}})
	dst := d.expect(dw, 1, testKey(3, 1), "q:1", 64, 0, 20*sec)
	ask := func(id uint64) {
		d.event(func() {
			d.ex.Await(s.now, id, engines.Await{Key: testKey(3, 2), Peer: "q:1",
				TTL: 8 * sec})
		})
	}
	ask(1)
	s.run(s.now+source.VacantWait/2, func() bool { return false })
	if dst.done != nil || len(d.answer) != 0 {
		t.Fatal("gave up at once")
	}
	s.until("the end", source.VacantWait, func() bool { return dst.done != nil && len(d.answer) == 1 })
	ask(2)
	late := d.expect(dw, 2, testKey(4, 1), "q:1", 64, 0, 20*sec)
	s.until("the answer to the next ones", sec/10, func() bool {
		return late.done != nil &&
			len(d.answer) == 2
	})
	for _, x := range []*simLease{dst, late} {
		if x.done.Status != engines.StatusExpired || !strings.Contains(x.done.Reason,
			"no engine is connected") {
			t.Errorf("status %d, %s", x.done.Status, x.done.Reason)
		}
	}
	if a := d.answer[2]; a.State != "gone" || !strings.Contains(a.Message, "no engine is connected") {
		t.Errorf("answer %+v", a)
	}
	q.steps(q.intent(q.worker(), 1, testKey(5, 1), 64, 1, 60*sec))
	next := d.expect(dw, 3, testKey(5, 1), "q:1", 64, 0, 20*sec)
	s.until("transfer", 2*sec, func() bool { return next.done != nil })
	wantStatus(t, next, engines.StatusOK)
}

// Once every request of a transfer id is finished, no other hash can come, and the grant is refused
// at once. A query may be early, because a list of prompts is admitted one by one.
func TestMismatchOnceAllAreHeld(t *testing.T) {
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
	wantStatus(t, early, engines.StatusRefused)
	late := d.expect(dw, 2, testKey(3, 8), "p:1", 64, 0, 8*sec)
	s.until("refusal of a later one", sec, func() bool { return late.done != nil })
	wantStatus(t, late, engines.StatusRefused)
}

// A prefill may compute for longer than the deadline; only its silence is bounded.
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
	wantStatus(t, src, engines.StatusOK)
	wantStatus(t, dst, engines.StatusOK)

	silent := p.intent(pw, 2, testKey(2, 1), 512, 1, 5*sec)
	p.step(silent, 0, 64)
	s.until("expiry", 6*sec, func() bool { return silent.done != nil })
	wantStatus(t, silent, engines.StatusExpired)
}

// A source's sidecar that cannot be reached and is not known to be dead has the match timeout to
// return. If it returns in time, the transfer continues.
func TestSourceSidecarOutOfReach(t *testing.T) {
	for _, back := range []bool{false, true} {
		s, p, d, pw, dw := pair(t, 12, 0)
		src := p.intent(pw, 1, testKey(1, 1), 512, 1, 60*sec)
		dst := d.expect(dw, 1, testKey(1, 1), "p:1", 512, 0, 20*sec) // the match timeout is 10 s
		s.run(s.now+50*time.Millisecond, func() bool { return false })
		d.hangs = map[string]bool{"p:1": true}
		d.peerDown(p.boot, false)
		s.run(s.now+9*sec, func() bool { return false })
		if dst.done != nil {
			t.Fatalf("gave up after 9 s: %s", dst.done.Reason)
		}
		if back {
			d.event(func() { d.ex.PeerUp(s.now, "p:1", p.boot) })
			s.run(s.now+5*sec, func() bool { return false })
			p.steps(src)
			s.until("transfer", sec, func() bool { return dst.done != nil })
			wantStatus(t, dst, engines.StatusOK)
			continue
		}
		s.until("expiry", 2*sec, func() bool { return dst.done != nil })
		wantStatus(t, dst, engines.StatusExpired)
	}
}

func TestFingerprint(t *testing.T) {
	s, p, d, pw, dw := pair(t, 5, 0)
	pw.Fingerprint[0] = 1
	src := p.intent(pw, 1, testKey(3, 1), 64, 1, 60*sec)
	p.steps(src)
	dst := d.expect(dw, 1, testKey(3, 1), "p:1", 64, 0, 8*sec)
	s.until("refusal", sec, func() bool { return dst.done != nil })
	wantStatus(t, dst, engines.StatusRefused)
	const want = "fingerprint: dtype: a at prefill, b at decode"
	if dst.done.Reason != want {
		t.Errorf("reason %q, want %q", dst.done.Reason, want)
	}
	p.event(func() { p.ex.Hold(s.now, pw, 1) })
	s.until("the source's expiry", 11*sec, func() bool { return src.done != nil })
	if wantStatus(t, src, engines.StatusExpired); !strings.HasSuffix(src.done.Reason,
		"; last: "+want) {
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
	wantStatus(t, dst, engines.StatusOK)
	wantStatus(t, src, engines.StatusOK)
}

// After an announcement, the origin is open and sleeping peers have a wake-up hint before the first
// layer is complete. This happens in any order of grant and announcement, in each step, and not for
// finished transfers.
func TestAnnounced(t *testing.T) {
	for _, first := range []string{"announced", "expected"} {
		t.Run(first, func(t *testing.T) {
			s, p, d, pw, dw := pair(t, 9, 0)
			s.join(p, d)
			s.until("lanes", sec, func() bool { return len(p.lanes) == 3 && len(d.lanes) == 3 })
			src := p.intent(pw, 1, testKey(1, 1), 512, 1, 30*sec)
			var dst *simLease
			pause := func() { s.run(s.now+100*time.Millisecond, func() bool { return false }) }
			want := func(when string, bound, hinted int) {
				t.Helper()
				if p.bound != bound || p.hinted != hinted {
					t.Fatalf("%s: %d origins and %d lanes with a hint, want %d and %d", when, p.bound, p.hinted,
						bound, hinted)
				}
			}
			for _, what := range []string{first, map[string]string{"announced": "expected",
				"expected": "announced"}[first]} {
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
			wantStatus(t, src, engines.StatusOK)
			wantStatus(t, dst, engines.StatusOK)
		})
	}
}

func TestCancelBothSides(t *testing.T) {
	s, p, d, pw, dw := pair(t, 7, 0)
	a, b := p.intent(pw, 1, testKey(1, 1), 512, 1, 30*sec), p.intent(pw, 2, testKey(2, 1),
		512, 1, 30*sec)
	x, y := d.expect(dw, 1, testKey(1, 1), "p:1", 512, 0, 30*sec), d.expect(dw, 2, testKey(2, 1),
		"p:1", 512, 0, 30*sec)
	s.run(s.now+50*time.Millisecond, func() bool { return false })
	p.step(a, 0, 512)
	p.step(b, 0, 512)
	s.run(s.now+500*time.Microsecond, func() bool { return false })
	p.event(func() { p.ex.Cancel(s.now, pw, 1, "") })
	d.event(func() { d.ex.Cancel(s.now, dw, 2, "") })
	s.until("ends", sec, func() bool {
		return a.done != nil && b.done != nil && x.done != nil &&
			y.done != nil
	})
	wantStatus(t, a, engines.StatusCancelled)
	wantStatus(t, x, engines.StatusFailed)
	wantStatus(t, y, engines.StatusCancelled)
	wantStatus(t, b, engines.StatusCancelled)
}

func TestAwait(t *testing.T) {
	s, p, d, pw, _ := pair(t, 8, 0)
	ask := func(id uint64, k transfer.Key) {
		d.event(func() { d.ex.Await(s.now, id, engines.Await{Key: k, Peer: "p:1", TTL: 2 * sec}) })
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
		t.Errorf("mismatch %+v, no match %+v", d.answer[2], d.answer[3])
	}
	p.event(func() { p.ex.Cancel(s.now, pw, 1, "") })
	ask(4, testKey(1, 1))
	s.run(s.now+100*time.Millisecond, func() bool { return false })
	if d.answer[4].State != "gone" || src.done == nil {
		t.Errorf("after the end: %+v", d.answer[4])
	}
}

// If a router names the decode engine's own sidecar by mistake, the query is refused at once. Two
// engines may share a sidecar.
func TestOwnSidecarIsNoPeer(t *testing.T) {
	s, _, d, _, dw := pair(t, 8, 0)
	dw.Place.Engine = "vllm/d/dp0"
	ask := func(id uint64, peer string) {
		d.event(func() {
			d.ex.Await(s.now, id, engines.Await{Engine: "vllm/d", Key: testKey(1, 1), Peer: peer,
				TTL: 2 * sec})
		})
		s.run(s.now+100*time.Millisecond, func() bool { return false })
	}
	ask(1, "d:1")
	if got := d.answer[1]; got.State != "refused" || !strings.Contains(got.Message, "own sidecar") ||
		!strings.Contains(got.Message, "peer of an engine") {
		t.Errorf("asked itself: %+v", got)
	}
	ask(2, "p:1")
	pw := d.worker()
	pw.Place.Engine = "vllm/p"
	ask(3, "d:1")
	if len(d.answer) != 1 {
		t.Errorf("an intent may still come: %+v", d.answer)
	}
	d.intent(pw, 3, testKey(1, 1), 64, 1, 30*sec)
	s.until("engines of one sidecar", sec, func() bool { return d.answer[3].State == "admitted" })
}

func TestHoldWithoutReceiver(t *testing.T) {
	s, p, _, pw, _ := pair(t, 9, 0)
	src := p.intent(pw, 1, testKey(1, 1), 64, 1, 30*sec)
	p.steps(src)
	p.event(func() { p.ex.Hold(s.now, pw, 1) })
	s.run(s.now+9900*time.Millisecond, func() bool { return false })
	if src.done != nil {
		t.Fatal("released before the match timeout was over")
	}
	s.until("expiry", 200*time.Millisecond, func() bool { return src.done != nil })
	wantStatus(t, src, engines.StatusExpired)
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
	wantStatus(t, dst, engines.StatusOK)
}
