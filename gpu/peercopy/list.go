package peercopy

import (
	"encoding/binary"

	"github.com/kvspray/kvspray/gpu/device"
	"github.com/kvspray/kvspray/internal/sys/mem"
)

const listBytes = MaxRuns*device.RunBytes + (MaxRuns+1)*4

// Bounds of one move.
const (
	maxPiece  = 1 << 32 // bytes
	MaxPieces = 1 << 24
)

// packable: the kernels move 16 bytes at a time, and a large piece is better off with the copy engine alone.
func packable(m *Move) bool {
	all := uint64(m.Src) | uint64(m.Dst) | m.SrcStride | m.DstStride | m.Len
	return all%device.Align == 0 && m.Len < DirectBytes
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

// minUniform is the number of pieces of one length in a row that make the short list worth a stage of its own.
const minUniform = 16

// sampleMoves are looked at to tell whether the next pieces lie in runs.
const sampleMoves = 64

// regular reports whether the next moves are runs that are worth their length in the list.
func regular(moves []Move) bool {
	moves = moves[:min(len(moves), sampleMoves)]
	pieces := uint64(0)
	for i := range moves {
		pieces += min(moves[i].Count, MaxPieces)
	}
	return pieces >= device.Strided*uint64(len(moves))
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
		if n == most || v.Len != length || (v.Src|v.Dst)%device.Align != 0 {
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
const firstAt = MaxRuns * device.RunBytes

// fillRuns writes strided runs of any lengths, and returns how many each side has of them.
func (b *stageBuffer) fillRuns(moves []Move, cur *cursor, size uint64) (n [2]int, bytes uint64) {
	lists := [2]rowList{{list: b.runs[0]}, {list: b.runs[1]}}
	for cur.move < len(moves) && max(lists[0].n, lists[1].n) < MaxRuns {
		m := &moves[cur.move]
		k := min(m.Count-cur.piece, (size-bytes)/max(m.Len, 1))
		if k == 0 || m.Len == 0 || m.Count > MaxPieces || !packable(m) {
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
