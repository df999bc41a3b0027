// Package debug has a sidecar's /debug/state: the sidecar writes it, and kvspray status reads it.
// It contains views of the sidecar's parts as they are. Plain values, no goroutine.
package debug

import (
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/control/route"
	"github.com/kvspray/kvspray/gpu"
	"github.com/kvspray/kvspray/gpu/policy"
	"github.com/kvspray/kvspray/internal/nodeapi"
)

// State is /debug/state.
type State struct {
	nodeapi.Node
	Leases exec.View      `json:"leases"`
	Lanes  []nodeapi.Lane `json:"lanes"`
	Totals nodeapi.Totals `json:"totals"`
	// boot to the address at which this node reached it; empty if it connected to this node
	Peers map[string]string `json:"peers"`
	// Claimed is the endpoint that each of the latter announced. By boot.
	Claimed map[string]string `json:"claimed"`
	// Releases are the versions of peers. By boot.
	Releases map[string]string `json:"releases"`
	Rails    []nodeapi.Rail    `json:"our_rails"`
	// Links are the paths of large copies between host memory and each GPU.
	Links []gpu.PathState `json:"gpu_links"`
	// Executors are the copy methods for scattered blocks of a GPU, with their bytes.
	Executors []policy.RouteState `json:"gpu_executors"`
	// Store is the page store; nil: the node has none.
	Store *nodeapi.Store `json:"store,omitempty"`
	// Control lanes to each peer, each as its two addresses. By boot.
	Control map[string][]string `json:"control"`
	// Routes are the paths to each peer, best first, with the reason for each unused one. By boot.
	Routes map[string][]route.Candidate `json:"routes"`
}
