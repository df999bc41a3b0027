package spray

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/kvspray/kvspray/transfer"
)

// A pair over a link that is down, ours or the peer's, gets nothing from then on, and its chunks go
// out again at once, without a time of silence. When the link is up, a probe goes first, and the
// pair is in use within a second.
func TestLinkDown(t *testing.T) {
	for _, ours := range []bool{true, false} {
		t.Run(fmt.Sprint("ours ", ours), func(t *testing.T) {
			m := newModel(t, Config{})
			m.rail(gbit, 100*time.Microsecond, 2)
			dying := m.rail(gbit, 100*time.Microsecond, 2)
			m.move(64 << 20)
			side := m.p
			if ours {
				side = nil
			}
			f := m.open(LayerStream, 256<<20)
			m.run(50*ms, f.landed)
			dying.set(func() { dying.dead = true })
			m.s.RailDown(m.now, side, "tcp", "r1")
			m.pulled = func(sl Slice) {
				if m.byLane[sl.Lane] == dying {
					t.Errorf("%v: a slice for a link that is down", m.now)
				}
			}
			before, began := m.links[0].bytes, m.now
			m.wait(20 * ms)
			if got := float64(m.links[0].bytes-before) / float64(m.now-began); got < 0.95*gbit {
				t.Errorf("the other rail carried %.2f of what it can in the first 20 ms", got/gbit)
			}
			if v := m.s.View(m.now).Pairs[1]; v.State != "excluded" || !strings.Contains(v.Reason,
				"r1 is down") {
				t.Errorf("state %s: %s", v.State, v.Reason)
			}
			if m.run(10*sec, f.landed) < 0 {
				t.Fatal("the transfer did not end")
			}
			f.Close()
			m.pulled = nil
			dying.set(func() { dying.dead = false })
			m.s.RailUp(m.now, side, "tcp", "r1")
			f = m.open(LayerStream, 256<<20)
			m.run(sec, func() bool { return m.p.pairs[1].state == Healthy })
			if q := m.p.pairs[1]; q.state != Healthy || q.count.Probes == 0 {
				t.Errorf("a second after the link was up: %s after %d probes", q.state, q.count.Probes)
			}
			if m.run(10*sec, f.landed) < 0 {
				t.Fatal("the transfer did not end")
			}
		})
	}
}

// A lane over a link that is down waits for the link; links beyond the bound are ignored.
func TestLinkDownBeforeItsLane(t *testing.T) {
	s := New(Config{})
	p := s.Peer(transfer.Boot{1}, nil)
	s.RailDown(0, nil, "tcp", "0")
	up(t, s, p, 0)
	flow(t, s, p, 8)
	if out := pullAll(s, p, 1); len(out) != 0 {
		t.Fatalf("%d slices over a link that is down", len(out))
	}
	s.RailUp(2, nil, "tcp", "0")
	if out := pullAll(s, p, 3); len(out) == 0 {
		t.Fatal("nothing goes over the only link after it is up")
	}
	for i := range 2 * maxLinks {
		s.RailDown(4, p, "tcp", fmt.Sprint("bogus", i))
	}
	if len(p.down) != maxLinks {
		t.Errorf("%d rails of a peer are remembered as down, want %d", len(p.down), maxLinks)
	}
}

// Both ends of a pair have links: the pair is usable only if both are up.
func TestBothLinks(t *testing.T) {
	s, p := solo(t, 1)
	s.RailDown(1, nil, "tcp", "0")
	s.RailDown(2, p, "tcp", "0")
	s.RailUp(3, nil, "tcp", "0")
	if q := p.pairs[0]; !q.down || q.usable() {
		t.Error("in use while the peer's link is down")
	}
	s.RailUp(4, p, "tcp", "0")
	s.renew(4, p)
	if q := p.pairs[0]; q.down || q.state != Probing {
		t.Errorf("down %v, %s", q.down, q.state)
	}
}

// Credits bound the bytes in flight to a remote rail, over all pairs that lead there; without a
// credit the windows bound them.
func TestCredits(t *testing.T) {
	m := newModel(t, Config{})
	m.rail(gbit, ms, 2)
	m.move(256 << 20)
	q := m.p.pairs[0]
	free := q.window
	if free <= 2*transfer.ChunkBytes {
		t.Fatalf("window %d: not what this test is about", free)
	}
	check := func(credit uint64) {
		t.Helper()
		f := m.open(LayerStream, 16<<20)
		m.pulled = func(Slice) {
			if q.inflight > max(credit, transfer.ChunkBytes) {
				t.Errorf("%d bytes in flight with a credit of %d", q.inflight, credit)
			}
		}
		m.run(10*sec, f.landed)
		f.Close()
		m.pulled = nil
	}
	for _, credit := range []uint64{4 * transfer.ChunkBytes, transfer.ChunkBytes, 1} {
		if !m.s.Credit(m.p, "tcp", "r0", credit) {
			t.Fatal("refused")
		}
		check(credit)
	}
	m.s.Credit(m.p, "tcp", "r0", 0)
	m.move(256 << 20)
	if q.window < free/2 {
		t.Errorf("window %d after the credit is gone, %d before it", q.window, free)
	}
	for i := range maxLinks {
		if !m.s.Credit(m.p, "tcp", fmt.Sprint("bogus", i), 1) {
			t.Fatalf("credit %d refused", i)
		}
	}
	if m.s.Credit(m.p, "tcp", "one too many", 1) {
		t.Error("credits have no bound")
	}
}

// A pair's tier depends on the memory of the flow, not on the lane.
func TestPlaces(t *testing.T) {
	m := newModel(t, Config{})
	m.p.Tier = func(p Path, at Place) int {
		if (p.Local == "r0") == (at == 1) {
			return 1
		}
		return 3
	}
	a := m.rail(gbit, 50*time.Microsecond, 1)
	b := m.rail(gbit, 50*time.Microsecond, 1)
	m.move(64 << 20)
	for at, want := range map[Place]*link{1: a, 2: b} {
		x, y := a.bytes, b.bytes
		for range 50 {
			f := m.s.Open(m.p, LayerStream, 0, space(t, 64<<10), nil)
			f.SetPlace(at)
			f.Ready(f.space.All())
			m.run(sec, f.landed)
			f.Close()
			m.wait(5 * ms)
		}
		near, far := a.bytes-x, b.bytes-y
		if want == b {
			near, far = far, near
		}
		if near < 45*64<<10 || far > 5*64<<10 {
			t.Errorf("memory at %d: %d bytes went near and %d far", at, near, far)
		}
	}
}

// If all pairs are equally far, the tier changes neither the tail nor a hedge.
func TestOneTierForAllIsNone(t *testing.T) {
	var took [2]Instant
	for i, tier := range []int{1, 3} {
		m := newModel(t, Config{})
		for _, rate := range []float64{2 * gbit, gbit, gbit / 2} {
			m.rail(rate, 100*time.Microsecond, 2, func(in *LaneInfo) { in.Tier = tier })
		}
		m.move(64 << 20)
		f := m.open(LayerStream, 64<<20)
		took[i] = m.run(10*sec, f.landed)
	}
	if took[0] != took[1] {
		t.Errorf("the same transfer takes %v in tier 1 and %v in tier 3", took[0], took[1])
	}
}

// Bytes within a slice are progress: a lane that reports some is not silent, however long its slice
// takes. A lane that reports none is suspect after Config.Suspect, however long its slice was
// predicted to take.
func TestProgressWithinASlice(t *testing.T) {
	for _, moves := range []bool{true, false} {
		m := newModel(t, Config{})
		slow := m.rail(5*mbit, 100*time.Microsecond, 2, func(in *LaneInfo) { in.ReportsAcked = true })
		m.rail(2*gbit, 100*time.Microsecond, 2)
		m.move(16 << 20)
		for range 20 {
			m.move(128 << 20)
		}
		q := m.p.pairs[0]
		if took := 64 << 10 / (5 * mbit); took < 100e6 {
			t.Fatalf("a chunk takes %v: not what this test is about", Instant(took))
		}
		before := q.count.Suspicions
		if before == 0 {
			t.Error("without a query it was never suspect: this test proves nothing")
		}
		asked := 0
		var ask func()
		ask = func() {
			m.s.Quiet(m.now, func(id uint64) {
				asked++
				// the other lane waits for its turn
				if moves && len(slow.queue) > 0 && slow.queue[0].Lane == id {
					m.s.Moved(m.now, id)
				}
			})
			m.at(TickEvery, ask)
		}
		ask()
		for range 20 {
			m.move(128 << 20)
		}
		if asked == 0 {
			t.Error("never asked")
		}
		if got := q.count.Suspicions - before; moves != (got == 0) {
			t.Errorf("moves %v: suspected %d times", moves, got)
		}
	}
}
