package connector

import (
	"fmt"
	"os"
	"sync/atomic"

	"github.com/kvspray/kvspray/connector/internal/eventfd"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/internal/board"
	"github.com/kvspray/kvspray/transfer"
)

// submissions reads the submission ring of a worker. Its fields are guarded by worker.mu, except
// for the atomic ones.
type submissions struct {
	w          *worker
	ring       *board.Consumer
	event      *os.File      // SQ eventfd, which wakes the worker's goroutine
	signaled   atomic.Bool   // by this process
	drained    atomic.Uint64 // source epoch of the last record taken from the ring
	lastEpoch  uint64
	complaints map[string]int // malformed records by kind
}

// drainLocked drains up to n records and reports whether there may be more.
func (s *submissions) drainLocked(n int) bool {
	for range n {
		if s.w.closed || s.w.broken != nil {
			return false
		}
		rec, ok, err := s.ring.Next()
		if err != nil {
			s.w.breakLocked(err)
			return false
		}
		if !ok {
			return false
		}
		if rec.Epoch < s.lastEpoch || rec.Epoch > s.w.flags.SourceEpoch() {
			s.w.breakLocked(fmt.Errorf("record %d has source epoch %d after %d, the board's is %d",
				rec.Seq, rec.Epoch, s.lastEpoch, s.w.flags.SourceEpoch()))
			return false
		}
		s.w.recordLocked(rec)
		s.lastEpoch = rec.Epoch
		// After the lease's own epoch has moved: a reader that sees this epoch as drained also sees
		// the record's effect.
		s.drained.Store(rec.Epoch)
	}
	return true
}

// complainLocked counts a bad record, logs its kind once, and sends an ERROR to the shim.
func (s *submissions) complainLocked(kind string, err error) {
	s.w.s.hookMalformed(kind)
	s.complaints[kind]++
	if s.complaints[kind] == 1 {
		s.w.log.Warn("malformed record; the session goes on without it", "kind", kind, "err", err)
	}
	total := 0
	for _, n := range s.complaints {
		total += n
	}
	if s.w.session != nil && total <= maxComplaints {
		s.w.session.sendError(errorMessage(0, msg.CodeProtocol, err, false))
	}
}

// sourceValid is Worker.SourceValid.
func (s *submissions) sourceValid(id transfer.LeaseID) bool {
	// This load comes first: the records drained up to this epoch cover every reuse that can have
	// changed the bytes read before.
	now := s.w.flags.SourceEpoch()
	if s.drained.Load() < now && !s.catchUp(now) {
		return false
	}
	v, ok := s.w.sources.Load(id.ID)
	return ok && id.Epoch != 0 && v.(*lease).epoch.Load() == id.Epoch && id.Boot == s.w.pub.Boot
}

// catchUp drains the ring up to the record of that source epoch. False: the record has not been
// written yet, or too many events wait for delivery, or the ring is broken.
func (s *submissions) catchUp(epoch uint64) bool {
	s.w.mu.Lock()
	defer s.w.mu.Unlock()
	for s.drained.Load() < epoch {
		if s.w.pendingLocked() >= maxUndelivered || !s.drainLocked(drainBatch) {
			break
		}
	}
	if !s.w.closed && (s.w.pendingLocked() > 0 || s.w.signals.Waiting() || s.w.broken != nil) {
		s.wakeLocked() // the ring's goroutine delivers
	}
	return s.drained.Load() >= epoch
}

func (s *submissions) eventFD() int {
	fd := -1
	if rc, err := s.event.SyscallConn(); err == nil {
		_ = rc.Control(func(n uintptr) { fd = int(n) })
	}
	return fd
}

// await waits in the netpoller until the eventfd is signaled. It does not reset the counter:
// each write is an edge of its own, and a read would be a system call that the shim could make
// block, because the shim shares the eventfd's flags. The netpoller forgets an edge before the
// wait, so the ring is checked once more.
func (s *submissions) await() error {
	rc, err := s.event.SyscallConn()
	if err != nil {
		return err
	}
	looked := false
	return rc.Read(func(uintptr) bool {
		if looked {
			return true
		}
		looked = true
		s.w.mu.Lock()
		defer s.w.mu.Unlock()
		return s.w.closed || s.w.broken != nil || s.w.pendingLocked() > 0 || s.signaled.Swap(false) ||
			!s.ring.Sleep()
	})
}

// wakeLocked signals the worker's own eventfd. After closing, its descriptor may be another file's.
func (s *submissions) wakeLocked() {
	if s.w.closed {
		return
	}
	s.signaled.Store(true)
	eventfd.Signal(s.eventFD())
}
