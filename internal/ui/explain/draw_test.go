// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"bytes"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvspray/kvspray/parseblock"
)

// genPart is a part of two or three axes whose cells do not overlap.
func genPart(t *rapid.T) part {
	p := part{role: "k", at: rapid.Uint64Range(0, 50).Draw(t, "at"), cell: rapid.Uint64Range(1,
		9).Draw(t, "cell")}
	inner := p.cell
	for i := range rapid.IntRange(0, 3).Draw(t, "axes") {
		a := partAxis{fmt.Sprint("axis", i), rapid.Uint64Range(2, 6).Draw(t, "n"), inner +
			rapid.SampledFrom([]uint64{0, 0, 3, 17}).Draw(t, "gap")}
		inner = (a.n-1)*a.stride + inner
		p.axes = slices.Insert(p.axes, 0, a)
	}
	return p
}

// TestExtents: what is drawn of a part in a window are its bytes there; where it is too fine, as
// many of them.
func TestExtents(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := genPart(t)
		in := extent{lo: rapid.Uint64Range(0, p.end()).Draw(t, "lo")}
		in.hi = rapid.Uint64Range(in.lo, p.end()+10).Draw(t, "hi")
		has := make([]bool, p.end()+10)
		count := uint64(1)
		for _, a := range p.axes {
			count *= a.n
		}
		for i := range count {
			at, k := p.at, i
			for _, a := range p.axes {
				at += k % a.n * a.stride
				k /= a.n
			}
			for x := range p.cell {
				has[at+x] = true
			}
		}
		drawn := make([]bool, len(has))
		p.extents(in, 0, func(e extent, share float64) {
			if share != 1 || e.lo < in.lo || e.hi > in.hi || e.lo >= e.hi {
				t.Fatalf("%+v of a window %+v, share %v", e, in, share)
			}
			for i := e.lo; i < e.hi; i++ {
				if drawn[i] {
					t.Fatalf("byte %d is drawn twice", i)
				}
				drawn[i] = true
			}
		})
		for i := range has {
			if want := has[i] && uint64(i) >= in.lo && uint64(i) < in.hi; drawn[i] != want {
				t.Fatalf("byte %d of %+v in %+v: drawn %v, want %v", i, p, in, drawn[i], want)
			}
		}
		fine := rapid.Uint64Range(1, 40).Draw(t, "fine")
		var sum float64
		n := uint64(0)
		p.extents(extent{0, p.end()}, fine, func(e extent, share float64) {
			n++
			sum += share * float64(e.hi-e.lo)
		})
		if want := float64(count * p.cell); sum < want-0.5 || sum > want+0.5 {
			t.Fatalf("%v bytes are drawn of %v", sum, want)
		}
		if n > 2*(p.end()/fine)+2 { // the nearest are fine apart, at least every other time
			t.Fatalf("%d extents of %d bytes, none finer than %d", n, p.end(), fine)
		}
	})
}

// TestFigures: the bars of every preset show each byte of a page once, and what a bar shows below
// another is inside of it.
func TestFigures(t *testing.T) {
	for _, name := range Presets() {
		for _, order := range Orders {
			m, err := Preset(name)
			if err != nil {
				t.Fatal(err)
			}
			r, err := Explain(m, side(256, 2, order, m.DType()), side(128, 1, parseblock.PackedHND,
				m.DType()), 300)
			if err != nil {
				t.Fatal(name, order, err)
			}
			for i := range r.Pages {
				p := &r.Pages[i]
				parts := p.parts()
				all := windows(p, parts)
				for k := range all {
					if k > 0 {
						in, out := all[k].places[0], all[k-1].places[0]
						if in.lo < out.lo || in.hi > out.hi {
							t.Errorf("%s %s: %+v is not inside of %+v", name, order, in, out)
						}
					}
				}
				var sum uint64
				for _, place := range all[0].places {
					last := place.lo
					for _, g := range segments(parts, place, 0) {
						if g.lo < last || len(g.roles) != 1 || g.gaps {
							t.Fatalf("%s %s, %s: %+v after byte %d", name, order, p.Strategy, g, last)
						}
						sum, last = sum+g.hi-g.lo, g.hi
					}
				}
				if sum != p.Bytes {
					t.Errorf("%s %s, %s: %d bytes are drawn of %d", name, order, p.Strategy, sum, p.Bytes)
				}
			}
			var svg bytes.Buffer
			if err := r.WriteSVG(&svg); err != nil {
				t.Fatal(err)
			}
			for _, want := range []string{m.Name, size(r.TotalBytes), comma(r.TotalWrites),
				comma(r.Pages[0].Bytes) + " bytes", "P0", "D0"} {
				if !strings.Contains(svg.String(), want) {
					t.Errorf("%s %s: the figure does not say %q", name, order, want)
				}
			}
			if svg.Len() > 1<<20 {
				t.Errorf("%s %s: a figure of %d bytes", name, order, svg.Len())
			}
		}
	}
}

// TestFiguresOfTheDocs: those in docs/layouts.md are what is drawn today.
func TestFiguresOfTheDocs(t *testing.T) {
	for file, c := range map[string]struct {
		model    string
		from, to Side
	}{
		"llama-3.1-8b-tp2-tp1": {"llama-3.1-8b", side(16, 2, parseblock.PackedNHD, "bf16"),
			side(16, 1, parseblock.PackedNHD, "bf16")},
		"deepseek-v3.2": {"deepseek-v3.2", side(128, 1, parseblock.PackedNHD, "fp8"),
			side(128, 1, parseblock.PackedNHD, "fp8")},
	} {
		m, err := Preset(c.model)
		if err != nil {
			t.Fatal(err)
		}
		r, err := Explain(m, c.from, c.to, 32768)
		if err != nil {
			t.Fatal(err)
		}
		var svg bytes.Buffer
		if err := r.WriteSVG(&svg); err != nil {
			t.Fatal(err)
		}
		old, err := os.ReadFile("../../../docs/layouts/" + file + ".svg")
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(old, svg.Bytes()) {
			t.Errorf(
				"docs/layouts/%s.svg is not what `kvspray layout explain --format svg` draws: make it again",
				file)
		}
	}
}
