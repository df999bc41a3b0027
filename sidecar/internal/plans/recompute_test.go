package plans

import (
	"slices"
	"testing"

	"github.com/kvspray/kvspray/connector/connectortest"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/parseblock"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

var testShape = connectortest.Shape{Layers: 4, NumBlocks: 256, TokensPerBlock: 16, TokenBytes: 1024}

// landing is a part of a grant of a layout's own geometry.
func landing(t *testing.T, reg *parseblock.Registry, l *layout.Layout, tokens,
	skip uint32) (*exec.ReceivePart, *transport.Receipt) {
	t.Helper()
	m, err := parseblock.NewMatch(reg, l, l, nil)
	if err != nil {
		t.Fatal(err)
	}
	plan, err := m.Plan(tokens, []uint32{skip})
	if err != nil {
		t.Fatal(err)
	}
	x := &exec.ReceivePart{Worker: &engines.Worker{Layout: l}, Plan: received{Plan: plan}}
	s := &x.Grant.Receipt
	s.Reset(plan.Space().NumChunks())
	return x, s
}

// Exactly the tokens are named of which a byte is missing in some layer, in whole blocks.
func TestRecompute(t *testing.T) {
	reg := parseblock.Default()
	l := testShape.Layout() // 4 layers, 16 tokens a block of 16 KiB: a chunk is four blocks
	const tokens, skip = 200, 32
	for name, c := range map[string]struct {
		missing [][2]int // layer, chunk of the layer's
		want    []TokenRange
	}{
		"nothing":        {nil, nil}, // failed all the same: all of it
		"first":          {[][2]int{{0, 0}}, []TokenRange{{32, 96}}},
		"last":           {[][2]int{{3, 2}}, []TokenRange{{160, 200}}},
		"neighbours":     {[][2]int{{0, 0}, {2, 1}}, []TokenRange{{32, 160}}},
		"two":            {[][2]int{{1, 0}, {2, 2}}, []TokenRange{{32, 96}, {160, 200}}},
		"one, by layers": {[][2]int{{0, 1}, {1, 1}, {2, 1}, {3, 1}}, []TokenRange{{96, 160}}},
	} {
		x, s := landing(t, reg, l, tokens, skip)
		sp := x.Plan.Space()
		for chunk := range sp.NumChunks() {
			seg := sp.SegmentOf(chunk)
			r, _ := sp.Segment(seg)
			if !slices.Contains(c.missing, [2]int{seg, int(chunk - r.First)}) {
				s.Set(transfer.Range{First: chunk, Count: 1})
			}
		}
		if got := New(reg).Recompute([]*exec.ReceivePart{x}); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
	// Of several parts each lacks its own.
	a, _ := landing(t, reg, l, 64, 0)
	b, s := landing(t, reg, l, 200, 32)
	s.Set(transfer.Range{Count: s.Chunks() - 1})
	if got := New(reg).Recompute([]*exec.ReceivePart{a, b}); !slices.Equal(got, []TokenRange{{0, 64},
		{160, 200}}) {
		t.Errorf("two parts: %v", got)
	}
	if got := New(reg).Recompute(nil); got != nil {
		t.Errorf("without a grant: %v", got)
	}
	// An engine cannot go on in the middle of what it sees only a window of.
	w := testShape.Layout()
	w.Groups[0].Params = map[string]int64{"window": 64}
	for k, v := range l.Groups[0].Params {
		w.Groups[0].Params[k] = v
	}
	c, _ := landing(t, reg, w, 200, 0)
	if got := New(reg).Recompute([]*exec.ReceivePart{c}); got != nil {
		t.Errorf("of a window: %v", got)
	}
	// Nor where another stage has layers of a kind that this one has not.
	w = testShape.Layout()
	w.Groups = append(w.Groups, layout.Group{TokensPerBlock: 16, NumBlocks: 4,
		Strategy: parseblock.GDNState})
	if resumable(reg, w) || !resumable(reg, testShape.Layout()) {
		t.Error("a stage goes on in the middle of a prompt of which another has states")
	}
}

// Forget removes the matches of one worker, and no others.
func TestPlannerForgets(t *testing.T) {
	p := New(parseblock.Default())
	a, b := &engines.Worker{}, &engines.Worker{}
	for _, w := range []*engines.Worker{a, b} {
		for i := range 3 {
			p.matches[matchKey{w: w, geometry: [32]byte{byte(i)}}] = &parseblock.Match{}
		}
	}
	p.Forget(a)
	for k := range p.matches {
		if k.w != b {
			t.Error("a match of the worker that is gone is kept")
		}
	}
	if len(p.matches) != 3 {
		t.Errorf("%d matches are left, want 3", len(p.matches))
	}
}
