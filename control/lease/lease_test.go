package lease

import (
	"errors"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/kvspray/kvspray/transfer"
)

func boot(b byte) (x transfer.Boot) {
	x[0] = b
	return x
}

func TestReleaseRule(t *testing.T) {
	for _, c := range []struct {
		e    Exposure
		want bool
	}{
		{Exposure{}, true},
		{Exposure{Granted: true}, false},
		{Exposure{Granted: true, Fenced: true}, true},
		{Exposure{Granted: true, Exited: true}, true},
		{Exposure{Granted: true, Fenced: true, Exited: true}, true},
		{Exposure{Fenced: true}, true},
	} {
		if got := MayRelease(c.e); got != c.want {
			t.Errorf("MayRelease(%+v) = %v, want %v", c.e, got, c.want)
		}
	}
}

// Every call in every state of a destination lease.
func TestDestTransitions(t *testing.T) {
	ops := map[string]func(*Dest) error{
		"grant":       func(d *Dest) error { return d.Grant(boot(1), 1, 1) },
		"bind":        func(d *Dest) error { return d.Bind(transfer.LeaseID{ID: 9}) },
		"close":       func(d *Dest) error { _, err := d.Close(false); return err },
		"close-final": func(d *Dest) error { _, err := d.Close(true); return err },
		"fenced":      (*Dest).Fenced,
		"complete":    (*Dest).Complete,
	}
	none := DestState(255)
	reach := map[DestState][]string{
		DestWaiting: nil, DestGranted: {"grant"}, DestLanding: {"grant", "bind"}, DestClosing: {"grant",
			"close-final"},
		DestFenced: {"grant", "close-final", "fenced"}, DestCompleted: {"grant", "close-final", "fenced",
			"complete"},
	}
	next := map[DestState]map[string]DestState{
		DestWaiting: {"grant": DestGranted, "bind": none, "close": DestWaiting,
			"close-final": DestFenced, "fenced": none, "complete": none},
		DestGranted: {"grant": none, "bind": DestLanding, "close": DestClosing,
			"close-final": DestClosing, "fenced": none, "complete": none},
		DestLanding: {"grant": none, "bind": none, "close": DestClosing, "close-final": DestClosing,
			"fenced": none, "complete": none},
		DestClosing: {"grant": none, "bind": none, "close": DestClosing, "close-final": DestClosing,
			"fenced": DestFenced, "complete": none},
		DestFenced: {"grant": none, "bind": none, "close": none, "close-final": none, "fenced": none,
			"complete": DestCompleted},
		DestCompleted: {"grant": none, "bind": none, "close": none, "close-final": none, "fenced": none,
			"complete": none},
	}
	for state, path := range reach {
		for op, want := range next[state] {
			d := &Dest{}
			for _, p := range path {
				if err := ops[p](d); err != nil {
					t.Fatal(err)
				}
			}
			if d.State != state {
				t.Fatalf("path %v leads to %v, want %v", path, d.State, state)
			}
			err := ops[op](d)
			if refused := want == none; refused != (err != nil) || refused && !errors.As(err,
				new(*StateError)) {
				t.Errorf("%s in %s: %v", op, state, err)
			}
			if want == none {
				want = state
			}
			if d.State != want {
				t.Errorf("%s in %s leads to %s, want %s", op, state, d.State, want)
			}
		}
	}
	// A fence that is not final leads back to the waiting state, and never to completion.
	d := &Dest{}
	for _, p := range []string{"grant", "close", "fenced"} {
		if err := ops[p](d); err != nil {
			t.Fatal(err)
		}
	}
	if d.State != DestWaiting || d.Complete() == nil {
		t.Errorf("after a fence for another grant: %s", d.State)
	}
}

func TestSource(t *testing.T) {
	a, b, c := GrantID{boot(1), transfer.LeaseID{ID: 1}}, GrantID{boot(1), transfer.LeaseID{ID: 2}},
		GrantID{boot(2), transfer.LeaseID{ID: 1}}
	s := &Source{Fanout: 2}
	if s.Complete() == nil {
		t.Error("an open lease completes")
	}
	one := func(s *Source, g GrantID) error { return s.Bind(g, TeamID{byte(g.Dest.ID), g.Peer[0]}, 1) }
	for _, g := range []GrantID{a, b} {
		if err := one(s, g); err != nil {
			t.Fatal(err)
		}
		s.OriginOpened()
	}
	if err := one(s, c); !errors.Is(err, ErrLimit) {
		t.Errorf("a third grant of two: %v", err)
	}
	if err := one(s, a); err != nil {
		t.Errorf("a grant that comes again: %v", err)
	}
	if first, again := s.End(a, true), s.End(a, true); first || again {
		t.Error("done with one of two, or one ended twice")
	}
	if !s.End(b, false) || s.Served != 1 {
		t.Errorf("not done with both ended, or served %d", s.Served)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if s.Complete() == nil {
		t.Error("complete with origins open")
	}
	s.OriginClosed()
	s.OriginClosed()
	if err := s.Complete(); err != nil {
		t.Error(err)
	}
	if s.Complete() == nil || s.Close() == nil || one(s, c) == nil {
		t.Error("a complete lease moves on")
	}
	n := &Source{Fanout: 4}
	_ = one(n, a) // room is certain
	if n.Narrow() || n.Room(TeamID{9}) || !n.End(a, true) {
		t.Error("narrowed to the one grant that is here, it is done when that ends")
	}
}

// A request of several receivers takes one place of a source, which is free when all of them have
// ended.
func TestTeams(t *testing.T) {
	g := func(id uint64) GrantID { return GrantID{boot(1), transfer.LeaseID{ID: id}} }
	x, y := TeamID{1}, TeamID{2}
	s := &Source{Fanout: 1}
	for id := range uint64(3) {
		if err := s.Bind(g(id), x, 3); err != nil {
			t.Fatal(err)
		}
	}
	if s.Room(y) || s.Room(x) {
		t.Error("room for a fourth receiver of three, or for a second request of one")
	}
	if s.Bind(g(9), y, 1) == nil || s.Bind(g(9), x, 3) == nil {
		t.Error("one too many is bound")
	}
	if s.End(g(0), true) || s.End(g(1), true) || s.Done() || s.Served != 0 {
		t.Error("done with two of three receivers")
	}
	if err := s.Bind(g(2), y, 1); err != nil || !s.End(g(2), true) || s.Served != 1 {
		t.Errorf("not done with all three: %v, served %d", err, s.Served)
	}
	// If one receiver fails the request is not served.
	f := &Source{Fanout: 2}
	_, _ = f.Bind(g(0), x, 2), f.Bind(g(1), x, 2) // room is certain
	if f.End(g(0), true) || f.End(g(1), false) || f.Served != 0 {
		t.Errorf("served %d, and one receiver of two failed", f.Served)
	}
	// A receiver that has not come in time does not count: neither the second request nor the
	// second receiver of the first.
	n := &Source{Fanout: 2}
	_ = n.Bind(g(0), x, 2) // room is certain
	if n.Narrow() || n.Room(x) || n.Room(y) || !n.End(g(0), true) || n.Served != 1 {
		t.Errorf("narrowed: served %d", n.Served)
	}
	// The lease remembers ended receivers: a repeated grant must not take the place of a receiver
	// that is still to come.
	if p := (&Source{Fanout: 1}); p.Bind(g(0), x, 2) != nil || p.Over(g(0)) || p.End(g(0), true) ||
		!p.Over(g(0)) || p.Over(g(1)) {
		t.Error("a receiver that has ended looks like one that has not come")
	}
	// The next life of a lease has the place of the previous one, and no other lease gets a place
	// by it.
	r := &Source{Fanout: 1}
	_ = r.Bind(g(0), x, 1) // room is certain
	r.Rename(g(9), g(8))
	if r.Rename(g(0), g(1)); r.Has(g(0)) || r.Has(g(8)) || !r.Has(g(1)) || r.Bind(g(1), y, 1) != nil ||
		r.Bind(g(0), x, 1) == nil {
		t.Error("a place that was renamed is not the place that it was")
	}
	if r.End(g(0), true) || !r.End(g(1), true) || r.Served != 1 {
		t.Errorf("renamed, and served %d", r.Served)
	}
	late := &Source{Fanout: 1}
	_ = late.Bind(g(0), x, 2) // room is certain
	if late.End(g(0), true) || !late.Narrow() || !late.Done() {
		t.Error("its one receiver has ended, the other never came: it is not done")
	}
	if b := (&Source{Fanout: 1}); b.Bind(g(0), x, 0) == nil || b.Bind(g(0), x, MaxTeam+1) == nil {
		t.Error("teams of no receivers, or of too many")
	}
}

// A slot is never used twice at a time, is reused only after its fence, and no name repeats, even
// if peers were forgotten.
func TestSlots(t *testing.T) {
	type name struct {
		peer transfer.Boot
		slot transfer.Slot
		gen  transfer.Gen
	}
	rapid.Check(t, func(t *rapid.T) {
		s := NewSlots(4)
		for i := range MaxPeers - 3 { // the table gets full: peers without grants are forgotten
			idle := boot(9)
			idle[1], idle[2] = byte(i), byte(i>>8)
			s.peers[idle] = &peerSlots{}
		}
		open := map[name]bool{}
		given := map[name]bool{}
		for range rapid.IntRange(1, 200).Draw(t, "steps") {
			peer := boot(byte(rapid.IntRange(0, 2).Draw(t, "peer")))
			if rapid.Bool().Draw(t, "alloc") {
				slot, gen, err := s.Alloc(peer)
				if err != nil {
					if !errors.Is(err, ErrLimit) || s.Open(peer) != 4 {
						t.Fatalf("alloc with %d open: %v", s.Open(peer), err)
					}
					continue
				}
				for n := range open {
					if n.peer == peer && n.slot == slot {
						t.Fatalf("slot %d is given again before its fence", slot)
					}
				}
				n := name{peer, slot, gen}
				if given[n] || gen == 0 {
					t.Fatalf("slot %d generation %d given again", slot, gen)
				}
				open[n], given[n] = true, true
				continue
			}
			for n := range open {
				if n.peer != peer {
					continue
				}
				if s.Fenced(peer, n.slot, n.gen+1000) == nil {
					t.Fatal("a fence of another generation frees the slot")
				}
				if err := s.Fenced(peer, n.slot, n.gen); err != nil {
					t.Fatal(err)
				}
				if s.Fenced(peer, n.slot, n.gen) == nil {
					t.Fatal("a slot is freed twice")
				}
				delete(open, n)
				break
			}
		}
	})
}

// A slot that has used every generation is not reused; others are, while there are any.
func TestSlotsOutliveTheirGenerations(t *testing.T) {
	s, p := NewSlots(4), boot(1)
	once := func() (transfer.Slot, transfer.Gen, error) {
		n, g, err := s.Alloc(p)
		if err == nil {
			err = s.Fenced(p, n, g)
		}
		return n, g, err
	}
	for want := range transfer.Slot(3) {
		if n, g, err := once(); err != nil || n != want || g != 1 {
			t.Fatalf("slot %d generation %d, %v: want %d and 1", n, g, err, want)
		}
		s.peers[p].slots[want].gen = maxGen - 1
		if n, g, err := once(); err != nil || n != want || g != maxGen {
			t.Fatalf("slot %d generation %d, %v: want %d and the last one", n, g, err, want)
		}
	}
	s.peers[p].slots = make([]slot, maxSlots)
	if n, _, err := once(); !errors.Is(err, ErrLimit) {
		t.Errorf("slot %d, %v: every one of them is used up", n, err)
	}
	if s.Open(p) != 0 || s.Peers() != 0 {
		t.Errorf("%d open, %d peers", s.Open(p), s.Peers())
	}
}

func TestTombstones(t *testing.T) {
	k := func(b byte) (k transfer.Key) {
		k.Xfer[0] = b
		return k
	}
	x := NewTombstones(3, time.Minute)
	x.Add(0, k(1), true)
	x.Add(time.Second, k(2), false)
	if b, ok := x.Find(time.Second, k(1)); !ok || !b.Served {
		t.Errorf("found %+v %v", b, ok)
	}
	x.Remove(k(1))
	if _, ok := x.Find(time.Second, k(1)); ok {
		t.Error("a raised key is found")
	}
	x.Add(2*time.Second, k(1), true) // again: its first entry must not remove this one
	if _, ok := x.Find(time.Minute+500*time.Millisecond, k(1)); !ok {
		t.Error("the second tombstone of a key was dropped with the first")
	}
	if _, ok := x.Find(2*time.Minute, k(1)); ok || x.Len() != 0 {
		t.Error("too old, and still there")
	}
	for i := range 10 {
		x.Add(3*time.Minute, k(byte(i)), true)
	}
	if x.Len() != 3 {
		t.Errorf("%d keys kept of at most 3", x.Len())
	}
}
