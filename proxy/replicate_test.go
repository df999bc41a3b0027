package proxy

import (
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"
)

// twins starts a router of engines that prefill and decode. Their streamed answers begin at once,
// and end when the returned channel is closed.
func twins(t *testing.T, cfg Config, n int) (engines []*engine, p *Proxy, url string,
	end chan struct{}) {
	end = make(chan struct{})
	for range n {
		e := newEngine(t, func(w http.ResponseWriter, r *http.Request, s seen) {
			if params(s)["do_remote_decode"] == true {
				answerPrefill(w, r, s)
				return
			}
			fmt.Fprint(w, "data: begun\n")
			_ = http.NewResponseController(w).Flush()
			select {
			case <-end:
			case <-r.Context().Done():
			}
			fmt.Fprint(w, "data: over\n")
		})
		engines = append(engines, e)
		cfg.Prefill = append(cfg.Prefill, Engine{URL: e.URL, Peer: "127.0.0.1:7650"})
		cfg.Decode = append(cfg.Decode, Engine{URL: e.URL})
	}
	p, url = start(t, cfg)
	return engines, p, url, end
}

// decoded counts the requests that an engine answered, and those for which it got blocks.
func decoded(e *engine) (all, moved int) {
	for _, s := range e.requests() {
		if params(s)["do_remote_decode"] == true {
			continue
		}
		all++
		if params(s)["do_remote_prefill"] == true {
			moved++
		}
	}
	return all, moved
}

// Askers of one document: the engine that has it serves the first ones, one fetch gives another
// engine a copy, and that engine serves the next ones from it.
func TestHotPrefixIsFetchedOnce(t *testing.T) {
	log := &lines{}
	engines, _, url, end := twins(t, Config{Mode: PrefillFirst, Policy: "auto", Replicate: 3,
		Log: slog.New(slog.NewTextHandler(log, nil))}, 2)
	document := strings.Repeat("a long document ", 1000)
	var wg sync.WaitGroup
	for i := range 6 {
		wg.Go(func() {
			code, answer, _ := post(t, url, "/v1/completions", prompt(document+fmt.Sprint(i)))
			if code != 200 || !strings.Contains(answer, "over") {
				t.Errorf("%d %s", code, answer)
			}
		})
		until(t, "the request has no answer", func() bool {
			_, metrics, _ := getMetrics(t, url)
			return strings.Contains(metrics, fmt.Sprintf(
				"kvspray_proxy_first_byte_seconds_count{mode=\"prefill-first\"} %d\n", i+1))
		})
	}
	close(end)
	wg.Wait()
	moved := 0
	for i, e := range engines {
		all, m := decoded(e)
		if all != 3 {
			t.Errorf("engine %d answered %d of 6 requests, want 3", i, all)
		}
		moved += m
	}
	if moved != 1 {
		t.Errorf("%d requests got blocks from the other engine, want 1", moved)
	}
	_, metrics, _ := getMetrics(t, url)
	if !strings.Contains(metrics, "kvspray_proxy_placement_replicas_total 1\n") {
		t.Error("the metric does not count one copy")
	}
	if text := log.String(); strings.Count(text, "a hot prefix goes to another engine") != 1 ||
		strings.Count(text, "replica=true") != 1 {
		t.Errorf("the log does not name the copy: %s", text)
	}
}

// Without a policy an engine in both lists does not send blocks to itself.
func TestEngineInBothListsDoesNotSendToItself(t *testing.T) {
	for n := 1; n <= 2; n++ {
		engines, p, url, end := twins(t, Config{Mode: PrefillFirst}, n)
		close(end)
		for i := range 8 {
			if code, answer, _ := post(t, url, "/v1/completions", prompt(fmt.Sprint(i))); code != 200 {
				t.Fatalf("%d %s", code, answer)
			}
		}
		for i, e := range engines {
			xfers := map[any]bool{}
			for _, s := range e.requests() {
				xfer := own(s)["xfer"]
				if xfer != nil && xfers[xfer] {
					t.Errorf("%d engines: engine %d sends to itself", n, i)
				}
				xfers[xfer] = true
			}
			if all, moved := decoded(e); all == 0 || moved != 0 && n == 1 {
				t.Errorf("%d engines: engine %d answered %d requests, %d with blocks", n, i, all, moved)
			}
		}
		until(t, "requests are in flight at the end", func() bool {
			return load(p.prefill.all[0]) == 0 && load(p.decode.all[0]) == 0
		})
	}
	// One of two engines goes down: the other one computes alone.
	engines, _, url, end := twins(t, Config{Mode: PrefillFirst}, 2)
	close(end)
	engines[0].Close()
	for i := range 4 {
		if code, answer, _ := post(t, url, "/v1/completions", prompt(fmt.Sprint(i))); code != 200 {
			t.Fatalf("%d %s", code, answer)
		}
	}
}

// An engine in both lists has one feed, in whichever list its events are named.
func TestEngineInBothListsHasOneFeed(t *testing.T) {
	e := newReporting(t)
	with, without := []Engine{e.reported()}, decoders(e.URL)
	for _, x := range [][2][]Engine{{with, without}, {without, with}, {with, with}} {
		p, err := New(Config{Prefill: x[0], Decode: x[1], Mode: PrefillFirst, Policy: "auto"})
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for _, b := range p.backends() {
			if b.reporter != nil {
				n++
			}
		}
		if n != 1 {
			t.Errorf("%d feeds", n)
		}
	}
}

// The prefill engine of a decision may leave before the request begins. Another one takes its part,
// and does not send to itself.
func TestOtherPrefillThanDecidedDoesNotSendToItself(t *testing.T) {
	engines, p, _, end := twins(t, Config{Mode: PrefillFirst}, 2)
	close(end)
	req, err := parseRequest(kindCompletion, []byte(prompt("a")))
	if err != nil {
		t.Fatal(err)
	}
	params := req.concurrentParams(randomID(), "127.0.0.1:7650", "")
	in := httptest.NewRequest(http.MethodPost, "/v1/completions", nil)
	j := &job{p: p, w: httptest.NewRecorder(), in: in, req: req, id: "a", start: time.Now(),
		mode: PrefillFirst, prefer: p.decode.all[0], source: p.prefill.all[0], tried: map[*backend]bool{}}
	j.decode(in.Context(), params)
	if _, moved := decoded(engines[0]); moved != 0 {
		t.Error("an engine gets blocks from itself")
	}
	if all, moved := decoded(engines[1]); all != 1 || moved != 1 {
		t.Errorf("the other engine answers %d requests, %d with blocks", all, moved)
	}
}
