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

// Packer is a Device with the two kernels that rearrange bytes inside its GPU's memory.
type Packer interface {
	Device
	// AllocHost gives pinned host memory that the device's copy engines reach; freed by Close.
	AllocHost(n int) ([]byte, cuda.Ptr, error)
	// Pack gathers, Unpack scatters: n runs at runs (kernels.cu, kvs_run), with the counts of pieces before each at first.
	Pack(q Queue, runs, first cuda.Ptr, n int) error
	Unpack(q Queue, runs, first cuda.Ptr, n int) error
	// The same for n pieces of len bytes each, whose addresses stand at bases; piece i lies at dense + i*len.
	PackUniform(q Queue, bases cuda.Ptr, n int, dense cuda.Ptr, len uint64) error
	UnpackUniform(q Queue, bases cuda.Ptr, n int, dense cuda.Ptr, len uint64) error
}

// Move is one strided run between two GPUs: Count pieces of Len bytes, piece i from Src + i*SrcStride to Dst + i*DstStride.
type Move struct {
	Src, Dst             cuda.Ptr
	SrcStride, DstStride uint64
	Len                  uint64
	Count                uint64
}

// The shape of the peer pipeline. [measured, 2 H200, scattered 16 KiB, contiguous copy 397 GB/s] stages of 64 MiB give 379, 32 MiB
// 371, 16 MiB 356: each copy costs 2.6 us before its first byte. Stages grow from and shrink to MinStage where nobody else's are under
// way, so that the first pack and the last unpack, which overlap nothing, are short; below 16 MiB the host cannot issue stages as fast as
// the link takes them.
const (
	MaxStage    = 64 << 20
	MinStage    = 16 << 20
	PeerDepth   = 4
	PeerRuns    = 8        // at once; more wait
	MaxRuns     = 64 << 10 // of one stage
	DirectBytes = 16 << 20 // pieces of so many bytes skip packing
)

// Lists of the kernels.
const (
	packAlign = 16 // addresses and lengths are multiples of it
	runBytes  = 40 // sizeof(struct kvs_run)
	runOuter  = 16 // offset of outer in it
)

// Peer moves scattered blocks from one GPU to another: pack into a dense buffer, one copy across the link by the source GPU's
// copy engine (a pull by the destination's costs 10 us a copy), unpack. It belongs to the destination's sidecar, whose process
// issues all three: its fence is its own queues.
//
// Runs share the queues. One issues its stages behind those of another, and waits for its own alone, so that the link has no pause
// between two runs: [measured, 2 H200] with a pipeline for each of two runs at a time it stood still for a quarter of the time.
type Peer struct {
	src, dst half
	link     Queue
	buffers  [PeerDepth]stageBuffer
	max, min uint64

	free chan runEvents // of runs that may still begin; Close takes them all

	mu     sync.Mutex // who issues
	used   uint64     // stages ever issued
	runs   int        // under way
	closed bool
}

// runEvents mark the end of one run.
type runEvents struct {
	linked Event // on the source, behind its last direct copy
	done   Event // on the destination, behind all of it
}

type half struct {
	dev   Packer
	queue Queue
}

type stageBuffer struct {
	dense    [2]cuda.Ptr // on the source, on the destination
	runs     [2][]byte   // pinned, as the host writes them: runs, then first
	runsHost [2]cuda.Ptr
	runsDev  [2]cuda.Ptr
	packed   Event // on the source
	copied   Event
	unpacked Event // on the destination; the host waits for it before it writes the lists again
}

const listBytes = MaxRuns*runBytes + (MaxRuns+1)*4

// NewPeer makes the pipeline from src to dst, which have peer access to each other. It takes PeerDepth*MaxStage bytes on each.
func NewPeer(src, dst Packer) (*Peer, error) { return newPeer(MinStage, MaxStage, src, dst) }

func newPeer(minStage, maxStage uint64, src, dst Packer) (_ *Peer, err error) {
	p := &Peer{src: half{dev: src}, dst: half{dev: dst}, min: minStage, max: maxStage, free: make(chan runEvents, PeerRuns)}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("stage: peer pipeline: %w", err), p.release())
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
	for range PeerRuns {
		var e runEvents
		if e.linked, err = src.NewEvent(); err != nil {
			return nil, err
		}
		if e.done, err = dst.NewPromptEvent(); err != nil {
			return nil, err
		}
		p.free <- e
	}
	for i := range p.buffers {
		b := &p.buffers[i]
		if b.copied, err = src.NewEvent(); err != nil {
			return nil, err
		}
		if b.packed, err = src.NewEvent(); err != nil {
			return nil, err
		}
		if b.unpacked, err = dst.NewPromptEvent(); err != nil {
			return nil, err
		}
		for side, dev := range []Packer{src, dst} {
			if b.dense[side], err = dev.Alloc(maxStage); err != nil {
				return nil, fmt.Errorf("%d bytes of staging: %w", maxStage, err)
			}
			if b.runsDev[side], err = dev.Alloc(listBytes); err != nil {
				return nil, err
			}
			if b.runs[side], b.runsHost[side], err = dev.AllocHost(listBytes); err != nil {
				return nil, err
			}
		}
	}
	return p, nil
}

// Run moves all of moves and returns when every byte is in place. After an error, what was in flight has been waited for: no
// late write follows. Safe for concurrent use.
func (p *Peer) Run(moves []Move) error {
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
		err = errors.Join(err, p.settle())
	}
	return err
}

// issueAll enqueues all of moves, and e behind them.
func (p *Peer) issueAll(moves []Move, e runEvents) error {
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
		// Before anybody else issues: a stage that was issued in part has no event that says when its buffer is free.
		err = errors.Join(err, p.settle())
	}
	return err
}

// settle waits for whatever is under way, others' runs too.
func (p *Peer) settle() error {
	return errors.Join(p.src.queue.Sync(), p.link.Sync(), p.dst.queue.Sync())
}

// stages enqueues moves, and reports whether some of them are copies on the link alone.
func (p *Peer) stages(moves []Move) (direct bool, err error) {
	var cur cursor
	least := p.min
	if p.runs > 1 {
		least = p.max
	}
	size := least
	for cur.move < len(moves) {
		m := &moves[cur.move]
		if m.Len == 0 || m.Count == 0 || m.Len > maxPiece || m.Count > maxPieces {
			return false, fmt.Errorf("stage: move %d: %d pieces of %d bytes: want 1 to %d pieces of 1 to %d bytes", cur.move, m.Count, m.Len,
				uint64(maxPieces), uint64(maxPiece))
		}
		if !packable(m) || m.Len > p.max {
			if err := p.link.Copy(m.Dst+cuda.Ptr(cur.piece*m.DstStride), m.Src+cuda.Ptr(cur.piece*m.SrcStride), m.Len); err != nil {
				return false, err
			}
			direct = true
			cur.advance(m, 1)
			continue
		}
		if err := p.stage(moves, &cur, size); err != nil {
			return false, err
		}
		// What is left is guessed from the next move: to look at all of them would cost as much as to list them.
		left := uint64(0)
		if cur.move < len(moves) {
			m := &moves[cur.move]
			left = uint64(len(moves)-cur.move) * min(m.Len, maxPiece) * min(m.Count, maxPieces)
		}
		size = min(size*2, p.max, max(left/2, least))
	}
	return direct, nil
}

// Bounds of one move.
const (
	maxPiece  = 1 << 32 // bytes
	maxPieces = 1 << 24
)

// packable: the kernels move 16 bytes at a time, and a large piece is better off with the copy engine alone.
func packable(m *Move) bool {
	all := uint64(m.Src) | uint64(m.Dst) | m.SrcStride | m.DstStride | m.Len
	return all%packAlign == 0 && m.Len < DirectBytes
}

type cursor struct {
	move  int
	piece uint64
}

func (c *cursor) advance(m *Move, n uint64) {
	if c.piece += n; c.piece == m.Count {
		c.move, c.piece = c.move+1, 0
	}
}

// stage fills one buffer with packable pieces, up to size bytes, and issues its three steps.
func (p *Peer) stage(moves []Move, cur *cursor, size uint64) error {
	b := &p.buffers[p.used%PeerDepth]
	if p.used >= PeerDepth {
		// Its last unpack frees the lists, which are host memory, and both dense buffers.
		if err := b.unpacked.Sync(); err != nil {
			return err
		}
	}
	p.used++
	size = max(size, moves[cur.move].Len)
	if n, bytes := b.fillUniform(moves, cur, size); n > 0 {
		length := bytes / uint64(n)
		return p.issue(b, bytes, func(side int, q Queue) error {
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
	return p.issue(b, bytes, func(side int, q Queue) error {
		if err := q.Copy(b.runsDev[side], b.runsHost[side], uint64(n[side]*runBytes)); err != nil {
			return err
		}
		if err := q.Copy(b.runsDev[side]+firstAt, b.runsHost[side]+firstAt, uint64((n[side]+1)*4)); err != nil {
			return err
		}
		if side == 0 {
			return p.src.dev.Pack(q, b.runsDev[side], b.runsDev[side]+firstAt, n[side])
		}
		return p.dst.dev.Unpack(q, b.runsDev[side], b.runsDev[side]+firstAt, n[side])
	})
}

// minUniform is the number of pieces of one length in a row that make the short list worth a stage of its own.
const minUniform = 16

// sampleMoves are looked at to tell whether the next pieces lie in runs.
const sampleMoves = 64

// regular reports whether the next moves are runs that are worth their length in the list.
func regular(moves []Move) bool {
	moves = moves[:min(len(moves), sampleMoves)]
	pieces := uint64(0)
	for i := range moves {
		pieces += min(moves[i].Count, maxPieces)
	}
	return pieces >= strided*uint64(len(moves))
}

// fillUniform writes the addresses of pieces of one length; 0 where too few come next, or where they are better off as runs.
func (b *stageBuffer) fillUniform(moves []Move, cur *cursor, size uint64) (n int, bytes uint64) {
	m := moves[cur.move:]
	length := m[0].Len
	if !packable(&m[0]) || regular(m) {
		return 0, 0
	}
	at, most := *cur, int(min(size/length, MaxRuns))
	// This loop bounds the rate of small blocks: the link takes 32,768 of 2 KiB in 170 us.
	from, to := b.runs[0][:most*8], b.runs[1][:most*8]
	for i := range m {
		v := &m[i]
		if n == most || v.Len != length || (v.Src|v.Dst)%packAlign != 0 {
			break
		}
		if v.Count == 1 {
			binary.LittleEndian.PutUint64(from[n*8:n*8+8], uint64(v.Src))
			binary.LittleEndian.PutUint64(to[n*8:n*8+8], uint64(v.Dst))
			n++
			at.move++
			continue
		}
		if !packable(v) || v.Count == 0 || v.Count > maxPieces {
			break
		}
		k := int(min(v.Count-at.piece, uint64(most-n)))
		for range k {
			binary.LittleEndian.PutUint64(from[n*8:n*8+8], uint64(v.Src)+at.piece*v.SrcStride)
			binary.LittleEndian.PutUint64(to[n*8:n*8+8], uint64(v.Dst)+at.piece*v.DstStride)
			n++
			at.piece++
		}
		if at.piece < v.Count {
			break
		}
		at.move, at.piece = at.move+1, 0
	}
	if n < min(minUniform, most) && at.move < len(moves) {
		return 0, 0
	}
	*cur = at
	return n, uint64(n) * length
}

// firstAt is where the counts of pieces stand, after the runs.
const firstAt = MaxRuns * runBytes

// fillRuns writes strided runs of any lengths, and returns how many each side has of them.
func (b *stageBuffer) fillRuns(moves []Move, cur *cursor, size uint64) (n [2]int, bytes uint64) {
	lists := [2]rowList{{list: b.runs[0]}, {list: b.runs[1]}}
	for cur.move < len(moves) && max(lists[0].n, lists[1].n) < MaxRuns {
		m := &moves[cur.move]
		k := min(m.Count-cur.piece, (size-bytes)/max(m.Len, 1))
		if k == 0 || m.Len == 0 || m.Count > maxPieces || !packable(m) {
			break
		}
		lists[0].add(uint64(m.Src)+cur.piece*m.SrcStride, m.SrcStride, uint64(b.dense[0])+bytes, m.Len, uint32(k))
		lists[1].add(uint64(m.Dst)+cur.piece*m.DstStride, m.DstStride, uint64(b.dense[1])+bytes, m.Len, uint32(k))
		bytes += k * m.Len
		cur.advance(m, k)
	}
	for side := range lists {
		lists[side].first()
		n[side] = lists[side].n
	}
	return n, bytes
}

// rowList is the list of one side while it is written: rows that are alike and at equal distances are one run. A move is one row on both sides,
// whose rows lie otherwise on each.
type rowList struct {
	list   []byte
	n      int    // runs
	pieces uint32 // of all of them
	row    uint64 // base of the last row
	len    uint64
	mem.Strides
}

// first writes how many pieces come before the next run.
func (l *rowList) first() { binary.LittleEndian.PutUint32(l.list[firstAt+l.n*4:], l.pieces) }

func (l *rowList) add(base, stride, dense, size uint64, count uint32) {
	outer := base - l.row
	if count > 1 && count == l.Count && stride == l.Stride && size == l.len && (l.Rows == 1 || outer == l.Outer) {
		l.Outer = outer
		l.Rows++
		binary.LittleEndian.PutUint64(l.list[(l.n-1)*runBytes+runOuter:], outer)
	} else {
		l.Strides, l.len = mem.Strides{Stride: stride, Count: count, Rows: 1}, size
		l.first()
		putRun(l.list[l.n*runBytes:], base, dense, size, &l.Strides)
		l.n++
	}
	l.row = base
	l.pieces += count
}

// putRun writes a struct kvs_run.
func putRun(b []byte, base, dense, size uint64, s *mem.Strides) {
	b = b[:runBytes]
	binary.LittleEndian.PutUint64(b, base)
	binary.LittleEndian.PutUint64(b[8:], s.Stride)
	binary.LittleEndian.PutUint64(b[runOuter:], s.Outer)
	binary.LittleEndian.PutUint64(b[24:], dense)
	binary.LittleEndian.PutUint32(b[32:], uint32(size))
	binary.LittleEndian.PutUint32(b[36:], s.Count)
}

// issue enqueues the three steps of a filled buffer; rearrange uploads a side's list and launches its kernel.
func (p *Peer) issue(b *stageBuffer, bytes uint64, rearrange func(side int, q Queue) error) error {
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

// idleRuns is how many runs may begin at once.
func (p *Peer) idleRuns() int { return len(p.free) }

// Close waits for the runs that have begun and frees the buffers. Later calls of Run get net.ErrClosed.
func (p *Peer) Close() error {
	p.mu.Lock()
	closed := p.closed
	p.closed = true
	p.mu.Unlock()
	if closed {
		return nil
	}
	for range PeerRuns {
		<-p.free
	}
	close(p.free)
	return p.release()
}

func (p *Peer) release() error {
	errs := []error{p.src.dev.Close(), p.dst.dev.Close()}
	for i := range p.buffers {
		for side, dev := range []Packer{p.src.dev, p.dst.dev} {
			for _, ptr := range []cuda.Ptr{p.buffers[i].dense[side], p.buffers[i].runsDev[side]} {
				if ptr != 0 {
					errs = append(errs, dev.Free(ptr))
				}
			}
		}
	}
	return errors.Join(errs...)
}
