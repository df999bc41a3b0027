package lanes

import (
	"testing"

	"github.com/kvspray/kvspray/control/exec/internal/core"
	"github.com/kvspray/kvspray/control/exec/internal/frame"
	"github.com/kvspray/kvspray/control/spray"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// A chunk that is ready goes out with the next Assign, behind it the wake-up hint; a lane that is
// gone gets nothing.
func TestAssign(t *testing.T) {
	c, out, ps, dp, _ := parts(core.Config{Transports: []string{"tcp"}})
	p := ps.Get(transfer.Boot{1})
	for id := uint64(1); id <= 2; id++ {
		if err := dp.Up(0, p.Boot, spray.LaneInfo{ID: id,
			Path:       spray.Path{Transport: "tcp", Local: "r0", Remote: "r0"},
			SliceBytes: transfer.ChunkBytes, MaxSlices: 1}, id == 1); err != nil {
			t.Fatal(err)
		}
	}
	dp.Down(1, 2)
	if p.Lanes() != 1 || dp.Len() != 1 {
		t.Fatalf("%d and %d lanes, want one", p.Lanes(), dp.Len())
	}
	space, err := transfer.NewSpace([]uint64{4 * transfer.ChunkBytes})
	if err != nil {
		t.Fatal(err)
	}
	f := c.Spray.Open(p.Rails, spray.LayerStream, 0, space, &transport.Origin{})
	f.Ready(space.All())
	dp.Hint(p)
	dp.Assign(2)
	if out.moved[1] == 0 || out.moved[2] != 0 || len(out.hints) != 1 || out.hints[0] != 1 {
		t.Errorf("slices by lane %v, hints %v: want slices and a hint for lane 1 only",
			out.moved, out.hints)
	}
	before := out.moved[1]
	dp.Assign(3)
	if out.moved[1] != before || len(out.hints) != 1 {
		t.Errorf("without an event: slices %v, hints %v", out.moved, out.hints)
	}
}

// Each kind of violation is reported as the first one once per peer; all are counted.
func TestViolations(t *testing.T) {
	_, _, ps, _, _ := parts(core.Config{})
	a, b := ps.Get(transfer.Boot{1}), ps.Get(transfer.Boot{2})
	for i, want := range []bool{true, false, false} {
		for _, p := range []*Peer{a, b} {
			if got := ps.Violates(p, frame.BadKey); got != want {
				t.Errorf("violation %d of %s: first %v", i, p.Boot, got)
			}
		}
	}
	if ps.Report(transfer.Boot{3}, frame.BadKey) {
		t.Error("the first one of an unknown peer is to be logged")
	}
	if n := ps.Violations()[frame.BadKey.String()]; n != 7 {
		t.Errorf("%d are counted, want 7", n)
	}
}
