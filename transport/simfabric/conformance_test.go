package simfabric

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/leaktest"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
	"github.com/kvspray/kvspray/transport/transporttest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// paced lets a fabric run by itself for tests with wall clocks and goroutines: one
// goroutine steps it, under a lock that every call takes.
type paced struct {
	mu   sync.Mutex
	f    *Fabric
	stop chan struct{}
	done chan struct{}
	kick chan struct{}
	n    int
}

func newPaced(tb testing.TB, cfg Config) *paced {
	p := &paced{f: New(cfg), stop: make(chan struct{}), done: make(chan struct{}),
		kick: make(chan struct{}, 1)}
	go func() {
		defer close(p.done)
		for {
			p.mu.Lock()
			busy := p.f.Step()
			p.mu.Unlock()
			select {
			case <-p.stop:
				return
			default:
			}
			if !busy {
				select {
				case <-p.stop:
					return
				case <-p.kick:
				}
			}
		}
	}()
	tb.Cleanup(func() {
		close(p.stop)
		<-p.done
	})
	return p
}

func (p *paced) do(fn func()) {
	p.mu.Lock()
	fn()
	p.mu.Unlock()
	select {
	case p.kick <- struct{}{}:
	default:
	}
}

func (p *paced) backend(link LinkSpec) transport.Backend {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.n++
	h := p.f.NewHost(string(rune('a'+p.n)), RailSpec{Name: "r0", Link: link}, RailSpec{Name: "r1",
		Link: link})
	return &pacedBackend{p, h.Backend()}
}

type pacedBackend struct {
	p *paced
	b *Backend
}

func (b *pacedBackend) Name() string         { return b.b.Name() }
func (b *pacedBackend) Caps() transport.Caps { return b.b.Caps() }

func (b *pacedBackend) Open(ctx context.Context, h transport.Host) (r []transport.Rail, err error) {
	b.p.do(func() { r, err = b.b.Open(ctx, pacedHost{h, b.p}) })
	return r, err
}

func (b *pacedBackend) Dial(ctx context.Context, peer transport.Peer, local,
	remote transport.Rail) (l transport.Lane, err error) {
	b.p.do(func() { l, err = b.b.Dial(ctx, peer, local, remote) })
	if err != nil {
		return nil, err
	}
	return pacedLane{l, b.p}, nil
}

func (b *pacedBackend) Grant(g *transport.Grant) ([]byte, error) { return b.b.Grant(g) }

// Fence waits for the guard without the fabric, whose events are what empties it; what a NIC may
// still write is the fabric's.
func (b *pacedBackend) Fence(ctx context.Context, g *transport.Grant) error {
	err := idle(ctx, &g.Guard)
	if err == nil {
		b.p.do(func() { err = b.b.Fence(ctx, g) })
	}
	return err
}

// CloseOrigin waits for a guard, which needs no lock.
func (b *pacedBackend) CloseOrigin(ctx context.Context, o *transport.Origin) error {
	return b.b.CloseOrigin(ctx, o)
}

func (b *pacedBackend) Close() (err error) {
	b.p.do(func() { err = b.b.Close() })
	return err
}

type pacedLane struct {
	transport.Lane
	p *paced
}

func (l pacedLane) Move(batch []transport.Slice) (err error) {
	l.p.do(func() { err = l.Lane.Move(batch) })
	return err
}

func (l pacedLane) Close() (err error) {
	l.p.do(func() { err = l.Lane.Close() })
	return err
}

func (l pacedLane) Acked() (n uint64) {
	l.p.do(func() { n = l.Lane.(*end).Acked() })
	return n
}

type pacedHost struct {
	transport.Host
	p *paced
}

func (h pacedHost) LaneUp(l transport.Lane)              { h.Host.LaneUp(pacedLane{l, h.p}) }
func (h pacedHost) LaneDown(l transport.Lane, err error) { h.Host.LaneDown(pacedLane{l, h.p}, err) }
func (h pacedHost) Done(l transport.Lane, r []transport.Result) {
	h.Host.Done(pacedLane{l, h.p}, r)
}

// TestConformance runs the suite that every transport passes, over a network that is good, and one
// that is not: a buffer that overflows, loss, jitter that reorders.
func TestConformance(t *testing.T) {
	for _, c := range []struct {
		name string
		cfg  Config
		link LinkSpec
	}{
		{"good", Config{Seed: 1}, LinkSpec{BitsPerSecond: 10e9, Latency: 10 * time.Microsecond}},
		{"bad", Config{Seed: 2}, LinkSpec{BitsPerSecond: 1e9, Latency: 100 * time.Microsecond,
			Jitter: 2 * time.Millisecond, Loss: 0.002,
			Buffer: transfer.ChunkBytes}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var mu sync.Mutex
			nets := map[string]*paced{} // one for both ends of a test
			transporttest.Conformance(t, func(tb testing.TB) transport.Backend {
				mu.Lock()
				defer mu.Unlock()
				p := nets[tb.Name()]
				if p == nil {
					p = newPaced(tb, c.cfg)
					nets[tb.Name()] = p
				}
				return p.backend(c.link)
			})
			var s Stats
			for _, p := range nets {
				s.Again += p.f.stats.Again
				s.Lost += p.f.stats.Lost
				s.Overflows += p.f.stats.Overflows
				s.Sent += p.f.stats.Sent
			}
			t.Logf("%d chunks sent, %d again, %d lost a packet, %d overflows", s.Sent, s.Again, s.Lost,
				s.Overflows)
			if bad := c.link.Loss > 0; bad && (s.Again == 0 || s.Lost == 0 || s.Overflows == 0) {
				t.Error("the bad network was not bad")
			}
		})
	}
}
