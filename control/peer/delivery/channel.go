// Package delivery has the reliable channel of control frames to one peer process: it numbers,
// resends, orders and acknowledges frames over the lanes that exist at a time.
//
// Invariants: while both ends live, each message is delivered once and in order, whatever happens
// to lanes. Send never blocks. Queues are bounded: unacknowledged frames per channel, received
// frames per channel and in a Budget that all channels of a process share.
//
// Goroutines: none but those of two timers, for acknowledgements and for resending; Close stops
// them. Channel.mu is taken before locks of lanes and after all locks of callers. Deliver is called
// without a lock.
package delivery

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/peer/frame"
	"github.com/kvspray/kvspray/transfer"
)

// Bounds.
const (
	MaxUnacked = 8192 // frames to one peer that it has not acknowledged
	// of MaxUnacked: for frames that end or answer something, never for grants, awaits and credits.
	reserved        = 2048
	maxUnackedBytes = 8 << 20 // to one peer
	reservedBytes   = 2 << 20 // of these
	maxHeldBytes    = 2 * maxUnackedBytes
	maxLanes        = 16 // twice the control addresses of a process: both ends may dial

	ackDelay = 20 * time.Millisecond
	ackEvery = 256 // frames
)

// Errors that callers distinguish.
var (
	ErrUnknown   = errors.New("unknown peer") // the channel is closed
	ErrQueueFull = errors.New("the peer does not acknowledge; too many frames wait")
)

// Lane is one connection to the peer. All methods return at once.
type Lane interface {
	// Write sends a frame after those of earlier calls, and does not keep b. False: the lane has
	// ended.
	Write(b []byte) bool
	Backlog() int      // bytes that the socket has not accepted
	Received() int64   // the last reception, in unix nanoseconds
	Local() netip.Addr // of this end
	Address() string   // that this process dialed; empty: the peer dialed
	Err() error        // why the lane has ended; nil: it lives
	Fail(err error)    // ends it
	String() string    // both addresses
}

// laneState is a lane of a channel, with what the channel has observed on it.
type laneState struct {
	Lane
	suspected int64 // a frame sent then was not acknowledged in time; unix nanoseconds, 0: never
	pinged    int64 // the last ping; unix nanoseconds, 0: none
}

// suspect reports that frames were lost on the lane, or seem to be, and that nothing was received
// on it since.
func (l *laneState) suspect() bool { return l.suspected != 0 && l.Received() <= l.suspected }

// Channel is the conversation with one process.
type Channel struct {
	peer    transfer.Boot
	deliver func(*peerv1.ControlFrame)
	budget  *Budget

	mu     sync.Mutex // protects all below
	quiet  sync.Cond  // of mu: delivering has ended
	closed bool
	lanes  []*laneState
	prefer netip.Addr // of this host, for frames that any lane can take; zero: any
	since  time.Time  // the last lane ended, or the channel was made
	active time.Time  // the last frame was sent or received
	buf    []byte

	// Sending.
	next        uint64 // seq of the last frame
	unacked     []outgoing
	outBytes    int
	resendTimer *time.Timer
	resendArmed bool

	// Receiving.
	handled    uint64 // all up to here were handled
	taken      uint64 // all up to here were given to the deliverer
	held       map[uint64]*peerv1.ControlFrame
	heldBytes  int
	delivering bool
	acked      uint64 // the last ack that was sent
	message    frame.Reassembly
	waits      int       // bytes in held and message, also in Budget.waiting
	overShare  time.Time // waits has been more than waitShare since
	ackTimer   *time.Timer
	ackArmed   bool
}

// outgoing is an unacknowledged frame.
type outgoing struct {
	seq   uint64
	bytes []byte
	lane  *laneState // nil: none yet
	at    time.Time  // it was last put on a lane
	tries int        // after the first
}

// New makes a channel without lanes. deliver gets each message once and in order; it must not
// block, and may call Send.
func New(peer transfer.Boot, budget *Budget, deliver func(*peerv1.ControlFrame)) *Channel {
	now := time.Now()
	c := &Channel{peer: peer, deliver: deliver, budget: budget, since: now, active: now,
		held: map[uint64]*peerv1.ControlFrame{}}
	c.quiet.L = &c.mu
	return c
}

// State is a channel at one moment.
type State struct {
	Closed  bool
	Lanes   int
	Since   time.Time // of a channel without lanes: it has had none since
	Unacked int       // frames sent
	Held    int       // frames received that wait for earlier ones
	Active  time.Time // the last frame was sent or received
}

// State returns the state.
func (c *Channel) State() State {
	c.mu.Lock()
	defer c.mu.Unlock()
	return State{Closed: c.closed, Lanes: len(c.lanes), Since: c.since, Unacked: len(c.unacked),
		Held: len(c.held), Active: c.active}
}

// Lanes are the lanes of this moment.
func (c *Channel) Lanes() []Lane {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := make([]Lane, len(c.lanes))
	for i, l := range c.lanes {
		out[i] = l.Lane
	}
	return out
}

// Admit is an error if the channel takes no further lane.
func (c *Channel) Admit() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.admitLocked()
}

func (c *Channel) admitLocked() error {
	if c.closed || len(c.lanes) >= maxLanes {
		return fmt.Errorf("peer: %s: session ended, or %d lanes are open, which is the limit", c.peer,
			maxLanes)
	}
	return nil
}

// Add adds a lane, which gets the frames of lanes that have ended.
func (c *Channel) Add(l Lane) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return fmt.Errorf("peer: %s: session ended", c.peer)
	}
	c.lanes = append(c.lanes, &laneState{Lane: l})
	c.resendEndedLocked()
	return nil
}

// Remove removes a lane that has ended. Its frames are sent again on others. It returns the state
// afterwards.
func (c *Channel) Remove(l Lane) (left int, closed bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.removeLocked(l)
	c.resendEndedLocked()
	return len(c.lanes), c.closed
}

func (c *Channel) removeLocked(l Lane) {
	if i := slices.IndexFunc(c.lanes, func(x *laneState) bool { return x.Lane == l }); i >= 0 {
		c.lanes = append(c.lanes[:i:i], c.lanes[i+1:]...)
	}
	if len(c.lanes) == 0 {
		c.since = time.Now()
	}
}

// Prefer sets the local address over which frames are sent from now on, while a lane there is
// healthy; the zero address: any.
func (c *Channel) Prefer(local netip.Addr) {
	c.mu.Lock()
	c.prefer = local
	c.mu.Unlock()
}

// bestLocked is the best lane: not suspect, then with the least backlog, then from the preferred
// address, then with the most recent reception, which proves that it works.
func (c *Channel) bestLocked() (best *laneState) {
	var suspect bool
	var backlog int
	var last int64
	for _, l := range c.lanes {
		s, n, r := l.suspect(), l.Backlog(), l.Received()
		better := r > last
		if best != nil && c.prefer.IsValid() &&
			(l.Local() == c.prefer) != (best.Local() == c.prefer) {
			better = l.Local() == c.prefer
		}
		if n != backlog {
			better = n < backlog
		}
		if s != suspect {
			better = suspect
		}
		if best == nil || better {
			best, suspect, backlog, last = l, s, n, r
		}
	}
	return best
}

// Close ends the channel and its lanes. Frames that were not acknowledged are lost.
func (c *Channel) Close(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	for _, l := range c.lanes {
		l.Fail(err)
	}
	c.lanes, c.unacked, c.held = nil, nil, map[uint64]*peerv1.ControlFrame{}
	c.outBytes, c.heldBytes, c.message = 0, 0, frame.Reassembly{}
	c.waitsLocked(-c.waits)
	if c.ackTimer != nil {
		c.ackTimer.Stop()
	}
	if c.resendTimer != nil {
		c.resendTimer.Stop()
	}
}

// Wait returns when no call of deliver is in progress. After Close there are no further calls.
func (c *Channel) Wait() {
	c.mu.Lock()
	for c.delivering {
		c.quiet.Wait()
	}
	c.mu.Unlock()
}

// Pings detect a peer that has died or stopped.
type Pings struct {
	Busy    time.Duration // between pings while frames are exchanged
	Idle    time.Duration // otherwise
	Timeout time.Duration // until a lane without an answer is closed
}

// Watch sends the pings that are due and ends lanes without an answer.
func (c *Channel) Watch(now time.Time, p Pings) {
	c.mu.Lock()
	defer c.mu.Unlock()
	every := p.Idle
	if len(c.unacked) > 0 || len(c.held) > 0 || now.Sub(c.active) < p.Idle {
		every = p.Busy
	}
	for _, l := range c.lanes {
		received := l.Received()
		switch {
		case l.pinged > received:
			if now.UnixNano()-l.pinged >= int64(p.Timeout) {
				l.Fail(fmt.Errorf("peer: %s did not answer a ping within %s", c.peer, p.Timeout))
			}
		case now.UnixNano()-received >= int64(every):
			l.pinged = now.UnixNano()
			c.unnumberedLocked(l, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Ping{
				Ping: &peerv1.Ping{Nonce: uint64(l.pinged)}}})
		}
	}
}

// unnumberedLocked sends a frame without a number on this lane, unless the lane's backlog makes it
// useless.
func (c *Channel) unnumberedLocked(l Lane, f *peerv1.ControlFrame) {
	f.Ack = c.handled
	b, err := frame.Append(c.buf[:0], f)
	if err != nil || l.Backlog() > frame.Max {
		return
	}
	c.buf = b
	l.Write(b)
}
