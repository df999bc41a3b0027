package spray

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/kvspray/kvspray/transfer"
)

// Mistakes of other engines, one test each.

func near(t *testing.T, what string, got, want, tolerance float64) {
	t.Helper()
	if math.Abs(got-want) > tolerance*math.Abs(want) {
		t.Errorf("%s: %g, want %g within %g%%", what, got, want, tolerance*100)
	}
}

// solo is a scheduler with n rails of one lane each, without a model.
func solo(t *testing.T, n int) (*Scheduler, *Peer) {
	s := New(Config{})
	p := s.Peer(transfer.Boot{1}, nil)
	for i := range n {
		up(t, s, p, i)
	}
	return s, p
}

func up(t *testing.T, s *Scheduler, p *Peer, i int) {
	t.Helper()
	name := fmt.Sprint(i)
	if err := s.LaneUp(0, p, LaneInfo{ID: uint64(i + 1), Path: Path{"tcp", name, name},
		SliceBytes: 1 << 20, MaxSlices: 16}); err != nil {
		t.Fatal(err)
	}
}

func flow(t *testing.T, s *Scheduler, p *Peer, chunks int) *Flow {
	f := s.Open(p, LayerStream, 0, space(t, uint64(chunks)*transfer.ChunkBytes), nil)
	f.Ready(f.space.All())
	return f
}

func pullAll(s *Scheduler, p *Peer, now Instant) (out []Slice) {
	for {
		sl, ok := s.Pull(now, p)
		if !ok {
			return out
		}
		out = append(out, sl)
	}
}

// Inverted weight: 0.01 was meant for the newest sample and applied to all others. One outlier must
// not move an estimate by more than its weight, and many equal samples must move it.
func TestTrapInvertedEWMA(t *testing.T) {
	near(t, "weight of the newest", ewma(100, 0, alpha), 75, 1e-9)
	m := newModel(t, Config{})
	l := m.rail(gbit, 100*time.Microsecond, 1)
	m.move(64 << 20)
	q := m.p.pairs[0]
	near(t, "learned", q.bw, gbit, 0.03)
	before := q.bw
	f := m.open(LayerStream, 16<<20)
	m.run(20*ms, f.landed)
	n := q.count.Confirmed
	l.set(func() { l.rate /= 50 })
	m.run(sec, func() bool { return q.count.Confirmed > n })
	if q.bw < before*(1-2*alpha) {
		t.Errorf("one slow slice took the estimate from %g to %g", before, q.bw)
	}
	m.run(60*sec, func() bool { return q.count.Confirmed > n+30 })
	near(t, "after thirty slow ones", q.bw, gbit/50, 0.2)
}

// Queue counted twice: once in the bytes in flight, and again in a bandwidth measured from post to
// completion. A rail that is kept full must be learned at its own rate, and the prediction must
// hold.
func TestTrapQueueCountedTwice(t *testing.T) {
	m := newModel(t, Config{})
	m.rail(gbit, 5*ms, 4)
	m.move(512 << 20)
	q := m.p.pairs[0]
	if q.window < 8*q.piece {
		t.Fatalf("window %d and slice %d: not what this test is about", q.window, q.piece)
	}
	near(t, "learned under a full window", q.bw, gbit, 0.03)
	if q.err > 0.15 {
		t.Errorf("predictions are off by %.2f with b0 %v and b1 %.2f", q.err, Instant(q.b0), q.b1)
	}
}

// A floor of a tenth of the nominal speed hid a NIC that was slower than that. An estimate that is
// too low must not starve its rail for ever either.
func TestTrapFloorHidesSlowRail(t *testing.T) {
	m := newModel(t, Config{})
	m.rail(gbit, 100*time.Microsecond, 1, func(in *LaneInfo) { in.Gbps = 400 })
	slow := m.rail(mbit, 100*time.Microsecond, 1, func(in *LaneInfo) { in.Gbps = 400 })
	f := m.open(LayerStream, 1<<30)
	m.run(6*sec, f.landed)
	q := m.p.pairs[1]
	near(t, "a rail of 1 Mbit/s that claims 400 Gbit/s", q.bw, mbit, 0.15)
	f.Close()

	// The rail recovers, and the next long transfer measures it.
	slow.set(func() { slow.rate = gbit })
	m.wait(10 * sec)
	m.move(256 << 20)
	near(t, "healed", q.bw, gbit, 0.1)
}

// Timeouts without a retry: a slice that never ends must go out again elsewhere, and count as a
// failure of its rail.
func TestTrapTimeoutWithoutRetry(t *testing.T) {
	m := newModel(t, Config{})
	m.rail(gbit, 100*time.Microsecond, 1)
	m.rail(gbit, 100*time.Microsecond, 1)
	f := m.open(LayerStream, 4<<30-1<<20)
	m.run(100*ms, f.landed)
	// One slice of rail 0 is lost; the lane stays up.
	l := m.links[0]
	var lost Slice
	l.set(func() {
		lost = l.queue[1]
		l.queue = append(l.queue[:1], l.queue[2:]...)
	})
	again := false
	m.pulled = func(sl Slice) {
		if sl.Range.First <= lost.Range.First && lost.Range.First < sl.Range.End() {
			again = again || sl.Lane != lost.Lane && sl.Attempt > lost.Attempt
		}
	}
	m.wait(DefaultAttempt + 100*ms)
	q := m.p.pairs[0]
	if !again || q.count.TimedOut != 1 || q.count.Errors != 1 {
		t.Errorf("sent again elsewhere %v, %d timeouts, %d errors: want true, 1, 1", again,
			q.count.TimedOut, q.count.Errors)
	}
	if q.count.Suspicions != 0 {
		t.Error("the lane moved all the time, and was suspect")
	}
}

// Retries that are not charged: a retransmission is in flight as much as any other slice.
func TestTrapRetriesAreCharged(t *testing.T) {
	s, p := solo(t, 2)
	f := flow(t, s, p, 1)
	a, ok := s.Pull(0, p)
	if !ok {
		t.Fatal("nothing to pull")
	}
	if _, ok := s.End(ms, a.Cookie, Failed); !ok {
		t.Fatal("unknown slice")
	}
	b, ok := s.Pull(ms, p)
	if !ok || b.Attempt != 2 || b.Lane == a.Lane {
		t.Fatalf("retry %+v of %+v, %v: want attempt 2 on the other lane", b, a, ok)
	}
	q := s.lanes[b.Lane].pair
	if q.inflight != transfer.ChunkBytes || s.lanes[b.Lane].inflight != transfer.ChunkBytes ||
		p.flights != 1 || f.state(0).Strikes != 1 {
		t.Errorf("a retry is in flight with %d bytes on its pair, %d slices and %d strikes", q.inflight,
			p.flights, f.state(0).Strikes)
	}
	if o := s.lanes[a.Lane].pair; o.inflight != 0 {
		t.Errorf("%d bytes still charged to the pair that failed", o.inflight)
	}
	// Retries are bounded.
	now := 2 * ms
	for n := 2; ; n++ {
		out, ok := s.End(now, b.Cookie, Failed)
		if !ok || n > DefaultMaxStrikes {
			t.Fatalf("slice known: %v; a chunk failed %d times, and goes on", ok, n)
		}
		if out.Exhausted {
			if n != DefaultMaxStrikes {
				t.Errorf("given up after %d attempts: want %d", n, DefaultMaxStrikes)
			}
			return
		}
		now += sec
		if b, ok = s.Pull(now, p); !ok {
			t.Fatalf("attempt %d has no lane", n+1)
		}
	}
}

// Health per worker thread: what one transfer learns must apply to all others.
func TestTrapHealthIsShared(t *testing.T) {
	s, p := solo(t, 2)
	flow(t, s, p, 64)
	bad := uint64(1)
	for now := Instant(0); s.lanes[bad].pair.state != Excluded; now += ms {
		if now > sec {
			t.Fatal("three errors did not exclude the rail")
		}
		for _, sl := range pullAll(s, p, now) {
			v := Confirmed
			if sl.Lane == bad {
				v = Failed
			}
			s.End(now+ms/2, sl.Cookie, v)
		}
	}
	other := s.Open(p, DecodeWaits, 0, space(t, 1<<20), nil)
	other.Ready(other.space.All())
	q := s.lanes[bad].pair
	for _, sl := range pullAll(s, p, q.since) {
		if sl.Lane == bad {
			t.Errorf("a new flow was given an excluded rail: %+v", sl)
		}
	}
	if v := s.View(q.since).Pairs[0]; v.State != "excluded" || !strings.Contains(v.Reason,
		"3 errors") {
		t.Errorf("shown as %s, %q", v.State, v.Reason)
	}
}

// The cooldown doubled on every error, so that the first one was four times as long as configured.
// Ten errors of one incident are one exclusion.
func TestTrapCooldownDoublesPerError(t *testing.T) {
	s, p := solo(t, 2)
	f := flow(t, s, p, 640)
	q := s.lanes[1].pair
	var held []Slice
	for range 10 { // more in flight than a window would allow
		r, attempt := f.take(1, true)
		held = append(held, s.post(0, s.lanes[1], f, r, attempt))
	}
	for _, sl := range held {
		s.End(ms, sl.Cookie, Failed)
	}
	if q.state != Excluded || q.cooldown != DefaultCooldown || q.count.Exclusions != 1 {
		t.Errorf("%v, cooldown %v after %d exclusions: want excluded, %v, 1", q.state, q.cooldown,
			q.count.Exclusions, DefaultCooldown)
	}
	// A second incident right afterwards is a second step, up to the longest cooldown.
	for now := 2 * ms; q.count.Exclusions < 8; now += ms {
		if now > 20*sec {
			t.Fatalf("%d exclusions", q.count.Exclusions)
		}
		for _, sl := range pullAll(s, p, now) {
			v := Confirmed
			if sl.Lane == 1 {
				v = Failed
			}
			s.End(now, sl.Cookie, v)
		}
		f.Close()
		f = flow(t, s, p, 64)
	}
	if q.cooldown != DefaultMaxCooldown {
		t.Errorf("cooldown %v after eight exclusions: want %v", q.cooldown, DefaultMaxCooldown)
	}
}

// Readmission by expiry, with live traffic: the first slice on a rail after its cooldown must be a
// copy, which takes its chunk from no other lane; then the window grows.
func TestTrapExpiryReadmitsLiveTraffic(t *testing.T) {
	m := newModel(t, Config{})
	m.rail(4*gbit, 100*time.Microsecond, 1)
	m.rail(4*gbit, 100*time.Microsecond, 1)
	m.move(16 << 20)
	q := m.p.pairs[1]
	if q.window < 2*transfer.ChunkBytes<<(readmitSteps-1) {
		t.Fatalf("window %d: not what this test is about", q.window)
	}
	f := m.open(LayerStream, 1<<30)
	m.run(20*ms, f.landed)
	for range maxErrors {
		q.fault(m.now, &m.s.cfg, "test")
	}
	m.wait(20 * ms)
	var first []Slice
	full := 0 // steps whose window was used
	m.pulled = func(sl Slice) {
		if sl.Lane != 2 || q.state == Healthy {
			return
		}
		first = append(first, sl)
		limit := uint64(transfer.ChunkBytes) // of a probe
		if q.state == Readmitted {
			limit <<= q.step
		}
		if n := q.load(); n > limit {
			t.Errorf("%v, step %d: %d bytes in flight, want %d at most", q.state, q.step, n, limit)
		} else if n == limit && q.state == Readmitted {
			full |= 1 << q.step
		}
	}
	m.wait(DefaultCooldown + 50*ms)
	if len(first) < readmitSteps+1 || first[0].Attempt != 0 || first[0].Range.Count != 1 ||
		first[1].Attempt == 0 {
		t.Fatalf("after the cooldown went %+v: want a probe, then slices", first)
	}
	if full == 0 {
		t.Error("no step was ever full: this tests nothing")
	}
	if q.state != Healthy || q.count.Readmissions != 1 || q.count.Probes != 1 {
		t.Errorf("%v after %d probes and %d re-admissions", q.state, q.count.Probes, q.count.Readmissions)
	}
}

// The remote NIC was ignored: one local rail to a fast and a slow remote one is two pairs.
func TestTrapRemoteIgnored(t *testing.T) {
	m := newModel(t, Config{})
	m.rail(gbit, 100*time.Microsecond, 1, func(in *LaneInfo) { in.Path.Local = "same" })
	m.rail(gbit/10, 100*time.Microsecond, 1, func(in *LaneInfo) { in.Path.Local = "same" })
	m.move(64 << 20)
	near(t, "fast remote", m.p.pairs[0].bw, gbit, 0.1)
	near(t, "slow remote", m.p.pairs[1].bw, gbit/10, 0.1)
}

// A retry delayed everything behind it: it avoids the pair that failed it, and while all other
// pairs were full, nothing of its flow was sent, though that pair had room for chunks that had
// never failed.
func TestTrapRetriesHoldUpTheirFlow(t *testing.T) {
	s, p := solo(t, 2)
	f := flow(t, s, p, 64)
	sent := pullAll(s, p, 0)
	bad := sent[0]
	s.End(ms, bad.Cookie, Failed)
	again := pullAll(s, p, ms)
	if len(again) != 1 || again[0].Lane != bad.Lane || again[0].Range.First <= bad.Range.First ||
		again[0].Attempt != 1 {
		t.Fatalf("after %+v failed came %+v: want a slice that was never sent, over the same pair, "+
			"which alone has room", bad, again)
	}
	if f.chunks.Retries() != bad.Range.Count {
		t.Errorf("%d chunks wait for another pair, want the %d that failed", f.chunks.Retries(),
			bad.Range.Count)
	}
	if err := check(s, []*Peer{p}, []*Flow{f}); err != nil {
		t.Error(err)
	}
	// As soon as the other one has room, it carries them.
	for _, sl := range sent {
		if sl.Lane != bad.Lane {
			s.End(2*ms, sl.Cookie, Confirmed)
		}
	}
	if again = pullAll(s, p, 2*ms); len(again) == 0 || again[0].Lane == bad.Lane ||
		again[0].Range != bad.Range || again[0].Attempt != 2 {
		t.Errorf("then came %+v: want %+v once more on the other pair", again, bad.Range)
	}
}

// A retry waited for the pair that it avoids: near its end a transfer is left to the pairs that
// finish sooner, and the one that had failed it counted among these. If that pair is much faster
// and busy with other work, the retry was sent only when its delay was measured, every half second.
func TestTrapRetryLeftToThePairItAvoids(t *testing.T) {
	m := newModel(t, Config{})
	m.rail(2*gbit, 100*time.Microsecond, 1)
	slow := m.rail(50*mbit, 100*time.Microsecond, 1)
	m.move(256 << 20)
	m.wait(sec)
	f := m.open(DecodeWaits, transfer.ChunkBytes)
	first, ok := m.s.Pull(m.now, m.p)
	if !ok || m.byLane[first.Lane] == slow {
		t.Fatalf("%+v: not what this test is about", first)
	}
	bulk := func() { // keeps the fast one busy, and leaves the slow one alone
		for range 8 {
			m.open(LayerStream, 256<<10)
		}
	}
	bulk()
	m.pulled = func(Slice) {
		if m.p.waits(Background) < 16 {
			bulk()
		}
	}
	m.pull()
	m.end(first, Failed)
	if d := m.run(100*ms, f.landed); d < 0 {
		t.Error("a chunk that its fast pair failed once has not gone by the other one, which takes 11 " +
			"ms, in 100 ms")
	}
}

// A slice that a lane did not even accept was lost. It must go out on another pair at once, without
// a failure of its chunks.
func TestTrapRefusedAtSubmit(t *testing.T) {
	s, p := solo(t, 2)
	f := flow(t, s, p, 1)
	a, ok := s.Pull(0, p)
	if !ok {
		t.Fatal("nothing to pull")
	}
	s.End(0, a.Cookie, Lost)
	b, ok := s.Pull(0, p)
	if !ok || b.Lane == a.Lane || b.Range != a.Range || f.state(0).Strikes != 0 {
		t.Errorf(
			"after %+v came %+v, %v, with %d strikes: want the same chunk on the other lane, and none", a, b,
			ok, f.state(0).Strikes)
	}
}

// The next transport sent the whole request again, finished slices included. A chunk that has
// landed must never be sent again.
func TestTrapFinishedSlicesSentAgain(t *testing.T) {
	m := newModel(t, Config{})
	first := m.rail(gbit, 100*time.Microsecond, 1)
	m.rail(gbit, 100*time.Microsecond, 1, func(in *LaneInfo) {
		in.Path.Transport,
			in.Rank = "next", 1
	})
	m.move(16 << 20)
	f := m.open(LayerStream, 64<<20)
	m.run(256*ms, f.landed) // about half of it
	first.set(func() { first.dead = true })
	landed, sent := uint64(0), uint64(0)
	for i := range f.chunks.Len() {
		if f.chunks.HasLanded(i) {
			landed += transfer.ChunkBytes
		}
	}
	m.pulled = func(sl Slice) {
		for c := sl.Range.First; c < sl.Range.End(); c++ {
			if f.chunks.HasLanded(c) && sl.Attempt > 0 {
				t.Errorf("chunk %d had landed, and is sent again by %s", c, m.byLane[sl.Lane].name)
			}
		}
		sent += sl.Bytes
	}
	if m.run(10*sec, f.landed) < 0 {
		t.Fatal("the next transport did not carry on")
	}
	if landed < 16<<20 || sent > 64<<20-landed {
		t.Errorf("%d bytes had landed, %d of %d were sent after that", landed, sent, 64<<20)
	}
}

// Without a path there were hundreds of thousands of attempts, and a fifth of the rate afterwards.
// Three seconds without any rail must cost no more than what was in flight, and then each rail is
// used as before.
func TestTrapStormWhileAllIsDead(t *testing.T) {
	m := newModel(t, Config{})
	for range 4 {
		m.rail(gbit, 100*time.Microsecond, 2)
	}
	m.move(64 << 20)
	f := m.open(LayerStream, 256<<20)
	m.run(50*ms, f.landed)
	all := func(dead bool) {
		for _, l := range m.links {
			l.set(func() { l.dead = dead })
		}
	}
	all(true)
	before := m.pulls
	m.wait(3 * sec)
	if n := m.pulls - before; n > DefaultMaxFlights {
		t.Errorf("%d slices were given out in three seconds without a path: want %d at most", n,
			DefaultMaxFlights)
	}
	all(false)
	m.wait(sec)
	f.Close()
	if r := m.move(256<<20) / m.sum(); r < 0.97 {
		t.Errorf("%.3f of the rails a second after they were back", r)
	}
}

// The only lane has one slice that never ends, and was silent once. All work waited for progress,
// which could not come because nothing was sent. When the slice is late, the lane must get more.
func TestTrapSuspectForEver(t *testing.T) {
	s, p := solo(t, 1)
	f := flow(t, s, p, 64)
	first := pullAll(s, p, 0)
	for _, sl := range first[1:] {
		s.End(ms, sl.Cookie, Confirmed)
	}
	var sent []Slice
	at := Instant(0)
	for ; at < 3*sec && len(sent) == 0; at += TickEvery {
		s.Tick(at, func(*Peer) {})
		if at > DefaultSuspect+10*ms { // suspect
			sent = pullAll(s, p, at)
		}
	}
	if len(sent) == 0 || at < DefaultAttempt {
		t.Fatalf("%d slices were sent at %v: want some, when the stuck one is late", len(sent), at)
	}
	confirmed(t, s, p, f, at, sent)
	if n := p.pairs[0].count.TimedOut; n != 1 {
		t.Errorf("%d slices timed out, want the stuck one", n)
	}
}
