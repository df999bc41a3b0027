package spray

import (
	"fmt"
	"testing"
	"time"

	"github.com/kvspray/kvspray/transfer"
	"golang.org/x/sys/unix"
)

// loaded is a scheduler with n warm pairs, full windows and endless work. end confirms the oldest
// slice; pull gives out what fits then, including the pull that finds nothing, and returns the
// number of slices.
func loaded(t testing.TB, n int) (end func(), pull func() int) {
	s := New(Config{MaxFlights: 1 << 20})
	p := s.Peer(transfer.Boot{1}, nil)
	for i := range n {
		name := fmt.Sprint(i)
		for k := range 2 {
			if err := s.LaneUp(0, p, LaneInfo{ID: uint64(2*i + k + 1), Path: Path{"tcp", name, name},
				SliceBytes: 256 << 10, MaxSlices: 16}); err != nil {
				t.Fatal(err)
			}
		}
	}
	sp := space(t, 1<<32-1<<20)
	var f *Flow
	now := Instant(0)
	var flying []Slice
	head := 0
	open := func() {
		f = s.Open(p, LayerStream, 0, sp, nil)
		f.Ready(sp.All())
	}
	open()
	pull = func() (pulled int) {
		for {
			sl, ok := s.Pull(now, p)
			if !ok {
				return pulled
			}
			pulled++
			flying = append(flying, sl)
		}
	}
	end = func() {
		if p.waits(Background) < 1000 {
			open()
		}
		sl := flying[head]
		if head++; head > 1<<12 {
			flying = append(flying[:0], flying[head:]...)
			head = 0
		}
		now += 250 * time.Microsecond / Instant(n)
		if _, ok := s.End(now, sl.Cookie, Confirmed); !ok {
			t.Fatal("unknown slice")
		}
	}
	for range 1 << 14 {
		pull()
		end()
	}
	return end, pull
}

// A pull and its confirmation allocate nothing.
func TestHotPathDoesNotAllocate(t *testing.T) {
	for _, n := range []int{1, 32} {
		end, pull := loaded(t, n)
		if a := testing.AllocsPerRun(500, func() { pull(); end() }); a != 0 {
			t.Errorf("%d pairs: %v allocations for a pull and a confirmation", n, a)
		}
	}
	end, _ := sharedRails(t, 16, 4)
	if a := testing.AllocsPerRun(500, end); a != 0 {
		t.Errorf("16 peers over 4 rails: %v allocations for a slice", a)
	}
}

// BenchmarkPull is one pull and one confirmation.
func BenchmarkPull(b *testing.B) {
	for _, n := range []int{1, 4, 32} {
		b.Run(fmt.Sprint(n, "pairs"), func(b *testing.B) {
			end, pull := loaded(b, n)
			b.ReportAllocs()
			for b.Loop() {
				pull()
				end()
			}
		})
	}
}

// cpuTime is the CPU time of this process, which other load changes less than wall time.
func cpuTime() time.Duration {
	var u unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &u) // cannot fail: both arguments are right
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkPeers measures all work of the scheduler per slice if several peers share the local
// rails: confirmation, turns, the pull of the next slice, and the pulls that find nothing.
func BenchmarkPeers(b *testing.B) {
	for _, c := range [][2]int{{2, 1}, {4, 2}, {16, 1}, {16, 4}, {64, 4}} {
		b.Run(fmt.Sprintf("%dpeers%drails", c[0], c[1]), func(b *testing.B) {
			end, slices := sharedRails(b, c[0], c[1])
			b.ReportAllocs()
			from, cpu := *slices, cpuTime()
			for b.Loop() {
				end()
			}
			b.ReportMetric(float64(cpuTime()-cpu)/float64(*slices-from), "cpu-ns/slice")
		})
	}
}

// sharedRails is a scheduler with peers that share local rails of 10 Gbit/s, with endless layer
// streams. end confirms the next slice that is due and gives out what fits then.
func sharedRails(t testing.TB, peers, rails int) (end func(), slices *int) {
	const rate = 1.25 // bytes per nanosecond of each rail
	s := New(Config{})
	var all []*Peer
	lane, at := map[uint64]int{}, make([]Instant, rails)
	id := uint64(0)
	for i := range peers {
		p := s.Peer(transfer.Boot{byte(i)}, i)
		for r := range rails {
			for range 2 {
				id++
				name := fmt.Sprint("eth", r)
				if err := s.LaneUp(0, p, LaneInfo{ID: id, Path: Path{"tcp", name, name}, SliceBytes: 1 << 20,
					MaxSlices: 16, RTT: 50 * time.Microsecond}); err != nil {
					t.Fatal(err)
				}
				lane[id] = r
			}
		}
		all = append(all, p)
	}
	sp := space(t, 1<<32-1<<20)
	type due struct {
		at     Instant
		peer   *Peer
		cookie uint64
	}
	var q [1 << 14]due
	head, n := make([]int, rails), make([]int, rails)
	slices = new(int)
	size := len(q) / rails
	slot := func(r, i int) *due { return &q[r*size+(head[r]+i)%size] }
	now := Instant(0)
	dirty := make([]*Peer, 0, peers)
	marked := make([]bool, peers)
	touch := func(p *Peer) {
		if i := p.Owner.(int); !marked[i] {
			marked[i] = true
			dirty = append(dirty, p)
		}
	}
	open := func(p *Peer) {
		f := s.Open(p, LayerStream, 0, sp, nil)
		f.Ready(sp.All())
	}
	ticked := Instant(0)
	assign := func() {
		for again := true; again; again = s.Wake(now, touch) {
			for _, p := range dirty {
				marked[p.Owner.(int)] = false
				for {
					sl, ok := s.Pull(now, p)
					if !ok {
						break
					}
					*slices++
					r := lane[sl.Lane]
					at[r] = max(at[r], now) + Instant(float64(sl.Bytes)/rate)
					*slot(r, n[r]) = due{at[r] + 50*time.Microsecond, p, sl.Cookie}
					n[r]++
				}
			}
			dirty = dirty[:0]
		}
	}
	for _, p := range all {
		open(p)
		touch(p)
	}
	assign()
	end = func() {
		r := 0
		for k := range rails {
			if n[k] > 0 && (n[r] == 0 || slot(k, 0).at < slot(r, 0).at) {
				r = k
			}
		}
		d := *slot(r, 0)
		head[r], n[r] = (head[r]+1)%size, n[r]-1
		now = max(now, d.at)
		if now-ticked >= tickEvery {
			ticked = now
			s.Tick(now, touch)
		}
		if _, ok := s.End(now, d.cookie, Confirmed); !ok {
			t.Fatal("unknown slice")
		}
		if d.peer.waits(Background) < 1000 {
			open(d.peer)
		}
		touch(d.peer)
		assign()
	}
	for range 1 << 15 {
		end()
	}
	return end, slices
}
