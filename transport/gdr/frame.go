package gdr

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strings"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/internal/sys/verbs"
	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
)

// frames are the supported versions of a lane.
var frames = wire.Versions{Min: wire.V(1, 0), Max: wire.V(1, 0)}

// The frames on a lane's socket: a head, and after a GO its spans, in cells: a span is one cell, a
// run of spans two or three.
const (
	kindAsk = iota + 1
	kindGo
	kindEnd
)

const (
	headBytes = 40
	cellBytes = wire.StridesCell
	maxSpans  = 1 << 17 // of a slice, in any number of cells
	maxSpan   = 1 << 30 // bytes of one

	// maxUnsent frames wait for the socket: the ASKs of this end, and for each of the peer's a GO
	// and an END, which the peer must read before it asks again. More frames wait only for a peer
	// that does not read.
	maxUnsent = 3 * maxInFlight
)

var errFrame = errors.New("gdr: malformed frame")

// head is the fixed part of every frame. seq distinguishes uses of an id.
type head struct {
	kind    uint8
	id      uint8 // of the slice, chosen by its source: below maxInFlight
	reason  transfer.Reason
	seq     uint16
	slot    transfer.Slot
	gen     transfer.Gen
	r       transfer.Range
	attempt uint32
	cells   uint32
	bytes   uint64
}

func appendHead(b []byte, h *head) []byte {
	b = append(b, h.kind, h.id, byte(h.reason), 0)
	b = binary.LittleEndian.AppendUint16(b, h.seq)
	b = binary.LittleEndian.AppendUint16(b, uint16(h.slot))
	b = wire.AppendChunks(b, wire.Chunks{Gen: h.gen, Range: h.r, Attempt: h.attempt})
	b = binary.LittleEndian.AppendUint32(b, h.cells)
	b = binary.LittleEndian.AppendUint32(b, 0)
	return binary.LittleEndian.AppendUint64(b, h.bytes)
}

// setCells sets the number of cells after the head of frame b.
func setCells(b []byte) {
	binary.LittleEndian.PutUint32(b[24:], uint32((len(b)-headBytes)/cellBytes))
}

// parseHead reads a head from a peer.
func parseHead(b *[headBytes]byte, h *head) error {
	le := binary.LittleEndian
	c := wire.ReadChunks(b[8:])
	*h = head{kind: b[0], id: b[1], reason: transfer.Reason(b[2]), seq: le.Uint16(b[4:]),
		slot: transfer.Slot(le.Uint16(b[6:])),
		gen:  c.Gen, r: c.Range, attempt: c.Attempt, cells: le.Uint32(b[24:]), bytes: le.Uint64(b[32:])}
	switch {
	case h.kind < kindAsk || h.kind > kindEnd:
		return fmt.Errorf("%w: kind %d", errFrame, h.kind)
	case h.id >= maxInFlight:
		return fmt.Errorf("%w: slice %d of %d", errFrame, h.id, maxInFlight)
	case int(h.reason) >= transfer.NumReasons:
		return fmt.Errorf("%w: reason %d", errFrame, h.reason)
	case h.cells > maxSpans || h.kind != kindGo && h.cells != 0:
		return fmt.Errorf("%w: %d spans", errFrame, h.cells)
	case b[3] != 0 || le.Uint32(b[28:]) != 0:
		return fmt.Errorf("%w: reserved bytes are set", errFrame)
	}
	return nil
}

// span is memory under one key. In a GO, key 0 and address 0 mean that these bytes have already
// landed.
type span struct {
	addr uint64
	len  uint32
	key  uint32
}

func (s span) skip() bool { return s.key == 0 && s.addr == 0 }

// run is spans of one key and length.
type run struct {
	span // the first
	mem.Strides
}

func single(s span) run { return run{s, mem.Single} }

func appendCells(b []byte, runs []run) []byte {
	for i := range runs {
		r := &runs[i]
		flag := uint32(0)
		if r.Count > 1 {
			flag = wire.RunFlag
		}
		b = binary.LittleEndian.AppendUint64(b, r.addr)
		b = binary.LittleEndian.AppendUint32(b, r.len|flag)
		b = binary.LittleEndian.AppendUint32(b, r.key)
		if r.Count > 1 {
			b = wire.AppendStrides(b, &r.Strides)
		}
	}
	return b
}

// appendRuns parses the output of appendCells. The result names at most maxSpans spans, which are
// made when they are posted. The peer's NIC checks whether they may be written.
func appendRuns(dst []run, b []byte) ([]run, error) {
	spans := uint64(0)
	le := binary.LittleEndian
	for len(b) >= cellBytes {
		dst = append(dst, run{})
		r := &dst[len(dst)-1] // filled in place: a copy would take longer than the rest
		r.addr, r.len, r.key = le.Uint64(b), le.Uint32(b[8:]), le.Uint32(b[12:])
		r.Count, r.Rows = 1, 1
		b = b[cellBytes:]
		if r.len >= wire.RunFlag {
			r.len -= wire.RunFlag
			var err error
			if b, err = wire.ReadStrides(b, &r.Strides); err != nil {
				return dst, fmt.Errorf("%w: %w", errFrame, err)
			}
		}
		if r.len == 0 {
			return dst, fmt.Errorf("%w: an empty span", errFrame)
		}
		n := r.Pieces() // any number of 64 bits
		if n > maxSpans-spans {
			return dst, fmt.Errorf("%w: %d spans in a run, behind %d others: at most %d", errFrame, n,
				spans, maxSpans)
		}
		spans += n
	}
	return dst, nil
}

// total returns the number of spans of runs, and their bytes: at most maxSpans and below 2^48 after
// appendRuns.
func total(runs []run) (spans, bytes uint64) {
	for i := range runs {
		n := runs[i].Pieces()
		spans += n
		bytes += n * uint64(runs[i].len)
	}
	return spans, bytes
}

// cursor walks the spans of runs without making a list.
type cursor struct {
	span       // rest of the current span
	runs []run // starts with the current span's run; empty: the end
	at   mem.Offsets
}

func (c *cursor) begin(runs []run) {
	if c.runs = runs; len(runs) > 0 {
		r := &runs[0]
		c.span = r.span
		c.at.Start(r.addr, &r.Strides)
	}
}

// take advances by k bytes, which lie in the current span.
func (c *cursor) take(k uint32) {
	c.addr += uint64(k)
	if c.len -= k; c.len > 0 {
		return
	}
	r := &c.runs[0]
	if !c.at.Next(&r.Strides) {
		c.begin(c.runs[1:])
		return
	}
	c.span = span{c.at.Off, r.len, r.key}
}

// The immediate of a verdict: the slice's id, the reason why it does not count, and the low half of
// its use.
func verdictOf(id uint8, why transfer.Reason, seq uint16) uint32 {
	return uint32(id)<<24 | uint32(why)<<16 | uint32(seq)
}

func parseVerdict(imm uint32) (id uint8, why transfer.Reason, seq uint16) {
	return uint8(imm >> 24), transfer.Reason(imm >> 16), uint16(imm)
}

// The attachment of each end to the lane's opening: its queue pair's address and its rail's name.
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
		return a, "", fmt.Errorf("%w: an address of %d bytes, not %d and a rail's name of at most %d",
			errFrame, len(b), addressBytes, maxRailName)
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
