// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"net"
	"slices"
	"testing"
	"time"
)

// mute is a lane's connection whose bytes go nowhere, as on a rail that has died in silence.
type mute struct{ net.Conn }

func (mute) Write(b []byte) (int, error)      { return len(b), nil }
func (mute) SetWriteDeadline(time.Time) error { return nil }

type muteRaw struct{}

// nothing was taken: the writer does it, and mute takes all.
func (muteRaw) Write(func(fd uintptr) bool) error { return nil }

// silence makes what n's end of the lane at index i writes go nowhere.
func silence(s *session, i int) *lane {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.lanes[i]
	l.mu.Lock()
	defer l.mu.Unlock()
	l.conn, l.raw = mute{l.conn}, muteRaw{}
	return l
}

// A control lane that goes silent, one way or both, holds a frame for no longer than it takes to
// doubt it; nothing ticks meanwhile and no connection dies.
func TestSilentLane(t *testing.T) {
	const (
		soon = time.Second // many times what it takes to doubt a lane
		// one may be late on a busy machine, and a frame may have taken the other lane
		tries = 5
	)
	for name, both := range map[string]bool{"one way": false, "both ways": true} {
		t.Run(name, func(t *testing.T) {
			for n := 1; ; n++ {
				took, doubted := overSilence(t, both)
				if took <= soon && doubted {
					return
				}
				if t.Logf("try %d: the frames took %v, the silent lane was doubted: %v", n, took,
					doubted); n == tries {
					t.Fatalf("in none of %d tries frames came within %v from a lane that went silent to another",
						tries, soon)
				}
			}
		})
	}
}

// overSilence says how long frames take that are sent both ways when the lane that would carry
// those of one end has gone silent, and whether that one was doubted.
func overSilence(t *testing.T, both bool) (took time.Duration, doubted bool) {
	two := func(o *Options) { slow(o); o.Control = []string{"127.0.0.2:0"} }
	a, b := start(t, two), start(t, two)
	join(t, a, b)
	sa, sb := a.session(b.opt.Boot), b.session(a.opt.Boot)
	poll(t, "two lanes", func() bool {
		sa.mu.Lock()
		defer sa.mu.Unlock()
		sb.mu.Lock()
		defer sb.mu.Unlock()
		return len(sa.lanes) == 2 && len(sb.lanes) == 2
	})
	for i := range uint64(10) {
		if a.Send(b.opt.Boot, await(i+1)) != nil || b.Send(a.opt.Boot, commit(i+1)) != nil {
			t.Fatal("not sent")
		}
	}
	b.inOrder(a.opt.Boot, 10)
	a.inOrder(b.opt.Boot, 10)
	sa.mu.Lock()
	best := sa.bestLocked()
	i := slices.Index(sa.lanes, best)
	here := best.conn.LocalAddr().String()
	sa.mu.Unlock()
	silence(sa, i)
	if both {
		sb.mu.Lock()
		k := slices.IndexFunc(sb.lanes,
			func(l *lane) bool { return l.conn.RemoteAddr().String() == here })
		sb.mu.Unlock()
		silence(sb, k)
	}
	begun := time.Now()
	for i := range uint64(10) {
		if a.Send(b.opt.Boot, await(i+11)) != nil || b.Send(a.opt.Boot, commit(i+11)) != nil {
			t.Fatal("not sent")
		}
	}
	b.inOrder(a.opt.Boot, 20)
	a.inOrder(b.opt.Boot, 20)
	took = time.Since(begun)
	for _, s := range []*session{sa, sb} {
		poll(t, "all acknowledged", func() bool {
			s.mu.Lock()
			defer s.mu.Unlock()
			return len(
				s.unacked) == 0
		})
	}
	return took, best.doubted.Load() != 0
}
