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

// Mapped-memory copies: small pieces between pinned host memory and a GPU. A copy engine takes at
// least 1.4 us for each, and a staging slot a memcpy, of which a core does 10 GB/s. Kernels move
// thousands of pieces at once: to the GPU, one kernel gathers host pages in a dense buffer and
// another one scatters it; from the GPU the reverse. Beside a busy engine these kernels are
// time-sliced and slow it down, so that staging slots are used there.
//
// largePiece is the average piece from which copy engines move a list alone. [measured, H200, two
// sidecars] Staging slots reach 12 to 15 GB/s whatever the size, a link 39 to 48 with pieces of 32
// KiB and 50 to 54 with 64 KiB; with scattered 16 KiB a copy engine reaches 4 to 12.
const largePiece = 32 << 10

// fewMapped is the number of pieces up to which the copy engine moves a list. It has the shortest
// latency for a layer of a small request, and takes no CPU.
const fewMapped = 32

// The lists of one staging slot, which holds both ends of its pieces.
const (
	mappedPieces  = slotRuns/2 - 1
	mappedFirstAt = mappedPieces * device.RunBytes
	mappedSide    = mappedFirstAt + (mappedPieces+1)*4
)

// mappedWorkers use a staging slot each: one gathers while another one scatters.
const mappedWorkers = 4

// copyMapped moves parts between pinned host memory and u: by kernels while k admits them, else,
// and where k is nil, by the copy engine piece by piece. When it returns, nothing is in flight. It
// changes parts.
func (u *GPU) copyMapped(k *policy.IdleProbe, dir device.Direction, parts []device.Piece) error {
	a := mappedCopy{u: u, probe: k, dir: dir, rest: parts}
	slots := max((pieceBytes(parts)+SlotBytes-1)/SlotBytes,
		uint64(len(parts)+mappedPieces-1)/mappedPieces)
	if slots <= 1 {
		a.work()
	} else {
		var wg sync.WaitGroup
		for range min(slots, mappedWorkers) {
			wg.Go(a.work)
		}
		wg.Wait()
	}
	if a.failed != nil {
		return fmt.Errorf("gpu: GPU %d: %w", u.index, a.failed)
	}
	return nil
}

// mappedCopy is one call of copyMapped.
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
			err = errors.Join(err, h.queue.Sync()) // nothing may be in flight when work returns
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

// take moves what one staging slot holds from rest to list, which has room for it.
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

// copySlot moves the pieces of one staging slot, and waits for the end.
func (a *mappedCopy) copySlot(h *slot, parts []device.Piece, bytes uint64, kernels bool) error {
	u := a.u
	from, to := fromHost, fromGPU
	if a.dir == device.DeviceToHost {
		from, to = to, from
	}
	if !kernels {
		h.far, h.near, h.sizes = h.far[:0], h.near[:0], h.sizes[:0]
		for i := range parts {
			h.far, h.near, h.sizes = append(h.far, to(&parts[i])), append(h.near, from(&parts[i])),
				append(h.sizes, parts[i].Len)
		}
		enqueue := h.queue.CopyBatch
		if a.dir == device.HostToDevice {
			enqueue = func(dst, src []cuda.Ptr, n []uint64) error {
				return h.rows.CopyIn(h.queue, dst, src, n)
			}
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

// mappedMethod is how pieces move between host pages and u: by kernels, by kernels after a probe
// (Auto), or by the copy engine. Under MPS the probe sees nothing, and kernels that access host
// memory take most of the GPU. [measured, H200] Layers of 41 us took 15 times as long beside 50
// GB/s to the host, and 6 times as long beside 48 GB/s from it.
func (u *GPU) mappedMethod() policy.CopyMethod {
	switch e := u.gpus.cfg.Method; {
	case e == policy.Pack && u.mps != device.MPSOn, e == policy.Auto && u.mps == device.MPSOff:
		return e
	}
	return policy.Copy
}

// end is a list of the kernels for one side.
type end struct {
	at  cuda.Ptr
	len uint64 // of each piece; 0: several lengths, listed as runs
}

// small moves pieces that are too small for copy engines alone, and returns the path. parts are the
// addresses of list.
func (c *Copier) small(u *GPU, dir device.Direction, list []hostPiece,
	parts []device.Piece) (path string, err error) {
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
