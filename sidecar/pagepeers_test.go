package sidecar

import (
	"bytes"
	"encoding/json"
	"net"
	"path/filepath"
	"strings"
	"testing"

	"github.com/alicebob/miniredis/v2"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/connector/connectortest"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/nodeapi"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/store/page"
	"github.com/kvspray/kvspray/transfer"
)

// storeNode is a sidecar with a store, beside others, and an engine of it.
type storeNode struct {
	*running
	*pageEngine
	s     *connectortest.Scheduler
	space uint64 // of the scheduler
}

// storeCluster is sidecars that meet by gossip at the address of the first one.
type storeCluster struct {
	t      *testing.T
	at     string
	change func(*config.Config)
	waits  bool // a node waits for the removals of others
}

func newStoreCluster(t *testing.T, change func(*config.Config)) *storeCluster {
	t.Helper()
	ln, err := net.Listen("tcp", net.JoinHostPort(testutil.Loopback(), "0"))
	if err != nil {
		t.Fatal(err)
	}
	at := ln.Addr().String()
	_ = ln.Close()
	return &storeCluster{t: t, at: at, change: change}
}

// add starts a node; the first one listens where the others join.
func (c *storeCluster) add(first bool) *storeNode {
	t := c.t
	t.Helper()
	r := start(t, func(cfg *config.Config) {
		cfg.Store.Memory = 8 << 20
		cfg.Peer.Gossip.Listen = "127.0.0.1:0"
		if first {
			cfg.Peer.Gossip.Listen = c.at
		}
		cfg.Peer.Gossip.Join = []string{c.at}
		if c.change != nil {
			c.change(cfg)
		}
	})
	n := &storeNode{running: r, pageEngine: newPageEngine(t, r)}
	var err error
	if !c.waits {
		if err = n.pages.removals.Handle(transfer.Boot{}, &peerv1.ControlFrame{
			Body: &peerv1.ControlFrame_PageRemovals{PageRemovals: &peerv1.PageRemovals{Last: true}},
		}); err != nil {
			t.Fatal(err)
		}
	}
	if n.s, err = connectortest.DialScheduler(t.Context(),
		connectortest.SchedulerConfig{Socket: r.cfg.Engine.Socket}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = n.s.Close() })
	open := openPool()
	open.Pieces, open.Blocks = nil, 0
	if n.space, err = n.s.OpenSpace(t.Context(), open); err != nil {
		t.Fatal(err)
	}
	return n
}

// nodes starts several, and waits until all have met.
func (c *storeCluster) nodes(n int) []*storeNode {
	c.t.Helper()
	var all []*storeNode
	for i := range n {
		all = append(all, c.add(i == 0))
	}
	for _, x := range all {
		x.meets(c.t, n-1)
	}
	return all
}

// meets waits until a node has that many others to ask, keeps hints with these, and takes pages.
func (n *storeNode) meets(t *testing.T, others int) {
	t.Helper()
	until(t, func() bool {
		st := n.state(t)
		return len(st.Peers) == others && (st.Directory.Kind == config.DirRedis ||
			st.Directory.Members == others+1) && n.pages.removals.Settled()
	})
}

func (n *storeNode) state(t *testing.T) (st nodeapi.Store) {
	t.Helper()
	_, text := get(t, n.running, "/v1/store")
	if err := json.Unmarshal([]byte(text), &st); err != nil {
		t.Fatal(err)
	}
	return st
}

// put stores pages whose content names them.
func (n *storeNode) put(t *testing.T, pages ...byte) {
	t.Helper()
	blocks := make([]uint32, len(pages))
	for i, p := range pages {
		blocks[i] = uint32(i)
		copy(n.block(i), pageContent(p))
	}
	lease, err := n.Put(msg.Put{Space: n.pageEngine.space, Hashes: hashes16(pages...), HashBytes: 16,
		Blocks: blocks})
	if err != nil {
		t.Fatal(err)
	}
	for i, r := range n.ok(lease).Received.Pages {
		if r = r &^ msg.PageFlagDurable; r != msg.PageStored && r != msg.PageExisted {
			t.Fatalf("page %d: %d", pages[i], r)
		}
	}
}

func pageContent(p byte) []byte {
	return bytes.Repeat([]byte{p, p ^ 0x55, 7}, testPage/3+1)[:testPage]
}

// exists waits until the scheduler finds these pages.
func (n *storeNode) exists(t *testing.T, pages ...byte) {
	t.Helper()
	until(t, func() bool { return n.found(t, pages...) == len(pages) })
}

func (n *storeNode) found(t *testing.T, pages ...byte) (count int) {
	t.Helper()
	f, err := n.s.Exists(t.Context(), msg.Exists{Spaces: []msg.SpaceRef{{Space: n.space}},
		Hashes: hashes16(pages...), HashBytes: 16})
	if err != nil {
		t.Fatal(err)
	}
	for i := range pages {
		count += int(f.Found[i/8] >> (i % 8) & 1)
	}
	return count
}

// fetch gets pages, compares those that are hits, and returns the bytes of all.
func (n *storeNode) fetch(t *testing.T, pages ...byte) []byte {
	t.Helper()
	blocks := make([]uint32, len(pages))
	for i := range pages {
		blocks[i] = uint32(100 + i)
		clear(n.block(100 + i))
	}
	lease, err := n.Get(msg.Get{Space: n.pageEngine.space, Hashes: hashes16(pages...), HashBytes: 16,
		Blocks: blocks, Req: "r"})
	if err != nil {
		t.Fatal(err)
	}
	results := n.ok(lease).Received.Pages
	for i, r := range results {
		if r&15 == msg.PageHit && !bytes.Equal(n.block(100+i), pageContent(pages[i])) {
			t.Fatalf("WRONG PAGE %d", pages[i])
		}
	}
	return results
}

const (
	fromPeer   = msg.PageHit | msg.PageFlagPeer
	fromMemory = msg.PageHit | msg.PageFlagMemory
)

// TestPagesOfPeers: what one node has, another one finds and gets; then it has it itself.
func TestPagesOfPeers(t *testing.T) {
	all := newStoreCluster(t, nil).nodes(3)
	a, b := all[0], all[1]
	a.put(t, 1, 2, 3, 4, 5)
	b.exists(t, 1, 2, 3, 4, 5)
	until(t, func() bool { return b.found(t, 1, 9) == 1 }) // the directory has 50 ms to answer
	if got := b.fetch(t, 1, 2, 9, 3); !bytes.Equal(got, []byte{fromPeer, fromPeer, msg.PageMiss,
		fromPeer}) {
		t.Fatalf("%v", got)
	}
	if got := b.fetch(t, 1, 2, 3); !bytes.Equal(got, []byte{fromMemory, fromMemory, fromMemory}) {
		t.Errorf("a page is not kept: %v", got)
	}
	// Two holders now: the third node still gets each page once.
	c := all[2]
	c.exists(t, 1, 2, 3)
	if got := c.fetch(t, 1, 2, 3, 4); !bytes.Equal(got, []byte{fromPeer, fromPeer, fromPeer,
		fromPeer}) {
		t.Errorf("%v", got)
	}
	until(t, func() bool { st := a.state(t); return st.Peers[0].Served+st.Peers[1].Served == 0 })
	_, text := get(t, b.running, "/metrics")
	for _, line := range []string{`kvspray_store_hits_total{tier="peer"} 3`,
		`kvspray_store_peer_pages_total{direction="in"} 3`,
		`kvspray_store_peer_bytes_total{direction="in"} 12288`} {
		if !strings.Contains(text, line) {
			t.Errorf("no metric %s", line)
		}
	}
}

func series(from, n int) (out []byte) {
	for i := range n {
		out = append(out, byte(from+i))
	}
	return out
}

func hits(results []byte) (n int) {
	for _, r := range results {
		if r&15 == msg.PageHit {
			n++
		}
	}
	return n
}

// TestPagesOfARestartedPeer: pages of an earlier life of a node are missed, and found again once
// they are put again.
func TestPagesOfARestartedPeer(t *testing.T) {
	c := newStoreCluster(t, nil)
	all := c.nodes(2)
	b, a := all[0], all[1]
	a.put(t, 1, 2, 3)
	b.exists(t, 1, 2, 3)
	if err := a.stop(); err != nil {
		t.Fatal(err)
	}
	if got := hits(b.fetch(t, 1, 2, 3)); got != 0 {
		t.Errorf("%d hits of a node that is gone", got)
	}
	a = c.add(false)
	a.meets(t, 1)
	b.meets(t, 1)
	if got := hits(b.fetch(t, 1, 2, 3)); got != 0 {
		t.Errorf("%d hits of an earlier life", got)
	}
	a.put(t, 3)
	b.exists(t, 3)
	if got := b.fetch(t, 3, 1); !bytes.Equal(got, []byte{fromPeer, msg.PageMiss}) {
		t.Errorf("%v", got)
	}
}

// TestStaleAndLyingHints: hints of pages that are removed, or were never there, cost a miss.
func TestStaleAndLyingHints(t *testing.T) {
	all := newStoreCluster(t, nil).nodes(3)
	a, b, liar := all[0], all[1], all[2]
	a.put(t, series(1, 50)...)
	b.exists(t, series(1, 50)...)
	ns := openPool().Namespace
	hashes, err := (&page.Namespace{Weights: ns.Weights, DType: ns.DType, Layout: ns.Layout,
		PageTokens: int(ns.PageTokens), PageBytes: int(ns.PageBytes), Algorithm: ns.Algorithm}).Keyer().
		Keys(page.Hashes{Bytes: hashes16(append(series(1, 50), 99)...), Each: 16})
	if err != nil {
		t.Fatal(err)
	}
	if err := liar.pages.directory.Announce(t.Context(), hashes); err != nil {
		t.Fatal(err)
	}
	b.exists(t, 99)
	if got := b.fetch(t, append(series(1, 20), 99)...); hits(got) != 20 || got[20] != msg.PageMiss {
		t.Errorf("%v", got)
	}
	// The hints of what is removed are withdrawn; one that is followed before costs a miss.
	if err := a.Remove(t.Context(), a.pageEngine.space); err != nil {
		t.Fatal(err)
	}
	if got := hits(b.fetch(t, series(30, 20)...)); got != 0 {
		t.Errorf("%d hits of pages that are removed", got)
	}
}

// TestDamagedAtThePeer: bytes that differ from what was put are no hit.
func TestDamagedAtThePeer(t *testing.T) {
	all := newStoreCluster(t, nil).nodes(2)
	a, b := all[0], all[1]
	a.put(t, 1, 2)
	b.exists(t, 1, 2)
	arena, _ := a.pages.store.Region().Bytes()
	at := bytes.Index(arena, pageContent(1))
	if at < 0 {
		t.Fatal("the page is not in memory")
	}
	arena[at+100] ^= 4
	if got := b.fetch(t, 1, 2); !bytes.Equal(got, []byte{msg.PageDamaged, fromPeer}) {
		t.Errorf("%v", got)
	}
	if got := b.fetch(t, 1); hits(got) != 0 {
		t.Errorf("it is kept: %v", got)
	}
}

// TestHolderEndsDuringGets: every get ends, and none has a wrong page.
func TestHolderEndsDuringGets(t *testing.T) {
	all := newStoreCluster(t, nil).nodes(3)
	a, b, c := all[0], all[1], all[2]
	a.put(t, series(1, 100)...)
	b.exists(t, series(1, 100)...)
	stopped := make(chan error)
	begin := make(chan struct{})
	go func() { <-begin; stopped <- a.stop() }()
	count := 0
	for i := range 10 {
		if i == 3 {
			close(begin)
		}
		count += hits(b.fetch(t, series(1+i*10, 10)...))
	}
	if err := <-stopped; err != nil {
		t.Fatal(err)
	}
	if t.Logf("%d of 100 pages came", count); count < 30 {
		t.Error("pages were missed before the end")
	}
	if got := hits(b.fetch(t, series(1, 100)...)); got != count {
		t.Errorf("%d of %d are kept", got, count)
	}
	// Another node can get the pages that came.
	until(t, func() bool { return hits(c.fetch(t, series(1, 100)...)) == count })
}

// TestPagesOfADisk: what a holder has on its disk only, it reads from there; and a node without a
// directory asks no node.
func TestPagesOfADisk(t *testing.T) {
	c := newStoreCluster(t, nil)
	b := c.add(true)
	c.change = func(cfg *config.Config) {
		cfg.Store.Memory = 1 << 20
		cfg.Store.Disk = []config.StoreDisk{{Path: filepath.Join(t.TempDir(), "pages"), Size: 64 << 20}}
	}
	a := c.add(false)
	c.change = func(cfg *config.Config) { cfg.Store.Directory = config.Off }
	alone := c.add(false)
	for i := range 4 { // more than its memory has
		a.put(t, series(1+i*60, 60)...)
	}
	b.exists(t, series(1, 240)...)
	if got := b.fetch(t, series(1, 240)...); hits(got) != 240 {
		t.Errorf("%d of 240: %v", hits(got), got)
	}
	if st := alone.state(t); st.Directory != nil || alone.found(t, 1) != 0 ||
		hits(alone.fetch(t, 1)) != 0 {
		t.Errorf("%+v", st)
	}
}

// TestPagesByRedis: the same with a directory in a service, which goes away and comes back.
func TestPagesByRedis(t *testing.T) {
	s := miniredis.RunT(t)
	all := newStoreCluster(t, func(cfg *config.Config) {
		cfg.Store.Directory = config.DirRedis
		cfg.Store.Redis.Addresses = []string{s.Addr()}
	}).nodes(2)
	a, b := all[0], all[1]
	a.put(t, 1, 2)
	b.exists(t, 1, 2)
	if got := b.fetch(t, 1); !bytes.Equal(got, []byte{fromPeer}) {
		t.Errorf("%v", got)
	}
	s.Close()
	if got := b.fetch(t, 2); !bytes.Equal(got, []byte{msg.PageMiss}) {
		t.Errorf("%v", got)
	}
	if err := s.Restart(); err != nil {
		t.Fatal(err)
	}
	a.put(t, 3)
	b.exists(t, 2, 3)
	if got := b.fetch(t, 2, 3); !bytes.Equal(got, []byte{fromPeer, fromPeer}) {
		t.Errorf("%v", got)
	}
}
