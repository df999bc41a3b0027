package gpu

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvspray/kvspray/internal/board"
	"github.com/kvspray/kvspray/internal/sys/cuda"
	"github.com/kvspray/kvspray/internal/sys/mem"
)

// GPU is one GPU as a mem.Device: hops between its memory and the host's, and pipelines to other GPUs.
type GPU struct {
	gpus  *GPUs
	index int
	card  card
	pci   string
	dev   Packer

	// Pinned host memory: what lanes borrow, then a bounce buffer for each hop.
	arena    []byte
	arenaPtr cuda.Ptr
	lent     chan []byte
	hops     chan *hop
	in, out  *chooser // to the GPU, from it

	// The dense buffers of all hops, of which a lent one may be known to engines until they die.
	staging    cuda.Ptr
	packBlocks int // of kernels that engines launch for us
	mps        MPS
	door       door
	budget     budget

	engines atomic.Pointer[[]*engine] // changed under enginesMu

	enginesMu sync.Mutex // protects all below
	exported  bool
	handle    cuda.IPCHandle // of staging, if exported
}

var _ mem.Warmer = (*GPU)(nil)

// hop is what one gather or scatter needs.
type hop struct {
	queue     Queue
	done      Event
	prompt    Event    // done of a short hop
	dense     cuda.Ptr // HopBytes on the GPU; 0: none, and the copy engine does all
	at        uint64   // of dense in staging, if lent
	lent      bool     // dense is a part of staging; else it took the place of one that a dead engine may have written to
	bounce    []byte   // HopBytes of the arena, for callers whose memory is not pinned
	list      []byte   // pinned: block lists as the kernels read them
	listPtr   cuda.Ptr
	pieces    []mem.Block // what is moved: of no region, at addresses of the GPU
	far, near []cuda.Ptr  // CopyBatch's
	sizes     []uint64
	rows      rowCopier
	copies    bool // by copy engines alone
}

const hopListBytes = hopRuns*runBytes + (hopRuns+1)*4

// hopFirstAt is where a hop's list has the counts of pieces.
const hopFirstAt = hopRuns * runBytes

func newGPU(g *GPUs, index int, c card) (_ *GPU, err error) {
	u := &GPU{gpus: g, index: index, card: c, in: newChooser(g.cfg.Executor, kernelPrice), out: newChooser(g.cfg.Executor, kernelPrice),
		packBlocks: 1}
	u.engines.Store(&[]*engine{})
	u.budget.limit = g.cfg.Memory
	if u.pci, err = c.PCI(); err != nil {
		return nil, err
	}
	if u.dev, err = c.NewPacker(); err != nil {
		return nil, err
	}
	if s, ok := u.dev.(packSizer); ok {
		u.packBlocks = min(s.PackBlocks(), board.WorkMaxBlocks)
	}
	if s, ok := u.dev.(sharer); ok {
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
	u.lent, u.hops = make(chan []byte, g.cfg.Buffers), make(chan *hop, g.cfg.Hops)
	lend := g.cfg.Buffers * LendBytes
	size := lend + g.cfg.Hops*HopBytes
	if u.arena, u.arenaPtr, err = u.dev.AllocHost(size); err != nil {
		return nil, fmt.Errorf("%d MiB of pinned host memory: %w; lower transports.gpu.buffers", size>>20, err)
	}
	for off := 0; off < lend; off += LendBytes {
		u.lent <- u.arena[off:][:LendBytes:LendBytes]
	}
	if u.staging, err = u.dev.Alloc(u.stagingBytes()); err != nil {
		return nil, fmt.Errorf("%d bytes of staging: %w", u.stagingBytes(), err)
	}
	u.budget.staging.Store(u.stagingBytes())
	if u.door.queue, err = u.dev.NewQueue(); err != nil {
		return nil, err
	}
	if u.door.back, err = u.dev.NewPromptEvent(); err != nil {
		return nil, err
	}
	for i := range g.cfg.Hops {
		h := &hop{bounce: u.arena[lend+i*HopBytes:][:HopBytes:HopBytes], pieces: make([]mem.Block, 0, hopRuns),
			far: make([]cuda.Ptr, 0, hopRuns), near: make([]cuda.Ptr, 0, hopRuns),
			sizes: make([]uint64, 0, hopRuns), at: uint64(i) * HopBytes, lent: true}
		h.dense = u.staging + cuda.Ptr(h.at)
		if h.queue, err = u.dev.NewQueue(); err != nil {
			return nil, err
		}
		if h.done, err = u.dev.NewEvent(); err != nil {
			return nil, err
		}
		if h.prompt, err = u.dev.NewPromptEvent(); err != nil {
			return nil, err
		}
		if h.list, h.listPtr, err = u.dev.AllocHost(hopListBytes); err != nil {
			return nil, err
		}
		u.hops <- h
	}
	return u, nil
}

func (u *GPU) stagingBytes() uint64 { return uint64(cap(u.hops)) * HopBytes }

// close waits for what is under way. What does not end in time keeps all that it may touch, until this process ends.
func (u *GPU) close() error {
	var errs []error
	var own []cuda.Ptr
	late := time.NewTimer(u.gpus.closePatience)
	defer late.Stop()
	for ended := range cap(u.hops) {
		select {
		case h := <-u.hops:
			if !h.lent && h.dense != 0 {
				own = append(own, h.dense)
			}
		case <-late.C:
			return fmt.Errorf("stage: GPU %d: %d of %d gathers and scatters are still under way after %v, in an engine that has stopped or a driver that hangs: "+
				"its memory stays allocated", u.index, cap(u.hops)-ended, cap(u.hops), u.gpus.closePatience)
		}
	}
	if !u.door.quiet(late.C) {
		return fmt.Errorf("stage: GPU %d: a kernel that does nothing has not run in %v, beside an engine that leaves no time or in a driver that hangs: "+
			"its memory stays allocated", u.index, u.gpus.closePatience)
	}
	errs = append(errs, u.dev.Close())
	for _, p := range own {
		errs = append(errs, u.dev.Free(p))
	}
	if u.enginesMu.Lock(); !u.exported { // else it goes with the context: engines may have it open
		errs = append(errs, u.dev.Free(u.staging))
	}
	u.enginesMu.Unlock()
	return errors.Join(append(errs, u.card.Close())...)
}

// export names staging to engines.
func (u *GPU) export() (_ cuda.IPCHandle, err error) {
	u.enginesMu.Lock()
	defer u.enginesMu.Unlock()
	if !u.exported {
		if u.handle, err = u.card.Export(u.staging); err != nil {
			return u.handle, err
		}
		u.exported = true
	}
	return u.handle, nil
}

// setEngines replaces the list of engines; change gets a copy of it.
func (u *GPU) setEngines(change func([]*engine) []*engine) {
	u.enginesMu.Lock()
	defer u.enginesMu.Unlock()
	all := change(slices.Clone(*u.engines.Load()))
	u.engines.Store(&all)
}

// retire gives a hop another dense buffer: what a dead engine's kernel does to the one it had, nobody knows. It happens to a hop once, as no
// engine is told of the other one.
func (u *GPU) retire(h *hop) {
	h.lent = false
	err := u.budget.fits(HopBytes)
	if err == nil {
		h.dense, err = u.dev.Alloc(HopBytes)
	}
	if err == nil {
		u.budget.staging.Add(HopBytes)
	} else {
		h.dense = 0
		u.gpus.cfg.Log.Warn("an engine died in mid kernel, and its staging buffer cannot be replaced: the copy engine takes its part", "gpu", u.index, "err", err)
	}
}

// PCI is where the GPU sits: which NICs are near to its memory follows from it.
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
	return u.rearrange(DeviceToHost, dst, blocks)
}

// Scatter implements mem.Device.
func (u *GPU) Scatter(blocks []mem.Block, src []byte) error {
	return u.rearrange(HostToDevice, src, blocks)
}

// rearrange does a gather or a scatter in hops of at most HopBytes and hopRuns blocks.
func (u *GPU) rearrange(dir Direction, p []byte, blocks []mem.Block) error {
	h := <-u.hops
	defer func() { u.hops <- h }()
	var off uint64 // of blocks[0]: done already
	for len(blocks) > 0 {
		n, bytes := 0, uint64(0)
		h.pieces = h.pieces[:0]
		for n < len(blocks) && len(h.pieces) < hopRuns && bytes < HopBytes {
			b := &blocks[n]
			if err := b.Region.Check(b.Off, b.Len); err != nil {
				return err
			}
			k := min(b.Len-off, HopBytes-bytes)
			if k > 0 {
				h.pieces = append(h.pieces, mem.Block{Off: b.Region.Base() + b.Off + off, Len: k})
			}
			bytes += k
			if off += k; off == b.Len {
				n, off = n+1, 0
			}
		}
		if bytes > uint64(len(p)) {
			return fmt.Errorf("stage: blocks of %d bytes and more beside a buffer of %d: %w", bytes, len(p), mem.ErrBounds)
		}
		if err := u.hop(h, dir, p[:bytes]); err != nil {
			return fmt.Errorf("stage: GPU %d: %w", u.index, err)
		}
		p, blocks = p[bytes:], blocks[n:]
	}
	return nil
}

// hop moves h.pieces, and waits for it.
func (u *GPU) hop(h *hop, dir Direction, p []byte) error {
	if len(h.pieces) == 0 {
		return nil
	}
	host, pinned := u.pinned(p)
	if !pinned {
		host, _ = u.pinned(h.bounce)
		if dir == HostToDevice {
			mem.Copy(h.bounce, p)
		}
	}
	learn := u.out
	if dir == HostToDevice {
		learn = u.in
	}
	how, choice, worker := u.how(h, len(p), learn)
	start := time.Now()
	var err error
	if how == InEngine {
		if err = u.engaged(worker, h, dir, host, uint64(len(p))); errors.Is(err, errNoEngine) {
			learn.wasted(InEngine, uint64(len(p)), start, time.Now())
			how, start, err = Copy, time.Now(), u.copied(h, dir, host)
		}
	} else if how == Pack {
		err = u.packed(h, dir, host, uint64(len(p)))
	} else {
		err = u.copied(h, dir, host)
	}
	if err == nil {
		err = h.wait(uint64(len(p)))
	}
	if err != nil {
		// Nothing may be in flight when we return, whatever went wrong.
		err = errors.Join(err, h.queue.Sync())
		if errors.Is(err, errEngineGone) {
			u.retire(h)
		}
		return err
	}
	if choice {
		learn.took(how, uint64(len(p)), start, time.Now())
	}
	if !pinned && dir == DeviceToHost {
		mem.Copy(p, h.bounce)
	}
	return nil
}

// Lists that are not worth a kernel. [measured, H100 and H200] the copy engine takes 1.5 us for a piece and 15 us for any copy, busy or not. A kernel
// and the copy behind it take as long where nothing else computes, and milliseconds beside an engine that does: to try that costs a layer of a
// small request more than it could ever gain.
const (
	packPieces = 4  // where kernels were asked for
	autoPieces = 16 // where they are one of several ways
)

// promptBytes is up to where a hop is over so soon that a pause between two looks would be most of it.
const promptBytes = 256 << 10

// how: the kernels move 16 bytes at a time, and few or large blocks need no packing. choice: any executor would have done. For InEngine it
// says where, too, and the caller gives that back.
func (u *GPU) how(h *hop, bytes int, learn *chooser) (e Executor, choice bool, w workplace) {
	few := packPieces
	if u.gpus.cfg.Executor == Auto {
		few = autoPieces
	}
	if h.copies || h.dense == 0 || len(h.pieces) < few || bytes/len(h.pieces) >= directPiece {
		return Copy, false, w
	}
	for i := range h.pieces {
		if (h.pieces[i].Off|h.pieces[i].Len)%packAlign != 0 {
			return Copy, false, w
		}
	}
	w = u.workplace(h)
	if e, _ = learn.pick(time.Now(), w.engine != nil); e != InEngine && w.engine != nil {
		w.giveBack(nil)
	}
	return e, true, w
}

// warmWait is how long Warm waits for its copy.
const warmWait = 100 * time.Microsecond

// Warm implements mem.Warmer. [measured, H200] to hand over the first small copy after some milliseconds takes a thread 40 us, and 10 those that follow.
func (u *GPU) Warm() {
	if len(u.hops) < cap(u.hops) {
		return // blocks are gathered or scattered: it is warm
	}
	var h *hop
	select {
	case h = <-u.hops:
	default:
		return
	}
	if h.dense == 0 || !u.warm(h) {
		u.hops <- h
		return
	}
	go func() { // nothing may be in flight when others have it
		_ = h.queue.Sync() // who copies next finds out what is wrong
		u.hops <- h
	}()
}

// warm copies what nobody needs from h to h, and reports whether that is not over yet.
func (u *GPU) warm(h *hop) (under bool) {
	late := time.Now().Add(warmWait)
	h.far, h.near, h.sizes = h.far[:0], h.near[:0], h.sizes[:0]
	to, _ := u.pinned(h.bounce)
	for i := range cuda.Ptr(packPieces) {
		h.far, h.near, h.sizes = append(h.far, to+i*packAlign), append(h.near, h.dense+i*packAlign), append(h.sizes, packAlign)
	}
	if h.queue.CopyBatch(h.far, h.near, h.sizes) != nil || h.queue.Record(h.prompt) != nil {
		return true
	}
	back, err := backBy(h.prompt, late)
	return !back || err != nil
}

// pinned gives the device address of host memory that lies in the arena, or in what Pin was told.
func (u *GPU) pinned(p []byte) (cuda.Ptr, bool) {
	if off, ok := offsetIn(u.arena, p); ok {
		return u.arenaPtr + cuda.Ptr(off), true
	}
	for _, r := range *u.gpus.pins.Load() {
		if off, ok := offsetIn(r.bytes, p); ok {
			return r.at + cuda.Ptr(off), true
		}
	}
	return 0, false
}

// copied lets the copy engine walk the blocks.
func (u *GPU) copied(h *hop, dir Direction, host cuda.Ptr) error {
	h.far, h.near, h.sizes = h.far[:0], h.near[:0], h.sizes[:0]
	for i := range h.pieces {
		p := &h.pieces[i]
		h.far, h.near, h.sizes = append(h.far, cuda.Ptr(p.Off)), append(h.near, host), append(h.sizes, p.Len)
		host += cuda.Ptr(p.Len)
	}
	if dir == HostToDevice {
		return h.rows.copyIn(h.queue, h.far, h.near, h.sizes)
	}
	return h.queue.CopyBatch(h.near, h.far, h.sizes)
}

// packed crosses the link once: a kernel packs on the GPU before, or unpacks after.
func (u *GPU) packed(h *hop, dir Direction, host cuda.Ptr, bytes uint64) error {
	launch := u.list(h)
	if dir == HostToDevice {
		return errors.Join(h.queue.Copy(h.dense, host, bytes), launch(u.dev.Unpack, u.dev.UnpackUniform))
	}
	return errors.Join(launch(u.dev.Pack, u.dev.PackUniform), h.queue.Copy(host, h.dense, bytes))
}

// engaged is packed, with the kernel in the engine's context. A queue does not wait for another process, so we do.
func (u *GPU) engaged(w workplace, h *hop, dir Direction, host cuda.Ptr, bytes uint64) (err error) {
	defer func() { w.giveBack(err) }()
	if dir == DeviceToHost {
		if err = w.run(h, board.WorkPack); err != nil {
			return err
		}
		return h.queue.Copy(host, h.dense, bytes)
	}
	if err = h.queue.Copy(h.dense, host, bytes); err == nil {
		err = h.wait(bytes)
	}
	if err != nil {
		return err
	}
	return w.run(h, board.WorkUnpack)
}

// wait returns once the queue is done with so many bytes.
func (h *hop) wait(bytes uint64) error {
	done := h.done
	if bytes <= promptBytes {
		done = h.prompt
	}
	if err := h.queue.Record(done); err != nil {
		return err
	}
	return done.Sync()
}

// list writes the blocks for the kernels, which read it where it is: it is short, and a copy of it would cost a launch.
func (u *GPU) list(h *hop) func(runs func(Queue, cuda.Ptr, cuda.Ptr, int) error, uniform func(Queue, cuda.Ptr, int, cuda.Ptr, uint64) error) error {
	n, same := len(h.pieces), true
	for i := range h.pieces {
		same = same && h.pieces[i].Len == h.pieces[0].Len
	}
	most := n
	if same {
		most = n / strided
	}
	if runs := h.runs(most); runs > 0 {
		return func(launch func(Queue, cuda.Ptr, cuda.Ptr, int) error, _ func(Queue, cuda.Ptr, int, cuda.Ptr, uint64) error) error {
			return launch(h.queue, h.listPtr, h.listPtr+hopFirstAt, runs)
		}
	}
	for i := range h.pieces {
		binary.LittleEndian.PutUint64(h.list[i*8:], h.pieces[i].Off)
	}
	return func(_ func(Queue, cuda.Ptr, cuda.Ptr, int) error, uniform func(Queue, cuda.Ptr, int, cuda.Ptr, uint64) error) error {
		return uniform(h.queue, h.listPtr, n, h.dense, h.pieces[0].Len)
	}
}

// strided is how many blocks a run has on average, at least, where blocks of one length go to the kernels as runs and not as addresses, which
// are a fifth as long.
const strided = 8

// runs writes the blocks as at most so many strided runs, and returns how many; 0 where it takes more, which scattered blocks soon show.
func (h *hop) runs(most int) int {
	dense := uint64(h.dense)
	n, pieces := 0, uint64(0)
	for rest := h.pieces; len(rest) > 0; n++ {
		if n == most {
			return 0
		}
		r := mem.Leading(rest, mem.BothAxes)
		putRun(h.list[n*runBytes:], rest[0].Off, dense, rest[0].Len, &r)
		binary.LittleEndian.PutUint32(h.list[hopFirstAt+n*4:], uint32(pieces))
		dense += r.Pieces() * rest[0].Len
		pieces += r.Pieces()
		rest = rest[r.Pieces():]
	}
	binary.LittleEndian.PutUint32(h.list[hopFirstAt+n*4:], uint32(pieces))
	return n
}

// moves is scratch of Move: callers come from several goroutines.
var moves = sync.Pool{New: func() any { s := make([]Move, 0, 4096); return &s }}

// Move implements mem.Device.
func (u *GPU) Move(dst, src []mem.Block) error {
	buf := moves.Get().(*[]Move)
	w := mover{gpus: u.gpus, list: (*buf)[:0]}
	err := w.run(dst, src)
	*buf = w.list[:0]
	moves.Put(buf)
	return err
}

// mover walks two lists of blocks together. Pieces between the same two GPUs gather in one list, pieces between a GPU and the host in
// another; both are moved when the next piece does not fit.
type mover struct {
	gpus     *GPUs
	dst, src side // of the last piece
	between  bool // which lies between the two GPUs of list
	list     []Move
	total    uint64 // bytes of list
	from, to *GPU   // of list
	copies   bool   // the list goes by copy engines alone

	far, near []mem.Block // of gpu, and of the host
	gpu       *GPU
	dir       Direction
	bytes     uint64 // of far
}

func (w *mover) run(dst, src []mem.Block) error {
	if err := w.walk(dst, src); err != nil {
		return err
	}
	if err := w.flush(); err != nil {
		return err
	}
	return w.host()
}

func (w *mover) walk(dst, src []mem.Block) error {
	var si, di int
	var soff, doff uint64
	for si < len(src) && di < len(dst) {
		s, d := &src[si], &dst[di]
		k := min(s.Len-soff, d.Len-doff)
		if so, do := s.Off+soff, d.Off+doff; w.between && s.Region == w.src.Region && d.Region == w.dst.Region && w.src.holds(so, k) && w.dst.holds(do, k) && k > 0 {
			w.add(w.src.base+cuda.Ptr(so), w.dst.base+cuda.Ptr(do), k) // nearly every piece
		} else if k > 0 {
			if err := w.piece(mem.Block{Region: d.Region, Off: d.Off + doff, Len: k}, mem.Block{Region: s.Region, Off: s.Off + soff, Len: k}); err != nil {
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
		return fmt.Errorf("stage: move: the two lists have different lengths: %w", mem.ErrBounds)
	}
	return nil
}

func (w *mover) piece(d, s mem.Block) error {
	// Thousands of pieces lie in the same two regions: what they need is looked up once.
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
		return w.beside(to, HostToDevice, d, s)
	case to == nil:
		return w.beside(from, DeviceToHost, s, d)
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

// add puts a piece on the list: into the run that it goes on with, or by itself. Two pieces have a distance by chance, so that a run takes
// three; large ones are as well off by themselves.
func (w *mover) add(src, dst cuda.Ptr, n uint64) {
	w.total += n
	if k := len(w.list); k > 0 && n == w.list[k-1].Len && n < directPiece {
		a := &w.list[k-1]
		if a.Count > 1 {
			if src == a.Src+cuda.Ptr(a.Count*a.SrcStride) && dst == a.Dst+cuda.Ptr(a.Count*a.DstStride) && a.Count < maxPieces {
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
	// Field by field: to copy a whole Move would take longer than all the rest.
	k := len(w.list)
	if k == cap(w.list) {
		w.list = slices.Grow(w.list, 1)
	}
	w.list = w.list[:k+1]
	m := &w.list[k]
	m.Src, m.Dst, m.SrcStride, m.DstStride, m.Len, m.Count = src, dst, 0, 0, n, 1
}

// side is what a mover needs of a region.
type side struct {
	*mem.Region
	gpu  *GPU // nil: of the host
	base cuda.Ptr
	size uint64
}

func sideOf(r *mem.Region) side {
	u, _ := r.Device().(*GPU)
	return side{r, u, cuda.Ptr(r.Base()), r.Size()}
}

// holds reports whether [off, off+n) lies in the region.
func (s *side) holds(off, n uint64) bool { return off <= s.size && n <= s.size-off }

// beside adds a piece between a GPU and the host.
func (w *mover) beside(u *GPU, dir Direction, far, near mem.Block) error {
	for far.Len > 0 {
		if w.gpu != u || w.dir != dir || w.bytes == LendBytes {
			if err := w.host(); err != nil {
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

// flush runs the list.
func (w *mover) flush() error {
	if len(w.list) == 0 {
		return nil
	}
	defer func() { w.list, w.total = w.list[:0], 0 }()
	p, err := w.gpus.pair(w.from, w.to)
	if errors.Is(err, errNoPeer) {
		return w.through()
	}
	if err != nil {
		return err
	}
	// Kernels of this process wait for an engine that keeps either GPU busy, and slow it down. Copy
	// engines do neither, and take scattered blocks across PCIe well. Within one GPU they do not:
	// there the driver copies by kernels, too.
	c, done := p.pick(time.Now())
	defer done()
	w.copies = c.alone
	if c.try && w.total > probeBytes {
		return w.split(p, c.how)
	}
	return w.by(p, c)
}

// split tries how with the first bytes of the list, and leaves the others to the executor in favour.
func (w *mover) split(p *pair, how Executor) error {
	all, total := w.list, w.total
	n, bytes := 0, uint64(0)
	for n < len(all) && bytes < probeBytes {
		bytes += all[n].Len * all[n].Count
		n++
	}
	w.list, w.total = all[:n], bytes
	err := w.by(p, choice{how: how})
	if w.list, w.total = all[n:], total-bytes; err == nil && len(w.list) > 0 {
		err = w.by(p, choice{how: Pack + Copy - how})
	}
	w.list = all
	return err
}

// by moves the list as chosen, and learns how long it took.
func (w *mover) by(p *pair, c choice) (err error) {
	start := time.Now()
	if c.how == Copy {
		err = w.through()
	} else {
		err = p.run(w.list)
	}
	switch {
	case err != nil:
	case c.idle:
		p.learn.count(c.how, w.total)
	default:
		p.learn.took(c.how, w.total, start, time.Now())
	}
	return err
}

// throughWorkers exchange at once: each waits for two copies, one after the other, so several fill the link.
const throughWorkers = 6

// through takes the list by way of host memory: where two GPUs do not reach each other, or are busy. A worker holds one hop at a
// time: to hold one of each GPU could deadlock against those who go the other way.
func (w *mover) through() error {
	var mu sync.Mutex // protects all below
	var failed error
	rest := w.list
	// next adds a hop's worth of what is left to list.
	next := func(list []Move) (_ []Move, bytes uint64) {
		mu.Lock()
		defer mu.Unlock()
		if failed != nil {
			return nil, 0
		}
		for pieces := uint64(0); len(rest) > 0; {
			m := &rest[0]
			part := *m
			part.Count = min(m.Count, hopRuns-pieces, (LendBytes-bytes)/m.Len)
			if part.Count == 0 && len(list) > 0 {
				break
			}
			if part.Count == 0 { // larger than a buffer, and no run: cut it
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
	for range min(throughWorkers, 1+w.total/LendBytes) {
		wg.Go(func() {
			buf, giveBack := w.from.buffer()
			defer giveBack()
			scratch := moves.Get().(*[]Move)
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

// exchange moves at most a hop's worth.
func (w *mover) exchange(list []Move, buf []byte) error {
	for _, side := range []struct {
		gpu *GPU
		dir Direction
	}{{w.from, DeviceToHost}, {w.to, HostToDevice}} {
		h := <-side.gpu.hops
		h.pieces = h.pieces[:0]
		for i := range list {
			p, stride := list[i].Src, list[i].SrcStride
			if side.dir == HostToDevice {
				p, stride = list[i].Dst, list[i].DstStride
			}
			for range list[i].Count {
				h.pieces = append(h.pieces, mem.Block{Off: uint64(p), Len: list[i].Len})
				p += cuda.Ptr(stride)
			}
		}
		h.copies = w.copies
		err := side.gpu.hop(h, side.dir, buf)
		h.copies = false
		side.gpu.hops <- h
		if err != nil {
			return fmt.Errorf("stage: GPU %d: %w", side.gpu.index, err)
		}
	}
	return nil
}

// buffer is a lent buffer, or pageable memory while none is free.
func (u *GPU) buffer() (buf []byte, giveBack func()) {
	if b := u.Lend(); b != nil {
		return b, func() { u.Return(b) }
	}
	return make([]byte, LendBytes), func() {}
}

// host moves the pieces that have host memory on one side, by way of one buffer.
func (w *mover) host() error {
	if len(w.near) == 0 {
		return nil
	}
	u := w.gpu
	buf, giveBack := u.buffer()
	defer giveBack()
	buf = buf[:w.bytes]
	if w.dir == HostToDevice {
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
