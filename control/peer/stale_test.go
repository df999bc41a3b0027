package peer

import (
	"errors"
	"testing"
	"time"
)

// A lane that a session has dialed arrives after that session's end, when both sides have a new
// session and frames in it. Both sides begin again, and frames flow.
func TestLateLaneOfAnEarlierSession(t *testing.T) {
	a, b := start(t, nil), start(t, nil)
	join(t, a, b)
	laneOf(t, a, b)
	old := a.sessionOf(b)
	a.sessions.end(old, errors.New("evicted"))
	lanes := func(n, to *node) int {
		s := n.sessionOf(to)
		if s == nil || s == old {
			return 0
		}
		return s.channel.State().Lanes
	}
	connected := func() bool {
		if lanes(a, b) == 0 {
			a.Connect(b.Endpoint())
		}
		return lanes(a, b) > 0 && lanes(b, a) > 0
	}
	poll(t, "connected again", connected)
	for i := uint64(1); i <= 20; i++ {
		if err := errors.Join(a.Send(b.opt.Boot, commit(i)), b.Send(a.opt.Boot, commit(i))); err != nil {
			t.Fatal(err)
		}
	}
	b.inOrder(a.opt.Boot, 20)
	a.inOrder(b.opt.Boot, 20)
	acknowledged(t, a.sessionOf(b))
	if err := a.dialer.dialLane(t.Context(), old, target{b.Endpoint(), 0}); err == nil {
		t.Fatal("a lane of a session that has ended was accepted")
	}
	delivered := func(n, from *node) int {
		n.mu.Lock()
		defer n.mu.Unlock()
		return len(n.got[from.opt.Boot])
	}
	count := uint64(20)
	poll(t, "frames flow both ways", func() bool {
		if !connected() {
			return false
		}
		before, beforeB := delivered(a, b), delivered(b, a)
		count++
		_, _ = a.Send(b.opt.Boot, commit(count)), b.Send(a.opt.Boot, commit(count))
		end := time.Now().Add(2 * time.Second)
		for time.Now().Before(end) {
			if delivered(a, b) > before && delivered(b, a) > beforeB {
				return a.sessionOf(b).channel.State().Unacked == 0
			}
			<-time.After(20 * time.Millisecond)
		}
		return false
	})
}
