package explain

import (
	"cmp"
	"fmt"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvspray/kvspray/parseblock"
)

// genPart is a part of two or three axes whose cells do not overlap.
func genPart(t *rapid.T) part {
	p := part{at: rapid.Uint64Range(0, 50).Draw(t, "at"), cell: rapid.Uint64Range(1,
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

// TestBars: the first bar of every preset shows each byte of a page in one part, and the other bars
// show bytes of the bar above them.
func TestBars(t *testing.T) {
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
				all := windows(p, p.parts())
				for k := range all[1:] {
					in, out := all[k+1].places[0], all[k].places[0]
					if in.lo < out.lo || in.hi > out.hi {
						t.Errorf("%s %s: %+v is not inside of %+v", name, order, in, out)
					}
				}
				var drawn []extent
				for _, part := range p.parts() {
					for _, place := range all[0].places {
						part.extents(place, 0, func(e extent, _ float64) { drawn = append(drawn, e) })
					}
				}
				slices.SortFunc(drawn, func(a, b extent) int { return cmp.Compare(a.lo, b.lo) })
				var sum, last uint64
				for _, e := range drawn {
					if e.lo < last {
						t.Fatalf("%s %s, %s: %+v is drawn twice", name, order, p.Strategy, e)
					}
					sum, last = sum+e.hi-e.lo, e.hi
				}
				if sum != p.Bytes {
					t.Errorf("%s %s, %s: %d bytes are drawn of %d", name, order, p.Strategy, sum, p.Bytes)
				}
			}
		}
	}
}
