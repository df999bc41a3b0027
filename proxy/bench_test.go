package proxy

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
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
