// Package peer talks to other sidecars: the gRPC service Peer (identity, versions, rails, layouts),
// control lanes that carry ControlFrames during transfers.
//
// Two sidecars agree on a key by Hello, and every lane proves it. The side on which Connect was
// called dials the lanes, one to each control address of the other side, and dials again with
// growing pauses when they are lost.
//
// This package has the sessions: which peers there are, when they are up, and when a session ends.
// Its parts are listeners, sessions (the table), dialer, preconnector and service. The packages
// below it have no sessions: opening proves connections, lane and frame carry frames on them,
// delivery makes one reliable channel of several lanes, hello and rpc have the calls, keys has the
// credentials.
//
// Invariants: each frame reaches the handler once and in order, whatever happens to lanes, while
// both processes live and neither was unreachable for longer than forgetAfter; or than idleAfter if
// gossip reports that it has left and no lease with it is open. PeerUp precedes the first frame of
// a boot. PeerDown only means unreachable, unless over is set. Once another boot answers at a
// peer's own address, no frame of the old boot is accepted. No event of this package is evidence
// that memory is safe. Send never blocks. Gossip is advisory.
//
// Goroutines: those of package opening, the gRPC server's, one maintainer with a slow tick, one
// reader per lane, one writer per lane while a socket is full, one per connect or reconnection
// while it lasts and per lane that it dials, memberlist's if gossip is on. Close joins all but
// memberlist's timers.
//
// Each part has one lock, for its own fields, so that all code under a lock is in one file. Lock
// order: session.life; then Mesh.mu; then one of listeners.mu, dialer.mu, loop.mu and
// preconnector.mu; then sessions.mu; then session.mu; then delivery.Channel; then the locks of
// lanes, and tasks.mu. The others are leaf locks. The handler is called under session.life (PeerUp,
// PeerDown) or no lock.
package peer

import (
	"log/slog"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/cluster"
	"github.com/kvspray/kvspray/control/peer/delivery"
	"github.com/kvspray/kvspray/control/peer/frame"
	"github.com/kvspray/kvspray/control/peer/hello"
	"github.com/kvspray/kvspray/control/peer/keys"
	"github.com/kvspray/kvspray/control/peer/opening"
	"github.com/kvspray/kvspray/control/peer/rpc"
	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
)

// Bounds.
const (
	MaxMessage = frame.MaxMessage   // bytes of one control message
	MaxRails   = hello.MaxRails     // in a Hello
	MaxAddrs   = hello.MaxAddresses // control addresses of one process, and lanes to it

	maxPeers      = 1024         // at a time
	maxConnects   = 128          // connection attempts in progress
	maxOwned      = maxPeers / 8 // sessions of one certificate from one address
	maxOwnedNet   = maxPeers / 2 // the same from one IPv6 /64
	unprovedPart  = 2            // and this part of either without a lane ever
	maxSuperseded = 4096         // superseded boots that are remembered

	openTimeout  = opening.Timeout  // for one step of reaching a peer
	boundTimeout = time.Second      // for a connect from one rail, before any may be tried
	forgetAfter  = 10 * time.Minute // unreachable: many times the longest deadline of a transfer
	downAfter    = time.Second      // without a lane
	idleAfter    = 30 * time.Second // without a lane, a lease, or a frame to deliver
	stuckAfter   = openTimeout      // incomplete messages have taken up memory
	checkTick    = time.Second
	redialFirst  = 20 * time.Millisecond
	redialMax    = 5 * time.Second
)

// Errors that callers distinguish.
var (
	ErrUnknown   = delivery.ErrUnknown
	ErrQueueFull = delivery.ErrQueueFull
	ErrTooBig    = frame.ErrTooBig
	ErrNoAnswer  = rpc.ErrNoAnswer // to a call; a later call may succeed
	ErrUnsafe    = hello.ErrUnsafe
	ErrRelease   = hello.ErrRelease
	ErrOther     = hello.ErrOther
)

// CheckRails is hello.CheckRails.
func CheckRails(rails []*peerv1.Rail) (good []*peerv1.Rail, refused []string) {
	return hello.CheckRails(rails)
}

// Peer is another process as the handshake authenticated it.
type Peer struct {
	Boot transfer.Boot
	Node string
	// where this process reached it; empty if the peer called, because it could claim the endpoint of
	// another sidecar
	Endpoint string
	Claimed  string // endpoint that the peer claims, for display only
	HostBoot string // kernel boot id
	SameHost bool
	Rails    []*peerv1.Rail
	Version  wire.Version // chosen
	Features []string
	Release  string   // of its build, for display
	Key      [32]byte // of the pair; lanes prove it
}

// Handler receives events. The mesh's goroutines call its methods, which must not block; they may
// call Send, Connect and PeerKey, not Close.
type Handler interface {
	// PeerUp reports that control lanes to p are open. It also answers a Connect if they were open
	// before.
	PeerUp(p Peer)
	// PeerDown reports that they are lost. over: the conversation has ended, and frames that were sent
	// and not acknowledged are lost. The reason is one of: another boot answers at the peer's own
	// address or at the endpoint that Connect used, nothing was received for forgetAfter, or the peer
	// has lost its session. In all cases but the first it may come up again.
	PeerDown(boot transfer.Boot, over bool, err error)
	// ConnectFailed answers a Connect.
	ConnectFailed(endpoint string, err error)
	// Control takes one frame: in order per peer, each once. The handler owns f.
	Control(boot transfer.Boot, f *peerv1.ControlFrame)
	// Busy reports whether leases are open with boot. Its session is then kept, also without a lane.
	Busy(boot transfer.Boot) bool
	// Describe returns the canonical layout behind a geometry hash; of several the one with that
	// fingerprint, unless it is zero.
	Describe(geometry, fingerprint [32]byte) ([]byte, bool)
}

// Options make a mesh.
type Options struct {
	Boot     transfer.Boot
	Node     string
	HostBoot string // kernel boot id; empty: no peer counts as being on this host
	Version  string // of the build, sent to peers for display
	Listen   string // host:port of gRPC and control lanes
	// host:port announced to peers; port 0 means the bound port; empty: the bound address
	Advertise string
	// further host:port to listen on for control lanes, one per rail; SetControl changes them
	Control  []string
	Features []string
	// called for each Hello of an incompatible release; nil: not counted
	Refused func()

	Credentials *keys.Credentials // nil: loopback only
	Rails       func() []*peerv1.Rail
	Handler     Handler
	Log         *slog.Logger
	Join        cluster.Join // nil: gossip is off
	Pings       Pings
	Versions    wire.Versions // zero: hello.Protocol
}

// Pings detect a dead or stopped peer. Zero values take the defaults.
type Pings struct {
	Busy    time.Duration // between pings while something is open; 2 s
	Idle    time.Duration // otherwise; 10 s
	Timeout time.Duration // until a lane without an answer is closed; 3 s
	Tick    time.Duration // interval of these checks; 1 s

	// until a connection is closed whose other end's kernel acknowledges nothing; usertimeout.Default
	HostSilence time.Duration
}

// Defaults of Pings.
const (
	pingBusy    = 2 * time.Second
	pingIdle    = 10 * time.Second
	pingTimeout = 3 * time.Second
)

func (p Pings) withDefaults() Pings {
	set := func(d *time.Duration, v time.Duration) {
		if *d <= 0 {
			*d = v
		}
	}
	set(&p.Busy, pingBusy)
	set(&p.Idle, pingIdle)
	set(&p.Timeout, pingTimeout)
	set(&p.Tick, checkTick)
	return p
}
