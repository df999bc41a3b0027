package core

import (
	"time"

	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec/internal/agreement"
	"github.com/kvspray/kvspray/control/lease"
	"github.com/kvspray/kvspray/transfer"
)

// Config is constant for the life of an executor.
type Config struct {
	Boot       transfer.Boot // of this process
	Endpoint   string        // that peers dial; an engine that names it means ourselves
	Planner    agreement.Planner
	Transports []string // preferred first; others come last
	// Distance is how far one of our rails is from the memory of a worker: 1 to 3, as in package topo;
	// 0: unknown. Nil: all are unknown.
	Distance func(w *engines.Worker, transport, rail string) int

	// Zero values take the defaults below.
	Deadline     time.Duration // of a lease that names none, and the longest
	MatchTimeout time.Duration // for the other side of a transfer to come
	HoldTimeout  time.Duration // the same, while the other side's engine lives and waits
	Grace        time.Duration // between tries of a fence that failed
	MaxAttempts  int           // failures of one chunk
	MaxRegrants  int           // of one destination lease
	MaxSlices    int           // in flight, over all lanes of one peer
	MaxSlots     int           // parts of grants open towards one peer
	// grants, parts of them and queries of one peer that wait for an intent
	MaxPending   int
	MaxDest      int
	MaxSource    int
	TombstoneAge time.Duration
	// how long after a served key another grant for it still waits (a list of equal prompts)
	TombstoneGrace time.Duration
}

// Defaults of Config.
const (
	DefaultDeadline       = 30 * time.Second
	DefaultMatchTimeout   = 10 * time.Second
	DefaultHoldTimeout    = 2 * time.Minute
	DefaultGrace          = 5 * time.Second
	DefaultMaxAttempts    = 8
	DefaultMaxRegrants    = 16
	DefaultMaxSlices      = 256
	DefaultMaxPending     = 4096
	DefaultTombstoneGrace = 2 * time.Second
)

// WithDefaults sets what is zero.
func (c Config) WithDefaults() Config {
	dur := func(v *time.Duration, d time.Duration) {
		if *v <= 0 {
			*v = d
		}
	}
	num := func(v *int, d int) {
		if *v <= 0 {
			*v = d
		}
	}
	dur(&c.Deadline, DefaultDeadline)
	dur(&c.MatchTimeout, DefaultMatchTimeout)
	dur(&c.HoldTimeout, DefaultHoldTimeout)
	dur(&c.Grace, DefaultGrace)
	dur(&c.TombstoneAge, lease.TombstoneAge)
	dur(&c.TombstoneGrace, DefaultTombstoneGrace)
	num(&c.MaxAttempts, DefaultMaxAttempts)
	num(&c.MaxRegrants, DefaultMaxRegrants)
	num(&c.MaxSlices, DefaultMaxSlices)
	num(&c.MaxSlots, lease.MaxSlotsPerPeer)
	num(&c.MaxPending, DefaultMaxPending)
	num(&c.MaxDest, lease.MaxDest)
	num(&c.MaxSource, lease.MaxSource)
	return c
}
