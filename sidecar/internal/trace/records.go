package trace

import "time"

// Transfer is a transfer's line in trace.transfers.
type Transfer struct {
	Side    string `json:"side"`
	Outcome string `json:"outcome"`
	Xfer    string `json:"xfer"`
	Hash    string `json:"hash"`
	Req     string `json:"req,omitempty"`
	Source  string `json:"source"`
	Dest    string `json:"dest"`
	Peer    string `json:"peer"`
	Slot    uint32 `json:"slot"`
	Gen     uint32 `json:"gen"`
	Route   string `json:"route,omitempty"`
	Bytes   uint64 `json:"bytes"`
	// source: bytes confirmed before the last step's flag
	Early    uint64 `json:"early_bytes,omitempty"`
	Grants   int    `json:"grants"`
	QueueUS  int64  `json:"queue_us"`
	WireUS   int64  `json:"wire_us"`
	CommitUS int64  `json:"commit_us"`
	FlagUS   int64  `json:"flag_us,omitempty"` // source: time from the last flag to the commit
	TookUS   int64  `json:"took_us"`
	Reason   string `json:"reason,omitempty"`
	Trace    string `json:"trace,omitempty"` // id of the distributed trace that has its spans
}

// Copy is a copy's line in trace.transfers.
type Copy struct {
	Side    string `json:"side"` // "copy"
	Outcome string `json:"outcome"`
	Req     string `json:"req,omitempty"`
	Lease   string `json:"lease"`
	Source  string `json:"source"` // regions
	Dest    string `json:"dest"`
	Route   string `json:"route,omitempty"`
	Blocks  int    `json:"blocks"`
	Bytes   uint64 `json:"bytes"`
	QueueUS int64  `json:"queue_us"`
	TookUS  int64  `json:"took_us"`
	Reason  string `json:"reason,omitempty"`
}

// Pages is the line of a get or put of pages in trace.transfers.
type Pages struct {
	Side    string `json:"side"` // "get" or "put"
	Outcome string `json:"outcome"`
	Req     string `json:"req,omitempty"`
	Lease   string `json:"lease"`
	Pages   int    `json:"pages"`
	Memory  int    `json:"memory,omitempty"` // pages that a get found there
	Disk    int    `json:"disk,omitempty"`
	Object  int    `json:"object,omitempty"`
	Peer    int    `json:"peer,omitempty"`
	Missing int    `json:"missing,omitempty"`
	Stored  int    `json:"stored,omitempty"`
	Existed int    `json:"existed,omitempty"`
	Failed  int    `json:"failed,omitempty"`
	Bytes   uint64 `json:"bytes"`
	TookUS  int64  `json:"took_us"`
	Reason  string `json:"reason,omitempty"`
}

// Ended is what ended lately, of any kind.
type Ended struct {
	At      time.Time `json:"at"`
	Side    string    `json:"side"`
	Outcome string    `json:"outcome"`
	Req     string    `json:"req,omitempty"`
	Peer    string    `json:"peer,omitempty"` // its boot
	Route   string    `json:"route,omitempty"`
	Bytes   uint64    `json:"bytes"`
	TookUS  int64     `json:"took_us"`
	Reason  string    `json:"reason,omitempty"`
}

// record is a line with a summary.
type record interface{ ended() Ended }

func (t Transfer) ended() Ended {
	return Ended{Side: t.Side, Outcome: t.Outcome, Req: t.Req, Peer: t.Peer, Route: t.Route,
		Bytes: t.Bytes, TookUS: t.TookUS, Reason: t.Reason}
}

func (c Copy) ended() Ended {
	return Ended{Side: c.Side, Outcome: c.Outcome, Req: c.Req, Route: c.Route, Bytes: c.Bytes,
		TookUS: c.TookUS, Reason: c.Reason}
}

func (p Pages) ended() Ended {
	return Ended{Side: p.Side, Outcome: p.Outcome, Req: p.Req, Bytes: p.Bytes, TookUS: p.TookUS,
		Reason: p.Reason}
}
