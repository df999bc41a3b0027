package sidecar

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/control/lease"
	"github.com/kvspray/kvspray/control/peer"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/metrics"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// bindName names a grant or an origin: what a frame carries, with the peer whose lane it came on.
type bindName struct {
	peer transfer.Boot
	slot transfer.Slot
}

// driver runs the executor: it serialises events, gives them the time, and performs what follows.
//
// An event is handled in the goroutine that brings it. Whoever finds nobody performing performs, until nothing is left;
// others leave their actions to him. So actions keep the executor's order, nothing is done under the lock, and an event on an
// idle sidecar costs no change of goroutine.
type driver struct {
	start time.Time

	mu         sync.Mutex // protects the executor and the fields below
	ex         *exec.Exec
	performing bool
	rounds     uint64     // batches performed
	batch      exec.Batch // the performer's
	armed      exec.Instant
	timer      *time.Timer
	awaits     map[uint64]func(connector.Admission)
	lastAwait  uint64
	fenced     map[*connector.Worker]func()

	// Found by frames, so apart from mu. Only actions write to them.
	bindMu  sync.RWMutex
	grants  map[bindName]*exec.ReceivePart
	origins map[bindName]*exec.SendPart
	lanes   map[uint64]*laneEntry

	inflows inflows

	ctx  context.Context // of fences and dials; ends when everything must
	stop context.CancelFunc
	wg   sync.WaitGroup
}

type laneEntry struct {
	lane    transport.Lane
	backend int           // index in the registry
	inflow  *inflow       // from its peer over its rail; nil: nothing stands before us that could overflow
	asked   uint64        // received bytes when it was asked last; the performer's
	down    chan struct{} // closed by LaneDown
	closing atomic.Bool
}

// enter takes the executor. leave must follow.
func (n *Node) enter() exec.Instant {
	n.d.mu.Lock()
	return n.now()
}

func (n *Node) now() exec.Instant { return time.Since(n.d.start) }

// leave performs what the executor wants done, unless somebody is doing that already.
func (n *Node) leave() {
	d := &n.d
	if d.performing {
		d.mu.Unlock()
		return
	}
	d.performing = true
	for d.ex.Drain(&d.batch) {
		d.mu.Unlock()
		for i := range d.batch.Actions {
			n.perform(&d.batch.Actions[i])
		}
		d.mu.Lock()
		d.rounds++
	}
	d.performing = false
	n.armLocked()
	d.mu.Unlock()
}

// armLocked sets the timer for the executor's next deadline.
func (n *Node) armLocked() {
	d := &n.d
	next := d.ex.Next()
	if next == d.armed || d.ctx.Err() != nil {
		return
	}
	// A timer that fires too early costs a Tick; one that is moved at each event costs more.
	if d.armed != lease.Never && next > d.armed {
		return
	}
	d.armed = next
	wait := max(next-n.now(), 0)
	if d.timer == nil {
		d.timer = time.AfterFunc(wait, n.tick)
	} else {
		d.timer.Reset(wait)
	}
}

func (n *Node) tick() {
	now := n.enter()
	n.d.armed = lease.Never
	n.d.ex.Tick(now)
	n.leave()
}

// perform does one action. It must not block: what may is started in a goroutine of the node.
func (n *Node) perform(a *exec.Action) {
	switch a.Kind {
	case exec.Connect:
		n.connect(a.Endpoint)
	case exec.Send:
		n.sendFrame(a.Peer, a.Frame)
	case exec.Offer:
		n.offer(a)
	case exec.Fence:
		n.fence(a)
	case exec.Forget:
		n.forget(a.ReceivePart)
	case exec.Follow:
		a.Worker.Follow(a.On)
	case exec.Bind:
		n.bind(a.SendPart)
	case exec.Update:
		n.update(a)
	case exec.CloseOrigin:
		n.closeOrigin(a)
	case exec.Move:
		n.move(a)
	case exec.WakeHint:
		n.rouse(a.Lane)
	case exec.Ask:
		n.ask(a.Lane)
	case exec.Measure:
		n.measure()
	case exec.LogViolation:
		n.log.Warn("a peer says what cannot be; said once", "peer", a.Peer.String(), "refused", a.Text)
	case exec.Complete:
		n.complete(a)
	case exec.Describe:
		n.fetchLayout(a.Peer, a.Geometry)
	case exec.Compare:
		n.compare(a.Comparison)
	case exec.Answer:
		n.d.mu.Lock()
		reply := n.d.awaits[a.Await]
		delete(n.d.awaits, a.Await)
		n.d.mu.Unlock()
		if reply != nil {
			reply(a.Admission)
		}
	case exec.WorkerFenced:
		n.d.mu.Lock()
		done := n.d.fenced[a.Worker]
		delete(n.d.fenced, a.Worker)
		n.plans.forget(a.Worker)
		n.d.mu.Unlock()
		if done != nil {
			done()
		}
	}
}

// sendFrame puts a frame on the control lanes; what is for ourselves is an event of the next round.
func (n *Node) sendFrame(to transfer.Boot, f *peerv1.ControlFrame) {
	if r := f.GetGrantReply(); r != nil && r.Code != peerv1.GrantReply_BOUND && r.Code != peerv1.GrantReply_RANKS {
		n.log.Warn("grant refused", "peer", to.String(), "code", strings.ToLower(r.Code.String()), "gen", r.Gen, "reason", r.Message)
	}
	if to == n.boot {
		n.frame(to, f)
		return
	}
	if f.GetRails() == nil {
		n.need(to)
	}
	n.metrics.Control(metrics.Out, frameName(f))
	n.prefer(to)
	if err := n.peers.Send(to, f); err != nil {
		n.log.Warn("control frame not sent", "peer", to.String(), "type", frameName(f), "err", err)
		// Of a peer that is not there any more the executor is told; this one is.
		if errors.Is(err, peer.ErrQueueFull) || errors.Is(err, peer.ErrTooBig) {
			n.d.ex.Unsent(n.enter(), to, f, err)
			n.leave()
		}
	}
}

// prefer has control frames go over the rail in front of which the least waits.
func (n *Node) prefer(to transfer.Boot) {
	n.d.mu.Lock()
	rail, ok := n.d.ex.Quickest(n.now(), to, config.TransTCP)
	n.d.mu.Unlock()
	var addr netip.Addr
	if r, here := n.rails.find(config.TransTCP, rail); ok && here {
		if a, err := netip.ParseAddrPort(r.Address); err == nil { // an address that is a name prefers nothing
			addr = a.Addr().Unmap()
		}
	}
	n.peers.Prefer(to, addr)
}

// frame takes one control frame from a peer.
func (n *Node) frame(from transfer.Boot, f *peerv1.ControlFrame) {
	if r := f.GetRails(); r != nil {
		n.peerRails(from, r.Rails)
		if len(r.ControlAddresses) > 0 && from != n.boot {
			if err := n.peers.PeerAddresses(from, r.ControlAddresses); err != nil {
				n.d.mu.Lock()
				first := n.d.ex.ReportViolation(from, exec.BadAddress)
				n.d.mu.Unlock()
				if first {
					n.log.Warn("control frame refused; said once", "peer", from.String(), "err", err)
				}
			}
		}
		return
	}
	n.need(from)
	now := n.enter()
	err := n.d.ex.Message(now, from, f)
	n.leave()
	if err != nil {
		n.log.Warn("control frame refused; said once", "peer", from.String(), "err", err)
	}
}

// offer makes the parts of a grant live in every backend and only then tells the peer.
func (n *Node) offer(a *exec.Action) {
	for _, l := range a.ReceiveParts {
		s := newSink(n, l)
		l.Sink, l.Grant.Sink = s, s
		n.d.bindMu.Lock()
		n.d.grants[bindName{l.Grant.Peer, l.Grant.Slot}] = l
		n.d.bindMu.Unlock()
		for _, b := range n.backends {
			token, err := b.Grant(&l.Grant)
			if err != nil {
				n.log.Warn("transport cannot receive this grant", "transport", b.Name(), "lease", l.Lease().String(), "rank", l.Part.Rank, "err", err)
				continue
			}
			if token == nil {
				continue
			}
			if l.Part.TokensByTransport == nil {
				l.Part.TokensByTransport = map[string][]byte{}
			}
			l.Part.TokensByTransport[b.Name()] = token
		}
	}
	n.sendFrame(a.Peer, a.Frame)
}

// fence closes the landing to writers at once, and reports when every backend has acknowledged it.
func (n *Node) fence(a *exec.Action) {
	l, cause := a.ReceivePart, a.Cause
	l.Grant.Revoke()
	began := n.now()
	end := func(ctx context.Context) {
		err := l.Grant.Wait(ctx)
		for _, b := range n.backends {
			if err == nil {
				err = b.Fence(ctx, &l.Grant)
			}
		}
		if s, ok := l.Sink.(*sink); ok {
			n.quarantine(&s.quarantined, err)
		}
		n.fenceEnded(l, cause, n.now()-began, err) // counted before it is told: who has heard of it finds it
		n.d.ex.FenceDone(n.enter(), l, err)
		n.leave()
	}
	if n.guarded && l.Grant.Empty() {
		end(n.d.ctx) // an engine waits, and there is nothing to wait for
		return
	}
	n.d.wg.Add(1)
	// Not in this goroutine: it may be a lane's that reports a landing and still holds the guard.
	go func() {
		defer n.d.wg.Done()
		ctx, cancel := context.WithTimeout(n.d.ctx, n.grace)
		defer cancel()
		end(ctx)
	}()
}

func (n *Node) forget(l *exec.ReceivePart) {
	name := bindName{l.Grant.Peer, l.Grant.Slot}
	n.d.bindMu.Lock()
	defer n.d.bindMu.Unlock()
	if n.d.grants[name] == l {
		delete(n.d.grants, name)
	}
}

func (n *Node) bind(s *exec.SendPart) {
	src, err := n.newSource(s)
	if err != nil {
		now := n.enter()
		n.d.ex.SourceBroken(now, s, err.Error())
		n.leave()
		return
	}
	s.Source, s.Origin.Source = src, src
	name := bindName{s.Origin.Peer, s.Origin.Slot}
	n.d.bindMu.Lock()
	n.d.origins[name] = s
	n.d.bindMu.Unlock()
}

func (n *Node) update(a *exec.Action) {
	src, ok := a.SendPart.Source.(*source)
	if !ok {
		return
	}
	if err := src.side.SetTables(a.Blocks); err != nil {
		now := n.enter()
		n.d.ex.SourceBroken(now, a.SendPart, err.Error())
		n.leave()
	}
}

// closeOrigin keeps lanes from reading at once, and reports when no backend reads any more.
func (n *Node) closeOrigin(a *exec.Action) {
	s, committed := a.SendPart, a.Committed
	s.Origin.Revoke()
	name := bindName{s.Origin.Peer, s.Origin.Slot}
	n.d.wg.Add(1)
	go func() {
		defer n.d.wg.Done()
		ctx, cancel := context.WithTimeout(n.d.ctx, n.grace)
		defer cancel()
		err := s.Origin.Wait(ctx)
		for _, b := range n.backends {
			if err == nil && s.Source != nil {
				err = b.CloseOrigin(ctx, &s.Origin)
			}
		}
		if err == nil {
			n.d.bindMu.Lock()
			if n.d.origins[name] == s {
				delete(n.d.origins, name)
			}
			n.d.bindMu.Unlock()
			if committed {
				n.hashes.sent(s)
			}
		} else if n.d.ctx.Err() == nil {
			n.log.Warn("origin not closed; tried again", "lease", s.Lease.String(), "err", err)
		}
		if src, ok := s.Source.(*source); ok {
			n.quarantine(&src.quarantined, err)
		}
		now := n.enter()
		n.d.ex.OriginClosed(now, s, err)
		n.leave()
	}()
}

func (n *Node) move(a *exec.Action) {
	e := n.laneOf(a.Lane)
	err := error(net.ErrClosed)
	if e != nil && !e.closing.Load() {
		if err = e.lane.Move(a.Slices); err == nil {
			return
		}
		// It took nothing, which only a lane that is about to end does: hasten it.
		n.closeLane(e)
	}
	res := make([]transport.Result, len(a.Slices))
	for i, s := range a.Slices {
		res[i] = transport.Result{Slice: s, Outcome: transfer.NotLanded, Reason: transfer.ReasonLaneLost, Err: err}
	}
	now := n.enter()
	n.d.ex.Results(now, res)
	n.leave()
}

// laneOf finds a lane that is up; nil: it is not.
func (n *Node) laneOf(id uint64) *laneEntry {
	n.d.bindMu.RLock()
	defer n.d.bindMu.RUnlock()
	return n.d.lanes[id]
}

func (n *Node) rouse(lane uint64) {
	e := n.laneOf(lane)
	if e == nil || e.closing.Load() {
		return
	}
	if r, ok := e.lane.(transport.Rouser); ok {
		r.Rouse()
	}
}

// ask says whether bytes of a quiet lane have moved.
func (n *Node) ask(lane uint64) {
	e := n.laneOf(lane)
	if e == nil {
		return
	}
	m, ok := e.lane.(transport.Meter)
	if !ok {
		return
	}
	if got := m.Received(); got > e.asked {
		e.asked = got
		now := n.enter()
		n.d.ex.Moved(now, lane)
		n.leave()
	}
}

func (n *Node) closeLane(e *laneEntry) {
	if e.closing.Swap(true) {
		return
	}
	n.d.wg.Add(1)
	go func() {
		defer n.d.wg.Done()
		if err := e.lane.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
			n.log.Debug("lane close", "lane", e.lane.ID(), "err", err)
		}
	}()
}

func (n *Node) complete(a *exec.Action) {
	c := a.Completion
	route, moved := "", uint64(0)
	if len(a.ReceiveParts) > 0 {
		c.Transport, route, moved = n.route(a.ReceiveParts)
		switch c.Status {
		case exec.StatusOK:
			for _, l := range a.ReceiveParts {
				n.hashes.received(l)
			}
		case exec.StatusFailed, exec.StatusExpired:
			c.Recompute = recompute(n.reg, a.ReceiveParts)
		}
	}
	if t := a.Trace; t != nil && !c.Received {
		c.Transport, route, moved = n.named(t.Moved[:])
	}
	// The engine waits; the log does not.
	err := n.engine.Complete(a.Worker, c)
	n.traceEnd(a, &c, route, moved)
	if err != nil {
		n.log.Debug("completion not delivered", "lease", c.Lease.String(), "err", err)
	}
}

// filled reports a landing whose bitmap is full. Called by lanes, under the grant's guard.
func (n *Node) filled(l *exec.ReceivePart) {
	now := n.enter()
	n.d.ex.Full(now, l)
	n.leave()
}
