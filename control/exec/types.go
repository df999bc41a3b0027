package exec

import (
	"github.com/kvspray/kvspray/control/exec/internal/agreement"
	"github.com/kvspray/kvspray/control/exec/internal/core"
	"github.com/kvspray/kvspray/control/exec/internal/dest"
	"github.com/kvspray/kvspray/control/exec/internal/endpoint"
	"github.com/kvspray/kvspray/control/exec/internal/frame"
	"github.com/kvspray/kvspray/control/exec/internal/lanes"
	"github.com/kvspray/kvspray/control/exec/internal/layouts"
	"github.com/kvspray/kvspray/control/exec/internal/source"
	"github.com/kvspray/kvspray/control/exec/internal/timer"
)

// Instant is a point in time: the duration since the driver's start.
type Instant = timer.Instant

// Types of the parts that a driver uses.
type (
	Config = core.Config
	Trace  = core.Trace

	SendRecord = core.Send
	RailRecord = core.RailSend

	Plan          = agreement.Plan
	Planner       = agreement.Planner
	Rank          = agreement.Rank
	Part          = agreement.Part
	UnknownLayout = agreement.UnknownLayout

	ReceivePart = dest.Part
	Cause       = dest.Cause
	SendPart    = source.Part
	Comparison  = source.Comparison

	LaneInfo  = lanes.Info
	Rail      = lanes.Rail
	Inflow    = lanes.Inflow
	Violation = frame.Violation
)

// Causes of a fence.
const (
	ByCommit     = dest.ByCommit
	ByCancel     = dest.ByCancel
	ByDeadline   = dest.ByDeadline
	ByRefusal    = dest.ByRefusal
	BySourceLost = dest.BySourceLost
	ByPeerLost   = dest.ByPeerLost
	ByEngineGone = dest.ByEngineGone
	ByDrain      = dest.ByDrain

	ByPeerSilent   = dest.ByPeerSilent
	BySourceSilent = dest.BySourceSilent
	ByLanesSilent  = dest.ByLanesSilent
)

// Defaults and bounds that others use.
const (
	DefaultGrace      = core.DefaultGrace
	DefaultMaxSlices  = core.DefaultMaxSlices
	DefaultMaxPending = core.DefaultMaxPending
	MaxParts          = frame.MaxParts
)

// Violations that others report: invalid addresses of control lanes, invalid messages about pages.
const (
	BadAddress = frame.BadAddress
	BadPages   = frame.BadPages
)

// Errors of connects and descriptions.
var (
	ErrNotListening = endpoint.ErrNotListening
	ErrNotPossible  = endpoint.ErrNotPossible
	ErrNoAnswer     = layouts.ErrNoAnswer
)
