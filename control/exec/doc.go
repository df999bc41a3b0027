// Package exec is the executor, the state machine of all transfers of one process. It matches
// intents with grants, releases chunks as layers become complete, commits, fences, expires and
// completes. Package spray chooses the lane of each slice and retries failed ones.
//
// It has no goroutine, clock, I/O or lock. Events are method calls with `now`; Drain returns the
// resulting actions in the order in which the driver must perform them. The driver serializes the
// calls. Moving a slice allocates nothing in steady state.
//
// Each part of an Exec owns its state: see the type's fields for the parts and their order.
//
// Invariants:
//   - each lease completes exactly once, by lease.MayRelease;
//   - a commit needs a full bitmap, both leases, and the fence;
//   - a destination lease is granted in parts, one for each rank of the source's engine that sends
//     something; together they are all missing bytes, and the commit needs every part;
//   - slices name only bound origins; nothing counts after an origin's guard is revoked;
//   - every lease has a deadline, every wait ends by it, and then only a fence starts;
//   - all tables are bounded (package lease and Limits).
package exec

import (
	"fmt"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/lease"
	"github.com/kvspray/kvspray/control/spray"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// Instant is a point in time: the duration since the driver's start.
type Instant = lease.Instant

// Plan is the transfer space of one part of a grant. Both sides compute it: a segment for each
// layer of the receiver. Immutable.
type Plan interface {
	Space() *transfer.Space
	// Ready returns the front of a segment that may be sent once its layers of the source hold tokens
	// [0, tokens); final: no later step writes to them. The result only grows.
	Ready(segment int, tokens uint32, final bool) transfer.Range
	// Feeds lists the segments that a layer of the source contributes to, From the layers of the
	// source that contribute to a segment.
	Feeds(layer int) []int
	From(segment int) []int
	// Digest is equal on two sides where every byte has the same place in the transfer space.
	Digest() [32]byte
}

// Rank is a rank of a peer's engine: its name there, and the geometry of its cache.
type Rank struct {
	Name     string
	Geometry [32]byte
}

// Part is what one rank of a peer's engine sends for a destination lease. Plan is nil if the rank
// sends nothing.
type Part struct {
	Rank
	Share []uint32 // as it travels; empty: all that both have
	Plan  Plan
	// bytes of the receiver's blocks outside its attention window, which the rank has dropped
	Lacks uint64
}

// Planner makes plans. Implemented by the driver over parseblock.
type Planner interface {
	// Version counts the changes to how plans order bytes, of all that this planner makes. From 1.
	Version() uint32
	// Receive plans all that the engine of w wants.
	Receive(w *engines.Worker, x *engines.Expect) (Plan, error)
	// Divide plans the same from the ranks of another engine, each byte from exactly one of them; load
	// is the bytes that a rank owes. The result has a part for every rank. If a layout is unknown, the
	// error is an *UnknownLayout.
	Divide(w *engines.Worker, x *engines.Expect, ranks []Rank, load func(rank string) uint64) (
		[]Part, error)
	// Send plans a part of a grant, and checks that the layout of w can serve it. The error may be an
	// *UnknownLayout.
	Send(w *engines.Worker, g *peerv1.Grant, part *peerv1.Part) (Plan, error)
}

// UnknownLayout asks for layouts of a peer. A Describe follows for each geometry, and then the
// same call again.
type UnknownLayout struct{ Geometries [][32]byte }

func (u *UnknownLayout) Error() string {
	return fmt.Sprintf("%d layouts of the peer are not known yet", len(u.Geometries))
}

// Config is constant for the life of an executor.
type Config struct {
	Boot       transfer.Boot // of this process
	Endpoint   string        // that peers dial; an engine that names it means ourselves
	Planner    Planner
	Transports []string // preferred first; others come last
	Policy     spray.Policy
	// Distance is how far one of our rails is from the memory of a worker: 1 to 3, as in package topo;
	// 0: unknown. Nil: all are unknown.
	Distance func(w *engines.Worker, transport, rail string) int

	// Zero values take the defaults below.
	Deadline     time.Duration // of a lease that names none, and the longest
	MatchTimeout time.Duration // for a partner to come
	Grace        time.Duration // between tries of a fence that failed
	MaxAttempts  int           // failures of one chunk
	MaxRegrants  int           // of one destination lease
	MaxSlices    int           // in flight, over all lanes of one peer
	MaxSlots     int           // parts of grants open towards one peer
	// grants, parts of them and questions of one peer that wait for an intent
	MaxPending   int
	MaxDest      int
	MaxSource    int
	TombstoneAge time.Duration
	// how long after a served key another grant for it still waits (a list of equal prompts)
	TombstoneGrace time.Duration
}

// Defaults of Config.
const (
	DefaultDeadline       = 30 * time.Second
	DefaultMatchTimeout   = 10 * time.Second
	DefaultGrace          = 5 * time.Second
	DefaultMaxAttempts    = 8
	DefaultMaxRegrants    = 16
	DefaultMaxSlices      = 256
	DefaultMaxPending     = 4096
	DefaultTombstoneGrace = 2 * time.Second
	MaxDeadline           = 10 * time.Minute
	// tries at an address without a listener: 2 s, enough for a sidecar to restart.
	maxRefused = 10
	// between tries to reach a peer that a lease waits for.
	connectRetry  = 200 * time.Millisecond
	revokeWait    = time.Second // for the engine's record of an invalidated source
	MaxParts      = 256         // ranks of an engine, and so parts of a grant
	maxRankBytes  = 64          // of a rank's name
	maxDescribing = 1024        // layouts asked for at a time
)

func (c Config) withDefaults() Config {
	dur := func(v *time.Duration, d time.Duration) {
		if *v <= 0 {
			*v = d
		}
	}
	num := func(v *int, d int) {
		if *v <= 0 {
			*v = d
		}
	}
	dur(&c.Deadline, DefaultDeadline)
	dur(&c.MatchTimeout, DefaultMatchTimeout)
	dur(&c.Grace, DefaultGrace)
	dur(&c.TombstoneAge, lease.TombstoneAge)
	dur(&c.TombstoneGrace, DefaultTombstoneGrace)
	num(&c.MaxAttempts, DefaultMaxAttempts)
	num(&c.MaxRegrants, DefaultMaxRegrants)
	num(&c.MaxSlices, DefaultMaxSlices)
	num(&c.MaxSlots, lease.MaxSlotsPerPeer)
	num(&c.MaxPending, DefaultMaxPending)
	num(&c.MaxDest, lease.MaxDest)
	num(&c.MaxSource, lease.MaxSource)
	return c
}

// Kind is what an Action asks for.
type Kind uint8

// The actions. The driver starts what may block and reports its end as an event; it does the rest
// before the next action.
const (
	// Connect reaches Endpoint; PeerUp or ConnectFailed follows.
	Connect Kind = iota + 1
	// Send puts Frame on the control lanes to Peer.
	Send
	// Offer makes the grants of ReceiveParts live (Sink, Host.Grant, backends), fills the tokens into
	// their parts and sends Frame to Peer.
	Offer
	// Fence revokes the guard of ReceivePart at once, then fences it in every backend; FenceDone
	// follows.
	Fence
	// Forget drops ReceivePart from what Host.Grant finds.
	Forget
	// Follow starts (On) or ends the observation of Worker's layers: something is sent from its
	// memory.
	Follow
	// Bind makes SendPart's origin live with its blocks as they are now.
	Bind
	// Update gives SendPart's origin the block table Blocks.
	Update
	// CloseOrigin revokes the guard of SendPart at once, then closes it in every backend; OriginClosed
	// follows.
	CloseOrigin
	// Move hands Slices to lane Lane. Where that fails the slices come back through Results.
	Move
	// WakeHint announces slices to the peer of Lane, a transport.WakeHinter.
	WakeHint
	// Ask reads how many bytes of Lane the other host has received; Moved follows if there are more.
	Ask
	// Measure reads what came over each rail from each peer since the last one; Measured follows.
	Measure
	// LogViolation logs Text, once for each peer and kind of Violation.
	LogViolation
	// Complete ends a lease towards the engine of Worker; ReceiveParts are those of its last grant.
	Complete
	// Describe asks Peer for the layout behind Geometry; Described follows.
	Describe
	// Compare finds out in what the caches of Comparison differ; Compared follows.
	Compare
	// Answer answers the Await of that Token.
	Answer
	// WorkerFenced reports that Worker has no lease left.
	WorkerFenced
)

// Action is something that the driver must do. Which fields are set depends on Kind.
type Action struct {
	Kind         Kind
	Peer         transfer.Boot
	Endpoint     string
	Frame        *peerv1.ControlFrame
	ReceivePart  *ReceivePart
	ReceiveParts []*ReceivePart
	Geometry     [32]byte
	Comparison   Comparison
	SendPart     *SendPart
	Blocks       [][]uint32
	Cause        Cause // Fence: why
	Committed    bool  // CloseOrigin: the receiver committed what was sent
	Lane         uint64
	Slices       []transport.Slice // valid until the next Drain into the same Batch
	Worker       *engines.Worker
	On           bool // Follow
	Completion   engines.Completion
	Trace        *Trace // Complete: set for leases that got as far as a partner
	Text         string // LogViolation
	Await        uint64
	Admission    engines.Admission

	first, count int // of Slices in the batch, until Drain
}

// Cause is the reason of a fence.
type Cause uint8

// The causes.
const (
	ByCommit Cause = iota + 1
	ByCancel
	ByDeadline
	ByRefusal    // the source's sidecar will not serve the grant
	BySourceLost // preempted, aborted, or its engine is dead
	ByPeerLost   // the source's sidecar is dead, or could not be reached until the time was over
	ByEngineGone // the receiver's
	ByDrain
)

// causeOf is the cause of a fence where only the status is known.
func causeOf(status uint16) Cause {
	switch status {
	case engines.StatusOK:
		return ByCommit
	case engines.StatusCancelled:
		return ByCancel
	case engines.StatusExpired:
		return ByDeadline
	case engines.StatusRefused:
		return ByRefusal
	}
	return BySourceLost
}

// Batch carries actions out of the executor; its memory is reused.
type Batch struct {
	Actions []Action
	slices  []transport.Slice
}

// Trace describes a finished transfer, for one line of the log.
type Trace struct {
	Key         transfer.Key
	Req         string
	Source      transfer.LeaseID
	Dest        transfer.LeaseID
	Peer        transfer.Boot
	Slot        transfer.Slot
	Gen         transfer.Gen
	Queue       time.Duration // from the engine's request to the match
	Wire        time.Duration // from there to the full bitmap
	Commit      time.Duration // from there to the fence's end
	Grants      int
	Parts       int              // destination: ranks that gave something
	Flag        time.Duration    // source: from the last flag to the commit
	BytesBefore uint64           // source: bytes that were sent before the final step's flag
	Moved       [maxRanks]uint64 // source: bytes confirmed, by index in Config.Transports
}

// ReceivePart is one part of a grant on the receiver: one (peer, slot, generation) of a
// destination lease.
type ReceivePart struct {
	Grant  transport.Grant // Sink is the driver's
	Worker *engines.Worker
	Expect *engines.Expect
	Plan   Plan
	Part   *peerv1.Part // as it is offered; what backends add goes into it

	offer  *outboundGrant
	source transfer.LeaseID // that gives it
	bound  bool
	full   bool
	fenced bool
}

// Lease names the destination lease of the part.
func (l *ReceivePart) Lease() transfer.LeaseID { return l.Expect.Lease }

// SendPart is one part of a grant on the sender: a source lease serves it through one origin.
type SendPart struct {
	Origin transport.Origin // Source is the driver's
	Worker *engines.Worker
	Lease  transfer.LeaseID // source, at the epoch that the bytes are read under; set by Bind
	Dest   transfer.LeaseID
	Key    transfer.Key
	Prompt uint32            // its tokens
	Skip   []uint32          // per block table: tokens that the receiver had
	Tokens map[string][]byte // per transport, as the receiver's backends made them
	Plan   Plan
	// as of Bind, which may be before the step that has all of them: Update follows; never changed in
	// place
	Blocks [][]uint32

	sendPartState
}

// LaneInfo describes a lane that came up.
type LaneInfo struct {
	ID           uint64
	Peer         transfer.Boot
	Backend      string
	Local        string // rails
	Remote       string
	Tier         int     // 1 to 3; 0: unknown
	Gbps         float64 // what the link claims; 0: unknown
	SliceBytes   int
	MaxInFlight  int           // slices
	RTT          time.Duration // the round trip when it came up; 0: unknown
	Apart        bool          // other peers' lanes over its local rail are not in its way
	ReportsAcked bool          // a transport.Meter: it may be asked what has been received
	WakeHints    bool          // a transport.WakeHinter
}
