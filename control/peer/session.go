// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"fmt"
	"net/netip"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/transfer"
)

// session is the state with one other process: its handshake, the lanes to it, and both directions
// of the numbered frames.
type session struct {
	m    *Mesh
	boot transfer.Boot

	life sync.Mutex // serializes PeerUp and PeerDown; taken before mu

	mu       sync.Mutex // protects all below
	quiet    sync.Cond  // of mu: delivering has ended
	id       identity
	from     netip.Prefix // the source of its first Hello
	info     Peer         // its Endpoint is where we dialed, if ever
	claimed  string       // endpoint that the peer claims
	ups      int          // number of PeerUp events
	saidAs   string       // the endpoint in the last PeerUp
	addrs    []string     // control addresses of the peer
	lanes    []*lane
	prefer   netip.Addr // of ours, for frames that any lane can take; zero: any
	up       bool       // PeerUp was the last event
	since    time.Time  // the last lane died, or the session was made
	dialing  bool       // a goroutine reconnects
	dialed   bool       // this side opened it, so this side reopens it
	lastFill time.Time  // missing lanes were dialed
	closed   bool
	mine     [incarnationBytes]byte // distinguishes this side's sessions with the boot
	theirs   [incarnationBytes]byte
	met      bool // theirs is known
	member   bool // gossip lists it
	business time.Time

	railsLogged bool // a message about the peer's rails

	// Sending.
	next     uint64 // seq of the next frame
	unacked  []outgoing
	outBytes int
	buf      []byte

	resendTimer *time.Timer
	resendArmed bool

	// Receiving.
	handled    uint64 // all up to here were handled
	taken      uint64 // all up to here were given to the deliverer
	held       map[uint64]*peerv1.ControlFrame
	heldBytes  int
	delivering bool
	told       uint64 // the last ack that was sent
	joined     joiner
	waits      int       // bytes held and joined, also in Mesh.waiting
	stuck      time.Time // waits has been more than waitShare since
	ackTimer   *time.Timer
	ackArmed   bool
}

const incarnationBytes = 16

type outgoing struct {
	seq   uint64
	bytes []byte
	lane  *lane     // nil: none yet
	at    time.Time // it was last put on a lane
	tries int       // after the first
}

// ordinary frames may not use the reserved capacity: they start something, and can be tried again.
func ordinary(f *peerv1.ControlFrame) bool {
	switch f.Body.(type) {
	case *peerv1.ControlFrame_Await, *peerv1.ControlFrame_Grant, *peerv1.ControlFrame_Credit:
		return true
	}
	return false
}

// whereLocked is where to call it.
func (s *session) whereLocked() string {
	if s.info.Endpoint != "" {
		return s.info.Endpoint
	}
	return s.claimed
}

// send numbers a frame and puts it on a lane, or keeps it until there is one.
func (s *session) send(f *peerv1.ControlFrame) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return fmt.Errorf("peer: send to %s: %w", s.boot, ErrUnknown)
	}
	frames, bytes := MaxUnacked, maxUnackedBytes
	if ordinary(f) {
		frames, bytes = MaxUnacked-Reserved, maxUnackedBytes-reservedBytes
	}
	pieces, err := s.split(f)
	if err != nil {
		return err
	}
	// A frame of one piece is accepted while there is any room, a frame of several pieces if there is
	// room for all of them.
	if n := len(pieces) - 1; len(s.unacked)+n >= frames || s.outBytes+n*MaxFrame >= bytes {
		return fmt.Errorf("peer: send to %s: %d frames of %d bytes wait, and %d more do not fit: %w",
			s.boot, len(s.unacked), s.outBytes, n+1, ErrQueueFull)
	}
	for _, out := range pieces {
		if err := s.sendLocked(out); err != nil {
			return err
		}
	}
	return nil
}

// sendLocked numbers one frame that fits, and there is room for.
func (s *session) sendLocked(out *peerv1.ControlFrame) error {
	out.Seq, out.Ack = s.next+1, s.handled
	b, err := AppendFrame(make([]byte, 0, lengthBytes+proto.Size(out)), out)
	if err != nil {
		return err
	}
	s.next++
	s.told = s.handled
	s.unacked = append(s.unacked, outgoing{seq: s.next, bytes: b})
	s.outBytes += len(b)
	s.business = time.Now()
	o := &s.unacked[len(s.unacked)-1]
	o.at = s.business
	s.putLocked(o)
	s.watchUnackedLocked()
	return nil
}

// putLocked writes one frame to the best lane.
func (s *session) putLocked(o *outgoing) {
	for {
		l := s.bestLocked()
		o.lane = l
		if l == nil || l.write(o.bytes) {
			return
		}
		s.dropLaneLocked(l)
	}
}

// bestLocked is the best lane: not doubtful, then with the least backlog, then from the preferred
// address, then with the most recent reception, which proves that it works.
func (s *session) bestLocked() (best *lane) {
	var doubted bool
	var least int
	var heard int64
	for _, l := range s.lanes {
		d, n, h := l.doubtful(), l.waiting(), l.heard.Load()
		better := h > heard
		if best != nil && s.prefer.IsValid() && (l.local == s.prefer) != (best.local == s.prefer) {
			better = l.local == s.prefer
		}
		if n != least {
			better = n < least
		}
		if d != doubted {
			better = doubted
		}
		if best == nil || better {
			best, doubted, least, heard = l, d, n, h
		}
	}
	return best
}

func (s *session) dropLaneLocked(dead *lane) {
	for i, l := range s.lanes {
		if l == dead {
			s.lanes = append(s.lanes[:i:i], s.lanes[i+1:]...)
			break
		}
	}
	if len(s.lanes) == 0 {
		s.since = time.Now()
	}
}

// resendLocked sends the frames of dead lanes on live ones, in order.
func (s *session) resendLocked() {
	for i := range s.unacked {
		if len(s.lanes) == 0 {
			return
		}
		o := &s.unacked[i]
		if o.lane != nil {
			o.lane.mu.Lock()
			dead := o.lane.dead
			o.lane.mu.Unlock()
			if !dead {
				continue
			}
		}
		o.at = time.Now()
		s.putLocked(o)
	}
	s.watchUnackedLocked()
}

// take handles one frame of a lane.
func (s *session) take(l *lane, f *peerv1.ControlFrame) error {
	switch b := f.Body.(type) {
	case *peerv1.ControlFrame_Ping:
		s.control(l, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Pong{Pong: &peerv1.Pong{
			Nonce: b.Ping.GetNonce()}}})
	case *peerv1.ControlFrame_Pong: // that something came is all that counts
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed { // what is held of it from now on would count for its mesh for good
		return fmt.Errorf("peer: a frame of %s: %w", s.boot, ErrUnknown)
	}
	if f.Ack > s.next {
		return fmt.Errorf("peer: %s acknowledges frame %d of %d", s.boot, f.Ack, s.next)
	}
	s.ackedLocked(f.Ack)
	if f.Seq == 0 {
		return nil
	}
	if f.Seq > s.handled+2*MaxUnacked {
		return fmt.Errorf("peer: %s sends frame %d where %d is the last handled: more than %d open",
			s.boot, f.Seq, s.handled, 2*MaxUnacked)
	}
	if _, dup := s.held[f.Seq]; dup || f.Seq <= s.taken {
		// It was sent again because the acknowledgement was lost or late.
		s.told = min(s.told, s.handled-min(s.handled, 1))
		s.ackLocked()
		return nil
	}
	n := proto.Size(f)
	if s.heldBytes+n > maxHeldBytes {
		return fmt.Errorf("peer: %s: %d bytes of frames wait for earlier ones, at most %d", s.boot,
			s.heldBytes, maxHeldBytes)
	}
	if through := f.Seq == s.taken+1 && !s.delivering && s.joined.completes(f); !through &&
		!s.m.mayWait(n) {
		return nil // as if it had been lost: the peer sends it again
	}
	s.held[f.Seq] = f
	s.heldBytes += n
	s.waitsLocked(n)
	s.business = time.Now()
	if s.delivering {
		return nil
	}
	s.delivering = true
	var bad error
	for !s.closed {
		g := s.held[s.taken+1]
		if g == nil {
			break
		}
		s.taken++
		delete(s.held, s.taken)
		n, joined := proto.Size(g), len(s.joined.b)
		s.heldBytes -= n
		g, err := s.joined.add(g)
		s.waitsLocked(len(s.joined.b) - joined - n)
		if err != nil {
			bad = fmt.Errorf("peer: %s: %w", s.boot, err)
		} else if g != nil {
			s.mu.Unlock()
			s.m.opt.Handler.Control(s.boot, g)
			s.mu.Lock()
		}
		s.handled = s.taken
		if s.handled-s.told >= ackEvery {
			s.ackLocked()
		}
	}
	s.delivering = false
	s.quiet.Broadcast()
	if s.handled != s.told {
		s.armAckLocked()
	}
	return bad
}

func (s *session) ackedLocked(ack uint64) {
	i := 0
	for i < len(s.unacked) && s.unacked[i].seq <= ack {
		s.outBytes -= len(s.unacked[i].bytes)
		s.unacked[i] = outgoing{}
		i++
	}
	if i == 0 {
		return
	}
	if s.unacked = s.unacked[i:]; len(s.unacked) == 0 {
		s.unacked = nil
	}
}

func (s *session) armAckLocked() {
	if s.ackArmed || s.closed {
		return
	}
	s.ackArmed = true
	if s.ackTimer == nil {
		s.ackTimer = time.AfterFunc(ackDelay, s.lateAck)
	} else {
		s.ackTimer.Reset(ackDelay)
	}
}

func (s *session) lateAck() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ackArmed = false
	if s.handled != s.told && !s.closed {
		s.ackLocked()
	}
}

func (s *session) ackLocked() {
	l := s.bestLocked()
	if l == nil {
		return // the next lane's first frame carries it
	}
	b, err := AppendFrame(s.buf[:0], &peerv1.ControlFrame{Ack: s.handled})
	if err != nil {
		return // an ack always fits
	}
	s.buf = b
	if l.write(b) {
		s.told = s.handled
	}
}

// control sends an unnumbered frame on this lane, unless the lane's backlog makes it useless.
func (s *session) control(l *lane, f *peerv1.ControlFrame) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f.Ack = s.handled
	b, err := AppendFrame(s.buf[:0], f)
	if err != nil || l.waiting() > MaxFrame {
		return
	}
	s.buf = b
	l.write(b)
}

// busyLocked reports whether frames wait or were exchanged recently.
func (s *session) busyLocked(now time.Time, idle time.Duration) bool {
	return len(s.unacked) > 0 || len(s.held) > 0 || now.Sub(s.business) < idle
}

// watch sends pings that are due and closes lanes without an answer.
func (s *session) watch(now time.Time, p Pings) {
	s.mu.Lock()
	every := p.Idle
	if s.busyLocked(now, p.Idle) {
		every = p.Busy
	}
	lanes := append([]*lane(nil), s.lanes...)
	s.mu.Unlock()
	for _, l := range lanes {
		if asked := l.asked.Load(); asked != 0 {
			if now.UnixNano()-asked >= int64(p.Timeout) {
				l.fail(fmt.Errorf("peer: %s did not answer a ping within %s", s.boot, p.Timeout))
			}
			continue
		}
		if now.UnixNano()-l.heard.Load() >= int64(every) {
			l.asked.Store(now.UnixNano())
			s.control(l, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Ping{Ping: &peerv1.Ping{
				Nonce: uint64(now.UnixNano())}}})
		}
	}
}

// close ends the session. The readers of its lanes then end.
func (s *session) close(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	for _, l := range s.lanes {
		l.fail(err)
	}
	s.lanes, s.unacked, s.held = nil, nil, map[uint64]*peerv1.ControlFrame{}
	s.outBytes, s.heldBytes, s.joined = 0, 0, joiner{}
	s.waitsLocked(-s.waits)
	if s.ackTimer != nil {
		s.ackTimer.Stop()
	}
	if s.resendTimer != nil {
		s.resendTimer.Stop()
	}
}
