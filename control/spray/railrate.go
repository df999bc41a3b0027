package spray

// The rate of a shared local rail, and the corrections of its queue.

// railRate counts a confirmed slice. It returns the rate of the local rail if the slice waited for
// the rail, and 0 if it was late, found the rail idle, or was alone there.
func (q *pair) railRate(now Instant, fl *flight) (rate float64) {
	o := q.out
	if o == nil || fl.rail.mark == 0 {
		return 0
	}
	o.delivered += fl.bytes
	if fl.rail.clean {
		took := max(now-fl.posted-Instant(float64(fl.bytes)/o.bw), 0)
		if d := q.minTrip(o.bw); d > 0 {
			took = min(took, d+outLate) // one late confirmation does not make the path longer
		}
		if o.tripped {
			took = Instant(ewma(float64(o.meanTrip), float64(took), alpha))
		}
		o.meanTrip, o.tripped = took, true
	}
	trip := q.trip(o.bw)
	newest := fl.rail.mark > o.cleared // else later slices have arrived: it waited elsewhere
	if newest {
		o.cleared = fl.rail.mark
		late := now - trip + Instant(float64(o.posted-o.cleared)/o.bw) - o.free
		if late < 0 {
			o.free += late
			late = 0
		}
		o.late, o.lookLate = min(o.late, late), min(o.lookLate, late)
	}
	late := now-trip-fl.posted > 2*(fl.rail.leaves-fl.posted+outLate)
	if !late && !fl.rail.busy && o.waiting == 0 && q.peer.waits(Background) == 0 {
		o.spanDry++
	}
	o.learn(now, fl.bytes)
	alone := o.delivered-fl.rail.delivered == q.delivered-fl.path.delivered
	if !newest || o.samples == 0 || !fl.rail.busy || alone || late {
		return 0
	}
	return o.bw
}

// learn updates the rate of the rail and its queue at the end of each span.
func (e *egressQueue) learn(now Instant, bytes uint64) {
	e.spanTime += now - e.delivAt
	e.spanBytes += bytes
	e.spanCount++
	e.delivAt = now
	if e.probing {
		e.judge(now)
	}
	if e.spanTime < outSpan || e.spanCount < outSlices {
		return
	}
	rate := min(max(float64(e.spanBytes)/float64(e.spanTime), smallest), maxClaim)
	late := e.late
	if late == never {
		late = 0
	}
	full := rate >= fullRail*e.bw
	dry := 2*e.spanDry > e.spanCount // too few slices: the rail could have moved more
	switch {
	case dry && rate <= e.bw:
		e.restart()
		return
	case e.samples == 0:
		e.bw = rate
	case e.probing:
	case rate > e.bw:
		e.bw = ewma(e.bw, rate, outWeight)
	default:
		e.bw = max(rate, e.bw*max(0, 1-float64(e.spanTime)/float64(2*outHalf)))
	}
	if full {
		// A rail that moves less than it can has no queue: late slices wait at the peers.
		e.free += late
	}
	e.samples, e.sampled = min(e.samples+1, 1<<20), now
	e.restart()
	wanted := e.waiting > 0 && e.turns[DecodeWaits].Len() == 0
	if full && wanted && !e.probing && now-e.probed >= e.probeGap {
		e.probing, e.probed, e.probeFrom = true, now, e.posted
		e.looked, e.lookLate = now, never
	}
}

func (e *egressQueue) restart() {
	e.spanTime, e.spanBytes, e.spanCount, e.spanDry, e.late = 0, 0, 0, 0, never
}

// judge ends a probe: it raises the rate if slices were not late although more was sent, and keeps
// it if they were. If the receivers limit a rail, its learned rate is only what they took; probes
// then find that they take more.
func (e *egressQueue) judge(now Instant) {
	switch {
	case now-e.looked >= probeLook && e.lookLate != never:
		if e.lookLate > outSlack {
			// The rail moved no more: the excess waits.
			e.free += e.lookLate
			e.late = 0
			e.probing, e.probeGap = false, min(2*e.probeGap, probeRest)
			return
		}
		e.looked, e.lookLate = now, never
	}
	if now-e.probed < probeSpan {
		return
	}
	e.probing = false
	if float64(e.posted-e.probeFrom) < probePart*e.bw*float64(now-e.probed) {
		return // too little was posted: nothing could be late
	}
	e.probeGap = probeEvery
	e.bw = min(e.bw*probeGain, maxClaim)
	e.restart()
}

// trip is the time from when a slice has left the local rail to its confirmation: the mean of
// slices that found the rail idle, or else minTrip. The mean includes the time in which the two
// processes wait for a processor, and exceeds minTrip by outLate at most.
func (q *pair) trip(rate float64) Instant {
	d := q.minTrip(rate)
	switch o := q.out; {
	case !o.tripped:
		return d
	case d == 0:
		return o.meanTrip // nothing else is known
	default:
		return min(max(d, o.meanTrip), d+outLate)
	}
}

// minTrip is the RTT of when the lanes opened, or the least delay that was seen without the time
// of its slice on the wire, whichever is longer; 0: unknown.
func (q *pair) minTrip(rate float64) Instant {
	d, bytes := q.lat[0], q.latBytes[0]
	if d == 0 || q.lat[1] != 0 && q.lat[1] < d {
		d, bytes = q.lat[1], q.latBytes[1]
	}
	return max(d-min(Instant(float64(bytes)/rate), sliceTime), q.rtt, 0)
}
