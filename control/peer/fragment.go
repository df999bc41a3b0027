// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"errors"
	"fmt"
	"net/netip"
	"time"

	"google.golang.org/protobuf/proto"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/transfer"
)

// A grant has a part for each rank of the prefill engine, with its share of the receiver's layers,
// and may be longer than a frame may be: lanes read whole frames, and an urgent one should not wait
// behind megabytes. Such a frame travels as Fragments. They are frames like any other, numbered one
// after another, so that they are sent again, put in order and acknowledged as those are.

// pieceBytes is what of a longer frame one Fragment carries; the rest of it is its own fields and
// the frame's.
const pieceBytes = MaxFrame - 64

var errFragment = errors.New("fragments do not form a control frame")

// split makes the frames that carry f: itself where it fits, else its Fragments.
func (s *session) split(f *peerv1.ControlFrame) ([]*peerv1.ControlFrame, error) {
	out := &peerv1.ControlFrame{Body: f.Body}
	n := proto.Size(out)
	if n <= pieceBytes {
		return []*peerv1.ControlFrame{out}, nil
	}
	switch {
	case n > MaxMessage:
		return nil, fmt.Errorf("peer: send to %s: a control frame of %d bytes, at most %d: %w",
			s.boot, n, MaxMessage, ErrTooBig)
	case !s.info.has(FeatureFragments):
		return nil, fmt.Errorf("peer: send to %s: a control frame of %d bytes, and its "+
			"release takes at most %d: upgrade the sidecar there: %w",
			s.boot, n, MaxFrame, ErrTooBig)
	}
	b, err := proto.Marshal(out)
	if err != nil {
		return nil, fmt.Errorf("peer: encode control frame: %w", err)
	}
	all := make([]*peerv1.ControlFrame, 0, n/pieceBytes+1)
	for len(b) > 0 {
		k := min(len(b), pieceBytes)
		all = append(all, fragment(b[:k], k == len(b)))
		b = b[k:]
	}
	return all, nil
}

func fragment(piece []byte, last bool) *peerv1.ControlFrame {
	return &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Fragment{
		Fragment: &peerv1.Fragment{Piece: piece, Last: last}}}
}

// joiner puts Fragments together that come in order.
type joiner struct{ b []byte }

// add takes the next frame. It returns the frame that is whole with it, or nil where more is to
// come.
func (j *joiner) add(f *peerv1.ControlFrame) (*peerv1.ControlFrame, error) {
	body, is := f.Body.(*peerv1.ControlFrame_Fragment)
	if !is {
		if len(j.b) > 0 {
			n := len(j.b)
			j.b = nil
			return nil, fmt.Errorf("another frame after %d bytes of one: %w", n, errFragment)
		}
		return f, nil
	}
	piece := body.Fragment.GetPiece()
	if len(piece) == 0 || len(j.b)+len(piece) > MaxMessage {
		n := len(j.b)
		j.b = nil
		return nil, fmt.Errorf("a piece of %d bytes after %d, at most %d in all: %w", len(piece), n,
			MaxMessage, errFragment)
	}
	j.b = append(j.b, piece...)
	if !body.Fragment.GetLast() {
		return nil, nil
	}
	b := j.b
	j.b = nil
	whole := new(peerv1.ControlFrame)
	if err := proto.Unmarshal(b, whole); err != nil {
		return nil, fmt.Errorf("%d bytes: %w: %w", len(b), errFragment, err)
	}
	if _, again := whole.Body.(*peerv1.ControlFrame_Fragment); again {
		return nil, fmt.Errorf("a fragment within fragments: %w", errFragment)
	}
	return whole, nil
}

// completes reports whether nothing of f waits once it is added: it is whole, or makes one whole.
func (j *joiner) completes(f *peerv1.ControlFrame) bool {
	body, is := f.Body.(*peerv1.ControlFrame_Fragment)
	return !is || body.Fragment.GetLast()
}

// What waits in all sessions together is bounded, too: a member with many boots could leave in each
// of them a long frame without its end. A frame for which there is no room is not acknowledged, and
// its sender sends it again. Meanwhile the process that holds the most loses a session that has
// held more than waitShare for too long. A process that holds less loses none, however long its
// frames have waited: they may wait for the room that the other one holds.
const (
	maxWaiting = 128 << 20 // bytes: frames that came before earlier ones, and fragments
	waitShare  = MaxFrame  // bytes that any session may hold
	stuckAfter = openTimeout
)

// mayWait reports whether so many bytes more may wait.
func (m *Mesh) mayWait(n int) bool {
	if m.waiting.Load()+int64(n) <= m.mostWaiting {
		return true
	}
	if !m.shedding.Swap(true) {
		m.wg.Go(m.shed) // the caller is one of them, so that Close still waits
	}
	return false
}

// waitsLocked counts bytes that wait, or do so no longer.
func (s *session) waitsLocked(n int) {
	if s.waits <= waitShare && s.waits+n > waitShare {
		s.stuck = time.Now()
	}
	s.waits += n
	s.m.waiting.Add(int64(n))
}

// holder is the process that sessions belong to. Certificates identify it; without them each
// session counts alone.
type holder struct {
	id   identity
	from netip.Prefix
	boot transfer.Boot // without a certificate
}

func (s *session) holderLocked() holder {
	if s.id == (identity{}) {
		return holder{boot: s.boot}
	}
	return holder{id: s.id, from: s.from}
}

// shed ends, of the process that holds the most bytes, the session that has held more than
// waitShare for the longest time, if that is too long.
func (m *Mesh) shed() {
	defer m.shedding.Store(false)
	type candidate struct {
		s     *session
		since time.Time
	}
	limit := time.Now().Add(-m.stuckAfter)
	bytes, longest := map[holder]int{}, map[holder]candidate{}
	var most holder
	m.mu.Lock()
	for _, s := range m.sessions {
		s.mu.Lock()
		h := s.holderLocked()
		if bytes[h] += s.waits; bytes[h] > bytes[most] {
			most = h
		}
		old, known := longest[h]
		if s.waits > waitShare && !s.delivering && (!known || s.stuck.Before(old.since)) {
			longest[h] = candidate{s, s.stuck}
		}
		s.mu.Unlock()
	}
	m.mu.Unlock()
	if c := longest[most]; c.s != nil && c.since.Before(limit) {
		m.end(c.s, fmt.Errorf("peer: incomplete frames have taken up memory since %s: %w",
			c.since.Format(time.TimeOnly), errFragment))
	}
}
