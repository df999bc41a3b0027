package digest

import (
	"encoding/binary"
	"math/bits"

	"github.com/kvspray/kvspray/layout"
)

// Prime is the modulus of digests and weights.
const Prime = 1<<61 - 1

// SeedBytes is the size of a seed. A lease draws its own.
const SeedBytes = 16

// axis is what a weight belongs to. The weights of two axes are independent.
type axis uint64

const (
	axisWord  axis = iota + 1 // 32-bit word of a unit
	axisRow                   // token, entry of several tokens, opaque block, or row of a state
	axisHead                  // head of the model
	axisPlane                 // role and layer of the model
)

// Key holds the weights of a seed.
type Key struct {
	seed  [2]uint64
	words []uint64 // weights of the first words of a unit, extended on demand
}

// NewKey returns the key of a seed.
func NewKey(seed [SeedBytes]byte) *Key {
	return &Key{seed: [2]uint64{binary.LittleEndian.Uint64(seed[:8]),
		binary.LittleEndian.Uint64(seed[8:])}}
}

// weight is the weight of position i of an axis: 60 bits, never 0.
func (k *Key) weight(a axis, i uint64) uint64 {
	var room [16]byte
	b := binary.LittleEndian.AppendUint64(room[:0], uint64(a))
	return k.draw(binary.LittleEndian.AppendUint64(b, i))
}

// plane is the weight of a role in a layer of the model.
func (k *Key) plane(layer string, role layout.Role) uint64 {
	b := make([]byte, 0, 16+layout.MaxStringBytes)
	b = binary.LittleEndian.AppendUint64(b, uint64(axisPlane))
	b = binary.LittleEndian.AppendUint64(b, uint64(role))
	return k.draw(append(b, layer...))
}

func (k *Key) draw(name []byte) uint64 { return max(sipHash(k.seed, name)>>4, 1) }

// upTo returns the weights of the first n words of a unit.
func (k *Key) upTo(n uint64) []uint64 {
	for i := uint64(len(k.words)); i < n; i++ {
		k.words = append(k.words, k.weight(axisWord, i))
	}
	return k.words[:n]
}

// sipHash is SipHash-2-4.
func sipHash(key [2]uint64, in []byte) uint64 {
	v := [4]uint64{key[0] ^ 0x736f6d6570736575, key[1] ^ 0x646f72616e646f6d,
		key[0] ^ 0x6c7967656e657261, key[1] ^ 0x7465646279746573}
	size := uint64(len(in))
	for ; len(in) >= 8; in = in[8:] {
		sipWord(&v, binary.LittleEndian.Uint64(in))
	}
	var last [8]byte
	copy(last[:], in)
	sipWord(&v, binary.LittleEndian.Uint64(last[:])|size<<56)
	v[2] ^= 0xff
	for range 4 {
		sipRound(&v)
	}
	return v[0] ^ v[1] ^ v[2] ^ v[3]
}

func sipWord(v *[4]uint64, m uint64) {
	v[3] ^= m
	sipRound(v)
	sipRound(v)
	v[0] ^= m
}

func sipRound(v *[4]uint64) {
	v[0] += v[1]
	v[1] = bits.RotateLeft64(v[1], 13) ^ v[0]
	v[0] = bits.RotateLeft64(v[0], 32)
	v[2] += v[3]
	v[3] = bits.RotateLeft64(v[3], 16) ^ v[2]
	v[0] += v[3]
	v[3] = bits.RotateLeft64(v[3], 21) ^ v[0]
	v[2] += v[1]
	v[1] = bits.RotateLeft64(v[1], 17) ^ v[2]
	v[2] = bits.RotateLeft64(v[2], 32)
}

// wide is a sum of products, not yet reduced: of two numbers below the prime, or of the words of a
// unit and their weights. hi stays below 2^58.
type wide struct{ hi, lo uint64 }

func (s *wide) add(weight, word uint64) {
	hi, lo := bits.Mul64(weight, word)
	var carry uint64
	s.lo, carry = bits.Add64(s.lo, lo, 0)
	s.hi += hi + carry
}

// mod reduces the sum: 2^64 is 8 modulo the prime.
func (s *wide) mod() uint64 {
	return Add(Add(s.lo&Prime, s.lo>>61), s.hi<<3)
}

// Add returns the digest of two disjoint parts together.
func Add(a, b uint64) uint64 {
	s := a + b
	if s >= Prime {
		s -= Prime
	}
	return s
}

func mul(a, b uint64) uint64 {
	var s wide
	s.add(a, b)
	return s.mod()
}
