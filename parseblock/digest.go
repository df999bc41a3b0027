package parseblock

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"

	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/transfer"
)

// PlanVersion counts the changes to the order of bytes in a transfer space. Raise it with every
// change that moves a byte within the space and that Digest would not show: the order of rows,
// heads and columns in a page, or the meaning of a number below. Two sidecars of different versions
// refuse each other's plans.
const PlanVersion = 1

const (
	matchDomain = "kvspray-plan-layers-v1"
	planDomain  = "kvspray-plan-v1"
)

// rules are the inputs of every plan that depend on the release, not on layouts or prompts.
type rules struct{ version, chunkBytes uint64 }

var ourRules = rules{PlanVersion, transfer.ChunkBytes}

// Digest is equal on two sides if every byte has the same place in both transfer spaces. Each side
// computes it from its own plan. The source sends nothing to a receiver with another digest,
// because every byte would arrive intact and in the wrong place.
//
// The digest covers the order of segments, the planes of each segment with their axes, heads and
// layers, the tokens of each segment, the cut pages, and the mapping of segments to chunks. It
// omits strides, bases and block tables, which belong to one side. Successive equal segments are
// written once with their count, so the cost depends on the number of kinds of layers, not on the
// length of the model or the prompt.
func (p *Plan) Digest() [32]byte { return p.digest(ourRules) }

func (p *Plan) digest(r rules) [32]byte {
	var room [1024]byte
	b := append(room[:0], planDomain...)
	b = appendNums(b, r.version, r.chunkBytes)
	b = append(b, p.match.digest[:]...)
	b = appendNums(b, uint64(p.tokens), uint64(p.space.NumChunks()), p.space.TotalBytes(),
		uint64(len(p.segs)))
	// position of the last different segment, after which the count of equal segments stands
	last, next := -1, uint32(0)
	for i := range p.segs {
		r, size := p.space.Segment(i)
		at := len(b)
		// Chunks between two segments would change the space, so the distance from the end of the
		// last segment counts.
		b = appendNums(b, 1, uint64(r.First-next), uint64(r.Count), size)
		b = p.segs[i].append(b)
		next = r.End()
		if last >= 0 && bytes.Equal(b[last+8:at], b[at+8:]) {
			b = b[:at]
			binary.LittleEndian.PutUint64(b[last:], binary.LittleEndian.Uint64(b[last:])+1)
			continue
		}
		last = at
	}
	return sha256.Sum256(b)
}

// append adds the tokens and rows of a segment.
func (s *segment) append(b []byte) []byte {
	b = appendNums(b, boolNum(s.state), uint64(s.n), uint64(s.block0),
		uint64(s.full), s.page, s.tail, uint64(len(s.tails)))
	b = appendNums(b, s.tails...)
	if s.cut == nil {
		return appendNums(b, 0)
	}
	b = appendNums(b, 1, uint64(s.cut.pages), s.cut.bytes, s.cut.lacks)
	return appendNums(b, s.cut.rows...)
}

// sum covers the values that follow from the two layouts and the share: the layers in order and the
// pairs of planes of each.
func (m *Match) sum() [32]byte {
	h := sha256.New()
	b := append(make([]byte, 0, 1024), matchDomain...)
	b = appendNums(b, uint64(len(m.links)))
	for flat, pairs := range m.links {
		b = appendText(b, layerName(m.dst, flat))
		b = appendNums(b, uint64(len(pairs)))
		for i := range pairs {
			p := &pairs[i]
			b = appendText(b, layerName(m.src, p.from.flat))
			b = p.append(b)
		}
		h.Write(b)
		b = b[:0]
	}
	return [32]byte(h.Sum(b[:0]))
}

// append adds the cells that a pair moves, and their order.
func (p *pair) append(b []byte) []byte {
	b = appendNums(b, uint64(p.role), uint64(p.unit), boolNum(p.headMajor), boolNum(p.colMajor),
		boolNum(p.turned),
		p.cell, p.heads, p.cols, p.rows, p.rowTokens, p.head0)
	for i, s := range [2]*place{&p.from, &p.to} {
		h := p.headsOf[i]
		b = appendNums(b, uint64(s.group), uint64(s.table), uint64(s.flat), s.tokens,
			uint64(h.first), uint64(h.count))
	}
	return b
}

func layerName(l *layout.Layout, flat int) string {
	if g, i, ok := l.LayerAt(flat); ok {
		return l.Groups[g].Layers[i].Name
	}
	return ""
}

func boolNum(v bool) uint64 {
	if v {
		return 1
	}
	return 0
}

func appendText(b []byte, s string) []byte {
	return append(appendNums(b, uint64(len(s))), s...)
}

func appendNums(b []byte, all ...uint64) []byte {
	for _, v := range all {
		b = binary.LittleEndian.AppendUint64(b, v)
	}
	return b
}
