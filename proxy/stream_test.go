package proxy

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
)

// A client that goes away takes both requests with it.
func TestClientDisconnect(t *testing.T) {
	for _, mode := range []Mode{Concurrent, PrefillFirst} {
		t.Run(string(mode), func(t *testing.T) {
			var p, d *engine
			arrived := make(chan struct{}, 2)
			p = newEngine(t, func(_ http.ResponseWriter, r *http.Request,
				_ seen) {
				arrived <- struct{}{}
				p.hang(r)
			})
			d = newEngine(t, func(_ http.ResponseWriter, r *http.Request,
				_ seen) {
				arrived <- struct{}{}
				d.hang(r)
			})
			_, url := start(t, Config{Prefill: []Engine{{URL: p.URL, Peer: "127.0.0.1:1"}},
				Decode: decoders(d.URL), Mode: mode})
			ctx, cancel := context.WithCancel(context.Background())
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/completions",
				strings.NewReader(`{"prompt":"a"}`))
			if err != nil {
				t.Fatal(err)
			}
			done := make(chan struct{})
			go func() {
				defer close(done)
				if _, err := http.DefaultClient.Do(req); !errors.Is(err, context.Canceled) {
					t.Errorf("%v", err)
				}
			}()
			<-arrived
			if mode == Concurrent {
				<-arrived
			}
			cancel()
			waitFor(t, done, "the client's call did not end")
			waitFor(t, p.gone, "P's request was not cancelled")
			if mode == Concurrent {
				waitFor(t, d.gone, "D's request was not cancelled")
			} else if n := len(d.requests()); n != 0 {
				t.Errorf("D got %d requests", n)
			}
		})
	}
}

// Both engines' requests end with the client's, in any order. That P's has ended is no failure of
// P.
func TestClientDisconnectIsNoFailedPrefill(t *testing.T) {
	const clients = 32 // half of them would be counted
	arrived := make(chan struct{}, 2)
	hang := func(_ http.ResponseWriter, r *http.Request,
		_ seen) {
		arrived <- struct{}{}
		<-r.Context().Done()
	}
	p, d := newEngine(t, hang), newEngine(t, hang)
	px, url := start(t, Config{Prefill: []Engine{{URL: p.URL, Peer: "127.0.0.1:1"}},
		Decode: decoders(d.URL), Mode: Concurrent})
	for range clients {
		ctx, cancel := context.WithCancel(context.Background())
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/completions",
			strings.NewReader(`{"prompt":"a"}`))
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			defer cancel()
			<-arrived
			<-arrived
		}()
		if _, err := http.DefaultClient.Do(req); !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		until(t, "the request did not end",
			func() bool { return testutil.ToFloat64(px.met.inFlight) == 0 })
	}
	if n := testutil.ToFloat64(px.met.alone.WithLabelValues(aloneFailed)); n != 0 {
		t.Errorf("%v failed prefills counted of %d clients that went away", n, clients)
	}
}

// Each event reaches the client before the next is made.
func TestStreaming(t *testing.T) {
	next := make(chan struct{})
	decode := func(w http.ResponseWriter, r *http.Request, _ seen) {
		w.Header().Set("Content-Type", "text/event-stream")
		for i := range 3 {
			fmt.Fprintf(w, "data: {\"i\":%d}\n\n", i)
			w.(http.Flusher).Flush()
			select {
			case <-next:
			case <-r.Context().Done():
				return
			}
		}
		fmt.Fprint(w, "data: [DONE]\n\n")
	}
	_, _, _, url := pair(t, Concurrent, answerPrefill, decode)
	resp, err := http.Post(url+"/v1/completions", "application/json",
		strings.NewReader(`{"prompt":"a","stream":true}`))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if ct := resp.Header.Get("Content-Type"); ct != "text/event-stream" {
		t.Error(ct)
	}
	lines := bufio.NewScanner(resp.Body)
	for i := range 3 {
		if !lines.Scan() || lines.Text() != fmt.Sprintf(`data: {"i":%d}`, i) {
			t.Fatalf("event %d: %q", i, lines.Text())
		}
		lines.Scan()
		next <- struct{}{}
	}
	if !lines.Scan() || lines.Text() != "data: [DONE]" {
		t.Error(lines.Text())
	}
}

// An answer that breaks off must not look complete.
func TestDecodeBreaksOff(t *testing.T) {
	decode := func(w http.ResponseWriter, _ *http.Request, _ seen) {
		fmt.Fprint(w, "data: 1\n\n")
		w.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	}
	_, _, px, url := pair(t, Concurrent, answerPrefill, decode)
	resp, err := http.Post(url+"/v1/completions", "application/json",
		strings.NewReader(`{"prompt":"a","stream":true}`))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if b, err := io.ReadAll(resp.Body); err == nil {
		t.Errorf("%q looked complete", b)
	}
	for _, b := range []*backend{px.prefill.all[0], px.decode.all[0]} {
		until(t, b.url.String()+" still counts a request", func() bool { return load(b) == 0 })
	}
}

// So must an answer that is only passed on.
func TestPassBreaksOff(t *testing.T) {
	_, _, px, url := pair(t, Concurrent, answerPrefill, func(w http.ResponseWriter,
		_ *http.Request, _ seen) {
		fmt.Fprint(w, `{"data":[`)
		w.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	})
	resp, err := http.Get(url + "/v1/models?limit=1")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if b, err := io.ReadAll(resp.Body); err == nil && resp.StatusCode == http.StatusOK {
		t.Errorf("%q looked complete", b)
	}
	until(t, "a place is still taken", func() bool { return len(px.slots) == 0 })
}

func TestStatusClass(t *testing.T) {
	for code, want := range map[int]string{0: "none", 200: "2xx", 302: "3xx", 404: "4xx", 502: "5xx"} {
		if got := statusClass(code); got != want {
			t.Errorf("%d: %s", code, got)
		}
	}
}

// Serve lets a request in flight finish, then ends with everything joined.
func TestServeDrains(t *testing.T) {
	arrived, finish := make(chan struct{}), make(chan struct{})
	p := newEngine(t, answerPrefill)
	d := newEngine(t, func(w http.ResponseWriter, r *http.Request, s seen) {
		close(arrived)
		<-finish
		answerDecode(w, r, s)
	})
	px, err := New(Config{Prefill: []Engine{{URL: p.URL, Peer: "a:1"}}, Decode: decoders(d.URL)})
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- px.Serve(ctx, l) }()
	answered := make(chan int, 1)
	go func() {
		code, _, _ := post(t, "http://"+l.Addr().String(), "/v1/completions", `{"prompt":"a"}`)
		answered <- code
	}()
	<-arrived
	cancel()
	close(finish)
	if code := <-answered; code != 200 {
		t.Error(code)
	}
	if err := <-served; err != nil {
		t.Error(err)
	}
	http.DefaultClient.CloseIdleConnections()
}
