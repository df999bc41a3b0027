package shm

import (
	"runtime"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
)

// awaitPollers waits until so many readers poll.
func (n *node) awaitPollers(t *testing.T, want int32) {
	t.Helper()
	for end := time.Now().Add(waitFor); n.b.polling.Load() != want; runtime.Gosched() {
		if time.Now().After(end) {
			t.Fatalf("%d readers poll, want %d", n.b.polling.Load(), want)
		}
	}
}

// TestRouse: who is roused polls, for a while, at the end that was roused; who is not does not.
func TestRouse(t *testing.T) {
	p := newPair(t, Config{pollers: 1, rouse: 50 * time.Millisecond, stay: time.Millisecond})
	for slot := range transfer.Slot(4) {
		from, to := newMemory(t, 1<<20, 16<<10, 1), newMemory(t, 1<<20, 16<<10, 2)
		o, _ := p.bind(t, slot, from, to)
		roused := slot >= 2
		if roused {
			p.lane.(*lane).Rouse()
			p.dst.awaitPollers(t, 1)
		}
		p.move(t, o, from.space, 4, p.lane)
		if !roused && p.dst.b.polling.Load() != 0 {
			t.Error("a reader that nobody roused polls")
		}
		p.dst.awaitPollers(t, 0)
	}
	if n := p.src.b.polling.Load(); n != 0 {
		t.Errorf("%d readers poll at the source", n)
	}
}

// TestRouseWaitsForNothing: while packets wait for the peer there are no more of them.
func TestRouseWaitsForNothing(t *testing.T) {
	l := newPair(t, Config{}).lane.(*lane)
	l.out.mu.Lock()
	l.out.flushing = true // somebody sends, and is stuck
	l.out.mu.Unlock()
	for range 3 {
		l.Rouse()
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

// TestRouseOld: a peer that knows no rouses is sent none.
func TestRouseOld(t *testing.T) {
	l := newPair(t, Config{versions: wire.Versions{Min: wire.V(1, 0), Max: framesRows}}).lane.(*lane)
	l.out.mu.Lock()
	l.out.flushing = true // what is queued stays
	l.out.mu.Unlock()
	l.Rouse()
	if l.out.waits() {
		t.Error("roused")
	}
	l.out.mu.Lock()
	l.out.flushing = false
	l.out.mu.Unlock()
}

// TestStayAwake: a reader lingers for the first pull behind a rouse and for a while behind each, no
// rouse makes it longer, and one that gained nothing by it is left alone for some time.
func TestStayAwake(t *testing.T) {
	const rouse, asked, refused = 1, 2, 5 // refused: roused, but as many others poll as may
	type event struct {
		at    time.Duration
		what  int
		until time.Duration // that it lingers afterwards; 0: it does not
	}
	const ms = time.Millisecond
	for name, events := range map[string][]event{
		"nobody roused it":             {{0, asked, 0}, {ms, asked, 0}},
		"a pass":                       {{0, rouse, 20 * ms}, {5 * ms, asked, 20 * ms}, {20*ms - 1, asked, 20*ms - 1 + stayFor}, {30 * ms, asked, 0}},
		"a step, and one behind it":    {{0, rouse, 20 * ms}, {15 * ms, asked, 20 * ms}, {16 * ms, rouse, 36 * ms}, {17 * ms, asked, 36 * ms}, {40 * ms, rouse, 60 * ms}},
		"a step with its first layers": {{0, rouse | asked, 20 * ms}, {ms, asked, 20 * ms}},
		"rouses alone": {{0, rouse, 20 * ms}, {15 * ms, rouse, 20 * ms}, {19 * ms, rouse, 20 * ms}, {21 * ms, rouse, 0}, {30 * ms, rouse, 0},
			{20*ms + deafFor - 1, rouse, 0}, {20*ms + deafFor, rouse, 40*ms + deafFor}},
		"nothing for a long time":            {{0, rouse, 20 * ms}, {10 * time.Second, rouse, 10*time.Second + 20*ms}},
		"a layer that comes too late":        {{0, rouse, 20 * ms}, {39 * ms, asked, 0}, {40 * ms, rouse, 0}, {41 * ms, asked, 0}, {20*ms + deafFor, rouse, 40*ms + deafFor}},
		"others poll, and a pull is in time": {{0, refused, 0}, {ms, asked, 0}, {2 * ms, rouse, 22 * ms}},
	} {
		start := time.Now()
		l := &lane{b: New(Config{pollers: 1})}
		in := newInbox(nil, nil, 1)
		for i, e := range events {
			if now := start.Add(e.at); !in.until.After(now) {
				in.until = time.Time{} // as recv does
			}
			l.roused, l.asked = e.what&rouse != 0, e.what&asked != 0
			l.stayAwake(in, start.Add(e.at))
			if e.what == refused {
				in.until = time.Time{} // as recv does
			}
			until := time.Duration(0)
			if in.lingers() {
				until = in.until.Sub(start)
			}
			if until != e.until {
				t.Fatalf("%s: event %d: it lingers until %s, want %s", name, i, until, e.until)
			}
		}
	}
	l, in := &lane{b: New(Config{pollers: 1}), roused: true}, newInbox(nil, nil, 0)
	if l.stayAwake(in, time.Now()); in.lingers() {
		t.Error("it lingers on a host with too few processors")
	}
}

// TestRousedEnds: nobody waits longer for the end of a reader that polls.
func TestRousedEnds(t *testing.T) {
	p := newPair(t, Config{pollers: 1, rouse: time.Hour, stay: time.Hour})
	p.lane.(*lane).Rouse()
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
