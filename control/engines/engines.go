// Package engines has the values that engines and the control layer exchange: workers, their
// memory, the leases that they open, and how these end. Package connector turns messages of engines
// into them; control/exec and control/driver work with them, and import no code of the engine side.
package engines

import (
	"sync/atomic"
	"time"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/parseblock"
	"github.com/kvspray/kvspray/transfer"
)

// Priority orders work that waits for the network.
type Priority uint8

// The priorities, most urgent first.
const (
	DecodeWaits Priority = iota
	LayerStream
	Background
)

// Worker is one registered engine worker, alive until WorkerGone.
type Worker struct {
	Boot        transfer.Boot
	Name        string // "vllm/<engine id>/tp0" for logs
	Place       Place
	Engine      About
	Layout      *layout.Layout
	Fingerprint [32]byte
	Geometry    [32]byte
	// of the layout with itself, for plans between engines of equal geometry
	Own     *parseblock.Match
	Regions []*mem.Region // index = layout.Layer.Region
	// SourceValid reports whether the engine still guaranteed the blocks of a source lease, at the
	// epoch in the id, at the time of the call. It compares the board's source epoch with the epoch
	// of the last drained record, and drains the ring first if they differ. Safe from any
	// goroutine; a load and a compare if nothing changed.
	SourceValid func(transfer.LeaseID) bool
	Session     Session
	// Internal: the worker is the sidecar's own, for its page store, and no engine's. Its layout and
	// its only rank are the same at all peers, whatever engines these serve.
	Internal bool
	// Leases counts those that are open, of all kinds.
	Leases atomic.Int64
}

// About is what an engine has announced of itself, for routers.
type About struct {
	Version string
	API     string // URL of its API server; empty: unknown
	Role    string // prefill, decode or both; empty: unknown
	Events  string // endpoint of its KV events, whose host may be "*"; empty: none
	Replay  string // of their replay; empty: none
}

// Session is what package connector has behind a Worker.
type Session interface {
	// Follow sets whether a source lease of the worker is matched with a receiver. If so, the worker's
	// layers are checked one by one.
	Follow(matched bool)
	// HeldOn reports that a source lease is still held, because an engine that lives waits for it.
	HeldOn(lease uint64)
}

// Intent is a source lease: blocks that hold, or will hold, a prompt's KV.
type Intent struct {
	Lease    transfer.LeaseID
	Key      transfer.Key
	Tokens   uint32
	Fanout   int
	Blocks   [][]uint32 // per block table; grows with Progress
	Held     bool
	Priority Priority
	Deadline time.Duration // time that is left
	Attempt  uint32
	Req      string // for traces
	Trace    Trace
}

// Trace places a lease in the distributed trace of its request. The control layer passes it on and
// does not read it.
type Trace struct {
	Parent string // W3C traceparent that came with the request; empty: none, or a malformed one
	// traceparent of the lease's own span, which is the parent of those at the peer; empty: this
	// sidecar records no span
	Own string
	// of an Expect: when the scheduler's admission query came, and its answer; 0: there was none
	Asked, Admitted time.Duration
}

// MaxTraceparent bounds a traceparent, in bytes. Version 00 has 55.
const MaxTraceparent = 64

// ForPeer is the traceparent for the peer's spans; empty: none.
func (t *Trace) ForPeer() string {
	if t.Own != "" {
		return t.Own
	}
	return t.Parent
}

// Expect is a destination lease: blocks that are to receive a prompt's KV.
type Expect struct {
	Lease        transfer.LeaseID
	Key          transfer.Key
	Peer         string // endpoint of the source's sidecar
	Tokens       uint32
	Skip         []uint32 // per block table
	Blocks       [][]uint32
	Priority     Priority
	Deadline     time.Duration
	MatchTimeout time.Duration
	Stall        time.Duration // longest wait without a byte or a sign of life; 0: the deadline's
	Req          string
	Trace        Trace
}

// Progress reports that layer Layer (index into the flattened layers of the layout, all groups in
// order) of a source lease holds tokens [0, Tokens). Final: no later step will write a block of it.
type Progress struct {
	Lease  transfer.LeaseID
	Layer  int
	Tokens uint32
	Final  bool
	Blocks [][]uint32 // the table as of that step; nil if unchanged
}

// Await is an admission query of a scheduler: has the prefill admitted a request?
type Await struct {
	Token   uint64 // no other query has its number
	Session uint64 // of the scheduler; no other session has its number
	Engine  string // of the scheduler, as in Place
	Key     transfer.Key
	Peer    string
	Tokens  uint32
	TTL     time.Duration
	Reply   func(Admission) // takes the answer, once, from any goroutine
}

// Decline is a scheduler's message that ranks of its engine will not expect a prompt's KV.
type Decline struct {
	Boot   transfer.Boot // of the scheduler; identifies the message together with ID
	ID     uint64
	Engine string // as in Place
	World  int    // ranks of the engine
	Key    transfer.Key
	Peer   string
	Reason string
	Req    string   // as in Expect; empty: of no request that has an Expect
	Ranks  []uint32 // those of the engine that decline; empty: all
}

// Admission answers an Await.
type Admission struct {
	State   string // "admitted", "refused", "gone"
	Tokens  uint32
	Message string
}

// Completion ends one lease towards the shim.
type Completion struct {
	Lease     transfer.LeaseID
	Received  bool   // RECEIVED, else SENT
	Status    uint16 // enum kvs_status
	Bytes     uint64
	Took      time.Duration
	Transport string
	Reason    string
	Grants    int
	Recompute [][2]uint32 // token ranges
	// of a lease for pages of the store: a connector.PageResult for each page
	Pages []byte
	// of a batch that failed: bit i%8 of byte i/8 is set if entry i has arrived
	Entries []byte
}

// Status of a Completion: enum kvs_status of the board.
const (
	StatusOK        uint16 = 0
	StatusFailed    uint16 = 1
	StatusCancelled uint16 = 2
	StatusExpired   uint16 = 3
	StatusRefused   uint16 = 4
)
