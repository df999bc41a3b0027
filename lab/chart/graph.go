package chart

import (
	"fmt"
	"html/template"
	"image/color"
	"io"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
)

// maxMarks bounds the lines of marks in one graph: more of them hide the curves.
const maxMarks = 2000

// Graph is quantities of one unit over time.
type Graph struct {
	Title  string  `json:"title"`
	Unit   string  `json:"unit"`
	Curves []Curve `json:"curves"`
	// Marks are times at which something happened, in seconds as X of the curves is.
	Marks []float64 `json:"marks"`
	Text  string    `json:"text"` // stands below the graph
}

// Curve is one quantity. Where Y has no value (nil) the curve has a gap.
type Curve struct {
	Name string     `json:"name"`
	X    []float64  `json:"x"` // seconds
	Y    []*float64 `json:"y"`
}

// Graphs writes a page with one plot for each graph that has curves.
func Graphs(w io.Writer, title string, graphs ...Graph) error {
	page := page{Title: title}
	for _, g := range graphs {
		v := view{Title: g.Title, Text: g.Text}
		if len(g.Curves) > 0 {
			svg, err := g.draw()
			if err != nil {
				return fmt.Errorf("chart: %s: %w", g.Title, err)
			}
			v.SVG = template.HTML(svg) //nolint:gosec // drawn above
		}
		for i, c := range g.Curves {
			v.Keys = append(v.Keys, key{css(palette[i%len(palette)]), c.Name})
		}
		page.Panels = append(page.Panels, v)
	}
	return document.Execute(w, page)
}

func (g Graph) draw() (string, error) {
	p := plot.New()
	p.X.Label.Text, p.Y.Label.Text = "seconds", g.Unit
	p.Y.Min = 0
	p.Add(newGrid())
	var lines []plot.Plotter
	end, top := 0.0, 0.0
	for i, c := range g.Curves {
		if len(c.X) != len(c.Y) {
			return "", fmt.Errorf("curve %s: %d times and %d values", c.Name, len(c.X), len(c.Y))
		}
		for _, part := range parts(c) {
			l, err := plotter.NewLine(part)
			if err != nil {
				return "", err
			}
			l.Color, l.Width = palette[i%len(palette)], vg.Points(1.1)
			lines = append(lines, l)
			for _, xy := range part {
				end, top = max(end, xy.X), max(top, xy.Y)
			}
		}
	}
	p.X.Min, p.X.Max, p.Y.Max = 0, max(end, 0.001), max(top*1.05, 0.001)
	for _, x := range g.Marks[:min(len(g.Marks), maxMarks)] {
		l, err := plotter.NewLine(plotter.XYs{{X: x, Y: 0}, {X: x, Y: p.Y.Max}})
		if err != nil {
			return "", err
		}
		l.Color, l.Width = color.RGBA{0xe8, 0xc8, 0xc8, 0xff}, vg.Points(0.5)
		p.Add(l)
	}
	p.Add(lines...)
	return svgOf(p)
}

// parts is a curve cut at its gaps, and thinned out: of points that fall together the greatest is
// kept, since peaks are what is looked for.
func parts(c Curve) (out []plotter.XYs) {
	var now plotter.XYs
	flush := func() {
		if len(now) > 0 {
			out = append(out, now)
		}
		now = nil
	}
	step := max(1, (len(c.X)+points-1)/points)
	for k := 0; k < len(c.X); k += step {
		var top *float64
		for _, y := range c.Y[k:min(k+step, len(c.Y))] {
			if y != nil && (top == nil || *y > *top) {
				top = y
			}
		}
		if top == nil {
			flush()
			continue
		}
		now = append(now, plotter.XY{X: c.X[k], Y: *top})
	}
	flush()
	return out
}
