//go:build cgo

package stage

import (
	"errors"

	"github.com/kvspray/kvspray/internal/cuda"
)

// CUDA makes a Device of a context. The context outlives it.
func CUDA(c *cuda.Context) (Device, error) {
	_, greatest, err := c.PriorityRange()
	if err != nil {
		return nil, err
	}
	return &cudaDevice{c: c, priority: greatest}, nil
}

type cudaDevice struct {
	c        *cuda.Context
	priority int
	streams  []*cuda.Stream
	events   []*cuda.Event
}

type cudaQueue struct{ *cuda.Stream }

func (q cudaQueue) Record(e Event) error { return e.(*cuda.Event).Record(q.Stream) }
func (q cudaQueue) Wait(e Event) error   { return q.Stream.Wait(e.(*cuda.Event)) }

func (d *cudaDevice) Alloc(n uint64) (cuda.Ptr, error) { return d.c.Alloc(n) }
func (d *cudaDevice) Free(p cuda.Ptr) error            { return d.c.Free(p) }

func (d *cudaDevice) NewQueue() (Queue, error) {
	s, err := d.c.NewStream(d.priority)
	if err != nil {
		return nil, err
	}
	d.streams = append(d.streams, s)
	return cudaQueue{s}, nil
}

// Events sleep in Sync: a sidecar that spins takes a core from the engine for as long as a copy lasts.
func (d *cudaDevice) NewEvent() (Event, error) {
	e, err := d.c.NewEvent(cuda.SleepEvent)
	if err != nil {
		return nil, err
	}
	d.events = append(d.events, e)
	return e, nil
}

func (d *cudaDevice) Close() error {
	var errs []error
	for _, s := range d.streams {
		errs = append(errs, s.Sync(), s.Destroy())
	}
	for _, e := range d.events {
		errs = append(errs, e.Destroy())
	}
	d.streams, d.events = nil, nil
	return errors.Join(errs...)
}
