package connector_test

import (
	"strings"
	"testing"
	"time"

	"github.com/kvspray/kvspray/connector/connectortest"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/internal/board"
)

func expectAfter(t *testing.T, w *connectortest.Worker, mark, deadlineMS uint64,
	blocks ...uint32) uint64 {
	t.Helper()
	x, h := key()
	id, err := w.Expect(msg.Expect{Xfer: x, Hash: h, Peer: "10.0.0.1:7",
		Tokens: 16 * uint32(len(blocks)),
		Blocks: [][]uint32{blocks}, DeadlineMS: deadlineMS, StreamMark: mark})
	must(t, err)
	return id
}

// TestAfterHoldsBack: no part of the sidecar that could write has a lease before the engine's
// stream has passed the mark that it names.
func TestAfterHoldsBack(t *testing.T) {
	r := start(t, nil)
	w := withHost(t, r, 1<<16)
	first := expectAfter(t, w, 1, 0, 0, 1)
	third := expectAfter(t, w, 3, 0, 2)
	copied, err := w.Copy(msg.Copy{Src: 1, Dst: 1, Blocks: []msg.CopyBlock{{DstOff: 4096, Len: 64}},
		StreamMark: 2})
	must(t, err)
	free := expectAfter(t, w, 0, 0, 3)
	r.rec.until(t, "the one without a mark", func() bool { return len(r.rec.expects) == 1 })
	if got := r.rec.seen(); got.expects[0].Lease.ID != free || len(got.copies) != 0 {
		t.Fatalf("begun before any mark: %+v %+v", got.expects, got.copies)
	}
	if n := r.Leases(); n != 4 {
		t.Errorf("%d leases are open, want 4: those held count and have their blocks", n)
	}
	w.Flags().SetMark(2) // the watcher notices: no record follows
	r.rec.until(t, "marks 1 and 2", func() bool {
		return len(r.rec.expects) == 2 &&
			len(r.rec.copies) == 1
	})
	if got := r.rec.seen(); got.expects[1].Lease.ID != first || got.copies[0].Lease.ID != copied {
		t.Fatalf("begun at mark 2: %+v %+v", got.expects[1], got.copies[0])
	}
	w.Flags().SetMark(3)
	r.rec.until(t, "mark 3", func() bool { return len(r.rec.expects) == 3 })
	if got := r.rec.seen(); got.expects[2].Lease.ID != third {
		t.Fatalf("begun at mark 3: %+v", got.expects[2])
	}
}

// TestAfterEnds: a lease that is held ends by a cancellation or at its deadline, and never begins
// afterwards.
func TestAfterEnds(t *testing.T) {
	r := start(t, nil)
	w := r.worker(t, nil)
	ends := func(id uint64, status uint16, reason string) {
		t.Helper()
		got, err := w.Wait(testContext(t))
		must(t, err)
		if got.Lease != id || got.Status != status || got.Received == nil ||
			!strings.Contains(got.Received.Reason, reason) {
			t.Fatalf("completion %+v %+v, want lease %d with status %d and %q", got, got.Received, id,
				status, reason)
		}
		if status != board.OK {
			r.rec.until(t, "the refusal",
				func() bool { return strings.Contains(r.rec.refused[id], reason) })
		}
	}
	late := expectAfter(t, w, 7, 20, 0)
	ends(late, board.Expired, "did not pass mark 7 before the deadline (it is at 0)")
	given := expectAfter(t, w, 7, 0, 1)
	must(t, w.Cancel(given, "request finished", false))
	ends(given, board.Cancelled, "request finished")
	w.Flags().SetMark(7)
	again := expectAfter(t, w, 7, 0, 0, 1) // their blocks are free again
	r.rec.until(t, "the one that begins", func() bool { return len(r.rec.expects) == 1 })
	if got := r.rec.seen(); got.expects[0].Lease.ID != again || len(got.cancels) != 0 {
		t.Fatalf("expects %+v, cancels %v", got.expects, got.cancels)
	}
	must(t, r.Complete(r.lastUp(t), engines.Completion{Lease: r.rec.seen().expects[0].Lease,
		Received: true}))
	ends(again, board.OK, "")
	if n := r.Leases(); n != 0 {
		t.Errorf("%d leases left", n)
	}
}

// TestAfterCountsFromTheRecord: what a lease has waited for its mark is no longer its to wait for
// layers.
func TestAfterCountsFromTheRecord(t *testing.T) {
	r := start(t, nil)
	w := r.worker(t, nil)
	expectAfter(t, w, 1, 60_000, 0)
	expectAfter(t, w, 0, 0, 1) // records are read in order: when this one begins, the first is held
	r.rec.until(t, "the one without a mark", func() bool { return len(r.rec.expects) == 1 })
	w.Flags().SetMark(1)
	r.rec.until(t, "the held one", func() bool { return len(r.rec.expects) == 2 })
	if left := r.rec.seen().expects[1].Deadline; left <= 0 || left >= time.Minute {
		t.Errorf("%s are left of a minute", left)
	}
}

// TestAfterOfAnotherSession: a new session of the engine ends what the one before held, and its
// marks go on.
func TestAfterOfAnotherSession(t *testing.T) {
	r := start(t, nil)
	w := r.worker(t, nil)
	expectAfter(t, w, 5, 0, 0)
	eventually(t, "the lease", func() bool { return r.Leases() == 1 })
	r.rec.fenceAtOnce(true)
	_, err := w.Connect(testContext(t))
	must(t, err)
	r.rec.until(t, "the new session", func() bool { return len(r.rec.ups) == 2 })
	w.Flags().SetMark(5)
	again := expectAfter(t, w, 5, 0, 0)
	r.rec.until(t, "its begin", func() bool { return len(r.rec.expects) == 1 })
	if got := r.rec.seen().expects; len(got) != 1 || got[0].Lease.ID != again || r.Leases() != 1 {
		t.Errorf("begun: %+v, %d leases open", got, r.Leases())
	}
	ups := r.rec.seen().ups
	if old, now := ups[0].Leases.Load(), ups[1].Leases.Load(); old != 0 || now != 1 {
		t.Errorf("%d leases of the session before are open, %d of the new one", old, now)
	}
}
