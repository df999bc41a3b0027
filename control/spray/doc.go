// Package spray decides which slice of which transfer goes over which rails, and when. It is the
// scheduler of the executor: pure, without clock, I/O, goroutine or randomness. The same calls with
// the same times give the same slices.
//
// Late binding. Chunks that may be sent wait in their flow, flows wait in one queue per priority
// and peer, and nothing is bound to a lane before that lane can start it: Pull hands out a slice
// only where the window of a rail pair, in bytes that the receiver has confirmed, is open. So a
// slow rail never holds a tail, and an urgent transfer never waits behind more than a window.
//
// Learning. A pair of rails (transport, local, remote) has a bandwidth, taken from bytes confirmed
// per time while it was busy and so free of queueing; a fixed cost b0 and a factor b1 that correct
// the prediction
//
//	score(pair, len) = tier penalty x (b0 + b1 x (bytes in flight + len) / bandwidth)
//
// and the least delay, which is that of the path alone. Its window is what the path holds
// (bandwidth x delay) and a few slices more, fewer for what nobody waits for. A queue that our own
// window makes stands in front of every later slice and looks like delay; so a delay is only
// believed of a slice that found next to nothing in flight before it, and where a pair that is busy
// has had no such slice for long, its window is closed for a moment until one does (drain). The
// score ranks the open pairs, and near the end of what waits it leaves the rest to faster ones.
// What is not used decays to neutral, so that it is tried again.
//
// Urgency. What a decode waits for may go one slice beyond the window, and finds before it what
// background left in flight: so background has a window of its own, a smaller one, and stays off
// one lane of each pair, whose stream is then free.
//
// Local rails. Peers share our rails, and so the queue in front of each (egress). Predictions
// include what others have posted there, and where a rail is shared, pairs add to its queue in
// turns: the more urgent first, equals by the bytes that they were given. Wake says whose turn it
// is.
//
// Health. A lane that brings nothing for Config.Suspect is suspect: it is passed over and its
// chunks are free for others. A pair is excluded for errors, and for silence while its peers moved;
// it comes back through a probe (a copy of a chunk under way, as attempt 0, which takes nothing
// from anybody), then in steps with growing windows. Where no pair is left, excluded ones carry one
// slice at a time. A slice that is late is sent again, and charged as a failure where its lane
// moves. From the lane's next sign of life on it fills no window: it may never end. A window full
// of late ones is tried with one chunk.
//
// Invariants, checked after every step of the property tests:
//   - a chunk that was made ready and has not landed waits, is in flight, or both; it is in flight
//     twice only where the second copy was declared (hedge, probe, or after suspicion);
//   - bytes in flight of a lane, a pair, a local rail and a peer are the sum of their flights,
//     retries included;
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
	DecodeWaits Priority = iota // a request stands still until it has come
	LayerStream                 // follows a prefill
	Background                  // store, prefetch
	numPriorities

	Priorities = int(numPriorities)
)

func (p Priority) String() string {
	return [...]string{"decode_waits", "layer_stream", "background"}[min(p, Background)]
}

// Policy says who gets the next slice.
type Policy uint8

// The policies. RoundRobin and Weighted bind slices to pairs in a fixed order, as other engines do;
// they exist to be compared with.
const (
	Spray Policy = iota
	RoundRobin
	Weighted // by the speed that the links claim
)

func (p Policy) String() string {
	return [...]string{"spray", "round-robin", "weighted"}[min(p, Weighted)]
}

// ParsePolicy is the inverse of Policy.String.
func ParsePolicy(s string) (Policy, bool) {
	for p := Spray; p <= Weighted; p++ {
		if s == p.String() {
			return p, true
		}
	}
	return Spray, false
}

// Config is constant for the life of a scheduler. Zero values take the defaults.
type Config struct {
	Policy      Policy
	Suspect     time.Duration // silence after which a busy lane is suspect
	Exclude     time.Duration // silence after which a pair whose peers moved is excluded
	Attempt     time.Duration // one slice may take, while its lane brings others
	Cooldown    time.Duration // of the first exclusion; it doubles up to MaxCooldown
	MaxCooldown time.Duration
	MaxFlights  int // slices in flight to one peer
	MaxStrikes  int // failures of one chunk that are charged to it
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
	MaxRanks       = 8         // transports told apart; the rest share the last rank
	MaxPairs       = 256       // rail pairs of one peer
	MaxLanes       = 1024      // lanes of one peer
	MaxCopies      = 16        // of one chunk in flight at once, probes not counted
	MaxAttempts    = 1<<16 - 1 // of one chunk, of every kind
	maxSliceChunks = 1024      // of one slice
	MaxHedgeBytes  = 4 << 20   // hedges in flight to one peer
	hedgeShare     = 8         // of a flow's chunks, one in so many may be hedged, and hedgeLeast
	hedgeLeast     = 16        // chunks
	hedgeScan      = 4         // newest slices of a lane that are looked at for a hedge
	// flows at the head of a queue that are asked in turn when the first cannot use what is open.
	scanFlows = 4
	wakeFlows = 4 // resting flows that one Tick puts back into their queues
	maxErrors = 3 // within errorSpan exclude a pair
	// failures of a transport with one flow, after which that flow prefers the next transport.
	badFlow         = 3
	readmitSteps    = 4         // windows of 2, 4, 8 and 16 chunks, one confirmed slice each
	shareQuantum    = 256 << 10 // bytes that a lower priority is owed before it goes first
	maxShareQuanta  = 4         // owed at most
	coldChunks      = 4         // window of a pair about which nothing is known
	staticSlices    = 4         // window of a pair under RoundRobin and Weighted, in slices
	maxPairNameSize = 256       // bytes of a rail's name
)

// Times of the model.
const (
	sliceTime    = time.Millisecond     // a slice is as long as a rail moves in that time
	lowSliceTime = time.Millisecond / 2 // and one of background
	// a window is so much longer than its path: for the time in which processes do not run.
	spareTime    = 2 * time.Millisecond
	latencySpan  = 2 * time.Second        // a least delay is believed for one to two of these
	drainEvery   = 500 * time.Millisecond // without a look at the delay of the path alone
	renewEvery   = time.Millisecond       // between two looks at what time alone changes
	decayAfter   = 5 * time.Second        // without a sample
	decayHalf    = 5 * time.Second        // then estimates come half way back to neutral in so long
	decayEvery   = 250 * time.Millisecond // is enough to look
	neutralAfter = 60 * time.Second       // without a sample nothing is known
	errorSpan    = 10 * time.Second
	refusalRest  = 200 * time.Millisecond // of a flow from transports that refused it badFlow times
	// without an exclusion the next one begins with the first cooldown.
	calmAfter  = 10 * time.Second
	hedgeFloor = 2 * time.Millisecond
	tickEvery  = 10 * time.Millisecond
	maxTickGap = 50 * time.Millisecond // between two Ticks; what is longer, this process was asleep
	lateFactor = 2                     // times its prediction before a slice makes its lane suspect
	lagFactor  = 4                     // times its prediction before a silent pair is excluded
	// times its prediction before one slice of a living lane counts as failed.
	stuckFactor = 8
)

// Numbers of the model. Rates are in bytes per nanosecond, which is GB/s.
const (
	alpha       = 0.25         // weight of the newest sample
	defaultRate = 0.125        // 1 Gbit/s, where a link claims nothing
	minClaim    = 1e-6         // what a link may claim; learned rates have no floor but smallestRate
	maxClaim    = 125          // 1 Tbit/s
	smallest    = 1e-9         // byte per second, so that no division fails
	maxB1       = float64(256) // a prediction is corrected so far, either way
	maxB0       = float64(10 * time.Second)
	tailSlack   = 1.125 // a piece is left to faster rails if this much sooner there
	hedgeGain   = 1.5   // a hedge must beat the slice by that
	// what a window holds of its path: twice, so that one that is too small doubles the next one.
	gain     = 2
	scavenge = 1.25 // the same for background, which has time to find out
	// of what the path holds, in front of which there is no queue even if the delay is less than
	// believed.
	drainShare  = 0.5
	drainDelays = 40 // a pair is drained no more often than once in so many of its delays
)

// tierPenalty is by tier 1 (same PCIe switch), 2 (same NUMA node) and 3.
var tierPenalty = [...]float64{1, 1, 3, 10}

// share is what a lower priority is owed of the bytes that go before it.
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

// LaneInfo describes a lane that came up.
type LaneInfo struct {
	ID   uint64 // unique in this process
	Path Path
	// of its transport: 0 is preferred; another one carries on where nothing of a lower rank is usable
	Rank         int
	Tier         int     // 1 to 3; 0 is 1
	Gbps         float64 // what the link claims; 0: unknown
	SliceBytes   int     // the longest slice that suits it
	MaxSlices    int     // in flight
	RTT          Instant // the round trip when it came up; 0: unknown
	Apart        bool    // other peers' lanes over its local rail are not in its way
	ReportsAcked bool    // received bytes within a slice are told through Moved: its silence is silence
}

// Slice is a run of chunks that a lane takes now.
type Slice struct {
	Lane    uint64
	Flow    *Flow
	Range   transfer.Range
	Bytes   uint64
	Attempt uint32 // later than every earlier one of these chunks; 0 for a probe
	Cookie  uint64 // for End
}

// Verdict is how a slice ended.
type Verdict uint8

// The verdicts.
const (
	Confirmed Verdict = iota + 1 // landed, says the receiver
	// the receiver has passed it over for a later attempt: the path is well.
	Superseded
	Failed  // by the path: checksum, timeout
	Refused // by the transport for this flow: memory, range
	Lost    // with its lane, which takes nothing more
	Dropped // for reasons of the flow, which say nothing about the path
)

// Ended is what became of a slice.
type Ended struct {
	Flow      *Flow
	Range     transfer.Range
	Bytes     uint64
	Rank      int
	Fresh     uint32 // chunks that had not landed before: what a second copy brings counts once
	Exhausted bool   // a chunk has failed too often: the flow cannot succeed
}
