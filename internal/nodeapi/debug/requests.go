package debug

import (
	"time"

	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/control/spray"
	"github.com/kvspray/kvspray/internal/nodeapi"
)

// Requests is /v1/requests?id=ID: what a sidecar has about one request. Peers and Excluded describe
// the present.
type Requests struct {
	Node  string   `json:"node"`
	Boot  string   `json:"boot"`
	Order []string `json:"transports_order"`
	// Records that ended since Since are kept; zero: all since the start of the sidecar.
	Since    time.Time           `json:"since"`
	Records  []nodeapi.Record    `json:"records"`      // newest first
	Dests    []exec.DestView     `json:"destinations"` // open leases
	Sources  []exec.SourceView   `json:"sources"`
	Unseen   int                 `json:"open_unseen"` // open leases that were not searched
	Peers    []nodeapi.PeerReach `json:"peers"`       // that took part
	Excluded []spray.PairView    `json:"excluded"`    // rail pairs to them that are out of use
}
