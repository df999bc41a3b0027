// SPDX-License-Identifier: Apache-2.0

// Package ask sends requests to the HTTP port of a running sidecar (http.listen), for commands that
// show or change its state, and to engines. No proxy of the environment gets them. Answers are
// bounded, and errors name the address and the remedy. No goroutines.
package ask

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"
)

// Bounds of a request. MaxAnswer is exported for tests.
const (
	MaxAnswer = 16 << 20 // bytes
	patience  = 3 * time.Second
	maxReason = 1024 // bytes of an answer that an error quotes
)

// ErrNone is wrapped if the sidecar has nothing of the kind, such as no store.
var ErrNone = errors.New("not there")

// client asks the address that it is given, and no other one: neither a proxy of the environment,
// which would be another host to a sidecar, nor the target of a redirect.
var client = &http.Client{
	Transport: &http.Transport{DisableKeepAlives: true},
	CheckRedirect: func(*http.Request, []*http.Request) error {
		return http.ErrUseLastResponse
	},
}

// Address is addr as host:port; it also accepts a URL.
func Address(addr string) (string, error) {
	bare := strings.TrimSuffix(strings.TrimPrefix(addr, "http://"), "/")
	host, port, err := net.SplitHostPort(bare)
	if err == nil && (host == "" || port == "") {
		err = errors.New("want both")
	}
	if err == nil && strings.ContainsAny(bare, "/?#@ ") {
		err = errors.New("more than an address")
	}
	if err != nil {
		return "", fmt.Errorf("--http %q: %w: write host:port of a sidecar's http.listen, which it "+
			"logs as http= when it is ready", addr, err)
	}
	return bare, nil
}

// JSON reads path of the sidecar at addr, host:port, into v.
func JSON(ctx context.Context, addr, path string, v any) error {
	b, err := Bytes(ctx, addr, path)
	if err != nil {
		return err
	}
	return Decode(addr, path, b, v)
}

// Decode reads a sidecar's answer into v.
func Decode(addr, path string, b []byte, v any) error {
	if err := json.Unmarshal(b, v); err != nil {
		return fmt.Errorf("%s: %s: %w; a sidecar of another version?", addr, path, err)
	}
	return nil
}

// Bytes reads path of the sidecar at addr.
func Bytes(ctx context.Context, addr, path string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	return Do(ctx, http.MethodGet, addr, path)
}

// Do sends a request to the sidecar at addr, and returns its answer. The end of ctx is the only
// limit of time.
func Do(ctx context.Context, method, addr, path string) ([]byte, error) {
	addr, err := Address(addr)
	if err != nil {
		return nil, err
	}
	status, b, err := Fetch(ctx, method, "http://"+addr+path)
	var op *url.Error
	switch {
	case errors.As(err, &op):
		return nil, fmt.Errorf("no sidecar answers at http://%s: %w. Start one with 'kvspray serve', "+
			"or pass --http HOST:PORT of the right one: its http.listen, which it logs as http= when it "+
			"is ready", addr, op.Err) // without the text of op, which repeats the address
	case err != nil:
		return nil, fmt.Errorf("%s: %w: not a sidecar?", addr, err)
	case status == http.StatusOK:
		return b, nil
	}
	reason := Reason(b)
	if reason == "" {
		reason = "not a sidecar, or one of another version"
	}
	err = fmt.Errorf("%s answers %d %s to %s %s: %s", addr, status, http.StatusText(status), method,
		path, reason)
	if status == http.StatusNotFound {
		err = fmt.Errorf("%w: %w, or not a sidecar, or one of another version", err, ErrNone)
	}
	return nil, err
}

// Reason is the beginning of an answer, for an error.
func Reason(b []byte) string { return strings.TrimSpace(string(b[:min(len(b), maxReason)])) }

// Send sends a request to the host that it names, whatever proxy the environment has. The caller
// bounds and closes the answer.
func Send(req *http.Request) (*http.Response, error) { return client.Do(req) }

// Fetch sends a request without a body to a URL, and returns the status and the answer.
func Fetch(ctx context.Context, method, target string) (status int, body []byte, err error) {
	req, err := http.NewRequestWithContext(ctx, method, target, nil)
	if err != nil {
		return 0, nil, err
	}
	res, err := Send(req)
	if err != nil {
		return 0, nil, err
	}
	defer func() { _ = res.Body.Close() }() // read to its end
	b, err := io.ReadAll(io.LimitReader(res.Body, MaxAnswer+1))
	switch {
	case err != nil:
		return 0, nil, fmt.Errorf("read the answer of %s: %w", target, err)
	case len(b) > MaxAnswer:
		return 0, nil, fmt.Errorf("%s answers more than %d MiB", target, MaxAnswer>>20)
	}
	return res.StatusCode, b, nil
}
