package spray

import (
	"fmt"
	"testing"
	"time"

	"github.com/kvspray/kvspray/transfer"
)

// loaded is a scheduler with n warm pairs, their windows full, and endless work: end confirms the oldest slice, pull gives out what fits then,
// up to the pull that finds nothing, and says how many slices that was.
func loaded(t testing.TB, n int) (end func(), pull func() int) {
	s := New(Config{MaxFlights: 1 << 20})
	p := s.Peer(transfer.Boot{1}, nil)
	for i := range n {
		name := fmt.Sprint(i)
		for k := range 2 {
			if err := s.LaneUp(0, p, LaneInfo{ID: uint64(2*i + k + 1), Path: Path{"tcp", name, name}, SliceBytes: 256 << 10, MaxSlices: 16}); err != nil {
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
