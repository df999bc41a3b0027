// Package drain is `kvspray drain`: it takes an engine out of service before the engine ends. It
// marks the engine as leaving at the sidecar, from which routers read the mark; they send no new
// requests there. The mark expires, so the command renews it while the engine still has requests.
// An engine whose metrics cannot be read does not count as idle, but for Options.Ended. No
// goroutines.
package drain

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/kvspray/kvspray/internal/nodeapi"
	"github.com/kvspray/kvspray/internal/redact"
	"github.com/kvspray/kvspray/internal/ui/ask"
)

const (
	poll     = 500 * time.Millisecond
	quiet    = 3 // looks without a request: an engine counts a request a moment after it came
	patience = 3 * time.Second
	path     = "/v1/leave"
)

// queues are the metrics of engines that count their requests. Those of SGLang with
// disaggregation count requests in other queues than running and waiting ones.
var queues = []string{"vllm:num_requests_running", "vllm:num_requests_waiting",
	"sglang:num_running_reqs", "sglang:num_queue_reqs",
	"sglang:num_prefill_bootstrap_queue_reqs", "sglang:num_prefill_inflight_queue_reqs",
	"sglang:num_decode_prealloc_queue_reqs", "sglang:num_decode_transfer_queue_reqs"}

// Options of a drain.
type Options struct {
	Admin  string        // path of the sidecar's admin socket
	Engine string        // URL; empty: wait for Notice only
	Notice time.Duration // in which routers have seen it
	// Timeout is the longest wait, with Notice. If one is the other, the last look decides.
	Timeout time.Duration
	Undo    bool // routers may send requests again; nothing else is done
	// Ended: an engine that refuses connections, or whose host has no address, has ended and counts
	// as idle. For workers of an engine, whose leader serves its requests and ends before them.
	Ended bool
}

// Run drains. A sidecar that does not answer is an error after the wait, if it still did not answer
// at the end: the engine is to end all the same.
func Run(ctx context.Context, o Options) error {
	begun := time.Now()
	if o.Undo {
		_, err := mark(ctx, http.MethodDelete, o.Admin, patience)
		return err
	}
	for idle := 0; ; {
		left := o.Timeout - time.Since(begun)
		within := min(patience, max(left, poll))
		sources, markErr := mark(ctx, http.MethodPost, o.Admin, within)
		noticed := time.Since(begun) >= o.Notice
		var looked error
		if o.Engine != "" && noticed {
			if looked = look(ctx, o, sources, within); looked == nil {
				idle++
			} else {
				idle = 0
			}
		}
		switch left = o.Timeout - time.Since(begun); {
		case ctx.Err() != nil:
			return interrupted(ctx, begun) // both calls were interrupted, too: their errors add nothing
		case noticed && (o.Engine == "" || idle >= quiet || left <= 0 && idle > 0):
			return markErr
		case noticed && left <= 0:
			return errors.Join(fmt.Errorf("drain: %w after %v; raise --timeout", looked, o.Timeout), markErr)
		}
		pause := max(min(poll, left), time.Millisecond)
		if !noticed {
			pause = min(poll, max(o.Notice-time.Since(begun), time.Millisecond))
		}
		sleep(ctx, pause)
		if ctx.Err() != nil {
			return errors.Join(interrupted(ctx, begun), looked, markErr)
		}
	}
}

func interrupted(ctx context.Context, begun time.Time) error {
	return fmt.Errorf("drain: interrupted after %v: %w", time.Since(begun).Round(time.Millisecond),
		ctx.Err())
}

func sleep(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}

// mark marks the sidecar, or ends the mark, and returns how many source leases its engines have:
// blocks that wait to be fetched.
func mark(ctx context.Context, method, socket string, within time.Duration) (sources int,
	err error) {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	var node nodeapi.Node
	b, err := ask.Admin(ctx, method, socket, path)
	if err == nil {
		err = ask.Decode(socket, path, b, &node)
	}
	if err != nil {
		return 0, fmt.Errorf("drain: sidecar: %w", err)
	}
	return node.SourceLeases, nil
}

// look returns why the engine is not idle.
func look(ctx context.Context, o Options, sources int, within time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	target := strings.TrimRight(o.Engine, "/") + "/metrics"
	status, b, err := ask.Fetch(ctx, http.MethodGet, target)
	target = redact.URL(target) // for errors
	if err == nil && status != http.StatusOK {
		err = fmt.Errorf("GET %s: %d %s: %s", target, status, http.StatusText(status), ask.Reason(b))
	}
	n := 0.0
	switch {
	case o.Ended && ended(err):
		err = nil
	case err == nil:
		n, err = requests(b)
	}
	switch {
	case err != nil:
		return fmt.Errorf("%s: %w; pass --engine the URL of the engine's API server", target, err)
	case n > 0:
		return fmt.Errorf("the engine still has %.0f requests", n)
	case sources > 0:
		return fmt.Errorf("the blocks of %d requests of the engine still wait to be fetched", sources)
	}
	return nil
}

// ended reports whether nothing listens where an engine did. A host that does not answer may still
// serve others.
func ended(err error) bool {
	var name *net.DNSError
	if errors.As(err, &name) {
		return name.IsNotFound // and not a name server that refuses connections
	}
	return errors.Is(err, syscall.ECONNREFUSED)
}

// requests counts what an engine has, in its metrics.
func requests(metrics []byte) (float64, error) {
	sum, found := 0.0, false
	lines := bufio.NewScanner(bytes.NewReader(metrics))
	lines.Buffer(nil, ask.MaxAnswer)
	for lines.Scan() {
		series, value := cutLast(lines.Text(), ' ')
		name, _, _ := strings.Cut(series, "{")
		if !slices.Contains(queues, name) {
			continue
		}
		v, err := strconv.ParseFloat(value, 64)
		if err != nil || math.IsNaN(v) || v < 0 {
			return 0, fmt.Errorf("%s is %q, which is no count", name, value)
		}
		sum, found = sum+v, true
	}
	if err := lines.Err(); err != nil {
		return 0, err
	}
	if !found {
		return 0, fmt.Errorf("it has none of %s (SGLang: --enable-metrics)", strings.Join(queues, ", "))
	}
	return sum, nil
}

func cutLast(s string, sep byte) (before, after string) {
	i := strings.LastIndexByte(s, sep)
	if i < 0 {
		return s, ""
	}
	return s[:i], s[i+1:]
}
