package connector

import (
	"log/slog"
	"time"

	"github.com/kvspray/kvspray/internal/board"
	"github.com/kvspray/kvspray/internal/mem"
	"github.com/kvspray/kvspray/parseblock"
	"github.com/kvspray/kvspray/transfer"
)

// Defaults and bounds of a Server.
const (
	DefaultMaxSessions = 64
	DefaultMaxLeases   = 4096     // open leases of one worker
	DefaultMaxRegions  = 1024     // regions of one worker
	DefaultMaxAwaits   = 4096     // unanswered AWAITs of one scheduler
	DefaultMaxBlockIDs = 16 << 20 // block ids that one worker's open leases may name together
	DefaultMaxCopies   = 64       // open copies of one worker
	DefaultFenceWait   = 5 * time.Second
	DefaultDeadline    = 30 * time.Second
	DefaultPartner     = 10 * time.Second
	DefaultGrace       = 5 * time.Second

	maxDeadline    = time.Hour        // of a lease or an AWAIT; longer wishes are cut
	helloTimeout   = 10 * time.Second // a connection that says nothing gives its place back
	writeTimeout   = 5 * time.Second  // of one packet to a shim that does not read
	detachedWarn   = 30 * time.Second // a worker without socket that lives on is logged
	maxOutbox      = 1024             // packets that wait for a shim to read
	maxComplaints  = 16               // ERROR messages about records, per session
	maxBadPackets  = 64               // per session; then it ends
	drainBatch     = 256              // records between two deliveries
	maxUndelivered = 4096             // events that SourceValid may leave for the ring's goroutine
	retryFirst     = 2 * time.Millisecond
	retryLast      = 100 * time.Millisecond // between looks at a full completion ring
	statsPeriod    = time.Second
)

// Limits bounds what engines can make a Server hold. A zero field takes its default.
type Limits struct {
	Sessions int // sockets open at once
	Leases   int // open leases of one worker
	Copies   int // of these, copies
	Regions  int // regions of one worker
	Awaits   int // unanswered AWAITs of one scheduler session
	BlockIDs int // block ids in the tables of one worker's open leases
}

func (l Limits) withDefaults() Limits {
	set := func(v *int, d int) {
		if *v <= 0 {
			*v = d
		}
	}
	set(&l.Sessions, DefaultMaxSessions)
	set(&l.Leases, DefaultMaxLeases)
	set(&l.Copies, DefaultMaxCopies)
	set(&l.Regions, DefaultMaxRegions)
	set(&l.Awaits, DefaultMaxAwaits)
	set(&l.BlockIDs, DefaultMaxBlockIDs)
	return l
}

// Hooks are called for metrics, from any goroutine; nil ones are skipped. They must not block.
type Hooks struct {
	Session   func(role string, delta int) // sockets opened (+1) and closed (-1)
	Leases    func(source bool, delta int) // open leases
	Record    func(kind string)            // records accepted: "step", "intent", ...
	Malformed func(kind string)            // records and packets refused
	Ignored   func(kind string)            // records for a lease that is unknown or complete: a race, no error
}

// Options configures a Server.
type Options struct {
	Socket   string        // path of the unix socket; its folder is made 0700 where it does not exist
	Boot     transfer.Boot // of this sidecar
	Node     string
	HostBoot string        // kernel boot id; read from /proc when empty
	Endpoint func() string // "host:port" that peers dial; called for each WELCOME
	Events   Events
	Log      *slog.Logger
	Limits   Limits
	Hooks    Hooks
	// AllowUIDs are users besides our own whose processes may connect. Mode 0600 keeps them out of the socket itself unless
	// the folder and the socket are shared on purpose (SocketMode).
	AllowUIDs  []uint32
	SocketMode uint32 // 0: 0600
	Features   []string
	// Told to shims in WELCOME. Zero: 30 s, 10 s, 5 s.
	Deadline, Partner, Grace time.Duration
	// FenceWait bounds how long a takeover waits for the older session's leases to be fenced before it is told to retry.
	// Zero: a quarter of Grace, DefaultFenceWait at most.
	FenceWait time.Duration
	// Layouts knows the strategies that layouts may name. nil: parseblock.Default().
	Layouts *parseblock.Registry
	// Devices imports memory of GPUs. nil: such regions are refused.
	Devices Devices
	// Engines has work for engines on their own GPUs. nil: they are not asked.
	Engines Engines
}

// Devices makes regions of GPU memory that engines lend.
type Devices interface {
	// Import takes the handle that the engine's shim made, and the descriptor that goes with it or -1. On success the region owns fd.
	Import(id mem.ID, handle []byte, fd int, size uint64) (*mem.Region, error)
}

// Engines uses what engines do for the sidecar in their own GPU contexts.
type Engines interface {
	// Attach takes an engine over until detach, which is called once all leases are fenced. It calls e.End when nothing uses e any more, or at
	// once, with a nil detach, where there is no use for it.
	Attach(e Engine) (detach func())
}

// Engine is the work memory of a worker, and what belongs to it.
type Engine struct {
	Work    *board.Work
	Regions []*mem.Region // of REGISTER, in its order
	Ring    func()        // wakes the shim's thread
	Exited  func() bool   // the process's end is proved
	End     func()
}

// Stats is what STATS tells shims; cumulative.
type Stats struct {
	Transfers map[string]uint64 // by outcome
	Bytes     map[string]uint64 // by transport
}
