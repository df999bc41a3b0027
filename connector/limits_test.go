package connector_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/connector/connectortest"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/internal/board"
)

// TestFullCompletionRing: completions wait in order and lose nothing.
func TestFullCompletionRing(t *testing.T) {
	r := start(t, nil)
	w := r.worker(t, func(c *connectortest.Config) { c.CompletionBytes = board.RingMinBytes })
	const n = 1500 // more than 64 KiB of records
	go func() {
		for range n {
			x, h := key()
			if _, err := w.Expect(msg.Expect{Xfer: x, Hash: h, Peer: "p:1", Tokens: 16, Skip: []uint32{16},
				Blocks: [][]uint32{{1}}}); err != nil {
				t.Error(err)
				return
			}
		}
	}()
	r.rec.until(t, "expects", func() bool { return len(r.rec.expects) == n })
	up := r.lastUp(t)
	for _, ex := range r.rec.seen().expects {
		must(t, r.Complete(up, engines.Completion{Lease: ex.Lease, Received: true, Status: board.OK,
			Reason: strings.Repeat("x", 50)}))
	}
	for i := range n {
		c, err := w.Wait(testContext(t))
		must(t, err)
		if c.Lease != r.rec.seen().expects[i].Lease.ID || c.Seq != uint64(i+1) {
			t.Fatalf("completion %d: lease %d, seq %d", i, c.Lease, c.Seq)
		}
	}
}

func TestLimitsAndDrain(t *testing.T) {
	r := start(t, func(o *connector.Options) { o.Limits.Leases = 2 })
	w := r.worker(t, nil)
	a, err := w.Intent(intent(16, 1))
	must(t, err)
	_, err = w.Intent(intent(16, 2))
	must(t, err)
	c, err := w.Intent(intent(16, 3))
	must(t, err)
	got, err := w.Wait(testContext(t))
	must(t, err)
	if got.Lease != c || got.Status != board.Refused || !strings.Contains(got.Sent.Reason,
		"2 leases") {
		t.Fatalf("%+v", got)
	}
	r.rec.until(t, "intents", func() bool { return len(r.rec.intents) == 2 })
	drained := make(chan error, 1)
	go func() { drained <- r.Drain(testContext(t)) }()
	must(t, w.WaitBye(testContext(t)))
	up := r.lastUp(t)
	for _, in := range r.rec.seen().intents {
		select {
		case err := <-drained:
			t.Fatalf("drained with leases open: %v", err)
		default:
		}
		must(t, r.Complete(up, engines.Completion{Lease: in.Lease, Status: board.OK}))
	}
	must(t, <-drained)
	for range 2 {
		_, err = w.Wait(testContext(t))
		must(t, err)
	}
	late, err := w.Intent(intent(16, 4))
	must(t, err)
	if got, err = w.Wait(testContext(t)); err != nil || got.Lease != late ||
		got.Status != board.Refused || !strings.Contains(got.Sent.Reason, "drain") {
		t.Fatalf("%+v %v", got, err)
	}
	_, err = connectortest.DialWorker(testContext(t), r.config(t, nil))
	var se *connectortest.ServerError
	if !errors.As(err, &se) || se.Code != msg.CodeDraining {
		t.Fatalf("a draining sidecar lets in: %v", err)
	}
	_ = a
}

// TestBlockIDsAreBounded: the tables that open leases name count together, and go back with their
// leases.
func TestBlockIDsAreBounded(t *testing.T) {
	r := start(t, func(o *connector.Options) { o.Limits.BlockIDs = 6 })
	w := r.worker(t, nil)
	a, err := w.Intent(intent(64, 1, 2, 3, 4))
	must(t, err)
	x, h := key()
	ex := msg.Expect{Xfer: x, Hash: h, Peer: "10.0.0.1:7", Tokens: 48, Skip: []uint32{0},
		Blocks: [][]uint32{{5, 6, 7}}}
	b, err := w.Expect(ex)
	must(t, err)
	got, err := w.Wait(testContext(t))
	must(t, err)
	if got.Lease != b || got.Status != board.Refused || !strings.Contains(got.Received.Reason,
		"block ids") {
		t.Fatalf("%+v", got)
	}
	r.rec.until(t, "the refusal", func() bool {
		return strings.Contains(r.rec.refused[b], "block ids")
	})
	r.rec.until(t, "the intent", func() bool { return len(r.rec.intents) == 1 })
	must(t, r.Complete(r.lastUp(t), engines.Completion{Lease: r.rec.seen().intents[0].Lease,
		Status: board.OK}))
	if got, err = w.Wait(testContext(t)); err != nil || got.Lease != a {
		t.Fatalf("%+v %v", got, err)
	}
	_, err = w.Expect(ex)
	must(t, err)
	r.rec.until(t, "the expectation", func() bool { return len(r.rec.expects) == 1 })
}

// A source does not wait for a lease that is refused because of its tables.
func TestRefusedTablesAreDeclined(t *testing.T) {
	r := start(t, nil)
	w := r.worker(t, nil)
	x, h := key()
	id, err := w.Expect(msg.Expect{Xfer: x, Hash: h, Peer: "10.0.0.1:7", Tokens: 16,
		Skip: []uint32{0}, Blocks: [][]uint32{{1 << 20}}})
	must(t, err)
	r.rec.until(t, "the refusal", func() bool {
		return strings.Contains(r.rec.refused[id], "its groups have")
	})
}
