package plans

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"sort"

	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/transfer"
)

// Run is equally spaced pieces of one region: piece i has Len bytes at Off + i*Stride.
type Run struct {
	Region           *mem.Region
	Off, Len, Stride uint64
	Count            uint32 // at least 1
}

// List is the plan of a batch, and the memory of one side: the bytes of all runs, one behind the
// other. Both sides compute the same space, because it depends on lengths and counts alone.
// Immutable. It implements exec.Plan and transport.Memory.
type List struct {
	space  *transfer.Space
	runs   []Run
	start  []uint64 // of each run in the bytes of the list
	cuts   []uint64 // of each segment of the space, likewise
	all    []int    // segments, which the only layer feeds
	digest [32]byte
	device mem.Device
}

// chunkPieces bounds the pieces of a chunk. A slice of 64 chunks then has as many pieces as a lane
// of shared memory takes at once.
const chunkPieces = 512

// listDomain keeps digests of lists apart from those of other plans.
const listDomain = "kvspray-segments-list-v1"

// NewList makes the plan of runs, each of which has a byte and a piece at least.
func NewList(runs []Run) (*List, error) {
	l := &List{runs: runs, start: make([]uint64, len(runs)), cuts: []uint64{0}}
	h := sha256.New()
	_, _ = h.Write([]byte(listDomain))
	var lengths []uint64
	var total, first, chunk uint64 // bytes: of all; before this segment; in this chunk
	pieces := 0                    // in this chunk
	for i := range runs {
		r := &runs[i]
		var text [12]byte
		binary.LittleEndian.PutUint64(text[:], r.Len)
		binary.LittleEndian.PutUint32(text[8:], r.Count)
		_, _ = h.Write(text[:])
		l.start[i] = total
		if l.device == nil {
			l.device = r.Region.Device()
		}
		for range r.Count {
			if pieces == chunkPieces {
				lengths, l.cuts = append(lengths, total-first), append(l.cuts, total)
				first, chunk, pieces = total, 0, 0
			}
			total += r.Len
			chunk += r.Len
			if pieces++; chunk >= transfer.ChunkBytes {
				if chunk %= transfer.ChunkBytes; chunk == 0 {
					pieces = 0
				} else {
					pieces = 1
				}
			}
		}
	}
	if total > first {
		lengths = append(lengths, total-first)
	} else {
		l.cuts = l.cuts[:len(l.cuts)-1]
	}
	space, err := transfer.NewSpace(lengths)
	if err != nil {
		return nil, fmt.Errorf("%d bytes: %w", total, err)
	}
	l.space = space
	for i := range lengths {
		l.all = append(l.all, i)
	}
	h.Sum(l.digest[:0])
	return l, nil
}

// Space implements exec.Plan.
func (l *List) Space() *transfer.Space { return l.space }

// Bytes implements transport.Memory.
func (l *List) Bytes(r transfer.Range) (uint64, error) { return l.space.Bytes(r) }

// Ready implements exec.Plan: the whole list is there from the beginning.
func (l *List) Ready(segment int, tokens uint32, _ bool) transfer.Range {
	r, _ := l.space.Segment(segment)
	if tokens == 0 {
		r.Count = 0
	}
	return r
}

// Feeds implements exec.Plan.
func (l *List) Feeds(int) []int { return l.all }

// onlyLayer feeds every segment of a list.
var onlyLayer = []int{0}

// From implements exec.Plan.
func (l *List) From(int) []int { return onlyLayer }

// Digest implements exec.Plan.
func (l *List) Digest() [32]byte { return l.digest }

// Device implements transport.Memory.
func (l *List) Device() mem.Device { return l.device }

// Resolve implements transport.Memory.
func (l *List) Resolve(dst []mem.Block, r transfer.Range) ([]mem.Block, error) {
	if err := l.space.Check(r); err != nil {
		return dst, err
	}
	for r.Count > 0 {
		seg := l.space.SegmentOf(r.First)
		chunks, bytes := l.space.Segment(seg)
		end := min(r.End(), chunks.End())
		from := uint64(r.First-chunks.First) * transfer.ChunkBytes
		to := min(uint64(end-chunks.First)*transfer.ChunkBytes, bytes)
		dst = l.blocks(dst, l.cuts[seg]+from, l.cuts[seg]+to)
		r = transfer.Range{First: end, Count: r.End() - end}
	}
	return dst, nil
}

// blocks appends the memory of bytes [from, to) of the list.
func (l *List) blocks(dst []mem.Block, from, to uint64) []mem.Block {
	i := sort.Search(len(l.start), func(i int) bool { return l.start[i] > from }) - 1
	for ; from < to; i++ {
		r := &l.runs[i]
		at := from - l.start[i]
		for piece := at / r.Len; piece < uint64(r.Count) && from < to; piece++ {
			skip := at % r.Len
			n := min(r.Len-skip, to-from)
			dst = append(dst, mem.Block{Region: r.Region, Off: r.Off + piece*r.Stride + skip, Len: n})
			from, at = from+n, at+n
		}
	}
	return dst
}

// Arrived returns which runs have arrived whole: bit i%8 of byte i/8 for run i. missing yields the
// chunks that have not.
func (l *List) Arrived(missing func(yield func(transfer.Range) bool)) []byte {
	bits := make([]byte, (len(l.runs)+7)/8)
	for i := range l.runs {
		bits[i/8] |= 1 << (i % 8)
	}
	for r := range missing {
		for c := r.First; c < r.End(); c++ {
			seg := l.space.SegmentOf(c)
			chunks, _ := l.space.Segment(seg)
			from := l.cuts[seg] + uint64(c-chunks.First)*transfer.ChunkBytes
			to := from + l.space.ChunkBytes(c)
			i := sort.Search(len(l.start), func(i int) bool { return l.start[i] > from }) - 1
			for ; i < len(l.runs) && l.start[i] < to; i++ {
				bits[i/8] &^= 1 << (i % 8)
			}
		}
	}
	return bits
}

// Arrived returns the entries of a batch that have arrived before its destination lease failed, as
// List.Arrived does. nil: it did not fail, or nothing was granted.
func Arrived(parts []*exec.ReceivePart, status uint16) []byte {
	if len(parts) != 1 || status == engines.StatusOK {
		return nil
	}
	l, ok := parts[0].Plan.(*List)
	if !ok {
		return nil
	}
	return l.Arrived(parts[0].Grant.Receipt.Missing())
}

// Lists finds the list of a lease of the sidecar's own worker for batches. *segments.Segments
// implements it.
type Lists interface {
	// List returns nil if w is another worker, or has no such lease.
	List(w *engines.Worker, k transfer.Key, receives bool) *List
}
