// Package transfer holds the words that every part of a transfer shares: ids, the chunk space and
// its bitmap, and the outcome of an attempt. It is pure: no clock, no I/O, no goroutine.
package transfer

import (
	"encoding/hex"
	"fmt"
)

// Boot names one life of one process. Nothing from an older boot is ever believed.
type Boot [16]byte

func (b Boot) String() string { return hex.EncodeToString(b[:]) }

// XferID names a transfer: chosen by the router, or by the prefill engine. Not unique: a prompt
// list shares one.
type XferID [16]byte

func (x XferID) String() string { return hex.EncodeToString(x[:]) }

// PrefixHash is the SHA-256 over the prompt and all that its KV depends on (docs/protocol.md,
// section 4).
type PrefixHash [32]byte

// Key is what an intent and a grant must agree on to meet.
type Key struct {
	Xfer XferID
	Hash PrefixHash
}

func (k Key) String() string { return fmt.Sprintf("%s/%x", k.Xfer, k.Hash[:4]) }

// LeaseID names one lease: the boot of the engine session that it was given by, the id that its
// shim chose, and the epoch of the blocks behind it.
type LeaseID struct {
	Boot  Boot
	ID    uint64
	Epoch uint32
}

func (l LeaseID) String() string { return fmt.Sprintf("%x:%d.%d", l.Boot[:4], l.ID, l.Epoch) }

// Slot is a receiver-chosen small name for one grant, scoped to the pair of peers.
type Slot uint16

// Gen is the generation of a slot. Frames of another generation are discarded.
type Gen uint32

// ChunkBytes is the unit of readiness, confirmation and retry in the transfer space.
const ChunkBytes = 64 << 10

// MaxSlotChunks bounds the chunks of one slot: 256 GiB, the memory of the largest GPUs. Both sides
// keep some bytes for each chunk of an open transfer, so the bound is on what a wrong number can
// make them hold.
const MaxSlotChunks = 1 << 22

// Range is a run of consecutive chunks.
type Range struct {
	First, Count uint32
}

// End is one past the last chunk.
func (r Range) End() uint32 { return r.First + r.Count }

// Outcome is how one attempt to move one range ended.
type Outcome uint8

// Only Landed is success, and only the receiver can report it.
const (
	Landed Outcome = iota + 1 // the receiver has proved it
	// proved not to have landed, or invalidated before it counted; retry at will.
	NotLanded
	// the receiver refused it: stale lease, bad range, integrity; see Reason.
	Rejected
	// bytes may still be on their way: fence before the blocks are reused.
	InDoubt
)

func (o Outcome) String() string {
	switch o {
	case Landed:
		return "landed"
	case NotLanded:
		return "not-landed"
	case Rejected:
		return "rejected"
	case InDoubt:
		return "in_doubt"
	}
	return fmt.Sprintf("outcome(%d)", uint8(o))
}

// Reason is why a frame was refused or an attempt failed. Stable: it is a metric label and
// travels on lanes.
type Reason uint8

// The reasons.
const (
	ReasonNone        Reason = iota
	ReasonUnknownSlot        // no such slot for this peer
	ReasonStaleGen           // the slot belongs to another generation
	ReasonRevoked            // the lease is closed to writers
	ReasonRange              // chunks outside the grant
	ReasonLength             // payload length does not match the range
	ReasonChecksum           // integrity check failed
	ReasonInvalidated        // the sender reported an invalid source
	ReasonLaneLost           // the lane died under it
	ReasonSourceGone         // the source lease closed before the bytes were read
	ReasonMemory             // memory could not be read or written (an engine died)
	ReasonTimeout            // past its deadline
	ReasonSuperseded         // a later attempt has taken over some of its chunks
	ReasonForged             // an encrypted record fails authentication
	ReasonReplayed           // an encrypted record was replayed
	ReasonReordered          // an encrypted record is out of order, or one is missing
	ReasonTruncated          // a sealed lane was cut in mid record or frame
	reasonCount
)

var reasonNames = [reasonCount]string{"none", "unknown_slot", "stale_gen", "revoked", "range",
	"length", "checksum", "source_invalidated",
	"lane_lost", "source_gone", "memory", "timeout", "superseded",
	"forged", "replayed", "reordered", "truncated"}

func (r Reason) String() string {
	if int(r) < len(reasonNames) {
		return reasonNames[r]
	}
	return "unknown"
}

// NumReasons is for tables and metrics that have a row for each reason.
const NumReasons = int(reasonCount)
