package local

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/kvspray/kvspray/control/engines"
)

// A fault of a worker ends its open leases and those that follow, until it is over or the worker is
// gone; leases of others go on.
func TestFault(t *testing.T) {
	l := New(t.Context())
	a, b := &engines.Worker{}, &engines.Worker{}
	why := errors.New("its GPU has failed")
	open := func(w *engines.Worker, id uint64) context.Context {
		ctx, end := l.Open(w, id, time.Hour)
		t.Cleanup(end)
		return ctx
	}
	before, other := open(a, 1), open(b, 1)
	l.SetFault(a, why)
	for _, ctx := range []context.Context{before, open(a, 2)} {
		if !errors.Is(context.Cause(ctx), why) || Status(context.Cause(ctx)) != engines.StatusFailed {
			t.Errorf("%v", context.Cause(ctx))
		}
	}
	l.SetFault(a, nil)
	after := open(a, 3)
	if other.Err() != nil || after.Err() != nil {
		t.Errorf("another worker: %v; after the fault: %v", other.Err(), after.Err())
	}
	l.SetFault(b, why)
	l.Gone(b)
	if len(l.faults) != 0 {
		t.Errorf("%d faults of workers that are gone", len(l.faults))
	}
}

// A lease of a peer and one of the engine with the same id are two: the memory stays until both
// have ended, whatever ids the engine chooses.
func TestLeaseOfPeer(t *testing.T) {
	l := New(t.Context())
	w := &engines.Worker{}
	for _, id := range []uint64{1, 1<<63 | 1} {
		ctx, end := l.OpenPeer(w, id, time.Hour)
		_, endOwn := l.Open(w, id, time.Hour)
		if !l.Cancel(w, id, "") || ctx.Err() != nil {
			t.Errorf("the engine canceled lease %d of a peer", id)
		}
		endOwn()
		free := false
		l.After(w, func() { free = true })
		if free {
			t.Errorf("the memory is free during lease %d of a peer", id)
		}
		if end(); !free {
			t.Errorf("the memory is not free after lease %d", id)
		}
	}
}
