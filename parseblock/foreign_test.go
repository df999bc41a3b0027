package parseblock

import (
	"runtime"
	"testing"

	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/transfer"
)

// FuzzForeign: whatever a peer or an engine sends as a layout is refused, or goes through all that is done with one: nothing panics, no
// offset leaves what was checked, and memory is bounded by what was sent and by named bounds.
func FuzzForeign(f *testing.F) {
	reg := Default()
	for _, fam := range families {
		for _, k := range fam.kinds {
			d := dims{layers: 2, n: 4, blocks: 3, kvHeads: 2, head: 2, value: 2, scale: 1, size: 1, kHeads: 1, kDim: 1, vHeads: 1, vDim: 1, histor: 1, elem: 2, ratio: 1, tile: 4}
			l := fam.make(k, &d).layout()
			l.Identity = map[string]string{IdentityWeights: "1"}
			b, err := l.Marshal()
			if err != nil {
				f.Fatal(err)
			}
			f.Add(b, uint32(7))
		}
	}
	f.Fuzz(func(t *testing.T, b []byte, tokens uint32) {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		l, err := layout.Unmarshal(b)
		if err == nil {
			err = layout.ValidateForeign(l, reg.Planes)
		}
		runtime.ReadMemStats(&after)
		// The check may make 65,536 intervals of a layout, and sort them twice.
		if n, most := after.TotalAlloc-before.TotalAlloc, uint64(48<<20+64*len(b)); n > most {
			t.Fatalf("%d bytes made it allocate %d, more than %d", len(b), n, most)
		}
		if err != nil {
			return
		}
		if _, err := reg.Describe(l); err != nil {
			t.Fatalf("it is valid, and cannot be described: %v", err)
		}
		m, err := NewMatch(reg, l, l, nil)
		if err != nil {
			return // such as two layers of the model with one name
		}
		tables := make([][]uint32, len(l.Groups))
		for gi := range l.Groups {
			g := &l.Groups[gi]
			// So many as there are blocks for, and no more than are looked at here in time.
			tokens = uint32(min(uint64(max(tokens, 1)), uint64(min(g.NumBlocks, 300))*uint64(g.TokensPerBlock)))
		}
		for gi := range l.Groups {
			tables[gi] = seq((uint64(tokens)-1)/uint64(l.Groups[gi].TokensPerBlock) + 1)
		}
		p, err := m.Plan(tokens, make([]uint32, len(l.Groups)))
		if err != nil {
			return // larger than a transfer
		}
		side, err := p.Side(reg, l, tables)
		if err != nil {
			t.Fatal(err)
		}
		sp := p.Space()
		for seg := range sp.NumSegments() {
			r, bytes := sp.Segment(seg)
			if bytes == 0 {
				continue
			}
			for _, c := range []uint32{r.First, r.End() - 1} {
				one := transfer.Range{First: c, Count: 1}
				pieces, err := side.Append(nil, one)
				if err != nil {
					t.Fatal(err)
				}
				var n uint64
				for _, x := range pieces {
					if n += x.Len; x.Off+x.Len < x.Off || x.Off+x.Len > 1<<63 {
						t.Fatalf("%+v", x)
					}
				}
				if want, err := sp.Bytes(one); err != nil || n != want {
					t.Fatalf("chunk %d: %d bytes of %d, %v", c, n, want, err)
				}
			}
		}
	})
}
