// Package nodeapi has the answers of a sidecar's HTTP port and admin socket, which commands, router
// and placement read. Package debug below it has /debug/state, which contains views of the parts of
// a sidecar.
//
// Plain values, no goroutine.
package nodeapi

import "time"

// Node is /v1/node, the description for routers.
type Node struct {
	Node       string   `json:"node"`
	Boot       string   `json:"boot"`
	Version    string   `json:"version"`
	Endpoint   string   `json:"endpoint"`
	Transports []string `json:"transports"`
	Workers    []string `json:"workers"` // registered workers of engines
	Ready      bool     `json:"ready"`
	Draining   bool     `json:"draining"`
	Leaving    bool     `json:"leaving"` // routers choose other engines
	// LeavingSeconds is how long Leaving still lasts without a renewal, rounded up.
	LeavingSeconds int `json:"leaving_seconds"`
	// SourceLeases are those of engines: blocks that wait to be fetched
	SourceLeases int `json:"source_leases"`
	// Problems need an operator, or end by themselves; kvspray status and doctor show them.
	Problems []string `json:"problems"`
	// Health is that of the devices that the engines use.
	Health Health `json:"health"`
}

// Health is what faults of GPUs and links do to the engines of a node. The zero value restricts
// nothing.
type Health struct {
	// State is that of the engine with the worst devices: fit, degraded, failed.
	State  string  `json:"state,omitempty"`
	Faults []Fault `json:"faults,omitempty"` // also of devices that no engine uses
	// Failed are the ids of engines whose leases fail.
	Failed []string `json:"failed,omitempty"`
	// FailedURLs are those API servers of which all engines are in Failed, as far as they are known.
	FailedURLs []string `json:"failed_urls,omitempty"`
	// Affected are the ids of engines that use a device with a fault, those in Failed included.
	Affected []string `json:"affected,omitempty"`
	// AffectedURLs are their API servers. If there are some, the other engines of the node are fit;
	// none: not all are known.
	AffectedURLs []string `json:"affected_urls,omitempty"`
	// Leaving: all engines of the node are in Failed, and there is one. Node.Leaving includes it.
	Leaving bool `json:"leaving,omitempty"`
}

// MaxFaults bounds Health.Faults: routers read a small answer.
const MaxFaults = 32

// States of Health.
const (
	HealthDegraded = "degraded" // routers prefer other engines
	HealthFailed   = "failed"
)

// Fault is a fault of a device.
type Fault struct {
	Device string    `json:"device"` // "GPU 0000:1b:00.0", "interface eth0"
	Kind   string    `json:"kind"`
	State  string    `json:"state"`
	Text   string    `json:"text"`
	Remedy string    `json:"remedy,omitempty"`
	Since  time.Time `json:"since"`
}

// Totals are counts since the node's start.
type Totals struct {
	Transfers map[string]uint64 // by outcome
	Bytes     map[string]uint64 // by transport
}

// Lane is a lane of a node.
type Lane struct {
	Lane      uint64 `json:"lane"`
	Peer      string `json:"peer"`
	Transport string `json:"transport"`
	Local     string `json:"local"`
	Remote    string `json:"remote"`
}

// Rail is a local rail in /debug/state.
type Rail struct {
	Transport string  `json:"transport"`
	Rail      string  `json:"rail"`
	Address   string  `json:"address"`
	Interface string  `json:"interface,omitempty"`
	Gbps      float64 `json:"gbps,omitempty"`
	MTU       int     `json:"mtu,omitempty"`
	Down      bool    `json:"down"`
	Fault     string  `json:"fault,omitempty"` // why it is out of use although its link is up
	Auto      bool    `json:"auto"`            // by a pattern
}

// Layouts is /v1/layouts: the registered layouts, for `kvspray layout`. Ranks of an engine are in
// order.
type Layouts struct {
	Workers []Layout `json:"workers"`
}

// Layout is that of one worker.
type Layout struct {
	Name   string `json:"name"`
	Engine string `json:"engine"` // its kind and id
	Rank   string `json:"rank"`   // within the engine
	Layout []byte `json:"layout"` // msgpack, docs/protocol.md section 3
}
