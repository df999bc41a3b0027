package connector_test

import (
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/internal/board"
	"github.com/kvspray/kvspray/transfer"
)

// TestLayerByLayer follows one prompt through two steps, layer by layer, to its completion.
func TestLayerByLayer(t *testing.T) {
	r := start(t, nil)
	w := r.worker(t, nil)
	up := r.lastUp(t)
	if up.Name != "vllm/e/tp0" || up.Boot != w.Boot() || len(up.Regions) != 1 {
		t.Fatalf("worker %+v", up)
	}
	in := intent(40, 3)
	in.Req = "req-1"
	id, err := w.Intent(in)
	must(t, err)
	must(t, w.Step(msg.Step{Step: 1, Reqs: []msg.StepReq{{Lease: id, End: 16,
		Blocks: [][]uint32{{3}}}}}))
	must(t, w.Step(msg.Step{Step: 2, Reqs: []msg.StepReq{{Lease: id, End: 40,
		Blocks: [][]uint32{{3, 4, 5}}}}}))
	r.rec.until(t, "intent", func() bool { return len(r.rec.intents) == 1 })
	got := r.rec.seen().intents[0]
	if got.Lease.ID != id || got.Key.Xfer != in.Xfer || got.Key.Hash != in.Hash || got.Tokens != 40 ||
		got.Req != "req-1" ||
		got.Fanout != 1 || got.Priority != engines.LayerStream ||
		got.Deadline != connector.DefaultDeadline {
		t.Fatalf("intent %+v", got)
	}
	if !up.SourceValid(got.Lease) {
		t.Error("a fresh source lease is not valid")
	}
	r.rec.until(t, "both steps", func() bool {
		return slices.Equal(r.rec.announced, []transfer.LeaseID{got.Lease, got.Lease})
	})

	w.SignalLayer(0, 1)
	r.rec.until(t, "layer 0", func() bool { return len(r.rec.progress) == 1 })
	if p := r.rec.seen().progress[0]; p.Layer != 0 || p.Tokens != 16 || p.Final ||
		asJSON(p.Blocks) != "[[3]]" || p.Lease != got.Lease {
		t.Fatalf("progress %+v", p)
	}
	w.SignalLayer(1, 1)
	w.SignalStep(1) // layers 2 and 3 have no hook
	r.rec.until(t, "step 1", func() bool { return len(r.rec.progress) == 4 })
	for i, p := range r.rec.seen().progress[1:] {
		if p.Layer != i+1 || p.Tokens != 16 || p.Blocks != nil {
			t.Fatalf("progress %+v", p)
		}
	}
	w.SignalLayer(3, 2)
	r.rec.until(t, "layer 3 of step 2", func() bool { return len(r.rec.progress) == 5 })
	if p := r.rec.seen().progress[4]; p.Layer != 3 || p.Tokens != 40 || !p.Final ||
		asJSON(p.Blocks) != "[[3,4,5]]" {
		t.Fatalf("progress %+v", p)
	}
	w.SignalStep(2)
	r.rec.until(t, "step 2", func() bool { return len(r.rec.progress) == 8 })

	must(t, w.Hold(id))
	r.rec.until(t, "hold", func() bool { return len(r.rec.holds) == 1 })
	must(t, w.Yield(id))
	r.rec.until(t, "yield", func() bool { return slices.Equal(r.rec.yields, []uint64{id}) })
	must(t, r.Complete(up, engines.Completion{Lease: got.Lease, Status: board.OK, Grants: 1,
		Bytes: 777, Reason: "done"}))
	c, err := w.Wait(testContext(t))
	must(t, err)
	if c.Lease != id || c.Status != board.OK || c.Seq != 1 || c.Sent == nil ||
		*c.Sent != (msg.Sent{Grants: 1, Bytes: 777, Reason: "done"}) {
		t.Fatalf("completion %+v", c)
	}
	if up.SourceValid(got.Lease) {
		t.Error("a completed lease is valid")
	}
	if err := r.Complete(up, engines.Completion{Lease: got.Lease}); err == nil {
		t.Error("completed twice")
	}
	if r.Leases() != 0 {
		t.Errorf("%d leases open", r.Leases())
	}
}

func TestExpectAndRecompute(t *testing.T) {
	r := start(t, nil)
	w := r.worker(t, nil)
	x, h := key()
	id, err := w.Expect(msg.Expect{Xfer: x, Hash: h, Peer: "10.0.0.1:7", Tokens: 48,
		Skip: []uint32{16}, Blocks: [][]uint32{{0, 1, 2}}, DeadlineMS: 1500, StallMS: 700})
	must(t, err)
	r.rec.until(t, "expect", func() bool { return len(r.rec.expects) == 1 })
	ex := r.rec.seen().expects[0]
	if ex.Peer != "10.0.0.1:7" || ex.Tokens != 48 || asJSON(ex.Skip) != "[16]" ||
		ex.Deadline != 1500*time.Millisecond || ex.Stall != 700*time.Millisecond ||
		ex.MatchTimeout != connector.DefaultMatchTimeout {
		t.Fatalf("expect %+v", ex)
	}
	for _, typ := range []uint16{board.RecPreempt, board.RecHold, board.RecYield} { // of sources only
		must(t, w.Push(typ, id, (&msg.Empty{}).Append(nil), false))
	}
	must(t, w.Cancel(id, "aborted", false))
	r.rec.until(t, "cancel", func() bool { return r.rec.cancels[id] == "aborted" })
	if r.bad.get("preempt")+r.bad.get("hold")+r.bad.get("yield") != 3 {
		t.Errorf("records that name no source lease were accepted: %+v", r.rec.seen())
	}
	must(t, r.Complete(r.lastUp(t), engines.Completion{Lease: ex.Lease, Received: true,
		Status: board.Cancelled, Took: 3 * time.Millisecond,
		Transport: "tcp", Recompute: [][2]uint32{{16, 48}}}))
	c, err := w.Wait(testContext(t))
	must(t, err)
	if c.Received == nil || c.Status != board.Cancelled || c.Received.TookUS != 3000 ||
		asJSON(c.Received.Recompute) != "[[16,48]]" || c.Received.Transport != "tcp" {
		t.Fatalf("completion %+v %+v", c, c.Received)
	}
}

// TestPreempt: the epoch word alone makes a source invalid, the record names the lease, and the
// others are valid again.
func TestPreempt(t *testing.T) {
	r := start(t, nil)
	w := r.worker(t, nil)
	a, err := w.Intent(intent(32, 1, 2))
	must(t, err)
	b, err := w.Intent(intent(32, 3, 4))
	must(t, err)
	must(t, w.Step(msg.Step{Step: 1, Reqs: []msg.StepReq{{Lease: a, End: 32}, {Lease: b, End: 32}}}))
	r.rec.until(t, "intents", func() bool { return len(r.rec.intents) == 2 })
	up := r.lastUp(t)
	la, lb := r.rec.seen().intents[0].Lease, r.rec.seen().intents[1].Lease
	w.BumpEpoch()
	if up.SourceValid(la) || up.SourceValid(lb) {
		t.Fatal("valid although the epoch moved, and no record names the reason")
	}
	must(t, w.Push(board.RecPreempt, a, (&msg.Empty{}).Append(nil), false))
	if up.SourceValid(la) {
		t.Error("the preempted lease is valid")
	}
	if !up.SourceValid(lb) {
		t.Error("the other lease is not valid")
	}
	r.rec.until(t, "preempt", func() bool {
		return len(r.rec.preempts) == 1 &&
			r.rec.preempts[0] == a
	})
	w.SignalStep(1)
	r.rec.until(t, "progress of b", func() bool { return len(r.rec.progress) == 4 })
	for _, p := range r.rec.seen().progress {
		if p.Lease != lb {
			t.Fatalf("progress %+v", p)
		}
	}
	if got := r.rec.seen().announced; !slices.Equal(got, []transfer.LeaseID{la, lb}) {
		t.Fatalf("announced %v", got)
	}
	// A later attempt revives the lease under a new epoch.
	must(t, w.Step(msg.Step{Step: 2, Reqs: []msg.StepReq{{Lease: a, End: 32,
		Blocks: [][]uint32{{5, 6}}, Attempt: 1}}}))
	w.SignalStep(2)
	r.rec.until(t, "progress of a", func() bool { return len(r.rec.progress) == 8 })
	p := r.rec.seen().progress[4]
	if got := r.rec.seen().announced; len(got) != 3 || got[2] != p.Lease {
		t.Fatalf("announced %v before progress of %v", got, p.Lease)
	}
	if p.Lease.ID != a || p.Lease == la || asJSON(p.Blocks) != "[[5,6]]" || !p.Final {
		t.Fatalf("progress %+v", p)
	}
	if up.SourceValid(la) || !up.SourceValid(p.Lease) {
		t.Error("the old epoch is valid, or the new one is not")
	}
	// An attempt that moved without PREEMPT is taken for one.
	must(t, w.Step(msg.Step{Step: 3, Reqs: []msg.StepReq{{Lease: b, End: 16, Attempt: 7}}}))
	r.rec.until(t, "implied preempt", func() bool { return len(r.rec.preempts) == 2 })
	if up.SourceValid(lb) {
		t.Error("valid after an implied preemption")
	}
	must(t, w.Cancel(b, "", true))
	r.rec.until(t, "cancel", func() bool { _, ok := r.rec.cancels[b]; return ok })
}

func TestRestartPresentsLeases(t *testing.T) {
	r := start(t, nil)
	w := r.worker(t, nil)
	w.SignalStep(5)
	in := intent(100, 1, 2, 3, 4, 5, 6, 7)
	in.Ready, in.Held, in.Attempt = 32, true, 2
	in.Steps = []msg.PendingStep{{Step: 5, End: 64}, {Step: 6, End: 100}}
	must(t, w.IntentAs(77, in))
	r.rec.until(t, "progress", func() bool { return len(r.rec.progress) == 8 })
	if got := r.rec.seen().intents[0]; !got.Held || got.Attempt != 2 || got.Lease.ID != 77 {
		t.Fatalf("intent %+v", got)
	}
	for i, p := range r.rec.seen().progress {
		want := uint32(32)
		if i >= 4 {
			want = 64
		}
		if p.Tokens != want || p.Layer != i%4 || p.Final {
			t.Fatalf("progress %d: %+v", i, p)
		}
	}
	w.SignalLayer(2, 6)
	r.rec.until(t, "layer 2", func() bool { return len(r.rec.progress) == 9 })
	if p := r.rec.seen().progress[8]; p.Layer != 2 || p.Tokens != 100 || !p.Final {
		t.Fatalf("progress %+v", p)
	}
}

// TestReplays: the layers of captured graphs, whose flags are cleared when the next step begins.
// Each is reported once, and none is missed.
func TestReplays(t *testing.T) {
	const steps = 60
	r := start(t, nil)
	w := r.worker(t, nil)
	var blocks []uint32
	for b := range uint32(steps) {
		blocks = append(blocks, b)
	}
	id, err := w.Intent(intent(16*steps, blocks...))
	must(t, err)
	announce := func(s uint64) {
		t.Helper()
		must(t, w.Step(msg.Step{Step: s, Reqs: []msg.StepReq{{Lease: id, End: uint32(16 * s)}}}))
	}
	// One after another, each layer awaited.
	for s := uint64(1); s <= 3; s++ {
		announce(s)
		w.StartReplay(s)
		for l := range shape.Layers {
			n := int(s-1)*shape.Layers + l
			w.SignalReplay(l)
			r.rec.until(t, "a layer", func() bool { return len(r.rec.progress) > n })
			if p := r.rec.seen().progress[n]; p.Layer != l || p.Tokens != uint32(16*s) {
				t.Fatalf("step %d, layer %d: progress %+v", s, l, p)
			}
		}
		w.SignalStep(s)
	}
	// Step 4 ends, and its flags are cleared, before its record is taken: the end of a step stands
	// for all layers.
	w.StartReplay(4)
	for l := range shape.Layers {
		w.SignalReplay(l)
	}
	w.SignalStep(4)
	w.StartReplay(5)
	w.SignalReplay(2)
	announce(4)
	announce(5)
	r.rec.until(t, "all layers, and one of the next step", func() bool {
		seen := map[int]uint32{}
		for _, p := range r.rec.progress {
			seen[p.Layer] = p.Tokens
		}
		return seen[0] == 16*4 && seen[1] == 16*4 && seen[2] == 16*5 && seen[3] == 16*4
	})
	w.SignalStep(5)
	// At full speed, except for some layers that must be seen before they are cleared.
	for s := uint64(6); s <= steps; s++ {
		announce(s)
		w.StartReplay(s)
		for l := range shape.Layers {
			w.SignalReplay(l)
			if s%3 == 0 && l == int(s)%shape.Layers {
				r.rec.until(t, "a layer in between", func() bool {
					return slices.ContainsFunc(r.rec.progress, func(p engines.Progress) bool {
						return p.Layer ==
							l && p.Tokens == uint32(16*s)
					})
				})
			}
		}
		w.SignalStep(s)
	}
	w.StartReplay(steps + 1)
	r.rec.until(t, "the end", func() bool { return finals(r.rec) == shape.Layers })
	last := make([]uint32, shape.Layers)
	for i, p := range r.rec.seen().progress {
		if p.Tokens <= last[p.Layer] {
			t.Errorf("progress %d is repeated: %+v after %d tokens", i, p, last[p.Layer])
		}
		last[p.Layer] = p.Tokens
	}
}

// TestTableOutlivesUnchangedStep: a table for which no flag was seen is reported with a later step
// that has "unchanged".
func TestTableOutlivesUnchangedStep(t *testing.T) {
	r := start(t, nil)
	w := r.worker(t, nil)
	id, err := w.Intent(intent(48, 1))
	must(t, err)
	must(t, w.Step(msg.Step{Step: 1, Reqs: []msg.StepReq{{Lease: id, End: 16}}}))
	must(t, w.Step(msg.Step{Step: 2, Reqs: []msg.StepReq{{Lease: id, End: 40,
		Blocks: [][]uint32{{1, 2, 3}}}}}))
	must(t, w.Step(msg.Step{Step: 3, Reqs: []msg.StepReq{{Lease: id, End: 48}}}))
	r.rec.until(t, "intent", func() bool { return len(r.rec.intents) == 1 })
	w.SignalStep(3) // the flags of steps 1 and 2 are never seen by themselves
	r.rec.until(t, "progress", func() bool { return len(r.rec.progress) == 4 })
	if p := r.rec.seen().progress[0]; p.Tokens != 48 || asJSON(p.Blocks) != "[[1,2,3]]" {
		t.Fatalf("progress %+v, want the table of step 2", p)
	}
	for _, p := range r.rec.seen().progress[1:] {
		if p.Tokens != 48 || p.Blocks != nil {
			t.Fatalf("progress %+v, want no table: an earlier one had it", p)
		}
	}
}

// TestManyStepsAtOnce: an engine that computed more steps than may be pending, all of them
// signaled, while the sidecar did not run, has done nothing wrong.
func TestManyStepsAtOnce(t *testing.T) {
	r := start(t, nil)
	w := r.worker(t, nil)
	first, err := w.Intent(intent(16, 0))
	must(t, err)
	held, release := make(chan struct{}), make(chan struct{})
	var once sync.Once
	r.rec.atIntent(func(_ *engines.Worker, in engines.Intent) {
		if in.Lease.ID != first {
			once.Do(func() { close(held); <-release }) // the ring's goroutine stands still
		}
	})
	const steps = msg.MaxPendingSteps + 40
	id, err := w.Intent(intent(steps, 1, 2, 3, 4, 5, 6, 7))
	must(t, err)
	<-held
	for i := uint64(1); i <= steps; i++ {
		must(t, w.Step(msg.Step{Step: i, Reqs: []msg.StepReq{{Lease: id, End: uint32(i)}}}))
		w.SignalStep(i)
	}
	close(release)
	r.rec.until(t, "the end of the last step, or of the lease", func() bool {
		n := len(r.rec.progress)
		return n > 0 && r.rec.progress[n-1].Final || len(r.rec.cancels) > 0
	})
	if why, ok := r.rec.seen().cancels[id]; ok {
		t.Fatalf("the lease was ended: %s", why)
	}
}
