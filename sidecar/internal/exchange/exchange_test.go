package exchange

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/proto"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/internal/leaktest"
	"github.com/kvspray/kvspray/internal/metrics"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/parseblock"
	"github.com/kvspray/kvspray/store"
	"github.com/kvspray/kvspray/store/directory"
	"github.com/kvspray/kvspray/store/memory"
	"github.com/kvspray/kvspray/store/page"
	"github.com/kvspray/kvspray/transfer"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

const pageBytes = 5000 // two blocks of the worker

var namespace = page.Namespace{Weights: "w", DType: "bfloat16", Layout: "l", PageTokens: 16,
	PageBytes: pageBytes, Algorithm: "sglang-sha256"}

// cable joins nodes: it carries their frames, and moves the bytes of a lease when both sides have
// it. It is the directory, too.
type cable struct {
	t      testing.TB
	mu     sync.Mutex // guards what follows
	nodes  map[transfer.Boot]*node
	hints  map[page.Key][]transfer.Boot
	fails  int  // announcements that the directory does not take
	taken  int  // pages
	silent bool // the directory answers no lookup

	drop   func(from, to transfer.Boot, f *peerv1.ControlFrame) bool // changes or loses a frame
	stuck  bool                                                      // no bytes are moved
	wrong  bool                                                      // one byte of each page is
	fences bool                                                      // canceled leases do not end
}

type node struct {
	*Exchange
	c      *cable
	boot   transfer.Boot
	store  *store.Store
	space  *store.Space
	pool   *store.Pool
	blocks []byte

	intents map[transfer.Key]engines.Intent
	expects map[uint64]engines.Expect

	removed   sync.Mutex // guards what follows
	known     uint64     // of the only namespace
	applied   uint64
	unsettled atomic.Bool
	learned   []uint64
}

// The removals.

func (n *node) Settled() bool { return !n.unsettled.Load() }

func (n *node) Known(page.ID) uint64 {
	n.removed.Lock()
	defer n.removed.Unlock()
	return n.known
}

func (n *node) Applied(page.ID) uint64 {
	n.removed.Lock()
	defer n.removed.Unlock()
	return n.applied
}

func (n *node) Learn(_ transfer.Boot, _ page.ID, stamp uint64) {
	n.removed.Lock()
	defer n.removed.Unlock()
	n.learned = append(n.learned, stamp)
	n.known = max(n.known, stamp)
}

// remove is what package removals does.
func (n *node) remove(stamp uint64) {
	n.c.t.Helper()
	n.removed.Lock()
	n.known = stamp
	n.removed.Unlock()
	if err := n.store.RemoveSpace(namespace.ID()); err != nil {
		n.c.t.Fatal(err)
	}
	n.removed.Lock()
	n.applied = stamp
	n.removed.Unlock()
}

func newCable(t testing.TB, nodes int) (*cable, []*node) {
	t.Helper()
	c := &cable{t: t, nodes: map[transfer.Boot]*node{}, hints: map[page.Key][]transfer.Boot{}}
	var all []*node
	for i := range nodes {
		all = append(all, c.add(transfer.Boot{byte(i + 1)}))
	}
	for _, a := range all {
		for _, b := range all {
			a.PeerUp(b.boot, "n", string(b.boot[:1]), []string{Feature})
		}
	}
	return c, all
}

func (c *cable) add(boot transfer.Boot) *node {
	c.t.Helper()
	n := &node{c: c, boot: boot, intents: map[transfer.Key]engines.Intent{},
		expects: map[uint64]engines.Expect{}}
	m, err := metrics.NewStorePeers(prometheus.NewRegistry())
	if err != nil {
		c.t.Fatal(err)
	}
	n.Exchange = New(Options{Self: boot, Registry: parseblock.Default(), Events: n.events,
		Directory: c, Removals: n,
		Changed: func() <-chan struct{} { return nil }, Metrics: m,
		Log:  slog.New(slog.DiscardHandler),
		Send: func(to transfer.Boot, f *peerv1.ControlFrame) error { return c.send(boot, to, f) }})
	n.store, err = store.Open(store.Config{Memory: memory.Config{Bytes: 8 << 20, SlabBytes: 64 << 10,
		MaxPages: 64},
		Workers: 2, Peers: func(*store.Store) store.Peers { return n.Exchange }})
	if err != nil {
		c.t.Fatal(err)
	}
	if err := n.Attach(n.store); err != nil {
		c.t.Fatal(err)
	}
	if n.space, err = n.store.Space(namespace, store.Shares{}); err != nil {
		c.t.Fatal(err)
	}
	region, err := mem.NewAnonymous("engine", 64*pageBytes)
	if err != nil {
		c.t.Fatal(err)
	}
	n.blocks, _ = region.Bytes()
	n.pool, err = store.NewPool([]store.Piece{{Region: region, Stride: pageBytes, Len: pageBytes}}, 64)
	if err != nil {
		c.t.Fatal(err)
	}
	c.mu.Lock()
	c.nodes[boot] = n
	c.mu.Unlock()
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { n.Run(ctx); close(done) }()
	c.t.Cleanup(func() {
		_ = n.Stop(c.t.Context())
		stop()
		<-done
		if err := n.store.Close(); err != nil {
			c.t.Error(err)
		}
		region.Release()
	})
	return n
}

func (c *cable) send(from, to transfer.Boot, f *peerv1.ControlFrame) error {
	c.mu.Lock()
	n, drop := c.nodes[to], c.drop
	c.mu.Unlock()
	if n == nil {
		return errors.New("no node is there")
	}
	if drop != nil && drop(from, to, f) {
		return nil
	}
	return n.Handle(from, f)
}

// The directory.

func (c *cable) Announce(_ context.Context, keys []page.Key) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fails > 0 {
		c.fails--
		return errors.New("the directory is gone")
	}
	c.taken += len(keys)
	return nil
}
func (c *cable) Withdraw(context.Context, []page.Key) error { return nil }
func (c *cable) Close() error                               { return nil }

func (c *cable) Lookup(_ context.Context, keys []page.Key, found *directory.Found) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.silent {
		return errors.New("no answer")
	}
	for i := range keys {
		for _, h := range c.hints[keys[i]] {
			found.Add(i, h)
		}
	}
	return nil
}

func (c *cable) hint(holder transfer.Boot, pages ...int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, k := range keysOf(pages...) {
		c.hints[k] = append(c.hints[k], holder)
	}
}

// The executor.

func (n *node) events(all []engines.Event) {
	for _, e := range all {
		switch e.Kind {
		case engines.WorkerGone:
			e.Fenced()
		case engines.SourceOpened:
			n.c.mu.Lock()
			n.intents[e.Intent.Key] = *e.Intent
			n.c.mu.Unlock()
		case engines.DestOpened:
			n.c.mu.Lock()
			n.expects[e.Expect.Lease.ID] = *e.Expect
			stuck := n.c.stuck
			n.c.mu.Unlock()
			if !stuck {
				go n.c.move(n, *e.Expect)
			}
		case engines.Canceled:
			n.cancelled(e.Lease, e.Reason)
		}
	}
}

func (n *node) cancelled(id uint64, reason string) {
	n.c.mu.Lock()
	x, open := n.expects[id]
	stay := n.c.fences
	if !stay {
		delete(n.expects, id)
	}
	n.c.mu.Unlock()
	if open && !stay {
		go n.Completed(engines.Completion{Lease: x.Lease, Status: engines.StatusCancelled,
			Reason: reason})
	}
}

// move copies what a lease is for, and ends it at both sides.
func (c *cable) move(to *node, x engines.Expect) {
	c.mu.Lock()
	from := c.nodes[transfer.Boot{x.Peer[0]}]
	in, ok := from.intents[x.Key]
	delete(from.intents, x.Key)
	delete(to.expects, x.Lease.ID)
	wrong := c.wrong
	c.mu.Unlock()
	if !ok || in.Tokens != x.Tokens {
		to.Completed(engines.Completion{Lease: x.Lease, Status: engines.StatusExpired})
		return
	}
	src, _ := from.store.Region().Bytes()
	dst, _ := to.store.Region().Bytes()
	for i, b := range x.Blocks[0] {
		copy(dst[b*unit:][:unit], src[in.Blocks[0][i]*unit:])
		if wrong {
			dst[b*unit+7]++
		}
	}
	from.Completed(engines.Completion{Lease: in.Lease, Bytes: uint64(in.Tokens) * unit})
	to.Completed(engines.Completion{Lease: x.Lease, Received: true})
}

func keysOf(pages ...int) (out []page.Key) {
	for _, p := range pages {
		out = append(out, page.Key{byte(p), byte(p >> 8), 9})
	}
	return out
}

func contentOf(p int) []byte {
	return bytes.Repeat([]byte{byte(p), byte(p >> 8), 3, 1}, pageBytes/4)
}

func (n *node) put(pages ...int) {
	n.c.t.Helper()
	blocks := make([]uint32, len(pages))
	for i, p := range pages {
		copy(n.blocks[i*pageBytes:], contentOf(p))
		blocks[i] = uint32(i)
	}
	b, err := n.space.Put(keysOf(pages...), nil, n.pool, blocks)
	if err != nil {
		n.c.t.Fatal(err)
	}
	<-b.Done()
	for _, r := range b.Results() {
		if r.Outcome != store.Stored {
			n.c.t.Fatalf("%+v", r)
		}
	}
}

func (n *node) start(pages ...int) *store.Batch {
	n.c.t.Helper()
	clear(n.blocks)
	blocks := make([]uint32, len(pages))
	for i := range pages {
		blocks[i] = uint32(i)
	}
	b, err := n.space.Get(keysOf(pages...), n.pool, blocks)
	if err != nil {
		n.c.t.Fatal(err)
	}
	return b
}

// get returns the outcomes, and compares the pages that are hits.
func (n *node) get(pages ...int) (out []store.Outcome) {
	n.c.t.Helper()
	b := n.start(pages...)
	<-b.Done()
	for i, r := range b.Results() {
		out = append(out, r.Outcome)
		if r.Outcome == store.Hit && !bytes.Equal(n.blocks[i*pageBytes:][:pageBytes],
			contentOf(pages[i])) {
			n.c.t.Fatalf("WRONG PAGE %d", pages[i])
		}
	}
	return out
}

func want(t *testing.T, got []store.Outcome, want ...store.Outcome) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

// TestSeveralHolders: a batch is spread over the holders of its pages.
func TestSeveralHolders(t *testing.T) {
	c, n := newCable(t, 3)
	pages := []int{1, 2, 3, 4, 5, 6, 7, 8}
	asked := map[transfer.Boot]int{}
	c.drop = func(from, to transfer.Boot, f *peerv1.ControlFrame) bool {
		if m := f.GetPageRequest(); m != nil {
			c.mu.Lock()
			asked[to] += len(m.Keys) / page.KeyBytes
			c.mu.Unlock()
		}
		return false
	}
	for _, h := range n[:2] {
		h.put(pages...)
		c.hint(h.boot, pages...)
	}
	for _, o := range n[2].get(pages...) {
		if o != store.Hit {
			t.Errorf("%v", o)
		}
	}
	// Load that an answer reports may change a choice.
	if x, y := asked[n[0].boot], asked[n[1].boot]; x+y != len(pages) || min(x, y) == 0 {
		t.Errorf("asked for %d and %d", x, y)
	}
}

// TestLies: hints of pages that are not there or of processes that are gone, and bytes that are not
// the page's cost a miss, or another holder's answer.
func TestLies(t *testing.T) {
	c, n := newCable(t, 3)
	a, b, liar := n[0], n[1], n[2]
	a.put(1, 2, 3, 4)
	c.hint(liar.boot, 1, 2)
	c.hint(transfer.Boot{99}, 2)
	c.hint(a.boot, 1)
	want(t, b.get(1, 2, 3), store.Hit, store.Miss, store.Miss)
	c.mu.Lock()
	c.wrong = true
	c.mu.Unlock()
	c.hint(a.boot, 2, 3)
	want(t, b.get(2, 3), store.Damaged, store.Damaged)
	c.mu.Lock()
	c.wrong = false
	c.mu.Unlock()
	want(t, b.get(2), store.Hit)
	// What did not come has left its slots: all of the memory can be filled.
	var many []int
	for i := range 60 {
		many = append(many, 1000+i)
	}
	b.put(many...)
}

// TestOffersAreChecked: no offer of a peer is more than a miss, unless it is what was asked for.
func TestOffersAreChecked(t *testing.T) {
	for name, change := range map[string]func(m *peerv1.PageOffer){
		"short":     func(m *peerv1.PageOffer) { m.Found = nil },
		"long":      func(m *peerv1.PageOffer) { m.Found = append(m.Found, 0) },
		"beyond":    func(m *peerv1.PageOffer) { m.Found[0] = 0xff },
		"checksums": func(m *peerv1.PageOffer) { m.Crc = m.Crc[1:] },
		"xfer":      func(m *peerv1.PageOffer) { m.Xfer = m.Xfer[1:] },
		"hash":      func(m *peerv1.PageOffer) { m.Hash = nil },
		"crc":       func(m *peerv1.PageOffer) { m.Crc[0]++ },
		"looked":    func(m *peerv1.PageOffer) { m.Looked = 3 },
		"fewer":     func(m *peerv1.PageOffer) { m.Found[0], m.Crc = 1, m.Crc[:1] },
		"other key": func(m *peerv1.PageOffer) { m.Xfer[0]++ },
	} {
		t.Run(name, func(t *testing.T) {
			c, n := newCable(t, 3)
			n[0].put(1, 2)
			c.hint(n[0].boot, 1, 2)
			c.drop = func(from, to transfer.Boot, f *peerv1.ControlFrame) bool {
				if m := f.GetPageOffer(); m != nil {
					// One that was not asked counts for nothing.
					_ = n[1].Handle(n[2].boot, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_PageOffer{
						PageOffer: &peerv1.PageOffer{Id: m.Id, Found: []byte{0}}}})
					change(m)
				}
				return false
			}
			hits := 0
			for _, o := range n[1].get(1, 2) {
				if o == store.Hit {
					hits++
				}
			}
			if hits > 1 || hits == 1 && name != "crc" {
				t.Errorf("%d hits", hits)
			}
		})
	}
}

// TestHolderGoes: a get ends when its holder is gone, after its lease's fence, and its slots are
// used again only then.
func TestHolderGoes(t *testing.T) {
	c, n := newCable(t, 2)
	a, b := n[0], n[1]
	a.put(1)
	c.hint(a.boot, 1)
	c.stuck, c.fences = true, true
	batch := b.start(1)
	var x engines.Expect
	until(t, func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		for _, x = range b.expects {
			return true
		}
		return false
	})
	b.PeerDown(a.boot)
	batch.Cancel()
	if err := batch.Fence(t.Context()); err != nil { // the engine's block waits for no peer
		t.Fatal(err)
	}
	select {
	case <-batch.Done():
		t.Error("the get has ended before the fence of its slot")
	default:
	}
	if _, busy := b.store.Stage(namespace.ID(), pageBytes, keysOf(1)); busy != nil {
		t.Error(busy)
	}
	b.Completed(engines.Completion{Lease: x.Lease, Status: engines.StatusCancelled})
	<-batch.Done()
	if o := batch.Results()[0].Outcome; o == store.Hit {
		t.Error("a hit")
	}
}

// TestFenceNeverEnds: once the node stops it waits for a fence for a time only, and the slot stays
// taken.
func TestFenceNeverEnds(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		c, n := newCable(t, 2)
		n[0].put(1)
		c.hint(n[0].boot, 1)
		c.stuck, c.fences = true, true
		batch := n[1].start(1)
		synctest.Wait()
		began := time.Now()
		if err := n[1].Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
		<-batch.Done()
		if took := time.Since(began); took != fenceTime {
			t.Errorf("it took %v", took)
		}
		if o := batch.Results()[0].Outcome; o != store.Miss {
			t.Errorf("%v", o)
		}
		// Another page cannot have the slot: the key is still being loaded.
		b, err := n[1].space.Put(keysOf(1), nil, n[1].pool, []uint32{0})
		if err != nil {
			t.Fatal(err)
		}
		if <-b.Done(); b.Results()[0].Outcome != store.Busy {
			t.Errorf("%+v", b.Results()[0])
		}
	})
}

// TestSilence: a holder that does not answer costs its time, not more.
func TestSilence(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		c, n := newCable(t, 2)
		n[0].put(1)
		c.hint(n[0].boot, 1)
		c.drop = func(_, _ transfer.Boot, f *peerv1.ControlFrame) bool { return true }
		began := time.Now()
		want(t, n[1].get(1), store.Miss)
		if took := time.Since(began); took != askTime {
			t.Errorf("it took %v", took)
		}
	})
}

// TestSharesOfPeers: pages that are offered and never taken hold a part of the memory only.
func TestSharesOfPeers(t *testing.T) {
	_, n := newCable(t, 3)
	var pages []int
	for i := range 60 {
		pages = append(pages, i+1)
	}
	n[0].put(pages...)
	asking := func() *peerv1.PageRequest {
		m := &peerv1.PageRequest{PageBytes: pageBytes, DeadlineMs: 10_000}
		id := namespace.ID()
		m.Space = id[:]
		for _, k := range keysOf(pages...) {
			m.Keys = append(m.Keys, k[:]...)
		}
		return m
	}
	for _, from := range n[1:] {
		for range 3 {
			n[0].serve(&request{from.boot, asking(), time.Now()})
		}
	}
	size := n[0].store.Region().Size()
	n[0].mu.Lock()
	defer n[0].mu.Unlock()
	if got := n[0].served; got > size/servedShare || got < size/peerShare {
		t.Errorf("%d bytes of %d are pinned", got, size)
	}
	for _, p := range n[0].peers {
		if p.served > size/peerShare {
			t.Errorf("%d bytes for one peer", p.served)
		}
	}
}

func until(t testing.TB, ok func() bool) {
	t.Helper()
	end := time.Now().Add(20 * time.Second)
	for tick := time.NewTicker(time.Millisecond); !ok(); <-tick.C {
		if time.Now().After(end) {
			t.Fatal("not in time")
		}
	}
}

// FuzzHandle: a frame of a peer is refused, or ends as a miss.
func FuzzHandle(f *testing.F) {
	id := namespace.ID()
	key := keysOf(1)[0]
	for _, m := range []*peerv1.ControlFrame{
		{Body: &peerv1.ControlFrame_PageRequest{PageRequest: &peerv1.PageRequest{Id: 1, Space: id[:],
			PageBytes: pageBytes, Keys: key[:], DeadlineMs: 10}}},
		{Body: &peerv1.ControlFrame_PageOffer{PageOffer: &peerv1.PageOffer{Id: 1, Found: []byte{1},
			Crc: []uint32{1}, Xfer: id[:16], Hash: id[:]}}},
	} {
		b, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var m peerv1.ControlFrame
		if proto.Unmarshal(b, &m) != nil {
			return
		}
		if o := m.GetPageOffer(); o != nil {
			if checkOffer(o, 3) == nil && len(o.Crc) > 0 && (len(o.Xfer) != 16 || len(o.Hash) != 32) {
				t.Fatal("an offer without a key")
			}
		}
		if q := m.GetPageRequest(); q != nil && checkRequest(q) == nil {
			if n := len(q.Keys); n == 0 || n%page.KeyBytes != 0 {
				t.Fatalf("keys of %d bytes", n)
			}
		}
	})
}
