package sidecar

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/cluster"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/peer"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/metrics"
	"github.com/kvspray/kvspray/internal/nodeapi"
	"github.com/kvspray/kvspray/parseblock"
	"github.com/kvspray/kvspray/sidecar/internal/exchange"
	"github.com/kvspray/kvspray/sidecar/internal/removals"
	"github.com/kvspray/kvspray/store"
	"github.com/kvspray/kvspray/store/directory/embedded"
	"github.com/kvspray/kvspray/store/directory/redis"
	"github.com/kvspray/kvspray/store/page"
	"github.com/kvspray/kvspray/transfer"
)

// What members publish.
const (
	storeLabel = "store-hints" // they keep hints of pages
	pagesLabel = "store"       // they have pages
)

// Hints that this node keeps for others: as many as its own tiers may have pages of hintPage bytes,
// twice, since keys are divided unevenly.
const (
	hintPage = 64 << 10
	minHints = 64 << 10
	maxHints = 64 << 20
)

// remote reports whether pages of other nodes are used.
func (p *pageStore) remote() bool {
	return p.cfg.Memory > 0 && p.gossip && p.cfg.Directory != config.Off
}

// labels are what this member takes part in.
func (p *pageStore) labels() (out []string) {
	if p.remote() && p.cfg.Directory != config.DirRedis {
		out = append(out, storeLabel)
	}
	if p.removes() {
		out = append(out, pagesLabel)
	}
	return out
}

// removes reports whether this node takes part in removals of others.
func (p *pageStore) removes() bool { return p.cfg.Memory > 0 && p.gossip }

// features are those of Hello.
func (p *pageStore) features() (out []string) {
	if p.remote() {
		out = append(out, exchange.Feature)
	}
	if p.removes() {
		out = append(out, removals.Feature)
	}
	return out
}

// openRemovals makes what removes namespaces, once.
func (p *pageStore) openRemovals(s *store.Store) {
	if p.removals != nil {
		return
	}
	o := removals.Options{Self: removals.Member{Boot: p.boot, Node: p.conv.cfg.Node}, Store: s,
		Log: p.log}
	if p.removes() {
		o.Members = p.storeMembers
		o.Send = func(to transfer.Boot, f *peerv1.ControlFrame) error {
			p.conv.metrics.Control(metrics.Out, frameName(f))
			return p.conv.mesh.Send(to, f)
		}
	}
	p.removals = removals.New(o)
}

// storeMembers are the members that have pages.
func (p *pageStore) storeMembers() (out []removals.Member) {
	c := p.cluster()
	if c == nil {
		return nil
	}
	for _, m := range c.Members() {
		if m.Has(pagesLabel) {
			out = append(out, removals.Member{Boot: m.Boot, Node: m.Node})
		}
	}
	return out
}

// openDirectory makes the directory and what uses it, if others are asked for pages.
func (p *pageStore) openDirectory(c *store.Config) error {
	if !p.remote() {
		return nil
	}
	bytes := uint64(p.cfg.Memory)
	for _, d := range p.cfg.Disk {
		bytes += uint64(d.Size)
	}
	hints := min(max(2*bytes/hintPage, minHints), maxHints)
	m, err := metrics.NewStorePeers(p.registry)
	if err != nil {
		return fmt.Errorf("sidecar: metrics: %w", err)
	}
	if p.cfg.Directory == config.DirRedis {
		d, err := redis.Configured(p.boot, &p.cfg.Redis)
		if err != nil {
			return fmt.Errorf("sidecar: %w", err)
		}
		p.directory = d
	} else {
		p.embedded, err = embedded.New(embedded.Options{Self: p.boot, Members: p.hintMembers,
			Capacity: int(hints), Send: func(to transfer.Boot, f *peerv1.ControlFrame) error {
				p.conv.metrics.Control(metrics.Out, frameName(f))
				return p.conv.mesh.Send(to, f)
			}})
		if err != nil {
			return fmt.Errorf("sidecar: store.directory: %w", err)
		}
		p.directory = p.embedded
	}
	c.Peers = func(s *store.Store) store.Peers {
		p.openRemovals(s)
		p.exchange = exchange.New(exchange.Options{Self: p.boot, Registry: parseblock.Default(),
			Events: p.driver.Handle, Directory: p.directory, Removals: p.removals,
			Changed: p.membersChanged, Metrics: m, Log: p.log,
			Send: func(to transfer.Boot, f *peerv1.ControlFrame) error {
				p.conv.dial.need(to) // data follows
				p.conv.metrics.Control(metrics.Out, frameName(f))
				return p.conv.mesh.Send(to, f)
			}})
		return p.exchange
	}
	return nil
}

func (p *pageStore) closeDirectory() error {
	if p.directory == nil {
		return nil
	}
	return p.directory.Close()
}

// leave ends transfers of pages, before the store's memory goes. Idempotent.
func (p *pageStore) leave() {
	ctx, stop := context.WithTimeout(context.Background(), p.grace)
	defer stop()
	if err := p.exchange.Stop(ctx); err != nil {
		p.log.Warn("stop", "err", err)
	}
}

// find returns what asks other nodes; nil: nothing does.
func (p *pageStore) find() func([]page.Key, page.Bitmap) {
	if p.exchange == nil {
		return nil
	}
	return p.exchange.Find
}

// frame takes a frame about pages. It returns false for others. Peers without a store ignore these.
func (p *pageStore) frame(from transfer.Boot, f *peerv1.ControlFrame) (bool, error) {
	switch f.Body.(type) {
	case *peerv1.ControlFrame_PageHints, *peerv1.ControlFrame_PageLookup,
		*peerv1.ControlFrame_PageHolders:
		if p.embedded == nil {
			return true, nil
		}
		return true, p.embedded.Handle(from, f)
	case *peerv1.ControlFrame_PageRequest, *peerv1.ControlFrame_PageOffer:
		if p.exchange == nil {
			return true, nil
		}
		p.conv.dial.need(from)
		return true, p.exchange.Handle(from, f)
	case *peerv1.ControlFrame_PageRemovals, *peerv1.ControlFrame_PageRemoved:
		if p.removals == nil {
			return true, nil
		}
		return true, p.removals.Handle(from, f)
	}
	return false, nil
}

func (p *pageStore) peerUp(in *peer.Peer) {
	if p.removes() && slices.Contains(in.Features, removals.Feature) {
		p.removals.PeerUp(in.Boot, in.Node)
	}
	if p.exchange != nil {
		// A claim that is wrong costs a miss.
		p.exchange.PeerUp(in.Boot, in.Node, cmp.Or(in.Endpoint, in.Claimed), in.Features)
	}
}

func (p *pageStore) peerDown(boot transfer.Boot) {
	if p.removals != nil {
		p.removals.PeerDown(boot)
	}
	if p.exchange != nil {
		p.exchange.PeerDown(boot)
	}
}

// memberCache keeps the members that keep hints, until these change.
type memberCache struct {
	mu      sync.Mutex // guards what follows
	boots   []transfer.Boot
	changed <-chan struct{}
}

// hintMembers are the members that keep hints, this one included.
func (p *pageStore) hintMembers() []transfer.Boot {
	m := &p.members
	m.mu.Lock()
	defer m.mu.Unlock()
	select {
	case <-m.changed:
		m.boots = nil
	default:
	}
	if m.boots != nil {
		return m.boots
	}
	c := p.cluster()
	if c == nil {
		return []transfer.Boot{p.boot}
	}
	m.changed = c.Changed() // before the members are read
	m.boots = []transfer.Boot{p.boot}
	for _, x := range c.Members() {
		if x.Has(storeLabel) && x.Boot != p.boot {
			m.boots = append(m.boots, x.Boot)
		}
	}
	return m.boots
}

// cluster is nil before the node is a member.
func (p *pageStore) cluster() cluster.Cluster {
	if p.conv.mesh == nil {
		return nil
	}
	return p.conv.mesh.Cluster()
}

func (p *pageStore) membersChanged() <-chan struct{} {
	if c := p.cluster(); c != nil {
		return c.Changed()
	}
	return nil
}

// publish reports to the members which engines this node serves.
func (p *pageStore) publish(workers []*engines.Worker) {
	c := p.cluster()
	if c == nil {
		return
	}
	var names []string
	for _, w := range workers {
		names = append(names, w.Place.Engine)
	}
	slices.Sort(names)
	c.Publish(slices.Compact(names), p.labels())
}

// showPeers adds the directory and the peers to /v1/store.
func (p *pageStore) showPeers(out *nodeapi.Store) {
	if p.exchange == nil {
		return
	}
	d := &nodeapi.StoreDirectory{Kind: p.cfg.Directory}
	if p.embedded != nil {
		st := p.embedded.Stats()
		d.Hints, d.Capacity, d.Bytes = st.Hints, st.Capacity, st.Bytes
		d.Members = len(p.hintMembers())
	}
	d.Problem = p.exchange.Problem()
	out.Directory = d
	for _, s := range p.exchange.Peers() {
		out.Peers = append(out.Peers, nodeapi.StorePeer{Node: s.Node, Boot: s.Boot.String(),
			Asked: s.Asked, Load: s.Load, Served: s.Served})
	}
	slices.SortFunc(out.Peers, func(a, b nodeapi.StorePeer) int { return cmp.Compare(a.Boot, b.Boot) })
}
