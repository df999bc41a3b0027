package exec

import (
	"fmt"
	"strings"
	"testing"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec/internal/lanes"
	"github.com/kvspray/kvspray/control/spray"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// When every lane of the preferred transport is lost, the next transport continues.
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
	wantStatus(t, dst, engines.StatusOK)
}

// chunksIn counts the chunks of a lease that have landed.
func (l *simLease) chunksIn() (n int) {
	for _, v := range l.content {
		if v == l.key {
			n++
		}
	}
	return n
}

// A lane that becomes silent during a transfer costs less than 100 ms, even if it is the preferred
// transport's only lane.
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
	wantStatus(t, dst, engines.StatusOK)
	for _, l := range silent {
		held += len(l.held)
	}
	// 400 chunks remain, and the healthy lane moves at least two per millisecond.
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

// An urgent transfer precedes a background transfer that began earlier.
func TestPriorities(t *testing.T) {
	s, p, d, pw, dw := pair(t, 2, 0)
	var src, dst [2]*simLease
	open := func(i int, prio engines.Priority) {
		k := testKey(byte(i), 1)
		src[i] = p.intent(pw, uint64(i+1), k, 8192, 1, 30*sec)
		lid := transfer.LeaseID{Boot: dw.Boot, ID: uint64(i + 1)}
		dst[i] = &simLease{id: lid, w: dw, receive: true, opened: s.now, deadline: 30 * sec,
			key: k.String(), tokens: 8192}
		d.leases[lid] = dst[i]
		d.event(func() {
			d.ex.Expect(s.now, dw, engines.Expect{Lease: lid, Key: k, Peer: "p:1", Tokens: 8192,
				Skip: []uint32{0}, Deadline: 30 * sec,
				MatchTimeout: 10 * sec, Priority: prio})
		})
	}
	open(0, engines.Background)
	s.run(s.now+50*time.Millisecond, func() bool { return false })
	p.steps(src[0])
	s.until("a start", sec, func() bool { return dst[0].chunksIn() > 10 })
	open(1, engines.DecodeWaits)
	p.steps(src[1])
	s.until("the urgent one", sec, func() bool { return dst[1].done != nil })
	if dst[0].done != nil {
		t.Error("background was over first")
	}
	s.until("background", sec, func() bool { return dst[0].done != nil })
	wantStatus(t, dst[0], engines.StatusOK)
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
		for _, snd := range p.ex.match.Sending() {
			return snd
		}
		return nil
	}
	if flow() == nil || dst.done != nil {
		t.Fatal("no sending is open")
	}
	s.queue = nil
	p.ex.Tick(s.now + 2*sec)
	s.now += 2 * sec
	before := p.ex.core.Spray.Flights()
	p.step(src, 1, 8192)
	if n := p.ex.core.Spray.Flights(); n > before {
		t.Errorf("%d slices were sent after the deadline", n-before)
	}
}

// Lanes beyond the bound are refused by name, and the others continue.
func TestLanesAreBounded(t *testing.T) {
	s, p, _, _, _ := pair(t, 3, 0)
	var boot transfer.Boot
	boot[0] = 9
	var refused error
	for i := range 2000 {
		rail := fmt.Sprint("rail", i)
		if err := p.ex.LaneUp(s.now, boot, spray.LaneInfo{ID: uint64(1000 + i),
			Path: spray.Path{Transport: "tcp", Local: rail, Remote: rail}}, false); err != nil {
			refused = err
		}
	}
	if n := p.ex.Lanes(boot); n == 0 || n > 1024 || refused == nil ||
		!strings.Contains(refused.Error(), "rail1999") {
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
	// A new sidecar at the same address, to which the shim presents its lease again.
	p2 := s.node("p:1", Config{Transports: []string{"shm", "tcp"}})
	w2 := p2.worker()
	src := p2.intent(w2, 1, testKey(1, 1), 512, 1, 30*sec)
	p2.steps(src)
	s.until("transfer", 5*sec, func() bool { return dst.done != nil && src.done != nil })
	wantStatus(t, dst, engines.StatusOK)
}

func TestWorkerGone(t *testing.T) {
	s, p, d, pw, dw := pair(t, 13, 0)
	src := p.intent(pw, 1, testKey(1, 1), 512, 1, 30*sec)
	dst := d.expect(dw, 1, testKey(1, 1), "p:1", 512, 0, 30*sec)
	s.run(s.now+50*time.Millisecond, func() bool { return false })
	p.step(src, 0, 512)
	p.event(func() { p.ex.WorkerGone(s.now, pw, true, "exited") })
	s.until("both", sec, func() bool { return p.fenced[pw] && dst.done != nil })
	wantStatus(t, dst, engines.StatusFailed)
	d.event(func() { d.ex.WorkerGone(s.now, dw, true, "exited") })
	if !d.fenced[dw] {
		t.Error("a worker without leases is not fenced at once")
	}
}

// TestRandomSchedules combines all faults.
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
		w *engines.Worker
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
		s.after(s.delay(5*sec), func() {
			gone = true
			d.event(func() {
				d.ex.WorkerGone(s.now, dw, true, "exited")
			})
		})
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
			if l.done != nil && l.receive && l.done.Status == engines.StatusOK {
				good++
			}
		}
		if dests, sources := n.ex.Open(); dests+sources != 0 {
			s.fatalf("seed %d: %s has %d and %d leases open", seed, n.addr, dests, sources)
		}
		keys, transfers := n.ex.sources.Keys()
		if n.ex.match.Counts().Grants+n.ex.layouts.Len()+len(n.ex.match.Comparing())+n.ex.match.Counts().
			WaitingKeys+
			keys+transfers != 0 || n.ex.core.Spray.Flights() != 0 && faults == 0 {
			s.fatalf("seed %d: %s keeps %d grants, %d descriptions, %d pending, %d keys, %d flights", seed,
				n.addr, n.ex.match.Counts().Grants, n.ex.layouts.Len(), n.ex.match.Counts().WaitingKeys, keys,
				n.ex.core.Spray.Flights())
		}
	}
	if faults == 0 && good == 0 {
		s.fatalf("seed %d: nothing was ever received", seed)
	}
}

// A slice allocates nothing once the tables have their size.
func TestSlicesDoNotAllocate(t *testing.T) {
	s, p, d, pw, dw := pair(t, 1, 0)
	src := p.intent(pw, 1, testKey(1, 1), 60000, 1, 30*sec)
	d.expect(dw, 1, testKey(1, 1), "p:1", 60000, 0, 30*sec)
	s.run(s.now+100*time.Millisecond, func() bool { return false })
	// From here on the test plays the lanes.
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
	p.ex.Progress(s.now, pw, []engines.Progress{{Lease: src.id, Layer: 0, Tokens: 60000,
		Final: true}})
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

// A prompt that the receiver already has commits without a byte.
func TestNothingToMove(t *testing.T) {
	s, p, d, pw, dw := pair(t, 1, 0)
	src := p.intent(pw, 1, testKey(1, 1), 64, 1, 30*sec)
	dst := d.expect(dw, 1, testKey(1, 1), "p:1", 64, 64, 30*sec)
	s.until("transfer", sec, func() bool { return src.done != nil && dst.done != nil })
	wantStatus(t, src, engines.StatusOK)
	wantStatus(t, dst, engines.StatusOK)
}

func TestDrain(t *testing.T) {
	s, p, d, pw, dw := pair(t, 1, 0)
	src := p.intent(pw, 1, testKey(1, 1), 64, 1, 30*sec)
	p.event(func() { p.ex.DrainLeases() })
	late := p.intent(pw, 2, testKey(2, 1), 64, 1, 30*sec)
	wantStatus(t, late, engines.StatusRefused)
	dst := d.expect(dw, 1, testKey(1, 1), "p:1", 64, 0, 30*sec)
	other := d.expect(dw, 2, testKey(2, 1), "p:1", 64, 0, 30*sec)
	p.steps(src)
	s.until("what runs", sec, func() bool {
		return src.done != nil && dst.done != nil &&
			other.done != nil
	})
	wantStatus(t, dst, engines.StatusOK)
	wantStatus(t, other, engines.StatusFailed)
}

// A peer may be forgotten while assign has left its work to the next tick. That tick gives nothing
// to the peer: neither slices nor a hint.
func TestForgottenPeerGetsNothing(t *testing.T) {
	for _, forgotten := range []bool{false, true} {
		tg := newTarget()
		_ = tg.ex.LaneUp(1, tg.peer, spray.LaneInfo{ID: 2, Path: spray.Path{Transport: "shm"},
			SliceBytes: transfer.ChunkBytes, MaxSlices: 4}, true) // there is room for it
		soon := engines.Intent{Lease: transfer.LeaseID{Boot: tg.w.Boot, ID: 2, Epoch: 1},
			Key:    testKey(1, 2),
			Tokens: targetTokens, Fanout: 1, Blocks: [][]uint32{{0}}, Deadline: 30 * sec}
		tg.ex.Intent(1, tg.w, soon)
		tg.ex.Announced(1, tg.w, []transfer.LeaseID{soon.Lease})
		for i := range 4 * lanes.MaxAssigned { // their boots are before the peer's
			tg.ex.PeerUp(1, "", transfer.Boot{0, byte(i >> 8), byte(i)})
		}
		drained(tg.ex)
		tg.ex.SetRails(sec, nil) // touches all peers, of which the first are assigned to
		full, announced := goodGrant(), goodGrant()
		announced.Hash, announced.Destination.Id, announced.Parts[0].Slot = soon.Key.Hash[:], 6, 8
		for _, g := range []*peerv1.Grant{full, announced} {
			if err := tg.ex.Message(sec, tg.peer, grantFrame(g)); err != nil {
				t.Fatal(err)
			}
		}
		if forgotten {
			tg.ex.PeerDown(sec, tg.peer, true)
		}
		before := drained(tg.ex)
		if n := len(only(t, before, Bind)); n != 2 {
			t.Fatalf("%d grants are served, want 2", n)
		}
		if n := len(only(t, before, Move)) + len(only(t, before, WakeHint)); n != 0 {
			t.Fatalf("the peer gets %d things before the next tick", n)
		}
		if tg.ex.Next() > sec {
			t.Fatal("no tick is due for the rest")
		}
		tg.ex.Tick(sec)
		tg.ex.Tick(sec)
		after := drained(tg.ex)
		moves, hints := len(only(t, after, Move)), len(only(t, after, WakeHint))
		if got := moves > 0 && hints > 0; got == forgotten || forgotten && moves+hints > 0 {
			t.Errorf("forgotten %v: the next tick has %d moves and %d hints", forgotten, moves, hints)
		}
	}
}

// A part is read under the epoch of the progress that releases it, even if no step was announced:
// an older epoch would name blocks that the engine has taken back since.
func TestProgressSetsTheEpoch(t *testing.T) {
	tg := newTarget()
	in := engines.Intent{Lease: transfer.LeaseID{Boot: tg.w.Boot, ID: 2, Epoch: 1},
		Key:    testKey(1, 2),
		Tokens: targetTokens, Fanout: 1, Deadline: 30 * sec}
	tg.ex.Intent(1, tg.w, in)
	g := goodGrant()
	g.Hash = in.Key.Hash[:]
	if err := tg.ex.Message(sec, tg.peer, grantFrame(g)); err != nil {
		t.Fatal(err)
	}
	in.Lease.Epoch = 3
	tg.ex.Progress(sec, tg.w, []engines.Progress{{Lease: in.Lease, Tokens: targetTokens,
		Final: true}})
	binds := only(t, drained(tg.ex), Bind)
	if len(binds) != 1 || binds[0].SendPart.Lease != in.Lease {
		t.Errorf("bound: %+v, want one part of %s", binds, in.Lease)
	}
}
