package sidecar

import (
	"path/filepath"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/kvspray/kvspray/control/peer/keys"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/testutil"
)

// maxIdlePeer is what a peer may cost that has nothing to do, in bytes of heap.
const maxIdlePeer = 24 << 10

// A peer that is known and idle costs little heap, and no data lane.
func TestIdlePeer(t *testing.T) {
	const peers = 24
	key, err := keys.NewCluster()
	ok(t, err)
	secret := filepath.Join(t.TempDir(), "cluster.key")
	ok(t, keys.WriteCluster(secret, key))
	set := func(c *config.Config) { c.Transports.Order, c.Peer.ClusterKeyFile = []string{"tcp"}, secret }
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
	before := heap()
	for _, n := range all {
		hub.peers.Connect(n.Endpoint())
	}
	for _, n := range all {
		until(t, func() bool { return n.dial.knows(hub.boot) && hub.dial.knows(n.boot) })
	}
	var each int64
	until(t, func() bool { // calls that met them end a moment later
		each = (int64(heap().HeapAlloc) - int64(before.HeapAlloc)) / (2 * peers)
		return each < maxIdlePeer || testutil.Race
	})
	t.Logf("an idle peer costs %d bytes of heap at each end", each)
	hub.d.bindMu.RLock()
	defer hub.d.bindMu.RUnlock()
	if len(hub.d.lanes) != 0 {
		t.Errorf("%d data lanes that no request needs", len(hub.d.lanes))
	}
}

// The first transfer after the idle time opens its lanes while it is being agreed on: it takes
// little longer than the next one.
func TestFirstAfterIdle(t *testing.T) {
	const rounds = 15
	set := func(c *config.Config) {
		c.Transports.Order, c.Transports.Idle = []string{"tcp"}, config.Duration(300*time.Millisecond)
	}
	p, d := start(t, set), start(t, set)
	pe, de := newEngine(t, p, testShape), newEngine(t, d, testShape)
	xfer := uint64(0)
	once := func() time.Duration {
		xfer++
		began := time.Now()
		x := begin(t, p, pe, de, xfer, tokens)
		de.ok(x.dst)
		took := time.Since(began)
		pe.ok(x.src)
		return took
	}
	once() // the two meet
	var first, next []time.Duration
	for range rounds {
		until(t, func() bool { return len(p.lanesTo(d.boot))+len(d.lanesTo(p.boot)) == 0 })
		first = append(first, once())
		next = append(next, once())
	}
	slices.Sort(first)
	slices.Sort(next)
	a, b := first[rounds/2], next[rounds/2]
	t.Logf("median of a transfer with lanes open %v, of the first after the idle time %v", b, a)
	if a > b+20*time.Millisecond && a > 5*b {
		t.Errorf("the first transfer after the idle time takes %v, the next %v", a, b)
	}
}
