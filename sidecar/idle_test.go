package sidecar

import (
	"path/filepath"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/control/peer/keys"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/transport"
)

// maxIdlePeer is what a peer may cost that has nothing to do, in bytes of heap.
const maxIdlePeer = 24 << 10

// A peer that is known and idle costs little heap, and no data lane.
func TestMeasureIdlePeer(t *testing.T) {
	testutil.Measures(t)
	const peers = 24
	key, err := keys.NewCluster()
	ok(t, err)
	secret := filepath.Join(t.TempDir(), "cluster.key")
	ok(t, keys.WriteCluster(secret, key))
	set := func(c *config.Config) {
		c.Transports.Order, c.Peer.ClusterKeyFile = []string{"tcp"},
			secret
	}
	hub := start(t, set)
	var all []*running
	for range peers {
		all = append(all, start(t, set))
	}
	heap := func() (m runtime.MemStats) {
		for range 3 { // what a pool keeps goes with the second collection
			runtime.GC()
		}
		runtime.ReadMemStats(&m)
		return m
	}
	meet := func(nodes []*running) {
		for _, n := range nodes {
			hub.conv.mesh.Connect(n.Endpoint())
		}
		for _, n := range nodes {
			until(t, func() bool { return n.dial.has(hub.boot) && hub.dial.has(n.boot) })
		}
	}
	meet(all[:1]) // what the first connection of a process makes once is no peer's
	before := heap()
	meet(all[1:])
	var each int64
	until(t, func() bool { // calls that met them end a moment later
		each = (int64(heap().HeapAlloc) - int64(before.HeapAlloc)) / (2 * (peers - 1))
		return each < maxIdlePeer || testutil.Race
	})
	t.Logf("an idle peer costs %d bytes of heap at each end", each)
	if all := lanesOf(hub.Node, func(transport.Lane) bool { return true }); len(all) != 0 {
		t.Errorf("%d data lanes that no request needs", len(all))
	}
}

// The first transfer after the idle time opens its lanes with the first message about it from
// either end: they are up at both ends while the prefill's engine has not named the prompt yet,
// whichever end dials. The transfer then goes by them, and takes little longer than the next one.
func TestFirstAfterIdle(t *testing.T) {
	const rounds = 5 // of each direction
	conns := 0
	set := func(c *config.Config) {
		c.Transports.Order, c.Transports.Idle = []string{"tcp"}, config.Duration(300*time.Millisecond)
		conns = c.Transports.TCP.Connections
	}
	a, b := start(t, set), start(t, set)
	ae, be := newEngine(t, a, testShape), newEngine(t, b, testShape)
	xfer := uint64(0)
	once := func(p *running, pe, de *engine) time.Duration {
		xfer++
		began := time.Now()
		x := begin(t, p, pe, de, xfer, tokens)
		de.ok(x.dst)
		took := time.Since(began)
		pe.ok(x.src)
		return took
	}
	once(a, ae, be) // the two meet
	once(b, be, ae)
	idle := func() {
		until(t,
			func() bool { return len(a.lanesTo(b.boot))+len(b.lanesTo(a.boot)) == 0 })
	}
	var first, next []time.Duration
	for i := range 2 * rounds {
		p, d, pe, de := a, b, ae, be
		if i%2 == 1 {
			p, d, pe, de = b, a, be, ae
		}
		idle()
		first = append(first, once(p, pe, de))
		next = append(next, once(p, pe, de))
		idle()
		pr := newPrompt(tokens)
		rng := newRand(uint64(i))
		n := blocksFor(tokens, 16)
		pt, dt := table(rng, 256, n), table(rng, 256, n)
		dst, err := de.Expect(msg.Expect{Xfer: pr.xfer, Hash: pr.hash, Tokens: tokens,
			Peer: p.Endpoint(), Skip: []uint32{0},
			Blocks: [][]uint32{dt}, DeadlineMS: deadlineMS, MatchTimeoutMS: deadlineMS})
		ok(t, err)
		until(t, func() bool {
			return min(len(p.lanesTo(d.boot)), len(d.lanesTo(p.boot))) == conns
		})
		v := viewOf(d)
		if len(v.Dests) != 1 || v.Dests[0].State == "landing" {
			t.Fatalf("the prompt has a source already: %+v", v.Dests)
		}
		up := p.lanesTo(d.boot)
		src, err := pe.Intent(msg.Intent{Xfer: pr.xfer, Hash: pr.hash, Tokens: tokens, Fanout: 1,
			Blocks: [][]uint32{pt},
			Ready:  tokens, DeadlineMS: deadlineMS})
		ok(t, err)
		de.ok(dst)
		if after := p.lanesTo(d.boot); !slices.Equal(up, after) {
			t.Errorf("lanes %v were up before the transfer, %v after it", up, after)
		}
		pe.ok(src)
	}
	slices.Sort(first)
	slices.Sort(next)
	t.Logf("median of a transfer with lanes open %v, of the first after the idle time %v",
		next[rounds], first[rounds])
}
