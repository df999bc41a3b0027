package transfer

import "fmt"

// State is where a transfer stands in its life, on either side.
type State uint8

// The states. Done and Failed are final, and both lie behind a fence: nothing leaves Committing or Revoking before the
// fence (destination) or the close (source) was acknowledged.
const (
	Offered    State = iota // a lease is there, its partner is not
	Bound                   // both leases met and agree about the space
	Streaming               // at least one slice was assigned
	Committing              // every chunk landed; the lease is being closed to writers
	Revoking                // cancelled, late, lost or preempted; the lease is being closed to writers
	Done
	Failed
	numStates
)

var stateNames = [numStates]string{"offered", "bound", "streaming", "committing", "revoking", "done", "failed"}

func (s State) String() string {
	if s < numStates {
		return stateNames[s]
	}
	return fmt.Sprintf("state(%d)", uint8(s))
}

// Final reports whether the life is over.
func (s State) Final() bool { return s == Done || s == Failed }

// legal is the whole table: to[from] has the bit of each state that may follow.
var legal = [numStates]uint16{
	Offered:    1<<Bound | 1<<Revoking,
	Bound:      1<<Streaming | 1<<Committing | 1<<Revoking, // an empty space commits at once
	Streaming:  1<<Committing | 1<<Revoking,
	Committing: 1<<Done | 1<<Revoking,  // cancelled while the fence runs
	Revoking:   1<<Offered | 1<<Failed, // fenced: offered again under a new generation, or the end
}

// Life holds the state of one transfer. The zero Life is Offered.
type Life struct{ state State }

// State returns where it stands.
func (l *Life) State() State { return l.state }

// To moves on, or says why it may not; the state is then unchanged.
func (l *Life) To(next State) error {
	if next >= numStates || legal[l.state]&(1<<next) == 0 {
		return fmt.Errorf("transfer: %s cannot follow %s", next, l.state)
	}
	l.state = next
	return nil
}

// Retryable reports whether the same range may be sent again in the same attempt generation. InDoubt is not: its bytes may
// still arrive, which only a duplicate of the same bytes may meet; the executor fences before anyone reuses the blocks.
func (o Outcome) Retryable() bool { return o == NotLanded }

// NeedsFence reports whether bytes of the attempt may still arrive.
func (o Outcome) NeedsFence() bool { return o == InDoubt }

// Final reports whether a refusal with this reason stays: asking again cannot help while the leases are what they are.
func (r Reason) Final() bool {
	switch r {
	case ReasonUnknownSlot, ReasonStaleGen, ReasonRevoked, ReasonRange, ReasonLength, ReasonSourceGone, ReasonMemory, ReasonTimeout:
		return true
	}
	return false
}

// NumReasons is for tables and metrics that have a row for each reason.
const NumReasons = int(reasonCount)
