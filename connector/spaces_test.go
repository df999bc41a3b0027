package connector_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/connector/connectortest"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/internal/board"
	"github.com/kvspray/kvspray/transfer"
)

func openOf(weights string, pageBytes, blocks uint32, pieces ...msg.PagePiece) msg.Open {
	return msg.Open{Namespace: msg.Namespace{Weights: weights, DType: "bfloat16", Layout: "l",
		PageTokens: 16, PageBytes: pageBytes, Algorithm: "sglang-sha256"}, Pieces: pieces,
		Blocks: blocks}
}

// begin begins a GET or PUT of one page: its lease, or why it was refused.
func begin(t *testing.T, w *connectortest.Worker, s *fakeStore, put bool, space uint64,
	block uint32) (lease transfer.LeaseID, refused string) {
	t.Helper()
	var err error
	if put {
		_, err = w.Put(msg.Put{Space: space, Hashes: make([]byte, 16), HashBytes: 16,
			Blocks: []uint32{block}})
	} else {
		_, err = w.Get(msg.Get{Space: space, Hashes: make([]byte, 16), HashBytes: 16,
			Blocks: []uint32{block}})
	}
	must(t, err)
	eventually(t, "its begin or refusal", func() bool {
		select {
		case p := <-s.began:
			lease = p.Lease
			return true
		default:
		}
		c, ok, err := w.Poll()
		must(t, err)
		if ok && c.Status == board.Refused {
			refused = c.Received.Reason
		}
		return ok
	})
	return lease, refused
}

// end completes a lease.
func end(t *testing.T, r *rig, w *connectortest.Worker, lease transfer.LeaseID) {
	t.Helper()
	must(t, r.Complete(r.lastUp(t), engines.Completion{Lease: lease, Received: true,
		Status: board.OK}))
	_, err := w.Wait(testContext(t))
	must(t, err)
}

// Blocks are guarded as memory, by whatever pool a request names them.
func TestPoolsOverOneMemory(t *testing.T) {
	l := startLender(t)
	must(t, l.AddRegions(testContext(t), 0, parts(0, 2), l.file))
	const half, quarter = part / 2, part / 4
	open := func(m msg.Open) uint64 {
		t.Helper()
		space, err := l.OpenSpace(testContext(t), m)
		must(t, err)
		return space
	}
	whole := func(region uint64) msg.PagePiece {
		return msg.PagePiece{Region: region, Stride: half, Len: half}
	}
	first := open(openOf("a", half, 2, whole(0)))
	pools := map[string]struct {
		space          uint64
		shares, others bool // memory with block 0, and with block 1, of the first pool
	}{
		"itself":        {first, true, true},
		"other weights": {open(openOf("b", half, 2, whole(0))), true, true},
		"two pieces": {open(openOf("a", half, 2, msg.PagePiece{Base: quarter, Stride: half, Len: quarter},
			msg.PagePiece{Stride: half, Len: quarter})), true, true},
		"the first quarter": {open(openOf("a", quarter, 1, msg.PagePiece{Stride: half, Len: quarter})),
			true, false},
		"elsewhere": {open(openOf("a", half, 2, whole(1))), false, false},
	}
	for name, p := range pools {
		for _, c := range []struct {
			put, again bool
			what       string
		}{{false, false, "written"}, {false, true, "written"}, {true, false, "read"}} {
			lease, why := begin(t, l.Worker, l.store, c.put, first, 0)
			if why != "" {
				t.Fatal(why)
			}
			other, why := begin(t, l.Worker, l.store, c.again, p.space, 0)
			want := fmt.Sprintf("the memory of block 0 is %s for lease %d", c.what, lease.ID)
			if p.shares != strings.Contains(why, want) || !p.shares && why != "" {
				t.Errorf("%s: put %v, then put %v: %q, shares memory: %v", name, c.put, c.again, why, p.shares)
			}
			if why == "" {
				end(t, l.r, l.Worker, other)
			}
			end(t, l.r, l.Worker, lease)
			other, why = begin(t, l.Worker, l.store, c.again, p.space, 0)
			if why != "" {
				t.Fatalf("%s, after the end of the other lease: %s", name, why)
			}
			end(t, l.r, l.Worker, other)
		}
		lease, _ := begin(t, l.Worker, l.store, false, first, 1)
		other, why := begin(t, l.Worker, l.store, false, p.space, 0)
		if why != "" {
			t.Errorf("%s: block 0 beside block 1: %s", name, why)
		} else {
			end(t, l.r, l.Worker, other)
		}
		end(t, l.r, l.Worker, lease)
	}
	// Blocks of other strides: which of them share bytes is not compared.
	odd := open(openOf("a", part, 1, msg.PagePiece{Stride: part, Len: part}))
	put, why := begin(t, l.Worker, l.store, true, odd, 0)
	if why != "" {
		t.Fatal(why)
	}
	same, why := begin(t, l.Worker, l.store, true, first, 1)
	if why != "" {
		t.Errorf("a PUT beside another one was refused: %s", why)
	}
	if _, why = begin(t, l.Worker, l.store, false, first, 0); !strings.Contains(why, "is read for") {
		t.Errorf("a GET beside a PUT of another stride: refusal %q, want one", why)
	}
	end(t, l.r, l.Worker, put)
	end(t, l.r, l.Worker, same)
}

// Blocks of the layout and those of a pool are one memory.
func TestPoolOverTheLayout(t *testing.T) {
	s := &fakeStore{pools: map[uint64]connector.Pool{}, began: make(chan connector.Pages, 16)}
	r := start(t, func(o *connector.Options) { o.Store = s })
	w := r.worker(t, nil)
	var pieces []msg.PagePiece
	for _, x := range shape.Layout().Groups[0].Layers {
		pieces = append(pieces, msg.PagePiece{Base: x.Base, Stride: x.BlockStride, Len: x.PageBytes})
	}
	space, err := w.OpenSpace(testContext(t), openOf("w", 4*uint32(shape.PageBytes()),
		shape.NumBlocks, pieces...))
	must(t, err)
	expect := func(block uint32) (refused string) {
		t.Helper()
		n := len(r.rec.seen().expects)
		x, h := key()
		_, err := w.Expect(msg.Expect{Xfer: x, Hash: h, Peer: "10.0.0.1:7", Tokens: 16,
			Skip: []uint32{0}, Blocks: [][]uint32{{block}}})
		must(t, err)
		eventually(t, "the expect", func() bool {
			c, ok, err := w.Poll()
			must(t, err)
			if ok {
				refused = c.Received.Reason
			}
			return ok || len(r.rec.seen().expects) > n
		})
		return refused
	}
	for _, put := range []bool{false, true} {
		lease, why := begin(t, w, s, put, space, 3)
		if why != "" {
			t.Fatal(why)
		}
		if why := expect(3); !strings.Contains(why, "the memory of block 3 is") {
			t.Errorf("an EXPECT of the block of a GET or PUT: %q", why)
		}
		if why := expect(4); put && why == "" || !put && why != "" {
			t.Errorf("an EXPECT of another block: %q", why) // the second one finds the first one's
		}
		end(t, r, w, lease)
	}
	for _, put := range []bool{false, true} {
		if _, why := begin(t, w, s, put, space, 4); !strings.Contains(why, "block 4 is written") {
			t.Errorf("put %v of the block of an EXPECT: %q", put, why)
		}
	}
}

// The namespaces of a session are bounded: the one whose last use is the oldest goes for a new one.
func TestManyNamespaces(t *testing.T) {
	l := startLender(t)
	must(t, l.AddRegions(testContext(t), 0, parts(0, 1), l.file))
	const namespaces = 10_000
	piece := msg.PagePiece{Stride: part / 2, Len: part / 2}
	open := func(i int) uint64 {
		t.Helper()
		space, err := l.OpenSpace(testContext(t), openOf(fmt.Sprint("step ", i), part/2, 2, piece))
		must(t, err)
		return space
	}
	first, asked := open(-2), open(-1)
	lease, why := begin(t, l.Worker, l.store, false, first, 0)
	if why != "" {
		t.Fatal(why)
	}
	exists := func(space uint64) error {
		_, err := l.Exists(testContext(t), msg.Exists{Spaces: []msg.SpaceRef{{Space: space}},
			Hashes: make([]byte, 16), HashBytes: 16})
		return err
	}
	var last uint64
	for i := range namespaces {
		last = open(i)
		must(t, exists(asked))
	}
	if n := l.store.maxPools; n > msg.MaxSpaces+1 {
		t.Errorf("%d pools were open at once", n)
	}
	if l.store.pool(first).ID != first {
		t.Error("a pool was closed that a lease uses")
	}
	end(t, l.r, l.Worker, lease)
	for i := range msg.MaxSpaces { // the first one is not used any more
		last = open(i)
	}
	if _, why := begin(t, l.Worker, l.store, false, first, 0); !strings.Contains(why, "send OPEN") {
		t.Errorf("a GET in a closed pool: refusal %q, want one", why)
	}
	refused(t, exists(first), msg.CodeStore, "spaces[0]", "is not open")
	if _, why := begin(t, l.Worker, l.store, false, last, 0); why != "" {
		t.Error(why)
	}
}

// Where leases use all namespaces, a new one is refused, and nothing is lost.
func TestNamespacesInUse(t *testing.T) {
	l := startLender(t)
	must(t, l.AddRegions(testContext(t), 0, parts(0, msg.MaxSpaces+1), l.file))
	open := func(i int) (uint64, error) {
		return l.OpenSpace(testContext(t), openOf("w", part/2, 2, msg.PagePiece{Region: uint64(i),
			Stride: part / 2, Len: part / 2}))
	}
	var spaces []uint64
	var leases []transfer.LeaseID
	for i := range msg.MaxSpaces {
		space, err := open(i)
		must(t, err)
		lease, why := begin(t, l.Worker, l.store, false, space, 0)
		if why != "" {
			t.Fatal(why)
		}
		spaces, leases = append(spaces, space), append(leases, lease)
	}
	_, err := open(msg.MaxSpaces)
	refused(t, err, msg.CodeStore, "namespace", "open GETs and PUTs use all")
	end(t, l.r, l.Worker, leases[5])
	_, err = open(msg.MaxSpaces)
	must(t, err)
	if l.store.pool(spaces[5]).ID != 0 || l.store.pool(spaces[0]).ID == 0 {
		t.Errorf("closed %v, want the one that no lease uses, %d", l.store.closed, spaces[5])
	}
}

// An engine of eight ranks changes its weights 200 times: CLOSE ends what each change has opened,
// once the leases in it have ended.
func TestChangesOfWeights(t *testing.T) {
	l := startLender(t)
	must(t, l.AddRegions(testContext(t), 0, parts(0, 1), l.file))
	scheduler, err := connectortest.DialScheduler(testContext(t), connectortest.SchedulerConfig{
		Socket: l.r.socket, Engine: msg.Engine{Name: "vllm", Version: "1", ID: "e"}})
	must(t, err)
	defer func() { _ = scheduler.Close() }()
	const ranks, changes = 8, 200
	var asks []*msg.Opened
	var pool *msg.Opened
	for i := range changes {
		for _, o := range asks {
			must(t, scheduler.CloseSpace(o))
		}
		asks = asks[:0]
		for rank := range ranks {
			o, err := scheduler.Open(testContext(t), openOf(fmt.Sprint(i, rank), part/2, 0))
			must(t, err)
			asks = append(asks, o)
		}
		last := pool
		pool, err = l.Open(testContext(t), openOf(fmt.Sprint("w", i), part/2, 2, msg.PagePiece{
			Stride: part / 2, Len: part / 2}))
		must(t, err)
		if last == nil {
			continue
		}
		lease, why := begin(t, l.Worker, l.store, true, last.Space, 0)
		if why != "" {
			t.Fatal(why)
		}
		must(t, l.CloseSpace(last))
		must(t, l.CloseSpace(last)) // a second one does no harm
		if _, err := l.Exists(testContext(t), msg.Exists{Spaces: []msg.SpaceRef{{Space: last.Space}},
			Hashes: make([]byte, 16), HashBytes: 16}); err == nil {
			t.Fatal("a closed namespace is asked about")
		}
		if l.store.pool(last.Space).ID != last.Space {
			t.Fatal("a pool was closed while a PUT reads its blocks")
		}
		end(t, l.r, l.Worker, lease)
		eventually(t, "the end of the pool", func() bool { return l.store.pool(last.Space).ID == 0 })
	}
	var all []msg.SpaceRef
	for _, o := range asks {
		all = append(all, msg.SpaceRef{Space: o.Space})
	}
	_, err = scheduler.Exists(testContext(t), msg.Exists{Spaces: all, Hashes: make([]byte, 16),
		HashBytes: 16})
	must(t, err)
	if l.store.maxPools > 2 {
		t.Errorf("%d pools were open at once, want those of two weights", l.store.maxPools)
	}
}

// Pins whose time is over take no place of a session's.
func TestPinsThatHaveEnded(t *testing.T) {
	l := startLender(t)
	must(t, l.AddRegions(testContext(t), 0, parts(0, 1), l.file))
	space, err := l.open(t, 0)
	must(t, err)
	pin := func(ms uint64) error {
		_, err := l.Exists(testContext(t), msg.Exists{Spaces: []msg.SpaceRef{{Space: space}},
			Hashes: make([]byte, 16), HashBytes: 16, PinMS: ms})
		return err
	}
	const pins = 4096
	for i := range pins {
		must(t, pin(1+uint64(i%2)*60_000))
	}
	for range pins / 2 {
		eventually(t, "room for pins", func() bool { return pin(60_000) == nil })
	}
	if err := pin(60_000); err == nil || !strings.Contains(err.Error(), "send UNPIN") {
		t.Errorf("more pins than a session may have: %v, want a refusal with its remedy", err)
	}
}
