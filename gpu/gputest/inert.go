package gputest

import (
	"github.com/kvspray/kvspray/gpu/device"
	"github.com/kvspray/kvspray/internal/sys/cuda"
)

// InertPlatform is a platform whose devices accept all work and do none of it, so that a benchmark
// measures only the code above the driver.
type InertPlatform struct{ *Platform }

// NewInertPlatform makes a platform of n GPUs.
func NewInertPlatform(n int) *InertPlatform { return &InertPlatform{NewPlatform(n)} }

// InertCard is a Card of an InertPlatform.
type InertCard struct{ Card }

// InertPacker is a Packer of an InertPlatform.
type InertPacker struct{ *Device }

// InertQueue drops what it is given.
type InertQueue struct{}

func (p *InertPlatform) Open(i int) (device.Card, error) {
	return &InertCard{Card{p.Platform, i}}, nil
}

func (c *InertCard) NewPacker() (device.Packer, error) {
	return InertPacker{c.Platform.Machine.Device()}, nil
}

func (InertPacker) NewQueue() (device.Queue, error) { return InertQueue{}, nil }

func (InertPacker) Pack(device.Queue, cuda.Ptr, cuda.Ptr, int) error { return nil }

func (InertPacker) Unpack(device.Queue, cuda.Ptr, cuda.Ptr, int) error { return nil }

func (InertPacker) PackUniform(device.Queue, cuda.Ptr, int, cuda.Ptr, uint64) error { return nil }

func (InertPacker) UnpackUniform(device.Queue, cuda.Ptr, int, cuda.Ptr, uint64) error { return nil }

func (InertPacker) Move(device.Queue, cuda.Ptr, cuda.Ptr, int) error { return nil }

func (InertQueue) Copy(cuda.Ptr, cuda.Ptr, uint64) error { return nil }

func (InertQueue) CopyBatch([]cuda.Ptr, []cuda.Ptr, []uint64) error { return nil }

func (InertQueue) CopyRows([]cuda.Rows) error { return nil }

func (InertQueue) CopySync(cuda.Ptr, cuda.Ptr, uint64) error { return nil }

func (InertQueue) Record(device.Event) error { return nil }

func (InertQueue) Wait(device.Event) error { return nil }

func (InertQueue) Sync() error { return nil }
