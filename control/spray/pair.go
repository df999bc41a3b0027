package spray

import (
	"fmt"
	"math"
	"time"

	"github.com/kvspray/kvspray/transfer"
)

// State is the health of a pair.
type State uint8

// The states. A pair is suspect if all of its lanes are.
const (
	Healthy    State = iota
	Readmitted       // carries slices again, in growing windows
	Probing          // the cooldown is over: a probe precedes slices
	Excluded
)

func (s State) String() string {
	return [...]string{"healthy", "readmitted", "probing", "excluded"}[min(s, Excluded)]
}

// pair is a local rail and a peer's rail, with the estimates for them. It outlives its lanes.
type pair struct {
	// Read by Pull for each pair: two cache lines.
	state    State
	draining bool // closed until a slice finds next to nothing in flight
	live     int  // usable lanes
	rank     int
	flights  int    // slices on usable lanes
	slots    int    // maximum of slices on usable lanes
	kept     int    // of those, reserved for urgent slices
	inflight uint64 // bytes on all lanes
	stalled  uint64 // of them, on unusable lanes, or of passed slices
	window   uint64 // bytes that may be in flight
	low      uint64 // the same for background
	piece    uint64 // current length of a slice, bytes
	lowPiece uint64 // the same for background
	bw       float64
	b0       float64 // nanoseconds
	b1       float64
	spare    *laneState // the lane without background; nil: there is only one lane

	out *egressTurn // at the local rail; nil: no other pair shares its queue

	apart  bool // LaneInfo.Apart, or another policy than Spray
	path   Path
	peer   *Peer
	index  int // in peer.pairs
	tier   int
	lanes  []*laneState
	shared int    // slots that are not kept, on lanes with background
	slice  uint64 // the longest slice that its lanes take, bytes

	// Learned, with bw, b0 and b1.
	neutral   float64 // bytes per nanosecond, before the first sample
	samples   int
	sampled   Instant // the last one
	seen      Instant // the last decay or sample
	lat       [2]Instant
	latBytes  [2]uint64 // of the slices that had these delays
	latAt     Instant   // begin of lat[0]; lat[1] is the span before
	err       float64   // mean of |predicted - actual| / actual
	delivered uint64    // bytes
	delivAt   Instant   // the last of them, or the begin of the busy period
	moved     Instant   // last progress
	clean     Instant   // last slice that found next to nothing in flight, or last idle time
	patience  Instant   // draining ends then at the latest
	credit    uint64    // receiver's limit for what waits at its rail; 0: none
	rtt       Instant   // least RTT of its lanes when they came up; 0: unknown

	// Health, with state.
	down     bool // a link is
	step     int  // of Readmitted
	since    Instant
	until    Instant // of Excluded
	silent   bool    // it is excluded for silence
	cooldown time.Duration
	reason   string
	errors   int // since errorsAt
	errorsAt Instant

	count Counters
	tiers [MaxPlaces]uint8 // by place; 0: not computed yet
}

// Counters only grow.
type Counters struct {
	Bytes        uint64 `json:"bytes"` // confirmed
	Confirmed    uint64 `json:"slices_confirmed"`
	Superseded   uint64 `json:"slices_superseded"`
	Failed       uint64 `json:"slices_failed"`
	Refused      uint64 `json:"slices_refused"`
	Lost         uint64 `json:"slices_lost"`
	Dropped      uint64 `json:"slices_dropped"`
	Doubled      uint64 `json:"slices_doubled"` // also given to other lanes, for silence
	TimedOut     uint64 `json:"slices_timed_out"`
	Hedges       uint64 `json:"hedges"`
	Probes       uint64 `json:"probes"`
	ProbesPassed uint64 `json:"probes_passed"`
	ProbesFailed uint64 `json:"probes_failed"`
	Errors       uint64 `json:"errors"`     // that count towards an exclusion
	Suspicions   uint64 `json:"suspicions"` // of lanes
	Exclusions   uint64 `json:"exclusions"`
	Readmissions uint64 `json:"readmissions"`
}

func (c *Counters) ended(v Verdict) {
	switch v {
	case Confirmed:
		c.Confirmed++
	case Superseded:
		c.Superseded++
	case Failed:
		c.Failed++
	case Refused:
		c.Refused++
	case Lost:
		c.Lost++
	case Dropped:
		c.Dropped++
	}
}

// laneState is one connection of a pair. Its flights form a list, oldest first.
type laneState struct {
	info     LaneInfo
	pair     *pair
	inflight uint64 // bytes
	passed   uint64 // of them, of passed slices
	flights  int
	head     int32 // indices of flights; none is -1
	tail     int32
	moved    Instant // last progress, or last post on the idle lane
	doubted  Instant // when it last became suspect, or usable again through retry
	suspect  bool
	broken   bool
	busy     int // index in Scheduler.busy, or -1
}

func (l *laneState) usable() bool { return !l.suspect && !l.broken }

// nominal is the neutral rate of a link of nominal Gbit/s, within bounds. A wrong value
// costs no more than a window until the first sample.
func nominal(gbps float64) float64 {
	if !(gbps > 0) || math.IsInf(gbps, 1) {
		return defaultRate
	}
	return min(max(gbps/8, minClaim), maxClaim)
}

func (q *pair) reset() {
	q.bw, q.b0, q.b1, q.samples, q.err = q.neutral, 0, 1, 0, 0
	q.lat = [2]Instant{}
	q.resize()
}

// load is the bytes in flight without stalled ones.
func (q *pair) load() uint64 { return q.inflight - q.stalled }

// expect predicts the time from now until the last of len more bytes is confirmed.
func (q *pair) expect(n uint64) float64 { return q.b0 + q.b1*float64(q.load()+n)/q.bw }

// expectAt is expect with the queue of other pairs at the local rail.
func (q *pair) expectAt(now Instant, n uint64) float64 {
	v := q.expect(n)
	if q.crowded() {
		v = max(v, q.b0+q.b1*(float64(q.out.queue(now))+float64(n)/q.out.bw))
	}
	return v
}

// score ranks pairs for memory at a place; less is better.
func (q *pair) score(now Instant, n uint64, at Place) float64 {
	return tierPenalty[q.tierAt(at)] * q.expectAt(now, n)
}

// usable reports whether the pair may carry slices other than probes.
func (q *pair) usable() bool { return q.live > 0 && q.state <= Readmitted }

// room reports whether the window is open for n more bytes. Urgent slices may exceed it by one
// slice: they wait behind a window, not for one.
func (q *pair) room(n uint64, prio Priority, urgent bool) bool {
	load, slots, w, all := q.load(), q.slots, q.limit(prio), q.window
	if urgent {
		all += q.piece
		if q.state == Healthy && q.samples > 0 && q.crowded() {
			// Turns at the local rail limit this pair. The rate that it learned there is only what
			// the other pairs left.
			all = max(all, min(uint64(q.out.bw*float64(spareTime)), q.creditMax()))
		}
		w = all
	} else {
		slots -= q.kept // urgent slices find a slot on each lane
	}
	if q.draining {
		w = q.shallow()
		all = w
	}
	if q.flights >= slots || load > 0 && load+n > w {
		return false
	}
	if prio == Background && load > 0 && load+q.piece > all {
		// Short slices would take the room, one after the other, that a longer one waits for.
		return false
	}
	return prio != Background || q.spare == nil ||
		q.flights-q.spare.flights < slots-q.spare.limit(urgent)
}

// limit is the window of a priority.
func (q *pair) limit(prio Priority) uint64 {
	if prio == Background {
		return q.low
	}
	return q.window
}

// limit is the largest number of slices on the lane.
func (l *laneState) limit(urgent bool) int {
	if !urgent && l.info.MaxSlices > 1 {
		return l.info.MaxSlices - 1
	}
	return l.info.MaxSlices
}

// pick is the least loaded lane with room.
func (q *pair) pick(prio Priority, urgent bool) *laneState {
	var found *laneState
	for _, l := range q.lanes {
		if l.usable() && l.flights < l.limit(urgent) && (found == nil || l.inflight < found.inflight) &&
			(prio != Background || l != q.spare) {
			found = l
		}
	}
	return found
}

// minDelay is the smallest recent delay from post to confirmation, of slices that found next to
// nothing in flight: the delay of the path and the time of one slice on the wire. (That time cannot
// be subtracted: the rate of a path is unknown until the path is full.) Without such a slice it is
// the RTT when the lanes came up; 0: unknown.
func (q *pair) minDelay() Instant {
	switch {
	case q.lat[0] == 0 && q.lat[1] == 0:
		return q.rtt
	case q.lat[1] == 0:
		return q.lat[0]
	case q.lat[0] == 0:
		return q.lat[1]
	}
	return min(q.lat[0], q.lat[1])
}

// holds is the content of the full path without a queue: bandwidth x delay.
func (q *pair) holds() float64 { return q.bw * float64(q.minDelay()) }

// shallow is the maximum of bytes in flight before a slice that measures the delay. The path holds
// more than that without a queue. If the current estimate of the delay includes a queue, this slice
// measures less, and the next one measures the delay without it.
func (q *pair) shallow() uint64 { return uint64(drainShare * q.holds()) }

// drain closes the window of a pair that was busy for long without a measurement of its path's
// delay, one pair of a peer at a time.
func (q *pair) drain(now Instant) {
	switch {
	case q.load() == 0:
		q.drained(now) // the next slice measures it
	case q.draining && now >= q.patience:
		q.drained(now) // a slice does not end; watch judges that
	case q.crowded(): // other pairs keep the queue filled: closing this window measures nothing
	case q.peer.draining == nil && q.usable() && q.samples > 0 &&
		now-q.clean >= max(drainEvery, drainDelays*q.minDelay()):
		q.peer.draining, q.draining, q.patience = q, true, now+lateFactor*Instant(q.expect(0))
	}
}

// drained opens the window again.
func (q *pair) drained(now Instant) {
	q.clean = now
	if q.draining {
		q.peer.draining, q.draining = nil, false
	}
}

// resize computes slice and window from the estimates: a slice is what the rail moves in sliceTime,
// a window is gain times what the path holds, and at least scavenge times that plus spareTime.
func (q *pair) resize() {
	q.slice = max(q.slice, transfer.ChunkBytes)
	if q.samples == 0 {
		q.piece, q.window = transfer.ChunkBytes, coldChunks*transfer.ChunkBytes
		q.lowPiece, q.low = q.piece, q.window
	} else {
		holds := q.holds()
		q.piece = q.whole(q.bw*float64(sliceTime), gain*holds)
		q.lowPiece = q.whole(q.bw*float64(lowSliceTime), gain*holds)
		q.low = max(uint64(scavenge*holds)+q.lowPiece, 2*q.lowPiece)
		q.window = max(uint64(max(gain*holds, scavenge*holds+q.bw*float64(spareTime))), 2*q.piece)
	}
	if q.state == Readmitted {
		q.window = min(q.window, transfer.ChunkBytes<<q.step)
		q.piece = min(q.piece, max(q.window/2, transfer.ChunkBytes))
	}
	q.credited()
	q.low = min(q.low, q.window)
	q.lowPiece = min(q.lowPiece, q.piece)
}

// whole is a slice in whole chunks. It is longer if the lanes have too few slots
// to fill a window with such slices, and never longer than the lanes accept.
func (q *pair) whole(bytes, window float64) uint64 {
	chunks := uint64(math.Ceil(max(bytes, window/float64(max(q.shared, 1))) / transfer.ChunkBytes))
	return min(max(chunks, 1)*transfer.ChunkBytes, q.slice)
}

// cut is the slice of a priority.
func (q *pair) cut(prio Priority) uint64 {
	if prio == Background {
		return q.lowPiece
	}
	return q.piece
}

// ewma moves v towards the newest sample. The weight is that of the *new* sample.
func ewma(v, sample, weight float64) float64 { return v + weight*(sample-v) }

// learn updates the estimates with the confirmation of f. out is the rate of the local rail if f
// waited for the rail beside slices of other pairs: alone there, this pair would be as fast. 0: f
// did not.
func (q *pair) learn(now Instant, f *flight, out float64) {
	took := max(now-f.posted, 1)
	q.count.Bytes += f.bytes

	// Bytes confirmed since f was posted, per busy time. Waiting in queues changes neither.
	rate := float64(q.delivered-f.path.delivered) / float64(max(now-f.path.begin, time.Microsecond))
	rate = min(max(rate, smallest), maxClaim)
	// Single slices that take twice their prediction prove that the rail is slower.
	limited := f.path.limited && !(q.crowded() && q.b1 > lateFactor)
	switch {
	case out > 0:
		rate, limited = out, false
	case limited && q.samples > 0:
		// The rail could have moved more. Only the slice itself proves a rate: other confirmations
		// may arrive late, and then together.
		rate = float64(f.bytes) / float64(took)
	}
	if !limited || rate > q.bw || q.samples == 0 {
		q.bw = ewma(q.bw, rate, max(alpha, 1/float64(q.samples+1)))
	}
	q.samples = min(q.samples+1, 1<<20)
	q.sampled, q.seen = now, now

	predicted, actual := float64(f.predicted), float64(took)
	q.err = ewma(q.err, min(math.Abs(predicted-actual)/actual, maxB1), alpha)
	// The part that the wire does not explain counts as a cost per slice if the slice is short, and
	// as a factor if it is long.
	if wire := float64(f.path.ahead+f.bytes) / q.bw; wire < q.b0 || q.samples == 1 {
		q.b0 = min(max(ewma(q.b0, actual-q.b1*wire, alpha), 0), maxB0)
	} else {
		q.b1 = min(max(ewma(q.b1, (actual-q.b0)/wire, alpha), 1/maxB1), maxB1)
	}
	if f.path.clean {
		if q.lat[0] == 0 || now-q.latAt > latencySpan {
			q.lat[1], q.lat[0], q.latAt = q.lat[0], took, now
			q.latBytes[1], q.latBytes[0] = q.latBytes[0], f.bytes
		} else if took < q.lat[0] {
			q.lat[0], q.latBytes[0] = took, f.bytes
		}
	}
	q.resize()
}

// decay moves the estimates of an unused pair towards neutral, so that a pair is tried again after
// a bad period.
func (q *pair) decay(now Instant) {
	if q.samples == 0 || now-q.sampled < decayAfter || now-q.seen < decayEvery {
		return
	}
	if now-q.sampled >= neutralAfter {
		q.reset()
		return
	}
	from := max(q.seen, q.sampled+decayAfter)
	keep := math.Exp2(-float64(now-from) / float64(decayHalf))
	q.bw = q.neutral * math.Pow(q.bw/q.neutral, keep)
	q.b0 *= keep
	q.b1 = math.Pow(q.b1, keep)
	q.seen = now
	q.resize()
}

// exclude takes the pair out of use until its cooldown is over.
func (q *pair) exclude(now Instant, c *Config, reason string) {
	if q.cooldown == 0 || q.state == Healthy && now-q.since > calmAfter {
		q.cooldown = c.Cooldown
	} else {
		q.cooldown = min(2*q.cooldown, max(c.MaxCooldown, c.Cooldown))
	}
	if q.state == Probing {
		q.peer.probing--
	}
	q.state, q.since, q.until, q.reason = Excluded, now, now+q.cooldown, reason
	q.errors, q.silent = 0, false
	q.count.Exclusions++
	q.drained(now)
	q.peer.renewAt = 0
}

// stirs records progress. A pair that was excluded for silence is probed at once.
func (q *pair) stirs(now Instant) {
	if q.state == Excluded && q.silent {
		q.until = min(q.until, now)
		q.peer.renewAt = 0
	}
}

// fault counts an error of the path. Several errors exclude a pair; one does if it is on trial.
func (q *pair) fault(now Instant, c *Config, what string) {
	q.count.Errors++
	if q.errors == 0 || now-q.errorsAt > errorSpan {
		q.errors, q.errorsAt = 0, now
	}
	q.errors++
	switch {
	case q.state == Excluded:
	case q.state != Healthy:
		q.exclude(now, c, what+" on trial")
	case q.errors >= maxErrors:
		q.exclude(now, c, fmt.Sprintf("%d errors within %v, the last: %s", q.errors, errorSpan, what))
	}
}

// proven counts a confirmed slice that was posted after the exclusion.
func (q *pair) proven(now Instant) {
	switch q.state {
	case Excluded, Probing:
		if q.state == Probing {
			q.peer.probing--
		}
		q.state, q.step, q.since = Readmitted, 1, now
	case Readmitted:
		if q.step++; q.step > readmitSteps {
			q.state, q.since, q.errors = Healthy, now, 0
			q.count.Readmissions++
		}
	}
	q.resize()
}
