package doctor

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode"

	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/nodeapi"
	"github.com/kvspray/kvspray/internal/ui/ask"
)

// Bounds of a sidecar's report about its peers.
const (
	shownPeers  = 64  // in text; JSON has all
	shownReason = 240 // bytes of a reason in text
)

// Reach is a running sidecar's report about the paths to its peers.
type Reach nodeapi.Reach

// Peers asks the sidecar that runs on this host.
func Peers(ctx context.Context, c *config.Config) (*Reach, error) {
	addr := c.HTTP.Listen
	if addr == config.Off || addr == "" {
		return nil, errors.New("doctor: peers: http.listen is off: configure one for the running " +
			"sidecar, and name it with --http")
	}
	r := &Reach{}
	if err := ask.JSON(ctx, addr, "/v1/reach", r); err != nil {
		return nil, fmt.Errorf("doctor: peers: %w", err)
	}
	return r, nil
}

// Reached reports whether every peer has at least one lane, or none because no request needs one.
func (r *Reach) Reached() bool {
	return !slices.ContainsFunc(r.Peers, func(p nodeapi.PeerReach) bool {
		return !slices.ContainsFunc(p.Pairs, func(x nodeapi.PairReach) bool {
			return x.Lanes > 0 || x.Idle
		})
	})
}

// WriteJSON writes the report as one object.
func (r *Reach) WriteJSON(w io.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(r)
}

// WriteText writes a matrix for each peer and transport: rows are local rails, columns the peer's.
// Cells show the number of lanes, or the number of the reason below, or "idle" if no request needs
// a lane.
func (r *Reach) WriteText(w io.Writer) error {
	var b strings.Builder
	if len(r.Peers) == 0 {
		fmt.Fprintf(&b, "%s has no peer yet: sidecars connect when a request names a peer, or by "+
			"gossip (peer.gossip.join)\n", r.Node)
	}
	for _, p := range r.Peers[:min(len(r.Peers), shownPeers)] {
		writePeer(&b, &p)
	}
	if more := len(r.Peers) - shownPeers; more > 0 {
		fmt.Fprintf(&b, "and %d more peers: --json shows all\n", more)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func writePeer(b *strings.Builder, p *nodeapi.PeerReach) {
	fmt.Fprintf(b, "peer %s (%sboot %.8s)\n", where(p), quoted(p), p.Boot)
	if len(p.Pairs) == 0 {
		b.WriteString("  no transport in common\n")
	}
	var reasons []string
	missing := false
	for pairs := p.Pairs; len(pairs) > 0; {
		transport := pairs[0].Transport
		var locals, remotes []string
		cells := map[[2]string]string{}
		rest := pairs[:0:0]
		for _, x := range pairs {
			if x.Transport != transport {
				rest = append(rest, x)
				continue
			}
			locals, remotes = once(locals, x.Local), once(remotes, x.Remote)
			cell := fmt.Sprintf("%d up", x.Lanes)
			switch {
			case x.Lanes > 0:
			case x.Idle:
				cell = "idle"
			default:
				missing = true
				why := cmp.Or(x.Why, "no known reason")
				why = onTerminal(strings.ToValidUTF8(why[:min(len(why), shownReason)], ""))
				reasons = once(reasons, why)
				cell = fmt.Sprintf("no [%d]", slices.Index(reasons, why)+1)
			}
			cells[[2]string{x.Local, x.Remote}] = cell
		}
		grid := [][]string{append([]string{transport}, remotes...)}
		for _, l := range locals {
			row := []string{"  " + l}
			for _, m := range remotes {
				row = append(row, cmp.Or(cells[[2]string{l, m}], "-"))
			}
			grid = append(grid, row)
		}
		writeGrid(b, grid)
		pairs = rest
	}
	for i, why := range reasons {
		fmt.Fprintf(b, "  [%d] %s\n", i+1, why)
	}
	if missing && !p.Dials {
		fmt.Fprintf(b, "  (the peer opens the lanes, because its boot id is lower: see 'kvspray doctor "+
			"--peers' there)\n")
	}
}

// where locates the peer: the address that was dialed, or the endpoint that it announced.
func where(p *nodeapi.PeerReach) string {
	switch {
	case p.Endpoint != "":
		return p.Endpoint
	case p.Claimed != "":
		return fmt.Sprintf("that connected to this sidecar, and announced the endpoint %q", p.Claimed)
	}
	return "that connected to this sidecar, and announced no endpoint"
}

// quoted is the peer's name for itself, quoted: it is foreign text.
func quoted(p *nodeapi.PeerReach) string {
	if p.Node == "" {
		return ""
	}
	return fmt.Sprintf("node %q, ", p.Node)
}

// onTerminal makes a text safe that may contain a peer's words, such as the address of an
// unreachable rail.
func onTerminal(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return '?'
	}, s)
}

// once appends s unless it is present.
func once(all []string, s string) []string {
	if slices.Contains(all, s) {
		return all
	}
	return append(all, s)
}

func writeGrid(b *strings.Builder, grid [][]string) {
	width := make([]int, len(grid[0]))
	for _, row := range grid {
		for i, cell := range row {
			width[i] = max(width[i], len(cell))
		}
	}
	for _, row := range grid {
		line := " "
		for i, cell := range row {
			line += fmt.Sprintf(" %-*s", width[i], cell)
		}
		b.WriteString(strings.TrimRight(line, " ") + "\n")
	}
}
