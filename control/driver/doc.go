// Package driver runs the executor of one process: it serializes events, adds the time, and
// performs the actions that follow. The sidecar and the simulator run the same driver. What differs
// between them (clock, goroutines, peers, engines, memory) is in the interfaces of Config.
//
// Invariants: one goroutine at a time enters the executor, and its actions are performed in its
// order. Every backend has a grant before its peer receives it. A grant's guard is revoked when its
// fence begins, and an origin's guard when its close begins.
//
// Goroutines: those of Config.Process. An event is handled in the goroutine that brings it.
package driver

import (
	"context"
	"log/slog"
	"sync"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/control/lease"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// Config is what a driver works with. All fields are required, except for Lock.
type Config struct {
	Exec     *exec.Exec
	Process  Process
	Peers    Peers
	Engines  Engines
	Memory   Memory
	Rails    Rails
	Observer Observer
	Log      *slog.Logger
	Grace    time.Duration // for one try of a fence or of an origin's close
	Lock     Lock          // excludes goroutines from the executor; nil: a sync.Mutex
}

// Lock excludes goroutines from the executor. *sync.Mutex is one.
type Lock interface {
	sync.Locker
	TryLock() bool
}

// Process is the clock and the goroutines of the driver's process.
type Process interface {
	// Now is the time since the process began. It is monotonic.
	Now() exec.Instant
	// Idle is called at the end of each round of actions, under the driver's lock: tick must be
	// called at next, or earlier. It does not call tick itself.
	Idle(next exec.Instant, tick func())
	// Fired is called under the driver's lock once tick has it: the call that Idle asked for is made.
	Fired()
	// Go runs work, which may block until its context ends, outside of the caller's event; then it
	// calls the event that work returns, if any.
	Go(work func(ctx context.Context) (event func()))
}

// Peers is the conversation with other sidecars. Its methods do not block.
type Peers interface {
	// PeerKey is PeerKey of transport.Host.
	PeerKey(boot transfer.Boot) (transport.Peer, bool)
	// Known reports whether the conversation with a peer goes on.
	Known(boot transfer.Boot) bool
	// Connect reaches a peer; the executor's PeerUp or ConnectFailed follows.
	Connect(endpoint string)
	// Send delivers frames in order; Unsent follows for a frame that cannot be queued.
	Send(to transfer.Boot, f *peerv1.ControlFrame)
	// Describe asks a peer for the layout of a geometry; Described follows.
	Describe(peer transfer.Boot, geometry [32]byte)
	// Compare finds the differences between two engines' caches; Compared follows.
	Compare(c exec.Comparison)
}

// Engines is the way back to the engines. Its methods do not block.
type Engines interface {
	// Complete performs an exec.Complete.
	Complete(a *exec.Action)
	// Forget drops what was kept for a worker without leases. The driver's lock is held.
	Forget(w *engines.Worker)
}

// Memory finds the memory of parts.
type Memory interface {
	// Receiver returns the memory that a part is received into.
	Receiver(l *exec.ReceivePart) transport.Memory
	// Sender returns the memory that a part is sent from.
	Sender(s *exec.SendPart) (transport.Memory, error)
	// Extend replaces the block tables of a part that is sent by longer ones.
	Extend(s *exec.SendPart, blocks [][]uint32) error
}

// Rails describes the local rails.
type Rails interface {
	// Rail returns a rail by its backend and name, or false.
	Rail(backend, name string) (transport.Rail, bool)
	// DeviceSlices reports whether lanes should use slices for GPU memory.
	DeviceSlices() bool
}

// Observer counts and records what happens. Lanes call it concurrently; it does not call the
// driver.
type Observer interface {
	LaneUp(l transport.Lane)
	// LaneRefused is a lane that the executor does not accept; it is closed.
	LaneRefused(l transport.Lane, err error)
	// LaneDown has lost set unless the lane was closed on purpose.
	LaneDown(l transport.Lane, lost bool)
	// Slice is the end of a slice of the given bytes.
	Slice(l transport.Lane, r *transport.Result, bytes uint64)
	FrameRefused(l transport.Lane, why transfer.Reason)
	// Landed counts bytes of chunks that were missing before; backend is the index of the transport.
	Landed(transport, rail string, backend int, bytes uint64)
	// Fenced is the end of a fence, before the executor receives it.
	Fenced(cause lease.Cause, took time.Duration)
	// Quarantined counts parts whose blocks are withheld, from the first failure of a fence or of a
	// close to its success.
	Quarantined(by int)
	// Sent is the end of a part that its receiver has committed. The source is still held.
	Sent(s *exec.SendPart)
}
