package trace

import "github.com/kvspray/kvspray/internal/nodeapi"

// Transfer is a transfer's line in trace.transfers.
type Transfer struct {
	Side    string `json:"side"`
	Outcome string `json:"outcome"`
	Xfer    string `json:"xfer"`
	Hash    string `json:"hash"`
	Req     string `json:"req,omitempty"`
	Engine  string `json:"engine"` // the worker's name
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

	Moved []nodeapi.Moved `json:"moved,omitempty"` // bytes by transport
	Sends []nodeapi.Send  `json:"sends,omitempty"` // source
}

// Copy is a copy's line in trace.transfers.
type Copy struct {
	Side    string `json:"side"` // "copy"
	Outcome string `json:"outcome"`
	Req     string `json:"req,omitempty"`
	Engine  string `json:"engine,omitempty"` // the worker's name
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
	Engine  string `json:"engine,omitempty"` // the worker's name
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

// record is a line with a summary.
type record interface{ ended() nodeapi.Record }

func (t Transfer) ended() nodeapi.Record {
	return nodeapi.Record{Side: t.Side, Outcome: t.Outcome, Req: t.Req, Xfer: t.Xfer,
		Engine: t.Engine, Peer: t.Peer, Route: t.Route, Bytes: t.Bytes, Early: t.Early,
		Grants: t.Grants, QueueUS: t.QueueUS, WireUS: t.WireUS, CommitUS: t.CommitUS,
		FlagUS: t.FlagUS, TookUS: t.TookUS, Reason: t.Reason, Moved: t.Moved, Sends: t.Sends}
}

func (c Copy) ended() nodeapi.Record {
	return nodeapi.Record{Side: c.Side, Outcome: c.Outcome, Req: c.Req, Engine: c.Engine,
		Route: c.Route, Bytes: c.Bytes, QueueUS: c.QueueUS, TookUS: c.TookUS, Reason: c.Reason}
}

func (p Pages) ended() nodeapi.Record {
	return nodeapi.Record{Side: p.Side, Outcome: p.Outcome, Req: p.Req, Engine: p.Engine,
		Bytes: p.Bytes, TookUS: p.TookUS, Reason: p.Reason,
		Pages: &nodeapi.PageCount{All: p.Pages, Memory: p.Memory, Disk: p.Disk, Object: p.Object,
			Peer: p.Peer, Missing: p.Missing, Stored: p.Stored, Existed: p.Existed,
			Failed: p.Failed}}
}
