// Package gossip finds the other sidecars by memberlist, and publishes what this one serves. A
// router observes them (serving.go): no sidecar counts it as a member.
//
// Streams pass a gate (stream.go), because memberlist does not bound them. Goroutines:
// memberlist's, one for streams, one while members of the configuration do not answer, one that
// announces changes, one that sends what is served, and those of its messages. Leave joins all but
// memberlist's timers.
package gossip

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v5"
	"github.com/hashicorp/memberlist"
	"google.golang.org/protobuf/proto"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/cluster"
	"github.com/kvspray/kvspray/internal/admit"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/transfer"
)

// The interval of gossip is memberlist's own for a LAN. With a longer one, hundreds of members took
// minutes to learn of each other after many had come and gone. A member probes the others one by
// one, and one that missed the news of a death lists the dead until its turn comes: with
// memberlist's second, for minutes among 200. suspicionMult keeps the time of a suspicion as
// memberlist has it, about 9 s among 200. A member that alone suspects another waits suspicionMax
// times as long as one whose suspicion others confirm. Members that have declared the other dead do
// not confirm. With memberlist's 6, the last one would list it for a minute more.
const (
	gossipInterval = 200 * time.Millisecond
	probeInterval  = 300 * time.Millisecond
	probeTimeout   = 150 * time.Millisecond // of the direct one; the rest is for probes by others
	suspicionMult  = 13
	suspicionMax   = 2
	joinFirst      = 200 * time.Millisecond
	joinMax        = 30 * time.Second
	joinDial       = 3 * time.Second
	joinPatience   = 5 * time.Second // until a member without an answer is logged
	leaveTime      = time.Second     // for others to get the message
	publishTime    = time.Second     // likewise; the next exchange of states carries it in any case
)

// ErrUnsafe is returned for an address that others reach, without a key.
var ErrUnsafe = errors.New("gossip: without a key only loopback is allowed")

// Options make a membership.
type Options struct {
	Listen    string // host:port, UDP and TCP
	Advertise string // host:port, if it differs
	Join      []string
	Keys      [][]byte // of 32 bytes, the one to encrypt with first; none: loopback only
	Log       *slog.Logger
	// Missed gets the addresses of Join that do not answer, for joinPatience or more, after
	// each try. nil: none is needed.
	Missed func(addresses []string)

	reunion time.Duration // 0: reunionEvery
	stream  time.Duration // longest exchange by a stream; 0: memberlist's
	observe bool          // no member: it asks for what they serve
}

// Gossip is this process among the members. It implements cluster.Cluster.
type Gossip struct {
	list *memberlist.Memberlist
	net  *gated
	self *self
	own  string // address; memberlist may change its node meanwhile
	stop context.CancelFunc
	wg   sync.WaitGroup
}

// self is this member as others see it, and the others. It implements the delegates of memberlist,
// whose calls come under memberlist's locks. It has the members itself, because memberlist changes
// the nodes that it returns.
type self struct {
	news chan struct{} // the metadata has changed

	mu      sync.Mutex // protects all below
	member  cluster.Member
	meta    []byte
	members map[string]cluster.Member // by memberlist's name
	lost    map[string]lostMember     // likewise
	changed chan struct{}
	serving serving
}

func (d *self) NodeMeta(limit int) []byte {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.meta) > limit {
		return nil
	}
	return d.meta
}
func (*self) GetBroadcasts(int, int) [][]byte { return nil }
func (*self) LocalState(bool) []byte          { return nil }
func (*self) MergeRemoteState([]byte, bool)   {}

func (d *self) NotifyJoin(n *memberlist.Node)   { d.set(n) }
func (d *self) NotifyUpdate(n *memberlist.Node) { d.set(n) }

func (d *self) NotifyLeave(n *memberlist.Node) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, member := d.members[n.Name]; member {
		d.loseLocked(n) // a router asks for itself
	}
	delete(d.members, n.Name)
	d.serving.loseLocked(n.Name, time.Now())
	d.notifyLocked()
}

// set takes a member whose metadata has come. Without a boot a node is no peer.
func (d *self) set(n *memberlist.Node) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if m, revision, ok := decode(n.Meta); ok {
		m.Address = n.Address()
		d.members[n.Name] = m
		d.serving.wantLocked(n.Name, revision)
		delete(d.lost, n.Name)
	} else {
		delete(d.members, n.Name)
		d.serving.forgetLocked(n.Name)
		d.serving.routers[n.Name] = n.Address()
	}
	d.notifyLocked()
}

// decode reads the metadata of a member, with the revision of what it serves. It is foreign: what
// exceeds the bounds is left out.
func decode(b []byte) (cluster.Member, uint64, bool) {
	var m peerv1.Member
	if proto.Unmarshal(b, &m) != nil || len(m.Boot) != len(transfer.Boot{}) {
		return cluster.Member{}, 0, false
	}
	if long(m.Release) {
		m.Release = ""
	}
	labels, engines := slices.DeleteFunc(m.Labels, long), slices.DeleteFunc(m.Engines, long)
	return cluster.Member{Node: m.Node, Endpoint: m.Endpoint, Boot: transfer.Boot(m.Boot),
		Version: m.Release, Labels: labels[:min(len(labels), cluster.MaxLabels)],
		Engines: engines[:min(len(engines), cluster.MaxEngines)]}, m.Serving, true
}

func long(s string) bool { return len(s) > cluster.MaxNameBytes }

func (d *self) notifyLocked() {
	close(d.changed)
	d.changed = make(chan struct{})
}

// encode makes the metadata of a member, with as many of its engines and labels as fit. A router
// has no boot, and no metadata.
func encode(m cluster.Member, revision uint64) ([]byte, error) {
	if m.Boot == (transfer.Boot{}) {
		return nil, nil
	}
	for {
		b, err := proto.Marshal(&peerv1.Member{Boot: m.Boot[:], Node: m.Node, Endpoint: m.Endpoint,
			Release: m.Version, Labels: m.Labels, Engines: m.Engines, Serving: revision})
		if err != nil {
			return nil, fmt.Errorf("gossip: metadata: %w", err)
		}
		switch {
		case len(b) <= memberlist.MetaMaxSize:
			return b, nil
		case len(m.Engines) > 0:
			m.Engines = m.Engines[:len(m.Engines)-1]
		case len(m.Labels) > 0:
			m.Labels = m.Labels[:len(m.Labels)-1]
		default:
			return nil, fmt.Errorf("gossip: node name, endpoint and version take %d bytes, at most "+
				"%d: shorten node", len(b), memberlist.MetaMaxSize)
		}
	}
}

// Joiner returns what makes a process a member.
func Joiner(o Options) cluster.Join {
	return func(m cluster.Member, known *admit.Members) (cluster.Cluster, error) {
		g, err := Start(o, m, known)
		if err != nil {
			return nil, err
		}
		return g, nil
	}
}

// Start makes m a member.
func Start(o Options, m cluster.Member, known *admit.Members) (*Gossip, error) {
	if len(o.Keys) == 0 && !config.IsLoopback(o.Listen) {
		return nil, fmt.Errorf("peer.gossip.listen %s: %w: set peer.cluster_key_file ('kvspray "+
			"keygen cluster'), or gossip.listen to off", o.Listen, ErrUnsafe)
	}
	c := memberlist.DefaultLANConfig()
	host, port, err := splitAddr(o.Listen)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", o.key("listen"), err)
	}
	c.Name = fmt.Sprintf("%s/%s", m.Node, m.Boot)
	c.BindAddr, c.BindPort, c.AdvertisePort = host, port, port
	if o.Advertise != "" {
		if c.AdvertiseAddr, c.AdvertisePort, err = splitAddr(o.Advertise); err != nil {
			return nil, fmt.Errorf("%s: %w", o.key("advertise"), err)
		}
	}
	c.GossipInterval, c.ProbeInterval, c.ProbeTimeout = gossipInterval, probeInterval, probeTimeout
	c.SuspicionMult, c.SuspicionMaxTimeoutMult = suspicionMult, suspicionMax
	c.TCPTimeout = cmp.Or(o.stream, c.TCPTimeout)
	c.LogOutput, c.Logger = nil, slog.NewLogLogger(o.Log.With("part", "gossip").Handler(),
		slog.LevelDebug)
	d := &self{news: make(chan struct{}, 1), member: m, members: map[string]cluster.Member{},
		lost: map[string]lostMember{}, changed: make(chan struct{}), serving: newServing(o.observe)}
	if d.meta, err = encode(m, 0); err != nil {
		return nil, err
	}
	c.Delegate, c.Events = d, d
	if len(o.Keys) > 0 {
		if c.Keyring, err = memberlist.NewKeyring(o.Keys[1:], o.Keys[0]); err != nil {
			return nil, fmt.Errorf("gossip keys: %w", err)
		}
	}
	t, err := newGated(c, known)
	if err == nil {
		c.Transport = t
		var list *memberlist.Memberlist
		if list, err = memberlist.Create(c); err == nil {
			g := &Gossip{list: list, net: t, self: d, own: list.LocalNode().Address()}
			g.begin(o)
			return g, nil
		}
		_ = t.Shutdown()
	}
	return nil, fmt.Errorf("%s: %w: %w", o.key("listen"), cluster.ErrListen, err)
}

// key is the name of a setting of gossip, as a sidecar or a router has it.
func (o *Options) key(name string) string {
	switch {
	case !o.observe:
		return "peer.gossip." + name
	case name == "join":
		return name
	}
	return "gossip_" + name
}

func (g *Gossip) begin(o Options) {
	ctx, stop := context.WithCancel(context.Background())
	g.stop = stop
	if len(o.Join) > 0 {
		g.wg.Go(func() { joinAll(ctx, o, g.ask) })
	}
	g.wg.Go(func() { g.reunite(ctx, o) })
	g.wg.Go(func() { g.deliver(ctx) })
	g.wg.Go(func() { g.announcer(ctx) })
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
func (g *Gossip) ask(ctx context.Context, addr string) error {
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
func joinAll(ctx context.Context, o Options, ask func(context.Context, string) error) {
	wait := backoff.NewExponentialBackOff()
	wait.InitialInterval, wait.MaxInterval = joinFirst, joinMax
	wait.Reset()
	start, missed := time.Now(), map[string]bool{}
	left := slices.Clone(o.Join)
	for {
		left = slices.DeleteFunc(left, func(a string) bool {
			if ctx.Err() != nil {
				return false
			}
			err := ask(ctx, a)
			switch {
			case err == nil && missed[a]:
				delete(missed, a)
				o.Log.Info("gossip: joined a member that did not answer before", "join", a)
			case err != nil && ctx.Err() == nil && !missed[a] && time.Since(start) >= joinPatience:
				missed[a] = true
				o.Log.Warn("gossip: cannot join a member; retrying", "join", a, "err", err,
					"remedy", "start it, or correct "+o.key("join")+": it names the peer.gossip.listen of "+
						"others, which hold the same key")
			}
			return err == nil
		})
		if o.Missed != nil {
			o.Missed(slices.Sorted(maps.Keys(missed)))
		}
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

// Members implements cluster.Cluster.
func (g *Gossip) Members() []cluster.Member {
	g.self.mu.Lock()
	defer g.self.mu.Unlock()
	return slices.Collect(maps.Values(g.self.members))
}

// Changed implements cluster.Cluster.
func (g *Gossip) Changed() <-chan struct{} {
	g.self.mu.Lock()
	defer g.self.mu.Unlock()
	return g.self.changed
}

// Publish implements cluster.Cluster.
func (g *Gossip) Publish(engines, labels []string) {
	d := g.self
	d.mu.Lock()
	m := d.member
	m.Engines = engines[:min(len(engines), cluster.MaxEngines)]
	m.Labels = labels[:min(len(labels), cluster.MaxLabels)]
	b, err := encode(m, d.serving.revision)
	same := err != nil || string(b) == string(d.meta) // what was short enough before still is
	if !same {
		d.member, d.meta = m, b
	}
	d.mu.Unlock()
	if !same {
		g.announce()
	}
}

// announce makes gossip carry the metadata. It does not wait: a further change must not.
func (g *Gossip) announce() {
	select {
	case g.self.news <- struct{}{}:
	default: // the one before is not under way yet
	}
}

// announcer carries changed metadata until ctx ends.
func (g *Gossip) announcer(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-g.self.news:
			_ = g.list.UpdateNode(publishTime) // the exchange of states carries it in any case
		}
	}
}

// Address is where this member's gossip is.
func (g *Gossip) Address() string { return g.own }

// Leave implements cluster.Cluster.
func (g *Gossip) Leave() error {
	g.stop()
	g.net.leave()
	g.wg.Wait()
	_ = g.list.Leave(leaveTime) // members without this message detect it by probes
	return g.list.Shutdown()    //nolint:wrapcheck // memberlist's own
}
