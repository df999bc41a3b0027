package object_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/store/object"
	"github.com/kvspray/kvspray/store/object/objecttest"
	"github.com/kvspray/kvspray/store/page"
)

// Pages are readable before their upload and after it, and after a restart, and those that lie one
// after another come with one request for up to 8 MiB.
func TestAddReadRestart(t *testing.T) {
	s := objecttest.New()
	n := start(t, s)
	if got := n.add(n.o, 0, 200); got != 200 {
		t.Fatalf("%d pages were taken", got)
	}
	all(t, n.read(n.o, 0, 200), nil)
	n.flush()
	before, _ := s.Gets()
	all(t, n.read(n.o, 0, 200), nil)
	after, _ := s.Gets()
	if after-before > 4 { // two objects of 127 pages at most, and 128 pages a request
		t.Errorf("%d requests for 200 pages", after-before)
	}
	if data := s.Data(objects(s)[0]); len(data) < 127*size {
		t.Errorf("the first object has %d bytes", len(data))
	}
	n.add(n.o, 200, 230)
	n.close() // uploads what is left
	n = start(t, s)
	defer n.close()
	all(t, n.read(n.o, 0, 230), nil)
	found := page.NewBitmap(232)
	n.o.Exists(keys(0, 232), found)
	if found.Leading() != 230 {
		t.Errorf("%d of 230 pages exist", found.Leading())
	}
	all(t, n.read(n.owner("b"), 0, 2), object.ErrMissing)
}

// A removal wins over every restart: also over objects that come back, and over an upload that
// ends later.
func TestRemovalWins(t *testing.T) {
	s := objecttest.New()
	n := start(t, s)
	n.add(n.o, 0, 150)
	b := n.owner("b")
	n.add(b, 500, 510)
	n.flush()
	n.add(n.o, 150, 160) // in a buffer
	saved := map[string][]byte{}
	for _, name := range objects(s) {
		saved[name] = s.Data(name)
	}
	if err := n.tier.Remove(context.Background(), ns("a")); err != nil {
		t.Fatal(err)
	}
	all(t, n.read(n.o, 0, 160), object.ErrMissing)
	eventually(t, "its objects are deleted", func() bool { return len(objects(s)) == 1 })
	n.kill()
	for round := range 3 {
		for name, data := range saved {
			s.Set(name, data)
		}
		if round == 1 { // one copy of the ledger is damaged
			l := s.Data("node1/ledger.kvspray")
			l[70] ^= 1
			s.Set("node1/ledger.kvspray", l)
		}
		n = start(t, s)
		all(t, n.read(n.o, 5, 160), object.ErrMissing)
		if round == 0 {
			all(t, n.read(n.o, 0, 5), object.ErrMissing)
		}
		all(t, n.read(n.owner("b"), 500, 510), nil)
		n.add(n.o, 0, 5) // what is added later is there
		n.flush()
		n.kill()
	}
	n = start(t, s)
	defer n.close()
	all(t, n.read(n.o, 0, 5), nil)
}

// Whatever bit flips in the bucket, no page is wrong, and the others are there.
func TestFlippedBits(t *testing.T) {
	s := objecttest.New()
	n := start(t, s)
	n.add(n.o, 0, 40)
	n.close()
	name := objects(s)[0]
	whole := s.Data(name)
	ledger := s.Data("node1/ledger.kvspray")
	r := rand.New(rand.NewPCG(1, 2))
	for i := range 60 {
		bit := r.IntN(8 * len(whole))
		if i%2 == 0 {
			bit = r.IntN(8 * 128) // the fixed part of the header
		}
		data := bytes.Clone(whole)
		data[bit/8] ^= 1 << (bit % 8)
		s.Set(name, data)
		l := bytes.Clone(ledger)
		l[r.IntN(len(l))] ^= 1 << r.IntN(8)
		s.Set("node1/ledger.kvspray", l)
		n := start(t, s)
		headerBytes := len(whole) - 40*size
		errs := n.read(n.o, 0, 40)
		if got := good(errs); bit/8 >= headerBytes && got != 39 {
			t.Fatalf("bit %d: %d pages are left: %v", bit, got, errors.Join(errs...))
		} else if bit/8 < headerBytes && got != 0 {
			t.Fatalf("bit %d of the header: %d pages", bit, got)
		}
		if st := n.tier.Stats(); bit/8 >= headerBytes && st.Damaged != 1 {
			t.Fatalf("%+v", st)
		}
		n.kill()
	}
	// While it runs.
	s.Set(name, whole)
	n = start(t, s)
	defer n.close()
	data := bytes.Clone(whole)
	data[len(data)-1] ^= 1
	s.Set(name, data)
	if got := good(n.read(n.o, 0, 40)); got != 39 {
		t.Fatalf("%d pages are left", got)
	}
	s.Set(name, whole[:len(whole)-size/2])
	n.read(n.o, 0, 40)
	s.Set(name, nil)
	all(t, n.read(n.o, 0, 40), object.ErrMissing)
}

// Answers that are late, cut, flipped on their way or errors cost time at most.
func TestFaultsOfRequests(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		s := objecttest.New()
		n := start(t, s, impatient)
		defer func() { n.close() }()
		n.add(n.o, 0, 40)
		n.flush()
		var calls atomic.Int64
		for name, f := range map[string]func(op, name string) objecttest.Fault{
			"every second fails": func(string, string) objecttest.Fault {
				if calls.Add(1)%2 == 0 {
					return objecttest.Fault{Err: errors.New("503")}
				}
				return objecttest.Fault{}
			},
			"every second is cut": func(string, string) objecttest.Fault {
				return objecttest.Fault{Cut: (calls.Add(1) % 2) * (20*size + 77)}
			},
			"every second is flipped": func(string, string) objecttest.Fault {
				return objecttest.Fault{Flip: (calls.Add(1) % 2) * 5 * size}
			},
		} {
			t.Log(name)
			s.Fail(f)
			all(t, n.read(n.o, 0, 40), nil)
			s.Fail(nil)
		}
		s.Fail(func(string, string) objecttest.Fault { return objecttest.Fault{Err: errors.New("503")} })
		began := time.Now()
		errs := n.read(n.o, 0, 20)
		if good(errs) > 0 || errs[0] == nil || !strings.Contains(errs[0].Error(), "503") {
			t.Fatal(errs[0])
		}
		all(t, n.read(n.o, 0, 20), object.ErrAway) // at once
		found := page.NewBitmap(20)
		if n.o.Exists(keys(0, 20), found); found.Count() != 0 {
			t.Error("pages exist while the object store is away")
		}
		if took := time.Since(began); took > 300*time.Millisecond {
			t.Errorf("it took %v, the timeout is 300 ms", took)
		}
		s.Fail(nil)
		eventually(t, "it is asked again", func() bool { return n.o.Has(&keys(0, 1)[0]) })
		all(t, n.read(n.o, 0, 20), nil)
		// It hangs: the caller gives up, and then the timeout does.
		s.Fail(func(op, _ string) objecttest.Fault {
			if op == "get" {
				return objecttest.Fault{Hold: make(chan struct{})}
			}
			return objecttest.Fault{}
		})
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
		defer cancel()
		n.o.Read(ctx, keys(0, 1), object.Reading{Buffers: [][]byte{make([]byte, size)},
			Part: func(int, int, int) {}, Check: func(int, uint32) bool { return true },
			End: func(_ int, _ uint32, err error) {
				if !errors.Is(err, context.Canceled) {
					t.Error(err)
				}
			}})
		if !n.o.Has(&keys(0, 1)[0]) {
			t.Error("after a canceled call the tier takes the object store for away")
		}
		if got := good(n.read(n.o, 0, 1)); got != 0 {
			t.Error("a page came from a store that hangs")
		}
		s.Fail(nil)
	})
}

// Buffers are bounded: without uploads no more is taken, and no caller waits.
func TestBuffersAreBounded(t *testing.T) {
	s := objecttest.New()
	n := start(t, s, func(c *object.Config) { c.Timeouts.Upload = time.Hour })
	hold := make(chan struct{})
	s.Fail(func(op, name string) objecttest.Fault {
		if op == "put" && strings.Contains(name, "pages") {
			return objecttest.Fault{Hold: hold}
		}
		return objecttest.Fault{}
	})
	const room = 8 * 127
	if got := n.add(n.o, 0, room+100); got > room || got < room-8 {
		t.Errorf("%d pages were taken, %d fit", got, room)
	}
	st := n.tier.Stats()
	if st.Dropped == 0 || st.Uploaded != 0 {
		t.Errorf("%+v", st)
	}
	close(hold)
	n.flush()
	if st := n.tier.Stats(); st.Uploaded == 0 || st.Stored == 0 {
		t.Errorf("%+v", st)
	}
	n.close()
}

// An upload that fails for good gives its pages up, and whatever is in the bucket of it goes.
func TestUploadFails(t *testing.T) {
	s := objecttest.New()
	n := start(t, s)
	s.Fail(func(op, name string) objecttest.Fault {
		if op == "put" && strings.Contains(name, "pages") {
			return objecttest.Fault{Lost: errors.New("no answer")}
		}
		return objecttest.Fault{}
	})
	n.add(n.o, 0, 10)
	n.flush()
	all(t, n.read(n.o, 0, 10), object.ErrMissing)
	eventually(t, "the object is deleted", func() bool { return len(objects(s)) == 0 })
	s.Fail(nil)
	n.add(n.o, 0, 10)
	n.flush()
	all(t, n.read(n.o, 0, 10), nil)
	n.close()
}

// Objects of others are named and stay as they are.
func TestForeignObjects(t *testing.T) {
	one, two := objecttest.New(), objecttest.New()
	n := start(t, one)
	n.add(n.o, 0, 10)
	n.close()
	other := start(t, two)
	other.add(other.o, 0, 10)
	other.close()
	theirs := one.Data(objects(one)[0])
	newer := bytes.Clone(theirs)
	binary.LittleEndian.PutUint16(newer[12:], object.Version+1)
	ours := objects(two)[0]
	n = start(t, two)
	n.tier.Remove(context.Background(), ns("a"))
	n.close()
	names := map[string][]byte{"node1/pages/0000001000000777": theirs,
		"node1/pages/0000001000000778": newer, "node1/pages/readme": []byte("text"),
		"node1/pages/0000001000000779": []byte("text"), "node1/nothing": []byte("text")}
	for name, data := range names {
		two.Set(name, data)
	}
	n = start(t, two)
	eventually(t, "our object is deleted", func() bool { return two.Data(ours) == nil })
	all(t, n.read(n.o, 0, 10), object.ErrMissing)
	st := n.tier.Stats()
	if st.Foreign != 4 || !strings.Contains(st.Problem, "node1/pages/") {
		t.Errorf("%+v", st)
	}
	n.close()
	for name, data := range names {
		if !bytes.Equal(two.Data(name), data) {
			t.Errorf("%s was touched", name)
		}
	}
}

// A prefix that this release cannot use is refused by name, and stays as it is.
func TestRefusedPrefixes(t *testing.T) {
	made := objecttest.New()
	n := start(t, made)
	n.add(n.o, 0, 10)
	n.close()
	ledger := made.Data("node1/ledger.kvspray")
	newer := bytes.Clone(ledger)
	for _, at := range []int{12, len(newer)/2 + 12} {
		binary.LittleEndian.PutUint16(newer[at:], object.Version+1)
	}
	damaged := bytes.Clone(ledger)
	damaged[40] ^= 1
	damaged[len(damaged)/2+40] ^= 1
	for _, c := range []struct {
		name   string
		ledger []byte
		want   []string
	}{
		{"newer", newer, []string{"format 2", "start the newer release"}},
		{"damaged", damaged, []string{"damaged", "empty it yourself"}},
		{"not ours", []byte("text"), []string{"no kvspray store"}},
		{"gone", nil, []string{"record of namespaces", "node1/pages/"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			made.Set("node1/ledger.kvspray", c.ledger)
			_, err := object.Open(config(made.Open()))
			var mistake *object.ConfigError
			if !errors.As(err, &mistake) || mistake.Field != "prefix" {
				t.Fatalf("%v", err)
			}
			for _, w := range c.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("%q does not contain %q", err, w)
				}
			}
			if !bytes.Equal(made.Data("node1/ledger.kvspray"), c.ledger) || len(objects(made)) != 1 {
				t.Error("it was touched")
			}
		})
	}
}

func TestConfigIsChecked(t *testing.T) {
	for _, c := range []struct {
		change func(*object.Config)
		want   []string
	}{
		{func(c *object.Config) { c.ObjectBytes = 1 << 20 }, []string{"object_bytes", "1048576"}},
		{func(c *object.Config) { c.Size = 1 }, []string{"size", "33554432"}},
		{func(c *object.Config) { c.Buffers = 1 }, []string{"buffers"}},
		{func(c *object.Config) { c.Size = 1 << 60 }, []string{"size", "2199023255552"}},
		{func(c *object.Config) { c.Size, c.ObjectBytes = 8<<40+1<<30, 0 },
			[]string{"size", "8796093022208"}},
	} {
		cfg := config(objecttest.New().Open())
		c.change(&cfg)
		_, err := object.Open(cfg)
		for _, w := range c.want {
			if err == nil || !strings.Contains(err.Error(), w) {
				t.Errorf("%v does not contain %q", err, w)
			}
		}
	}
}

// Two processes with one prefix: no page is wrong, and the older one refuses removals with the
// reason.
func TestTwoProcesses(t *testing.T) {
	s := objecttest.New()
	first := start(t, s)
	first.add(first.o, 0, 10)
	first.flush()
	second := start(t, s)
	second.add(second.o, 10, 20)
	second.flush()
	first.add(first.o, 20, 30)
	first.flush()
	err := first.tier.Remove(context.Background(), ns("a"))
	if err == nil || !strings.Contains(err.Error(), "another process") {
		t.Errorf("%v", err)
	}
	if err := first.tier.Remove(context.Background(), ns("a")); err == nil {
		t.Error("a removal that is not durable was acknowledged")
	}
	first.read(first.o, 0, 30)
	if err := second.tier.Remove(context.Background(), ns("a")); err != nil {
		t.Fatal(err)
	}
	all(t, second.read(second.o, 0, 30), object.ErrMissing)
	first.kill()
	second.kill()
	n := start(t, s)
	defer n.close()
	all(t, n.read(n.o, 0, 30), object.ErrMissing)
}

// The object store is away at the start: all goes on without it, and with it when it is there.
func TestStartWithoutObjectStore(t *testing.T) {
	s := objecttest.New()
	n := start(t, s)
	n.add(n.o, 0, 10)
	n.close()
	s.Fail(func(string, string) objecttest.Fault { return objecttest.Fault{Err: errors.New("gone")} })
	c := config(s.Open())
	c.Timeouts.Open = 100 * time.Millisecond
	tier, err := object.Open(c)
	if err != nil {
		t.Fatal(err)
	}
	n = &node{t: t, tier: tier}
	n.o = n.owner("a")
	b := n.owner("b")
	if st := tier.Stats(); st.Ready || !strings.Contains(st.Problem, "gone") {
		t.Errorf("%+v", st)
	}
	if n.add(n.o, 50, 60) != 0 {
		t.Error("pages were taken")
	}
	if err := n.tier.Remove(context.Background(), ns("a")); !errors.Is(err, object.ErrAway) {
		t.Errorf("%v", err)
	}
	s.Fail(nil)
	if err := tier.Ready(context.Background()); err != nil {
		t.Fatal(err)
	}
	all(t, n.read(n.o, 0, 10), object.ErrMissing) // removed
	if n.add(b, 50, 60) != 10 {
		t.Error("pages were not taken")
	}
	n.close()
	n = start(t, s)
	defer n.close()
	all(t, n.read(n.o, 0, 10), object.ErrMissing)
	all(t, n.read(n.owner("b"), 50, 60), nil)
}

// A page whose bytes changed in memory is not taken.
func TestAddChecks(t *testing.T) {
	n := start(t, objecttest.New())
	defer n.close()
	k, data := key(1), content(1)
	if err := n.o.Add(&k, nil, data, mem.CRC32C(0, data)+1, nil); !errors.Is(err, object.ErrDamaged) {
		t.Errorf("%v", err)
	}
	all(t, n.read(n.o, 1, 2), object.ErrMissing)
	if n.add(n.o, 1, 2) != 1 {
		t.Error("it is not taken afterwards")
	}
}

// What a removal has left in the bucket is counted until it is deleted, also by the next start.
func TestRemovedBytesAreCounted(t *testing.T) {
	s := objecttest.New()
	n := start(t, s)
	n.add(n.o, 0, 10)
	n.flush()
	if left := n.tier.Stats().Removed; left != 0 {
		t.Errorf("%d bytes before the removal", left)
	}
	s.Fail(func(op, _ string) objecttest.Fault {
		if op == "delete" {
			return objecttest.Fault{Err: &object.ConfigError{Problem: "it may not delete"}}
		}
		return objecttest.Fault{}
	})
	if err := n.tier.Remove(t.Context(), ns("a")); err != nil {
		t.Fatal(err)
	}
	if left := n.tier.Stats().Removed; left < 10*size {
		t.Errorf("%d bytes are left", left)
	}
	n.kill()
	s.Fail(nil)
	n = start(t, s)
	defer n.close()
	eventually(t, "the objects are deleted", func() bool {
		return n.tier.Stats().Removed == 0 && len(objects(s)) == 0
	})
}
