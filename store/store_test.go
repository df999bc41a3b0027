package store

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"testing"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/store/disk"
	"github.com/kvspray/kvspray/store/disk/disktest"
	"github.com/kvspray/kvspray/store/page"
)

const simBytes = 1<<20 + 40*simSegment

func TestPutAndGet(t *testing.T) {
	s := onDisk(t, disktest.New(simBytes, 1), false)
	defer shut(t, s)
	for name, size := range map[string]int{"small": 4096, "odd": 10_001} {
		e := newEngine(t, s, name, size)
		for _, r := range e.put(upTo(0, 50)...) {
			if r.Outcome != Stored || !r.Durable || r.Err != nil {
				t.Fatalf("%s: %+v", name, r)
			}
		}
		if rs := e.get(upTo(0, 60)...); count(rs, Hit) != 50 || count(rs, Miss) != 10 {
			t.Errorf("%s: %+v", name, rs)
		}
		for _, r := range e.put(upTo(0, 50)...) {
			// those that memory gave up are stored there again
			if !r.Durable || r.Outcome != Existed && r.Outcome != Stored {
				t.Errorf("%s: a second put: %+v", name, r)
			}
		}
		found, err := e.space.Exists(e.keys(upTo(0, 60)))
		if err != nil || found.Count() != 50 || found.Leading() != 50 {
			t.Errorf("%s: %d of 50 exist: %v", name, found.Count(), err)
		}
		e.close()
	}
	if st := s.Stats(); st.Hits[Memory] == 0 || st.Hits[Disk] == 0 || st.Stored == 0 {
		t.Errorf("%+v", st)
	}
}

// Memory gives pages up, the disk has them, and the second get finds them in memory.
func TestPagesComeBackFromDisk(t *testing.T) {
	s := onDisk(t, disktest.New(simBytes, 1), false)
	defer shut(t, s)
	e := newEngine(t, s, "a", 8192)
	defer e.close()
	for i := range 4 {
		e.put(upTo(i*30, i*30+30)...)
	}
	for _, want := range []Tier{Disk, Memory} {
		for n, r := range e.get(upTo(0, 10)...) {
			if r.Outcome != Hit || r.Tier != want {
				t.Errorf("page %d: %+v, want tier %d", n, r, want)
			}
		}
	}
}

// Keys of one namespace find nothing in another.
func TestNamespacesAreApart(t *testing.T) {
	s := inMemory(t, 1<<20)
	defer shut(t, s)
	a, b := newEngine(t, s, "a", 4096), newEngine(t, s, "b", 4096)
	defer a.close()
	defer b.close()
	a.put(1, 2)
	batch, err := b.space.Get(a.keys([]int{1, 2}), b.pool, b.blocks(2))
	if err != nil {
		t.Fatal(err)
	}
	<-batch.Done()
	if count(batch.Results(), Miss) != 2 {
		t.Errorf("%+v", batch.Results())
	}
	again, err := s.Space(namespace("a", 4096), Shares{})
	if err != nil || again != a.space {
		t.Errorf("the same namespace is another space: %v", err)
	}
	if _, err := s.Space(namespace("a", 4097), Shares{}); err != nil {
		t.Errorf("another page size is another namespace: %v", err)
	}
}

// More namespaces than a store has at once, one after another: those that are closed and have no
// pages make room, and those that are open, or have pages, do not.
func TestNamespacesDoNotRunOut(t *testing.T) {
	sim := disktest.New(simBytes, 1)
	s := onDisk(t, sim, true)
	open := newEngine(t, s, "open", 4096)
	full := newEngine(t, s, "full", 4096)
	full.put(1, 2, 3)
	full.close()
	stale := newEngine(t, s, "stale", 4096)
	for i := range MaxSpaces + 200 {
		e := newEngine(t, s, fmt.Sprint("n", i), 4096+i%2*4096)
		e.put(1)
		if n := count(e.get(1), Hit); n != 1 {
			t.Fatalf("namespace %d: its page is missed", i)
		}
		if i%100 == 0 {
			if err := s.Flush(context.Background()); err != nil {
				t.Fatal(err)
			}
		}
		if err := e.space.Remove(); err != nil {
			t.Fatal(err)
		}
		e.close()
		if i == 0 {
			stale.close()
		}
	}
	if again := newEngine(t, s, "open", 4096); again.space != open.space {
		t.Error("a namespace that is open lost its number")
	} else {
		again.close()
	}
	if n := count(open.put(7), Stored); n != 1 {
		t.Error("a namespace that is open takes no pages")
	}
	if _, err := stale.space.Exists(stale.keys([]int{1})); !errors.Is(err, ErrClosed) {
		t.Errorf("a space that is closed: %v", err)
	}
	_, err := stale.space.Get(stale.keys([]int{1}), open.pool, open.blocks(1))
	if !errors.Is(err, ErrClosed) {
		t.Errorf("a space that is closed: %v", err)
	}
	open.close()
	shut(t, s)
	s = onDisk(t, sim, true)
	defer shut(t, s)
	full = newEngine(t, s, "full", 4096)
	defer full.close()
	if n := count(full.get(1, 2, 3), Hit); n != 3 {
		t.Errorf("%d of 3 pages of a namespace that was closed", n)
	}
}

// Where the disk refuses a namespace's share, its share of memory stays what it was.
func TestSharesChangeTogether(t *testing.T) {
	s := onDisk(t, disktest.New(simBytes, 1), false)
	defer shut(t, s)
	half := s.Region().Size() / 2
	huge := Share{Reserve: 1 << 40}
	if _, err := s.Space(namespace("a", 4096),
		Shares{Memory: Share{Reserve: half}, Disk: huge}); err == nil ||
		!strings.Contains(err.Error(), "store.disk: reserve") {
		t.Errorf("%v", err)
	}
	if _, err := s.Space(namespace("b", 4096), Shares{Memory: Share{Reserve: half}}); err != nil {
		t.Errorf("what was refused is still reserved: %v", err)
	}
	if _, err := s.Space(namespace("b", 4096), Shares{Disk: huge}); err == nil {
		t.Error("not refused")
	}
	if _, err := s.Space(namespace("c", 4096), Shares{Memory: Share{Reserve: 4096}}); err == nil ||
		!strings.Contains(err.Error(), "store.memory: reserve") {
		t.Errorf("the reserve of a namespace is gone: %v", err)
	}
}

func TestRefusesRequests(t *testing.T) {
	s := inMemory(t, 1<<20)
	e := newEngine(t, s, "a", 4096)
	defer e.close()
	sealed, err := mem.NewAnonymous("other", 4096)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name   string
		keys   int
		blocks []uint32
		want   []string
	}{
		{"none", 0, nil, []string{"keys", "1 to 10000"}},
		{"many", page.MaxBatch + 1, nil, []string{"10001 keys"}},
		{"fewer", 2, []uint32{0}, []string{"blocks", "1 for 2 keys"}},
		{"outside", 1, []uint32{enginePages}, []string{"blocks[0]", "blocks 0 to 63"}},
		{"twice", 3, []uint32{3, 5, 3}, []string{"blocks[2]", "as blocks[0] is"}},
	} {
		_, err := e.space.Get(make([]page.Key, c.keys), e.pool, c.blocks)
		var re *RequestError
		if !errors.As(err, &re) {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		for _, w := range c.want {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%s: %q does not contain %q", c.name, err, w)
			}
		}
	}
	other := func(bytes uint64) *Pool {
		p, err := NewPool([]Piece{{sealed, 0, bytes, bytes}}, 1)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	freed, short := other(4096), other(4095)
	sealed.Release()
	if _, err := e.space.Get(make([]page.Key, 1), short, []uint32{0}); err == nil ||
		!strings.Contains(err.Error(), "4095 bytes; pages of this namespace have 4096") {
		t.Errorf("blocks of another size: %v", err)
	}
	if _, err := e.space.Get(make([]page.Key, 1), freed, []uint32{0}); !errors.Is(err, mem.ErrFreed) {
		t.Errorf("a region that is freed: %v", err)
	}
	if _, err := s.Space(namespace("big", 1<<20), Shares{}); err == nil ||
		!strings.Contains(err.Error(), "store.memory to") {
		t.Errorf("an arena that is too small for a page: %v", err)
	}
	if _, err := s.Space(page.Namespace{}, Shares{}); err == nil {
		t.Error("an empty namespace")
	}
	shut(t, s)
	if _, err := e.space.Get(e.keys([]int{1}), e.pool, e.blocks(1)); !errors.Is(err, ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
}

// gate stops reads of a disk until it is opened.
type gate struct {
	in   chan struct{} // a value for each read that waits
	open chan struct{}
}

func newGate(sim *disktest.Sim) *gate {
	g := &gate{make(chan struct{}, 100), make(chan struct{})}
	sim.Hold(func() { g.in <- struct{}{}; <-g.open })
	return g
}

// A get is canceled while its disk reads: the fence returns at once, what is then written to the
// placements stays, and every page ends.
func TestNothingIsWrittenAfterTheFence(t *testing.T) {
	sim := disktest.New(simBytes, 1)
	s := onDisk(t, sim, false)
	defer shut(t, s)
	e := newEngine(t, s, "a", 8192)
	defer e.close()
	for i := range 4 {
		e.put(upTo(i*30, i*30+30)...)
	}
	g := newGate(sim)
	b, err := e.space.Get(e.keys(upTo(0, 20)), e.pool, e.blocks(20))
	if err != nil {
		t.Fatal(err)
	}
	<-g.in // a worker is in the disk
	b.Cancel()
	if err := b.Fence(context.Background()); err != nil {
		t.Fatal(err)
	}
	select {
	case <-b.Done():
		t.Fatal("the batch is done while its disk reads")
	default:
	}
	whole, _ := e.lent.Bytes()
	mem.Fill(whole, 0xee) // the engine has given the blocks to another prompt
	close(g.open)
	<-b.Done()
	if !bytes.Equal(whole, bytes.Repeat([]byte{0xee}, len(whole))) {
		t.Error("a placement was written after the fence")
	}
	if n := count(b.Results(), Canceled); n != 20 {
		t.Errorf("%d of 20 pages are canceled: %+v", n, b.Results())
	}
	sim.Hold(nil)
	if n := count(e.get(upTo(0, 20)...), Hit); n != 20 {
		t.Errorf("%d of 20 pages afterwards", n)
	}
}

// The same hundreds of times against workers that copy: from the fence on, no byte of the memory
// changes.
func TestLateWrites(t *testing.T) {
	s := inMemory(t, 32<<20)
	defer shut(t, s)
	e := newEngine(t, s, "a", 64<<10)
	defer e.close()
	e.put(upTo(0, enginePages)...)
	whole, _ := e.lent.Bytes()
	want := bytes.Repeat([]byte{0xee}, len(whole))
	r := rand.New(rand.NewPCG(1, 1))
	cut := 0
	// On a busy machine most requests end before they are canceled.
	for n := 0; n < 300 || cut < 10 && n < 10000; n++ {
		b, err := e.space.Get(e.keys(upTo(0, enginePages)), e.pool, e.blocks(enginePages))
		if err != nil {
			t.Fatal(err)
		}
		// somewhere in the middle
		for until := int64(1 + r.IntN(enginePages)); b.unresolved.Load() > until; {
			runtime.Gosched()
		}
		b.Cancel()
		if err := b.Fence(context.Background()); err != nil {
			t.Fatal(err)
		}
		mem.Fill(whole, 0xee)
		<-b.Done()
		if !bytes.Equal(whole, want) {
			t.Fatal("a placement was written after the fence")
		}
		if n := count(b.Results(), Hit); n > 0 && n < enginePages {
			cut++
		}
	}
	if cut < 10 {
		t.Errorf("%d were cut in the middle", cut)
	}
}

// What memory holds is damaged: it is not served, and the disk's copy is.
func TestDamageInMemory(t *testing.T) {
	for _, withDisk := range []bool{true, false} {
		s := inMemory(t, 1<<20)
		if withDisk {
			shut(t, s)
			s = onDisk(t, disktest.New(simBytes, 1), false)
		}
		e := newEngine(t, s, "a", 8192)
		e.put(1, 2, 3)
		pins, err := e.space.Pin(e.keys([]int{2}))
		if err != nil || !pins.Found().Get(0) {
			t.Fatalf("pin: %v", err)
		}
		b, _ := pins.Blocks()[0].Bytes()
		b[1000] ^= 4
		pins.Release()
		pins.Release()
		want := Result{Outcome: Damaged}
		if withDisk {
			want = Result{Outcome: Hit, Tier: Disk, Replaced: true}
		}
		if r := e.get(2)[0]; r != want {
			t.Errorf("disk %t: %+v, want %+v", withDisk, r, want)
		}
		if n := count(e.get(1, 3), Hit); n != 2 {
			t.Errorf("disk %t: the other pages: %d", withDisk, n)
		}
		e.close()
		shut(t, s)
	}
}

// A page that has changed in memory since its put does not go to the disk when it is put again.
func TestDamageInMemoryBeforeDisk(t *testing.T) {
	sim := disktest.New(simBytes, 1)
	s := onDisk(t, sim, false)
	defer shut(t, s)
	e := newEngine(t, s, "a", 8192)
	defer e.close()
	sim.Fail(func(op string, _ int64) error {
		if op == "write" {
			return errors.New("broken")
		}
		return nil
	})
	if r := e.put(1)[0]; r.Outcome != Stored || r.Durable {
		t.Fatalf("a put while the disk fails: %+v", r)
	}
	sim.Fail(nil)
	pins, err := e.space.Pin(e.keys([]int{1}))
	if err != nil || !pins.Found().Get(0) {
		t.Fatalf("pin: %v", err)
	}
	b, _ := pins.Blocks()[0].Bytes()
	b[8000] ^= 16
	pins.Release()
	if r := e.put(1)[0]; r.Outcome != Existed || r.Durable || !errors.Is(r.Err, disk.ErrDamaged) {
		t.Errorf("a second put: %+v", r)
	}
	if r := e.get(1)[0]; r.Outcome != Miss {
		t.Errorf("a get: %+v", r)
	}
	if r := e.put(1)[0]; r.Outcome != Stored || !r.Durable {
		t.Errorf("a put after that: %+v", r)
	}
}

// Write-back: the result comes before the page is durable, and Flush waits for that.
func TestWriteBack(t *testing.T) {
	sim := disktest.New(simBytes, 1)
	s := onDisk(t, sim, true)
	e := newEngine(t, s, "a", 8192)
	for _, r := range e.put(upTo(0, 20)...) {
		if r.Outcome != Stored || r.Durable {
			t.Fatalf("%+v", r)
		}
	}
	if err := s.Flush(context.Background()); err != nil {
		t.Fatal(err)
	}
	e.close()
	shut(t, s)
	sim.Crash()
	s = onDisk(t, sim, true)
	defer shut(t, s)
	e = newEngine(t, s, "a", 8192)
	defer e.close()
	if n := count(e.get(upTo(0, 20)...), Hit); n != 20 {
		t.Errorf("%d of 20 pages survive", n)
	}
	if err := e.space.Remove(); err != nil {
		t.Fatal(err)
	}
	if n := count(e.get(upTo(0, 20)...), Miss); n != 20 {
		t.Errorf("%d of 20 removed pages are missed", n)
	}
}

// The store keeps the first pages of a prompt longest, although several workers store pieces of it,
// and although prompts take turns as in chunked prefill.
func TestWhatIsLeftIsTheHead(t *testing.T) {
	s := onDisk(t, disktest.New(simBytes, 1), false)
	defer shut(t, s)
	e := newEngine(t, s, "a", 8192)
	defer e.close()
	const prompts, pages, part = 60, 20, 5
	first := func(prompt int) int { return prompt * 100 }
	for prompt := 0; prompt < prompts; prompt += 2 {
		for at := 0; at < 2*pages; at += part {
			from := first(prompt+at/part%2) + at/(2*part)*part
			put := upTo(from, from+part)
			for n, i := range put {
				copy(e.memory(n), e.content(i))
			}
			after := e.key(from - 1)
			b, err := e.space.Put(e.keys(put), &after, e.pool, e.blocks(part))
			if err != nil {
				t.Fatal(err)
			}
			<-b.Done()
		}
		for i := range prompt + 2 {
			found, err := e.space.Exists(e.keys(upTo(first(i), first(i)+pages)))
			if err != nil || found.Count() != found.Leading() {
				t.Fatalf("after %d prompts %d pages of prompt %d are left, %d of them at its start: %v",
					prompt+2, found.Count(), i, found.Leading(), err)
			}
		}
	}
	if st := s.Stats().Disk; st.Evicted == 0 {
		t.Error("the disk has given nothing up")
	}
}

// Pinned pages stay, in memory and on the disk, however much is put.
func TestPins(t *testing.T) {
	s := onDisk(t, disktest.New(simBytes, 1), false)
	defer shut(t, s)
	e := newEngine(t, s, "a", 8192)
	defer e.close()
	e.put(upTo(1000, 1030)...)
	e.put(upTo(0, 30)...)
	pins, err := e.space.Pin(e.keys(append(upTo(20, 30), upTo(1000, 1010)...)))
	if err != nil || pins.Found().Count() != 20 {
		t.Fatalf("%d pages are pinned: %v", pins.Found().Count(), err)
	}
	for i := range 40 {
		e.put(upTo(2000+i*30, 2030+i*30)...)
	}
	if n := count(e.get(append(upTo(20, 30), upTo(1000, 1010)...)...), Hit); n != 20 {
		t.Errorf("%d of 20 pinned pages are there", n)
	}
	pins.Release()
	for i := range 100 {
		e.put(upTo(5000+i*30, 5030+i*30)...)
	}
	if n := count(e.get(append(upTo(20, 30), upTo(1000, 1010)...)...), Hit); n != 0 {
		t.Errorf("%d pages are there long after the pins", n)
	}
}

// Pins of one page have a bound of their own, and leave room for the page's reads.
func TestPinsOfOnePage(t *testing.T) {
	s := onDisk(t, disktest.New(simBytes, 1), false)
	defer shut(t, s)
	e := newEngine(t, s, "a", 8192)
	defer e.close()
	e.put(1)
	var all []*Pins
	var err error
	for err == nil && len(all) < 1<<16 {
		var p *Pins
		if p, err = e.space.Pin(e.keys([]int{1})); err == nil {
			all = append(all, p)
		}
	}
	if re := (*RequestError)(nil); !errors.As(err, &re) || re.Field != "keys[0]" {
		t.Errorf("after %d pins of one page: %v", len(all), err)
	}
	if n := count(e.get(1), Hit); n != 1 {
		t.Error("a page with many pins is a miss")
	}
	for _, p := range all {
		p.Release()
	}
	p, err := e.space.Pin(e.keys([]int{1}))
	if err != nil {
		t.Fatal(err)
	}
	p.Release()
}

// Many engines at once put, get, cancel and remove, over a disk: no wrong page, no batch that does
// not end.
func TestManyEngines(t *testing.T) {
	s := onDisk(t, disktest.New(simBytes, 1), false)
	defer shut(t, s)
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			e := newEngine(t, s, []string{"a", "b"}[g%2], []int{4096, 12_000}[g%2])
			defer e.close()
			r := rand.New(rand.NewPCG(uint64(g), 9))
			for range 60 {
				from := r.IntN(100)
				pages := upTo(from, from+1+r.IntN(30))
				switch r.IntN(8) {
				case 0:
					b, err := e.space.Get(e.keys(pages), e.pool, e.blocks(len(pages)))
					if err != nil {
						t.Error(err)
						return
					}
					b.Cancel()
					<-b.Done()
				case 1:
					if g == 0 {
						if err := e.space.Remove(); err != nil {
							t.Error(err)
						}
					}
				case 2, 3, 4:
					e.put(pages...)
				default:
					e.get(pages...)
				}
			}
		})
	}
	wg.Wait()
}
