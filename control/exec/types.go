package exec

import (
	"github.com/kvspray/kvspray/control/exec/internal/agreement"
	"github.com/kvspray/kvspray/control/exec/internal/core"
	"github.com/kvspray/kvspray/control/exec/internal/credit"
	"github.com/kvspray/kvspray/control/exec/internal/dest"
	"github.com/kvspray/kvspray/control/exec/internal/endpoint"
	"github.com/kvspray/kvspray/control/exec/internal/frame"
	"github.com/kvspray/kvspray/control/exec/internal/lanes"
	"github.com/kvspray/kvspray/control/exec/internal/layouts"
	"github.com/kvspray/kvspray/control/exec/internal/source"
	"github.com/kvspray/kvspray/control/lease"
)

// Instant is a point in time: the duration since the driver's start.
type Instant = lease.Instant

// Types of the parts that a driver uses.
type (
	Config = core.Config
	Trace  = core.Trace

	Plan          = agreement.Plan
	Planner       = agreement.Planner
	Rank          = agreement.Rank
	Part          = agreement.Part
	UnknownLayout = agreement.UnknownLayout

	ReceivePart = dest.Part
	SendPart    = source.Part
	Comparison  = source.Comparison

	Rail      = lanes.Rail
	Inflow    = credit.Inflow
	Violation = frame.Violation
)

// Defaults that others use.
const (
	DefaultGrace      = core.DefaultGrace
	DefaultMaxSlices  = core.DefaultMaxSlices
	DefaultMaxPending = core.DefaultMaxPending
)

// Violations that others report: invalid addresses of control lanes, invalid messages about pages
// and segments.
const (
	BadAddress  = frame.BadAddress
	BadPages    = frame.BadPages
	BadSegments = frame.BadSegments
)

// Errors of connects and descriptions.
var (
	ErrNotListening = endpoint.ErrNotListening
	ErrNotPossible  = endpoint.ErrNotPossible
	ErrNoAnswer     = layouts.ErrNoAnswer
)
