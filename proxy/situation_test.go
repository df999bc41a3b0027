// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
)

// A thousand streams at once are all served, and none is taken for another.
func TestThousandStreams(t *testing.T) {
	const streams = 1000
	arrived, release := make(chan struct{}, streams), make(chan struct{})
	d := newEngine(t, func(w http.ResponseWriter, r *http.Request, s seen) {
		w.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprintf(w, "data: %s\n\n", s.body["prompt"])
		_ = http.NewResponseController(w).Flush()
		arrived <- struct{}{}
		select {
		case <-release:
		case <-r.Context().Done():
		}
		fmt.Fprint(w, "data: [DONE]\n\n")
	})
	px, err := New(Config{Decode: []string{d.URL}})
	if err != nil {
		t.Fatal(err)
	}
	url, stop := serveOn(t, px)
	defer stop()
	var wg sync.WaitGroup
	for i := range streams {
		wg.Go(func() {
			_, answer, _ := post(t, url, "/v1/completions", fmt.Sprintf(`{"prompt":"%d","stream":true}`, i))
			if want := fmt.Sprintf("data: %d\n\ndata: [DONE]\n\n", i); answer != want {
				t.Errorf("stream %d: %q", i, answer)
			}
		})
	}
	for range streams {
		<-arrived
	}
	close(release)
	wg.Wait()
}

// Bodies of clients come in several forms.
func TestFormsOfBodies(t *testing.T) {
	d := newEngine(t, answerDecode)
	px, err := New(Config{Decode: []string{d.URL}})
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
	_, url := start(t, Config{Mode: PrefillFirst, Prefill: []Prefill{{URL: p.URL}},
		Decode: []string{d.URL}})
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
	_, url := start(t, Config{Decode: []string{newEngine(t, answerDecode).URL}})
	for _, path := range []string{"/v1/embeddings", "/rerank", "/v1/audio/transcriptions",
		"/v1/responses/resp_1/cancel", "/inference/v1/generate", "/v1/load_lora_adapter"} {
		code, answer, h := post(t, url, path, `{}`)
		refusal(t, path, code, h, answer, 404, codeUnknownURL, "POST "+path)
	}
}
