package gpu

import (
	"errors"
	"fmt"
	"net"
	"sync"

	"github.com/kvspray/kvspray/gpu/device"
	"github.com/kvspray/kvspray/gpu/policy"
	"github.com/kvspray/kvspray/internal/sys/cuda"
)

// Small pieces between pinned memory of the host and a GPU. A copy engine takes 1.4 us and more for each, and a buffer in between takes a
// memcpy, of which a core does 10 GB/s. Kernels take thousands of pieces at once, and reach the host's memory by themselves: to the GPU they gather
// it in a dense buffer, from where others scatter it; from the GPU the other way round. Beside an engine that computes they are
// time-sliced as any kernel of another process, for which it pays: there buffers serve.

// largePiece is the average piece from which on copy engines take a list as it is. [measured, H200, two sidecars] movers that gather in buffers reach
// 12 to 15 GB/s whatever the size, a link 39 to 48 with pieces of this one and 50 to 54 with twice of it; of 16 KiB that lie anywhere in
// host memory a copy engine takes 4 to 12 GB/s.
const largePiece = 32 << 10

// fewAcross pieces at most always go to the copy engine: what a layer of a small request has is there soonest so, and without the CPU.
const fewMapped = 32

// acrossPieces are those of one hop, whose list has both of their ends.
const (
	mappedPieces  = slotRuns/2 - 1
	mappedFirstAt = mappedPieces * device.RunBytes
	mappedSide    = mappedFirstAt + (mappedPieces+1)*4
)

// acrossWorkers have a hop each: while one of them gathers another one scatters.
const mappedWorkers = 4

// across moves parts between pinned memory of the host and that of u, by kernels as long as k lets them in, else, and where it is nil, by the copy engine
// one after the other. When it returns nothing of them is in flight. It cuts them.
func (u *GPU) copyMapped(k *policy.IdleProbe, dir device.Direction, parts []device.Piece) error {
	a := mappedCopy{u: u, probe: k, dir: dir, rest: parts}
	hops := max((pieceBytes(parts)+SlotBytes-1)/SlotBytes, uint64(len(parts)+mappedPieces-1)/mappedPieces)
	if hops <= 1 {
		a.work()
	} else {
		var wg sync.WaitGroup
		for range min(hops, mappedWorkers) {
			wg.Go(a.work)
		}
		wg.Wait()
	}
	if a.failed != nil {
		return fmt.Errorf("gpu: GPU %d: %w", u.index, a.failed)
	}
	return nil
}

// crosser is one call of across.
type mappedCopy struct {
	u     *GPU
	probe *policy.IdleProbe
	dir   device.Direction

	mu     sync.Mutex     // protects both
	rest   []device.Piece // not taken yet
	failed error
}

func (a *mappedCopy) work() {
	buf := pieceLists.Get().(*[]device.Piece)
	defer pieceLists.Put(buf)
	for {
		h := <-a.u.slots
		parts, bytes := a.take((*buf)[:0])
		if len(parts) == 0 {
			a.u.slots <- h
			return
		}
		kernels := h.dense != 0 && a.probe.Enter()
		err := a.copySlot(h, parts, bytes, kernels)
		if err != nil {
			err = errors.Join(err, h.queue.Sync()) // nothing may be in flight when we return
		}
		if kernels {
			a.probe.Leave()
		}
		a.u.slots <- h
		if err != nil {
			a.mu.Lock()
			a.failed = errors.Join(a.failed, err)
			a.mu.Unlock()
		}
	}
}

// take adds a hop's worth of what is left to list, which has room for it.
func (a *mappedCopy) take(list []device.Piece) (_ []device.Piece, bytes uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for a.failed == nil && len(a.rest) > 0 && len(list) < mappedPieces && bytes < SlotBytes {
		p := &a.rest[0]
		part := *p
		part.Len = min(p.Len, SlotBytes-bytes)
		if p.Len -= part.Len; p.Len > 0 {
			p.Host, p.Dev = p.Host+cuda.Ptr(part.Len), p.Dev+cuda.Ptr(part.Len)
		} else {
			a.rest = a.rest[1:]
		}
		list = append(list, part)
		bytes += part.Len
	}
	return list, bytes
}

// cross moves one hop's worth, and waits for it.
func (a *mappedCopy) copySlot(h *slot, parts []device.Piece, bytes uint64, kernels bool) error {
	u := a.u
	from, to := fromHost, fromGPU
	if a.dir == device.DeviceToHost {
		from, to = to, from
	}
	if !kernels {
		h.far, h.near, h.sizes = h.far[:0], h.near[:0], h.sizes[:0]
		for i := range parts {
			h.far, h.near, h.sizes = append(h.far, to(&parts[i])), append(h.near, from(&parts[i])), append(h.sizes, parts[i].Len)
		}
		enqueue := h.queue.CopyBatch
		if a.dir == device.HostToDevice {
			enqueue = func(dst, src []cuda.Ptr, n []uint64) error { return h.rows.CopyIn(h.queue, dst, src, n) }
		}
		if err := enqueue(h.far, h.near, h.sizes); err != nil {
			return err
		}
		return h.wait(bytes)
	}
	gather, scatter := h.ends(0, parts, from), h.ends(mappedSide, parts, to)
	var err error
	if gather.len > 0 {
		err = errors.Join(u.dev.PackUniform(h.queue, gather.at, len(parts), h.dense, gather.len),
			u.dev.UnpackUniform(h.queue, scatter.at, len(parts), h.dense, scatter.len))
	} else {
		err = errors.Join(u.dev.Pack(h.queue, gather.at, gather.at+mappedFirstAt, len(parts)),
			u.dev.Unpack(h.queue, scatter.at, scatter.at+mappedFirstAt, len(parts)))
	}
	if err != nil {
		return err
	}
	return h.wait(bytes)
}

func fromHost(p *device.Piece) cuda.Ptr { return p.Host }

func fromGPU(p *device.Piece) cuda.Ptr { return p.Dev }

// reaching is who moves pieces between the host's pages and u: kernels, Auto where they knock before, or the copy engine. Under MPS nobody hears who
// computes, and kernels that reach the host's memory take most of the GPU away from it. [measured, H200] layers of 41 us took 15 times as long
// beside 50 GB/s to the host, and six times beside 48 from it.
func (u *GPU) mappedMethod() policy.CopyMethod {
	switch e := u.gpus.cfg.Method; {
	case e == policy.Pack && u.mps != device.MPSOn, e == policy.Auto && u.mps == device.MPSOff:
		return e
	}
	return policy.Copy
}

// end is a list for the kernels.
type end struct {
	at  cuda.Ptr
	len uint64 // of each piece; 0: a list of runs, as they have several lengths
}

// small moves pieces for which a copy engine takes too long, and names the way. parts are those of list.
func (c *Copier) small(u *GPU, dir device.Direction, list []hostPiece, parts []device.Piece) (path string, err error) {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return "", net.ErrClosed
	}
	c.under.Add(1)
	c.mu.Unlock()
	defer c.under.Done()
	if len(parts) <= fewMapped {
		return PathDirect, u.copyMapped(nil, dir, parts)
	}
	if pieceBytes(parts) < c.shape.mappedFrom || !packablePieces(parts) {
		return PathStaged, buffered(u, dir, list)
	}
	k := u.idleProbe
	if !k.Enter() {
		k.Count(policy.Copy, dir, pieceBytes(parts))
		return PathStaged, buffered(u, dir, list)
	}
	k.Leave()
	k.Count(policy.Pack, dir, pieceBytes(parts))
	return PathPacked, u.copyMapped(k, dir, parts)
}
