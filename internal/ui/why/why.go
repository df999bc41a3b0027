// Package why is `kvspray why`: what sidecars, and the router, have about one request. It asks each
// sidecar for the request's id, and then for the transfers that the answers name, because the two
// engines of a request may have different ids for it. The report lists what is unknown.
//
// Text is pure. No goroutines.
package why

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/kvspray/kvspray/internal/nodeapi"
	"github.com/kvspray/kvspray/internal/nodeapi/debug"
	"github.com/kvspray/kvspray/internal/ui/ask"
)

const (
	maxTransfers  = 4 // of one request: sidecars are asked for no more
	routerTimeout = 3 * time.Second
)

// ErrUnknown is wrapped if there is no record of the request.
var ErrUnknown = errors.New("no record of request")

// Options select what is asked.
type Options struct {
	ID       string   // of the request, or its beginning
	Sidecars []string // host:port of each http.listen
	Router   string   // its URL; empty: it is not asked
}

// Report is the answer.
type Report struct {
	ID       string           `json:"id"`
	Router   []nodeapi.Routed `json:"router,omitempty"` // newest first
	Sidecars []Sidecar        `json:"sidecars"`
	Unknown  []string         `json:"unknown"` // parts without an answer
}

// Sidecar is what one sidecar has.
type Sidecar struct {
	Address string `json:"address"`
	debug.Requests
	Choices []Choice `json:"choices"`
}

// Read asks the router and the sidecars.
func Read(ctx context.Context, o Options) (*Report, error) {
	r := &Report{ID: o.ID, Sidecars: []Sidecar{}, Unknown: []string{}}
	addrs, ids := slices.Clone(o.Sidecars), []string{o.ID}
	if o.Router != "" {
		if err := r.askRouter(ctx, o.Router); err != nil {
			return nil, err
		}
	}
	for _, e := range r.Router {
		ids = append(ids, e.Req)
		if e.PrefillSidecar == "" && e.DecodeSidecar == "" && len(o.Sidecars) == 0 {
			r.unknown("the sidecars of these engines: the router's configuration has none for them; name " +
				"them with --http")
		}
		for _, at := range []string{e.PrefillSidecar, e.DecodeSidecar} {
			if addr, ok := strings.CutPrefix(at, "http://"); ok {
				addrs = append(addrs, addr)
			}
		}
	}
	equal := func(a, b string) bool { return a == b }
	for _, addr := range union(nil, addrs, equal) {
		s := Sidecar{Address: addr}
		if err := s.ask(ctx, union(nil, ids, equal)...); err != nil {
			r.unknown("%v", err)
			continue
		}
		r.Sidecars = append(r.Sidecars, s)
	}
	transfers := r.transfers()
	for i := range r.Sidecars {
		if err := r.Sidecars[i].ask(ctx, transfers...); err != nil {
			r.unknown("%v", err)
		}
	}
	if !r.found() {
		r.absent()
		return nil, fmt.Errorf("why: %w %q: %s", ErrUnknown, o.ID, strings.Join(r.Unknown, "; "))
	}
	r.judge()
	return r, nil
}

func (r *Report) unknown(format string, a ...any) {
	r.Unknown = append(r.Unknown, fmt.Sprintf(format, a...))
}

// askRouter reads the router's records.
func (r *Report) askRouter(ctx context.Context, router string) error {
	ctx, cancel := context.WithTimeout(ctx, routerTimeout)
	defer cancel()
	status, body, err := ask.Fetch(ctx, http.MethodGet,
		strings.TrimRight(router, "/")+"/v1/requests?id="+url.QueryEscape(r.ID))
	var list nodeapi.RoutedList
	switch {
	case err != nil:
		return fmt.Errorf("why: router: %w: name its URL with --router, or leave out --router", err)
	case status != http.StatusOK:
		return fmt.Errorf("why: router: it answers %d: %s: is --router the URL of 'kvspray proxy'?",
			status, ask.Reason(body))
	}
	if err := ask.Decode(router, "/v1/requests", body, &list); err != nil {
		return fmt.Errorf("why: router: %w", err)
	}
	if r.Router = list.Records; len(r.Router) == 0 {
		r.unknown("the router has no request whose X-Request-Id is %q or a part of it (%s)", r.ID,
			kept(list.Since))
	}
	return nil
}

// kept describes the time from which on records are kept.
func kept(since time.Time) string {
	if since.IsZero() {
		return "it has all since its start"
	}
	return "it has those since " + since.Local().Format(time.DateTime)
}

// ask adds what the sidecar has of each id.
func (s *Sidecar) ask(ctx context.Context, ids ...string) error {
	for _, id := range ids {
		var v debug.Requests
		err := ask.JSON(ctx, s.Address, "/v1/requests?id="+url.QueryEscape(id), &v)
		if err != nil {
			return err
		}
		s.merge(v)
	}
	return nil
}

// merge adds an answer. It replaces older states of the same lease, peer or rail pair.
func (s *Sidecar) merge(v debug.Requests) {
	had := s.Requests
	s.Requests = v
	s.Records = union(v.Records, had.Records, func(a, b nodeapi.Record) bool {
		return a.At.Equal(b.At) && a.Side == b.Side && a.Xfer == b.Xfer && a.Engine == b.Engine
	})
	slices.SortStableFunc(s.Records, func(a, b nodeapi.Record) int { return b.At.Compare(a.At) })
	s.Dests = union(v.Dests, had.Dests, func(a, b view) bool { return a.Lease == b.Lease })
	s.Sources = union(v.Sources, had.Sources, func(a, b offer) bool { return a.Lease == b.Lease })
	s.Peers = union(v.Peers, had.Peers, func(a, b nodeapi.PeerReach) bool { return a.Boot == b.Boot })
	s.Excluded = union(v.Excluded, had.Excluded, func(a, b pair) bool {
		return a.Peer == b.Peer && a.Path == b.Path
	})
}

// union is a, and the elements of b that are the same as none of a.
func union[T any](a, b []T, same func(a, b T) bool) []T {
	for _, x := range b {
		if !slices.ContainsFunc(a, func(y T) bool { return same(x, y) }) {
			a = append(a, x)
		}
	}
	return a
}

// transfers are the ids of the request's transfers.
func (r *Report) transfers() (ids []string) {
	add := func(xfer string) {
		if xfer != "" && !slices.Contains(ids, xfer) && len(ids) < maxTransfers {
			ids = append(ids, xfer)
		}
	}
	for i := range r.Sidecars {
		s := &r.Sidecars[i]
		for _, e := range s.Records {
			add(e.Xfer)
		}
		for _, d := range s.Dests {
			add(xferOf(d.Key))
		}
		for _, d := range s.Sources {
			add(xferOf(d.Key))
		}
	}
	return ids
}

// xferOf is the transfer of a key.
func xferOf(key string) string {
	xfer, _, _ := strings.Cut(key, "/")
	return xfer
}

// some reports whether the sidecar has something about the request.
func (s *Sidecar) some() bool { return len(s.Records)+len(s.Dests)+len(s.Sources) > 0 }

// found reports whether the router or a sidecar has something about the request.
func (r *Report) found() bool {
	found := len(r.Router) > 0
	for i := range r.Sidecars {
		found = found || r.Sidecars[i].some()
	}
	return found
}

// absent notes each sidecar that has nothing about the request.
func (r *Report) absent() {
	for i := range r.Sidecars {
		s := &r.Sidecars[i]
		if s.some() {
			continue
		}
		open := ""
		if s.Unseen > 0 {
			open = fmt.Sprintf("; %d open leases were not searched", s.Unseen)
		}
		r.unknown("%s has no transfer, copy, get or put of it (%s%s): its engine may have computed the "+
			"whole prompt (the log of the engine names the reason), or another sidecar serves it: "+
			"name that one with --http, or all of a router's with --router", s.Node, kept(s.Since), open)
	}
}

// WriteJSON writes the report as one object.
func (r *Report) WriteJSON(w io.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(r)
}
