package proxy

import (
	"encoding/json"
	"net/http"
	"time"

	"github.com/kvspray/kvspray/internal/origin"
)

// health reports whether requests can be served, and the state of every back end.
func (p *Proxy) health(w http.ResponseWriter, _ *http.Request) {
	type state struct {
		Role      string     `json:"role"`
		URL       origin.URL `json:"url"`
		Up        bool       `json:"up"`
		Condition string     `json:"condition"`
		Leaves    bool       `json:"leaving,omitempty"` // it gets no new requests
		Load      int        `json:"in_flight"`
		Leases    int        `json:"leases"` // at its sidecar, as that has published; -1: unknown
		Peer      string     `json:"peer,omitempty"`
		Reason    string     `json:"reason,omitempty"`
		Warn      string     `json:"warning,omitempty"`
	}
	var list []state
	for _, b := range p.backends() {
		b.mu.Lock()
		now := time.Now()
		c, why := b.conditionLocked(now), b.health.why(now, b.last())
		if b.waits && c < down {
			c, why = down, "it has not listed its models (/v1/models)"
		}
		list = append(list, state{b.role, b.url, c < silent, c.String(), b.identity.leaving, b.load,
			b.leases, b.identity.endpoint, why, b.identity.warnings()})
		b.mu.Unlock()
	}
	w.Header().Set("Content-Type", "application/json")
	status := "ok"
	switch {
	case !p.decode.any(nil, "", candidate.possible):
		status = p.decode.none(roleDecode)
		w.WriteHeader(http.StatusServiceUnavailable)
	case !p.decode.any(nil, "", candidate.takes):
		status = "degraded: no decode engine is fit"
	case len(p.prefill.list()) > 0 && !p.prefill.any(nil, "", candidate.takes):
		status = "degraded: " + p.prefill.none(rolePrefill)
	}
	// the client may be gone
	_ = json.NewEncoder(w).Encode(map[string]any{"status": status, "mode": p.mode, "backends": list})
}
