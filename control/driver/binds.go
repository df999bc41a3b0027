package driver

import (
	"context"
	"sync"
	"sync/atomic"

	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// bindName names a grant or an origin: the slot of a frame, and the peer of its lane.
type bindName struct {
	peer transfer.Boot
	slot transfer.Slot
}

// binds holds the live grants and origins. Lanes look them up, so they have a lock of their own;
// only actions and the ends of closes write to them.
type binds struct {
	mu      sync.RWMutex // protects all below
	grants  map[bindName]*receiver
	origins map[bindName]*sender // a newer origin of a slot replaces one that is being closed
	senders map[*exec.SendPart]*sender
}

// sender is the sending end of one part.
type sender struct {
	sending     *exec.SendPart
	quarantined atomic.Bool // its origin could not be closed, and the close is retried
}

func (b *binds) put(r *receiver) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.grants[grantName(r.landing)] = r
}

func (b *binds) receiver(l *exec.ReceivePart) *receiver {
	b.mu.RLock()
	defer b.mu.RUnlock()
	if r := b.grants[grantName(l)]; r != nil && r.landing == l {
		return r
	}
	return nil
}

func (b *binds) forget(l *exec.ReceivePart) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if r := b.grants[grantName(l)]; r != nil && r.landing == l {
		delete(b.grants, grantName(l))
	}
}

func (b *binds) putSender(x *sender) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.origins[originName(x.sending)], b.senders[x.sending] = x, x
}

// sender returns the sending end of s; nil: its Bind has failed, or it is closed.
func (b *binds) sender(s *exec.SendPart) *sender {
	b.mu.RLock()
	defer b.mu.RUnlock()
	return b.senders[s]
}

func (b *binds) forgetSender(s *exec.SendPart) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.senders, s)
	if x := b.origins[originName(s)]; x != nil && x.sending == s {
		delete(b.origins, originName(s))
	}
}

func grantName(l *exec.ReceivePart) bindName { return bindName{l.Grant.Peer, l.Grant.Slot} }
func originName(s *exec.SendPart) bindName   { return bindName{s.Origin.Peer, s.Origin.Slot} }

// Grant finds the live grant of a frame's slot, for transport.Host.
func (d *Driver) Grant(peer transfer.Boot, slot transfer.Slot, gen transfer.Gen) (*transport.Grant,
	transfer.Reason) {
	d.binds.mu.RLock()
	r := d.binds.grants[bindName{peer, slot}]
	d.binds.mu.RUnlock()
	if r == nil {
		return nil, transfer.ReasonUnknownSlot
	}
	switch g := &r.landing.Grant; {
	case g.Gen != gen:
		return nil, transfer.ReasonStaleGen
	case g.Revoked():
		return nil, transfer.ReasonRevoked
	default:
		return g, transfer.ReasonNone
	}
}

// Origin finds the live origin of a destination-initiated confirmation, for transport.Host.
func (d *Driver) Origin(peer transfer.Boot, slot transfer.Slot,
	gen transfer.Gen) (*transport.Origin, transfer.Reason) {
	d.binds.mu.RLock()
	x := d.binds.origins[bindName{peer, slot}]
	d.binds.mu.RUnlock()
	if x == nil {
		return nil, transfer.ReasonUnknownSlot
	}
	switch o := &x.sending.Origin; {
	case o.Gen != gen:
		return nil, transfer.ReasonStaleGen
	case o.Revoked():
		return nil, transfer.ReasonSourceGone
	default:
		return o, transfer.ReasonNone
	}
}

// Bound counts the grants and origins of each peer.
func (d *Driver) Bound() map[transfer.Boot]int {
	count := map[transfer.Boot]int{}
	d.binds.mu.RLock()
	defer d.binds.mu.RUnlock()
	for k := range d.binds.grants {
		count[k.peer]++
	}
	for k := range d.binds.origins {
		count[k.peer]++
	}
	return count
}

// BoundTo counts the grants and origins of one peer.
func (d *Driver) BoundTo(boot transfer.Boot) (count int) {
	d.binds.mu.RLock()
	defer d.binds.mu.RUnlock()
	for k := range d.binds.grants {
		if k.peer == boot {
			count++
		}
	}
	for k := range d.binds.origins {
		if k.peer == boot {
			count++
		}
	}
	return count
}

// offer makes the parts of a grant live in every backend, and only then sends it to the peer.
func (d *Driver) offer(a *exec.Action) {
	for _, l := range a.ReceiveParts {
		r := newReceiver(d, l)
		for _, b := range d.backends {
			token, err := b.Grant(&l.Grant)
			if err != nil {
				d.log.Warn("transport cannot receive this grant", "transport", b.Name(), "lease",
					l.Lease().String(),
					"rank", l.Part.Rank, "err", err)
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
		d.binds.put(r)
	}
	d.cfg.Peers.Send(a.Peer, a.Frame)
}

// fence closes the landing to writers at once, and reports when every backend has acknowledged it.
func (d *Driver) fence(a *exec.Action) {
	l, cause := a.ReceivePart, a.Cause
	r := d.binds.receiver(l)
	l.Grant.Revoke()
	began := d.cfg.Process.Now()
	work := func(ctx context.Context) (done func()) {
		err := l.Grant.Wait(ctx)
		for _, b := range d.backends {
			if err == nil {
				err = b.Fence(ctx, &l.Grant)
			}
		}
		if r != nil {
			d.quarantine(&r.quarantined, err)
		}
		if err == nil {
			d.cfg.Observer.Fenced(cause, d.cfg.Process.Now()-began)
		} else if ctx.Err() != context.Canceled {
			d.log.Error("fence failed and will be retried; the blocks stay in quarantine", "lease",
				l.Lease().String(), "err", err)
		}
		return func() {
			d.ex.FenceDone(d.enter(), l, err)
			d.leave()
		}
	}
	if d.guarded && l.Grant.Empty() {
		work(context.Background())() // an engine waits, and no writer is left
		return
	}
	// Not in this goroutine: it may be that of a lane that reports a landing and still holds the
	// guard.
	d.goFor(work)
}

// goFor runs work, for the grace time at most.
func (d *Driver) goFor(work func(ctx context.Context) (event func())) {
	d.cfg.Process.Go(func(ctx context.Context) func() {
		ctx, cancel := context.WithTimeout(ctx, d.cfg.Grace)
		defer cancel()
		return work(ctx)
	})
}

func (d *Driver) quarantine(in *atomic.Bool, err error) {
	switch was := in.Swap(err != nil); {
	case !was && err != nil:
		d.cfg.Observer.Quarantined(1)
	case was && err == nil:
		d.cfg.Observer.Quarantined(-1)
	}
}

func (d *Driver) bind(s *exec.SendPart) {
	m, err := d.cfg.Memory.Sender(s)
	if err != nil {
		d.broken(s, err)
		return
	}
	s.Origin.Memory, s.Origin.Lease, s.Origin.Valid = m, s.Lease, s.Worker.SourceValid
	d.binds.putSender(&sender{sending: s})
}

func (d *Driver) update(a *exec.Action) {
	if d.binds.sender(a.SendPart) == nil {
		return
	}
	if err := d.cfg.Memory.Extend(a.SendPart, a.Blocks); err != nil {
		d.broken(a.SendPart, err)
	}
}

func (d *Driver) broken(s *exec.SendPart, err error) {
	now := d.enter()
	d.ex.SourceBroken(now, s, err.Error())
	d.leave()
}

// closeOrigin keeps lanes from reading at once, and reports when no backend reads any more.
func (d *Driver) closeOrigin(a *exec.Action) {
	s, committed := a.SendPart, a.Committed
	x := d.binds.sender(s)
	s.Origin.Revoke()
	d.goFor(func(ctx context.Context) (done func()) {
		err := s.Origin.Wait(ctx)
		for _, b := range d.backends {
			if err == nil && x != nil {
				err = b.CloseOrigin(ctx, &s.Origin)
			}
		}
		if err == nil {
			d.binds.forgetSender(s)
			if committed {
				d.cfg.Observer.Sent(s)
			}
		} else if ctx.Err() != context.Canceled {
			d.log.Warn("origin not closed; tried again", "lease", s.Lease.String(), "err", err)
		}
		if x != nil {
			d.quarantine(&x.quarantined, err)
		}
		return func() {
			now := d.enter()
			d.ex.OriginClosed(now, s, err)
			d.leave()
		}
	})
}
