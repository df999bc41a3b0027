package parseblock

import "github.com/kvspray/kvspray/layout"

// runWriter coalesces pieces into runs: first those that touch on both sides, then those of equal length and distance.
type runWriter struct {
	runs     []layout.Run
	base     int // runs before it are the caller's
	src, dst uint64
	len      uint64 // 0: no piece is pending
}

func (w *runWriter) add(src, dst, n uint64) {
	if w.len != 0 && src == w.src+w.len && dst == w.dst+w.len {
		w.len += n
		return
	}
	w.flush()
	w.src, w.dst, w.len = src, dst, n
}

func (w *runWriter) flush() {
	if w.len == 0 {
		return
	}
	w.push(w.src, w.dst, w.len)
	w.len = 0
}

func (w *runWriter) push(src, dst, n uint64) {
	if len(w.runs) > w.base {
		last := &w.runs[len(w.runs)-1]
		if last.Len == n {
			if last.Count == 1 {
				last.SrcStride, last.DstStride, last.Count = src-last.SrcOff, dst-last.DstOff, 2
				return
			}
			if last.Count > 1 && src == last.SrcOff+uint64(last.Count)*last.SrcStride && dst == last.DstOff+uint64(last.Count)*last.DstStride {
				last.Count++
				return
			}
		}
	}
	w.runs = append(w.runs, layout.Run{SrcOff: src, DstOff: dst, Count: 1, Len: n})
}

// tokens walks a plane whose tokens lie one after another in the block, and whole pages of any plane.
func (w *runWriter) tokens(from, to Side, pf, pt layout.Plane, t layout.TokenRange) {
	nf, nt := from.Group.TokensPerBlock, to.Group.TokensPerBlock
	fb, tb := from.Layer.Base+pf.Offset, to.Layer.Base+pt.Offset
	if nf == nt && t.Start%nf == 0 && (t.End%nf == 0 || pf.Unit == layout.UnitBlock) {
		n := pf.Bytes()
		first, end := t.Start/nf, (t.End-1)/nf+1
		w.pages(from.Table[first:end], to.Table[first:end], fb, tb, from.Layer.BlockStride, to.Layer.BlockStride, n)
		return
	}
	unit := pf.UnitBytes
	for tok := t.Start; tok < t.End; {
		of, ot := tok%nf, tok%nt
		n := min(t.End-tok, nf-of, nt-ot)
		w.add(fb+uint64(from.Table[tok/nf])*from.Layer.BlockStride+uint64(of)*unit,
			tb+uint64(to.Table[tok/nt])*to.Layer.BlockStride+uint64(ot)*unit, uint64(n)*unit)
		tok += n
	}
}

// pages adds whole pages of n bytes. It is the hot loop of every strategy, so it keeps the pending piece in registers.
func (w *runWriter) pages(from, to []uint32, fb, tb, fs, ts, n uint64) {
	to = to[:len(from)]
	src, dst, pending := w.src, w.dst, w.len
	for i, b := range from {
		s, d := fb+uint64(b)*fs, tb+uint64(to[i])*ts
		if s == src+pending && d == dst+pending && pending != 0 {
			pending += n
			continue
		}
		if pending != 0 {
			w.push(src, dst, pending)
		}
		src, dst, pending = s, d, n
	}
	w.src, w.dst, w.len = src, dst, pending
}

// heads walks a plane of heads: the chosen tokens of each head of each block are one piece.
func (w *runWriter) heads(from, to Side, pf, pt layout.Plane, t layout.TokenRange) {
	nf, nt := from.Group.TokensPerBlock, to.Group.TokensPerBlock
	row := pf.UnitBytes / uint64(nf)
	if nf == nt && t.Start%nf == 0 && t.End-t.Start >= nf {
		first, end := t.Start/nf, t.End/nf
		w.pages(from.Table[first:end], to.Table[first:end], from.Layer.Base+pf.Offset, to.Layer.Base+pt.Offset,
			from.Layer.BlockStride, to.Layer.BlockStride, pf.Bytes())
		t.Start = end * nf
	}
	for tok := t.Start; tok < t.End; {
		of, ot := tok%nf, tok%nt
		n := min(t.End-tok, nf-of, nt-ot)
		src := from.Layer.Base + pf.Offset + uint64(from.Table[tok/nf])*from.Layer.BlockStride + uint64(of)*row
		dst := to.Layer.Base + pt.Offset + uint64(to.Table[tok/nt])*to.Layer.BlockStride + uint64(ot)*row
		if n == nf && n == nt {
			w.add(src, dst, pf.Bytes())
			tok += n
			continue
		}
		for range pf.Units {
			w.add(src, dst, uint64(n)*row)
			src += pf.UnitBytes
			dst += pt.UnitBytes
		}
		tok += n
	}
}
