package gpu

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/kvspray/kvspray/gpu/device"
	"github.com/kvspray/kvspray/gpu/policy"
	"github.com/kvspray/kvspray/internal/sys/cuda"
	"github.com/kvspray/kvspray/internal/sys/mem"
)

// calibration is the sizes of a measurement, in bytes unless noted. Tests have smaller ones.
type calibration struct {
	copier   copierShape
	piece    uint64 // of a kernel's list
	pieces   int
	direct   []uint64 // sizes of pieces, rising
	bytes    uint64   // over which pieces are scattered; more than caches hold
	runs     int      // of which the median counts
	loadRuns int      // queued kernels of the load
}

func fullCalibration() calibration {
	c := calibration{copier: fullShape(), piece: 16 << 10, pieces: 4096, bytes: 256 << 20, runs: 9,
		loadRuns: 4}
	// copy engines do not get smaller ones
	for size := uint64(largePiece); size <= 128<<10; size *= 2 {
		c.direct = append(c.direct, size)
	}
	return c
}

// enough is the part of the best rate that a smaller number of thread blocks must reach. The rest
// of the GPU is the engine's.
const enough = 0.95

// Calibrate measures each model of GPU of the host under load, because other values are best on an
// idle GPU: a stream of kernels keeps the GPU busy, as an engine would. It opens every GPU, takes
// some hundred MiB of each, and slows down their users for some seconds.
func Calibrate(ctx context.Context, g *GPUs) (*policy.Table, error) {
	return calibrate(ctx, g, fullCalibration())
}

func calibrate(ctx context.Context, g *GPUs, cal calibration) (_ *policy.Table, err error) {
	t := &policy.Table{Version: policy.TableVersion, GPUs: map[string]policy.Limits{}}
	var opened []*GPU
	var failed []error
	for i := range g.ids {
		u, err := g.open(i)
		if err != nil {
			failed = append(failed, err)
			g.cfg.Log.Warn("gpu not measured", "gpu", i, "err", err)
			continue
		}
		u.mayRelay.Store(true) // all links are measured
		opened = append(opened, u)
	}
	if len(opened) == 0 {
		return nil, fmt.Errorf("gpu: calibrate: no GPU can be used: %w", errors.Join(failed...))
	}
	c := newCopier(g, cal.copier)
	defer func() { err = errors.Join(err, c.Close()) }()
	for _, u := range opened {
		model := g.model(u.index)
		if model == "" {
			return nil, fmt.Errorf("gpu: calibrate: GPU %d has no name", u.index)
		}
		if _, ok := t.GPUs[model]; ok {
			continue
		}
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		l, err := cal.gpu(c, u)
		if err != nil {
			return nil, fmt.Errorf("gpu: calibrate GPU %d: %w", u.index, err)
		}
		t.GPUs[model] = l
		g.cfg.Log.Info("gpu measured", "gpu", u.index, "model", model, "pack_blocks", l.PackBlocks,
			"direct_bytes", l.DirectBytes, "every_link_bytes", l.EveryLink)
	}
	return t, t.Check()
}

// gpu measures one GPU under load.
func (cal *calibration) gpu(c *Copier, u *GPU) (l policy.Limits, err error) {
	stop, err := cal.load(u)
	if err != nil {
		return l, err
	}
	defer func() { err = errors.Join(err, stop()) }()
	l = policy.Limits{Measured: time.Now().UTC().Truncate(time.Second), EveryLink: map[int]uint64{}}
	if l.PackBlocks, err = cal.packBlocks(u); err != nil {
		return l, err
	}
	p, err := c.path(u) // measures the multipath threshold
	if err != nil {
		return l, err
	}
	defer p.mu.RUnlock()
	if n := len(p.relays); n > 0 {
		l.EveryLink[1+n] = p.m.Threshold()
	}
	l.DirectBytes, err = cal.directBytes(c, p, u)
	return l, err
}

// packing is a list of scattered pieces on a GPU, and a kernel that packs them.
type packing struct {
	d     device.Packer
	q     device.Queue
	done  device.Event
	mem   cuda.Ptr // the pieces, then the packed bytes
	bases cuda.Ptr
	n     int
	piece uint64
}

func (cal *calibration) packing(u *GPU) (_ *packing, err error) {
	d, err := u.card.NewPacker()
	if err != nil {
		return nil, err
	}
	k := &packing{d: d, n: cal.pieces, piece: cal.piece}
	defer func() {
		if err != nil {
			err = errors.Join(err, k.close())
		}
	}()
	if k.mem, err = d.Alloc(2 * uint64(k.n) * k.piece); err != nil {
		return nil, err
	}
	list, bases, err := d.AllocHost(8 * k.n)
	if err != nil {
		return nil, err
	}
	k.bases = bases
	for i, at := range rand.Perm(k.n) {
		binary.LittleEndian.PutUint64(list[8*i:], uint64(k.mem)+uint64(at)*k.piece)
	}
	if k.q, err = d.NewQueue(); err != nil {
		return nil, err
	}
	k.done, err = d.NewEvent()
	return k, err
}

func (k *packing) launch(pack bool) error {
	f := k.d.UnpackUniform
	if pack {
		f = k.d.PackUniform
	}
	return f(k.q, k.bases, k.n, k.mem+cuda.Ptr(uint64(k.n)*k.piece), k.piece)
}

// wait returns when all launched kernels have ended.
func (k *packing) wait() error { return errors.Join(k.q.Record(k.done), k.done.Sync()) }

func (k *packing) close() error {
	err := k.d.Close()
	if k.mem != 0 {
		err = errors.Join(err, k.d.Free(k.mem))
	}
	return err
}

// load keeps u busy until stop is called.
func (cal *calibration) load(u *GPU) (stop func() error, err error) {
	k, err := cal.packing(u)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		var err error
		for ctx.Err() == nil && err == nil {
			for range cal.loadRuns {
				err = errors.Join(err, k.launch(true))
			}
			err = errors.Join(err, k.wait())
		}
		ended <- err
	}()
	return func() error {
		cancel()
		return errors.Join(<-ended, k.close())
	}, nil
}

// median is the median time of some runs of f.
func (cal *calibration) median(f func(run int) error) (time.Duration, error) {
	took := make([]time.Duration, 0, cal.runs)
	for run := range cal.runs {
		start := time.Now()
		if err := f(run); err != nil {
			return 0, err
		}
		took = append(took, time.Since(start))
	}
	slices.Sort(took)
	return took[len(took)/2], nil
}

// packBlocks finds the fewest thread blocks that pack and unpack about as fast as the best number.
// 0: the device has no such setting.
func (cal *calibration) packBlocks(u *GPU) (n int, err error) {
	k, err := cal.packing(u)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, k.close()) }()
	s, ok := k.d.(device.PackSizer)
	if !ok {
		return 0, nil
	}
	var counts []int
	var took []time.Duration
	for blocks := s.PackBlocks(); blocks > 0; blocks /= 2 {
		s.SetPackBlocks(blocks)
		d, err := cal.median(func(int) error {
			return errors.Join(k.launch(true), k.launch(false), k.wait())
		})
		if err != nil {
			return 0, err
		}
		counts, took = append(counts, blocks), append(took, d)
	}
	return fewest(counts, took), nil
}

// fewest is the least of the counts that are fast enough.
func fewest(counts []int, took []time.Duration) int {
	n := 0
	for i, count := range counts {
		if float64(took[i])*enough <= float64(slices.Min(took)) && (n == 0 || count < n) {
			n = count
		}
	}
	return n
}

// directBytes finds the size of pieces from which the copy engine alone moves a list faster than a
// staging slot.
func (cal *calibration) directBytes(c *Copier, p *paths, u *GPU) (n uint64, err error) {
	const apart = 2 // distance of pieces in lengths, so that none can be joined
	host, err := mem.NewAnonymous("calibrate", apart*cal.bytes)
	if err != nil {
		return 0, err
	}
	defer host.Release()
	defer func() { err = errors.Join(err, c.Forget([]*mem.Region{host})) }()
	d, err := u.card.NewPacker()
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	at, err := d.Alloc(apart * cal.bytes)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, d.Free(at)) }()
	far, err := mem.NewDevice(mem.NewID(), mem.DeviceMemory{Device: u, Addr: uint64(at),
		Size: apart * cal.bytes, FD: -1})
	if err != nil {
		return 0, err
	}
	defer far.Release()
	c.mu.Lock()
	w, err := c.pinLocked(u, host, 0)
	c.mu.Unlock()
	if err != nil {
		return 0, err
	}
	if n := uint64(len(w.bytes)); n < host.Size() {
		return 0, fmt.Errorf("%d of %d bytes are pinned", n, host.Size())
	}
	var direct, staged []time.Duration // of both directions the slower one
	for _, size := range cal.direct {
		lists := make([]list, cal.runs)
		for i := range lists {
			for _, k := range rand.Perm(int(cal.bytes / size))[:min(cal.bytes/size, pieceLimit)] {
				off := uint64(k) * apart * size
				lists[i].pieces = append(lists[i].pieces, device.Piece{Host: w.at + cuda.Ptr(off), Dev: at +
					cuda.Ptr(off), Len: size})
				lists[i].near = append(lists[i].near, mem.Block{Region: host, Off: off, Len: size})
				lists[i].far = append(lists[i].far, mem.Block{Region: far, Off: off, Len: size})
			}
		}
		var a, b time.Duration
		for _, dir := range []device.Direction{device.HostToDevice, device.DeviceToHost} {
			x, err := cal.median(func(run int) error { return p.m.CopyDirect(dir, lists[run].pieces) })
			if err != nil {
				return 0, err
			}
			y, err := cal.median(func(run int) error {
				if dir == device.DeviceToHost {
					return u.Move(lists[run].near, lists[run].far)
				}
				return u.Move(lists[run].far, lists[run].near)
			})
			if err != nil {
				return 0, err
			}
			a, b = max(a, x), max(b, y)
		}
		direct, staged = append(direct, a), append(staged, b)
	}
	return crossover(cal.direct, direct, staged), nil
}

// list is what one run of directBytes copies, as pieces and as blocks.
type list struct {
	pieces    []device.Piece
	near, far []mem.Block
}

// pieceLimit bounds the pieces of such a list.
const pieceLimit = 4096

// crossover is the least of the rising sizes from which a is never slower than b, or twice the
// greatest where a is slower even there.
func crossover(sizes []uint64, a, b []time.Duration) uint64 {
	n := 2 * sizes[len(sizes)-1]
	for i := len(sizes) - 1; i >= 0 && a[i] <= b[i]; i-- {
		n = sizes[i]
	}
	return n
}

func (g *GPUs) model(i int) string {
	if m, ok := g.plat.(device.Modeler); ok {
		return m.Model(i)
	}
	return ""
}
