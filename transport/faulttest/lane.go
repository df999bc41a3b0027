package faulttest

import (
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// lane is a lane with faults. Slices go to the inner lane under cookies of their own, so that an
// extra slice is distinguishable from its original slice.
type lane struct {
	transport.Lane
	b *Backend

	mu     sync.Mutex
	open   map[uint64]*entry // by the inner cookie
	taken  int               // entries whose result the host awaits
	extras int               // entries that are extra slices
	next   uint64
	ended  bool
	stuck  bool
	frozen []func() // results kept by a stuck lane, in order

	acked uint64 // before it was stuck
}

// entry is a slice that has not ended.
type entry struct {
	s     transport.Slice // the host's
	rule  *Rule           // nil: no fault
	extra Kind            // not 0: the host has received a result
	began time.Time
	stuck bool // its lane kept it, or its result
	left  bool // it is in the inner lane, or was
	// pending: Move has not returned; only Move may end the entry, as never accepted.
	pending bool
}

// kind is the fault of the entry; 0: none.
func (e *entry) kind() Kind {
	if e.rule == nil {
		return 0
	}
	return e.rule.Kind
}

var errBusy = errors.New("faulttest: more slices than the lane takes at once")

// Acked implements transport.Meter. A stuck lane shows no progress, even if the inner lane still
// moves.
func (l *lane) Acked() uint64 {
	m, ok := l.Lane.(transport.Meter)
	if !ok {
		return 0
	}
	n := m.Acked()
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.stuck {
		l.acked = n
	}
	return l.acked
}

// MaxInFlight implements transport.Lane. A quarter of the inner lane is for extra slices.
func (l *lane) MaxInFlight() int { return max(1, l.Lane.MaxInFlight()*3/4) }

// extraRetry is the wait of an extra slice that finds its quarter full.
const extraRetry = 200 * time.Microsecond

// Move implements transport.Lane.
func (l *lane) Move(batch []transport.Slice) error {
	var plain []transport.Slice
	type faulty struct {
		id   uint64
		kind Kind
	}
	var bad []faulty
	now := time.Now()
	l.mu.Lock()
	if l.ended {
		l.mu.Unlock()
		return fmt.Errorf("faulttest: move on lane %d: %w", l.ID(), net.ErrClosed)
	}
	if l.taken+len(batch) > l.MaxInFlight() {
		n := l.taken
		l.mu.Unlock()
		return fmt.Errorf("faulttest: move on lane %d: %d slices with %d in flight of %d: %w", l.ID(),
			len(batch), n, l.MaxInFlight(), errBusy)
	}
	first := l.next + 1
	for _, s := range batch {
		e := &entry{s: s, began: now, pending: true}
		if !l.stuck {
			e.rule = l.b.plan.draw(l, s)
		}
		l.next++
		id := l.next
		l.open[id] = e
		l.taken++
		if e.kind() == Stuck {
			l.stuck = true
			if after := e.rule.After; after > 0 {
				l.b.pump.after(after, l.thaw)
			}
		}
		if l.stuck {
			e.stuck = true
			l.frozen = append(l.frozen, func() { l.leave(id) })
		} else if e.leavesNow() {
			e.left = true
			plain = append(plain, e.inside(id))
		}
		if e.rule != nil {
			bad = append(bad, faulty{id, e.rule.Kind})
		}
	}
	l.mu.Unlock()
	err := l.Lane.Move(plain)
	l.mu.Lock()
	for id := first; id < first+uint64(len(batch)); id++ {
		e := l.open[id]
		switch {
		case e == nil:
		case err != nil: // nothing of the batch was accepted
			delete(l.open, id)
			l.taken--
		default:
			e.pending = false
			if l.ended && !e.left {
				l.b.pump.after(0, func() {
					l.endAs(id, transfer.NotLanded, transfer.ReasonLaneLost, net.ErrClosed)
				})
			}
		}
	}
	l.mu.Unlock()
	if err != nil {
		return err
	}
	for _, f := range bad {
		l.b.plan.count(f.kind)
		l.suffer(f.id)
	}
	return nil
}

// leavesNow reports whether the slice, or a part of it, goes to the inner lane at once.
func (e *entry) leavesNow() bool {
	switch e.kind() {
	case 0, DelayResult, DropResult, Partial, Duplicate, DuplicateResult:
		return true
	}
	return false
}

// inside returns the slice for the inner lane.
func (e *entry) inside(id uint64) transport.Slice {
	s := e.s
	s.Cookie = id
	if e.kind() == Partial && e.extra == 0 {
		s.Range.Count /= 2
	}
	return s
}

// suffer applies a fault to an accepted slice. It never calls Host, because Move runs it.
func (l *lane) suffer(id uint64) {
	l.mu.Lock()
	e := l.open[id]
	l.mu.Unlock()
	if e == nil {
		return // already over
	}
	after := l.b.pump.after
	switch r := e.rule; r.Kind {
	case Error:
		after(0, func() { l.endAs(id, transfer.NotLanded, r.Reason, ErrInjected) })
	case FalseLanded:
		after(0, func() { l.endAs(id, transfer.Landed, transfer.ReasonNone, nil) })
	case Delay:
		after(r.After, func() { l.leave(id) })
	case Drop:
		if r.After > 0 {
			after(r.After, func() { l.endAs(id, transfer.InDoubt, transfer.ReasonTimeout, ErrInjected) })
		}
	case Hold:
		l.b.plan.hold(&extra{l: l, s: e.s, kind: Hold, id: id})
	case LateWrite:
		g := &extra{l: l, s: e.s, kind: LateWrite}
		l.b.plan.extraBegun()
		if r.AfterFence {
			l.b.plan.hold(g)
		} else {
			after(r.After, func() { l.sendExtra(g) })
		}
		after(0, func() { l.endAs(id, transfer.NotLanded, r.Reason, ErrInjected) })
	}
}

// thaw lets a stuck lane move again.
func (l *lane) thaw() {
	l.mu.Lock()
	frozen := l.frozen
	l.frozen, l.stuck = nil, false
	l.mu.Unlock()
	for _, fn := range frozen {
		fn()
	}
}

// leave passes a kept slice to the inner lane. Runs on the pump.
func (l *lane) leave(id uint64) {
	l.mu.Lock()
	e := l.open[id]
	if e == nil {
		l.mu.Unlock()
		return
	}
	if e.pending {
		l.mu.Unlock()
		l.b.pump.after(extraRetry, func() { l.leave(id) })
		return
	}
	e.left = true
	s := e.inside(id)
	l.mu.Unlock()
	if err := l.Lane.Move([]transport.Slice{s}); err != nil {
		l.endAs(id, transfer.NotLanded, transfer.ReasonLaneLost, err)
	}
}

// sendExtra sends an extra slice.
func (l *lane) sendExtra(g *extra) {
	l.mu.Lock()
	if l.ended {
		l.mu.Unlock()
		l.b.plan.extraUnsent(g.kind)
		return
	}
	if l.extras >= max(1, l.Lane.MaxInFlight()-l.MaxInFlight()) {
		l.mu.Unlock()
		l.b.pump.after(extraRetry, func() { l.sendExtra(g) })
		return
	}
	l.extras++
	l.next++
	id := l.next
	l.open[id] = &entry{s: g.s, extra: g.kind, began: time.Now(), left: true}
	s := g.s
	s.Cookie = id
	l.mu.Unlock()
	if l.Lane.Move([]transport.Slice{s}) != nil {
		if l.take(id) != nil {
			l.b.plan.extraUnsent(g.kind)
		}
	}
}

// take ends an entry; the caller that receives it ends the slice.
func (l *lane) take(id uint64) *entry {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.open[id]
	if e == nil {
		return nil
	}
	delete(l.open, id)
	if e.extra == 0 {
		l.taken--
	} else {
		l.extras--
	}
	return e
}

// endAs ends a slice, unless it has ended, with an invented result.
func (l *lane) endAs(id uint64, o transfer.Outcome, why transfer.Reason, err error) {
	if e := l.take(id); e != nil {
		l.report(e.result(o, why, err))
	}
}

// result is an invented result. Err names the injected fault, if any.
func (e *entry) result(o transfer.Outcome, why transfer.Reason, err error) transport.Result {
	if errors.Is(err, ErrInjected) {
		err = fmt.Errorf("%w: %s of chunks %d+%d", err, e.kind(), e.s.Range.First, e.s.Range.Count)
	}
	return transport.Result{Slice: e.s, Outcome: o, Reason: why, Err: err,
		Took: max(time.Since(e.began), 1)}
}

func (l *lane) report(res ...transport.Result) { l.b.host.Done(l, res) }

// done processes results of the inner lane.
func (l *lane) done(res []transport.Result) {
	out := make([]transport.Result, 0, len(res)+1)
	for _, r := range res {
		id := r.Cookie
		l.mu.Lock()
		e := l.open[id]
		if e == nil {
			l.mu.Unlock()
			continue // it has already ended
		}
		r.Slice = e.s
		if e.kind() == Partial && e.extra == 0 && r.Reason != transfer.ReasonLaneLost {
			// also if a stuck lane keeps it: only half of it moved
			r = e.result(transfer.InDoubt, transfer.ReasonTimeout, ErrInjected)
		}
		if l.stuck && !l.ended && e.extra == 0 {
			e.stuck = true
			l.frozen = append(l.frozen, func() { l.pass(id, r) })
			l.mu.Unlock()
			continue
		}
		late := !l.ended && (e.kind() == DelayResult || e.kind() == DropResult) && e.extra == 0
		l.mu.Unlock()
		if late {
			switch {
			case e.kind() == DelayResult:
				l.b.pump.after(e.rule.After, func() { l.pass(id, r) })
			case e.rule.After > 0:
				l.b.pump.after(e.rule.After, func() {
					l.endAs(id, transfer.InDoubt, transfer.ReasonTimeout, ErrInjected)
				})
			}
			continue
		}
		if l.take(id) == nil {
			continue
		}
		switch {
		case e.extra != 0:
			l.b.plan.extraEnded(e.extra, r.Outcome)
			continue
		case e.kind() == DropResult:
			r = e.result(transfer.InDoubt, transfer.ReasonLaneLost, net.ErrClosed)
		case e.kind() == Duplicate && r.Outcome == transfer.Landed:
			l.b.plan.extraBegun()
			l.sendExtra(&extra{l: l, s: e.s, kind: Duplicate})
		case e.kind() == DuplicateResult:
			out = append(out, r)
		}
		out = append(out, r)
	}
	if len(out) > 0 {
		l.report(out...)
	}
}

// pass delivers a kept result.
func (l *lane) pass(id uint64, r transport.Result) {
	if l.take(id) != nil {
		l.report(r)
	}
}

// down ends what the inner lane will not end: slices that never entered it, and kept results.
// Slices in the inner lane end there.
func (l *lane) down() {
	var out []transport.Result
	l.mu.Lock()
	l.ended, l.stuck, l.frozen = true, false, nil
	for id, e := range l.open {
		o := transfer.InDoubt // as a sender must assume for a lane that died
		switch {
		case e.pending, e.extra != 0, e.left && !e.stuck && e.kind() != DropResult &&
			e.kind() != DelayResult:
			continue
		case !e.left && e.kind() != Drop:
			o = transfer.NotLanded
		}
		delete(l.open, id)
		l.taken--
		out = append(out, e.result(o, transfer.ReasonLaneLost, net.ErrClosed))
	}
	l.mu.Unlock()
	if len(out) > 0 {
		l.report(out...)
	}
}
