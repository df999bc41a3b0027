package sidecar

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/parseblock"
	"github.com/kvspray/kvspray/transfer"
)

// landing is a part of a grant of a layout's own geometry.
func landing(t *testing.T, reg *parseblock.Registry, l *layout.Layout, tokens, skip uint32) (*exec.ReceivePart, *sink) {
	t.Helper()
	m, err := parseblock.NewMatch(reg, l, l, nil)
	ok(t, err)
	plan, err := m.Plan(tokens, []uint32{skip})
	ok(t, err)
	s := &sink{bitmap: transfer.NewBitmap(plan.Space().NumChunks())}
	x := &exec.ReceivePart{Worker: &connector.Worker{Layout: l}, Plan: received{Plan: plan}, Sink: s}
	return x, s
}

// Exactly the tokens are named of which a byte is missing in some layer, in whole blocks.
func TestRecompute(t *testing.T) {
	reg := parseblock.Default()
	l := testShape.Layout() // 4 layers, 16 tokens a block of 16 KiB: a chunk is four blocks
	const tokens, skip = 200, 32
	for name, c := range map[string]struct {
		missing [][2]int // layer, chunk of the layer's
		want    []tokenRange
	}{
		"nothing":        {nil, nil}, // failed all the same: all of it
		"first":          {[][2]int{{0, 0}}, []tokenRange{{32, 96}}},
		"last":           {[][2]int{{3, 2}}, []tokenRange{{160, 200}}},
		"neighbours":     {[][2]int{{0, 0}, {2, 1}}, []tokenRange{{32, 160}}},
		"two":            {[][2]int{{1, 0}, {2, 2}}, []tokenRange{{32, 96}, {160, 200}}},
		"one, by layers": {[][2]int{{0, 1}, {1, 1}, {2, 1}, {3, 1}}, []tokenRange{{96, 160}}},
	} {
		x, s := landing(t, reg, l, tokens, skip)
		sp := x.Plan.Space()
		for chunk := range sp.NumChunks() {
			seg := sp.SegmentOf(chunk)
			r, _ := sp.Segment(seg)
			if !slices.Contains(c.missing, [2]int{seg, int(chunk - r.First)}) {
				s.bitmap.Set(transfer.Range{First: chunk, Count: 1})
			}
		}
		if got := recompute(reg, []*exec.ReceivePart{x}); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
	// Of several parts each lacks its own.
	a, _ := landing(t, reg, l, 64, 0)
	b, s := landing(t, reg, l, 200, 32)
	s.bitmap.Set(transfer.Range{Count: s.bitmap.Len() - 1})
	if got := recompute(reg, []*exec.ReceivePart{a, b}); !slices.Equal(got, []tokenRange{{0, 64}, {160, 200}}) {
		t.Errorf("two parts: %v", got)
	}
	if got := recompute(reg, nil); got != nil {
		t.Errorf("without a grant: %v", got)
	}
	// An engine cannot go on in the middle of what it sees only a window of.
	w := testShape.Layout()
	w.Groups[0].Params = map[string]int64{"window": 64}
	for k, v := range l.Groups[0].Params {
		w.Groups[0].Params[k] = v
	}
	c, _ := landing(t, reg, w, 200, 0)
	if got := recompute(reg, []*exec.ReceivePart{c}); got != nil {
		t.Errorf("of a window: %v", got)
	}
	// Nor where another stage has layers of a kind that this one has not.
	w = testShape.Layout()
	w.Groups = append(w.Groups, layout.Group{TokensPerBlock: 16, NumBlocks: 4, Strategy: parseblock.GDNState})
	if resumable(reg, w) || !resumable(reg, testShape.Layout()) {
		t.Error("a stage goes on in the middle of a prompt of which another has states")
	}
}

// halfLanded is a transfer of which half of the prompt has landed, and all of it of the first
// layers ahead.
func halfLanded(t *testing.T, p, d *running, ahead int) (pe, de *engine, x underway) {
	t.Helper()
	pe, de = newEngine(t, p, testShape), newEngine(t, d, testShape)
	pe.random()
	x = begin(t, p, pe, de, 1, 0, msg.PendingStep{Step: 1, End: 1024}, msg.PendingStep{Step: 2, End: tokens})
	bound(t, d)
	for l := range testShape.Layers {
		pe.SignalLayer(l, 1)
	}
	pe.SignalStep(1)
	for l := range ahead {
		pe.SignalLayer(l, 2)
	}
	until(t, func() bool { return landedBytes(d) == uint64(testShape.Layers+ahead)*1024*1024 })
	return pe, de, x
}

// A transfer that fails in its middle names what did not come to the engine, and what it does not
// name is there.
func TestFailedTransferNamesItsTokens(t *testing.T) {
	each(t, func(t *testing.T, p, d *running) {
		pe, de, x := halfLanded(t, p, d, 0)
		if err := pe.Cancel(x.src, "aborted", true); err != nil {
			t.Fatal(err)
		}
		c := de.wait(x.dst)
		if want := []tokenRange{{1024, tokens}}; c.Status != exec.StatusFailed || !slices.Equal(c.Received.Recompute, want) {
			t.Fatalf("status %d, recompute %v: want %v", c.Status, c.Received.Recompute, want)
		}
		same(t, pe, de, x.pt, x.dt, 1024, 0)
		pe.wait(x.src)
	})
}

// A transfer whose deadline comes in its middle names what did not come, neither more nor less,
// whatever layers have more of it than others. The deadline is the executor's: it is told that it
// has come, so nothing here depends on how fast this machine is.
func TestExpiredTransferNamesItsTokens(t *testing.T) {
	// layers that have all of the prompt, of which the others have a half
	for _, ahead := range []int{0, 2} {
		t.Run(fmt.Sprint("ahead ", ahead), func(t *testing.T) {
			each(t, func(t *testing.T, p, d *running) {
				pe, de, x := halfLanded(t, p, d, ahead)
				now := d.enter()
				open := d.d.ex.Load().Dests
				d.d.ex.Tick(now + deadlineMS*time.Millisecond)
				d.leave()
				c := de.wait(x.dst)
				if want := []tokenRange{{1024, tokens}}; open != 1 || c.Status != exec.StatusExpired || !strings.Contains(c.Received.Reason, "the deadline passed") ||
					!slices.Equal(c.Received.Recompute, want) {
					t.Fatalf("%d were open; status %d, %q, recompute %v: want %v", open, c.Status, c.Received.Reason, c.Received.Recompute, want)
				}
				same(t, pe, de, x.pt, x.dt, 1024, 0)
				if err := pe.Cancel(x.src, "nobody wants it any more", true); err != nil {
					t.Fatal(err)
				}
				pe.wait(x.src)
			})
		})
	}
}

// What was worked out for an engine goes with it.
func TestPlannerForgets(t *testing.T) {
	p := newPlanner(parseblock.Default())
	a, b := &connector.Worker{}, &connector.Worker{}
	for _, w := range []*connector.Worker{a, b} {
		for i := range 3 {
			p.matches[matchKey{w: w, geometry: [32]byte{byte(i)}}] = &parseblock.Match{}
		}
	}
	p.forget(a)
	for k := range p.matches {
		if k.w != b {
			t.Error("a match of the worker that is gone is kept")
		}
	}
	if len(p.matches) != 3 {
		t.Errorf("%d matches are left, want 3", len(p.matches))
	}
}
