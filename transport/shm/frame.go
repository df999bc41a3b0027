package shm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
)

// A packet of the lane's socket holds frames one after another: kind, a zero byte, the body's
// length, the body. Everything is little-endian.
const (
	maxPacketBytes = 60 << 10 // well below the smallest default send buffer
	frameHeader    = 4
	maxCells       = (maxPacketBytes - frameHeader - pullFixed) / cellBytes // of one pull
	// descriptors of one packet.
	maxPacketFDs = 16
)

type kind uint8

const (
	kindRegion kind = iota + 1 // source: passes a descriptor; later pulls name the region by index
	kindForget                 // source: the region is gone; unmap it
	kindPull                   // source: copy this
	kindPulled                 // destination: copied, or refused
	// source: the copied bytes were still valid, or the source was invalidated
	kindVerdict
	kindConfirm // destination: landed, or too late
	// source: like kindRegion, for GPU memory: a handle, and a descriptor if the handle needs one
	kindDevice
	// source: a few bytes themselves, which were valid when they were read
	kindPush
	kindHint // source: awaited pulls follow soon (wake-up hint)
	numKinds
)

// frames are the supported versions of a lane.
var frames = wire.Versions{Min: wire.V(1, 0), Max: wire.V(1, 0)}

const (
	regionBytes  = 4 + 16 + 8
	deviceFixed  = regionBytes + 1 // with a descriptor or without; the handle follows
	forgetBytes  = 4
	pullFixed    = 8 + 2 + 2 + wire.ChunksBytes
	cellBytes    = wire.StridesCell
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
	cells   []byte // cellBytes each, or the bytes of a push; a view into the packet
}

// run is pieces of a source region, each of len bytes. In a frame a single piece takes one cell
// (region, length and offset), a run two or three: wire.RunFlag in the first announces cells of
// wire.AppendStrides.
type run struct {
	region uint32
	len    uint32
	off    uint64 // of the first piece
	mem.Strides
}

// Bounds of one pull. A run describes any number of pieces in 48 bytes; the pieces exist only when
// they are copied.
const (
	maxPieces   = 32 << 10
	maxLen      = deviceSlice // of all pieces
	maxRunBytes = (1 + wire.MaxStridesCells) * cellBytes
)

// pushBytes are sent at once. Requesting and judging a pull of so few bytes takes longer than
// copying it: two of the five wake-ups between the engines.
const pushBytes = 16 << 10

// cellAt reads a cell: a single piece, or with wire.RunFlag in its length the first of a run.
func cellAt(c []byte) (region, length uint32, off uint64) {
	c = c[:cellBytes]
	what := binary.LittleEndian.Uint64(c)
	return uint32(what), uint32(what >> 32), binary.LittleEndian.Uint64(c[8:])
}

// putCell writes one.
func putCell(c []byte, region, length uint32, off uint64) {
	c = c[:cellBytes]
	binary.LittleEndian.PutUint64(c, uint64(length)<<32|uint64(region))
	binary.LittleEndian.PutUint64(c[8:], off)
}

// next reads the first run of the cells of a pull, which are not empty, and returns the cells after
// it.
func (r *run) next(cells []byte) ([]byte, error) {
	if r.region, r.len, r.off = cellAt(cells); r.len >= wire.RunFlag {
		return r.strided(cells[cellBytes:])
	}
	r.Count, r.Rows = 1, 1 // the strides of one piece are unused
	return cells[cellBytes:], nil
}

// strided reads the cells after the first one of a run.
func (r *run) strided(cells []byte) ([]byte, error) {
	r.len -= wire.RunFlag
	cells, err := wire.ReadStrides(cells, &r.Strides)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errFrame, err)
	}
	return cells, nil
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

// appendPull begins a pull; the caller appends the cells and then calls endPull.
func appendPull(b []byte, f pullFrame) []byte { return appendAsk(b, kindPull, f) }

// appendPush begins a push; the caller appends the bytes and then calls endPush.
func appendPush(b []byte, f pullFrame) []byte { return appendAsk(b, kindPush, f) }

func appendAsk(b []byte, k kind, f pullFrame) []byte {
	b = appendHeader(b, k, 0)
	b = binary.LittleEndian.AppendUint64(b, f.tag)
	b = binary.LittleEndian.AppendUint16(b, uint16(f.slot))
	b = append(b, 0, 0)
	return wire.AppendChunks(b, wire.Chunks{Gen: f.gen, Range: f.r, Attempt: f.attempt})
}

// setTag gives the pull that begins the frame b its tag.
func setTag(b []byte, tag uint64) { binary.LittleEndian.PutUint64(b[frameHeader:], tag) }

// endPull writes the lengths of a pull that begins the frame b.
func endPull(b []byte) {
	n := len(b) - frameHeader
	binary.LittleEndian.PutUint16(b[2:], uint16(n))
	binary.LittleEndian.PutUint16(b[frameHeader+10:], uint16((n-pullFixed)/cellBytes))
}

// endPush writes the length of a push that begins the frame b.
func endPush(b []byte) { binary.LittleEndian.PutUint16(b[2:], uint16(len(b)-frameHeader)) }

func appendRun(b []byte, r *run) []byte {
	length := r.len
	if r.Count > 1 {
		length |= wire.RunFlag
	}
	b = slices.Grow(b, cellBytes)[:len(b)+cellBytes]
	putCell(b[len(b)-cellBytes:], r.region, length, r.off)
	if r.Count > 1 {
		b = wire.AppendStrides(b, &r.Strides)
	}
	return b
}

// appendPieces appends cells for the blocks of one region at any offsets, up to the bounds of a
// pull, and returns the remaining blocks. Small blocks come at tens of millions per second, so the
// cost per block matters.
func appendPieces(b []byte, blocks []mem.Block, of *mem.Region, region uint32) ([]byte,
	[]mem.Block) {
	start := of.Offset()
	for len(blocks) > 0 && len(b)+maxRunBytes <= maxPacketBytes {
		p := &blocks[0]
		if p.Region != of || p.Len > maxLen || mem.Regular(blocks) {
			break
		}
		n := len(b)
		b = slices.Grow(b, cellBytes)[:n+cellBytes]
		putCell(b[n:], region, uint32(p.Len), start+p.Off)
		blocks = blocks[1:]
	}
	return b, blocks
}

func appendPulled(b []byte, tag uint64, reason transfer.Reason) []byte {
	return append(binary.LittleEndian.AppendUint64(appendHeader(b, kindPulled, pulledBytes), tag),
		byte(reason))
}

func appendVerdict(b []byte, tag uint64, valid bool) []byte {
	v := byte(0)
	if valid {
		v = 1
	}
	return append(binary.LittleEndian.AppendUint64(appendHeader(b, kindVerdict, verdictBytes), tag), v)
}

func appendConfirm(b []byte, tag uint64, o transfer.Outcome, r transfer.Reason) []byte {
	return append(binary.LittleEndian.AppendUint64(appendHeader(b, kindConfirm, confirmBytes), tag),
		byte(o), byte(r))
}

func appendHint(b []byte) []byte { return appendHeader(b, kindHint, 0) }

// handler takes the frames of a packet. Views into the packet end with the call.
type handler interface {
	region(regionFrame) error
	device(deviceFrame) error
	forget(index uint32) error
	pull(pullFrame) error
	push(pullFrame) error
	pulled(tag uint64, reason transfer.Reason) error
	verdict(tag uint64, valid bool) error
	confirm(tag uint64, o transfer.Outcome, r transfer.Reason) error
	hint() error
}

// parse walks one packet of foreign bytes: it checks every length before use, and an error ends the
// lane.
func parse(p []byte, h handler) error {
	for len(p) > 0 {
		if len(p) < frameHeader {
			return fmt.Errorf("%w: %d bytes are too short for a header", errFrame, len(p))
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
			want = pullFixed + int(binary.LittleEndian.Uint16(b[10:]))*cellBytes
		}
	case kindPush:
		want = max(pullFixed+1, min(len(b), pullFixed+pushBytes))
	case kindPulled:
		want = pulledBytes
	case kindVerdict:
		want = verdictBytes
	case kindConfirm:
		want = confirmBytes
	case kindHint:
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
		f := deviceFrame{regionFrame: regionFrame{index: binary.LittleEndian.Uint32(b),
			size: binary.LittleEndian.Uint64(b[20:])},
			hasFD: b[28] == 1, handle: b[deviceFixed:]}
		copy(f.id[:], b[4:])
		return h.device(f)
	case kindForget:
		return h.forget(binary.LittleEndian.Uint32(b))
	case kindPull:
		return h.pull(asked(b))
	case kindPush:
		if b[10] != 0 || b[11] != 0 {
			return fmt.Errorf("%w: a push of cells", errFrame)
		}
		return h.push(asked(b))
	case kindPulled:
		return h.pulled(binary.LittleEndian.Uint64(b), transfer.Reason(b[8]))
	case kindVerdict:
		return h.verdict(binary.LittleEndian.Uint64(b), b[8] == 1)
	case kindHint:
		return h.hint()
	}
	return h.confirm(binary.LittleEndian.Uint64(b), transfer.Outcome(b[8]), transfer.Reason(b[9]))
}

// asked reads the common part of a pull and a push; b is long enough.
func asked(b []byte) pullFrame {
	c := wire.ReadChunks(b[12:])
	return pullFrame{
		tag:     binary.LittleEndian.Uint64(b),
		slot:    transfer.Slot(binary.LittleEndian.Uint16(b[8:])),
		gen:     c.Gen,
		r:       c.Range,
		attempt: c.Attempt,
		cells:   b[pullFixed:],
	}
}
