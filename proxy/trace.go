package proxy

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"time"

	"github.com/kvspray/kvspray/internal/spans"
)

const traceHeader = "Traceparent"

// jobTrace is a request's place in a distributed trace. Nil: it has none.
type jobTrace struct {
	rec *spans.Recorder // nil: no spans are exported, and the client's is passed on
	// what P and D get; without a Recorder both are the client's span
	self, parent    spans.Context
	prefill, decode hop
}

// hop is what an engine was asked. The goroutine that asks P owns P's until it is joined.
type hop struct {
	at       spans.Context
	url      string
	from, to time.Time
	tries    int
	failed   string
}

// trace prepares the export of spans.
func (p *Proxy) trace(cfg *Config) (err error) {
	if cfg.TraceShare < 0 || cfg.TraceShare > 1 {
		return fmt.Errorf("proxy: trace_share %v is not above 0 and at most 1; write for instance 0.1",
			cfg.TraceShare)
	}
	p.share = cmp.Or(cfg.TraceShare, 1)
	if cfg.OTLP == "" {
		return nil
	}
	if problem, remedy := spans.CheckEndpoint(cfg.OTLP); problem != "" {
		return fmt.Errorf("proxy: otlp %q: %s; %s", spans.Redacted(cfg.OTLP), problem, remedy)
	}
	host, _ := os.Hostname() // without one spans have no instance
	p.spans, err = spans.New(spans.Options{Endpoint: cfg.OTLP, Service: "kvspray-router",
		Instance: host, Version: cfg.Version, Log: p.log,
		Exported: func(n int) { p.met.spans.WithLabelValues("exported").Add(float64(n)) },
		Dropped:  func(n int) { p.met.spans.WithLabelValues("dropped").Add(float64(n)) }})
	return err
}

// traceOf places a request: below the client's span, or at the root of a new trace. A client that
// does not want its trace to be sampled is obeyed, also by the engines: they get what it has sent.
func (p *Proxy) traceOf(h http.Header) *jobTrace {
	given := h.Get(traceHeader)
	if p.spans == nil && given == "" {
		return nil
	}
	parent, sampled := spans.Parse(given)
	switch {
	case p.spans == nil && !parent.IsValid():
		return nil
	case p.spans == nil, parent.IsValid() && !sampled:
		return &jobTrace{prefill: hop{at: parent}, decode: hop{at: parent}}
	case !sampled && p.share < 1 && rand.Float64() >= p.share:
		return nil
	}
	t := &jobTrace{rec: p.spans, parent: parent, self: spans.NewRoot()}
	if sampled {
		t.self = spans.NewChild(parent)
	}
	t.prefill.at, t.decode.at = spans.NewChild(t.self), spans.NewChild(t.self)
	return t
}

// hop is P's or D's; nil: the request has no trace.
func (t *jobTrace) hop(decode bool) *hop {
	switch {
	case t == nil:
		return nil
	case decode:
		return &t.decode
	default:
		return &t.prefill
	}
}

// traceparent is what an engine gets; empty: nothing.
func (h *hop) traceparent() string {
	if h == nil {
		return ""
	}
	return spans.Format(h.at)
}

// begin notes that an engine is asked. Several decode engines may be tried: the last one counts.
func (h *hop) begin(b *backend) {
	if h == nil {
		return
	}
	if h.tries++; h.tries == 1 {
		h.from = time.Now()
	}
	h.url, h.failed = b.url.String(), ""
}

// end notes that an engine has answered, or will not.
func (h *hop) end(err error) {
	if h == nil {
		return
	}
	h.to, h.failed = time.Now(), classOf(err)
}

// classOf is an error without its text, which may have parts of a prompt or a password.
func classOf(err error) string {
	s := (*statusError)(nil)
	switch {
	case err == nil:
		return ""
	case errors.As(err, &s) && s.sign == signAlive:
		return fmt.Sprint("refused: ", s.status)
	case errors.As(err, &s):
		return fmt.Sprint("failed: ", s.status)
	case notReached(err):
		return "not reached"
	case signOfError(err) == signLate:
		return "no answer in time"
	}
	return "no whole answer"
}

// clock places times by the wall clock as it is now: it may have been set between them.
type clock struct{ now time.Time }

func (c clock) at(t time.Time) time.Time {
	if t.IsZero() {
		return t
	}
	return c.now.Round(0).Add(t.Sub(c.now))
}

// span makes the span of a hop.
func (h *hop) span(t *jobTrace, c clock, name, id string, more ...spans.Attr) spans.Span {
	return spans.Span{Name: name, Kind: spans.Client, Self: h.at, Parent: t.self, Start: c.at(h.from),
		End: c.at(h.to), Failed: h.failed, Attrs: append([]spans.Attr{spans.Text("kvspray.request", id),
			spans.Text("url.full", h.url), spans.Number("kvspray.tries", h.tries)}, more...)}
}

// traced exports the spans of a request that has ended.
func (j *job) traced() {
	t := j.trace
	if t == nil || t.rec == nil {
		return
	}
	now := time.Now()
	failed := ""
	switch {
	case j.broken:
		failed = "the decode engine ended its answer early"
	case j.status >= http.StatusInternalServerError:
		failed = http.StatusText(j.status)
	}
	attrs := []spans.Attr{spans.Text("kvspray.request", j.id), spans.Text("http.route",
		j.req.kind.path()), spans.Text("kvspray.mode", string(j.mode))}
	if j.status > 0 { // the client waited for it
		attrs = append(attrs, spans.Number("http.response.status_code", j.status))
	}
	if j.alone != "" {
		attrs = append(attrs, spans.Text("kvspray.local_prefill", j.alone))
	}
	first, id, start := j.firstAt, j.id, j.start
	maxSpans := 1 + min(t.prefill.tries, 1) + min(t.decode.tries, 1)
	t.rec.Put(maxSpans, func() []spans.Span {
		c := clock{now}
		out := []spans.Span{{Name: "kvspray.request", Kind: spans.Server, Self: t.self, Parent: t.parent,
			Start: c.at(start), End: c.at(now), Failed: failed, Attrs: attrs}}
		if t.prefill.tries > 0 {
			out = append(out, t.prefill.span(t, c, "kvspray.prefill", id))
		}
		if t.decode.tries > 0 {
			var more []spans.Attr
			if !first.IsZero() {
				more = append(more, spans.Number("kvspray.first_byte_us",
					max(first.Sub(t.decode.from).Microseconds(), 0)))
			}
			out = append(out, t.decode.span(t, c, "kvspray.decode", id, more...))
		}
		return out
	})
}

// withOwn adds a traceparent and hints to the kvspray key of P's parameters. Others stay as they
// are.
func withOwn(params json.RawMessage, traceparent string, h hints) json.RawMessage {
	var all, own map[string]json.RawMessage
	if traceparent == "" && h.pin == 0 || json.Unmarshal(params, &all) != nil ||
		json.Unmarshal(all["kvspray"], &own) != nil || own == nil {
		return params
	}
	if traceparent != "" {
		own["traceparent"] = marshal(traceparent)
	}
	if h.pin > 0 {
		own["pin"], own["ttl"] = json.RawMessage("true"), marshal(h.pin.Seconds())
	}
	all["kvspray"] = encode(own)
	return encode(all)
}
