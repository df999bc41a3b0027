// Package lease holds the state of destination and source leases, of the slots that name grants,
// and of finished keys. It is pure: no clock, no I/O, no goroutine. An instant is a time.Duration
// since the caller's own start.
//
// Invariants: a slot is reused only after its fence. No (peer, slot, generation) repeats within a
// boot. A lease completes once. Only MayRelease decides when blocks return to an engine.
package lease

import (
	"errors"
	"fmt"
	"time"

	"github.com/kvspray/kvspray/transfer"
)

// Limits of one process. At each limit new entries are refused, and existing ones continue.
const (
	MaxSlotsPerPeer = 4096  // open grants towards one peer
	MaxPeers        = 1024  // peers that hold slots at the same time
	MaxDest         = 16384 // destination leases open
	MaxSource       = 16384 // source leases open
	MaxFanout       = 16    // grants that one source lease serves
	MaxTombstones   = 65536 // finished keys remembered
	TombstoneAge    = 2 * time.Minute
)

// Instant is a point in time: the duration since the owner's start, by a monotonic clock.
type Instant = time.Duration

// Never is after every deadline.
const Never = Instant(1<<63 - 1)

// ErrLimit is wrapped when a bounded table is full. A retry can help later.
var ErrLimit = errors.New("limit reached")

// StateError is a transition that the state machine does not have.
type StateError struct {
	Lease transfer.LeaseID
	Op    string
	State fmt.Stringer
}

func (e *StateError) Error() string {
	return fmt.Sprintf("lease %s: %s is not possible in state %s", e.Lease, e.Op, e.State)
}

// Exposure describes which processes could still touch the blocks of a lease.
type Exposure struct {
	Granted bool // some process was ever permitted to touch them
	Fenced  bool // every backend has acknowledged the fence (destination) or the close (source)
	Exited  bool // the exit of every process that could touch them is proved
}

// MayRelease is the release rule: blocks return to the engine only after a fence acknowledgement,
// or the proved exit of every process that could touch them. Deadlines, cancels and lost
// connections start fences; none of them releases blocks.
func MayRelease(e Exposure) bool { return !e.Granted || e.Fenced || e.Exited }
