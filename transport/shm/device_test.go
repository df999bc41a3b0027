package shm

import (
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// instant is a device whose moves take no time: what is left is the lane's own cost.
type instant struct{}

func (instant) Gather([]byte, []mem.Block) error  { return nil }
func (instant) Scatter([]mem.Block, []byte) error { return nil }
func (instant) Move(_, _ []mem.Block) error       { return nil }
func (instant) Lend() []byte                      { return nil }
func (instant) Return([]byte)                     {}
func (instant) LendBytes() int                    { return 0 }

func (d instant) Import(id mem.ID, handle []byte, _ int, size uint64) (*mem.Region, error) {
	return mem.NewDevice(id, mem.DeviceMemory{Device: d, Addr: 1 << 20, Size: size,
		Handle: handle, FD: -1})
}

type deviceMemory struct {
	*memory
	region *mem.Region
}

func (m *deviceMemory) Device() mem.Device { return m.region.Device() }

// link is a device between whose memories bytes take as long as on a link of that many GB/s, two
// moves at once.
type link struct {
	instant
	gbps  float64
	pipes chan struct{}

	mu   sync.Mutex
	free time.Time // guarded by mu: when the link is done with all that it was given
}

// linkDelay is what a move takes beside the link: its first pack and its last unpack.
const linkDelay = 60 * time.Microsecond

func (d *link) Move(dst, _ []mem.Block) error {
	d.pipes <- struct{}{}
	defer func() { <-d.pipes }()
	bytes := uint64(0)
	for i := range dst {
		bytes += dst[i].Len
	}
	d.mu.Lock()
	now := time.Now()
	if d.free.Before(now) {
		d.free = now
	}
	d.free = d.free.Add(time.Duration(float64(bytes) / d.gbps))
	end := d.free.Add(linkDelay)
	d.mu.Unlock()
	for left := time.Until(end); left > 0; left = time.Until(end) {
		pause := unix.NsecToTimespec(int64(left))
		_ = unix.Nanosleep(&pause, nil) // a timer's channel would be a millisecond late
	}
	return nil
}

func (d *link) Import(id mem.ID, handle []byte, _ int, size uint64) (*mem.Region, error) {
	return mem.NewDevice(id, mem.DeviceMemory{Device: d, Addr: 1 << 20, Size: size,
		Handle: handle, FD: -1})
}

// importer is a device and what imports its memory.
type importer interface {
	mem.Device
	Devices
}

// scattered is device memory in blocks that lie anywhere, or at equal distances.
func scattered(tb testing.TB, d importer, bytes, block, seed uint64, even bool) *deviceMemory {
	m := newMemory(tb, bytes, block, seed)
	r, err := d.Import(mem.NewID(), []byte{1}, -1, 2*bytes)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(r.Release)
	for k := range m.blocks {
		m.blocks[k].Region = r
		if even {
			m.blocks[k].Off = uint64(k) * 2 * block
		}
	}
	return &deviceMemory{m, r}
}

// cold is a device that counts how often it is warmed.
type cold struct {
	instant
	warmed atomic.Int32
}

func (d *cold) Warm() { d.warmed.Add(1) }

func (d *cold) Import(id mem.ID, handle []byte, _ int, size uint64) (*mem.Region, error) {
	return mem.NewDevice(id, mem.DeviceMemory{Device: d, Addr: 1 << 20, Size: size,
		Handle: handle, FD: -1})
}

// TestHintWarms: a hint warms each GPU of the peer's regions once.
func TestHintWarms(t *testing.T) {
	var d cold
	p := newPair(t, Config{Devices: &d, pollers: 1, cold: 1})
	for slot := range transfer.Slot(2) { // two regions of it
		from, to := scattered(t, &d, 1<<20, 16<<10, 1, false), scattered(t, &d, 1<<20, 16<<10, 2, false)
		o, g := p.bind(t, slot, from.memory, to.memory)
		o.Memory = from
		p.dst.mu.Lock()
		g.Memory = to
		p.dst.mu.Unlock()
		p.move(t, o, from.space, 4, p.lane)
	}
	if n := d.warmed.Load(); n != 0 {
		t.Errorf("warmed %d times without a hint", n)
	}
	p.lane.(*lane).WakeHint()
	for end := time.Now().Add(waitFor); d.warmed.Load() != 1; runtime.Gosched() {
		if time.Now().After(end) {
			t.Fatalf("warmed %d times", d.warmed.Load())
		}
	}
	from, to := scattered(t, &d, 1<<20, 16<<10, 1, false), scattered(t, &d, 1<<20, 16<<10, 2, false)
	o, g := p.bind(t, 9, from.memory, to.memory)
	o.Memory = from
	p.dst.mu.Lock()
	g.Memory = to
	p.dst.mu.Unlock()
	p.move(t, o, from.space, 4, p.lane) // after everything that the hint announced
	if n := d.warmed.Load(); n != 1 {
		t.Errorf("warmed %d times, want once", n)
	}
}

// short limits the bytes of its chunks, and has a block less of one of them.
type short struct {
	*deviceMemory
	chunk uint32
}

func (s *short) Resolve(dst []mem.Block, r transfer.Range) ([]mem.Block, error) {
	dst, err := s.deviceMemory.Resolve(dst, r)
	if err == nil && r.First <= s.chunk && s.chunk < r.End() {
		dst = dst[:len(dst)-1]
	}
	return dst, err
}

// Pulls whose two sides are not as long are refused, by themselves: those that share a batch with
// them land.
func TestBlocksOutOfStep(t *testing.T) {
	p := newPair(t, Config{Devices: instant{}, Workers: 8})
	const chunks = 32
	from, to := scattered(t, instant{}, chunks*transfer.ChunkBytes, 16<<10, 1, false),
		scattered(t, instant{}, chunks*transfer.ChunkBytes, 16<<10, 2, false)
	o, g := p.bind(t, 1, from.memory, to.memory)
	o.Memory = from
	p.dst.mu.Lock()
	g.Memory = &short{to, 7}
	p.dst.mu.Unlock()
	var batch []transport.Slice
	for i := range uint32(chunks) {
		batch = append(batch, transport.Slice{Origin: o, Range: transfer.Range{First: i, Count: 1},
			Attempt: 1, Cookie: uint64(i)})
	}
	if err := p.lane.Move(batch); err != nil {
		t.Fatal(err)
	}
	for range batch {
		r := p.src.result(t)
		want, why := transfer.Landed, transfer.ReasonNone
		if r.Cookie == 7 {
			want, why = transfer.Rejected, transfer.ReasonRange
		}
		if r.Outcome != want || r.Reason != why {
			t.Errorf("chunk %d ended %s (%s): %v", r.Cookie, r.Outcome, r.Reason, r.Err)
		}
	}
	if n := to.bitmap.Count(); n != chunks-1 {
		t.Errorf("%d chunks landed", n)
	}
}

// BenchmarkDevicePull is the cost of a lane beside the copy: slices as the scheduler gives them
// where a GPU is, in blocks that lie anywhere, or at equal distances.
func BenchmarkDevicePull(b *testing.B) {
	for _, c := range []struct {
		name  string
		block uint64
		even  bool
	}{{"16 KiB random", 16 << 10, false}, {"16 KiB even", 16 << 10, true}, {"2 KiB random",
		2 << 10, false}} {
		b.Run(c.name, func(b *testing.B) { benchmarkDevicePull(b, instant{}, c.block, c.even) })
	}
}

// BenchmarkDeviceLink is how much of a link a lane uses. One lane's share of the CPU decides how
// fast a link it may be: on a host of two cores some 100 GB/s.
func BenchmarkDeviceLink(b *testing.B) {
	for _, gbps := range []float64{50, 100, 200} {
		b.Run(fmt.Sprintf("%.0f GB per s", gbps), func(b *testing.B) {
			benchmarkDevicePull(b, &link{gbps: gbps, pipes: make(chan struct{}, 2)}, 16<<10, false)
			b.ReportMetric(float64(b.N)*deviceSlice/float64(b.Elapsed().Nanoseconds())/gbps, "of-link")
		})
	}
}

func benchmarkDevicePull(b *testing.B, d importer, block uint64, even bool) {
	p := newPair(b, Config{Devices: d})
	const bytes = 1 << 30
	ends := []*deviceMemory{scattered(b, d, bytes, block, 0, even), scattered(b, d, bytes,
		block, 1, even)}
	o := &transport.Origin{Peer: p.dst.boot, Slot: 1, Gen: 7, Memory: ends[0],
		Valid: valid}
	const chunks, slices = deviceSlice / transfer.ChunkBytes, bytes / deviceSlice
	batch := make([]transport.Slice, 1)
	b.SetBytes(deviceSlice)
	b.ReportAllocs()
	moved, ended := 0, 0
	await := func() {
		if r := <-p.src.results; r.Outcome != transfer.Landed {
			b.Fatal(r.Outcome, r.Reason, r.Err)
		}
		ended++
	}
	b.ResetTimer()
	for ended < b.N {
		for moved < b.N && moved-ended < maxInFlight {
			if moved%slices == 0 { // as a transfer of its own: nothing has landed yet
				for moved > ended {
					await()
				}
				g := &transport.Grant{Peer: p.src.boot, Slot: 1, Gen: 7, Memory: ends[1],
					Landed: ends[1].Landed}
				g.Receipt.Reset(ends[1].space.NumChunks())
				p.dst.mu.Lock()
				p.dst.grants[1] = g
				p.dst.mu.Unlock()
			}
			batch[0] = transport.Slice{Origin: o, Range: transfer.Range{First: uint32(moved%slices) * chunks,
				Count: chunks}, Attempt: uint32(1 + moved)}
			if err := p.lane.Move(batch); err != nil {
				b.Fatal(err)
			}
			moved++
		}
		await()
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(deviceSlice/block),
		"ns/block")
}
