package peer

import (
	"context"
	"sync"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/peer/hello"
	"github.com/kvspray/kvspray/control/peer/rpc"
	"github.com/kvspray/kvspray/internal/admit"
	"github.com/kvspray/kvspray/internal/wire"
)

// core is what all parts of a mesh use.
type core struct {
	opt     Options // constant
	pings   Pings
	secret  hello.Secret
	caller  rpc.Caller
	refused admit.Log // of events that unproved connections can cause
	tasks   tasks
}

// side is this process as it chooses a version.
func (c *core) side(endpoint string) hello.Side {
	return hello.Side{Versions: c.opt.Versions, Address: endpoint, Release: c.opt.Version}
}

// request is the Hello of this process, without a key share.
func (c *core) request(l *listeners) *peerv1.HelloRequest {
	return &peerv1.HelloRequest{Versions: &peerv1.VersionRange{
		Min: uint32(c.opt.Versions.Min), Max: uint32(c.opt.Versions.Max)},
		Boot: c.opt.Boot[:], Node: c.opt.Node,
		Endpoint: l.name(), HostBoot: c.opt.HostBoot, Rails: c.opt.Rails(),
		ControlAddresses: l.addresses(), Features: c.opt.Features, Release: c.opt.Version}
}

// reply is the answer to a Hello, without a key share.
func (c *core) reply(l *listeners, chosen wire.Version) *peerv1.HelloReply {
	return &peerv1.HelloReply{Version: uint32(chosen), Boot: c.opt.Boot[:], Node: c.opt.Node,
		Endpoint: l.name(), HostBoot: c.opt.HostBoot, Rails: c.opt.Rails(),
		ControlAddresses: l.addresses(), Features: c.opt.Features, Release: c.opt.Version}
}

// selfKey is the key of lanes between this process and itself.
func (c *core) selfKey() [32]byte {
	return c.secret.Key(c.opt.Boot, hello.Identity{}, c.secret.Share(c.opt.Boot, hello.Identity{}))
}

// self is this process as a peer of itself.
func (c *core) self(endpoint string) Peer {
	return Peer{Boot: c.opt.Boot, Node: c.opt.Node, Endpoint: endpoint, HostBoot: c.opt.HostBoot,
		SameHost: true, Rails: c.opt.Rails(), Version: c.opt.Versions.Max,
		Features: c.opt.Features, Release: c.opt.Version, Key: c.selfKey()}
}

// tasks are goroutines that Close joins.
type tasks struct {
	ctx  context.Context // ends with close
	stop context.CancelFunc
	wg   sync.WaitGroup

	mu     sync.Mutex // protects closed; nothing starts after it is set
	closed bool
}

// run starts f. False: the mesh is closed.
func (t *tasks) run(f func()) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.closed {
		t.wg.Go(f)
	}
	return !t.closed
}

func (t *tasks) close() {
	t.mu.Lock()
	t.closed = true
	t.mu.Unlock()
	t.stop()
}
