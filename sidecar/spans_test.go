package sidecar

import (
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvspray/kvspray/connector/connectortest"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/spans/spanstest"
)

const (
	traceID       = "0af7651916cd43dd8448eb211c80319c"
	prefillSpan   = "aaaaaaaaaaaaaaaa"
	decodeSpan    = "dddddddddddddddd"
	prefillParent = "00-" + traceID + "-" + prefillSpan + "-01"
	decodeParent  = "00-" + traceID + "-" + decodeSpan + "-01"
)

// moveTraced moves one prompt with these traceparents. The decode's scheduler asks for admission
// first.
func moveTraced(t *testing.T, p, d *running, prefill, decode string) {
	t.Helper()
	pe, de := newEngine(t, p, testShape), newEngine(t, d, testShape)
	sched, err := connectortest.DialScheduler(t.Context(), connectortest.SchedulerConfig{
		Socket: d.cfg.Engine.Socket})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = sched.Close() }()
	x := newPrompt(tokens)
	n := blocksFor(tokens, 16)
	rng := newRand(1)
	admitted := make(chan error, 1)
	go func() {
		a, err := sched.Await(t.Context(), x.xfer, x.hash, p.Endpoint(), tokens, patience)
		if err == nil && a.State != "admitted" {
			t.Errorf("the answer is %s: %s", a.State, a.Message)
		}
		admitted <- err
	}()
	src, err := pe.Intent(msg.Intent{Xfer: x.xfer, Hash: x.hash, Tokens: tokens, Fanout: 1,
		Blocks: [][]uint32{table(rng, 256, n)}, Steps: []msg.PendingStep{{Step: 1, End: tokens}},
		DeadlineMS: deadlineMS, Req: "req-p", Traceparent: prefill})
	if err != nil {
		t.Fatal(err)
	}
	if err := <-admitted; err != nil {
		t.Fatal(err)
	}
	dst, err := de.Expect(msg.Expect{Xfer: x.xfer, Hash: x.hash, Tokens: tokens, Peer: p.Endpoint(),
		Skip: []uint32{0}, Blocks: [][]uint32{table(rng, 256, n)}, DeadlineMS: deadlineMS,
		MatchTimeoutMS: matchMS, Req: "req-d", Traceparent: decode})
	if err != nil {
		t.Fatal(err)
	}
	bound(t, d)
	for l := range testShape.Layers {
		pe.SignalLayer(l, 1)
	}
	pe.SignalStep(1)
	if c := de.ok(dst); c.Received.Bytes == 0 {
		t.Error("nothing was moved")
	}
	pe.ok(src)
}

// traced runs two nodes, of which those with a collector export spans, over two rails.
func traced(t *testing.T, source, destination string) (p, d *running) {
	t.Helper()
	with := func(endpoint string) func(*config.Config) {
		return func(c *config.Config) {
			c.Transports.Order = []string{"tcp"}
			c.Transports.TCP.Rails = []config.Rail{{Name: "r0", Listen: "127.0.0.1:0"},
				{Name: "r1", Listen: "127.0.0.1:0"}}
			c.Trace.OTLP = endpoint
		}
	}
	return start(t, with(source)), start(t, with(destination))
}

// The spans of one transfer through two sidecars are one trace: those of the receiver below the
// decode's span, those of the sender below the receiver's and the prefill's.
func TestSpansOfATransfer(t *testing.T) {
	col := spanstest.New(t)
	p, d := traced(t, col.URL, col.URL)
	began := time.Now()
	moveTraced(t, p, d, prefillParent, decodeParent)
	// On a busy machine a slice may be retransmitted, and the copies overlap.
	again := value(t, p, "kvspray_rail_hedges_total") +
		value(t, p, "kvspray_rail_retransmissions_total")
	for _, r := range []*running{p, d} { // they export what waits
		if err := r.stop(); err != nil {
			t.Fatal(err)
		}
	}
	took := time.Since(began)
	for _, r := range []*running{p, d} { // the line of a transfer leads to its spans
		b, err := os.ReadFile(r.cfg.Trace.Transfers)
		if err != nil || !strings.Contains(string(b), `"trace":"`+traceID+`"`) {
			t.Errorf("%v: no trace in %s", err, b)
		}
	}
	one := func(name, parent string) (s spanstest.Span) {
		t.Helper()
		var found []spanstest.Span
		for _, s := range col.Named(name) {
			if s.Parent == parent {
				found = append(found, s)
			}
		}
		if len(found) != 1 {
			t.Fatalf("%d spans %s below %s: want one; all: %+v", len(found), name, parent, col.Spans())
		}
		return found[0]
	}
	offer, receive := one("kvspray.offer", prefillSpan), one("kvspray.receive", decodeSpan)
	send := one("kvspray.send", receive.ID)
	admission, grant := one("kvspray.admission", receive.ID), one("kvspray.grant", receive.ID)
	arrive, fence := one("kvspray.arrive", receive.ID), one("kvspray.fence", receive.ID)
	commit := one("kvspray.commit", receive.ID)
	queue, acked := one("kvspray.queue", send.ID), one("kvspray.commit", send.ID)
	wire := slices.DeleteFunc(col.Named("kvspray.wire"),
		func(s spanstest.Span) bool { return s.Parent != send.ID })

	const bytes = int64(tokens) * 1024 * 4
	var carried, slices int64
	rails := map[string]bool{}
	for _, w := range wire {
		carried += w.Number["kvspray.bytes"]
		slices += w.Number["kvspray.slices"]
		pair := w.Text["kvspray.rail"] + ">" + w.Text["kvspray.rail.remote"]
		if rails[pair] || w.Text["kvspray.transport"] != "tcp" {
			t.Errorf("wire over %s %s, twice or wrong: %+v", w.Text["kvspray.transport"], pair, w)
		}
		rails[pair] = true
	}
	if carried != bytes && again == 0 || carried <= 0 || slices == 0 || len(wire) == 0 {
		t.Errorf("%d wire spans carried %d bytes in %d slices: want %d", len(wire), carried, slices,
			bytes)
	}
	for _, s := range []spanstest.Span{offer, receive, send, arrive} {
		if s.Number["kvspray.bytes"] != bytes {
			t.Errorf("%s: %d bytes, want %d", s.Name, s.Number["kvspray.bytes"], bytes)
		}
	}
	all := col.Spans()
	ids := map[string]bool{}
	for _, s := range all {
		req := "req-p"
		if slicesOf(s.Name) {
			req = "req-d"
		}
		if s.Name == "kvspray.commit" {
			req = map[string]string{receive.ID: "req-d", send.ID: "req-p"}[s.Parent]
		}
		if s.Trace != traceID || ids[s.ID] || s.Service != "kvspray-sidecar" || s.Failed != "" ||
			s.Text["kvspray.request"] != req || s.Text["kvspray.transfer"] == "" {
			t.Errorf("%+v: want request %s", s, req)
		}
		ids[s.ID] = true
		if s.Start.Before(began) || s.End.Before(s.Start) || s.End.Sub(began) > took {
			t.Errorf("%s: %v to %v, in a test from %v of %v", s.Name, s.Start, s.End, began, took)
		}
	}
	if want := 10 + len(wire); len(all) != want {
		t.Errorf("%d spans, want %d: %+v", len(all), want, all)
	}
	// Both sidecars run on one clock here.
	order := []struct {
		what string
		at   time.Time
	}{{"offer begins", offer.Start}, {"send begins", send.Start}, {"queue ends", queue.End},
		{"arrive ends", arrive.End}, {"fence ends", fence.End}, {"commit ends", commit.End}}
	for i := 1; i < len(order); i++ {
		if order[i].at.Before(order[i-1].at) {
			t.Errorf("%s before %s", order[i].what, order[i-1].what)
		}
	}
	for _, x := range []struct {
		what string
		a, b time.Time
	}{{"fence begins", arrive.End, fence.Start}, {"commit begins", fence.End, commit.Start},
		{"receive ends", commit.End, receive.End}, {"receive begins", admission.Start, receive.Start},
		{"queue begins", send.Start, queue.Start}, {"send ends", acked.End, send.End}} {
		if !x.a.Equal(x.b) {
			t.Errorf("%s at %v: want %v", x.what, x.b, x.a)
		}
	}
	if grant.Start.Before(admission.End) || !grant.End.Equal(arrive.Start) {
		t.Errorf("the grant is from %v to %v, the admission ends at %v, the arrival begins at %v",
			grant.Start, grant.End, admission.End, arrive.Start)
	}
	first := wire[0].Start
	for _, w := range wire {
		if w.Start.Before(first) {
			first = w.Start
		}
	}
	if !queue.End.Equal(first) {
		t.Errorf("the queue ends at %v, the first slice is sent at %v", queue.End, first)
	}
}

// slicesOf reports whether a span of this name is always the receiver's.
func slicesOf(name string) bool {
	return slices.Contains([]string{"kvspray.receive", "kvspray.admission", "kvspray.grant",
		"kvspray.arrive", "kvspray.fence"}, name)
}

// A transfer is moved, and has no spans, if no request asks for them or the traceparent is
// malformed.
func TestTransfersWithoutSpans(t *testing.T) {
	col := spanstest.New(t)
	p, d := traced(t, col.URL, col.URL)
	unsampled := strings.TrimSuffix(decodeParent, "01") + "00"
	for _, bad := range []string{"", "x", unsampled, strings.Repeat("0", 55),
		strings.Repeat("a", msg.MaxNameBytes), "00-" + strings.Repeat("ÿ", 20)} {
		moveTraced(t, p, d, bad, bad)
	}
	for _, r := range []*running{p, d} {
		if err := r.stop(); err != nil {
			t.Fatal(err)
		}
	}
	if all := col.Spans(); len(all) != 0 {
		t.Errorf("there are spans: %+v", all)
	}
}

// A sidecar without a collector passes the traceparent on: the sender's spans are below the
// decode's. A peer that names none leaves the prefill's span.
func TestOneSideExports(t *testing.T) {
	for decode, what := range map[string]string{decodeParent: decodeSpan, "": "offer",
		"junk": "offer", decodeParent[:53] + "zz": "offer", "\xff\xfe": "offer"} {
		col := spanstest.New(t)
		p, d := traced(t, col.URL, "")
		moveTraced(t, p, d, prefillParent, decode)
		if err := p.stop(); err != nil {
			t.Fatal(err)
		}
		offer, send := col.Named("kvspray.offer"), col.Named("kvspray.send")
		if len(offer) != 1 || len(send) != 1 || len(col.Named("kvspray.receive")) != 0 {
			t.Fatalf("%+v", col.Spans())
		}
		want := what
		if what == "offer" {
			want = offer[0].ID
		}
		if send[0].Parent != want || send[0].Trace != traceID {
			t.Errorf("the parent of send is %s, want %s (%s)", send[0].Parent, want, what)
		}
	}
}

// Transfers go on while the collector is away, and their spans are counted.
func TestSpansWithoutCollector(t *testing.T) {
	col := spanstest.New(t)
	p, d := traced(t, col.URL, col.URL)
	col.Close()
	moveTraced(t, p, d, prefillParent, decodeParent)
	for _, r := range []*running{p, d} {
		const name = "kvspray_sidecar_spans_total"
		until(t, func() bool { return value(t, r, name, "outcome", "dropped") > 0 })
		if n := value(t, r, name, "outcome", "exported"); n != 0 {
			t.Errorf("%v spans are counted as exported", n)
		}
	}
}

// A transfer that fails has a span with the reason.
func TestSpansOfAFailure(t *testing.T) {
	col := spanstest.New(t)
	p, d := traced(t, "", col.URL)
	de := newEngine(t, d, testShape)
	x := newPrompt(tokens)
	dst, err := de.Expect(msg.Expect{Xfer: x.xfer, Hash: x.hash, Tokens: tokens, Peer: p.Endpoint(),
		Skip: []uint32{0}, Blocks: [][]uint32{table(newRand(1), 256, blocksFor(tokens, 16))},
		DeadlineMS: 500, MatchTimeoutMS: 200, Traceparent: decodeParent})
	if err != nil {
		t.Fatal(err)
	}
	if c := de.wait(dst); c.Status != engines.StatusExpired {
		t.Fatalf("status %d", c.Status)
	}
	if err := d.stop(); err != nil {
		t.Fatal(err)
	}
	all := col.Spans()
	if len(all) != 1 || all[0].Name != "kvspray.receive" || all[0].Parent != decodeSpan ||
		all[0].Text["kvspray.outcome"] != "expired" || !strings.Contains(all[0].Failed, "no source") {
		t.Errorf("%+v", all)
	}
}

// Off, tracing costs neither memory nor a lock: a lease gets no span, and its end makes none.
func TestTracingOffIsFree(t *testing.T) {
	var off *tracing
	e := engineEvents{tracing: off}
	a := &exec.Action{Trace: &exec.Trace{}}
	c := &engines.Completion{Received: true}
	in := engines.Intent{Trace: engines.Trace{Parent: prefillParent}}
	if n := testing.AllocsPerRun(1000, func() {
		if e.tracing != nil {
			in.Trace = e.tracing.placed(in.Trace)
		}
		off.ended(a, c, "tcp")
	}); n != 0 {
		t.Errorf("%v allocations for a lease", n)
	}
	if newTracing("", nil) != nil {
		t.Error("tracing is on without a collector")
	}
}
