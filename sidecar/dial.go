package sidecar

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v5"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/exec"
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
	maxRailPairs = 64                    // per peer and transport
	maxUnreached = 1024                  // addresses remembered as not answering; what is beyond is not warned of
)

// peerInfo is a peer as the handshake authenticated it.
type peerInfo struct {
	Boot     transfer.Boot
	Key      [32]byte
	Endpoint string
	HostBoot string
	Rails    []*peerv1.Rail
}

// dialer keeps lanes to peers open.
type dialer struct {
	node *Node

	mu        sync.Mutex // guards what follows
	peers     map[transfer.Boot]*remote
	unreached map[string]struct{} // addresses that were warned of and have not answered since
}

type remote struct {
	peer     transport.Peer
	endpoint string
	stop     context.CancelFunc // of the lanes that we keep; nil where the peer keeps them
}

// peerKey is what lanes prove.
func (n *Node) peerKey(boot transfer.Boot) (transport.Peer, bool) {
	if boot == n.boot {
		return n.self, true
	}
	n.dial.mu.Lock()
	defer n.dial.mu.Unlock()
	r := n.dial.peers[boot]
	if r == nil {
		return transport.Peer{}, false
	}
	return r.peer, true
}

// selfUp makes the node its own peer: one sidecar may serve both sides.
func (n *Node) selfUp() {
	info := peerInfo{Boot: n.boot, Key: n.self.Key, Endpoint: n.Endpoint(), HostBoot: n.host, Rails: n.railList()}
	n.peerUp(info)
}

// connect reaches a peer for the executor.
func (n *Node) connect(endpoint string) { n.peers.Connect(endpoint) }

// peerUp takes a peer whose handshake is complete; again after each reconnection of its control lanes.
func (n *Node) peerUp(in peerInfo) {
	d := &n.dial
	d.mu.Lock()
	r := d.peers[in.Boot]
	if r == nil {
		r = &remote{endpoint: in.Endpoint}
		d.peers[in.Boot] = r
		// Of two sidecars one dials, so that there is one set of lanes: both ends send on it.
		if bytes.Compare(n.boot[:], in.Boot[:]) <= 0 {
			var ctx context.Context
			ctx, r.stop = context.WithCancel(n.d.ctx)
			defer n.keepLanes(ctx, in)
		}
	}
	delete(d.unreached, in.Endpoint)
	r.peer = transport.Peer{Boot: in.Boot, Self: n.boot, Key: in.Key}
	count := len(d.peers) - 1
	d.mu.Unlock()
	n.metrics.Peers(max(count, 0))
	now := n.enter()
	n.d.ex.PeerUp(now, in.Endpoint, in.Boot)
	n.leave()
}

// connectFailed ends a connect.
func (n *Node) connectFailed(endpoint string, err error) {
	// Somebody waits for this peer, or it would not have been tried: a wrong address costs each request seconds. Said once, until it answers.
	d := &n.dial
	level := slog.LevelDebug
	d.mu.Lock()
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

// peerDown takes the loss of the control lanes to a peer. proved: that process will never speak again.
func (n *Node) peerDown(boot transfer.Boot, proved bool) {
	if proved {
		n.dial.mu.Lock()
		if r := n.dial.peers[boot]; r != nil && r.stop != nil {
			r.stop()
		}
		delete(n.dial.peers, boot)
		count := len(n.dial.peers) - 1
		n.dial.mu.Unlock()
		n.metrics.Peers(max(count, 0))
		n.d.bindMu.RLock()
		for _, e := range n.d.lanes {
			if e.lane.Peer() == boot {
				n.closeLane(e)
			}
		}
		n.d.bindMu.RUnlock()
	}
	now := n.enter()
	n.d.ex.PeerDown(now, boot, proved)
	n.leave()
}

// keepLanes starts a keeper for each lane that is wanted.
func (n *Node) keepLanes(ctx context.Context, in peerInfo) {
	peer := transport.Peer{Boot: in.Boot, Self: n.boot, Key: in.Key}
	for _, b := range n.backends {
		if b.Caps().SameHost && (n.host == "" || n.host != in.HostBoot) {
			continue
		}
		var theirs []transport.Rail
		for _, r := range in.Rails {
			if r.Transport == b.Name() {
				theirs = append(theirs, transport.Rail{Name: r.Name, Address: r.Address, Gbps: r.Gbps, MTU: int(r.Mtu), NUMA: int(r.Numa)})
			}
		}
		ours := n.rails[b.Name()]
		if len(theirs) == 0 || len(ours) == 0 {
			continue
		}
		lanes := shmLanes
		if b.Name() == config.TransTCP {
			lanes = n.cfg.Transports.TCP.Connections
		}
		// Rails are paired in order; the longer list decides how many pairs there are.
		for i := range min(max(len(ours), len(theirs)), maxRailPairs) {
			for range lanes {
				n.d.wg.Add(1)
				go func() {
					defer n.d.wg.Done()
					n.keepLane(ctx, b, peer, ours[i%len(ours)], theirs[i%len(theirs)])
				}()
			}
		}
	}
}

// keepLane holds one lane open until ctx ends.
func (n *Node) keepLane(ctx context.Context, b transport.Backend, peer transport.Peer, local, remote transport.Rail) {
	wait := backoff.NewExponentialBackOff()
	wait.InitialInterval, wait.MaxInterval = dialFirst, dialLongest
	wait.Reset()
	for ctx.Err() == nil {
		dctx, cancel := context.WithTimeout(ctx, dialTimeout)
		lane, err := b.Dial(dctx, peer, local, remote)
		cancel()
		if errors.Is(err, transport.ErrNotSupported) {
			n.log.Info("lane not possible", "transport", b.Name(), "peer", peer.Boot.String(), "rail", local.Name, "remote", remote.Name, "err", err)
			return
		}
		if err == nil {
			n.d.bindMu.RLock()
			e := n.d.lanes[lane.ID()]
			n.d.bindMu.RUnlock()
			if e != nil {
				wait.Reset()
				select {
				case <-e.down:
				case <-ctx.Done():
					n.closeLane(e)
					return
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

// railList describes our rails to peers.
func (n *Node) railList() (out []*peerv1.Rail) {
	for _, b := range n.backends {
		for _, r := range n.rails[b.Name()] {
			out = append(out, &peerv1.Rail{Transport: b.Name(), Name: r.Name, Address: r.Address, Gbps: r.Gbps, Mtu: uint32(max(r.MTU, 0)),
				Numa: int32(r.NUMA)})
		}
	}
	return out
}

var (
	_ transport.Host = host{}
	_ exec.Planner   = (*planner)(nil)
)
