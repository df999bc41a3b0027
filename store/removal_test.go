// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/kvspray/kvspray/store/disk"
	"github.com/kvspray/kvspray/store/disk/disktest"
	"github.com/kvspray/kvspray/store/memory"
	"github.com/kvspray/kvspray/store/object"
	"github.com/kvspray/kvspray/store/object/objecttest"
	"github.com/kvspray/kvspray/store/page"
	"github.com/kvspray/kvspray/store/removal"
)

func removeSpace(t *testing.T, s *Store, id page.ID) (had bool) {
	t.Helper()
	had, err := s.RemoveSpace(id)
	if err != nil {
		t.Fatal(err)
	}
	return had
}

// A namespace is removed by its id, whether an engine has it open, had, or has not since the start.
func TestRemoveSpaceThatIsNotOpen(t *testing.T) {
	sim := disktest.New(8<<20, 1)
	s := onDisk(t, sim, false)
	e, f := newEngine(t, s, "a", 4096), newEngine(t, s, "b", 4096)
	if !s.Has(e.space.id) || s.Has(page.ID{1}) || removeSpace(t, s, page.ID{1}) {
		t.Error("a namespace that nobody has")
	}
	e.put(upTo(0, 10)...)
	f.put(upTo(0, 10)...)
	if !removeSpace(t, s, e.space.id) || count(e.get(upTo(0, 10)...), Miss) != 10 {
		t.Error("it was open")
	}
	e.put(1)
	e.close()
	if !removeSpace(t, s, e.space.id) {
		t.Error("it was closed")
	}
	f.close()
	shut(t, s)

	s = onDisk(t, sim, false)
	if !s.Keeps() || !s.Has(f.space.id) || !removeSpace(t, s, f.space.id) {
		t.Error("only the disk has it")
	}
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
	if _, err := s.RemoveSpace(e.space.id); err == nil {
		t.Error("of a closed store")
	}
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
	before := e.space.removals
	p, r := s.fill(b, 0, &worker{})
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
		if had, err := s.RemoveSpace(e.space.id); !had || !errors.Is(err, removal.ErrObjects) {
			t.Errorf("%v %v", had, err)
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
	if used := s.usageOf(e.space.id).Object; used == 0 || used > quota {
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
	if !removeSpace(t, s, e.space.id) || s.Keeps() && s.disk.Stats().Pages > 0 {
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
