// SPDX-License-Identifier: Apache-2.0

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
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/kvspray/kvspray/proxy/internal/place"
)

const (
	requestIDHeader = "X-Request-Id"
	maxRequestID    = 128 // bytes
	copyBytes       = 32 << 10
)

// errRefused is a 4xx answer of P: the client's request is wrong. D will answer the same, and its
// answer goes to the client.
var errRefused = errors.New("refused")

// enter takes a place among the requests in flight, or refuses; leave releases it.
func (p *Proxy) enter(w http.ResponseWriter) bool {
	select {
	case p.slots <- struct{}{}:
		p.met.inFlight.Inc()
		return true
	default:
		w.Header().Set("Retry-After", "1")
		p.refuse(w, http.StatusServiceUnavailable, codeTooMany, "too many requests in flight; try again")
		return false
	}
}

func (p *Proxy) leave() {
	p.met.inFlight.Dec()
	<-p.slots
}

// generate serves the two endpoints with prefill and decode.
func (p *Proxy) generate(w http.ResponseWriter, r *http.Request, k kind) {
	if !p.enter(w) {
		return
	}
	defer p.leave()
	body, ok := p.readBody(w, r)
	if !ok {
		return
	}
	req, err := parseRequest(k, body)
	if err != nil {
		p.refuse(w, http.StatusBadRequest, codeInvalidBody, err.Error())
		return
	}
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	j := &job{p: p, w: w, in: r, req: req, id: requestID(r.Header.Get(requestIDHeader)),
		start: time.Now(), mode: p.mode, trace: p.traceOf(r.Header)}
	w.Header().Set(requestIDHeader, j.id)
	j.run(ctx)
	j.placed()
	j.traced()
	p.met.requests.WithLabelValues(string(j.mode), statusClass(j.status)).Inc()
	if j.broken {
		// The status was sent; only a broken connection shows the client that the answer is
		// incomplete.
		panic(http.ErrAbortHandler)
	}
}

func (p *Proxy) readBody(w http.ResponseWriter, r *http.Request) ([]byte, bool) {
	// A test's recorder has no deadline to set; a real connection always has.
	_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(bodyTimeout))
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, p.limit))
	_ = http.NewResponseController(w).SetReadDeadline(time.Time{})
	if err == nil {
		return body, true
	}
	tooLarge := (*http.MaxBytesError)(nil)
	switch {
	case errors.As(err, &tooLarge):
		p.refuse(w, http.StatusRequestEntityTooLarge, codeBodyTooLarge,
			fmt.Sprintf("the body is larger than %d bytes, the router's --max-body", p.limit))
	case errors.Is(err, os.ErrDeadlineExceeded):
		p.refuse(w, http.StatusRequestTimeout, codeBodyTimeout, fmt.Sprintf("the body did not come "+
			"within %s", bodyTimeout))
	default:
		p.refuse(w, http.StatusBadRequest, codeInvalidBody, "the body could not be read")
	}
	return nil, false
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
	source     *backend        // P, from which D gets blocks
	firstAfter time.Duration   // until D's first byte

	// Set in concurrent mode: P's failure, at most once, and its back end.
	failed <-chan error
	pre    *backend

	trace   *jobTrace
	alone   string    // why D computed the prompt, if it did
	firstAt time.Time // D's first byte
}

func (j *job) run(ctx context.Context) {
	if !j.p.decode.anyTakes() {
		// A prefill would compute, and hold its blocks, for a decode engine that does not come.
		j.fail(http.StatusServiceUnavailable, codeNoEngine, errors.New(j.p.decode.none(roleDecode)))
		return
	}
	pre, ok := j.place(ctx)
	if j.req.alone != "" {
		j.decodeAlone(ctx, aloneRequest)
		return
	}
	if ok && j.decision.Prefill < 0 {
		j.decodeAlone(ctx, aloneChosen)
		return
	}
	if pre == nil {
		pre = j.p.prefill.take(nil)
	}
	if pre == nil {
		j.decodeAlone(ctx, aloneNoPrefill)
		return
	}
	defer pre.done()
	if pre.twin != nil && !j.p.decode.anyTakesBut(pre.twin) {
		j.decodeAlone(ctx, aloneNoPrefill) // it would send to itself
		return
	}
	j.source = pre
	peer := pre.peerAddr()
	if peer == "" {
		j.mode = PrefillFirst // P's sidecar is unknown: P itself must name it
	}
	xfer := randomID()
	body, err := j.req.forPrefill(xfer, j.trace.hop(false).traceparent())
	if err != nil {
		j.fail(http.StatusBadRequest, codeInvalidBody, err)
		return
	}
	if j.mode == PrefillFirst {
		params, err := j.prefill(ctx, pre, body)
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			j.decodeAlone(ctx, j.noteAlone(pre, err))
			return
		}
		j.decode(ctx, withTraceparent(params, j.trace.hop(true).traceparent()))
		return
	}
	params, err := j.req.concurrentParams(xfer, peer, j.trace.hop(true).traceparent())
	if err != nil {
		j.fail(http.StatusBadRequest, codeInvalidBody, err)
		return
	}
	pctx, stop := context.WithCancel(ctx)
	failed := make(chan error, 1)
	joined := make(chan struct{})
	go func() {
		defer close(joined)
		// P's answer is not needed for its content: D knows everything from the start. An error after
		// the client has gone, or D has answered, is our own end of the request.
		_, err := j.prefill(pctx, pre, body)
		if err != nil && pctx.Err() == nil && !errors.Is(err, errNoParams) && !errors.Is(err,
			errListParams) {
			failed <- err
		}
	}()
	j.failed, j.pre = failed, pre
	j.decode(ctx, params)
	stop() // D has answered, or never will: P is not needed any more
	<-joined
}

// noteAlone logs why P's work cannot be used and returns the label of the reason.
func (j *job) noteAlone(pre *backend, err error) string {
	if errors.Is(err, errRefused) {
		j.p.log.Info("the prefill engine refused the request; the decode engine gets it unchanged",
			"request", j.id, "url", pre.url, "err", err)
		return aloneRefused
	}
	j.p.log.Warn("prefill failed; the decode engine prefills locally", "request", j.id, "url",
		pre.url, "err", err)
	if errors.Is(err, errNoParams) || errors.Is(err, errListParams) {
		return aloneParams
	}
	return aloneFailed
}

// prefill asks P and returns the kv_transfer_params of its answer.
func (j *job) prefill(ctx context.Context, b *backend, body []byte) (json.RawMessage, error) {
	hop := j.trace.hop(false)
	hop.begin(b)
	params, err := j.askPrefill(ctx, b, body)
	switch {
	case ctx.Err() != nil, errors.Is(err, errNoParams), errors.Is(err, errListParams):
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
	resp, err := j.send(ctx, b, body, false)
	if err != nil {
		if notReached(err) {
			b.suspect(err)
		}
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }() // its end or its error was read
	answer, err := io.ReadAll(io.LimitReader(resp.Body, maxPrefillAnswer+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("prefill %s: %w", b.url, err)
	case resp.StatusCode >= 400 && resp.StatusCode < 500:
		return nil, &statusError{resp.StatusCode, fmt.Errorf("prefill %s: %w: %s: %s", b.url, errRefused,
			resp.Status, firstBytes(answer))}
	case resp.StatusCode != http.StatusOK:
		return nil, &statusError{resp.StatusCode, fmt.Errorf("prefill %s: %s: %s", b.url, resp.Status,
			firstBytes(answer))}
	case len(answer) > maxPrefillAnswer:
		return nil, fmt.Errorf("prefill %s: the answer is larger than %d bytes", b.url, maxPrefillAnswer)
	}
	params, err := j.req.answeredParams(answer)
	if err == nil {
		b.hear(peerOf(params))
	}
	return params, err
}

func firstBytes(b []byte) string {
	const most = 200
	return strings.ToValidUTF8(string(b[:min(len(b), most)]), "?")
}

func (j *job) decodeAlone(ctx context.Context, reason string) {
	j.p.met.alone.WithLabelValues(reason).Inc()
	j.alone = reason
	j.decode(ctx, nil)
}

// decode sends the request to a D and streams its answer to the client. If P fails before D's first
// byte, D restarts without P: it would otherwise wait for a prefill that never comes.
func (j *job) decode(ctx context.Context, params json.RawMessage) {
	tried := map[*backend]bool{}
	var last error
	for range decodeTries {
		var b *backend
		if j.prefer != nil && len(tried) == 0 && !j.not(tried, params)[j.prefer] {
			b = j.p.decode.takeThis(j.prefer)
		}
		if b == nil {
			b = j.p.decode.take(j.not(tried, params))
		}
		if b == nil && params != nil {
			// The only engine left has computed the prompt itself.
			params = nil
			b = j.p.decode.take(tried)
		}
		if b == nil {
			break
		}
		tried[b] = true
		if len(tried) > 1 {
			j.p.met.retries.Inc()
		}
		var sent bool
		sent, params, last = j.decodeOn(ctx, b, params)
		b.done()
		if sent || ctx.Err() != nil {
			return
		}
	}
	if last == nil {
		j.fail(http.StatusServiceUnavailable, codeNoEngine, errors.New(j.p.decode.none(roleDecode)))
		return
	}
	j.fail(http.StatusBadGateway, codeEngineFailed, last)
}

// not are the decode engines that are no choice: those tried, and P itself if D gets its blocks.
func (j *job) not(tried map[*backend]bool, params json.RawMessage) map[*backend]bool {
	if params == nil || j.source == nil || j.source.twin == nil {
		return tried
	}
	list := maps.Clone(tried)
	list[j.source.twin] = true
	return list
}

// first is the start of D's answer, up to its first byte.
type first struct {
	resp *http.Response
	buf  []byte
	err  error // of the request or of the first read; io.EOF: an empty answer
}

// decodeOn tries one back end. sent: the client has received an answer, or is gone. The returned
// params are for the next try.
func (j *job) decodeOn(ctx context.Context, b *backend, params json.RawMessage) (sent bool,
	next json.RawMessage, err error) {
	for {
		body, err := j.req.forDecode(params)
		if err != nil {
			return false, nil, err
		}
		dctx, stop := context.WithCancel(ctx)
		got := make(chan first, 1)
		hop := j.trace.hop(true)
		hop.begin(b)
		go func() { got <- j.firstByte(dctx, b, body) }()
		var f first
		select {
		case f = <-got:
		case perr := <-j.failed:
			stop()
			if f = <-got; f.resp != nil {
				_ = f.resp.Body.Close() // aborted
			}
			j.alone = j.noteAlone(j.pre, perr)
			j.p.met.alone.WithLabelValues(j.alone).Inc()
			params, j.failed = nil, nil
			continue
		}
		if f.resp == nil {
			stop()
			if hop.end(f.err); ctx.Err() != nil {
				hop.end(nil) // the client is gone
			}
			if ctx.Err() == nil {
				b.suspect(f.err)
				j.p.log.Warn("decode engine failed", "request", j.id, "url", b.url, "err", f.err)
			}
			// A D that received the request may have consumed the grant: another D must not wait
			// for it.
			if !notReached(f.err) {
				params = nil
			}
			return false, params, fmt.Errorf("decode %s: %w", b.url, f.err)
		}
		j.answered(b, f.resp.StatusCode)
		j.p.met.first.WithLabelValues(string(j.mode)).Observe(time.Since(j.start).Seconds())
		j.firstAt = time.Now()
		j.pass(f)
		stop()
		hop.end(nil)
		return true, nil, nil
	}
}

// notReached reports whether no connection was made, so that the engine cannot have received the
// request.
func notReached(err error) bool {
	op := (*net.OpError)(nil)
	return errors.As(err, &op) && op.Op == "dial"
}

// firstByte sends the request and waits for the first bytes of the answer, so that the client
// receives nothing before.
func (j *job) firstByte(ctx context.Context, b *backend, body []byte) first {
	resp, err := j.send(ctx, b, body, true)
	if err != nil {
		return first{err: err}
	}
	buf := make([]byte, copyBytes)
	n, err := resp.Body.Read(buf)
	if n == 0 && err != nil && !errors.Is(err, io.EOF) {
		_ = resp.Body.Close()
		return first{err: err}
	}
	return first{resp: resp, buf: buf[:n], err: err}
}

// pass copies D's answer to the client as it arrives.
func (j *job) pass(f first) {
	defer func() { _ = f.resp.Body.Close() }() // its end or its error was read
	copyHeader(j.w.Header(), f.resp.Header)
	j.w.Header().Set(requestIDHeader, j.id)
	j.status = f.resp.StatusCode
	j.w.WriteHeader(f.resp.StatusCode)
	flush := http.NewResponseController(j.w)
	data, err := f.buf, f.err
	buf := f.buf[:cap(f.buf)]
	for {
		if len(data) > 0 {
			if _, werr := j.w.Write(data); werr != nil {
				return // the client is gone; closing the body cancels D
			}
			_ = flush.Flush() // an error shows at the next write
		}
		if err != nil {
			break
		}
		var n int
		n, err = f.resp.Body.Read(buf)
		data = buf[:n]
	}
	if !errors.Is(err, io.EOF) && j.in.Context().Err() == nil {
		j.p.log.Warn("decode engine ended its answer early", "request", j.id, "err", err)
		j.broken = true
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

func copyHeader(dst, src http.Header) {
	named := map[string]bool{}
	for _, line := range src.Values("Connection") {
		for name := range strings.SplitSeq(line, ",") {
			named[http.CanonicalHeaderKey(strings.TrimSpace(name))] = true
		}
	}
	for k, v := range src {
		if !named[k] {
			dst[k] = append([]string(nil), v...)
		}
	}
	for _, k := range hopByHop {
		dst.Del(k)
	}
}

func (j *job) send(ctx context.Context, b *backend, body []byte, decode bool) (*http.Response,
	error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, b.url+j.req.kind.path(),
		bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	copyHeader(req.Header, j.in.Header)
	req.Header.Del("Content-Length")
	req.Header.Del("Expect")
	if !decode {
		req.Header.Del("Accept-Encoding") // the router reads this answer
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set(requestIDHeader, j.id)
	if t := j.trace.hop(decode).traceparent(); t != "" {
		req.Header.Set(traceHeader, t)
	}
	return j.p.client.Do(req)
}

// pass sends a request that needs no prefill to a decode engine.
func (p *Proxy) pass(w http.ResponseWriter, r *http.Request) {
	if !p.enter(w) {
		return
	}
	defer p.leave()
	body, ok := p.readBody(w, r)
	if !ok {
		return
	}
	b := p.decode.take(nil)
	if b == nil {
		p.refuse(w, http.StatusServiceUnavailable, codeNoEngine, p.decode.none(roleDecode))
		return
	}
	defer b.done()
	req, err := http.NewRequestWithContext(r.Context(), r.Method, b.url+r.URL.RequestURI(),
		bytes.NewReader(body))
	if err != nil {
		p.refuse(w, http.StatusBadRequest, codeInvalidTarget, err.Error())
		return
	}
	copyHeader(req.Header, r.Header)
	resp, err := p.client.Do(req)
	if err != nil {
		if notReached(err) {
			b.suspect(err)
		}
		p.refuse(w, http.StatusBadGateway, codeEngineFailed, fmt.Sprintf("decode %s: %v", b.url, err))
		return
	}
	defer func() { _ = resp.Body.Close() }() // read to its end or aborted
	copyHeader(w.Header(), resp.Header)
	w.WriteHeader(resp.StatusCode)
	if _, err := io.Copy(w, resp.Body); err != nil {
		// The client is gone, or the engine ended early: the client must not take this for the end.
		panic(http.ErrAbortHandler)
	}
}

// health reports whether requests can be served, and the state of every back end.
func (p *Proxy) health(w http.ResponseWriter, _ *http.Request) {
	type state struct {
		Role   string `json:"role"`
		URL    string `json:"url"`
		Up     bool   `json:"up"`
		Leaves bool   `json:"leaving,omitempty"` // it gets no new requests
		Load   int    `json:"in_flight"`
		Peer   string `json:"peer,omitempty"`
		Reason string `json:"reason,omitempty"`
		Warn   string `json:"warning,omitempty"`
	}
	var list []state
	for _, set := range []*pool{p.prefill, p.decode} {
		for _, b := range set.all {
			b.mu.Lock()
			list = append(list, state{b.role, b.url, b.upLocked(), b.leaving, b.load, b.peer, b.reason,
				b.warningsLocked()})
			b.mu.Unlock()
		}
	}
	w.Header().Set("Content-Type", "application/json")
	status := "ok"
	if !p.decode.anyTakes() {
		status = p.decode.none(roleDecode)
		w.WriteHeader(http.StatusServiceUnavailable)
	} else if len(p.prefill.all) > 0 && !p.prefill.anyTakes() {
		status = "degraded: " + p.prefill.none(rolePrefill)
	}
	// the client may be gone
	_ = json.NewEncoder(w).Encode(map[string]any{"status": status, "mode": p.mode, "backends": list})
}
