package proxy

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
)

// processTime is the processors' time of this process in microseconds.
func processTime(b *testing.B) float64 {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_PROCESS_CPUTIME_ID, &t); err != nil {
		b.Fatal(err)
	}
	return float64(t.Nano()) / 1e3
}

// BenchmarkRouter is a whole request through the router, from many clients at once to eight engines
// that answer at once. All run in one process, so the engines' and the clients' part is in it.
func BenchmarkRouter(b *testing.B) {
	for _, size := range []int{4 << 10, 128 << 10} {
		for _, policy := range []string{"least-loaded", "auto"} {
			b.Run(fmt.Sprintf("%dKiB/%s", size>>10, policy), func(b *testing.B) {
				var urls []string
				for range 8 {
					e := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
						_, _ = io.Copy(io.Discard, r.Body)
						answerDecode(w, r, seen{})
					}))
					defer e.Close()
					urls = append(urls, e.URL)
				}
				p, err := New(Config{Decode: decoders(urls...), Mode: PrefillFirst, Policy: policy})
				if err != nil {
					b.Fatal(err)
				}
				srv := httptest.NewServer(p.Handler())
				defer http.DefaultClient.CloseIdleConnections()
				defer p.client.CloseIdleConnections()
				defer srv.Close()
				var n atomic.Int64
				b.SetParallelism(8)
				before := processTime(b)
				b.ResetTimer()
				b.RunParallel(func(pb *testing.PB) {
					for pb.Next() {
						text := fmt.Sprintf("%d ", n.Add(1)%64) + strings.Repeat("a long document ", size/16)
						resp, err := http.Post(srv.URL+"/v1/completions", "application/json",
							strings.NewReader(prompt(text)))
						if err != nil {
							b.Error(err)
							return
						}
						_, _ = io.Copy(io.Discard, resp.Body)
						_ = resp.Body.Close()
						if resp.StatusCode != http.StatusOK {
							b.Error(resp.Status)
						}
					}
				})
				b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "requests/s")
				b.ReportMetric((processTime(b)-before)/float64(b.N), "cpu-us/request")
			})
		}
	}
}

// BenchmarkStream is a stream of tokens through the router, with continuations and without, in
// turns. Engines and clients run in the same process: their part is in both. The difference is that
// of the router, and of the token ids that the engine sends.
func BenchmarkStream(b *testing.B) {
	const tokens, clients = 1000, 16
	event := func(ids string) []byte {
		return []byte(`data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion",` +
			`"created":1700000000,"model":"a-model","choices":[{"index":0,"text":" token","logprobs":null,` +
			`"finish_reason":null,"stop_reason":null,` + ids + `}]}` + "\n\n")
	}
	plain := event(`"token_ids":null,"prompt_token_ids":null`)
	first := event(`"token_ids":[12345],"prompt_token_ids":[1,2,3]`)
	next := event(`"token_ids":[12345],"prompt_token_ids":null`)
	e := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		w.Header().Set("Content-Type", "text/event-stream")
		events := [2][]byte{plain, plain}
		if strings.Contains(string(body), "return_token_ids") {
			events = [2][]byte{first, next}
		}
		for i := range tokens {
			_, _ = w.Write(events[min(i, 1)]) // the router may be gone
			_ = http.NewResponseController(w).Flush()
		}
		_, _ = io.WriteString(w, "data: [DONE]\n\n")
	}))
	defer e.Close()
	var urls [2]string
	for i, follows := range []bool{false, true} {
		p, err := New(Config{Decode: decoders(e.URL), Continue: follows})
		if err != nil {
			b.Fatal(err)
		}
		srv := httptest.NewServer(p.Handler())
		defer srv.Close()
		defer p.client.CloseIdleConnections()
		urls[i] = srv.URL
	}
	defer http.DefaultClient.CloseIdleConnections()
	var used [2]float64
	for range b.N {
		for i, url := range urls {
			before := processTime(b)
			var wg sync.WaitGroup
			for range clients {
				wg.Go(func() {
					resp, err := http.Post(url+"/v1/completions", "application/json",
						strings.NewReader(`{"prompt":"a","stream":true,"max_tokens":1000}`))
					if err != nil {
						b.Error(err)
						return
					}
					_, _ = io.Copy(io.Discard, resp.Body)
					_ = resp.Body.Close()
				})
			}
			wg.Wait()
			used[i] += processTime(b) - before
		}
	}
	n := float64(b.N) * tokens * clients
	b.ReportMetric(used[0]/n, "cpu-us/token")
	b.ReportMetric(used[1]/n, "cpu-us/token-followed")
}

// BenchmarkTake is one event of a followed answer.
func BenchmarkTake(b *testing.B) {
	r, err := parseRequest(kindCompletion, []byte(`{"prompt":"a","stream":true}`))
	if err != nil {
		b.Fatal(err)
	}
	var room budget
	room.give(1 << 30)
	f := r.follow(&room)
	event := []byte(`data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion",` +
		`"created":1700000000,"model":"a-model","choices":[{"index":0,"text":" token","logprobs":null,` +
		`"finish_reason":null,"stop_reason":null,"token_ids":[12345],"prompt_token_ids":[1]}]}` + "\n\n")
	b.ReportAllocs()
	before := processTime(b)
	for range b.N {
		if _, err := f.take(event); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric((processTime(b)-before)/float64(b.N), "cpu-us/event")
}
