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

// BenchmarkDevicePull is the cost of a lane beside the copy: slices of 1 MiB in blocks of 16 KiB.
func BenchmarkDevicePull(b *testing.B) {
	p := newPair(b, Config{Devices: instant{}})
	const bytes = 256 << 20
	ends := make([]*deviceMemory, 2)
	for i := range ends {
		m := newMemory(b, bytes, 16<<10, uint64(i))
		r, err := instant{}.Import(mem.NewID(), []byte{1}, -1, 2*bytes)
		if err != nil {
			b.Fatal(err)
		}
		defer r.Release()
		for k := range m.blocks {
			m.blocks[k].Region = r
		}
		ends[i] = &deviceMemory{m, r}
	}
	g := &transport.Grant{Peer: p.src.boot, Slot: 1, Gen: 7, Sink: ends[1]}
	p.dst.mu.Lock()
	p.dst.grants[1] = g
	p.dst.mu.Unlock()
	o := &transport.Origin{Peer: p.dst.boot, Slot: 1, Gen: 7, Source: ends[0]}
	const chunks = sliceBytes / transfer.ChunkBytes
	b.SetBytes(sliceBytes)
	b.ReportAllocs()
	moved, ended := 0, 0
	b.ResetTimer()
	for ended < b.N {
		for moved < b.N && moved-ended < maxInFlight {
			s := transport.Slice{Origin: o, Range: transfer.Range{First: uint32(moved%(bytes/sliceBytes)) * chunks, Count: chunks}, Attempt: uint32(1 + moved)}
			if moved%(bytes/sliceBytes) == 0 { // as a transfer of its own: nothing has landed yet
				for moved > ended {
					<-p.src.results
					ended++
				}
				g = &transport.Grant{Peer: p.src.boot, Slot: 1, Gen: 7, Sink: ends[1]}
				p.dst.mu.Lock()
				p.dst.grants[1] = g
				p.dst.mu.Unlock()
			}
			if err := p.lane.Move([]transport.Slice{s}); err != nil {
				b.Fatal(err)
			}
			moved++
		}
		if r := <-p.src.results; r.Outcome != transfer.Landed {
			b.Fatal(r.Outcome, r.Reason, r.Err)
		}
		ended++
	}
}
