// Package cluster has what the parts of a sidecar see of the other sidecars: which there are, where
// they answer and which engines they serve. Package cluster/gossip finds them.
//
// Membership is advisory. A member may be gone, and a sidecar that is there may be missing. So no
// event here is evidence that memory is safe, and each user bounds what a wrong entry costs.
package cluster

import (
	"errors"
	"slices"
	"time"

	"github.com/kvspray/kvspray/internal/admit"
	"github.com/kvspray/kvspray/transfer"
)

// Bounds of what one member publishes.
const (
	MaxEngines   = 64
	MaxNameBytes = 128 // of an engine, a label, a node and an endpoint
	MaxLabels    = 8
	MaxAPIs      = 64
	MaxURLBytes  = 256
	MaxRanks     = 64       // of one API
	MaxServing   = 64 << 10 // bytes of a Serving
)

// ErrListen is returned by a Join whose address is not of this host, or taken.
var ErrListen = errors.New("cannot listen")

// Member is one sidecar.
type Member struct {
	Node     string
	Address  string // of the membership protocol
	Endpoint string // where it answers to sidecars
	Boot     transfer.Boot
	Version  string   // of its build, for display
	Engines  []string // that it serves
	Labels   []string // what it takes part in
}

// Has reports whether a member has a label.
func (m *Member) Has(label string) bool { return slices.Contains(m.Labels, label) }

// The roles of an engine.
const (
	RolePrefill = "prefill"
	RoleDecode  = "decode"
	RoleBoth    = "both"
)

// API is an API server and the engine behind it.
type API struct {
	URL         string
	Role        string   // of the above
	Engine      string   // kind and id
	Version     string   // of the engine
	Fingerprint string   // of its model, 64 hexadecimal digits; empty: unknown
	World       int      // ranks of the engine
	Ranks       []string // of these, those of the member
	Events      string   // endpoint of its KV events; empty: none
	Replay      string   // of their replay; empty: none
	Leases      int      // that are open; -1: unknown
}

// Serving is where the engines of a member answer clients.
type Serving struct {
	HTTP    string // URL of the sidecar's HTTP listener; empty: none
	Leaving bool   // its engines take no new requests
	Started time.Time
	APIs    []API
}

// Served is a member with what it serves.
type Served struct {
	Member
	Serving
	// Lost: the member has ended, or does not answer to the others. Its engines may still do.
	Lost bool
}

// Fleet is what all members serve, as a process sees it that is none of them. Its methods can be
// called from any goroutine.
type Fleet interface {
	// Served returns the members that serve something. They differ from those of another process for
	// a moment only.
	Served() []Served
	// Changed is closed at the next change.
	Changed() <-chan struct{}
	// Leave ends the observation.
	Leave() error
}

// Cluster is the members, as one of them sees them. Its methods can be called from any goroutine.
type Cluster interface {
	// Members returns all, this one included.
	Members() []Member
	// Changed is closed at the next change of the members.
	Changed() <-chan struct{}
	// Publish replaces the engines and labels of this member. Those that do not fit are left out.
	Publish(engines, labels []string)
	// Serve replaces what this member serves. What exceeds the bounds is left out.
	Serve(Serving)
	// Leave ends the membership. Others learn of it at once, or by their probes.
	Leave() error
}

// Join makes self, whose addresses are bound, a member. Addresses of members become known to the
// gates that bound unproved connections.
type Join func(self Member, known *admit.Members) (Cluster, error)
