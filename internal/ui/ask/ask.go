// Package ask sends requests to a running sidecar: to its HTTP port (http.listen) for commands that
// show its state, and to its admin socket for those that change it; and to engines. No proxy of the
// environment gets them. Answers are bounded, and errors name the address and the remedy. No
// goroutines.
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
	"os"
	"strings"
	"time"

	"github.com/kvspray/kvspray/internal/redact"
)

// Bounds of a request. MaxAnswer is exported for tests.
const (
	MaxAnswer = 16 << 20 // bytes
	patience  = 3 * time.Second
	maxReason = 1024 // bytes of an answer that an error quotes
)

// ErrNone is wrapped if the sidecar has nothing of the kind, such as no store.
var ErrNone = errors.New("not there")

// client asks the address that it is given, and no other one: neither a proxy of the environment
// nor the target of a redirect.
var client = &http.Client{
	Transport: &http.Transport{DisableKeepAlives: true},
	CheckRedirect: func(*http.Request, []*http.Request) error {
		return http.ErrUseLastResponse
	},
}

// Address is addr as host:port; it also accepts a URL.
func Address(addr string) (string, error) {
	bare := strings.TrimSuffix(strings.TrimPrefix(addr, "http://"), "/")
	var err error
	if strings.ContainsAny(bare, "/?#@ ") {
		err = errors.New("more than an address")
	} else if host, port, serr := net.SplitHostPort(bare); serr != nil {
		err = serr
	} else if host == "" || port == "" {
		err = errors.New("want both")
	}
	if err != nil {
		return "", fmt.Errorf("--http %q: %w: write host:port of a sidecar's http.listen, which it "+
			"logs as http= when it is ready", redact.URL(addr), err)
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
	base := "http://" + addr
	return sidecar{client, base, base, "--http HOST:PORT of the right one: its http.listen, " +
		"which it logs as http= when it is ready"}.ask(ctx, method, path)
}

// Admin sends a request to the socket of a sidecar for calls that change it. The end of ctx is the
// only limit of time.
func Admin(ctx context.Context, method, socket, path string) ([]byte, error) {
	c := *client
	c.Transport = &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		}}
	b, err := sidecar{&c, socket, "http://localhost", "--socket PATH of the right one: its " +
		"engine.socket, which it logs as socket= when it is ready"}.ask(ctx, method, path)
	return b, denied(socket, err)
}

// denied replaces the error of a socket that this user may not use. A sidecar has the socket, so
// the remedy is not to start one.
func denied(socket string, err error) error {
	if !errors.Is(err, os.ErrPermission) {
		return err
	}
	return fmt.Errorf("the sidecar's socket %s: %w: run kvspray as root or as the sidecar's user, or "+
		"name this user in its engine.admin_uids", socket, os.ErrPermission)
}

// sidecar is where to reach one.
type sidecar struct {
	client     *http.Client
	name, base string // in errors, and in URLs
	flag       string // that names another one
}

func (s sidecar) ask(ctx context.Context, method, path string) ([]byte, error) {
	name := s.name
	status, b, err := fetch(ctx, s.client, method, s.base+path)
	var op *url.Error
	switch {
	case errors.As(err, &op):
		return nil, fmt.Errorf("no sidecar answers at %s: %w. Start one with 'kvspray serve', or pass "+
			"%s", name, op.Err, s.flag) // without the text of op, which repeats the address
	case err != nil:
		return nil, fmt.Errorf("%s: %w: not a sidecar?", name, err)
	case status == http.StatusOK:
		return b, nil
	}
	reason := Reason(b)
	if reason == "" {
		reason = "not a sidecar, or one of another version"
	}
	err = fmt.Errorf("%s answers %d %s to %s %s: %s", name, status, http.StatusText(status), method,
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
func Send(req *http.Request) (*http.Response, error) { return send(client, req) }

// send hides users and passwords from errors: http's own have the user, which can be a token.
func send(c *http.Client, req *http.Request) (*http.Response, error) {
	res, err := c.Do(req)
	var op *url.Error
	if errors.As(err, &op) {
		op.URL = redact.URL(op.URL)
	}
	return res, err
}

// Fetch sends a request without a body to a URL, and returns the status and the answer.
func Fetch(ctx context.Context, method, target string) (status int, body []byte, err error) {
	return fetch(ctx, client, method, target)
}

func fetch(ctx context.Context, c *http.Client, method, target string) (status int, body []byte,
	err error) {
	req, err := http.NewRequestWithContext(ctx, method, target, nil)
	if err != nil {
		return 0, nil, errors.New(redact.URLs(err.Error())) // the target is malformed, and quoted
	}
	res, err := send(c, req)
	if err != nil {
		return 0, nil, err
	}
	defer func() { _ = res.Body.Close() }() // read to its end
	b, err := io.ReadAll(io.LimitReader(res.Body, MaxAnswer+1))
	switch {
	case err != nil:
		return 0, nil, fmt.Errorf("read the answer of %s: %w", redact.URL(target), err)
	case len(b) > MaxAnswer:
		return 0, nil, fmt.Errorf("%s answers more than %d MiB", redact.URL(target), MaxAnswer>>20)
	}
	return res.StatusCode, b, nil
}
