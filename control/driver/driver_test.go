package driver

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/control/lease"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// nothing implements everything around a driver, without peers and engines.
type nothing struct{ connects chan struct{} }

func (nothing) PeerKey(transfer.Boot) (transport.Peer, bool)    { return transport.Peer{}, false }
func (nothing) Known(transfer.Boot) bool                        { return true }
func (n nothing) Connect(string)                                { <-n.connects }
func (nothing) Send(transfer.Boot, *peerv1.ControlFrame)        {}
func (nothing) Describe(transfer.Boot, [32]byte)                {}
func (nothing) Compare(exec.Comparison)                         {}
func (nothing) Complete(*exec.Action)                           {}
func (nothing) Forget(*engines.Worker)                          {}
func (nothing) Rail(string, string) (transport.Rail, bool)      { return transport.Rail{}, false }
func (nothing) DeviceSlices() bool                              { return false }
func (nothing) LaneUp(transport.Lane)                           {}
func (nothing) LaneRefused(transport.Lane, error)               {}
func (nothing) LaneDown(transport.Lane, bool)                   {}
func (nothing) Slice(transport.Lane, *transport.Result, uint64) {}
func (nothing) FrameRefused(transport.Lane, transfer.Reason)    {}
func (nothing) Landed(string, string, int, uint64)              {}
func (nothing) Fenced(lease.Cause, time.Duration)               {}
func (nothing) Quarantined(int)                                 {}
func (nothing) Sent(*exec.SendPart)                             {}
func (nothing) Receiver(*exec.ReceivePart) transport.Memory     { return nil }
func (nothing) Sender(*exec.SendPart) (transport.Memory, error) { return nil, nil }
func (nothing) Extend(*exec.SendPart, [][]uint32) error         { return nil }

// newDriver returns a driver of a new executor.
func newDriver(p Process, n nothing) *Driver {
	return New(Config{Exec: exec.New(exec.Config{Boot: transfer.Boot{1}}), Process: p, Peers: n,
		Engines: n, Memory: n, Rails: n,
		Observer: n, Log: slog.New(slog.DiscardHandler), Grace: time.Second})
}

// A driver is wedged if its lock is held, or if an action does not end; otherwise it is not.
func TestWedged(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		p := NewGoroutines()
		defer func() { p.Stop(); p.Wait() }()
		n := nothing{connects: make(chan struct{})}
		d := newDriver(p, n)
		wedged := func(want string) {
			t.Helper()
			from := time.Now()
			why := d.Wedged(t.Context())
			if took := time.Since(from); want == "" && (why != "" || took > 0) || !strings.Contains(why,
				want) || want != "" && took != WedgedAfter {
				t.Errorf("wedged: %q after %v, want %q", why, took, want)
			}
		}
		wedged("")
		d.lock.Lock()
		wedged(wedgedLock)
		d.lock.Unlock()
		wedged("")
		done := make(chan struct{})
		go func() { // its action Connect blocks
			defer close(done)
			d.Handle([]engines.Event{{Kind: engines.Asked,
				Await: &engines.Await{Peer: "elsewhere:1", TTL: time.Hour}}})
		}()
		synctest.Wait()
		wedged(wedgedActions)
		close(n.connects)
		<-done
		wedged("")
	})
}

// The timer fires at the next instant, or earlier; none is left after Wait.
func TestIdle(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		g := NewGoroutines()
		var at []time.Duration
		tick := func() {
			at = append(at, g.Now())
			g.Fired()
		}
		g.Idle(3*time.Second, tick)
		g.Idle(lease.Never, tick) // an early tick is cheaper than moving the timer
		g.Idle(2*time.Second, tick)
		time.Sleep(time.Minute)
		synctest.Wait()
		if len(at) != 1 || at[0] != 2*time.Second {
			t.Errorf("called at %v", at)
		}
		g.Idle(2*time.Minute, tick)
		g.Stop()
		g.Wait()
		g.Idle(time.Minute, tick)
		time.Sleep(time.Hour)
		if len(at) != 1 {
			t.Errorf("called after the end: %v", at)
		}
	})
}

// still is a Process without goroutines.
type still struct{}

func (still) Now() exec.Instant               { return time.Second }
func (still) Idle(exec.Instant, func())       {}
func (still) Fired()                          {}
func (still) Go(func(context.Context) func()) {}

type stillLane struct{ transport.Lane }

func (stillLane) ID() uint64          { return 7 }
func (stillLane) Peer() transfer.Boot { return transfer.Boot{7} }
func (stillLane) Backend() string     { return "tcp" }
func (stillLane) Local() string       { return "lo" }
func (stillLane) Remote() string      { return "lo" }
func (stillLane) MaxInFlight() int    { return 16 }

type stillMemory struct{ transport.Memory }

func (stillMemory) Bytes(transfer.Range) (uint64, error) { return 1 << 20, nil }

// The end of a slice, a landed chunk and an event of the executor allocate nothing in the driver.
func TestAllocatesNothing(t *testing.T) {
	d := newDriver(still{}, nothing{})
	var l transport.Lane = stillLane{}
	d.LaneUp(l)
	res := []transport.Result{{Slice: transport.Slice{Origin: &transport.Origin{Memory: stillMemory{}},
		Range: transfer.Range{Count: 16}, Attempt: 1, Cookie: 1 << 60}, Outcome: transfer.Landed}}
	space, err := transfer.NewSpace([]uint64{64 * transfer.ChunkBytes})
	if err != nil {
		t.Fatal(err)
	}
	x := &exec.ReceivePart{}
	x.Grant.Receipt.Reset(space.NumChunks())
	r := &receiver{d: d, landing: x, space: space}
	for what, f := range map[string]func(){
		"slice":    func() { d.Done(l, res) },
		"landed":   func() { r.landed(l, transfer.Range{First: 1, Count: 2}, 1) },
		"progress": func() { d.Do(func(ex *exec.Exec, now exec.Instant) { ex.Tick(now) }) },
	} {
		if n := testing.AllocsPerRun(100, f); n > 0 {
			t.Errorf("%s: %v allocations", what, n)
		}
	}
}

// While a tick waits for the driver's lock, events that end meanwhile start no other tick.
func TestTickThatWaits(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		g := NewGoroutines()
		lock, ticks := make(chan struct{}), 0
		tick := func() {
			ticks++
			<-lock
			g.Fired()
		}
		g.Idle(time.Second, tick)
		time.Sleep(2 * time.Second)
		for range 200 {
			g.Idle(time.Second, tick)
			synctest.Wait()
		}
		if ticks != 1 {
			t.Errorf("%d ticks for one instant", ticks)
		}
		close(lock)
		synctest.Wait()
		g.Idle(3*time.Second, tick)
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if ticks != 2 {
			t.Errorf("%d ticks for two instants", ticks)
		}
		g.Stop()
		g.Wait()
	})
}
