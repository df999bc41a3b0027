package connector_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/internal/board"
	"github.com/kvspray/kvspray/transfer"
)

// twoParts loads pages 0 and 2 of two parts of region 0 into pages 3 and 1 of region 1.
func twoParts() msg.Load {
	part := func(at uint64) msg.LoadPart {
		return msg.LoadPart{SrcBase: at, SrcStride: 4096, DstBase: 8 * at, DstStride: 1024, Len: 512,
			Dst: 1}
	}
	return msg.Load{Parts: []msg.LoadPart{part(512), part(1024)},
		Pages: []msg.LoadPage{{Src: 0, Dst: 3}, {Src: 2, Dst: 1}}, Flag: 1, Value: 10}
}

func TestLoad(t *testing.T) {
	r := start(t, nil)
	w := withHost(t, r, 1<<16)
	id, err := w.Load(twoParts())
	must(t, err)
	r.rec.until(t, "load", func() bool { return len(r.rec.copies) == 1 })
	c, up := r.rec.seen().copies[0], r.lastUp(t)
	want := [][]msg.CopyBlock{
		{{SrcOff: 512, DstOff: 4096 + 3*1024, Len: 512}, {SrcOff: 512 + 2*4096, DstOff: 4096 + 1024,
			Len: 512}},
		{{SrcOff: 1024, DstOff: 8192 + 3*1024, Len: 512}, {SrcOff: 1024 + 2*4096, DstOff: 8192 + 1024,
			Len: 512}}}
	if c.Lease.ID != id || !c.Load || len(c.Parts) != 2 {
		t.Fatalf("copy %+v", c)
	}
	for i, p := range c.Parts {
		if p.Src != up.Regions[0] || p.Dst != up.Regions[1] || !slices.Equal(blocksOf(p), want[i]) {
			t.Errorf("part %d: %+v", i, p)
		}
	}
	flag := func(what string, want uint64) {
		t.Helper()
		if got := w.Flags().Load(1); got != want {
			t.Errorf("%s: the flag is %d, want %d", what, got, want)
		}
	}
	r.Loaded(up, c.Lease, 1)
	flag("before an earlier load's end", 0)
	w.Flags().SetLoad(1, 10)
	other, elsewhere := c.Lease, c.Lease
	other.ID++
	elsewhere.Boot[0]++
	r.Loaded(up, other, 1)
	r.Loaded(up, elsewhere, 1)
	flag("another lease", 10)
	r.Loaded(up, c.Lease, 1)
	flag("one part", 11)
	must(t, w.Cancel(id, "late", false)) // what arrives still counts
	r.rec.until(t, "cancel", func() bool { return r.rec.cancels[id] != "" })
	r.Loaded(up, c.Lease, 2)
	flag("both parts", 12)
	r.Loaded(up, c.Lease, 1)
	flag("a late report", 12)
	must(t, r.Complete(up, engines.Completion{Lease: c.Lease, Received: true}))
	_, err = w.Wait(testContext(t))
	must(t, err)
	r.Loaded(up, c.Lease, 9)
	flag("after the end", 12)
	copied, err := w.Copy(msg.Copy{Src: 0, Dst: 1, Blocks: []msg.CopyBlock{{Len: 8}}})
	must(t, err)
	r.rec.until(t, "copy", func() bool { return len(r.rec.copies) == 2 })
	r.Loaded(up, transfer.LeaseID{Boot: up.Boot, ID: copied, Epoch: 1}, 1)
	if got := w.Flags().Load(0); got != 0 {
		t.Errorf("a copy has raised flag 0 to %d", got)
	}
}

// A region stays while a load, two parts of which access it, is under way.
func TestLoadKeepsRegions(t *testing.T) {
	l := startLender(t)
	must(t, l.AddRegions(testContext(t), 0, parts(0, 3), l.file))
	part := msg.LoadPart{Src: 2, Dst: 1, SrcStride: 64, DstStride: 64, Len: 64}
	second := part
	second.DstBase = 64
	_, err := l.Load(msg.Load{Parts: []msg.LoadPart{part, second}, Pages: []msg.LoadPage{{}}})
	must(t, err)
	l.r.rec.until(t, "the load", func() bool { return len(l.r.rec.copies) == 1 })
	done := make(chan error, 1)
	go func() { done <- l.DropRegions(testContext(t), 1) }()
	eventually(t, "the drop", func() bool {
		empty := []msg.LoadPart{{Src: 2, Dst: 1}} // refused in any case
		_, err := l.Load(msg.Load{Parts: empty, Pages: []msg.LoadPage{{}}})
		must(t, err)
		c, err := l.Wait(testContext(t))
		must(t, err)
		return strings.HasPrefix(c.Received.Reason, "LOAD.parts[0].dst: region 1 is being dropped")
	})
	select {
	case err := <-done:
		t.Errorf("the region is dropped under a load: %v", err)
	default:
	}
	must(t, l.r.Complete(l.r.lastUp(t), engines.Completion{Lease: l.r.rec.seen().copies[0].Lease,
		Received: true}))
	must(t, <-done)
}

func TestLoadRefused(t *testing.T) {
	r := start(t, nil)
	const size = 1 << 16
	w := withHost(t, r, size)
	for _, c := range []struct {
		name   string
		change func(m *msg.Load)
		want   string
	}{
		{"flag", func(m *msg.Load) { m.Flag = uint32(w.Flags().Layers()) }, "LOAD.flag: "},
		{"flag", func(m *msg.Load) { m.Flag = 1<<32 - 1 }, "LOAD.flag: "},
		{"value", func(m *msg.Load) { m.Value = board.FlagLimit }, "LOAD.value: "},
		{"value", func(m *msg.Load) { m.Value = board.FlagLimit - msg.MaxLoadParts }, "LOAD.value: "},
		{"no parts", func(m *msg.Load) { m.Parts = nil }, "LOAD.parts: "},
		{"no pages", func(m *msg.Load) { m.Pages = nil }, "LOAD.pages: "},
		{"blocks", func(m *msg.Load) {
			m.Parts = slices.Repeat(m.Parts, 512)
			m.Pages = slices.Repeat(m.Pages, 65)
		}, "LOAD.pages: 130 pages of each of 1024 parts"},
		{"region", func(m *msg.Load) { m.Parts[1].Src = 2 }, "LOAD.parts[1].src: region 2 is not"},
		{"region", func(m *msg.Load) { m.Parts[0].Dst = 7 }, "LOAD.parts[0].dst: region 7 is not"},
		{"empty", func(m *msg.Load) { m.Parts[1].Len = 0 }, "LOAD.parts[1]: its pages have no bytes"},
		{"twice", func(m *msg.Load) { m.Pages[1].Dst = 3 }, "LOAD.pages: page 3 is written twice"},
		{"overlapping pages", func(m *msg.Load) { m.Parts[0].DstStride = 511 },
			"LOAD.parts[0]: pages of 512 bytes, 511 bytes apart"},
		{"source's end", func(m *msg.Load) { m.Pages[0].Src = 1 << 30 }, "LOAD.parts[0]: mem: region"},
		{"destination's end", func(m *msg.Load) { m.Parts[1].DstBase = size - 3*1024 - 511 },
			"LOAD.parts[1]: mem: region"},
		{"overflow", func(m *msg.Load) { m.Parts[1].SrcStride = 1 << 63 }, "LOAD.parts[1]: page 2, "},
		{"overflow", func(m *msg.Load) { m.Parts[1].DstBase = 1<<64 - 1024 }, "LOAD.parts[1]: page 3, "},
		{"parts overlap", func(m *msg.Load) { m.Parts[1].DstBase = m.Parts[0].DstBase + 2048 },
			"LOAD.parts[1]: writes between pages of parts[0]"},
		{"parts overlap", func(m *msg.Load) { m.Parts[1].DstBase = m.Parts[0].DstBase - 2048 },
			"LOAD.parts[0]: writes between pages of parts[1]"},
		{"read and written", func(m *msg.Load) { m.Parts[1].Src = 1 },
			"LOAD.parts[1].src: parts[1] writes to this region"},
	} {
		m := twoParts()
		c.change(&m)
		id, err := w.Load(m)
		must(t, err)
		got, err := w.Wait(testContext(t))
		must(t, err)
		if got.Lease != id || got.Status != board.Refused || got.Received == nil ||
			!strings.HasPrefix(got.Received.Reason, c.want) {
			t.Errorf("%s: completion %+v %+v, want %q", c.name, got, got.Received, c.want)
		}
		if e, err := w.WaitError(testContext(t), msg.CodeProtocol); err != nil || e.Field == "" {
			t.Errorf("%s: error %+v, %v", c.name, e, err)
		}
	}
	if n := len(r.rec.seen().copies); n > 0 {
		t.Errorf("%d loads were delivered", n)
	}
}
