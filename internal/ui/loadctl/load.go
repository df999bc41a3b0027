// SPDX-License-Identifier: Apache-2.0

// Package loadctl is `kvspray load`: it puts an engine of vLLM to sleep, has kvspray's plug-in load
// other weights on all ranks, and wakes the engine when all of them have everything. It moves no
// bytes itself. If it dies, the engine stays asleep. No goroutines.
package loadctl

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"
)

// Bounds of a request.
const (
	maxAnswer  = 16 << 20 // bytes
	patience   = 10 * time.Minute
	cancelTime = 3 * time.Minute // the plug-in ends its reads and its copies
	poll       = "0.5"           // seconds
)

// Loader loads weights into one engine.
type Loader struct {
	Engine string // http://host:port
	Source string // the absolute path of a directory on the engine's host, or http://host:port
	Socket string // of the sidecar on the engine's host; empty: its default
	Level  int    // of sleep
	Asleep bool   // leave it asleep
	JSON   bool
	Out    io.Writer // what came of it
	Log    io.Writer // progress
}

// answer is what a rank says, of any of the plug-in's methods.
type answer struct {
	Error   string  `json:"error"`
	Digest  string  `json:"digest"`
	Bytes   uint64  `json:"bytes"`
	Total   uint64  `json:"total"`
	Tensors int     `json:"tensors"`
	Files   int     `json:"files"`
	Checked bool    `json:"checked"`
	State   string  `json:"state"`
	Weights string  `json:"weights"`
	Sidecar int     `json:"by_sidecar"`
	Seconds float64 `json:"seconds"`
}

// Result is what --json prints.
type Result struct {
	Weights string  `json:"weights"`
	Ranks   int     `json:"ranks"`
	Bytes   uint64  `json:"bytes"`
	Seconds float64 `json:"seconds"`
	Awake   bool    `json:"awake"`
}

// Run returns when the engine has the weights, or an error says in which state it is.
func (l *Loader) Run(ctx context.Context) error {
	asked, err := json.Marshal(map[string]string{"source": l.Source, "socket": l.Socket})
	if err != nil {
		return fmt.Errorf("load: %w", err)
	}
	checked, err := l.ranks(ctx, "check", string(asked))
	if err != nil {
		return fmt.Errorf("%w. The engine is as it was", err)
	}
	for _, r := range checked[1:] {
		if r.Digest != checked[0].Digest {
			return fmt.Errorf("load: %s is %s on one rank and %s on another: give all hosts the same "+
				"files. The engine is as it was", l.Source, checked[0].Digest, r.Digest)
		}
	}
	first := checked[0]
	l.say("%s: %s in %d tensors, %d files, %d ranks", first.Digest, size(first.Bytes), first.Tensors,
		first.Files, len(checked))
	if !first.Checked {
		l.say("the engine's own checkpoint is not on its host, so shapes are compared as they are loaded")
	}
	if err := l.sleep(ctx); err != nil {
		return err
	}
	if _, err := l.ranks(ctx, "begin", string(asked), first.Digest); err != nil {
		return fmt.Errorf("%w. The engine stays asleep", err)
	}
	if err := l.follow(ctx); err != nil {
		return err
	}
	done, err := l.ranks(ctx, "finish")
	if err != nil {
		return fmt.Errorf("%w. The engine stays asleep: load again", err)
	}
	out := Result{Weights: done[0].Weights, Ranks: len(done), Awake: !l.Asleep}
	for _, r := range done {
		out.Bytes += r.Bytes
		out.Seconds = max(out.Seconds, r.Seconds)
	}
	if !l.Asleep {
		var woken struct {
			Status string `json:"status"`
		}
		if err := l.post(ctx, "/wake_up", url.Values{"tags": {"kv_cache"}}, nil, &woken); err != nil {
			return fmt.Errorf("%w. The engine has the new weights and sleeps: wake it up", err)
		}
		if woken.Status != "awake" {
			return fmt.Errorf("load: the engine has the new weights and is %q: wake it up by "+
				"POST %s/wake_up", woken.Status, l.Engine)
		}
	}
	return l.print(out)
}

// sleep leaves only the memory of the weights awake. The caches are emptied.
func (l *Loader) sleep(ctx context.Context) error {
	q := url.Values{"level": {fmt.Sprint(l.Level)}}
	if err := l.post(ctx, "/sleep", q, nil, nil); err != nil {
		return fmt.Errorf("%w. Its weights are as they were", err)
	}
	var woken struct {
		Status string `json:"status"`
	}
	if err := l.post(ctx, "/wake_up", url.Values{"tags": {"weights"}}, nil, &woken); err != nil {
		return fmt.Errorf("%w. The engine stays asleep", err)
	}
	if woken.Status != "sleeping" {
		return fmt.Errorf("load: the engine is %q after it was put to sleep, so nothing is loaded: "+
			"this vLLM cannot wake the weights alone; use 0.32 or later", woken.Status)
	}
	return nil
}

// follow returns when all ranks have loaded. Otherwise it stops the others.
func (l *Loader) follow(ctx context.Context) error {
	last := time.Now()
	for {
		ranks, err := l.ranks(ctx, "poll", poll)
		if err != nil {
			why := "the command failed"
			if ctx.Err() != nil {
				why, err = "the command was stopped", fmt.Errorf("load: %w", context.Cause(ctx))
			}
			l.cancel(ctx, why)
			return fmt.Errorf("%w. The engine stays asleep: load again", err)
		}
		slowest, loaded := ranks[0], 0
		for _, r := range ranks {
			if r.Bytes < slowest.Bytes {
				slowest = r
			}
			if r.State == "loaded" || r.State == "done" {
				loaded++
			}
		}
		if loaded == len(ranks) {
			return nil
		}
		if time.Since(last) >= time.Second {
			last = time.Now()
			l.say("%s of %s, %s/s", size(slowest.Bytes), size(slowest.Total),
				size(uint64(float64(slowest.Bytes)/max(slowest.Seconds, 0.001))))
		}
	}
}

func (l *Loader) cancel(ctx context.Context, why string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cancelTime)
	defer cancel()
	if _, err := l.ranks(ctx, "cancel", why); err != nil {
		l.say("%v", err)
	}
}

func (l *Loader) say(format string, args ...any) {
	if !l.JSON {
		_, _ = fmt.Fprintf(l.Log, format+"\n", args...)
	}
}

func (l *Loader) print(r Result) error {
	if l.JSON {
		return json.NewEncoder(l.Out).Encode(r)
	}
	state := "awake"
	if !r.Awake {
		state = "asleep, with the new weights"
	}
	_, err := fmt.Fprintf(l.Out, "%s is loaded on %d ranks, %s in %.2f s. The engine is %s\n",
		r.Weights, r.Ranks, size(r.Bytes), r.Seconds, state)
	return err
}

// ranks calls a method of the plug-in on all of them. The first error of any is that of the call.
func (l *Loader) ranks(ctx context.Context, method string, args ...string) ([]answer, error) {
	if args == nil {
		args = []string{}
	}
	body := map[string]any{"method": "kvspray_load_" + method, "args": args}
	var to struct {
		Results []json.RawMessage `json:"results"`
	}
	if err := l.post(ctx, "/collective_rpc", nil, body, &to); err != nil {
		return nil, err
	}
	out := make([]answer, len(to.Results))
	for i, raw := range to.Results {
		if err := json.Unmarshal(raw, &out[i]); err != nil {
			return nil, fmt.Errorf("load: %s: rank %d answers %.200s: a plug-in of another version?",
				l.Engine, i, raw)
		}
		if out[i].Error != "" {
			return nil, fmt.Errorf("load: rank %d: %s", i, out[i].Error)
		}
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("load: %s: no rank answers %s", l.Engine, method)
	}
	return out, nil
}

func (l *Loader) post(ctx context.Context, path string, q url.Values, body, to any) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var data []byte
	if body != nil {
		var err error
		if data, err = json.Marshal(body); err != nil {
			return fmt.Errorf("load: %w", err)
		}
	}
	u := l.Engine + path
	if q != nil {
		u += "?" + q.Encode()
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, u, bytes.NewReader(data))
	if err != nil {
		return fmt.Errorf("load: --engine %q: %w; want http://host:port of the engine", l.Engine, err)
	}
	req.Header.Set("Content-Type", "application/json")
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		var op *url.Error
		if errors.As(err, &op) {
			err = op.Err // its text repeats the address
		}
		return fmt.Errorf("load: no engine answers at %s: %w; pass --engine http://HOST:PORT", l.Engine,
			err)
	}
	defer func() { _ = res.Body.Close() }()
	b, err := io.ReadAll(io.LimitReader(res.Body, maxAnswer+1))
	switch {
	case err != nil:
		return fmt.Errorf("load: read from %s: %w", l.Engine, err)
	case len(b) > maxAnswer:
		return fmt.Errorf("load: %s answers more than %d MiB: not an engine", l.Engine, maxAnswer>>20)
	case res.StatusCode == http.StatusNotFound:
		return fmt.Errorf("load: %s has no %s: start vllm serve with VLLM_SERVER_DEV_MODE=1, and "+
			"let only trusted hosts reach it", l.Engine, path)
	case res.StatusCode != http.StatusOK:
		text := strings.TrimSpace(string(b[:min(len(b), 2048)]))
		remedy := ""
		if strings.Contains(text, "is not implemented") {
			remedy = "; install kvspray-vllm beside vLLM, and name kvspray in VLLM_PLUGINS if it is set"
		}
		return fmt.Errorf("load: %s%s answers %s: %s%s", l.Engine, path, res.Status, text, remedy)
	}
	if to == nil {
		return nil
	}
	if err := json.Unmarshal(b, to); err != nil {
		return fmt.Errorf("load: %s%s: %w; not an engine of vLLM?", l.Engine, path, err)
	}
	return nil
}

func size(n uint64) string {
	switch {
	case n >= 1e9:
		return fmt.Sprintf("%.2f GB", float64(n)/1e9)
	case n >= 1e6:
		return fmt.Sprintf("%.1f MB", float64(n)/1e6)
	}
	return fmt.Sprintf("%d bytes", n)
}
