package web

import (
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/internal/nodeapi"
	"github.com/kvspray/kvspray/internal/nodeapi/debug"
)

const (
	maxFound = 64 // records in an answer
	minXfer  = 8  // digits: fewer find no transfer
)

// requests answers for one request, by the beginning of its id or of its transfer's id.
func (w *Server) requests(rw http.ResponseWriter, r *http.Request) {
	id := r.URL.Query().Get("id")
	if id == "" || len(id) > nodeapi.MaxRequestID {
		reply(rw, http.StatusBadRequest, fmt.Sprintf("want id: the beginning of a request's id, or %d "+
			"or more digits of its xfer in the log, %d bytes at most\n", minXfer,
			nodeapi.MaxRequestID))
		return
	}
	replyJSON(rw, w.find(id))
}

func (w *Server) find(id string) debug.Requests {
	fits := func(req, xfer string) bool {
		return nodeapi.SameRequest(req, id) || len(id) >= minXfer && strings.HasPrefix(xfer, id)
	}
	v := debug.Requests{Node: w.o.Node, Boot: w.o.Boot.String(), Order: w.o.Order}
	v.Records, v.Since = w.o.Find(func(e *nodeapi.Record) bool { return fits(e.Req, e.Xfer) })
	v.Records = v.Records[:min(len(v.Records), maxFound)]
	var open exec.View
	w.o.Driver.View(func(ex *exec.Exec, now exec.Instant) { open = ex.View(now) })
	v.Unseen = open.Open[0] + open.Open[1] - len(open.Dests) - len(open.Sources)
	took := map[string]bool{}
	for _, e := range v.Records {
		took[e.Peer] = true
		for _, s := range e.Sends {
			took[s.Peer] = true
		}
	}
	for _, d := range open.Dests {
		if fits(d.Req, d.Key) {
			v.Dests, took[d.Peer] = append(v.Dests, d), true
		}
	}
	for _, s := range open.Sources {
		if fits(s.Req, s.Key) {
			v.Sources = append(v.Sources, s)
		}
	}
	v.Peers = slices.DeleteFunc(w.Reach().Peers, func(p nodeapi.PeerReach) bool {
		return !took[p.Boot]
	})
	for _, pair := range open.Rails.Pairs {
		if took[pair.Peer] && pair.Reason != "" {
			v.Excluded = append(v.Excluded, pair)
		}
	}
	return v
}
