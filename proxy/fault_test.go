package proxy

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/iotest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/kvspray/kvspray/internal/config"
	kvtest "github.com/kvspray/kvspray/internal/testutil"
)

// quick are times for tests in which an engine freezes.
func quick() Times {
	return Times{Check: 20 * time.Millisecond, Slow: 100 * time.Millisecond,
		Silent: time.Second}
}

// faulty is a fake engine that tests break in several ways. It answers /health, too.
type faulty struct {
	*engine
	frozen   atomic.Bool // it accepts connections and reads nothing
	status   atomic.Int64
	after    atomic.Int64 // Retry-After of status
	truncate atomic.Bool  // closes connections in place of answers

	lock sync.Mutex
	thaw chan struct{} // closed when it wakes up
}

// freeze makes the engine read and answer nothing until wake.
func (f *faulty) freeze() {
	f.lock.Lock()
	defer f.lock.Unlock()
	f.thaw = make(chan struct{})
	f.frozen.Store(true)
}

func (f *faulty) wake() {
	f.lock.Lock()
	defer f.lock.Unlock()
	if f.frozen.Swap(false) {
		close(f.thaw)
	}
}

// hold blocks while the engine is frozen.
func (f *faulty) hold(r *http.Request) {
	f.lock.Lock()
	thaw := f.thaw
	f.lock.Unlock()
	select {
	case <-r.Context().Done():
	case <-thaw:
	}
}

// leave ends the engine's connections and its listener: connections are refused until comeBack.
func (f *faulty) leave() {
	_ = f.Listener.Close()
	f.CloseClientConnections()
}

func (f *faulty) comeBack() {
	l, err := net.Listen("tcp", f.Listener.Addr().String())
	if err != nil {
		f.t.Error(err)
		return
	}
	f.Listener = l // the server's Close ends it, too
	served := make(chan struct{})
	go func() { _ = f.Config.Serve(l); close(served) }()
	f.t.Cleanup(func() { _ = l.Close(); <-served })
}

func newFaulty(t *testing.T, answer func(http.ResponseWriter, *http.Request, seen)) *faulty {
	f := &faulty{}
	f.engine = newEngine(t, answer)
	inner := f.Config.Handler
	f.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if f.frozen.Load() {
			f.hold(r)
			panic(http.ErrAbortHandler)
		}
		health := r.URL.Path == "/health"
		switch {
		case f.truncate.Load() && !health:
			panic(http.ErrAbortHandler)
		case f.status.Load() != 0 && !health:
			if n := f.after.Load(); n != 0 {
				w.Header().Set("Retry-After", fmt.Sprint(n))
			}
			_, _ = io.Copy(io.Discard, r.Body) // the router sends all of it
			http.Error(w, "broken", int(f.status.Load()))
			return
		}
		inner.ServeHTTP(w, r)
	})
	t.Cleanup(f.wake)
	return f
}

// A decode engine freezes with a request that has no first byte. An idle one takes it over.
func TestFrozenDecodeEngineLosesItsRequests(t *testing.T) {
	arrived := make(chan struct{}, 2)
	frozen := newFaulty(t, nil)
	frozen.answer = func(_ http.ResponseWriter, r *http.Request, _ seen) {
		frozen.freeze()
		arrived <- struct{}{}
		frozen.hold(r)
	}
	d := newEngine(t, answerDecode)
	px, url := start(t, Config{Decode: decoders(frozen.URL, d.URL), Times: quick()})
	for range 2 { // one goes to the frozen engine at first
		if code, body, _ := post(t, url, "/v1/completions", `{"prompt":"a"}`); code != 200 {
			t.Fatal(code, body)
		}
	}
	<-arrived
	until(t, "it is not silent", func() bool { return px.decode.all[0].condition() >= silent })
}

// The same of a prefill engine: another one computes the prompt, or the decode engine itself.
func TestFrozenPrefillEngineLosesItsRequests(t *testing.T) {
	for _, mode := range []Mode{PrefillFirst, Concurrent} {
		for _, second := range []bool{true, false} {
			t.Run(fmt.Sprint(mode, second), func(t *testing.T) {
				frozen := newFaulty(t, nil)
				frozen.answer = func(_ http.ResponseWriter, r *http.Request, _ seen) {
					frozen.freeze()
					frozen.hold(r)
				}
				p := newEngine(t, answerPrefill)
				d := newEngine(t, func(w http.ResponseWriter, r *http.Request, s seen) {
					if own(s)["peer"] == "127.0.0.1:1" {
						<-r.Context().Done() // waits for the frozen one
						return
					}
					answerDecode(w, r, s)
				})
				cfg := Config{Mode: mode, Prefill: []Engine{{URL: frozen.URL, Peer: "127.0.0.1:1"}},
					Decode: decoders(d.URL), Times: quick()}
				if second {
					cfg.Prefill = append(cfg.Prefill, Engine{URL: p.URL, Peer: "127.0.0.1:2"})
				}
				_, url := start(t, cfg)
				for range 2 {
					if code, body, _ := post(t, url, "/v1/completions", `{"prompt":"a"}`); code != 200 {
						t.Fatal(code, body)
					}
				}
				got := d.requests()
				if last := got[len(got)-1]; (params(last) != nil) != second {
					t.Errorf("params %v with a second prefill engine: %v", params(last), second)
				}
			})
		}
	}
}

// An engine that answers its checks late, but requests at once, is used where no other one is.
func TestSlowEngineIsUsed(t *testing.T) {
	d := newEngine(t, answerDecode)
	inner := d.Config.Handler
	times := quick()
	d.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/health" {
			select {
			case <-time.After(2 * times.Slow):
			case <-r.Context().Done():
				return
			}
		}
		inner.ServeHTTP(w, r)
	})
	times.Silent = patience // a busy machine is none
	px, url := start(t, Config{Decode: decoders(d.URL), Times: times})
	until(t, "it is not slow", func() bool { return px.decode.all[0].condition() == slow })
	if code, body, _ := post(t, url, "/v1/completions", `{"prompt":"a"}`); code != 200 {
		t.Error(code, body)
	}
}

// An engine that fails at once is not preferred for its few requests. Another one serves each.
func TestFailingEngineIsNotPreferred(t *testing.T) {
	for _, status := range []int64{429, 500, 503, 408} {
		for _, path := range []string{"/v1/completions", "/tokenize", "/v1/responses", "/v1/messages"} {
			t.Run(fmt.Sprint(status, path), func(t *testing.T) {
				broken, d := newFaulty(t, answerDecode), newEngine(t, answerDecode)
				broken.status.Store(status)
				px, url := start(t, Config{Decode: decoders(broken.URL, d.URL)})
				for range 20 {
					if code, body, _ := post(t, url, path, `{"prompt":"a"}`); code != 200 {
						t.Fatal(code, body)
					}
				}
				if n := testutil.ToFloat64(px.met.retries); n > 4 {
					t.Errorf("%v of 20 requests went to the engine that fails", n)
				}
			})
		}
	}
}

// Without a better engine the client gets the engine's own answer, whole and with its header.
func TestRefusalOfTheOnlyEngineIsPassedOn(t *testing.T) {
	broken := newFaulty(t, answerDecode)
	broken.status.Store(429)
	broken.after.Store(7)
	_, url := start(t, Config{Decode: decoders(broken.URL)})
	for range 3 {
		code, body, h := post(t, url, "/v1/completions", `{"prompt":"a"}`)
		if code != 429 || body != "broken\n" || h.Get("Retry-After") != "7" {
			t.Errorf("%d %q %v", code, body, h)
		}
	}
}

// A prefill engine without a place for a request is replaced.
func TestBusyPrefillIsReplaced(t *testing.T) {
	for _, status := range []int64{429, 503, 500} {
		busy, p, d := newFaulty(t, answerPrefill), newEngine(t, answerPrefill), newEngine(t, answerDecode)
		busy.status.Store(status)
		_, url := start(t, Config{Mode: PrefillFirst, Prefill: []Engine{{URL: busy.URL}, {URL: p.URL}},
			Decode: decoders(d.URL)})
		for range 4 {
			if code, body, _ := post(t, url, "/v1/completions", `{"prompt":"a"}`); code != 200 {
				t.Fatal(code, body)
			}
		}
		for _, s := range d.requests() {
			if params(s) == nil {
				t.Errorf("%d: the decode engine computed a prompt, and a prefill engine was idle", status)
			}
		}
	}
}

// One engine of two is gone: all routes use the other one.
func TestAllRoutesRetry(t *testing.T) {
	for _, route := range []string{"GET /v1/models", "GET /version", "POST /tokenize",
		"POST /detokenize", "POST /v1/messages/count_tokens", "POST /v1/completions",
		"POST /v1/chat/completions", "POST /v1/responses", "POST /v1/messages"} {
		gone, d := newEngine(t, answerDecode), newEngine(t, answerDecode)
		gone.Close()
		p, err := New(Config{Decode: decoders(gone.URL, d.URL)}) // without health checks
		if err != nil {
			t.Fatal(err)
		}
		method, path, _ := strings.Cut(route, " ")
		r := httptest.NewRequest(method, path+"?x=1", nil)
		if method == http.MethodPost {
			r = httptest.NewRequest(method, path+"?x=1", strings.NewReader(`{"a":1}`))
		}
		w := httptest.NewRecorder()
		p.Handler().ServeHTTP(w, r)
		if w.Code != 200 || len(d.requests()) != 1 || d.requests()[0].path != path {
			t.Errorf("%s: %d %s", route, w.Code, w.Body)
		}
		p.client.CloseIdleConnections()
	}
}

// Clients' parameters of the connector reach no engine, on any route that generates.
func TestClientsParamsReachNoEngine(t *testing.T) {
	d := newEngine(t, answerDecode)
	_, url := start(t, Config{Decode: decoders(d.URL)})
	for _, path := range []string{"/v1/responses", "/v1/messages", "/v1/completions"} {
		post(t, url, path, `{"input":"a","kv_transfer_params":{"x":1},"vllm_xargs":{"a":1,
			"kv_transfer_params":{"x":1}}}`)
	}
	for _, s := range d.requests() {
		if extra, _ := s.body["vllm_xargs"].(map[string]any); params(s) != nil || len(extra) != 1 {
			t.Errorf("%s: %v", s.path, s.body)
		}
	}
}

// The router's own faults take no engine out: requests wait until they end.
func TestOwnFaultsAreNotTheEngines(t *testing.T) {
	for name, fault := range map[string]error{
		"descriptors": os.NewSyscallError("socket", syscall.EMFILE),
		"resolver":    &net.DNSError{Err: "connection refused", Name: "d"},
	} {
		t.Run(name, func(t *testing.T) {
			p, d := newEngine(t, answerPrefill), newEngine(t, answerDecode)
			px, err := New(Config{Prefill: []Engine{{URL: p.URL, Peer: "p:1"}}, Decode: decoders(d.URL)})
			if err != nil {
				t.Fatal(err)
			}
			defer px.client.CloseIdleConnections()
			var left atomic.Int64
			left.Store(6)
			tr := px.client.Transport.(*http.Transport)
			dial := tr.DialContext
			tr.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
				if left.Add(-1) >= 0 {
					return nil, &net.OpError{Op: "dial", Net: network, Err: fault}
				}
				return dial(ctx, network, addr)
			}
			b := px.decode.all[0]
			for range 3 {
				if err := checkNow(t, px, b); err == nil {
					t.Fatal("the fault has no effect")
				}
			}
			w := httptest.NewRecorder()
			px.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/v1/completions",
				strings.NewReader(`{"prompt":"a"}`)))
			if w.Code != 200 || b.condition() != fit || px.prefill.all[0].condition() != fit {
				t.Errorf("%d %s; the engine is %s", w.Code, w.Body, b.condition())
			}
		})
	}
}

// raw sends a request as it is, and returns all that comes until the connection ends.
func raw(t *testing.T, url, request string) (answer string, err error) {
	t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, request); err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(conn)
	return string(b), err
}

// sends is an engine whose answers are the given bytes, after which it closes the connection.
func sends(t *testing.T, answer string) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				r, err := http.ReadRequest(bufio.NewReader(c))
				if err != nil {
					return
				}
				_, _ = io.Copy(io.Discard, r.Body)
				text := answer
				if r.URL.Path == "/health" {
					text = "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
				}
				_, _ = io.WriteString(c, text)
			})
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		wg.Wait()
	})
	return "http://" + l.Addr().String()
}

const (
	plain   = "Content-Type: application/json\r\n"
	events  = "Content-Type: text/event-stream\r\n"
	chunked = "Transfer-Encoding: chunked\r\n"
)

func chunks(list ...string) string {
	var b strings.Builder
	for _, s := range list {
		fmt.Fprintf(&b, "%x\r\n%s\r\n", len(s), s)
	}
	return b.String()
}

// An answer that breaks is never whole for a client, whatever the versions of HTTP.
func TestBrokenAnswersAreNeverWhole(t *testing.T) {
	const done, end = "data: [DONE]\n\n", "0\r\n\r\n"
	big := `{"a":"` + strings.Repeat("x", 2*maxHeld) + `"}`
	for _, c := range []struct {
		name, path, answer string
		stream, whole      bool
	}{
		{"short of its length", "", "1.1 200 OK\r\n" + plain + "Content-Length: 9\r\n\r\n{\"a\"", false,
			false},
		{"whole", "", "1.1 200 OK\r\n" + plain + "Content-Length: 2\r\n\r\n{}", false, true},
		{"empty", "", "1.1 200 OK\r\n" + plain + "Content-Length: 0\r\n\r\n", false, false},
		{"empty chunks", "", "1.1 200 OK\r\n" + plain + chunked + "\r\n" + end, false, false},
		{"empty events", "", "1.1 200 OK\r\n" + events + chunked + "\r\n" + end, true, false},
		{"chunks without an end", "", "1.1 200 OK\r\n" + plain + chunked + "\r\n" + chunks("{}"), false,
			false},
		{"large without an end", "", "1.1 200 OK\r\n" + plain + chunked + "\r\n" + chunks(big), false,
			false},
		{"large", "", "1.1 200 OK\r\n" + plain + chunked + "\r\n" + chunks(big) + end, false, true},
		{"ended by its connection", "", "1.0 200 OK\r\n" + plain + "\r\n{\"a\":1}", false, true},
		{"broken by its connection", "", "1.0 200 OK\r\n" + plain + "\r\n{\"a\":1", false, false},
		{"no events, ended by the connection", "", "1.0 200 OK\r\n" + plain + "\r\n{\"a\":1}", true,
			true},
		{"no events, broken by the connection", "", "1.0 200 OK\r\n" + plain + "\r\n{\"a\":1", true,
			false},
		{"events", "", "1.1 200 OK\r\n" + events + chunked + "\r\n" + chunks("data: 1\n\n", done) + end,
			true, true},
		{"events without the last", "", "1.1 200 OK\r\n" + events + chunked + "\r\n" +
			chunks("data: 1\n\n") + end, true, false},
		{"events of a length", "", "1.1 200 OK\r\n" + events + "Content-Length: 9\r\n\r\ndata: 1\n\n",
			true, false},
		{"events, ended by the connection", "",
			"1.0 200 OK\r\n" + events + "\r\ndata: 1\n\n" + done, true, true},
		{"events, broken by the connection", "", "1.0 200 OK\r\n" + events + "\r\ndata: 1\n\n", true,
			false},
		{"an event in parts", "", "1.1 200 OK\r\n" + events + chunked + "\r\n" +
			chunks("data: 1\n\nda", "ta: [DO", "NE]\n\n") + end, true, true},
		{"a text that has the mark", "", "1.1 200 OK\r\n" + events + chunked + "\r\n" +
			chunks("data: x data: [DONE]\n\n") + end, true, false},
		{"a response", "/v1/responses", "1.1 200 OK\r\n" + events + chunked + "\r\n" +
			chunks("event: response.completed\ndata: {}\n\n") + end, true, true},
		{"a response that breaks", "/v1/responses", "1.1 200 OK\r\n" + events + chunked + "\r\n" +
			chunks("event: response.created\ndata: {}\n\n") + end, true, false},
		{"a message", "/v1/messages", "1.1 200 OK\r\n" + events + chunked + "\r\n" +
			chunks("event: message_stop\ndata: {}\n\n") + end, true, true},
		{"a message that breaks", "/v1/messages", "1.1 200 OK\r\n" + events + chunked + "\r\n" +
			chunks("event: message_start\ndata: {}\n\n") + end, true, false},
	} {
		path := c.path
		if path == "" {
			path = "/v1/completions"
		}
		px, err := New(Config{Decode: decoders(sends(t, "HTTP/"+c.answer))})
		if err != nil {
			t.Fatal(err)
		}
		url, stop := serveOn(t, px)
		body := fmt.Sprintf(`{"prompt":"a","stream":%v}`, c.stream)
		for _, version := range []string{"1.0", "1.1"} {
			text, err := raw(t, url, fmt.Sprintf("POST %s HTTP/%s\r\nHost: x\r\nConnection: close\r\n"+
				"Content-Length: %d\r\n\r\n%s", path, version, len(body), body))
			whole := false
			if err == nil {
				resp, rerr := http.ReadResponse(bufio.NewReader(strings.NewReader(text)), nil)
				if rerr == nil {
					_, rerr = io.ReadAll(resp.Body)
					whole = rerr == nil && resp.StatusCode == 200
				}
			}
			if whole != c.whole {
				t.Errorf("%s, client of HTTP/%s: whole %v, %v: %.300q", c.name, version, whole, err, text)
			}
		}
		stop()
	}
}

// A small answer that breaks was not begun: another engine gives a whole one.
func TestBrokenSmallAnswerIsReplaced(t *testing.T) {
	for _, answer := range []string{
		"HTTP/1.1 200 OK\r\n" + plain + "Content-Length: 9\r\n\r\n{\"a\"",
		"HTTP/1.1 200 OK\r\n" + plain + "Content-Length: 0\r\n\r\n",
		"HTTP/1.1 200 OK\r\n" + plain + chunked + "\r\n" + chunks(`{"choices":`),
		"HTTP/1.1 200 OK\r\n" + events + chunked + "\r\n0\r\n\r\n",
		"",
	} {
		d := newEngine(t, answerDecode)
		_, url := start(t, Config{Decode: decoders(sends(t, answer), d.URL)})
		for range 4 {
			code, body, _ := post(t, url, "/v1/completions", `{"prompt":"a"}`)
			if code != 200 || !strings.Contains(body, "hello") {
				t.Errorf("after %q: %d %q", answer, code, body)
			}
		}
	}
}

// Clients that send the start of a body take no place from others.
func TestSilentClientsTakeNoPlace(t *testing.T) {
	d := newEngine(t, answerDecode)
	px, err := New(Config{Decode: decoders(d.URL)})
	if err != nil {
		t.Fatal(err)
	}
	url, stop := serveOn(t, px)
	defer stop()
	conns := make([]net.Conn, maxInFlight)
	for i := range conns {
		if conns[i], err = net.Dial("tcp", strings.TrimPrefix(url, "http://")); err != nil {
			t.Fatalf("connection %d: %v", i, err)
		}
		defer conns[i].Close()
		if _, err := io.WriteString(conns[i], "POST /v1/completions HTTP/1.1\r\nHost: x\r\n"+
			"Content-Length: 10\r\n\r\n{"); err != nil {
			t.Fatal(err)
		}
	}
	until(t, "the heads do not arrive", func() bool {
		return px.bodies.free.Load() <= defaultBodies-11*config.MaxBodyCopies*maxInFlight
	})
	for range 3 {
		if code, body, _ := post(t, url, "/v1/completions", `{"prompt":"a"}`); code != 200 {
			t.Fatal(code, body)
		}
	}
}

// serveOn runs Serve; stop waits for its end.
func serveOn(t *testing.T, px *Proxy) (url string, stop func()) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- px.Serve(ctx, l) }()
	return "http://" + l.Addr().String(), func() {
		http.DefaultClient.CloseIdleConnections()
		cancel()
		if err := <-served; err != nil {
			t.Error(err)
		}
	}
}

// The bodies of all requests share one bound, which counts each as often as it is held. A request
// that ends releases its part.
func TestBodiesAreBounded(t *testing.T) {
	release := make(chan struct{})
	d := newEngine(t, func(w http.ResponseWriter, r *http.Request, s seen) {
		select {
		case <-release:
		case <-r.Context().Done():
		}
		answerDecode(w, r, s)
	})
	const bound = 5 * 40 << 10
	px, url := start(t, Config{Decode: decoders(d.URL), BodiesBytes: bound})
	body := fmt.Sprintf(`{"prompt":%q}`, strings.Repeat("<", 40<<10))
	first := make(chan int, 1)
	go func() {
		code, _, _ := post(t, url, "/v1/completions", body)
		first <- code
	}()
	until(t, "the first request does not arrive", func() bool { return len(d.requests()) == 1 })
	code, answer, h := post(t, url, "/v1/completions", body)
	refusal(t, "a second large body", code, h, answer, 503, codeTooMany, "bytes of request bodies")
	if h.Get("Retry-After") == "" {
		t.Error("no Retry-After")
	}
	close(release)
	if code := <-first; code != 200 {
		t.Error(code)
	}
	if code, answer, _ := post(t, url, "/v1/completions", body); code != 200 {
		t.Error(code, answer)
	}
	for _, s := range d.requests() {
		if n := s.header.Get("Content-Length"); n != fmt.Sprint(len(body)) {
			t.Errorf("the decode engine gets %s bytes of a body of %d", n, len(body))
		}
	}
	until(t, "bytes are not given back", func() bool { return px.bodies.free.Load() == bound })
}

// At the bound of connections the longest idle one gives its place to a new one.
func TestIdleConnectionsGiveWay(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	limited := newLimitedListener(l, 3)
	release := make(chan struct{})
	srv := &http.Server{ConnState: limited.state,
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/wait" {
				<-release
			}
			fmt.Fprint(w, "ok")
		})}
	served := make(chan error, 1)
	go func() { served <- srv.Serve(limited) }()
	url := "http://" + l.Addr().String()
	var wg sync.WaitGroup
	for range 2 { // busy: they stay
		wg.Go(func() {
			if text, err := raw(t, url, "GET /wait HTTP/1.0\r\n\r\n"); err != nil ||
				!strings.HasSuffix(text, "ok") {
				t.Errorf("a busy connection got %q, %v", text, err)
			}
		})
	}
	for range 5 { // each takes the place of the one before
		conn, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if _, err := io.WriteString(conn, "GET / HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
			t.Fatal(err)
		}
		if line, err := bufio.NewReader(conn).ReadString('\n'); err != nil {
			t.Fatalf("%q, %v", line, err)
		}
	}
	close(release)
	wg.Wait()
	_ = srv.Close()
	<-served
	until(t, "places are lost", func() bool {
		limited.mu.Lock()
		defer limited.mu.Unlock()
		return limited.open == 0 && limited.idle.Len() == 0
	})
}

// A router that ends gives requests its drain time, and counts those that it cuts.
func TestDrainTimeCutsAndCounts(t *testing.T) {
	arrived := make(chan struct{}, 1)
	d := newEngine(t, func(w http.ResponseWriter, r *http.Request, _ seen) {
		w.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprint(w, "data: 1\n\n")
		_ = http.NewResponseController(w).Flush()
		arrived <- struct{}{}
		<-r.Context().Done()
	})
	var log kvtest.Log
	times := quick()
	times.Drain = 50 * time.Millisecond
	px, err := New(Config{Decode: decoders(d.URL), Times: times,
		Log: slog.New(slog.NewTextHandler(&log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	url, stop := serveOn(t, px)
	ended := make(chan error, 1)
	go func() {
		resp, err := http.Post(url+"/v1/completions", "application/json",
			strings.NewReader(`{"prompt":"a","stream":true}`))
		if err == nil {
			_, err = io.ReadAll(resp.Body)
			_ = resp.Body.Close()
		}
		ended <- err
	}()
	<-arrived
	stop() // fails on an error of Serve
	if err := <-ended; err == nil {
		t.Error("a stream that was cut is whole for its client")
	}
	if !strings.Contains(log.String(), `msg="requests were cut because they did not end in time" `+
		"requests=1") {
		t.Errorf("logged: %s", log.String())
	}
}

// No text that leaves the process has the password of an engine's URL.
func TestPasswordsStayInside(t *testing.T) {
	const planted = "hunter2"
	withUser := func(raw string) string {
		return strings.Replace(raw, "http://", "http://router:"+planted+"@", 1)
	}
	var authorized atomic.Int64
	check := func(r *http.Request) {
		if user, password, ok := r.BasicAuth(); ok && user == "router" && password == planted {
			authorized.Add(1)
		}
	}
	sidecar := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		check(r)
		fmt.Fprint(w, `{"endpoint":"127.0.0.1:1"}`)
	}))
	defer sidecar.Close()
	p := newEngine(t, func(w http.ResponseWriter, r *http.Request, s seen) {
		check(r)
		answerPrefill(w, r, s)
	})
	d := newEngine(t, func(w http.ResponseWriter, r *http.Request, s seen) {
		check(r)
		answerDecode(w, r, s)
	})
	var log kvtest.Log
	px, router := start(t, Config{Prefill: []Engine{{URL: withUser(p.URL),
		Sidecar: withUser(sidecar.URL), Peer: "127.0.0.2:1"}}, Decode: []Engine{{URL: withUser(d.URL),
		Sidecar: withUser(sidecar.URL)}}, Policy: "auto", Times: quick(),
		Log: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))})
	var all bytes.Buffer
	get := func(path string) {
		resp, err := http.Get(router + path)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		_ = resp.Header.Write(&all)
		_, _ = io.Copy(&all, resp.Body)
	}
	until(t, "the sidecar is not asked", func() bool { return px.decode.all[0].endpoint() != "" })
	_, answer, _ := post(t, router, "/v1/completions", `{"prompt":"a"}`)
	all.WriteString(answer)
	until(t, "calls with the password, of two engines and two sidecars",
		func() bool { return authorized.Load() >= 4 })
	for _, e := range []*engine{p, d} {
		e.CloseClientConnections()
		e.Close()
	}
	sidecar.Close()
	for range 3 {
		for _, path := range []string{"/v1/completions", "/tokenize"} {
			_, answer, _ := post(t, router, path, `{"prompt":"a"}`)
			all.WriteString(answer)
		}
	}
	until(t, "they do not become down", func() bool {
		return px.decode.all[0].condition() == down && px.prefill.all[0].condition() == down
	})
	for _, path := range []string{"/health", "/metrics", "/"} {
		get(path)
	}
	all.WriteString(log.String())
	for _, bad := range []string{"http://router:" + planted + "@", "ftp://router:" + planted + "@a",
		"router:" + planted + "@a:1", "http://router:" + planted + "@a?x=" + planted} {
		for _, cfg := range []Config{{Decode: decoders(bad)},
			{Decode: []Engine{{URL: d.URL, Sidecar: bad}}},
			{Decode: decoders(d.URL), Prefill: []Engine{{URL: bad}}},
			{Decode: decoders(d.URL), Prefill: []Engine{{URL: d.URL, Sidecar: bad}}},
			{Decode: decoders(d.URL), Prefill: []Engine{{URL: withUser(d.URL)}}}} {
			_, err := New(cfg)
			if err == nil {
				t.Errorf("%+v is taken", cfg)
				continue
			}
			all.WriteString(err.Error())
		}
	}
	if i := strings.Index(all.String(), planted); i >= 0 {
		t.Errorf("the password is in: %.200s", all.String()[max(i-100, 0):])
	}
	if u, err := url.Parse(d.URL); err != nil || !strings.Contains(all.String(), u.Host) {
		t.Error("the texts do not name the engine")
	}
}

// A target that no URL can have is the client's mistake, not the engine's.
func TestTargetThatIsNoURL(t *testing.T) {
	d := newEngine(t, answerDecode)
	px, url := start(t, Config{Decode: decoders(d.URL)})
	answer, err := raw(t, url, "GET /v1/models?a#%zz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
	if err != nil || !strings.HasPrefix(answer, "HTTP/1.1 400 ") ||
		!strings.Contains(answer, codeInvalidTarget) {
		t.Errorf("%q, %v", answer, err)
	}
	if c := px.decode.all[0].condition(); c != fit || len(d.requests()) != 0 {
		t.Errorf("the engine is %s after %d requests", c, len(d.requests()))
	}
}

// An engine that closes its connections without an answer gets a request once more at most.
func TestLostRequestIsRepeatedOnce(t *testing.T) {
	const kept = 8
	var wg sync.WaitGroup
	wg.Add(kept)
	d := newEngine(t, func(w http.ResponseWriter, r *http.Request, s seen) {
		if s.body["prompt"] == "bad" {
			panic(http.ErrAbortHandler)
		}
		wg.Done()
		wg.Wait() // each on its own connection
		answerDecode(w, r, s)
	})
	p, err := New(Config{Decode: decoders(d.URL)})
	if err != nil {
		t.Fatal(err)
	}
	defer p.client.CloseIdleConnections()
	var all sync.WaitGroup
	for range kept {
		all.Go(func() { ask(p, `{"prompt":"a"}`) })
	}
	all.Wait()
	if code := ask(p, `{"prompt":"bad"}`); code != http.StatusBadGateway {
		t.Error(code)
	}
	if n := len(d.requests()) - kept; n > 2 {
		t.Errorf("the engine got the request %d times", n)
	}
}

// deadlined notes the deadline of the connection.
type deadlined struct {
	*httptest.ResponseRecorder
	reads time.Time
}

func (d *deadlined) SetReadDeadline(t time.Time) error { d.reads = t; return nil }

// net/http reads the rest of a body after the handler: for a bounded time, if it does not come.
func TestUnsentBodyHoldsNoConnection(t *testing.T) {
	d := newEngine(t, answerDecode)
	p, err := New(Config{Decode: decoders(d.URL)})
	if err != nil {
		t.Fatal(err)
	}
	defer p.client.CloseIdleConnections()
	late := iotest.ErrReader(os.ErrDeadlineExceeded)
	for _, x := range []struct {
		method, path string
		body         io.Reader
		bounded      bool
	}{
		{"POST", "/v1/completions", io.MultiReader(strings.NewReader("{"), late), true},
		{"POST", "/v1/completions", strings.NewReader(`{"prompt":"a"}`), false}, // all was read
		{"GET", "/health", late, true},
		{"POST", "/x", late, true},
	} {
		w := &deadlined{ResponseRecorder: httptest.NewRecorder()}
		p.Handler().ServeHTTP(w, httptest.NewRequest(x.method, x.path, x.body))
		if w.reads.IsZero() == x.bounded {
			t.Errorf("%s %s: %d, then the deadline is %s", x.method, x.path, w.Code, w.reads)
		}
	}
}

func ask(p *Proxy, body string) int {
	w := httptest.NewRecorder()
	p.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/v1/completions",
		strings.NewReader(body)))
	return w.Code
}
