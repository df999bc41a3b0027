// Package storectl is `kvspray store`: it asks a running sidecar about its page store over HTTP,
// operates it over the sidecar's admin socket, and checks the files of a store that no sidecar has
// open. Answers are printed as text, or as the sidecar's own JSON. No goroutines.
package storectl

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/kvspray/kvspray/internal/nodeapi"
	"github.com/kvspray/kvspray/internal/ui/ask"
)

const patience = 30 * time.Second // of a request

// Client asks one sidecar.
type Client struct {
	Addr  string // host:port of http.listen: for Stat and List
	Admin string // path of the admin socket: for all others
	JSON  bool   // print the sidecar's answers as they are
	Out   io.Writer
}

// show reads the state of the store.
func (c *Client) show(ctx context.Context) (s nodeapi.Store, b []byte, err error) {
	const path = "/v1/store"
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	b, err = ask.Do(ctx, http.MethodGet, c.Addr, path)
	if err == nil {
		err = ask.Decode(c.Addr, path, b, &s)
	}
	if err != nil {
		return s, nil, fmt.Errorf("store: %w", err)
	}
	return s, b, nil
}

// ask sends a request to the admin socket and decodes its answer.
func (c *Client) ask(ctx context.Context, method, path string, q url.Values, to any) ([]byte,
	error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	u := url.URL{Path: path, RawQuery: q.Encode()}
	b, err := ask.Admin(ctx, method, c.Admin, u.String())
	if err == nil {
		err = ask.Decode(c.Admin, path, b, to)
	}
	if err != nil {
		return nil, fmt.Errorf("store: %w", err)
	}
	return b, nil
}

// raw prints an answer as it came.
func (c *Client) raw(b []byte) error {
	_, err := c.Out.Write(b)
	return err
}

// Stat prints tiers and counts.
func (c *Client) Stat(ctx context.Context) error {
	s, b, err := c.show(ctx)
	if err != nil || c.JSON {
		return errors.Join(err, c.raw(b))
	}
	return c.stat(&s)
}

// List prints the namespaces that engines of the node have open.
func (c *Client) List(ctx context.Context) error {
	s, b, err := c.show(ctx)
	if err != nil || c.JSON {
		return errors.Join(err, c.raw(b))
	}
	return c.namespaces(&s)
}

// Keys prints keys of a namespace's pages in a tier, from an entry on.
func (c *Client) Keys(ctx context.Context, namespace, tier string, first uint32, limit int) error {
	q := url.Values{"namespace": {namespace}, "tier": {tier}, "first": {fmt.Sprint(first)},
		"limit": {fmt.Sprint(limit)}}
	var a nodeapi.StoreKeys
	b, err := c.ask(ctx, http.MethodGet, "/v1/store/keys", q, &a)
	if err != nil || c.JSON {
		return errors.Join(err, c.raw(b))
	}
	for _, k := range a.Keys {
		if _, err := fmt.Fprintln(c.Out, k); err != nil {
			return err
		}
	}
	if a.Next != 0 {
		_, err = fmt.Fprintf(c.Out, "more: --first %d\n", a.Next)
	}
	return err
}

// ErrNoPage is the result of Verify for a page that is not there, or differs from its checksum.
var ErrNoPage = errors.New("store: the page was not read")

// Verify has the sidecar read a page and compare it with its checksum.
func (c *Client) Verify(ctx context.Context, namespace, key string) error {
	var a nodeapi.StoreVerified
	b, err := c.ask(ctx, http.MethodGet, "/v1/store/verify",
		url.Values{"namespace": {namespace}, "key": {key}}, &a)
	if err != nil {
		return err
	}
	switch {
	case c.JSON:
		err = c.raw(b)
	case a.Outcome == "hit":
		_, err = fmt.Fprintf(c.Out, "ok: %d bytes from %s in %v, crc32c %s\n", a.Bytes, a.Tier,
			microseconds(a.Took), a.CRC32C)
	}
	if a.Outcome != "hit" {
		if a.Problem != "" {
			a.Outcome += ": " + a.Problem
		}
		return errors.Join(err, fmt.Errorf("%w: %s", ErrNoPage, a.Outcome))
	}
	return err
}

// ErrUnconfirmed is the result of Remove if members have not confirmed, which were printed.
var ErrUnconfirmed = errors.New("store: not all nodes have removed the namespace; the others do " +
	"it when they meet one of these")

// Remove has the sidecar remove a namespace from all members.
func (c *Client) Remove(ctx context.Context, namespace string, unknown bool) error {
	var a nodeapi.StoreRemoved
	b, err := c.ask(ctx, http.MethodPost, "/v1/store/remove",
		url.Values{"namespace": {namespace}, "unknown": {strconv.FormatBool(unknown)}}, &a)
	if err != nil {
		return err
	}
	if c.JSON {
		err = c.raw(b)
	} else {
		var out strings.Builder
		fmt.Fprintf(&out, "removed on %d of %d nodes, which serve none of its pages any more; 'kvspray "+
			"store stat' shows what is still to be overwritten\n", a.Confirmed, len(a.Members))
		for _, m := range a.Members {
			if !m.Confirmed {
				fmt.Fprintf(&out, "not on %s (%s): %s\n", shown(m.Node), shown(m.Boot), shown(m.Problem))
			}
		}
		_, err = io.WriteString(c.Out, out.String())
	}
	if a.Confirmed < len(a.Members) {
		return errors.Join(err, ErrUnconfirmed)
	}
	return err
}

// Drain has the sidecar take no more pages, and returns once all that it has are durable.
func (c *Client) Drain(ctx context.Context) error {
	for {
		var a nodeapi.StoreDrained
		b, err := c.ask(ctx, http.MethodPost, "/v1/store/drain", nil, &a)
		switch {
		case ctx.Err() != nil:
			return fmt.Errorf("store: not drained yet, ask again: %w", ctx.Err())
		case err != nil:
			return err
		case a.Drained && c.JSON:
			return c.raw(b)
		case a.Drained:
			what := "pages are in memory only, and go with the sidecar's process"
			if a.Durable {
				what = "all pages that the lower tiers took are durable"
			}
			_, err = fmt.Fprintf(c.Out, "drained: %s; no others are taken until the sidecar restarts\n",
				what)
			return err
		}
	}
}
