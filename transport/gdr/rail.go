package gdr

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/kvspray/kvspray/internal/admit"
	"github.com/kvspray/kvspray/internal/sys/usertimeout"
	"github.com/kvspray/kvspray/internal/sys/verbs"
	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// Bounds of reopening a lost device.
const (
	reopenFirst   = 20 * time.Millisecond // after the loss
	reopenLongest = 2 * time.Second       // between tries
	// lost devices of a rail that still have queue pairs; with more, none is opened.
	maxLost = 4
)

// rail is a listener with its device. A lost device is reopened in the background, under the GID
// and address that its port has then.
type rail struct {
	b    *Backend
	cfg  Rail
	wake chan struct{} // a device was lost

	dials, accepts *gate       // of set-ups
	unproved       *admit.Gate // accepted connections that are being opened

	mu sync.Mutex // never held during a command to the device
	// guarded by mu
	dev    *openDevice // nil: lost, and not reopened yet
	why    error       // why dev is nil
	down   bool        // the port
	ln     net.Listener
	at     string        // the address given to listen
	lost   []*openDevice // until they are released completely
	closed bool
}

// openDevice is a device with the resources of its life.
type openDevice struct {
	verbs.Device
	sends   int // work requests of a lane
	domains *domains
	keys    *keys
	gone    chan struct{} // closed by lose: no new lanes
	dead    chan struct{} // closed when the device will report nothing any more

	mu sync.Mutex
	// guarded by mu
	users  int // lanes, and callers in a command
	kept   int // ended lanes whose queue pairs the device has not released
	ways   map[wayKey]*ways
	slabs  uint64 // bytes of all lanes' slabs
	idle   sync.Cond
	closed bool
}

func (b *Backend) openRail(ctx context.Context, cfg Rail) (*rail, error) {
	r := &rail{b: b, cfg: cfg, wake: make(chan struct{}, 1), dials: newGate(), accepts: newGate(),
		unproved: admit.New(admit.Limits{Unproved: maxUnproved, PerSource: maxSource}, nil)}
	dev, err := r.open()
	if err != nil {
		return nil, err
	}
	if err := r.listen(ctx, dev); err != nil {
		return nil, errors.Join(err, dev.Close())
	}
	r.dev = dev
	b.wg.Go(func() { r.follow(dev) })
	b.wg.Go(r.tend)
	return r, nil
}

func (r *rail) open() (*openDevice, error) {
	d, err := r.cfg.Open()
	if err != nil {
		return nil, err
	}
	sends, err := sendDepth(d.Name(), d.Limits())
	if err != nil {
		return nil, errors.Join(err, d.Close())
	}
	s := newDomains(d)
	dev := &openDevice{Device: d, sends: sends, domains: s, keys: newKeys(s, r.b.cfg.Log),
		gone: make(chan struct{}), dead: make(chan struct{}), ways: map[wayKey]*ways{}}
	dev.idle.L = &dev.mu
	return dev, nil
}

// sendDepth returns the number of work requests of a lane. The error: a limit of the device is too
// low for a lane.
func sendDepth(name string, l verbs.Limits) (int, error) {
	sends := min(maxSends, l.MaxWork, l.MaxCompletions-receives)
	if sends < 2*maxInFlight || l.MaxWork < receives || l.MaxMessage == 0 || l.MaxRegistration == 0 {
		return 0, fmt.Errorf("gdr: %s reports %d work requests, %d completions, and %d and %d bytes "+
			"of a message and a registration: at least %d, %d, 1 and 1 are needed: %w", name, l.MaxWork,
			l.MaxCompletions, l.MaxMessage, l.MaxRegistration, 2*maxInFlight, 2*maxInFlight+receives,
			transport.ErrNotSupported)
	}
	return sends, nil
}

// listen makes the listener for a device, unless one exists at its address. Called by openRail, and
// after it by tend alone.
func (r *rail) listen(ctx context.Context, dev *openDevice) error {
	at := r.cfg.Listen
	if at == "" { // the device's address, so that the sockets fail together with it
		at = net.JoinHostPort(dev.GID().Addr().String(), "0")
	}
	if at == r.at {
		return nil
	}
	ln, err := usertimeout.ListenConfig(r.b.cfg.HostSilence).Listen(ctx, "tcp", at)
	if err != nil {
		return fmt.Errorf("listen on %q: %w", at, err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return errors.Join(net.ErrClosed, ln.Close())
	}
	if r.ln != nil {
		_ = r.ln.Close() // the address no longer exists
	}
	r.ln, r.at = ln, at
	r.b.wg.Go(func() { r.accept(ln) })
	return nil
}

// follow handles the events of a device until the device or the backend is closed.
func (r *rail) follow(dev *openDevice) {
	for {
		var e verbs.Event
		var ok bool
		select {
		case e, ok = <-dev.Events():
		case <-r.b.life.Done():
			return
		}
		if !ok || e.Kind == verbs.DeviceFatal {
			close(dev.dead)
			r.lose(dev, errors.New("the device is gone"))
			return
		}
		r.b.cfg.Log.Info("device event", "transport", Name, "rail", r.cfg.Name, "event",
			e.Kind.String(), "qp", e.QP)
		switch e.Kind {
		case verbs.GIDChange: // mostly of an unused entry
			if _, err := dev.active(); err != nil {
				r.lose(dev, err)
			}
		case verbs.PortUp:
			r.setDown(dev, false)
		case verbs.PortDown:
			r.setDown(dev, true)
			r.b.failLanes(fmt.Errorf("gdr: rail %s: %s", r.cfg.Name, e.Kind),
				func(l *lane) bool { return l.dev == dev })
		case verbs.QueuePairFatal:
			r.b.failLanes(fmt.Errorf("gdr: rail %s: %s", r.cfg.Name, e.Kind),
				func(l *lane) bool { return l.dev == dev && l.q.Num() == e.QP })
		}
	}
}

// setDown records the state of the port.
func (r *rail) setDown(dev *openDevice, down bool) {
	r.mu.Lock()
	change := r.dev == dev && r.down != down
	if change {
		r.down = down
	}
	r.mu.Unlock()
	if change {
		r.b.changed()
	}
}

// lose gives up a device once: its lanes end, then it is closed, which lets the kernel remove it.
func (r *rail) lose(dev *openDevice, why error) {
	r.mu.Lock()
	if r.dev != dev || r.closed {
		r.mu.Unlock()
		return
	}
	r.dev, r.why = nil, why
	r.lost = append(r.lost, dev)
	r.mu.Unlock()
	r.b.cfg.Log.Warn("device lost; opened again in the background", "transport", Name, "rail",
		r.cfg.Name, "err", why)
	close(dev.gone)
	r.b.failLanes(fmt.Errorf("gdr: rail %s: device lost: %w", r.cfg.Name, why),
		func(l *lane) bool { return l.dev == dev })
	r.b.changed()
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// tend executes slow commands: it reopens the device, and releases idle keys and resources that a
// device kept.
func (r *rail) tend() {
	tick := time.NewTicker(r.b.interval())
	defer tick.Stop()
	var again <-chan time.Time
	wait := reopenFirst
	for {
		select {
		case <-r.b.life.Done():
			return
		case <-r.wake:
			wait, again = reopenFirst, time.After(reopenFirst)
		case <-again:
			again = nil
			if err := r.reopen(); err != nil {
				wait = min(2*wait, reopenLongest)
				again = time.After(wait)
			}
		case now := <-tick.C:
			if err := r.sweep(now); err != nil {
				r.b.cfg.Log.Warn("registration not released; tried again", "transport", Name, "rail",
					r.cfg.Name, "err", err)
			}
		}
	}
}

// reopen opens a lost device, and chooses its GID again.
func (r *rail) reopen() (err error) {
	r.mu.Lock()
	missing, lost := r.dev == nil, len(r.lost)
	r.mu.Unlock()
	if !missing {
		return nil
	}
	if lost > maxLost {
		return r.still(
			fmt.Errorf("%d lost devices have not released their queue pairs: restart the sidecar", lost))
	}
	dev, err := r.open()
	if err != nil {
		return r.still(err)
	}
	if err := r.listen(r.b.life, dev); err != nil {
		return r.still(errors.Join(err, dev.Close()))
	}
	r.mu.Lock()
	if r.closed {
		r.mu.Unlock()
		return dev.Close()
	}
	r.dev, r.why, r.down = dev, nil, false
	r.mu.Unlock()
	r.b.wg.Go(func() { r.follow(dev) })
	r.b.cfg.Log.Info("device reopened", "transport", Name, "rail", r.cfg.Name, "gid", dev.GID().Addr())
	r.b.changed()
	return nil
}

// still records why there is no device.
func (r *rail) still(err error) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.why = err
	return err
}

// active is Active of the open device.
func (d *openDevice) active() (bool, error) {
	if !d.enter() {
		return false, net.ErrClosed
	}
	defer d.leave()
	return d.Active()
}

// ready checks the rail by the device's events, without a command to it.
func (r *rail) ready() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.dev == nil:
		return lostFor(r.why)
	case r.down:
		return notActive(r.dev)
	}
	return nil
}

func lostFor(why error) error {
	return fmt.Errorf("the device was lost and is not open again yet: %w", why)
}

func notActive(dev *openDevice) error {
	return fmt.Errorf("the port of %s is not active: look at its cable and its network interface",
		dev.Name())
}

// usable returns the device if its port is up.
func (r *rail) usable() (*openDevice, error) {
	dev, why := r.current()
	if dev == nil {
		return nil, lostFor(why)
	}
	active, err := dev.active()
	if err != nil {
		r.lose(dev, err)
		return nil, err
	}
	if !active {
		return nil, notActive(dev)
	}
	return dev, nil
}

func (r *rail) current() (*openDevice, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.dev, r.why
}

// state is the rail's current state.
func (r *rail) state() RailState {
	r.mu.Lock()
	defer r.mu.Unlock()
	return RailState{Rail: transport.Rail{Name: r.cfg.Name, Address: r.ln.Addr().String(),
		Gbps: r.cfg.Gbps, NUMA: r.cfg.NUMA}, Down: r.dev == nil || r.down}
}

// sweep releases idle keys, queue pairs that a device kept, and lost devices without resources: the
// kernel waits for that before it removes them.
func (r *rail) sweep(now time.Time) error {
	for _, l := range r.b.allLanes() {
		if l.rail == r {
			l.trimStages(now, false)
			l.reap()
		}
	}
	r.mu.Lock()
	dev := r.dev
	lost := append([]*openDevice(nil), r.lost...)
	r.mu.Unlock()
	closed := map[*openDevice]bool{}
	for _, d := range lost {
		if d.unused() {
			_ = d.close(true) // it is gone; its answer does not matter
			closed[d] = true
		}
	}
	r.mu.Lock()
	kept := r.lost[:0]
	for _, d := range r.lost {
		if !closed[d] {
			kept = append(kept, d)
		}
	}
	clear(r.lost[len(kept):])
	r.lost = kept
	r.mu.Unlock()
	if dev == nil {
		return nil
	}
	return errors.Join(dev.keys.sweep(now), dev.domains.sweep())
}

// enter keeps the device open.
func (d *openDevice) enter() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return false
	}
	d.users++
	return true
}

func (d *openDevice) leave() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.users--; d.users == 0 {
		d.idle.Broadcast()
	}
}

// keep counts an ended lane whose queue pair still exists; n is 1, or -1 when it is released.
func (d *openDevice) keep(n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.kept += n
}

func (d *openDevice) unused() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.users == 0 && d.kept == 0
}

// close waits for lanes that are being opened, and releases the device. A device that keeps queue
// pairs stays open with the memory that they may touch, until the process ends.
func (d *openDevice) close(lost bool) error {
	d.mu.Lock()
	d.closed = true
	for d.users > 0 {
		d.idle.Wait()
	}
	kept := d.kept
	d.mu.Unlock()
	if kept > 0 {
		return fmt.Errorf("gdr: %s keeps %d queue pairs and the memory that they reach until this "+
			"process ends", d.Name(), kept)
	}
	return errors.Join(d.keys.close(lost), d.domains.sweep(), d.Close())
}

// shut ends the rail's listener; no device is reopened after it.
func (r *rail) shut() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = true
	_ = r.ln.Close() // its accepted connections are lanes
}

// close ends the rail's devices; their lanes have ended, and its goroutines.
func (r *rail) close() (err error) {
	r.mu.Lock()
	dev, lost := r.dev, r.lost
	r.dev, r.why, r.lost = nil, net.ErrClosed, nil
	r.mu.Unlock()
	for _, d := range lost {
		if cerr := d.close(true); !d.unused() {
			err = errors.Join(err, cerr)
		}
	}
	if dev != nil {
		err = errors.Join(err, dev.close(false))
	}
	return err
}

func (r *rail) accept(ln net.Listener) {
	failed := func(err error) {
		r.b.refused.Note(slog.LevelWarn, "accept failed", "rail", r.cfg.Name, "err", err)
	}
	for c := range admit.Accepted(r.b.life.Done(), ln.Accept, failed) {
		v := r.unproved.Enter(c)
		r.b.wg.Go(func() {
			proved, err := r.welcome(c, v)
			open := v.Leave() // false: closed for another one, or proved
			if err == nil {
				return
			}
			_ = c.Close()
			if open || proved {
				r.b.refused.Note(slog.LevelWarn, "lane refused", "rail", r.cfg.Name, "remote",
					c.RemoteAddr().String(), "err", err)
			}
		})
	}
}

// welcome opens a dialed lane. A silent dialler holds no place: the place is taken after the
// dialler's Hello, when the dialler has a place of its own.
func (r *rail) welcome(c net.Conn, v *admit.Visit) (proved bool, _ error) {
	ctx, cancel := context.WithTimeout(r.b.life, r.b.cfg.Opening)
	defer cancel()
	_ = c.SetDeadline(time.Now().Add(r.b.cfg.Opening))
	defer r.b.whileAlive(c)()
	var l *lane
	entered := false
	defer func() {
		if entered {
			r.accepts.leave()
		}
	}()
	o, err := wire.Accept(c, wire.AcceptParams{Purpose: purpose, Versions: frames,
		Lookup: func(boot transfer.Boot) ([32]byte, transfer.Boot, bool) {
			p, ok := r.b.host.PeerKey(boot)
			if ok {
				v.Spoke()
			}
			return p.Key, p.Self, ok
		},
		// A queue pair is made only for a peer that the control layer has authenticated.
		Attach: func(h *wire.Hello) (_ []byte, err error) {
			if err := r.accepts.enter(ctx); err != nil {
				return nil, fmt.Errorf("no turn to open a lane: %w", err)
			}
			entered = true
			dev, err := r.usable()
			if err != nil {
				return nil, err
			}
			if l, err = r.b.prepare(c, r, dev, h.From); err != nil {
				return nil, err
			}
			return l.attach(), nil
		},
	})
	if err == nil {
		if proved = v.Proved(); !proved {
			err = net.ErrClosed
		}
	}
	if err == nil {
		// The dialler's proof is verified; its address is used only after that.
		err = l.connect(o)
	}
	if err == nil {
		err = l.start()
	}
	if err != nil && l != nil {
		err = errors.Join(err, l.abandon())
	}
	return proved, err
}
