package object_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/kvspray/kvspray/store/object"
	"github.com/kvspray/kvspray/store/object/objecttest"
)

const maxSpaces = 1024

// away opens a tier over a store that does not answer until Fail is called again.
func away(t *testing.T, s *objecttest.Store) *node {
	t.Helper()
	down := errors.New("down")
	s.Fail(func(string, string) objecttest.Fault { return objecttest.Fault{Err: down} })
	c := config(s.Open())
	c.Timeouts.Open = 100 * time.Millisecond
	tier, err := object.Open(c)
	if err != nil {
		t.Fatal(err)
	}
	return &node{t: t, tier: tier}
}

// A removal that was asked for before the ledger could be read counts once it is, and leaves other
// namespaces alone.
func TestRemovalBeforeTheLedgerIsRead(t *testing.T) {
	s := objecttest.New()
	n := start(t, s)
	n.add(n.o, 0, 4)
	n.add(n.owner("b"), 10, 14)
	n.close()
	n = away(t, s)
	for i := range 2 * maxSpaces {
		if err := n.tier.Remove(t.Context(), ns(fmt.Sprint("late", i%maxSpaces))); !errors.Is(err,
			object.ErrAway) {
			t.Fatal(err)
		}
		if i == 0 {
			n.owner("b")
			if err := n.tier.Remove(t.Context(), ns("b")); !errors.Is(err, object.ErrAway) {
				t.Fatal(err)
			}
		}
	}
	n.o = n.owner("a")
	s.Fail(nil)
	if err := n.tier.Ready(t.Context()); err != nil {
		t.Fatal(err)
	}
	all(t, n.read(n.o, 0, 4), nil)
	all(t, n.read(n.owner("b"), 10, 14), object.ErrMissing)
	n.close()
	n = start(t, s)
	defer n.close()
	all(t, n.read(n.o, 0, 4), nil)
	all(t, n.read(n.owner("b"), 10, 14), object.ErrMissing)
}

// A ledger that is written while its answers are lost is this process's own afterwards.
func TestLedgerAnswerLost(t *testing.T) {
	s := objecttest.New()
	n := start(t, s)
	n.add(n.o, 0, 4)
	n.flush()
	b := n.owner("b")
	n.add(b, 4, 8)
	n.flush()
	first, down := true, errors.New("down")
	s.Fail(func(op, _ string) objecttest.Fault {
		if op == "put" && first {
			first = false
			return objecttest.Fault{Lost: down}
		}
		return objecttest.Fault{Err: down}
	})
	if err := n.tier.Remove(t.Context(), ns("b")); !errors.Is(err, down) {
		t.Fatalf("%v", err)
	}
	s.Fail(nil)
	if err := n.tier.Remove(t.Context(), ns("a")); err != nil {
		t.Error(err)
	}
	if st := n.tier.Stats(); st.Problem != "" || !st.Ready {
		t.Errorf("%+v", st)
	}
	n.close()
	n = start(t, s)
	defer n.close()
	all(t, n.read(n.o, 0, 4), object.ErrMissing)
}
