package gpu

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/kvspray/kvspray/gpu/device"
	"github.com/kvspray/kvspray/gpu/policy"
	"github.com/kvspray/kvspray/internal/sys/cuda"
	"github.com/kvspray/kvspray/internal/sys/mem"
)

// ends lists the addresses of the pieces on one side.
func (h *slot) ends(at int, parts []device.Piece, where func(*device.Piece) cuda.Ptr) end {
	e := end{h.listPtr + cuda.Ptr(at), parts[0].Len}
	list := h.list[at:][:mappedSide]
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
		device.PutRun(list[i*device.RunBytes:], uint64(where(&parts[i])), dense, parts[i].Len,
			&mem.Single)
		binary.LittleEndian.PutUint32(list[mappedFirstAt+i*4:], uint32(i))
		dense += parts[i].Len
	}
	binary.LittleEndian.PutUint32(list[mappedFirstAt+len(parts)*4:], uint32(len(parts)))
	return e
}

// slot is a staging slot: what one gather or scatter needs.
type slot struct {
	queue          device.Queue
	done           device.Event
	prompt         device.Event // instead of done for short copies
	dense          cuda.Ptr     // SlotBytes of staging, on the GPU
	bounce         []byte       // SlotBytes of the arena, for memory that is not pinned
	list           []byte       // pinned: lists of the kernels
	listPtr        cuda.Ptr
	pieces         []mem.Block // without region, at addresses of the GPU
	far, near      []cuda.Ptr  // arguments of CopyBatch
	sizes          []uint64
	rows           device.RowCopier
	copyEngineOnly bool // no kernels
}

const slotListBytes = slotRuns*device.RunBytes + (slotRuns+1)*4

// slotFirstAt is the offset of the counts of pieces in list.
const slotFirstAt = slotRuns * device.RunBytes

// rearrange gathers or scatters in steps of at most SlotBytes and slotRuns blocks.
func (u *GPU) rearrange(dir device.Direction, p []byte, blocks []mem.Block) error {
	h := <-u.slots
	defer func() { u.slots <- h }()
	var off uint64 // done of blocks[0]
	for len(blocks) > 0 {
		n, bytes := 0, uint64(0)
		h.pieces = h.pieces[:0]
		for n < len(blocks) && len(h.pieces) < slotRuns && bytes < SlotBytes {
			b := &blocks[n]
			if err := b.Region.Check(b.Off, b.Len); err != nil {
				return err
			}
			k := min(b.Len-off, SlotBytes-bytes)
			if k > 0 {
				h.pieces = append(h.pieces, mem.Block{Off: b.Region.Base() + b.Off + off, Len: k})
			}
			bytes += k
			if off += k; off == b.Len {
				n, off = n+1, 0
			}
		}
		if bytes > uint64(len(p)) {
			return fmt.Errorf("gpu: blocks of %d bytes and more beside a buffer of %d: %w", bytes, len(p),
				mem.ErrBounds)
		}
		if err := u.copySlot(h, dir, p[:bytes]); err != nil {
			return fmt.Errorf("gpu: GPU %d: %w", u.index, err)
		}
		p, blocks = p[bytes:], blocks[n:]
	}
	return nil
}

// copySlot moves h.pieces, and waits for the end.
func (u *GPU) copySlot(h *slot, dir device.Direction, p []byte) error {
	if len(h.pieces) == 0 {
		return nil
	}
	host, pinned := u.pinned(p)
	if !pinned {
		host, _ = u.pinned(h.bounce)
		if dir == device.HostToDevice {
			mem.Copy(h.bounce, p)
		}
	}
	learn := u.out
	if dir == device.HostToDevice {
		learn = u.in
	}
	how, choice := u.chooseMethod(h, len(p), learn)
	start := time.Now()
	var err error
	if how == policy.Pack {
		err = u.packHere(h, dir, host, uint64(len(p)))
	} else {
		err = u.copyByEngine(h, dir, host)
	}
	if err == nil {
		err = h.wait(uint64(len(p)))
	}
	if err != nil {
		return errors.Join(err, h.queue.Sync()) // also after an error nothing may be in flight
	}
	if choice {
		learn.Observe(how, uint64(len(p)), start, time.Now())
	}
	if !pinned && dir == device.DeviceToHost {
		mem.Copy(p, h.bounce)
	}
	return nil
}

// Numbers of pieces below which no kernel is used. [measured, H100 and H200] The copy engine
// takes 1.5 us per piece and at least 15 us, under any load. A kernel and its copy take as long
// on an idle GPU, and milliseconds beside an engine: a trial would cost a layer of a small
// request more than it can gain.
const (
	packPieces = 4  // where the configuration asks for kernels
	autoPieces = 16 // where kernels are one of several methods
)

// promptBytes is the size up to which the pause between two polls would dominate.
const promptBytes = 256 << 10

// chooseMethod chooses how h moves. Kernels move units of 16 bytes; few or large blocks need no
// packing. choice: every method was possible.
func (u *GPU) chooseMethod(h *slot, bytes int, learn *policy.Policy) (e policy.CopyMethod,
	choice bool) {
	few := packPieces
	if u.gpus.cfg.Method == policy.Auto {
		few = autoPieces
	}
	if h.copyEngineOnly || len(h.pieces) < few || bytes/len(h.pieces) >= directPiece {
		return policy.Copy, false
	}
	for i := range h.pieces {
		if (h.pieces[i].Off|h.pieces[i].Len)%device.Align != 0 {
			return policy.Copy, false
		}
	}
	e, _ = learn.Pick(time.Now())
	return e, true
}

// warmWait is the longest time that Warm waits for its copy.
const warmWait = 100 * time.Microsecond

// Warm implements mem.Warmer. [measured, H200] After some idle milliseconds the first small copy
// takes a thread 40 us to enqueue, later ones 10.
func (u *GPU) Warm() {
	if len(u.slots) < cap(u.slots) {
		return // slots are in use: the driver is warm
	}
	var h *slot
	select {
	case h = <-u.slots:
	default:
		return
	}
	if !u.warm(h) {
		u.slots <- h
		return
	}
	go func() { // nothing may be in flight in a free slot
		_ = h.queue.Sync() // the next copy returns the error
		u.slots <- h
	}()
}

// warm makes a short copy inside h. under: it has not ended.
func (u *GPU) warm(h *slot) (under bool) {
	late := time.Now().Add(warmWait)
	h.far, h.near, h.sizes = h.far[:0], h.near[:0], h.sizes[:0]
	to, _ := u.pinned(h.bounce)
	for i := range cuda.Ptr(packPieces) {
		h.far, h.near, h.sizes = append(h.far, to+i*device.Align), append(h.near, h.dense+i*device.Align),
			append(h.sizes, device.Align)
	}
	if h.queue.CopyBatch(h.far, h.near, h.sizes) != nil || h.queue.Record(h.prompt) != nil {
		return true
	}
	back, err := device.DoneBy(h.prompt, late)
	return !back || err != nil
}

// copyByEngine copies block by block.
func (u *GPU) copyByEngine(h *slot, dir device.Direction, host cuda.Ptr) error {
	h.far, h.near, h.sizes = h.far[:0], h.near[:0], h.sizes[:0]
	for i := range h.pieces {
		p := &h.pieces[i]
		h.far, h.near, h.sizes = append(h.far, cuda.Ptr(p.Off)), append(h.near, host),
			append(h.sizes, p.Len)
		host += cuda.Ptr(p.Len)
	}
	if dir == device.HostToDevice {
		return h.rows.CopyIn(h.queue, h.far, h.near, h.sizes)
	}
	return h.queue.CopyBatch(h.near, h.far, h.sizes)
}

// packHere crosses the link once: a kernel packs on the GPU before the copy, or unpacks after it.
func (u *GPU) packHere(h *slot, dir device.Direction, host cuda.Ptr, bytes uint64) error {
	launch := u.list(h)
	if dir == device.HostToDevice {
		return errors.Join(h.queue.Copy(h.dense, host, bytes), launch(u.dev.Unpack, u.dev.UnpackUniform))
	}
	return errors.Join(launch(u.dev.Pack, u.dev.PackUniform), h.queue.Copy(host, h.dense, bytes))
}

// wait waits for the end of a copy.
func (h *slot) wait(bytes uint64) error {
	done := h.done
	if bytes <= promptBytes {
		done = h.prompt
	}
	if err := h.queue.Record(done); err != nil {
		return err
	}
	return done.Sync()
}

// list writes the list of blocks. The kernels read it in host memory: it is short, and a copy of it
// would cost a launch.
func (u *GPU) list(h *slot) func(runs func(device.Queue, cuda.Ptr, cuda.Ptr, int) error,
	uniform func(device.Queue, cuda.Ptr, int, cuda.Ptr, uint64) error) error {
	n, same := len(h.pieces), true
	for i := range h.pieces {
		same = same && h.pieces[i].Len == h.pieces[0].Len
	}
	limit := n
	if same {
		limit = n / device.Strided
	}
	if runs := h.runs(limit); runs > 0 {
		return func(launch func(device.Queue, cuda.Ptr, cuda.Ptr, int) error, _ func(device.Queue,
			cuda.Ptr, int, cuda.Ptr, uint64) error) error {
			return launch(h.queue, h.listPtr, h.listPtr+slotFirstAt, runs)
		}
	}
	for i := range h.pieces {
		binary.LittleEndian.PutUint64(h.list[i*8:], h.pieces[i].Off)
	}
	return func(_ func(device.Queue, cuda.Ptr, cuda.Ptr, int) error, uniform func(device.Queue,
		cuda.Ptr, int, cuda.Ptr, uint64) error) error {
		return uniform(h.queue, h.listPtr, n, h.dense, h.pieces[0].Len)
	}
}

// runs lists the blocks as strided runs, and returns their number; 0 where more than limit are
// needed.
func (h *slot) runs(limit int) int {
	dense := uint64(h.dense)
	n, pieces := 0, uint64(0)
	for rest := h.pieces; len(rest) > 0; n++ {
		if n == limit {
			return 0
		}
		r := mem.Leading(rest)
		device.PutRun(h.list[n*device.RunBytes:], rest[0].Off, dense, rest[0].Len, &r)
		binary.LittleEndian.PutUint32(h.list[slotFirstAt+n*4:], uint32(pieces))
		dense += r.Pieces() * rest[0].Len
		pieces += r.Pieces()
		rest = rest[r.Pieces():]
	}
	binary.LittleEndian.PutUint32(h.list[slotFirstAt+n*4:], uint32(pieces))
	return n
}
