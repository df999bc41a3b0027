package workers

import (
	"testing"

	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/transfer"
)

type lease struct{}

func (lease) LeaseID() transfer.LeaseID { return transfer.LeaseID{ID: 1} }

// A departed worker is fenced once its last lease has ended, and only once.
func TestIdle(t *testing.T) {
	var fenced []*engines.Worker
	tb := New(func(w *engines.Worker, _ func()) { fenced = append(fenced, w) })
	if !tb.Vacant() {
		t.Error("not vacant without a worker")
	}
	w := &engines.Worker{}
	tb.Up(w)
	ws := tb.Find(w)
	ws.Leases[1] = lease{}
	if tb.Idle(ws); tb.Vacant() || len(fenced) != 0 {
		t.Error("fenced while it is here")
	}
	ws.Gone = true
	if tb.Idle(ws); !tb.Vacant() || len(fenced) != 0 {
		t.Error("fenced with an open lease")
	}
	delete(ws.Leases, 1)
	tb.Idle(ws)
	tb.Idle(ws)
	if len(fenced) != 1 || tb.Find(w) != nil {
		t.Errorf("fenced %d times", len(fenced))
	}
	if tb.Up(&engines.Worker{Internal: true}); !tb.Vacant() {
		t.Error("the worker of the page store counts as an engine")
	}
}
