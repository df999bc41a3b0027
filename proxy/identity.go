package proxy

import (
	"fmt"
	"time"
)

const leavingFor = 30 * time.Second // as the sidecar's mark lasts without a renewal

// identity is which sidecar an engine has, and whether that engine leaves. It has no clock and does
// no I/O. The endpoint goes to decode engines: a wrong one costs each request its transfer, without
// another sign of the cause.
type identity struct {
	role       string
	sidecar    string // URL of the sidecar that the operator named; empty: none
	configured bool   // the operator set endpoint

	endpoint        string // of its sidecar, for D
	engineEndpoint  string // the same, from its engine's last answer
	sidecarEndpoint string // the same, from the sidecar's last answer; empty: it did not answer
	checkedEndpoint string // with which endpoint was compared last
	checkedSidecar  string // the sidecarEndpoint of that comparison
	endpointWarning string // why that endpoint contradicts

	sidecarErr      string // why the sidecar does not answer
	sidecarDown     bool   // it has not answered the last request
	sidecarAnswered time.Time
	leaving         bool // by its sidecar, the engine ends soon
}

// answered takes a sidecar's mark, and reports whether it changed.
func (i *identity) answered(now time.Time, leaving bool) (changed bool) {
	changed = i.leaving != leaving
	i.sidecarDown, i.sidecarAnswered, i.leaving = false, now, leaving
	return changed
}

// inherit takes the marks of the same sidecar from another role of the engine.
func (i *identity) inherit(x *identity) {
	i.sidecarDown, i.sidecarAnswered, i.leaving = x.sidecarDown, x.sidecarAnswered, x.leaving
}

// stale reports whether the sidecar's last answer is too old to count.
func (i *identity) stale(now time.Time) bool { return now.Sub(i.sidecarAnswered) >= leavingFor }

// unanswered notes that the sidecar does not answer. Its last mark stays for leavingFor: a slow
// answer must not bring requests to an engine that ends.
func (i *identity) unanswered(now time.Time) (changed bool) {
	i.sidecarDown = true
	if !i.leaving || !i.stale(now) {
		return false
	}
	i.leaving = false
	return true
}

// ended notes that the engine is down: one that comes back may have another sidecar, or none. It
// reports whether the marks of a sidecar that did not answer have ended.
func (i *identity) ended() bool {
	if i.sidecarDown {
		i.leaving = false
	}
	return i.sidecarDown
}

// asked takes the result of a request for the endpoint. learns: the endpoint is for a policy, or of
// a prefill engine. An answer is expected only while the engine is up.
func (i *identity) asked(endpoint string, err error, up, learns bool) (changed bool, was string) {
	was, i.sidecarErr = i.sidecarErr, ""
	if err != nil {
		endpoint = ""
		if up {
			i.sidecarErr = fmt.Sprintf("sidecar %s cannot be asked (%v): %s; set sidecar to the "+
				"http.listen of this engine's", i.sidecar, err, i.costs())
		}
	}
	if i.role == roleDecode {
		if err == nil && learns {
			i.endpoint = endpoint
		}
		return false, was
	}
	i.sidecarEndpoint = endpoint
	if i.configured || endpoint == i.endpoint {
		return false, was
	}
	i.endpoint, i.checkedEndpoint, i.endpointWarning = endpoint, "", ""
	return endpoint != "", was
}

// costs is what is lost while the sidecar does not answer.
func (i *identity) costs() string {
	switch {
	case i.role == roleDecode:
		return "until it answers, nothing shows that the engine leaves"
	case i.configured:
		return "nothing checks peer, or shows that the engine leaves"
	}
	return "until it answers, decode engines start only after the prefill"
}

// comparison is of endpoints that should be names of the same sidecar.
type comparison struct{ used, reported, sidecar string }

// toCompare returns the comparison that is due. The engine is more reliable than a sidecar that may
// be another engine's.
func (i *identity) toCompare() (c comparison, due bool) {
	reported := i.sidecarEndpoint
	if i.engineEndpoint != "" || !i.configured {
		reported = i.engineEndpoint
	}
	known := reported == i.checkedEndpoint &&
		(i.sidecarEndpoint == "" || i.sidecarEndpoint == i.checkedSidecar)
	return comparison{i.endpoint, reported, i.sidecarEndpoint},
		i.endpoint != "" && reported != "" && !known
}

// contradiction is a setting of the operator that disagrees with an engine.
type contradiction struct{ key, value, remedy string }

// compared takes the results: whether the endpoint for D is the reported one, and whether the
// sidecar's is. Nil: they agree.
func (i *identity) compared(c comparison, same, sidecarSame bool) *contradiction {
	i.checkedEndpoint, i.checkedSidecar, i.endpointWarning = c.reported, c.sidecar, ""
	if same && sidecarSame {
		return nil
	}
	x := &contradiction{"peer", c.used, "set peer to " + c.reported}
	named := c.used
	switch {
	case same || !i.configured:
		x.key, x.value = "sidecar", i.sidecar
		x.remedy = "set sidecar to the http.listen of that one"
		named = i.sidecar + ", whose endpoint is " + c.sidecar
	case c.sidecar == c.reported:
		x.remedy += ", or correct sidecar " + i.sidecar + ", which returned it"
	}
	i.endpointWarning = fmt.Sprintf("%s is %s, but the endpoint of this engine's sidecar is %s: %s, "+
		"unless both are the same", x.key, named, c.reported, x.remedy)
	return x
}

// warnings are for the operator; empty: none.
func (i *identity) warnings() string {
	if i.sidecarErr != "" && i.endpointWarning != "" {
		return i.sidecarErr + "; " + i.endpointWarning
	}
	return i.sidecarErr + i.endpointWarning
}
