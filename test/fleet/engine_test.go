package fleet

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/kvspray/kvspray/connector/connectortest"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/internal/sys/mem"
)

// engineConfig is a fake engine's, in its environment.
type engineConfig struct {
	Socket, Listen, ID, Role string
	Loads                    time.Duration // until it answers
	GPU                      int           // that has its cache, from 1; 0: the host's memory
}

// stats are what a fake engine has seen, with its own times. All are of one host.
type stats struct {
	Healthy, First, Last time.Time // first good health check; first and last request
	Requests             int
}

// runEngine is a fake engine: its worker at the sidecar, and its API server.
func runEngine(c *engineConfig) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	l, err := net.Listen("tcp", c.Listen)
	if err != nil {
		return err
	}
	ready := time.Now().Add(c.Loads)
	var mu sync.Mutex
	var seen stats
	answer := func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		mu.Lock()
		seen.Requests++
		seen.Last = time.Now()
		if seen.First.IsZero() {
			seen.First = seen.Last
		}
		mu.Unlock()
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprintf(w, `{"choices":[{"text":%q}]}`, c.ID)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		switch now := time.Now(); {
		case now.Before(ready):
			w.WriteHeader(http.StatusServiceUnavailable)
		case seen.Healthy.IsZero():
			seen.Healthy = ready // it could have answered from then on
		}
	})
	mux.HandleFunc("GET /v1/models", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"object":"list","data":[{"id":"m"}]}`)
	})
	mux.HandleFunc("GET /stats", func(w http.ResponseWriter, _ *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		_ = json.NewEncoder(w).Encode(seen)
	})
	mux.HandleFunc("POST /v1/completions", answer)
	srv := &http.Server{Handler: mux}
	go func() { _ = srv.Serve(l) }()
	defer func() { _ = srv.Close() }()
	region, err := mem.NewAnonymous("cache", 1<<16)
	if err != nil {
		return err
	}
	shape := connectortest.Shape{Layers: 4, NumBlocks: 4, TokensPerBlock: 4, TokenBytes: 64}
	w, err := connectortest.NewWorker(connectortest.Config{Socket: c.Socket, Layout: shape.Layout(),
		Regions: []*mem.Region{region},
		Engine: msg.Engine{Name: "fake", Version: "1", ID: c.ID, Api: "http://" + l.Addr().String(),
			Role: c.Role},
		Tamper: func(m *msg.Register, fds []int) []int {
			if c.GPU > 0 {
				onGPU(c.GPU, &m.Regions[0])
			}
			return fds
		}})
	if err != nil {
		return err
	}
	defer func() { _ = w.Close() }()
	for ctx.Err() == nil { // as the shim does, it returns to a sidecar that has restarted
		if _, err := w.Connect(ctx); err == nil {
			_ = w.WaitEnd(ctx)
			continue
		} else if os.Getenv("KVSPRAY_FLEET_DEBUG") != "" {
			fmt.Fprintln(os.Stderr, err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(50 * time.Millisecond):
		}
	}
	return nil
}
