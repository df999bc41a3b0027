package peercopy

import (
	"encoding/binary"

	"github.com/kvspray/kvspray/gpu/device"
	"github.com/kvspray/kvspray/internal/sys/cuda"
	"github.com/kvspray/kvspray/internal/sys/mem"
)

// listBytes is the size of the lists of one stage on one side.
const listBytes = MaxRuns*device.RunBytes + (MaxRuns+1)*4

// Bounds of one move.
const (
	maxPiece  = 1 << 32 // bytes
	MaxPieces = 1 << 24
)

// aligned reports whether kernels can move m: in units of 16 bytes.
func aligned(m *Move) bool {
	all := uint64(m.Src) | uint64(m.Dst) | m.SrcStride | m.DstStride | m.Len
	return all%device.Align == 0
}

// packable reports whether kernels move m between two GPUs. A large piece is faster by the copy
// engine alone.
func packable(m *Move) bool { return aligned(m) && m.Len < DirectBytes }

// byKernel reports whether kernels move m.
func (p *Pipeline) byKernel(m *Move) bool {
	if p.within {
		return aligned(m)
	}
	return packable(m) && m.Len <= p.max
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

// minUniform is the number of successive pieces of one length that are worth a stage of their own.
const minUniform = 16

// sampleMoves is the number of moves that regular examines.
const sampleMoves = 64

// regular reports whether the next moves have enough pieces per run to be listed as runs.
func regular(moves []Move) bool {
	moves = moves[:min(len(moves), sampleMoves)]
	pieces := uint64(0)
	for i := range moves {
		pieces += min(moves[i].Count, MaxPieces)
	}
	return pieces >= device.Strided*uint64(len(moves))
}

// fillUniform lists the addresses of pieces of one length. It returns 0 where too few follow, or
// where runs are shorter.
func (b *stageBuffer) fillUniform(moves []Move, cur *cursor, size uint64) (n int, bytes uint64) {
	m := moves[cur.move:]
	length := m[0].Len
	if !packable(&m[0]) || regular(m) {
		return 0, 0
	}
	at, limit := *cur, int(min(size/length, MaxRuns))
	// This loop bounds the rate of small blocks: the link takes 32,768 of 2 KiB in 170 us.
	from, to := b.runs[0][:limit*8], b.runs[1][:limit*8]
	for i := range m {
		v := &m[i]
		if n == limit || v.Len != length || (v.Src|v.Dst)%device.Align != 0 {
			break
		}
		if v.Count == 1 {
			binary.LittleEndian.PutUint64(from[n*8:n*8+8], uint64(v.Src))
			binary.LittleEndian.PutUint64(to[n*8:n*8+8], uint64(v.Dst))
			n++
			at.move++
			continue
		}
		if !packable(v) || v.Count == 0 || v.Count > MaxPieces {
			break
		}
		k := int(min(v.Count-at.piece, uint64(limit-n)))
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
	if n < min(minUniform, limit) && at.move < len(moves) {
		return 0, 0
	}
	*cur = at
	return n, uint64(n) * length
}

// firstAt is the offset of the counts of pieces, behind the runs.
const firstAt = MaxRuns * device.RunBytes

// fillRuns lists strided runs of any lengths and returns the number of runs of each side.
func (b *stageBuffer) fillRuns(moves []Move, cur *cursor, size uint64) (n [2]int, bytes uint64) {
	lists := [2]rowList{{list: b.runs[0]}, {list: b.runs[1]}}
	for cur.move < len(moves) && max(lists[0].n, lists[1].n) < MaxRuns {
		m := &moves[cur.move]
		k := min(m.Count-cur.piece, (size-bytes)/max(m.Len, 1))
		if k == 0 || m.Len == 0 || m.Count > MaxPieces || !packable(m) {
			break
		}
		lists[0].add(uint64(m.Src)+cur.piece*m.SrcStride, m.SrcStride, uint64(b.dense[0])+bytes,
			m.Len, uint32(k))
		lists[1].add(uint64(m.Dst)+cur.piece*m.DstStride, m.DstStride, uint64(b.dense[1])+bytes,
			m.Len, uint32(k))
		bytes += k * m.Len
		cur.advance(m, k)
	}
	for side := range lists {
		lists[side].first()
		n[side] = lists[side].n
	}
	return n, bytes
}

// rowList is the list of one side while it is written. Equal rows at equal distances become one
// run. A move is one row on both sides, with different distances between rows.
type rowList struct {
	list   []byte
	n      int    // runs
	pieces uint32 // of all of them
	row    uint64 // base of the last row
	len    uint64
	mem.Strides
}

// first writes the number of pieces before the next run.
func (l *rowList) first() { binary.LittleEndian.PutUint32(l.list[firstAt+l.n*4:], l.pieces) }

func (l *rowList) add(base, stride, dense, size uint64, count uint32) {
	outer := base - l.row
	if count > 1 && count == l.Count && stride == l.Stride && size == l.len && (l.Rows == 1 ||
		outer == l.Outer) {
		l.Outer = outer
		l.Rows++
		binary.LittleEndian.PutUint64(l.list[(l.n-1)*device.RunBytes+device.RunOuter:], outer)
	} else {
		l.Strides, l.len = mem.Strides{Stride: stride, Count: count, Rows: 1}, size
		l.first()
		device.PutRun(l.list[l.n*device.RunBytes:], base, dense, size, &l.Strides)
		l.n++
	}
	l.row = base
	l.pieces += count
}

// maxCut is the number of entries of a piece that is cut: equal parts and the rest.
const maxCut = 2

// fillMoves lists pieces that stay within the GPU, and returns the number of runs.
func (b *stageBuffer) fillMoves(moves []Move, cur *cursor, size uint64) int {
	list := moveList{list: b.runs[0]}
	for bytes := uint64(0); cur.move < len(moves) && list.n <= MaxRuns-maxCut; {
		m := &moves[cur.move]
		k := uint64(1)
		if m.Len <= withinPiece {
			k = min(m.Count-cur.piece, (size-bytes)/max(m.Len, 1))
		}
		if k == 0 || m.Len == 0 || m.Len > size-bytes || m.Count == 0 || m.Count > MaxPieces ||
			!aligned(m) {
			break
		}
		src, dst := m.Src+cuda.Ptr(cur.piece*m.SrcStride), m.Dst+cuda.Ptr(cur.piece*m.DstStride)
		if m.Len <= withinPiece {
			list.add(&Move{Src: src, Dst: dst, SrcStride: m.SrcStride, DstStride: m.DstStride, Len: m.Len,
				Count: k})
		} else {
			parts, rest := m.Len/withinPiece, m.Len%withinPiece
			list.add(&Move{Src: src, Dst: dst, SrcStride: withinPiece, DstStride: withinPiece,
				Len: withinPiece, Count: parts})
			if at := cuda.Ptr(m.Len - rest); rest > 0 {
				list.add(&Move{Src: src + at, Dst: dst + at, Len: rest, Count: 1})
			}
		}
		bytes += k * m.Len
		cur.advance(m, k)
	}
	list.first()
	return list.n
}

// moveList is the list of moves within a GPU while it is written.
type moveList struct {
	list   []byte
	n      int    // entries
	pieces uint32 // of all of them
}

// first writes the number of pieces before the next entry.
func (l *moveList) first() { binary.LittleEndian.PutUint32(l.list[firstAt+l.n*4:], l.pieces) }

func (l *moveList) add(m *Move) {
	l.first()
	device.PutMove(l.list[l.n*device.MoveBytes:], m)
	l.n++
	l.pieces += uint32(m.Count)
}
