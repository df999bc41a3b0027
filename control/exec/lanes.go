package exec

import (
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// maxRanks bounds the transports that are told apart; the rest share the last rank.
const maxRanks = 8

// badAfter is how many slices a transport may fail, for reasons of its own, before a sending prefers the next one.
const badAfter = 3

// lane is one path to a peer.
type lane struct {
	info     LaneInfo
	peer     *peer
	rank     int // of its transport
	inflight int // slices
	chunks   int
	moved    Instant // the last time that a slice ended, or that it was given one while idle
	suspect  bool    // nothing ended for too long: passed over until something does
	broken   bool    // refused slices: its end is about to be told
	batch    []transport.Slice
}

// flight is a slice on a lane. Its index and use are the cookie.
type flight struct {
	snd     *Sending
	lane    *lane
	r       transfer.Range
	attempt uint32 // of this range: a later one takes the chunks over from an earlier one
	strikes uint8  // attempts that failed for a reason that is counted
	use     uint32 // how often this entry was given out
	live    bool
	doubled bool // its range was given to another lane meanwhile
}

func (e *Exec) touch(p *peer) {
	if !p.dirty {
		p.dirty = true
		e.touched = append(e.touched, p)
	}
}

func (e *Exec) rank(backend string) int {
	for i, t := range e.cfg.Transports {
		if t == backend {
			return min(i, maxRanks-1)
		}
	}
	return maxRanks - 1
}

// LaneUp adds a lane.
func (e *Exec) LaneUp(now Instant, in LaneInfo) {
	if e.lanes[in.ID] != nil {
		return
	}
	in.SliceBytes = max(in.SliceBytes, transfer.ChunkBytes)
	in.MaxInFlight = max(in.MaxInFlight, 1)
	l := &lane{info: in, peer: e.peer(in.Peer), rank: e.rank(in.Backend), moved: now}
	e.lanes[in.ID] = l
	l.peer.lanes = append(l.peer.lanes, l)
	e.touch(l.peer)
	e.assign(now)
}

// LaneDown removes a lane. What it still held ends through Results, before or after.
func (e *Exec) LaneDown(now Instant, id uint64) {
	l := e.lanes[id]
	if l == nil {
		return
	}
	delete(e.lanes, id)
	l.peer.lanes = remove(l.peer.lanes, l)
	l.broken = true
	e.touch(l.peer)
	e.assign(now)
}

// Results ends slices.
func (e *Exec) Results(now Instant, res []transport.Result) {
	for i := range res {
		e.result(now, &res[i])
	}
	e.assign(now)
}

func (e *Exec) result(now Instant, r *transport.Result) {
	i := uint32(r.Cookie)
	if int(i) >= len(e.flights) {
		return
	}
	f := &e.flights[i]
	if !f.live || f.use != uint32(r.Cookie>>32) {
		return
	}
	l, snd := f.lane, f.snd
	e.touch(snd.peer)
	l.inflight--
	l.chunks -= int(f.r.Count)
	snd.peer.inflight--
	e.live--
	again, doubled := retry{f.r, f.attempt + 1, f.strikes, l.info.ID}, f.doubled
	f.live, f.snd, f.lane = false, nil, nil
	e.free = append(e.free, i)
	if r.Reason != transfer.ReasonLaneLost {
		l.moved, l.suspect = now, false
	}
	if snd.state != sendOpen {
		return
	}
	if r.Outcome == transfer.Landed {
		if n, err := snd.Plan.Space().Bytes(again.r); err == nil {
			snd.moved[l.rank] += n
			if !snd.src.finished {
				snd.early += n
			}
		}
		return
	}
	switch r.Reason {
	case transfer.ReasonDisowned, transfer.ReasonSourceGone:
		e.disowned(now, snd)
		return
	case transfer.ReasonUnknownSlot, transfer.ReasonStaleGen, transfer.ReasonRevoked:
		// The receiver has closed the lease; its word is on the way.
		snd.stopped = true
		return
	case transfer.ReasonSuperseded:
		return // by a later attempt of ours, which carries on
	case transfer.ReasonLaneLost:
		l.broken = true
	case transfer.ReasonChecksum, transfer.ReasonTimeout, transfer.ReasonNone:
		again.strikes++
	default:
		again.strikes++
		if snd.fails[l.rank] < badAfter {
			snd.fails[l.rank]++
		}
	}
	if doubled {
		return // its other copy carries on
	}
	if int(again.strikes) >= e.cfg.MaxAttempts {
		detail := r.Reason.String()
		if r.Err != nil {
			detail += ": " + r.Err.Error()
		}
		e.lose(now, snd, true, "a slice failed too often; last: "+detail)
		return
	}
	snd.retries = append(snd.retries, again)
}

// disowned stops a sending whose source is no longer valid. The engine's record says why; if none comes, the receiver is
// told to grant afresh.
func (e *Exec) disowned(now Instant, snd *Sending) {
	if snd.stopped {
		return
	}
	snd.stopped = true
	e.agenda.arm(newTimer(func(now Instant) { e.lose(now, snd, false, "the source blocks changed") }), now+disownedWait)
}

// assign gives work to lanes: those of a peer that has news.
func (e *Exec) assign(now Instant) {
	for i := 0; i < len(e.touched); i++ {
		p := e.touched[i]
		p.dirty = false
		e.touched[i] = nil
		e.assignPeer(now, p)
	}
	e.touched = e.touched[:0]
	if len(e.late) > 0 {
		e.out = append(e.out, e.late...)
		clear(e.late)
		e.late = e.late[:0]
	}
	if e.live > 0 && e.scan.idx < 0 {
		e.agenda.arm(e.scan, now+e.cfg.SliceTimeout/2)
	}
}

func (e *Exec) assignPeer(now Instant, p *peer) {
	if len(p.lanes) == 0 {
		return
	}
	for _, snd := range p.sends {
		if snd.stopped || !snd.live {
			continue
		}
		for p.inflight < e.cfg.MaxSlices && e.next(now, p, snd) {
		}
	}
	for _, l := range p.lanes {
		if len(l.batch) == 0 {
			continue
		}
		a := e.emit(Move)
		a.Lane, a.first, a.count = l.info.ID, len(e.outSlices), len(l.batch)
		e.outSlices = append(e.outSlices, l.batch...)
		clear(l.batch)
		l.batch = l.batch[:0]
	}
}

// next gives one slice of snd to a lane; false: nothing to send, or no lane has room.
func (e *Exec) next(now Instant, p *peer, snd *Sending) bool {
	if k := len(snd.retries) - 1; k >= 0 {
		t := snd.retries[k]
		l := e.pick(p, snd, t.avoid)
		if l == nil {
			return false
		}
		snd.retries = snd.retries[:k]
		e.put(now, snd, l, t)
		return true
	}
	if snd.ready.Count() == 0 {
		return false
	}
	l := e.pick(p, snd, 0)
	if l == nil {
		return false
	}
	r := snd.ready.Take(uint32(l.info.SliceBytes / transfer.ChunkBytes))
	if r.Count == 0 {
		return false
	}
	e.put(now, snd, l, retry{r: r, attempt: 1})
	return true
}

// pick chooses a lane: the least loaded of the preferred transport. Lanes that are suspect, that just failed this range, or
// whose transport keeps failing this sending come last. A lane whose window is full is not waited for by going elsewhere:
// the next result opens it.
func (e *Exec) pick(p *peer, snd *Sending, avoid uint64) *lane {
	best := 1 << 30
	var found *lane
	for _, l := range p.lanes {
		if l.broken {
			continue
		}
		class := l.rank
		if snd.fails[l.rank] >= badAfter {
			class += maxRanks
		}
		if l.info.ID == avoid {
			class += 2 * maxRanks
		}
		if l.suspect {
			class += 4 * maxRanks
		}
		if class < best {
			best, found = class, nil
		}
		if class == best && e.room(l) && (found == nil || l.chunks < found.chunks) {
			found = l
		}
	}
	return found
}

// room reports whether the window of a lane is open.
func (e *Exec) room(l *lane) bool {
	return l.inflight < l.info.MaxInFlight &&
		(l.inflight == 0 || l.chunks < e.cfg.WindowSlices*l.info.SliceBytes/transfer.ChunkBytes)
}

func (e *Exec) put(now Instant, snd *Sending, l *lane, t retry) {
	var i uint32
	if n := len(e.free); n > 0 {
		i = e.free[n-1]
		e.free = e.free[:n-1]
	} else {
		i = uint32(len(e.flights))
		e.flights = append(e.flights, flight{})
	}
	f := &e.flights[i]
	f.use++
	f.snd, f.lane, f.r, f.attempt, f.strikes, f.live, f.doubled = snd, l, t.r, t.attempt, t.strikes, true, false
	if l.inflight == 0 {
		l.moved = now
	}
	l.inflight++
	l.chunks += int(t.r.Count)
	snd.peer.inflight++
	e.live++
	l.batch = append(l.batch, transport.Slice{Origin: &snd.Origin, Range: t.r, Attempt: t.attempt, Cookie: uint64(f.use)<<32 | uint64(i)})
}

// scanFlights finds lanes on which nothing ends and gives their ranges to others. The receiver's bitmap makes a duplicate
// harmless.
func (e *Exec) scanFlights(now Instant) {
	for _, l := range e.lanes {
		if l.inflight > 0 && now-l.moved >= e.cfg.SliceTimeout {
			l.suspect = true
		}
	}
	for i := range e.flights {
		f := &e.flights[i]
		if !f.live || f.doubled || !f.lane.suspect || f.snd.state != sendOpen || f.snd.stopped || !healthy(f.snd.peer) {
			continue
		}
		f.doubled = true
		f.snd.retries = append(f.snd.retries, retry{f.r, f.attempt + 1, f.strikes, f.lane.info.ID})
		e.touch(f.snd.peer)
	}
}

func healthy(p *peer) bool {
	for _, l := range p.lanes {
		if !l.suspect && !l.broken {
			return true
		}
	}
	return false
}

// confirmFlights counts what is still on its way as moved: the commit has overtaken its confirmation.
func (e *Exec) confirmFlights(snd *Sending) {
	for i := range e.flights {
		f := &e.flights[i]
		if !f.live || f.snd != snd || f.doubled {
			continue
		}
		if n, err := snd.Plan.Space().Bytes(f.r); err == nil {
			snd.moved[f.lane.rank] += n
		}
	}
}
