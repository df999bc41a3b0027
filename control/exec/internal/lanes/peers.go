// Package lanes gives slices to the lanes of peers. It has the other sidecars with their lanes and
// rails, how far rails are from memory, and the credits of both directions. The slice scheduler
// (package spray) decides; this package moves its decisions into actions.
package lanes

import (
	"bytes"
	"fmt"
	"maps"
	"slices"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/exec/internal/core"
	"github.com/kvspray/kvspray/control/exec/internal/credit"
	"github.com/kvspray/kvspray/control/exec/internal/frame"
	"github.com/kvspray/kvspray/control/exec/internal/timer"
	"github.com/kvspray/kvspray/control/spray"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// Instant is a point in time: the duration since the owner's start.
type Instant = timer.Instant

// Actions are what this package asks of the driver.
type Actions interface {
	// Move gives slices to a lane. The callee copies them.
	Move(lane uint64, batch []transport.Slice)
	WakeHint(lane uint64)
	Ask(lane uint64)
	Measure()
	Send(to transfer.Boot, f *peerv1.ControlFrame)
	LogViolation(peer transfer.Boot, text string)
}

// Peers are the other sidecars, and ourselves.
type Peers struct {
	*core.Core
	byBoot map[transfer.Boot]*Peer
	counts frame.Counts // of protocol violations
	out    Actions
}

// Link is whether frames reach a peer.
type Link uint8

// The states of a Link.
const (
	Unmet Link = iota // its control lanes were never up
	Up
	Down // they were, and will be again if the peer returns
)

// NewPeers returns an empty table.
func NewPeers(c *core.Core, out Actions) *Peers {
	return &Peers{Core: c, out: out, byBoot: map[transfer.Boot]*Peer{}}
}

// Peer is one boot of another sidecar, or of ourselves.
type Peer struct {
	Boot    transfer.Boot
	Link    Link
	Rails   *spray.Peer
	Pending int // what of it waits for an intent; counted by package source

	lanes    []*laneState
	known    map[railID]bool // its rails: whether their links are down; nil: not reported yet
	limits   credit.Limits
	places   localities
	reported frame.Reported
	dirty    bool
	hint     bool // send a wake-up hint as soon as there is a lane
}

// Up reports whether frames reach the peer.
func (p *Peer) Up() bool { return p.Link == Up }

// Lanes counts the lanes to the peer.
func (p *Peer) Lanes() int { return len(p.lanes) }

// Known counts the rails of the peer that are known.
func (p *Peer) Known() int { return len(p.known) }

// Moves counts flows that enter and leave a locality.
func (p *Peer) Moves(at spray.Place, by int) { p.places.moves(at, by) }

// Find returns the entry of a boot; nil: there is none.
func (ps *Peers) Find(boot transfer.Boot) *Peer { return ps.byBoot[boot] }

// Len counts the peers.
func (ps *Peers) Len() int { return len(ps.byBoot) }

// Forget deletes a peer with its lanes' state in the slice scheduler.
func (ps *Peers) Forget(p *Peer) {
	delete(ps.byBoot, p.Boot)
	p.hint = false
	ps.Spray.Forget(p.Rails)
}

// Get returns the entry of a boot, a new one where there is none.
func (ps *Peers) Get(boot transfer.Boot) *Peer {
	p := ps.byBoot[boot]
	if p == nil {
		p = &Peer{Boot: boot}
		p.Rails = ps.Spray.Peer(boot, p)
		p.Rails.Tier = func(path spray.Path, at spray.Place) int {
			return p.places.tier(ps.Cfg.Distance, path, at)
		}
		ps.byBoot[boot] = p
	}
	return p
}

func (ps *Peers) inOrder() []*Peer {
	return slices.SortedFunc(maps.Values(ps.byBoot),
		func(a, b *Peer) int { return bytes.Compare(a.Boot[:], b.Boot[:]) })
}

// Violates counts a violation of p, and reports whether it is the first of its kind from this peer.
// Only that one is logged: no peer can fill the log.
func (ps *Peers) Violates(p *Peer, what frame.Violation) (first bool) {
	ps.counts[what]++
	return p.reported.First(what)
}

// Report counts a violation that another package found.
func (ps *Peers) Report(boot transfer.Boot, what frame.Violation) (first bool) {
	if p := ps.byBoot[boot]; p != nil {
		return ps.Violates(p, what)
	}
	ps.counts[what]++
	return false // it is gone
}

// logViolation counts and logs an invalid field. The rest of the frame is used.
func (ps *Peers) logViolation(p *Peer, what frame.Violation, format string, args ...any) {
	if ps.Violates(p, what) {
		ps.out.LogViolation(p.Boot, fmt.Sprintf(format, args...))
	}
}

// Violations counts all violations by the invalid field.
func (ps *Peers) Violations() (counts map[string]uint64) { return ps.counts.ByLabel() }
