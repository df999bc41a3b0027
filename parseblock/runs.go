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
	src, dst, n := w.src, w.dst, w.len
	w.len = 0
	if len(w.runs) > w.base {
		last := &w.runs[len(w.runs)-1]
		if last.Len == n && last.Count != 0 {
			if last.Count == 1 && src > last.SrcOff && dst > last.DstOff {
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
		fs, ts := from.Layer.BlockStride, to.Layer.BlockStride
		tt := to.Table[first:end]
		for i, b := range from.Table[first:end] {
			w.add(fb+uint64(b)*fs, tb+uint64(tt[i])*ts, n)
		}
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

// heads walks a plane of heads: the chosen tokens of each head of each block are one piece.
func (w *runWriter) heads(from, to Side, pf, pt layout.Plane, t layout.TokenRange) {
	nf, nt := from.Group.TokensPerBlock, to.Group.TokensPerBlock
	row := pf.UnitBytes / uint64(nf)
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
