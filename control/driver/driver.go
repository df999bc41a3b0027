package driver

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/transport"
)

// Driver runs one executor.
//
// The goroutine that brings an event performs the actions that follow, until nothing is left; while
// it does so, other goroutines leave their actions to it. So actions keep the executor's order,
// none is performed under the lock, and an event on an idle sidecar costs no change of goroutine.
type Driver struct {
	cfg  Config
	log  *slog.Logger
	tick func() // Tick

	// Set by Use, before peers can open lanes.
	backends transport.Registry
	guarded  bool // Caps.Guarded of all backends

	lock       Lock // protects the executor and the fields below
	ex         *exec.Exec
	performing bool
	rounds     uint64     // batches performed
	batch      exec.Batch // of the goroutine that performs

	binds   binds
	lanes   lanes
	inflows inflows
}

// New makes a driver. Use must follow before peers can open lanes.
func New(c Config) *Driver {
	d := &Driver{cfg: c, log: c.Log, ex: c.Exec, lock: c.Lock}
	if d.lock == nil {
		d.lock = &sync.Mutex{}
	}
	d.tick = d.Tick
	d.binds.grants, d.binds.origins = map[bindName]*receiver{}, map[bindName]*sender{}
	d.binds.senders = map[*exec.SendPart]*sender{}
	d.lanes.byID = map[uint64]*lane{}
	d.inflows.all = map[inflowName]*inflow{}
	return d
}

// Use sets the backends that are open.
func (d *Driver) Use(backends transport.Registry) {
	d.backends = backends
	d.guarded = !slices.ContainsFunc(backends,
		func(b transport.Backend) bool { return !b.Caps().Guarded })
}

// enter takes the executor. leave must follow.
func (d *Driver) enter() exec.Instant {
	d.lock.Lock()
	return d.cfg.Process.Now()
}

// leave performs the executor's actions, unless another goroutine does.
func (d *Driver) leave() {
	if d.performing {
		d.lock.Unlock()
		return
	}
	d.performing = true
	for d.ex.Drain(&d.batch) {
		d.lock.Unlock()
		for i := range d.batch.Actions {
			d.perform(&d.batch.Actions[i])
		}
		d.lock.Lock()
		d.rounds++
	}
	d.performing = false
	d.cfg.Process.Idle(d.ex.Next(), d.tick)
	d.lock.Unlock()
}

// Do brings an event to the executor, and performs what follows.
func (d *Driver) Do(event func(ex *exec.Exec, now exec.Instant)) {
	now := d.enter()
	event(d.ex, now)
	d.leave()
}

// eventsAtOnce bounds how long a batch of events has the executor's lock, which lanes wait for.
const eventsAtOnce = 64

// Handle brings events of engines to the executor, and performs what follows. An empty batch proves
// that the executor is free.
func (d *Driver) Handle(events []engines.Event) {
	for {
		n := min(len(events), eventsAtOnce)
		now := d.enter()
		d.ex.Handle(now, events[:n])
		d.leave()
		if events = events[n:]; len(events) == 0 {
			return
		}
	}
}

// View reads the executor's state. It brings no event.
func (d *Driver) View(read func(ex *exec.Exec, now exec.Instant)) {
	now := d.enter()
	defer d.lock.Unlock()
	read(d.ex, now)
}

// Tick brings the time to the executor.
func (d *Driver) Tick() {
	now := d.enter()
	d.cfg.Process.Fired()
	d.ex.Tick(now)
	d.leave()
}

// Performing reports whether actions are being performed.
func (d *Driver) Performing() bool {
	d.lock.Lock()
	defer d.lock.Unlock()
	return d.performing
}

// Bounds of Wedged.
const (
	WedgedAfter   = 800 * time.Millisecond // a kubelet waits a second
	wedgedLooks   = 5 * time.Millisecond
	wedgedLock    = "the executor's lock is held"
	wedgedActions = "an action of the executor has not ended"
)

// Wedged returns what blocks the executor, or nothing: within WedgedAfter its lock becomes free,
// and the goroutine that performs its actions finishes a batch.
func (d *Driver) Wedged(ctx context.Context) string {
	ctx, cancel := context.WithTimeout(ctx, WedgedAfter)
	defer cancel()
	t := time.NewTicker(wedgedLooks)
	defer t.Stop()
	var first uint64
	why := wedgedLock
	for seen := false; ; {
		if d.lock.TryLock() {
			performing, rounds := d.performing, d.rounds
			d.lock.Unlock()
			if !performing || seen && rounds != first {
				return ""
			}
			first, seen, why = rounds, true, wedgedActions
		}
		select {
		case <-ctx.Done():
			return fmt.Sprintf("wedged: %s, for %v", why, WedgedAfter)
		case <-t.C:
		}
	}
}

// perform does one action. It does not block: what may block runs in Process.Go.
func (d *Driver) perform(a *exec.Action) {
	switch a.Kind {
	case exec.Connect:
		d.cfg.Peers.Connect(a.Endpoint)
	case exec.Send:
		d.cfg.Peers.Send(a.Peer, a.Frame)
	case exec.Offer:
		d.offer(a)
	case exec.Fence:
		d.fence(a)
	case exec.Forget:
		d.binds.forget(a.ReceivePart)
	case exec.Follow:
		a.Worker.Session.Follow(a.On)
	case exec.Bind:
		d.bind(a.SendPart)
	case exec.Update:
		d.update(a)
	case exec.CloseOrigin:
		d.closeOrigin(a)
	case exec.Move:
		d.move(a)
	case exec.WakeHint:
		d.wakeHint(a.Lane)
	case exec.Ask:
		d.ask(a.Lane)
	case exec.Measure:
		d.measure()
	case exec.LogViolation:
		d.log.Warn("protocol violation by a peer; logged once", "peer", a.Peer.String(),
			"refused", a.Text)
	case exec.HeldOn:
		a.Worker.Session.HeldOn(a.Lease)
	case exec.Complete:
		d.cfg.Engines.Complete(a)
	case exec.Describe:
		d.cfg.Peers.Describe(a.Peer, a.Geometry)
	case exec.Compare:
		d.cfg.Peers.Compare(a.Comparison)
	case exec.Answer:
		a.Await.Reply(a.Admission)
	case exec.WorkerFenced:
		d.lock.Lock()
		d.cfg.Engines.Forget(a.Worker)
		d.lock.Unlock()
		a.Fenced()
	}
}
