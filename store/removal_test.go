// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"testing"

	"github.com/kvspray/kvspray/store/disk/disktest"
	"github.com/kvspray/kvspray/store/object/objecttest"
	"github.com/kvspray/kvspray/store/page"
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

// All namespaces of all tiers go, open or not.
func TestRemoveAll(t *testing.T) {
	objects, sim := objecttest.New(), disktest.New(8<<20, 1)
	open := func() *Store {
		return tiered(t, sim, Config{OpenedObject: bucket(t, objects.Open()), ObjectAtPut: true})
	}
	s := open()
	a, b := newEngine(t, s, "a", 4096), newEngine(t, s, "b", 4096)
	a.put(upTo(0, 10)...)
	b.put(upTo(0, 10)...)
	flush(t, s)
	a.close()
	b.close()
	shut(t, s)
	s = open()
	c := newEngine(t, s, "c", 4096)
	c.put(upTo(0, 10)...)
	if err := s.RemoveAll(t.Context()); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		for _, name := range []string{"a", "b", "c"} {
			e := newEngine(t, s, name, 4096)
			if rs := e.get(upTo(0, 10)...); count(rs, Miss) != 10 {
				t.Errorf("%s: %+v", name, rs)
			}
			e.close()
		}
		if s.spaces[c.space.id] == c.space {
			c.close()
		}
		shut(t, s)
		s = open()
	}
	shut(t, s)
	if err := s.RemoveAll(t.Context()); err == nil {
		t.Error("of a closed store")
	}
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
