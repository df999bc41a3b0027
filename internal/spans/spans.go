// Package spans sends spans of requests to an OpenTelemetry collector (OTLP over HTTP), with
// OpenTelemetry's own library. It is the only package that imports that library.
//
// A span is made after it has ended, from the times that its owner has recorded anyway. Callers
// choose its id before, so that others can name it as their parent.
//
// Invariants: Put never waits, and makes no span. What a Recorder keeps is bounded; what it cannot
// keep or send is counted as dropped. A nil *Recorder records nothing: that is how tracing is off.
//
// Goroutines: Start starts one, Close ends and joins it.
package spans

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"

	"github.com/kvspray/kvspray/internal/redact"
)

// Bounds and times. Spans are small: a full queue takes a few megabytes.
const (
	// MaxTraceparent bounds what Parse reads, in bytes. Version 00 has 55.
	MaxTraceparent = 64
	maxQueued      = 2048 // Puts that wait for the goroutine
	maxWaiting     = 8192 // spans of these
	maxBatch       = 512  // spans of one call of the collector; those of one Put stay together
	maxAttribute   = 256  // bytes of a text
	flushEvery     = time.Second
	exportTimeout  = 5 * time.Second
	closeTimeout   = 2 * time.Second // of Close, whatever the collector does
	complainEvery  = time.Minute
	defaultPath    = "/v1/traces" // the collector's, of the specification
)

// Context names a span and its trace. The zero Context names none.
type Context = trace.SpanContext

// Attr is an attribute of a span.
type Attr = attribute.KeyValue

// Text is an attribute. Longer text is cut.
func Text(key, value string) Attr { return attribute.String(key, clip(value)) }

// clip makes a text that the protocol takes: with one that is no UTF-8 a whole call fails.
func clip(s string) string {
	if len(s) > maxAttribute {
		return strings.ToValidUTF8(s[:maxAttribute], "")
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}

// Number is an attribute.
func Number[T ~int | ~int64 | ~uint32 | ~uint64](key string, value T) Attr {
	return attribute.Int64(key, int64(min(uint64(value), math.MaxInt64)))
}

// Kind is what a span is to its caller.
type Kind = trace.SpanKind

// The kinds.
const (
	Internal = trace.SpanKindInternal
	Server   = trace.SpanKindServer // answers a request of another process
	Client   = trace.SpanKindClient // asks another process
)

// Span is one that has ended.
type Span struct {
	Name       string
	Kind       Kind
	Self       Context
	Parent     Context // the zero Context: Self is the root of its trace
	Start, End time.Time
	Attrs      []Attr
	Failed     string // the reason; empty: the span ended well
}

// Parse reads a W3C traceparent. False: it is malformed, or its trace is not sampled. Both mean
// that nothing is recorded.
func Parse(traceparent string) (Context, bool) {
	if traceparent == "" || len(traceparent) > MaxTraceparent {
		return Context{}, false
	}
	c := trace.SpanContextFromContext(propagation.TraceContext{}.Extract(context.Background(),
		propagation.MapCarrier{header: traceparent}))
	return c, c.IsValid() && c.IsSampled()
}

const header = "traceparent" // the propagator's key

// Format writes a W3C traceparent.
func Format(c Context) string {
	m := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(trace.ContextWithSpanContext(context.Background(), c), m)
	return m[header]
}

// NewRoot names a new span of a new trace.
func NewRoot() Context {
	var id trace.TraceID
	fill(id[:])
	return child(id)
}

// NewChild names a new span of parent's trace.
func NewChild(parent Context) Context { return child(parent.TraceID()) }

func child(id trace.TraceID) Context {
	var s trace.SpanID
	fill(s[:])
	return trace.NewSpanContext(trace.SpanContextConfig{TraceID: id, SpanID: s,
		TraceFlags: trace.FlagsSampled})
}

// fill writes random bytes that are not all zero: ids of zeros are invalid. Ids are unique, not
// secret.
func fill(b []byte) {
	for i := range b {
		b[i] = byte(rand.Uint32())
	}
	b[0] |= 1
}

// Options are for New.
type Options struct {
	Endpoint string // URL of the collector; empty: off
	Service  string // service.name; the standard variable OTEL_SERVICE_NAME has precedence
	Instance string // service.instance.id
	Version  string // service.version
	Log      *slog.Logger
	Exported func(spans int) // counts what the collector took; nil: not counted
	Dropped  func(spans int) // counts what it did not; nil: not counted
}

// Recorder sends spans. Nil records nothing.
type Recorder struct {
	opt      Options
	queue    chan put
	waiting  atomic.Int64 // spans in the queue
	sealed   atomic.Bool  // nothing takes from the queue any more
	stop     chan struct{}
	stopOnce sync.Once
	started  atomic.Bool
	stopped  atomic.Bool
	done     chan struct{} // closed when the goroutine has ended

	ctx    context.Context // of calls of the collector
	cancel context.CancelFunc

	// of the goroutine
	exporter *otlptrace.Exporter
	client   *http.Client
	tracer   trace.Tracer
	provider *sdk.TracerProvider
	ended    []sdk.ReadOnlySpan
	lost     int       // since the last complaint
	quiet    time.Time // until then no complaint is logged

	problem atomic.Pointer[string] // why the last spans were not taken; nil: they were
}

// Problem is why the collector takes no spans; empty: it does, or none were sent.
func (r *Recorder) Problem() string {
	if why := r.problem.Load(); why != nil {
		return *why
	}
	return ""
}

// put is the queue: at most that many spans wait.
type put struct {
	spans int
	make  func() []Span
}

// CheckEndpoint reports what is wrong with the URL of a collector, and what to do.
func CheckEndpoint(endpoint string) (problem, remedy string) {
	const example = "write for instance http://127.0.0.1:4318"
	u, err := url.Parse(endpoint)
	switch {
	case err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Hostname() == "":
		return "not a URL", example
	case u.Port() != "" && !isPort(u.Port()):
		return "has no port from 1 to 65535", example
	case u.User != nil:
		return "has a user or a password", "put credentials into the environment: " +
			"OTEL_EXPORTER_OTLP_HEADERS=authorization=..."
	case u.RawQuery != "" || u.Fragment != "":
		return "has a query or a fragment", example
	}
	return "", ""
}

func isPort(s string) bool {
	n, err := strconv.ParseUint(s, 10, 16)
	return err == nil && n > 0
}

// Redacted is an endpoint for messages: without a user and a password.
func Redacted(endpoint string) string { return redact.URL(endpoint) }

// New makes a Recorder; nil if no endpoint is set. Spans are sent from Start on. The collector need
// not answer.
func New(o Options) (*Recorder, error) {
	if o.Endpoint == "" {
		return nil, nil
	}
	if problem, remedy := CheckEndpoint(o.Endpoint); problem != "" {
		return nil, fmt.Errorf("spans: endpoint %q: %s; %s", Redacted(o.Endpoint), problem, remedy)
	}
	u, err := url.Parse(o.Endpoint)
	if err != nil {
		return nil, fmt.Errorf("spans: endpoint %q: %w", Redacted(o.Endpoint), err)
	}
	if strings.Trim(u.Path, "/") == "" {
		u.Path = defaultPath
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	r := &Recorder{opt: o, queue: make(chan put, maxQueued), stop: make(chan struct{}),
		done: make(chan struct{}), client: &http.Client{Timeout: exportTimeout,
			Transport: &http.Transport{Proxy: http.ProxyFromEnvironment,
				DialContext:         (&net.Dialer{Timeout: exportTimeout}).DialContext,
				MaxIdleConnsPerHost: 1, MaxConnsPerHost: 1}}}
	r.ctx, r.cancel = context.WithCancel(context.Background())
	// A call that fails is not repeated: the spans behind it would be dropped meanwhile.
	r.exporter, err = otlptracehttp.New(context.Background(),
		otlptracehttp.WithEndpointURL(u.String()), otlptracehttp.WithHTTPClient(r.client),
		otlptracehttp.WithTimeout(exportTimeout),
		otlptracehttp.WithRetry(otlptracehttp.RetryConfig{Enabled: false}))
	if err != nil {
		return nil, fmt.Errorf("spans: endpoint %q: %w", o.Endpoint, err)
	}
	// A wrong variable of the environment costs attributes only.
	about, err := resource.New(context.Background(), resource.WithAttributes(
		Text("service.name", o.Service), Text("service.instance.id", o.Instance),
		Text("service.version", o.Version)), resource.WithTelemetrySDK(), resource.WithFromEnv())
	if err != nil {
		o.Log.Warn("tracing: OTEL_RESOURCE_ATTRIBUTES is not understood", "err", err)
	}
	r.provider = sdk.NewTracerProvider(sdk.WithResource(about), sdk.WithSampler(sdk.AlwaysSample()),
		sdk.WithIDGenerator(givenIDs{}), sdk.WithSpanProcessor(collector{r}))
	r.tracer = r.provider.Tracer("github.com/kvspray/kvspray")
	return r, nil
}

// Start begins to send spans.
func (r *Recorder) Start() {
	if r != nil && r.started.CompareAndSwap(false, true) {
		go r.run()
	}
}

// On reports whether spans are recorded.
func (r *Recorder) On() bool { return r != nil }

// Put has make called on the Recorder's goroutine, and sends its spans. They are bounded;
// that number counts as dropped if there is no room.
func (r *Recorder) Put(spans int, make func() []Span) {
	if r == nil {
		return
	}
	if r.waiting.Add(int64(spans)) > maxWaiting || r.stopped.Load() {
		r.refuse(spans)
		return
	}
	select {
	case r.queue <- put{spans, make}:
	default:
		r.refuse(spans)
	}
	if r.sealed.Load() { // the goroutine may have ended before it
		r.drain()
	}
}

func (r *Recorder) refuse(spans int) {
	r.waiting.Add(-int64(spans))
	r.dropped(spans)
}

// next is what waits longest; false: nothing does.
func (r *Recorder) next() (put, bool) {
	select {
	case p := <-r.queue:
		r.waiting.Add(-int64(p.spans))
		return p, true
	default:
		return put{}, false
	}
}

// drain drops what waits.
func (r *Recorder) drain() {
	for p, ok := r.next(); ok; p, ok = r.next() {
		r.dropped(p.spans)
	}
}

// Close sends what waits, for at most closeTimeout, and ends the Recorder.
func (r *Recorder) Close() error {
	if r == nil {
		return nil
	}
	r.stopped.Store(true)
	r.stopOnce.Do(func() { close(r.stop) })
	if r.started.Load() {
		late := time.AfterFunc(closeTimeout, r.cancel)
		defer late.Stop()
		<-r.done
	} else {
		r.sealed.Store(true)
		r.drain()
	}
	r.cancel()
	return nil
}

func (r *Recorder) run() {
	defer close(r.done)
	tick := time.NewTicker(flushEvery)
	defer tick.Stop()
	for {
		select {
		case p := <-r.queue:
			r.waiting.Add(-int64(p.spans))
			r.make(p.make)
		case <-tick.C:
			r.flush()
		case <-r.stop:
			r.end()
			return
		}
	}
}

// end sends what waits, and drops what comes meanwhile.
func (r *Recorder) end() {
	for p, ok := r.next(); ok; p, ok = r.next() {
		r.make(p.make)
	}
	r.flush()
	r.sealed.Store(true)
	r.drain()
	// Both have nothing left to send.
	_ = r.provider.Shutdown(r.ctx)
	_ = r.exporter.Shutdown(r.ctx)
	r.client.CloseIdleConnections()
}

type selfKey struct{}

// make has the library make spans, which come back through collector, and sends a full batch.
func (r *Recorder) make(f func() []Span) {
	for _, s := range f() {
		ctx := context.WithValue(context.Background(), selfKey{}, s.Self)
		if s.Parent.IsValid() {
			ctx = trace.ContextWithRemoteSpanContext(ctx, s.Parent)
		}
		_, span := r.tracer.Start(ctx, s.Name, trace.WithTimestamp(s.Start), trace.WithSpanKind(s.Kind),
			trace.WithAttributes(s.Attrs...))
		if s.Failed != "" {
			span.SetStatus(codes.Error, clip(s.Failed))
		}
		if s.End.Before(s.Start) { // an end that was seen before its beginning
			s.End = s.Start
		}
		span.End(trace.WithTimestamp(s.End))
	}
	if len(r.ended) >= maxBatch {
		r.flush()
	}
}

// flush sends the spans that have come.
func (r *Recorder) flush() {
	n := len(r.ended)
	if n == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(r.ctx, exportTimeout)
	defer cancel()
	err := r.exporter.ExportSpans(ctx, r.ended)
	clear(r.ended)
	r.ended = r.ended[:0]
	if err == nil {
		r.problem.Store(nil)
		if r.opt.Exported != nil {
			r.opt.Exported(n)
		}
		return
	}
	why := Redacted(r.opt.Endpoint) + ": " + redact.URLs(err.Error())
	r.problem.Store(&why)
	r.dropped(n)
	r.lost += n
	if now := time.Now(); now.After(r.quiet) {
		r.opt.Log.Warn("tracing: the collector does not take spans", "endpoint", r.opt.Endpoint, "lost",
			r.lost, "err", redact.URLs(err.Error()),
			"remedy", "check that an OTLP collector listens there for HTTP")
		r.quiet, r.lost = now.Add(complainEvery), 0
	}
}

func (r *Recorder) dropped(spans int) {
	if r.opt.Dropped != nil {
		r.opt.Dropped(spans)
	}
}

// collector takes the library's spans as they end, on the Recorder's goroutine.
type collector struct{ r *Recorder }

// OnStart implements sdk.SpanProcessor.
func (collector) OnStart(context.Context, sdk.ReadWriteSpan) {}

// OnEnd implements sdk.SpanProcessor.
func (c collector) OnEnd(s sdk.ReadOnlySpan) { c.r.ended = append(c.r.ended, s) }

// Shutdown implements sdk.SpanProcessor.
func (collector) Shutdown(context.Context) error { return nil }

// ForceFlush implements sdk.SpanProcessor.
func (collector) ForceFlush(context.Context) error { return nil }

// givenIDs gives the library the ids that Span has.
type givenIDs struct{}

// NewIDs implements sdk.IDGenerator.
func (givenIDs) NewIDs(ctx context.Context) (trace.TraceID, trace.SpanID) {
	c, _ := ctx.Value(selfKey{}).(Context)
	return c.TraceID(), c.SpanID()
}

// NewSpanID implements sdk.IDGenerator.
func (givenIDs) NewSpanID(ctx context.Context, _ trace.TraceID) trace.SpanID {
	c, _ := ctx.Value(selfKey{}).(Context)
	return c.SpanID()
}
