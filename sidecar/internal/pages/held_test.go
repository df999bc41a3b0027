package pages

import (
	"context"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/store"
	"github.com/kvspray/kvspray/store/disk/disktest"
	"github.com/kvspray/kvspray/store/object/objecttest"
	"github.com/kvspray/kvspray/store/page"
)

// held is one I/O that does not go on until release.
type held struct {
	reached chan struct{} // closed when it has begun
	release chan struct{}
	once    sync.Once
	first   atomic.Int64 // calls that are not held
}

func newHeld() *held { return &held{reached: make(chan struct{}), release: make(chan struct{})} }

func (h *held) wait() {
	if h.first.Add(-1) >= 0 {
		return
	}
	h.once.Do(func() { close(h.reached) })
	<-h.release
}

// bucketHolds has requests with these words in their operation and name wait.
func (h *held) bucketHolds(objects *objecttest.Store, op, name string) {
	objects.Fail(func(o, n string) objecttest.Fault {
		if o != op || !strings.Contains(n, name) {
			return objecttest.Fault{}
		}
		h.once.Do(func() { close(h.reached) })
		return objecttest.Fault{Hold: h.release}
	})
}

// heldPeers are other nodes. Once they are armed, they have all pages and do not answer.
type heldPeers struct {
	h              *held
	finds, fetches atomic.Bool
}

func (p *heldPeers) Find(keys []page.Key, found page.Bitmap) {
	if p.finds.Load() {
		p.h.wait()
	}
	for i := range keys {
		if p.fetches.Load() {
			found.Set(i)
		}
	}
}

func (p *heldPeers) Fetch(context.Context, page.ID, int, []page.Key, []mem.Block,
	func(int, uint32) bool) []int {
	p.h.wait()
	return nil
}

// another opens a namespace for a worker of its own, which ends with the test.
func (r *rig) another(weights string) (*engines.Worker, connector.Pool) {
	r.t.Helper()
	region, err := mem.NewAnonymous("another", blocks*pageBytes)
	if err != nil {
		r.t.Fatal(err)
	}
	w := &engines.Worker{Name: weights, Regions: []*mem.Region{region}}
	p := connector.Pool{ID: 9, Namespace: testNamespace(weights), Blocks: blocks,
		Pieces: []connector.PoolPiece{{Region: region, Stride: pageBytes, Len: pageBytes}}}
	if _, err := r.Open(w, p); err != nil {
		r.t.Error(err)
	}
	r.t.Cleanup(func() { r.Gone(w); region.Release() })
	return w, p
}

// While one I/O hangs, every call that does not need it ends, for each kind of I/O.
func TestNothingWaitsForIOOfOthers(t *testing.T) {
	type world struct {
		*rig
		sim     *disktest.Sim
		objects *objecttest.Store
		h       *held
		peers   *heldPeers
	}
	remove := func(weights string) func(w *world) {
		return func(w *world) {
			ns := testNamespace(weights)
			_, _ = w.RemoveNamespace(context.Background(), ns.ID(), true) // it may fail: the node stops
		}
	}
	request := func(put bool, pages ...int) func(w *world) {
		return func(w *world) {
			q := w.request(put, pages...)
			q.Pool = 8
			w.Start(w.w, q)
		}
	}
	afterNote := func(w *world) {
		w.h.first.Store(1)
		w.sim.HoldWrites(w.h.wait)
	}
	for _, c := range []struct {
		name string
		hold func(w *world)
		call func(w *world) // meets the I/O; in a goroutine
	}{
		{"a removal's note", func(w *world) { w.sim.HoldWrites(w.h.wait) }, remove("none")},
		{"a removal on the disk", afterNote, remove("old")},
		{"a removal on the disk, of an open namespace", afterNote, remove("open")},
		{"a removal in the object store", func(w *world) {
			w.h.bucketHolds(w.objects, "put", "ledger")
		}, remove("old")},
		{"a put to the disk", func(w *world) { w.sim.HoldWrites(w.h.wait) }, request(true, 50)},
		{"a put's sync", func(w *world) { w.sim.HoldSyncs(w.h.wait) }, request(true, 50)},
		{"a get from the disk", func(w *world) { w.sim.Hold(w.h.wait) }, request(false, 20)},
		{"an upload", func(w *world) { w.h.bucketHolds(w.objects, "put", "pages") }, func(w *world) {
			_ = w.o.Store.Flush(context.Background())
		}},
		{"the record before an upload", func(w *world) { w.h.bucketHolds(w.objects, "put", "ledger") },
			func(w *world) { _ = w.o.Store.Flush(context.Background()) }},
		{"a lookup of other nodes' pages", func(w *world) { w.peers.finds.Store(true) },
			request(false, 99)},
		{"a fetch from a node that does not answer", func(w *world) { w.peers.fetches.Store(true) },
			request(false, 99)},
		{"a completion to an engine that reads none", func(w *world) {
			w.o.Complete = func(worker *engines.Worker, c engines.Completion) error {
				if worker != w.w {
					w.h.wait()
					return nil
				}
				w.ended <- c
				return nil
			}
		}, func(w *world) {
			other, p := w.another("silent")
			q := w.request(false, 1)
			q.Pool = p.ID
			w.Start(other, q)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := &world{sim: disktest.New(8<<20, 1), objects: objecttest.New(), h: newHeld()}
			w.peers = &heldPeers{h: w.h}
			t.Run("before", func(t *testing.T) {
				r := startOver(t, w.sim, w.objects)
				p := r.pool
				p.ID, p.Namespace = 8, testNamespace("old")
				if _, err := r.Open(r.w, p); err != nil {
					t.Fatal(err)
				}
				q := r.request(true, 1, 2)
				q.Pool = 8
				r.serve(q)
				p.ID, p.Namespace = 10, testNamespace("open")
				if _, err := r.Open(r.w, p); err != nil {
					t.Fatal(err)
				}
				q = r.request(true, 20)
				q.Pool = 10
				r.serve(q)
				if err := r.o.Store.Flush(t.Context()); err != nil {
					t.Fatal(err)
				}
			})
			config := configOver(t, w.sim, w.objects)
			config.Peers = func(*store.Store) store.Peers { return w.peers }
			w.rig = startWith(t, config)
			p := w.pool
			p.ID, p.Namespace = 8, testNamespace("open")
			if _, err := w.Open(w.w, p); err != nil {
				t.Fatal(err)
			}
			w.put(1, 2) // of a namespace that the object store has no record of yet
			c.hold(w)
			called := make(chan struct{})
			go func() { c.call(w); close(called) }()
			<-w.h.reached
			ends := func(what string, call func()) {
				t.Helper()
				done := make(chan struct{})
				go func() { call(); close(done) }()
				select {
				case <-done:
				case <-time.After(20 * time.Second):
					t.Fatalf("%s waits for %s", what, c.name)
				}
			}
			defer func() {
				w.sim.Hold(nil)
				w.sim.HoldWrites(nil)
				w.sim.HoldSyncs(nil)
				w.objects.Fail(nil)
				close(w.h.release)
				<-called
			}()
			ends("a get", func() {
				q := w.request(false, 1, 2)
				w.Start(w.w, q)
				for got := range w.ended {
					if got.Lease.ID == q.Lease.ID {
						return
					}
				}
			})
			ends("EXISTS", func() { w.exists(1, 2) })
			ends("OPEN", func() { w.another("new") })
			ends("the end of a worker", func() {
				other, _ := w.another("newer")
				w.Gone(other)
			})
			ends("status", func() {
				_, _ = w.Namespaces()
				_, _ = w.o.Removals.Stats()
				w.Drained()
			})
			ends("metrics", func() {
				_, _ = w.o.Store.Usage(), w.o.Store.Stats()
			})
			ends("a deadline", func() {
				q := w.request(false, 20) // it may wait for the I/O
				q.Pool, q.Deadline = 8, time.Millisecond
				w.Start(w.w, q)
				for got := range w.ended {
					if got.Lease.ID == q.Lease.ID {
						return
					}
				}
			})
			ends("a question of an operator", func() {
				ns := testNamespace("old")
				w.o.Store.Has(ns.ID())
			})
			if !strings.Contains(c.name, "note") && !strings.Contains(c.name, "disk") &&
				!strings.Contains(c.name, "put") { // a removal needs the disk
				ends("a removal of another namespace", func() {
					_, err := w.RemoveNamespace(t.Context(), page.ID{1}, true)
					if err != nil {
						t.Error(err)
					}
				})
			}
			if strings.HasPrefix(c.name, "a removal") {
				ends("a drain", func() {
					ctx, stop := context.WithCancel(context.Background())
					if strings.Contains(c.name, "object") {
						stop() // uploads need the record, too
					}
					defer stop()
					_ = w.Drain(ctx)
				})
			}
		})
	}
}
