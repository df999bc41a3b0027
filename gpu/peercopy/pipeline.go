// Package peercopy moves scattered pieces from one GPU to another by pack, copy engine and unpack,
// and within one GPU by one kernel.
//
// A Pipeline owns its queues, buffers and events, and no goroutine: Run issues in the caller's
// goroutine. pipeline.go has the stages and their order, list.go the lists of the kernels.
package peercopy

import (
	"errors"
	"fmt"
	"net"
	"sync"

	"github.com/kvspray/kvspray/gpu/device"
	"github.com/kvspray/kvspray/internal/sys/cuda"
)

// Bytes is what one pipeline between two GPUs allocates on each of them.
func Bytes(maxStage uint64) uint64 { return Depth * (maxStage + listBytes) }

// WithinBytes is what one pipeline within a GPU allocates there.
func WithinBytes() uint64 { return Depth * listBytes }

// Move is an entry of the lists that a Pipeline moves.
type Move = device.Move

// The shape of a pipeline. [measured, 2 H200, scattered 16 KiB, contiguous copy 397 GB/s]
// Stages of 64 MiB give 379, 32 MiB 371, 16 MiB 356 GB/s, because each copy takes 2.6 us before
// its first byte. A run that is alone begins and ends with stages of MinStage, so that the
// first pack and the last unpack, which overlap nothing, are short. Below 16 MiB the host
// issues stages more slowly than the link moves them.
const (
	MaxStage    = 64 << 20
	MinStage    = 16 << 20
	Depth       = 4
	Runs        = 8        // at once; others wait
	MaxRuns     = 64 << 10 // of one stage
	DirectBytes = 16 << 20 // pieces from this size on are not packed

	// Within one GPU there is no staging: a stage is as many bytes as one kernel moves, while the host
	// lists those of the next.
	withinStage = 128 << 20
	// Longer pieces are cut, so that all multiprocessors take part: this is what a thread block has in
	// flight.
	withinPiece = 32 << 10
)

// Pipeline moves scattered pieces from one GPU to another: pack into a dense buffer, one copy by
// the source GPU's copy engine (by the destination's it takes 10 us more), unpack. It belongs to
// the destination's sidecar, which issues all three steps: waiting for its own queues is the fence.
//
// Within one GPU there is one queue, and a stage is one kernel that reads each piece and writes it
// to its place. A list has no byte that is written and also read.
//
// Runs share the queues. A run issues its stages behind those of the run before and waits only for
// its own, so that the link has no pause. [measured, 2 H200] With one pipeline for each run the
// link was idle for a quarter of the time.
type Pipeline struct {
	src, dst half
	link     device.Queue
	buffers  [Depth]stageBuffer
	max, min uint64
	within   bool // src and dst are one

	free chan runEvents // one per run that may begin; Close takes all

	mu     sync.Mutex // held while a run issues
	used   uint64     // stages ever issued
	runs   int        // in flight
	closed bool
}

// runEvents marks the end of one run.
type runEvents struct {
	linked device.Event // on the source, behind its last direct copy
	done   device.Event // on the destination, behind all work
}

type half struct {
	dev   device.Packer
	queue device.Queue
}

type stageBuffer struct {
	dense    [2]cuda.Ptr // on the source, on the destination
	runs     [2][]byte   // pinned, as the host writes them: runs, then first
	runsHost [2]cuda.Ptr
	runsDev  [2]cuda.Ptr
	packed   device.Event // on the source
	copied   device.Event
	unpacked device.Event // on the destination; the host waits for it before it writes the lists again
}

// New makes the pipeline from src to dst, which must have peer access to each other. It allocates
// Bytes(MaxStage) on each.
func New(src, dst device.Packer) (*Pipeline, error) {
	return NewSized(MinStage, MaxStage, src, dst)
}

// NewSized is New with other sizes of stages.
func NewSized(minStage, maxStage uint64, src, dst device.Packer) (_ *Pipeline, err error) {
	p := &Pipeline{src: half{dev: src}, dst: half{dev: dst}, min: minStage, max: maxStage}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("gpu: peer pipeline: %w", err), p.release())
		}
	}()
	if p.src.queue, err = src.NewQueue(); err != nil {
		return nil, err
	}
	if p.link, err = src.NewQueue(); err != nil {
		return nil, err
	}
	if p.dst.queue, err = dst.NewQueue(); err != nil {
		return nil, err
	}
	if err = p.prepare(); err != nil {
		return nil, err
	}
	return p, nil
}

// NewWithin makes a pipeline within the GPU of dev. It allocates WithinBytes.
func NewWithin(dev device.Packer) (*Pipeline, error) {
	return newWithin(MinStage, withinStage, dev)
}

func newWithin(minStage, maxStage uint64, dev device.Packer) (_ *Pipeline, err error) {
	p := &Pipeline{src: half{dev: dev}, dst: half{dev: dev}, min: minStage, max: maxStage,
		within: true}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("gpu: pipeline within a GPU: %w", err), p.release())
		}
	}()
	q, err := dev.NewQueue()
	if err != nil {
		return nil, err
	}
	p.src.queue, p.link, p.dst.queue = q, q, q
	if err = p.prepare(); err != nil {
		return nil, err
	}
	return p, nil
}

// sides are the GPUs of the pipeline.
func (p *Pipeline) sides() []device.Packer {
	if p.within {
		return []device.Packer{p.dst.dev}
	}
	return []device.Packer{p.src.dev, p.dst.dev}
}

// prepare makes the events and the buffers.
func (p *Pipeline) prepare() (err error) {
	src, dst := p.src.dev, p.dst.dev
	p.free = make(chan runEvents, Runs)
	for range Runs {
		var e runEvents
		if e.linked, err = src.NewEvent(); err != nil {
			return err
		}
		if e.done, err = dst.NewPromptEvent(); err != nil {
			return err
		}
		p.free <- e
	}
	for i := range p.buffers {
		b := &p.buffers[i]
		if b.copied, err = src.NewEvent(); err != nil {
			return err
		}
		if b.packed, err = src.NewEvent(); err != nil {
			return err
		}
		if b.unpacked, err = dst.NewPromptEvent(); err != nil {
			return err
		}
		for side, dev := range p.sides() {
			if !p.within {
				if b.dense[side], err = dev.Alloc(p.max); err != nil {
					return fmt.Errorf("%d bytes of staging: %w", p.max, err)
				}
			}
			if b.runsDev[side], err = dev.Alloc(listBytes); err != nil {
				return err
			}
			if b.runs[side], b.runsHost[side], err = dev.AllocHost(listBytes); err != nil {
				return err
			}
		}
	}
	return nil
}

// Run moves all moves and returns when every byte is in place. Also after an error nothing is in
// flight: no late write follows. Safe for concurrent use.
func (p *Pipeline) Run(moves []Move) error {
	e, ok := <-p.free
	if !ok {
		return net.ErrClosed
	}
	defer func() { p.free <- e }()
	err := p.issueAll(moves, e)
	if err == nil {
		err = e.done.Sync()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.runs--
	if err != nil {
		err = errors.Join(err, p.drain())
	}
	return err
}

// issueAll enqueues all moves, and e behind them.
func (p *Pipeline) issueAll(moves []Move, e runEvents) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.runs++
	direct, err := p.stages(moves)
	if err == nil && direct {
		err = errors.Join(p.link.Record(e.linked), p.dst.queue.Wait(e.linked))
	}
	if err == nil {
		err = p.dst.queue.Record(e.done)
	}
	if err != nil {
		// With the lock held: no event marks when the buffer of an incomplete stage is free.
		err = errors.Join(err, p.drain())
	}
	return err
}

// drain waits for everything in flight, also of other runs.
func (p *Pipeline) drain() error {
	return errors.Join(p.src.queue.Sync(), p.link.Sync(), p.dst.queue.Sync())
}

// stages enqueues moves. direct: some of them are copies on the link alone.
func (p *Pipeline) stages(moves []Move) (direct bool, err error) {
	var cur cursor
	smallest := p.min
	if p.runs > 1 {
		smallest = p.max
	}
	size := smallest
	for cur.move < len(moves) {
		m := &moves[cur.move]
		if m.Len == 0 || m.Count == 0 || m.Len > maxPiece || m.Count > MaxPieces {
			return false,
				fmt.Errorf("gpu: move %d: %d pieces of %d bytes: want 1 to %d pieces of 1 to %d bytes",
					cur.move, m.Count, m.Len,
					uint64(MaxPieces), uint64(maxPiece))
		}
		if !p.byKernel(m) {
			if err := p.link.Copy(m.Dst+cuda.Ptr(cur.piece*m.DstStride),
				m.Src+cuda.Ptr(cur.piece*m.SrcStride), m.Len); err != nil {
				return false, err
			}
			direct = true
			cur.advance(m, 1)
			continue
		}
		if err := p.stage(moves, &cur, size); err != nil {
			return false, err
		}
		// The rest is estimated from the next move: to add up all would take as long as to list them.
		left := uint64(0)
		if cur.move < len(moves) {
			m := &moves[cur.move]
			left = uint64(len(moves)-cur.move) * min(m.Len, maxPiece) * min(m.Count, MaxPieces)
		}
		size = min(size*2, p.max, max(left/2, smallest))
	}
	return direct, nil
}

// stage fills one buffer with up to size bytes of pieces for kernels and issues its steps.
func (p *Pipeline) stage(moves []Move, cur *cursor, size uint64) error {
	b := &p.buffers[p.used%Depth]
	if p.used >= Depth {
		// After its last unpack the lists in host memory and both dense buffers are free.
		if err := b.unpacked.Sync(); err != nil {
			return err
		}
	}
	p.used++
	size = max(size, moves[cur.move].Len)
	if p.within {
		return p.issueWithin(b, b.fillMoves(moves, cur, size))
	}
	if n, bytes := b.fillUniform(moves, cur, size); n > 0 {
		length := bytes / uint64(n)
		return p.issue(b, bytes, func(side int, q device.Queue) error {
			if err := q.Copy(b.runsDev[side], b.runsHost[side], uint64(n)*8); err != nil {
				return err
			}
			if side == 0 {
				return p.src.dev.PackUniform(q, b.runsDev[side], n, b.dense[side], length)
			}
			return p.dst.dev.UnpackUniform(q, b.runsDev[side], n, b.dense[side], length)
		})
	}
	n, bytes := b.fillRuns(moves, cur, size)
	return p.issue(b, bytes, func(side int, q device.Queue) error {
		if err := b.upload(side, q, n[side]*device.RunBytes, n[side]); err != nil {
			return err
		}
		if side == 0 {
			return p.src.dev.Pack(q, b.runsDev[side], b.runsDev[side]+firstAt, n[side])
		}
		return p.dst.dev.Unpack(q, b.runsDev[side], b.runsDev[side]+firstAt, n[side])
	})
}

// upload copies a list of n entries, and the pieces before each, to the GPU.
func (b *stageBuffer) upload(side int, q device.Queue, bytes, n int) error {
	if err := q.Copy(b.runsDev[side], b.runsHost[side], uint64(bytes)); err != nil {
		return err
	}
	return q.Copy(b.runsDev[side]+firstAt, b.runsHost[side]+firstAt, uint64((n+1)*4))
}

// issueWithin enqueues the kernel of a buffer with n runs.
func (p *Pipeline) issueWithin(b *stageBuffer, n int) error {
	q := p.dst.queue
	if err := b.upload(0, q, n*device.MoveBytes, n); err != nil {
		return err
	}
	if err := p.dst.dev.Move(q, b.runsDev[0], b.runsDev[0]+firstAt, n); err != nil {
		return err
	}
	return q.Record(b.unpacked)
}

// issue enqueues the three steps of a filled buffer. rearrange uploads the list of a side and
// launches its kernel.
func (p *Pipeline) issue(b *stageBuffer, bytes uint64, rearrange func(side int,
	q device.Queue) error) error {
	if err := rearrange(0, p.src.queue); err != nil {
		return err
	}
	if err := p.src.queue.Record(b.packed); err != nil {
		return err
	}
	if err := p.link.Wait(b.packed); err != nil {
		return err
	}
	if err := p.link.Copy(b.dense[1], b.dense[0], bytes); err != nil {
		return err
	}
	if err := p.link.Record(b.copied); err != nil {
		return err
	}
	if err := p.dst.queue.Wait(b.copied); err != nil {
		return err
	}
	if err := rearrange(1, p.dst.queue); err != nil {
		return err
	}
	return p.dst.queue.Record(b.unpacked)
}

// IdleRuns is the number of runs that may begin now.
func (p *Pipeline) IdleRuns() int { return len(p.free) }

// Close waits for the runs in flight and frees the buffers. Later calls of Run return
// net.ErrClosed.
func (p *Pipeline) Close() error {
	p.mu.Lock()
	closed := p.closed
	p.closed = true
	p.mu.Unlock()
	if closed {
		return nil
	}
	for range Runs {
		<-p.free
	}
	close(p.free)
	return p.release()
}

func (p *Pipeline) release() error {
	var errs []error
	for _, dev := range p.sides() {
		errs = append(errs, dev.Close())
	}
	for i := range p.buffers {
		for side, dev := range p.sides() {
			for _, ptr := range []cuda.Ptr{p.buffers[i].dense[side], p.buffers[i].runsDev[side]} {
				if ptr != 0 {
					errs = append(errs, dev.Free(ptr))
				}
			}
		}
	}
	return errors.Join(errs...)
}
