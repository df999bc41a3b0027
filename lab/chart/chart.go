// Package chart draws timeline.Results, the throughput of every rail and their sum over time with
// what happened to the rails marked, and Graphs of any quantity over time. Each is one HTML page
// that needs nothing else (plots are inline SVG).
//
// Pure: results in, bytes out. No goroutines.
package chart

import (
	"bytes"
	"fmt"
	"html/template"
	"image/color"
	"io"
	"strings"
	"time"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"

	"github.com/kvspray/kvspray/lab/timeline"
)

// Size and resolution.
const (
	width  = 28 * vg.Centimeter
	height = 11 * vg.Centimeter
	points = 600 // of one curve at most
	// that one point stands for: below it the shapers' bursts show, not the rails.
	minStep = 20 * time.Millisecond
	perGbit = 1e9
)

// Colors that stay apart for most eyes and in grey (Okabe and Ito).
var palette = [...]color.Color{
	color.RGBA{0x00, 0x72, 0xb2, 0xff}, color.RGBA{0xe6, 0x9f, 0x00, 0xff}, color.RGBA{0x00, 0x9e,
		0x73, 0xff}, color.RGBA{0xcc, 0x79, 0xa7, 0xff},
	color.RGBA{0x56, 0xb4, 0xe9, 0xff}, color.RGBA{0xd5, 0x5e, 0x00, 0xff}, color.RGBA{0xb0, 0xa4,
		0x10, 0xff}, color.RGBA{0x60, 0x60, 0x60, 0xff},
}

var (
	black = color.RGBA{0x20, 0x20, 0x20, 0xff}
	grey  = color.RGBA{0x90, 0x90, 0x90, 0xff}
	red   = color.RGBA{0xb0, 0x20, 0x20, 0xff}
)

// Panel is one run with a title of its own.
type Panel struct {
	Title  string
	Result *timeline.Result
}

// page is what the document is made of.
type page struct {
	Title  string
	Panels []view
}

type view struct {
	Title string
	Keys  []key
	SVG   template.HTML
	Text  string
}

type key struct {
	Colour template.CSS
	Name   string
}

// HTML writes a page with one plot for each panel.
func HTML(w io.Writer, title string, panels ...Panel) error {
	page := page{Title: title}
	top := 0.0 // one scale for all, so that they can be compared
	for _, p := range panels {
		top = max(top, float64(p.Result.Together), float64(sum(p.Result)))
	}
	for _, p := range panels {
		svg, err := draws(p.Result, top*1.12/perGbit)
		if err != nil {
			return fmt.Errorf("chart: %s: %w", p.Title, err)
		}
		var text strings.Builder
		if err := p.Result.Print(&text); err != nil {
			return err
		}
		var keys []key
		for i, x := range p.Result.Rails {
			keys = append(keys, key{css(palette[i%len(palette)]), fmt.Sprintf("%s, %s", x.Name, x.Rate)})
		}
		keys = append(keys, key{css(black), "all rails"}, key{css(grey), "dashed: plain streams over " +
			"all rails at once"})
		page.Panels = append(page.Panels, view{p.Title, keys, template.HTML(svg), text.String()}) //nolint:gosec // drawn above
	}
	return document.Execute(w, page)
}

var document = template.Must(template.New("page").Parse(`<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{{.Title}}</title>
<style>
body { font: 15px/1.45 system-ui, sans-serif; color: #202020; background: #fff; max-width: 1120px; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.4em } h2 { font-size: 1.1em; margin: 2em 0 .3em }
.key { margin-right: 1.4em; white-space: nowrap } .key i { display: inline-block; width: 1.6em; height: .28em; margin-right: .4em; vertical-align: middle }
svg { width: 100%; height: auto } pre { background: #f4f4f2; padding: .8em 1em; overflow-x: auto; font-size: 13px }
</style></head><body>
<h1>{{.Title}}</h1>
{{range .Panels}}<section><h2>{{.Title}}</h2>
<p>{{range .Keys}}<span class="key"><i style="background: {{.Colour}}"></i>{{.Name}}</span>{{end}}</p>
{{.SVG}}
{{with .Text}}<pre>{{.}}</pre>{{end}}</section>
{{end}}</body></html>
`))

// Of draws one result as a page of its own.
func Of(title string) func(io.Writer, *timeline.Result) error {
	return func(w io.Writer, r *timeline.Result) error {
		return HTML(w, title, Panel{Title: fmt.Sprintf("%s, blocks of %s", r.Bench,
			timeline.FormatSize(int64(r.Block))), Result: r})
	}
}

// css is a color as style sheets write it.
func css(c color.Color) template.CSS {
	r, g, b, _ := c.RGBA()
	return template.CSS(fmt.Sprintf("#%02x%02x%02x", r>>8, g>>8, b>>8)) //nolint:gosec // digits only
}

// sum is what the rails carry one by one.
func sum(r *timeline.Result) (s timeline.Rate) {
	for _, x := range r.Rails {
		s += x.Alone
	}
	return s
}

// draws is one plot as SVG.
func draws(r *timeline.Result, top float64) (string, error) {
	p := plot.New()
	p.X.Label.Text, p.Y.Label.Text = "seconds after the first transfer began", "received, Gbit/s"
	p.Y.Min, p.Y.Max = 0, max(top, 0.001)
	p.Add(newGrid())

	curves, err := series(r)
	if err != nil {
		return "", err
	}
	end := 0.0
	for i, xy := range curves {
		l, err := plotter.NewLine(xy)
		if err != nil {
			return "", err
		}
		l.Color, l.Width = black, vg.Points(1.6)
		if i < len(r.Rails) {
			l.Color, l.Width = palette[i%len(palette)], vg.Points(1.1)
		}
		p.Add(l)
		end = max(end, xy[len(xy)-1].X)
	}
	p.X.Min, p.X.Max = 0, max(end, 0.001)
	if r.Together > 0 {
		l, err := plotter.NewLine(plotter.XYs{{X: 0, Y: float64(r.Together) / perGbit},
			{X: end, Y: float64(r.Together) / perGbit}})
		if err != nil {
			return "", err
		}
		l.Color, l.Dashes = grey, []vg.Length{vg.Points(4), vg.Points(3)}
		p.Add(l)
	}
	if err := events(p, r, end); err != nil {
		return "", err
	}
	return svgOf(p)
}

func newGrid() *plotter.Grid {
	grid := plotter.NewGrid()
	pale := color.RGBA{0xe8, 0xe8, 0xe8, 0xff}
	grid.Vertical.Color, grid.Horizontal.Color = pale, pale
	return grid
}

// svgOf is a plot as an element of a page.
func svgOf(p *plot.Plot) (string, error) {
	c := vgsvg.New(width, height)
	p.Draw(draw.New(c))
	var b bytes.Buffer
	if _, err := c.WriteTo(&b); err != nil {
		return "", err
	}
	// Within a page there is no place for an XML declaration.
	_, svg, ok := strings.Cut(b.String(), "<svg")
	if !ok {
		return "", fmt.Errorf("no <svg in what was drawn")
	}
	return "<svg" + svg, nil
}

// series is the throughput of each rail, and of all of them last.
func series(r *timeline.Result) ([]plotter.XYs, error) {
	s := &r.Samples
	n := 0
	for _, b := range s.Bytes {
		n = max(n, len(b))
	}
	if s.Every <= 0 || n < 2 {
		return nil, fmt.Errorf("no samples")
	}
	step := max(1, int(minStep/s.Every.D()), (n+points-1)/points)
	out := make([]plotter.XYs, len(s.Bytes)+1)
	for k := 0; k+step < n; k += step {
		x := (float64(k) + float64(step)/2) * s.Every.D().Seconds()
		all := 0.0
		for i, b := range s.Bytes {
			y := 0.0
			if k+step < len(b) {
				y = float64(timeline.RateOf(b[k+step]-b[k], time.Duration(step)*s.Every.D())) / perGbit
			}
			out[i] = append(out[i], plotter.XY{X: x, Y: y})
			all += y
		}
		out[len(s.Bytes)] = append(out[len(s.Bytes)], plotter.XY{X: x, Y: all})
	}
	if len(out[len(s.Bytes)]) == 0 {
		return nil, fmt.Errorf("no samples: the run was shorter than %v", time.Duration(step)*s.Every.D())
	}
	return out, nil
}

// events marks what happened to rails.
func events(p *plot.Plot, r *timeline.Result, end float64) error {
	rows := map[time.Duration]int{}
	for _, f := range r.Faults {
		x := f.At.Seconds()
		if x > end {
			continue
		}
		l, err := plotter.NewLine(plotter.XYs{{X: x, Y: 0}, {X: x, Y: p.Y.Max}})
		if err != nil {
			return err
		}
		l.Color, l.Dashes = red, []vg.Length{vg.Points(2), vg.Points(2)}
		_, label, _ := strings.Cut(f.String(), ":")
		t, err := plotter.NewLabels(plotter.XYLabels{XYs: plotter.XYs{{X: x,
			Y: p.Y.Max * (0.97 - 0.05*float64(rows[f.At]))}}, Labels: []string{" " + label}})
		if err != nil {
			return err
		}
		rows[f.At]++
		t.TextStyle[0].Color = red
		t.TextStyle[0].YAlign = text.YTop
		p.Add(l, t)
	}
	return nil
}
