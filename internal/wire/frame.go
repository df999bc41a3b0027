package wire

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"

	"github.com/kvspray/kvspray/transfer"
)

// Sizes on a data lane, in bytes and entries.
const (
	HeaderBytes  = 48
	TrailerBytes = 16
	EntryBytes   = 24
	// MaxConfirms bounds the confirmations in one message, including the one in its header.
	MaxConfirms = 64
)

const (
	magicFrame   = 0x4653564b // "KVSF"
	magicTrailer = 0x5453564b // "KVST"
	frameMajor   = 1
)

// Kind is the kind of the bytes after a header. Stable on the wire.
type Kind uint8

// The kinds of messages on a data lane.
const (
	KindData    Kind = iota + 1 // payload and trailer follow
	KindConfirm                 // further entries follow
	kindEnd
)

// Flags of a data frame. Unknown ones are an error, because they would change the following bytes.
type Flags uint16

// FlagCRC32C marks a trailer whose sum is the CRC-32C of the payload.
const FlagCRC32C Flags = 1

const knownFlags = FlagCRC32C

// Header starts every message on a data lane. A receiver first verifies its check sum: after a
// damaged header the boundaries of frames are lost, and the lane with them.
type Header struct {
	Kind    Kind
	Outcome transfer.Outcome // confirmations only
	Reason  transfer.Reason  // confirmations only
	Flags   Flags
	Slot    transfer.Slot
	Gen     transfer.Gen
	Range   transfer.Range
	Attempt uint32
	Seq     uint32 // counts the data frames of a lane and direction; a confirmation repeats it
	Length  uint64 // bytes that follow, without the trailer
}

// header layout: magic u32, major u8, kind u8, outcome u8, reason u8, flags u16, slot u16, gen u32,
// first u32, count u32, attempt u32, seq u32, length u64, reserved u32, check u32.

// PutHeader encodes h into the first HeaderBytes of b.
func PutHeader(b []byte, h *Header) {
	_ = b[HeaderBytes-1]
	binary.LittleEndian.PutUint32(b[0:], magicFrame)
	b[4], b[5], b[6], b[7] = frameMajor, byte(h.Kind), byte(h.Outcome), byte(h.Reason)
	binary.LittleEndian.PutUint16(b[8:], uint16(h.Flags))
	binary.LittleEndian.PutUint16(b[10:], uint16(h.Slot))
	binary.LittleEndian.PutUint32(b[12:], uint32(h.Gen))
	binary.LittleEndian.PutUint32(b[16:], h.Range.First)
	binary.LittleEndian.PutUint32(b[20:], h.Range.Count)
	binary.LittleEndian.PutUint32(b[24:], h.Attempt)
	binary.LittleEndian.PutUint32(b[28:], h.Seq)
	binary.LittleEndian.PutUint64(b[32:], h.Length)
	binary.LittleEndian.PutUint32(b[40:], 0)
	binary.LittleEndian.PutUint32(b[44:], Sum(b[:44]))
}

// ParseHeader decodes and checks the first HeaderBytes of b. After an error the stream is unusable.
func ParseHeader(b []byte, h *Header) error {
	if len(b) < HeaderBytes {
		return headerError("length", uint64(len(b)))
	}
	if m := binary.LittleEndian.Uint32(b); m != magicFrame {
		return headerError("magic", uint64(m))
	}
	if got, want := Sum(b[:44]), binary.LittleEndian.Uint32(b[44:]); got != want {
		return headerError("check", uint64(want))
	}
	if b[4] != frameMajor {
		return headerError("major version", uint64(b[4]))
	}
	*h = Header{
		Kind: Kind(b[5]), Outcome: transfer.Outcome(b[6]), Reason: transfer.Reason(b[7]),
		Flags: Flags(binary.LittleEndian.Uint16(b[8:])),
		Slot:  transfer.Slot(binary.LittleEndian.Uint16(b[10:])),
		Gen:   transfer.Gen(binary.LittleEndian.Uint32(b[12:])),
		Range: transfer.Range{First: binary.LittleEndian.Uint32(b[16:]),
			Count: binary.LittleEndian.Uint32(b[20:])},
		Attempt: binary.LittleEndian.Uint32(b[24:]),
		Seq:     binary.LittleEndian.Uint32(b[28:]),
		Length:  binary.LittleEndian.Uint64(b[32:]),
	}
	if h.Kind == 0 || h.Kind >= kindEnd {
		return headerError("kind", uint64(h.Kind))
	}
	if h.Range.Count == 0 || h.Range.Count > transfer.MaxSlotChunks ||
		h.Range.First > transfer.MaxSlotChunks-h.Range.Count {
		return headerError("range", uint64(h.Range.First)<<32|uint64(h.Range.Count))
	}
	switch h.Kind {
	case KindData:
		if h.Flags&^knownFlags != 0 {
			return headerError("flags", uint64(h.Flags))
		}
		if h.Length > uint64(h.Range.Count)*transfer.ChunkBytes {
			return headerError("payload length", h.Length)
		}
	case KindConfirm:
		if h.Outcome != transfer.Landed && h.Outcome != transfer.Rejected {
			return headerError("outcome", uint64(h.Outcome))
		}
		if h.Length%EntryBytes != 0 || h.Length > (MaxConfirms-1)*EntryBytes {
			return headerError("confirmation length", h.Length)
		}
	}
	return nil
}

func headerError(field string, v uint64) error {
	return fmt.Errorf("wire: frame header: bad %s %#x: %w", field, v, ErrMalformed)
}

// Entry is one confirmation.
type Entry struct {
	Slot    transfer.Slot
	Outcome transfer.Outcome
	Reason  transfer.Reason
	Gen     transfer.Gen
	Range   transfer.Range
	Attempt uint32
	Seq     uint32
}

// Entry returns the confirmation in a KindConfirm header.
func (h *Header) Entry() Entry {
	return Entry{Slot: h.Slot, Outcome: h.Outcome, Reason: h.Reason, Gen: h.Gen, Range: h.Range,
		Attempt: h.Attempt, Seq: h.Seq}
}

// AppendConfirms appends one message with 1 to MaxConfirms entries. It allocates nothing when dst
// has room.
func AppendConfirms(dst []byte, entries []Entry) []byte {
	if len(entries) == 0 || len(entries) > MaxConfirms {
		panic(fmt.Sprintf("wire: %d confirmations in one message", len(entries)))
	}
	e := &entries[0]
	h := Header{Kind: KindConfirm, Outcome: e.Outcome, Reason: e.Reason, Slot: e.Slot, Gen: e.Gen,
		Range:   e.Range,
		Attempt: e.Attempt, Seq: e.Seq, Length: uint64(len(entries)-1) * EntryBytes}
	n := len(dst)
	dst = append(dst, zeroHeader[:]...)
	PutHeader(dst[n:], &h)
	for i := range entries[1:] {
		e := &entries[1+i]
		dst = binary.LittleEndian.AppendUint16(dst, uint16(e.Slot))
		dst = append(dst, byte(e.Outcome), byte(e.Reason))
		dst = binary.LittleEndian.AppendUint32(dst, uint32(e.Gen))
		dst = binary.LittleEndian.AppendUint32(dst, e.Range.First)
		dst = binary.LittleEndian.AppendUint32(dst, e.Range.Count)
		dst = binary.LittleEndian.AppendUint32(dst, e.Attempt)
		dst = binary.LittleEndian.AppendUint32(dst, e.Seq)
	}
	return dst
}

var zeroHeader [HeaderBytes]byte

// ParseEntry decodes one further entry from the first EntryBytes of b.
func ParseEntry(b []byte, e *Entry) error {
	if len(b) < EntryBytes {
		return headerError("entry length", uint64(len(b)))
	}
	*e = Entry{
		Slot:    transfer.Slot(binary.LittleEndian.Uint16(b)),
		Outcome: transfer.Outcome(b[2]), Reason: transfer.Reason(b[3]),
		Gen: transfer.Gen(binary.LittleEndian.Uint32(b[4:])),
		Range: transfer.Range{First: binary.LittleEndian.Uint32(b[8:]),
			Count: binary.LittleEndian.Uint32(b[12:])},
		Attempt: binary.LittleEndian.Uint32(b[16:]),
		Seq:     binary.LittleEndian.Uint32(b[20:]),
	}
	if e.Outcome != transfer.Landed && e.Outcome != transfer.Rejected {
		return headerError("outcome", uint64(e.Outcome))
	}
	return nil
}

// Status is the source's verdict about a payload, sent after the last byte was read. Stable on the
// wire.
type Status uint8

// The statuses.
const (
	StatusValid       Status = iota + 1 // the bytes are those of the lease
	StatusInvalidated                   // source invalidated: the receiver must not count the bytes
)

// Trailer ends a data frame.
type Trailer struct {
	Status Status
	Seq    uint32 // of the frame, to detect a lost boundary
	CRC32C uint32 // of the payload, with FlagCRC32C
}

// trailer layout: magic u32 with the status in its top byte's place, see PutTrailer; seq u32, crc
// u32, check u32.

// PutTrailer encodes t into the first TrailerBytes of b.
func PutTrailer(b []byte, t *Trailer) {
	_ = b[TrailerBytes-1]
	binary.LittleEndian.PutUint32(b, (magicTrailer&0xffffff)|uint32(t.Status)<<24)
	binary.LittleEndian.PutUint32(b[4:], t.Seq)
	binary.LittleEndian.PutUint32(b[8:], t.CRC32C)
	binary.LittleEndian.PutUint32(b[12:], Sum(b[:12]))
}

// ParseTrailer decodes and checks the first TrailerBytes of b. After an error the stream is
// unusable.
func ParseTrailer(b []byte, t *Trailer) error {
	if len(b) < TrailerBytes {
		return headerError("trailer length", uint64(len(b)))
	}
	w := binary.LittleEndian.Uint32(b)
	if w&0xffffff != magicTrailer&0xffffff {
		return headerError("trailer magic", uint64(w))
	}
	if got, want := Sum(b[:12]), binary.LittleEndian.Uint32(b[12:]); got != want {
		return headerError("trailer check", uint64(want))
	}
	*t = Trailer{Status: Status(w >> 24), Seq: binary.LittleEndian.Uint32(b[4:]),
		CRC32C: binary.LittleEndian.Uint32(b[8:])}
	if t.Status != StatusValid && t.Status != StatusInvalidated {
		return headerError("trailer status", uint64(t.Status))
	}
	return nil
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Sum is the check sum of headers and trailers: CRC-32C.
func Sum(b []byte) uint32 { return crc32.Checksum(b, castagnoli) }
