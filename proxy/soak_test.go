package proxy

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// soakFor is how long two engines fail in turns after each has failed in each way;
// KVSPRAY_ROUTER_SOAK=5m makes it longer.
func soakFor(t *testing.T) time.Duration {
	text := os.Getenv("KVSPRAY_ROUTER_SOAK")
	if text == "" {
		return 0
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		t.Fatal("KVSPRAY_ROUTER_SOAK: ", err)
	}
	return d
}

// Two engines are frozen, broken, busy, slow or gone in turns, under load: no request fails that
// the other one could serve. Only an answer that has begun may break.
func TestEnginesFailInTurns(t *testing.T) {
	const clients = 16
	answer := func(w http.ResponseWriter, r *http.Request, s seen) {
		if s.body["stream"] != true {
			answerDecode(w, r, s)
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		for range 3 {
			fmt.Fprint(w, "data: {}\n\n")
			_ = http.NewResponseController(w).Flush()
		}
		fmt.Fprint(w, "data: [DONE]\n\n")
	}
	var engines [2]*faulty
	var slow [2]atomic.Bool
	for i := range engines {
		engines[i] = newFaulty(t, func(w http.ResponseWriter, r *http.Request, s seen) {
			if slow[i].Load() {
				select {
				case <-time.After(20 * time.Millisecond):
				case <-r.Context().Done():
				}
			}
			answer(w, r, s)
		})
	}
	times := quick()
	times.Silent = 2 * time.Second // on a busy machine an engine may get no CPU for a while
	px, url := start(t, Config{Decode: decoders(engines[0].URL, engines[1].URL), Times: times})
	stop := make(chan struct{})
	var wg sync.WaitGroup
	var served, broken atomic.Int64
	var rounds [clients]atomic.Int64
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: clients}}
	defer client.CloseIdleConnections()
	for c := range clients {
		wg.Go(func() {
			for n := 0; ; n++ {
				rounds[c].Add(1)
				select {
				case <-stop:
					return
				case <-time.After(time.Millisecond):
				}
				streamed := (n+c)%2 == 0
				resp, err := client.Post(url+"/v1/completions", "application/json",
					strings.NewReader(fmt.Sprintf(`{"prompt":"a","stream":%v}`, streamed)))
				if err != nil {
					t.Errorf("no answer: %v", err)
					return
				}
				body, err := io.ReadAll(resp.Body)
				_ = resp.Body.Close()
				switch {
				case resp.StatusCode != 200:
					t.Errorf("%d %s", resp.StatusCode, body)
				case err != nil && streamed && len(body) > 0:
					broken.Add(1) // it had begun
				case err != nil:
					t.Errorf("an answer broke: %v", err)
				case streamed && !bytes.HasSuffix(body, []byte("data: [DONE]\n\n")):
					t.Errorf("not whole: %q", body)
				default:
					served.Add(1)
				}
			}
		})
	}
	fit := func() bool {
		return px.decode.all[0].condition() == fit && px.decode.all[1].condition() == fit
	}
	// A request that one turn delayed must not meet the next one, too.
	ended := func() {
		var from [clients]int64
		for c := range from {
			from[c] = rounds[c].Load()
		}
		until(t, "requests of an earlier turn do not end", func() bool {
			for c := range from {
				if rounds[c].Load() < from[c]+2 {
					return false
				}
			}
			return true
		})
	}
	progress := func(what string, want int64) {
		from := served.Load()
		until(t, what, func() bool { return served.Load() >= from+want })
	}
	turns := 0
	end := time.Now().Add(soakFor(t))
	for ; (turns < 12 || time.Now().Before(end)) && !t.Failed(); turns++ {
		f, sleepy := engines[turns%2], &slow[turns%2]
		until(t, "the engines do not recover", fit)
		ended()
		switch turns / 2 % 6 {
		case 0:
			f.status.Store(500)
			progress("broken: nothing is served", 4*clients)
			f.status.Store(0)
		case 1:
			f.truncate.Store(true)
			progress("resets: nothing is served", 4*clients)
			f.truncate.Store(false)
		case 2:
			f.status.Store(429)
			progress("busy: nothing is served", 4*clients)
			f.status.Store(0)
		case 3:
			sleepy.Store(true)
			progress("slow: nothing is served", 4*clients)
			sleepy.Store(false)
		case 4:
			f.freeze()
			until(t, "a frozen engine is not silent", func() bool {
				return px.decode.all[turns%2].condition() >= silent
			})
			progress("frozen: nothing is served", 4*clients)
			f.wake()
		case 5:
			f.leave()
			until(t, "an engine that refuses connections is not down", func() bool {
				return px.decode.all[turns%2].condition() == down
			})
			progress("gone: nothing is served", 4*clients)
			f.comeBack()
		}
	}
	close(stop)
	wg.Wait()
	t.Logf("%d turns, %d requests served, %d begun answers broke", turns, served.Load(), broken.Load())
}
