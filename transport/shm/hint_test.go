package shm

import (
	"runtime"
	"testing"
	"time"

	"github.com/kvspray/kvspray/transfer"
)

// awaitPollers waits until want readers poll.
func (n *node) awaitPollers(t *testing.T, want int32) {
	t.Helper()
	for end := time.Now().Add(waitFor); n.b.polling.Load() != want; runtime.Gosched() {
		if time.Now().After(end) {
			t.Fatalf("%d readers poll, want %d", n.b.polling.Load(), want)
		}
	}
}

// TestHint: only a reader that received a hint polls, and only for a while.
func TestHint(t *testing.T) {
	p := newPair(t, Config{pollers: 1, hinted: 50 * time.Millisecond, stay: time.Millisecond})
	for slot := range transfer.Slot(4) {
		from, to := newMemory(t, 1<<20, 16<<10, 1), newMemory(t, 1<<20, 16<<10, 2)
		o, _ := p.bind(t, slot, from, to)
		hinted := slot >= 2
		if hinted {
			p.lane.(*lane).WakeHint()
			p.dst.awaitPollers(t, 1)
		}
		p.move(t, o, from.space, 4, p.lane)
		if !hinted && p.dst.b.polling.Load() != 0 {
			t.Error("a reader without a hint polls")
		}
		p.dst.awaitPollers(t, 0)
	}
	if n := p.src.b.polling.Load(); n != 0 {
		t.Errorf("%d readers poll at the source", n)
	}
}

// TestNoHintBehindPackets: while packets wait for the peer, no hint is added to them.
func TestNoHintBehindPackets(t *testing.T) {
	l := newPair(t, Config{}).lane.(*lane)
	l.out.mu.Lock()
	l.out.flushing = true // a sender that is stuck
	l.out.mu.Unlock()
	for range 3 {
		l.WakeHint()
	}
	l.out.mu.Lock()
	n := 0
	for _, q := range l.out.q {
		n += len(q.b)
	}
	l.out.flushing = false
	l.out.mu.Unlock()
	if n != frameHeader {
		t.Errorf("%d bytes wait, want one frame", n)
	}
}

// TestStayAwake: a reader polls for the first pull after a hint, and for a while after each pull.
// Further hints do not prolong it. After a hint that gained nothing, hints are ignored for a while.
func TestStayAwake(t *testing.T) {
	const hint, asked, refused = 1, 2, 5 // refused: a hint, while the permitted number of readers poll
	type event struct {
		at    time.Duration
		what  int
		until time.Duration // end of polling afterwards; 0: it does not poll
	}
	const ms = time.Millisecond
	for name, events := range map[string][]event{
		"no hint": {{0, asked, 0}, {ms, asked, 0}},
		"a step": {{0, hint, 20 * ms}, {5 * ms, asked, 20 * ms}, {20*ms - 1, asked,
			20*ms - 1 + stayFor}, {30 * ms, asked, 0}},
		"two steps": {{0, hint, 20 * ms}, {15 * ms, asked, 20 * ms}, {16 * ms, hint,
			36 * ms}, {17 * ms, asked, 36 * ms}, {40 * ms, hint, 60 * ms}},
		"a step with its first layers": {{0, hint | asked, 20 * ms}, {ms, asked, 20 * ms}},
		"hints alone": {{0, hint, 20 * ms}, {15 * ms, hint, 20 * ms}, {19 * ms, hint, 20 * ms},
			{21 * ms, hint, 0}, {30 * ms, hint, 0},
			{20*ms + ignoredFor - 1, hint, 0}, {20*ms + ignoredFor, hint, 40*ms + ignoredFor}},
		"nothing for a long time": {{0, hint, 20 * ms}, {10 * time.Second, hint,
			10*time.Second + 20*ms}},
		"a layer that comes too late": {{0, hint, 20 * ms}, {39 * ms, asked, 0}, {40 * ms, hint,
			0}, {41 * ms, asked, 0}, {20*ms + ignoredFor, hint, 40*ms + ignoredFor}},
		"others poll, and a pull is in time": {{0, refused, 0}, {ms, asked, 0}, {2 * ms, hint, 22 * ms}},
	} {
		start := time.Now()
		l := &lane{b: New(Config{pollers: 1})}
		in := newInbox(nil, nil, 1)
		for i, e := range events {
			if now := start.Add(e.at); !in.until.After(now) {
				in.until = time.Time{} // as recv does
			}
			l.hints.hinted, l.hints.asked = e.what&hint != 0, e.what&asked != 0
			l.stayAwake(in, start.Add(e.at))
			if e.what == refused {
				in.until = time.Time{} // as recv does
			}
			until := time.Duration(0)
			if in.polls() {
				until = in.until.Sub(start)
			}
			if until != e.until {
				t.Fatalf("%s: event %d: it polls until %s, want %s", name, i, until, e.until)
			}
		}
	}
	l, in := &lane{b: New(Config{pollers: 1}), hints: hints{hinted: true}}, newInbox(nil, nil, 0)
	if l.stayAwake(in, time.Now()); in.polls() {
		t.Error("it polls on a host with too few processors")
	}
}

// TestPollingReaderEnds: Close does not wait for the end of polling.
func TestPollingReaderEnds(t *testing.T) {
	p := newPair(t, Config{pollers: 1, hinted: time.Hour, stay: time.Hour})
	p.lane.(*lane).WakeHint()
	p.dst.awaitPollers(t, 1)
	ended := make(chan error, 1)
	go func() { ended <- p.dst.b.Close() }()
	select {
	case err := <-ended:
		if err != nil {
			t.Fatal(err)
		}
	case <-time.After(waitFor):
		t.Fatal("it does not end")
	}
	if n := p.dst.b.polling.Load(); n != 0 {
		t.Errorf("%d readers poll when all lanes have ended", n)
	}
}
