package index

import (
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"os"
	"reflect"
	"strconv"
	"strings"
	"testing"

	"github.com/kvspray/kvspray/store/page"
	"pgregory.net/rapid"
)

func key(i int) (k page.Key) {
	r := rand.NewPCG(uint64(i), 1)
	for o := 0; o < len(k); o += 8 {
		binary.LittleEndian.PutUint64(k[o:], r.Uint64())
	}
	return k
}

func table(tb testing.TB, pages int) *Table {
	tb.Helper()
	t, err := New(pages)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(t.Close)
	return t
}

// A table is a map with bounds.
func TestTableIsAMap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const pages, keys = 20, 40
		tab, err := New(pages)
		if err != nil {
			t.Fatal(err)
		}
		defer tab.Close()
		model := map[int]Node{}
		t.Repeat(map[string]func(*rapid.T){
			"insert": func(t *rapid.T) {
				i := rapid.IntRange(0, keys-1).Draw(t, "key")
				if _, ok := model[i]; ok {
					return
				}
				k := key(i)
				n, err := tab.Insert(&k)
				if len(model) == pages {
					if !errors.Is(err, ErrFull) {
						t.Fatalf("a full table: %v", err)
					}
					return
				}
				if err != nil {
					t.Fatal(err)
				}
				tab.At(n).CRC = uint32(i)
				model[i] = n
			},
			"delete": func(t *rapid.T) {
				i := rapid.IntRange(0, keys-1).Draw(t, "key")
				if n, ok := model[i]; ok {
					tab.Delete(n)
					delete(model, i)
				}
			},
			"": func(t *rapid.T) {
				all, nodes := make([]page.Key, keys), make([]Node, keys)
				for i := range keys {
					all[i] = key(i)
				}
				tab.FindAll(all, nodes)
				for i := range keys {
					if want := model[i]; nodes[i] != want || tab.Find(&all[i]) != want {
						t.Fatalf("key %d: node %d, want %d", i, nodes[i], want)
					}
					if n := nodes[i]; n != 0 && tab.At(n).CRC != uint32(i) {
						t.Fatalf("key %d has the entry of %d", i, tab.At(n).CRC)
					}
				}
				if tab.Len() != len(model) {
					t.Fatalf("length %d, want %d", tab.Len(), len(model))
				}
			},
		})
	})
}

func TestSizes(t *testing.T) {
	if size := reflect.TypeFor[Entry]().Size(); size != 48 {
		t.Errorf("an entry has %d bytes", size)
	}
	tab := table(t, 1000)
	if per := float64(tab.Bytes()) / 1000; per > 52.1 {
		t.Errorf("%.1f bytes per page", per)
	}
}

func TestFindAllocatesNothing(t *testing.T) {
	tab := table(t, 100)
	keys, nodes := make([]page.Key, 1000), make([]Node, 1000)
	if n := testing.AllocsPerRun(10, func() { tab.FindAll(keys, nodes) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// resident is the process's memory in bytes.
func resident(tb testing.TB) int {
	tb.Helper()
	b, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		tb.Fatal(err)
	}
	pages, err := strconv.Atoi(strings.Fields(string(b))[1])
	if err != nil {
		tb.Fatal(err)
	}
	return pages * os.Getpagesize()
}

// Ten million pages, and a request for 10,000 keys of which half are there.
func BenchmarkFindAll10M(b *testing.B) {
	const pages = 10_000_000
	before := resident(b)
	tab := table(b, pages)
	for i := range pages {
		k := key(i)
		if _, err := tab.Insert(&k); err != nil {
			b.Fatal(err)
		}
	}
	perPage := float64(resident(b)-before) / pages
	keys, nodes := make([]page.Key, page.MaxBatch), make([]Node, page.MaxBatch)
	r := rand.New(rand.NewPCG(1, 2))
	b.ResetTimer()
	for b.Loop() {
		b.StopTimer()
		for i := range keys {
			keys[i] = key(r.IntN(2 * pages))
		}
		b.StartTimer()
		tab.FindAll(keys, nodes)
	}
	b.ReportMetric(perPage, "B/page")
	b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(b.N)/1000, "ms/10k-keys")
}
