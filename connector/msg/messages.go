package msg

import (
	"fmt"
	"math"
)

// Type is the type of a packet.
type Type uint32

// The types.
const (
	TypeHello      Type = 1
	TypeWelcome    Type = 2
	TypeRegister   Type = 3
	TypeRegistered Type = 4
	TypeError      Type = 5
	TypeAwait      Type = 6
	TypeAdmitted   Type = 7
	TypeBye        Type = 8
	TypeStats      Type = 9
	TypeDecline    Type = 10
)

func (t Type) String() string {
	names := [...]string{"", "HELLO", "WELCOME", "REGISTER", "REGISTERED", "ERROR", "AWAIT",
		"ADMITTED", "BYE", "STATS", "DECLINE"}
	if t > 0 && int(t) < len(names) {
		return names[t]
	}
	return fmt.Sprintf("type %d", uint32(t))
}

// Message is one packet.
type Message interface {
	Type() Type
	append(b []byte) []byte
}

// Roles of a session.
const (
	RoleWorker    = "worker"
	RoleScheduler = "scheduler"
)

// Engine names the engine behind a session.
type Engine struct{ Name, Version, ID string }

// Rank is a position and the size of its group.
type Rank struct{ Rank, Size uint32 }

// Ranks places a worker in its engine.
type Ranks struct{ DP, PP, TP, PCP, DCP Rank }

// Hello opens a session.
type Hello struct {
	ID       uint64
	Min, Max Version
	Role     string
	Boot     [16]byte
	Engine   Engine
	Ranks    Ranks
	PID      uint32
	Features []string
}

// Welcome.Features.
const (
	FeatureCopy = "copy" // the sidecar accepts COPY records
	FeatureWork = "work" // the sidecar uses engines with GPU memory for work, see Register.Work
	// FeatureAfter: EXPECT and COPY wait for the stream mark in them.
	FeatureAfter   = "after"
	FeatureDecline = "decline" // the sidecar accepts DECLINE of schedulers
)

// Limits are sent to the shim.
type Limits struct{ Leases, Regions, RecordBytes uint64 }

// Welcome answers Hello.
type Welcome struct {
	ID         uint64
	Version    Version
	Boot       [16]byte
	Node       string
	Endpoint   string
	Host       string
	Features   []string
	Fenced     bool
	Limits     Limits
	DeadlineMS uint64
	PartnerMS  uint64
	GraceMS    uint64
}

// Kinds of a region.
const (
	KindMemfd   = "memfd"
	KindAdopted = "adopted"
	KindProcess = "process"
	KindDevice  = "device" // of a GPU
)

// Region describes memory whose descriptor is in the packet.
type Region struct {
	Region [16]byte
	Kind   string
	Bytes  uint64
	Addr   uint64 // KindProcess only
	FD     uint32 // index into the packet's descriptors; NoFD: none, KindDevice only
	Handle []byte // KindDevice only: import handle of the allocation
}

// NoFD is the descriptor index of a region without a descriptor.
const NoFD = math.MaxUint32

// MaxHandleBytes bounds Region.Handle.
const MaxHandleBytes = 256

// FDs are indices into the packet's descriptors.
type FDs struct{ Flags, Rings, Doorbell, Bell uint32 }

// WorkFDs are further indices: the work memory (board.h) and the eventfd that wakes the shim for
// it.
type WorkFDs struct{ Board, Bell uint32 }

// Register passes memory, layout and board to the sidecar.
type Register struct {
	ID      uint64
	Session [16]byte
	Regions []Region
	Layout  []byte // one msgpack map, docs/protocol.md section 3; see package layout
	FDs     FDs
	Work    *WorkFDs // nil: the engine has no GPU, or does no work for the sidecar
}

// Registered answers Register.
type Registered struct {
	ID          uint64
	Fingerprint [32]byte
	Geometry    [32]byte // zero if a sidecar does not send it
}

// Codes of an ErrorMessage.
const (
	CodeProtocol   = "protocol"   // a packet or record that cannot be read
	CodeVersion    = "version"    // no common version
	CodePermission = "permission" // uid, or the process cannot be held
	CodeState      = "state"      // not allowed now: HELLO twice, REGISTER by a scheduler ...
	CodeRegion     = "region"     // a region cannot be used
	CodeLayout     = "layout"     // the layout cannot be used
	CodeBoard      = "board"      // flags or rings cannot be used
	CodeLimit      = "limit"      // a bound is reached
	CodeFencing    = "fencing"    // the older session's leases are not fenced yet: try again
	CodeDraining   = "draining"   // no new sessions or leases
	CodeSuperseded = "superseded" // a newer session of the same boot took over
)

// ErrorMessage refuses a request, or reports invalid input.
type ErrorMessage struct {
	ID      uint64 // 0: answers no request
	Code    string
	Message string
	Field   string
	Remedy  string
	Fatal   bool
}

// Await asks for admission.
type Await struct {
	ID     uint64
	Xfer   [16]byte
	Hash   [32]byte
	Peer   string
	Tokens uint32
	TTLMS  uint64
}

// Admitted answers Await once, at any later time.
type Admitted struct {
	ID      uint64
	State   string
	Tokens  uint32
	Message string
}

// Decline reports that no rank of the scheduler's engine will ask for this prompt's KV: the request
// ended, or is served without it, before any rank received it. The source's engine need not keep
// its blocks for it.
type Decline struct {
	ID     uint64
	Xfer   [16]byte
	Hash   [32]byte
	Peer   string // endpoint of the source's sidecar
	Reason string
}

// Bye announces the end; the sidecar drains.
type Bye struct{ Reason string }

// Stats are cumulative.
type Stats struct {
	Transfers map[string]uint64 // by outcome
	Bytes     map[string]uint64 // by transport
}

// Types of the messages.
func (*Hello) Type() Type { return TypeHello }

func (*Welcome) Type() Type { return TypeWelcome }

func (*Register) Type() Type { return TypeRegister }

func (*Registered) Type() Type { return TypeRegistered }

func (*ErrorMessage) Type() Type { return TypeError }

func (*Await) Type() Type { return TypeAwait }

func (*Admitted) Type() Type { return TypeAdmitted }

func (*Bye) Type() Type { return TypeBye }

func (*Decline) Type() Type { return TypeDecline }

func (*Stats) Type() Type { return TypeStats }
