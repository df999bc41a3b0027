package connector

import (
	"log/slog"
	"time"

	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/parseblock"
	"github.com/kvspray/kvspray/transfer"
)

// Defaults and bounds of a Server.
const (
	DefaultMaxSessions  = 64
	DefaultMaxLeases    = 4096     // open leases of one worker
	DefaultMaxRegions   = 1024     // regions of one worker
	DefaultMaxAwaits    = 4096     // unanswered AWAITs of one scheduler
	DefaultMaxBlockIDs  = 16 << 20 // block ids in the open leases of one worker together
	DefaultMaxCopies    = 64       // open copies and loads of one worker
	DefaultFenceWait    = 5 * time.Second
	DefaultDeadline     = 30 * time.Second
	DefaultMatchTimeout = 10 * time.Second
	DefaultGrace        = 5 * time.Second

	maxDeadline    = time.Hour        // of a lease or an AWAIT; a longer one is shortened
	helloTimeout   = 10 * time.Second // a silent connection loses its place
	writeTimeout   = 5 * time.Second  // of one packet to a shim that does not read
	detachedWarn   = 30 * time.Second // after this a worker without a socket is logged
	maxOutbox      = 1024             // packets that wait until the shim reads
	maxComplaints  = 16               // ERROR messages about records, per session
	maxBadPackets  = 64               // per session; then it ends
	drainBatch     = 256              // records between two deliveries
	maxUndelivered = 4096             // events that SourceValid may leave to the ring's goroutine
	retryFirst     = 2 * time.Millisecond
	retryLast      = 100 * time.Millisecond // between checks of a full completion ring
)

// Limits bounds the resources that engines can use in a Server. A zero field takes its default.
type Limits struct {
	Sessions int // sockets open at once
	Leases   int // open leases of one worker
	Copies   int // of these, copies and loads
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
	// records for an unknown or complete lease: a race, not an error
	Ignored func(kind string)
}

// Options configures a Server.
type Options struct {
	Socket   string        // path of the unix socket; a missing directory is made with mode 0700
	Boot     transfer.Boot // of this sidecar
	Node     string
	Release  string        // of the build, for errors and logs
	HostBoot string        // kernel boot id; read from /proc when empty
	Endpoint func() string // "host:port" that peers dial; called for each WELCOME
	// Events takes events, in their order for each worker, and does not block. It may change the
	// batch, and does not keep it. An empty batch asks for nothing: the return proves that the control
	// layer does not hang.
	Events func([]engines.Event)
	// Copy opens a lease for copies, in the order of the worker's ring. It does not block. The lease
	// ends like a destination lease.
	Copy   func(*engines.Worker, Copy)
	Log    *slog.Logger
	Limits Limits
	Hooks  Hooks
	// AllowUIDs are further users whose processes may connect. Mode 0600 keeps them out of the
	// socket unless the directory and the socket are shared on purpose (SocketMode).
	AllowUIDs  []uint32
	SocketMode uint32 // 0: 0600
	Features   []string
	// Sent to shims in WELCOME. Zero: 30 s, 10 s, 5 s.
	Deadline, MatchTimeout, Grace time.Duration
	// FenceWait bounds the wait of a takeover for the fence of the older session's leases, before
	// the sidecar answers "fencing". Zero: a quarter of Grace, DefaultFenceWait at most.
	FenceWait time.Duration
	// Look is the time between two checks that the socket's path leads to the socket: cleaners of
	// /tmp and administrators remove sockets. Zero: sock.DefaultLook.
	Look time.Duration
	// Layouts holds the strategies that layouts may name. nil: parseblock.Default().
	Layouts *parseblock.Registry
	// Devices imports memory of GPUs. nil: such regions are refused.
	Devices Devices
	// Store serves pages. nil: this node has no store.
	Store Store
	// Segments serves segments. nil: this node has none.
	Segments Segments
	// Generation is part of the namespaces of all pages.
	Generation string
}

// Devices makes regions of GPU memory that engines share.
type Devices interface {
	// Import takes the handle that the engine's shim made, and its descriptor or -1. On success the
	// region owns fd.
	Import(id mem.ID, handle []byte, fd int, size uint64) (*mem.Region, error)
	// Forget releases what GPUs hold for regions that end.
	Forget([]*mem.Region)
}
