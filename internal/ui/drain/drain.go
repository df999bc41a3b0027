// SPDX-License-Identifier: Apache-2.0

// Package drain is `kvspray drain`: it takes an engine out of service before it ends. The engine's
// sidecar tells routers that it leaves, so that they send it nothing new. The command then waits
// until the engine has answered what it has. No goroutines.
package drain

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/kvspray/kvspray/internal/ui/ask"
)

const (
	poll     = 500 * time.Millisecond
	quiet    = 3 // polls without a request: an engine counts a request a moment after it came
	patience = 3 * time.Second
	maxBytes = 16 << 20 // of an engine's metrics
)

// queues are the metrics of engines that count their requests.
var queues = []string{"vllm:num_requests_running", "vllm:num_requests_waiting",
	"sglang:num_running_reqs", "sglang:num_queue_reqs"}

// Options of a drain.
type Options struct {
	HTTP   string        // host:port of the sidecar's http.listen
	Engine string        // URL; empty: wait for Notice only
	Notice time.Duration // in which routers have seen it
	Undo   bool          // routers may send requests again; nothing else is done
}

// Run drains until ctx ends, which is a failure. If the sidecar does not answer, it waits all the
// same, because the engine is to end, and then returns the sidecar's error.
func Run(ctx context.Context, o Options) error {
	method := http.MethodPost
	if o.Undo {
		method = http.MethodDelete
	}
	told := tell(ctx, method, o.HTTP)
	if o.Undo {
		return told
	}
	if err := sleep(ctx, o.Notice); err != nil {
		return err
	}
	if o.Engine == "" {
		return told
	}
	for idle := 0; idle < quiet; {
		n, err := requests(ctx, o.Engine)
		switch {
		case ctx.Err() != nil:
		case err != nil:
			return fmt.Errorf("drain: %w; pass --engine the URL of the engine's API server", err)
		case n > 0:
			idle = 0
		default:
			idle++
		}
		if sleep(ctx, poll) != nil {
			return fmt.Errorf("drain: the engine still has %d requests; raise --timeout", n)
		}
	}
	return told
}

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return fmt.Errorf("drain: %w; raise --timeout", ctx.Err())
	case <-t.C:
		return nil
	}
}

func tell(ctx context.Context, method, addr string) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	addr, err := ask.Address(addr)
	if err != nil {
		return err
	}
	body, err := do(ctx, method, "http://"+addr+"/v1/leave")
	if err != nil {
		return fmt.Errorf("drain: sidecar: %w; pass --http its http.listen", err)
	}
	return body.Close()
}

// requests counts what an engine has running and waiting.
func requests(ctx context.Context, engine string) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	body, err := do(ctx, http.MethodGet, strings.TrimRight(engine, "/")+"/metrics")
	if err != nil {
		return 0, err
	}
	defer func() { _ = body.Close() }() // read to its end
	sum, found := 0.0, false
	lines := bufio.NewScanner(io.LimitReader(body, maxBytes))
	lines.Buffer(nil, maxBytes)
	for lines.Scan() {
		series, value, _ := cutLast(lines.Text(), ' ')
		name, _, _ := strings.Cut(series, "{")
		for _, q := range queues {
			if name != q {
				continue
			}
			v, err := strconv.ParseFloat(value, 64)
			if err != nil {
				return 0, fmt.Errorf("%s of %s: %w", q, engine, err)
			}
			sum, found = sum+v, true
		}
	}
	if err := lines.Err(); err != nil {
		return 0, fmt.Errorf("metrics of %s: %w", engine, err)
	}
	if !found {
		return 0, fmt.Errorf("%s/metrics has none of %s", engine, strings.Join(queues, ", "))
	}
	return int(sum), nil
}

func cutLast(s string, sep byte) (before, after string, ok bool) {
	i := strings.LastIndexByte(s, sep)
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+1:], true
}

// do returns the body of a successful answer. The caller closes it.
func do(ctx context.Context, method, url string) (io.ReadCloser, error) {
	req, err := http.NewRequestWithContext(ctx, method, url, nil)
	if err != nil {
		return nil, err
	}
	req.Close = true
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	if res.StatusCode == http.StatusOK {
		return res.Body, nil
	}
	text, _ := io.ReadAll(io.LimitReader(res.Body, 1024)) // only for the error
	_ = res.Body.Close()
	return nil, fmt.Errorf("%s %s: %s: %s", method, url, res.Status, strings.TrimSpace(string(text)))
}
