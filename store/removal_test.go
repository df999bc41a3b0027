package store

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/store/disk"
	"github.com/kvspray/kvspray/store/disk/disktest"
	"github.com/kvspray/kvspray/store/memory"
	"github.com/kvspray/kvspray/store/object"
	"github.com/kvspray/kvspray/store/object/objecttest"
	"github.com/kvspray/kvspray/store/page"
	"github.com/kvspray/kvspray/store/removal"
	"golang.org/x/sys/unix"
)

func removeSpace(t *testing.T, s *Store, id page.ID) {
	t.Helper()
	if err := s.RemoveSpace(id); err != nil {
		t.Fatal(err)
	}
}

// A namespace is removed by its id, whether an engine has it open, had, or has not since the start.
func TestRemoveSpaceThatIsNotOpen(t *testing.T) {
	sim := disktest.New(8<<20, 1)
	s := onDisk(t, sim, false)
	e, f := newEngine(t, s, "a", 4096), newEngine(t, s, "b", 4096)
	if !s.Has(e.space.id) || s.Has(page.ID{1}) {
		t.Error("a namespace without pages was found")
	}
	removeSpace(t, s, page.ID{1})
	e.put(upTo(0, 10)...)
	f.put(upTo(0, 10)...)
	removeSpace(t, s, e.space.id)
	if count(e.get(upTo(0, 10)...), Miss) != 10 {
		t.Error("it was open")
	}
	e.put(1)
	e.close()
	removeSpace(t, s, e.space.id) // it was closed
	f.close()
	shut(t, s)

	s = onDisk(t, sim, false)
	if !s.Keeps() || !s.Has(f.space.id) || s.Has(e.space.id) {
		t.Error("only the disk has it")
	}
	removeSpace(t, s, f.space.id)
	shut(t, s)
	s = onDisk(t, sim, false)
	for _, name := range []string{"a", "b"} {
		e := newEngine(t, s, name, 4096)
		if rs := e.get(upTo(0, 10)...); count(rs, Miss) != 10 {
			t.Errorf("%s: %+v", name, rs)
		}
		e.close()
	}
	shut(t, s)
	if err := s.RemoveSpace(e.space.id); err == nil {
		t.Error("of a closed store")
	}
}

// A removal counts for all that any medium has, whatever the index has of it: pages whose segments
// could not be read at the start, and pages that were given up and whose number is another's. A
// removal whose record could not be written, and that is tried again, is no other.
func TestRemovePagesThatTheIndexLacks(t *testing.T) {
	unreadable := func(op string, off int64) error {
		if op == "read" && off >= 1<<20 {
			return unix.EIO
		}
		return nil
	}
	for name, lack := range map[string]func(t *testing.T, s *Store, sim *disktest.Sim) *Store{
		"unreadable": func(t *testing.T, s *Store, sim *disktest.Sim) *Store {
			shut(t, s)
			sim.Fail(unreadable)
			s = onDisk(t, sim, false)
			sim.Fail(nil)
			return s
		},
		"unreadable and open": func(t *testing.T, s *Store, sim *disktest.Sim) *Store {
			shut(t, s)
			sim.Fail(unreadable)
			s = onDisk(t, sim, false)
			sim.Fail(nil)
			e := newEngine(t, s, "a", 4096)
			e.put(77)
			e.close()
			return s
		},
		"given up": func(t *testing.T, s *Store, _ *disktest.Sim) *Store {
			for i := range MaxSpaces - 1 {
				sp, err := s.Space(namespace(fmt.Sprint("n", i), 4096), Shares{})
				if err != nil {
					t.Fatal(err)
				}
				defer sp.Close()
			}
			return s
		},
		"not recorded": func(t *testing.T, s *Store, sim *disktest.Sim) *Store {
			sim.Fail(func(op string, _ int64) error {
				if op == "write" {
					return unix.EIO
				}
				return nil
			})
			ns := namespace("a", 4096)
			if err := s.RemoveSpace(ns.ID()); !errors.Is(err, unix.EIO) {
				t.Fatal(err)
			}
			sim.Fail(nil)
			return s
		},
	} {
		t.Run(name, func(t *testing.T) {
			sim := disktest.New(8<<20, 1)
			s := onDisk(t, sim, false)
			e, f := newEngine(t, s, "a", 4096), newEngine(t, s, "b", 4096)
			e.put(upTo(0, 10)...)
			f.put(upTo(0, 10)...)
			e.close()
			s = lack(t, s, sim)
			removeSpace(t, s, e.space.id)
			f.close()
			shut(t, s)
			sim.Crash()
			s = onDisk(t, sim, false)
			e, f = newEngine(t, s, "a", 4096), newEngine(t, s, "b", 4096)
			if rs := e.get(append(upTo(0, 10), 77)...); count(rs, Miss) != 11 {
				t.Errorf("removed pages are served: %+v", rs)
			}
			// Segments that could not be read are overwritten: they may have removed pages.
			if rs := f.get(upTo(0, 10)...); count(rs, Hit) != 10 &&
				!strings.HasPrefix(name, "unreadable") {
				t.Errorf("pages of another namespace are not served: %+v", rs)
			}
			e.close()
			f.close()
			shut(t, s)
		})
	}
}

// An upload of a process that has ended reaches the bucket after the next process has listed it,
// and has removed the namespace.
func TestUploadThatArrivesAfterARemoval(t *testing.T) {
	objects := objecttest.New()
	process := objects.Open()
	start := func() *Store {
		process = objects.Open()
		s := tiered(t, nil, Config{ObjectAtPut: true,
			OpenedObject: bucketWith(t, process, object.Timeouts{})})
		if err := s.object.Ready(t.Context()); err != nil {
			t.Fatal(err)
		}
		return s
	}
	s := start()
	e := newEngine(t, s, "a", 4096)
	e.put(1)
	flush(t, s)
	e.put(upTo(2, 10)...)
	objects.Fail(func(op, name string) objecttest.Fault {
		if op == "put" && strings.Contains(name, "/pages/") {
			process.Kill()
			return objecttest.Fault{Late: &object.ConfigError{Problem: "it ends"}}
		}
		return objecttest.Fault{}
	})
	flush(t, s)
	e.close()
	_ = s.Close() // it was killed
	objects.Fail(nil)
	s = start()
	removeSpace(t, s, e.space.id)
	if n := objects.Deliver(); n != 1 {
		t.Fatalf("%d uploads were under way", n)
	}
	for range 2 {
		shut(t, s)
		s = start()
		e = newEngine(t, s, "a", 4096)
		if rs := e.get(upTo(1, 10)...); count(rs, Miss) != 9 {
			t.Errorf("removed pages are served: %+v", rs)
		}
		e.put(1) // so that the namespace has an era again
		e.space.s.memory.RemoveOwner(e.space.number)
		e.close()
		removeSpace(t, s, e.space.id)
	}
	shut(t, s)
}

// Ten thousand namespaces come one after the other. The oldest ones lose their pages, and those
// that are in use do not.
func TestManyNamespaces(t *testing.T) {
	objects, sim := objecttest.New(), disktest.New(64<<20, 1)
	start := func() *Store {
		return tiered(t, sim, Config{ObjectAtPut: true,
			OpenedObject: bucketWith(t, objects.Open(), object.Timeouts{})})
	}
	s := start()
	used := newEngine(t, s, "used", 4096)
	used.put(upTo(0, 10)...)
	const n = 10_000
	visit := func(name string, put bool) []Result {
		e := newEngine(t, s, name, 4096)
		defer e.close()
		if put {
			return e.put(1)
		}
		return e.get(1)
	}
	for i := range n {
		// Most are only opened, as by an engine that computes nothing.
		if rs := visit(fmt.Sprint("step", i), i%5 == 0 || i > n-20); count(rs, Failed) > 0 {
			t.Fatalf("%d: %+v", i, rs)
		}
	}
	for range 2 {
		for i := n - 19; i < n; i++ {
			if rs := visit(fmt.Sprint("step", i), false); count(rs, Hit) != 1 {
				t.Errorf("one of the latest, %d: %+v", i, rs)
			}
		}
		if rs := visit("step0", false); count(rs, Miss) != 1 {
			t.Errorf("the first one: %+v", rs)
		}
		if rs := used.get(upTo(0, 10)...); count(rs, Hit) != 10 {
			t.Errorf("of a namespace in use: %+v", rs)
		}
		used.close()
		shut(t, s)
		s = start()
		used = newEngine(t, s, "used", 4096)
	}
	used.close()
	shut(t, s)
}

// A bucket that is slow to take uploads does not keep their namespaces' places.
func TestManyNamespacesBesideUploads(t *testing.T) {
	objects := objecttest.New()
	s := tiered(t, nil, Config{ObjectAtPut: true,
		OpenedObject: bucketWith(t, objects.Open(), object.Timeouts{})})
	if err := s.object.Ready(t.Context()); err != nil {
		t.Fatal(err)
	}
	held := make(chan struct{})
	objects.Fail(func(op, _ string) objecttest.Fault {
		if op == "put" {
			return objecttest.Fault{Hold: held}
		}
		return objecttest.Fault{}
	})
	for i := range 2 * MaxSpaces {
		e := newEngine(t, s, fmt.Sprint("step", i), 4096)
		if rs := e.put(1); count(rs, Failed) > 0 {
			t.Fatalf("%d: %+v", i, rs)
		}
		e.close()
	}
	objects.Fail(nil)
	close(held)
	shut(t, s)
}

// Pages in the object store of a namespace that no engine has opened since the start.
func TestRemoveSpaceFromObjects(t *testing.T) {
	objects := objecttest.New()
	s := overObjects(t, objects, true)
	e := newEngine(t, s, "a", 4096)
	e.put(upTo(0, 10)...)
	flush(t, s)
	e.close()
	shut(t, s)
	s = overObjects(t, objects, true)
	if err := s.object.Ready(context.Background()); err != nil || !s.Keeps() {
		t.Fatal(err)
	}
	removeSpace(t, s, e.space.id)
	for range 2 {
		e = newEngine(t, s, "a", 4096)
		if rs := e.get(upTo(0, 10)...); count(rs, Miss) != 10 {
			t.Errorf("%+v", rs)
		}
		e.close()
		shut(t, s)
		s = overObjects(t, objects, true)
		if err := s.object.Ready(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
	shut(t, s)
}

// holdLedger has the removals of an object tier wait until release.
func holdLedger(objects *objecttest.Store) (reached chan struct{}, release func()) {
	hold, reached := make(chan struct{}), make(chan struct{}, 10)
	objects.Fail(func(op, name string) objecttest.Fault {
		if op == "put" && strings.HasSuffix(name, "ledger.kvspray") {
			reached <- struct{}{}
			return objecttest.Fault{Hold: hold}
		}
		return objecttest.Fault{}
	})
	return reached, func() {
		close(hold)
		objects.Fail(nil)
	}
}

// A put during a removal finds the page that memory still has. Nothing of it stays: not on the
// disk, not in the object store, and not by what the disk gives up meanwhile.
func TestPutDuringARemoval(t *testing.T) {
	for _, atPut := range []bool{false, true} {
		objects, sim := objecttest.New(), disktest.New(1<<20+8*simSegment, 1)
		s := tiered(t, sim, Config{ObjectAtPut: atPut,
			OpenedObject: bucketWith(t, objects.Open(), object.Timeouts{})})
		e, f := newEngine(t, s, "a", 4096), newEngine(t, s, "b", 4096)
		e.put(upTo(0, 10)...)
		flush(t, s)
		e.uploaded(1000)
		reached, release := holdLedger(objects)
		removed := make(chan error)
		go func() { removed <- e.space.Remove() }()
		<-reached
		if rs := e.put(upTo(0, 10)...); count(rs, Existed) != 10 {
			t.Errorf("%+v", rs)
		}
		// Both tiers give the pages up now.
		for at := 0; at < 400; at += 20 {
			f.put(upTo(at, at+20)...)
		}
		release()
		if err := <-removed; err != nil {
			t.Fatal(err)
		}
		flush(t, s)
		if rs := e.get(upTo(0, 10)...); count(rs, Miss) != 10 {
			t.Errorf("at put %v: %+v", atPut, rs)
		}
		e.close()
		f.close()
		shut(t, s)
	}
}

// The same with what the tiers still have.
func TestRemovedPagesAreGone(t *testing.T) {
	objects := objecttest.New()
	s := tiered(t, disktest.New(8<<20, 1),
		Config{OpenedObject: bucketWith(t, objects.Open(), object.Timeouts{})})
	e := newEngine(t, s, "a", 4096)
	e.put(upTo(0, 10)...)
	e.uploaded(1000)
	reached, release := holdLedger(objects)
	removed := make(chan error)
	go func() { removed <- e.space.Remove() }()
	<-reached
	e.put(upTo(0, 10)...)
	release()
	if err := <-removed; err != nil {
		t.Fatal(err)
	}
	if rs := e.get(upTo(0, 10)...); count(rs, Miss) != 10 {
		t.Errorf("%+v", rs)
	}
	e.close()
	shut(t, s)
}

// A put that has looked into memory before a removal writes nothing after it.
func TestPutFromBeforeARemoval(t *testing.T) {
	s := onDisk(t, disktest.New(8<<20, 1), false)
	e := newEngine(t, s, "a", 4096)
	e.put(1)
	b := &Batch{space: e.space, keys: e.keys([]int{1}), pool: e.pool, blocks: e.blocks(1), put: true}
	before := e.space.wanted()
	p, r := s.reserve(b, 0)
	if err := e.space.Remove(); err != nil {
		t.Fatal(err)
	}
	errs := s.below(b, []held{{page: p, pinned: true, data: p.Slot, crc: p.CRC}}, before)
	s.memory.Unpin(p)
	if rs := e.get(1); r.Outcome != Existed || !errors.Is(errs[0], disk.ErrRemoved) ||
		rs[0].Outcome != Miss {
		t.Errorf("%+v %v %+v", r, errs, rs)
	}
	e.close()
	shut(t, s)
}

// When only the object tier has failed, the rest of the removal leaves what was put since.
func TestTheRestOfARemoval(t *testing.T) {
	for _, open := range []bool{true, false} {
		objects, sim := objecttest.New(), disktest.New(8<<20, 1)
		start := func() *Store {
			s := tiered(t, sim, Config{OpenedObject: bucket(t, objects.Open()), ObjectAtPut: true})
			if err := s.object.Ready(t.Context()); err != nil {
				t.Fatal(err)
			}
			return s
		}
		s := start()
		e := newEngine(t, s, "a", 4096)
		e.put(upTo(0, 10)...)
		flush(t, s)
		if !open {
			e.close()
			shut(t, s)
			s = start()
		}
		objects.Fail(func(string, string) objecttest.Fault {
			return objecttest.Fault{Err: errors.New("away")}
		})
		if err := s.RemoveSpace(e.space.id); !errors.Is(err, removal.ErrObjects) {
			t.Error(err)
		}
		objects.Fail(nil)
		if !open {
			e = newEngine(t, s, "a", 4096)
		}
		e.put(3)
		if err := s.RemoveObjects(e.space.id); err != nil {
			t.Error(err)
		}
		for range 2 {
			if rs := e.get(upTo(0, 10)...); count(rs, Miss) != 9 || rs[3].Outcome != Hit {
				t.Errorf("open %v: %+v", open, rs)
			}
			e.close()
			shut(t, s)
			s = start()
			e = newEngine(t, s, "a", 4096)
		}
		e.close()
		shut(t, s)
		if err := s.RemoveObjects(e.space.id); err == nil {
			t.Error("of a closed store")
		}
	}
}

// The removal of a namespace that is not open does not take its quota.
func TestQuotaAfterARemoval(t *testing.T) {
	const quota = 20 * 5000
	objects, sim := objecttest.New(), disktest.New(8<<20, 1)
	start := func() *Store {
		return tiered(t, sim, Config{OpenedObject: bucket(t, objects.Open()), ObjectAtPut: true,
			Shares: func(page.ID) Shares { return Shares{Object: Share{Quota: quota}} }})
	}
	s := start()
	e := newEngine(t, s, "a", 4096)
	e.put(1)
	e.close()
	shut(t, s)
	s = start()
	removeSpace(t, s, e.space.id)
	e = newEngine(t, s, "a", 4096)
	e.put(upTo(0, 40)...)
	if used := s.usageOf(e.space.id).Bytes[Object]; used == 0 || used > quota {
		t.Errorf("%d bytes", used)
	}
	e.close()
	shut(t, s)
}

// Pages on the disk that do not fit into the memory of this start can be removed.
func TestRemoveSpaceThatCannotBeOpened(t *testing.T) {
	objects, sim := objecttest.New(), disktest.New(8<<20, 1)
	const size = 60 << 10
	s := onDisk(t, sim, false)
	e := newEngine(t, s, "a", size)
	e.put(1)
	e.close()
	shut(t, s)
	device, err := disk.OpenFiles([]disk.OpenDevice{{Path: "sim", File: sim, Size: int64(sim.Size())}},
		disk.Config{SegmentBytes: simSegment, MaxPages: 2048})
	if err != nil {
		t.Fatal(err)
	}
	s, err = Open(Config{Memory: memory.Config{Bytes: 64 << 10, SlabBytes: 32 << 10}, Opened: device,
		OpenedObject: bucket(t, objects.Open())})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Stage(e.space.id, size, e.keys([]int{1})); err == nil {
		t.Error("it can be opened")
	}
	removeSpace(t, s, e.space.id)
	if s.Has(e.space.id) || s.disk.Stats().Pages > 0 {
		t.Error("it has its pages")
	}
	shut(t, s)
}

// A page that was removed and is still read can be put again.
func TestPutOfARemovedPageThatIsRead(t *testing.T) {
	s := onDisk(t, disktest.New(8<<20, 1), false)
	e := newEngine(t, s, "a", 4096)
	e.put(1)
	pins, err := e.space.Pin(e.keys([]int{1}))
	if err != nil {
		t.Fatal(err)
	}
	if err := e.space.Remove(); err != nil {
		t.Fatal(err)
	}
	if rs := e.get(1); rs[0].Outcome != Miss {
		t.Errorf("%+v", rs)
	}
	if rs := e.put(1); rs[0].Outcome != Stored || !rs[0].Durable {
		t.Errorf("%+v", rs)
	}
	if rs := e.get(1); rs[0].Outcome != Hit {
		t.Errorf("%+v", rs)
	}
	pins.Release()
	if rs := e.get(1); rs[0].Outcome != Hit {
		t.Errorf("%+v", rs)
	}
	e.close()
	shut(t, s)
}

// The note lives as long as the pages.
func TestNoteOfAStore(t *testing.T) {
	sim := disktest.New(8<<20, 1)
	s := onDisk(t, sim, false)
	if err := s.SetNote([]byte("n")); err != nil {
		t.Fatal(err)
	}
	shut(t, s)
	s = onDisk(t, sim, false)
	if note, err := s.Note(); err != nil || string(note) != "n" || s.Keeps() {
		t.Errorf("%q %v", note, err)
	}
	shut(t, s)
	s = inMemory(t, 1<<20)
	defer shut(t, s)
	if err := s.SetNote([]byte("n")); err != nil {
		t.Fatal(err)
	}
	if note, err := s.Note(); err != nil || note != nil {
		t.Errorf("%q %v", note, err)
	}
}

// A tenant that puts and removes in a loop has the pages of others moved a few times in an hour,
// not each time. What it leaves is overwritten in time.
func TestRemovalsInALoopMoveFewPages(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		tier, err := disk.OpenFiles([]disk.OpenDevice{{Path: "sim", File: disktest.New(32<<20, 1),
			Size: 32 << 20}}, disk.Config{SegmentBytes: simSegment, MaxPages: 2048})
		if err != nil {
			t.Fatal(err)
		}
		s, err := Open(Config{Memory: inMemoryConfig(), Opened: tier, EraseWithin: time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		e, f := newEngine(t, s, "a", 4096), newEngine(t, s, "b", 4096)
		for i := range 3600 {
			f.put(i % 40)
			e.put(1)
			if err := e.space.Remove(); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Second)
		}
		if st := s.Stats().Disk; st.Moved > 200 || st.Cleaned > 100 {
			t.Errorf("%d pages were moved, of %d segments", st.Moved, st.Cleaned)
		}
		time.Sleep(time.Hour)
		if st := s.Stats().Disk; st.Removed > 0 {
			t.Errorf("%d bytes are left after an hour: %+v", st.Removed, st)
		}
		e.close()
		f.close()
		shut(t, s)
	})
}
