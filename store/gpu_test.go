package store

import (
	"bytes"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/store/disk/disktest"
	"github.com/kvspray/kvspray/store/object/objecttest"
	"github.com/kvspray/kvspray/transport/transporttest"
)

// onGPU is an engine whose blocks lie in two regions of one device. The device sees them as one
// piece of memory, so that the test compares whole pages.
func onGPU(t *testing.T, s *Store, d *transporttest.Device, pageBytes int) *engine {
	t.Helper()
	e := newEngine(t, s, "a", pageBytes)
	size, a := uint64(pageBytes), uint64(pageBytes/3+1)
	view, _ := e.lent.Bytes()
	lower, err := d.Region(view)
	if err != nil {
		t.Fatal(err)
	}
	upper, err := d.Region(view[a:])
	if err != nil {
		t.Fatal(err)
	}
	e.onGPU = []*mem.Region{lower, upper}
	e.pool, err = NewPool([]Piece{{lower, 0, size, a / 2}, {lower, a / 2, size, a - a/2},
		{upper, 0, size, size - a}}, enginePages)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// Pages go to blocks of a GPU, and come from there, whatever the tier: with Config.Copy, and
// through mem.Device.
func TestBlocksOfAGPU(t *testing.T) {
	for _, direct := range []bool{false, true} {
		d := transporttest.NewDevice(t)
		var copies atomic.Int64
		c := Config{OpenedObject: bucket(t, objecttest.New().Open())}
		if direct {
			c.Copy = func(to, from []mem.Block) error {
				copies.Add(1)
				if !slices.EqualFunc(to, from, func(a, b mem.Block) bool { return a.Len == b.Len }) {
					return errors.New("the lists have other lengths")
				}
				for _, list := range [][]mem.Block{to, from} {
					for _, b := range list {
						if b.Region != list[0].Region {
							return errors.New("a list has blocks of two regions")
						}
					}
				}
				return d.Move(to, from)
			}
		}
		s := tiered(t, disktest.New(1<<20+8*simSegment, 1), c)
		e := onGPU(t, s, d, 4096)
		const pages = 400
		for at := 0; at < pages; at += 20 {
			if n := count(e.put(upTo(at, at+20)...), Stored); n != 20 {
				t.Fatalf("%d of 20 pages were stored", n)
			}
		}
		flush(t, s)
		for at := 0; at < pages; at += 50 {
			if rs := e.get(upTo(at, at+50)...); count(rs, Hit) != 50 {
				t.Fatalf("%d of 50 pages: %+v", count(rs, Hit), rs)
			}
		}
		last := upTo(pages-50, pages)
		if rs := e.get(last...); count(rs, Hit) != 50 || rs[49].Tier != Memory {
			t.Errorf("from memory: %+v", rs)
		}
		st := s.Stats()
		if st.Hits[Object] == 0 || st.Hits[Disk] == 0 || st.Hits[Memory] == 0 {
			t.Errorf("no page of some tier: %+v", st)
		}
		if n := copies.Load(); direct && n < 4*50 {
			t.Errorf("%d calls of Copy", n)
		}
		d.Fail.Store(true)
		if rs := e.get(last...); count(rs, Failed) != 50 {
			t.Errorf("with a device that fails: %+v", rs)
		}
		d.Fail.Store(false)
		if rs := e.get(last...); count(rs, Hit) != 50 {
			t.Errorf("once it works again: %+v", rs)
		}
		e.close()
		shut(t, s)
	}
}

// A page that is damaged in the arena does not reach the GPU.
func TestDamagedPageStaysOffTheGPU(t *testing.T) {
	d := transporttest.NewDevice(t)
	s, err := Open(Config{Memory: inMemoryConfig(), Workers: 4,
		Copy: func(to, from []mem.Block) error { return d.Move(to, from) }})
	if err != nil {
		t.Fatal(err)
	}
	e := onGPU(t, s, d, 4096)
	e.put(1)
	k := e.key(1)
	p, ok := s.memory.Pin(e.space.number, &k)
	if !ok {
		t.Fatal("not in memory")
	}
	p.Bytes[100] ^= 1
	s.memory.Unpin(p)
	before := bytes.Clone(e.memory(0))
	clear(e.memory(0))
	b, err := e.space.Get(e.keys([]int{1}), e.pool, e.blocks(1))
	if err != nil {
		t.Fatal(err)
	}
	<-b.Done()
	if b.Results()[0].Outcome != Damaged || !bytes.Equal(e.memory(0), make([]byte, len(before))) {
		t.Errorf("%+v; the block was written: %v", b.Results()[0],
			!bytes.Equal(e.memory(0), make([]byte, len(before))))
	}
	e.close()
	shut(t, s)
}

// One pool lies on one GPU, or in host memory.
func TestPoolOfOneDevice(t *testing.T) {
	host, err := mem.NewAnonymous("host", 4096)
	if err != nil {
		t.Fatal(err)
	}
	defer host.Release()
	there, err := transporttest.NewDevice(t).Region(make([]byte, 4096))
	if err != nil {
		t.Fatal(err)
	}
	defer there.Release()
	_, err = NewPool([]Piece{{host, 0, 1024, 1024}, {there, 0, 1024, 1024}}, 4)
	if err == nil || !strings.Contains(err.Error(), "pieces[1]") {
		t.Errorf("%v", err)
	}
}
