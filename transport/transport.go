// Package transport is the contract between the executor, which decides what goes where, and the backends, which move bytes.
//
// The contract is neutral about who moves. The source's executor alone assigns slices to lanes; a backend whose initiator is
// the destination (shared memory) turns Move into a request that the destination's side obeys. A backend never decides
// routing, never retries, never reports success that the receiver has not proved.
//
// Ownership. A Grant belongs to the receiver, an Origin to the sender; both are bound to a (peer, slot, generation) and end
// once, by Fence and by Close. A lane belongs to the backend; after Close, or when it dies, each slice that Move accepted
// still ends exactly once. No order is promised between slices, nor between lanes.
//
// Goroutines: backends own theirs and join them in Close. Callbacks on Host come from any of them, never under a lock of the
// backend that a Lane or Backend method takes, and must not block.
package transport

import (
	"context"
	"errors"
	"time"

	"github.com/kvspray/kvspray/internal/mem"
	"github.com/kvspray/kvspray/transfer"
)

// Initiator says which side's sidecar touches both memories.
type Initiator uint8

// Who initiates.
const (
	BySource Initiator = iota + 1
	ByDestination
)

// Evidence says how the receiver knows that bytes have landed.
type Evidence uint8

// The kinds of evidence.
const (
	EvidenceRead      Evidence = iota + 1 // its own CPU read or copied them
	EvidenceImmediate                     // an immediate on the same queue pair followed them
	EvidenceStream                        // its own stream was synchronised
)

// FenceScope says what a fence stops besides the lease it is meant for.
type FenceScope uint8

// The scopes of a fence.
const (
	FenceLease FenceScope = iota + 1
	FenceLane
	FencePeer
)

// Caps describes a backend. Constant for its life.
type Caps struct {
	Initiator   Initiator
	Evidence    Evidence
	Fence       FenceScope
	NeedsTokens bool // Grant returns a token that the sender needs (remote keys, descriptors)
	SameHost    bool // only between processes of one kernel
	Device      bool // moves memory of GPUs without a stop in host memory
	Credits     int  // receives that the destination must post ahead; 0: none needed
	SliceBytes  int  // the slice size that suits it; a multiple of transfer.ChunkBytes
	DeviceSlice int  // the same where memory of GPUs is moved; 0: SliceBytes
	Tells       bool // every lane is a Meter
	Guarded     bool // whoever writes to a grant's memory holds its guard: where that is revoked and empty, Fence returns nil at once
}

// Rail is one local attachment of a backend: an address, a port, a socket in a folder.
type Rail struct {
	Name    string // stable within the process's life: "eth0", "lo", "shm"
	Address string // what a peer dials; opaque to everybody but the backend
	Gbps    float64
	MTU     int
	NUMA    int // -1: unknown
	Tier    int // 1..3, DESIGN section 5; 0: decided by the pair
}

// Peer is the other sidecar, as the control layer's handshake authenticated it.
type Peer struct {
	Boot transfer.Boot // of the peer's process
	Self transfer.Boot // of this one
	Key  [32]byte      // both ends prove that they hold it when a lane opens; from the handshake
}

// Sink is the receiving end of one grant. The executor's side implements it; Resolve and Landed are called from lanes
// concurrently.
type Sink interface {
	// Resolve appends the memory of chunks r, in transfer-space order, to dst. It must not allocate when dst has room.
	// An error means that r is outside the grant.
	Resolve(dst []mem.Block, r transfer.Range) ([]mem.Block, error)
	// Bytes is the length of chunks r; the payload of a frame must match it.
	Bytes(r transfer.Range) (uint64, error)
	// Landed reports bytes of r visible in place, with integrity met, while the guard of the grant is still held.
	// Duplicates are harmless. It runs before the confirmation leaves for the sender.
	Landed(lane Lane, r transfer.Range)
}

// Grant binds a Sink to (peer, slot, generation) in the backends of the receiver. Backends that write with their own CPU
// write under a Claim, which holds the Guard. Not to be copied.
type Grant struct {
	Peer transfer.Boot
	Slot transfer.Slot
	Gen  transfer.Gen
	Sink Sink
	Guard
	claims claims
}

// Source is the sending end: what a lane reads. Implemented by the executor's side.
type Source interface {
	Resolve(dst []mem.Block, r transfer.Range) ([]mem.Block, error)
	Bytes(r transfer.Range) (uint64, error)
	// Valid reports whether bytes of r read before this call were still what the lease promised. A false is final for
	// those bytes: they are disowned.
	Valid(r transfer.Range) bool
}

// OnDevice is implemented by a Sink or a Source whose memory may lie on a device. A backend whose CPU moves bytes then stages whole
// slices through the buffers that the device lends, instead of small pieces through its own.
type OnDevice interface {
	Device() mem.Device // nil: host memory
}

// DeviceOf returns the device of a Sink or a Source; nil for host memory.
func DeviceOf(end any) mem.Device {
	if d, ok := end.(OnDevice); ok {
		return d.Device()
	}
	return nil
}

// Origin binds a Source to (peer, slot, generation) in the backends of the sender.
type Origin struct {
	Peer   transfer.Boot
	Slot   transfer.Slot
	Gen    transfer.Gen
	Source Source
	Token  []byte // what the receiver's backend returned for the grant, if it returned one
	Guard
}

// Slice is a run of consecutive chunks given to one lane in one attempt. The origin's guard is not held by the caller; the
// lane enters it around each read, so that Close of the origin waits for reads and not for the wire.
type Slice struct {
	Origin  *Origin
	Range   transfer.Range
	Attempt uint32 // 1, 2 ...: a later one takes chunks over from an earlier one; 0: a probe, which takes them from nobody
	Cookie  uint64 // the executor's; returned in Result untouched
}

// Result ends one slice on the source's side, exactly once.
type Result struct {
	Slice
	Outcome transfer.Outcome
	Reason  transfer.Reason
	Err     error         // detail for logs; nil when Landed
	Took    time.Duration // from Move to the end
}

// Lane is one path to one peer over one pair of rails.
type Lane interface {
	ID() uint64 // unique in this process
	Peer() transfer.Boot
	Backend() string
	Local() string  // rail names
	Remote() string // as the peer calls it
	// Move hands over slices. It does not block and does not keep the slice header; the executor bounds what is in
	// flight by MaxInFlight. An error means that nothing was taken. It may call the Source before it returns (a small
	// slice leaves at once), so the caller holds no lock that the Source takes; it never calls Host.
	Move(batch []Slice) error
	MaxInFlight() int // slices
	// Close ends the lane; what it held ends NotLanded or InDoubt. Idempotent.
	Close() error
}

// Meter is a Lane that knows how far its bytes came before a slice is confirmed. Silence is judged by it: a chunk takes longer on a slow
// rail than anybody should wait for a dead one.
type Meter interface {
	Lane
	// Received is how many bytes that this end sent have reached the other host, of whatever slice. It only grows, and takes a
	// microsecond or two. That a byte was received says that the path works, and nothing about a slice.
	Received() uint64
}

// Timed is a Lane that knows how long a small message takes there and back while nothing else is on the way.
type Timed interface {
	Lane
	Way() time.Duration // 0: unknown
}

// Rouser is a Lane whose peer is slow to wake up, and can be told before.
type Rouser interface {
	Lane
	// Rouse says that slices follow soon, each of them waited for. It does not block; nothing depends on it.
	Rouse()
}

// Host is what a backend calls. The executor's driver implements it.
type Host interface {
	// PeerKey returns the peer as authenticated by the handshake, or false: an unknown peer's lane is refused.
	PeerKey(boot transfer.Boot) (Peer, bool)
	// Grant finds the live grant that a frame names. nil and the reason if there is none.
	Grant(peer transfer.Boot, slot transfer.Slot, gen transfer.Gen) (*Grant, transfer.Reason)
	// Origin finds the live origin that a destination-initiated confirmation names.
	Origin(peer transfer.Boot, slot transfer.Slot, gen transfer.Gen) (*Origin, transfer.Reason)
	LaneUp(Lane)
	LaneDown(Lane, error)
	// Done ends slices that Move took. The slice of results is the lane's and reused after the call.
	Done(Lane, []Result)
	// Refused counts a frame that was scrapped.
	Refused(Lane, transfer.Reason)
}

// Backend is one transport of this process.
type Backend interface {
	Name() string
	Caps() Caps
	// Open starts listening on every rail and returns them with their addresses filled in. Called once.
	Open(ctx context.Context, host Host) ([]Rail, error)
	// Dial opens a lane. The peer's Host sees LaneUp for its end too. Blocks; honours ctx.
	Dial(ctx context.Context, peer Peer, local, remote Rail) (Lane, error)
	// Grant prepares the grant's memory for writers of this backend and returns the token that the sender needs, if
	// the Caps say so.
	Grant(g *Grant) (token []byte, err error)
	// Fence returns once no byte can be written to the grant's memory through this backend any more, whatever its peer
	// and lanes do. The guard was revoked before; receivers that are local need only wait for it. Idempotent.
	Fence(ctx context.Context, g *Grant) error
	// CloseOrigin returns once this backend, and where the destination initiates the peer too, reads the origin's
	// memory no more. The guard was revoked before. Idempotent.
	CloseOrigin(ctx context.Context, o *Origin) error
	Close() error
}

// ErrNotSupported is wrapped by Open and Dial when the host cannot do it at all; its text gives the reason and the remedy.
var ErrNotSupported = errors.New("not supported")

// Registry holds the backends of one process, in order of preference. Filled by main, no init.
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
