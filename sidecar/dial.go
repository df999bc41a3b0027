package sidecar

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v5"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/driver"
	"github.com/kvspray/kvspray/control/route"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/sidecar/internal/web"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// Bounds of lane keeping.
const (
	dialTimeout = 5 * time.Second
	dialFirst   = 20 * time.Millisecond // before the second try
	dialLongest = 5 * time.Second       // between tries
	shmLanes    = 1                     // per peer: one lane copies with several threads
	// a lane that ended sooner does not count as one that was open.
	laneLived = time.Second
	// addresses without an answer that are remembered; further ones cause no warning.
	maxUnreached = 1024
	maxNamed     = 1024 // endpoints that requests named and that are not up yet
)

// peerInfo is a peer as the handshake authenticated it.
type peerInfo struct {
	Boot     transfer.Boot
	Key      [32]byte
	Endpoint string
	Claimed  string
	Node     string
	Release  string // of its build
	HostBoot string
	Rails    []*peerv1.Rail
}

// dialer keeps lanes to peers open while requests need them.
type dialer struct {
	boot  transfer.Boot
	host  string // kernel boot id
	cfg   *config.Config
	log   *slog.Logger
	proc  *driver.Goroutines
	rails *railSet
	gpus  *gpus
	lanes interface { // *driver.Driver
		Down(id uint64) (<-chan struct{}, bool)
		CloseLane(id uint64)
		Bound() map[transfer.Boot]int
	}
	errs laneErrors
	live *openBackends

	mu        sync.Mutex // guards what follows
	peers     map[transfer.Boot]*remote
	unreached map[string]struct{} // addresses of a warning that have not answered since
	// endpoints that requests named: their lanes are wanted once they are up
	named map[string]struct{}
}

type remote struct {
	peer     transport.Peer
	endpoint string
	// announced by the peer and not verified: its endpoint, its node's name, its release
	claimed  string
	node     string
	release  string
	hostBoot string
	rails    []*peerv1.Rail     // the peer's last list; never changed in place
	ctx      context.Context    // of the lanes that this node opens; nil: the peer opens them
	stop     context.CancelFunc // ends it
	keepers  map[wantedLane]context.CancelFunc

	wanted bool      // lanes are: a request names the peer, or was over less than the idle time ago
	used   time.Time // when they were needed last

	complained bool // about its rails
}

// wantedLane is a lane that this node keeps open.
type wantedLane struct {
	backend, local, remote, address string
	n                               int
}

// name records an endpoint that a request names.
func (d *dialer) name(endpoint string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.named) < maxNamed {
		d.named[endpoint] = struct{}{}
	}
}

// up records a completed handshake. named: a request waits for the lanes.
func (d *dialer) up(in peerInfo) (others int, named bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	r := d.peers[in.Boot]
	if r == nil {
		r = &remote{hostBoot: in.HostBoot, keepers: map[wantedLane]context.CancelFunc{}}
		d.peers[in.Boot] = r
		// One of two sidecars dials: both ends send on the same lanes.
		if bytes.Compare(d.boot[:], in.Boot[:]) <= 0 {
			r.ctx, r.stop = context.WithCancel(d.proc.Context())
		}
	}
	r.peer = transport.Peer{Boot: in.Boot, Self: d.boot, Key: in.Key}
	r.claimed, r.node, r.release = in.Claimed, in.Node, in.Release
	r.endpoint = cmp.Or(in.Endpoint, r.endpoint) // a peer that connected to this node has none yet
	delete(d.unreached, in.Endpoint)
	_, named = d.named[in.Endpoint]
	delete(d.named, in.Endpoint)
	return d.othersLocked(), named
}

// failed records an attempt without success. first: no earlier one since the address answered.
func (d *dialer) failed(endpoint string) (first bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.named, endpoint)
	_, logged := d.unreached[endpoint]
	if logged || len(d.unreached) >= maxUnreached {
		return false
	}
	d.unreached[endpoint] = struct{}{}
	return true
}

// forget ends the lanes to a peer.
func (d *dialer) forget(boot transfer.Boot) (others int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if r := d.peers[boot]; r != nil && r.stop != nil {
		r.stop()
	}
	delete(d.peers, boot)
	d.errs.forget(boot)
	return d.othersLocked()
}

// othersLocked counts the peers without this node.
func (d *dialer) othersLocked() int { return max(len(d.peers)-1, 0) }

// setRails records a peer's list. first: it is the peer's first one with invalid rails.
func (d *dialer) setRails(boot transfer.Boot, list []*peerv1.Rail, invalid bool) (known,
	first bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	r := d.peers[boot]
	if r == nil {
		return false, false
	}
	first = invalid && !r.complained
	r.complained = r.complained || invalid
	r.rails = list
	return true, first
}

// need opens the lanes to a peer, if they are not open, and keeps them for the idle time from now
// on. Each control frame of a transfer calls it at both ends, so that lanes open before bytes are
// ready.
func (d *dialer) need(boot transfer.Boot) {
	d.mu.Lock()
	r := d.peers[boot]
	open := false
	if r != nil {
		open = !r.wanted
		r.wanted, r.used = true, time.Now()
	}
	d.mu.Unlock()
	if open {
		d.reconcile(boot)
	}
}

// closeIdle ends the lanes of peers without leases whose idle time is over. The end that dials
// closes: a lease that begins at the other end comes with a frame.
func (d *dialer) closeIdle(now time.Time) {
	busy := d.lanes.Bound()
	var idle []transfer.Boot
	d.mu.Lock()
	for boot, r := range d.peers {
		switch {
		case !r.wanted:
		case busy[boot] > 0:
			r.used = now
		case now.Sub(r.used) >= time.Duration(d.cfg.Transports.Idle):
			r.wanted = false
			idle = append(idle, boot)
		}
	}
	d.mu.Unlock()
	for _, boot := range idle {
		d.reconcile(boot)
	}
}

// idleLooks is the number of checks within the idle time.
const idleLooks = 4

func (d *dialer) watchIdle(ctx context.Context) {
	t := time.NewTicker(time.Duration(d.cfg.Transports.Idle) / idleLooks)
	defer t.Stop()
	for {
		select {
		case now := <-t.C:
			d.closeIdle(now)
		case <-ctx.Done():
			return
		}
	}
}

func (d *dialer) has(boot transfer.Boot) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.peers[boot] != nil
}

// boots are the peers that are known.
func (d *dialer) boots() []transfer.Boot {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.SortedFunc(maps.Keys(d.peers),
		func(a, b transfer.Boot) int { return bytes.Compare(a[:], b[:]) })
}

// railsOf is the last list of a peer's rails; never changed in place.
func (d *dialer) railsOf(boot transfer.Boot) []*peerv1.Rail {
	d.mu.Lock()
	defer d.mu.Unlock()
	if r := d.peers[boot]; r != nil {
		return r.rails
	}
	return nil
}

func (d *dialer) reconcileAll() {
	for _, boot := range d.boots() {
		d.reconcile(boot)
	}
}

// reconcile starts a keeper for each wanted lane without one, and ends those of other lanes.
func (d *dialer) reconcile(boot transfer.Boot) {
	d.mu.Lock()
	defer d.mu.Unlock()
	r := d.peers[boot]
	if r == nil || r.ctx == nil || r.ctx.Err() != nil {
		return
	}
	wanted := map[wantedLane]bool{}
	var routes []route.Candidate
	if r.wanted {
		routes = d.routes(r)
	}
	for _, c := range routes {
		if !c.Usable() {
			continue
		}
		b, ok := d.live.Get(c.Transport)
		i := slices.IndexFunc(r.rails, func(x *peerv1.Rail) bool {
			return x.Transport == c.Transport &&
				x.Name == c.Remote
		})
		local, here := d.rails.find(c.Transport, c.Local)
		if !ok || i < 0 || !here {
			continue
		}
		x := r.rails[i]
		remote := transport.Rail{Name: x.Name, Address: x.Address, Gbps: x.Gbps}
		lanes := shmLanes
		switch c.Transport {
		case config.TransTCP:
			lanes = d.cfg.Transports.TCP.Connections
		case config.TransGDR:
			lanes = d.cfg.Transports.GDR.QueuePairs
		}
		for k := range lanes {
			w := wantedLane{c.Transport, c.Local, c.Remote, x.Address, k}
			wanted[w] = true
			if r.keepers[w] != nil {
				continue
			}
			ctx, stop := context.WithCancel(r.ctx)
			r.keepers[w] = stop
			peer := r.peer
			d.proc.Run(func(context.Context) { d.keepLane(ctx, b, peer, local.Rail, remote) })
		}
	}
	for w, stop := range r.keepers {
		if !wanted[w] {
			stop()
			delete(r.keepers, w)
		}
	}
}

// keepLane holds one lane open until ctx ends.
func (d *dialer) keepLane(ctx context.Context, b transport.Backend, peer transport.Peer, local,
	remote transport.Rail) {
	wait := backoff.NewExponentialBackOff()
	wait.InitialInterval, wait.MaxInterval = dialFirst, dialLongest
	wait.Reset()
	pair := pairName{peer.Boot, b.Name(), local.Name, remote.Name}
	defer func() {
		if ctx.Err() != nil { // the lane is not wanted any more
			d.errs.set(pair, nil)
		}
	}()
	for ctx.Err() == nil {
		dctx, cancel := context.WithTimeout(ctx, dialTimeout)
		lane, err := b.Dial(dctx, peer, local, remote)
		cancel()
		d.errs.set(pair, err)
		if errors.Is(err, transport.ErrNotSupported) {
			d.log.Info("lane not possible", "transport", b.Name(), "peer", peer.Boot.String(), "rail",
				local.Name, "remote", remote.Name, "err", err)
			return
		}
		if err == nil {
			if down, ok := d.lanes.Down(lane.ID()); ok {
				up := time.Now()
				select {
				case <-down:
				case <-ctx.Done():
					d.lanes.CloseLane(lane.ID())
					return
				}
				if time.Since(up) >= laneLived {
					wait.Reset()
				}
			}
		} else if ctx.Err() == nil {
			d.log.Debug("lane not opened; tried again", "transport", b.Name(), "peer", peer.Boot.String(),
				"rail", local.Name, "remote", remote.Name,
				"err", err)
		}
		select {
		case <-time.After(wait.NextBackOff()):
		case <-ctx.Done():
		}
	}
}

// views describe the peers.
func (d *dialer) views() (out []web.Peer) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for boot, r := range d.peers {
		out = append(out, web.Peer{Boot: boot, Node: r.node, Release: r.release, Endpoint: r.endpoint,
			Claimed: r.claimed, Wanted: r.wanted})
	}
	return out
}

// routesTo returns the paths to a peer, best first.
func (d *dialer) routesTo(boot transfer.Boot) []route.Candidate {
	d.mu.Lock()
	defer d.mu.Unlock()
	if r := d.peers[boot]; r != nil {
		return d.routes(r)
	}
	return nil
}

// routes is routesTo; the caller holds mu.
func (d *dialer) routes(r *remote) []route.Candidate {
	in := route.Input{SameHost: d.host != "" && d.host == r.hostBoot, Device: d.gpus.inUse()}
	for i, b := range d.live.Registry {
		in.Transports = append(in.Transports, route.Transport{Name: b.Name(), Rank: i,
			SameHost: b.Caps().SameHost, Device: b.Caps().Device})
		for _, x := range d.rails.of(b.Name()) {
			in.Local = append(in.Local, route.Rail{Transport: b.Name(), Name: x.Name, Address: x.Address,
				Prefix: x.prefix, Gbps: x.Gbps, Down: x.down(), Fault: x.outOfUse(), Tier: x.Tier})
		}
	}
	for _, x := range r.rails {
		in.Remote = append(in.Remote, route.Rail{Transport: x.Transport, Name: x.Name, Address: x.Address,
			Gbps: x.Gbps, Down: x.Down})
	}
	return route.Rank(in)
}
