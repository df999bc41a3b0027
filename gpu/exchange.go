package gpu

import (
	"fmt"
	"sync"

	"github.com/kvspray/kvspray/gpu/device"
	"github.com/kvspray/kvspray/gpu/peercopy"
	"github.com/kvspray/kvspray/internal/sys/cuda"
	"github.com/kvspray/kvspray/internal/sys/mem"
)

// hostWorkers is how many goroutines exchange at once. Each waits for two copies in turn, so that
// several are needed to fill the link.
const hostWorkers = 6

// throughHost moves the list through host memory, where two GPUs do not reach each other or are
// busy. A worker holds one staging slot at a time: one slot of each GPU could deadlock with copies
// in the other direction.
func (w *batcher) throughHost() error {
	var mu sync.Mutex // protects all below
	var failed error
	rest := w.list
	// next moves what one staging slot holds from rest to list.
	next := func(list []peercopy.Move) (_ []peercopy.Move, bytes uint64) {
		mu.Lock()
		defer mu.Unlock()
		if failed != nil {
			return nil, 0
		}
		for pieces := uint64(0); len(rest) > 0; {
			m := &rest[0]
			part := *m
			part.Count = min(m.Count, slotRuns-pieces, (LendBytes-bytes)/m.Len)
			if part.Count == 0 && len(list) > 0 {
				break
			}
			if part.Count == 0 { // one piece is larger than a buffer
				part.Len, part.Count = LendBytes, 1
				m.Src, m.Dst, m.Len = m.Src+LendBytes, m.Dst+LendBytes, m.Len-LendBytes
			} else if m.Count -= part.Count; m.Count > 0 {
				m.Src, m.Dst = m.Src+cuda.Ptr(part.Count*m.SrcStride), m.Dst+cuda.Ptr(part.Count*m.DstStride)
			} else {
				rest = rest[1:]
			}
			list = append(list, part)
			pieces += part.Count
			bytes += part.Count * part.Len
		}
		return list, bytes
	}
	var wg sync.WaitGroup
	for range min(hostWorkers, 1+w.total/LendBytes) {
		wg.Go(func() {
			buf, release := w.from.buffer()
			defer release()
			scratch := moves.Get().(*[]peercopy.Move)
			defer moves.Put(scratch)
			for {
				list, bytes := next((*scratch)[:0])
				if len(list) == 0 {
					return
				}
				*scratch = list
				if err := w.exchange(list, buf[:bytes]); err != nil {
					mu.Lock()
					failed = err
					mu.Unlock()
				}
			}
		})
	}
	wg.Wait()
	return failed
}

// exchange moves at most what one staging slot holds.
func (w *batcher) exchange(list []peercopy.Move, buf []byte) error {
	for _, side := range []struct {
		gpu *GPU
		dir device.Direction
	}{{w.from, device.DeviceToHost}, {w.to, device.HostToDevice}} {
		h := <-side.gpu.slots
		h.pieces = h.pieces[:0]
		for i := range list {
			p, stride := list[i].Src, list[i].SrcStride
			if side.dir == device.HostToDevice {
				p, stride = list[i].Dst, list[i].DstStride
			}
			for range list[i].Count {
				h.pieces = append(h.pieces, mem.Block{Off: uint64(p), Len: list[i].Len})
				p += cuda.Ptr(stride)
			}
		}
		h.copyEngineOnly = w.copyEngineOnly
		err := side.gpu.copySlot(h, side.dir, buf)
		h.copyEngineOnly = false
		side.gpu.slots <- h
		if err != nil {
			return fmt.Errorf("gpu: GPU %d: %w", side.gpu.index, err)
		}
	}
	return nil
}
