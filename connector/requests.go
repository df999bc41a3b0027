package connector

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/kvspray/kvspray/connector/internal/watch"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/internal/board"
	"github.com/kvspray/kvspray/transfer"
)

// checkTables refuses tables that do not match the layout: every id must be inside its groups.
func (w *worker) checkTables(what string, tables [][]uint32) (ids int, err error) {
	if w.pub.Layout == nil {
		return 0, &msg.Error{Message: what, Field: "blocks", Problem: "this worker has no layout",
			Remedy: "send REGISTER with the layout of the KV cache"}
	}
	if len(tables) != len(w.tables) {
		return 0, &msg.Error{Message: what, Field: "blocks", Problem: fmt.Sprintf("%d tables, the "+
			"layout has %d", len(tables), len(w.tables)),
			Remedy: "send each block table once, in the layout's order; groups with same_table use the " +
				"table of the previous group"}
	}
	for ti, table := range tables {
		n := w.pub.Layout.Groups[w.tables[ti].First].NumBlocks
		for i, id := range table {
			if id >= n {
				return 0, &msg.Error{Message: what, Field: "blocks", Problem: fmt.Sprintf("table %d: block "+
					"%d at index %d, its groups have %d blocks", ti, id, i, n),
					Remedy: "send ids of the registered cache"}
			}
		}
		ids += len(table)
	}
	return ids, nil
}

// openLocked opens a lease unless a bound or a state forbids it. The shim receives a refusal as a
// completion.
func (w *worker) openLocked(rec board.Record, source bool) (*lease, error) {
	if rec.Lease != 0 && w.leases[rec.Lease] == nil {
		return &lease{id: rec.Lease, source: source}, nil
	}
	err := &msg.Error{Message: strings.ToUpper(recordNames[rec.Type]), Field: "lease",
		Problem: "0 names no lease", Remedy: "count leases from 1"}
	if rec.Lease != 0 {
		err.Problem = fmt.Sprintf("lease %d is open already", rec.Lease)
		err.Remedy = "never reuse an id within one boot"
	}
	return nil, err
}

// refuseLocked ends a lease that was never opened.
func (w *worker) refuseLocked(rec board.Record, source bool, err error) {
	if rec.Lease == 0 {
		return
	}
	if _, open := w.leases[rec.Lease]; open {
		return
	}
	c := engines.Completion{Lease: transfer.LeaseID{Boot: w.pub.Boot, ID: rec.Lease},
		Received: !source,
		Status:   board.Refused, Reason: err.Error()}
	w.completions.postLocked(encodeCompletion(c))
}

func (w *worker) admitLocked(l *lease, ids int) error {
	switch {
	case w.blockIDs+ids > w.s.opt.Limits.BlockIDs:
		return fmt.Errorf("the tables of open leases hold %d block ids, this record %d more; at most %d",
			w.blockIDs, ids, w.s.opt.Limits.BlockIDs)
	case w.draining.Load() || w.s.draining.Load():
		return errors.New("draining: no new leases")
	case len(w.leases) >= w.s.opt.Limits.Leases:
		return fmt.Errorf("%d leases are open, at most %d", len(w.leases), w.s.opt.Limits.Leases)
	}
	l.epoch.Store(w.s.nextEpoch())
	l.ids = ids
	w.blockIDs += ids
	w.leases[l.id] = l
	if l.source {
		w.sources.Store(l.id, l)
	}
	w.s.hookLeases(l.source, 1)
	w.pub.Leases.Add(1)
	return nil
}

func (w *worker) intentLocked(rec board.Record) error {
	l, err := w.openLocked(rec, true)
	if err != nil {
		return err
	}
	ids := 0
	m, err := msg.DecodeIntent(rec.Body)
	if err == nil {
		ids, err = w.checkTables("INTENT", m.Blocks)
	}
	if err == nil && len(m.Steps) > 0 && m.Steps[len(m.Steps)-1].End > m.Tokens {
		err = &msg.Error{Message: "INTENT", Field: "steps", Problem: fmt.Sprintf("reach token %d of %d",
			m.Steps[len(m.Steps)-1].End, m.Tokens)}
	}
	if err != nil {
		w.refuseLocked(rec, true, err)
		return err
	}
	l.tokens, l.attempt = m.Tokens, m.Attempt
	l.reported = make([]uint32, len(w.steps.index))
	if err := w.admitLocked(l, ids); err != nil {
		w.refuseLocked(rec, true, err)
		return nil
	}
	w.signals.fresh.Store(int64(watch.Now() + watch.Fresh))
	for _, s := range m.Steps {
		l.steps = append(l.steps, pendingStep{step: s.Step, end: s.End})
	}
	w.steps.changedLocked(l)
	in := &engines.Intent{Lease: w.leaseID(l), Key: transfer.Key{Xfer: m.Xfer, Hash: m.Hash},
		Tokens: m.Tokens,
		Fanout: int(m.Fanout), Blocks: m.Blocks,
		Held: m.Held, Priority: priority(m.Priority),
		Deadline: w.s.duration(m.DeadlineMS, w.s.opt.Deadline),
		Attempt:  m.Attempt, Req: m.Req, Trace: placed(m.Traceparent)}
	w.eventLocked(engines.Event{Kind: engines.SourceOpened, Intent: in})
	if len(l.steps) > 0 {
		w.eventLocked(engines.Event{Kind: engines.StepAnnounced,
			Leases: []transfer.LeaseID{in.Lease}})
	}
	if m.Ready > 0 {
		p := make([]engines.Progress, len(w.steps.index))
		for i := range p {
			p[i] = engines.Progress{Lease: in.Lease, Layer: i, Tokens: m.Ready, Final: m.Ready >= m.Tokens}
			l.reported[i] = m.Ready
		}
		w.eventLocked(engines.Event{Kind: engines.LayersComplete, Progress: p})
	}
	return nil
}

func (w *worker) expectLocked(rec board.Record) error {
	l, err := w.openLocked(rec, false)
	if err != nil {
		return err
	}
	m, err := msg.DecodeExpect(rec.Body)
	if err == nil && m.Peer == "" {
		err = &msg.Error{Message: "EXPECT", Field: "peer", Problem: "empty",
			Remedy: "name the endpoint of the prefill's sidecar"}
	}
	if err != nil {
		w.refuseLocked(rec, false, err)
		return err
	}
	l.tokens = m.Tokens
	if m.Skip == nil {
		m.Skip = make([]uint32, len(m.Blocks))
	}
	ex := &engines.Expect{Lease: w.leaseID(l), Key: transfer.Key{Xfer: m.Xfer, Hash: m.Hash},
		Peer:   m.Peer,
		Tokens: m.Tokens, Skip: m.Skip, Blocks: m.Blocks,
		Priority: priority(m.Priority), Deadline: w.s.duration(m.DeadlineMS, w.s.opt.Deadline),
		MatchTimeout: w.s.duration(m.MatchTimeoutMS, w.s.opt.MatchTimeout), Req: m.Req,
		Stall: w.s.duration(m.StallMS, 0),
		Trace: placed(m.Traceparent)}
	refuse := func(err error) {
		w.refuseLocked(rec, false, err)
		w.eventLocked(engines.Event{Kind: engines.DestRefused, Expect: ex, Reason: err.Error()})
	}
	ids, err := w.checkTables("EXPECT", m.Blocks)
	if err != nil {
		refuse(err)
		return err
	}
	if err := w.reserveLocked(l, m); err != nil {
		refuse(err)
		return err
	}
	if err := w.admitLocked(l, ids); err != nil {
		w.guard.Release(l.id)
		refuse(err)
		return nil
	}
	ex.Lease = w.leaseID(l)
	w.beginLocked(l, m.StreamMark, ex.Deadline, func(left time.Duration) {
		ex.Deadline = left
		w.eventLocked(engines.Event{Kind: engines.DestOpened, Expect: ex})
	})
	if l.held != nil {
		l.held.expect = ex
	}
	return nil
}

// placed is where a lease is in a distributed trace. A trace is no reason to refuse a request: what
// is too long is malformed, and left out.
func placed(traceparent string) (t engines.Trace) {
	if len(traceparent) <= engines.MaxTraceparent {
		t.Parent = traceparent
	}
	return t
}

// reserveLocked reserves the blocks that a destination lease will write.
func (w *worker) reserveLocked(l *lease, m *msg.Expect) error {
	if m.Tokens == 0 || len(m.Skip) != len(m.Blocks) {
		return nil // the plan refuses it
	}
	return w.guard.Reserve(l.id, m.Blocks, func(table int) (first, end int) {
		return w.pub.Own.Written(table, m.Tokens, m.Skip[table])
	})
}

// priority maps a value of a newer version to the least urgent priority.
func priority(v uint32) engines.Priority {
	return engines.Priority(min(v, uint32(engines.Background)))
}

// changeLocked applies CANCEL, PREEMPT, HOLD or YIELD. The record takes effect even if its body is
// unreadable.
func (w *worker) changeLocked(rec board.Record) error {
	kind := recordNames[rec.Type]
	l := w.leases[rec.Lease]
	if l == nil || l.canceled {
		w.s.hookIgnored(kind)
		return nil
	}
	if rec.Type == board.RecCancel {
		reason := "cancelled"
		m, err := msg.DecodeCancel(rec.Body)
		if err == nil {
			reason = m.Reason
		}
		w.cancelLocked(l, reason)
		return err
	}
	what := strings.ToUpper(kind)
	if !l.source {
		return &msg.Error{Message: what, Field: "lease", Problem: fmt.Sprintf("lease %d is a destination",
			l.id), Remedy: "name a source lease; CANCEL ends a destination lease"}
	}
	_, err := msg.DecodeEmpty(what, rec.Body)
	switch rec.Type {
	case board.RecPreempt:
		w.preemptLocked(l)
	case board.RecHold:
		w.eventLocked(engines.Event{Kind: engines.Held, Lease: l.id})
	case board.RecYield:
		w.eventLocked(engines.Event{Kind: engines.Yielded, Lease: l.id})
	}
	return err
}

func (w *worker) cancelLocked(l *lease, reason string) {
	if l.held != nil {
		w.endHeldLocked(l, board.Cancelled, reason)
		return
	}
	l.canceled = true
	l.epoch.Store(0)
	w.steps.dropLocked(l)
	w.eventLocked(engines.Event{Kind: engines.Canceled, Lease: l.id, Reason: reason})
}

func (w *worker) preemptLocked(l *lease) {
	l.epoch.Store(w.s.nextEpoch())
	l.preempt = true
	w.steps.dropLocked(l)
	clear(l.reported)
	w.eventLocked(engines.Event{Kind: engines.Preempted, Lease: l.id})
}
