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
	"fmt"
	"time"

	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/internal/ui/ask"
)

// Snapshot is a sidecar's /debug/state at a time.
type Snapshot struct {
	At time.Time `json:"-"`

	Node           string    `json:"node"`
	Boot           string    `json:"boot"`
	Version        string    `json:"version"`
	Endpoint       string    `json:"endpoint"`
	Sessions       []string  `json:"sessions"`
	Ready          bool      `json:"ready"`
	Draining       bool      `json:"draining"`
	Leaving        bool      `json:"leaving"` // routers choose other engines, for LeavingSeconds
	LeavingSeconds int       `json:"leaving_seconds"`
	Problems       []string  `json:"problems"`
	Leases         exec.View `json:"leases"`
	Lanes          []Lane    `json:"lanes"`
	Totals         Totals    `json:"totals"`
	// by boot: address at which it was reached; empty if it connected to this sidecar
	Peers   map[string]string `json:"peers"`
	Claimed map[string]string `json:"claimed"` // endpoint that one of the latter announced
	Store   *Store            `json:"store"`   // nil: the sidecar has none
}

// Totals are counts since the sidecar's start.
type Totals struct {
	Transfers map[string]uint64 // by outcome
	Bytes     map[string]uint64 // by transport
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

// Fetch reads the state of the sidecar at addr, host:port.
func Fetch(ctx context.Context, addr string) (*Snapshot, error) {
	s := &Snapshot{}
	if err := ask.JSON(ctx, addr, "/debug/state", s); err != nil {
		return nil, fmt.Errorf("top: %w", err)
	}
	s.At = time.Now()
	return s, nil
}
