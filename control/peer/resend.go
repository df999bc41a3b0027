// SPDX-License-Identifier: Apache-2.0

package peer

import "time"

// If a rail dies silently, the frames in its control lane are lost, and the kernel reports that
// only after minutes. A frame is small and is handled once however often it arrives, so sending it
// again elsewhere is cheap, long before the lane is proved dead.
const (
	resendAfter = 3 * ackDelay // without an acknowledgement
	resendMax   = time.Second  // between two tries of the same frame
	// frames sent again at a time: the others wait for the acknowledgement of these.
	resendBatch = 64
)

// watchUnackedLocked arms the timer that sends unacknowledged frames again.
func (s *session) watchUnackedLocked() {
	if s.resendArmed || s.closed || len(s.unacked) == 0 {
		return
	}
	s.resendArmed = true
	wait := max(time.Until(s.unacked[0].due()), time.Millisecond)
	if s.resendTimer == nil {
		s.resendTimer = time.AfterFunc(wait, s.overdue)
	} else {
		s.resendTimer.Reset(wait)
	}
}

// due is when the frame is sent again.
func (o *outgoing) due() time.Time {
	return o.at.Add(min(resendAfter<<min(o.tries, 8), resendMax))
}

// overdue sends the oldest frames again, on other lanes than before.
func (s *session) overdue() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.resendArmed = false
	if s.closed {
		return
	}
	now := time.Now()
	for i := range min(len(s.unacked), resendBatch) {
		o := &s.unacked[i]
		if now.Before(o.due()) {
			break
		}
		if o.lane == nil {
			continue // there was none; the next one takes it
		}
		// Frames that the socket still holds are not lost: a full lane is slow, not silent.
		if o.lane.waiting() == 0 {
			o.lane.doubted.Store(o.at.UnixNano())
		}
		o.at = now
		o.tries++
		s.putLocked(o)
	}
	s.watchUnackedLocked()
}

// doubtful reports that frames were lost on the lane, or seem to be, and that nothing was received
// on it since.
func (l *lane) doubtful() bool {
	at := l.doubted.Load()
	return at != 0 && l.heard.Load() <= at
}
