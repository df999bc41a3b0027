//go:build cgo

package device

import (
	"errors"
	"time"

	"github.com/kvspray/kvspray/internal/sys/cuda"
	"github.com/kvspray/kvspray/internal/sys/cuda/kernels"
)

// CUDA makes a Packer of a context, which must outlive it.
func CUDA(c *cuda.Context) (_ Packer, err error) {
	d := &cudaDevice{c: c}
	if _, d.priority, err = c.PriorityRange(); err != nil {
		return nil, err
	}
	major, err := c.Device.Attribute(cuda.ComputeMajor)
	if err != nil {
		return nil, err
	}
	minor, err := c.Device.Attribute(cuda.ComputeMinor)
	if err != nil {
		return nil, err
	}
	if d.blocks, err = c.Device.Attribute(cuda.MultiprocessorCount); err != nil {
		return nil, err
	}
	if n, err := c.Device.Attribute(cuda.MPSEnabled); err == nil {
		d.mps = MPSOff
		if n != 0 {
			d.mps = MPSOn
		}
	}
	if d.module, err = c.Load(kernels.Image(major, minor)); err != nil {
		return nil, err
	}
	for name, f := range map[string]**cuda.Function{"kvs_pack_v4": &d.pack, "kvs_unpack_v4": &d.unpack,
		"kvs_pack_uniform_v4": &d.packUniform, "kvs_unpack_uniform_v4": &d.unpackUniform,
		"kvs_move_v4": &d.move} {
		if *f, err = d.module.Function(name); err != nil {
			return nil, errors.Join(err, d.module.Unload())
		}
	}
	return d, nil
}

// packThreads is the size of the one thread block on every multiprocessor. [measured, H200] A short
// wide kernel slows a busy engine down less than a long narrow one, and at 970 GB/s the link is the
// bottleneck.
const packThreads = 512

// moveBlocks is the number of thread blocks of Move beside one of the other kernels. No link bounds
// Move, and no engine computes beside it.
const moveBlocks = 2

type cudaDevice struct {
	c            *cuda.Context
	priority     int
	blocks       int
	mps          MPS
	module       *cuda.Module
	pack, unpack *cuda.Function

	packUniform, unpackUniform, move *cuda.Function

	streams []*cuda.Stream
	events  []*cuda.Event
	host    [][]byte
}

func (d *cudaDevice) PackBlocks() int { return d.blocks }

func (d *cudaDevice) SetPackBlocks(n int) { d.blocks = n }

func (d *cudaDevice) MPS() MPS { return d.mps }

type cudaQueue struct{ *cuda.Stream }

func (q cudaQueue) Record(e Event) error { return e.(cudaEvent).Record(q.Stream) }

func (q cudaQueue) Wait(e Event) error { return q.Stream.Wait(e.(cudaEvent).Event) }

func (d *cudaDevice) Alloc(n uint64) (cuda.Ptr, error) { return d.c.Alloc(n) }

func (d *cudaDevice) Free(p cuda.Ptr) error { return d.c.Free(p) }

func (d *cudaDevice) AllocHost(n int) ([]byte, cuda.Ptr, error) {
	b, p, err := d.c.AllocHost(n)
	if err == nil {
		d.host = append(d.host, b)
	}
	return b, p, err
}

func (d *cudaDevice) Pack(q Queue, runs, first cuda.Ptr, n int) error {
	return d.pack.LaunchWords(q.(cudaQueue).Stream, d.blocks, packThreads, uint64(runs),
		uint64(first), uint64(n))
}

func (d *cudaDevice) Unpack(q Queue, runs, first cuda.Ptr, n int) error {
	return d.unpack.LaunchWords(q.(cudaQueue).Stream, d.blocks, packThreads, uint64(runs),
		uint64(first), uint64(n))
}

func (d *cudaDevice) PackUniform(q Queue, bases cuda.Ptr, n int, dense cuda.Ptr,
	length uint64) error {
	return d.packUniform.LaunchWords(q.(cudaQueue).Stream, d.blocks, packThreads, uint64(bases),
		uint64(n), uint64(dense), length)
}

func (d *cudaDevice) UnpackUniform(q Queue, bases cuda.Ptr, n int, dense cuda.Ptr,
	length uint64) error {
	return d.unpackUniform.LaunchWords(q.(cudaQueue).Stream, d.blocks, packThreads, uint64(bases),
		uint64(n), uint64(dense), length)
}

func (d *cudaDevice) Move(q Queue, moves, first cuda.Ptr, n int) error {
	return d.move.LaunchWords(q.(cudaQueue).Stream, moveBlocks*d.blocks, packThreads, uint64(moves),
		uint64(first), uint64(n))
}

func (d *cudaDevice) NewQueue() (Queue, error) {
	s, err := d.c.NewStream(d.priority)
	if err != nil {
		return nil, err
	}
	d.streams = append(d.streams, s)
	return cudaQueue{s}, nil
}

func (d *cudaDevice) NewEvent() (Event, error) { return d.newEvent(syncPause) }

func (d *cudaDevice) NewPromptEvent() (Event, error) { return d.newEvent(syncPrompt) }

func (d *cudaDevice) newEvent(pause time.Duration) (Event, error) {
	e, err := d.c.NewEvent(cuda.OrderEvent)
	if err != nil {
		return nil, err
	}
	d.events = append(d.events, e)
	return cudaEvent{e, pause}, nil
}

type cudaEvent struct {
	*cuda.Event
	pause time.Duration // between two polls
}

func (e cudaEvent) Sync() (err error) {
	Poll(e.pause, func() bool {
		var done bool
		done, err = e.Done()
		return done || err != nil
	})
	return err
}

func (d *cudaDevice) Close() error {
	var errs []error
	for _, s := range d.streams {
		errs = append(errs, s.Sync(), s.Destroy())
	}
	for _, e := range d.events {
		errs = append(errs, e.Destroy())
	}
	for _, b := range d.host {
		errs = append(errs, d.c.FreeHost(b))
	}
	if d.module != nil {
		errs = append(errs, d.module.Unload())
	}
	d.streams, d.events, d.host, d.module = nil, nil, nil, nil
	return errors.Join(errs...)
}
