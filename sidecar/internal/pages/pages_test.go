package pages

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/internal/leaktest"
	"github.com/kvspray/kvspray/internal/metrics"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/sidecar/internal/local"
	"github.com/kvspray/kvspray/sidecar/internal/removals"
	"github.com/kvspray/kvspray/sidecar/internal/trace"
	"github.com/kvspray/kvspray/store"
	"github.com/kvspray/kvspray/store/disk"
	"github.com/kvspray/kvspray/store/disk/disktest"
	"github.com/kvspray/kvspray/store/memory"
	"github.com/kvspray/kvspray/store/object"
	"github.com/kvspray/kvspray/store/object/objecttest"
	"github.com/kvspray/kvspray/store/page"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

const (
	pageBytes = 4096
	blocks    = 64
)

// rig is a service over a store of 256 KiB, and one worker with a pool.
type rig struct {
	*Service
	t      *testing.T
	leases *local.Leases
	w      *engines.Worker
	pool   connector.Pool
	memory []byte
	ended  chan engines.Completion
	last   uint64 // lease
}

func start(t *testing.T, sim *disktest.Sim) *rig {
	t.Helper()
	return startOver(t, sim, nil)
}

func startOver(t *testing.T, sim *disktest.Sim, objects *objecttest.Store) *rig {
	t.Helper()
	return startWith(t, configOver(t, sim, objects))
}

func configOver(t *testing.T, sim *disktest.Sim, objects *objecttest.Store) store.Config {
	t.Helper()
	c := store.Config{Memory: memory.Config{Bytes: 256 << 10, SlabBytes: 64 << 10}, Workers: 4}
	if sim != nil {
		var err error
		c.Opened, err = disk.OpenFiles([]disk.OpenDevice{{Path: "sim", File: sim,
			Size: int64(sim.Size())}}, disk.Config{SegmentBytes: 128 << 10, MaxPages: 2048})
		if err != nil {
			t.Fatal(err)
		}
	}
	if objects != nil {
		c.ObjectAtPut = true
		c.Object = &object.Config{Bucket: objects.Open(), Prefix: "node", Size: 64 << 20,
			ObjectBytes: object.MinObjectBytes, MaxPages: 2048, Buffers: 4}
	}
	return c
}

func startWith(t *testing.T, c store.Config) *rig {
	t.Helper()
	s, err := store.Open(c)
	if err != nil {
		t.Fatal(err)
	}
	m, err := metrics.NewStore(prometheus.NewRegistry(), func() (s metrics.StoreSample) { return s })
	if err != nil {
		t.Fatal(err)
	}
	region, err := mem.NewAnonymous("engine", blocks*pageBytes)
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{t: t, leases: local.New(t.Context()), ended: make(chan engines.Completion, 100),
		w: &engines.Worker{Name: "w", Regions: []*mem.Region{region}}}
	r.memory, _ = region.Bytes()
	r.Service = New(Options{Store: s, Leases: r.leases, Metrics: m, Transfers: &trace.Lines{},
		Log: slog.New(slog.DiscardHandler), Removals: removing(t, s),
		Complete: func(_ *engines.Worker, c engines.Completion) error {
			r.ended <- c
			return nil
		}})
	// Keys and values in turns, as vLLM has them.
	r.pool = connector.Pool{ID: 7, Namespace: testNamespace("a"), Blocks: blocks,
		Pieces: []connector.PoolPiece{{Region: region, Stride: pageBytes, Len: pageBytes / 2},
			{Region: region, Base: pageBytes / 2, Stride: pageBytes, Len: pageBytes / 2}}}
	if _, err := r.Open(r.w, r.pool); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		r.leases.Stop(local.ErrGone)
		r.leases.Wait()
		r.Gone(r.w)
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		region.Release()
	})
	return r
}

// removing removes pages of a store, until the test ends.
func removing(t *testing.T, s *store.Store) *removals.Removals {
	r := removals.New(removals.Options{Store: s, Log: slog.New(slog.DiscardHandler)})
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { r.Run(ctx); close(done) }()
	t.Cleanup(func() { stop(); <-done })
	return r
}

func testNamespace(weights string) page.Namespace {
	return page.Namespace{Weights: weights, DType: "bfloat16", Layout: "test", PageTokens: 16,
		PageBytes: pageBytes, Algorithm: "sglang-sha256"}
}

// request asks for the pages with these numbers, in blocks from 0 on.
func (r *rig) request(put bool, pages ...int) connector.Pages {
	r.last++
	p := connector.Pages{Put: put, Pool: r.pool.ID, Hashes: hashes(pages...), Deadline: time.Minute}
	p.Lease.ID = r.last
	for i := range pages {
		p.Blocks = append(p.Blocks, uint32(i))
	}
	return p
}

func hashes(pages ...int) page.Hashes {
	h := page.Hashes{Each: 16}
	for _, n := range pages {
		var b [16]byte
		binary.LittleEndian.PutUint64(b[:], uint64(n))
		h.Bytes = append(h.Bytes, b[:]...)
	}
	return h
}

func content(n int) []byte {
	b := make([]byte, pageBytes)
	_, _ = rand.NewChaCha8([32]byte{byte(n), byte(n >> 8)}).Read(b)
	return b
}

func (r *rig) block(i int) []byte { return r.memory[i*pageBytes : (i+1)*pageBytes] }

func (r *rig) serve(p connector.Pages) engines.Completion {
	r.t.Helper()
	r.Start(r.w, p)
	return <-r.ended
}

// put stores pages and returns their outcomes.
func (r *rig) put(pages ...int) []store.Outcome {
	r.t.Helper()
	for i, n := range pages {
		copy(r.block(i), content(n))
	}
	return r.outcomes(r.serve(r.request(true, pages...)))
}

// get loads pages and compares those that were found.
func (r *rig) get(pages ...int) []store.Outcome {
	r.t.Helper()
	clear(r.memory)
	out := r.outcomes(r.serve(r.request(false, pages...)))
	for i, o := range out {
		if o == store.Hit && !bytes.Equal(r.block(i), content(pages[i])) {
			r.t.Fatalf("WRONG PAGE %d", pages[i])
		}
	}
	return out
}

func (r *rig) outcomes(c engines.Completion) (out []store.Outcome) {
	r.t.Helper()
	if c.Status != engines.StatusOK || !c.Received {
		r.t.Fatalf("completion %+v", c)
	}
	for _, p := range c.Pages {
		o, _ := connector.SplitPageResult(p)
		out = append(out, store.Outcome(o))
	}
	return out
}

func (r *rig) exists(pages ...int) page.Bitmap {
	r.t.Helper()
	found, err := r.Exists([]page.ID{r.pool.Namespace.ID()}, hashes(pages...))
	if err != nil {
		r.t.Fatal(err)
	}
	return found
}

func all(t *testing.T, got []store.Outcome, want store.Outcome) {
	t.Helper()
	for i, o := range got {
		if o != want {
			t.Fatalf("page %d: %d, want %d", i, o, want)
		}
	}
}

func TestPutGetExistsRemove(t *testing.T) {
	r := start(t, nil)
	all(t, r.put(1, 2, 3), store.Stored)
	all(t, r.put(2), store.Existed)
	all(t, r.get(3, 1, 2), store.Hit)
	all(t, r.get(4), store.Miss)
	if found := r.exists(1, 2, 3, 4); found.Count() != 3 || found.Leading() != 3 {
		t.Errorf("found %b", found)
	}
	id := r.pool.Namespace.ID()
	other := testNamespace("b")
	if found, err := r.Exists([]page.ID{id, other.ID()}, hashes(1)); err != nil || found.Count() != 0 {
		t.Errorf("a page that one of two ranks lacks: %b, %v", found, err)
	}
	if _, err := r.Remove(r.w, other.ID()); err == nil ||
		!strings.Contains(err.Error(), "open a pool") {
		t.Errorf("removal of a namespace of others: %v", err)
	}
	if out, err := r.Remove(r.w, id); err != nil || out.Members != 1 || out.Confirmed != 1 ||
		out.Missing != nil {
		t.Fatalf("%+v %v", out, err)
	}
	if found := r.exists(1, 2, 3); found.Count() != 0 {
		t.Errorf("removed, and found %b", found)
	}
	all(t, r.get(1), store.Miss)
	all(t, r.put(1), store.Stored) // later than the removal
	all(t, r.get(1), store.Hit)
}

// An operator removes a namespace by its id. An id that this node does not have is an error.
func TestRemoveNamespace(t *testing.T) {
	r := start(t, nil)
	all(t, r.put(1), store.Stored)
	unknown := page.ID{9}
	if _, err := r.RemoveNamespace(t.Context(), unknown, false); err == nil ||
		!strings.Contains(err.Error(), unknown.String()+" is not open") ||
		!strings.Contains(err.Error(), "store ls") {
		t.Error(err)
	}
	if out, err := r.RemoveNamespace(t.Context(), unknown, true); err != nil || out.Confirmed != 1 {
		t.Errorf("%+v %v", out, err)
	}
	all(t, r.get(1), store.Hit)
	if out, err := r.RemoveNamespace(t.Context(), r.pool.Namespace.ID(), false); err != nil ||
		out.Confirmed != 1 || len(out.Members) != 1 {
		t.Errorf("%+v %v", out, err)
	}
	all(t, r.get(1), store.Miss)
}

// While a removal is known and not applied, pages of the namespace are neither found nor got.
func TestNothingOfARemovalUnderWay(t *testing.T) {
	sim := disktest.New(8<<20, 1)
	r := start(t, sim)
	all(t, r.put(1), store.Stored)
	sim.Fail(func(op string, _ int64) error {
		if op == "sync" {
			return errors.New("the disk does not sync")
		}
		return nil
	})
	if _, err := r.Remove(r.w, r.pool.Namespace.ID()); err == nil ||
		!strings.Contains(err.Error(), "does not sync") {
		t.Fatal(err)
	}
	if found := r.exists(1); found.Count() != 0 {
		t.Errorf("found %b", found)
	}
	if c := r.serve(r.request(false, 1)); c.Status != engines.StatusRefused ||
		!strings.Contains(c.Reason, "a removal of the namespace is under way") {
		t.Errorf("%+v", c)
	}
	sim.Fail(nil)
	if _, err := r.Remove(r.w, r.pool.Namespace.ID()); err != nil {
		t.Fatal(err)
	}
	all(t, r.get(1), store.Miss)
}

// A worker that goes closes its pools; the pages stay for the next one.
func TestWorkerGone(t *testing.T) {
	r := start(t, nil)
	all(t, r.put(1), store.Stored)
	r.Gone(r.w)
	if found := r.exists(1); found.Count() != 0 {
		t.Error("pages of a namespace that is not open were found")
	}
	if c := r.serve(r.request(false, 1)); c.Status != engines.StatusRefused ||
		!strings.Contains(c.Reason, "7 is not open") {
		t.Errorf("%+v", c)
	}
	if _, err := r.Open(r.w, r.pool); err != nil {
		t.Fatal(err)
	}
	all(t, r.get(1), store.Hit)
}

func TestRefusesPools(t *testing.T) {
	r := start(t, nil)
	for want, change := range map[string]func(p *connector.Pool){
		"7 is open already":          func(p *connector.Pool) { p.ID = 7 },
		"a block has 2048 bytes":     func(p *connector.Pool) { p.Pieces = p.Pieces[:1] },
		"field blocks: 0":            func(p *connector.Pool) { p.Blocks = 0 },
		"shares bytes with":          func(p *connector.Pool) { p.Pieces[1].Base-- },
		"field weights":              func(p *connector.Pool) { p.Namespace.Weights = "" },
		"store.memory: page of 1048": func(p *connector.Pool) { p.Pieces[0].Len = 1 << 20 },
	} {
		p := r.pool
		p.ID = 8
		p.Pieces = append([]connector.PoolPiece(nil), r.pool.Pieces...)
		change(&p)
		if _, err := r.Open(r.w, p); err == nil {
			t.Errorf("accepted, want %q", want)
		} else if !strings.Contains(err.Error(), want) && !strings.Contains(want, "1048") {
			t.Errorf("%v, want %q", err, want)
		}
	}
	for i := range uint64(MaxPools - 1) {
		p := r.pool
		p.ID = 100 + i
		if _, err := r.Open(r.w, p); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := r.Open(r.w, r.pool); err == nil {
		t.Error("too many pools")
	}
}

func TestRefusesRequests(t *testing.T) {
	r := start(t, nil)
	for want, change := range map[string]func(p *connector.Pages){
		"5 is not open":      func(p *connector.Pages) { p.Pool = 5 },
		"hashes of 4 bytes":  func(p *connector.Pages) { p.Hashes.Each = 4 },
		"no whole number":    func(p *connector.Pages) { p.Hashes.Bytes = p.Hashes.Bytes[1:] },
		"0 hashes":           func(p *connector.Pages) { p.Hashes.Bytes = nil },
		"1 for 2 keys":       func(p *connector.Pages) { p.Blocks = p.Blocks[1:] },
		"blocks[1]: 64":      func(p *connector.Pages) { p.Blocks[1] = blocks },
		"is block 0":         func(p *connector.Pages) { p.Blocks[1] = 0 },
		"page_hash = \"01\"": func(p *connector.Pages) { p.Put, p.Before = true, []byte{1} },
	} {
		p := r.request(false, 1, 2)
		change(&p)
		if c := r.serve(p); c.Status != engines.StatusRefused || !strings.Contains(c.Reason, want) {
			t.Errorf("%+v, want %q", c, want)
		}
	}
}

// An engine whose completions are taken late delays no get of another lease.
func TestASlowCompletionHoldsUpNoWorkerOfTheStore(t *testing.T) {
	r := start(t, nil)
	r.put(1)
	slow, free := make(chan struct{}, 64), make(chan struct{})
	late := r.request(false, 1).Lease.ID
	complete := r.o.Complete
	r.o.Complete = func(w *engines.Worker, c engines.Completion) error {
		if c.Lease.ID <= late+64 {
			slow <- struct{}{}
			<-free
		}
		return complete(w, c)
	}
	for range 64 { // more than the store has workers
		r.Start(r.w, r.request(false, 1))
	}
	for range 64 {
		<-slow
	}
	all(t, r.get(1), store.Hit)
	close(free)
	for range 64 {
		<-r.ended
	}
}

// A get that ends early while a disk reads is completed at once, and no byte of its blocks is
// written afterwards.
func TestNothingIsWrittenAfterACancel(t *testing.T) {
	for name, end := range map[string]func(r *rig, p *connector.Pages){
		"cancel":   func(r *rig, p *connector.Pages) { r.leases.Cancel(r.w, p.Lease.ID, "not wanted") },
		"deadline": func(_ *rig, p *connector.Pages) { p.Deadline = 3 * time.Second },
		"gone":     func(r *rig, _ *connector.Pages) { r.leases.Gone(r.w) },
	} {
		t.Run(name, func(t *testing.T) {
			sim := disktest.New(4<<20, 1)
			r := start(t, sim)
			const many = 200 // more than memory holds
			for i := range many {
				all(t, r.put(i), store.Stored)
			}
			reads, open := make(chan struct{}, many), make(chan struct{})
			sim.Hold(func() { reads <- struct{}{}; <-open })
			clear(r.memory)
			var old []int
			for i := range 20 {
				old = append(old, i)
			}
			p := r.request(false, old...)
			if name == "deadline" {
				end(r, &p)
			}
			r.Start(r.w, p)
			<-reads
			if name != "deadline" {
				end(r, &p)
			}
			c := <-r.ended
			want := map[string]uint16{"cancel": engines.StatusCancelled, "deadline": engines.StatusExpired,
				"gone": engines.StatusFailed}[name]
			if c.Status != want || c.Pages != nil || c.Reason == "" {
				t.Errorf("completion %+v", c)
			}
			before := bytes.Clone(r.memory)
			close(open)
			sim.Hold(nil)
			all(t, r.get(1), store.Hit) // behind it in the queues
			clear(r.block(0))
			clear(before[:pageBytes])
			if !bytes.Equal(r.memory, make([]byte, len(r.memory))) && !bytes.Equal(r.memory, before) {
				t.Error("a block was written after the lease's end")
			}
		})
	}
}

// Pages that only other nodes have take nothing of this node's share for pins, and other nodes are
// asked for all namespaces at once.
func TestPagesOfOthers(t *testing.T) {
	r := start(t, nil)
	ids := []page.ID{r.pool.Namespace.ID(), r.pool.Namespace.ID()}
	var asked sync.WaitGroup
	asked.Add(len(ids))
	r.o.Find = func(keys []page.Key, found page.Bitmap) {
		asked.Done()
		asked.Wait()
		for i := range keys {
			found.Set(i)
		}
	}
	many := make([]int, 40)
	for i := range many {
		many[i] = i
	}
	found, unpin, err := r.Pin(ids, hashes(many...), time.Minute)
	if err != nil || found.Leading() != len(many) {
		t.Fatalf("found %b, %v", found, err)
	}
	defer unpin()
	if _, pinned := r.Namespaces(); pinned != 0 {
		t.Errorf("%d bytes are pinned", pinned)
	}
}

func TestPins(t *testing.T) {
	r := start(t, nil)
	id := []page.ID{r.pool.Namespace.ID()}
	all(t, r.put(1, 2), store.Stored)
	found, unpin, err := r.Pin(id, hashes(1, 2, 3, 4), time.Minute)
	if err != nil || found.Leading() != 2 {
		t.Fatalf("found %b, %v", found, err)
	}
	flood := func(from int) {
		for i := range 200 {
			r.put(from + i)
		}
	}
	flood(1000)
	if found := r.exists(1, 2); found.Count() != 2 {
		t.Errorf("pinned, and gone after a flood: %b", found)
	}
	unpin()
	unpin()
	if _, pinned := r.Namespaces(); pinned != 0 {
		t.Errorf("unpinned, and %d bytes stay counted", pinned)
	}
	// The time of a pin ends.
	if _, _, err := r.Pin(id, hashes(1), time.Millisecond); err != nil {
		t.Fatal(err)
	}
	for pinned := uint64(1); pinned != 0; {
		_, pinned = r.Namespaces()
	}
	var many []int
	for i := range 40 {
		many = append(many, 3000+i)
	}
	r.put(many...)
	var re *store.RequestError
	if _, _, err := r.Pin(id, hashes(many...), time.Minute); !errors.As(err, &re) ||
		re.Field != "pin_ms" {
		t.Errorf("more than half of the memory: %v", err)
	}
	if _, pinned := r.Namespaces(); pinned != 0 {
		t.Errorf("%d bytes stay counted after a refusal", pinned)
	}
	if _, _, err := r.Pin(id, hashes(1), MaxPinTime+1); !errors.As(err, &re) {
		t.Errorf("more than %v: %v", MaxPinTime, err)
	}
	_, unpin, err = r.Pin(id, hashes(1), MaxPinTime)
	if err != nil {
		t.Fatal(err)
	}
	unpin()
}

// TestVerifyReportsDamage: a damaged copy is reported, though the disk has a good one.
func TestVerifyReportsDamage(t *testing.T) {
	r := start(t, disktest.New(16<<20, 1))
	all(t, r.put(1), store.Stored)
	id := r.pool.Namespace.ID()
	keys, err := r.Keys(id, "memory", 0, 10)
	if err != nil || len(keys.Keys) != 1 {
		t.Fatalf("%+v, %v", keys, err)
	}
	key, err := hex.DecodeString(keys.Keys[0])
	if err != nil {
		t.Fatal(err)
	}
	arena, _ := r.o.Store.Region().Bytes()
	at := bytes.Index(arena, content(1))
	if at < 0 {
		t.Fatal("the page is not in memory")
	}
	arena[at+100] ^= 4
	for _, want := range []string{"damaged", "hit"} {
		if v, err := r.Verify(t.Context(), id, [32]byte(key)); err != nil || v.Outcome != want {
			t.Errorf("%+v, %v: want %s", v, err, want)
		}
	}
}

// TestWaitsOfTheSlowestTier: a get counts for the slowest tier that it had a page from.
func TestWaitsOfTheSlowestTier(t *testing.T) {
	r := start(t, nil)
	for _, tier := range []store.Tier{store.Memory, store.Disk, store.Peer, store.Object} {
		c := engines.Completion{Took: time.Millisecond, Bytes: 3}
		for _, from := range []store.Tier{store.Memory, tier} {
			c.Pages = append(c.Pages, connector.PageResult(uint8(store.Hit), uint8(from), false))
		}
		p := connector.Pages{}
		r.Service.ended(r.w, &p, &c)
		gets, bytes, took := r.Waits(tier.String())
		if gets != 1 || bytes != 3 || took != time.Millisecond {
			t.Errorf("%s: %d gets of %d bytes in %v", tier, gets, bytes, took)
		}
	}
}

// TestPinsOfTheDisk: pins of pages that are on the disk only are counted, so that they leave room
// for what others put.
func TestPinsOfTheDisk(t *testing.T) {
	r := start(t, disktest.New(4<<20, 1))
	id := []page.ID{r.pool.Namespace.ID()}
	capacity := r.o.Store.Capacities()[store.Disk]
	pages := 0
	for r.o.Store.Stats().Disk.Bytes < capacity/2 {
		all(t, r.put(upTo(pages, pages+blocks)...), store.Stored)
		pages += blocks
	}
	kept, refused := 0, false
	for i := range pages {
		found, unpin, err := r.Pin(id, hashes(i), time.Minute)
		if err != nil {
			var re *store.RequestError
			refused = refused || errors.As(err, &re) && re.Field == "pin_ms" &&
				strings.Contains(re.Problem, "tier disk")
			continue
		}
		defer unpin()
		kept += found.Count()
	}
	_, bytes := r.Namespaces()
	if bytes < uint64(kept)*pageBytes {
		t.Errorf("%d pages are pinned, and %d bytes are counted", kept, bytes)
	}
	memory := r.o.Store.Capacities()[store.Memory]
	if limit := (capacity + memory) / tenantPinnedShare; bytes > limit || kept == 0 {
		t.Errorf("%d bytes are pinned, want some, and at most %d", bytes, limit)
	}
	if !refused {
		t.Error("no pin is refused because of the disk")
	}
	for i := range 20 {
		all(t, r.put(upTo(10_000+i*blocks, 10_000+(i+1)*blocks)...), store.Stored)
	}
}

// TestPinsOfTenants: one tenant's pins leave some for another one.
func TestPinsOfTenants(t *testing.T) {
	r := start(t, nil)
	ours := r.pool
	id := []page.ID{ours.Namespace.ID()}
	r.put(upTo(0, 16)...)
	_, unpin, err := r.Pin(id, hashes(upTo(0, 16)...), time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	defer unpin()
	r.put(100)
	var re *store.RequestError
	if _, _, err := r.Pin(id, hashes(100), time.Minute); !errors.As(err, &re) ||
		!strings.Contains(re.Problem, "of this tenant") {
		t.Errorf("more than a quarter of the memory: %v", err)
	}
	for i, secret := range []string{"the secret of another", "the secret of a third"} {
		r.pool.ID++
		r.pool.Namespace.Secret = []byte(secret)
		if _, err := r.Open(r.w, r.pool); err != nil {
			t.Fatal(err)
		}
		r.put(upTo(0, 16)...)
		found, unpin, err := r.Pin([]page.ID{r.pool.Namespace.ID()}, hashes(upTo(0, 16)...), time.Minute)
		if i == 0 && (err != nil || found.Leading() != 16) {
			t.Errorf("the other tenant: found %b, %v", found, err)
		}
		if i == 1 && (!errors.As(err, &re) || !strings.Contains(re.Problem, "of all tenants")) {
			t.Errorf("more than half of the memory: %v", err)
		}
		if err == nil {
			defer unpin()
		}
	}
	if _, bytes := r.Namespaces(); bytes != 32*pageBytes {
		t.Errorf("%d bytes are pinned", bytes)
	}
}

func upTo(from, to int) (out []int) {
	for i := from; i < to; i++ {
		out = append(out, i)
	}
	return out
}
