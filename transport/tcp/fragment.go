package tcp

import (
	"fmt"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

const (
	fragmentChunks = 4                                    // resolved at once
	fragmentBytes  = fragmentChunks * transfer.ChunkBytes // at most, in one system call
	iovMax         = 1024                                 // UIO_MAXIOV
)

// fragment is a bounded run of chunks of the frame under way: where its bytes are, and how far the
// kernel got.
type fragment struct {
	blocks []mem.Block
	segs   [][]byte // of mapped memory, or of stage; valid under the guard only
	at     int      // first segment with bytes left
	off    int      // bytes of it that are done
	left   int      // bytes of the fragment that are not done
	bytes  int      // of the whole fragment
	mapped bool     // segs are filled in
	staged bool     // segs are the stage: some of the memory cannot be mapped
	stage  []byte
}

// load resolves chunks r. It does not touch the memory.
func (p *fragment) load(from transport.Memory, r transfer.Range) error {
	want, err := from.Bytes(r)
	if err != nil {
		return err
	}
	p.reset()
	if p.blocks, err = from.Resolve(p.blocks[:0], r); err != nil {
		return err
	}
	var sum uint64
	for i := range p.blocks {
		b := &p.blocks[i]
		if b.Region == nil || b.Len > fragmentBytes || b.Region.Check(b.Off, b.Len) != nil {
			return fmt.Errorf("tcp: chunks %d+%d resolve to %d bytes at %d, outside their region: %w",
				r.First, r.Count, b.Len, b.Off, mem.ErrBounds)
		}
		sum += b.Len
	}
	if sum != want || sum > fragmentBytes {
		return fmt.Errorf("tcp: chunks %d+%d resolve to %d bytes, they have %d: %w", r.First, r.Count,
			sum, want, mem.ErrBounds)
	}
	p.left, p.bytes = int(sum), int(sum)
	return nil
}

// enter fills in the segments. Under the guard.
func (p *fragment) enter() {
	if p.mapped {
		return
	}
	p.mapped = true
	for _, b := range p.blocks {
		if b.Len == 0 {
			continue
		}
		m, ok := b.Bytes()
		if !ok {
			p.useStage()
			return
		}
		p.segs = append(p.segs, m)
	}
}

func (p *fragment) useStage() {
	if p.stage == nil {
		p.stage = make([]byte, fragmentBytes)
	}
	p.segs, p.staged = append(p.segs[:0], p.stage[:p.bytes]), true
}

// fixed makes a fragment of memory that needs no guard: padding, and bytes to discard.
func (p *fragment) fixed(b []byte) {
	p.reset()
	p.segs, p.left, p.bytes, p.mapped = append(p.segs, b), len(b), len(b), true
}

func (p *fragment) reset() {
	clear(p.segs)
	p.segs = p.segs[:0]
	p.at, p.off, p.left, p.bytes, p.mapped, p.staged = 0, 0, 0, 0, false, false
}

// vecs appends what is left to v, at most iovMax-spare entries, and reports whether that is all of
// it.
func (p *fragment) vecs(v []iovec, spare int) ([]iovec, bool) {
	off := p.off
	for i := p.at; i < len(p.segs); i++ {
		if len(v) >= iovMax-spare {
			return v, false
		}
		v = append(v, vec(p.segs[i][off:]))
		off = 0
	}
	return v, true
}

// advance takes up to n bytes as done, and returns how many of n were not this fragment's. sum sees
// each done segment.
func (p *fragment) advance(n int, crc *uint32) int {
	for n > 0 && p.at < len(p.segs) {
		s := p.segs[p.at][p.off:]
		k := min(n, len(s))
		if crc != nil {
			*crc = mem.CRC32C(*crc, s[:k])
		}
		n -= k
		p.left -= k
		if p.off += k; k == len(s) {
			p.at, p.off = p.at+1, 0
		}
	}
	return n
}
