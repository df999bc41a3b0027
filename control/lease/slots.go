package lease

import (
	"fmt"
	"math"

	"github.com/kvspray/kvspray/transfer"
)

const (
	maxSlots = 1 << 16        // limit of a frame
	maxGen   = math.MaxUint32 // of a slot
)

// Slots allocates (slot, generation) names for grants, per peer. The generations of a slot only
// count up, and a slot that has used all of them is never used again. So no name occurs twice in a
// boot, and a frame that was delayed for months matches no grant. Each peer has 2^48 names, nine
// years of a million grants a second, or fewer if a peer with very many was forgotten.
type Slots struct {
	peers map[transfer.Boot]*peerSlots
	floor transfer.Gen // no forgotten peer has had a later one
	busy  int          // peers with open slots
	max   int
}

type peerSlots struct {
	slots []slot          // those ever used
	free  []transfer.Slot // fenced, oldest first
	open  int
}

type slot struct {
	gen  transfer.Gen // the last one used
	open bool
}

// NewSlots returns an empty table that gives each peer at most max slots at a time.
func NewSlots(max int) *Slots {
	return &Slots{peers: make(map[transfer.Boot]*peerSlots), max: min(max, MaxSlotsPerPeer)}
}

// Alloc names a new grant for peer.
func (s *Slots) Alloc(peer transfer.Boot) (transfer.Slot, transfer.Gen, error) {
	p := s.peers[peer]
	if p == nil {
		if len(s.peers) >= MaxPeers {
			return 0, 0, fmt.Errorf("slot for peer %s: %d peers hold slots already: %w", peer,
				MaxPeers, ErrLimit)
		}
		p = &peerSlots{}
		s.peers[peer] = p
	}
	var n transfer.Slot
	switch {
	case p.open >= s.max:
		return 0, 0, fmt.Errorf("slot for peer %s: %d grants are open: %w", peer, p.open, ErrLimit)
	case len(p.free) > 0:
		// The oldest free slot: frames with a recently used slot then meet a stale generation for
		// longest.
		n = p.free[0]
		p.free = append(p.free[:0], p.free[1:]...)
	case len(p.slots) < maxSlots && s.floor < maxGen:
		n = transfer.Slot(len(p.slots))
		p.slots = append(p.slots, slot{gen: s.floor})
	default:
		return 0, 0, fmt.Errorf("slot for peer %s: every generation of every slot is used: restart the "+
			"sidecar: %w", peer, ErrLimit)
	}
	if p.open++; p.open == 1 {
		s.busy++
	}
	x := &p.slots[n]
	x.gen++
	x.open = true
	return n, x.gen, nil
}

// Fenced makes a slot available again. Only a fence acknowledgement leads here.
func (s *Slots) Fenced(peer transfer.Boot, n transfer.Slot, gen transfer.Gen) error {
	p := s.peers[peer]
	if p == nil || int(n) >= len(p.slots) || !p.slots[n].open || p.slots[n].gen != gen {
		return fmt.Errorf("fenced slot %d of peer %s: generation %d is not open", n, peer, gen)
	}
	p.slots[n].open = false
	if gen < maxGen {
		p.free = append(p.free, n)
	}
	if p.open--; p.open == 0 {
		s.busy--
		s.tidy(peer, p)
	}
	return nil
}

// tidy forgets a peer without grants if there are many. If the peer returns, its names start beyond
// those of every forgotten peer.
func (s *Slots) tidy(peer transfer.Boot, p *peerSlots) {
	if len(s.peers) <= MaxPeers/2 {
		return
	}
	for i := range p.slots {
		s.floor = max(s.floor, p.slots[i].gen)
	}
	delete(s.peers, peer)
}

// Peers counts the peers with allocated, unfenced slots.
func (s *Slots) Peers() int { return s.busy }

// Open counts the allocated, unfenced slots of peer.
func (s *Slots) Open(peer transfer.Boot) int {
	if p := s.peers[peer]; p != nil {
		return p.open
	}
	return 0
}
