package spray

import (
	"fmt"
	"testing"
	"time"

	"github.com/kvspray/kvspray/transfer"
)

// The sum of the rails, warm and cold.
func TestRailsAddUp(t *testing.T) {
	for _, c := range []struct {
		name       string
		rates      []float64
		delay      Instant
		bytes      uint64
		warm, cold float64
		claims     float64
	}{
		{"10+10+10+1", []float64{10 * gbit, 10 * gbit, 10 * gbit, gbit}, 50 * time.Microsecond, 256 << 20,
			0.97, 0.95, 0},
		{"2+1+0.5+0.5", []float64{2 * gbit, gbit, gbit / 2, gbit / 2}, 100 * time.Microsecond, 256 << 20,
			0.97, 0.93, 0},
		{"a claim of ten times the rate", []float64{gbit, gbit / 10}, 100 * time.Microsecond, 256 << 20,
			0.97, 0.90, 1},
		{"50 Mbit/s beside 2 Gbit/s", []float64{2 * gbit, 50 * mbit}, 100 * time.Microsecond, 256 << 20,
			0.97, 0.93, 0},
		{"5 Mbit/s beside 2 Gbit/s", []float64{2 * gbit, 5 * mbit}, 100 * time.Microsecond, 256 << 20,
			0.97, 0.93, 0},
		{"eight", []float64{2 * gbit, gbit, gbit / 2, gbit / 4, gbit / 8, gbit / 10, gbit / 20,
			gbit / 20}, 100 * time.Microsecond, 256 << 20,
			0.97, 0.93, 0},
		{"a long way", []float64{gbit, gbit}, 20 * ms, 512 << 20, 0.97, 0.93, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := newModel(t, Config{})
			for _, r := range c.rates {
				m.rail(r, c.delay, 2, func(in *LaneInfo) { in.Gbps, in.MaxSlices = c.claims, 64 })
			}
			cold := m.move(c.bytes) / m.sum()
			warm := 1.0
			for sent := uint64(0); sent < 6*256<<20; sent += c.bytes {
				m.wait(3 * ms)
				warm = min(warm, m.move(c.bytes)/m.sum())
			}
			t.Logf("cold %.3f, worst warm %.3f of the sum", cold, warm)
			if cold < c.cold || warm < c.warm {
				t.Errorf("cold %.3f, warm %.3f of the sum of the rails: want %.2f and %.2f", cold, warm,
					c.cold, c.warm)
				for _, v := range m.s.View(m.now).Pairs {
					t.Logf("%+v", v)
				}
			}
			for _, v := range m.s.View(m.now).Pairs {
				if v.Counters.Exclusions > 0 {
					t.Errorf("a healthy rail was excluded: %s: %s", v.Path, v.Reason)
				}
			}
		})
	}
}

// A rail that fails during a transfer costs less than 100 ms, whatever the failure. Once it works
// again, it is used again.
func TestRailDiesInMidTransfer(t *testing.T) {
	for name, fault := range map[string]struct {
		kill func(*link)
		heal func(*link)
		rate float64 // of the rail while it is ill
	}{
		"silent": {func(l *link) { l.set(func() { l.dead = true }) },
			func(l *link) { l.set(func() { l.dead = false }) }, 0},
		"ack drop": {func(l *link) { l.set(func() { l.mute = true }) },
			func(l *link) { l.set(func() { l.mute = false }) }, 0},
		"collapse": {func(l *link) { l.set(func() { l.rate /= 20 }) },
			func(l *link) { l.set(func() { l.rate *= 20 }) }, gbit / 20},
	} {
		for victim := range 3 {
			t.Run(fmt.Sprint(name, victim), func(t *testing.T) {
				const bytes = 256 << 20
				m := newModel(t, Config{})
				for range 4 {
					m.rail(gbit, 100*time.Microsecond, 2)
				}
				m.move(64 << 20)
				dead := m.links[victim]
				f := m.open(LayerStream, bytes)
				at := 100*ms + Instant(victim)*7*ms
				m.run(at, f.landed)
				fault.kill(dead)
				rest := int(f.chunks.Len() - f.chunks.Landed())
				took := m.run(10*sec, f.landed)
				ideal := Instant(float64(rest*transfer.ChunkBytes) / (3*gbit + fault.rate))
				if took < 0 || took > ideal+100*ms {
					t.Errorf("%d chunks took %v after the fault, want at most %v and 100 ms", rest, took, ideal)
				}
				t.Logf("cost %v", took-ideal)
				f.Close()
				// Meanwhile the other rails continue at their full rate.
				if r := m.move(bytes); r < 0.95*3*gbit {
					t.Errorf("%.3f Gbit/s beside the ill rail, want 0.95 of 3", r/gbit)
				}
				fault.heal(dead)
				healed := m.now
				for m.move(64<<20) < 0.97*4*gbit {
					if m.now > healed+2*sec {
						t.Fatalf("not at 97%% within 2 s of healing: %+v", m.s.View(m.now).Pairs[victim])
					}
				}
			})
		}
	}
}

// A rail may become silent at any moment of a transfer, even during its last slices.
func TestRailDiesAtAnyMoment(t *testing.T) {
	const bytes = 64 << 20
	var worst Instant
	for step := range 60 {
		for _, lanes := range []int{1, 2} {
			m := newModel(t, Config{})
			for range 4 {
				m.rail(gbit, 100*time.Microsecond, lanes)
			}
			m.move(32 << 20)
			whole := Instant(bytes / (4 * gbit))
			f := m.open(LayerStream, bytes)
			from := m.now
			if m.run(whole*Instant(step)/59, f.landed) >= 0 && f.landed() {
				continue
			}
			dead := m.links[step%4]
			dead.set(func() { dead.dead = true })
			if m.run(10*sec, f.landed) < 0 {
				t.Fatal("the transfer did not end")
			}
			// The remaining chunks, at the rate of the three other rails.
			ideal := whole*Instant(step)/59 + (whole-whole*Instant(step)/59)*4/3
			worst = max(worst, m.now-from-ideal)
		}
	}
	t.Logf("worst cost %v", worst)
	if worst > 100*ms {
		t.Errorf("a rail that falls silent costs up to %v: want 100 ms at most", worst)
	}
}

// A rail that flaps every 300 ms, and three seconds without any rail.
func TestFlapsAndBlackouts(t *testing.T) {
	m := newModel(t, Config{})
	for range 3 {
		m.rail(gbit, 100*time.Microsecond, 2)
	}
	var flap func()
	flap = func() {
		m.links[0].set(func() { m.links[0].dead = !m.links[0].dead })
		m.at(300*ms, flap)
	}
	m.at(50*ms, flap)
	if r := m.move(1 << 30); r < 0.95*2*gbit {
		t.Errorf("%.2f Gbit/s beside a flapping rail, want 0.95 of the 2 that are steady", r/gbit)
	}

	m = newModel(t, Config{})
	for range 3 {
		m.rail(gbit, 100*time.Microsecond, 2)
	}
	f := m.open(LayerStream, 256<<20)
	m.run(100*ms, f.landed)
	all := func(dead bool) {
		for _, l := range m.links {
			l.set(func() { l.dead = dead })
		}
	}
	all(true)
	m.wait(3 * sec)
	all(false)
	if took := m.run(2*sec, f.landed); took < 0 {
		t.Errorf("not done 2 s after all rails came back: %+v", m.s.View(m.now))
	}
}

// Urgent slices wait behind at most two slices of the fastest rail.
func TestUrgentBesideBackground(t *testing.T) {
	m := newModel(t, Config{})
	for _, r := range []float64{2, 1, 0.5} {
		m.rail(r*gbit, 100*time.Microsecond, 2)
	}
	alone := func() Instant {
		f := m.s.Open(m.p, DecodeWaits, 0, space(t, 4096), nil)
		f.Ready(f.space.All())
		d := m.run(sec, f.landed)
		if d < 0 {
			t.Fatal("an urgent transfer did not end")
		}
		f.Close()
		return d
	}
	m.move(64 << 20)
	m.wait(50 * ms)
	var quiet Instant
	for range 100 {
		quiet = max(quiet, alone())
		m.wait(3 * ms)
	}
	m.open(Background, 2<<30)
	m.wait(200 * ms)
	var loaded Instant
	for range 300 {
		loaded = max(loaded, alone())
		m.wait(1700 * time.Microsecond)
	}
	slice := Instant((256 << 10) / (2 * gbit))
	t.Logf("worst: alone %v, with load %v, slice time %v", quiet, loaded, slice)
	if loaded > quiet+2*slice {
		t.Errorf("worst urgent transfer %v with load and %v alone: more than two slice times of %v",
			loaded, quiet, slice)
	}
}

// An urgent chunk that finds the fast rail full for a moment waits for it. It does not go to a slow
// rail because of endless background on the fast one: no background precedes it.
func TestUrgentIsNotPutOnASlowRail(t *testing.T) {
	m := newModel(t, Config{})
	m.rail(gbit, 100*time.Microsecond, 2)
	m.rail(gbit/50, 100*time.Microsecond, 2)
	m.move(64 << 20)
	m.open(Background, 2<<30)
	m.wait(100 * ms)
	slow := 0
	m.pulled = func(sl Slice) {
		if sl.Flow.prio == DecodeWaits && m.byLane[sl.Lane] == m.links[1] {
			slow++
		}
	}
	var all []*Flow
	for range 10 {
		f := m.s.Open(m.p, DecodeWaits, 0, space(t, 256<<10), nil)
		f.Ready(f.space.All())
		all = append(all, f)
	}
	for _, f := range all {
		if m.run(sec, f.landed) < 0 {
			t.Fatal("an urgent transfer did not end")
		}
	}
	if slow > 0 {
		t.Errorf("%d urgent slices went over a rail of a fiftieth of the speed", slow)
	}
}

// Background has its share beside urgent work, and no more than that.
func TestBackgroundShare(t *testing.T) {
	m := newModel(t, Config{})
	m.rail(gbit, 100*time.Microsecond, 2)
	m.rail(gbit, 100*time.Microsecond, 2)
	var bytes [numPriorities]uint64
	m.ends = func(e Ended, _ Slice) { bytes[e.Flow.prio] += e.Bytes }
	for p := range numPriorities {
		for range 2 {
			m.open(p, 1<<30)
		}
	}
	m.wait(2 * sec)
	all := float64(bytes[0] + bytes[1] + bytes[2])
	t.Logf("shares %.3f %.3f %.3f", float64(bytes[0])/all, float64(bytes[1])/all,
		float64(bytes[2])/all)
	if v := float64(bytes[Background]) / all; v < 0.04 || v > 0.1 {
		t.Errorf("background had %.3f of the wire", v)
	}
	if v := float64(bytes[LayerStream]) / all; v < 0.08 || v > 0.15 {
		t.Errorf("layer streams had %.3f of the wire under urgent load", v)
	}
}

// If all rails of the preferred transport fail, the next transport continues. When they work again,
// the preferred one is used again.
func TestTransportSubstitution(t *testing.T) {
	m := newModel(t, Config{})
	m.rail(4*gbit, 20*time.Microsecond, 1, func(in *LaneInfo) { in.Path.Transport = "shm" })
	m.rail(gbit, 100*time.Microsecond, 2, func(in *LaneInfo) { in.Rank = 1 })
	m.move(64 << 20)
	if m.links[1].bytes != 0 {
		t.Errorf("%d bytes over the second transport while the first is well", m.links[1].bytes)
	}
	f := m.open(LayerStream, 64<<20)
	m.run(20*ms, f.landed)
	m.links[0].set(func() { m.links[0].dead = true })
	if took := m.run(sec, f.landed); took < 0 {
		t.Fatal("the second transport did not carry on")
	}
	f.Close()
	m.links[0].set(func() { m.links[0].dead = false })
	m.wait(2 * sec)
	m.move(64 << 20)
	before := m.links[1].bytes
	m.move(64 << 20)
	if n := m.links[1].bytes - before; n != 0 {
		t.Errorf("%d bytes over the second transport after the first one healed", n)
	}
}

// Near tiers carry what they can; a far one helps only if there is enough work.
func TestTiers(t *testing.T) {
	m := newModel(t, Config{})
	near := m.rail(gbit, 50*time.Microsecond, 1, func(in *LaneInfo) { in.Tier = 1 })
	far := m.rail(gbit, 50*time.Microsecond, 1, func(in *LaneInfo) { in.Tier = 3 })
	m.move(64 << 20)
	a, b := near.bytes, far.bytes
	for range 50 {
		m.move(64 << 10)
		m.wait(5 * ms)
	}
	if near.bytes-a < 45*64<<10 || far.bytes-b > 5*64<<10 {
		t.Errorf("of small transfers %d bytes went near and %d far", near.bytes-a, far.bytes-b)
	}
	if far.bytes == 0 {
		t.Error("the far rail did not help with a long transfer")
	}
}
