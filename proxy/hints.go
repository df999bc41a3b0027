package proxy

import (
	"encoding/json"
	"time"
)

// Bounds of hints.
const (
	maxHint     = 16 << 10        // bytes of the object
	defaultTTL  = 5 * time.Minute // of a pin without a time, as vllm#52113 has it
	maxHintPlan = 64              // edits of one request
)

// hintKeys are the fields in which agents describe how they will use a request's cache later: those
// of vllm#52113 and of sglang#24656.
var hintKeys = []string{"agent_hint", "agent_hints"}

// Results of hints: the values of the label.
const (
	hintPin       = "pin"
	hintShortened = "pin_shortened" // to the router's bound
	hintOff       = "pin_off"       // the router passes none on
	hintPrefetch  = "prefetch"
	hintMalformed = "malformed" // ignored
	hintUnknown   = "unknown"   // no field that the router uses
)

// hints are an agent's wishes for the cache of a request. None of them changes the answer.
type hints struct {
	pin      time.Duration // the store keeps the pages for that long; 0: it does not
	prefetch bool          // the engine of the next turn loads or computes the prompt now
}

// agentHints is the object of hintKeys. Other fields are ignored.
type agentHints struct {
	Pin      *bool        `json:"pin"`
	TTL      *json.Number `json:"ttl"` // seconds
	Prefetch *bool        `json:"prefetch"`
	// As in vllm#52113: cache_control pins, and an edit may prefetch.
	Cache *struct {
		TTL *json.Number `json:"ttl"`
	} `json:"cache_control"`
	Context *struct {
		Edits []struct {
			Type string `json:"type"`
		} `json:"edits"`
	} `json:"context_management"`
}

// hintsOf reads the hints of a request, and returns their results for metrics. It ignores malformed
// hints, as they are no reason to refuse a request. longest bounds a pin; 0: there is none.
func hintsOf(fields map[string]json.RawMessage, longest time.Duration) (h hints,
	results []string) {
	var raw json.RawMessage
	for _, key := range hintKeys {
		if raw = fields[key]; raw != nil && !isNull(raw) {
			break
		}
	}
	if raw == nil || isNull(raw) {
		return h, nil
	}
	var a agentHints
	if len(raw) > maxHint || json.Unmarshal(raw, &a) != nil ||
		a.Context != nil && len(a.Context.Edits) > maxHintPlan {
		return h, []string{hintMalformed}
	}
	ttl, ok := a.ttl()
	switch {
	case !ok:
		results = append(results, hintMalformed)
	case ttl > 0 && longest == 0:
		results = append(results, hintOff)
	case ttl > longest:
		h.pin = longest
		results = append(results, hintShortened)
	case ttl > 0:
		h.pin = ttl
		results = append(results, hintPin)
	}
	if a.prefetches() {
		h.prefetch = true
		results = append(results, hintPrefetch)
	}
	if len(results) == 0 {
		results = []string{hintUnknown}
	}
	return h, results
}

// ttl is the time of a pin; 0: the client asks for none. ok is false if the value is no time.
func (a *agentHints) ttl() (d time.Duration, ok bool) {
	text := a.TTL
	switch {
	case a.Pin != nil && !*a.Pin:
		return 0, true
	case a.Cache != nil:
		if a.Cache.TTL != nil {
			text = a.Cache.TTL
		}
	case a.Pin == nil:
		return 0, true // a time without a pin is about an engine's own cache
	}
	if text == nil {
		return defaultTTL, true
	}
	seconds, err := text.Float64() // an error if it is too large
	if err != nil || seconds < 0 {
		return 0, false
	}
	const longest = float64(1<<62) / float64(time.Second)
	return time.Duration(min(seconds, longest) * float64(time.Second)), true
}

func (a *agentHints) prefetches() bool {
	if a.Prefetch != nil {
		return *a.Prefetch
	}
	if a.Context != nil {
		for _, e := range a.Context.Edits {
			if e.Type == "prefetch" {
				return true
			}
		}
	}
	return false
}
