// SPDX-License-Identifier: Apache-2.0

package drain

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// host is a sidecar and an engine with some requests, one of which ends with each look.
func host(t *testing.T, requests int64) (sidecar, engine *httptest.Server, left *atomic.Int64,
	calls *atomic.Value) {
	left, calls = &atomic.Int64{}, &atomic.Value{}
	left.Store(requests)
	sidecar = httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		calls.Store(r.Method + " " + r.URL.Path)
	}))
	engine = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		n := left.Load()
		fmt.Fprintf(w, "# HELP vllm:num_requests_running Requests.\n"+
			"vllm:num_requests_running{engine=\"0\",model_name=\"a b\"} %d.0\n"+
			"vllm:num_requests_running_more 7\nvllm:num_requests_waiting{engine=\"0\"} 0.0\n", n)
		if n > 0 {
			left.Add(-1)
		}
	}))
	t.Cleanup(sidecar.Close)
	t.Cleanup(engine.Close)
	return sidecar, engine, left, calls
}

func TestWaitsUntilTheEngineIsIdle(t *testing.T) {
	sidecar, engine, left, calls := host(t, 2)
	o := Options{HTTP: sidecar.Listener.Addr().String(), Engine: engine.URL + "/"}
	if err := Run(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	if n := left.Load(); n != 0 {
		t.Errorf("it ended while the engine had %d requests", n)
	}
	if got := calls.Load(); got != "POST /v1/leave" {
		t.Errorf("the sidecar was asked for %v", got)
	}
}

func TestEndsAtItsTimeout(t *testing.T) {
	sidecar, engine, _, _ := host(t, 1<<40)
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	err := Run(ctx, Options{HTTP: sidecar.Listener.Addr().String(), Engine: engine.URL})
	if err == nil || !strings.Contains(err.Error(), "still has 10995") {
		t.Error(err)
	}
}

func TestUndo(t *testing.T) {
	sidecar, engine, left, calls := host(t, 1)
	if err := Run(t.Context(), Options{HTTP: sidecar.Listener.Addr().String(), Engine: engine.URL,
		Undo: true}); err != nil {
		t.Fatal(err)
	}
	if got := calls.Load(); got != "DELETE /v1/leave" || left.Load() != 1 {
		t.Errorf("%v, %d requests", got, left.Load())
	}
}

// Without its sidecar an engine still answers what it has; the error comes after that.
func TestWithoutASidecar(t *testing.T) {
	sidecar, engine, left, _ := host(t, 1)
	sidecar.Close()
	err := Run(t.Context(), Options{HTTP: sidecar.Listener.Addr().String(), Engine: engine.URL})
	if err == nil || !strings.Contains(err.Error(), "sidecar") || left.Load() != 0 {
		t.Errorf("%v, %d requests", err, left.Load())
	}
}

func TestBadEngine(t *testing.T) {
	sidecar, _, _, _ := host(t, 0)
	other := httptest.NewServer(http.NotFoundHandler())
	defer other.Close()
	for url, text := range map[string]string{other.URL: "404 Not Found",
		sidecar.URL: "has none of vllm:num_requests_running"} {
		err := Run(t.Context(), Options{HTTP: sidecar.Listener.Addr().String(), Engine: url})
		if err == nil || !strings.Contains(err.Error(), text) || !strings.Contains(err.Error(),
			"--engine") {
			t.Errorf("%v: want %q", err, text)
		}
	}
}
