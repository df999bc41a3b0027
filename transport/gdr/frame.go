package gdr

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strings"

	"github.com/kvspray/kvspray/internal/verbs"
	"github.com/kvspray/kvspray/transfer"
)

// What ends say on a lane's socket: a head, and behind a GO its spans.
const (
	kindAsk = iota + 1
	kindGo
	kindEnd
)

const (
	headBytes = 40
	spanBytes = 8 + 4 + 4
	maxSpans  = 1 << 17 // of a slice

	// maxUnsent frames wait for the socket: the questions of this end, and for each of the peer's a GO and an END, which it has to
	// read before it asks again. More wait only for somebody who does not read.
	maxUnsent = 3 * maxInFlight
)

var errFrame = errors.New("gdr: malformed frame")

// head is the fixed part of every frame. seq tells uses of an id apart.
type head struct {
	kind    uint8
	id      uint8 // of the slice, chosen by its source: below maxInFlight
	reason  transfer.Reason
	seq     uint16
	slot    transfer.Slot
	gen     transfer.Gen
	r       transfer.Range
	attempt uint32
	spans   uint32
	bytes   uint64
}

func appendHead(b []byte, h *head) []byte {
	b = append(b, h.kind, h.id, byte(h.reason), 0)
	b = binary.LittleEndian.AppendUint16(b, h.seq)
	b = binary.LittleEndian.AppendUint16(b, uint16(h.slot))
	b = binary.LittleEndian.AppendUint32(b, uint32(h.gen))
	b = binary.LittleEndian.AppendUint32(b, h.r.First)
	b = binary.LittleEndian.AppendUint32(b, h.r.Count)
	b = binary.LittleEndian.AppendUint32(b, h.attempt)
	b = binary.LittleEndian.AppendUint32(b, h.spans)
	b = binary.LittleEndian.AppendUint32(b, 0)
	return binary.LittleEndian.AppendUint64(b, h.bytes)
}

// parseHead takes a head from a peer.
func parseHead(b *[headBytes]byte, h *head) error {
	le := binary.LittleEndian
	*h = head{kind: b[0], id: b[1], reason: transfer.Reason(b[2]), seq: le.Uint16(b[4:]), slot: transfer.Slot(le.Uint16(b[6:])),
		gen: transfer.Gen(le.Uint32(b[8:])), r: transfer.Range{First: le.Uint32(b[12:]), Count: le.Uint32(b[16:])}, attempt: le.Uint32(b[20:]),
		spans: le.Uint32(b[24:]), bytes: le.Uint64(b[32:])}
	switch {
	case h.kind < kindAsk || h.kind > kindEnd:
		return fmt.Errorf("%w: kind %d", errFrame, h.kind)
	case h.id >= maxInFlight:
		return fmt.Errorf("%w: slice %d of %d", errFrame, h.id, maxInFlight)
	case int(h.reason) >= transfer.NumReasons:
		return fmt.Errorf("%w: reason %d", errFrame, h.reason)
	case h.spans > maxSpans || h.kind != kindGo && h.spans != 0:
		return fmt.Errorf("%w: %d spans", errFrame, h.spans)
	case b[3] != 0 || le.Uint32(b[28:]) != 0:
		return fmt.Errorf("%w: reserved bytes are set", errFrame)
	}
	return nil
}

// span is memory under one key. In a GO, key 0 and address 0 mean that these bytes have landed already.
type span struct {
	addr uint64
	len  uint32
	key  uint32
}

func (s span) skip() bool { return s.key == 0 && s.addr == 0 }

func appendSpan(b []byte, s span) []byte {
	b = binary.LittleEndian.AppendUint64(b, s.addr)
	b = binary.LittleEndian.AppendUint32(b, s.len)
	return binary.LittleEndian.AppendUint32(b, s.key)
}

// appendSpans parses what appendSpan made.
func appendSpans(dst []span, b []byte) ([]span, error) {
	for ; len(b) >= spanBytes; b = b[spanBytes:] {
		s := span{binary.LittleEndian.Uint64(b), binary.LittleEndian.Uint32(b[8:]), binary.LittleEndian.Uint32(b[12:])}
		if s.len == 0 {
			return dst, fmt.Errorf("%w: a span of no length", errFrame)
		}
		dst = append(dst, s)
	}
	return dst, nil
}

// The immediate of a verdict: the slice's id, why it does not count, and the low half of its use.
func verdictOf(id uint8, why transfer.Reason, seq uint16) uint32 {
	return uint32(id)<<24 | uint32(why)<<16 | uint32(seq)
}

func parseVerdict(imm uint32) (id uint8, why transfer.Reason, seq uint16) {
	return uint8(imm >> 24), transfer.Reason(imm >> 16), uint16(imm)
}

// What each end attaches to the lane's opening: its queue pair's address and its rail's name.
const (
	addressBytes = 16 + 4 + 4 + 2 + 1 + 1
	maxRailName  = 64
)

func encodeAddress(a verbs.Address, rail string) []byte {
	b := append([]byte(nil), a.GID[:]...)
	b = binary.LittleEndian.AppendUint32(b, a.QP)
	b = binary.LittleEndian.AppendUint32(b, a.PSN)
	b = binary.LittleEndian.AppendUint16(b, a.LID)
	b = append(b, byte(a.MTU), byte(a.Type))
	return append(b, rail[:min(len(rail), maxRailName)]...)
}

func decodeAddress(b []byte) (a verbs.Address, rail string, err error) {
	if len(b) < addressBytes || len(b) > addressBytes+maxRailName {
		return a, "", fmt.Errorf("%w: an address of %d bytes, not %d and a rail's name of at most %d", errFrame, len(b), addressBytes, maxRailName)
	}
	copy(a.GID[:], b)
	le := binary.LittleEndian
	a.QP, a.PSN, a.LID = le.Uint32(b[16:]), le.Uint32(b[20:]), le.Uint16(b[24:])
	a.MTU, a.Type = verbs.MTU(b[26]), verbs.GIDType(b[27])
	rail = string(b[addressBytes:])
	if rail == "" || strings.ContainsFunc(rail, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return a, "", fmt.Errorf("%w: a rail with the name %q", errFrame, rail)
	}
	return a, rail, nil
}
