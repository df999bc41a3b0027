package delivery

import (
	"fmt"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/proto"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/peer/frame"
)

// All channels together have a bound, too: a member with many boots could leave a long message
// without its end in each of them. A frame for which there is no room is not acknowledged, and its
// sender sends it again. Meanwhile the owner of the budget ends a channel.
const (
	MaxWaiting = 128 << 20 // bytes: frames that wait for earlier ones, and incomplete messages
	waitShare  = frame.Max // bytes that any channel may hold
)

// Budget bounds the bytes that wait in all channels of a process.
type Budget struct {
	limit   int64
	full    func()
	waiting atomic.Int64
}

// NewBudget makes a budget of limit bytes. full is called, under the lock of a channel, whenever a
// frame finds no room.
func NewBudget(limit int64, full func()) *Budget { return &Budget{limit: limit, full: full} }

// Waiting is how many bytes wait.
func (b *Budget) Waiting() int64 { return b.waiting.Load() }

// mayWait reports whether n more bytes may wait.
func (b *Budget) mayWait(n int) bool {
	if b.waiting.Load()+int64(n) <= b.limit {
		return true
	}
	b.full()
	return false
}

// waitsLocked counts bytes that wait, or do so no longer.
func (c *Channel) waitsLocked(n int) {
	if c.waits <= waitShare && c.waits+n > waitShare {
		c.overShare = time.Now()
	}
	c.waits += n
	c.budget.waiting.Add(int64(n))
}

// Waiting is how many bytes wait, and since when the channel has held more than any channel may;
// zero: it does not, or a message is being delivered.
func (c *Channel) Waiting() (bytes int, since time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.waits > waitShare && !c.delivering {
		since = c.overShare
	}
	return c.waits, since
}

// Receive handles one frame of a lane. After an error the caller ends the lane.
func (c *Channel) Receive(l Lane, f *peerv1.ControlFrame) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	// A Pong needs no handling: the lane has recorded that something was received.
	if b, is := f.Body.(*peerv1.ControlFrame_Ping); is {
		c.unnumberedLocked(l, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Pong{
			Pong: &peerv1.Pong{Nonce: b.Ping.GetNonce()}}})
	}
	if c.closed { // nothing would return what is held from now on to the budget
		return fmt.Errorf("peer: a frame of %s: %w", c.peer, ErrUnknown)
	}
	if f.Ack > c.next {
		return fmt.Errorf("peer: %s acknowledges frame %d of %d", c.peer, f.Ack, c.next)
	}
	c.ackedLocked(f.Ack)
	if f.Seq == 0 {
		return nil
	}
	if f.Seq > c.handled+2*MaxUnacked {
		return fmt.Errorf("peer: %s sends frame %d where %d is the last handled: more than %d open",
			c.peer, f.Seq, c.handled, 2*MaxUnacked)
	}
	if _, dup := c.held[f.Seq]; dup || f.Seq <= c.taken {
		// It was sent again because the acknowledgement was lost or late.
		c.acked = min(c.acked, c.handled-min(c.handled, 1))
		c.ackLocked()
		return nil
	}
	n := proto.Size(f)
	if c.heldBytes+n > maxHeldBytes {
		return fmt.Errorf("peer: %s: %d bytes of frames wait for earlier ones, at most %d", c.peer,
			c.heldBytes, maxHeldBytes)
	}
	if through := f.Seq == c.taken+1 && !c.delivering && frame.Completes(f); !through &&
		!c.budget.mayWait(n) {
		return nil // as if it had been lost: the peer sends it again
	}
	c.held[f.Seq] = f
	c.heldBytes += n
	c.waitsLocked(n)
	c.active = time.Now()
	if c.delivering {
		return nil
	}
	return c.deliverLocked()
}

// deliverLocked delivers the messages that are complete. It releases the lock during each call of
// deliver.
func (c *Channel) deliverLocked() (bad error) {
	c.delivering = true
	for !c.closed {
		f := c.held[c.taken+1]
		if f == nil {
			break
		}
		c.taken++
		delete(c.held, c.taken)
		n, before := proto.Size(f), c.message.Bytes()
		c.heldBytes -= n
		whole, err := c.message.Add(f)
		c.waitsLocked(c.message.Bytes() - before - n)
		if err != nil {
			bad = fmt.Errorf("peer: %s: %w", c.peer, err)
		} else if whole != nil {
			c.mu.Unlock()
			c.deliver(whole)
			c.mu.Lock()
		}
		c.handled = c.taken
		if c.handled-c.acked >= ackEvery {
			c.ackLocked()
		}
	}
	c.delivering = false
	c.quiet.Broadcast()
	if c.handled != c.acked {
		c.armAckLocked()
	}
	return bad
}

func (c *Channel) armAckLocked() {
	if c.ackArmed || c.closed {
		return
	}
	c.ackArmed = true
	if c.ackTimer == nil {
		c.ackTimer = time.AfterFunc(ackDelay, c.lateAck)
	} else {
		c.ackTimer.Reset(ackDelay)
	}
}

func (c *Channel) lateAck() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ackArmed = false
	if c.handled != c.acked && !c.closed {
		c.ackLocked()
	}
}

func (c *Channel) ackLocked() {
	l := c.bestLocked()
	if l == nil {
		return // the next lane's first frame carries it
	}
	b, err := frame.Append(c.buf[:0], &peerv1.ControlFrame{Ack: c.handled})
	if err != nil {
		return // an ack always fits
	}
	c.buf = b
	if l.Write(b) {
		c.acked = c.handled
	}
}
