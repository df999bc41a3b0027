// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"cmp"
	"encoding/json"
	"fmt"
	"html"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
)

// WriteJSON writes the report as one indented object.
func (r *Report) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(r)
}

// maxFlows bounds the lines of a plan that people read.
const maxFlows = 16

// WriteText writes the report for people.
func (r *Report) WriteText(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	p := func(format string, a ...any) { _, _ = fmt.Fprintf(t, format, a...) } // Flush says what failed
	p("%s, %s tokens\n", r.Model, comma(uint64(r.Tokens)))
	if r.Note != "" {
		p("  note: %s\n", r.Note)
	}
	p("  %s bytes a token, all layers and heads, %s\n", decimal(r.BytesPerToken), r.Prefill.DType)
	if r.FixedBytes > 0 {
		p("  %s bytes a request besides (state, sliding windows): %s\n", comma(r.FixedBytes), size(r.FixedBytes))
	}
	for i := range r.Pages {
		pg := &r.Pages[i]
		window := ""
		if pg.Window > 0 {
			window = fmt.Sprintf(", window %d", pg.Window)
		}
		p("\n%s, rank 0: %d layers of %s, a page of %s tokens has %s bytes%s\n", pg.Side, pg.Layers, pg.Strategy, comma(uint64(pg.Tokens)), comma(pg.Bytes), window)
		if bar := pg.bar(64); bar != "" {
			p("  |%s|\n", bar)
		}
		for k := range pg.Planes {
			pl := &pg.Planes[k]
			p("  %c %s\tat %s\tcells of %s B", letter(k), pl.Role, comma(pl.Offset), comma(pl.CellBytes))
			p("\t%s", pl.axis("rows", pl.Rows, pl.RowStride))
			if pl.AllHeads > 1 {
				p("\t%s: %d to %d of %d", pl.axis("heads", pl.Heads, pl.HeadStride), pl.FirstHead, pl.FirstHead+pl.Heads-1, pl.AllHeads)
			}
			if pl.Cols > 1 {
				p("\t%s", pl.axis("columns", pl.Cols, pl.ColStride))
			}
			if pl.Tiles > 1 {
				p("\tin %d kernel pages, %s B apart", pl.Tiles, comma(pl.TileStride))
			}
			if pl.RowTokens > 1 {
				p("\ta row stands for %s tokens", comma(uint64(pl.RowTokens)))
			}
			p("\n")
		}
	}
	p("\nplan, prefill TP %d with %d tokens a block to decode TP %d with %d\n", r.Prefill.TP, r.Prefill.Block, r.Decode.TP, r.Decode.Block)
	p("  from\tto\tbytes\twrites\tof bytes\truns\n")
	for i := range r.Flows[:min(maxFlows, len(r.Flows))] {
		f := &r.Flows[i]
		of := comma(f.Least)
		if f.Most != f.Least {
			of += " to " + comma(f.Most)
		}
		p("  P%d\tD%d\t%s\t%s\t%s\t%s\n", f.From, f.To, comma(f.Bytes), comma(f.Writes), of, comma(f.Runs))
	}
	if n := len(r.Flows) - maxFlows; n > 0 {
		p("  and %d more\n", n)
	}
	p("  total\t\t%s\t%s\t\t\t%s\n", comma(r.TotalBytes), comma(r.TotalWrites), size(r.TotalBytes))
	return t.Flush()
}

func letter(plane int) rune { return rune('a' + plane) }

func (p *Plane) axis(name string, n uint32, stride uint64) string {
	if n == 1 {
		return "1 " + strings.TrimSuffix(name, "s")
	}
	return fmt.Sprintf("%s %s every %s B", comma(uint64(n)), name, comma(stride))
}

// extents yields the pieces of a plane in the page, neighbours as one, and stops after so many.
func (p *Plane) extents(limit int, yield func(lo, hi uint64)) {
	type axis struct{ n, stride uint64 }
	axes := []axis{{uint64(p.Cols), p.ColStride}, {uint64(p.Heads), p.HeadStride}, {uint64(p.Rows / p.Tiles), p.RowStride}, {uint64(p.Tiles), p.TileStride}}
	slices.SortStableFunc(axes, func(a, b axis) int { return cmp.Compare(a.stride, b.stride) })
	cell, total := p.CellBytes, uint64(1)
	outer := axes[:0]
	for _, a := range axes {
		switch {
		case a.n == 1:
		case a.stride == cell && len(outer) == 0:
			cell *= a.n
		default:
			outer = append(outer, a)
			total *= a.n
		}
	}
	for i := range min(total, uint64(limit)) {
		at := p.Offset
		for _, a := range outer {
			at += i % a.n * a.stride
			i /= a.n
		}
		yield(at, at+cell)
	}
}

// span is the bytes that the drawing shows: the page and what lies between its pieces; planes far away are left to the list.
func (p *Page) span() uint64 {
	end := p.Bytes
	for i := range p.Planes {
		p.Planes[i].extents(1<<12, func(_, hi uint64) {
			if hi <= 4*p.Bytes {
				end = max(end, hi)
			}
		})
	}
	return end
}

// bar draws the page to scale: the letter of the plane that has most of each column, a dot where another layer's bytes lie.
func (p *Page) bar(width int) string {
	span := p.span()
	share := make([][]uint64, width)
	for i := range share {
		share[i] = make([]uint64, len(p.Planes))
	}
	for k := range p.Planes {
		p.Planes[k].extents(1<<12, func(lo, hi uint64) {
			for c := lo * uint64(width) / span; c < uint64(width) && c*span/uint64(width) < hi; c++ {
				a, b := max(lo, c*span/uint64(width)), min(hi, (c+1)*span/uint64(width))
				if b > a {
					share[c][k] += b - a
				}
			}
		})
	}
	out := make([]rune, width)
	for c := range out {
		out[c] = '.'
		best := uint64(0)
		for k, n := range share[c] {
			if n > best {
				best, out[c] = n, letter(k)
			}
		}
	}
	return string(out)
}

var colours = []string{"#4878a8", "#c8763c", "#5a9a5a", "#9a6aa8", "#a89a3c", "#6a9aa8", "#a85a5a", "#7a7a7a"}

// WriteSVG draws the pages of both sides to scale, one bar each, and the flows between ranks below.
func (r *Report) WriteSVG(w io.Writer) error {
	const width, left, bar = 1000, 20, 34
	var b strings.Builder
	y := 30
	text := func(x, y int, s string) {
		fmt.Fprintf(&b, `<text x="%d" y="%d">%s</text>`+"\n", x, y, html.EscapeString(s))
	}
	text(left, y, fmt.Sprintf("%s: %s bytes a token, %s a request besides", r.Model, decimal(r.BytesPerToken), size(r.FixedBytes)))
	y += 30
	for i := range r.Pages {
		p := &r.Pages[i]
		text(left, y, fmt.Sprintf("%s: %d layers of %s, %s bytes for %s tokens", p.Side, p.Layers, p.Strategy, comma(p.Bytes), comma(uint64(p.Tokens))))
		y += 10
		span := p.span()
		fmt.Fprintf(&b, `<rect x="%d" y="%d" width="%d" height="%d" fill="#eee" stroke="#333"/>`+"\n", left, y, width, bar)
		for k := range p.Planes {
			p.Planes[k].extents(256, func(lo, hi uint64) {
				if hi > span {
					return
				}
				x := float64(lo) * width / float64(span)
				fmt.Fprintf(&b, `<rect x="%.2f" y="%d" width="%.2f" height="%d" fill="%s" stroke="#fff" stroke-width="0.4"><title>%s: bytes %d to %d</title></rect>`+"\n",
					left+x, y, float64(hi-lo)*width/float64(span), bar, colours[k%len(colours)], html.EscapeString(p.Planes[k].Role), lo, hi)
			})
		}
		y += bar + 16
		for k := range p.Planes {
			fmt.Fprintf(&b, `<rect x="%d" y="%d" width="10" height="10" fill="%s"/>`+"\n", left+k*160, y-9, colours[k%len(colours)])
			text(left+14+k*160, y, p.Planes[k].Role)
		}
		y += 34
	}
	text(left, y, fmt.Sprintf("plan: %s in %s writes", size(r.TotalBytes), comma(r.TotalWrites)))
	y += 20
	for i := range r.Flows[:min(maxFlows, len(r.Flows))] {
		f := &r.Flows[i]
		text(left, y, fmt.Sprintf("P%d to D%d: %s in %s writes of %s to %s bytes", f.From, f.To, size(f.Bytes), comma(f.Writes), comma(f.Least), comma(f.Most)))
		y += 18
	}
	_, err := fmt.Fprintf(w, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="13">`+"\n"+
		`<rect width="100%%" height="100%%" fill="#fff"/>`+"\n%s</svg>\n", width+2*left, y+10, b.String())
	return err
}

func comma(n uint64) string {
	s := fmt.Sprint(n)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

func decimal(v float64) string {
	if v == float64(uint64(v)) {
		return comma(uint64(v))
	}
	return fmt.Sprintf("%s%s", comma(uint64(v)), strings.TrimPrefix(fmt.Sprintf("%.1f", v-float64(uint64(v))), "0"))
}

func size(n uint64) string {
	v, unit := float64(n), "B"
	for _, u := range []string{"KiB", "MiB", "GiB", "TiB"} {
		if v < 1024 {
			break
		}
		v, unit = v/1024, u
	}
	if unit == "B" {
		return fmt.Sprintf("%d B", n)
	}
	return fmt.Sprintf("%.2f %s", v, unit)
}
