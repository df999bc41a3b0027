package gpu

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/kvspray/kvspray/gpu/device"
	"github.com/kvspray/kvspray/gpu/peercopy"
	"github.com/kvspray/kvspray/gpu/policy"
	"github.com/kvspray/kvspray/internal/sys/cuda"
	"github.com/kvspray/kvspray/internal/sys/mem"
)

// moves is scratch of Move, which several goroutines call.
var moves = sync.Pool{New: func() any { s := make([]peercopy.Move, 0, 4096); return &s }}

// Move implements mem.Device.
func (u *GPU) Move(dst, src []mem.Block) error {
	buf := moves.Get().(*[]peercopy.Move)
	w := batcher{gpus: u.gpus, list: (*buf)[:0]}
	err := w.run(dst, src)
	*buf = w.list[:0]
	moves.Put(buf)
	return err
}

// batcher walks two lists of blocks together. It collects pieces between the same two GPUs in one
// list, pieces between a GPU and the host in another. It moves a list when the next piece does not
// belong to it.
type batcher struct {
	gpus           *GPUs
	dst, src       side // of the last piece
	between        bool // the last piece is between from and to
	list           []peercopy.Move
	total          uint64 // bytes of list
	from, to       *GPU   // of list
	copyEngineOnly bool   // staging slots use no kernel

	far, near []mem.Block // of gpu, and of the host
	gpu       *GPU
	dir       device.Direction
	bytes     uint64 // of far
}

func (w *batcher) run(dst, src []mem.Block) error {
	if err := w.walk(dst, src); err != nil {
		return err
	}
	if err := w.flush(); err != nil {
		return err
	}
	return w.flushHost()
}

func (w *batcher) walk(dst, src []mem.Block) error {
	var si, di int
	var soff, doff uint64
	for si < len(src) && di < len(dst) {
		s, d := &src[si], &dst[di]
		k := min(s.Len-soff, d.Len-doff)
		if so, do := s.Off+soff, d.Off+doff; w.between && s.Region == w.src.Region &&
			d.Region == w.dst.Region && w.src.holds(so, k) && w.dst.holds(do, k) && k > 0 {
			w.add(w.src.base+cuda.Ptr(so), w.dst.base+cuda.Ptr(do), k) // nearly every piece
		} else if k > 0 {
			if err := w.piece(mem.Block{Region: d.Region, Off: d.Off + doff, Len: k},
				mem.Block{Region: s.Region, Off: s.Off + soff, Len: k}); err != nil {
				return err
			}
		}
		if soff += k; soff == s.Len {
			si, soff = si+1, 0
		}
		if doff += k; doff == d.Len {
			di, doff = di+1, 0
		}
	}
	if si < len(src) || di < len(dst) {
		return fmt.Errorf("gpu: move: the two lists have different lengths: %w", mem.ErrBounds)
	}
	return nil
}

func (w *batcher) piece(d, s mem.Block) error {
	// Thousands of pieces are in the same two regions, which are looked up once.
	if d.Region != w.dst.Region || s.Region != w.src.Region {
		w.dst, w.src, w.between = sideOf(d.Region), sideOf(s.Region), false
	}
	if !w.src.holds(s.Off, s.Len) || !w.dst.holds(d.Off, d.Len) {
		return errors.Join(s.Region.Check(s.Off, s.Len), d.Region.Check(d.Off, d.Len))
	}
	from, to := w.src.gpu, w.dst.gpu
	switch {
	case from == nil && to == nil:
		buf := make([]byte, s.Len)
		return errors.Join(s.Region.ReadAt(buf, s.Off), d.Region.WriteAt(buf, d.Off))
	case from == nil:
		return w.addHost(to, device.HostToDevice, d, s)
	case to == nil:
		return w.addHost(from, device.DeviceToHost, s, d)
	}
	if from != w.from || to != w.to {
		if err := w.flush(); err != nil {
			return err
		}
		w.from, w.to = from, to
	}
	w.between = true
	w.add(w.src.base+cuda.Ptr(s.Off), w.dst.base+cuda.Ptr(d.Off), s.Len)
	return nil
}

// add appends a piece to the list: to the last run, or as an entry of its own. Any two pieces have
// a distance, so that a run begins with three. Large pieces stay single.
func (w *batcher) add(src, dst cuda.Ptr, n uint64) {
	w.total += n
	if k := len(w.list); k > 0 && n == w.list[k-1].Len && n < directPiece {
		a := &w.list[k-1]
		if a.Count > 1 {
			if src == a.Src+cuda.Ptr(a.Count*a.SrcStride) && dst == a.Dst+cuda.Ptr(a.Count*a.DstStride) &&
				a.Count < peercopy.MaxPieces {
				a.Count++
				return
			}
		} else if k > 1 {
			z := &w.list[k-2]
			if src-a.Src == a.Src-z.Src && dst-a.Dst == a.Dst-z.Dst && z.Count == 1 && z.Len == n {
				z.SrcStride, z.DstStride, z.Count = uint64(src-a.Src), uint64(dst-a.Dst), 3
				w.list = w.list[:k-1]
				return
			}
		}
	}
	// Field by field: a copy of a whole Move would take most of the time.
	k := len(w.list)
	if k == cap(w.list) {
		w.list = slices.Grow(w.list, 1)
	}
	w.list = w.list[:k+1]
	m := &w.list[k]
	m.Src, m.Dst, m.SrcStride, m.DstStride, m.Len, m.Count = src, dst, 0, 0, n, 1
}

// side is what the batcher needs of a region.
type side struct {
	*mem.Region
	gpu  *GPU // nil: host memory
	base cuda.Ptr
	size uint64
}

func sideOf(r *mem.Region) side {
	u, _ := r.Device().(*GPU)
	return side{r, u, cuda.Ptr(r.Base()), r.Size()}
}

// holds reports whether [off, off+n) is inside the region.
func (s *side) holds(off, n uint64) bool { return off <= s.size && n <= s.size-off }

// addHost adds a piece between a GPU and the host.
func (w *batcher) addHost(u *GPU, dir device.Direction, far, near mem.Block) error {
	for far.Len > 0 {
		if w.gpu != u || w.dir != dir || w.bytes == LendBytes {
			if err := w.flushHost(); err != nil {
				return err
			}
			w.gpu, w.dir = u, dir
		}
		k := min(far.Len, LendBytes-w.bytes)
		w.far = append(w.far, mem.Block{Region: far.Region, Off: far.Off, Len: k})
		w.near = append(w.near, mem.Block{Region: near.Region, Off: near.Off, Len: k})
		w.bytes += k
		far.Off, far.Len, near.Off = far.Off+k, far.Len-k, near.Off+k
	}
	return nil
}

// flush moves the list between two GPUs.
func (w *batcher) flush() error {
	if len(w.list) == 0 {
		return nil
	}
	defer func() { w.list, w.total = w.list[:0], 0 }()
	p, err := w.gpus.pair(w.from, w.to)
	if errors.Is(err, errNoPeer) {
		return w.throughHost()
	}
	if err != nil {
		return err
	}
	// Kernels of this process wait for a busy engine and slow it down. Copy engines do neither, and
	// copy scattered blocks well across PCIe. Within one GPU they do not, because the driver uses
	// kernels there, too.
	c, done := p.pick(time.Now())
	defer done()
	w.copyEngineOnly = c.copyEngineOnly
	if c.try && w.total > policy.TrialBytes {
		return w.split(p, c.how)
	}
	return w.runList(p, c)
}

// split tries how with the first bytes of the list, and moves the rest by the other method.
func (w *batcher) split(p *pair, how policy.CopyMethod) error {
	all, total := w.list, w.total
	n, bytes := 0, uint64(0)
	for n < len(all) && bytes < policy.TrialBytes {
		bytes += all[n].Len * all[n].Count
		n++
	}
	w.list, w.total = all[:n], bytes
	err := w.runList(p, choice{how: how})
	if w.list, w.total = all[n:], total-bytes; err == nil && len(w.list) > 0 {
		err = w.runList(p, choice{how: policy.Pack + policy.Copy - how})
	}
	w.list = all
	return err
}

// runList moves the list as chosen, and learns from its time.
func (w *batcher) runList(p *pair, c choice) (err error) {
	start := time.Now()
	if c.how == policy.Copy {
		err = w.throughHost()
	} else {
		err = p.run(w.list)
	}
	switch {
	case err != nil:
	case c.idle:
		p.policy.Count(c.how, w.total)
	default:
		p.policy.Observe(c.how, w.total, start, time.Now())
	}
	return err
}

// buffer returns a lent buffer, or pageable memory while none is free.
func (u *GPU) buffer() (buf []byte, release func()) {
	if b := u.Lend(); b != nil {
		return b, func() { u.Return(b) }
	}
	return make([]byte, LendBytes), func() {}
}

// flushHost moves the pieces with host memory on one side, through one buffer.
func (w *batcher) flushHost() error {
	if len(w.near) == 0 {
		return nil
	}
	u := w.gpu
	buf, release := u.buffer()
	defer release()
	buf = buf[:w.bytes]
	if w.dir == device.HostToDevice {
		if err := mem.Gather(buf, w.near); err != nil {
			return err
		}
		if err := u.Scatter(w.far, buf); err != nil {
			return err
		}
	} else {
		if err := u.Gather(buf, w.far); err != nil {
			return err
		}
		if err := mem.Scatter(w.near, buf); err != nil {
			return err
		}
	}
	w.far, w.near, w.bytes = w.far[:0], w.near[:0], 0
	return nil
}
