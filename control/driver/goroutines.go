package driver

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/control/lease"
)

// Goroutines is a Process with real time and goroutines.
type Goroutines struct {
	start time.Time
	ctx   context.Context // of fences and lanes: it ends when everything must
	stop  context.CancelFunc
	wg    sync.WaitGroup

	armed atomic.Int64 // the instant of the timer; lease.Never: no timer runs
	mu    sync.Mutex   // protects timer
	timer *time.Timer
}

// NewGoroutines begins a process.
func NewGoroutines() *Goroutines {
	g := &Goroutines{start: time.Now()}
	g.ctx, g.stop = context.WithCancel(context.Background())
	g.armed.Store(int64(lease.Never))
	return g
}

// Now implements Process.
func (g *Goroutines) Now() exec.Instant { return time.Since(g.start) }

// Idle implements Process.
func (g *Goroutines) Idle(next exec.Instant, tick func()) {
	armed := exec.Instant(g.armed.Load())
	if next == armed {
		return
	}
	// A timer that fires too early costs a Tick; one that is moved at each event costs more.
	if armed != lease.Never && next > armed {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.ctx.Err() != nil {
		return
	}
	g.armed.Store(int64(next))
	wait := max(next-g.Now(), 0)
	if g.timer != nil {
		g.timer.Reset(wait)
		return
	}
	g.timer = time.AfterFunc(wait, tick)
}

// Fired implements Process. Until tick has the driver's lock, the timer counts as armed: otherwise
// each event that ends meanwhile would start it again.
func (g *Goroutines) Fired() { g.armed.Store(int64(lease.Never)) }

// Go implements Process.
func (g *Goroutines) Go(work func(ctx context.Context) (event func())) {
	g.wg.Go(func() {
		if event := work(g.ctx); event != nil {
			event()
		}
	})
}

// Run starts a goroutine that Wait joins.
func (g *Goroutines) Run(f func(ctx context.Context)) { g.wg.Go(func() { f(g.ctx) }) }

// Context ends at Stop.
func (g *Goroutines) Context() context.Context { return g.ctx }

// Stop ends the context of everything that runs.
func (g *Goroutines) Stop() { g.stop() }

// Wait joins the goroutines. Stop comes first.
func (g *Goroutines) Wait() {
	g.mu.Lock()
	if g.timer != nil {
		g.timer.Stop()
	}
	g.mu.Unlock()
	g.wg.Wait()
}

// Started is the time at which Now is 0.
func (g *Goroutines) Started() time.Time { return g.start }
