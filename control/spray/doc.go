// Package spray decides which slice of which transfer goes over which rail pair, and when. It is
// the slice scheduler of the executor: pure, without clock, I/O, goroutine or randomness. The same
// calls with the same times give the same slices.
//
// Late binding. Chunks that may be sent wait in their flow, and flows wait in one queue per
// priority and peer. Pull binds a slice to a lane only where the in-flight window of a rail pair,
// in bytes that the receiver has confirmed, is open. So a slow rail never holds the end of a
// transfer, and an urgent transfer never waits behind more than a window.
//
// Learning. A rail pair (transport, local, remote) has a bandwidth, which is confirmed bytes per
// busy time and so free of queueing; a fixed cost b0 and a factor b1, which correct the prediction
//
//	score(pair, len) = tier penalty x (b0 + b1 x (bytes in flight + len) / bandwidth)
//
// and the least delay, which is that of the path alone. Its window is what the path holds
// (bandwidth x delay) and a few slices more, fewer for background. A queue that the pair's own
// window makes precedes every later slice and looks like delay; so a delay sample counts only if
// its slice found next to nothing in flight. If a busy pair has had no such slice for long, its
// window is closed until one does (drain). The score ranks the open pairs; near the end of the
// waiting work it leaves the rest to faster pairs. Estimates of unused pairs decay to neutral, so
// that these pairs are tried again.
//
// Urgency. Slices that a decode engine waits for may exceed the window by one slice. Background has
// a smaller window of its own, because urgent slices queue behind it, and leaves one lane of each
// pair free.
//
// Local rails. Peers share the local rails, and so the queue in front of each (egressQueue).
// Predictions include what other pairs have posted there. Where a rail is shared, pairs add to its
// queue in turns: higher priorities first, equals by the bytes that they were given. Wake returns
// the next one.
//
// Health. A lane without progress for Config.Suspect is suspect: it gets no slices, and its chunks
// become available to other lanes. A pair is excluded for errors, and for silence while other pairs
// of its peer moved. It returns through a probe (a copy of a chunk in flight elsewhere, as attempt
// 0, which takes the chunk from no other lane), then in steps with growing windows. If no pair is
// left, excluded ones carry one slice at a time. A late slice is sent again, and counts as a
// failure if its lane moves. From the lane's next progress on it fills no window, because it may
// never end. If late slices fill a window, one chunk tests the pair.
//
// Invariants, checked after every step of the property tests:
//   - a chunk that was made ready and has not landed waits, is in flight, or both; it is in flight
//     twice only if the second copy was declared (hedge, probe, or after suspicion);
//   - bytes in flight of a lane, a pair, a local rail and a peer are the sum of their flights,
//     retransmissions included;
//   - every slice that Pull gave ends through End once; everything is bounded by the constants
//     below.
package spray

import (
	"math"
	"time"

	"github.com/kvspray/kvspray/transfer"
)

// Instant is a point in time: the duration since the start of the process.
type Instant = time.Duration

// Priority orders what waits for the wire.
type Priority uint8

// The priorities.
const (
	DecodeWaits Priority = iota // a decode engine waits for it
	LayerStream                 // layers of a prefill in progress
	Background                  // store, prefetch
	numPriorities

	Priorities = int(numPriorities)
)

func (p Priority) String() string {
	return [...]string{"decode_waits", "layer_stream", "background"}[min(p, Background)]
}

// Config is constant for the life of a scheduler. Zero values take the defaults.
type Config struct {
	Suspect     time.Duration // silence after which a busy lane is suspect
	Exclude     time.Duration // silence after which a pair whose peers moved is excluded
	Attempt     time.Duration // longest time of one slice while its lane moves others
	Cooldown    time.Duration // of the first exclusion; it doubles up to MaxCooldown
	MaxCooldown time.Duration
	MaxFlights  int // slices in flight to one peer
	MaxStrikes  int // failures of one chunk
}

// Defaults of Config.
const (
	DefaultSuspect     = 60 * time.Millisecond
	DefaultExclude     = time.Second // packet loss alone makes gaps of 200 ms and 600 ms
	DefaultAttempt     = 2 * time.Second
	DefaultCooldown    = 100 * time.Millisecond
	DefaultMaxCooldown = 800 * time.Millisecond
	DefaultMaxFlights  = 256
	DefaultMaxStrikes  = 8
)

// Bounds.
const (
	MaxRanks       = 8       // distinct transports; the rest share the last rank
	MaxPairs       = 256     // rail pairs of one peer
	MaxLanes       = 1024    // lanes of one peer
	maxSliceChunks = 1024    // of one slice
	MaxHedgeBytes  = 4 << 20 // hedges in flight to one peer
	hedgeShare     = 8       // one of this number of chunks of a flow may be hedged, and hedgeMin
	hedgeMin       = 16      // chunks
	hedgeScan      = 4       // newest slices of a lane that are looked at for a hedge
	// flows at the head of a queue that are tried when the first cannot use the open pairs.
	scanFlows = 4
	wakeFlows = 4 // resting flows that one Tick puts back into their queues
	maxErrors = 3 // within errorSpan exclude a pair
	// failures of a transport with one flow, after which that flow prefers the next transport.
	badFlow         = 3
	readmitSteps    = 4         // windows of 2, 4, 8 and 16 chunks, one confirmed slice each
	shareQuantum    = 256 << 10 // bytes that a lower priority is owed before it goes first
	maxShareQuanta  = 4         // owed at most
	coldChunks      = 4         // window of a pair without samples
	maxPairNameSize = 256       // bytes of a rail's name
)

// Times of the model.
const (
	sliceTime    = time.Millisecond     // time of one slice on the wire
	lowSliceTime = time.Millisecond / 2 // the same for background
	// A window exceeds its path by this, for the time in which processes do not run.
	spareTime    = 2 * time.Millisecond
	latencySpan  = 2 * time.Second        // a least delay is valid for one to two of these
	drainEvery   = 500 * time.Millisecond // between two measurements of the path's delay
	renewEvery   = time.Millisecond       // between two checks of what time alone changes
	decayAfter   = 5 * time.Second        // without a sample, estimates begin to decay
	decayHalf    = 5 * time.Second        // half-life of that decay
	decayEvery   = 250 * time.Millisecond // between two steps of it
	neutralAfter = 60 * time.Second       // without a sample, estimates are reset
	errorSpan    = 10 * time.Second
	refusalRest  = 200 * time.Millisecond // of a flow from transports that refused it badFlow times
	// After this time without an exclusion the next one begins with the first cooldown.
	calmAfter  = 10 * time.Second
	hedgeFloor = 2 * time.Millisecond
	tickEvery  = 10 * time.Millisecond
	maxTickGap = 50 * time.Millisecond // between two Ticks; in a longer gap the process did not run
	lateFactor = 2                     // times its prediction before a slice makes its lane suspect
	lagFactor  = 4                     // times its prediction before a silent pair is excluded
	// Times its prediction before one slice of a moving lane counts as failed.
	stuckFactor = 8
)

// Numbers of the model. Rates are in bytes per nanosecond, which is GB/s.
const (
	alpha       = 0.25         // weight of the newest sample
	defaultRate = 0.125        // 1 Gbit/s, for links without a nominal speed
	minClaim    = 1e-6         // least nominal rate; the least learned rate is smallest
	maxClaim    = 125          // 1 Tbit/s
	smallest    = 1e-9         // one byte per second, so that no division fails
	maxB1       = float64(256) // largest correction of a prediction, up or down
	maxB0       = float64(10 * time.Second)
	tailSlack   = 1.125 // a piece is left to faster pairs if they are done sooner by this factor
	hedgeGain   = 1.5   // a hedge must be sooner by this factor
	// Window per path content: two, so that a window that is too small doubles the next one.
	gain     = 2
	scavenge = 1.25 // the same for background, which has time to grow
	// Part of the path's content at which there is no queue, even if the delay is overestimated.
	drainShare  = 0.5
	drainDelays = 40 // least time between two drains of a pair, in its delays
)

// tierPenalty is by tier 1 (same PCIe switch), 2 (same NUMA node) and 3.
var tierPenalty = [...]float64{1, 1, 3, 10}

// share is the part that a lower priority is owed of the bytes that precede it.
var share = [numPriorities]float64{0, 1.0 / 8, 1.0 / 16}

func (c Config) withDefaults() Config {
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
	dur(&c.Suspect, DefaultSuspect)
	dur(&c.Exclude, DefaultExclude)
	dur(&c.Attempt, DefaultAttempt)
	dur(&c.Cooldown, DefaultCooldown)
	dur(&c.MaxCooldown, DefaultMaxCooldown)
	num(&c.MaxFlights, DefaultMaxFlights)
	num(&c.MaxStrikes, DefaultMaxStrikes)
	c.MaxStrikes = min(c.MaxStrikes, math.MaxUint8)
	return c
}

// Path names a pair of rails to one peer.
type Path struct {
	Transport string `json:"transport"`
	Local     string `json:"local"`
	Remote    string `json:"remote"`
}

func (p Path) String() string { return p.Transport + ":" + p.Local + ">" + p.Remote }

// LaneInfo describes a lane that has opened.
type LaneInfo struct {
	ID   uint64 // unique in this process
	Path Path
	// Rank of its transport: 0 is preferred; a higher rank is used if no pair of a lower one is
	// usable.
	Rank         int
	Tier         int     // 1 to 3; 0 is 1
	Gbps         float64 // nominal speed; 0: unknown
	SliceBytes   int     // longest slice
	MaxSlices    int     // in flight
	RTT          Instant // when it came up; 0: unknown
	Apart        bool    // it shares no queue with other lanes of its local rail
	ReportsAcked bool    // Moved reports bytes within a slice, so silence means no progress
}

// Slice is a run of chunks for a lane.
type Slice struct {
	Lane    uint64
	Flow    *Flow
	Range   transfer.Range
	Bytes   uint64
	Attempt uint32 // greater than every earlier one of these chunks; 0 for a probe
	Cookie  uint64 // for End
}

// Verdict is how a slice ended.
type Verdict uint8

// The verdicts.
const (
	Confirmed  Verdict = iota + 1 // the receiver reports that it landed
	Superseded                    // the receiver skipped it for a later attempt: the path is healthy
	Failed                        // by the path: checksum, timeout
	Refused                       // by the transport for this flow: memory, range
	Lost                          // with its lane, which takes nothing more
	Dropped                       // for reasons of the flow, which are no evidence about the path
)

// Ended describes a slice that has ended.
type Ended struct {
	Flow      *Flow
	Range     transfer.Range
	Bytes     uint64
	Rank      int
	Fresh     uint32 // chunks that had not landed before
	Exhausted bool   // a chunk has failed too often: the flow cannot succeed
}

// Flight is how a slice travels.
type Flight struct {
	Path   *Path   // of the pair, which owns it; nil: there is no such slice
	Posted Instant // when the slice was given to its lane
}
