// Package frame encodes control frames: each is a ControlFrame behind its length. A message longer
// than a frame is sent as several frames, each with one Fragment of the message.
//
// The package has no goroutines. A Reassembly belongs to its caller, and all else has no state.
package frame

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"google.golang.org/protobuf/proto"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
)

// Bounds.
const (
	Max         = 64 << 10 // bytes of one frame, without its length
	MaxMessage  = 4 << 20  // of one in fragments: a grant of all ranks with the longest shares
	LengthBytes = 4        // of the length before each frame

	firstBuffer = 512
)

// ErrTooBig is wrapped if a frame or a message exceeds its bound.
var ErrTooBig = errors.New("frame too big")

// Read reads one frame. It reuses buf, and returns the buffer for the next call. The frame does not
// alias the buffer.
func Read(r io.Reader, buf []byte) (*peerv1.ControlFrame, []byte, error) {
	if cap(buf) < LengthBytes {
		buf = make([]byte, LengthBytes, firstBuffer)
	}
	if _, err := io.ReadFull(r, buf[:LengthBytes]); err != nil {
		return nil, buf, err //nolint:wrapcheck // io.EOF between frames is the orderly end
	}
	n := binary.LittleEndian.Uint32(buf[:LengthBytes])
	if n == 0 || n > Max {
		return nil, buf, fmt.Errorf("peer: control frame of %d bytes, want 1 to %d: %w", n, Max,
			ErrTooBig)
	}
	if cap(buf) < int(n) {
		buf = make([]byte, n)
	}
	buf = buf[:n]
	if _, err := io.ReadFull(r, buf); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return nil, buf, fmt.Errorf("peer: read control frame: %w", err)
	}
	f := new(peerv1.ControlFrame)
	if err := proto.Unmarshal(buf, f); err != nil {
		return nil, buf, fmt.Errorf("peer: control frame of %d bytes: %w", n, err)
	}
	return f, buf, nil
}

// Append appends f behind its length.
func Append(dst []byte, f *peerv1.ControlFrame) ([]byte, error) {
	at := len(dst)
	out, err := proto.MarshalOptions{}.MarshalAppend(append(dst, 0, 0, 0, 0), f)
	if err != nil {
		return dst, fmt.Errorf("peer: encode control frame: %w", err)
	}
	n := len(out) - at - LengthBytes
	if n > Max {
		return dst, fmt.Errorf("peer: control frame of %d bytes, at most %d: %w", n, Max, ErrTooBig)
	}
	binary.LittleEndian.PutUint32(out[at:], uint32(n))
	return out, nil
}
