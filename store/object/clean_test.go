package object_test

import (
	"errors"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/kvspray/kvspray/store/object"
	"github.com/kvspray/kvspray/store/object/objecttest"
)

// A tier that is full gives up its oldest pages; the bucket stays within the size, but for the
// objects under way, and objects without pages are deleted.
func TestSizeIsKept(t *testing.T) {
	s := objecttest.New()
	n := start(t, s)
	for i := range 30 {
		n.add(n.o, i*100, i*100+100)
		n.flush()
	}
	eventually(t, "the bucket shrinks", func() bool { return n.tier.Stats().Stored <= 72<<20 })
	st := n.tier.Stats()
	if st.Evicted == 0 || st.Deleted == 0 || st.Bytes > st.Capacity {
		t.Errorf("%+v", st)
	}
	all(t, n.read(n.o, 2900, 3000), nil)
	total := uint64(0)
	for _, name := range s.Names() {
		total += uint64(len(s.Data(name)))
	}
	if total > 80<<20 {
		t.Errorf("the bucket has %d bytes, the size is %d", total, 64<<20)
	}
	n.close()
	n = start(t, s)
	defer n.close()
	all(t, n.read(n.o, 2900, 3000), nil)
}

// Small objects of a namespace are merged, and so are what is left of objects that are mostly dead.
// A crash at any request of it loses nothing.
func TestMerging(t *testing.T) {
	s := objecttest.New()
	n := start(t, s)
	for i := range 16 {
		n.add(n.o, i*10, i*10+10)
		n.flush()
	}
	eventually(t, "small objects are merged", func() bool { return len(objects(s)) <= 5 })
	if st := n.tier.Stats(); st.Moved == 0 {
		t.Errorf("%+v", st)
	}
	all(t, n.read(n.o, 0, 160), nil)
	n.close()
	n = start(t, s)
	all(t, n.read(n.o, 0, 160), nil)
	n.close()
}

func TestMergingOfDamagedObjects(t *testing.T) {
	s := objecttest.New()
	n := start(t, s)
	hold := make(chan struct{})
	s.Fail(func(op, name string) objecttest.Fault {
		if op == "get" {
			return objecttest.Fault{Hold: hold}
		}
		return objecttest.Fault{}
	})
	for i := range 18 {
		n.add(n.o, i*10, i*10+10)
		n.flush()
	}
	names := objects(s)
	page := s.Data(names[0])
	page[len(page)-5] ^= 1
	s.Set(names[0], page)
	header := s.Data(names[1])
	header[50] ^= 1
	s.Set(names[1], header)
	s.Set(names[2], nil)
	close(hold)
	eventually(t, "objects are merged", func() bool { return n.tier.Stats().Moved > 0 })
	if got := good(n.read(n.o, 0, 180)); got < 180-21 {
		t.Errorf("%d pages are left", got)
	}
	if s.Data(names[1]) == nil {
		t.Error("an object with another header was deleted")
	}
	n.close()
}

// A merge whose upload fails changes nothing.
func TestMergeThatFails(t *testing.T) {
	s := objecttest.New()
	n := start(t, s)
	defer func() { n.close() }()
	var whole atomic.Bool // all objects are there
	s.Fail(func(op, _ string) objecttest.Fault {
		if op == "get" && !whole.Load() || op == "put" && whole.Load() {
			return objecttest.Fault{Err: errors.New("503")}
		}
		return objecttest.Fault{}
	})
	for i := range 16 {
		n.add(n.o, i*10, i*10+10)
		n.flush()
	}
	before := n.tier.Stats().Failed
	whole.Store(true)
	eventually(t, "the merge fails", func() bool { return n.tier.Stats().Failed > before+1 })
	all(t, n.read(n.o, 0, 160), nil)
	if got := len(objects(s)); got != 16 {
		t.Errorf("%d of 16 objects are there", got)
	}
	s.Fail(nil)
	eventually(t, "it is tried again", func() bool { return len(objects(s)) <= 5 })
	all(t, n.read(n.o, 0, 160), nil)
}

// The process is killed at any request, or requests fail. After the next start, flushed pages are
// there and removed pages are not.
func TestKillAtEveryRequest(t *testing.T) {
	rounds := 60
	if testing.Short() {
		rounds = 15
	}
	for seed := range rounds {
		r := rand.New(rand.NewPCG(uint64(seed), 3))
		s := objecttest.New()
		durable := map[int]bool{}
		removed := map[int]bool{}
		next := 0
		for range 4 {
			n := start(t, s)
			b := n.owner("b")
			for i := range next {
				errs := n.read(n.o, i, i+1)
				if durable[i] && errs[0] != nil {
					t.Fatalf("seed %d: page %d was durable: %v", seed, i, errs[0])
				}
				if removed[i] && errs[0] == nil {
					t.Fatalf("seed %d: page %d was removed", seed, i)
				}
			}
			var mu sync.Mutex // guards what follows
			at, count, luck := 1+r.IntN(80), 0, rand.New(rand.NewPCG(r.Uint64(), 4))
			s.Fail(func(op, _ string) objecttest.Fault {
				mu.Lock()
				defer mu.Unlock()
				if count++; count == at {
					n.p.Kill()
				}
				if luck.IntN(12) == 0 && op != "get" {
					return objecttest.Fault{Lost: errors.New("lost")}
				}
				return objecttest.Fault{}
			})
			for range 8 {
				from := next
				next += 1 + r.IntN(12)
				n.add(n.o, from, next)
				n.add(b, from, next)
				n.flush()
				for i := from; i < next; i++ { // uploaded, or given up
					if n.read(n.o, i, i+1)[0] == nil {
						durable[i] = true
					}
				}
				switch r.IntN(6) {
				case 0:
					clear(durable)
					if n.tier.Remove(t.Context(), ns("a")) != nil {
						break // it may have been done, or not
					}
					for i := range next {
						removed[i] = true
					}
				case 1:
					_ = n.tier.Remove(t.Context(), ns("b")) // it may fail
				}
			}
			s.Fail(nil)
			n.kill()
		}
	}
}

// Namespaces that come and are removed fill the ledger with nothing.
func TestManyRemovals(t *testing.T) {
	s := objecttest.New()
	n := start(t, s)
	for i := range 5000 {
		id := ns(string(rune(i)) + "x" + strings.Repeat("y", i%7))
		o, err := n.tier.Owner(id, size, 0, 0)
		if err != nil {
			t.Fatal(err)
		}
		if i%500 == 0 {
			n.add(o, 0, 2)
			n.flush()
		}
		if err := n.tier.Remove(t.Context(), id); err != nil {
			t.Fatal(i, err)
		}
		o.Close()
	}
	if l := len(s.Data("node1/ledger.kvspray")); l > 2*(128+1024*48) {
		t.Errorf("the ledger has %d bytes", l)
	}
	all(t, n.read(n.o, 0, 2), object.ErrMissing)
	n.close()
}
