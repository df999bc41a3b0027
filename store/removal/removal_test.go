package removal

import (
	"bytes"
	"errors"
	"maps"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/kvspray/kvspray/store/page"
)

var now = time.Unix(1_800_000_000, 0)

func id(n int) page.ID { return page.ID{byte(n), byte(n >> 8)} }

func learn(t *testing.T, l *List, n int, stamp uint64) bool {
	t.Helper()
	isNew, err := l.Learn(Removal{id(n), stamp}, now)
	if err != nil {
		t.Fatal(err)
	}
	return isNew
}

func TestALaterRemovalWins(t *testing.T) {
	l := NewList()
	first := l.Next(id(1), now)
	if !learn(t, l, 1, first) || learn(t, l, 1, first) || learn(t, l, 1, first-1) {
		t.Fatal("a removal is new once")
	}
	if l.Known(id(1)) != first || l.Applied(id(1)) != 0 || len(l.Pending()) != 1 {
		t.Fatalf("%+v", l)
	}
	second := l.Next(id(1), now)
	if second <= first {
		t.Fatalf("%d is not later than %d", second, first)
	}
	if !learn(t, l, 1, second) {
		t.Fatal("not taken")
	}
	l.Apply(Removal{id(1), first})
	if l.Applied(id(1)) != first || len(l.Pending()) != 1 {
		t.Fatal("the removal that came meanwhile is not pending")
	}
	l.Apply(Removal{id(1), second})
	l.Apply(Removal{id(1), first})
	l.Apply(Removal{id(1), second + 5}) // not known
	l.Apply(Removal{id(2), second})
	if l.Applied(id(1)) != second || len(l.Pending()) != 0 || l.Len() != 1 {
		t.Fatalf("%+v", l)
	}
}

func TestStampsOutOfTime(t *testing.T) {
	l := NewList()
	at := uint64(now.UnixNano())
	if _, err := l.Learn(Removal{id(1), at + uint64(MaxAhead) + 1}, now); !errors.Is(err, ErrAhead) {
		t.Errorf("far ahead: %v", err)
	}
	if isNew, err := l.Learn(Removal{id(1), at - uint64(Keep) - 1}, now); isNew || err != nil {
		t.Errorf("forgotten everywhere: %v %v", isNew, err)
	}
	ahead := at + uint64(MaxAhead)
	if !learn(t, l, 1, ahead) {
		t.Error("a clock that is a little ahead")
	}
	// A later removal wins over it, whatever the clock's time. Nodes that have the first take it.
	next := l.Next(id(1), now)
	if next <= ahead || next > ahead+1+spread {
		t.Errorf("%d after %d", next, ahead)
	}
	if !learn(t, l, 1, next) {
		t.Error("a stamp that was raised is not taken")
	}
	if _, err := l.Learn(Removal{id(1), next + spread + 2}, now); !errors.Is(err, ErrAhead) {
		t.Errorf("raised further: %v", err)
	}
	ahead = next
	// It is forgotten with time, once it is applied.
	later := now.Add(Keep + MaxAhead + 2*spread)
	if _, err := l.Learn(Removal{id(2), uint64(later.UnixNano())}, later); err != nil || l.Len() != 2 {
		t.Errorf("%v, %d", err, l.Len())
	}
	l.Apply(Removal{id(1), ahead})
	if _, err := l.Learn(Removal{id(3), uint64(later.UnixNano())}, later); err != nil || l.Len() != 2 {
		t.Errorf("%v, %d", err, l.Len())
	}
}

// A list that is full forgets the earliest removal that is applied, and never one that is not.
func TestListIsBounded(t *testing.T) {
	l := NewList()
	at := uint64(now.UnixNano())
	for i := range Max {
		if l.Full(now) {
			t.Fatal("full")
		}
		learn(t, l, i, at+uint64(i))
	}
	if !l.Full(now) {
		t.Fatal("not full")
	}
	if isNew, err := l.Learn(Removal{id(Max), at + Max}, now); isNew || !errors.Is(err, ErrFull) {
		t.Errorf("nothing is applied: %v %v", isNew, err)
	}
	for i := 10; i < 20; i++ {
		l.Apply(Removal{id(i), at + uint64(i)})
	}
	if _, err := l.Learn(Removal{id(Max), at + 5}, now); !errors.Is(err, ErrFull) {
		t.Errorf("all that are applied are later: %v", err)
	}
	for i := range 10 {
		if !learn(t, l, Max+i, at+uint64(Max+i)) || l.Len() != Max || l.Known(id(10+i)) != 0 {
			t.Fatalf("%d: %d", i, l.Len())
		}
	}
	if _, err := l.Learn(Removal{id(3 * Max), at + 3*Max}, now); !errors.Is(err, ErrFull) {
		t.Error(err)
	}
	if !learn(t, l, 1, at+3*Max) || len(l.Pending()) != Max { // one that it has needs no room
		t.Errorf("%d are pending", len(l.Pending()))
	}
}

func TestEncode(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := NewList()
		for range rapid.IntRange(0, 20).Draw(t, "n") {
			r := Removal{id(rapid.IntRange(0, 9).Draw(t, "id")), uint64(now.UnixNano()) +
				rapid.Uint64Range(0, 99).Draw(t, "stamp")}
			if _, err := l.Learn(r, now); err != nil {
				t.Fatal(err)
			}
			if rapid.Bool().Draw(t, "apply") {
				l.Apply(r)
			}
		}
		back, err := Parse(l.Encode())
		if err != nil || !maps.Equal(back.entries, l.entries) {
			t.Fatalf("%v: %+v, %+v", err, back, l)
		}
		for id, e := range l.entries {
			if e.applied > e.known {
				t.Fatalf("%v %+v", id, e)
			}
		}
	})
}

func FuzzParse(f *testing.F) {
	l := NewList()
	_, _ = l.Learn(Removal{id(3), 7}, time.Unix(0, 7))
	f.Add(l.Encode())
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		l, err := Parse(b)
		if err != nil {
			return
		}
		if l.Len() > Max {
			t.Fatal(l.Len())
		}
		if again, err := Parse(l.Encode()); err != nil || !bytes.Equal(again.Encode()[:headBytes],
			l.Encode()[:headBytes]) {
			t.Fatal(err)
		}
	})
}
