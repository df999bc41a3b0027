package explain

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
)

// WriteJSON writes the report as one indented object.
func (r *Report) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(r)
}

// maxFlows bounds the printed lines of a plan.
const maxFlows = 16

// WriteText writes the report for people.
func (r *Report) WriteText(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	// Flush returns the error
	p := func(format string, a ...any) { _, _ = fmt.Fprintf(t, format, a...) }
	p("%s, %s tokens\n", r.Model, comma(uint64(r.Tokens)))
	if r.Note != "" {
		p("  note: %s\n", r.Note)
	}
	p("  %s bytes a token, all layers and heads, %s\n", decimal(r.BytesPerToken), r.Prefill.DType)
	if r.FixedBytes > 0 {
		p("  %s bytes a request besides (state, sliding windows): %s\n", comma(r.FixedBytes),
			size(r.FixedBytes))
	}
	for i := range r.Pages {
		pg := &r.Pages[i]
		p("\n%s, %s\n", pg.Side, pg.caption())
		parts := pg.parts()
		for _, w := range windows(pg, parts) {
			p("  %-14s|%s|\n", w.name, w.bar(parts, 64))
		}
		part := 0
		for k := range pg.Planes {
			pl := &pg.Planes[k]
			letters := string(letter(part))
			if part++; pl.halves() {
				letters += string(letter(part))
				part++
			}
			p("  %s %s\tat %s\tcells of %s B", letters, pl.Role, comma(pl.Offset), comma(pl.CellBytes))
			p("\t%s\n", strings.Join(pl.words(), "\t"))
		}
	}
	p("\nplan, prefill TP %d with %d tokens a block to decode TP %d with %d\n", r.Prefill.TP,
		r.Prefill.Block, r.Decode.TP, r.Decode.Block)
	p("  from\tto\tbytes\twrites\tof bytes\truns\n")
	for i := range r.Flows[:min(maxFlows, len(r.Flows))] {
		f := &r.Flows[i]
		of := comma(f.Shortest)
		if f.Longest != f.Shortest {
			of += " to " + comma(f.Longest)
		}
		p("  P%d\tD%d\t%s\t%s\t%s\t%s\n", f.From, f.To, comma(f.Bytes), comma(f.Writes), of,
			comma(f.Runs))
	}
	if n := len(r.Flows) - maxFlows; n > 0 {
		p("  and %d more\n", n)
	}
	p("  total\t\t%s\t%s\t\t\t%s\n", comma(r.TotalBytes), comma(r.TotalWrites), size(r.TotalBytes))
	return t.Flush()
}

// caption describes a page.
func (p *Page) caption() string {
	what := fmt.Sprintf("a page of %s tokens", comma(uint64(p.Tokens)))
	if len(p.Planes) > 0 && p.Planes[0].Unit == "state" {
		what = "the state of a request"
	}
	s := fmt.Sprintf("rank 0, %d layers of %s: %s has %s bytes", p.Layers, p.Strategy, what,
		comma(p.Bytes))
	if p.Window > 0 {
		s += fmt.Sprintf(", window %s", comma(uint64(p.Window)))
	}
	return s
}

func letter(plane int) rune { return rune('a' + plane) }

// words describe the axes of a plane.
func (p *Plane) words() []string {
	head, row := "head", "row"
	if p.Unit == "state" && p.Role != "recurrent" {
		head = "channel"
	}
	out := []string{axisWords(row, p.Rows/max(p.Tiles, 1), p.RowStride)}
	switch {
	case p.AllHeads > 1 && p.Heads == 1:
		out = append(out, fmt.Sprintf("%s %d of %s", head, p.FirstHead, comma(uint64(p.AllHeads))))
	case p.AllHeads > 1:
		out = append(out, fmt.Sprintf("%s: %s to %s of %s", axisWords(head, p.Heads, p.HeadStride),
			comma(uint64(p.FirstHead)), comma(uint64(p.FirstHead+p.Heads-1)),
			comma(uint64(p.AllHeads))))
	}
	if p.Cols > 1 {
		out = append(out, axisWords("column", p.Cols, p.ColStride))
	}
	if p.Tiles > 1 {
		out = append(out, axisWords("kernel page", p.Tiles, p.TileStride))
	}
	if p.RowTokens > 1 {
		out = append(out, fmt.Sprintf("a row stands for %s tokens", comma(uint64(p.RowTokens))))
	}
	return out
}

func axisWords(name string, n uint32, stride uint64) string {
	if n == 1 {
		return "1 " + name
	}
	return fmt.Sprintf("%s %ss every %s B", comma(uint64(n)), name, comma(stride))
}

// bar draws a window to scale: the letter of the part with largest of each column, a star if others
// have nearly as much, a dot for another layer's bytes.
func (w *window) bar(parts []part, width int) string {
	const star = 0.75 // of a column, for a part's letter
	out := []rune(strings.Repeat(".", width))
	all, largest := make([]float64, width), make([]float64, width)
	column := float64(w.bytes()) / float64(width)
	before := 0.0 // bytes of earlier places
	for _, place := range w.places {
		for k := range parts {
			share := make([]float64, width)
			parts[k].extents(place, uint64(column/8), func(e extent, of float64) {
				lo, hi := (before+float64(e.lo-place.lo))/column, (before+float64(e.hi-place.lo))/column
				for c := int(lo); c < width && float64(c) < hi; c++ {
					share[c] += of * (min(hi, float64(c+1)) - max(lo, float64(c)))
				}
			})
			for c := range out {
				if all[c] += share[c]; share[c] > largest[c] {
					largest[c], out[c] = share[c], letter(k)
				}
			}
		}
		before += float64(place.hi - place.lo)
	}
	for c := range out {
		if all[c] > 0 && largest[c] < star*all[c] {
			out[c] = '*'
		}
	}
	return string(out)
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
	return fmt.Sprintf("%s%s", comma(uint64(v)), strings.TrimPrefix(fmt.Sprintf("%.1f",
		v-float64(uint64(v))), "0"))
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
