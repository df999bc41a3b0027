package frame

import (
	"errors"
	"fmt"

	"google.golang.org/protobuf/proto"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
)

// A grant has a part for each rank of the prefill engine, with the rank's share of the receiver's
// layers, and may be longer than a frame. Lanes read whole frames, and an urgent frame should not
// wait behind megabytes. So a long message travels in fragments. They are ordinary frames with
// consecutive numbers: they are resent, ordered and acknowledged like all others.

// FragmentBytes is how much of a message one fragment carries. The rest of the frame is for its
// other fields.
const FragmentBytes = Max - 64

// ErrFragment is wrapped if fragments do not form a message.
var ErrFragment = errors.New("fragments do not form a control frame")

// Split returns the frames that carry the body of f: one, or its fragments.
func Split(f *peerv1.ControlFrame) ([]*peerv1.ControlFrame, error) {
	out := &peerv1.ControlFrame{Body: f.Body}
	n := proto.Size(out)
	if n <= FragmentBytes {
		return []*peerv1.ControlFrame{out}, nil
	}
	if n > MaxMessage {
		return nil, fmt.Errorf("a control frame of %d bytes, at most %d: %w", n, MaxMessage, ErrTooBig)
	}
	b, err := proto.Marshal(out)
	if err != nil {
		return nil, fmt.Errorf("encode control frame: %w", err)
	}
	all := make([]*peerv1.ControlFrame, 0, n/FragmentBytes+1)
	for len(b) > 0 {
		k := min(len(b), FragmentBytes)
		all = append(all, fragment(b[:k], k == len(b)))
		b = b[k:]
	}
	return all, nil
}

func fragment(piece []byte, last bool) *peerv1.ControlFrame {
	return &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Fragment{
		Fragment: &peerv1.Fragment{Piece: piece, Last: last}}}
}

// Reassembly makes messages of frames that arrive in order. The zero Reassembly is ready.
type Reassembly struct{ b []byte }

// Bytes is the length of the incomplete message.
func (r *Reassembly) Bytes() int { return len(r.b) }

// Add takes the next frame. It returns the message that the frame completes, or nil.
func (r *Reassembly) Add(f *peerv1.ControlFrame) (*peerv1.ControlFrame, error) {
	body, is := f.Body.(*peerv1.ControlFrame_Fragment)
	if !is {
		if len(r.b) > 0 {
			n := len(r.b)
			r.b = nil
			return nil, fmt.Errorf("another frame after %d bytes of one: %w", n, ErrFragment)
		}
		return f, nil
	}
	piece := body.Fragment.GetPiece()
	if len(piece) == 0 || len(r.b)+len(piece) > MaxMessage {
		n := len(r.b)
		r.b = nil
		return nil, fmt.Errorf("a piece of %d bytes after %d, at most %d in all: %w", len(piece), n,
			MaxMessage, ErrFragment)
	}
	r.b = append(r.b, piece...)
	if !body.Fragment.GetLast() {
		return nil, nil
	}
	b := r.b
	r.b = nil
	whole := new(peerv1.ControlFrame)
	if err := proto.Unmarshal(b, whole); err != nil {
		return nil, fmt.Errorf("%d bytes: %w: %w", len(b), ErrFragment, err)
	}
	if _, again := whole.Body.(*peerv1.ControlFrame_Fragment); again {
		return nil, fmt.Errorf("a fragment within fragments: %w", ErrFragment)
	}
	return whole, nil
}

// Completes reports whether Add would keep no bytes of f: f is a message or the last fragment of
// one.
func Completes(f *peerv1.ControlFrame) bool {
	body, is := f.Body.(*peerv1.ControlFrame_Fragment)
	return !is || body.Fragment.GetLast()
}
