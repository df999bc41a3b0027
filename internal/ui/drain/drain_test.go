package drain

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/testutil"
)

// host is a sidecar and an engine with some requests, one of which ends with each look.
type host struct {
	sidecar, engine *httptest.Server
	left            atomic.Int64 // requests of the engine
	calls           atomic.Value // the last one of the sidecar
	marks           atomic.Int64 // calls of the sidecar
	refused         atomic.Int64 // calls of the sidecar that are still to fail
	sources         atomic.Int64 // source leases, one of which ends with each call
	failing         atomic.Int64 // looks that are still to fail
	metrics         atomic.Value // the engine's answer, if not empty
}

func newHost(t *testing.T, requests int64) *host {
	h := &host{}
	h.left.Store(requests)
	h.metrics.Store("")
	h.sidecar = testutil.HTTPSocket(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h.calls.Store(r.Method + " " + r.URL.Path)
		h.marks.Add(1)
		if h.refused.Add(-1) >= 0 {
			http.Error(w, "not now", http.StatusServiceUnavailable)
			return
		}
		n := h.sources.Load()
		fmt.Fprintf(w, `{"leaving": true, "source_leases": %d}`, n)
		if n > 0 {
			h.sources.Add(-1)
		}
	}))
	h.engine = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if h.failing.Add(-1) >= 0 {
			http.Error(w, "busy", http.StatusInternalServerError)
			return
		}
		if m := h.metrics.Load(); m != "" {
			_, _ = fmt.Fprint(w, m)
			return
		}
		n := h.left.Load()
		fmt.Fprintf(w, "# HELP vllm:num_requests_running Requests.\n"+
			"vllm:num_requests_running{engine=\"0\",model_name=\"a b\"} %d.0\n"+
			"vllm:num_requests_running_more 7\nvllm:num_requests_waiting{engine=\"0\"} 0.0\n", n)
		if n > 0 {
			h.left.Add(-1)
		}
	}))
	t.Cleanup(h.engine.Close)
	return h
}

func (h *host) options(timeout time.Duration) Options {
	return Options{Admin: h.sidecar.Listener.Addr().String(), Engine: h.engine.URL + "/",
		Timeout: timeout}
}

const long = time.Minute

// wantError fails if err has not all of the texts.
func wantError(t *testing.T, err error, texts ...string) {
	t.Helper()
	if err == nil {
		t.Fatal("no error")
	}
	for _, x := range texts {
		if !strings.Contains(err.Error(), x) {
			t.Errorf("%v: want %q", err, x)
		}
	}
}

func TestWaitsUntilTheEngineIsIdle(t *testing.T) {
	t.Parallel()
	h := newHost(t, 2)
	if err := Run(t.Context(), h.options(long)); err != nil {
		t.Fatal(err)
	}
	if n := h.left.Load(); n != 0 {
		t.Errorf("it ended while the engine had %d requests", n)
	}
	if got := h.calls.Load(); got != "POST /v1/leave" {
		t.Errorf("the sidecar was asked for %v", got)
	}
	if n := h.marks.Load(); n != 2+quiet {
		t.Errorf("the mark was set %d times: it has to be renewed at each look", n)
	}
}

// Blocks that no peer has fetched would be lost with the engine.
func TestWaitsForSourceLeases(t *testing.T) {
	t.Parallel()
	h := newHost(t, 0)
	h.sources.Store(2)
	if err := Run(t.Context(), h.options(long)); err != nil {
		t.Fatal(err)
	}
	if n := h.marks.Load(); n != 2+quiet {
		t.Errorf("it ended after %d looks", n)
	}
	h.sources.Store(1 << 40)
	wantError(t, Run(t.Context(), h.options(time.Second)), "still wait to be fetched after 1s")
}

func TestEndsAtItsTimeout(t *testing.T) {
	t.Parallel()
	h := newHost(t, 1<<40)
	wantError(t, Run(t.Context(), h.options(time.Second)), "still has 10995",
		"after 1s; raise --timeout")
}

func TestInterrupted(t *testing.T) {
	t.Parallel()
	h := newHost(t, 1<<40)
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	err := Run(ctx, h.options(long))
	wantError(t, err, "interrupted after")
	if strings.Contains(err.Error(), "--timeout") {
		t.Errorf("an interrupted drain reports that its time is over: %v", err)
	}
}

// With as much notice as time the last look decides.
func TestNoticeIsTheTimeout(t *testing.T) {
	t.Parallel()
	h := newHost(t, 0)
	o := h.options(3 * time.Second)
	o.Notice = o.Timeout
	begun := time.Now()
	if err := Run(t.Context(), o); err != nil {
		t.Error(err)
	}
	if took := time.Since(begun); took < o.Notice {
		t.Errorf("it ended after %v", took)
	}
	if n := h.marks.Load(); n < 3 {
		t.Errorf("the mark was set %d times: it has to be renewed during the notice", n)
	}
	h.left.Store(5)
	wantError(t, Run(t.Context(), o), "still has 5 requests")
}

// A worker of an engine ends after its leader, which has the metrics. Blocks of its own wait all
// the same, and without the option an engine that does not answer can be one that is busy.
func TestEnded(t *testing.T) {
	t.Parallel()
	h := newHost(t, 0)
	o := h.options(time.Second)
	h.engine.Close()
	wantError(t, Run(t.Context(), o), "connection refused", "after 1s; raise --timeout")
	o.Ended, o.Timeout = true, long
	if err := Run(t.Context(), o); err != nil {
		t.Error(err)
	}
	h.sources.Store(1 << 40)
	o.Timeout = time.Second
	wantError(t, Run(t.Context(), o), "still wait to be fetched after 1s")
	h = newHost(t, 0)
	h.failing.Store(1 << 40)
	o = h.options(time.Second)
	o.Ended = true
	wantError(t, Run(t.Context(), o), "500 Internal Server Error")
	for _, c := range []struct {
		err  error
		want bool
	}{{&net.DNSError{IsNotFound: true}, true}, {&net.DNSError{IsTemporary: true,
		UnwrapErr: syscall.ECONNREFUSED}, false}, {syscall.EHOSTUNREACH, false},
		{context.DeadlineExceeded, false}} {
		if ended(fmt.Errorf("GET: %w", c.err)) != c.want {
			t.Errorf("%v: want %v", c.err, c.want)
		}
	}
}

func TestUndo(t *testing.T) {
	t.Parallel()
	h := newHost(t, 1)
	o := h.options(long)
	o.Undo = true
	if err := Run(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	if got := h.calls.Load(); got != "DELETE /v1/leave" || h.left.Load() != 1 {
		t.Errorf("%v, %d requests", got, h.left.Load())
	}
}

// Without its sidecar an engine still answers what it has; the error comes after that.
func TestWithoutASidecar(t *testing.T) {
	t.Parallel()
	h := newHost(t, 1)
	h.sidecar.Close()
	wantError(t, Run(t.Context(), h.options(long)), "sidecar")
	if n := h.left.Load(); n != 0 {
		t.Errorf("%d requests", n)
	}
}

// A sidecar that restarts is marked again: only what the last call found counts.
func TestSidecarThatRestarts(t *testing.T) {
	t.Parallel()
	h := newHost(t, 0)
	h.refused.Store(2)
	if err := Run(t.Context(), h.options(long)); err != nil {
		t.Error(err)
	}
	h.left.Store(1 << 40)
	h.refused.Store(1 << 40)
	wantError(t, Run(t.Context(), h.options(time.Second)), "requests", "503", "not now")
}

// A look that fails is no evidence about the engine: a loaded one may answer late.
func TestLooksThatFail(t *testing.T) {
	t.Parallel()
	h := newHost(t, 2)
	h.failing.Store(2)
	if err := Run(t.Context(), h.options(long)); err != nil {
		t.Error(err)
	}
	if n := h.left.Load(); n != 0 {
		t.Errorf("it ended while the engine had %d requests", n)
	}
}

// An engine that may still have requests gets the whole timeout.
func TestNeverIdle(t *testing.T) {
	t.Parallel()
	for metrics, text := range map[string]string{
		"":                                "500 Internal Server Error: busy",
		"python_info 1\n":                 "none of vllm:num_requests_running",
		"vllm:num_requests_running NaN\n": `"NaN"`,
		"vllm:num_requests_waiting x\n":   `"x"`,
		"sglang:num_prefill_bootstrap_queue_reqs 1": "still has 1 requests",
		"sglang:num_prefill_inflight_queue_reqs 2":  "still has 2 requests",
		"sglang:num_decode_prealloc_queue_reqs 3":   "still has 3 requests",
		"sglang:num_decode_transfer_queue_reqs 4":   "still has 4 requests",
	} {
		t.Run(text, func(t *testing.T) {
			t.Parallel()
			h := newHost(t, 0)
			if metrics == "" {
				h.failing.Store(1 << 40)
			} else {
				h.metrics.Store("sglang:num_running_reqs 0.0\n" + metrics)
				if strings.Contains(text, "none of") {
					h.metrics.Store(metrics)
				}
			}
			begun := time.Now()
			wantError(t, Run(t.Context(), h.options(time.Second)), text, "after 1s")
			if took := time.Since(begun); took < time.Second {
				t.Errorf("it gave up after %v", took)
			}
		})
	}
}
