package connector_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/connector/connectortest"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/internal/board"
	"github.com/kvspray/kvspray/internal/sys/mem"
)

// withHost adds a second region, of host bytes, to what a worker registers.
func withHost(t *testing.T, r *rig, bytes uint64) *connectortest.Worker {
	t.Helper()
	host, err := mem.NewAnonymous("host", bytes)
	must(t, err)
	t.Cleanup(host.Release)
	return r.worker(t, func(c *connectortest.Config) { c.Regions = append(c.Regions, host) })
}

func TestCopy(t *testing.T) {
	r := start(t, nil)
	w := withHost(t, r, 1<<16)
	want := []msg.CopyBlock{{SrcOff: 4096, DstOff: 0, Len: 4096}, {SrcOff: 0, DstOff: 8192, Len: 1}}
	id, err := w.Copy(msg.Copy{Src: 0, Dst: 1, Blocks: want, DeadlineMS: 1500, Req: "load"})
	must(t, err)
	r.rec.until(t, "copy", func() bool { return len(r.rec.copies) == 1 })
	c := r.rec.seen().copies[0]
	up := r.lastUp(t)
	if c.Lease.ID != id || len(c.Parts) != 1 || c.Parts[0].Src != up.Regions[0] ||
		c.Parts[0].Dst != up.Regions[1] || !slices.Equal(blocksOf(c.Parts[0]), want) || c.Load ||
		c.Deadline != 1500*time.Millisecond || c.Req != "load" {
		t.Fatalf("copy %+v", c)
	}
	if n := r.Leases(); n != 1 {
		t.Errorf("%d leases are open, want the copy's", n)
	}
	must(t, w.Cancel(id, "not any more", false))
	r.rec.until(t, "cancel", func() bool { return r.rec.cancels[id] == "not any more" })
	end := engines.Completion{Lease: c.Lease, Received: true, Status: board.Cancelled, Bytes: 4096,
		Transport: "host"}
	must(t, r.Complete(r.lastUp(t), end))
	if err := r.Complete(r.lastUp(t), end); err == nil {
		t.Error("completed twice")
	}
	got, err := w.Wait(testContext(t))
	must(t, err)
	if got.Lease != id || got.Status != board.Cancelled || got.Received == nil ||
		got.Received.Bytes != 4096 || got.Received.Transport != "host" {
		t.Fatalf("completion %+v %+v", got, got.Received)
	}
}

func blocksOf(p connector.CopyPart) (out []msg.CopyBlock) {
	for i := range p.Len() {
		out = append(out, p.Block(i))
	}
	return out
}

// TestCopyRefused: an impossible copy is refused by name, and the control layer does not receive
// it.
func TestCopyRefused(t *testing.T) {
	r := start(t, nil)
	const size = 1 << 16
	w := withHost(t, r, size)
	for _, c := range []struct {
		name string
		copy msg.Copy
		want string
	}{
		{"region", msg.Copy{Src: 2, Dst: 1, Blocks: []msg.CopyBlock{{Len: 1}}}, "COPY.src: region 2 is " +
			"not registered"},
		{"region", msg.Copy{Src: 0, Dst: 1 << 31, Blocks: []msg.CopyBlock{{Len: 1}}},
			"COPY.dst: region 2147483648"},
		{"no blocks", msg.Copy{Src: 0, Dst: 1}, "COPY.blocks: bin of 0 bytes"},
		{"empty block", msg.Copy{Src: 0, Dst: 1, Blocks: []msg.CopyBlock{{Len: 1},
			{SrcOff: 9, DstOff: 9}}}, "COPY.blocks[1]: has no bytes"},
		{"source's end", msg.Copy{Src: 1, Dst: 1, Blocks: []msg.CopyBlock{{SrcOff: size, Len: 1}}},
			"COPY.blocks[0]: mem: region"},
		{"destination's end", msg.Copy{Src: 0, Dst: 1, Blocks: []msg.CopyBlock{{DstOff: size - 1,
			Len: 2}}}, "COPY.blocks[0]: mem: region"},
		{"overflow", msg.Copy{Src: 0, Dst: 1, Blocks: []msg.CopyBlock{{DstOff: 1<<64 - 1, Len: 2}}},
			"COPY.blocks[0]: mem: region"},
		{"written twice", msg.Copy{Src: 0, Dst: 1, Blocks: []msg.CopyBlock{{DstOff: 100, Len: 10},
			{DstOff: 0, Len: 10}, {DstOff: 109, Len: 1}}},
			"COPY.blocks[2]: overlaps bytes that blocks[0]"},
		{"read and written", msg.Copy{Src: 1, Dst: 1, Blocks: []msg.CopyBlock{{SrcOff: 0, DstOff: 100,
			Len: 10}, {SrcOff: 109, DstOff: 300, Len: 1}}},
			"COPY.blocks[1]: overlaps bytes that blocks[0]"},
		{"onto itself", msg.Copy{Src: 1, Dst: 1, Blocks: []msg.CopyBlock{{SrcOff: 10, DstOff: 10,
			Len: 10}}}, "COPY.blocks[0]: overlaps bytes that blocks[0]"},
	} {
		id, err := w.Copy(c.copy)
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
	// Reading twice, and the neighbor of what is written, are fine.
	_, err := w.Copy(msg.Copy{Src: 1, Dst: 1, Blocks: []msg.CopyBlock{{SrcOff: 0, DstOff: 100,
		Len: 10}, {SrcOff: 5, DstOff: 110, Len: 10}, {SrcOff: 90, DstOff: 80, Len: 10}}})
	must(t, err)
	r.rec.until(t, "copy", func() bool { return len(r.rec.copies) == 1 })
}

// TestCopyBound: the limit bounds the open copies, and a copy that ends makes room for another.
func TestCopyBound(t *testing.T) {
	r := start(t, func(o *connector.Options) { o.Limits.Copies = 2 })
	w := withHost(t, r, 1<<16)
	if n := w.Welcome().Limits.Copies; n != 2 {
		t.Fatalf("WELCOME allows %d copies, want 2", n)
	}
	one := msg.Copy{Src: 0, Dst: 1, Blocks: []msg.CopyBlock{{Len: 8}}}
	for range 2 {
		_, err := w.Copy(one)
		must(t, err)
	}
	r.rec.until(t, "copies", func() bool { return len(r.rec.copies) == 2 })
	id, err := w.Copy(one)
	must(t, err)
	got, err := w.Wait(testContext(t))
	must(t, err)
	if got.Lease != id || got.Status != board.Refused || !strings.Contains(got.Received.Reason,
		"2 copies are open, at most 2: wait") {
		t.Fatalf("completion %+v %+v", got, got.Received)
	}
	must(t, r.Complete(r.lastUp(t), engines.Completion{Lease: r.rec.seen().copies[0].Lease,
		Received: true}))
	_, err = w.Copy(one)
	must(t, err)
	r.rec.until(t, "room", func() bool { return len(r.rec.copies) == 3 })
}
