package proxy

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/kvspray/kvspray/internal/nodeapi"
	"github.com/kvspray/kvspray/proxy/internal/place"
)

const (
	requestIDHeader = "X-Request-Id"
	maxRequestID    = 128 // bytes
	prefillTries    = 4   // prefill engines tried for one request
	decodeTries     = 16  // the same of decode engines
	// Of these, those that may have received the request before they failed: it may be the cause.
	receivedTries = 3
	ownFaultPause = 100 * time.Millisecond // before a try after a fault of the router's own host
	ownFaultLimit = 10 * time.Second       // such tries of one request
)

// serve answers one request of a client.
func (p *Proxy) serve(w http.ResponseWriter, r *http.Request, k kind) {
	if _, err := url.Parse(r.URL.RequestURI()); err != nil {
		p.refuse(w, http.StatusBadRequest, codeInvalidTarget, err.Error())
		return
	}
	body, ok := p.readBody(w, r, k)
	defer p.bodies.give(k.held() * int64(cap(body)))
	if !ok || !p.enter(w) {
		return
	}
	defer p.leave()
	req, err := parseRequest(k, body)
	if err != nil {
		p.refuse(w, http.StatusBadRequest, codeInvalidBody, err.Error())
		return
	}
	j := &job{p: p, w: w, in: r, req: req, id: requestID(r.Header.Get(requestIDHeader)),
		start: time.Now(), mode: p.mode, tried: map[*backend]bool{}, asks: k}
	if k == kindPassed {
		j.mode = modePassed
	} else {
		j.trace = p.traceOf(r.Header)
		var results []string
		req.hints, results = hintsOf(req.fields, p.maxPin)
		for _, result := range results {
			p.met.hints.WithLabelValues(result).Inc()
		}
	}
	if p.follows && (k == kindCompletion || k == kindChat) && req.streamed() {
		j.follow = req.follow(&p.bodies)
		defer j.follow.end()
	}
	w.Header().Set(requestIDHeader, j.id)
	j.run(r.Context())
	j.release()
	j.placed()
	j.traced()
	j.routedEnd()
	p.met.requests.WithLabelValues(string(j.mode), statusClass(j.status)).Inc()
	if j.broken {
		// The status was sent; only a broken connection shows the client that the answer is
		// incomplete.
		abort(w, r)
	}
}

// requestID keeps a client's id if it is valid in a header and a log line.
func requestID(given string) string {
	ok := given != "" && len(given) <= maxRequestID
	for _, c := range []byte(given) {
		if c <= ' ' || c > '~' {
			ok = false
		}
	}
	if ok {
		return given
	}
	return randomID()
}

func randomID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}

// job is one request in flight.
type job struct {
	p      *Proxy
	w      http.ResponseWriter
	in     *http.Request
	req    *request
	id     string
	start  time.Time
	mode   Mode
	status int
	broken bool // D's answer ended early, after its first byte

	decision   *place.Decision // of the policy; nil: none
	prefer     *backend        // D of the decision, for the first try
	decided    *backend        // P of it; nil: none
	source     *backend        // P, from which D gets blocks; nil: none
	firstAfter time.Duration   // until D's first byte

	// D.
	tried    map[*backend]bool
	received int             // of these, those that may have got the request
	own      []*backend      // of these, those that a fault of the router's own host kept from it
	ownNoted bool            // such a fault was logged
	refusal  *reply          // the last one that is an error; nil: none
	last     error           // of the last D without an answer
	used     json.RawMessage // params of the D that answered

	follow *followed // the answer; nil: the router does not follow it
	asks   kind      // of the request that engines get

	held []hold // at prefill engines
	race *race  // of P's failure and D's answer; nil: nothing of P can fail any more

	trace   *jobTrace
	alone   string    // why D computed the prompt, if it did
	firstAt time.Time // D's first byte
	routed  nodeapi.Routed
}

func (j *job) run(ctx context.Context) {
	switch model := j.req.model; {
	case j.p.decode.any(nil, model, candidate.possible):
	case model != "" && j.p.decode.any(nil, "", candidate.named) &&
		!j.p.decode.any(nil, model, candidate.named):
		j.fail(http.StatusNotFound, codeUnknownModel, fmt.Errorf("the model %q does not exist: GET "+
			"/v1/models lists those that do", model))
		return
	default:
		// A prefill would compute, and hold its blocks, for a decode engine that does not come.
		j.fail(http.StatusServiceUnavailable, codeNoEngine, errors.New(j.p.decode.none(roleDecode)))
		return
	}
	if j.req.kind == kindPassed {
		j.decode(ctx, nil)
		return
	}
	if j.ahead(ctx) {
		return
	}
	pre, placed := j.place(ctx)
	if j.req.alone != "" {
		j.decodeAlone(ctx, aloneRequest)
		return
	}
	if placed && j.decision.Prefill < 0 {
		j.decodeAlone(ctx, aloneChosen)
		return
	}
	tried, reason := map[*backend]bool{}, aloneNoPrefill
	for range prefillTries {
		if pre == nil {
			pre = j.p.prefill.take(tried, j.req.model, candidate.takes)
		}
		if pre == nil {
			break
		}
		tried[pre] = true
		if pre.twin != nil && !j.p.decode.any(map[*backend]bool{pre.twin: true},
			j.req.model, candidate.possible) {
			pre.done() // it would send to itself
			pre = nil
			continue
		}
		err := j.split(ctx, pre)
		pre.done()
		if err == nil || ctx.Err() != nil {
			return
		}
		reason = j.noteAlone(pre, err)
		j.req.load = nil // it was for this engine
		if pre = nil; reason != aloneFailed {
			break
		}
	}
	j.decodeAlone(ctx, reason)
}

// split sends a request to a P and a D. An error is P's, and the client has got nothing.
func (j *job) split(ctx context.Context, pre *backend) error {
	j.source = pre
	defer func() { j.source, j.race = nil, nil }()
	j.mode = j.p.mode
	endpoint := pre.endpoint()
	if endpoint == "" {
		j.mode = PrefillFirst // P's sidecar is unknown: P itself must name it
	}
	xfer := randomID()
	body := j.req.forPrefill(xfer, j.trace.hop(false).traceparent())
	if j.mode == PrefillFirst {
		params, err := j.prefill(ctx, pre, body)
		if err != nil || ctx.Err() != nil {
			return err
		}
		j.hold(pre, params)
		j.decode(ctx, withOwn(params, j.trace.hop(true).traceparent(), j.req.hints))
		return nil
	}
	params := j.req.concurrentParams(xfer, endpoint, j.trace.hop(true).traceparent())
	j.hold(pre, params)
	pctx, stopP := context.WithCancel(ctx)
	dctx, stopD := context.WithCancelCause(ctx)
	j.race = &race{stop: func() { stopD(errPrefillFailed) }}
	var failed error
	var wg sync.WaitGroup
	wg.Go(func() {
		// P's answer is not needed for its content: D has everything from the start. An error after
		// the client has gone, or D has answered, is our own end of the request.
		_, err := j.prefill(pctx, pre, body)
		if err != nil && pctx.Err() == nil && !errors.Is(err, errNoParams) {
			failed = err
			j.race.prefillFailed()
		}
	})
	answered := j.decode(dctx, params)
	stopP() // D has answered, or never will: P is not needed any more
	wg.Wait()
	stopD(nil)
	if answered {
		return nil
	}
	last := len(j.held) - 1
	j.held[last].end()
	j.held = j.held[:last] // a P that fails keeps nothing
	return failed
}

// errRepeated ends the repetition of a request that the engine may have received each time.
var errRepeated = fmt.Errorf("two connections ended without an answer: %w", io.ErrUnexpectedEOF)

// errPrefillFailed ends D's request before its first byte: it would wait for a prefill that never
// comes.
var errPrefillFailed = errors.New("the prefill failed")

// noteAlone logs why P's work cannot be used and returns the label of the reason.
func (j *job) noteAlone(pre *backend, err error) string {
	if refused(err) {
		// The client's request is wrong. D will answer the same, and its answer goes to the client.
		j.p.log.Info("the prefill engine refused the request; the decode engine gets it unchanged",
			"request", j.id, "url", pre.url, "err", err)
		return aloneRefused
	}
	j.p.log.Warn("prefill failed; another engine computes the prompt", "request", j.id, "url",
		pre.url, "err", err)
	if errors.Is(err, errNoParams) {
		return aloneParams
	}
	return aloneFailed
}

// prefill asks P and returns the kv_transfer_params of its answer.
func (j *job) prefill(ctx context.Context, b *backend, body []byte) (json.RawMessage, error) {
	j.routed.Prefill, j.routed.PrefillSidecar = b.url.String(), b.sidecar.String()
	hop := j.trace.hop(false)
	hop.begin(b)
	params, err := j.askPrefill(ctx, b, body)
	switch {
	case ctx.Err() != nil, errors.Is(err, errNoParams):
		hop.end(nil) // D has answered and needs no more of P, or the client is gone
	default:
		hop.end(err)
	}
	if j.decision != nil {
		j.p.placing.Prefilled(j.decision, err == nil && b.number == j.decision.Prefill, time.Now())
	}
	return params, err
}

func (j *job) askPrefill(ctx context.Context, b *backend, body []byte) (json.RawMessage, error) {
	g := newGuard(ctx, b, j.p.times.Prefill, func() bool { return true })
	defer g.stop()
	resp, err := j.send(g.ctx, b, body, false)
	var text []byte
	if err == nil {
		defer func() { _ = resp.Body.Close() }() // its end or its error was read
		text, err = io.ReadAll(io.LimitReader(resp.Body, maxPrefillAnswer+1))
	}
	switch {
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case err != nil:
		err = g.cause(ended(err))
	case resp.StatusCode != http.StatusOK:
		err = newStatusError(resp, text)
	case len(text) == 0:
		err = errEmpty
	}
	if err != nil {
		b.failed(err)
		return nil, fmt.Errorf("prefill %s: %w", b.url, err)
	}
	b.alive(time.Now())
	b.outcome(nil, signAlive, 0)
	if len(text) > maxPrefillAnswer {
		return nil, fmt.Errorf("prefill %s: the answer is larger than %d bytes", b.url, maxPrefillAnswer)
	}
	params, err := j.req.answeredParams(text)
	if err == nil {
		b.reports(ownParams(params).Peer)
	}
	return params, err
}

func (j *job) decodeAlone(ctx context.Context, reason string) {
	j.p.met.alone.WithLabelValues(reason).Inc()
	j.alone = reason
	j.decode(ctx, nil)
}

// decode sends the request to a D and streams its answer to the client. If a D fails before its
// first byte, another one gets the request. answered is false if P has failed before.
func (j *job) decode(ctx context.Context, params json.RawMessage) (answered bool) {
	end := time.Now().Add(ownFaultLimit)
	j.retryOwn()
	for len(j.tried) < decodeTries && j.received < receivedTries {
		b := j.takeDecode(params)
		if b == nil && params != nil {
			// The only engine left has computed the prompt itself.
			if b = j.takeDecode(nil); b != nil {
				params = nil
			}
		}
		if b == nil {
			if len(j.own) == 0 || time.Now().After(end) || !pause(ctx, ownFaultPause) {
				break
			}
			j.retryOwn()
			continue
		}
		if len(j.tried) > 0 {
			j.p.met.retries.Inc()
		}
		j.tried[b] = true
		a, err := j.askDecode(ctx, b, params)
		if err == nil && j.race.decodeAnswers() {
			j.used = params
			j.pass(a)
			a.close()
			b.done()
			if a.end.marks != nil { // it was followed
				j.resume(ctx, b)
			}
			return true
		}
		if err == nil {
			a.close()
		}
		b.done()
		if errors.Is(context.Cause(ctx), errPrefillFailed) {
			delete(j.tried, b) // the failure is not its own
			return false
		}
		if ctx.Err() != nil {
			return true
		}
		switch s := signOfError(err); {
		case s == signNone:
			j.own = append(j.own, b)
		case s != signBusy && !notReached(err):
			// A D that received the request may have consumed the grant: another D must not wait for
			// it.
			params = nil
			j.received++
		}
	}
	switch {
	case errors.Is(context.Cause(ctx), errPrefillFailed):
		return false
	case ctx.Err() != nil:
	case j.refusal != nil:
		j.pass(j.refusal)
	case j.last == nil:
		j.fail(http.StatusServiceUnavailable, codeNoEngine, errors.New(j.p.decode.none(roleDecode)))
	case errors.Is(j.last, errLate):
		j.fail(http.StatusGatewayTimeout, codeEngineFailed, j.last)
	default:
		j.fail(http.StatusBadGateway, codeEngineFailed, j.last)
	}
	return true
}

// retryOwn makes the engines a choice again that only a fault of the router's own host failed to
// reach.
func (j *job) retryOwn() {
	for _, b := range j.own {
		delete(j.tried, b)
	}
	j.own = j.own[:0]
}

func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// skips are the decode engines that were tried and, if D gets P's blocks, P itself.
func (j *job) skips(params json.RawMessage) map[*backend]bool {
	if params == nil || j.source == nil || j.source.twin == nil {
		return j.tried
	}
	skip := maps.Clone(j.tried)
	skip[j.source.twin] = true
	return skip
}

// takeDecode takes a decode engine that was not tried, and is not P itself if D gets P's blocks.
func (j *job) takeDecode(params json.RawMessage) *backend {
	skip := j.skips(params)
	if j.prefer != nil && len(j.tried) == 0 && !skip[j.prefer] {
		if b := j.p.decode.takeThis(j.prefer); b != nil {
			return b
		}
	}
	return j.p.decode.take(skip, j.req.model, candidate.possible)
}

// askDecode asks one back end and returns its answer, of which the client has got nothing yet.
func (j *job) askDecode(ctx context.Context, b *backend, params json.RawMessage) (*reply, error) {
	if j.decision == nil || j.decision.Prefill >= 0 || b != j.prefer {
		j.req.load = nil // it is for another engine
	}
	return j.askAnswer(ctx, b, maps.Clone(j.skips(params)), j.req.forDecode(params))
}

// askAnswer sends a body for an answer that the client gets. skip are engines that are no
// replacement: Watch looks at it while the request goes on.
func (j *job) askAnswer(ctx context.Context, b *backend, skip map[*backend]bool, body []byte) (
	*reply, error) {
	j.routed.Decode, j.routed.DecodeSidecar = b.url.String(), b.sidecar.String()
	hop := j.trace.hop(true)
	hop.begin(b)
	g := newGuard(ctx, b, j.p.times.FirstByte, func() bool {
		return j.p.decode.any(skip, j.req.model, candidate.takes)
	})
	a, err := j.beginDecode(g, b, body)
	switch {
	case err == nil:
		return a, nil
	case ctx.Err() != nil:
		hop.end(nil) // the client is gone, or P has failed
		g.stop()
		return nil, ctx.Err()
	}
	err = g.cause(ended(err))
	g.stop()
	hop.end(err)
	b.failed(err)
	j.last = fmt.Errorf("decode %s: %w", b.url, err)
	if signOfError(err) != signNone {
		j.p.log.Warn("decode engine failed", "request", j.id, "url", b.url, "err", err)
	} else if !j.ownNoted {
		j.ownNoted = true
		j.p.log.Warn("the router cannot connect to an engine; it tries again", "request", j.id, "url",
			b.url, "err", err)
	}
	return nil, j.last
}

func (j *job) beginDecode(g *guard, b *backend, body []byte) (*reply, error) {
	resp, err := j.send(g.ctx, b, body, true)
	if err != nil {
		return nil, err
	}
	s, _ := signOfStatus(resp.StatusCode, resp.Header)
	a, err := begin(b, j.req.kind, resp, j.req.streamed(), s != signAlive || !j.in.ProtoAtLeast(1, 1))
	if err != nil {
		_ = resp.Body.Close() // aborted
		return nil, err
	}
	if s != signAlive {
		_ = resp.Body.Close() // its end was read
		j.refusal = a
		return nil, newStatusError(resp, a.buf)
	}
	if !g.begin() {
		_ = resp.Body.Close() // aborted
		return nil, context.Cause(g.ctx)
	}
	a.guard = g
	b.begins()
	return a, nil
}

// pass copies D's answer to the client as it arrives.
func (j *job) pass(a *reply) {
	b := a.b
	j.answered(b, a.resp.StatusCode)
	j.p.met.first.WithLabelValues(string(j.mode)).Observe(time.Since(j.start).Seconds())
	j.firstAt = time.Now()
	a.header(j.w.Header())
	j.w.Header().Set(requestIDHeader, j.id)
	j.status = a.resp.StatusCode
	j.w.WriteHeader(j.status)
	j.copy(a)
}

// copy copies D's answer to the client, all of it or from where another one has broken.
func (j *job) copy(a *reply) {
	b, through := a.b, func(data []byte) ([]byte, error) { return data, nil }
	if j.follow != nil && a.guard != nil && a.end.marks != nil {
		through = j.follow.take
		j.follow.from(a.guard)
	}
	gone, err := a.copyTo(j.w, through)
	if a.guard == nil {
		return
	}
	switch {
	case errors.Is(err, errStopped):
		err = nil // the client has the end
	case err == nil && j.follow != nil:
		_ = newSink(j.w).send(j.follow.rest()) // the client may be gone
	}
	j.trace.hop(true).end(nil)
	switch {
	case gone, j.in.Context().Err() != nil:
	case err != nil:
		err = a.guard.cause(err)
		b.failed(err)
		j.p.log.Warn("decode engine ended its answer early", "request", j.id, "url", b.url, "err", err)
		j.broken = true
	default:
		b.outcome(nil, signAlive, 0)
	}
}

func (j *job) fail(status int, code string, err error) {
	j.status = status
	j.p.log.Warn("request failed", "request", j.id, "code", status, "err", err)
	j.p.refuse(j.w, status, code, err.Error())
}

// hopByHop headers belong to one connection (RFC 9110, section 7.6.1).
var hopByHop = []string{"Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization",
	"Te", "Trailer", "Transfer-Encoding", "Upgrade", "Proxy-Connection"}

// copyHeader gives dst the values of src, which are not changed in place.
func copyHeader(dst, src http.Header) {
	maps.Copy(dst, src)
	for _, line := range src["Connection"] {
		for name := range strings.SplitSeq(line, ",") {
			dst.Del(strings.TrimSpace(name))
		}
	}
	for _, k := range hopByHop {
		delete(dst, k)
	}
}

// send sends a request to an engine: there is no other way for one of a client.
func (j *job) send(ctx context.Context, b *backend, body []byte, decode bool) (*http.Response,
	error) {
	method, path := http.MethodPost, j.asks.path()
	if j.req.kind == kindPassed {
		method, path = j.in.Method, j.in.URL.RequestURI()
	}
	req, err := b.url.Request(ctx, method, path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	if get := req.GetBody; get != nil {
		once := false
		req.GetBody = func() (io.ReadCloser, error) {
			if once {
				return nil, errRepeated
			}
			once = true
			return get()
		}
	}
	h := http.Header{}
	copyHeader(h, j.in.Header)
	h.Del("Content-Length")
	h.Del("Expect")
	if !decode || j.follow != nil {
		h.Del("Accept-Encoding") // the router reads this answer
	}
	if j.req.kind != kindPassed {
		h.Set("Content-Type", "application/json")
	}
	if _, given := h["Idempotency-Key"]; !given {
		// Not sent: net/http then repeats a request by itself if the engine has closed the idle
		// connection on which it went out. It would do so for each idle connection: GetBody ends it.
		h["Idempotency-Key"] = nil
	}
	h.Set(requestIDHeader, j.id)
	if t := j.trace.hop(decode).traceparent(); t != "" {
		h.Set(traceHeader, t)
	}
	b.url.SetHeader(req, h)
	return j.p.client.Do(req)
}
