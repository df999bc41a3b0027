package driver

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"

	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/control/spray"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// lanes holds the lanes that are up.
type lanes struct {
	mu   sync.RWMutex // protects byID
	byID map[uint64]*lane
}

type lane struct {
	transport.Lane
	transport, rail string // the lane's Backend and Local
	backend         int    // index of its backend
	// from its peer over its rail; nil: the rail has no queue that could overflow
	inflow  *inflow
	asked   uint64        // acknowledged bytes at the last ask; of the goroutine that performs
	down    chan struct{} // closed by LaneDown
	closing atomic.Bool
}

// find returns a lane that is up, or nil.
func (t *lanes) find(id uint64) *lane {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.byID[id]
}

var _ transport.Host = (*Driver)(nil)

// backendOf returns the index and the properties of a backend.
func (d *Driver) backendOf(name string) (int, transport.Caps) {
	for i, b := range d.backends {
		if b.Name() == name {
			return min(i, transport.MaxBackends-1), b.Caps()
		}
	}
	return transport.MaxBackends - 1, transport.Caps{}
}

// PeerKey implements transport.Host.
func (d *Driver) PeerKey(boot transfer.Boot) (transport.Peer,
	bool) {
	return d.cfg.Peers.PeerKey(boot)
}

func (d *Driver) laneOf(l transport.Lane) (*lane, transport.Caps) {
	e := &lane{Lane: l, transport: l.Backend(), rail: l.Local(), down: make(chan struct{})}
	i, caps := d.backendOf(e.transport)
	e.backend = i
	return e, caps
}

// LaneUp implements transport.Host.
func (d *Driver) LaneUp(l transport.Lane) {
	e, caps := d.laneOf(l)
	r, known := d.cfg.Rails.Rail(l.Backend(), l.Local())
	if !caps.SameHost {
		e.inflow = d.inflows.of(inflowName{l.Peer(), l.Backend(), l.Local()}, r.Gbps)
	}
	d.lanes.mu.Lock()
	d.lanes.byID[l.ID()] = e
	d.lanes.mu.Unlock()
	d.cfg.Observer.LaneUp(l)
	d.log.Debug("lane up", "lane", l.ID(), "peer", l.Peer().String(), "transport", l.Backend(), "rail",
		l.Local(), "remote", l.Remote())
	in := spray.LaneInfo{ID: l.ID(),
		Path:       spray.Path{Transport: l.Backend(), Local: l.Local(), Remote: l.Remote()},
		SliceBytes: caps.SliceBytes, MaxSlices: l.MaxInFlight(), Apart: caps.SameHost,
		ReportsAcked: caps.ReportsAcked}
	_, hints := l.(transport.WakeHinter)
	if caps.DeviceSlice > 0 && d.cfg.Rails.DeviceSlices() {
		in.SliceBytes = caps.DeviceSlice
	}
	if known {
		in.Gbps, in.Tier = r.Gbps, r.Tier
	}
	if t, ok := l.(transport.Timed); ok {
		in.RTT = t.RTT()
	}
	now := d.enter()
	err := d.ex.LaneUp(now, l.Peer(), in, hints)
	d.leave()
	if err != nil {
		d.cfg.Observer.LaneRefused(l, err)
		d.log.Warn("lane refused", "lane", l.ID(), "err", err)
		d.close(e)
	}
}

// LaneDown implements transport.Host.
func (d *Driver) LaneDown(l transport.Lane, err error) {
	d.lanes.mu.Lock()
	e := d.lanes.byID[l.ID()]
	delete(d.lanes.byID, l.ID())
	d.lanes.mu.Unlock()
	if e == nil {
		return
	}
	// The dialing end closes lanes that no lease needs.
	meant := err == nil || errors.Is(err, net.ErrClosed) || errors.Is(err, io.EOF) &&
		d.BoundTo(l.Peer()) == 0
	d.cfg.Observer.LaneDown(l, !meant)
	d.log.Debug("lane down", "lane", l.ID(), "peer", l.Peer().String(), "transport", l.Backend(),
		"rail", l.Local(), "err", err)
	now := d.enter()
	d.ex.LaneDown(now, l.ID())
	d.leave()
	if !d.cfg.Peers.Known(l.Peer()) {
		d.ForgetPeer(l.Peer()) // it was gone before its last lane came up
	}
	close(e.down)
}

// Done implements transport.Host.
func (d *Driver) Done(l transport.Lane, res []transport.Result) {
	for i := range res {
		r := &res[i]
		var bytes uint64
		if r.Origin != nil && r.Origin.Memory != nil {
			if b, err := r.Origin.Memory.Bytes(r.Range); err == nil {
				bytes = b
			}
		}
		d.cfg.Observer.Slice(l, r, bytes)
	}
	d.Results(res)
}

// Refused implements transport.Host.
func (d *Driver) Refused(l transport.Lane, why transfer.Reason) {
	d.cfg.Observer.FrameRefused(l, why)
}

// Results brings the ends of slices to the executor.
func (d *Driver) Results(res []transport.Result) {
	now := d.enter()
	d.ex.Results(now, res)
	d.leave()
}

// Lanes calls each for every lane that is up, under a lock that LaneUp and LaneDown take.
func (d *Driver) Lanes(each func(l transport.Lane)) {
	d.lanes.mu.RLock()
	defer d.lanes.mu.RUnlock()
	for _, e := range d.lanes.byID {
		each(e.Lane)
	}
}

// Down returns the channel that is closed when a lane is down; false: it is not up.
func (d *Driver) Down(id uint64) (<-chan struct{}, bool) {
	if e := d.lanes.find(id); e != nil {
		return e.down, true
	}
	return nil, false
}

// CloseLane closes a lane, if it is up. It does not wait.
func (d *Driver) CloseLane(id uint64) {
	if e := d.lanes.find(id); e != nil {
		d.close(e)
	}
}

// CloseLanes closes the lanes that match. It does not wait.
func (d *Driver) CloseLanes(match func(l transport.Lane) bool) {
	d.lanes.mu.RLock()
	defer d.lanes.mu.RUnlock()
	for _, e := range d.lanes.byID {
		if match(e.Lane) {
			d.close(e)
		}
	}
}

func (d *Driver) close(e *lane) {
	if e.closing.Swap(true) {
		return
	}
	d.cfg.Process.Go(func(context.Context) func() {
		if err := e.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
			d.log.Debug("lane close", "lane", e.ID(), "err", err)
		}
		return nil
	})
}

func (d *Driver) move(a *exec.Action) {
	e := d.lanes.find(a.Lane)
	err := error(net.ErrClosed)
	if e != nil && !e.closing.Load() {
		if err = e.Move(a.Slices); err == nil {
			return
		}
		// Only a lane that is about to end accepts nothing.
		d.close(e)
	}
	res := make([]transport.Result, len(a.Slices))
	for i, s := range a.Slices {
		res[i] = transport.Result{Slice: s, Outcome: transfer.NotLanded, Reason: transfer.ReasonLaneLost,
			Err: err}
	}
	d.Results(res)
}

func (d *Driver) wakeHint(id uint64) {
	e := d.lanes.find(id)
	if e == nil || e.closing.Load() {
		return
	}
	if r, ok := e.Lane.(transport.WakeHinter); ok {
		r.WakeHint()
	}
}

// ask reports whether bytes of a quiet lane have moved.
func (d *Driver) ask(id uint64) {
	e := d.lanes.find(id)
	if e == nil {
		return
	}
	m, ok := e.Lane.(transport.Meter)
	if !ok {
		return
	}
	if got := m.Acked(); got > e.asked {
		e.asked = got
		now := d.enter()
		d.ex.Moved(now, id)
		d.leave()
	}
}
