package delivery

import (
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/peer/frame"
)

// If a rail dies silently, the frames in its control lane are lost, and the kernel reports that
// only after minutes. A frame is small and is handled once however often it arrives, so sending it
// again elsewhere is cheap, long before the lane is proved dead.
const (
	resendAfter = 3 * ackDelay // without an acknowledgement
	resendMax   = time.Second  // between two tries of the same frame
	// frames sent again at a time: the others wait for the acknowledgement of these.
	resendBatch = 64
)

// Limits are how many frames may wait at one peer before f is refused, and how many bytes. Frames
// that start something do not use the reserved capacity: they can be tried again. Hints about
// pages, of which a store may send very many, use half of what is left, so that grants find room.
func Limits(f *peerv1.ControlFrame) (frames, bytes int) {
	switch f.Body.(type) {
	case *peerv1.ControlFrame_PageHints:
		return (MaxUnacked - reserved) / 2, (maxUnackedBytes - reservedBytes) / 2
	case *peerv1.ControlFrame_Await, *peerv1.ControlFrame_Grant, *peerv1.ControlFrame_Credit,
		*peerv1.ControlFrame_Check, *peerv1.ControlFrame_Checked,
		*peerv1.ControlFrame_PageLookup,
		*peerv1.ControlFrame_PageHolders, *peerv1.ControlFrame_PageRequest,
		*peerv1.ControlFrame_PageOffer:
		return MaxUnacked - reserved, maxUnackedBytes - reservedBytes
	}
	return MaxUnacked, maxUnackedBytes
}

// Send numbers a message and puts it on a lane, or keeps it until there is one.
func (c *Channel) Send(f *peerv1.ControlFrame) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return fmt.Errorf("peer: send to %s: %w", c.peer, ErrUnknown)
	}
	pieces, err := frame.Split(f)
	if err != nil {
		return fmt.Errorf("peer: send to %s: %w", c.peer, err)
	}
	// A message of one frame is accepted while there is any room, a message of several frames if there
	// is room for all of them.
	frames, bytes := Limits(f)
	if n := len(pieces) - 1; len(c.unacked)+n >= frames || c.outBytes+n*frame.Max >= bytes {
		return fmt.Errorf("peer: send to %s: %d frames of %d bytes wait, and %d more do not fit: %w",
			c.peer, len(c.unacked), c.outBytes, n+1, ErrQueueFull)
	}
	for _, out := range pieces {
		if err := c.sendLocked(out); err != nil {
			return err
		}
	}
	return nil
}

// sendLocked numbers one frame for which there is room.
func (c *Channel) sendLocked(out *peerv1.ControlFrame) error {
	out.Seq, out.Ack = c.next+1, c.handled
	b, err := frame.Append(make([]byte, 0, frame.LengthBytes+proto.Size(out)), out)
	if err != nil {
		return err //nolint:wrapcheck // it names the frame
	}
	c.next++
	c.acked = c.handled
	c.active = time.Now()
	c.unacked = append(c.unacked, outgoing{seq: c.next, bytes: b, at: c.active})
	c.outBytes += len(b)
	c.putLocked(&c.unacked[len(c.unacked)-1])
	c.watchUnackedLocked()
	return nil
}

// putLocked writes one frame to the best lane.
func (c *Channel) putLocked(o *outgoing) {
	for {
		l := c.bestLocked()
		o.lane = l
		if l == nil || l.Write(o.bytes) {
			return
		}
		c.removeLocked(l.Lane)
	}
}

// resendEndedLocked sends the frames of ended lanes on live ones, in order.
func (c *Channel) resendEndedLocked() {
	for i := range c.unacked {
		if len(c.lanes) == 0 {
			return
		}
		o := &c.unacked[i]
		if o.lane != nil && o.lane.Err() == nil {
			continue
		}
		o.at = time.Now()
		c.putLocked(o)
	}
	c.watchUnackedLocked()
}

// ackedLocked drops the frames that the peer has acknowledged.
func (c *Channel) ackedLocked(ack uint64) {
	i := 0
	for i < len(c.unacked) && c.unacked[i].seq <= ack {
		c.outBytes -= len(c.unacked[i].bytes)
		c.unacked[i] = outgoing{}
		i++
	}
	if i == 0 {
		return
	}
	if c.unacked = c.unacked[i:]; len(c.unacked) == 0 {
		c.unacked = nil
	}
}

// watchUnackedLocked arms the timer that sends unacknowledged frames again.
func (c *Channel) watchUnackedLocked() {
	if c.resendArmed || c.closed || len(c.unacked) == 0 {
		return
	}
	c.resendArmed = true
	wait := max(time.Until(c.unacked[0].due()), time.Millisecond)
	if c.resendTimer == nil {
		c.resendTimer = time.AfterFunc(wait, c.resend)
	} else {
		c.resendTimer.Reset(wait)
	}
}

// due is when the frame is sent again.
func (o *outgoing) due() time.Time {
	return o.at.Add(min(resendAfter<<min(o.tries, 8), resendMax))
}

// resend sends the oldest frames again, on other lanes than before.
func (c *Channel) resend() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.resendArmed = false
	if c.closed {
		return
	}
	now := time.Now()
	for i := range min(len(c.unacked), resendBatch) {
		o := &c.unacked[i]
		if now.Before(o.due()) {
			break
		}
		if o.lane == nil {
			continue // there was none; the next one takes it
		}
		// Frames that the socket still holds are not lost: a lane with a backlog is slow, not silent.
		if o.lane.Backlog() == 0 {
			o.lane.suspected = o.at.UnixNano()
		}
		o.at = now
		o.tries++
		c.putLocked(o)
	}
	c.watchUnackedLocked()
}
