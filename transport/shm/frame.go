package shm

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/kvspray/kvspray/internal/mem"
	"github.com/kvspray/kvspray/transfer"
)

// A packet of the lane's socket holds frames one after another: kind, a zero byte, the body's length, the body. Everything is
// little-endian.
const (
	maxPacketBytes = 60 << 10 // well below the smallest default send buffer
	frameHeader    = 4
	maxPieces      = (maxPacketBytes - frameHeader - pullFixed) / pieceBytes // of one pull
	maxPacketFDs   = 16                                                      // descriptors of one packet
)

type kind uint8

const (
	kindRegion  kind = iota + 1 // source: a descriptor rides along; pulls name it by index from now on
	kindForget                  // source: the region is gone; unmap it
	kindPull                    // source: copy this
	kindPulled                  // destination: copied, or refused
	kindVerdict                 // source: what was copied was still valid, or is disowned
	kindConfirm                 // destination: landed, or came too late
	kindDevice                  // source: as kindRegion, for memory of a GPU: a handle, and a descriptor only if the handle wants one
	numKinds
)

const (
	regionBytes  = 4 + 16 + 8
	deviceFixed  = regionBytes + 1 // with a descriptor or without; the handle follows
	forgetBytes  = 4
	pullFixed    = 8 + 2 + 2 + 4*4
	pieceBytes   = 4 + 4 + 8
	pulledBytes  = 8 + 1
	verdictBytes = 8 + 1
	confirmBytes = 8 + 1 + 1
)

var errFrame = errors.New("malformed frame")

type regionFrame struct {
	index uint32
	id    mem.ID
	size  uint64
}

// deviceFrame is a regionFrame whose memory is imported.
type deviceFrame struct {
	regionFrame
	hasFD  bool
	handle []byte // a view into the packet
}

type pullFrame struct {
	tag     uint64
	slot    transfer.Slot
	gen     transfer.Gen
	r       transfer.Range
	attempt uint32
	pieces  []byte // pieceBytes each; a view into the packet
}

// piece is a part of a source region.
type piece struct {
	region uint32
	len    uint32
	off    uint64
}

func (p pullFrame) numPieces() int { return len(p.pieces) / pieceBytes }

func (p pullFrame) piece(i int) piece {
	b := p.pieces[i*pieceBytes:]
	return piece{region: binary.LittleEndian.Uint32(b), len: binary.LittleEndian.Uint32(b[4:]), off: binary.LittleEndian.Uint64(b[8:])}
}

func appendHeader(b []byte, k kind, body int) []byte {
	b = append(b, byte(k), 0)
	return binary.LittleEndian.AppendUint16(b, uint16(body))
}

func appendRegion(b []byte, f regionFrame) []byte {
	b = appendHeader(b, kindRegion, regionBytes)
	b = binary.LittleEndian.AppendUint32(b, f.index)
	b = append(b, f.id[:]...)
	return binary.LittleEndian.AppendUint64(b, f.size)
}

func appendDevice(b []byte, f deviceFrame) []byte {
	b = appendHeader(b, kindDevice, deviceFixed+len(f.handle))
	b = binary.LittleEndian.AppendUint32(b, f.index)
	b = append(b, f.id[:]...)
	b = binary.LittleEndian.AppendUint64(b, f.size)
	fd := byte(0)
	if f.hasFD {
		fd = 1
	}
	return append(append(b, fd), f.handle...)
}

func appendForget(b []byte, index uint32) []byte {
	return binary.LittleEndian.AppendUint32(appendHeader(b, kindForget, forgetBytes), index)
}

// appendPull leaves the pieces to the caller, who appends n of them.
func appendPull(b []byte, f pullFrame, n int) []byte {
	b = appendHeader(b, kindPull, pullFixed+n*pieceBytes)
	b = binary.LittleEndian.AppendUint64(b, f.tag)
	b = binary.LittleEndian.AppendUint16(b, uint16(f.slot))
	b = binary.LittleEndian.AppendUint16(b, uint16(n))
	b = binary.LittleEndian.AppendUint32(b, uint32(f.gen))
	b = binary.LittleEndian.AppendUint32(b, f.r.First)
	b = binary.LittleEndian.AppendUint32(b, f.r.Count)
	return binary.LittleEndian.AppendUint32(b, f.attempt)
}

func appendPiece(b []byte, p piece) []byte {
	b = binary.LittleEndian.AppendUint32(b, p.region)
	b = binary.LittleEndian.AppendUint32(b, p.len)
	return binary.LittleEndian.AppendUint64(b, p.off)
}

func appendPulled(b []byte, tag uint64, reason transfer.Reason) []byte {
	return append(binary.LittleEndian.AppendUint64(appendHeader(b, kindPulled, pulledBytes), tag), byte(reason))
}

func appendVerdict(b []byte, tag uint64, valid bool) []byte {
	v := byte(0)
	if valid {
		v = 1
	}
	return append(binary.LittleEndian.AppendUint64(appendHeader(b, kindVerdict, verdictBytes), tag), v)
}

func appendConfirm(b []byte, tag uint64, o transfer.Outcome, r transfer.Reason) []byte {
	return append(binary.LittleEndian.AppendUint64(appendHeader(b, kindConfirm, confirmBytes), tag), byte(o), byte(r))
}

// handler takes the frames of a packet. Views into the packet end with the call.
type handler interface {
	region(regionFrame) error
	device(deviceFrame) error
	forget(index uint32) error
	pull(pullFrame) error
	pulled(tag uint64, reason transfer.Reason) error
	verdict(tag uint64, valid bool) error
	confirm(tag uint64, o transfer.Outcome, r transfer.Reason) error
}

// parse walks one packet. Foreign bytes: every length is checked before it is used, and an error ends the lane.
func parse(p []byte, h handler) error {
	for len(p) > 0 {
		if len(p) < frameHeader {
			return fmt.Errorf("%w: %d bytes are no header", errFrame, len(p))
		}
		k, n := kind(p[0]), int(binary.LittleEndian.Uint16(p[2:]))
		if p[1] != 0 || n > len(p)-frameHeader {
			return fmt.Errorf("%w: kind %d of %d bytes in a packet of %d", errFrame, k, n, len(p))
		}
		body := p[frameHeader : frameHeader+n]
		p = p[frameHeader+n:]
		if err := dispatch(k, body, h); err != nil {
			return err
		}
	}
	return nil
}

func dispatch(k kind, b []byte, h handler) error {
	var want int
	switch k {
	case kindRegion:
		want = regionBytes
	case kindDevice:
		want = max(deviceFixed, min(len(b), deviceFixed+mem.MaxHandleBytes))
	case kindForget:
		want = forgetBytes
	case kindPull:
		want = pullFixed
		if len(b) >= pullFixed {
			want = pullFixed + int(binary.LittleEndian.Uint16(b[10:]))*pieceBytes
		}
	case kindPulled:
		want = pulledBytes
	case kindVerdict:
		want = verdictBytes
	case kindConfirm:
		want = confirmBytes
	default:
		return fmt.Errorf("%w: kind %d is unknown", errFrame, k)
	}
	if len(b) != want {
		return fmt.Errorf("%w: kind %d of %d bytes, not %d", errFrame, k, len(b), want)
	}
	switch k {
	case kindRegion:
		f := regionFrame{index: binary.LittleEndian.Uint32(b), size: binary.LittleEndian.Uint64(b[20:])}
		copy(f.id[:], b[4:])
		return h.region(f)
	case kindDevice:
		f := deviceFrame{regionFrame: regionFrame{index: binary.LittleEndian.Uint32(b), size: binary.LittleEndian.Uint64(b[20:])},
			hasFD: b[28] == 1, handle: b[deviceFixed:]}
		copy(f.id[:], b[4:])
		return h.device(f)
	case kindForget:
		return h.forget(binary.LittleEndian.Uint32(b))
	case kindPull:
		return h.pull(pullFrame{
			tag:  binary.LittleEndian.Uint64(b),
			slot: transfer.Slot(binary.LittleEndian.Uint16(b[8:])),
			gen:  transfer.Gen(binary.LittleEndian.Uint32(b[12:])),
			r:    transfer.Range{First: binary.LittleEndian.Uint32(b[16:]), Count: binary.LittleEndian.Uint32(b[20:])},

			attempt: binary.LittleEndian.Uint32(b[24:]),
			pieces:  b[pullFixed:],
		})
	case kindPulled:
		return h.pulled(binary.LittleEndian.Uint64(b), transfer.Reason(b[8]))
	case kindVerdict:
		return h.verdict(binary.LittleEndian.Uint64(b), b[8] == 1)
	}
	return h.confirm(binary.LittleEndian.Uint64(b), transfer.Outcome(b[8]), transfer.Reason(b[9]))
}
