package store

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/store/disk/disktest"
	"github.com/kvspray/kvspray/store/memory"
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
		if n := copies.Load(); direct == (n == 0) {
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

// Pages of a request are copied together, in one call of Copy. If it fails, each page is copied by
// itself. Pages that are missing or damaged do not hold up the others.
func TestPagesOfAGPUTogether(t *testing.T) {
	d := transporttest.NewDevice(t)
	var calls, failures atomic.Int64
	s, err := Open(Config{Memory: memory.Config{Bytes: 4 << 20, SlabBytes: 64 << 10}, Workers: 4,
		Copy: func(to, from []mem.Block) error {
			calls.Add(1)
			if failures.Add(-1) >= 0 {
				return errors.New("the driver fails")
			}
			return d.Move(to, from)
		}})
	if err != nil {
		t.Fatal(err)
	}
	e := onGPU(t, s, d, 4096)
	all := upTo(0, 30)
	expect := func(what string, rs []Result, outcome Outcome, pages int, copies int64) {
		t.Helper()
		if n := count(rs, outcome); n != pages || calls.Swap(0) != copies {
			t.Errorf("%s: %d pages, want %d in %d copies: %+v", what, n, pages, copies, rs)
		}
	}
	expect("put", e.put(all...), Stored, 30, 1)
	expect("put again", e.put(all...), Existed, 30, 0)
	expect("get", e.get(all...), Hit, 30, 1)
	expect("get more", e.get(upTo(0, 40)...), Hit, 30, 1)
	k := e.key(7)
	p, ok := s.memory.Pin(e.space.number, &k)
	if !ok {
		t.Fatal("not in memory")
	}
	p.Bytes[100] ^= 1
	s.memory.Unpin(p)
	rs := e.get(all...)
	expect("one is damaged", rs, Hit, 29, 1)
	if rs[7].Outcome != Damaged {
		t.Errorf("%+v", rs[7])
	}
	expect("it is put again", e.put(all...), Stored, 1, 1)
	failures.Store(1)
	expect("the copy fails, then single ones do not", e.get(all...), Hit, 30, 31)
	failures.Store(1)
	expect("the same of a put", e.put(upTo(40, 60)...), Stored, 20, 21)
	failures.Store(1000)
	expect("all fail", e.get(all...), Failed, 30, 31)
	expect("all fail in a put", e.put(upTo(60, 80)...), Failed, 20, 21)
	failures.Store(0)
	expect("those are not there", e.get(upTo(60, 80)...), Miss, 20, 0)
	e.close()
	shut(t, s)
}

// Pages in very many pieces are copied a few at a time: the lists of all workers are bounded.
func TestPartsOfAGPUAreBounded(t *testing.T) {
	d := transporttest.NewDevice(t)
	var longest atomic.Int64
	s, err := Open(Config{Memory: memory.Config{Bytes: 8 << 20, SlabBytes: 1 << 20}, Workers: 1,
		Copy: func(to, from []mem.Block) error {
			longest.Store(max(longest.Load(), int64(len(to))))
			return d.Move(to, from)
		}})
	if err != nil {
		t.Fatal(err)
	}
	const pageBytes = 16 * MaxPieces
	e := onGPU(t, s, d, pageBytes)
	pieces := make([]Piece, MaxPieces)
	for i := range pieces {
		pieces[i] = Piece{e.onGPU[0], uint64(i) * 16, pageBytes, 16}
	}
	if e.pool, err = NewPool(pieces, enginePages); err != nil {
		t.Fatal(err)
	}
	if n := count(e.put(upTo(0, 10)...), Stored); n != 10 {
		t.Fatalf("%d of 10 pages were stored", n)
	}
	if n := count(e.get(upTo(0, 10)...), Hit); n != 10 || longest.Load() != deviceParts {
		t.Errorf("%d of 10 pages; %d pieces in one call, want %d", n, longest.Load(), deviceParts)
	}
	e.close()
	shut(t, s)
}

// The fence of a canceled request waits for the copy that is under way, and for no other.
func TestFenceWaitsForTheCopyOfAGPU(t *testing.T) {
	d := transporttest.NewDevice(t)
	var hold atomic.Bool
	in, open := make(chan struct{}, 100), make(chan struct{})
	s, err := Open(Config{Memory: memory.Config{Bytes: 1 << 20, SlabBytes: 64 << 10}, Workers: 1,
		Copy: func(to, from []mem.Block) error {
			if hold.Load() {
				in <- struct{}{}
				<-open
			}
			return d.Move(to, from)
		}})
	if err != nil {
		t.Fatal(err)
	}
	e := onGPU(t, s, d, 64<<10)
	e.put(upTo(0, 10)...)
	clear(e.memory(0))
	hold.Store(true)
	b, err := e.space.Get(e.keys(upTo(0, 10)), e.pool, e.blocks(10))
	if err != nil {
		t.Fatal(err)
	}
	<-in // 4 of the pages
	b.Cancel()
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := b.Fence(ctx); err == nil {
		t.Error("the fence is done while pages are copied")
	}
	close(open)
	if err := b.Fence(context.Background()); err != nil {
		t.Error(err)
	}
	<-b.Done()
	if rs := b.Results(); count(rs, Hit) != 4 || count(rs, Canceled) != 6 || len(in) != 0 {
		t.Errorf("%d more copies: %+v", len(in), rs)
	}
	e.close()
	shut(t, s)
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
