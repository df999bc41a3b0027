package chart

import (
	"bytes"
	"math"
	"strings"
	"testing"
)

func values(y ...float64) (out []*float64) {
	for _, v := range y {
		if math.IsNaN(v) {
			out = append(out, nil)
			continue
		}
		out = append(out, &v)
	}
	return out
}

func TestGraphs(t *testing.T) {
	gap := math.NaN()
	g := Graph{Title: "a & b", Unit: "MiB", Marks: []float64{1},
		Curves: []Curve{{"one", []float64{0, 1, 2, 3}, values(1, gap, 2, 5)}}, Text: "<text>"}
	var b bytes.Buffer
	if err := Graphs(&b, "title", g, Graph{Title: "words only", Text: "nothing to draw"}); err != nil {
		t.Fatal(err)
	}
	page := b.String()
	for _, want := range []string{"<svg", "a &amp; b", "&lt;text&gt;", "words only", ">one</span>"} {
		if !strings.Contains(page, want) {
			t.Errorf("the page has no %q", want)
		}
	}
	if n := strings.Count(page, "<svg"); n != 1 {
		t.Errorf("%d plots, want 1", n)
	}
	g.Curves[0].Y = g.Curves[0].Y[1:]
	if err := Graphs(&b, "title", g); err == nil {
		t.Error("a curve with fewer values than times was drawn")
	}
}

func TestPartsKeepGapsAndPeaks(t *testing.T) {
	gap := math.NaN()
	got := parts(Curve{"c", []float64{0, 1, 2, 3, 4}, values(1, 2, gap, 3, 4)})
	if len(got) != 2 || len(got[0]) != 2 || len(got[1]) != 2 || got[1][0].X != 3 {
		t.Errorf("parts: %v", got)
	}
	var c Curve
	for i := range 10 * points {
		c.X = append(c.X, float64(i))
		c.Y = append(c.Y, values(0)...)
	}
	peak := 7.0
	c.Y[1234] = &peak
	got = parts(c)
	if len(got) != 1 || len(got[0]) != points {
		t.Fatalf("%d parts, the first of %d points, want one of %d", len(got), len(got[0]), points)
	}
	top := 0.0
	for _, xy := range got[0] {
		top = max(top, xy.Y)
	}
	if top != peak {
		t.Errorf("the highest point drawn is %g, want the peak %g", top, peak)
	}
}
