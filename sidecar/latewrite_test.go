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

	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
	"github.com/kvspray/kvspray/transport/faulttest"
	"github.com/kvspray/kvspray/transport/transporttest"
)

// attack holds one lane of the sending sidecar: what that lane is given is in flight for its
// sender, and leaves when the attack lets it go. Other lanes take the chunks over meanwhile, and it
// is they that bring the commit.
//
// The worst moment is when the engine has its blocks back and has written to them. By then most
// senders have received the end, and send nothing; a slow one has not. So from the fence on the
// sending sidecar is frozen: it receives nothing, its source stays open, and what its lanes carry
// leaves whole.
type attack struct {
	plan    *faulttest.Plan
	backend string   // whose lane is held
	source  *running // set before the first run

	mu sync.Mutex // protects what follows
	on bool
	// let go when the transfer lacks this number of chunks, so that copies and the commit meet;
	// notEarly: after the end
	early   uint32
	victim  uint64 // the lane; 0: the first that is given a slice
	frozen  bool   // the source's executor is locked, by us
	caught  int    // slices that were held when they were let go
	arrived int    // slices that the receiver has refused, or taken
	release func() // ends the freeze
}

const notEarly = ^uint32(0)

// spareRuns limits the runs, as a multiple of those that must attack: on a busy machine, a lane
// that was held in the previous run may have no slice yet, and the run does not attack.
const spareRuns = 3

// earliest bounds attack.early: a few slices.
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
	a.on, a.early, a.victim, a.caught, a.arrived = true, early, 0, 0, 0
}

// landed is called before chunks are counted after which a transfer lacks `missing`, with the guard
// of its grant held.
func (a *attack) landed(missing uint32) {
	held := a.plan.Held() // the plan asks holds with its own lock held
	a.mu.Lock()
	a.arrived++
	now := a.on && missing <= a.early && a.early != notEarly
	if now {
		a.caught = max(a.caught, held)
	}
	a.mu.Unlock()
	if now {
		a.plan.Release()
	}
}

// fencing is called when a grant is revoked and about to be fenced, before a message about it can
// reach the source.
func (a *attack) fencing() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.on && a.early == notEarly {
		a.freezeLocked()
	}
}

func (a *attack) freeze() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.freezeLocked()
}

func (a *attack) freezeLocked() {
	if !a.frozen {
		a.frozen = true
		a.release = hold(a.source.Node)
	}
}

func (a *attack) thaw() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.frozen {
		a.frozen = false
		a.release()
	}
}

func (a *attack) refused() {
	a.mu.Lock()
	a.arrived++
	a.mu.Unlock()
}

// strike lets go what is held, once the engine has its blocks back, and waits until it has come to
// the receiver.
func (a *attack) strike(t *testing.T) {
	t.Helper()
	held := a.plan.Held() // the plan asks holds with its own lock held
	a.mu.Lock()
	frozen := a.frozen
	if frozen {
		a.caught, a.arrived = held, 0
	}
	a.mu.Unlock()
	if !frozen {
		return // it was an early attack
	}
	a.plan.Release()
	until(t, func() bool {
		a.mu.Lock()
		defer a.mu.Unlock()
		return a.arrived >= a.caught
	})
}

// end lets the source go on, and waits until nothing of it is in flight any more. It returns how
// many copies attacked.
func (a *attack) end(t *testing.T) int {
	t.Helper()
	a.mu.Lock()
	a.on = false
	a.mu.Unlock()
	a.thaw()
	until(t, func() bool {
		a.plan.Release() // also what was on its way to being held
		flights := 0
		a.source.driver.View(func(ex *exec.Exec, _ exec.Instant) { flights = ex.Load().Flights })
		return flights == 0 && a.plan.Held() == 0
	})
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.caught
}

// watched is a backend of the receiving sidecar that reports to an attack the moments that it waits
// for.
type watched struct {
	transport.Backend
	a *attack
	n *Node
}

func (w watched) Open(ctx context.Context, h transport.Host) ([]transport.Rail, error) {
	return w.Backend.Open(ctx, watchedHost{h, w.a})
}

func (w watched) Grant(g *transport.Grant) ([]byte, error) {
	if w.n.backends[0] == w { // once: several backends serve one grant
		landed := g.Landed
		g.Landed = func(l transport.Lane, r transfer.Range, fresh uint32) {
			w.a.landed(g.Receipt.Chunks() - g.Receipt.Landed())
			landed(l, r, fresh)
		}
	}
	return w.Backend.Grant(g)
}

func (w watched) Fence(ctx context.Context, g *transport.Grant) error {
	w.a.fencing()
	return w.Backend.Fence(ctx, g)
}

type watchedHost struct {
	transport.Host
	a *attack
}

func (h watchedHost) Refused(l transport.Lane, r transfer.Reason) {
	h.Host.Refused(l, r)
	h.a.refused()
}

// attacked starts two sidecars under an attack.
func attacked(t *testing.T, a *attack, order ...string) (p, d *running) {
	t.Helper()
	return attackedWith(t, a, func(*config.Config) {}, order...)
}

// attackedWith is attacked with another configuration.
func attackedWith(t *testing.T, a *attack, more func(*config.Config), order ...string) (p,
	d *running) {
	t.Helper()
	change := func(c *config.Config) {
		c.Transports.Order = order
		more(c)
	}
	p = startConfig(t, testConfig(t, change), func(n *Node) {
		for i, b := range n.backends {
			n.backends[i] = faulttest.Wrap(b, a.plan)
		}
	})
	d = startConfig(t, testConfig(t, change), func(n *Node) {
		for i, b := range n.backends {
			n.backends[i] = watched{b, a, n}
		}
	})
	a.source = p
	t.Cleanup(a.thaw) // or a run that failed would keep the node from stopping
	return p, d
}

// The late-write attack through two whole sidecars: blocks that came back to an engine, after a
// cancel or after success, are never written again, although copies of their chunks are in flight
// at that moment, and arrive.
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
	// off the heap: the race detector would follow each byte
	want, err := mem.NewAnonymous("canary", uint64(len(b)))
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
	rng := newRand(11)
	c := newCanary(t, de)
	copies, attacks, runs := 0, 0, 0
	for i := 0; attacks < attackRuns(t); i++ {
		if runs++; runs > spareRuns*attackRuns(t) {
			t.Fatalf("in only %d of %d runs a copy was in flight when the commit came: nothing was attacked",
				attacks, runs)
		}
		early := notEarly
		if i%4 == 0 {
			early = rng.Uint32N(earliest)
		}
		a.begin(early)
		x := begin(t, p, pe, de, uint64(i), tokens)
		de.ok(x.dst)
		same(t, pe, de, x.pt, x.dt, tokens, 0)
		c.sing()
		a.strike(t)
		n := a.end(t)
		if copies += n; n > 0 {
			attacks++
		}
		c.alive(t, i, "when nothing was in flight any more")
		pe.ok(x.src)
		c.alive(t, i, "when the source's lease was over")
	}
	t.Logf("%d copies in flight at %d commits, of %d", copies, attacks, runs)
}

func lateAfterCancel(t *testing.T, held string, order []string) {
	a := newAttack(held)
	p, d := attacked(t, a, order...)
	pe, de := newEngine(t, p, testShape), newEngine(t, d, testShape)
	pe.random()
	lanesUp(t, p, d, order)
	rng := newRand(11)
	c := newCanary(t, de)
	canceled, copies, attacks := 0, 0, 0
	for i := range attackRuns(t) {
		a.begin(notEarly)
		x := begin(t, p, pe, de, uint64(i), tokens)
		// something is in flight for certain; otherwise at any moment, the first ones too
		if i%2 == 0 {
			until(t, func() bool { return a.plan.Held() > 0 })
		}
		spin(time.Duration(rng.IntN(1500)) * time.Microsecond)
		a.freeze() // the source gets a cancel before the fence
		if err := de.Cancel(x.dst, "attack", false); err != nil {
			t.Fatal(err)
		}
		got := de.wait(x.dst)
		c.sing()
		a.strike(t)
		n := a.end(t)
		copies += n
		if n > 0 {
			attacks++
		}
		c.alive(t, i, "when nothing was in flight any more")
		if got.Status == engines.StatusCancelled {
			canceled++
			// The source gets no message about a cancel that came before the grant left.
			if err := pe.Cancel(x.src, "attack", true); err != nil {
				t.Fatal(err)
			}
		}
		pe.wait(x.src)
		c.alive(t, i, "when the source's lease was over")
	}
	t.Logf("%d of %d canceled in time, %d of them with slices in flight, %d slices", canceled,
		attackRuns(t), attacks, copies)
	if canceled == 0 || attacks < attackRuns(t)/2 {
		t.Errorf("%d of %d runs attacked anything, half of them expected; %d canceled in time", attacks,
			attackRuns(t), canceled)
	}
}

// lanesUp waits until every lane that the attack counts on is there: one is held, another one has
// to carry on.
func lanesUp(t *testing.T, p, d *running, order []string) {
	t.Helper()
	pe, de := newEngine(t, p, testShape), newEngine(t, d, testShape)
	x := begin(t, p, pe, de, 1, tokens) // makes them meet
	de.ok(x.dst)
	pe.ok(x.src)
	want := 0
	for _, tr := range order {
		want += map[string]int{config.TransTCP: p.cfg.Transports.TCP.Connections,
			config.TransSHM: shmLanes}[tr]
	}
	until(t, func() bool {
		return len(p.lanesTo(d.boot)) == want
	})
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

// attackRuns follows the transports' suite: few runs, unless KVSPRAY_ATTACK_RUNS sets more.
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
