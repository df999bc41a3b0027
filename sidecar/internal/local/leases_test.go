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
