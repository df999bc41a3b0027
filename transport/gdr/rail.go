package gdr

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/kvspray/kvspray/internal/verbs"
	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
)

// rail is a listener and the device that it is for. A device that was lost is opened again.
type rail struct {
	b   *Backend
	cfg Rail
	ln  net.Listener

	mu sync.Mutex
	// guarded by mu
	dev  *openDevice
	lost []*openDevice // until their lanes have ended
}

// openDevice is a device with what belongs to its life.
type openDevice struct {
	verbs.Device
	keys *keys
	gone chan struct{} // closed by lose
	once sync.Once

	mu sync.Mutex
	// guarded by mu
	lanes  int
	empty  sync.Cond
	closed bool
}

func (b *Backend) openRail(ctx context.Context, cfg Rail) (*rail, error) {
	r := &rail{b: b, cfg: cfg}
	dev, err := r.open()
	if err != nil {
		return nil, err
	}
	r.dev = dev
	if r.ln, err = (&net.ListenConfig{}).Listen(ctx, "tcp", cfg.Listen); err != nil {
		return nil, errors.Join(fmt.Errorf("listen on %q: %w", cfg.Listen, err), dev.Close())
	}
	b.wg.Go(r.accept)
	return r, nil
}

func (r *rail) open() (*openDevice, error) {
	d, err := r.cfg.Open()
	if err != nil {
		return nil, err
	}
	dev := &openDevice{Device: d, keys: newKeys(d), gone: make(chan struct{})}
	dev.empty.L = &dev.mu
	r.b.wg.Go(func() { r.follow(dev) })
	return dev, nil
}

// follow takes the device's events until it is closed, or the backend is.
func (r *rail) follow(dev *openDevice) {
	for {
		var e verbs.Event
		var ok bool
		select {
		case e, ok = <-dev.Events():
		case <-r.b.life.Done():
			return
		}
		if !ok {
			return
		}
		r.b.cfg.Log.Info("device event", "transport", Name, "rail", r.cfg.Name, "event", e.Kind.String(), "qp", e.QP)
		if e.Kind == verbs.GIDChange { // mostly of an entry that we do not use
			if _, err := dev.active(); err != nil {
				r.lose(dev, err)
			}
		}
		if e.Kind == verbs.DeviceFatal {
			r.lose(dev, errors.New("device fatal"))
			return
		}
		for _, l := range r.b.allLanes() {
			if l.dev != dev {
				continue
			}
			switch e.Kind {
			case verbs.PortDown:
				l.fail(fmt.Errorf("gdr: rail %s: %s", r.cfg.Name, e.Kind))
			case verbs.QueuePairFatal:
				if l.q.Num() == e.QP {
					l.fail(fmt.Errorf("gdr: rail %s: %s", r.cfg.Name, e.Kind))
				}
			}
		}
	}
}

// lose gives a device up, once: its lanes end, and when they have, it is closed, which lets the kernel remove it.
func (r *rail) lose(dev *openDevice, why error) {
	dev.once.Do(func() {
		r.b.cfg.Log.Warn("device lost", "transport", Name, "rail", r.cfg.Name, "err", why)
		close(dev.gone)
		for _, l := range r.b.allLanes() {
			if l.dev == dev {
				l.fail(fmt.Errorf("gdr: rail %s: device lost: %w", r.cfg.Name, why))
			}
		}
	})
}

// active is Active while the device is open.
func (d *openDevice) active() (bool, error) {
	if !d.enter() {
		return false, net.ErrClosed
	}
	defer d.leave()
	return d.Active()
}

// usable returns the device if its port is up; one that was lost is opened again.
func (r *rail) usable() (*openDevice, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	select {
	case <-r.dev.gone:
		dev, err := r.open()
		if err != nil {
			return nil, fmt.Errorf("the device was lost: %w", err)
		}
		r.lost = append(r.lost, r.dev)
		r.dev = dev
	default:
	}
	active, err := r.dev.active()
	if err != nil {
		r.lose(r.dev, err)
		return nil, err
	}
	if !active {
		return nil, fmt.Errorf("the port of %s is not active: look at its cable and its network interface", r.dev.Name())
	}
	return r.dev, nil
}

// sweep gives back idle keys, and lost devices that nobody uses any more: the kernel waits for that to remove them.
func (r *rail) sweep(now time.Time) error {
	r.mu.Lock()
	dev := r.dev
	kept := r.lost[:0]
	for _, d := range r.lost {
		if !d.closeLost() {
			kept = append(kept, d)
		}
	}
	r.lost = kept
	r.mu.Unlock()
	select {
	case <-dev.gone:
		dev.closeLost()
		return nil
	default:
		return dev.keys.sweep(now)
	}
}

// closeLost closes a lost device if no lane has it any more. It is gone: what it says to this changes nothing.
func (d *openDevice) closeLost() bool {
	if d.users() > 0 {
		return false
	}
	_ = d.close()
	return true
}

func (d *openDevice) users() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.lanes
}

// enter keeps the device open for a lane.
func (d *openDevice) enter() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return false
	}
	d.lanes++
	return true
}

func (d *openDevice) leave() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.lanes--; d.lanes == 0 {
		d.empty.Broadcast()
	}
}

// close waits for lanes that were being opened, and gives the device back.
func (d *openDevice) close() error {
	d.mu.Lock()
	d.closed = true
	for d.lanes > 0 {
		d.empty.Wait()
	}
	d.mu.Unlock()
	lost := false
	select {
	case <-d.gone:
		lost = true
	default:
	}
	return errors.Join(d.keys.close(lost), d.Close())
}

// close ends the rail's devices; their lanes have ended.
func (r *rail) close() (err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, d := range append(r.lost, r.dev) {
		cerr := d.close()
		select {
		case <-d.gone:
		default:
			err = errors.Join(err, cerr)
		}
	}
	r.lost = nil
	return err
}

func (r *rail) accept() {
	opening := make(chan struct{}, maxSetUps)
	for {
		c, err := r.ln.Accept()
		if err != nil {
			return
		}
		select {
		case opening <- struct{}{}:
			r.b.wg.Go(func() {
				defer func() { <-opening }()
				if err := r.welcome(c); err != nil {
					_ = c.Close()
					r.b.cfg.Log.Warn("lane refused", "transport", Name, "rail", r.cfg.Name, "err", err)
				}
			})
		default:
			_ = c.Close() // the dialer tries again
		}
	}
}

func (r *rail) welcome(c net.Conn) error {
	defer r.b.whileAlive(c)()
	dev, err := r.usable()
	if err != nil {
		return err
	}
	_ = c.SetDeadline(time.Now().Add(openTimeout))
	var l *lane
	o, err := wire.Accept(c, wire.AcceptParams{Purpose: purpose,
		Lookup: func(boot transfer.Boot) ([32]byte, transfer.Boot, bool) {
			p, ok := r.b.host.PeerKey(boot)
			return p.Key, p.Self, ok
		},
		// A queue pair is made only for somebody whom the control layer knows.
		Attach: func(*wire.Hello) (_ []byte, err error) {
			if l, err = r.b.prepare(c, r, dev); err != nil {
				return nil, err
			}
			return l.attach(), nil
		},
	})
	if err == nil {
		// The dialer's proof is checked: only now its address is used.
		err = l.connect(o)
	}
	if err == nil {
		err = l.start(o)
	}
	if err != nil && l != nil {
		err = errors.Join(err, l.abandon())
	}
	return err
}
