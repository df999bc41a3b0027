// Package spanstest is a collector of spans for tests: OTLP over HTTP with protobuf, read with the
// protocol's own types.
package spanstest

import (
	"encoding/hex"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	common "go.opentelemetry.io/proto/otlp/common/v1"
	trace "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"
)

// Span is one that came.
type Span struct {
	Service, Name, Kind string
	Trace, ID, Parent   string // hex; Parent is empty at the root
	Start, End          time.Time
	Text                map[string]string
	Number              map[string]int64
	Failed              string
}

// Collector is a server that keeps all spans.
type Collector struct {
	*httptest.Server

	mu    sync.Mutex // protects all below
	all   []Span
	calls int
	fail  bool
}

// New starts a collector that ends with the test.
func New(tb testing.TB) *Collector {
	tb.Helper()
	c := &Collector{}
	c.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := c.take(w, r); err != nil {
			tb.Errorf("collector: %s %s: %v", r.Method, r.URL, err)
			w.WriteHeader(http.StatusBadRequest)
		}
	}))
	tb.Cleanup(c.Close)
	return c
}

// Fail has the collector refuse spans with 503.
func (c *Collector) Fail(on bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.fail = on
}

func (c *Collector) take(w http.ResponseWriter, r *http.Request) error {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return err
	}
	var m collector.ExportTraceServiceRequest
	if err := proto.Unmarshal(body, &m); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls++
	if c.fail {
		w.WriteHeader(http.StatusServiceUnavailable)
		return nil
	}
	if r.URL.Path != "/v1/traces" {
		w.WriteHeader(http.StatusNotFound)
		return nil
	}
	for _, rs := range m.ResourceSpans {
		about, _ := attributes(rs.Resource.GetAttributes())
		for _, ss := range rs.ScopeSpans {
			for _, s := range ss.Spans {
				text, number := attributes(s.Attributes)
				c.all = append(c.all, Span{Service: about["service.name"], Name: s.Name,
					Kind:  strings.ToLower(strings.TrimPrefix(s.Kind.String(), "SPAN_KIND_")),
					Trace: hex.EncodeToString(s.TraceId), ID: hex.EncodeToString(s.SpanId),
					Parent: hex.EncodeToString(s.ParentSpanId),
					Start:  time.Unix(0, int64(s.StartTimeUnixNano)), End: time.Unix(0, int64(s.EndTimeUnixNano)),
					Text: text, Number: number, Failed: failure(s.Status)})
			}
		}
	}
	return nil
}

func failure(s *trace.Status) string {
	if s.GetCode() != trace.Status_STATUS_CODE_ERROR {
		return ""
	}
	return "error: " + s.GetMessage()
}

func attributes(all []*common.KeyValue) (text map[string]string, number map[string]int64) {
	text, number = map[string]string{}, map[string]int64{}
	for _, a := range all {
		switch v := a.Value.GetValue().(type) {
		case *common.AnyValue_StringValue:
			text[a.Key] = v.StringValue
		case *common.AnyValue_IntValue:
			number[a.Key] = v.IntValue
		}
	}
	return text, number
}

// Calls counts the calls that came, also those that were refused.
func (c *Collector) Calls() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.calls
}

// Spans are those that came so far.
func (c *Collector) Spans() []Span {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]Span(nil), c.all...)
}

// Named are those with a name.
func (c *Collector) Named(name string) (out []Span) {
	for _, s := range c.Spans() {
		if s.Name == name {
			out = append(out, s)
		}
	}
	return out
}
