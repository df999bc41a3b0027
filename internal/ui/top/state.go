// SPDX-License-Identifier: Apache-2.0

// Package top is `kvspray top`: the state of a running sidecar as text that is redrawn. It reads
// only the sidecar's /debug/state, which curl shows as well.
//
// Render is pure: two snapshots and a width in, lines out. Live drives it in a terminal, Once
// prints it once.
//
// Goroutines: those of the terminal library while Live runs.
package top

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

	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/control/exec"
)

// Bounds of a request.
const (
	maxState = 16 << 20 // bytes
	patience = 3 * time.Second
)

// Snapshot is a sidecar's /debug/state at a time.
type Snapshot struct {
	At time.Time `json:"-"`

	Node     string          `json:"node"`
	Boot     string          `json:"boot"`
	Version  string          `json:"version"`
	Endpoint string          `json:"endpoint"`
	Sessions []string        `json:"sessions"`
	Ready    bool            `json:"ready"`
	Draining bool            `json:"draining"`
	Leases   exec.View       `json:"leases"`
	Lanes    []Lane          `json:"lanes"`
	Totals   connector.Stats `json:"totals"`
	// by boot: address at which it was reached; empty if it connected to this sidecar
	Peers   map[string]string `json:"peers"`
	Claimed map[string]string `json:"claimed"` // endpoint that one of the latter announced
	Store   *Store            `json:"store"`   // nil: the sidecar has none
}

// Store is the page store of a sidecar. Counts are since its start.
type Store struct {
	Tiers   []Tier `json:"tiers"`
	Misses  uint64 `json:"misses"`
	Drained bool   `json:"drained"`
}

// Tier is one tier of a store.
type Tier struct {
	Name     string `json:"name"`
	Bytes    uint64 `json:"bytes"`
	Capacity uint64 `json:"capacity_bytes"`
	Hits     uint64 `json:"hits"`
	Evicted  uint64 `json:"evicted"`
	Gets     uint64 `json:"gets"` // whose slowest page came from here, and their time in all
	GetUS    uint64 `json:"get_us"`
	Problem  string `json:"problem"`
}

// Lane is one lane of a sidecar.
type Lane struct {
	Peer      string `json:"peer"`
	Transport string `json:"transport"`
	Local     string `json:"local"`
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

// Fetch reads the state of the sidecar at addr, host:port.
func Fetch(ctx context.Context, addr string) (*Snapshot, error) {
	addr, err := Address(addr)
	if err != nil {
		return nil, fmt.Errorf("top: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+"/debug/state", nil)
	if err != nil {
		return nil, fmt.Errorf("top: --http %q: %w; want host:port of a sidecar's http.listen", addr, err)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		var op *url.Error
		if errors.As(err, &op) {
			err = op.Err // its text repeats the address
		}
		return nil, fmt.Errorf("top: no sidecar answers at http://%s: %w. Start one with 'kvspray "+
			"serve', or pass --http HOST:PORT of "+
			"the right one: its http.listen, which it logs as http= when it is ready", addr, err)
	}
	defer func() { _ = res.Body.Close() }()
	b, err := io.ReadAll(io.LimitReader(res.Body, maxState+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("top: read from %s: %w", addr, err)
	case len(b) > maxState:
		return nil, fmt.Errorf("top: %s answers more than %d MiB: not a sidecar", addr, maxState>>20)
	case res.StatusCode != http.StatusOK:
		return nil,
			fmt.Errorf("top: %s answers %s to /debug/state: not a sidecar, or one of another version",
				addr, res.Status)
	}
	s := &Snapshot{At: time.Now()}
	if err := json.Unmarshal(b, s); err != nil {
		return nil, fmt.Errorf("top: %s: %w; a sidecar of another version?", addr, err)
	}
	return s, nil
}
