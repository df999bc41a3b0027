package spray

import (
	"fmt"
	"math"
	"time"

	"github.com/kvspray/kvspray/transfer"
)

// State is the health of a pair.
type State uint8

// The states. Whether a pair is suspect follows from its lanes.
const (
	Healthy    State = iota
	Readmitted       // carries slices again, in growing windows
	Probing          // the cooldown is over: a copy of something goes first
	Excluded
)

func (s State) String() string {
	return [...]string{"healthy", "readmitted", "probing", "excluded"}[min(s, Excluded)]
}

// pair is two rails, one here and one at the peer, and what was learned about them. It outlives its
// lanes.
type pair struct {
	// What Pull looks at in each pair: two cache lines.
	state    State
	draining bool // closed until a slice finds next to nothing before it
	live     int  // usable lanes
	rank     int
	flights  int    // slices on usable lanes
	slots    int    // slices that they can have
	kept     int    // of those, for what is urgent
	inflight uint64 // bytes on all lanes
	stalled  uint64 // of them, on lanes that are not usable, or of slices that were passed
	window   uint64 // bytes that may be in flight
	low      uint64 // the same for background
	piece    uint64 // slice that suits it now, bytes
	lowPiece uint64 // the same for background
	bw       float64
	b0       float64 // nanoseconds
	b1       float64
	spare    *laneState // the one that background leaves alone; nil: there are not two

	out *egressTurn // at the local rail; nil: nobody else is in its way there

	apart  bool // nobody ever can be
	path   Path
	peer   *Peer
	index  int // in peer.pairs
	tier   int
	lanes  []*laneState
	shared int    // slots that are not kept, on lanes that background uses, too
	slice  uint64 // the longest slice that its lanes take, bytes

	// Learned, with bw, b0 and b1.
	neutral   float64 // bytes per nanosecond, before anything is known
	samples   int
	sampled   Instant // the last one
	seen      Instant // the last decay or sample
	lat       [2]Instant
	latBytes  [2]uint64 // of the slices that showed them
	latAt     Instant   // begin of lat[0]; lat[1] is the span before
	err       float64   // mean of |predicted - actual| / actual
	delivered uint64    // bytes
	delivAt   Instant   // the last of them, or the begin of the busy period
	moved     Instant   // the last time that anything came back
	// the last time that a slice found next to nothing before it, or that the pair was idle
	clean    Instant
	patience Instant // of draining
	credit   uint64  // the most that its receiver wants to wait for it; 0: no word of it
	rtt      Instant // the round trip when its lanes came up, the least of them; 0: unknown

	// Health, with state.
	down     bool // a link is
	step     int  // of Readmitted
	since    Instant
	until    Instant // of Excluded
	silent   bool    // that is why it is excluded
	cooldown time.Duration
	reason   string
	errors   int // since errorsAt
	errorsAt Instant

	turn  float64 // of Weighted
	count Counters
	tiers [MaxPlaces]uint8 // by place; 0: not asked yet
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
	Doubled      uint64 `json:"slices_doubled"` // given to others as well, for silence
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
	passed   uint64 // of them, of slices that were passed
	flights  int
	head     int32 // indices of flights; none is -1
	tail     int32
	// the last time that anything came back, or that it was given something while idle
	moved   Instant
	doubted Instant // when it became suspect last, or was given another chance
	suspect bool
	broken  bool
	busy    int // index in Scheduler.busy, or -1
}

func (l *laneState) usable() bool { return !l.suspect && !l.broken }

// nominal is the neutral rate of a link that says it has so many Gbit/s. Absurd claims are bounded:
// they cost a window until the first sample, no more.
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

// load is what is in flight and believed to move.
func (q *pair) load() uint64 { return q.inflight - q.stalled }

// expect predicts the time from now until the last of len more bytes is confirmed.
func (q *pair) expect(n uint64) float64 { return q.b0 + q.b1*float64(q.load()+n)/q.bw }

// expectAt is expect with what others have in flight over the local rail.
func (q *pair) expectAt(now Instant, n uint64) float64 {
	v := q.expect(n)
	if q.crowded() {
		v = max(v, q.b0+q.b1*(float64(q.out.queue(now))+float64(n)/q.out.bw))
	}
	return v
}

// score ranks pairs for memory at a place: less is better.
func (q *pair) score(now Instant, n uint64, at Place) float64 {
	return tierPenalty[q.tierAt(at)] * q.expectAt(now, n)
}

// usable reports that real work may go there.
func (q *pair) usable() bool { return q.live > 0 && q.state <= Readmitted }

// room reports that the window is open for n more bytes. Urgent ones may go one slice beyond it:
// they wait behind a window, not for one.
func (q *pair) room(n uint64, prio Priority, urgent bool) bool {
	load, slots, w, all := q.load(), q.slots, q.most(prio), q.window
	if urgent {
		all += q.piece
		if q.state == Healthy && q.samples > 0 && q.crowded() {
			// Its turn at the local rail is what holds it back. A rate that it learned between
			// others is what they left it.
			all = max(all, min(uint64(q.out.bw*float64(spareTime)), q.creditMost()))
		}
		w = all
	} else {
		slots -= q.kept // what is urgent finds a place on each lane
	}
	if q.draining {
		w = q.shallow()
		all = w
	}
	if q.flights >= slots || load > 0 && load+n > w {
		return false
	}
	if prio == Background && load > 0 && load+q.piece > all {
		// its slices are shorter: one after the other they would take what a longer one waits for
		return false
	}
	return prio != Background || q.spare == nil ||
		q.flights-q.spare.flights < slots-q.spare.most(urgent)
}

// most is the window of a priority.
func (q *pair) most(prio Priority) uint64 {
	if prio == Background {
		return q.low
	}
	return q.window
}

// most is how many slices may be on the lane.
func (l *laneState) most(urgent bool) int {
	if !urgent && l.info.MaxSlices > 1 {
		return l.info.MaxSlices - 1
	}
	return l.info.MaxSlices
}

// pick is the least loaded lane that has room.
func (q *pair) pick(prio Priority, urgent bool) *laneState {
	var found *laneState
	for _, l := range q.lanes {
		if l.usable() && l.flights < l.most(urgent) && (found == nil || l.inflight < found.inflight) &&
			(prio != Background || l != q.spare) {
			found = l
		}
	}
	return found
}

// least is the least delay that was seen lately from post to confirmation, of slices that found
// next to nothing before them: that of the path, and the time of one slice on the wire. (What that
// time is cannot be taken off: as long as the path is not full, nobody knows how fast it is.)
// Without any such slice it is the round trip of when the lanes came up; 0: unknown.
func (q *pair) least() Instant {
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

// holds is what is on the way when the rail is full and next to nothing waits for it: bandwidth x
// delay.
func (q *pair) holds() float64 { return q.bw * float64(q.least()) }

// shallow is what may be in flight before a slice that is to tell the delay. Without a queue the
// path would hold more; and if what is taken for its delay has a queue in it, what is seen now is
// less, and the next look sees all of it.
func (q *pair) shallow() uint64 { return uint64(drainShare * q.holds()) }

// drain closes the window of a pair that has been busy for long without a look at its path alone,
// one pair of a peer at a time.
func (q *pair) drain(now Instant) {
	switch {
	case q.load() == 0:
		q.drained(now) // whatever goes first will see it
	case q.draining && now >= q.patience:
		q.drained(now) // something does not end; that is judged elsewhere
	case q.crowded(): // where others keep the local rail busy, closing this window shows nothing
	case q.peer.draining == nil && q.peer.policy == Spray && q.usable() && q.samples > 0 &&
		now-q.clean >= max(drainEvery, drainDelays*q.least()):
		q.peer.draining, q.draining, q.patience = q, true, now+lateFactor*Instant(q.expect(0))
	}
}

// drained opens it again.
func (q *pair) drained(now Instant) {
	q.clean = now
	if q.draining {
		q.peer.draining, q.draining = nil, false
	}
}

// resize follows what was learned: a slice is what the rail moves in sliceTime, and a window what
// the path holds, times gain, and some more.
func (q *pair) resize() {
	q.slice = max(q.slice, transfer.ChunkBytes)
	if q.peer.policy != Spray {
		q.piece, q.window = q.slice, staticSlices*q.slice
		q.lowPiece, q.low = q.piece, q.window
		return
	}
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

// whole is a slice of so many bytes in whole chunks: longer where lanes do not take enough of them
// to fill a window, and no longer than they take.
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

// ewma moves v towards the newest sample by its weight, which is the weight of the *new* one.
func ewma(v, sample, weight float64) float64 { return v + weight*(sample-v) }

// learn takes the confirmation of f. out is the rate of the local rail while f was in flight, if
// that is what f waited for, beside slices of others: alone there, the pair would be as fast; 0: it
// is not.
func (q *pair) learn(now Instant, f *flight, out float64) {
	took := max(now-f.posted, 1)
	q.count.Bytes += f.bytes

	// Bytes confirmed since f was posted, by the time in which the rail was busy with them. What waits
	// in queues shows up in neither.
	rate := float64(q.delivered-f.path.delivered) / float64(max(now-f.path.begin, time.Microsecond))
	rate = min(max(rate, smallest), maxClaim)
	// single slices that take twice as long as they should prove that it is slower
	limited := f.path.limited && !(q.crowded() && q.b1 > lateFactor)
	switch {
	case out > 0:
		rate, limited = out, false
	case limited && q.samples > 0:
		// The rail could have done more. That it did as much is proved by the slice alone: other
		// confirmations come late, and then together.
		rate = float64(f.bytes) / float64(took)
	}
	if !limited || rate > q.bw || q.samples == 0 {
		q.bw = ewma(q.bw, rate, max(alpha, 1/float64(q.samples+1)))
	}
	q.samples = min(q.samples+1, 1<<20)
	q.sampled, q.seen = now, now

	predicted, actual := float64(f.predicted), float64(took)
	q.err = ewma(q.err, min(math.Abs(predicted-actual)/actual, maxB1), alpha)
	// What the wire does not explain is a cost per slice where the slice is short, and a factor where
	// it is long.
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

// decay moves what was learned towards neutral where nothing new was learned for long, so that a
// rail is not judged for ever by a bad hour.
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

// stirs takes a sign of life. What is out of use for its silence, and is silent no longer, is
// probed at once: no cooldown tells more than that.
func (q *pair) stirs(now Instant) {
	if q.state == Excluded && q.silent {
		q.until = min(q.until, now)
		q.peer.renewAt = 0
	}
}

// fault counts an error of the path; several of them exclude it, and one does where it is on trial.
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

// proven takes a confirmation of something that was posted after the exclusion.
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
