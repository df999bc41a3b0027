package spray

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/kvspray/kvspray/transfer"
)

// fan is one host whose local rails lead to many peers. A slice waits in the queue of its local
// rail, then in the queue of its peer's rail, and is confirmed a delay later.
type fan struct {
	*model
	cfg    fanConfig
	peers  []*Peer
	near   []Instant // when a local rail will have moved what was posted on it
	far    []Instant // the same for the rail of a peer
	frozen []bool    // peers that confirm nothing
	came   []uint64  // bytes, by peer
	rails  map[uint64][2]int
	gave   func(peer int, sl Slice)
	dirty  map[*Peer]bool
}

type fanConfig struct {
	peers, rails int
	near         float64             // bytes per nanosecond
	far          func(i int) float64 // of peer i; nil: no limit
	delay        Instant
	looks        Instant // 0, or so often a receiver looks at what has come, and confirms it
}

func newFan(t testing.TB, cfg fanConfig) *fan {
	f := &fan{model: &model{t: t, s: New(Config{}), now: sec}, cfg: cfg, near: make([]Instant,
		cfg.rails), rails: map[uint64][2]int{}, dirty: map[*Peer]bool{}}
	for range cfg.peers {
		f.join()
	}
	f.p = f.s.Peer(transfer.Boot{255, 255}, nil) // run pulls for it
	f.tick()
	return f
}

// join adds a peer with lanes on every rail.
func (f *fan) join() {
	i := len(f.peers)
	p := f.s.Peer(transfer.Boot{byte(i), byte(i >> 8)}, nil)
	for r := range f.cfg.rails {
		for range 2 {
			f.lanes++
			name := fmt.Sprint("eth", r)
			if err := f.s.LaneUp(f.now, p, LaneInfo{ID: f.lanes, Path: Path{"tcp", name, name},
				SliceBytes: 1 << 20, MaxSlices: 16, RTT: f.cfg.delay}); err != nil {
				f.t.Fatal(err)
			}
			f.rails[f.lanes] = [2]int{i, r}
		}
	}
	f.peers, f.far, f.frozen, f.came = append(f.peers, p), append(f.far, 0), append(f.frozen, false),
		append(f.came, 0)
}

func (f *fan) tick() {
	f.at(TickEvery, func() {
		f.s.Tick(f.now, func(p *Peer) { f.dirty[p] = true })
		f.assign()
		f.tick()
	})
}

// assign does the same as the executor.
func (f *fan) assign() {
	touch := func(p *Peer) { f.dirty[p] = true }
	for again := true; again; again = f.s.Wake(f.now, touch) {
		for i, p := range f.peers {
			if !f.dirty[p] {
				continue
			}
			delete(f.dirty, p)
			for sl, ok := f.s.Pull(f.now, p); ok; sl, ok = f.s.Pull(f.now, p) {
				f.send(i, sl)
			}
		}
	}
}

func (f *fan) send(i int, sl Slice) {
	if f.gave != nil {
		f.gave(i, sl)
	}
	r := f.rails[sl.Lane][1]
	f.near[r] = max(f.near[r], f.now) + Instant(float64(sl.Bytes)/f.cfg.near)
	there := f.near[r]
	if f.cfg.far != nil {
		there = max(f.far[i], there) + Instant(float64(sl.Bytes)/f.cfg.far(i))
		f.far[i] = there
	}
	at := there + f.cfg.delay
	if every := f.cfg.looks; every > 0 {
		phase := Instant(i) * every / 7 // each receiver has its own
		at = (at+phase+every-1)/every*every - phase
	}
	f.at(at-f.now, func() {
		if f.frozen[i] {
			return
		}
		f.came[i] += sl.Bytes
		f.s.End(f.now, sl.Cookie, Confirmed)
		f.dirty[f.peers[i]] = true
		f.assign()
	})
}

func (f *fan) open(i int, prio Priority, bytes uint64) *Flow {
	fl := f.s.Open(f.peers[i], prio, 0, space(f.t, bytes), nil)
	fl.Ready(fl.space.All())
	f.dirty[f.peers[i]] = true
	f.assign()
	return fl
}

// endless keeps a peer busy with flows of a priority.
func (f *fan) endless(i int, prio Priority) { f.open(i, prio, 4<<30) }

// rate is the bytes per nanosecond within d, by peer.
func (f *fan) rate(d Instant) (all []float64, sum float64) {
	before := append([]uint64(nil), f.came...)
	f.wait(d)
	for i := range f.came {
		v := float64(f.came[i]-before[i]) / float64(d)
		all, sum = append(all, v), sum+v
	}
	return all, sum
}

// Urgent slices take little longer over a rail that also carries background or layer streams to
// other peers, at any time. The others get their share, and the rail is full.
func TestUrgentAmongPeers(t *testing.T) {
	const bytes = 8 << 20
	for _, c := range []struct {
		prio  Priority
		ratio float64
	}{{Background, 1.3}, {LayerStream, 1.5}} {
		for _, others := range []int{1, 4, 15, 60} {
			f := newFan(t, fanConfig{peers: others + 1, rails: 1, near: 10 * gbit,
				delay: 50 * time.Microsecond})
			urgent := func() Instant {
				fl := f.open(0, DecodeWaits, bytes)
				return f.run(10*sec, fl.landed)
			}
			f.run(sec, f.open(0, DecodeWaits, 64<<20).landed)
			alone := urgent()
			for i := range others {
				f.endless(i+1, c.prio)
			}
			f.wait(sec)
			var all []float64
			const rounds = 200
			for i := range Instant(rounds) {
				all = append(all, float64(urgent())/float64(alone))
				// at any point of the period of a few milliseconds
				f.wait(5*ms + i*1700*time.Microsecond%(13*ms))
			}
			f.endless(1, c.prio) // one peer alone has taken what it had
			_, sum := f.rate(sec)
			slices.Sort(all)
			worst := all[rounds-1]
			t.Logf("8 MiB beside %s to %2d peers: alone %v, times that p50 %.2f, p99 %.2f, most %.2f; "+
				"%.3f of the rail", c.prio, others, alone,
				all[rounds/2], all[rounds*99/100], worst, sum/(10*gbit))
			if worst > c.ratio {
				t.Errorf("8 MiB that a decode waits for take up to %.2f times as long beside %s to %d other "+
					"peers as alone: want %v at most",
					worst, c.prio, others, c.ratio)
			}
			if sum < 0.97*10*gbit {
				t.Errorf("%.3f of the rail is used beside that", sum/(10*gbit))
			}
		}
	}
}

// The same if receivers confirm many slices at a time, because other processes occupy their
// processors. The rail then seems faster than it is, and slices seem to wait longer than they do.
func TestUrgentAmongPeersThatConfirmInBursts(t *testing.T) {
	for _, c := range []struct {
		prio  Priority
		ratio float64
	}{{Background, 1.3}, {LayerStream, 1.5}} {
		for _, looks := range []Instant{ms, 2 * ms, 3 * ms} {
			const peers, rate = 16, gbit
			f := newFan(t, fanConfig{peers: peers, rails: 1, near: rate, delay: 50 * time.Microsecond,
				looks: looks})
			urgent := func() Instant {
				fl := f.open(0, DecodeWaits, 8<<20)
				return f.run(10*sec, fl.landed)
			}
			f.run(sec, f.open(0, DecodeWaits, 64<<20).landed)
			alone := urgent()
			for i := range peers - 1 {
				f.endless(i+1, c.prio)
			}
			f.wait(sec)
			var all []float64
			const rounds = 100
			for i := range Instant(rounds) {
				all = append(all, float64(urgent())/float64(alone))
				f.wait(5*ms + i*1700*time.Microsecond%(13*ms))
			}
			_, sum := f.rate(sec)
			slices.Sort(all)
			t.Logf("8 MiB beside %s, receivers look every %v: alone %v, times that p50 %.2f, p99 %.2f, "+
				"most %.2f; %.3f of the rail", c.prio, looks, alone,
				all[rounds/2], all[rounds*99/100], all[rounds-1], sum/rate)
			if all[rounds-1] > c.ratio {
				t.Errorf("8 MiB that a decode waits for take up to %.2f times as long beside %s as alone, "+
					"where receivers look every %v: want %v at most",
					all[rounds-1], c.prio, looks, c.ratio)
			}
			if sum < 0.75*rate {
				t.Errorf("%.3f of the rail is used beside that", sum/rate)
			}
		}
	}
}

// Peers of equal class that share a rail get equal parts of it, and the rail is fully used. A peer
// that is limited by its own end leaves the rest to the others, and the end of one transfer costs
// the others nothing.
func TestPeersShareARail(t *testing.T) {
	for _, c := range []struct {
		name  string
		delay Instant
		far   func(i int) float64
		prio  Priority
	}{
		{"equal", 50 * time.Microsecond, nil, LayerStream},
		{"background", 50 * time.Microsecond, nil, Background},
		{"urgent", 50 * time.Microsecond, nil, DecodeWaits},
		{"a long way", 5 * ms, nil, LayerStream},
		{"ends of half the share", 50 * time.Microsecond, func(int) float64 { return 10 * gbit / 32 },
			LayerStream},
		{"ends of their share", 50 * time.Microsecond, func(int) float64 { return 10 * gbit / 16 },
			LayerStream},
		{"one slow end", 50 * time.Microsecond, func(i int) float64 {
			if i == 3 {
				return 10 * gbit / 160
			}
			return 10 * gbit
		}, LayerStream},
		{"one frozen", 50 * time.Microsecond, nil, LayerStream},
	} {
		t.Run(c.name, func(t *testing.T) {
			const peers = 16
			f := newFan(t, fanConfig{peers: peers, rails: 1, near: 10 * gbit, delay: c.delay, far: c.far})
			for i := range peers {
				f.endless(i, c.prio)
			}
			f.wait(sec)
			frozen := c.name == "one frozen"
			if frozen {
				f.frozen[5] = true
				_, sum := f.rate(100 * ms) // before it is suspect, too
				t.Logf("the first 100 ms with one frozen: %.3f of the rail", sum/(10*gbit))
				if sum < 0.95*10*gbit {
					t.Errorf("beside one that has just stopped %.3f of the rail is used", sum/(10*gbit))
				}
			}
			all, sum := f.rate(sec)
			lowest, highest, slow, want := 1e9, 0.0, 0.0, 10*gbit
			for i, v := range all {
				switch {
				case c.name == "one slow end" && i == 3:
					slow = v
				case frozen && i == 5:
				default:
					lowest, highest = min(lowest, v), max(highest, v)
				}
			}
			if c.name == "ends of half the share" {
				want /= 2
			}
			t.Logf("%.3f of what there is, the slowest has %.3f of the fastest", sum/want, lowest/highest)
			full := 0.97
			if c.name == "ends of their share" {
				full = 0.95 // each end is full as long as it always has something, and so is the rail
			}
			if sum < full*want || lowest < 0.9*highest {
				t.Errorf("%.3f of what there is, the slowest has %.3f of the fastest: want %.2f and 0.9",
					sum/want, lowest/highest, full)
			}
			if slow > 0 && slow < 0.9*10*gbit/160 {
				t.Errorf("the slow end has %.3f of what it takes", slow/(10*gbit/160))
			}
		})
	}
}

// An urgent chunk goes over an idle rail, not behind the slices of another peer on a busy one.
func TestPredictionSeesOtherPeers(t *testing.T) {
	f := newFan(t, fanConfig{peers: 2, rails: 2, near: 10 * gbit, delay: 5 * ms})
	for id, at := range f.rails {
		if at == [2]int{1, 1} {
			f.s.LaneDown(f.now, id) // peer 1 is reached over eth0 only
		}
	}
	f.run(sec, f.open(0, DecodeWaits, 64<<20).landed) // both are known
	f.endless(1, LayerStream)
	f.wait(sec)
	behind := 0
	for range 100 {
		var toB uint64
		for _, q := range f.peers[1].pairs {
			toB += q.load()
		}
		if toB >= 11<<20 { // else its window is closed for a moment, for the delay of the path to be seen
			behind++
		}
		f.gave = func(peer int, sl Slice) {
			if r := f.rails[sl.Lane][1]; peer == 0 && r == 0 && toB >= 11<<20 {
				t.Errorf("an urgent chunk takes eth0 with %d MiB in flight, beside an idle eth1", toB>>20)
			}
		}
		f.run(sec, f.open(0, DecodeWaits, 64<<10).landed)
		f.gave = nil
		f.wait(3 * ms)
	}
	if behind < 50 {
		t.Errorf("11 MiB were in flight over eth0 in %d of 100 looks", behind)
	}
}

// A lower priority to one peer gets its share beside endless work of higher priorities to other
// peers.
func TestNoPeerStarves(t *testing.T) {
	f := newFan(t, fanConfig{peers: 4, rails: 1, near: 10 * gbit, delay: 50 * time.Microsecond})
	f.endless(0, DecodeWaits)
	f.endless(1, DecodeWaits)
	f.endless(2, LayerStream)
	f.endless(3, Background)
	f.wait(sec / 2)
	all, sum := f.rate(sec)
	t.Logf("of the rail %.3f: two urgent peers %.3f and %.3f, layers %.3f, background %.3f",
		sum/(10*gbit), all[0]/sum, all[1]/sum, all[2]/sum, all[3]/sum)
	if urgent := all[0] + all[1]; all[2] < 0.9*urgent/8 || all[3] < 0.9*urgent/16 ||
		sum < 0.97*10*gbit {
		t.Errorf("of the rail %.3f: urgent %.3f, layers %.3f, background %.3f: want an eighth and a "+
			"sixteenth", sum/(10*gbit), urgent/sum, all[2]/sum, all[3]/sum)
	}
}

// A peer that joins another one on a rail has its share at once, and gives it back when it has
// nothing to send.
func TestPeerJoins(t *testing.T) {
	f := newFan(t, fanConfig{peers: 1, rails: 1, near: 10 * gbit, delay: 50 * time.Microsecond})
	f.endless(0, LayerStream)
	f.wait(200 * ms)
	if f.peers[0].pairs[0].out != nil {
		t.Error("what a peer alone sends is counted at the rail")
	}
	f.join()
	other := f.open(1, LayerStream, 1<<30)
	f.wait(50 * ms)
	all, sum := f.rate(200 * ms)
	t.Logf("%.3f of the rail, %.3f and %.3f", sum/(10*gbit), all[0]/sum, all[1]/sum)
	if balance := min(all[0], all[1]) / max(all[0], all[1]); sum < 0.97*10*gbit || balance < 0.9 {
		t.Errorf("%.3f of the rail is used, and one has %.3f of the other: want 0.97 and 0.9",
			sum/(10*gbit), balance)
	}
	other.Close()
	f.wait(100 * ms)
	if all, _ := f.rate(200 * ms); all[0] < 0.97*10*gbit {
		t.Errorf("after the other has ended it has %.3f of the rail", all[0]/(10*gbit))
	}
}
