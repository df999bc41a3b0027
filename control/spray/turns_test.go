package spray

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/kvspray/kvspray/transfer"
)

// contended is a scheduler with n warm pairs and endless work of these priorities. step confirms
// the next slice that is due, at a rate of 2 Gbit/s for each pair, and gives out what fits then.
// given are the bytes of each priority.
func contended(t *testing.T, n int, way Instant, prios ...Priority) (s *Scheduler, p *Peer,
	step func(), given *[numPriorities]uint64) {
	t.Helper()
	s = New(Config{})
	p = s.Peer(transfer.Boot{1}, nil)
	for i := range n {
		if err := s.LaneUp(0, p, LaneInfo{ID: uint64(i + 1), Path: Path{"tcp", fmt.Sprint(i),
			fmt.Sprint(i)}, Gbps: 2, SliceBytes: 1 << 20, MaxSlices: 64, RTT: way}); err != nil {
			t.Fatal(err)
		}
	}
	sp := space(t, 1<<32-1<<20)
	for _, prio := range prios {
		f := s.Open(p, prio, 0, sp, nil)
		f.Ready(sp.All())
	}
	given = new([numPriorities]uint64)
	now := Instant(0)
	busy := make([]Instant, n) // until when each pair's wire is
	type due struct {
		at     Instant
		cookie uint64
	}
	var flying []due
	pull := func() {
		for {
			sl, ok := s.Pull(now, p)
			if !ok {
				return
			}
			const bytesPerNS = 0.25
			given[sl.Flow.prio] += sl.Bytes
			w := &busy[sl.Lane-1]
			*w = max(*w, now) + Instant(float64(sl.Bytes)/bytesPerNS)
			flying = append(flying, due{*w + way, sl.Cookie})
		}
	}
	pull()
	step = func() {
		next := 0
		for i, d := range flying {
			if d.at < flying[next].at {
				next = i
			}
		}
		d := flying[next]
		flying = append(flying[:next], flying[next+1:]...)
		now = d.at
		if _, ok := s.End(now, d.cookie, Confirmed); !ok {
			t.Fatal("unknown slice")
		}
		pull()
	}
	return s, p, step, given
}

// A lower priority gets an eighth or a sixteenth of all bytes that precede it, including the share
// of another one.
func TestShares(t *testing.T) {
	_, _, step, given := contended(t, 2, 100*time.Microsecond, DecodeWaits, LayerStream, Background)
	for range 5000 {
		step()
	}
	first, second, last := float64(given[DecodeWaits]), float64(given[LayerStream]),
		float64(given[Background])
	for _, x := range []struct {
		what      Priority
		got, want float64
	}{{LayerStream, second / first, 1.0 / 8}, {Background, last / (first + second), 1.0 / 16}} {
		if math.Abs(x.got-x.want) > 0.02*x.want {
			t.Errorf("%s: %.4f of what goes before it, want %.4f: %v", x.what, x.got, x.want, *given)
		}
	}
}

// Background has shorter slices. If it came first, and the receiver's credit is less than the path
// holds, its slices must not take the room, one after the other, that a longer slice waits for.
func TestShortSlicesTakeNoTurn(t *testing.T) {
	for _, way := range []Instant{100 * time.Microsecond, 2 * time.Millisecond,
		10 * time.Millisecond} {
		for chunks := uint64(1); chunks <= 12; chunks++ {
			s, p, step, given := contended(t, 2, way, Background)
			for range 300 {
				step()
			}
			for _, rail := range []string{"0", "1"} {
				if !s.Credit(p, "tcp", rail, chunks*transfer.ChunkBytes) {
					t.Fatal("a credit is refused")
				}
			}
			for range 300 {
				step()
			}
			sp := space(t, 1<<32-1<<20)
			s.Open(p, LayerStream, 0, sp, nil).Ready(sp.All())
			for range 300 {
				step() // what was in flight
			}
			*given = [numPriorities]uint64{}
			for range 2000 {
				step()
			}
			if got := float64(given[Background]) / float64(given[LayerStream]); !(got < 1.1/16) {
				t.Errorf("a way of %v, a credit of %d chunks: background has %.3f of what goes before it, "+
					"want %.3f: %v", way, chunks, got, 1.0/16, *given)
			}
		}
	}
}
