package fake

import (
	"bytes"
	"errors"
	"testing"

	"github.com/kvspray/kvspray/internal/verbs"
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
	if err := errors.Join(e.q.ToInit(), e.q.ToReadyToReceive(o.q.Address()), e.q.ToReadyToSend()); err != nil {
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
	w := verbs.Work{ID: id, Op: verbs.Write, LocalAddr: a.m.Addr() + uint64(off), LocalKey: a.m.LocalKey(), Len: n,
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
		if got := b.poll(t); len(got) > 0 && (got[0].ID != 50 || got[0].Imm != 7<<16|3 || !bytes.Equal(b.mem[:100], a.mem[:100])) {
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

// TestLateWriteAfterTimeout is the worst case of the field: the sender's completion says failure, the blocks are about to be
// reused, and the bytes are still on the wire. The sender's error stops nothing; the receiver's does.
func TestLateWriteAfterTimeout(t *testing.T) {
	for _, fenced := range []bool{false, true} {
		f, a, b := newPair(t)
		f.Hold(a.q.Num())
		post(t, a, write(a, b, 1, 0, 64, false))
		f.Run()
		f.TimeOut(a.q.Num())
		if got := a.poll(t); len(got) != 1 || got[0].Status != verbs.RetryExceeded || a.q.State() != verbs.Error {
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
			if len(got) != 2 || got[0].Status != c.want || got[1].Status != verbs.Flushed || a.q.State() != verbs.Error {
				t.Fatalf("%+v in %s", got, a.q.State())
			}
			if !bytes.Equal(b.mem, make([]byte, len(b.mem))) {
				t.Fatal("something was written")
			}
			// Posting in the error state is taken and flushed.
			post(t, a, write(a, b, 3, 0, 8, false))
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
