package simfabric

import (
	"fmt"
	"math"
	"time"
)

// LinkSpec describes one direction of a cable and the queue in front of it.
type LinkSpec struct {
	BitsPerSecond float64
	Latency       time.Duration
	Jitter        time.Duration // added to the latency, uniformly distributed
	Loss          float64       // of a packet
	Buffer        int           // bytes that may wait; 0: no bound, as for a blocking sender
}

// Link is one direction of a cable.
type Link struct {
	Name      string
	spec      LinkSpec
	scale     float64 // of the rate
	loss      float64
	silent    bool // drops everything without a signal
	down      bool // has no carrier
	barred    bool // no route leads to it
	busy      Time // time until which it is occupied
	bytes     uint64
	deepest   int
	overflows uint64
}

func newLink(name string, s LinkSpec) *Link {
	return &Link{Name: name, spec: s, scale: 1, loss: s.Loss}
}

// Bytes counts the bytes that the link has carried, including those in its queue.
func (l *Link) Bytes() uint64 { return l.bytes }

// Passed is how many bytes have left the link by now.
func (l *Link) Passed(now Time) uint64 {
	return l.bytes - min(l.bytes, uint64(max(0, l.busy-now).Seconds()*l.spec.BitsPerSecond*l.scale/8))
}

// Deepest is the greatest length of its queue, in bytes.
func (l *Link) Deepest() int { return l.deepest }

// Overflows counts chunks that found its buffer full.
func (l *Link) Overflows() uint64 { return l.overflows }

// SetSilent makes the link drop everything, or carry again. No host is notified.
func (l *Link) SetSilent(silent bool) { l.silent = silent }

// SetBarred removes or restores the route by which the host in front of the link sends. Bytes on
// their way arrive. No host is notified, but the host's own stack has a record of which bytes were
// never sent.
func (l *Link) SetBarred(barred bool) { l.barred = barred }

// SetRate scales the link's rate below its nominal speed.
func (l *Link) SetRate(scale float64) { l.scale = max(scale, 1e-6) }

// SetLoss sets the probability that a packet is lost.
func (l *Link) SetLoss(p float64) { l.loss = p }

func (l *Link) dead() bool { return l.silent || l.down || l.barred }

// carry sends n bytes whose first arrives at `first` and whose last at `tail`, and returns when
// they leave the far end.
func (l *Link) carry(f *Fabric, first, tail Time, n int) (Time, Time, bool) {
	if l.dead() {
		f.stats.Swallowed++
		return 0, 0, false
	}
	rate := l.spec.BitsPerSecond * l.scale
	if wait := l.busy - first; wait > 0 {
		// A chunk stands for many packets. If room for them is short, some enter and some do not,
		// whatever their sender. A sharp bound would exclude every sender except the one whose
		// chunks happen to arrive as one leaves.
		queued := int(wait.Seconds() * rate / 8)
		if short := queued + n - l.spec.Buffer; l.spec.Buffer > 0 && short > 0 &&
			f.rng.Float64()*2*float64(n) < float64(short) {
			f.stats.Overflows++
			l.overflows++
			return 0, 0, false
		}
		l.deepest = max(l.deepest, queued+n)
	}
	start := max(first, l.busy)
	end := max(start+Time(float64(n)*8e9/rate), tail)
	l.busy = end
	l.bytes += uint64(n)
	d := l.spec.Latency + f.Jitter(l.spec.Jitter)
	return start + d, end + d, true
}

// delay is the time of a packet of no size now; false: it does not get through.
func (l *Link) delay(f *Fabric) (Time, bool) {
	if l.dead() {
		f.stats.Swallowed++
		return 0, false
	}
	return max(0, l.busy-f.now) + l.spec.Latency + f.Jitter(l.spec.Jitter), true
}

// Switch joins rails. Traffic between two switches crosses the trunks of both, if they have any.
type Switch struct {
	Name     string
	up, down *Link
}

// NewSwitch adds a switch; trunk describes its link to the core, in either direction. nil: the core
// has no limit.
func (f *Fabric) NewSwitch(name string, trunk *LinkSpec) *Switch {
	s := &Switch{Name: name}
	if trunk != nil {
		s.up, s.down = newLink(name+"/up", *trunk), newLink(name+"/down", *trunk)
	}
	return s
}

// Trunk returns the links to the core and from it; nil without them.
func (s *Switch) Trunk() (up, down *Link) { return s.up, s.down }

// RailSpec describes a rail: the same link in both directions, or Out in the outgoing one. The
// outgoing queue has no bound.
type RailSpec struct {
	Name   string
	Link   LinkSpec
	Switch *Switch
	Out    *LinkSpec // nil: as Link
}

// Rail is a NIC of a host with its cable to a switch.
type Rail struct {
	Name   string
	host   *Host
	sw     *Switch
	tx, rx *Link
	ends   []*end
	cuts   uint64

	listener *Backend
}

// Host is one machine.
type Host struct {
	Name   string
	f      *Fabric
	rails  []*Rail
	watch  func(*Rail) // called for changes of carriers
	frozen bool
	// events that wait for the process; bounded by what lanes have in the network and by the
	// process's own calls
	held []event
}

// NewHost adds a host.
func (f *Fabric) NewHost(name string, rails ...RailSpec) *Host {
	h := &Host{Name: name, f: f}
	for _, s := range rails {
		out := s.Link
		if s.Out != nil {
			out = *s.Out
		}
		out.Buffer = 0
		r := &Rail{Name: s.Name, host: h, sw: s.Switch, tx: newLink(name+"/"+s.Name+"/tx", out),
			rx: newLink(name+"/"+s.Name+"/rx", s.Link)}
		h.rails = append(h.rails, r)
		f.byAddr[r.address()] = r
	}
	return h
}

// Watch calls fn for each rail of the host whose carrier has come or gone, when the host notices.
func (h *Host) Watch(fn func(*Rail)) { h.watch = fn }

// After runs fn after d in the host's process, or later if the process is frozen then.
func (h *Host) After(d Time, fn func()) {
	h.f.at(h.f.now+max(d, 0), event{kind: evCall, host: h, fn: fn})
}

// Freeze stops the process on the host, like SIGSTOP. Chunks that have left continue through the
// network and are written at hosts that are not frozen. Arriving chunks wait in the kernel, which
// accepts Config.RecvBuffer of each lane and confirms them to the sender. With Config.OneSided the
// NIC continues permitted writes.
func (h *Host) Freeze() { h.frozen = true }

// Thaw continues the process, which then processes the events that arrived, in order.
func (h *Host) Thaw() {
	if !h.frozen {
		return
	}
	h.frozen = false
	for _, r := range h.rails {
		for _, e := range r.ends {
			e.kernel = 0
		}
	}
	held := h.held
	h.held = nil
	for _, ev := range held {
		h.f.at(h.f.now, ev)
	}
}

// Frozen reports whether the process is stopped.
func (h *Host) Frozen() bool { return h.frozen }

// Rails of the host.
func (h *Host) Rails() []*Rail { return h.rails }

// Tx is the link out of the host.
func (r *Rail) Tx() *Link { return r.tx }

// Rx is the link into the host: the switch's port.
func (r *Rail) Rx() *Link { return r.rx }

func (r *Rail) address() string { return r.host.Name + "/" + r.Name }

// HasCarrier reports whether the cable is plugged in.
func (r *Rail) HasCarrier() bool { return !r.tx.down }

// Down pulls the cable. Bytes on it are lost. The host's own lanes over it die after Config.Carrier
// unless they are patient, its peers' lanes when they notice.
func (r *Rail) Down() {
	f := r.host.f
	r.tx.down, r.rx.down = true, true
	r.cuts++
	cut := r.cuts
	r.host.After(f.cfg.Carrier, func() {
		if r.cuts != cut || !r.tx.down {
			return // back before the host noticed
		}
		if r.host.watch != nil {
			r.host.watch(r)
		}
		if f.cfg.Patient {
			return
		}
		for _, e := range append([]*end(nil), r.ends...) {
			e.die(fmt.Errorf("simfabric: rail %s has no carrier", r.Name))
		}
	})
}

// Up plugs the cable in again.
func (r *Rail) Up() {
	if !r.tx.down {
		return
	}
	r.tx.down, r.rx.down = false, false
	r.cuts++
	cut := r.cuts
	r.host.After(r.host.f.cfg.CarrierBack, func() {
		if r.cuts == cut && r.host.watch != nil {
			r.host.watch(r)
		}
	})
}

// Flap pulls the cable repeatedly until a time, for about half of period each time.
func (r *Rail) Flap(period time.Duration, until Time) {
	f := r.host.f
	if f.now >= until {
		r.Up()
		return
	}
	r.Down()
	f.After(period/4+f.Jitter(period/2), func() {
		r.Up()
		f.After(period/4+f.Jitter(period/2), func() { r.Flap(period, until) })
	})
}

// path lists the links from one rail to another.
func path(from, to *Rail) []*Link {
	p := []*Link{from.tx}
	if from.sw != to.sw {
		if from.sw != nil && from.sw.up != nil {
			p = append(p, from.sw.up)
		}
		if to.sw != nil && to.sw.down != nil {
			p = append(p, to.sw.down)
		}
	}
	return append(p, to.rx)
}

// Latency is the current time of a small message from h to another host over the best of its rails;
// false: none gets through.
func (h *Host) Latency(to *Host) (Time, bool) {
	best := Time(math.MaxInt64)
	for i, a := range h.rails {
		b := to.rails[i%len(to.rails)]
		var d Time
		ok := true
		for _, l := range path(a, b) {
			if l.dead() {
				ok = false
				break
			}
			d += max(0, l.busy-h.f.now) + l.spec.Latency
		}
		if ok {
			best = min(best, d)
		}
	}
	return best, best != math.MaxInt64
}
