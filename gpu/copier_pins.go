package gpu

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/kvspray/kvspray/gpu/device"
	"github.com/kvspray/kvspray/internal/sys/cuda"
	"github.com/kvspray/kvspray/internal/sys/mem"
)

// The bounds of pinned host memory. A window is pinned at its first copy: a whole host cache
// would take a minute ([measured] 90 ms per GiB).
const (
	pinWindow  = 1 << 30
	maxWindows = 2048                 // of all regions
	yieldEvery = 2 * time.Millisecond // between two calls of Copier.yield
)

// window is a pinned part of a region.
type window struct {
	at     cuda.Ptr
	bytes  []byte
	by     device.Card
	pinned bool // false: the driver is pinning it
}

var errTooMany = fmt.Errorf("%d windows of %d bytes are pinned, the maximum", maxWindows, pinWindow)

// devicePieces appends the addresses of list for the copy engines and kernels of u, cut at the ends
// of windows. Where a window is not pinned, it is pinned, which takes a while, or, without pin, the
// error wraps errNotReady.
func (c *Copier) devicePieces(parts []device.Piece, u *GPU, list []hostPiece,
	pin bool) ([]device.Piece, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return parts, net.ErrClosed
	}
	// and the window of the previous piece: a look-up per piece would take most of the time
	var last *mem.Region
	var from, to uint64
	var at cuda.Ptr
	for i := range list {
		x := &list[i]
		off, dev, left := x.host.Off, cuda.Ptr(x.far.Region.Base()+x.far.Off), x.host.Len
		for left > 0 {
			if x.host.Region != last || off < from || off >= to {
				w, k := c.pins[x.host.Region][off/c.shape.window], off/c.shape.window
				if w == nil || !w.pinned {
					if !pin {
						return parts, errNotReady
					}
					var err error
					if w, err = c.pinLocked(u, x.host.Region, k); err != nil { // it is in the log
						return parts, err
					}
				}
				last, from, at = x.host.Region, k*c.shape.window, w.at
				to = from + uint64(len(w.bytes))
			}
			n := min(to-off, left)
			parts = append(parts, device.Piece{Host: at + cuda.Ptr(off-from), Dev: dev, Len: n,
				Shift: x.shift})
			off, dev, left = off+n, dev+cuda.Ptr(n), left-n
		}
	}
	return parts, nil
}

// Pin pins the windows of a copy between a GPU and the host, as Copy would, but only until ctx
// ends: all windows of a large list take longer than an engine waits. Copy reports what cannot be
// pinned.
func (c *Copier) Pin(ctx context.Context, dst, src []mem.Block) {
	buf := hostPieceLists.Get().(*[]hostPiece)
	defer hostPieceLists.Put(buf)
	list, ok := hostPiecesOf((*buf)[:0], dst, src)
	*buf = list[:0]
	if !ok {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	var last mem.Block // its window is pinned: a look-up per piece would take most of the time
	for i := range list {
		h := &list[i].host
		if h.Region == last.Region && h.Off >= last.Off && h.Off+h.Len <= last.Off+last.Len {
			continue
		}
		for k := h.Off / c.shape.window; k <= (h.Off+h.Len-1)/c.shape.window; k++ {
			last = mem.Block{Region: h.Region, Off: k * c.shape.window, Len: c.shape.window}
			if w := c.pins[h.Region][k]; w != nil && w.pinned {
				continue
			}
			if c.closed || ctx.Err() != nil {
				return
			}
			if _, err := c.pinLocked(list[i].u, h.Region, k); err != nil {
				return
			}
		}
	}
}

// pinLocked returns window k of a region, pinned for all GPUs. It releases mu while the driver
// pins.
func (c *Copier) pinLocked(u *GPU, r *mem.Region, k uint64) (*window, error) {
	from := k * c.shape.window
	to := min(from+c.shape.window, r.Size())
	for {
		w, ok := c.pins[r][k]
		if ok && w.pinned {
			return w, nil
		}
		if ok {
			c.settled.Wait()
			continue
		}
		b, _ := r.Bytes()
		if err := c.registerLocked(u, r, k, b[from:to:to]); err != nil {
			if !c.unpinned {
				c.unpinned = true
				c.gpus.cfg.Log.Warn(
					"host memory is not pinned; copies go through staging buffers (logged once)", "region",
					r.ID().String(), "offset", from, "err", err)
			}
			return nil, err
		}
	}
}

// registerLocked pins a window for all GPUs.
func (c *Copier) registerLocked(u *GPU, r *mem.Region, k uint64, b []byte) error {
	if c.windows >= maxWindows {
		return errTooMany
	}
	w := &window{bytes: b, by: u.card}
	c.windows++
	if c.pins[r] == nil {
		c.pins[r] = map[uint64]*window{}
	}
	c.pins[r][k] = w
	c.mu.Unlock()
	at, err := register(u.card, b, r.ReadOnly())
	c.mu.Lock()
	c.settled.Broadcast()
	if err != nil {
		delete(c.pins[r], k)
		c.windows--
		return err
	}
	w.at, w.pinned = at, true
	return nil
}

func register(by device.Card, b []byte, readOnly bool) (cuda.Ptr, error) {
	if !readOnly {
		return by.Register(b)
	}
	r, ok := by.(device.ReadOnlyCard)
	if !ok {
		return 0, errors.New("the driver cannot pin read-only memory")
	}
	return r.RegisterReadOnly(b)
}

// unpinLocked releases mu while the driver works.
func (c *Copier) unpinLocked(r *mem.Region) error {
	gone := c.pins[r]
	delete(c.pins, r)
	c.windows -= len(gone)
	c.mu.Unlock()
	defer c.mu.Lock()
	var errs []error
	for _, w := range gone {
		errs = append(errs, w.by.Unregister(w.bytes))
	}
	return errors.Join(errs...)
}
