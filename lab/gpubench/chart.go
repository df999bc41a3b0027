package gpubench

import (
	"bytes"
	"fmt"
	"html/template"
	"image/color"
	"io"
	"slices"
	"strconv"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

// The shape of a plot.
const (
	chartWidth = 28 * vg.Centimeter
	rowHeight  = 0.75 * vg.Centimeter // of one row's two bars
	barWidth   = 0.3 * vg.Centimeter
	axisHeight = 2 * vg.Centimeter
)

var (
	rateColour    = color.RGBA{0x00, 0x72, 0xb2, 0xff}
	ceilingColour = color.RGBA{0xc8, 0xc8, 0xc8, 0xff}
)

// HTML draws the report as one page that needs nothing else: for each bench the rate of every row
// beside its ceiling, with the least and the greatest of the repetitions.
func (r *Report) HTML(w io.Writer) error {
	type view struct {
		Title string
		SVG   template.HTML
		Rows  []Row
	}
	page := struct {
		Report *Report
		Plots  []view
	}{Report: r}
	for rows := r.Rows; len(rows) > 0; {
		name, n := rows[0].Bench, len(rows)
		if i := slices.IndexFunc(rows, func(x Row) bool { return x.Bench != name }); i >= 0 {
			n = i
		}
		svg, err := bars(rows[:n])
		if err != nil {
			return fmt.Errorf("gpubench: chart of %s: %w", name, err)
		}
		page.Plots = append(page.Plots, view{name, template.HTML(svg), rows[:n]}) //nolint:gosec // drawn above
		rows = rows[n:]
	}
	return document.Execute(w, page)
}

// whiskers are the least and the greatest of each row.
type whiskers struct {
	plotter.XYs
	plotter.XErrors
}

func bars(rows []Row) (string, error) {
	rates, ceilings := make(plotter.Values, len(rows)), make(plotter.Values, len(rows))
	labels := make([]string, len(rows))
	spread := whiskers{make(plotter.XYs, len(rows)), make(plotter.XErrors, len(rows))}
	for i := range rows {
		at := len(rows) - 1 - i // the first row on top
		rates[at], ceilings[at] = rows[i].GBps, rows[i].Ceiling
		// the list below has the names; its words are wider in a browser than where they were measured
		labels[at] = strconv.Itoa(i + 1)
		spread.XYs[at] = plotter.XY{X: rows[i].GBps, Y: float64(at)}
		spread.XErrors[at].Low, spread.XErrors[at].High = rows[i].GBps-rows[i].Min,
			rows[i].Max-rows[i].GBps
	}
	p := plot.New()
	p.X.Label.Text = "GB/s; grey: the ceiling of the same run"
	p.X.Min = 0
	for _, s := range []struct {
		values plotter.Values
		colour color.Color
		shift  vg.Length
	}{{ceilings, ceilingColour, -barWidth / 2}, {rates, rateColour, barWidth / 2}} {
		b, err := plotter.NewBarChart(s.values, barWidth)
		if err != nil {
			return "", err
		}
		b.Horizontal, b.Color, b.Offset, b.LineStyle.Width = true, s.colour, s.shift, 0
		p.Add(b)
	}
	e, err := plotter.NewXErrorBars(spread)
	if err != nil {
		return "", err
	}
	p.Add(e)
	p.NominalY(labels...)
	p.Y.Min, p.Y.Max = -0.6, float64(len(rows))-0.4
	p.X.Max = 1.03 * max(slices.Max(ceilings), slices.Max(rates))
	c := vgsvg.New(chartWidth, axisHeight+vg.Length(len(rows))*rowHeight)
	p.Draw(draw.New(c))
	var b bytes.Buffer
	if _, err := c.WriteTo(&b); err != nil {
		return "", err
	}
	// Within a page there is no place for an XML declaration.
	_, svg, _ := strings.Cut(b.String(), "<svg")
	return "<svg" + svg, nil
}

var document = template.Must(template.New("page").Funcs(template.FuncMap{"inc": func(i int) int { return i + 1 }}).Parse(`<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>kvspray-bench gpu</title>
<style>
body { font: 15px/1.45 system-ui, sans-serif; color: #202020; background: #fff; max-width: 1120px; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.4em } h2 { font-size: 1.1em; margin: 2em 0 .3em }
svg { width: 100%; height: auto } table { border-collapse: collapse } td, th { padding: .2em .8em; text-align: right } td:nth-child(2) { text-align: left }
</style></head><body>
<h1>kvspray-bench gpu</h1>
<p>{{len .Report.Devices}} x {{index .Report.Devices 0}}, CUDA {{.Report.Driver}}</p>
{{range .Plots}}<section><h2>{{.Title}}</h2>
{{.SVG}}
<table><tr><th></th><th></th><th>GB/s</th><th>least</th><th>greatest</th><th>ceiling</th><th>ratio</th><th>CPU cores</th></tr>
{{range $i, $row := .Rows}}{{with $row}}<tr><td>{{$i | inc}}</td><td>{{.What}}</td><td>{{printf "%.1f" .GBps}}</td><td>{{printf "%.1f" .Min}}</td><td>{{printf "%.1f" .Max}}</td><td>{{printf "%.1f" .Ceiling}}</td><td>{{printf "%.3f" .Ratio}}</td><td>{{printf "%.2f" .Cores}}</td></tr>
{{end}}{{end}}</table></section>
{{end}}</body></html>
`))
