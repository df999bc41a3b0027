package exec

import (
	"bytes"
	"maps"
	"slices"

	"github.com/kvspray/kvspray/control/exec/credit"
	"github.com/kvspray/kvspray/control/spray"
	"github.com/kvspray/kvspray/transfer"
)

// peers are the other sidecars, and ourselves.
type peers struct {
	*core
	byBoot map[transfer.Boot]*peer
	counts [numViolations]uint64 // of protocol violations
}

// peerLink is whether frames reach a peer.
type peerLink uint8

const (
	peerUnmet peerLink = iota // its control lanes were never up
	peerUp
	peerDown // they were, and will be again if the peer returns
)

func newPeers(c *core) *peers { return &peers{core: c, byBoot: map[transfer.Boot]*peer{}} }

// peer is one boot of another sidecar, or of ourselves.
type peer struct {
	names map[*endpoint]struct{} // that lead to it
	idle  []*endpoint            // unused ones of these, oldest first; at most maxIdleNames

	boot    transfer.Boot
	link    peerLink
	lanes   []*laneState
	rails   *spray.Peer
	pending int
	known   map[railID]bool // its rails: whether their links are down; nil: not reported yet
	limits  credit.Limits

	places localities

	reported reportedSet
	dirty    bool
	hint     bool              // send a wake-up hint as soon as there is a lane
	ranks    []Rank            // of the engine there, as reported last; nil: assumed to equal ours
	load     map[string]uint64 // bytes of the parts that its ranks owe us, by rank
}

// up reports whether frames reach the peer.
func (p *peer) up() bool { return p.link == peerUp }

// get returns the entry of a boot, a new one where there is none.
func (ps *peers) get(boot transfer.Boot) *peer {
	p := ps.byBoot[boot]
	if p == nil {
		p = &peer{boot: boot, names: map[*endpoint]struct{}{}}
		p.rails = ps.spray.Peer(boot, p)
		p.rails.Tier = func(path spray.Path, at spray.Place) int {
			return p.places.tier(ps.cfg.Distance,
				path, at)
		}
		ps.byBoot[boot] = p
	}
	return p
}

func (ps *peers) inOrder() []*peer {
	return slices.SortedFunc(maps.Values(ps.byBoot),
		func(a, b *peer) int { return bytes.Compare(a.boot[:], b.boot[:]) })
}
