package lease

import (
	"fmt"
	"math"

	"github.com/kvspray/kvspray/transfer"
)

// Slots gives out (slot, generation) names for grants, per peer.
type Slots struct {
	gen   transfer.Gen // the last one given, over all peers
	peers map[transfer.Boot]*peerSlots
	busy  int // peers with open slots
	max   int
}

type peerSlots struct {
	next int                            // lowest slot never given
	free []transfer.Slot                // fenced, oldest first
	used map[transfer.Slot]transfer.Gen // granted and not fenced
}

// NewSlots returns an empty table that gives each peer at most max slots at a time.
func NewSlots(max int) *Slots {
	return &Slots{peers: make(map[transfer.Boot]*peerSlots), max: min(max, MaxSlotsPerPeer)}
}

// Alloc names a new grant for peer.
func (s *Slots) Alloc(peer transfer.Boot) (transfer.Slot, transfer.Gen, error) {
	if s.gen == math.MaxUint32 {
		return 0, 0, fmt.Errorf("slot for peer %s: all generations of this boot are used: restart the sidecar: %w", peer, ErrLimit)
	}
	p := s.peers[peer]
	if p == nil {
		if len(s.peers) >= MaxPeers {
			return 0, 0, fmt.Errorf("slot for peer %s: %d peers hold slots already: %w", peer, MaxPeers, ErrLimit)
		}
		p = &peerSlots{used: make(map[transfer.Slot]transfer.Gen)}
		s.peers[peer] = p
	}
	var slot transfer.Slot
	switch {
	case len(p.used) >= s.max:
		return 0, 0, fmt.Errorf("slot for peer %s: %d grants are open: %w", peer, len(p.used), ErrLimit)
	case len(p.free) > 0:
		// The oldest free slot: frames that name a slot recently used meet a stale generation for longest.
		slot = p.free[0]
		p.free = append(p.free[:0], p.free[1:]...)
	default:
		slot = transfer.Slot(p.next)
		p.next++
	}
	s.gen++
	if len(p.used) == 0 {
		s.busy++
	}
	p.used[slot] = s.gen
	return slot, s.gen, nil
}

// Fenced makes a slot available again. Only a fence acknowledgement leads here.
func (s *Slots) Fenced(peer transfer.Boot, slot transfer.Slot, gen transfer.Gen) error {
	p := s.peers[peer]
	if p == nil || p.used[slot] != gen {
		return fmt.Errorf("fenced slot %d of peer %s: generation %d is not open", slot, peer, gen)
	}
	delete(p.used, slot)
	p.free = append(p.free, slot)
	if len(p.used) == 0 {
		s.busy--
	}
	if len(p.used) == 0 && len(s.peers) > MaxPeers/2 {
		// A peer without grants may be forgotten: generations are counted over all peers, so none repeats.
		delete(s.peers, peer)
	}
	return nil
}

// Peers counts those that have slots which are given and not fenced.
func (s *Slots) Peers() int { return s.busy }

// Open counts the slots of peer that are given and not fenced.
func (s *Slots) Open(peer transfer.Boot) int {
	if p := s.peers[peer]; p != nil {
		return len(p.used)
	}
	return 0
}
