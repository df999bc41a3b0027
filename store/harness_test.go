package store

import (
	"bytes"
	"context"
	"encoding/binary"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/leaktest"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/store/disk"
	"github.com/kvspray/kvspray/store/disk/disktest"
	"github.com/kvspray/kvspray/store/memory"
	"github.com/kvspray/kvspray/store/object"
	"github.com/kvspray/kvspray/store/object/objecttest"
	"github.com/kvspray/kvspray/store/page"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

type fatal interface {
	Fatal(...any)
	Fatalf(string, ...any)
	Helper()
}

// namespace has pages of a size in bytes.
func namespace(name string, bytes int) page.Namespace {
	return page.Namespace{Weights: name, DType: "bfloat16", Layout: "test", PageTokens: 16,
		PageBytes: bytes, Algorithm: "sglang-sha256"}
}

// engine is a caller with memory for pages, all of one space.
type engine struct {
	t     fatal
	space *Space
	keyer *page.Keyer
	lent  *mem.Region
	onGPU []*mem.Region // views of lent on a device
	pool  *Pool         // of enginePages blocks
}

const enginePages = 64

func newEngine(t fatal, s *Store, name string, bytes int) *engine {
	t.Helper()
	ns := namespace(name, bytes)
	sp, err := s.Space(ns, s.sharesOf(ns.ID()))
	if err != nil {
		t.Fatal(err)
	}
	lent, err := mem.NewAnonymous("engine", uint64(enginePages*bytes))
	if err != nil {
		t.Fatal(err)
	}
	e := &engine{t: t, space: sp, keyer: ns.Keyer(), lent: lent}
	// Two uneven pieces, one behind the other.
	size, a := uint64(bytes), uint64(bytes/3+1)
	e.pool, err = NewPool([]Piece{{lent, 0, size, a}, {lent, a, size, size - a}}, enginePages)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func (e *engine) close() {
	e.space.Close()
	e.lent.Release()
	for _, r := range e.onGPU {
		r.Release()
	}
}

func (e *engine) key(i int) page.Key {
	var h [16]byte
	binary.LittleEndian.PutUint64(h[:], uint64(i))
	k, err := e.keyer.Key(h[:])
	if err != nil {
		e.t.Fatal(err)
	}
	return k
}

func (e *engine) keys(pages []int) (out []page.Key) {
	for _, i := range pages {
		out = append(out, e.key(i))
	}
	return out
}

// content is page i of this engine's namespace.
func (e *engine) content(i int) []byte {
	b := make([]byte, e.space.pageBytes)
	_, _ = rand.NewChaCha8(e.key(i)).Read(b)
	return b
}

func (e *engine) memory(n int) []byte {
	b, _ := e.lent.Bytes()
	return b[n*e.space.pageBytes : (n+1)*e.space.pageBytes]
}

// blocks is the first n blocks.
func (e *engine) blocks(n int) (out []uint32) {
	for i := range n {
		out = append(out, uint32(i))
	}
	return out
}

// put stores pages as one prompt and waits.
func (e *engine) put(pages ...int) []Result {
	e.t.Helper()
	for n, i := range pages {
		copy(e.memory(n), e.content(i))
	}
	b, err := e.space.Put(e.keys(pages), nil, e.pool, e.blocks(len(pages)))
	if err != nil {
		e.t.Fatal(err)
	}
	<-b.Done()
	return b.Results()
}

// get loads pages, waits, and compares every one that is a hit.
func (e *engine) get(pages ...int) []Result {
	e.t.Helper()
	for n := range pages {
		clear(e.memory(n))
	}
	b, err := e.space.Get(e.keys(pages), e.pool, e.blocks(len(pages)))
	if err != nil {
		e.t.Fatal(err)
	}
	<-b.Done()
	for n, i := range pages {
		if b.Results()[n].Outcome == Hit && !bytes.Equal(e.memory(n), e.content(i)) {
			e.t.Fatalf("WRONG PAGE %d from tier %d", i, b.Results()[n].Tier)
		}
	}
	return b.Results()
}

// uploaded has the object store have a page of the namespace, which a removal there has to record.
func (e *engine) uploaded(i int) {
	e.t.Helper()
	k, data := e.key(i), e.content(i)
	if err := e.space.object.Add(&k, nil, data, mem.CRC32C(0, data), nil); err != nil {
		e.t.Fatal(err)
	}
	if err := e.space.s.Flush(context.Background()); err != nil {
		e.t.Fatal(err)
	}
}

func upTo(from, to int) (out []int) {
	for i := from; i < to; i++ {
		out = append(out, i)
	}
	return out
}

func count(rs []Result, o Outcome) (n int) {
	for _, r := range rs {
		if r.Outcome == o {
			n++
		}
	}
	return n
}

const simSegment = 128 << 10

// soon are timeouts for a model with many faults. A page that comes later is a miss.
var soon = object.Timeouts{Open: 50 * time.Millisecond, Read: 50 * time.Millisecond,
	Small: 50 * time.Millisecond, Upload: 100 * time.Millisecond, Close: 100 * time.Millisecond}

// bucket is an object tier for tests, over a store that may have pages. Its timeouts are short, but
// not so short that a busy machine misses one.
func bucket(t fatal, p *objecttest.Process) *object.Tier {
	t.Helper()
	return bucketWith(t, p, object.Timeouts{Open: time.Second, Read: 250 * time.Millisecond,
		Small: 250 * time.Millisecond, Upload: 500 * time.Millisecond, Close: 250 * time.Millisecond})
}

func bucketWith(t fatal, p *objecttest.Process, timeouts object.Timeouts) *object.Tier {
	t.Helper()
	tier, err := object.Open(object.Config{Bucket: p, Prefix: "node", Size: 64 << 20,
		ObjectBytes: object.MinObjectBytes, MaxPages: 2048, Buffers: 4, Timeouts: timeouts})
	if err != nil {
		t.Fatal(err)
	}
	return tier
}

// onDisk opens a store of little memory over a disk.
func onDisk(t fatal, sim *disktest.Sim, writeBack bool) *Store {
	t.Helper()
	return tiered(t, sim, Config{WriteBack: writeBack})
}

// tiered is onDisk with more tiers and settings, which are in c, or without a disk.
func tiered(t fatal, sim *disktest.Sim, c Config) *Store {
	t.Helper()
	var err error
	if sim != nil {
		c.Opened, err = disk.OpenFiles([]disk.OpenDevice{{Path: "sim", File: sim,
			Size: int64(sim.Size())}}, disk.Config{SegmentBytes: simSegment, MaxPages: 2048})
		if err != nil {
			t.Fatal(err)
		}
	}
	c.Memory = inMemoryConfig()
	c.Workers, c.Fetchers, c.EraseWithin = 4, 2, 1
	s, err := Open(c)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func inMemoryConfig() memory.Config {
	return memory.Config{Bytes: 256 << 10, SlabBytes: 64 << 10}
}

func inMemory(t fatal, bytes uint64) *Store {
	t.Helper()
	s, err := Open(Config{Memory: memory.Config{Bytes: bytes}, Workers: 4})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func shut(t fatal, s *Store) {
	t.Helper()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}
