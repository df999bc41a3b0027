// SPDX-License-Identifier: Apache-2.0

// Package status is `kvspray status`: a running sidecar on one screen. It reads what the sidecar's
// HTTP port has about itself, its peers and its store, once.
//
// WriteText is pure. No goroutines.
package status

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"unicode"

	"github.com/kvspray/kvspray/internal/ui/ask"
	"github.com/kvspray/kvspray/internal/ui/doctor"
	"github.com/kvspray/kvspray/internal/ui/top"
)

// Bounds of the text; JSON has all.
const (
	shownPeers    = 16
	shownTroubles = 8
)

// Status is a sidecar at one time.
type Status struct {
	Node    string `json:"node"`
	Version string `json:"version"`
	State   string `json:"state"` // starting, ready, not ready, leaving or draining
	// Leaving is for how many seconds routers still choose other engines; 0: they do not.
	Leaving  int               `json:"leaving_seconds"`
	Endpoint string            `json:"endpoint"`
	Engines  []string          `json:"engines"`
	Open     Open              `json:"open"`
	Ended    map[string]uint64 `json:"ended"` // transfers by side and outcome
	Peers    []Peer            `json:"peers"`
	Store    []Tier            `json:"store,omitempty"`
	Troubles []string          `json:"troubles"`
}

// Open counts open leases.
type Open struct {
	Receiving int `json:"receiving"`
	Sending   int `json:"sending"`
}

// Peer is another sidecar.
type Peer struct {
	Node     string   `json:"node"`
	Endpoint string   `json:"endpoint"` // empty: it connected to this sidecar
	Lanes    int      `json:"lanes"`
	Routes   []string `json:"routes"` // transport:rail of each local rail with a lane
	Sent     uint64   `json:"sent_bytes"`
	Idle     bool     `json:"idle"` // no request needs a lane
}

// Tier is a tier of the page store.
type Tier struct {
	Name     string `json:"name"`
	Bytes    uint64 `json:"bytes"`
	Capacity uint64 `json:"capacity_bytes"`
}

// Read asks the sidecar at addr, the host:port of its http.listen.
func Read(ctx context.Context, addr string) (*Status, error) {
	var state top.Snapshot
	var reach doctor.Reach
	var store struct {
		Tiers []Tier `json:"tiers"`
	}
	for _, q := range []struct {
		path     string
		into     any
		optional bool
	}{{"/debug/state", &state, false}, {"/v1/reach", &reach, false}, {"/v1/store", &store, true}} {
		err := ask.JSON(ctx, addr, q.path, q.into)
		if err != nil && !(q.optional && errors.Is(err, ask.ErrNone)) {
			return nil, fmt.Errorf("status: %w", err)
		}
	}
	return build(&state, &reach, store.Tiers), nil
}

func build(state *top.Snapshot, reach *doctor.Reach, tiers []Tier) *Status {
	s := &Status{Node: state.Node, Version: state.Version, State: "starting",
		Endpoint: state.Endpoint, Leaving: state.LeavingSeconds, Engines: state.Sessions,
		Open:  Open{state.Leases.Open[0], state.Leases.Open[1]},
		Ended: state.Totals.Transfers, Store: tiers, Troubles: []string{}}
	switch {
	case state.Draining:
		s.State = "draining"
	case state.Leaving:
		s.State = "leaving"
	case state.Ready:
		s.State = "ready"
	case len(state.Problems) > 0:
		s.State = "not ready"
	}
	names := map[string]string{}
	for _, p := range reach.Peers {
		if p.Boot == state.Boot {
			continue
		}
		names[p.Boot] = or(p.Node, p.Endpoint, p.Claimed, p.Boot)
		peer := Peer{Node: p.Node, Endpoint: p.Endpoint}
		missing := ""
		for _, pair := range p.Pairs {
			peer.Lanes += pair.Lanes
			peer.Idle = peer.Idle || pair.Idle
			if pair.Lanes > 0 {
				peer.Routes = append(peer.Routes, pair.Transport+":"+pair.Local)
			}
			missing = or(missing, pair.Why)
		}
		slices.Sort(peer.Routes)
		peer.Routes = slices.Compact(peer.Routes)
		for _, pair := range state.Leases.Rails.Pairs {
			if pair.Peer == p.Boot {
				peer.Sent += pair.Counters.Bytes
			}
		}
		if peer.Lanes == 0 && !peer.Idle {
			s.Troubles = append(s.Troubles, fmt.Sprintf("no lane to %s: %s", names[p.Boot],
				or(missing, "no transport in common")))
		}
		s.Peers = append(s.Peers, peer)
	}
	for _, pair := range state.Leases.Rails.Pairs {
		if pair.Reason != "" && pair.Peer != state.Boot {
			s.Troubles = append(s.Troubles, fmt.Sprintf("rail %s:%s to %s at %s is %s: %s",
				pair.Path.Transport, pair.Path.Local, pair.Path.Remote, or(names[pair.Peer], pair.Peer),
				pair.State, pair.Reason))
		}
	}
	s.Troubles = append(s.Troubles, state.Problems...)
	if len(s.Engines) == 0 {
		s.Troubles = append(s.Troubles, "no engine is connected: kvspray doctor checks the socket")
	}
	return s
}

// or is the first text that is not empty.
func or(texts ...string) string {
	for _, t := range texts {
		if t != "" {
			return t
		}
	}
	return ""
}

// WriteJSON writes the status as one object.
func (s *Status) WriteJSON(w io.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(s)
}

// WriteText writes one screen.
func (s *Status) WriteText(w io.Writer) error {
	var b strings.Builder
	now := s.State
	if now == "leaving" {
		now = fmt.Sprintf("leaving, %d s left", s.Leaving)
	}
	fmt.Fprintf(&b, "%s  %s  %s  kvspray %s\n", s.Node, now, s.Endpoint, s.Version)
	engines := or(strings.Join(s.Engines, ", "), "none")
	if s.Leaving > 0 && len(s.Engines) > 0 {
		engines += fmt.Sprintf(" (leaving: no new requests from routers for %d s)", s.Leaving)
	}
	fmt.Fprintf(&b, "engines    %s\n", engines)
	var ended []string
	for _, k := range slices.Sorted(maps.Keys(s.Ended)) {
		ended = append(ended, fmt.Sprintf("%s %d", strings.ReplaceAll(k, "_", " "), s.Ended[k]))
	}
	fmt.Fprintf(&b, "transfers  %d receiving, %d sending; ended: %s\n", s.Open.Receiving,
		s.Open.Sending, or(strings.Join(ended, ", "), "none"))
	var tiers []string
	for _, t := range s.Store {
		tiers = append(tiers, fmt.Sprintf("%s %s of %s", t.Name, size(t.Bytes), size(t.Capacity)))
	}
	fmt.Fprintf(&b, "store      %s\n", or(strings.Join(tiers, ", "), "off"))
	if len(s.Peers) == 0 {
		b.WriteString("peers      none yet: requests and gossip name them\n")
	} else {
		fmt.Fprintf(&b, "peers      %d\n", len(s.Peers))
	}
	// Flush has the errors.
	t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	for _, p := range s.Peers[:min(len(s.Peers), shownPeers)] {
		lanes := fmt.Sprintf("%d lanes", p.Lanes)
		switch {
		case p.Lanes == 0 && p.Idle:
			lanes = "idle"
		case p.Lanes == 0:
			lanes = "no lane"
		}
		_, _ = fmt.Fprintf(t, "  %s\t%s\t%s\t%s sent\t%s\n", clean(or(p.Endpoint, "(it connected)")),
			clean(or(p.Node, "-")), lanes, size(p.Sent), clean(strings.Join(p.Routes, " ")))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	more(&b, len(s.Peers)-shownPeers)
	for _, text := range s.Troubles[:min(len(s.Troubles), shownTroubles)] {
		fmt.Fprintf(&b, "! %s\n", clean(text))
	}
	more(&b, len(s.Troubles)-shownTroubles)
	lines := strings.Split(b.String(), "\n")
	for i, l := range lines {
		lines[i] = strings.TrimRight(clean(l), " ")
	}
	_, err := io.WriteString(w, strings.Join(lines, "\n"))
	return err
}

func more(b *strings.Builder, n int) {
	if n > 0 {
		fmt.Fprintf(b, "  and %d more (--output json)\n", n)
	}
}

// clean makes foreign text safe for a terminal and for a line.
func clean(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return '?'
	}, s)
}

func size(n uint64) string {
	const step = 1024
	units := []string{"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"}
	v, i := float64(n), 0
	for ; v >= step && i < len(units)-1; i++ {
		v /= step
	}
	if i == 0 {
		return fmt.Sprintf("%d B", n)
	}
	return fmt.Sprintf("%.1f %s", v, units[i])
}
