package spans

import (
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/spans/spanstest"
	"github.com/kvspray/kvspray/internal/testutil"
)

const patience = time.Minute // of a test that is about to fail

const given = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

// A malformed traceparent, and one whose trace is not sampled, name nothing.
func TestParse(t *testing.T) {
	c, ok := Parse(given)
	if !ok || Format(c) != given || Format(NewChild(c))[:36] != given[:36] ||
		NewChild(c).SpanID() == c.SpanID() {
		t.Errorf("%v %v", c, ok)
	}
	for what, s := range map[string]string{
		"empty": "", "not sampled": given[:53] + "00", "short": given[:54],
		"upper case": strings.ToUpper(given), "no trace": "00-" + strings.Repeat("0", 32) + given[35:],
		"no span": given[:36] + strings.Repeat("0", 16) + "-01", "version": "ff" + given[2:],
		"long": given + strings.Repeat("-0", 64), "more": given + "-00", "bytes": "\xff\x00" + given[2:],
		"not hex": strings.Replace(given, "0af", "xyz", 1),
	} {
		if c, ok := Parse(s); ok {
			t.Errorf("%s: %q is taken as %v", what, s, c)
		}
	}
	if c, ok := Parse("cc-" + given[3:] + "-later"); !ok || Format(c) != given {
		t.Errorf("a later version: %v %v", c, ok)
	}
	if a, b := NewRoot(), NewRoot(); !a.IsValid() || a.TraceID() == b.TraceID() {
		t.Errorf("roots %v and %v", a, b)
	}
}

func FuzzParse(f *testing.F) {
	f.Add(given)
	f.Add("00-" + strings.Repeat("0", 52))
	f.Fuzz(func(t *testing.T, s string) {
		if c, ok := Parse(s); ok && (!c.IsValid() || len(Format(c)) != len(given)) {
			t.Errorf("%q: %v", s, c)
		}
	})
}

// counts is what a Recorder reports.
type counts struct{ exported, dropped atomic.Int64 }

func open(t *testing.T, endpoint string, log *slog.Logger) (*Recorder, *counts) {
	t.Helper()
	c := &counts{}
	r, err := New(Options{Endpoint: endpoint, Service: "s", Instance: "i", Version: "v", Log: log,
		Exported: func(n int) { c.exported.Add(int64(n)) },
		Dropped:  func(n int) { c.dropped.Add(int64(n)) }})
	if err != nil {
		t.Fatal(err)
	}
	r.Start()
	t.Cleanup(func() { _ = r.Close() })
	return r, c
}

// one makes a span, and a child of it.
func one(parent Context) func() []Span {
	at := time.Unix(1_700_000_000, 5)
	self := NewChild(parent)
	return func() []Span {
		return []Span{{Name: "a", Kind: Server, Self: self, Parent: parent, Start: at,
			End: at.Add(3 * time.Second),
			Attrs: []Attr{Text("long", strings.Repeat("é", maxAttribute)), Number("n", uint64(1<<63)),
				Text("bytes", "a\xffb")},
			Failed: "it broke\xff"},
			{Name: "b", Self: NewChild(parent), Parent: self, Start: at.Add(2), End: at.Add(1)}}
	}
}

// Spans come with the ids, times and attributes that they were given.
func TestExport(t *testing.T) {
	t.Setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment=test")
	c := spanstest.New(t)
	r, n := open(t, c.URL, nil)
	parent, _ := Parse(given)
	r.Put(2, one(parent))
	testutil.Eventually(t, patience, "the spans come", func() bool { return len(c.Spans()) == 2 })
	a, b := c.Named("a")[0], c.Named("b")[0]
	if a.Service != "s" || a.Kind != "server" || a.Trace != given[3:35] || a.Parent != given[36:52] ||
		a.Failed != "error: it broke\uFFFD" || a.Text["bytes"] != "a\uFFFDb" ||
		a.End.Sub(a.Start) != 3*time.Second ||
		a.Start.UnixNano() != 1_700_000_000_000_000_005 || a.Number["n"] != 1<<63-1 ||
		a.Text["long"] != strings.Repeat("é", maxAttribute/2) {
		t.Errorf("%+v", a)
	}
	if b.Trace != a.Trace || b.Parent != a.ID || b.ID == a.ID || b.End.Before(b.Start) ||
		b.Failed != "" {
		t.Errorf("%+v, child of %s", b, a.ID)
	}
	root := NewRoot()
	r.Put(1, func() []Span {
		return []Span{{Name: "root", Self: root, Start: time.Now(), End: time.Now()}}
	})
	if err := r.Close(); err != nil { // it sends what waits
		t.Fatal(err)
	}
	if all := c.Named("root"); len(all) != 1 || all[0].Parent != "" ||
		all[0].Trace != root.TraceID().String() || all[0].ID != root.SpanID().String() {
		t.Errorf("%+v: want %v", all, root)
	}
	if n.exported.Load() != 3 || n.dropped.Load() != 0 {
		t.Errorf("%d exported, %d dropped", n.exported.Load(), n.dropped.Load())
	}
	r.Put(2, one(parent))
	if n.dropped.Load() != 2 {
		t.Errorf("%d dropped after the end", n.dropped.Load())
	}
}

// While the collector refuses spans, and while none listens, they are counted, and the log has one
// line.
func TestCollectorDown(t *testing.T) {
	c := spanstest.New(t)
	l, err := net.Listen("tcp", net.JoinHostPort(testutil.Loopback(), "0"))
	if err != nil {
		t.Fatal(err)
	}
	unreachable := "http://" + l.Addr().String()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	c.Fail(true)
	for what, endpoint := range map[string]string{"refuses": c.URL, "is away": unreachable} {
		var log testutil.Log
		r, n := open(t, endpoint, slog.New(slog.NewTextHandler(&log, nil)))
		parent, _ := Parse(given)
		for want := int64(2); want <= 6; want += 2 {
			r.Put(2, one(parent))
			testutil.Eventually(t, patience, "the loss is counted",
				func() bool { return n.dropped.Load() == want })
		}
		if lines := strings.Count(log.String(), "\n"); lines != 1 ||
			!strings.Contains(log.String(), "endpoint="+endpoint) ||
			!strings.Contains(log.String(), "remedy=") {
			t.Errorf("%s: %d lines: %s", what, lines, log.String())
		}
		if !strings.HasPrefix(r.Problem(), endpoint+": ") {
			t.Errorf("%s: the problem is %q", what, r.Problem())
		}
		if n.exported.Load() != 0 {
			t.Errorf("%s: %d are counted as exported", what, n.exported.Load())
		}
	}
	r, n := open(t, c.URL, nil)
	r.Put(2, one(NewRoot()))
	testutil.Eventually(t, patience, "there is a problem", func() bool { return r.Problem() != "" })
	c.Fail(false)
	r.Put(2, one(NewRoot()))
	testutil.Eventually(t, patience, "the spans come", func() bool { return n.exported.Load() == 2 })
	if r.Problem() != "" {
		t.Errorf("the problem is not over: %s", r.Problem())
	}
}

// A collector that does not answer delays Close by less than the timeout of one request, so Close
// makes no second request.
func TestCloseIsBounded(t *testing.T) {
	hold := make(chan struct{})
	var requests atomic.Int64
	srv := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		requests.Add(1)
		<-hold
	}))
	defer srv.Close()
	defer close(hold)
	r, n := open(t, srv.URL, nil)
	for range 3 * maxBatch {
		r.Put(2, one(NewRoot()))
	}
	testutil.Eventually(t, patience, "a request", func() bool { return requests.Load() > 0 })
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	if n := requests.Load(); n != 1 {
		t.Errorf("Close waited for %d requests", n)
	}
	if n.exported.Load() != 0 || n.dropped.Load() != 6*maxBatch {
		t.Errorf("%d exported, %d dropped", n.exported.Load(), n.dropped.Load())
	}
}

// Put does not wait, whatever the goroutine does: what has no room is counted.
func TestQueueIsBounded(t *testing.T) {
	c := spanstest.New(t)
	r, n := open(t, c.URL, nil)
	in, out := make(chan struct{}), make(chan struct{})
	r.Put(0, func() []Span { close(in); <-out; return nil })
	<-in
	for range maxQueued + 3 {
		r.Put(2, one(NewRoot()))
	}
	if n.dropped.Load() != 6 {
		t.Errorf("%d spans are dropped: want 6", n.dropped.Load())
	}
	big := func() []Span { t.Error("spans without room are made"); return nil }
	r.Put(maxWaiting-2*maxQueued+1, big)
	if n.dropped.Load() != 6+maxWaiting-2*maxQueued+1 {
		t.Errorf("%d spans are dropped: the queue is bounded by spans, too", n.dropped.Load())
	}
	close(out)
	testutil.Eventually(t, patience, "the others come",
		func() bool { return n.exported.Load() == 2*maxQueued })
	if calls := c.Calls(); calls < 2*maxQueued/(maxBatch+1) {
		t.Errorf("%d calls: too many spans in one", calls)
	}
}

// Whatever happens around the end, each span is sent or counted.
func TestPutsAtTheEndAreCounted(t *testing.T) {
	c := spanstest.New(t)
	for _, run := range []bool{true, false} {
		n := &counts{}
		r, err := New(Options{Endpoint: c.URL, Exported: func(k int) { n.exported.Add(int64(k)) },
			Dropped: func(k int) { n.dropped.Add(int64(k)) }})
		if err != nil {
			t.Fatal(err)
		}
		if run {
			r.Start()
		}
		const each, all = 500, 4
		var wg sync.WaitGroup
		for range all {
			wg.Go(func() {
				for range each {
					r.Put(2, one(NewRoot()))
				}
			})
		}
		if err := r.Close(); err != nil {
			t.Fatal(err)
		}
		wg.Wait()
		if got := n.exported.Load() + n.dropped.Load(); got != 2*each*all || r.waiting.Load() != 0 {
			t.Errorf("%d spans of %d, %d wait", got, 2*each*all, r.waiting.Load())
		}
	}
}

// Off is nil, and costs nothing.
func TestOff(t *testing.T) {
	r, err := New(Options{})
	if r != nil || err != nil {
		t.Fatal(r, err)
	}
	f := func() []Span { t.Error("spans are made"); return nil }
	if n := testing.AllocsPerRun(1000, func() { r.Put(1, f) }); n != 0 {
		t.Errorf("Put allocates %v times", n)
	}
	r.Start()
	if r.On() || r.Close() != nil {
		t.Error("a nil Recorder is on")
	}
}

// Wrong URLs are refused with the reason and a remedy.
func TestEndpoint(t *testing.T) {
	for url, want := range map[string]string{"a:1": "not a URL", "grpc://a": "not a URL",
		"http://": "not a URL", "http://u:p@a": "OTEL_EXPORTER_OTLP_HEADERS", "http://a?x": "query",
		"%": "not a URL"} {
		if r, err := New(Options{Endpoint: url}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, %v", url, r, err)
		}
	}
}

// An endpoint that is refused is named without its password.
func TestEndpoints(t *testing.T) {
	for endpoint, want := range map[string]string{"bad": "not a URL", "http://:4318": "not a URL",
		"grpc://h:1": "not a URL", "http://h:99999": "has no port", "http://h:0": "has no port",
		"http://u:secret@h:1": "has a user", "http://u:secret@h:x": "not a URL",
		"http://h:1/?a=b": "has a query"} {
		_, err := New(Options{Endpoint: endpoint})
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: %v, want %q", endpoint, err, want)
		}
	}
	if problem, _ := CheckEndpoint("https://h/v1/traces"); problem != "" {
		t.Error(problem)
	}
}
