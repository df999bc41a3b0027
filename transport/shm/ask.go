package shm

import (
	"errors"
	"fmt"
	"slices"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// asker makes pulls of slices. It belongs to one goroutine.
type asker struct {
	resumes bool // it continues stalled slices; other askers append to them
	blocks  []mem.Block
	frame   []byte
	limit   uint32 // chunks of the slice's last pull that was cut by a bound; 0: none was
}

// askHere is the largest number of chunks of GPU memory for which Move makes the pulls itself if no
// slice waits for an asker: the engine waits for the layer of a small request, and an asker would
// need longer to wake up.
const askHere = 4

// batchAsks bounds the slices whose pulls an asker holds back while it has more work: a packet has
// room for some.
const batchAsks = 4

// askFor makes the pulls of slices that Move has left to it: a GPU's link copies blocks faster than
// one core finds them.
func (s *source) askFor() {
	var a asker
	waiting := 0 // slices whose pulls are not sent yet
	for m := range s.asks {
		s.moveOne(&a, m)
		if waiting++; waiting >= batchAsks || len(s.asks) == 0 {
			s.l.out.kick()
			waiting = 0
		}
		s.wakeIfLate()
	}
}

// moveOne cuts a slice into pulls. The writer handles the rest if pulls run out.
func (s *source) moveOne(a *asker, m *moved) {
	a.limit = 0
	rest := s.cut(a, m, m.s.Range)
	if rest.Count == 0 {
		return
	}
	s.mu.Lock()
	s.stalled = append(s.stalled, stalled{m, rest, a.limit})
	if len(s.free) > 0 { // freed meanwhile; maybe nothing ends after this
		s.l.out.wakeUp()
	}
	s.mu.Unlock()
}

// cut makes pulls of rest, the last part of m, and returns the part without a free pull. If one
// pull cannot be made, it does not request the rest of the slice.
func (s *source) cut(a *asker, m *moved, rest transfer.Range) transfer.Range {
	for {
		n, reason, err := s.pullSome(a, m, rest)
		if errors.Is(err, errNoPull) {
			return rest
		}
		if err != nil {
			s.mu.Lock()
			m.spoil(transfer.NotLanded, reason, err)
			s.mu.Unlock()
			break
		}
		rest.First += n
		if rest.Count -= n; rest.Count == 0 {
			break
		}
	}
	s.mu.Lock()
	if m.left--; m.left == 0 {
		s.late = append(s.late, s.resultLocked(m))
	}
	s.mu.Unlock()
	return transfer.Range{}
}

// unstall continues slices that wait for pulls, as far as some are free. The writer's.
func (s *source) unstall(a *asker) {
	for {
		s.mu.Lock()
		if len(s.stalled) == 0 || len(s.free) == 0 {
			s.mu.Unlock()
			return
		}
		first := s.stalled[0] // it stays in front: only this goroutine takes pulls before it
		s.mu.Unlock()
		a.limit = first.limit
		rest := s.cut(a, first.m, first.rest)
		s.mu.Lock()
		if rest.Count > 0 {
			s.stalled[0].rest, s.stalled[0].limit = rest, a.limit
		} else {
			s.stalled = slices.Delete(s.stalled, 0, 1)
		}
		s.mu.Unlock()
		s.l.out.kick()
	}
}

// pullSome requests the chunks from the front of r that fit one pull, and returns their number.
func (s *source) pullSome(a *asker, m *moved, r transfer.Range) (uint32, transfer.Reason, error) {
	if r.Count == 0 {
		return 0, transfer.ReasonRange, errors.New("shm: an empty range")
	}
	o := m.s.Origin
	limit := uint32(maxPullBytes / transfer.ChunkBytes)
	if o.Memory.Device() != nil {
		limit = deviceSlice / transfer.ChunkBytes
	}
	if a.limit != 0 {
		limit = a.limit
	}
	r.Count = min(r.Count, limit)
	// The source owns the memory until the pull counts as a read of it; the close of an origin
	// waits for reads.
	if !o.Enter() {
		return 0, transfer.ReasonSourceGone, fmt.Errorf("shm: origin %d.%d is closed", o.Slot, o.Gen)
	}
	defer o.Leave()
	for {
		blocks, err := o.Memory.Resolve(a.blocks[:0], r)
		a.blocks = blocks[:0]
		if err != nil {
			return 0, transfer.ReasonRange, fmt.Errorf("shm: resolve chunks [%d, +%d): %w", r.First,
				r.Count, err)
		}
		if few(blocks) {
			return s.send(a, m, r, blocks)
		}
		fits, reason, err := s.list(a, m, r, blocks)
		switch {
		case err != nil:
			return 0, reason, err
		case fits:
			return s.ask(a, m, r, pull{m: m, r: r, reading: true})
		case r.Count == 1:
			return 0, transfer.ReasonMemory, fmt.Errorf("shm: chunk %d has %d pieces: a pull takes %d, in "+
				"%d cells: %w", r.First, len(blocks), maxPieces, maxCells,
				transport.ErrNotSupported)
		}
		r.Count /= 2
		a.limit = r.Count
	}
}

// few reports whether blocks are pushed: at most pushBytes, all of them host memory of this
// process.
func few(blocks []mem.Block) bool {
	n := uint64(0)
	for i := range blocks {
		b := &blocks[i]
		if _, ok := b.Bytes(); !ok || b.Len > pushBytes-n {
			return false
		}
		n += b.Len
	}
	return n > 0
}

// send pushes the bytes of r, whose origin the caller has entered. A push certifies that the bytes
// were valid when they were read.
func (s *source) send(a *asker, m *moved, r transfer.Range, blocks []mem.Block) (uint32,
	transfer.Reason, error) {
	o := m.s.Origin
	a.frame = appendPush(a.frame[:0], pullFrame{slot: o.Slot, gen: o.Gen, r: r, attempt: m.s.Attempt})
	for i := range blocks {
		from, _ := blocks[i].Bytes()
		at := len(a.frame)
		a.frame = slices.Grow(a.frame, len(from))[:at+len(from)]
		mem.Copy(a.frame[at:], from)
	}
	endPush(a.frame)
	if !o.Valid(o.Lease) {
		return 0, transfer.ReasonInvalidated, fmt.Errorf("shm: slot %d.%d: the source of chunks "+
			"[%d, +%d) was invalidated", o.Slot, o.Gen, r.First, r.Count)
	}
	return s.ask(a, m, r, pull{m: m, r: r, valid: true})
}

// list writes the pull of r without its tag. False: it has too many pieces.
func (s *source) list(a *asker, m *moved, r transfer.Range, blocks []mem.Block) (bool,
	transfer.Reason, error) {
	if len(blocks) > maxPieces {
		return false, 0, nil
	}
	o := m.s.Origin
	a.frame = appendPull(a.frame[:0], pullFrame{slot: o.Slot, gen: o.Gen, r: r, attempt: m.s.Attempt})
	a.frame = slices.Grow(a.frame, min(len(blocks), maxCells)*cellBytes)
	frame := a.frame
	var last *mem.Region
	var next run
	for len(blocks) > 0 {
		first := &blocks[0]
		// looking up a map for each block would be most of the cost of large caches
		if first.Region != last {
			var err error
			if next.region, err = s.regionIndex(first.Region); err != nil {
				return false, transfer.ReasonMemory, err
			}
			last = first.Region
		}
		if frame, blocks = appendPieces(frame, blocks, last, next.region); len(blocks) == 0 {
			break
		}
		if first = &blocks[0]; first.Region != last {
			continue
		}
		if first.Len > maxLen {
			return false, transfer.ReasonLength, fmt.Errorf("shm: a piece of %d bytes in %d chunks",
				first.Len, r.Count)
		}
		if len(frame)+maxRunBytes > maxPacketBytes {
			return false, 0, nil
		}
		next.off, next.len = last.Offset()+first.Off, uint32(first.Len)
		next.Count, next.Rows = 1, 1 // the strides of one piece are unused
		if mem.Regular(blocks) {
			next.Strides = mem.Leading(blocks)
		}
		frame = appendRun(frame, &next)
		blocks = blocks[next.Pieces():]
	}
	endPull(frame)
	a.frame = frame
	return true, 0, nil
}
