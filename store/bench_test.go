package store

import (
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/store/disk"
	"github.com/kvspray/kvspray/store/memory"
	"github.com/kvspray/kvspray/store/offheap"
	"github.com/kvspray/kvspray/store/page"
	"golang.org/x/sys/unix"
)

// rig is a store with pages, and memory to get them into.
type rig struct {
	e      *engine
	keys   []page.Key
	pool   *Pool
	blocks []uint32
}

func newRig(b *testing.B, s *Store, bytes, pages int) *rig {
	b.Helper()
	e := newEngine(b, s, "bench", bytes)
	e.lent.Release()
	var err error
	if e.lent, err = mem.NewAnonymous("engine", uint64(pages*bytes), mem.Populate()); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(e.close)
	r := &rig{e: e, keys: e.keys(upTo(0, pages))}
	whole, _ := e.lent.Bytes()
	for i := range whole {
		whole[i] = byte(i * i >> 7)
	}
	size := uint64(bytes)
	if r.pool, err = NewPool([]Piece{{e.lent, 0, size, size}}, pages); err != nil {
		b.Fatal(err)
	}
	r.blocks = e.blocks(pages)
	return r
}

func (r *rig) run(b *testing.B, start func() (*Batch, error),
	want Outcome) time.Duration {
	b.Helper()
	began := time.Now()
	batch, err := start()
	if err != nil {
		b.Fatal(err)
	}
	<-batch.Done()
	took := time.Since(began)
	if n := count(batch.Results(), want); n != len(r.keys) {
		b.Fatalf("%d of %d: %+v", n, len(r.keys), batch.Results()[0])
	}
	return took
}

func (r *rig) put() (*Batch, error) { return r.e.space.Put(r.keys, nil, r.pool, r.blocks) }

func (r *rig) get() (*Batch, error) { return r.e.space.Get(r.keys, r.pool, r.blocks) }

var benchSizes = []int{256 << 10, 4 << 20}

// A get from memory beside a copy of the same bytes, in turns, one thread each.
func BenchmarkGetFromMemory(b *testing.B) {
	mem.ChooseCopies()
	for _, size := range benchSizes {
		b.Run(fmt.Sprintf("%dKiB", size>>10), func(b *testing.B) {
			const total = 256 << 20
			s, err := Open(Config{Memory: memory.Config{Bytes: total + 64<<20, Populate: true},
				Workers: 1})
			if err != nil {
				b.Fatal(err)
			}
			defer shut(b, s)
			r := newRig(b, s, size, total/size)
			r.run(b, r.put, Stored)
			source, _ := s.Region().Bytes()
			target, _ := r.e.lent.Bytes()
			b.SetBytes(total)
			var ours, plain time.Duration
			for b.Loop() {
				began := time.Now()
				for off := 0; off < total; off += size {
					mem.Copy(target[off:off+size], source[off:off+size])
				}
				plain += time.Since(began)
				ours += r.run(b, r.get, Hit)
			}
			b.ReportMetric(float64(plain)/float64(ours), "of-memcpy")
			b.ReportMetric(float64(total*b.N)/ours.Seconds()/1e9, "GB/s")
		})
	}
}

// Put to and get from a disk beside O_DIRECT writes and reads of the same size on a file of the
// same disk, in turns. The baseline has as many threads as the store has workers, and syncs once
// for each group, as the store does.
func BenchmarkDisk(b *testing.B) {
	for _, size := range benchSizes {
		b.Run(fmt.Sprintf("%dKiB", size>>10), func(b *testing.B) {
			const total = 128 << 20
			dir := b.TempDir()
			const workers = 8
			const onDisk = 2 << 30
			base := newBaseline(b, filepath.Join(dir, "baseline"), onDisk, total, workers)
			s, err := Open(Config{Memory: memory.Config{Bytes: 512 << 20, Populate: true},
				Workers: workers,
				Disk:    &disk.Config{Devices: []disk.Device{{Path: dir, Size: onDisk}}}})
			if err != nil {
				b.Fatal(err)
			}
			defer shut(b, s)
			r := newRig(b, s, size, total/size)
			var putOurs, putPlain, getOurs, getPlain time.Duration
			b.SetBytes(total)
			for b.Loop() {
				if err := r.e.space.Remove(); err != nil {
					b.Fatal(err)
				}
				group := s.disk.GroupPages(size) * size
				putPlain += base.each(b, group, true)
				putOurs += r.run(b, r.put, Stored)
				s.memory.RemoveOwner(r.e.space.number) // the disk alone has them
				getPlain += base.each(b, size, false)
				getOurs += r.run(b, r.get, Hit)
			}
			if hits := s.Stats().Hits[Disk]; hits != uint64(b.N*total/size) {
				b.Fatalf("%d pages came from the disk", hits)
			}
			b.ReportMetric(float64(putPlain)/float64(putOurs), "put-of-O_DIRECT")
			b.ReportMetric(float64(getPlain)/float64(getOurs), "get-of-O_DIRECT")
			b.ReportMetric(float64(total*b.N)/putOurs.Seconds()/1e6, "put-MB/s")
			b.ReportMetric(float64(total*b.N)/getOurs.Seconds()/1e6, "get-MB/s")
		})
	}
}

type baseline struct {
	f       *os.File
	buf     *offheap.Array[byte]
	total   int
	threads int
	size    int // of the file, of which each round of writes takes the next part, as a log does
	at      int
}

func newBaseline(b *testing.B, name string, size, total, threads int) *baseline {
	b.Helper()
	f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE|unix.O_DIRECT, 0o600)
	if err != nil {
		b.Fatal(err)
	}
	if err := unix.Fallocate(int(f.Fd()), 0, 0, int64(size)); err != nil {
		b.Fatal(err)
	}
	buf, err := offheap.New[byte](total)
	if err != nil {
		b.Fatal(err)
	}
	mem.Fill(buf.Elems(), 3)
	b.Cleanup(func() { _ = f.Close(); buf.Free() })
	return &baseline{f, buf, total, threads, size, 0}
}

// each writes the file once in pieces, syncing each, one after another as a log does; or reads it
// once by all threads.
func (d *baseline) each(b *testing.B, piece int, write bool) time.Duration {
	b.Helper()
	if write {
		d.at = (d.at + d.total) % d.size
	}
	began := time.Now()
	if write {
		for off := 0; off < d.total; off += piece {
			end := min(off+piece, d.total)
			if _, err := d.f.WriteAt(d.buf.Elems()[off:end], int64(d.at+off)); err != nil {
				b.Fatal(err)
			}
			if err := unix.Fdatasync(int(d.f.Fd())); err != nil {
				b.Fatal(err)
			}
		}
		return time.Since(began)
	}
	errs := make(chan error, d.threads)
	for t := range d.threads {
		go func() {
			var err error
			for off := t * piece; off < d.total && err == nil; off += d.threads * piece {
				_, err = d.f.ReadAt(d.buf.Elems()[off:min(off+piece, d.total)], int64(d.at+off))
			}
			errs <- err
		}()
	}
	for range d.threads {
		if err := <-errs; err != nil {
			b.Fatal(err)
		}
	}
	return time.Since(began)
}

// A request for 10,000 keys of a memory tier that has the first 600.
func BenchmarkExists(b *testing.B) {
	s := inMemory(b, 64<<20)
	defer shut(b, s)
	e := newEngine(b, s, "bench", 4096)
	defer e.close()
	const half = 600 // MaxPages of such a small arena is 1,024
	for i := 0; i < half; i += 50 {
		e.put(upTo(i, i+50)...)
	}
	keys := e.keys(upTo(0, page.MaxBatch))
	for b.Loop() {
		found, err := e.space.Exists(keys)
		if err != nil || found.Leading() != half {
			b.Fatalf("%d exist: %v", found.Leading(), err)
		}
	}
}

// inertDevice is a GPU of whose memory nothing is read or written.
type inertDevice struct{ mem.Device }

// A get from memory to a GPU whose driver takes no time: a page has a piece in each of 32 regions,
// as those of an engine with 32 layers.
func BenchmarkGetToGPU(b *testing.B) {
	const size, pages, layers, piece = 2 << 20, 256, 32, 64 << 10
	var calls atomic.Int64
	s, err := Open(Config{Memory: memory.Config{Bytes: pages*size + 64<<20, Populate: true},
		Workers: 2, Copy: func(_, _ []mem.Block) error { calls.Add(1); return nil }})
	if err != nil {
		b.Fatal(err)
	}
	defer shut(b, s)
	r := newRig(b, s, size, pages)
	r.run(b, r.put, Stored)
	var pieces []Piece
	for i := range uint64(layers) {
		region, err := mem.NewDevice(mem.NewID(), mem.DeviceMemory{Device: inertDevice{},
			Addr: (i + 1) << 40, Size: pages * piece, FD: -1})
		if err != nil {
			b.Fatal(err)
		}
		pieces = append(pieces, Piece{region, 0, piece, piece})
	}
	if r.pool, err = NewPool(pieces, pages); err != nil {
		b.Fatal(err)
	}
	b.SetBytes(pages * size)
	for b.Loop() {
		r.run(b, r.get, Hit)
	}
	b.ReportMetric(float64(calls.Load())/float64(b.N*pages), "calls/page")
}
