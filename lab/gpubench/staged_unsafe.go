//go:build cgo

package gpubench

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/kvspray/kvspray/gpu"
	"github.com/kvspray/kvspray/gpu/device"
	"github.com/kvspray/kvspray/gpu/policy"
	"github.com/kvspray/kvspray/internal/sys/cuda"
	"github.com/kvspray/kvspray/internal/sys/mem"
)

const (
	stagedPool    = 4 << 30
	stagedTotal   = 1 << 30
	stagedWorkers = 8  // as many lanes
	moveBatch     = 32 // MiB of one call between two GPUs: what a shm lane has in flight
)

// staged measures what lanes use of a GPU: gathers and scatters of slices between another process's
// memory and lent buffers, beside one contiguous pinned copy; and, with two GPUs, moves of what a
// shm lane has in flight, beside the contiguous copy.
func (b *bench) staged() error {
	cs, release, err := b.contexts(min(2, len(b.drv.Devices)))
	if err != nil {
		return err
	}
	return errors.Join(b.stagedRows(cs), release())
}

// lent is another process's memory as a region.
func lent(g *gpu.GPUs, c *cuda.Context, n uint64) (r *mem.Region, p cuda.Ptr, h cuda.IPCHandle,
	stop func() error, err error) {
	p, h, stopOwner, err := owner(c, n)
	if err != nil {
		return nil, 0, h, nil, err
	}
	stop = func() error { return errors.Join(c.CloseIPC(p), stopOwner()) }
	id, err := c.Device.UUID()
	if err == nil {
		handle := device.Handle{Kind: device.HandleIPC, GPU: id, Alloc: n, IPC: h}
		r, err = g.Import(mem.NewID(), handle.Append(nil), -1, n)
	}
	if err != nil {
		return nil, 0, h, nil, errors.Join(err, stop())
	}
	return r, p, h, stop, nil
}

func (b *bench) stagedRows(cs []*cuda.Context) error {
	cache, err := mem.NewAnonymous("bench", stagedTotal, mem.Populate())
	if err != nil {
		return err
	}
	defer cache.Release()
	host, _ := cache.Bytes()
	rand.NewChaCha8([32]byte{4}).Read(host[:256<<20])
	for off := 256 << 20; off < len(host); off *= 2 {
		copy(host[off:], host[:off])
	}
	s, err := cs[0].NewStream(0)
	if err != nil {
		return err
	}
	defer s.Destroy()
	for _, how := range []policy.CopyMethod{policy.Pack, policy.Copy, policy.Auto} {
		g, err := gpu.New(gpu.Config{Method: how})
		if err != nil {
			return err
		}
		unpin, err := g.Pin(host)
		if err != nil {
			return errors.Join(err, g.Close())
		}
		// unified: host memory has the same address everywhere
		hostPtr := cuda.Ptr(uintptr(unsafe.Pointer(&host[0])))
		r, p, _, stop, err := lent(g, cs[0], stagedPool)
		if err != nil {
			return errors.Join(err, unpin(), g.Close())
		}
		for off := cuda.Ptr(0); off < stagedPool && err == nil; off += stagedTotal {
			err = errors.Join(s.Copy(p+off, hostPtr, stagedTotal), s.Sync())
		}
		for _, at := range []struct{ block, slice uint64 }{{4 << 10, gpu.SlotBytes},
			{16 << 10, gpu.SlotBytes}, {16 << 10, gpu.LendBytes}, {64 << 10, gpu.SlotBytes}} {
			for _, dir := range []device.Direction{device.DeviceToHost, device.HostToDevice} {
				if err == nil {
					err = b.hops(r, p, how, at.block, at.slice, dir, s, host, hostPtr)
				}
			}
		}
		if err == nil && how == policy.Auto {
			err = b.moves(g, cs, r, p)
		}
		r.Release()
		if err = errors.Join(err, unpin(), g.Close(), stop()); err != nil {
			return err
		}
	}
	return nil
}

// hops is stagedTotal in slices, by stagedWorkers at once, to and from pinned memory as a host
// cache has it.
func (b *bench) hops(r *mem.Region, p cuda.Ptr, how policy.CopyMethod, block, slice uint64,
	dir device.Direction, s *cuda.Stream, host []byte, hostPtr cuda.Ptr) error {
	dev := r.Device()
	perm := rand.New(rand.NewPCG(5, block)).Perm(int(stagedPool / block))[:stagedTotal/block]
	blocks := make([]mem.Block, len(perm))
	for i, k := range perm {
		blocks[i] = mem.Block{Region: r, Off: uint64(k) * block, Len: block}
	}
	per := int(slice / block)
	run := func() error {
		var next atomic.Int64
		var wg sync.WaitGroup
		errs := make([]error, stagedWorkers)
		for w := range stagedWorkers {
			wg.Go(func() {
				for errs[w] == nil {
					at := int(next.Add(int64(per))) - per
					if at >= len(blocks) {
						return
					}
					buf := host[uint64(at)*block:][:slice]
					if dir == device.DeviceToHost {
						errs[w] = dev.Gather(buf, blocks[at:at+per])
					} else {
						errs[w] = dev.Scatter(blocks[at:at+per], buf)
					}
				}
			})
		}
		wg.Wait()
		return errors.Join(errs...)
	}
	name, ceiling := "GPU to host", func() error {
		return errors.Join(s.Copy(hostPtr, p, stagedTotal), s.Sync())
	}
	if dir == device.HostToDevice {
		name, ceiling = "host to GPU", func() error {
			return errors.Join(s.Copy(p, hostPtr, stagedTotal), s.Sync())
		}
	}
	row := Row{What: fmt.Sprintf("%s, slices of %d MiB, scattered %d KiB, %s", name, slice>>20,
		block>>10, how), Bytes: stagedTotal, Block: block}
	if err := b.pair(row, run, stagedTotal, ceiling); err != nil {
		return err
	}
	// There and back through one slice: what is scattered is what is gathered, from places that a
	// plain copy finds too.
	in, out := make([]byte, slice), make([]byte, slice)
	rand.NewChaCha8([32]byte{byte(block)}).Read(in)
	if err := errors.Join(dev.Scatter(blocks[:per], in), dev.Gather(out, blocks[:per])); err != nil {
		return err
	}
	if !bytes.Equal(in, out) {
		return fmt.Errorf("%s: content differs", row.What)
	}
	for i := range per {
		if err := s.Copy(hostPtr+cuda.Ptr(uint64(i)*block), p+cuda.Ptr(blocks[i].Off),
			block); err != nil {
			return err
		}
	}
	if err := s.Sync(); err != nil {
		return err
	}
	if !bytes.Equal(in, host[:slice]) {
		return fmt.Errorf("%s: the blocks are not where they should be", row.What)
	}
	return nil
}

// moves is what shm does between two GPUs, or within one.
func (b *bench) moves(g *gpu.GPUs, cs []*cuda.Context, from *mem.Region, fromPtr cuda.Ptr) error {
	last := cs[len(cs)-1]
	to, _, h, stop, err := lent(g, last, stagedPool)
	if err != nil {
		return err
	}
	defer func() { to.Release(); _ = stop() }()
	var copies *cuda.Stream
	var near cuda.Ptr
	if copies, err = cs[0].NewStream(0); err != nil {
		return err
	}
	defer copies.Destroy()
	if near, err = cs[0].OpenIPC(h); err != nil {
		return err
	}
	defer cs[0].CloseIPC(near)
	shuffle := rand.New(rand.NewPCG(6, 7))
	for _, block := range []uint64{2 << 10, 16 << 10} {
		a, z := shuffle.Perm(int(stagedPool/block)), shuffle.Perm(int(stagedPool/block))
		src, dst := make([]mem.Block, stagedTotal/block), make([]mem.Block, stagedTotal/block)
		for i := range src {
			src[i] = mem.Block{Region: from, Off: uint64(a[i]) * block, Len: block}
			dst[i] = mem.Block{Region: to, Off: uint64(z[i]) * block, Len: block}
		}
		per := int(moveBatch << 20 / block)
		run := func() error {
			var next atomic.Int64
			var wg sync.WaitGroup
			var errs [2]error
			for w := range errs {
				wg.Go(func() {
					for errs[w] == nil {
						at := int(next.Add(int64(per))) - per
						if at >= len(src) {
							return
						}
						errs[w] = from.Device().Move(dst[at:at+per], src[at:at+per])
					}
				})
			}
			wg.Wait()
			return errors.Join(errs[:]...)
		}
		what := fmt.Sprintf("GPU %d to GPU %d, moves of %d MiB in scattered %d KiB", cs[0].Device,
			last.Device, moveBatch, block>>10)
		err := b.pair(Row{What: what, Bytes: stagedTotal, Block: block}, run, stagedTotal, func() error {
			return errors.Join(copies.Copy(near, fromPtr, stagedTotal), copies.Sync())
		})
		if err != nil {
			return err
		}
		if err := run(); err != nil {
			return err
		}
		x, y := make([]byte, 1<<20), make([]byte, 1<<20)
		k := int(1 << 20 / block)
		if err := errors.Join(mem.Gather(x, src[len(src)-k:]), mem.Gather(y, dst[len(dst)-k:])); err !=
			nil {
			return err
		}
		if !bytes.Equal(x, y) {
			return fmt.Errorf("%s: content differs", what)
		}
	}
	return nil
}
