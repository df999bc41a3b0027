//go:build cgo

package gpubench

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"

	"github.com/kvspray/kvspray/gpu/device"
	"github.com/kvspray/kvspray/gpu/peercopy"
	"github.com/kvspray/kvspray/internal/sys/cuda"
)

// contexts retains the first n devices and opens them to each other.
func (b *bench) contexts(n int) (cs []*cuda.Context, release func() error, err error) {
	release = func() error {
		var errs []error
		for _, c := range cs {
			errs = append(errs, c.Release())
		}
		return errors.Join(errs...)
	}
	for _, d := range b.drv.Devices[:n] {
		c, err := d.Retain()
		if err != nil {
			return nil, nil, errors.Join(err, release())
		}
		cs = append(cs, c)
	}
	for _, c := range cs {
		for _, o := range cs {
			if c == o {
				continue
			}
			if err := c.EnablePeer(o); err != nil {
				return nil, nil, errors.Join(fmt.Errorf("GPU %d to GPU %d: %w", c.Device, o.Device,
					err), release())
			}
		}
	}
	return cs, release, nil
}

const (
	nvlinkPool  = 4 << 30
	nvlinkTotal = 2 << 30
)

func (b *bench) nvlink() error {
	cs, release, err := b.contexts(2)
	if err != nil {
		return err
	}
	from, _, stop0, err := owner(cs[0], nvlinkPool)
	if err != nil {
		return err
	}
	to, handle, stop1, err := owner(cs[1], nvlinkPool)
	if err != nil {
		return errors.Join(err, stop0())
	}
	// For the contiguous copy alone the destination is mapped into the source's context too: without
	// it the driver stages the copy through the host.
	near, err := cs[0].OpenIPC(handle)
	if err == nil {
		err = errors.Join(b.nvlinkRows(cs, from, to, near), cs[0].CloseIPC(near))
	}
	return errors.Join(err, cs[0].CloseIPC(from), cs[1].CloseIPC(to), stop0(), stop1(), release())
}

func (b *bench) nvlinkRows(cs []*cuda.Context, from, to, near cuda.Ptr) error {
	p, err := pipeline(cs[0], cs[1])
	if err != nil {
		return err
	}
	return errors.Join(b.scattered(cs[0], p, "two processes' memory", from, to, near), p.Close())
}

// pipeline makes one with staging buffers.
func pipeline(from, to *cuda.Context) (*peercopy.Pipeline, error) {
	src, err := device.CUDA(from)
	if err != nil {
		return nil, err
	}
	dst, err := device.CUDA(to)
	if err != nil {
		return nil, errors.Join(err, src.Close())
	}
	return peercopy.New(src, dst)
}

// within compares, on one GPU, the kernel that the sidecar uses there with staging buffers.
func (b *bench) within() error {
	cs, release, err := b.contexts(1)
	if err != nil {
		return err
	}
	c := cs[0]
	from, _, stop0, err := owner(c, nvlinkPool)
	if err != nil {
		return err
	}
	to, _, stop1, err := owner(c, nvlinkPool)
	if err != nil {
		return errors.Join(err, stop0())
	}
	return errors.Join(b.withinRows(c, from, to), c.CloseIPC(from), c.CloseIPC(to), stop0(), stop1(),
		release())
}

func (b *bench) withinRows(c *cuda.Context, from, to cuda.Ptr) error {
	dev, err := device.CUDA(c)
	if err != nil {
		return err
	}
	p, err := peercopy.NewWithin(dev)
	if err != nil {
		return err
	}
	if err := errors.Join(b.scattered(c, p, "one kernel", from, to, to), p.Close()); err != nil {
		return err
	}
	if p, err = pipeline(c, c); err != nil {
		return err
	}
	return errors.Join(b.scattered(c, p, "pack, copy, unpack", from, to, to), p.Close())
}

// scattered measures blocks of several sizes between two pools. near is the address of the second
// one in c, the context of the first.
func (b *bench) scattered(c *cuda.Context, p *peercopy.Pipeline, what string, from, to,
	near cuda.Ptr) error {
	copies, err := c.NewStream(0)
	if err != nil {
		return err
	}
	defer copies.Destroy()
	host, hostPtr, err := c.AllocHost(256 << 20)
	if err != nil {
		return err
	}
	defer c.FreeHost(host)
	rng := rand.NewChaCha8([32]byte{1})
	for off := uint64(0); off < nvlinkPool; off += uint64(len(host)) {
		rng.Read(host)
		if err := errors.Join(copies.Copy(from+cuda.Ptr(off), hostPtr, uint64(len(host))),
			copies.Sync()); err != nil {
			return err
		}
	}
	contiguous := func() error {
		return errors.Join(copies.Copy(near, from, nvlinkTotal), copies.Sync())
	}
	shuffle := rand.New(rand.NewPCG(1, 2))
	for _, block := range []uint64{2 << 10, 4 << 10, 16 << 10, 32 << 10, 64 << 10, 1 << 20} {
		a, z := shuffle.Perm(int(nvlinkPool/block)), shuffle.Perm(int(nvlinkPool/block))
		moves := make([]peercopy.Move, nvlinkTotal/block)
		for i := range moves {
			moves[i] = peercopy.Move{Src: from + cuda.Ptr(uint64(a[i])*block), Dst: to +
				cuda.Ptr(uint64(z[i])*block), Len: block, Count: 1}
		}
		r := Row{What: fmt.Sprintf("%s, scattered blocks of %d KiB", what, block>>10),
			Bytes: nvlinkTotal, Block: block}
		if err := b.pair(r, func() error { return p.Run(moves) }, nvlinkTotal, contiguous); err != nil {
			return err
		}
		// The last run of the pair was ours: every block must be there.
		if err := p.Run(moves); err != nil {
			return err
		}
		half := uint64(len(host) / 2)
		for i := uint64(0); i < uint64(len(moves)); {
			n := min(half/block, uint64(len(moves))-i)
			for k := range n {
				m := &moves[i+k]
				if err := errors.Join(copies.Copy(hostPtr+cuda.Ptr(k*block), m.Src, block),
					copies.Copy(hostPtr+cuda.Ptr(half+k*block), m.Dst, block)); err != nil {
					return err
				}
			}
			if err := copies.Sync(); err != nil {
				return err
			}
			if !bytes.Equal(host[:n*block], host[half:half+n*block]) {
				return fmt.Errorf("%s: content differs", r.What)
			}
			// A sample is enough for small blocks: a copy each takes 5 us.
			i += max(n, uint64(len(moves))/4)
		}
	}
	return nil
}
