// Package transport is the contract between the executor, which decides the path of each slice, and
// the backends, which move bytes.
//
// The contract does not fix the side that moves. Only the source's executor assigns slices to
// lanes. A backend whose initiator is the destination (shared memory) turns Move into a request
// that the destination's side executes. A backend never decides routing, never retries, and never
// reports a success that the receiver has not proved.
//
// Ownership. A Grant belongs to the receiver, an Origin to the sender. Both are bound to a (peer,
// slot, generation) and end once, by Fence and by Close. A lane belongs to the backend. After
// Close, or when the lane dies, each slice that Move accepted still ends exactly once. No order is
// promised between slices or between lanes.
//
// Goroutines: backends own theirs and join them in Close. Callbacks on Host come from any of them,
// never under a lock of the backend that a Lane or Backend method takes, and must not block.
package transport

import (
	"context"
	"errors"
	"time"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/transfer"
)

// Initiator is the side whose sidecar touches both memories.
type Initiator uint8

// The initiators.
const (
	BySource Initiator = iota + 1
	ByDestination
)

// Evidence is the receiver's proof that bytes have landed.
type Evidence uint8

// The kinds of evidence.
const (
	EvidenceRead      Evidence = iota + 1 // its own CPU read or copied them
	EvidenceImmediate                     // an immediate on the same queue pair followed them
	EvidenceStream                        // its own stream was synchronized
)

// FenceScope is the range of work that a fence stops besides its own lease.
type FenceScope uint8

// The scopes of a fence.
const (
	FenceLease FenceScope = iota + 1
	FenceLane
	FencePeer
)

// Caps describes a backend. It is constant for the backend's life.
type Caps struct {
	Initiator    Initiator
	Evidence     Evidence
	Fence        FenceScope
	NeedsTokens  bool // Grant returns a token that the sender needs (remote keys, descriptors)
	SameHost     bool // only between processes of one kernel
	Device       bool // moves GPU memory without a copy in host memory
	Credits      int  // receives that the destination must post ahead; 0: none needed
	SliceBytes   int  // preferred slice size, a multiple of ChunkBytes; longer ones may be refused
	DeviceSlice  int  // the same for GPU memory; 0: SliceBytes
	ReportsAcked bool // every lane is a Meter
	// every writer of a grant's memory holds its guard: once the guard is revoked and empty, Fence
	// returns nil at once
	Guarded bool
}

// Rail is one local attachment of a backend: an address, a port, a socket in a directory.
type Rail struct {
	Name    string // stable within the process's life: "eth0", "lo", "shm"
	Address string // peers dial it; only the backend interprets it
	Gbps    float64
	MTU     int
	NUMA    int // -1: unknown
	Tier    int // distance, 1..3 (docs/glossary.md); 0: decided by the rail pair
}

// Peer is the other sidecar, as the control layer's handshake authenticated it.
type Peer struct {
	Boot transfer.Boot // of the peer's process
	Self transfer.Boot // of this one
	Key  [32]byte      // from the handshake; both ends prove when a lane opens that they hold it
}

// Memory finds the bytes of a transfer space in one side's memory. Lanes call it concurrently.
type Memory interface {
	// Resolve appends the memory of chunks r, in transfer-space order, to dst. It must not allocate
	// when dst has room. An error means that r is outside the space.
	Resolve(dst []mem.Block, r transfer.Range) ([]mem.Block, error)
	// Bytes is the length of chunks r; the payload of a frame must match it.
	Bytes(r transfer.Range) (uint64, error)
	// Device is the device that the memory lies on; nil: host memory. A backend whose CPU moves bytes
	// stages whole slices through a device's buffers instead of small pieces through its own.
	Device() mem.Device
}

// Grant binds the receiver's memory to (peer, slot, generation) in its backends. Backends that
// write with their own CPU write under a Claim, which holds the Guard. Not to be copied.
type Grant struct {
	Peer   transfer.Boot
	Slot   transfer.Slot
	Gen    transfer.Gen
	Memory Memory
	// Landed reports that bytes of r are visible in place and passed integrity, while the guard is
	// still held; fresh of the chunks were missing. Lanes call it concurrently. Duplicates are
	// harmless. It runs before the confirmation leaves for the sender.
	Landed  func(lane Lane, r transfer.Range, fresh uint32)
	Receipt Receipt // what has landed; Reset precedes the first Claim
	Guard
	claims claims
}

// Origin binds the sender's memory to (peer, slot, generation) in its backends.
type Origin struct {
	Peer   transfer.Boot
	Slot   transfer.Slot
	Gen    transfer.Gen
	Memory Memory
	Lease  transfer.LeaseID
	// Valid reports whether Lease still covered bytes that were read before this call. False is
	// final: the source of those bytes is invalidated. Lanes call it concurrently.
	Valid func(transfer.LeaseID) bool
	Token []byte // returned by the receiver's backend for the grant, if any
	Guard
}

// Slice is a range of consecutive chunks given to one lane in one attempt. The caller does not hold
// the origin's guard. The lane enters it around each read, so that Close of the origin waits for
// reads and not for the network.
type Slice struct {
	Origin *Origin
	Range  transfer.Range
	// 1, 2 ...: a later attempt takes chunks over from an earlier one; 0: a probe, which takes over
	// no chunks
	Attempt uint32
	Cookie  uint64 // the executor's; returned unchanged in Result
}

// Result ends one slice on the source's side, exactly once.
type Result struct {
	Slice
	Outcome transfer.Outcome
	Reason  transfer.Reason
	Err     error         // detail for logs; nil when Landed
	Took    time.Duration // from Move to the end
}

// Lane is one connection to one peer over one rail pair.
type Lane interface {
	ID() uint64 // unique in this process
	Peer() transfer.Boot
	Backend() string
	Local() string  // rail names
	Remote() string // the peer's name for it
	// Move accepts slices. It does not block and does not keep the slice header. The executor
	// bounds the slices in flight by MaxInFlight. An error means that nothing was accepted. Move
	// may call the origin's Memory and Valid before it returns (a small slice leaves at once), so the
	// caller holds no lock that these take. It never calls Host.
	Move(batch []Slice) error
	MaxInFlight() int // slices
	// Close ends the lane; its slices end NotLanded or InDoubt. Idempotent.
	Close() error
}

// Meter is a Lane that measures acknowledged bytes before a slice is confirmed. The executor uses
// it to judge a lane without confirmations: a chunk on a slow rail takes longer than the time after
// which a dead rail must be given up.
type Meter interface {
	Lane
	// Acked counts the bytes sent by this end that have reached the other host, of any slice. It
	// only grows, and takes a microsecond or two. Acknowledged bytes prove that the path works, and
	// nothing about a slice.
	Acked() uint64
}

// Timed is a Lane that measures the round-trip time of a small message on an idle path.
type Timed interface {
	Lane
	RTT() time.Duration // 0: unknown
}

// WakeHinter is a Lane whose peer is slow to wake up and accepts a wake-up hint.
type WakeHinter interface {
	Lane
	// WakeHint announces that awaited slices follow soon. It does not block; correctness does not
	// depend on it.
	WakeHint()
}

// Host is the interface that a backend calls. The executor's driver implements it.
type Host interface {
	// PeerKey returns the peer as authenticated by the handshake, or false; an unknown peer's lane
	// is refused.
	PeerKey(boot transfer.Boot) (Peer, bool)
	// Grant finds the live grant of a frame's slot, or returns nil and the reason.
	Grant(peer transfer.Boot, slot transfer.Slot, gen transfer.Gen) (*Grant, transfer.Reason)
	// Origin finds the live origin of a destination-initiated confirmation.
	Origin(peer transfer.Boot, slot transfer.Slot, gen transfer.Gen) (*Origin, transfer.Reason)
	LaneUp(Lane)
	LaneDown(Lane, error)
	// Done ends slices that Move accepted. The lane owns the slice of results and reuses it after
	// the call.
	Done(Lane, []Result)
	// Refused counts a discarded frame.
	Refused(Lane, transfer.Reason)
}

// Backend is one transport of this process.
type Backend interface {
	Name() string
	Caps() Caps
	// Open starts listening on every rail and returns the rails with their addresses. Called once.
	Open(ctx context.Context, host Host) ([]Rail, error)
	// Dial opens a lane. The peer's Host sees LaneUp for its end too. Blocks; honors ctx.
	Dial(ctx context.Context, peer Peer, local, remote Rail) (Lane, error)
	// Grant prepares the grant's memory for this backend's writers and returns the token that the
	// sender needs, if Caps.NeedsTokens is set.
	Grant(g *Grant) (token []byte, err error)
	// Fence returns once no byte can be written to the grant's memory through this backend any
	// more, whatever its peer and lanes do. The guard is already revoked; local receivers only wait
	// for it. Idempotent.
	Fence(ctx context.Context, g *Grant) error
	// CloseOrigin returns once this backend, and with a destination initiator also the peer, no
	// longer reads the origin's memory. The guard is already revoked. Idempotent.
	CloseOrigin(ctx context.Context, o *Origin) error
	Close() error
}

// ErrNotSupported is wrapped by Open and Dial if the host cannot support the backend; the text has
// reason and remedy.
var ErrNotSupported = errors.New("not supported")

// Registry holds the backends of one process, in order of preference. Main fills it; there is no
// init.
type Registry []Backend

// Get returns the backend of that name.
func (r Registry) Get(name string) (Backend, bool) {
	for _, b := range r {
		if b.Name() == name {
			return b, true
		}
	}
	return nil, false
}
