package object_test

import (
	"errors"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/store/object"
	"github.com/kvspray/kvspray/store/object/objecttest"
	"github.com/kvspray/kvspray/store/page"
)

// Credentials that expire are shown, stop nothing, and are forgotten once they are renewed.
func TestRefusalsEnd(t *testing.T) {
	s := objecttest.New()
	n := start(t, s)
	defer n.close()
	n.add(n.o, 0, 4)
	n.flush()
	b := n.owner("b")
	for _, op := range []string{"get", "put", "put and delete"} {
		n.add(b, 20, 24)
		n.flush()
		s.Fail(refuse(op))
		switch op {
		case "get":
			if good(n.read(n.o, 0, 4)) > 0 {
				t.Fatal("a page was read")
			}
		case "put":
			if err := n.tier.Remove(t.Context(), ns("b")); err == nil {
				t.Fatal("a removal was acknowledged that is not durable")
			}
		default:
			n.add(b, 10, 14)
			n.flush()
		}
		if st := n.tier.Stats(); !strings.Contains(st.Problem, "renew them") {
			t.Errorf("%s: %+v", op, st)
		}
		s.Fail(nil)
		eventually(t, "it is asked again", func() bool { return good(n.read(n.o, 0, 4)) == 4 })
		if err := n.tier.Remove(t.Context(), ns("b")); err != nil {
			t.Errorf("%s: %v", op, err)
		}
		eventually(t, "the problem is over", func() bool { return n.tier.Stats().Problem == "" })
	}
}

// An object store that goes away while the node runs is a problem, until it answers again. A single
// request that fails is none.
func TestAnObjectStoreThatGoesAway(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		s := objecttest.New()
		n := start(t, s, impatient)
		defer n.close()
		n.add(n.o, 0, 4)
		n.flush()
		var left atomic.Int64
		s.Fail(func(string, string) objecttest.Fault {
			if left.Add(-1) < 0 {
				return objecttest.Fault{}
			}
			return objecttest.Fault{Err: errors.New("503 slow down")}
		})
		left.Store(1)
		n.read(n.o, 0, 1)
		if st := n.tier.Stats(); st.Problem != "" {
			t.Errorf("after one failure: %s", st.Problem)
		}
		left.Store(1 << 40)
		eventually(t, "the problem is shown", func() bool {
			n.read(n.o, 0, 4)
			return strings.Contains(n.tier.Stats().Problem, "503 slow down")
		})
		left.Store(0)
		eventually(t, "the problem is over", func() bool {
			n.read(n.o, 0, 4)
			return n.tier.Stats().Problem == ""
		})
	})
}

// Pages in buffers can be read while the object store does not answer, and reads of them do not end
// the pause.
func TestBuffersWhileAway(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		s := objecttest.New()
		n := start(t, s, impatient)
		defer n.close()
		n.add(n.o, 0, 4)
		n.flush()
		s.Fail(func(string, string) objecttest.Fault { return objecttest.Fault{Err: errors.New("503")} })
		defer s.Fail(nil)
		n.add(n.o, 10, 15)
		n.read(n.o, 0, 4)
		all(t, n.read(n.o, 10, 15), nil)
		all(t, n.read(n.o, 0, 4), object.ErrAway)
		found := page.NewBitmap(20)
		n.o.Exists(keys(0, 20), found)
		for i, k := range keys(0, 20) {
			want := i >= 10 && i < 15
			if found.Get(i) != want || n.o.Has(&k) != want {
				t.Errorf("page %d: exists %v, has %v", i, found.Get(i), n.o.Has(&k))
			}
		}
	})
}

// Each read has one more page that differs at first, until the time is over: no page was found
// damaged.
func TestTimeoutAfterDifference(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		s := objecttest.New()
		n := start(t, s, impatient)
		defer n.close()
		n.add(n.o, 0, 10)
		n.flush()
		s.Fail(func(string, string) objecttest.Fault { return objecttest.Fault{Flip: size + 5} })
		errs := n.read(n.o, 0, 10)
		if got := good(errs); got == 0 || got == 10 {
			t.Fatalf("%d pages were read", got)
		}
		for i, err := range errs {
			if errors.Is(err, object.ErrDamaged) {
				t.Errorf("page %d: %v", i, err)
			}
		}
		s.Fail(nil)
		eventually(t, "it is asked again", func() bool { return good(n.read(n.o, 0, 10)) == 10 })
		if st := n.tier.Stats(); st.Damaged > 0 || st.Missing > 0 {
			t.Errorf("%+v", st)
		}
	})
}
