// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v5"
	"github.com/hashicorp/memberlist"
	"google.golang.org/protobuf/proto"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/internal/admit"
	"github.com/kvspray/kvspray/transfer"
)

// Slower than memberlist's own LAN settings: no request waits for gossip, and an idle sidecar
// should use no CPU time.
const (
	gossipInterval = 500 * time.Millisecond
	probeInterval  = 2 * time.Second
	joinFirst      = 200 * time.Millisecond
	joinMax        = 30 * time.Second
	joinDial       = 3 * time.Second
	joinPatience   = 5 * time.Second // until a member without an answer is logged
)

// gossip is memberlist with the sidecar's metadata; nil: off.
type gossip struct {
	list *memberlist.Memberlist
	gate *admit.Gate // of its streams
	stop context.CancelFunc
	wg   sync.WaitGroup
}

// meta is this node's metadata for the members.
type meta []byte

func (d meta) NodeMeta(limit int) []byte {
	if len(d) > limit {
		return nil
	}
	return d
}
func (meta) NotifyMsg([]byte)                {}
func (meta) GetBroadcasts(int, int) [][]byte { return nil }
func (meta) LocalState(bool) []byte          { return nil }
func (meta) MergeRemoteState([]byte, bool)   {}

func startGossip(opt Options, endpoint string, members *admit.Members) (*gossip, error) {
	g := opt.Gossip
	if g == nil {
		return nil, nil //nolint:nilnil // a nil gossip is one that is off
	}
	if len(g.Keys) == 0 && !loopback(g.Listen) {
		return nil, fmt.Errorf("peer: peer.gossip.listen %s: %w: set peer.cluster_key_file ('kvspray "+
			"keygen cluster'), or gossip.listen to off", g.Listen, ErrUnsafe)
	}
	c := memberlist.DefaultLANConfig()
	host, port, err := splitAddr(g.Listen)
	if err != nil {
		return nil, fmt.Errorf("peer: peer.gossip.listen: %w", err)
	}
	c.Name = fmt.Sprintf("%s/%s", opt.Node, opt.Boot)
	c.BindAddr, c.BindPort, c.AdvertisePort = host, port, port
	if g.Advertise != "" {
		if c.AdvertiseAddr, c.AdvertisePort, err = splitAddr(g.Advertise); err != nil {
			return nil, fmt.Errorf("peer: peer.gossip.advertise: %w", err)
		}
	}
	c.GossipInterval, c.ProbeInterval = gossipInterval, probeInterval
	c.LogOutput, c.Logger = nil, slog.NewLogLogger(opt.Log.With("part", "gossip").Handler(),
		slog.LevelDebug)
	d, err := proto.Marshal(&peerv1.HelloReply{Boot: opt.Boot[:], Node: opt.Node, Endpoint: endpoint,
		Features: []string{opt.Version}})
	if err != nil {
		return nil, fmt.Errorf("peer: gossip: %w", err)
	}
	if len(d) > memberlist.MetaMaxSize {
		return nil, fmt.Errorf("peer: gossip: node name, endpoint and version take %d bytes, at most "+
			"%d: shorten node", len(d), memberlist.MetaMaxSize)
	}
	c.Delegate = meta(d)
	if len(g.Keys) > 0 {
		if c.Keyring, err = memberlist.NewKeyring(g.Keys[1:], g.Keys[0]); err != nil {
			return nil, fmt.Errorf("peer: gossip keys: %w", err)
		}
	}
	t, err := newGated(c, members)
	if err == nil {
		c.Transport = t
		var list *memberlist.Memberlist
		if list, err = memberlist.Create(c); err == nil {
			return newGossip(opt, list, t.gate), nil
		}
		_ = t.Shutdown()
	}
	return nil, fmt.Errorf("peer: peer.gossip.listen: %w: name an address of this host%s "+
		"with a free port, or off", err, ownAddresses())
}

func newGossip(opt Options, list *memberlist.Memberlist, gate *admit.Gate) *gossip {
	ctx, stop := context.WithCancel(context.Background())
	out := &gossip{list: list, gate: gate, stop: stop}
	if join := opt.Gossip.Join; len(join) > 0 {
		out.wg.Go(func() { joinAll(ctx, join, out.ask, opt.Log) })
	}
	return out
}

func splitAddr(s string) (string, int, error) {
	host, p, err := net.SplitHostPort(s)
	if err != nil {
		return "", 0, fmt.Errorf("%q: %w: write host:port", s, err)
	}
	port, err := strconv.ParseUint(p, 10, 16)
	if err != nil {
		return "", 0, fmt.Errorf("%q: port: %w", s, err)
	}
	return host, int(port), nil
}

// ask joins one address. It dials first, because memberlist's own dial cannot be interrupted.
func (g *gossip) ask(ctx context.Context, addr string) error {
	c, err := (&net.Dialer{Timeout: joinDial}).DialContext(ctx, "tcp", addr)
	if err != nil {
		return err
	}
	_ = c.Close() // nothing was sent
	n, err := g.list.Join([]string{addr})
	if n == 0 && err == nil {
		return errors.New("the name has no address")
	}
	if n > 0 {
		return nil // at one address of the name
	}
	return err
}

// joinAll tries each address until it answers. Members start at the same time, so a missing one is
// logged only after joinPatience, and once.
func joinAll(ctx context.Context, addrs []string, ask func(context.Context, string) error,
	log *slog.Logger) {
	wait := backoff.NewExponentialBackOff()
	wait.InitialInterval, wait.MaxInterval = joinFirst, joinMax
	wait.Reset()
	start, missed := time.Now(), map[string]bool{}
	left := slices.Clone(addrs)
	for {
		left = slices.DeleteFunc(left, func(a string) bool {
			if ctx.Err() != nil {
				return false
			}
			err := ask(ctx, a)
			switch {
			case err == nil && missed[a]:
				log.Info("gossip: joined a member that did not answer before", "join", a)
			case err != nil && ctx.Err() == nil && !missed[a] && time.Since(start) >= joinPatience:
				missed[a] = true
				log.Warn("gossip: cannot join a member; retrying", "join",
					a, "err", err,
					"remedy", "start it, or correct peer.gossip.join: it names the peer.gossip.listen of "+
						"others, which hold the same key")
			}
			return err == nil
		})
		if len(left) == 0 {
			return
		}
		t := time.NewTimer(wait.NextBackOff())
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return
		}
	}
}

func (g *gossip) members() (out []Member) {
	if g == nil {
		return nil
	}
	for _, n := range g.list.Members() {
		var h peerv1.HelloReply
		if proto.Unmarshal(n.Meta, &h) != nil || len(h.Boot) != len(transfer.Boot{}) {
			continue // advisory: a node with unknown metadata is no peer
		}
		m := Member{Name: h.Node, Address: n.Address(), Endpoint: h.Endpoint, Boot: transfer.Boot(h.Boot)}
		if len(h.Features) > 0 {
			m.Version = h.Features[0]
		}
		out = append(out, m)
	}
	return out
}

func (g *gossip) close() error {
	if g == nil {
		return nil
	}
	g.stop()
	g.wg.Wait()
	_ = g.list.Leave(gossipLeave) // members without this message detect it by probes
	return g.list.Shutdown()
}
