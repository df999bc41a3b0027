package proxy

import (
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/kvspray/kvspray/internal/nodeapi"
)

// maxRouted bounds the requests that a router keeps.
const maxRouted = 1024

// routed has the last requests that have ended. The zero value is empty.
type routed struct {
	mu   sync.Mutex // protects all below
	last []nodeapi.Routed
	next int // the oldest, once all places are taken
}

func (r *routed) add(e nodeapi.Routed) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.last) < maxRouted {
		r.last = append(r.last, e)
		return
	}
	r.last[r.next] = e
	r.next = (r.next + 1) % maxRouted
}

// find lists the requests whose whole id is id, or a part of it between dashes. Clients may ask,
// and get nothing about a request of another client without its whole id.
func (r *routed) find(id string) nodeapi.RoutedList {
	r.mu.Lock()
	defer r.mu.Unlock()
	v := nodeapi.RoutedList{Records: []nodeapi.Routed{}}
	if len(r.last) == maxRouted {
		v.Since = r.last[r.next].At
	}
	for _, e := range slices.Concat(r.last[r.next:], r.last[:r.next]) {
		if strings.Contains("-"+id+"-", "-"+e.Req+"-") {
			v.Records = append(v.Records, e)
		}
	}
	slices.Reverse(v.Records)
	return v
}

// requests answers what the router decided about one request.
func (p *Proxy) requests(w http.ResponseWriter, r *http.Request) {
	id := r.URL.Query().Get("id")
	if id == "" || len(id) > nodeapi.MaxRequestID {
		p.refuse(w, http.StatusBadRequest, codeInvalidTarget, "want id: the request's X-Request-Id, or "+
			"an engine's id that contains it")
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(p.routed.find(id)) // the client may be gone
}

// routedEnd keeps a request that has ended, if an engine computed a prompt for it.
func (j *job) routedEnd() {
	if j.req.kind == kindPassed {
		return
	}
	e := j.routed
	e.At, e.Req, e.Mode, e.Status, e.LocalPrefill = time.Now(), j.id, string(j.mode), j.status, j.alone
	e.TookUS = e.At.Sub(j.start).Microseconds()
	if !j.firstAt.IsZero() {
		e.FirstUS = j.firstAt.Sub(j.start).Microseconds()
	}
	j.p.routed.add(e)
}
