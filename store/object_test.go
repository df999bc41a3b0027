package store

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/store/disk/disktest"
	"github.com/kvspray/kvspray/store/object/objecttest"
	"github.com/kvspray/kvspray/store/page"
	"pgregory.net/rapid"
)

func overObjects(t *testing.T, objects *objecttest.Store, atPut bool) *Store {
	t.Helper()
	return tiered(t, nil, Config{OpenedObject: bucket(t, objects.Open()), ObjectAtPut: atPut})
}

func flush(t *testing.T, s *Store) {
	t.Helper()
	if err := s.Flush(context.Background()); err != nil {
		t.Fatal(err)
	}
}

// Pages that memory, or the disk, gives up are found in the object tier, and in memory afterwards.
func TestObjectsHoldWhatOtherTiersGiveUp(t *testing.T) {
	for name, open := range map[string]func(o *objecttest.Store) (*Store, int){
		"memory": func(o *objecttest.Store) (*Store, int) { return overObjects(t, o, false), 200 },
		"disk": func(o *objecttest.Store) (*Store, int) {
			return tiered(t, disktest.New(1<<20+8*simSegment, 1), Config{
				OpenedObject: bucket(t, o.Open())}), 400
		},
	} {
		t.Run(name, func(t *testing.T) {
			s, pages := open(objecttest.New())
			e := newEngine(t, s, "a", 4096)
			for at := 0; at < pages; at += 20 {
				e.put(upTo(at, at+20)...)
			}
			flush(t, s)
			for at := 0; at < pages; at += 50 {
				if found, err := e.space.Exists(e.keys(upTo(at, at+50))); err != nil ||
					found.Count() != 50 {
					t.Fatalf("%d of 50 pages exist: %v", found.Count(), err)
				}
				rs := e.get(upTo(at, at+50)...)
				if count(rs, Hit) != 50 {
					t.Fatalf("%d of 50 pages: %+v %+v", count(rs, Hit), rs, s.Stats())
				}
			}
			st := s.Stats()
			if st.Hits[Object] < 50 || st.Object.Uploaded == 0 || st.Object.Dropped > 0 {
				t.Errorf("%+v", st)
			}
			list := upTo(0, 5)
			e.get(list...)
			for _, r := range e.get(list...) {
				if r.Outcome != Hit || r.Tier != Memory {
					t.Errorf("after a get: %+v", r)
				}
			}
			e.close()
			shut(t, s)
		})
	}
}

// After a restart of the node, pages that were put and flushed are there, and removed ones are not.
func TestObjectsSurviveTheNode(t *testing.T) {
	objects := objecttest.New()
	s := overObjects(t, objects, true)
	e, f := newEngine(t, s, "a", 4096), newEngine(t, s, "b", 9_999)
	e.put(upTo(0, 30)...)
	f.put(upTo(0, 20)...)
	flush(t, s)
	if err := f.space.Remove(); err != nil {
		t.Fatal(err)
	}
	f.close()
	e.close()
	shut(t, s)
	s = overObjects(t, objects, true)
	if err := s.object.Ready(context.Background()); err != nil {
		t.Fatal(err)
	}
	e, f = newEngine(t, s, "a", 4096), newEngine(t, s, "b", 9_999)
	if rs := e.get(upTo(0, 30)...); count(rs, Hit) != 30 || rs[0].Tier != Object {
		t.Errorf("%+v", rs)
	}
	if rs := f.get(upTo(0, 20)...); count(rs, Miss) != 20 {
		t.Errorf("%+v", rs)
	}
	pins, err := e.space.Pin(e.keys(upTo(0, 32)))
	if err != nil || pins.Found().Count() != 30 {
		t.Errorf("%d pages are pinned: %v", pins.Found().Count(), err)
	}
	pins.Release()
	if _, err := s.Space(namespace("a", 4096), Shares{Object: Share{Quota: 1}}); err == nil {
		t.Error("a quota of one byte in the object tier was taken")
	}
	e.close()
	f.close()
	shut(t, s)
}

// What memory gives up of a namespace while it is removed is not found in the object tier again:
// not after the removal, and not after a restart.
func TestRemovedWhileMemoryGivesUp(t *testing.T) {
	objects := objecttest.New()
	s := overObjects(t, objects, false)
	e, f := newEngine(t, s, "a", 4096), newEngine(t, s, "b", 4096)
	e.put(upTo(0, 20)...)
	e.uploaded(1000)
	hold, reached := make(chan struct{}), make(chan struct{}, 10)
	objects.Fail(func(op, name string) objecttest.Fault {
		if op == "put" && strings.HasSuffix(name, "ledger.kvspray") {
			reached <- struct{}{}
			return objecttest.Fault{Hold: hold}
		}
		return objecttest.Fault{}
	})
	removed := make(chan error)
	go func() { removed <- e.space.Remove() }()
	<-reached
	for at := 0; at < 120; at += 20 {
		f.put(upTo(at, at+20)...)
	}
	if st := s.Stats(); st.Memory.Evicted < 20 {
		t.Fatalf("memory kept the pages: %+v", st)
	}
	again := newEngine(t, s, "a", 4096) // opening it meanwhile changes nothing
	again.close()
	close(hold)
	if err := <-removed; err != nil {
		t.Fatal(err)
	}
	objects.Fail(nil)
	flush(t, s)
	if rs := e.get(upTo(0, 20)...); count(rs, Miss) != 20 {
		t.Errorf("after the removal: %+v", rs)
	}
	e.put(upTo(30, 40)...) // what is put afterwards is there
	for at := 0; at < 120; at += 20 {
		f.put(upTo(at, at+20)...)
		f.get(upTo(at, at+20)...)
	}
	flush(t, s)
	e.close()
	f.close()
	shut(t, s)
	s = overObjects(t, objects, false)
	if err := s.object.Ready(context.Background()); err != nil {
		t.Fatal(err)
	}
	e = newEngine(t, s, "a", 4096)
	if rs := e.get(upTo(0, 20)...); count(rs, Miss) != 20 {
		t.Errorf("after a restart: %+v", rs)
	}
	if rs := e.get(upTo(30, 40)...); count(rs, Hit) != 10 {
		t.Errorf("pages that were put after the removal: %+v", rs)
	}
	e.close()
	shut(t, s)
}

// While the object store hangs, gets from memory are served, and one that waits for it ends soon
// after Cancel.
func TestObjectStoreThatHangs(t *testing.T) {
	objects := objecttest.New()
	s := overObjects(t, objects, true)
	e := newEngine(t, s, "a", 4096)
	for at := 0; at < 200; at += 50 {
		e.put(upTo(at, at+50)...)
	}
	flush(t, s)
	hold := make(chan struct{})
	asked := make(chan struct{}, 10)
	objects.Fail(func(string, string) objecttest.Fault {
		asked <- struct{}{}
		return objecttest.Fault{Hold: hold}
	})
	waiting := newEngine(t, s, "a", 4096)
	b, err := waiting.space.Get(waiting.keys(upTo(0, 40)), waiting.pool, waiting.blocks(40))
	if err != nil {
		t.Fatal(err)
	}
	for range 2 { // both fetchers hang, and have their slots
		<-asked
	}
	found := page.NewBitmap(50)
	s.memory.Exists(e.space.number, e.keys(upTo(150, 200)), found)
	var here []int
	for i := range 50 {
		if found.Get(i) {
			here = append(here, 150+i)
		}
	}
	if rs := e.get(here...); len(here) < 20 || count(rs, Hit) != len(here) {
		t.Errorf("%+v", rs)
	}
	b.Cancel()
	if err := b.Fence(context.Background()); err != nil {
		t.Error(err)
	}
	select {
	case <-b.Done():
	case <-time.After(10 * time.Second):
		t.Fatal("a get that was canceled does not end")
	}
	objects.Fail(func(string, string) objecttest.Fault {
		return objecttest.Fault{Err: errors.New("gone")}
	})
	rs := e.get(upTo(0, 40)...)
	if count(rs, Failed) == 0 || count(rs, Hit) > 0 {
		t.Errorf("%+v", rs)
	}
	if rs := e.get(upTo(0, 40)...); count(rs, Miss) != 40 { // it is not asked for a while
		t.Errorf("%+v", rs)
	}
	e.close()
	waiting.close()
	shut(t, s)
}

// A page goes to its block in parts, whatever pieces it has.
func TestPartsOfBlocks(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		page := rapid.SliceOfN(rapid.Byte(), 1, 300).Draw(t, "page")
		lent, err := mem.NewAnonymous("engine", 4096)
		if err != nil {
			t.Fatal(err)
		}
		defer lent.Release()
		var place []mem.Block
		at, left := uint64(0), uint64(len(page))
		for left > 0 {
			n := rapid.Uint64Range(1, left).Draw(t, "block")
			place = append(place, mem.Block{Region: lent, Off: at, Len: n})
			at, left = at+n+rapid.Uint64Range(0, 9).Draw(t, "gap"), left-n
		}
		sum := uint32(0)
		for from := 0; from < len(page); {
			to := rapid.IntRange(from+1, len(page)).Draw(t, "to")
			blocks := part(place, uint64(from), uint64(to), nil)
			if sum, err = copyPart(sum, blocks, page[from:to]); err != nil {
				t.Fatal(err)
			}
			from = to
		}
		whole, _ := lent.Bytes()
		got := []byte{}
		for _, b := range place {
			got = append(got, whole[b.Off:b.Off+b.Len]...)
		}
		if !bytes.Equal(got, page) || sum != mem.CRC32C(0, page) {
			t.Fatal("another page is there, or another checksum")
		}
	})
}
