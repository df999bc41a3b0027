package exec

import (
	"errors"
	"testing"

	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/transfer"
)

// The methods of this file bring one event of an engine each.

func (e *Exec) one(now Instant, ev engines.Event) { e.Handle(now, []engines.Event{ev}) }

func (e *Exec) WorkerUp(w *engines.Worker) {
	e.handle(0, &engines.Event{Kind: engines.WorkerUp, Worker: w})
}

func (e *Exec) WorkerGone(now Instant, w *engines.Worker, exited bool, why string) {
	e.one(now, engines.Event{Kind: engines.WorkerGone, Worker: w, Exited: exited,
		Err: errors.New(why)})
}

func (e *Exec) Intent(now Instant, w *engines.Worker, in engines.Intent) {
	e.one(now, engines.Event{Kind: engines.SourceOpened, Worker: w, Intent: &in})
}

func (e *Exec) Announced(now Instant, w *engines.Worker, all []transfer.LeaseID) {
	e.one(now, engines.Event{Kind: engines.StepAnnounced, Worker: w, Leases: all})
}

func (e *Exec) Progress(now Instant, w *engines.Worker, all []engines.Progress) {
	e.one(now, engines.Event{Kind: engines.LayersComplete, Worker: w, Progress: all})
}

func (e *Exec) Preempt(now Instant, w *engines.Worker, id uint64) {
	e.one(now, engines.Event{Kind: engines.Preempted, Worker: w, Lease: id})
}

func (e *Exec) Hold(now Instant, w *engines.Worker, id uint64) {
	e.one(now, engines.Event{Kind: engines.Held, Worker: w, Lease: id})
}

func (e *Exec) Yield(now Instant, w *engines.Worker, id uint64) {
	e.one(now, engines.Event{Kind: engines.Yielded, Worker: w, Lease: id})
}

func (e *Exec) Expect(now Instant, w *engines.Worker, x engines.Expect) {
	e.one(now, engines.Event{Kind: engines.DestOpened, Worker: w, Expect: &x})
}

func (e *Exec) Cancel(now Instant, w *engines.Worker, id uint64, reason string) {
	e.one(now, engines.Event{Kind: engines.Canceled, Worker: w, Lease: id, Reason: reason})
}

func (e *Exec) Await(now Instant, id uint64, a engines.Await) {
	a.Token = id
	e.one(now, engines.Event{Kind: engines.Asked, Await: &a})
}

func (e *Exec) Decline(now Instant, d engines.Decline) {
	e.one(now, engines.Event{Kind: engines.Declined, Decline: &d})
}

func (e *Exec) SchedulerGone(now Instant, session uint64) {
	e.one(now, engines.Event{Kind: engines.SchedulerGone, Session: session})
}

// Lanes get work once, at the end of a batch: what a later event of it cancels is not sent.
func TestBatchAssignsOnce(t *testing.T) {
	for _, canceled := range []bool{false, true} {
		tg := newTarget()
		in := engines.Intent{Lease: transfer.LeaseID{Boot: tg.w.Boot, ID: 2, Epoch: 1},
			Key: testKey(1, 2), Tokens: targetTokens, Fanout: 1, Deadline: 30 * sec}
		tg.ex.Intent(1, tg.w, in)
		g := goodGrant()
		g.Hash = in.Key.Hash[:]
		if err := tg.ex.Message(sec, tg.peer, grantFrame(g)); err != nil {
			t.Fatal(err)
		}
		batch := []engines.Event{{Kind: engines.LayersComplete, Worker: tg.w,
			Progress: []engines.Progress{{Lease: in.Lease, Tokens: targetTokens, Final: true}}}}
		if canceled {
			batch = append(batch, engines.Event{Kind: engines.Canceled, Worker: tg.w, Lease: 2})
		}
		tg.ex.Handle(sec, batch)
		if n := len(only(t, drained(tg.ex), Move)); (n > 0) == canceled {
			t.Errorf("canceled %v: %d moves", canceled, n)
		}
	}
}
