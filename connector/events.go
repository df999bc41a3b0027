// Package connector is the sidecar's engine side: the unix socket, sessions, the registration of
// regions and layouts, the boards and the goroutines that watch them, step tracking, and
// completions to the shim.
//
// It turns messages of engines into Events for the control layer and accepts Completions from it.
// It never touches a transport.
//
// Invariants: a block id that reaches Events is inside its cache group. A lease ends once, by a
// Completion or with its worker. A lease's epoch is never used again in this process. A worker's
// memory stays mapped until WorkerGone's fenced was called. An end of file on a socket ends
// nothing. A faulty engine harms only its own session.
//
// Goroutines: see Server. While a step is open the watcher sleeps on its thread without giving its
// P away, so Listen raises GOMAXPROCS by one, once per process.
package connector

import (
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

// Worker is one registered engine worker, alive until Events.WorkerGone.
type Worker struct {
	Boot        transfer.Boot
	Name        string // "vllm/<engine id>/tp0" for logs
	Place       Place
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

	state *worker
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
}

// Expect is a destination lease: blocks that are to receive a prompt's KV.
type Expect struct {
	Lease    transfer.LeaseID
	Key      transfer.Key
	Peer     string // endpoint of the source's sidecar
	Tokens   uint32
	Skip     []uint32 // per block table
	Blocks   [][]uint32
	Priority Priority
	Deadline time.Duration
	Partner  time.Duration
	Req      string
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

// Await is a scheduler's question whether the prefill has admitted a request.
type Await struct {
	Token  uint64 // answer with it
	Engine string // of the scheduler, as in Place
	Key    transfer.Key
	Peer   string
	Tokens uint32
	TTL    time.Duration
}

// Decline is a scheduler's message that no rank of its engine will expect a prompt's KV.
type Decline struct {
	Boot   transfer.Boot // of the scheduler; identifies the message together with ID
	ID     uint64
	Engine string // as in Place
	World  int    // ranks of the engine
	Key    transfer.Key
	Peer   string
	Reason string
}

// Events is the control layer's interface. Calls for one worker come in the order of its ring, from
// one goroutine at a time, and must not block. An Expect or a Copy with a stream mark comes later,
// once the engine's stream has passed it.
type Events interface {
	WorkerUp(*Worker)
	// WorkerGone: its exit is proved, or a new session of the same engine took over. Every lease of
	// it must be fenced before fenced is called; its memory stays mapped until then.
	WorkerGone(w *Worker, why error, fenced func())
	Intent(*Worker, Intent)
	Progress(*Worker, []Progress)
	// Announced: a step of these source leases is about to run, and reports of its layers follow.
	// Their epochs are those that its Progress will carry.
	Announced(*Worker, []transfer.LeaseID)
	Expect(*Worker, Expect)
	// Copy opens a lease that ends like an Expect.
	Copy(*Worker, Copy)
	Cancel(w *Worker, lease uint64, reason string)
	// Preempt: the blocks of a source lease are lost; the lease stays open. Its next Progress
	// carries the new epoch.
	Preempt(w *Worker, lease uint64)
	Hold(w *Worker, lease uint64)
	// Await's answer goes to reply, once, from any goroutine.
	Await(a Await, reply func(Admission))
	Decline(d Decline)
	// Turn returns once the control layer has made progress, which proves that it does not hang.
	Turn()
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
	Pages     []byte      // of a Pages lease: a PageResult for each page
}
