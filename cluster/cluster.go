// Package cluster has what the parts of a sidecar see of the other sidecars: which there are, where
// they answer and which engines they serve. Package cluster/gossip finds them.
//
// Membership is advisory. A member may be gone, and a sidecar that is there may be missing. So no
// event here is evidence that memory is safe, and each user bounds what a wrong entry costs.
package cluster

import (
	"errors"
	"slices"

	"github.com/kvspray/kvspray/internal/admit"
	"github.com/kvspray/kvspray/transfer"
)

// Bounds of what one member publishes.
const (
	MaxEngines   = 64
	MaxNameBytes = 128 // of an engine, a label, a node and an endpoint
	MaxLabels    = 8
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

// Cluster is the members, as one of them sees them. Its methods can be called from any goroutine.
type Cluster interface {
	// Members returns all, this one included.
	Members() []Member
	// Changed is closed at the next change of the members.
	Changed() <-chan struct{}
	// Publish replaces the engines and labels of this member. Those that do not fit are left out.
	Publish(engines, labels []string)
	// Leave ends the membership. Others learn of it at once, or by their probes.
	Leave() error
}

// Join makes self, whose addresses are bound, a member. Addresses of members become known to the
// gates that bound unproved connections.
type Join func(self Member, known *admit.Members) (Cluster, error)
