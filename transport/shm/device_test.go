package shm

import (
	"testing"

	"github.com/kvspray/kvspray/internal/mem"
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
	return mem.NewDevice(id, mem.DeviceMemory{Device: d, Addr: 1 << 20, Size: size, Handle: handle, FD: -1})
}

type deviceMemory struct {
	*memory
	region *mem.Region
}

func (m *deviceMemory) Device() mem.Device { return m.region.Device() }

// BenchmarkDevicePull is the cost of a lane beside the copy: slices as the scheduler gives them where a GPU is, in blocks of 16 KiB that
// lie anywhere, or at equal distances.
func BenchmarkDevicePull(b *testing.B) {
	for _, c := range []struct {
		name  string
		even  bool
		lanes int
	}{{"random", false, 1}, {"random, 2 lanes", false, 2}, {"even", true, 1}} {
		b.Run(c.name, func(b *testing.B) { benchmarkDevicePull(b, c.even, c.lanes) })
	}
}

func benchmarkDevicePull(b *testing.B, even bool, lanes int) {
	p := newPair(b, Config{Devices: instant{}})
	all := []transport.Lane{p.lane}
	for len(all) < lanes {
		all = append(all, p.dial(b))
	}
	const bytes, block = 256 << 20, 16 << 10
	ends := make([]*deviceMemory, 2)
	for i := range ends {
		m := newMemory(b, bytes, block, uint64(i))
		r, err := instant{}.Import(mem.NewID(), []byte{1}, -1, 2*bytes)
		if err != nil {
			b.Fatal(err)
		}
		defer r.Release()
		for k := range m.blocks {
			m.blocks[k].Region = r
			if even {
				m.blocks[k].Off = uint64(k) * 2 * block
			}
		}
		ends[i] = &deviceMemory{m, r}
	}
	o := &transport.Origin{Peer: p.dst.boot, Slot: 1, Gen: 7, Source: ends[0]}
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
		for moved < b.N && moved-ended < lanes*maxInFlight {
			if moved%slices == 0 { // as a transfer of its own: nothing has landed yet
				for moved > ended {
					await()
				}
				g := &transport.Grant{Peer: p.src.boot, Slot: 1, Gen: 7, Sink: ends[1]}
				p.dst.mu.Lock()
				p.dst.grants[1] = g
				p.dst.mu.Unlock()
			}
			batch[0] = transport.Slice{Origin: o, Range: transfer.Range{First: uint32(moved%slices) * chunks, Count: chunks}, Attempt: uint32(1 + moved)}
			if err := all[moved%lanes].Move(batch); err != nil {
				b.Fatal(err)
			}
			moved++
		}
		await()
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/(deviceSlice/block), "ns/block")
}
