// Package loadctl is `kvspray load`: it puts an engine of vLLM to sleep, has kvspray's plug-in load
// other weights on all ranks, and wakes the engine when all of them have everything. It moves no
// bytes itself. From arming to release the plug-in keeps the weights from serving, even if the
// command dies. No goroutines.
package loadctl

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/kvspray/kvspray/internal/ui/ask"
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
	Force  bool   // also where the shape of the engine's checkpoint is not known
	JSON   bool
	Out    io.Writer // what came of it
	Log    io.Writer // progress
}

// answer is a rank's answer to any of the plug-in's methods.
type answer struct {
	Error   string  `json:"error"`
	Token   string  `json:"token"`
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

// run is one load: all ranks must answer with its token.
type run struct {
	*Loader
	token  string
	digest string
	count  int    // of ranks
	sleeps string // not empty: /sleep was sent, and may come yet
}

// lost is an error of a request that may still be carried out.
type lost struct{ error }

func (e lost) Unwrap() error { return e.error }

// Run returns when the engine has the weights, or an error with the state that the engine is in.
func (l *Loader) Run(ctx context.Context) error {
	asked, err := json.Marshal(map[string]any{
		"source": l.Source, "socket": l.Socket, "force": l.Force,
	})
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
	l.logf("%s: %s in %d tensors, %d files, %d ranks", first.Digest, size(first.Bytes), first.Tensors,
		first.Files, len(checked))
	if !first.Checked {
		l.logf("the shape of the engine's checkpoint is not known, so shapes are compared as they are " +
			"loaded")
	}
	r := run{Loader: l, token: token(), digest: first.Digest, count: len(checked)}
	done, err := r.load(ctx, string(asked))
	if err != nil {
		return fmt.Errorf("%w. %s", err, r.cancel(ctx, err))
	}
	// The ranks have the same weights, and their name. Nothing stops half of a release.
	out := Result{Weights: done[0].Weights, Ranks: len(done), Awake: !l.Asleep}
	for _, r := range done {
		out.Bytes += r.Bytes
		out.Seconds = max(out.Seconds, r.Seconds)
	}
	if _, err := r.ours(context.WithoutCancel(ctx), "release", "done"); err != nil {
		return fmt.Errorf("%w. The engine has the new weights, and may refuse to wake up: load again",
			err)
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

// token names a load, with its host and process, to other loads of the engine.
func token() string {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails
	host, err := os.Hostname()
	if err != nil || len(host) > 64 {
		host = "load"
	}
	return fmt.Sprintf("%s-%d-%s", host, os.Getpid(), hex.EncodeToString(b[:]))
}

// load returns when all ranks have named the weights. After an error it must be canceled.
func (r *run) load(ctx context.Context, asked string) ([]answer, error) {
	if _, err := r.ours(ctx, "arm", "armed"); err != nil {
		return nil, err
	}
	if err := r.sleep(ctx); err != nil {
		return nil, err
	}
	if _, err := r.ours(ctx, "begin", "", asked, r.digest); err != nil {
		return nil, err
	}
	if err := r.follow(ctx); err != nil {
		return nil, err
	}
	done, err := r.ours(ctx, "finish", "named")
	if err != nil {
		return nil, err
	}
	for i, d := range done {
		if d.Weights != r.digest {
			return nil, fmt.Errorf("load: rank %d has named its weights %.100q, and %s was checked", i,
				d.Weights, r.digest)
		}
	}
	return done, nil
}

// ours calls a method on all ranks of this load. state: what all of them must then be; empty: any.
func (r *run) ours(ctx context.Context, method, state string, args ...string) ([]answer, error) {
	out, err := r.ranks(ctx, method, append([]string{r.token}, args...)...)
	if err != nil {
		return nil, err
	}
	if ctx.Err() != nil {
		return nil, fmt.Errorf("load: stopped: %w", context.Cause(ctx))
	}
	if len(out) != r.count {
		return nil, fmt.Errorf("load: %d ranks answer %s, and %d the check", len(out), method, r.count)
	}
	for i, a := range out {
		if a.Token != r.token {
			return nil, fmt.Errorf("load: rank %d answers %s for the load %.200q, and this is %s", i,
				method, a.Token, r.token)
		}
		if state != "" && a.State != state {
			return nil, fmt.Errorf("load: rank %d is %q after %s, want %s", i, a.State, method, state)
		}
	}
	return out, nil
}

// sleep leaves only the memory of the weights awake. The caches are emptied.
func (r *run) sleep(ctx context.Context) error {
	// A command that is stopped still finishes this call: half of a sleep is worse.
	ctx = context.WithoutCancel(ctx)
	q := url.Values{"level": {fmt.Sprint(r.Level)}}
	if err := r.post(ctx, "/sleep", q, nil, nil); err != nil {
		if errors.As(err, new(lost)) {
			r.sleeps = "yes"
		}
		return err
	}
	var woken struct {
		Status string `json:"status"`
	}
	if err := r.post(ctx, "/wake_up", url.Values{"tags": {"weights"}}, nil, &woken); err != nil {
		return err
	}
	if woken.Status == "sleeping" {
		return nil
	}
	// Otherwise the scheduler would run.
	err := fmt.Errorf("load: the engine is %q after it was put to sleep, so nothing is loaded: this "+
		"vLLM cannot wake the weights alone; use 0.32 or later", woken.Status)
	return errors.Join(err, r.post(ctx, "/sleep", q, nil, nil))
}

// follow returns when all ranks have loaded.
func (r *run) follow(ctx context.Context) error {
	last := time.Now()
	for {
		ranks, err := r.ours(ctx, "poll", "", poll)
		if err != nil {
			return err
		}
		slowest, loaded := ranks[0], 0
		for i, a := range ranks {
			if a.Bytes < slowest.Bytes {
				slowest = a
			}
			switch {
			case a.State == "loaded" && a.Digest == r.digest:
				loaded++
			case a.State != "loading":
				return fmt.Errorf("load: rank %d is %q with %.100q while %s is loaded", i, a.State,
					a.Digest, r.digest)
			}
		}
		if loaded == len(ranks) {
			return nil
		}
		if time.Since(last) >= time.Second {
			last = time.Now()
			r.logf("%s of %s, %s/s", size(slowest.Bytes), size(slowest.Total),
				size(uint64(float64(slowest.Bytes)/max(slowest.Seconds, 0.001))))
		}
	}
}

// cancel ends the load on all ranks, and returns the engine's state after it.
func (r *run) cancel(ctx context.Context, cause error) string {
	why := strings.ToValidUTF8(cause.Error()[:min(len(cause.Error()), 500)], "")
	if ctx.Err() != nil {
		why = "the command was stopped"
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cancelTime)
	defer cancel()
	ranks, err := r.all(ctx, "cancel", r.token, why, r.sleeps)
	if err != nil {
		return fmt.Sprintf("Nor did the ranks answer that it ends (%v): if the engine sleeps, it "+
			"serves nothing until another load succeeds", err)
	}
	for _, a := range ranks {
		// A rank that was not armed, or by another load, has nothing of this one.
		if a.Token == r.token && a.State != "disarmed" {
			return "The engine serves nothing until another load succeeds: load again"
		}
	}
	return "The engine has the weights that it had"
}

func (l *Loader) logf(format string, args ...any) {
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
	out, err := l.all(ctx, method, args...)
	for i, a := range out {
		if a.Error != "" {
			return nil, fmt.Errorf("load: rank %d: %s", i, a.Error)
		}
	}
	return out, err
}

// all is as ranks, with the errors of ranks in their answers.
func (l *Loader) all(ctx context.Context, method string, args ...string) ([]answer, error) {
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
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("load: %s: no rank answers %s", l.Engine, method)
	}
	return out, nil
}

func (l *Loader) post(parent context.Context, path string, q url.Values, body, to any) error {
	ctx, cancel := context.WithTimeout(parent, patience)
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
	res, err := ask.Send(req)
	if err != nil && parent.Err() != nil {
		return lost{fmt.Errorf("load: stopped: %w", context.Cause(parent))}
	}
	if err != nil {
		var op *url.Error
		if errors.As(err, &op) {
			err = op.Err // its text repeats the address
		}
		return lost{fmt.Errorf("load: no engine answers at %s: %w; pass --engine http://HOST:PORT",
			l.Engine, err)}
	}
	defer func() { _ = res.Body.Close() }()
	b, err := io.ReadAll(io.LimitReader(res.Body, maxAnswer+1))
	switch {
	case err != nil && parent.Err() != nil:
		return lost{fmt.Errorf("load: stopped: %w", context.Cause(parent))}
	case err != nil:
		return lost{fmt.Errorf("load: read from %s: %w", l.Engine, err)}
	case len(b) > maxAnswer:
		return fmt.Errorf("load: %s answers more than %d MiB: not an engine", l.Engine, maxAnswer>>20)
	case res.StatusCode == http.StatusNotFound:
		return fmt.Errorf("load: %s has no %s: start vllm serve with VLLM_SERVER_DEV_MODE=1, and "+
			"let only trusted hosts reach it", l.Engine, path)
	case res.StatusCode != http.StatusOK:
		text := strings.TrimSpace(string(b[:min(len(b), 2048)]))
		remedy := ""
		if strings.Contains(text, "is not implemented") {
			remedy = "; start the engine with KVSPRAY_LOAD=1 and kvspray-vllm beside vLLM, and name " +
				"kvspray in VLLM_PLUGINS if it is set"
		}
		err := fmt.Errorf("load: %s%s answers %s: %s%s", l.Engine, path, res.Status, text, remedy)
		if res.StatusCode > http.StatusInternalServerError {
			return lost{err} // of a proxy
		}
		return err
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
