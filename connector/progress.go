package connector

import (
	"fmt"
	"slices"

	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/internal/board"
	"github.com/kvspray/kvspray/transfer"
)

type pendingStep struct {
	step   uint64
	end    uint32
	blocks [][]uint32 // nil once reported
	ids    int        // block ids that blocks holds, for the bound
}

// steps follows the announced steps of a worker's source leases: flags become Progress. Its fields
// are guarded by worker.mu.
type steps struct {
	w        *worker
	index    []int             // flat layer -> flag; set once
	leases   map[uint64]*lease // those with pending steps
	lastStep uint64
}

func (p *steps) stepLocked(rec board.Record) error {
	m, err := msg.DecodeStep(rec.Body)
	if err != nil {
		return err
	}
	if m.Step < p.lastStep { // equal: a step whose tables did not fit one record
		return &msg.Error{Message: "STEP", Field: "step", Problem: fmt.Sprintf("%d after %d", m.Step,
			p.lastStep), Remedy: "send growing step numbers"}
	}
	p.lastStep = m.Step
	var announced []transfer.LeaseID
	for i := range m.Reqs {
		l, e := p.reqLocked(m.Step, &m.Reqs[i])
		if e != nil && err == nil {
			err = e
		}
		if l != nil {
			announced = append(announced, p.w.leaseID(l))
		}
	}
	if announced != nil {
		p.w.eventLocked(engines.Event{Kind: engines.StepAnnounced, Leases: announced})
	}
	return err
}

// reqLocked returns the lease if its announced step will be followed.
func (p *steps) reqLocked(step uint64, q *msg.StepReq) (*lease, error) {
	l := p.w.leases[q.Lease]
	if l == nil || !l.source || l.canceled {
		p.w.s.hookIgnored("step")
		return nil, nil
	}
	// A step that cannot be followed must not be sent in part: the lease ends.
	fail := func(err error) (*lease, error) {
		p.w.cancelLocked(l, err.Error())
		return nil, err
	}
	ids := 0
	if len(q.Blocks) > 0 {
		var err error
		if ids, err = p.w.checkTables("STEP", q.Blocks); err != nil {
			return fail(err)
		}
	}
	switch {
	case q.Attempt < l.attempt:
		p.w.s.hookIgnored("step")
		return nil, nil
	case q.Attempt > l.attempt && !l.preempt:
		// The engine restarted the request without a PREEMPT: earlier tokens no longer count.
		p.w.preemptLocked(l)
	}
	l.attempt, l.preempt = q.Attempt, false
	if n := len(l.steps); n > 0 && q.End < l.steps[n-1].end {
		return fail(&msg.Error{Message: "STEP", Field: "end", Problem: fmt.Sprintf("lease %d: token %d "+
			"after %d in the same attempt", l.id, q.End, l.steps[n-1].end),
			Remedy: "write PREEMPT first"})
	}
	if len(l.steps) >= msg.MaxPendingSteps {
		// their flags may be set unnoticed: a sidecar that was stopped finds many steps at once
		p.followLocked()
	}
	if len(l.steps) >= msg.MaxPendingSteps {
		return fail(&msg.Error{Message: "STEP", Field: "step", Problem: fmt.Sprintf("lease %d: %d "+
			"steps wait for their flags", l.id, len(l.steps)),
			Remedy: "signal the layers of each step, and its end"})
	}
	if p.w.blockIDs+ids > p.w.s.opt.Limits.BlockIDs {
		return fail(&msg.Error{Message: "STEP", Field: "blocks", Problem: fmt.Sprintf("the tables of "+
			"open leases hold %d block ids, at most %d", p.w.blockIDs, p.w.s.opt.Limits.BlockIDs),
			Remedy: "send only changed tables"})
	}
	next := pendingStep{step: step, end: min(q.End, l.tokens)}
	if ids > 0 {
		next.blocks, next.ids = q.Blocks, ids
		p.w.blockIDs += ids
	}
	l.steps = append(l.steps, next)
	p.changedLocked(l)
	return l, nil
}

func (p *steps) dropLocked(l *lease) {
	if len(l.steps) == 0 {
		return
	}
	for i := range l.steps {
		p.w.blockIDs -= l.steps[i].ids
	}
	l.steps = nil
	p.changedLocked(l)
}

// changedLocked maintains the set of leases with pending steps.
func (p *steps) changedLocked(l *lease) {
	if len(l.steps) > 0 {
		p.leases[l.id] = l
	} else {
		delete(p.leases, l.id)
	}
	p.w.publishWaitingLocked()
}

// followLocked turns flags into Progress for every lease that has pending steps.
func (p *steps) followLocked() {
	if len(p.leases) == 0 || p.w.closed || p.w.broken != nil {
		return
	}
	end := p.w.flags.Layer(p.w.flags.Layers())
	var out []engines.Progress
	for _, l := range p.leases {
		id := p.w.leaseID(l)
		first := l.steps[0].step // lowest step that some layer still lacks
		slowest := ^uint64(0)
		for i, flag := range p.index {
			at := max(p.w.flags.Layer(flag), end)
			slowest = min(slowest, at)
			if at < first {
				continue
			}
			k := len(l.steps) - 1
			for l.steps[k].step > at {
				k--
			}
			s := &l.steps[k]
			if s.end <= l.reported[i] {
				continue
			}
			l.reported[i] = s.end
			// A step without a table has the previous step's table, which may not have been
			// reported yet.
			var blocks [][]uint32
			for j := k; j >= 0 && blocks == nil; j-- {
				if blocks = l.steps[j].blocks; blocks != nil {
					p.w.blockIDs += l.steps[j].ids - l.ids // it replaces the lease's table
					l.ids = l.steps[j].ids
				}
			}
			out = append(out, engines.Progress{Lease: id, Layer: i, Tokens: s.end, Final: s.end >= l.tokens,
				Blocks: blocks})
			for j := 0; j <= k; j++ { // reported now, or outdated by this report
				p.w.blockIDs -= l.steps[j].ids
				l.steps[j].blocks, l.steps[j].ids = nil, 0
			}
		}
		n := 0
		for n < len(l.steps) && l.steps[n].step <= slowest {
			p.w.blockIDs -= l.steps[n].ids
			n++
		}
		if n > 0 {
			l.steps = slices.Delete(l.steps, 0, n)
			p.changedLocked(l)
		}
	}
	if out != nil {
		p.w.eventLocked(engines.Event{Kind: engines.LayersComplete, Progress: out})
	}
}
