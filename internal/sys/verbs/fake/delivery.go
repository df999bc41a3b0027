package fake

import (
	"slices"
	"time"

	"github.com/kvspray/kvspray/internal/sys/verbs"
)

// lagLasts is how long Serve leaves bytes out of memory that nothing forces there, once nothing
// else moves.
const lagLasts = time.Millisecond

// Hop is a step of a message's way.
type Hop uint8

// The hops, from the sender to the receiver and back. The first two and the last are of the sending
// queue pair, Show and Complete of the receiving one.
const (
	Read Hop = iota // the sender's NIC reads the bytes: they are on the wire
	// the receiver's NIC takes the message in, looks at its key, and acknowledges it.
	Arrive
	Show     // its bytes are in the receiver's memory
	Complete // the receiver's completion
	Answer   // the sender's completion
	numHops
)

// Hold stops a queue pair at some of its hops until Release; without any, its messages stay on the
// wire.
func (f *Fabric) Hold(qp uint32, hops ...Hop) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(hops) == 0 {
		hops = []Hop{Arrive}
	}
	for _, h := range hops {
		f.held[step{qp, h}] = true
	}
}

// Lag keeps bytes that a sending queue pair's messages bring out of the receiver's memory, until
// Release or until something forces them there: a completion of the receiver's behind them, or the
// end of its key or queue pair.
func (f *Fabric) Lag(qp uint32) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lags[qp] = true
}

// Release lets a queue pair go on.
func (f *Fabric) Release(qp uint32) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.lags, qp)
	for _, q := range f.order {
		for i := range q.inbound {
			if a := &q.inbound[i]; a.from == qp {
				a.lags = false
			}
		}
	}
	for h := range numHops {
		delete(f.held, step{qp, h})
	}
	f.wakeLocked()
}

// Held counts the messages of a sending queue pair that have left it, and whose bytes are not in
// the receiver's memory.
func (f *Fabric) Held(qp uint32) (n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, q := range f.order {
		if q.num == qp {
			n += len(q.wire)
		}
		for i := range q.inbound {
			if a := &q.inbound[i]; a.from == qp && a.to != nil {
				n++
			}
		}
	}
	return n
}

// Serve runs the fabric whenever there may be something to do, until the result is called; for
// tests that do not drive it themselves.
func (f *Fabric) Serve() (stop func()) {
	done, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		var due <-chan time.Time
		for {
			for f.step(false) {
			}
			if due == nil && f.lagging() {
				due = time.After(lagLasts)
			}
			select {
			case <-f.work:
			case <-due:
				due = nil
				f.Run()
			case <-done:
				return
			}
		}
	}()
	return func() { close(done); <-stopped }
}

func (f *Fabric) wakeLocked() {
	select {
	case f.work <- struct{}{}:
	default:
	}
}

// LoseAnswers makes completions of a sending queue pair never come; its writes take effect.
func (f *Fabric) LoseAnswers(qp uint32) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lost[qp] = true
}

// Timers makes the retry counter of a sender run out at once where its message finds no queue pair.
// Without it only TimeOut does that.
func (f *Fabric) Timers() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.timers = true
}

// TimeOut is the sender's retry counter running out: its oldest request fails, the rest is flushed.
// Messages on the wire still arrive.
func (f *Fabric) TimeOut(qp uint32) {
	f.mu.Lock()
	defer f.mu.Unlock()
	q := f.qps[qp]
	if q == nil || q.state == verbs.Error {
		return
	}
	if len(q.unacked) > 0 {
		q.answers = append(q.answers, verbs.Completion{ID: q.unacked[0].w.ID, QP: q.num,
			Status: verbs.RetryExceeded})
		q.unacked = q.unacked[1:]
	}
	q.failLocked()
}

// Run steps until nothing moves any more and returns how many steps that took.
func (f *Fabric) Run() int {
	for n := 0; ; n++ {
		if !f.Step() {
			return n
		}
	}
}

// Step makes one hop of one queue pair. Without a seed they take turns in the order in which they
// were made. False: nothing can move.
func (f *Fabric) Step() bool { return f.step(true) }

// step is Step. settle: where nothing else moves, bytes that lag do.
func (f *Fabric) step(settle bool) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	first := f.drawLocked(len(f.order))
	for i := range f.order {
		at := (first + i) % len(f.order)
		if q := f.order[at]; f.moveLocked(q) {
			if f.rng == nil {
				f.order = append(slices.Delete(f.order, at, at+1), q)
			}
			return true
		}
	}
	// Nothing moves: what is closed and has nothing on the wire is forgotten.
	f.order = slices.DeleteFunc(f.order, func(q *queuePair) bool {
		return f.qps[q.num] == nil &&
			len(q.wire) == 0
	})
	if !settle {
		return false
	}
	for _, q := range f.order {
		for i := range q.inbound {
			a := &q.inbound[i]
			a.lags = f.lags[a.from]
		}
		if f.moveLocked(q) {
			return true
		}
	}
	return false
}

func (f *Fabric) lagging() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.ContainsFunc(f.order, func(q *queuePair) bool {
		return slices.ContainsFunc(q.inbound, func(a arrival) bool { return a.lags && !f.lags[a.from] })
	})
}

func (q *queuePair) lagging() (n int) {
	for i := range q.inbound {
		if q.inbound[i].lags {
			n++
		}
	}
	return n
}

// drawLocked is a number below n; 0 without a seed.
func (f *Fabric) drawLocked(n int) int {
	if f.rng == nil || n < 2 {
		return 0
	}
	return f.rng.IntN(n)
}

// moveLocked makes one hop of a queue pair. Without a seed, what is furthest on its way goes first.
func (f *Fabric) moveLocked(q *queuePair) bool {
	if len(q.sends)+len(q.wire)+len(q.answers)+len(q.inbound) == 0 {
		return false
	}
	order := [numHops]Hop{Show, Complete, Answer, Arrive, Read}
	first := f.drawLocked(len(order))
	for i := range order {
		if h := order[(first+i)%len(order)]; !f.held[step{q.num, h}] && f.hopLocked(q, h) {
			return true
		}
	}
	return false
}

func (f *Fabric) hopLocked(q *queuePair, h Hop) bool {
	switch h {
	case Read:
		return f.readLocked(q)
	case Arrive:
		return f.arriveLocked(q)
	case Show:
		return f.showLocked(q)
	case Complete:
		return f.completeLocked(q)
	}
	if len(q.answers) == 0 {
		return false
	}
	q.cq.addLocked(q.answers[0])
	q.answers = q.answers[1:]
	return true
}

func (f *Fabric) readLocked(q *queuePair) bool {
	if len(q.sends) == 0 || q.state != verbs.ReadyToSend || q.refused {
		return false
	}
	w := q.sends[0]
	q.sends = q.sends[1:]
	b := f.sliceLocked(q.p, w.LocalKey, w.LocalAddr, w.Len, false)
	if b == nil && w.Len > 0 {
		q.refused = true // what is ahead of it ends first
		q.unacked = append(q.unacked, request{w: w, acked: true, status: verbs.LocalAccess})
		f.settleLocked(q)
		return true
	}
	m := message{w: w, data: append([]byte(nil), b...), life: q.life, to: q.remote}
	if to := f.qps[q.remote]; to != nil {
		m.expected = to.life
	}
	q.unacked = append(q.unacked, request{w: w})
	q.wire = append(q.wire, m)
	return true
}

func (f *Fabric) arriveLocked(q *queuePair) bool {
	if len(q.wire) == 0 {
		return false
	}
	at := 0
	if f.unorderedLocked(q) {
		at = f.drawLocked(len(q.wire))
	}
	m := q.wire[at]
	// which clears: a kept queue pair does not keep what it sent
	q.wire = slices.Delete(q.wire, at, at+1)
	to := f.qps[m.to]
	if to == nil || (to.state != verbs.ReadyToReceive && to.state != verbs.ReadyToSend) ||
		to.remote != q.num || to.life != m.expected || q.refused && q.life == m.life {
		if f.timers && !q.refused {
			f.ackLocked(q, &m, verbs.RetryExceeded)
		}
		return true // no queue pair there; the sender's time-out will report it
	}
	b := f.sliceLocked(to.p, m.w.RemoteKey, m.w.RemoteAddr, m.w.Len, true)
	switch {
	case b == nil && m.w.Len > 0:
		f.ackLocked(q, &m, verbs.RemoteAccess)
		to.failLocked() // an access error takes both ends down
	case m.w.Op == verbs.WriteImm && len(to.receives) == 0:
		f.ackLocked(q, &m, verbs.ReceiverNotReady)
	default:
		f.arrived++
		if m.w.Len > 0 {
			lags := f.drawLocked(2) == 1 && to.lagging() < maxLagging || f.lags[q.num]
			to.inbound = append(to.inbound, arrival{from: q.num, at: f.arrived, key: m.w.RemoteKey,
				addr: m.w.RemoteAddr, to: b, data: m.data, lags: lags})
		}
		if m.w.Op == verbs.WriteImm {
			to.inbound = append(to.inbound, arrival{from: q.num, at: f.arrived,
				completion: verbs.Completion{ID: to.receives[0], QP: to.num, Op: verbs.Receive, Imm: m.w.Imm}})
			to.receives = to.receives[1:]
		}
		f.ackLocked(q, &m, verbs.OK)
	}
	return true
}

func (f *Fabric) unorderedLocked(q *queuePair) bool { return f.ports[q.d.name].unordered }

// waitsLocked reports whether a completion has to wait for bytes that arrived ahead of it.
func (f *Fabric) waitsLocked(q *queuePair, completion, bytes *arrival) bool {
	return !f.unorderedLocked(q) || completion.at == 0 || completion.at == bytes.at
}

// showLocked puts the bytes of one arrival into memory: any, but where two lie over each other the
// earlier one first. What lags waits for a completion that waits for it.
func (f *Fabric) showLocked(q *queuePair) bool {
	first := f.drawLocked(len(q.inbound))
	for i := range q.inbound {
		at := (first + i) % len(q.inbound)
		a := &q.inbound[at]
		if a.to == nil || a.lags && !slices.ContainsFunc(q.inbound[at:],
			func(b arrival) bool { return b.to == nil && f.waitsLocked(q, &b, a) }) {
			continue
		}
		for earlier := 0; earlier < at; earlier++ {
			if b := &q.inbound[earlier]; b.to != nil && b.overlaps(&q.inbound[at]) {
				at, earlier = earlier, -1
			}
		}
		a = &q.inbound[at]
		copy(a.to, a.data)
		q.inbound = slices.Delete(q.inbound, at, at+1)
		return true
	}
	return false
}

func (f *Fabric) completeLocked(q *queuePair) bool {
	// A failure completes before the requests that are flushed because of it.
	failing := slices.ContainsFunc(q.answers, func(c verbs.Completion) bool {
		return c.Status !=
			verbs.OK && c.Status != verbs.Flushed
	})
	for at := range q.inbound {
		a := &q.inbound[at]
		if a.to != nil || failing && a.completion.Status == verbs.Flushed {
			continue
		}
		if !slices.ContainsFunc(q.inbound[:at], func(b arrival) bool {
			return b.to != nil &&
				f.waitsLocked(q, a, &b)
		}) {
			q.cq.addLocked(a.completion)
			q.inbound = slices.Delete(q.inbound, at, at+1)
			return true
		}
		if !f.unorderedLocked(q) {
			return false // nor those behind it
		}
	}
	return false
}

// ackLocked notifies the sender's NIC how a message ended.
func (f *Fabric) ackLocked(q *queuePair, m *message, s verbs.Status) {
	if q.life != m.life {
		return
	}
	q.refused = q.refused || s != verbs.OK
	if f.lost[q.num] {
		return
	}
	for i := range q.unacked { // or the sender gave up on it
		if r := &q.unacked[i]; r.w.ID == m.w.ID && !r.acked {
			r.acked, r.status = true, s
			break
		}
	}
	f.settleLocked(q)
}

// settleLocked makes answers of what has ended, in the order of posting.
func (f *Fabric) settleLocked(q *queuePair) {
	for len(q.unacked) > 0 && q.unacked[0].acked {
		r := q.unacked[0]
		q.unacked = q.unacked[1:]
		switch {
		case r.status != verbs.OK:
			q.answers = append(q.answers, verbs.Completion{ID: r.w.ID, QP: q.num, Status: r.status})
			q.failLocked()
		case r.w.Signaled:
			q.answers = append(q.answers, verbs.Completion{ID: r.w.ID, QP: q.num, Op: r.w.Op})
		}
	}
}
