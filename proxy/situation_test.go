package proxy

import (
	"bytes"
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
)

// A thousand streams at once are all served, and none is taken for another.
func TestThousandStreams(t *testing.T) {
	const streams, begin = 1000, 50 // begin at a time: a busy machine connects no more in time
	arrived, release := make(chan struct{}, 2*streams), make(chan struct{})
	begins := make(chan struct{}, begin)
	d := newEngine(t, func(w http.ResponseWriter, r *http.Request, s seen) {
		w.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprintf(w, "data: %s\n\n", s.body["prompt"])
		_ = http.NewResponseController(w).Flush()
		arrived <- struct{}{}
		<-begins
		select {
		case <-release:
		case <-r.Context().Done():
		}
		fmt.Fprint(w, "data: [DONE]\n\n")
	})
	px, err := New(Config{Decode: decoders(d.URL)})
	if err != nil {
		t.Fatal(err)
	}
	url, stop := serveOn(t, px)
	defer stop()
	var wg sync.WaitGroup
	for i := range streams {
		begins <- struct{}{}
		wg.Go(func() {
			_, answer, _ := post(t, url, "/v1/completions", fmt.Sprintf(`{"prompt":"%d","stream":true}`, i))
			if want := fmt.Sprintf("data: %d\n\ndata: [DONE]\n\n", i); answer != want {
				t.Errorf("stream %d: %q", i, answer)
				arrived <- struct{}{}
				select {
				case <-begins:
				default:
				}
			}
		})
	}
	for range streams {
		<-arrived
	}
	close(release)
	wg.Wait()
}

// Streams of the other APIs pass event by event, as vLLM writes them.
func TestStreamsOfResponsesAndMessages(t *testing.T) {
	for path, kinds := range map[string][]string{
		"/v1/responses": {"response.created", "response.output_text.delta", "response.completed"},
		"/v1/messages":  {"message_start", "content_block_delta", "message_stop"},
	} {
		t.Run(path, func(t *testing.T) {
			passed := make(chan struct{})
			event := func(kind string) string {
				return fmt.Sprintf("event: %s\ndata: {\"type\":%q}\n\n", kind, kind)
			}
			d := newEngine(t, func(w http.ResponseWriter, r *http.Request, s seen) {
				if s.path != path || s.body["stream"] != true || s.body["kv_transfer_params"] != nil {
					t.Errorf("%s %v", s.path, s.body)
				}
				w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
				for _, kind := range kinds {
					fmt.Fprint(w, event(kind))
					_ = http.NewResponseController(w).Flush()
					select {
					case <-passed: // the client has it before the next one is written
					case <-r.Context().Done():
						return
					}
				}
			})
			p := newEngine(t, answerPrefill)
			px, err := New(Config{Prefill: []Engine{{URL: p.URL, Peer: "p:1"}}, Decode: decoders(d.URL)})
			if err != nil {
				t.Fatal(err)
			}
			url, stop := serveOn(t, px)
			defer stop()
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+path,
				strings.NewReader(`{"model":"m","input":"a","messages":[],"max_tokens":3,"stream":true}`))
			if err != nil {
				t.Fatal(err)
			}
			resp, err := http.DefaultClient.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			if got := resp.Header.Get("Content-Type"); resp.StatusCode != 200 ||
				!strings.HasPrefix(got, "text/event-stream") {
				t.Errorf("%d %s", resp.StatusCode, got)
			}
			for _, kind := range kinds {
				got := make([]byte, len(event(kind)))
				if _, err := io.ReadFull(resp.Body, got); err != nil || string(got) != event(kind) {
					t.Fatalf("%q, %v: want %q", got, err, event(kind))
				}
				passed <- struct{}{}
			}
			if rest, err := io.ReadAll(resp.Body); err != nil || len(rest) > 0 {
				t.Errorf("behind the last event: %q, %v", rest, err)
			}
			if n := len(p.requests()); n != 0 {
				t.Errorf("the prefill engine has %d requests", n)
			}
		})
	}
}

// Bodies of clients come in several forms.
func TestFormsOfBodies(t *testing.T) {
	d := newEngine(t, answerDecode)
	px, err := New(Config{Decode: decoders(d.URL)})
	if err != nil {
		t.Fatal(err)
	}
	url, stop := serveOn(t, px)
	defer stop()
	const body = `{"prompt":"a"}`
	head := "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
	for name, request := range map[string]string{
		"chunks": head + chunked + "\r\n" + chunks(body[:5], body[5:]) + "0\r\n\r\n",
		"chunks with a trailer": head + chunked + "Trailer: X-A\r\n\r\n" + chunks(body) +
			"0\r\nX-A: 1\r\n\r\n",
		"expects a continue": head + fmt.Sprintf("Expect: 100-continue\r\nContent-Length: %d\r\n\r\n%s",
			len(body), body),
		"HTTP/1.0": fmt.Sprintf("POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n%s",
			len(body), body),
	} {
		if answer, err := raw(t, url, request); err != nil || !strings.Contains(answer, "hello") {
			t.Errorf("%s: %q, %v", name, answer, err)
		}
	}
	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	_, _ = io.WriteString(z, body)
	_ = z.Close()
	code, answer, h := post(t, url, "/v1/completions", packed.String(), "Content-Encoding", "gzip")
	refusal(t, "a compressed body", code, h, answer, 400, codeInvalidBody, "not a JSON object")
}

// A client takes compressed answers: those of P are for the router, which reads them.
func TestCompressedAnswers(t *testing.T) {
	pack := func(w http.ResponseWriter, r *http.Request, answer func(http.ResponseWriter)) {
		if r.Header.Get("Accept-Encoding") != "gzip" {
			answer(w)
			return
		}
		w.Header().Set("Content-Encoding", "gzip")
		z := gzip.NewWriter(w)
		answer(packedWriter{w, z})
		_ = z.Close()
	}
	p := newEngine(t, func(w http.ResponseWriter, r *http.Request, s seen) {
		pack(w, r, func(w http.ResponseWriter) { answerPrefill(w, r, s) })
	})
	d := newEngine(t, func(w http.ResponseWriter, r *http.Request, s seen) {
		pack(w, r, func(w http.ResponseWriter) {
			w.Header().Set("Content-Type", "text/event-stream")
			fmt.Fprint(w, "data: [DONE]\n\n")
		})
	})
	_, url := start(t, Config{Mode: PrefillFirst, Prefill: []Engine{{URL: p.URL}},
		Decode: decoders(d.URL)})
	_, answer, h := post(t, url, "/v1/completions", `{"prompt":"a","stream":true}`, "Accept-Encoding",
		"gzip")
	z, err := gzip.NewReader(strings.NewReader(answer))
	if err != nil {
		t.Fatalf("%v: %q", err, answer)
	}
	if text, err := io.ReadAll(z); err != nil || string(text) != "data: [DONE]\n\n" ||
		h.Get("Content-Encoding") != "gzip" {
		t.Errorf("%q, %v", text, err)
	}
	if s := d.requests()[0]; params(s) == nil {
		t.Error("the router could not read the answer of the prefill")
	}
}

type packedWriter struct {
	http.ResponseWriter
	z *gzip.Writer
}

func (p packedWriter) Write(b []byte) (int, error) { return p.z.Write(b) }

// Paths that vLLM has and the router has not are refused by name.
func TestOtherPathsAreRefusedByName(t *testing.T) {
	_, url := start(t, Config{Decode: decoders(newEngine(t, answerDecode).URL)})
	for _, path := range []string{"/v1/embeddings", "/rerank", "/v1/audio/transcriptions",
		"/v1/responses/resp_1/cancel", "/inference/v1/generate", "/v1/load_lora_adapter"} {
		code, answer, h := post(t, url, path, `{}`)
		refusal(t, path, code, h, answer, 404, codeUnknownURL, "POST "+path)
	}
}

// The load of an engine goes down by what went up, however a request ends.
func TestLoadEndsWithTheRequest(t *testing.T) {
	first := func(w http.ResponseWriter) {
		w.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprint(w, "data: 1\n\n")
		_ = http.NewResponseController(w).Flush()
	}
	for _, c := range []struct {
		name   string
		decode func(w http.ResponseWriter, r *http.Request)
		leaves bool // the client, once the decode engine has its request
	}{
		{"no header, and the client leaves", func(_ http.ResponseWriter, r *http.Request) {
			<-r.Context().Done()
		}, true},
		{"silent after an event, and the client leaves", func(w http.ResponseWriter, r *http.Request) {
			first(w)
			<-r.Context().Done()
		}, true},
		{"breaks after an event", func(w http.ResponseWriter, _ *http.Request) {
			first(w)
			panic(http.ErrAbortHandler)
		}, false},
		{"breaks before one", func(http.ResponseWriter, *http.Request) {
			panic(http.ErrAbortHandler)
		}, false},
		{"a client's mistake", func(w http.ResponseWriter, _ *http.Request) {
			http.Error(w, "no", http.StatusBadRequest)
		}, false},
	} {
		for _, mode := range []Mode{Concurrent, PrefillFirst} {
			t.Run(c.name+" "+string(mode), func(t *testing.T) {
				arrived, ended := make(chan struct{}, decodeTries), make(chan struct{}, decodeTries)
				p, d := newEngine(t, answerPrefill), newEngine(t, func(w http.ResponseWriter,
					r *http.Request, _ seen) {
					arrived <- struct{}{}
					defer func() { ended <- struct{}{} }()
					c.decode(w, r)
				})
				px, url := start(t, Config{Mode: mode, Prefill: []Engine{{URL: p.URL, Peer: "p:1"}},
					Decode: decoders(d.URL)})
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/completions",
					strings.NewReader(`{"prompt":"a","stream":true}`))
				if err != nil {
					t.Fatal(err)
				}
				go func() {
					if <-arrived; c.leaves {
						cancel()
					}
				}()
				if resp, err := http.DefaultClient.Do(req); err == nil {
					_, _ = io.Copy(io.Discard, resp.Body) // it may break
					_ = resp.Body.Close()
				}
				waitFor(t, ended, "the decode engine's request goes on")
				until(t, "the engines' load stays", func() bool {
					return load(px.prefill.all[0])+load(px.decode.all[0])+len(px.slots) == 0
				})
			})
		}
	}
}

// The decode engine refuses, or cannot be reached, before the prefill engine has answered, which
// would wait for it: the prefill engine's request ends.
func TestPrefillEndsWithoutADecodeEngine(t *testing.T) {
	for _, reached := range []bool{true, false} {
		t.Run(fmt.Sprint(reached), func(t *testing.T) {
			began := make(chan struct{})
			var p *engine
			p = newEngine(t, func(_ http.ResponseWriter, r *http.Request, _ seen) {
				close(began)
				p.hang(r)
			})
			d := newEngine(t, func(w http.ResponseWriter, _ *http.Request, _ seen) {
				<-began
				if !reached {
					panic(http.ErrAbortHandler)
				}
				http.Error(w, "no", http.StatusBadRequest)
			})
			want := map[bool]int{true: 400, false: 502}[reached]
			_, url := start(t, Config{Prefill: []Engine{{URL: p.URL, Peer: "p:1"}},
				Decode: decoders(d.URL)})
			if code, body, _ := post(t, url, "/v1/completions", `{"prompt":"a"}`); code != want {
				t.Errorf("%d %s, want %d", code, body, want)
			}
			waitFor(t, p.gone, "the prefill engine's request goes on")
		})
	}
}

// A decode engine refuses a request for a stream: the client gets all of the refusal, in its form
// and with its length.
func TestRefusalOfAStreamIsWhole(t *testing.T) {
	const mistake = `{"error":{"message":"no such effort","type":"BadRequestError","code":400}}`
	_, _, _, url := pair(t, PrefillFirst, answerPrefill,
		func(w http.ResponseWriter, _ *http.Request, _ seen) {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusBadRequest)
			fmt.Fprint(w, mistake)
		})
	code, body, h := post(t, url, "/v1/chat/completions",
		`{"messages":[],"stream":true,"reasoning_effort":"x"}`)
	if code != 400 || body != mistake || h.Get("Content-Type") != "application/json" ||
		h.Get("Content-Length") != fmt.Sprint(len(mistake)) {
		t.Errorf("%d %v %q", code, h, body)
	}
}

// Prefill engines that all have no place are not down: decode engines serve meanwhile, and the
// prefill engines get requests again.
func TestFullPrefillEnginesAreUsedAgain(t *testing.T) {
	var cfg Config
	var engines []*faulty
	for range 2 {
		f := newFaulty(t, answerPrefill)
		f.status.Store(429)
		engines = append(engines, f)
		cfg.Prefill = append(cfg.Prefill, Engine{URL: f.URL, Peer: "p:1"})
	}
	cfg.Decode = decoders(newEngine(t, answerDecode).URL)
	_, url := start(t, cfg)
	var wg sync.WaitGroup
	for range 64 {
		wg.Go(func() {
			if code, body, _ := post(t, url, "/v1/completions", `{"prompt":"a"}`); code != 200 {
				t.Errorf("%d %s", code, body)
			}
		})
	}
	wg.Wait()
	until(t, "/health has another reason", func() bool {
		post(t, url, "/v1/completions", `{"prompt":"a"}`) // they may have a place again after 1 s
		resp, err := http.Get(url + "/health")
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		return err == nil && strings.Contains(string(text),
			"degraded: no prefill engine is fit (2 are busy or fail)")
	})
	for _, f := range engines {
		f.status.Store(0)
	}
	until(t, "no prefill engine gets a request", func() bool {
		if code, body, _ := post(t, url, "/v1/completions", `{"prompt":"a"}`); code != 200 {
			t.Errorf("%d %s", code, body)
		}
		return len(engines[0].requests())+len(engines[1].requests()) > 0
	})
}

// Requests without a body end at once, whatever their method.
func TestRequestsWithoutABody(t *testing.T) {
	px, err := New(Config{Decode: decoders(newEngine(t, answerDecode).URL)})
	if err != nil {
		t.Fatal(err)
	}
	url, stop := serveOn(t, px)
	defer stop()
	for request, want := range map[string]string{
		"HEAD /v1/models":         "HTTP/1.1 200",
		"GET /v1/models":          "HTTP/1.1 200",
		"DELETE /v1/models":       "HTTP/1.1 405",
		"POST /v1/completions":    "HTTP/1.1 400",
		"OPTIONS /v1/completions": "HTTP/1.1 405",
	} {
		answer, err := raw(t, url, request+" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
		if err != nil || !strings.HasPrefix(answer, want) {
			t.Errorf("%s: %q, %v", request, answer, err)
		}
	}
}

// A decode engine has answered with its header, and so may have fetched the cache, before its
// connection breaks without a byte: the next one computes the prompt.
func TestDecodeEngineBreaksAfterItsHeader(t *testing.T) {
	for _, mode := range []Mode{Concurrent, PrefillFirst} {
		broken := sends(t, "HTTP/1.1 200 OK\r\n"+events+chunked+"\r\n")
		p, d := newEngine(t, answerPrefill), newEngine(t, answerDecode)
		px, url := start(t, Config{Mode: mode, Prefill: []Engine{{URL: p.URL, Peer: "p:1"}},
			Decode: decoders(broken, d.URL)})
		px.decode.next = 0 // the first engine gets the first request
		code, body, _ := post(t, url, "/v1/completions", `{"prompt":"a","stream":true}`)
		if code != 200 {
			t.Errorf("%s: %d %s", mode, code, body)
		}
		if got := d.requests(); len(got) != 1 || params(got[0]) != nil {
			t.Errorf("%s: the second decode engine has %v", mode, got)
		}
	}
}
