package web

import (
	_ "embed"
	"encoding/json"
	"fmt"
	"net/http"
	"time"

	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/gpu"
	"github.com/kvspray/kvspray/internal/nodeapi"
)

// Bounds of the page.
const (
	maxStreams    = 16 // browsers at a time
	maxPagePeers  = 64 // in a snapshot
	snapshotEvery = time.Second
	snapshotWrite = 5 * time.Second // for a browser to take a snapshot
)

//go:embed page.html
var pageHTML string

//go:embed page.js
var pageScript string

// Live is an event of /v1/live: what the page shows.
type Live struct {
	nodeapi.Node
	At       time.Time           `json:"at"`
	Leases   exec.View           `json:"leases"`
	Totals   nodeapi.Totals      `json:"totals"`
	Rails    []nodeapi.Rail      `json:"rails"`
	Peers    []nodeapi.PeerReach `json:"peers"` // the first maxPagePeers
	AllPeers int                 `json:"all_peers"`
	Links    []gpu.PathState     `json:"gpu_links"`
	Store    *nodeapi.Store      `json:"store,omitempty"`
	Recent   []nodeapi.Record    `json:"recent"` // newest first
}

func (w *Server) live() Live {
	reach := w.Reach()
	v := Live{Node: w.describe(), At: time.Now(), Totals: w.o.Totals(), Rails: w.o.Rails(),
		Peers: reach.Peers[:min(len(reach.Peers), maxPagePeers)], AllPeers: len(reach.Peers),
		Links: w.o.Links(), Store: w.o.Store(), Recent: w.o.Recent()}
	w.o.Driver.View(func(ex *exec.Exec, now exec.Instant) { v.Leases = ex.View(now) })
	return v
}

// stream sends a snapshot each second as server-sent events, until the browser goes away.
func (w *Server) stream(rw http.ResponseWriter, r *http.Request) {
	select {
	case w.streams <- struct{}{}:
		defer func() { <-w.streams }()
	default:
		rw.Header().Set("Retry-After", "10")
		reply(rw, http.StatusServiceUnavailable,
			fmt.Sprintf("%d pages are open already: close one, or read /debug/state\n", maxStreams))
		return
	}
	h := rw.Header()
	h.Set("Content-Type", "text/event-stream")
	h.Set("Cache-Control", "no-store")
	c := http.NewResponseController(rw)
	tick := time.NewTicker(snapshotEvery)
	defer tick.Stop()
	for {
		j, err := json.Marshal(w.live())
		if err != nil {
			return
		}
		// The server's own deadline is for whole replies.
		if err := c.SetWriteDeadline(time.Now().Add(snapshotWrite)); err != nil {
			return
		}
		if _, err := fmt.Fprintf(rw, "data: %s\n\n", j); err != nil {
			return
		}
		if err := c.Flush(); err != nil {
			return
		}
		select {
		case <-r.Context().Done():
			return
		case <-tick.C:
		}
	}
}
