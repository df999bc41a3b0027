package gpu

import (
	"fmt"
	"testing"
	"time"
)

// TestGraphPacks: lists are moved once each by replays of a captured graph, in one session and in
// the next, and by launches when there are no replays any more.
func TestGraphPacks(t *testing.T) {
	s := newShim(t)
	for session := range uint64(2) {
		s.begin()
		if session == 0 {
			s.say("graph")
		}
		s.say("replay 20")
		before := s.say("look")
		slots := s.roundTrips(session)
		for tries := 0; ; tries++ { // replays may find no time on a busy machine
			if s.say("look").inGraphs > before.inGraphs || tries == 10 {
				break
			}
			slots += s.roundTrips(session)
		}
		st := s.say("replay 0")
		if n := st.inGraphs - before.inGraphs; st.moved-before.moved != slots || n == 0 ||
			st.astray != 0 {
			t.Errorf("session %d: %d kernels for %d slots, %d of them in graphs, %d astray", session,
				st.moved-before.moved, slots, n, st.astray)
		}
		more := s.roundTrips(session)
		if end := s.say("look"); end.inGraphs != st.inGraphs || end.moved-st.moved != more {
			t.Errorf("session %d: %d kernels for %d slots without replays, %d of them in graphs", session,
				end.moved-st.moved, more, end.inGraphs-st.inGraphs)
		}
		s.end()
		until(t, "the session's board is let go",
			func() bool { return s.say("look").overs == int(session)+1 })
	}
	s.quit("")
}

// TestGraphRaces: replays take lists while the thread takes them back, stop and go on, and the
// graph itself comes and goes. Each list is moved once.
func TestGraphRaces(t *testing.T) {
	s := newShim(t)
	s.begin()
	s.say("graph")
	const rounds = 6
	done := make(chan int)
	go func() {
		slots := 0
		for i := range uint64(rounds) {
			slots += s.roundTrips(i)
		}
		done <- slots
	}()
	slots := 0
	commands := []string{"replay 300", "replay 60", "replay 0", "no graph", "again", "replay 300",
		"replay 10"}
	tick := time.NewTicker(3 * time.Millisecond)
	defer tick.Stop()
	for i := 0; slots == 0; {
		select {
		case slots = <-done:
		case <-tick.C:
			s.say("%s", commands[i%len(commands)])
			i++
		}
	}
	st := s.say("replay 0")
	if st.moved != slots || st.astray != 0 || st.inGraphs == 0 || st.inGraphs == st.moved {
		t.Errorf("%d kernels for %d slots, %d of them in graphs, %d astray", st.moved, slots,
			st.inGraphs, st.astray)
	}
	t.Logf("%d of %d in graphs", st.inGraphs, slots)
	s.end()
	s.quit("")
}

// TestGraphBreaks: the context is lost while a graph has a list. The waiting copy is refused, and
// another method moves the bytes.
func TestGraphBreaks(t *testing.T) {
	s := newShim(t)
	s.begin()
	s.say("graph")
	s.say("replay 20")
	var result chan error
	for seed := uint64(0); ; seed++ { // until one is left to replays
		s.say("hold 1")
		result = s.gather(seed)
		until(t, "the list waits in a graph or in a stream",
			func() bool { st := s.say("look"); return st.moveWaits+st.jobs > 0 })
		if s.say("look").moveWaits > 0 {
			break
		}
		s.say("hold 0")
		if err := <-result; err != nil {
			t.Fatal(err)
		}
	}
	select {
	case err := <-result:
		t.Fatalf("the slot returned while a graph had its list: %v", err)
	case <-time.After(3 * workExitLook): // for what must not come
	}
	s.say("break 0")
	s.arrives(result, "in mid move")
	s.say("replay 0")
	s.end()
	s.quit("")
}

// TestGraphBreaksBetween: the context is lost between the two marks of a list. The next work is
// refused, too.
func TestGraphBreaksBetween(t *testing.T) {
	s := newShim(t)
	s.begin()
	s.say("graph")
	s.say("replay 20")
	s.say("break -2")
	for seed := range uint64(40) {
		s.arrives(s.gather(seed), fmt.Sprintf("slot %d", seed))
	}
	if st := s.say("replay 0"); st.inGraphs != 1 || st.astray != 0 {
		t.Errorf("%d lists in graphs, of which the first one was the end; %d astray",
			st.inGraphs, st.astray)
	}
	s.end()
	s.quit("")
}

// TestGraphEnds: a session ends and another begins while lists wait for rare replays. Every copy
// ends, and none is moved twice.
func TestGraphEnds(t *testing.T) {
	s := newShim(t)
	s.g.workTimeout = workTimeout // of what nobody takes, as the session is over
	moved, slots := 0, 0
	for session := range 20 {
		s.begin()
		if session == 0 {
			s.say("graph")
		}
		s.say("replay 300")
		if session%4 == 0 { // one that ends in time
			if err := <-s.gather(uint64(session)); err != nil {
				t.Error(fmt.Errorf("session %d: %w", session, err))
			}
			slots++
		}
		result := s.gather(uint64(session))
		s.end()
		if err := <-result; err != nil {
			t.Error(fmt.Errorf("session %d: %w", session, err))
		}
		slots++
		st := s.say("look")
		if moved = st.moved; st.astray != 0 || moved > slots {
			t.Fatalf("session %d: %d kernels for %d slots, %d astray", session, moved, slots, st.astray)
		}
		until(t, "the session's board is let go", func() bool { return s.say("look").overs == session+1 })
	}
	if moved == 0 {
		t.Error("the engine has moved nothing")
	}
	s.say("replay 0")
	s.quit("")
}
