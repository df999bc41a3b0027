package lease

import (
	"fmt"

	"github.com/kvspray/kvspray/transfer"
)

// DestState is the state of a destination lease.
type DestState uint8

// The states of a destination lease.
const (
	// no grant exists: the peer is not connected, or the last grant was fenced.
	DestWaiting   DestState = iota
	DestGranted             // offered; bytes may land
	DestLanding             // bound to a source lease
	DestClosing             // closed to writers, the fence is running
	DestFenced              // nothing can be written any more
	DestCompleted           // the engine has received the result, once
)

var destNames = [...]string{"waiting", "granted", "landing", "closing", "fenced", "completed"}

func (s DestState) String() string {
	if int(s) < len(destNames) {
		return destNames[s]
	}
	return fmt.Sprintf("state(%d)", uint8(s))
}

// Dest is one destination lease: blocks of an engine that are to receive a prompt's KV.
type Dest struct {
	ID       transfer.LeaseID
	Key      transfer.Key
	Deadline Instant
	MatchBy  Instant // when a source must be bound; Never afterwards

	State  DestState
	Peer   transfer.Boot
	Slot   transfer.Slot
	Gen    transfer.Gen
	Source transfer.LeaseID // bound to; zero before
	Bound  bool
	Grants int // made so far
	Final  bool
	exp    Exposure
}

// Grant records that the blocks were offered to peer.
func (d *Dest) Grant(peer transfer.Boot, slot transfer.Slot, gen transfer.Gen) error {
	if d.State != DestWaiting {
		return &StateError{d.ID, "grant", d.State}
	}
	d.State, d.Peer, d.Slot, d.Gen = DestGranted, peer, slot, gen
	d.Source, d.Bound = transfer.LeaseID{}, false
	d.Grants++
	d.exp = Exposure{Granted: true}
	return nil
}

// Bind records the source lease that serves the grant.
func (d *Dest) Bind(source transfer.LeaseID) error {
	if d.State != DestGranted {
		return &StateError{d.ID, "bind", d.State}
	}
	d.State, d.Source, d.Bound, d.MatchBy = DestLanding, source, true, Never
	return nil
}

// Close closes the grant to writers. With final the lease ends after the fence; otherwise it waits
// for a new grant. A lease that was never granted, or whose last grant is fenced, needs no fence:
// Close returns false.
func (d *Dest) Close(final bool) (fence bool, err error) {
	switch d.State {
	case DestWaiting:
		if final {
			d.State, d.Final = DestFenced, true
		}
		return false, nil
	case DestGranted, DestLanding:
		d.State, d.Final = DestClosing, final
		return true, nil
	case DestClosing:
		// The fence is already running; final can only be added.
		d.Final = d.Final || final
		return false, nil
	}
	return false, &StateError{d.ID, "close", d.State}
}

// Fenced records the acknowledgement of every backend.
func (d *Dest) Fenced() error {
	if d.State != DestClosing {
		return &StateError{d.ID, "fenced", d.State}
	}
	d.exp.Fenced = true
	if d.Final {
		d.State = DestFenced
	} else {
		d.State = DestWaiting
	}
	return nil
}

// Complete records that the engine receives the result. It succeeds once, and only if the release
// rule permits.
func (d *Dest) Complete() error {
	if d.State != DestFenced || !MayRelease(d.exp) {
		return &StateError{d.ID, "complete", d.State}
	}
	d.State = DestCompleted
	return nil
}
