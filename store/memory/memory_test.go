package memory

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/store/catalog"
	"github.com/kvspray/kvspray/store/index"
	"github.com/kvspray/kvspray/store/page"
	"pgregory.net/rapid"
)

func key(owner uint16, i int) (k page.Key) {
	binary.LittleEndian.PutUint64(k[:], uint64(i)*0x9e3779b97f4a7c15)
	k[31] = byte(owner)
	return k
}

func fill(p []byte, k page.Key) {
	r := rand.NewChaCha8(k)
	_, _ = r.Read(p)
}

func open(tb testing.TB, c Config) *Tier {
	tb.Helper()
	t, err := New(c)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(t.Close)
	return t
}

// put stores a page. It returns what Reserve did.
func put(t *Tier, owner uint16, i int, after *page.Key) error {
	k := key(owner, i)
	p, err := t.Reserve(owner, &k, after)
	if err != nil {
		return err
	}
	fill(p.Bytes, k)
	t.Commit(p, mem.CRC32C(0, p.Bytes))
	t.Unpin(p)
	return nil
}

func TestRefusesSizesByName(t *testing.T) {
	if _, err := New(Config{Bytes: 1000}); err == nil || !strings.Contains(err.Error(),
		"store.memory") {
		t.Errorf("1000 bytes: %v", err)
	}
	tier := open(t, Config{Bytes: 1 << 20})
	if err := tier.SetOwner(1, 2<<20, 0, 0); err == nil || !strings.Contains(err.Error(),
		"store.memory to 16777216") {
		t.Errorf("a page that is larger than the arena: %v", err)
	}
	if err := tier.SetOwner(1, 8192, 4096, 0); err == nil || !strings.Contains(err.Error(),
		"quota") {
		t.Errorf("a quota below one page: %v", err)
	}
}

// All reserves together leave half of the arena, and a refused one changes nothing.
func TestReservesAddUp(t *testing.T) {
	tier := open(t, Config{Bytes: 1 << 20})
	for id, reserve := range []uint64{200 << 10, 200 << 10, 112 << 10} {
		if err := tier.SetOwner(uint16(id), 4096, 0, reserve); err != nil {
			t.Fatal(err)
		}
	}
	for _, reserve := range []uint64{1, 1 << 63, ^uint64(0)} {
		if err := tier.SetOwner(3, 4096, 0, reserve); err == nil ||
			!strings.Contains(err.Error(), "have reserved 524288 bytes") {
			t.Errorf("a reserve of %d: %v", reserve, err)
		}
	}
	if err := tier.SetOwner(1, 4096, 0, 100<<10); err != nil { // its own does not count twice
		t.Error(err)
	}
	if err := tier.SetOwner(3, 4096, 0, 100<<10); err != nil {
		t.Error(err)
	}
}

func TestPutIfAbsent(t *testing.T) {
	tier := open(t, Config{Bytes: 1 << 20})
	if err := tier.SetOwner(1, 8192, 0, 0); err != nil {
		t.Fatal(err)
	}
	k := key(1, 7)
	p, err := tier.Reserve(1, &k, nil)
	if err != nil {
		t.Fatal(err)
	}
	found := page.NewBitmap(1)
	if tier.Exists(1, []page.Key{k}, found); found.Get(0) {
		t.Error("a page that is being stored is seen")
	}
	if _, ok := tier.Pin(1, &k); ok {
		t.Error("a page that is being stored can be read")
	}
	if _, err := tier.Reserve(1, &k, nil); !errors.Is(err, catalog.ErrBusy) {
		t.Errorf("a second put while the first goes on: %v", err)
	}
	tier.Commit(p, 1)
	tier.Unpin(p)
	if _, err := tier.Reserve(1, &k, nil); !errors.Is(err, catalog.ErrExists) {
		t.Errorf("a second put: %v", err)
	}
	if _, ok := tier.Pin(2, &k); ok {
		t.Error("another owner reads the page by its key")
	}
	p, ok := tier.Pin(1, &k)
	if !ok {
		t.Fatal("the page is gone")
	}
	tier.RemoveOwner(1)
	if _, ok := tier.Pin(1, &k); ok {
		t.Error("a removed page can be read")
	}
	if _, err := tier.Reserve(1, &k, nil); !errors.Is(err, catalog.ErrBusy) {
		t.Errorf("a put while a reader holds the removed page: %v", err)
	}
	tier.Unpin(p)
	if err := put(tier, 1, 7, nil); err != nil {
		t.Errorf("a put after the last reader: %v", err)
	}
	p, _ = tier.Pin(1, &k)
	tier.Drop(p)
	if tier.Used(1) != 0 {
		t.Error("a dropped page stays")
	}
}

// All pages pinned: a put is refused, and works again when one is not.
func TestPinsHold(t *testing.T) {
	tier := open(t, Config{Bytes: 64 << 10, SlabBytes: 64 << 10})
	if err := tier.SetOwner(1, 8192, 0, 0); err != nil {
		t.Fatal(err)
	}
	var pins []Page
	for i := range 8 {
		if err := put(tier, 1, i, nil); err != nil {
			t.Fatal(err)
		}
		k := key(1, i)
		p, _ := tier.Pin(1, &k)
		pins = append(pins, p)
	}
	if err := put(tier, 1, 100, nil); !errors.Is(err, catalog.ErrFull) {
		t.Fatalf("all pages are pinned: %v", err)
	}
	tier.Unpin(pins[3])
	if err := put(tier, 1, 100, nil); err != nil {
		t.Fatal(err)
	}
	k := key(1, 3)
	if _, ok := tier.Pin(1, &k); ok {
		t.Error("page 3 was not the one to go")
	}
}

// Random operations of three owners, two sizes and prompts: a page that is found has its bytes, no
// slot is used twice, and no quota is exceeded.
func TestTier(t *testing.T) {
	sizes := []int{0, 4096, 8192, 20000}
	rapid.Check(t, func(t *rapid.T) {
		tier, err := New(Config{Bytes: 256 << 10, SlabBytes: 64 << 10,
			MaxPages: rapid.SampledFrom([]int{12, 64}).Draw(t, "pages")})
		if err != nil {
			t.Fatal(err)
		}
		defer tier.Close()
		quota := []uint64{0, 0, 64 << 10, 0}
		for id := uint16(1); id < 4; id++ {
			if err := tier.SetOwner(id, sizes[id], quota[id], uint64(id/3)*40960); err != nil {
				t.Fatal(err)
			}
		}
		var pins []Page
		owner, number := rapid.Uint16Range(1, 3), rapid.IntRange(0, 39)
		verify := func(p Page) {
			want := make([]byte, len(p.Bytes))
			fill(want, tier.pages.At(p.node).Key)
			if !bytes.Equal(want, p.Bytes) || mem.CRC32C(0, p.Bytes) != p.CRC {
				t.Fatal("a page has other bytes")
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"prompt": func(t *rapid.T) {
				id, first, n := owner.Draw(t, "owner"), number.Draw(t, "first"), rapid.IntRange(1,
					8).Draw(t, "pages")
				var after *page.Key
				for i := first; i < first+n; i++ {
					k := key(id, i)
					if err := put(tier, id, i, after); err != nil && !errors.Is(err,
						catalog.ErrExists) && !errors.Is(err, catalog.ErrFull) && !errors.Is(err,
						catalog.ErrBusy) {
						t.Fatal(err)
					}
					after = &k
				}
			},
			"get": func(t *rapid.T) {
				id := owner.Draw(t, "owner")
				k := key(id, number.Draw(t, "key"))
				if p, ok := tier.Pin(id, &k); ok {
					verify(p)
					tier.Unpin(p)
				}
			},
			"pin": func(t *rapid.T) {
				id := owner.Draw(t, "owner")
				k := key(id, number.Draw(t, "key"))
				if p, ok := tier.Pin(id, &k); ok && len(pins) < 10 {
					pins = append(pins, p)
				} else if ok {
					tier.Unpin(p)
				}
			},
			"unpin": func(t *rapid.T) {
				if len(pins) > 0 {
					verify(pins[0])
					tier.Unpin(pins[0])
					pins = pins[1:]
				}
			},
			"remove": func(t *rapid.T) {
				if rapid.IntRange(0, 9).Draw(t, "seldom") == 0 {
					tier.RemoveOwner(owner.Draw(t, "owner"))
				}
			},
			"": func(t *rapid.T) {
				for _, p := range pins {
					verify(p)
				}
				taken := map[uint32]bool{}
				pages := 0
				for n := index.Node(1); n <= tier.pages.Last(); n++ {
					e := tier.pages.At(n)
					if e.State != index.Live {
						continue
					}
					pages++
					if sl := tier.slabs.all[e.Loc/tier.slabs.perSlab]; !slices.Contains(sl.nodes,
						uint32(n)) {
						t.Fatalf("the slab of page %d does not list it", n)
					}
					own := tier.owners[tier.pages.Owner(uint32(n))]
					size := tier.slabs.classes[own.class].bytes / unit
					for u := e.Loc; u < e.Loc+size; u++ {
						if taken[u] {
							t.Fatalf("unit %d of the arena has two pages", u)
						}
						taken[u] = true
					}
				}
				slots := 0
				for i, c := range tier.slabs.classes {
					free := 0
					for n := range tier.slabs.all {
						if sl := &tier.slabs.all[n]; i > 0 && int(sl.class) == i {
							free += len(sl.free)
							slots += tier.slabs.used(uint32(n))
						}
					}
					if free != c.free {
						t.Fatalf("class %d has %d free slots, and counts %d", i, free, c.free)
					}
				}
				if slots != pages {
					t.Fatalf("%d slots are taken by %d pages", slots, pages)
				}
				if pages != tier.pages.Pages() {
					t.Fatalf("%d pages, the policy counts %d", pages, tier.pages.Pages())
				}
				for id := uint16(1); id < 4; id++ {
					if used := tier.Used(id); quota[id] != 0 && used > quota[id] {
						t.Fatalf("owner %d has %d bytes", id, used)
					}
				}
			},
		})
		for _, p := range pins {
			tier.Unpin(p)
		}
		for id := uint16(1); id < 4; id++ {
			tier.RemoveOwner(id)
		}
		if tier.pages.Len() != 0 || tier.pages.Pages() != 0 {
			t.Fatalf("%d entries and %d pages are left", tier.pages.Len(), tier.pages.Pages())
		}
	})
}

// Pages of one size take over the arena from pages of another, and back.
func TestSlabsChangeTheirClass(t *testing.T) {
	tier := open(t, Config{Bytes: 1 << 20, SlabBytes: 64 << 10})
	for id, size := range map[uint16]int{1: 4096, 2: 16384} {
		if err := tier.SetOwner(id, size, 0, 0); err != nil {
			t.Fatal(err)
		}
	}
	for round := range 3 {
		for i := range 400 {
			if err := put(tier, 1, round*1000+i, nil); err != nil {
				t.Fatal(err)
			}
		}
		for i := range 100 {
			if err := put(tier, 2, round*1000+i, nil); err != nil {
				t.Fatal(err)
			}
		}
		if used := tier.Used(2); used < 512<<10 {
			t.Fatalf("round %d: pages of the second size have %d bytes of 1 MiB", round, used)
		}
	}
}

func TestConcurrent(t *testing.T) {
	tier := open(t, Config{Bytes: 512 << 10, SlabBytes: 64 << 10})
	for id, size := range map[uint16]int{1: 4096, 2: 16384} {
		if err := tier.SetOwner(id, size, 0, 0); err != nil {
			t.Fatal(err)
		}
	}
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(g), 1))
			for range 2000 {
				id, i := uint16(1+r.IntN(2)), r.IntN(200)
				k := key(id, i)
				if p, ok := tier.Pin(id, &k); ok {
					if mem.CRC32C(0, p.Bytes) != p.CRC {
						t.Error("a page has other bytes")
					}
					tier.Unpin(p)
				} else if err := put(tier, id, i, nil); err != nil && !errors.Is(err,
					catalog.ErrExists) && !errors.Is(err, catalog.ErrBusy) && !errors.Is(err,
					catalog.ErrFull) {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
}

// The whole of what a page costs beside its bytes.
func TestIndexBytesPerPage(t *testing.T) {
	const pages = 100_000
	tier := open(t, Config{Bytes: 1 << 20, MaxPages: pages})
	if per := float64(tier.IndexBytes()) / pages; per > 80 {
		t.Errorf("%.2f bytes a page, at most 80", per)
	} else {
		t.Logf("%.2f bytes a page", per)
	}
}

// Keys lists the pages of one owner, each once, in as many calls as the caller's room asks for.
func TestKeys(t *testing.T) {
	tier := open(t, Config{Bytes: 1 << 20})
	for id := range uint16(2) {
		if err := tier.SetOwner(id, 4096, 0, 0); err != nil {
			t.Fatal(err)
		}
	}
	want := map[page.Key]bool{}
	for i := range 25 {
		if err := errors.Join(put(tier, 0, i, nil), put(tier, 1, i, nil)); err != nil {
			t.Fatal(err)
		}
		want[key(1, i)] = true
	}
	calls := 0
	for next := uint32(0); calls == 0 || next != 0; calls++ {
		var got []page.Key
		got, next = tier.Keys(1, next, make([]page.Key, 0, 10))
		for _, k := range got {
			if !want[k] {
				t.Fatalf("%x: twice, or another owner's", k)
			}
			delete(want, k)
		}
	}
	if len(want) != 0 || calls != 3 {
		t.Errorf("%d of 25 keys are missing after %d calls", len(want), calls)
	}
}

// The eviction age is the time since the last use of what was given up.
func TestEvictionAge(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		tier := open(t, Config{Bytes: 64 << 10, SlabBytes: 16 << 10})
		if err := tier.SetOwner(0, 4096, 0, 0); err != nil {
			t.Fatal(err)
		}
		for i := range 16 {
			if err := put(tier, 0, i, nil); err != nil {
				t.Fatal(err)
			}
		}
		if s := tier.Stats(); s.EvictionAge != 0 || s.Evicted != 0 {
			t.Fatalf("%+v", s)
		}
		time.Sleep(time.Minute)
		if err := put(tier, 0, 16, nil); err != nil {
			t.Fatal(err)
		}
		if s := tier.Stats(); s.EvictionAge != time.Minute || s.Evicted != 1 {
			t.Errorf("%+v", s)
		}
		time.Sleep(16 * time.Minute)
		if err := put(tier, 0, 17, nil); err != nil {
			t.Fatal(err)
		}
		if s := tier.Stats(); s.EvictionAge != 2*time.Minute { // the mean moved by a sixteenth
			t.Errorf("%+v", s)
		}
	})
}
