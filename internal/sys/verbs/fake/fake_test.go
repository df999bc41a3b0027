package fake

import (
	"bytes"
	"errors"
	"testing"

	"github.com/kvspray/kvspray/internal/sys/verbs"
)

type end struct {
	d   verbs.Device
	p   verbs.Domain
	q   verbs.QueuePair
	cq  verbs.CompletionQueue
	m   verbs.Memory
	mem []byte
}

func newEnd(t *testing.T, d verbs.Device) *end {
	e := &end{d: d, mem: make([]byte, 4096)}
	var err error
	if e.cq, err = d.NewCompletionQueue(128); err != nil {
		t.Fatal(err)
	}
	if e.p, err = d.NewDomain(); err != nil {
		t.Fatal(err)
	}
	if e.q, err = e.p.NewQueuePair(e.cq, 32, 32); err != nil {
		t.Fatal(err)
	}
	if e.m, err = e.p.Register(e.mem, true); err != nil {
		t.Fatal(err)
	}
	return e
}

func (e *end) connect(t *testing.T, o *end) {
	t.Helper()
	if err := errors.Join(e.q.ToInit(), e.q.ToReadyToReceive(o.q.Address()),
		e.q.ToReadyToSend()); err != nil {
		t.Fatal(err)
	}
}

func newPair(t *testing.T) (*Fabric, *end, *end) {
	f := New()
	a, b := newEnd(t, f.Device("a")), newEnd(t, f.Device("b"))
	a.connect(t, b)
	b.connect(t, a)
	for i := range a.mem {
		a.mem[i] = byte(i)
	}
	return f, a, b
}

func (e *end) poll(t *testing.T) []verbs.Completion {
	t.Helper()
	var buf [64]verbs.Completion
	n, err := e.cq.Poll(buf[:])
	if err != nil {
		t.Fatal(err)
	}
	return buf[:n]
}

func write(a, b *end, id uint64, off, n uint32, imm bool) verbs.Work {
	w := verbs.Work{ID: id, Op: verbs.Write, LocalAddr: a.m.Addr() + uint64(off),
		LocalKey: a.m.LocalKey(), Len: n,
		RemoteAddr: b.m.Addr() + uint64(off), RemoteKey: b.m.RemoteKey(), Signaled: true}
	if imm {
		w.Op, w.Imm = verbs.WriteImm, 7<<16|3
	}
	return w
}

func post(t *testing.T, e *end, w ...verbs.Work) {
	t.Helper()
	if _, err := e.q.PostSend(w); err != nil {
		t.Fatal(err)
	}
}

// TestImmediateFollowsWrites: the evidence that gdr builds on.
func TestImmediateFollowsWrites(t *testing.T) {
	f, a, b := newPair(t)
	if err := b.q.PostReceive([]uint64{50}); err != nil {
		t.Fatal(err)
	}
	post(t, a, write(a, b, 1, 0, 100, false), write(a, b, 2, 1000, 24, true))
	for f.Step() {
		if got := b.poll(t); len(got) > 0 && (got[0].ID != 50 || got[0].Imm != 7<<16|3 ||
			!bytes.Equal(b.mem[:100], a.mem[:100])) {
			t.Fatalf("immediate %+v before the writes ahead of it", got)
		}
	}
	if got := a.poll(t); len(got) != 2 || got[0].ID != 1 || got[1].Status != verbs.OK {
		t.Fatalf("%+v", got)
	}
	if !bytes.Equal(b.mem[1000:1024], a.mem[1000:1024]) || b.mem[100] != 0 {
		t.Fatal("bytes")
	}
}

// TestLateWriteAfterTimeout is the worst case of the field: the sender's completion is a failure,
// the blocks are about to be reused, and the bytes are still on the wire. The sender's error stops
// nothing; the receiver's does.
func TestLateWriteAfterTimeout(t *testing.T) {
	for _, fenced := range []bool{false, true} {
		f, a, b := newPair(t)
		f.Hold(a.q.Num())
		post(t, a, write(a, b, 1, 0, 64, false))
		f.Run()
		f.TimeOut(a.q.Num())
		f.Run()
		if got := a.poll(t); len(got) != 1 || got[0].Status != verbs.RetryExceeded ||
			a.q.State() != verbs.Error {
			t.Fatalf("%+v in %s", got, a.q.State())
		}
		if fenced {
			if err := b.q.ToError(); err != nil {
				t.Fatal(err)
			}
		}
		f.Release(a.q.Num())
		f.Run()
		if written := b.mem[1] != 0; written == fenced {
			t.Fatalf("fenced %v, written %v", fenced, written)
		}
	}
}

func TestLostAnswerStillWrites(t *testing.T) {
	f, a, b := newPair(t)
	f.LoseAnswers(a.q.Num())
	post(t, a, write(a, b, 1, 0, 64, false))
	f.Run()
	if got := a.poll(t); len(got) != 0 || b.mem[1] != 1 {
		t.Fatalf("%+v, byte %d", got, b.mem[1])
	}
	if err := a.q.ToError(); err != nil {
		t.Fatal(err)
	}
	f.Run()
	if got := a.poll(t); len(got) != 1 || got[0].Status != verbs.Flushed {
		t.Fatalf("%+v", got)
	}
}

func TestErrors(t *testing.T) {
	for name, c := range map[string]struct {
		do   func(*Fabric, *end, *end) []verbs.Work
		want verbs.Status
	}{
		"remote key gone": {func(_ *Fabric, a, b *end) []verbs.Work {
			w := write(a, b, 1, 0, 8, false)
			_ = b.m.Close()
			return []verbs.Work{w}
		}, verbs.RemoteAccess},
		"a key of another domain of the same device": {func(_ *Fabric, a, b *end) []verbs.Work {
			return []verbs.Work{write(a, newEnd(t, b.d), 1, 0, 8, false)}
		}, verbs.RemoteAccess},
		"a local key of another domain": {func(_ *Fabric, a, b *end) []verbs.Work {
			return []verbs.Work{write(newEnd(t, a.d), b, 1, 0, 8, false)}
		}, verbs.LocalAccess},
		"past the remote end": {func(_ *Fabric, a, b *end) []verbs.Work {
			w := write(a, b, 1, 0, 8, false)
			w.RemoteAddr = b.m.Addr() + b.m.Len() - 7
			return []verbs.Work{w}
		}, verbs.RemoteAccess},
		"before the remote start": {func(_ *Fabric, a, b *end) []verbs.Work {
			w := write(a, b, 1, 0, 8, false)
			w.RemoteAddr = b.m.Addr() - 1
			return []verbs.Work{w}
		}, verbs.RemoteAccess},
		"past the local end": {func(_ *Fabric, a, b *end) []verbs.Work {
			return []verbs.Work{write(a, b, 1, 4090, 8, false)}
		}, verbs.LocalAccess},
		"no receive": {func(_ *Fabric, a, b *end) []verbs.Work {
			return []verbs.Work{write(a, b, 1, 0, 8, true)}
		}, verbs.ReceiverNotReady},
	} {
		t.Run(name, func(t *testing.T) {
			f, a, b := newPair(t)
			post(t, a, append(c.do(f, a, b), write(a, b, 2, 8, 8, false))...)
			f.Run()
			got := a.poll(t)
			if len(got) != 2 || got[0].Status != c.want || got[1].Status != verbs.Flushed ||
				a.q.State() != verbs.Error {
				t.Fatalf("%+v in %s", got, a.q.State())
			}
			if !bytes.Equal(b.mem, make([]byte, len(b.mem))) {
				t.Fatal("something was written")
			}
			// Posting in the error state is taken and flushed.
			post(t, a, write(a, b, 3, 0, 8, false))
			f.Run()
			if got := a.poll(t); len(got) != 1 || got[0].Status != verbs.Flushed {
				t.Fatalf("%+v", got)
			}
			// A fresh life: both ends reset and connect again.
			if err := errors.Join(a.q.ToReset(), b.q.ToReset()); err != nil {
				t.Fatal(err)
			}
			a.connect(t, b)
			b.connect(t, a)
		})
	}
}

func TestStates(t *testing.T) {
	f := New()
	a, b := newEnd(t, f.Device("a")), newEnd(t, f.Device("b"))
	for name, err := range map[string]error{
		"RTR from RESET": a.q.ToReadyToReceive(b.q.Address()),
		"RTS from RESET": a.q.ToReadyToSend(),
		"ERR from RESET": a.q.ToError(),
		"send in RESET":  second(a.q.PostSend([]verbs.Work{write(a, b, 1, 0, 1, false)})),
		"recv in RESET":  a.q.PostReceive([]uint64{1}),
	} {
		if !errors.Is(err, verbs.ErrState) {
			t.Errorf("%s: %v", name, err)
		}
	}
	a.connect(t, b)
	if err := a.q.ToInit(); !errors.Is(err, verbs.ErrState) {
		t.Errorf("INIT from RTS: %v", err)
	}
	if _, err := a.q.PostSend(make([]verbs.Work, 33)); !errors.Is(err, verbs.ErrFull) {
		t.Errorf("33 sends of 32: %v", err)
	}
	if err := a.q.PostReceive(make([]uint64, 33)); !errors.Is(err, verbs.ErrFull) {
		t.Errorf("33 receives of 32: %v", err)
	}
}

func second(_ int, err error) error { return err }

// TestHops: each hop can be stopped by itself, and what hardware promises holds whichever is.
func TestHops(t *testing.T) {
	type seen struct{ bytes, completed, answered bool }
	for _, c := range []struct {
		hop      Hop
		receiver bool // it is of the receiving queue pair
		want     seen
	}{
		{Read, false, seen{}},
		{Arrive, false, seen{}},
		{Show, true, seen{answered: true}}, // complete to the sender, and not a byte is there
		{Complete, true, seen{bytes: true, answered: true}},
		{Answer, false, seen{bytes: true, completed: true}},
	} {
		f, a, b := newPair(t)
		if err := b.q.PostReceive([]uint64{50}); err != nil {
			t.Fatal(err)
		}
		look := func() seen {
			return seen{bytes.Equal(b.mem[:100], a.mem[:100]), len(b.poll(t)) == 1, len(a.poll(t)) == 2}
		}
		stopped := a.q.Num()
		if c.receiver {
			stopped = b.q.Num()
		}
		f.Hold(stopped, c.hop)
		post(t, a, write(a, b, 1, 0, 100, false), write(a, b, 2, 1000, 24, true))
		f.Run()
		if got := look(); got != c.want {
			t.Errorf("stopped at hop %d: %+v, want %+v", c.hop, got, c.want)
		}
		f.Release(stopped)
		f.Run()
		if got, want := look(), (seen{true, !c.want.completed, !c.want.answered}); got != want {
			t.Errorf("hop %d goes on: %+v, want %+v", c.hop, got, want)
		}
	}
}

// race is what was seen in one seeded run of two queue pairs between two ends: writes and an
// immediate behind them on the first, an immediate on the second, posted when the first one's
// writes were complete to the sender.
type race struct {
	early   bool // a write was complete to the sender, and its bytes were not there
	swapped bool // of two writes the later one was there first
	// the second queue pair's immediate completed before the first one's bytes were there
	elsewhere bool
	own       bool // and so was the first one's
	steps     int
}

func runRace(t *testing.T, seed uint64, unordered bool) (r race) {
	f, a, b := newPair(t)
	if unordered {
		f.Unordered("a")
		f.Unordered("b")
	}
	f.Shuffle(seed)
	a2, b2 := newEnd(t, a.d), newEnd(t, b.d)
	a2.connect(t, b2)
	b2.connect(t, a2)
	if err := errors.Join(b.q.PostReceive([]uint64{50}), b2.q.PostReceive([]uint64{51})); err != nil {
		t.Fatal(err)
	}
	var works []verbs.Work
	const n, each = 8, 128
	for i := range uint32(n) {
		works = append(works, write(a, b, uint64(i+1), i*each, each, false))
	}
	over := write(a, b, n+1, 0, 8, false) // over the first one: it is later, so it stays
	over.LocalAddr += 2000
	post(t, a, append(works, over)...)
	there := func(i int) bool {
		return b.mem[i*each+each-1] == a.mem[i*each+each-1] &&
			b.mem[i*each+9] != 0
	}
	all := func() bool {
		for i := range n {
			if !there(i) {
				return false
			}
		}
		return b.mem[1] == a.mem[2001]
	}
	done, completed := 0, false
	for f.Step() {
		r.steps++
		for _, c := range a.poll(t) {
			if done++; c.Status != verbs.OK || c.ID != uint64(done) {
				t.Fatalf("seed %d: %+v, the answer to %d was due", seed, c, done)
			}
			if done <= n && !there(done-1) {
				r.early = true
			}
			if done == n+1 {
				post(t, a, write(a, b, n+2, 2048, 0, true))
				post(t, a2, write(a2, b2, 1, 0, 0, true))
			}
		}
		for i := range n - 1 {
			r.swapped = r.swapped || there(i+1) && !there(i)
		}
		complete := all()
		r.elsewhere = r.elsewhere || len(b2.poll(t)) > 0 && !complete
		if !completed && len(b.poll(t)) > 0 {
			completed = true
			r.own = !complete
		}
	}
	if !all() || !completed {
		t.Fatalf("seed %d: it ends with bytes missing, or no completion", seed)
	}
	return r
}

// TestSeededOrder: over some seeds everything is seen that hardware leaves open, and in none what
// it rules out.
func TestSeededOrder(t *testing.T) {
	const seeds = 200
	var ordered, unordered [4]int
	count := func(c *[4]int, r race) {
		for i, seen := range []bool{r.early, r.swapped, r.elsewhere, r.own} {
			if seen {
				c[i]++
			}
		}
	}
	for seed := range uint64(seeds) {
		r := runRace(t, seed, false)
		if again := runRace(t, seed, false); again != r {
			t.Fatalf("seed %d: %+v, and again %+v", seed, r, again)
		}
		count(&ordered, r)
		count(&unordered, runRace(t, seed, true))
	}
	t.Logf(
		"complete before its bytes, swapped, elsewhere before, completed before: %d, unordered %d of %d",
		ordered, unordered, seeds)
	if ordered[3] > 0 {
		t.Errorf("an immediate completed %d times before the bytes ahead of it on its queue pair",
			ordered[3])
	}
	for i, n := range ordered[:3] {
		if n < seeds/20 {
			t.Errorf("race %d was seen in %d of %d runs", i, n, seeds)
		}
	}
	if unordered[3] < seeds/20 {
		t.Errorf("without order an immediate came before the bytes in %d of %d runs", unordered[3], seeds)
	}
}

// TestSeededEnds: what a receiver may rely on to get its memory back. Behind a flush that it was
// completed, behind the end of a key, and behind the end of a queue pair, not a byte comes any
// more, whatever lagged.
func TestSeededEnds(t *testing.T) {
	for name, end := range map[string]func(t *testing.T, f *Fabric, b *end){
		"flush": func(t *testing.T, f *Fabric, b *end) {
			if err := b.q.ToError(); err != nil {
				t.Fatal(err)
			}
			for len(b.poll(t)) == 0 {
				if !f.Step() {
					t.Fatal("never flushed")
				}
			}
		},
		"key": func(t *testing.T, _ *Fabric, b *end) {
			if err := b.m.Close(); err != nil {
				t.Fatal(err)
			}
		},
		"queue pair": func(t *testing.T, _ *Fabric, b *end) {
			if err := b.q.Close(); err != nil {
				t.Fatal(err)
			}
		},
		"reset": func(t *testing.T, _ *Fabric, b *end) {
			if err := b.q.ToReset(); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			late := 0
			for seed := range uint64(200) {
				f, a, b := newPair(t)
				if f.Shuffle(seed); seed%3 == 0 {
					f.Lag(a.q.Num())
				}
				if err := b.q.PostReceive([]uint64{50}); err != nil {
					t.Fatal(err)
				}
				for i := range uint32(16) {
					post(t, a, write(a, b, uint64(i+1), i*64, 64, false))
				}
				for range seed % 60 {
					f.Step()
				}
				late += f.Held(a.q.Num())
				end(t, f, b)
				clear(b.mem)
				f.Run()
				if !bytes.Equal(b.mem, make([]byte, len(b.mem))) {
					t.Fatalf("seed %d: bytes came behind the end", seed)
				}
			}
			if late == 0 {
				t.Error("nothing was under way at any end: this proves nothing")
			}
		})
	}
}

// TestStaleLife: what is left on the wire of a connection that was reset at the receiver does not
// arrive in the next one.
func TestStaleLife(t *testing.T) {
	f, a, b := newPair(t)
	f.Hold(a.q.Num())
	post(t, a, write(a, b, 1, 0, 64, false))
	f.Run()
	if err := errors.Join(a.q.ToReset(), b.q.ToReset()); err != nil {
		t.Fatal(err)
	}
	a.connect(t, b)
	b.connect(t, a)
	post(t, a, write(a, b, 1, 128, 64, false))
	f.Release(a.q.Num())
	f.Run()
	if got := a.poll(t); len(got) != 1 || got[0].Status != verbs.OK {
		t.Fatalf("%+v", got)
	}
	if b.mem[1] != 0 || b.mem[129] != a.mem[129] {
		t.Fatal("bytes of the former connection, or none of this one")
	}
}
