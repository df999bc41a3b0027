package explain

import (
	"cmp"
	"slices"
)

// part is drawn with one letter: the cells of a plane, or the K or the V in them.
type part struct {
	at   uint64 // of the first cell, in the page
	cell uint64
	axes []partAxis // axes of more than one element, the widest stride first
}

// partAxis is n elements at distance stride.
type partAxis struct {
	name      string // of one element
	n, stride uint64
}

func (p *Plane) part() part {
	head, row := "head", "token"
	switch {
	case p.Unit == "state" && p.Role != "recurrent":
		head, row = "channel", "row"
	case p.Unit == "state":
		row = "row"
	case p.RowTokens > 1:
		row = "entry"
	}
	out := part{at: p.Offset, cell: p.CellBytes}
	for _, a := range []partAxis{{"column", uint64(p.Cols), p.ColStride}, {head, uint64(p.Heads),
		p.HeadStride},
		{row, uint64(p.Rows / max(p.Tiles, 1)), p.RowStride}, {"kernel page", uint64(p.Tiles),
			p.TileStride}} {
		if a.n > 1 {
			out.axes = append(out.axes, a)
		}
	}
	slices.SortStableFunc(out.axes, func(a, b partAxis) int { return cmp.Compare(b.stride, a.stride) })
	return out
}

// halves reports whether a cell of a plane consists of K and V.
func (p *Plane) halves() bool { return p.Role == "kv" && p.CellBytes%2 == 0 }

// parts returns the parts of a page; packed K and V are two.
func (p *Page) parts() (out []part) {
	for i := range p.Planes {
		k := p.Planes[i].part()
		if p.Planes[i].halves() {
			k.cell /= 2
			v := k
			v.at = k.at + k.cell
			out = append(out, k, v)
			continue
		}
		out = append(out, k)
	}
	return out
}

func (p *part) end() uint64 {
	end := p.at + p.cell
	for _, a := range p.axes {
		end += (a.n - 1) * a.stride
	}
	return end
}

// extent is bytes [lo, hi).
type extent struct{ lo, hi uint64 }

// extents yields the bytes of the part in a window, in no order. Pieces less than fine bytes apart
// are yielded as one with their share of it, which bounds the number of extents.
func (p *part) extents(in extent, fine uint64, yield func(e extent, share float64)) {
	axes, piece, share := p.axes, p.cell, 1.0
	for k := len(axes) - 1; k >= 0 && (axes[k].stride == piece || axes[k].stride < fine); k-- {
		whole := (axes[k].n-1)*axes[k].stride + piece
		share *= float64(axes[k].n) * float64(piece) / float64(whole)
		piece, axes = whole, axes[:k]
	}
	descend(axes, p.at, piece, in, func(e extent) { yield(e, share) })
}

func descend(axes []partAxis, at, piece uint64, in extent, yield func(extent)) {
	if len(axes) == 0 {
		if e := (extent{max(at, in.lo), min(at+piece, in.hi)}); e.lo < e.hi {
			yield(e)
		}
		return
	}
	a, reach := axes[0], piece
	for _, b := range axes[1:] {
		reach += (b.n - 1) * b.stride
	}
	i := uint64(0)
	if in.lo > at+reach {
		i = (in.lo - at - reach) / a.stride
	}
	for ; i < a.n && at+i*a.stride < in.hi; i++ {
		descend(axes[1:], at+i*a.stride, piece, in, yield)
	}
}

// window is the content of a bar: consecutive bytes, and further ranges if planes of a page lie far
// apart.
type window struct {
	name   string // of what it shows
	places []extent
}

func (w *window) bytes() (n uint64) {
	for _, e := range w.places {
		n += e.hi - e.lo
	}
	return n
}

// maxBars bounds the bars of a page.
const maxBars = 3

// windows returns the content of a page's bars: the page, the first unit of its first plane, the
// first unit of that.
func windows(p *Page, parts []part) []window {
	parts = slices.Clone(parts)
	slices.SortStableFunc(parts, func(a, b part) int { return cmp.Compare(a.at, b.at) })
	var page window
	for i := range parts {
		e := extent{parts[i].at, parts[i].end()}
		if k := len(page.places) - 1; k >= 0 && e.lo <= page.places[k].hi+p.Bytes {
			page.places[k].hi = max(page.places[k].hi, e.hi)
			continue
		}
		page.places = append(page.places, e)
	}
	out := []window{page}
	first := &parts[0]
	for _, a := range first.axes {
		next := extent{first.at, first.at + a.stride}
		if len(out) == maxBars || partsIn(parts, next) < 2 {
			break
		}
		out = append(out, window{name: a.name + " 0", places: []extent{next}})
	}
	return out
}

// partsIn counts the parts with bytes in a place.
func partsIn(parts []part, place extent) (n int) {
	for i := range parts {
		has := false
		parts[i].extents(place, place.hi-place.lo, func(extent, float64) { has = true })
		if has {
			n++
		}
	}
	return n
}
