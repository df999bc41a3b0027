package endpoint

import (
	"errors"
	"fmt"
	"testing"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/exec/internal/lanes"
	"github.com/kvspray/kvspray/control/exec/internal/timer"
)

// table returns a table and the addresses that it connected.
func table() (*Table, *timer.Agenda, *[]string) {
	var dialed []string
	a := &timer.Agenda{}
	return New(a, func(addr string) { dialed = append(dialed, addr) }), a, &dialed
}

// due fires the timers up to now.
func due(a *timer.Agenda, now Instant) {
	for t := a.Pop(now); t != nil; t = a.Pop(now) {
		t.Value(now)
	}
}

var (
	errRefused = fmt.Errorf("dial: %w", ErrNotListening)
	errHangs   = errors.New("dial: deadline exceeded")
)

// One connect at a time, with a pause after a failure, as long as a lease or query waits.
func TestReach(t *testing.T) {
	tb, a, dialed := table()
	ep := tb.Get("p:1")
	ep.Hold()
	ep.Wait()
	for range 3 {
		tb.Reach(0, ep)
	}
	if len(*dialed) != 1 {
		t.Fatalf("dialed %v", *dialed)
	}
	if failed, hopeless := tb.Failed(0, ep, errHangs); !failed || hopeless {
		t.Fatalf("failed %v, hopeless %v", failed, hopeless)
	}
	tb.Again(ep)
	if due(a, Retry-1); len(*dialed) != 1 {
		t.Error("no pause between two connects")
	}
	if due(a, Retry); len(*dialed) != 2 {
		t.Error("no second connect")
	}
	ep.Waited()
	tb.Failed(Retry, ep, errHangs)
	tb.Again(ep)
	tb.Release(ep)
	due(a, time.Hour)
	if tb.Len() != 0 || a.Len() != 0 || len(*dialed) != 2 {
		t.Errorf("%d addresses, %d timers, dialed %v", tb.Len(), a.Len(), *dialed)
	}
}

// An address without a listener is hopeless after maxRefused tries in a row; other failures and a
// connection start the count again. An impossible address is hopeless at once.
func TestRefused(t *testing.T) {
	tb, _, _ := table()
	ep := tb.Get("p:1")
	ep.Wait()
	fails := func(err error) bool {
		tb.Reach(time.Hour, ep)
		_, hopeless := tb.Failed(0, ep, err)
		tb.Again(ep)
		return hopeless
	}
	count := func(between func()) {
		t.Helper()
		for i := range maxRefused - 1 {
			if fails(errRefused) {
				t.Fatalf("hopeless after %d tries", i+1)
			}
		}
		between()
	}
	count(func() { fails(errHangs) })
	count(func() { tb.Connected(ep) })
	count(func() {})
	for range 2 {
		if !fails(errRefused) {
			t.Error("not hopeless, though no process listens")
		}
	}
	if ep.Queued() != 0 || !fails(ErrNotPossible) {
		t.Error("not hopeless, though it is not possible")
	}
}

// The unused addresses of one peer are bounded, the oldest go first, and ours stays.
func TestIdleNames(t *testing.T) {
	tb, _, _ := table()
	p := &lanes.Peer{Link: lanes.Up}
	own := tb.Get("own:1")
	tb.Leads(own, p)
	tb.IsSelf(own)
	used := tb.Get("used:1")
	used.Hold()
	tb.Leads(used, p)
	for i := range 5 * MaxIdle {
		ep := tb.Get(fmt.Sprint("p", i))
		tb.Leads(ep, p)
		tb.Drop(ep)
	}
	tb.Drop(own)
	if n := len(tb.Of(p)); n != MaxIdle+2 || tb.Len() != n || len(tb.names[p].idle) != MaxIdle {
		t.Errorf("%d names, %d addresses, %d idle ones", n, tb.Len(), len(tb.names[p].idle))
	}
	if tb.Find("p0") != nil || tb.Find(fmt.Sprint("p", 5*MaxIdle-1)) == nil ||
		tb.Find("own:1") == nil {
		t.Error("another one than the oldest is gone")
	}
	for _, ep := range tb.Of(p) {
		tb.Leads(ep, nil)
		tb.Drop(ep)
	}
	if len(tb.names) != 0 || tb.Len() != 1 {
		t.Errorf("%d peers, %d addresses: want none, and the one that is in use", len(tb.names), tb.Len())
	}
}

// Revokes wait for their address up to a bound, and end with a failure.
func TestRevokes(t *testing.T) {
	tb, _, dialed := table()
	ep := tb.Get("p:1")
	for range 2 * MaxRevokes {
		tb.Revoke(0, ep, &peerv1.ControlFrame{})
	}
	if ep.Queued() != MaxRevokes || len(*dialed) != 1 {
		t.Errorf("%d wait, dialed %v", ep.Queued(), *dialed)
	}
	if n := len(ep.Revokes()); n != MaxRevokes || ep.Queued() != 0 {
		t.Errorf("took %d, %d are left", n, ep.Queued())
	}
	tb.Revoke(0, ep, &peerv1.ControlFrame{})
	tb.Failed(0, ep, errHangs)
	if ep.Queued() != 0 {
		t.Error("a revoke outlives the failed connect")
	}
}
