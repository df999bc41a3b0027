// SPDX-License-Identifier: Apache-2.0

// Package core has what the parts of an executor share: configuration, timers and the slice
// scheduler.
package core

import (
	"time"

	"github.com/kvspray/kvspray/control/exec/internal/frame"
	"github.com/kvspray/kvspray/control/exec/internal/timer"
	"github.com/kvspray/kvspray/control/spray"
	"github.com/kvspray/kvspray/transfer"
)

// Core is what every part of an executor uses.
type Core struct {
	Cfg      Config
	Agenda   timer.Agenda
	Spray    *spray.Scheduler
	Draining bool // no new leases
}

// Span is the time of a lease that asks for d.
func (c *Core) Span(d time.Duration) time.Duration {
	if d <= 0 {
		return c.Cfg.Deadline
	}
	return min(d, frame.MaxDeadline)
}

// WithTrouble is the reason of a lease whose time is over, with the last trouble that it had.
func WithTrouble(reason, trouble string) string {
	if trouble == "" {
		return reason
	}
	return reason + "; last: " + trouble
}

// Trace describes a finished transfer, for one line of the log.
type Trace struct {
	Key         transfer.Key
	Req         string
	Source      transfer.LeaseID
	Dest        transfer.LeaseID
	Peer        transfer.Boot
	Slot        transfer.Slot
	Gen         transfer.Gen
	Queue       time.Duration // from the engine's request to the match
	Wire        time.Duration // from there to the full bitmap
	Commit      time.Duration // from there to the fence's end
	Grants      int
	Parts       int                    // destination: ranks that gave something
	Flag        time.Duration          // source: from the last flag to the commit
	BytesBefore uint64                 // source: bytes that were sent before the final step's flag
	Moved       [spray.MaxRanks]uint64 // source: bytes confirmed, by index in Config.Transports
}
