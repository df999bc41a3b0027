// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"fmt"
	"html"
	"io"
	"maps"
	"slices"
	"strings"
)

// Measures of the figure, in pixels.
const (
	figWidth   = 960
	figMargin  = 28
	figInner   = figWidth - 2*figMargin
	barHeight  = 28
	zoomHeight = 42  // between a bar and the one that shows a part of it
	finest     = 3.0 // narrower parts are drawn as a mixture
	breakWidth = 24  // width of a gap for omitted bytes
	digit      = 6.2 // approximate width of a label's digit
	tickSpace  = 40  // between the labels of two ticks, at least
	lineHeight = 16
	flowHeight = 240 // at most
	flowWidth  = 400
	nodeWidth  = 10
)

// roleColours are from Okabe's and Ito's palette, which color-blind readers can distinguish.
// Scales are lighter than their values.
var roleColours = map[string]string{
	"k": "#0072b2", "v": "#e69f00", "k_scale": "#8cc4e0", "v_scale": "#f5d590",
	"latent": "#009e73", "latent_scale": "#8cd3be", "index": "#cc79a7", "index_scale": "#e8c3d8",
	"compressor": "#999999",
	"conv_q":     "#56b4e9", "conv_k": "#0072b2", "conv_v": "#e69f00", "recurrent": "#d55e00",
	"page": "#6b7280",
}

// lightRoles carry dark labels.
var lightRoles = map[string]bool{"v": true, "k_scale": true, "v_scale": true, "latent_scale": true,
	"index_scale": true, "conv_q": true, "conv_v": true}

const (
	inkColour  = "#1a1a1a"
	noteColour = "#5f6368"
	gapColour  = "#ececea" // bytes of other layers, or of nobody
	zoomColour = "#f6f6f4"
	lineColour = "#9aa0a6"
)

// flowColours distinguish the sending ranks.
var flowColours = []string{"#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00",
	"#999999", "#6b7280"}

// WriteSVG draws a figure: the pages of both sides to scale, the content of their first parts, and
// the plan between the ranks.
func (r *Report) WriteSVG(w io.Writer) error {
	f := &figure{y: figMargin + 6, mixtures: map[string]string{}}
	f.text(figMargin, "title", r.Model)
	f.y += 20
	f.text(figMargin, "note", r.summary())
	if r.Note != "" {
		f.y += lineHeight
		f.text(figMargin, "note", r.Note)
	}
	for i, p := range r.drawn() {
		f.y += 34
		f.text(figMargin, "head", fmt.Sprintf("(%c)  %s", letter(i), p.caption()))
		f.y += 10
		f.page(p.Page)
	}
	f.y += 34
	f.text(figMargin, "head", fmt.Sprintf("(%c)  Plan: %s in %s writes, from prefill TP %d with %s "+
		"tokens a block to decode TP %d with %s", letter(len(r.drawn())), size(r.TotalBytes),
		comma(r.TotalWrites), r.Prefill.TP, comma(uint64(r.Prefill.Block)), r.Decode.TP,
		comma(uint64(r.Decode.Block))))
	f.y += 16
	f.plan(r)
	_, err := fmt.Fprintf(w, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%[1]d" height="%[2]d" font-family="Helvetica, Arial, 'Liberation Sans', sans-serif" font-size="11" fill="%[3]s">
<title>KV cache of %[4]s, and its plan from prefill to decode</title>
<style>.title{font-size:18px;font-weight:bold}.head{font-size:12.5px;font-weight:bold}.note,.tick{fill:%[5]s}.tick,.in{font-size:10px}.cell{font-variant-numeric:tabular-nums}</style>
<defs>%[6]s</defs>
<rect width="100%%" height="100%%" fill="#fff"/>
%[7]s</svg>
`, figWidth, f.y+figMargin, inkColour, html.EscapeString(r.Model), noteColour, f.defs(), f.b.String())
	return err
}

func (r *Report) summary() string {
	s := fmt.Sprintf("%s bytes a token in all layers and heads, %s", decimal(r.BytesPerToken),
		r.Prefill.DType)
	if r.FixedBytes > 0 {
		s += fmt.Sprintf("; %s a request besides (state, sliding windows)", size(r.FixedBytes))
	}
	return s + fmt.Sprintf("; a prompt of %s tokens", comma(uint64(r.Tokens)))
}

// drawnPage is a page with its sides.
type drawnPage struct {
	*Page
	sides string
}

// drawn returns the pages to draw; a page of both sides once.
func (r *Report) drawn() (out []drawnPage) {
	for i := range r.Pages {
		p := &r.Pages[i]
		same := slices.IndexFunc(out, func(o drawnPage) bool {
			return o.Side != p.Side && o.Layers == p.Layers && o.Strategy == p.Strategy &&
				o.Tokens == p.Tokens && o.Window == p.Window && slices.Equal(o.Planes, p.Planes)
		})
		if same < 0 {
			out = append(out, drawnPage{p, p.Side})
		} else {
			out[same].sides = "prefill and decode"
		}
	}
	return out
}

func (p *drawnPage) caption() string {
	return fmt.Sprintf("%s%s, %s", strings.ToUpper(p.sides[:1]), p.sides[1:], p.Page.caption())
}

// figure collects the drawing from top to bottom.
type figure struct {
	b        strings.Builder
	y        int
	mixtures map[string]string // names of patterns, by their colors
}

func (f *figure) text(x float64, class, s string) { f.put(x, f.y, class, "start", "", s) }

func (f *figure) put(x float64, y int, class, anchor, fill, s string) {
	if fill != "" {
		fill = ` fill="` + fill + `"`
	}
	fmt.Fprintf(&f.b, `<text x="%.1f" y="%d" class="%s" text-anchor="%s"%s>%s</text>`+"\n", x, y,
		class, anchor, fill, html.EscapeString(s))
}

func (f *figure) rect(x, width float64, y, height int, fill, tip string) {
	fmt.Fprintf(&f.b, `<rect x="%.2f" y="%d" width="%.2f" height="%d" fill="%s">`, x, y, width,
		height, fill)
	if tip != "" {
		fmt.Fprintf(&f.b, `<title>%s</title>`, html.EscapeString(tip))
	}
	f.b.WriteString("</rect>\n")
}

// fill is a color, or stripes of several for parts finer than the drawing.
func (f *figure) fill(colours []string) string {
	if len(colours) == 1 {
		return colours[0]
	}
	key := strings.Join(colours, " ")
	if f.mixtures[key] == "" {
		f.mixtures[key] = fmt.Sprintf("mix%d", len(f.mixtures))
	}
	return "url(#" + f.mixtures[key] + ")"
}

func (f *figure) defs() string {
	var b strings.Builder
	for _, key := range slices.Sorted(maps.Keys(f.mixtures)) {
		colours := strings.Fields(key)
		fmt.Fprintf(&b,
			`<pattern id="%s" width="%d" height="8" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">`, f.mixtures[key], 3*len(colours))
		for i, c := range colours {
			fmt.Fprintf(&b, `<rect x="%d" width="3" height="8" fill="%s"/>`, 3*i, c)
		}
		b.WriteString("</pattern>")
	}
	return b.String()
}

// scale maps the bytes of a window to the drawing.
type scale struct {
	places []extent
	px     float64 // of a byte
}

func (w *window) scale() scale {
	return scale{w.places, float64(figInner-breakWidth*(len(w.places)-1)) / float64(w.bytes())}
}

// left is the start of a place.
func (s *scale) left(place int) float64 {
	x := float64(figMargin)
	for _, p := range s.places[:place] {
		x += float64(p.hi-p.lo)*s.px + breakWidth
	}
	return x
}

func (s *scale) x(at uint64) float64 {
	for i, p := range s.places {
		if at < p.hi || at == p.hi && i+1 == len(s.places) {
			return s.left(i) + float64(at-min(at, p.lo))*s.px
		}
	}
	return figMargin + figInner
}

// page draws a page, and below each bar the content of its first part.
func (f *figure) page(p *Page) {
	parts := p.parts()
	all := windows(p, parts)
	for i := range all {
		w := &all[i]
		s := w.scale()
		f.bar(w, s, parts)
		f.y += barHeight
		if i+1 == len(all) {
			f.ticks(w, s, parts)
			break
		}
		next := &all[i+1]
		const left, right = figMargin, figMargin + figInner
		fmt.Fprintf(&f.b, `<path d="M%.2f %d H%.2f L%d %d H%d Z" fill="%s"/>`+"\n",
			s.x(next.places[0].lo), f.y, s.x(next.places[0].hi), right, f.y+zoomHeight, left, zoomColour)
		f.ticks(w, s, parts)
		f.put(figMargin, f.y+zoomHeight-6, "in", "start", "", fmt.Sprintf("%s: %s bytes", next.name,
			comma(next.bytes())))
		f.y += zoomHeight
	}
	f.y += 34
	for i := range p.Planes {
		f.legend(&p.Planes[i])
		f.y += lineHeight
	}
	f.y -= lineHeight
}

// bar draws the bytes of a window, and lines between its units.
func (f *figure) bar(w *window, s scale, parts []part) {
	for i, place := range w.places {
		left := s.left(i)
		if i > 0 {
			f.put(left-breakWidth/2, f.y+barHeight/2+4, "note", "middle", "", "⋯")
		}
		f.rect(left, float64(place.hi-place.lo)*s.px, f.y, barHeight, gapColour, "")
		all := segments(parts, place, uint64(finest/s.px))
		for k := range all {
			f.segment(s, &all[k])
		}
		if float64(w.unit.stride)*s.px >= finest {
			w.divisions(place, parts, func(_, at uint64) {
				if at > place.lo {
					fmt.Fprintf(&f.b, `<path d="M%.2f %d v%d" stroke="#fff" stroke-width="0.8"/>`+"\n", s.x(at),
						f.y, barHeight)
				}
			})
		}
		for k := range all {
			f.name(s, &all[k])
		}
		fmt.Fprintf(&f.b,
			`<rect x="%.2f" y="%d" width="%.2f" height="%d" fill="none" stroke="%s" stroke-width="0.8"/>`+"\n", left, f.y, float64(place.hi-place.lo)*s.px, barHeight, inkColour)
	}
}

// segment draws bytes that belong to the same parts.
func (f *figure) segment(s scale, g *segment) {
	var colours []string
	for _, r := range g.roles {
		colours = append(colours, roleColours[r])
	}
	if g.gaps {
		colours = append(colours, gapColour)
	}
	f.rect(s.x(g.lo), float64(g.hi-g.lo)*s.px, f.y, barHeight, f.fill(colours),
		fmt.Sprintf("%s: bytes %s to %s", strings.Join(g.roles, " and "), comma(g.lo), comma(g.hi)))
}

// name labels a segment of one part, if there is room; its outline separates it from lines.
func (f *figure) name(s scale, g *segment) {
	role, width := g.roles[0], float64(g.hi-g.lo)*s.px
	if len(g.roles) > 1 || g.gaps || width < digit*float64(len(role))+8 {
		return
	}
	ink := "#fff"
	if lightRoles[role] {
		ink = inkColour
	}
	fmt.Fprintf(&f.b,
		`<text x="%.1f" y="%d" class="in" text-anchor="middle" fill="%s" stroke="%s" stroke-width="5" paint-order="stroke">%s</text>`+"\n", s.x(g.lo)+width/2,
		f.y+barHeight/2+4, ink, roleColours[role], html.EscapeString(role))
}

// ticks labels units below a bar, and the bytes of the window.
func (f *figure) ticks(w *window, s scale, parts []part) {
	y := f.y
	total := comma(w.bytes()) + " B"
	right := float64(figMargin+figInner) - digit*float64(len(total)) - 12
	f.put(figMargin+figInner, y+13, "tick", "end", "", total)
	for i, place := range w.places {
		free := 0.0       // start of the room for a label
		step := uint64(1) // from a label to the next, in units
		for float64(step*w.unit.stride)*s.px < tickSpace && step < w.unit.n {
			step *= 2
		}
		w.divisions(place, parts, func(k, at uint64) {
			if k%step != 0 {
				return
			}
			x, label := s.x(at), comma(k)
			if k == 0 {
				label = w.unit.name + " 0"
			}
			if i > 0 && at == place.lo {
				x, label = s.left(i), label+", at byte "+comma(at)
			}
			if x < free || x+digit*float64(len(label)) > right {
				return
			}
			free = x + digit*float64(len(label)) + 14
			fmt.Fprintf(&f.b, `<path d="M%.2f %d v4" stroke="%s"/>`+"\n", x, y, lineColour)
			f.put(x+2, y+13, "tick", "start", "", label)
		})
	}
}

// legend describes a plane in words.
func (f *figure) legend(p *Plane) {
	colour := roleColours[p.Role]
	if p.Role == "kv" {
		f.rect(figMargin, 5, f.y-9, 10, roleColours["k"], "")
		f.rect(figMargin+5, 5, f.y-9, 10, roleColours["v"], "")
	} else {
		f.rect(figMargin, 10, f.y-9, 10, colour, "")
	}
	words := append([]string{fmt.Sprintf("at byte %s, cells of %s B", comma(p.Offset),
		comma(p.CellBytes))}, p.words()...)
	f.put(figMargin+16, f.y, "in", "start", "", p.Role)
	f.put(figMargin+100, f.y, "in", "start", noteColour, strings.Join(words, "; "))
}

// node is the point at which a rank's flow meets its edge.
type node struct{ y, px float64 }

// plan draws the flows between ranks, and lists the writes.
func (f *figure) plan(r *Report) {
	const label = 96.0 // beside a node
	const left, right = figMargin + label, figMargin + flowWidth - label
	top, height := f.y, float64(min(flowHeight, 40+30*max(r.Prefill.TP, r.Decode.TP)))
	given, taken := make([]uint64, r.Prefill.TP), make([]uint64, r.Decode.TP)
	for i := range r.Flows {
		given[r.Flows[i].From] += r.Flows[i].Bytes
		taken[r.Flows[i].To] += r.Flows[i].Bytes
	}
	from, to := f.nodes("P", given, left-nodeWidth, height, "end"), f.nodes("D", taken, right,
		height, "start")
	for i := range r.Flows {
		fl := &r.Flows[i]
		a, b, n := &from[fl.From], &to[fl.To], float64(fl.Bytes)
		const middle = (left + right) / 2
		fmt.Fprintf(&f.b,
			`<path d="M%g %.2f C%g %.2f %g %.2f %g %.2f v%.2f C%g %.2f %g %.2f %g %.2f Z" fill="%s" fill-opacity="0.4"><title>P%d to D%d: %s</title></path>`+"\n",
			left, a.y, middle, a.y, middle, b.y, right, b.y, n*b.px, middle, b.y+n*b.px, middle, a.y+n*a.px,
			left, a.y+n*a.px,
			flowColours[fl.From%len(flowColours)], fl.From, fl.To, size(fl.Bytes))
		a.y += n * a.px
		b.y += n * b.px
	}
	f.table(r)
	f.y = max(f.y, top+int(height))
	idle := 0
	for _, n := range given {
		if n == 0 {
			idle++
		}
	}
	if idle > 0 {
		f.y += 22
		f.text(figMargin, "in note", fmt.Sprintf("%d of the %d prefill ranks give nothing: what they "+
			"hold, others hold, too", idle, len(given)))
	}
}

// nodes draws the ranks of a side, as tall as their bytes.
func (f *figure) nodes(name string, bytes []uint64, x, height float64, anchor string) []node {
	var total uint64
	for _, n := range bytes {
		total += n
	}
	gap := min(8, 0.3*height/float64(len(bytes)))
	px := (height - gap*float64(len(bytes)-1)) / float64(max(total, 1))
	beside := x - 6
	if anchor == "start" {
		beside = x + nodeWidth + 6
	}
	out := make([]node, len(bytes))
	y, free := float64(f.y), 0.0
	for i, n := range bytes {
		tall := float64(n) * px
		out[i] = node{y, px}
		colour := inkColour
		if name == "P" {
			colour = flowColours[i%len(flowColours)]
		}
		fmt.Fprintf(&f.b,
			`<rect x="%g" y="%.2f" width="%d" height="%.2f" fill="%s"><title>%s%d: %s</title></rect>`+"\n",
			x, y, nodeWidth, tall, colour, name, i, size(n))
		if at := y + tall/2 + 4; n > 0 && at >= free {
			f.put(beside, int(at), "in", anchor, "", fmt.Sprintf("%s%d  %s", name, i, size(n)))
			free = at + 12
		}
		if n > 0 {
			y += tall + gap
		}
	}
	return out
}

// table lists the flows beside the drawing.
func (f *figure) table(r *Report) {
	columns := []float64{figMargin + flowWidth + 80, 640, 732, 850, figMargin + figInner}
	line := func(class string, cells ...string) {
		for i, c := range cells {
			f.put(columns[i], f.y, class, "end", "", c)
		}
	}
	f.y += 10
	line("in note", "from, to", "bytes", "writes", "bytes a write", "runs")
	f.y += 5
	fmt.Fprintf(&f.b, `<path d="M%d %d H%d" stroke="%s"/>`+"\n", figMargin+flowWidth+20, f.y,
		figMargin+figInner, lineColour)
	for i := range r.Flows[:min(maxFlows, len(r.Flows))] {
		f.y += lineHeight
		fl := &r.Flows[i]
		of := comma(fl.Least)
		if fl.Most != fl.Least {
			of += " to " + comma(fl.Most)
		}
		line("in cell", fmt.Sprintf("P%d, D%d", fl.From, fl.To), comma(fl.Bytes), comma(fl.Writes), of,
			comma(fl.Runs))
	}
	if n := len(r.Flows) - maxFlows; n > 0 {
		f.y += lineHeight
		f.put(columns[0], f.y, "in note", "end", "", fmt.Sprintf("%d more", n))
	}
}
