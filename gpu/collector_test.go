package gpu

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/kvspray/kvspray/gpu/gputest"
	"github.com/kvspray/kvspray/gpu/policy"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/internal/testutil"
)

// TestMeasureCollectorDelayOfMoves: moves of scattered blocks of 16 KiB do not delay the garbage
// collector, between two GPUs on a driver that does nothing, and between a GPU and the host on one
// that copies.
func TestMeasureCollectorDelayOfMoves(t *testing.T) {
	testutil.Measures(t)
	const block, n = 16 << 10, 4096
	t.Run("driver that does nothing", func(t *testing.T) {
		g := gputest.Must(newGPUs(gputest.NewInertPlatform(2), Config{Slots: 1, Buffers: 1,
			PeerStage: 16 << 20, Method: policy.Pack}))(t)
		var lists [2][]mem.Block
		for i := range lists {
			r, err := mem.NewDevice(mem.NewID(), mem.DeviceMemory{Device: gputest.Must(g.open(i))(t),
				Addr: 1 << 40, Size: 4 * n * block, FD: -1})
			if err != nil {
				t.Fatal(err)
			}
			for _, at := range rand.New(rand.NewPCG(uint64(i), 1)).Perm(4 * n)[:n] {
				lists[i] = append(lists[i], mem.Block{Region: r, Off: uint64(at) * block, Len: block})
			}
		}
		dev := mem.DeviceOf(lists[0])
		testutil.LetsCollectorInWhile(t, func() {
			if err := dev.Move(lists[1], lists[0]); err != nil {
				t.Error(err)
			}
		})
	})
	const n16 = n / 4 // 16 MiB
	for _, executor := range []policy.CopyMethod{policy.Pack, policy.Copy} {
		t.Run(fmt.Sprintf("driver that copies, %v", executor), func(t *testing.T) {
			p := gputest.NewPlatform(1)
			g := gputest.Must(newGPUs(p, Config{Slots: 3, Buffers: 4, Method: executor}))(t)
			handle, _ := p.Lend(0, 2*n16*block, 0)
			gpu, err := g.Import(mem.NewID(), handle.Append(nil), -1, 2*n16*block)
			if err != nil {
				t.Fatal(err)
			}
			defer gpu.Release()
			host, err := mem.NewAnonymous("collector", n16*block)
			if err != nil {
				t.Fatal(err)
			}
			defer host.Release()
			var from, to []mem.Block
			for i, at := range rand.New(rand.NewPCG(1, 1)).Perm(2 * n16)[:n16] {
				from = append(from, mem.Block{Region: gpu, Off: uint64(at) * block, Len: block})
				to = append(to, mem.Block{Region: host, Off: uint64(i) * block, Len: block})
			}
			dev := gpu.Device()
			testutil.LetsCollectorInWhile(t, func() {
				if err := dev.Move(to, from); err != nil {
					t.Error(err)
				}
			})
		})
	}
}
