// SPDX-License-Identifier: Apache-2.0

// Package ask reads the HTTP port of a running sidecar (http.listen), for commands that show its
// state. Answers are bounded, and errors name the address and the remedy. No goroutines.
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
)

// ErrNone is wrapped if the sidecar has nothing of the kind, such as no store.
var ErrNone = errors.New("not there")

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
	if err := json.Unmarshal(b, v); err != nil {
		return fmt.Errorf("%s: %s: %w; a sidecar of another version?", addr, path, err)
	}
	return nil
}

// Bytes reads path of the sidecar at addr.
func Bytes(ctx context.Context, addr, path string) ([]byte, error) {
	addr, err := Address(addr)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+path, nil)
	if err != nil {
		return nil, fmt.Errorf("--http %q: %w; want host:port of a sidecar's http.listen", addr, err)
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	res, err := client.Do(req)
	if err != nil {
		var op *url.Error
		if errors.As(err, &op) {
			err = op.Err // its text repeats the address
		}
		return nil, fmt.Errorf("no sidecar answers at http://%s: %w. Start one with 'kvspray serve', "+
			"or pass --http HOST:PORT of the right one: its http.listen, which it logs as http= when it "+
			"is ready", addr, err)
	}
	defer func() { _ = res.Body.Close() }() // read to its end
	b, err := io.ReadAll(io.LimitReader(res.Body, MaxAnswer+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("read from %s: %w", addr, err)
	case len(b) > MaxAnswer:
		return nil, fmt.Errorf("%s answers more than %d MiB: not a sidecar", addr, MaxAnswer>>20)
	case res.StatusCode == http.StatusNotFound:
		return nil, fmt.Errorf("%s answers %s to %s: %w, or not a sidecar, or one of another version",
			addr, res.Status, path, ErrNone)
	case res.StatusCode != http.StatusOK:
		return nil, fmt.Errorf("%s answers %s to %s: not a sidecar, or one of another version", addr,
			res.Status, path)
	}
	return b, nil
}
