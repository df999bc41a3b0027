package sidecar

import (
	"bytes"
	"context"
	"os"
	"runtime"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/mem"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
	"github.com/kvspray/kvspray/transport/faulttest"
	"github.com/kvspray/kvspray/transport/transporttest"
)

// attack holds one lane of the sending sidecar: what that lane is given is in flight for its sender and leaves when the attack
// lets it go, at the worst moments there are. Other lanes take the chunks over meanwhile, and it is they that bring the commit.
type attack struct {
	plan    *faulttest.Plan
	backend string // whose lane is held

	mu     sync.Mutex // protects what follows
	on     bool
	early  uint32 // let go when the transfer lacks so many chunks, so that copies and the commit meet; byFence: not before the fence
	victim uint64 // the lane; 0: the first that is given a slice
	caught int    // slices that were held when they were let go
}

const byFence = ^uint32(0)

// earliest bounds attack.early: one slice of tcp has as many chunks.
const earliest = 16

func newAttack(backend string) *attack {
	a := &attack{backend: backend}
	a.plan = faulttest.New(1, faulttest.Rule{Kind: faulttest.Hold, Only: a.holds})
	return a
}

func (a *attack) holds(l transport.Lane, s transport.Slice) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.on || l.Backend() != a.backend || s.Attempt == 0 {
		return false
	}
	if a.victim == 0 {
		a.victim = l.ID()
	}
	return a.victim == l.ID()
}

func (a *attack) begin(early uint32) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.on, a.early, a.victim, a.caught = true, early, 0, 0
}

// end lets everything go, and waits until the source has nothing in flight any more. It returns how many copies attacked.
func (a *attack) end(t *testing.T, source *running) int {
	t.Helper()
	a.mu.Lock()
	a.on = false
	a.mu.Unlock()
	until(t, func() bool {
		a.plan.Release() // also what was on its way to being held
		source.enter()
		load := source.d.ex.Load()
		source.leave()
		return load.Flights == 0 && a.plan.Held() == 0
	})
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.caught
}

// landed is called before chunks are counted after which a transfer lacks `missing`, with the guard of its grant held.
func (a *attack) landed(missing uint32) {
	a.mu.Lock()
	now := a.on && a.early != byFence && missing <= a.early
	if now {
		a.caught = max(a.caught, a.plan.Held())
	}
	a.mu.Unlock()
	if now {
		a.plan.Release()
	}
}

// fencing is called when a grant is revoked and about to be fenced.
func (a *attack) fencing() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.caught = max(a.caught, a.plan.Held())
}

// watched is a backend of the receiving sidecar that tells an attack of the moments it waits for.
type watched struct {
	transport.Backend
	a *attack
	n *Node
}

func (w watched) Grant(g *transport.Grant) ([]byte, error) {
	if _, done := g.Sink.(*watchedSink); !done { // several backends serve one grant
		w.n.d.bindMu.Lock() // under which lanes look it up
		g.Sink = &watchedSink{Sink: g.Sink, a: w.a, bitmap: transfer.NewBitmap(g.Sink.(*sink).bitmap.Len())}
		w.n.d.bindMu.Unlock()
	}
	return w.Backend.Grant(g)
}

func (w watched) Fence(ctx context.Context, g *transport.Grant) error {
	w.a.fencing()
	return w.Backend.Fence(ctx, g)
}

type watchedSink struct {
	transport.Sink
	a      *attack
	bitmap *transfer.Bitmap
}

func (s *watchedSink) Landed(l transport.Lane, r transfer.Range) {
	s.bitmap.Set(r)
	s.a.landed(s.bitmap.Len() - s.bitmap.Count())
	s.Sink.Landed(l, r)
}

func (s *watchedSink) Device() mem.Device { return transport.DeviceOf(s.Sink) }

// attacked starts two sidecars under an attack.
func attacked(t *testing.T, a *attack, order ...string) (p, d *running) {
	t.Helper()
	change := func(c *config.Config) { c.Transports.Order = order }
	p = startConfig(t, testConfig(t, change), func(n *Node) {
		for i, b := range n.backends {
			n.backends[i] = faulttest.Wrap(b, a.plan)
		}
	})
	d = startConfig(t, testConfig(t, change), func(n *Node) {
		for i, b := range n.backends {
			n.backends[i] = watched{faulttest.Wrap(b, a.plan), a, n}
		}
	})
	return p, d
}

// The late-write attack through two whole sidecars: blocks that came back to an engine, after a cancel or after success, are
// never written again, although copies of their chunks are in flight at that moment, and arrive.
func TestLateWrites(t *testing.T) {
	for _, tr := range []struct {
		held  string
		order []string
	}{
		{"tcp", []string{"tcp"}},        // two connections; the other one carries on
		{"shm", []string{"shm", "tcp"}}, // one lane; tcp carries on
	} {
		t.Run(tr.held+"/after cancel", func(t *testing.T) { lateAfterCancel(t, tr.held, tr.order) })
		t.Run(tr.held+"/after success", func(t *testing.T) { lateAfterSuccess(t, tr.held, tr.order) })
	}
}

// canary is what an engine writes to blocks that are its own again.
type canary struct {
	region, want []byte
}

func newCanary(t *testing.T, e *engine) *canary {
	b := must(e.region.Bytes())
	want, err := mem.NewAnonymous("canary", uint64(len(b))) // off the heap: the race detector would follow each byte
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(want.Release)
	w := must(want.Bytes())
	mem.Fill(w, 0xa5)
	return &canary{b, w}
}

func (c *canary) sing() { copy(c.region, c.want) }

func (c *canary) alive(t *testing.T, run int, when string) {
	t.Helper()
	if !bytes.Equal(c.region, c.want) {
		t.Fatalf("run %d: blocks were written after their completion, found %s", run, when)
	}
}

func lateAfterSuccess(t *testing.T, held string, order []string) {
	a := newAttack(held)
	p, d := attacked(t, a, order...)
	pe, de := newEngine(t, p, testShape), newEngine(t, d, testShape)
	pe.random()
	lanesUp(t, p, d, order)
	c := newCanary(t, de)
	rng := newRand(11)
	copies := 0
	for i := range attackRuns(t) {
		early := byFence
		if i%2 == 0 {
			early = rng.Uint32N(earliest)
		}
		a.begin(early)
		x := begin(t, p, pe, de, uint64(i), tokens)
		de.ok(x.dst)
		same(t, pe, de, x.pt, x.dt, tokens, 0)
		c.sing()
		n := a.end(t, p)
		if n == 0 {
			t.Fatalf("run %d: no copy was held when the commit came: nothing was attacked", i)
		}
		copies += n
		c.alive(t, i, "when nothing was in flight any more")
		pe.ok(x.src)
		c.alive(t, i, "when the source's lease was over")
	}
	t.Logf("%d copies in flight at %d commits", copies, attackRuns(t))
	arrived(t, d, held)
}

func lateAfterCancel(t *testing.T, held string, order []string) {
	a := newAttack(held)
	p, d := attacked(t, a, order...)
	pe, de := newEngine(t, p, testShape), newEngine(t, d, testShape)
	pe.random()
	lanesUp(t, p, d, order)
	rng := newRand(11)
	c := newCanary(t, de)
	cancelled, copies := 0, 0
	for i := range attackRuns(t) {
		a.begin(byFence)
		x := begin(t, p, pe, de, uint64(i), tokens)
		spin(time.Duration(rng.IntN(1500)) * time.Microsecond)
		if err := de.Cancel(x.dst, "attack", false); err != nil {
			t.Fatal(err)
		}
		if got := de.wait(x.dst); got.Status == exec.StatusCancelled {
			cancelled++
			// A cancel that came before the grant left is nothing that the source can know of.
			if err := pe.Cancel(x.src, "attack", true); err != nil {
				t.Fatal(err)
			}
		}
		c.sing()
		copies += a.end(t, p)
		c.alive(t, i, "when nothing was in flight any more")
		pe.wait(x.src)
		c.alive(t, i, "when the source's lease was over")
	}
	t.Logf("%d of %d cancelled in time, with %d slices in flight", cancelled, attackRuns(t), copies)
	if cancelled == 0 || copies == 0 {
		t.Errorf("%d cancels came in time, with %d slices in flight: nothing was attacked", cancelled, copies)
	}
}

// lanesUp waits until every lane that the attack counts on is there: one is held, another one has to carry on.
func lanesUp(t *testing.T, p, d *running, order []string) {
	t.Helper()
	pe, de := newEngine(t, p, testShape), newEngine(t, d, testShape)
	x := begin(t, p, pe, de, 1, tokens) // makes them meet
	de.ok(x.dst)
	pe.ok(x.src)
	want := 0
	for _, tr := range order {
		want += map[string]int{config.TransTCP: p.cfg.Transports.TCP.Connections, config.TransSHM: shmLanes}[tr]
	}
	until(t, func() bool {
		p.d.bindMu.RLock()
		defer p.d.bindMu.RUnlock()
		n := 0
		for _, e := range p.d.lanes {
			if e.lane.Peer() == d.boot {
				n++
			}
		}
		return n == want
	})
}

// arrived fails the test unless late slices reached the receiver and were refused there: those that never left attack nothing.
func arrived(t *testing.T, d *running, backend string) {
	t.Helper()
	_, body := get(t, d, "/metrics")
	n := 0.0
	for l := range bytes.Lines([]byte(body)) {
		if bytes.HasPrefix(l, []byte("kvspray_lane_refused_frames_total{")) && bytes.Contains(l, []byte(`transport="`+backend+`"`)) {
			t.Logf("%s", bytes.TrimSpace(l))
			v, err := strconv.ParseFloat(string(bytes.TrimSpace(l[bytes.LastIndexByte(l, ' '):])), 64)
			if err != nil {
				t.Fatal(err)
			}
			n += v
		}
	}
	if n == 0 {
		t.Error("no late slice came to the receiver")
	}
}

func must(b []byte, ok bool) []byte {
	if !ok {
		panic("region is not mapped")
	}
	return b
}

// spin waits for a time that a timer cannot measure.
func spin(d time.Duration) {
	for end := time.Now().Add(d); time.Now().Before(end); runtime.Gosched() {
	}
}

// attackRuns follows the transports' suite: few runs, unless KVSPRAY_ATTACK_RUNS says more.
func attackRuns(t testing.TB) int {
	t.Helper()
	v := os.Getenv(transporttest.AttackRunsEnv)
	if v == "" {
		return 20
	}
	n, err := strconv.Atoi(v)
	if err != nil || n < 1 {
		t.Fatalf("%s=%q: want a number from 1", transporttest.AttackRunsEnv, v)
	}
	return n
}
