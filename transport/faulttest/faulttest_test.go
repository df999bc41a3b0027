package faulttest

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
	"github.com/kvspray/kvspray/transport/transporttest"
)

// TestScript looks at each fault by itself: how the slice ends, what the receiver has, and that
// only the scripted one suffers.
func TestScript(t *testing.T) {
	const late = 20 * time.Millisecond
	for _, c := range []struct {
		rule    Rule
		outcome transfer.Outcome
		reason  transfer.Reason
		landed  bool // at the receiver, when the result comes
		after   time.Duration
	}{
		{Rule{Kind: Error, Reason: transfer.ReasonMemory}, transfer.NotLanded,
			transfer.ReasonMemory, false, 0},
		{Rule{Kind: Delay, After: late}, transfer.Landed, transfer.ReasonNone, true, late},
		{Rule{Kind: DelayResult, After: late}, transfer.Landed, transfer.ReasonNone, true, late},
		{Rule{Kind: Drop, After: late}, transfer.InDoubt, transfer.ReasonTimeout, false, late},
		{Rule{Kind: DropResult, After: late}, transfer.InDoubt, transfer.ReasonTimeout, true, late},
		{Rule{Kind: Partial}, transfer.InDoubt, transfer.ReasonTimeout, false, 0},
		{Rule{Kind: Duplicate}, transfer.Landed, transfer.ReasonNone, true, 0},
		{Rule{Kind: FalseLanded}, transfer.Landed, transfer.ReasonNone, false, 0},
		{Rule{Kind: LateWrite, AfterFence: true}, transfer.NotLanded, transfer.ReasonNone, false, 0},
		{Rule{Kind: Stuck, After: late}, transfer.Landed, transfer.ReasonNone, true, late},
	} {
		t.Run(c.rule.Kind.String(), func(t *testing.T) {
			c.rule.At = []int{2}
			plan := New(1, c.rule)
			p := transporttest.NewPair(t, func(tb testing.TB) transport.Backend {
				return Wrap(bases[2].make(tb), plan)
			})
			l, _ := p.Dial()
			s := transporttest.Shape{Chunks: 12, BlockBytes: 16 << 10}
			src, dst := transporttest.NewMemory(t, s), transporttest.NewMemory(t, s)
			src.Write(9)
			b := transporttest.NewBind(t, p.A, p.B, src, dst, 1, 1)
			b.Dest.Seed.Store(9)
			for i := range uint32(3) {
				began := time.Now()
				res := p.A.MoveWait(l, b.Origin, transfer.Range{First: 4 * i, Count: 4}, 1)
				if i != 1 {
					if res.Outcome != transfer.Landed {
						t.Fatalf("slice %d, which is not in the script: %s %s", i, res.Outcome, res.Reason)
					}
					continue
				}
				if res.Outcome != c.outcome || res.Reason != c.reason || res.Range.Count != 4 || res.Took <= 0 {
					t.Errorf("ended %s %s with %d chunks after %s: want %s %s", res.Outcome, res.Reason,
						res.Range.Count, res.Took, c.outcome, c.reason)
				}
				if (res.Outcome != transfer.Landed) != errors.Is(res.Err, ErrInjected) {
					t.Errorf("error %v", res.Err)
				}
				if d := time.Since(began); d < c.after {
					t.Errorf("came after %s, want %s at least", d, c.after)
				}
				has := 0
				for chunk := 4; chunk < 8; chunk++ {
					if _, ok := dst.Holds(9, chunk); ok {
						has++
					}
				}
				want := 0
				if c.landed {
					want = 4
				} else if c.rule.Kind == Partial {
					want = 2
				}
				if has != want {
					t.Errorf("%d chunks are there, want %d", has, want)
				}
			}
			if n := plan.Injected(c.rule.Kind); n != 1 {
				t.Errorf("injected %d times", n)
			}
			if c.rule.Kind == Duplicate { // which lands, unless the fence comes first
				until(t, "extra slices have ended", plan.Quiet)
			}
			b.End(t)
			until(t, "extra slices have ended", plan.Quiet)
			ends := map[Kind]transfer.Outcome{Duplicate: transfer.Landed, LateWrite: transfer.Rejected}
			if want := ends[c.rule.Kind]; want != 0 {
				if n := plan.Extra(c.rule.Kind, want) + plan.Extra(c.rule.Kind, transfer.NotLanded); n != 1 {
					t.Errorf("%d extra slices ended %s", n, want)
				}
			}
		})
	}
}

// TestStuckKeepsHalf: a lane that is stuck when half a slice has landed does not make a whole one
// of it.
func TestStuckKeepsHalf(t *testing.T) {
	plan := New(1, Rule{Kind: Partial, At: []int{1}}, Rule{Kind: Stuck, At: []int{1},
		After: 20 * time.Millisecond})
	p := transporttest.NewPair(t, func(tb testing.TB) transport.Backend {
		return Wrap(bases[2].make(tb), plan)
	})
	l, _ := p.Dial()
	s := transporttest.Shape{Chunks: 8, BlockBytes: 16 << 10}
	src, dst := transporttest.NewMemory(t, s), transporttest.NewMemory(t, s)
	b := transporttest.NewBind(t, p.A, p.B, src, dst, 1, 1)
	half := p.A.Move(l, b.Origin, transfer.Range{First: 0, Count: 4}, 1)
	stuck := p.A.Move(l, b.Origin, transfer.Range{First: 4, Count: 4}, 1)
	if r := <-half; r.Outcome != transfer.InDoubt || r.Reason != transfer.ReasonTimeout {
		t.Errorf("half a slice ended %s %s", r.Outcome, r.Reason)
	}
	if r := <-stuck; r.Outcome != transfer.Landed {
		t.Errorf("the slice that stuck ended %s %s", r.Outcome, r.Reason)
	}
	if plan.Injected(Partial) != 1 || plan.Injected(Stuck) != 1 {
		t.Errorf("injected: %d partial, %d stuck", plan.Injected(Partial), plan.Injected(Stuck))
	}
	b.End(t)
}

// TestStuckUntilClosed: what a stuck lane holds, and what it swallowed the result of, ends with the
// lane.
func TestStuckUntilClosed(t *testing.T) {
	plan := New(1, Rule{Kind: Stuck, At: []int{3}}, Rule{Kind: DelayResult, At: []int{1},
		After: time.Hour}, Rule{Kind: Drop, At: []int{1}})
	p := transporttest.NewPair(t, func(tb testing.TB) transport.Backend {
		return Wrap(bases[2].make(tb), plan)
	})
	l, _ := p.Dial()
	s := transporttest.Shape{Chunks: 8, BlockBytes: 16 << 10}
	src, dst := transporttest.NewMemory(t, s), transporttest.NewMemory(t, s)
	b := transporttest.NewBind(t, p.A, p.B, src, dst, 1, 1)
	var got []<-chan transport.Result
	// a late result, a drop, two that stick; the first rule that fires decides
	for i := range uint32(5) {
		got = append(got, p.A.Move(l, b.Origin, transfer.Range{First: i, Count: 1}, 1))
	}
	for i, c := range got {
		select {
		case r := <-c:
			t.Fatalf("slice %d ended %s", i, r.Outcome)
		default:
		}
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	want := []transfer.Outcome{transfer.InDoubt, transfer.InDoubt, transfer.NotLanded,
		transfer.NotLanded, transfer.NotLanded}
	for i, c := range got {
		select {
		case r := <-c:
			if r.Outcome != want[i] || r.Reason != transfer.ReasonLaneLost {
				t.Errorf("slice %d: %s %s, want %s", i, r.Outcome, r.Reason, want[i])
			}
		case <-time.After(patience):
			t.Fatalf("slice %d never ended", i)
		}
	}
	b.End(t)
}

// TestHold: a slice that is held is in flight for its sender, and leaves once its grant is fenced,
// or when it is released.
func TestHold(t *testing.T) {
	for _, fenced := range []bool{true, false} {
		plan := New(1, Rule{Kind: Hold, At: []int{1, 2}})
		p := transporttest.NewPair(t, func(tb testing.TB) transport.Backend {
			return Wrap(bases[2].make(tb), plan)
		})
		l, _ := p.Dial()
		s := transporttest.Shape{Chunks: 8, BlockBytes: 16 << 10}
		src, dst := transporttest.NewMemory(t, s), transporttest.NewMemory(t, s)
		src.Write(9)
		b := transporttest.NewBind(t, p.A, p.B, src, dst, 1, 1)
		held := []<-chan transport.Result{p.A.Move(l, b.Origin, transfer.Range{First: 0, Count: 4}, 1),
			p.A.Move(l, b.Origin, transfer.Range{First: 4, Count: 4}, 1)}
		if res := p.A.MoveWait(l, b.Origin, transfer.Range{First: 0, Count: 4}, 2); res.Outcome !=
			transfer.Landed {
			t.Errorf("the slice behind those that are held ended %s %s", res.Outcome, res.Reason)
		}
		if n := plan.Held(); n != 2 {
			t.Errorf("%d slices held, want 2", n)
		}
		for _, c := range held {
			select {
			case res := <-c:
				t.Errorf("a slice that is held ended %s %s", res.Outcome, res.Reason)
			default:
			}
		}
		want := transfer.Landed
		if fenced {
			want = transfer.Rejected
			b.Fence(t)
		} else {
			plan.Release()
		}
		for _, c := range held {
			select {
			case res := <-c:
				if res.Outcome != want {
					t.Errorf("fenced %v: ended %s %s, want %s", fenced, res.Outcome, res.Reason, want)
				}
			case <-time.After(patience):
				t.Fatal("a slice never ended")
			}
		}
		if n := plan.Held(); n != 0 {
			t.Errorf("%d slices held in the end", n)
		}
		b.End(t)
	}
}

// TestSeed: the same seed draws the same faults, another seed others.
func TestSeed(t *testing.T) {
	draws := func(seed uint64) (out []int) {
		p := New(seed, Rule{Kind: Error, Prob: 0.2, Max: 10}, Rule{Kind: Delay, Prob: 0.2,
			Only: func(_ transport.Lane, s transport.Slice) bool { return s.Attempt == 1 }})
		for i := range uint32(200) {
			k := 0
			if r := p.draw(nil, transport.Slice{Attempt: 1 + i%2, Range: transfer.Range{Count: 2}}); r !=
				nil {
				k = int(r.Kind)
				if r.Kind == Delay && i%2 == 1 {
					t.Fatal("a slice outside of the rule")
				}
			}
			out = append(out, k)
		}
		return out
	}
	a := draws(1)
	if !slices.Equal(a, draws(1)) {
		t.Error("one seed, two sequences")
	}
	if slices.Equal(a, draws(2)) {
		t.Error("two seeds, one sequence")
	}
	errs := 0
	for _, k := range a {
		if k == int(Error) {
			errs++
		}
	}
	if errs != 10 {
		t.Errorf("%d errors, at most 10", errs)
	}
}
