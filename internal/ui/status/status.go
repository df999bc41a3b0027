// Package status is `kvspray status`: a running sidecar on one screen, once or again and again. It
// reads what the sidecar's HTTP port has about itself and the rails to its peers.
//
// Text is pure: two states in, lines out. No goroutines.
package status

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/kvspray/kvspray/internal/nodeapi"
	"github.com/kvspray/kvspray/internal/nodeapi/debug"
	"github.com/kvspray/kvspray/internal/ui/ask"
)

// Status is a sidecar at one time.
type Status struct {
	At time.Time `json:"-"`

	Phase    string   `json:"state"` // starting, ready, not ready, leaving or draining
	Troubles []string `json:"troubles"`
	debug.State
	Reach []nodeapi.PeerReach `json:"reach"` // the other sidecars
}

// Read asks the sidecar at addr, the host:port of its http.listen.
func Read(ctx context.Context, addr string) (*Status, error) {
	s := &Status{}
	var reach nodeapi.Reach
	if err := ask.JSON(ctx, addr, "/debug/state", &s.State); err != nil {
		return nil, fmt.Errorf("status: %w", err)
	}
	if err := ask.JSON(ctx, addr, "/v1/reach", &reach); err != nil {
		return nil, fmt.Errorf("status: %w", err)
	}
	s.At, s.Reach = time.Now(), reach.Peers
	s.judge()
	return s, nil
}

// judge sets the phase and the troubles.
func (s *Status) judge() {
	s.Phase, s.Troubles = "starting", []string{}
	switch {
	case s.Draining:
		s.Phase = "draining"
	case s.Leaving:
		s.Phase = "leaving"
	case s.Ready:
		s.Phase = "ready"
	case len(s.Problems) > 0:
		s.Phase = "not ready"
	}
	trouble := func(format string, a ...any) {
		s.Troubles = append(s.Troubles, fmt.Sprintf(format, a...))
	}
	for i := range s.Reach {
		p := &s.Reach[i]
		lanes, idle := lanesOf(p)
		if lanes > 0 || idle {
			continue
		}
		why := "no transport in common"
		if k := slices.IndexFunc(p.Pairs, func(x nodeapi.PairReach) bool { return x.Why != "" }); k >= 0 {
			why = p.Pairs[k].Why
		}
		trouble("no lane to %s: %s", s.name(p.Boot), why)
	}
	for _, pair := range s.Leases.Rails.Pairs {
		if pair.Reason == "" || pair.Peer == s.Boot {
			continue
		}
		left := ""
		if pair.Left > 0 && pair.Left < time.Hour { // an endless exclusion lasts until the link is back
			left = fmt.Sprintf(" (for %v)", pair.Left.Round(time.Millisecond))
		}
		trouble("rail %s:%s to %s at %s is %s: %s%s", pair.Path.Transport, pair.Path.Local,
			pair.Path.Remote, s.name(pair.Peer), pair.State, pair.Reason, left)
	}
	s.Troubles = append(s.Troubles, s.Problems...)
	if len(s.Workers) == 0 {
		trouble("no engine is connected: kvspray doctor checks the socket")
	}
}

// name of a sidecar: what suffices for people.
func (s *Status) name(boot string) string {
	if boot == s.Boot {
		return "this sidecar"
	}
	for _, p := range s.Reach {
		if p.Boot == boot {
			return cmp.Or(p.Node, p.Endpoint, p.Claimed, short(boot))
		}
	}
	return short(boot)
}

// lanesOf counts the lanes to a peer; idle: no request needs one.
func lanesOf(p *nodeapi.PeerReach) (lanes int, idle bool) {
	for _, pair := range p.Pairs {
		lanes += pair.Lanes
		idle = idle || pair.Idle
	}
	return lanes, idle
}

// short is the part of an id that suffices for people.
func short(id string) string { return id[:min(len(id), 8)] }

// WriteJSON writes the status as one object.
func (s *Status) WriteJSON(w io.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(s)
}
