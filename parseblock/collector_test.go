package parseblock

import (
	"testing"

	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/layout"
)

// 32,768 tokens through 64 layers, from two ranks to one: two engines meet, a prompt is planned,
// and all of its runs are written out and walked.
func TestMeasureCollectorDelayOfPlanning(t *testing.T) {
	testutil.Measures(t)
	r := newReshaped()
	buf := make([]layout.Run, 0, 1<<15)
	testutil.LetsCollectorInWhile(t, func() {
		for i, p := range r.plan(t, r.meet(t)) {
			for l := range r.dst.NumLayers() {
				for part := range p.Parts(l) {
					out, _, _, err := p.Runs(buf, l, part, r.from[i:i+1], [][]uint32{r.to})
					if err != nil {
						t.Error(err)
						return
					}
					for x := range layout.Explode(out) {
						if x.Len == 0 {
							t.Error("an empty piece")
						}
					}
				}
			}
		}
	})
}
