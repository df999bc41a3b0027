package sidecar

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/cenkalti/backoff/v5"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/control/peer"
	"github.com/kvspray/kvspray/control/route"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// Bounds of lane keeping.
const (
	dialTimeout  = 5 * time.Second
	dialFirst    = 20 * time.Millisecond // before the second try
	dialLongest  = 5 * time.Second       // between tries
	shmLanes     = 1                     // per peer: one lane copies with several threads
	laneLived    = time.Second           // a lane that ended sooner does not count as one that was open
	maxUnreached = 1024                  // addresses remembered as not answering; what is beyond is not warned of
	maxNamed     = 1024                  // endpoints that requests named and that are not up yet
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

// dialer keeps lanes to peers open.
type dialer struct {
	node *Node

	mu        sync.Mutex // guards what follows
	peers     map[transfer.Boot]*remote
	unreached map[string]struct{} // addresses that were warned of and have not answered since
	named     map[string]struct{} // endpoints that requests named: their lanes are wanted once they are up
}

type remote struct {
	peer     transport.Peer
	endpoint string
	// where it says that it serves, its node's name and its release: shown to people, believed by
	// nobody
	claimed  string
	node     string
	release  string
	hostBoot string
	rails    []*peerv1.Rail     // the peer's, as it said last; never changed in place
	ctx      context.Context    // of the lanes that we keep; nil where the peer keeps them
	stop     context.CancelFunc // ends it
	keepers  map[wantedLane]context.CancelFunc

	wanted bool      // lanes are: a request names the peer, or was over less than the idle time ago
	used   time.Time // when they were needed last

	complained bool // about its rails
}

// wantedLane is a lane that we keep open.
type wantedLane struct {
	backend, local, remote, address string
	n                               int
}

// peerKey is what lanes prove. The handshake is enough: the first lane of a peer may come before its PeerUp.
func (n *Node) peerKey(boot transfer.Boot) (transport.Peer, bool) {
	if boot == n.boot {
		return n.self, true
	}
	key, ok := n.peers.PeerKey(boot)
	return transport.Peer{Boot: boot, Self: n.boot, Key: key}, ok
}

// selfUp makes the node its own peer: one sidecar may serve both sides.
func (n *Node) selfUp() {
	info := peerInfo{Boot: n.boot, Key: n.self.Key, Endpoint: n.Endpoint(), Release: n.version,
		HostBoot: n.host, Rails: n.railList()}
	n.peerUp(info)
}

// connect reaches a peer for the executor.
func (n *Node) connect(endpoint string) {
	n.dial.mu.Lock()
	if len(n.dial.named) < maxNamed {
		n.dial.named[endpoint] = struct{}{}
	}
	n.dial.mu.Unlock()
	n.peers.Connect(endpoint)
}

// need opens the lanes to a peer, if they are not there, and keeps them for the idle time from now on. Each
// control frame of a transfer calls it at both ends, so that lanes are on their way before bytes are.
func (n *Node) need(boot transfer.Boot) {
	d := &n.dial
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

// closeIdle ends the lanes of peers without leases whose idle time is over. The end that dials closes: while it
// has a lease open the other end may have one, and a lease that begins at the other end comes with a frame.
func (n *Node) closeIdle(now time.Time) {
	busy := map[transfer.Boot]bool{}
	n.d.bindMu.RLock()
	for k := range n.d.grants {
		busy[k.peer] = true
	}
	for k := range n.d.origins {
		busy[k.peer] = true
	}
	n.d.bindMu.RUnlock()
	d := &n.dial
	var idle []transfer.Boot
	d.mu.Lock()
	for boot, r := range d.peers {
		switch {
		case !r.wanted:
		case busy[boot]:
			r.used = now
		case now.Sub(r.used) >= time.Duration(n.cfg.Transports.Idle):
			r.wanted = false
			idle = append(idle, boot)
		}
	}
	d.mu.Unlock()
	for _, boot := range idle {
		d.reconcile(boot)
	}
}

// idleLooks is how often a lane's idle time is looked at while it runs.
const idleLooks = 4

func (n *Node) watchIdle(ctx context.Context) {
	t := time.NewTicker(time.Duration(n.cfg.Transports.Idle) / idleLooks)
	defer t.Stop()
	for {
		select {
		case now := <-t.C:
			n.closeIdle(now)
		case <-ctx.Done():
			return
		}
	}
}

// peerUp takes a peer whose handshake is complete; again after each reconnection of its control lanes.
func (n *Node) peerUp(in peerInfo) {
	d := &n.dial
	d.mu.Lock()
	r := d.peers[in.Boot]
	if r == nil {
		r = &remote{hostBoot: in.HostBoot, keepers: map[wantedLane]context.CancelFunc{}}
		d.peers[in.Boot] = r
		// Of two sidecars one dials, so that there is one set of lanes: both ends send on it.
		if bytes.Compare(n.boot[:], in.Boot[:]) <= 0 {
			r.ctx, r.stop = context.WithCancel(n.d.ctx)
		}
	}
	r.peer = transport.Peer{Boot: in.Boot, Self: n.boot, Key: in.Key}
	r.claimed, r.node, r.release = in.Claimed, in.Node, in.Release
	r.endpoint = cmp.Or(in.Endpoint, r.endpoint) // one that came to us may be reached later
	delete(d.unreached, in.Endpoint)
	_, named := d.named[in.Endpoint]
	delete(d.named, in.Endpoint)
	count := len(d.peers) - 1
	d.mu.Unlock()
	n.metrics.Peers(max(count, 0))
	now := n.enter()
	n.d.ex.PeerUp(now, in.Endpoint, in.Boot)
	n.leave()
	n.peerRails(in.Boot, in.Rails)
	if named {
		n.need(in.Boot)
	}
	if in.Boot != n.boot {
		// What its Hello was told may be older than this.
		n.sendFrame(in.Boot, n.railsFrame())
	}
}

// stranger is who answers at a peer's address and is none: as good as nobody, until another one is there.
type stranger struct {
	what string
	err  error
}

func (s stranger) Error() string        { return s.what + ": " + s.err.Error() }
func (s stranger) Unwrap() error        { return s.err }
func (s stranger) Is(target error) bool { return target == exec.ErrNotListening }

// judged says what an attempt's error means to those who wait.
func judged(err error) error {
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("%w: %w", exec.ErrNotListening, err)
	case errors.Is(err, peer.ErrUnsafe), errors.Is(err, peer.ErrRelease):
		return fmt.Errorf("%w: %w", exec.ErrNotPossible, err)
	case errors.Is(err, peer.ErrOther):
		return stranger{"a gRPC server that is no sidecar answers there: name the sidecar's listen " +
			"address (7650)", err}
	case strings.Contains(err.Error(), "HTTP/1.1 header"): // of an error of gRPC's that has no type
		return stranger{"an HTTP server answers there: name the sidecar's listen address (7650), not its http.listen (7651)", err}
	// Of errors of crypto/tls and crypto/x509, which gRPC makes texts of.
	case strings.Contains(err.Error(), "tls: expired certificate"):
		return stranger{"our certificate has expired, or the peer's clock is ahead: put another into the place of peer.tls.cert, which is read without a restart", err}
	case strings.Contains(err.Error(), "certificate has expired or is not yet valid"):
		return stranger{"the peer's certificate has expired or is not valid yet, or our clock is wrong: put another into the place of its peer.tls.cert", err}
	case strings.Contains(err.Error(), "tls: "), strings.Contains(err.Error(), "server preface: EOF"): // likewise; one that is stopped says nothing at all, and may go on
		return stranger{"the two sidecars do not share a cluster key or a certificate authority, or only one of them has any: compare peer.cluster_key_file and peer.tls of both", err}
	}
	return err
}

// connectFailed ends a connect.
func (n *Node) connectFailed(endpoint string, err error) {
	err = judged(err)
	// Somebody waits for this peer, or it would not have been tried: a wrong address costs each request seconds. Said once, until it answers.
	d := &n.dial
	level := slog.LevelDebug
	d.mu.Lock()
	delete(d.named, endpoint)
	if _, said := d.unreached[endpoint]; !said && len(d.unreached) < maxUnreached {
		d.unreached[endpoint] = struct{}{}
		level = slog.LevelWarn
	}
	d.mu.Unlock()
	n.log.Log(n.d.ctx, level, "peer not reached; tried again while requests wait for it", "endpoint", endpoint, "err", err)
	now := n.enter()
	n.d.ex.ConnectFailed(now, endpoint, err)
	n.leave()
}

// peerDown takes the loss of the control lanes to a peer. over: the conversation has ended, too; nothing is kept of it.
func (n *Node) peerDown(boot transfer.Boot, over bool) {
	if over {
		n.dial.mu.Lock()
		if r := n.dial.peers[boot]; r != nil && r.stop != nil {
			r.stop()
		}
		delete(n.dial.peers, boot)
		count := len(n.dial.peers) - 1
		n.dial.mu.Unlock()
		n.metrics.Peers(max(count, 0))
		n.dropLanes(func(l transport.Lane) bool { return l.Peer() == boot })
		n.forgetInflows(boot)
		n.troubles.forget(boot)
	}
	now := n.enter()
	n.d.ex.PeerDown(now, boot, over)
	n.leave()
}

// leases counts what is bound to the lanes of a peer, in both directions.
func (n *Node) leases(boot transfer.Boot) (count int) {
	n.d.bindMu.RLock()
	defer n.d.bindMu.RUnlock()
	for k := range n.d.grants {
		if k.peer == boot {
			count++
		}
	}
	for k := range n.d.origins {
		if k.peer == boot {
			count++
		}
	}
	return count
}

func (d *dialer) knows(boot transfer.Boot) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.peers[boot] != nil
}

// boots are the peers that are known.
func (d *dialer) boots() []transfer.Boot {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.SortedFunc(maps.Keys(d.peers), func(a, b transfer.Boot) int { return bytes.Compare(a[:], b[:]) })
}

// railsOf is what a peer said of its rails last; never changed in place.
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

// reconcile starts a keeper for each lane that is wanted and has none, and ends those of lanes that are not wanted any more.
func (d *dialer) reconcile(boot transfer.Boot) {
	n := d.node
	d.mu.Lock()
	defer d.mu.Unlock()
	r := d.peers[boot]
	if r == nil || r.ctx == nil || r.ctx.Err() != nil {
		return
	}
	wanted := map[wantedLane]bool{}
	var routes []route.Candidate
	if r.wanted {
		routes = n.routes(r)
	}
	for _, c := range routes {
		if !c.Usable() {
			continue
		}
		b, ok := n.backends.Get(c.Transport)
		i := slices.IndexFunc(r.rails, func(x *peerv1.Rail) bool { return x.Transport == c.Transport && x.Name == c.Remote })
		local, here := n.rails.find(c.Transport, c.Local)
		if !ok || i < 0 || !here {
			continue
		}
		x := r.rails[i]
		remote := transport.Rail{Name: x.Name, Address: x.Address, Gbps: x.Gbps, MTU: int(x.Mtu), NUMA: int(x.Numa)}
		lanes := shmLanes
		switch c.Transport {
		case config.TransTCP:
			lanes = n.cfg.Transports.TCP.Connections
		case config.TransGDR:
			lanes = n.cfg.Transports.GDR.QueuePairs
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
			n.d.wg.Add(1)
			go func() {
				defer n.d.wg.Done()
				n.keepLane(ctx, b, peer, local.Rail, remote)
			}()
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
func (n *Node) keepLane(ctx context.Context, b transport.Backend, peer transport.Peer, local, remote transport.Rail) {
	wait := backoff.NewExponentialBackOff()
	wait.InitialInterval, wait.MaxInterval = dialFirst, dialLongest
	wait.Reset()
	pair := pairName{peer.Boot, b.Name(), local.Name, remote.Name}
	defer func() {
		if ctx.Err() != nil { // nobody wants the lane any more
			n.troubles.set(pair, nil)
		}
	}()
	for ctx.Err() == nil {
		dctx, cancel := context.WithTimeout(ctx, dialTimeout)
		lane, err := b.Dial(dctx, peer, local, remote)
		cancel()
		n.troubles.set(pair, err)
		if errors.Is(err, transport.ErrNotSupported) {
			n.log.Info("lane not possible", "transport", b.Name(), "peer", peer.Boot.String(), "rail", local.Name, "remote", remote.Name, "err", err)
			return
		}
		if err == nil {
			if e := n.laneOf(lane.ID()); e != nil {
				up := time.Now()
				select {
				case <-e.down:
				case <-ctx.Done():
					n.closeLane(e)
					return
				}
				if time.Since(up) >= laneLived {
					wait.Reset()
				}
			}
		} else if ctx.Err() == nil {
			n.log.Debug("lane not opened; tried again", "transport", b.Name(), "peer", peer.Boot.String(), "rail", local.Name, "remote", remote.Name,
				"err", err)
		}
		select {
		case <-time.After(wait.NextBackOff()):
		case <-ctx.Done():
		}
	}
}

var (
	_ transport.Host = host{}
	_ exec.Planner   = (*planner)(nil)
)
