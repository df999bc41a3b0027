//go:build cgo

package gpubench

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"

	"github.com/kvspray/kvspray/gpu/device"
	"github.com/kvspray/kvspray/gpu/multipath"
	"github.com/kvspray/kvspray/internal/sys/cuda"
)

const multipathTotal = 4 << 30

func (b *bench) multipath() error {
	cs, release, err := b.contexts(len(b.drv.Devices))
	if err != nil {
		return err
	}
	return errors.Join(b.multipathRows(cs), release())
}

func (b *bench) multipathRows(cs []*cuda.Context) error {
	host, hostPtr, err := cs[0].AllocHost(multipathTotal)
	if err != nil {
		return err
	}
	defer cs[0].FreeHost(host)
	rng := rand.NewChaCha8([32]byte{2})
	rng.Read(host[:256<<20])
	for off := 256 << 20; off < len(host); off *= 2 {
		copy(host[off:], host[:off])
	}
	mem := make([]cuda.Ptr, len(cs))
	streams := make([]*cuda.Stream, len(cs))
	for i, c := range cs {
		if mem[i], err = c.Alloc(multipathTotal); err != nil {
			return err
		}
		defer c.Free(mem[i])
		if streams[i], err = c.NewStream(0); err != nil {
			return err
		}
		defer streams[i].Destroy()
	}
	hop := func(s *cuda.Stream, dir device.Direction, h, d cuda.Ptr, n uint64) error {
		if dir == device.DeviceToHost {
			return s.Copy(h, d, n)
		}
		return s.Copy(d, h, n)
	}
	name := map[device.Direction]string{device.HostToDevice: "host to GPU 0",
		device.DeviceToHost: "GPU 0 to host"}
	for links := 1; links <= len(cs); links++ {
		target, err := device.CUDA(cs[0])
		if err != nil {
			return err
		}
		var relays []device.Device
		for _, c := range cs[1:links] {
			r, err := device.CUDA(c)
			if err != nil {
				return err
			}
			relays = append(relays, r)
		}
		mp, err := multipath.New(target, relays...)
		if err != nil {
			return err
		}
		for _, dir := range []device.Direction{device.HostToDevice, device.DeviceToHost} {
			all := func() error {
				per := uint64(multipathTotal / links)
				var errs []error
				for i := range links {
					errs = append(errs, hop(streams[i], dir, hostPtr+cuda.Ptr(uint64(i)*per), mem[i], per))
				}
				for i := range links {
					errs = append(errs, streams[i].Sync())
				}
				return errors.Join(errs...)
			}
			r := Row{What: fmt.Sprintf("%s over %d of %d links, 4 GiB", name[dir], links, len(cs)),
				Bytes: multipathTotal}
			if err := b.pair(r, func() error { return mp.Copy(dir, hostPtr, mem[0], multipathTotal) },
				multipathTotal, all); err != nil {
				return err
			}
		}
		if links == len(cs) {
			if err := b.multipathContent(mp, host, hostPtr, mem[0], streams[0]); err != nil {
				return err
			}
			b.line.Phase("multipath: measuring from where on every link pays")
			threshold, err := mp.Calibrate(hostPtr, mem[0])
			if err != nil {
				return err
			}
			b.report.Threshold = threshold
			b.line.End()
			fmt.Fprintf(b.out, "calibrated: every link from %d MiB on\n", threshold>>20)
			for n := uint64(4 << 10); n <= 1<<30; n *= 2 {
				for _, dir := range []device.Direction{device.HostToDevice, device.DeviceToHost} {
					single := func() error {
						return errors.Join(hop(streams[0], dir, hostPtr, mem[0], n), streams[0].Sync())
					}
					r := Row{What: fmt.Sprintf("%s, %d KiB, ceiling: the single path", name[dir], n>>10), Bytes: n}
					if err := b.pair(r, func() error { return mp.Copy(dir, hostPtr, mem[0], n) }, n,
						single); err != nil {
						return err
					}
				}
			}
		}
		if err := mp.Close(); err != nil {
			return err
		}
	}
	return nil
}

// multipathContent sends random bytes there and back through two different places and compares.
func (b *bench) multipathContent(mp *multipath.Multipath, host []byte, hostPtr, dev cuda.Ptr,
	s *cuda.Stream) error {
	const n = 1<<30 + 12345
	b.line.Phase("multipath: comparing content, 1 GiB there and back")
	rng := rand.NewChaCha8([32]byte{3})
	rng.Read(host[:n])
	if err := mp.Copy(device.HostToDevice, hostPtr, dev+64, n); err != nil {
		return err
	}
	back := host[2<<30:][:n]
	if err := errors.Join(s.Copy(hostPtr+cuda.Ptr(2<<30), dev+64, n), s.Sync()); err != nil {
		return err
	}
	if !bytes.Equal(back, host[:n]) {
		return errors.New("multipath: host to device: content differs")
	}
	clear(back)
	if err := mp.Copy(device.DeviceToHost, hostPtr+cuda.Ptr(2<<30), dev+64, n); err != nil {
		return err
	}
	if !bytes.Equal(back, host[:n]) {
		return errors.New("multipath: device to host: content differs")
	}
	b.line.End()
	fmt.Fprintln(b.out, "content equal there and back, 1 GiB")
	return nil
}
