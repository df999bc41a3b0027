package multipath

import (
	"time"
)

// LinkState is the state of one link.
type LinkState struct {
	GPU      int     `json:"gpu"`                      // whose PCIe link it is
	State    string  `json:"state"`                    // one of LinkStates
	Bytes    uint64  `json:"bytes"`                    // moved
	InFlight uint64  `json:"in_flight_bytes"`          // in its pipeline
	Rate     float64 `json:"learned_bytes_per_second"` // 0: unknown
	Returned uint64  `json:"chunks_given_back"`
}

// The states of a link.
const (
	LinkIdle   = "idle"
	LinkMoves  = "moves"
	LinkYields = "yields" // its own GPU has work
	LinkSilent = "silent" // it finishes none of its chunks
	LinkDead   = "dead"
)

// LinkStates lists all states.
var LinkStates = []string{LinkIdle, LinkMoves, LinkYields, LinkSilent, LinkDead}

// Links reports all links, the target's first, without the number of the GPU.
func (m *Multipath) Links() []LinkState {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := make([]LinkState, len(m.links))
	for i, l := range m.links {
		s := LinkState{State: LinkIdle, Bytes: l.moved, InFlight: l.inFlight, Returned: l.returned}
		if l.took > 0 {
			s.Rate = l.bytes / l.took * float64(time.Second)
		}
		switch {
		case l.failed:
			s.State = LinkDead
		case l.silentLocked(time.Now()):
			s.State = LinkSilent
		case l.yields:
			s.State = LinkYields
		case l.inFlight > 0:
			s.State = LinkMoves
		}
		out[i] = s
	}
	return out
}

// ResetCounts sets the counters of all links to zero.
func (m *Multipath) ResetCounts() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, l := range m.links {
		l.moved, l.returned = 0, 0
	}
}
