// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"unicode"

	"github.com/kvspray/kvspray/internal/config"
)

// Bounds of what a sidecar says of its peers.
const (
	maxReachBytes = 16 << 20
	shownPeers    = 64  // in text; JSON has all
	shownReason   = 240 // bytes of a reason in text
)

// Reach is what a running sidecar knows of the ways to its peers.
type Reach struct {
	Node  string `json:"node"`
	Boot  string `json:"boot"`
	Peers []Peer `json:"peers"`
}

// Peer is another sidecar.
type Peer struct {
	Boot     string `json:"boot"`
	Node     string `json:"node"`     // as it calls itself
	Endpoint string `json:"endpoint"` // where it was reached; empty: it came to the sidecar that was asked
	Claimed  string `json:"claimed"`  // where it says that it serves
	Dials    bool   `json:"dials"`    // the sidecar that was asked opens the lanes; otherwise the peer does, and knows more
	Pairs    []Pair `json:"pairs"`    // the best first
}

// Pair is a local rail and a remote one, over one transport.
type Pair struct {
	Transport string `json:"transport"`
	Local     string `json:"local"`
	Remote    string `json:"remote"`
	Lanes     int    `json:"lanes"`
	Why       string `json:"why,omitempty"`  // why there is none
	Idle      bool   `json:"idle,omitempty"` // there is none because no request needs one
}

// Peers asks the sidecar that runs on this host.
func Peers(ctx context.Context, c *config.Config) (*Reach, error) {
	addr := c.HTTP.Listen
	if addr == config.Off || addr == "" {
		return nil, errors.New("doctor: peers: http.listen is off: give the running sidecar one, and name it with --http")
	}
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+"/v1/reach", nil)
	if err != nil {
		return nil, fmt.Errorf("doctor: peers: http.listen %q: %w; want host:port", addr, err)
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		var op *url.Error
		if errors.As(err, &op) {
			err = op.Err // its text repeats the address
		}
		return nil, fmt.Errorf("doctor: peers: tried http://%s, and no sidecar answers: %w. Start one with 'kvspray serve', or pass --http HOST:PORT of the one "+
			"that you mean: its http.listen, which it logs as http= when it is ready", addr, err)
	}
	defer func() { _ = resp.Body.Close() }() // read to its end
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxReachBytes+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("doctor: peers: read from %s: %w", addr, err)
	case resp.StatusCode != http.StatusOK:
		return nil, fmt.Errorf("doctor: peers: %s answers %s to /v1/reach: not a sidecar, or one of another version", addr, resp.Status)
	case len(b) > maxReachBytes:
		return nil, fmt.Errorf("doctor: peers: %s answers more than %d MiB: not a sidecar", addr, maxReachBytes>>20)
	}
	r := &Reach{}
	if err := json.Unmarshal(b, r); err != nil {
		return nil, fmt.Errorf("doctor: peers: %s: %w; a sidecar of another version?", addr, err)
	}
	return r, nil
}

// Reached reports whether every peer has at least one lane, or none because no request needs one.
func (r *Reach) Reached() bool {
	return !slices.ContainsFunc(r.Peers, func(p Peer) bool {
		return !slices.ContainsFunc(p.Pairs, func(x Pair) bool { return x.Lanes > 0 || x.Idle })
	})
}

// WriteJSON writes it as one object.
func (r *Reach) WriteJSON(w io.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(r)
}

// WriteText writes a matrix for each peer and transport: rows are rails of ours, columns the peer's, cells the number of lanes, or the
// number of the reason below why there is none; idle where no request needs any.
func (r *Reach) WriteText(w io.Writer) error {
	var b strings.Builder
	if len(r.Peers) == 0 {
		fmt.Fprintf(&b, "%s knows no peer yet: peers meet when a request names one, or by gossip (peer.gossip.join)\n", r.Node)
	}
	for _, p := range r.Peers[:min(len(r.Peers), shownPeers)] {
		p.text(&b)
	}
	if more := len(r.Peers) - shownPeers; more > 0 {
		fmt.Fprintf(&b, "and %d more peers: --json shows all\n", more)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func (p *Peer) text(b *strings.Builder) {
	fmt.Fprintf(b, "peer %s (%sboot %.8s)\n", p.where(), p.named(), p.Boot)
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
				why := cmp.Or(x.Why, "no reason is known")
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
		fmt.Fprintf(b, "  (the lanes are opened by the peer, whose boot id is the lower one: 'kvspray doctor --peers' there says more)\n")
	}
}

// where is how to find the peer: the address that was dialled, or what it has said of itself.
func (p *Peer) where() string {
	switch {
	case p.Endpoint != "":
		return p.Endpoint
	case p.Claimed != "":
		return fmt.Sprintf("that connected to this sidecar, and says that it serves at %q", p.Claimed)
	}
	return "that connected to this sidecar, and said no address of its own"
}

// named is the peer's name for itself, quoted: it is foreign text.
func (p *Peer) named() string {
	if p.Node == "" {
		return ""
	}
	return fmt.Sprintf("node %q, ", p.Node)
}

// onTerminal is a text in which a peer's words may stand, such as the address at which its rail was not reached.
func onTerminal(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return '?'
	}, s)
}

// once appends what is not there yet.
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
