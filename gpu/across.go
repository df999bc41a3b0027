package gpu

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"sync"

	"github.com/kvspray/kvspray/internal/sys/cuda"
	"github.com/kvspray/kvspray/internal/sys/mem"
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
const fewAcross = 32

// acrossPieces are those of one hop, whose list has both of their ends.
const (
	acrossPieces  = hopRuns/2 - 1
	acrossFirstAt = acrossPieces * runBytes
	acrossSide    = acrossFirstAt + (acrossPieces+1)*4
)

// acrossWorkers have a hop each: while one of them gathers another one scatters.
const acrossWorkers = 4

// packableParts reports whether kernels move these, 16 bytes at a time.
func packableParts(parts []Part) bool {
	for i := range parts {
		if p := &parts[i]; (uint64(p.Host)|uint64(p.Dev)|p.Len)%packAlign != 0 {
			return false
		}
	}
	return true
}

func partBytes(parts []Part) (n uint64) {
	for i := range parts {
		n += parts[i].Len
	}
	return n
}

// across moves parts between pinned memory of the host and that of u, by kernels as long as k lets them in, else, and where it is nil, by the copy engine
// one after the other. When it returns nothing of them is in flight. It cuts them.
func (u *GPU) across(k *knocker, dir Direction, parts []Part) error {
	a := crosser{u: u, knocker: k, dir: dir, rest: parts}
	hops := max((partBytes(parts)+HopBytes-1)/HopBytes, uint64(len(parts)+acrossPieces-1)/acrossPieces)
	if hops <= 1 {
		a.work()
	} else {
		var wg sync.WaitGroup
		for range min(hops, acrossWorkers) {
			wg.Go(a.work)
		}
		wg.Wait()
	}
	if a.failed != nil {
		return fmt.Errorf("stage: GPU %d: %w", u.index, a.failed)
	}
	return nil
}

// crosser is one call of across.
type crosser struct {
	u       *GPU
	knocker *knocker
	dir     Direction

	mu     sync.Mutex // protects both
	rest   []Part     // not taken yet
	failed error
}

var partLists = sync.Pool{New: func() any { s := make([]Part, 0, acrossPieces); return &s }}

func (a *crosser) work() {
	buf := partLists.Get().(*[]Part)
	defer partLists.Put(buf)
	for {
		h := <-a.u.hops
		parts, bytes := a.take((*buf)[:0])
		if len(parts) == 0 {
			a.u.hops <- h
			return
		}
		kernels := h.dense != 0 && a.knocker.enter()
		err := a.cross(h, parts, bytes, kernels)
		if err != nil {
			err = errors.Join(err, h.queue.Sync()) // nothing may be in flight when we return
		}
		if kernels {
			a.knocker.leave()
		}
		a.u.hops <- h
		if err != nil {
			a.mu.Lock()
			a.failed = errors.Join(a.failed, err)
			a.mu.Unlock()
		}
	}
}

// take adds a hop's worth of what is left to list, which has room for it.
func (a *crosser) take(list []Part) (_ []Part, bytes uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for a.failed == nil && len(a.rest) > 0 && len(list) < acrossPieces && bytes < HopBytes {
		p := &a.rest[0]
		part := *p
		part.Len = min(p.Len, HopBytes-bytes)
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
func (a *crosser) cross(h *hop, parts []Part, bytes uint64, kernels bool) error {
	u := a.u
	from, to := fromHost, fromGPU
	if a.dir == DeviceToHost {
		from, to = to, from
	}
	if !kernels {
		h.far, h.near, h.sizes = h.far[:0], h.near[:0], h.sizes[:0]
		for i := range parts {
			h.far, h.near, h.sizes = append(h.far, to(&parts[i])), append(h.near, from(&parts[i])), append(h.sizes, parts[i].Len)
		}
		enqueue := h.queue.CopyBatch
		if a.dir == HostToDevice {
			enqueue = func(dst, src []cuda.Ptr, n []uint64) error { return h.rows.copyIn(h.queue, dst, src, n) }
		}
		if err := enqueue(h.far, h.near, h.sizes); err != nil {
			return err
		}
		return h.wait(bytes)
	}
	gather, scatter := h.ends(0, parts, from), h.ends(acrossSide, parts, to)
	var err error
	if gather.len > 0 {
		err = errors.Join(u.dev.PackUniform(h.queue, gather.at, len(parts), h.dense, gather.len),
			u.dev.UnpackUniform(h.queue, scatter.at, len(parts), h.dense, scatter.len))
	} else {
		err = errors.Join(u.dev.Pack(h.queue, gather.at, gather.at+acrossFirstAt, len(parts)),
			u.dev.Unpack(h.queue, scatter.at, scatter.at+acrossFirstAt, len(parts)))
	}
	if err != nil {
		return err
	}
	return h.wait(bytes)
}

func fromHost(p *Part) cuda.Ptr { return p.Host }

func fromGPU(p *Part) cuda.Ptr { return p.Dev }

// MPS says whether kernels of ours run at the same time as those of other processes.
type MPS uint8

const (
	MPSUnknown MPS = iota // to the driver; it may be on
	MPSOff
	MPSOn
)

func (m MPS) String() string { return [...]string{"unknown", "off", "on"}[m] }

// sharer is a Packer that knows.
type sharer interface {
	MPS() MPS
}

// reaching is who moves pieces between the host's pages and u: kernels, Auto where they knock before, or the copy engine. Under MPS nobody hears who
// computes, and kernels that reach the host's memory take most of the GPU away from it. [measured, H200] layers of 41 us took 15 times as long
// beside 50 GB/s to the host, and six times beside 48 from it.
func (u *GPU) reaching() Executor {
	switch e := u.gpus.cfg.Executor; {
	case e == Pack && u.mps != MPSOn, e == Auto && u.mps == MPSOff:
		return e
	}
	return Copy
}

// end is a list for the kernels.
type end struct {
	at  cuda.Ptr
	len uint64 // of each piece; 0: a list of runs, as they have several lengths
}

// ends writes where the pieces lie on one side.
func (h *hop) ends(at int, parts []Part, where func(*Part) cuda.Ptr) end {
	e := end{h.listPtr + cuda.Ptr(at), parts[0].Len}
	list := h.list[at:][:acrossSide]
	for i := range parts {
		if parts[i].Len != e.len {
			e.len = 0
			break
		}
	}
	if e.len > 0 {
		for i := range parts {
			binary.LittleEndian.PutUint64(list[i*8:], uint64(where(&parts[i])))
		}
		return e
	}
	dense := uint64(h.dense)
	for i := range parts {
		putRun(list[i*runBytes:], uint64(where(&parts[i])), dense, parts[i].Len, &mem.Single)
		binary.LittleEndian.PutUint32(list[acrossFirstAt+i*4:], uint32(i))
		dense += parts[i].Len
	}
	binary.LittleEndian.PutUint32(list[acrossFirstAt+len(parts)*4:], uint32(len(parts)))
	return e
}

// small moves pieces for which a copy engine takes too long, and names the way. parts are those of list.
func (c *Copier) small(u *GPU, dir Direction, list []crossing, parts []Part) (path string, err error) {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return "", net.ErrClosed
	}
	c.under.Add(1)
	c.mu.Unlock()
	defer c.under.Done()
	if len(parts) <= fewAcross {
		return PathDirect, u.across(nil, dir, parts)
	}
	if partBytes(parts) < c.shape.across || !packableParts(parts) {
		return PathStaged, buffered(u, dir, list)
	}
	k := c.knockerOf(u)
	if !k.enter() {
		k.count(Copy, dir, partBytes(parts))
		return PathStaged, buffered(u, dir, list)
	}
	k.leave()
	k.count(Pack, dir, partBytes(parts))
	return PathPacked, u.across(k, dir, parts)
}

func bytesOf(list []crossing) (n uint64) {
	for i := range list {
		n += list[i].host.Len
	}
	return n
}

// buffered moves a list through buffers, as lanes do what nothing is pinned for.
func buffered(u *GPU, dir Direction, list []crossing) error {
	dst, src := make([]mem.Block, len(list)), make([]mem.Block, len(list))
	for i := range list {
		dst[i], src[i] = list[i].far, list[i].host
	}
	if dir == DeviceToHost {
		dst, src = src, dst
	}
	return u.Move(dst, src)
}
