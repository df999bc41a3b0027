package gpu

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/kvspray/kvspray/gpu/device"
	"github.com/kvspray/kvspray/gpu/policy"
	"github.com/kvspray/kvspray/internal/sys/cuda"
	"github.com/kvspray/kvspray/internal/sys/mem"
)

// GPU is one GPU as a mem.Device, with its staging slots.
type GPU struct {
	gpus  *GPUs
	index int
	card  device.Card
	pci   string
	dev   device.Packer

	// Pinned host memory: buffers that lanes borrow, then a bounce buffer for each staging slot.
	arena    []byte
	arenaPtr cuda.Ptr
	lent     chan []byte
	slots    chan *slot
	in, out  *policy.Policy // to the GPU, from the GPU

	staging    cuda.Ptr // the dense buffers of all staging slots
	mps        device.MPS
	idleKernel idleKernel
	idleProbe  *policy.IdleProbe
	// mayRelay: an engine has lent memory of this GPU, or the configuration permits it
	// (transports.gpu.relays), so that copies of other GPUs may use its link. A GPU that is only open
	// (transports.gpu.open) forwards nothing.
	mayRelay atomic.Bool
	budget   budget
}

var _ mem.Warmer = (*GPU)(nil)

func newGPU(g *GPUs, index int, c device.Card) (_ *GPU, err error) {
	u := &GPU{gpus: g, index: index, card: c, in: policy.New(g.cfg.Method, policy.KernelPrice),
		out: policy.New(g.cfg.Method, policy.KernelPrice)}
	u.budget.limit = g.cfg.Memory
	if u.pci, err = c.PCI(); err != nil {
		return nil, err
	}
	if u.dev, err = c.NewPacker(); err != nil {
		return nil, err
	}
	if s, ok := u.dev.(device.Sharer); ok {
		u.mps = s.MPS()
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, u.dev.Close())
			if u.staging != 0 {
				err = errors.Join(err, u.dev.Free(u.staging))
			}
		}
	}()
	u.lent, u.slots = make(chan []byte, g.cfg.Buffers), make(chan *slot, g.cfg.Slots)
	lend := g.cfg.Buffers * LendBytes
	size := lend + g.cfg.Slots*SlotBytes
	if u.arena, u.arenaPtr, err = u.dev.AllocHost(size); err != nil {
		return nil, fmt.Errorf("%d MiB of pinned host memory: %w; lower transports.gpu.pinned_buffers",
			size>>20, err)
	}
	for off := 0; off < lend; off += LendBytes {
		u.lent <- u.arena[off:][:LendBytes:LendBytes]
	}
	if err = u.budget.take(forStaging, u.stagingBytes()); err != nil {
		return nil, err
	}
	if u.staging, err = u.dev.Alloc(u.stagingBytes()); err != nil {
		return nil, fmt.Errorf("%d bytes of staging: %w", u.stagingBytes(), err)
	}
	u.idleProbe = u.newIdleProbe()
	if u.idleKernel.queue, err = u.dev.NewQueue(); err != nil {
		return nil, err
	}
	if u.idleKernel.done, err = u.dev.NewPromptEvent(); err != nil {
		return nil, err
	}
	for i := range g.cfg.Slots {
		h := &slot{bounce: u.arena[lend+i*SlotBytes:][:SlotBytes:SlotBytes], pieces: make([]mem.Block,
			0, slotRuns),
			far: make([]cuda.Ptr, 0, slotRuns), near: make([]cuda.Ptr, 0, slotRuns),
			sizes: make([]uint64, 0, slotRuns), dense: u.staging + cuda.Ptr(i*SlotBytes)}
		if h.queue, err = u.dev.NewQueue(); err != nil {
			return nil, err
		}
		if h.done, err = u.dev.NewEvent(); err != nil {
			return nil, err
		}
		if h.prompt, err = u.dev.NewPromptEvent(); err != nil {
			return nil, err
		}
		if h.list, h.listPtr, err = u.dev.AllocHost(slotListBytes); err != nil {
			return nil, err
		}
		u.slots <- h
	}
	return u, nil
}

func (u *GPU) stagingBytes() uint64 { return uint64(cap(u.slots)) * SlotBytes }

// close waits for everything in flight. Memory of what does not end in time stays allocated until
// this process ends.
func (u *GPU) close() error {
	var errs []error
	late := time.NewTimer(u.gpus.closeTimeout)
	defer late.Stop()
	for ended := range cap(u.slots) {
		select {
		case <-u.slots:
		case <-late.C:
			return fmt.Errorf("gpu: GPU %d: %d of %d gathers and scatters have not ended after %v, "+
				"because the driver hangs: "+
				"its memory stays allocated", u.index, cap(u.slots)-ended, cap(u.slots), u.gpus.closeTimeout)
		}
	}
	if !u.idleKernel.drain(late.C) {
		return fmt.Errorf("gpu: GPU %d: an empty kernel has not run in %v, because an engine takes all "+
			"time or the driver hangs: "+
			"its memory stays allocated", u.index, u.gpus.closeTimeout)
	}
	errs = append(errs, u.dev.Close(), u.dev.Free(u.staging))
	return errors.Join(append(errs, u.card.Close())...)
}

// PCI is the PCI address, from which follows which NICs are near.
func (u *GPU) PCI() string { return u.pci }

// LendBytes implements mem.Device.
func (u *GPU) LendBytes() int { return LendBytes }

// Lend implements mem.Device.
func (u *GPU) Lend() []byte {
	select {
	case b := <-u.lent:
		return b
	default:
		return nil
	}
}

// Return implements mem.Device.
func (u *GPU) Return(b []byte) { u.lent <- b[:LendBytes] }

// Gather implements mem.Device.
func (u *GPU) Gather(dst []byte, blocks []mem.Block) error {
	return u.rearrange(device.DeviceToHost, dst, blocks)
}

// Scatter implements mem.Device.
func (u *GPU) Scatter(blocks []mem.Block, src []byte) error {
	return u.rearrange(device.HostToDevice, src, blocks)
}
