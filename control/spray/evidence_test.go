package spray

import (
	"testing"
	"time"

	"github.com/kvspray/kvspray/transfer"
)

// What the model of a shared local rail may conclude, and what it has to ignore.

// An urgent slice may exceed the in-flight window of its rail pair if other peers keep the local
// rail busy. It does not exceed the receiver's credit, nor by more than one slice the window of a
// pair on trial or of an unknown pair.
func TestUrgentKeepsLimitsAmongPeers(t *testing.T) {
	for _, c := range []struct {
		name    string
		warm    bool
		maxLoad uint64
		limit   func(f *fan, q *pair)
	}{
		{"credit", true, 3 * transfer.ChunkBytes, func(f *fan, _ *pair) {
			if !f.s.Credit(f.peers[0], "tcp", "eth0", 2*transfer.ChunkBytes) {
				t.Fatal("a credit is refused")
			}
		}},
		{"on trial", true, 3 * transfer.ChunkBytes, func(f *fan, q *pair) {
			q.exclude(f.now, &f.s.cfg, "test")
			q.proven(f.now)
		}},
		{"unknown", false, (coldChunks + 1) * transfer.ChunkBytes, func(*fan, *pair) {}},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newFan(t, fanConfig{peers: 2, rails: 1, near: 10 * gbit, delay: 50 * time.Microsecond})
			if c.warm {
				f.run(sec, f.open(0, DecodeWaits, 64<<20).landed)
			}
			f.endless(1, Background)
			f.wait(sec)
			q := f.peers[0].pairs[0]
			c.limit(f, q)
			f.frozen[0] = true
			gave := 0
			f.gave = func(peer int, _ Slice) {
				if peer == 0 {
					gave++
				}
			}
			f.open(0, DecodeWaits, 8<<20)
			f.wait(20 * ms)
			if gave == 0 || q.load() > c.maxLoad {
				t.Errorf("%d slices, %d bytes in flight: want some, and at most %d bytes", gave, q.load(),
					c.maxLoad)
			}
		})
	}
}

// One late confirmation of a slice that found the local rail idle does not hide the queue there
// afterwards.
func TestOneLateConfirmationHidesNoQueue(t *testing.T) {
	const peers = 16
	f := newFan(t, fanConfig{peers: peers, rails: 1, near: gbit, delay: 50 * time.Microsecond})
	for i := range peers {
		f.run(sec, f.open(i, LayerStream, 16<<20).landed)
		f.wait(ms)
	}
	f.wait(50 * ms)
	f.cfg.delay = 50 * ms // within Config.Suspect: nothing else is concluded from it
	for i := range peers {
		f.run(sec, f.open(i, LayerStream, transfer.ChunkBytes).landed)
		f.wait(ms)
	}
	f.cfg.delay = 50 * time.Microsecond
	for i := range peers {
		f.endless(i, LayerStream)
	}
	var longest Instant
	f.gave = func(int, Slice) { longest = max(longest, f.near[0]-f.now) }
	f.wait(20 * ms) // the beginning: all windows are open
	longest = 0
	f.wait(500 * ms)
	t.Logf("up to %v wait at the local rail", longest)
	if longest > 5*ms {
		t.Errorf("up to %v wait at the local rail, want %v at most", longest, 5*ms)
	}
}

// A probe raises the rate of a local rail only if slices were posted meanwhile: otherwise none
// could have been late.
func TestProbeNeedsSlices(t *testing.T) {
	const rate = gbit
	for _, c := range []struct {
		sent float64 // times what the rail moves in probeSpan
		want float64
	}{{0, rate}, {0.4, rate}, {1, rate * probeGain}} {
		e := &egressQueue{bw: rate, probing: true, probed: sec, looked: sec, lookLate: 0, late: never,
			probeFrom: 1 << 20, probeGap: probeEvery}
		e.posted = e.probeFrom + uint64(c.sent*rate*float64(probeSpan))
		e.judge(sec + probeSpan)
		if e.probing || e.bw != c.want {
			t.Errorf("with %.1f times what the rail moves: rate %v, still probing %v: want %v, false",
				c.sent,
				e.bw, e.probing, c.want)
		}
	}
}

// Light traffic does not lower the rate of a local rail: the rail waits for the slices.
func TestLightTrafficKeepsTheRate(t *testing.T) {
	for _, delay := range []Instant{50 * time.Microsecond, ms, 5 * ms} {
		for _, bytes := range []uint64{transfer.ChunkBytes, 1 << 20} {
			f := newFan(t, fanConfig{peers: 4, rails: 1, near: 10 * gbit, delay: delay})
			for i := range f.peers {
				f.open(i, LayerStream, 256<<20)
			}
			f.wait(2 * sec)
			e := f.peers[0].pairs[0].out.egressQueue
			if e.bw < 0.9*10*gbit {
				t.Fatalf("%.3f of the rail's rate: not what this test is about", e.bw/(10*gbit))
			}
			for i := range 2000 {
				f.open(i%len(f.peers), LayerStream, bytes)
				f.wait(4 * ms)
			}
			t.Logf("%v, transfers of %d KiB: %.3f of the rail's rate", delay, bytes>>10, e.bw/(10*gbit))
			if e.bw < 0.8*10*gbit {
				t.Errorf("%v, transfers of %d KiB: the rate fell to %.3f of what the rail moves", delay,
					bytes>>10, e.bw/(10*gbit))
			}
		}
	}
}

// The model learns that a local rail has become slower, even if there is a pause after each
// transfer.
func TestSlowerRailIsLearned(t *testing.T) {
	for _, delay := range []Instant{50 * time.Microsecond, 5 * ms} {
		for _, pause := range []Instant{0, 30 * ms} {
			f := newFan(t, fanConfig{peers: 4, rails: 1, near: 10 * gbit, delay: delay})
			for i := range f.peers {
				f.open(i, LayerStream, 256<<20)
			}
			f.wait(2 * sec)
			e := f.peers[0].pairs[0].out.egressQueue
			f.cfg.near = gbit
			for range 200 {
				for i := range f.peers {
					fl := f.open(i, LayerStream, 1<<20)
					if i == len(f.peers)-1 {
						f.run(sec, fl.landed)
					}
				}
				f.wait(pause)
			}
			t.Logf("%v, pauses of %v: %.3f of the new rate", delay, pause, e.bw/gbit)
			if e.bw > 2*gbit {
				t.Errorf("%v, pauses of %v: the rate is %.2f of what the rail moves now", delay, pause,
					e.bw/gbit)
			}
		}
	}
}
