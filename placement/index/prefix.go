package index

import (
	"encoding/binary"
	"hash/maphash"
)

const tokensAtOnce = 64 // that are written into a hash in one call

// Prefix makes the keys of blocks of tokens. Its secret seed keeps a client from making two
// prompts with one key.
type Prefix struct{ seed maphash.Seed }

// NewPrefix makes one with a seed of its own: keys of two of them never agree.
func NewPrefix() Prefix { return Prefix{maphash.MakeSeed()} }

// First is the key before a prompt's first block. Blocks of other sizes share no key.
func (p Prefix) First(block int) uint64 {
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], uint64(block))
	return maphash.Bytes(p.seed, b[:])
}

// Next is the key of a block with some tokens, after the block with the key before.
func (p Prefix) Next(before uint64, tokens []uint32) uint64 {
	var h maphash.Hash
	var b [4 * tokensAtOnce]byte
	h.SetSeed(p.seed)
	binary.LittleEndian.PutUint64(b[:8], before)
	_, _ = h.Write(b[:8]) // never fails, here and below
	for len(tokens) > 0 {
		n := min(len(tokens), tokensAtOnce)
		for i, t := range tokens[:n] {
			binary.LittleEndian.PutUint32(b[4*i:], t)
		}
		_, _ = h.Write(b[:4*n])
		tokens = tokens[n:]
	}
	return h.Sum64()
}

// Keys are the keys of a prompt's first whole blocks, limit of them at most.
func (p Prefix) Keys(tokens []uint32, block, limit int) []uint64 {
	if block <= 0 {
		return nil
	}
	keys := make([]uint64, min(len(tokens)/block, limit))
	key := p.First(block)
	for i := range keys {
		key = p.Next(key, tokens[i*block:(i+1)*block])
		keys[i] = key
	}
	return keys
}

// Block is a block of an engine. Without a tier it is one that the engine lost.
type Block struct {
	Key   uint64
	Tiers uint8 // bits
	loss  uint32
}

const (
	heldBytes  = 40      // of one block in a map, about
	keptLost   = 1 << 16 // lost blocks that stay, at most
	maxForgets = 16      // entries of the ring that one call looks at
)

// Held has the blocks of one engine by the names that the engine gives them. A lost block stays for
// a while, because a later block may name it as its parent: that happens if the engine computed one
// block twice and lost one of the two.
//
// Each call but Clear and Drop takes a bounded time, also when there is no place.
type Held struct {
	blocks map[uint64]Block
	have   int // blocks with a tier
	limit  int

	lost   []loss // a ring of the last losses, the oldest at first
	first  int
	losses uint32
}

// loss is an entry of the ring. It counts while the block has the same number.
type loss struct {
	name   uint64
	number uint32
}

// NewHeld makes one for a number of blocks.
func NewHeld(limit int) *Held { return &Held{blocks: map[uint64]Block{}, limit: limit} }

// Blocks is the number of blocks that the engine has.
func (h *Held) Blocks() int { return h.have }

// Bytes is the memory of all, about.
func (h *Held) Bytes() int { return len(h.blocks) * heldBytes }

// Key is the key of a block, also of a lost one that is still known.
func (h *Held) Key(name uint64) (uint64, bool) {
	b, ok := h.blocks[name]
	return b.Key, ok
}

// Add records that the engine has a block in some tiers, and returns what it was before. If that
// has another key, it is gone. false: there is no place.
func (h *Held) Add(name, key uint64, tiers uint8) (before Block, ok bool) {
	before, known := h.blocks[name]
	if !known && len(h.blocks) >= h.limit {
		for range maxForgets {
			if len(h.blocks) < h.limit || len(h.lost) == h.first {
				break
			}
			h.forget()
		}
		if len(h.blocks) >= h.limit {
			return before, false
		}
	}
	if before.Tiers == 0 {
		h.have++
	}
	if before.Key == key {
		tiers |= before.Tiers
	}
	h.blocks[name] = Block{Key: key, Tiers: tiers}
	return before, true
}

// Remove records that the engine lost a block in some tiers, and returns what it was before and the
// tiers that remain.
func (h *Held) Remove(name uint64, tiers uint8) (before Block, after uint8) {
	before = h.blocks[name]
	if before.Tiers == 0 {
		return before, 0
	}
	after = before.Tiers &^ tiers
	b := Block{Key: before.Key, Tiers: after}
	if after == 0 {
		h.have--
		h.losses++
		b.loss = h.losses
		if len(h.lost)-h.first >= keptLost {
			h.forget()
		}
		h.lost = append(h.lost, loss{name, h.losses})
	}
	h.blocks[name] = b
	return before, after
}

// forget drops the block that was lost first, unless it is back.
func (h *Held) forget() {
	l := h.lost[h.first]
	if h.first++; 2*h.first >= len(h.lost) { // as many moves as there were losses
		h.lost, h.first = append(h.lost[:0], h.lost[h.first:]...), 0
	}
	if b := h.blocks[l.name]; b.Tiers == 0 && b.loss == l.number {
		delete(h.blocks, l.name)
	}
}

// Drop removes all blocks from some tiers, and returns what changed: blocks as they were.
func (h *Held) Drop(tiers uint8) []Block {
	var had []Block
	for name, b := range h.blocks {
		if b.Tiers&tiers == 0 {
			continue
		}
		had = append(had, b)
		if b.Tiers &^= tiers; b.Tiers == 0 {
			delete(h.blocks, name)
			h.have--
		} else {
			h.blocks[name] = b
		}
	}
	return had
}

// Clear drops all, and returns what the engine had.
func (h *Held) Clear() []Block {
	had := make([]Block, 0, h.have)
	for _, b := range h.blocks {
		if b.Tiers != 0 {
			had = append(had, b)
		}
	}
	*h = Held{blocks: map[uint64]Block{}, limit: h.limit}
	return had
}
