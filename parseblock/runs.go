package parseblock

import "github.com/kvspray/kvspray/layout"

// runWriter coalesces pieces into runs: first those that touch on both sides, then those of equal length and distance, then
// rows of such runs.
type runWriter struct {
	runs     []layout.Run
	base     int // runs before it are the caller's
	src, dst uint64
	len      uint64 // 0: no piece is pending
}

// maxCount bounds the pieces of one axis of a run.
const maxCount = 1 << 31

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

// push adds one contiguous piece.
func (w *runWriter) push(src, dst, n uint64) {
	if len(w.runs) > w.base {
		last := &w.runs[len(w.runs)-1]
		if last.Len == n && last.Outer == 1 {
			if last.Count == 1 {
				last.SrcStride, last.DstStride, last.Count = src-last.SrcOff, dst-last.DstOff, 2
				return
			}
			c := uint64(last.Count)
			if src == last.SrcOff+c*last.SrcStride && dst == last.DstOff+c*last.DstStride && c < maxCount {
				last.Count++
				return
			}
		}
	}
	w.runs = append(w.runs, layout.Run{SrcOff: src, DstOff: dst, Count: 1, Outer: 1, Len: n})
}

// strided adds a row of pieces: longer where it goes on with the last one's strides, else as one more row where the distance
// to the last one is the same again.
func (w *runWriter) strided(src, dst uint64, s *shape) {
	count := uint32(s.n[0])
	if len(w.runs) > w.base {
		last := &w.runs[len(w.runs)-1]
		if last.Len == s.len && last.Count > 1 && last.SrcStride == s.src[0] && last.DstStride == s.dst[0] {
			c, o := uint64(last.Count), uint64(last.Outer)
			switch {
			case o == 1 && src == last.SrcOff+c*s.src[0] && dst == last.DstOff+c*s.dst[0] && c+s.n[0] < maxCount:
				last.Count += count
				return
			case last.Count != count:
			case o == 1:
				last.SrcOuter, last.DstOuter, last.Outer = src-last.SrcOff, dst-last.DstOff, 2
				return
			case src == last.SrcOff+o*last.SrcOuter && dst == last.DstOff+o*last.DstOuter && o < maxCount:
				last.Outer++
				return
			}
		}
	}
	w.runs = append(w.runs, layout.Run{SrcOff: src, DstOff: dst, SrcStride: s.src[0], DstStride: s.dst[0], Count: count, Outer: 1, Len: s.len})
}

func (w *runWriter) shape(src, dst uint64, s *shape) {
	if s.dims == 0 {
		w.add(src, dst, s.len)
		return
	}
	w.flush()
	switch s.dims {
	case 1:
		w.strided(src, dst, s)
	default:
		outer := uint64(1)
		if s.dims == 3 {
			outer = s.n[2]
		}
		for range outer {
			w.runs = append(w.runs, layout.Run{SrcOff: src, DstOff: dst, SrcStride: s.src[0], DstStride: s.dst[0], Count: uint32(s.n[0]),
				SrcOuter: s.src[1], DstOuter: s.dst[1], Outer: uint32(s.n[1]), Len: s.len})
			src += s.src[2]
			dst += s.dst[2]
		}
	}
}

// rows walks rows [r, end) of a pair of token planes, or whole opaque blocks.
func (w *runWriter) rows(p *pair, from, to []uint32, r, end uint64) {
	if r%p.step != 0 {
		n := min(p.step-r%p.step, end-r)
		s := p.shape(n)
		w.shape(p.from.at(from, r), p.to.at(to, r), &s)
		r += n
	}
	whole := (end - r) / p.step
	switch {
	case whole == 0:
	case p.from.tiles == 1 && p.to.tiles == 1 && p.step == p.from.tileRows && p.step == p.to.tileRows:
		first := r / p.step
		w.blocks(p, from[first:first+whole], to[first:first+whole])
	default:
		for i := range whole {
			w.shape(p.from.at(from, r+i*p.step), p.to.at(to, r+i*p.step), &p.full)
		}
	}
	if r += whole * p.step; r < end {
		s := p.shape(end - r)
		w.shape(p.from.at(from, r), p.to.at(to, r), &s)
	}
}

// blocks adds whole blocks of equal size on both sides. It is the hot loop, so it keeps the pending piece in registers.
func (w *runWriter) blocks(p *pair, from, to []uint32) {
	to = to[:len(from)]
	fb, tb, fs, ts := p.from.off, p.to.off, p.from.block, p.to.block
	if p.full.dims != 0 {
		for i, b := range from {
			w.shape(fb+uint64(b)*fs, tb+uint64(to[i])*ts, &p.full)
		}
		return
	}
	src, dst, pending, n := w.src, w.dst, w.len, p.full.len
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
