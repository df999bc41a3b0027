package nodeapi

import (
	"strings"
	"time"
)

// MaxRequestID bounds the id in a question for one request, in bytes.
const MaxRequestID = 256

// SameRequest reports whether a request's id begins with part, or contains it after a "-": engines
// add parts of their own to the id of a client (cmpl-ID-0).
func SameRequest(id, part string) bool {
	return part != "" && (strings.HasPrefix(id, part) || strings.Contains(id, "-"+part))
}

// Record is a transfer, a copy, or a get or put of pages that has ended at a sidecar.
type Record struct {
	At       time.Time `json:"at"`
	Side     string    `json:"side"` // source, destination, copy, get, put
	Outcome  string    `json:"outcome"`
	Req      string    `json:"req,omitempty"` // the engine's id of the request
	Xfer     string    `json:"xfer,omitempty"`
	Engine   string    `json:"engine,omitempty"` // the worker's name
	Peer     string    `json:"peer,omitempty"`   // its boot
	Route    string    `json:"route,omitempty"`
	Bytes    uint64    `json:"bytes"`
	Early    uint64    `json:"early_bytes,omitempty"`
	Grants   int       `json:"grants,omitempty"`
	QueueUS  int64     `json:"queue_us,omitempty"`
	WireUS   int64     `json:"wire_us,omitempty"`
	CommitUS int64     `json:"commit_us,omitempty"`
	FlagUS   int64     `json:"flag_us,omitempty"`
	TookUS   int64     `json:"took_us"`
	Reason   string    `json:"reason,omitempty"`
	// Moved are the bytes by transport, also after a failure.
	Moved []Moved    `json:"moved,omitempty"`
	Sends []Send     `json:"sends,omitempty"` // source
	Pages *PageCount `json:"pages,omitempty"` // get, put
}

// Moved is what a transport carried.
type Moved struct {
	Transport string `json:"transport"`
	Bytes     uint64 `json:"bytes"`
}

// Send is what a source sent for one grant.
type Send struct {
	Peer      string `json:"peer"` // its boot
	Committed bool   `json:"committed"`
	FirstUS   int64  `json:"first_us"`  // from the binding of the grant to the first slice
	WireUS    int64  `json:"wire_us"`   // from the first slice to the last confirmation
	CommitUS  int64  `json:"commit_us"` // from the last confirmation to the receiver's commit
	// Rails are the rail pairs that carried slices.
	Rails []RailSend `json:"rails"`
}

// RailSend is what a rail pair carried of a Send. Bytes counts slices with new chunks only.
type RailSend struct {
	Transport string `json:"transport"`
	Local     string `json:"local"`
	Remote    string `json:"remote"`
	Bytes     uint64 `json:"bytes"`
	Slices    uint32 `json:"slices"`
	Failed    uint32 `json:"failed,omitempty"` // of the slices
}

// PageCount is where the pages of a get were, or what became of those of a put.
type PageCount struct {
	All     int `json:"all"`
	Memory  int `json:"memory,omitempty"`
	Disk    int `json:"disk,omitempty"`
	Object  int `json:"object,omitempty"`
	Peer    int `json:"peer,omitempty"`
	Missing int `json:"missing,omitempty"`
	Stored  int `json:"stored,omitempty"`
	Existed int `json:"existed,omitempty"`
	Failed  int `json:"failed,omitempty"`
}

// Routed is what the router decided about a request, in its answer to /v1/requests.
type Routed struct {
	At     time.Time `json:"at"` // its end
	Req    string    `json:"req"`
	Mode   string    `json:"mode"`
	Status int       `json:"status"` // of the answer; 0: the client disconnected before it
	// URLs of the engines that were asked last, and of their sidecars. Empty: none, or unknown.
	Prefill        string `json:"prefill,omitempty"`
	PrefillSidecar string `json:"prefill_sidecar,omitempty"`
	Decode         string `json:"decode,omitempty"`
	DecodeSidecar  string `json:"decode_sidecar,omitempty"`
	LocalPrefill   string `json:"local_prefill,omitempty"` // why decode computed the prompt
	FirstUS        int64  `json:"first_us,omitempty"`      // until the first byte of the answer
	TookUS         int64  `json:"took_us"`
}

// RoutedList is /v1/requests?id=ID of the router.
type RoutedList struct {
	Since   time.Time `json:"since"`   // requests that ended since then are kept
	Records []Routed  `json:"records"` // newest first
}
