// Package origin has the URL of a server whose user and password no text contains: a URL is shown
// in logs, metrics, errors and answers to clients, all of which are read by others. It owns no
// state and starts no goroutine.
package origin

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"strings"
)

// URL is the base URL of a server. Only Request uses its user and password.
type URL struct {
	base string
	user *url.Userinfo
}

var errNotURL = errors.New("not a URL of a server; write for instance http://127.0.0.1:8100")

// Parse reads a URL without query and fragment. Its errors do not contain the text.
func Parse(raw string) (URL, error) {
	u, err := url.Parse(raw)
	if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" ||
		u.RawQuery != "" || u.Fragment != "" {
		return URL{}, errNotURL
	}
	user := u.User
	u.User = nil
	return URL{base: strings.TrimRight(u.String(), "/"), user: user}, nil
}

// IsZero reports whether there is no URL.
func (u URL) IsZero() bool { return u.base == "" }

// String is the URL without user and password.
func (u URL) String() string { return u.base }

// GoString is String.
func (u URL) GoString() string { return u.base }

// MarshalText is String.
func (u URL) MarshalText() ([]byte, error) { return []byte(u.base), nil }

// LogValue is String.
func (u URL) LogValue() slog.Value { return slog.StringValue(u.base) }

// Request makes a request for a path. User and password become its Authorization.
func (u URL) Request(ctx context.Context, method, path string, body io.Reader) (*http.Request,
	error) {
	r, err := http.NewRequestWithContext(ctx, method, u.base+path, body)
	if err != nil {
		return nil, err
	}
	u.authorize(r.Header)
	return r, nil
}

// SetHeader replaces the header of a request that Request has made. An Authorization there stays:
// it is the client's, for the engine.
func (u URL) SetHeader(r *http.Request, h http.Header) {
	r.Header = h
	u.authorize(h)
}

func (u URL) authorize(h http.Header) {
	if u.user == nil || h.Get("Authorization") != "" {
		return
	}
	password, _ := u.user.Password()
	r := http.Request{Header: h}
	r.SetBasicAuth(u.user.Username(), password)
}
