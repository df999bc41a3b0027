package railsbench

import (
	"bytes"
	"context"
	crand "crypto/rand"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/connector/connectortest"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/internal/board"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/lab/railsbench/netrig"
	"github.com/kvspray/kvspray/lab/timeline"
)

// Shape of what is moved.
const (
	tokensPerBlock = timeline.BlockUnit
	atSource       = 0 // in Pair.region
	atDest         = 1
	maxChecks      = 64 // transfers whose content waits to be compared
	compareNice    = 10 // of the thread that compares
)

// Pair is an engine at each of two sidecars, with equal caches.
type Pair struct {
	field *Field
	from  netrig.Side
	to    netrig.Side
	id    string // of both engines: a sidecar distinguishes its workers by it
	shape connectortest.Shape
	n     int // blocks of one transfer, in each layer

	region   [2]*mem.Region
	src, dst *connectortest.Worker

	mu    sync.Mutex // protects all below
	rng   *rand.Rand
	waits map[waitKey]chan connectortest.Completion
	err   error

	slots   chan []uint32 // block tables at the destination that are free
	checks  chan *Transfer
	stop    context.CancelFunc
	takers  sync.WaitGroup // of completions, of this connection
	flights sync.WaitGroup // one for each transfer that has not ended
	wg      sync.WaitGroup
}

type waitKey struct {
	source bool
	lease  uint64
}

// Transfer is one of a pair, from the moment at which both engines have spoken.
type Transfer struct {
	Began, Ended time.Time
	Bytes        uint64
	Recompute    int    // tokens that are named as not come, where it failed
	Transport    string // that moved most of it
	// Err is why it failed or what differs; where it failed and named what did not come, also what
	// differs of the rest.
	Err error

	pair     *Pair
	from, to []uint32
	missing  [][2]uint32   // tokens [start, end), as its engine received them
	done     chan struct{} // closed when the content was compared
	landed   chan struct{} // closed at Ended
}

// Engines adds a pair of engines whose transfers have `total` bytes in blocks of `block`, rounded
// down to whole blocks, with room for a number at a time.
func (f *Field) Engines(ctx context.Context, block int, total int64, slots int) (*Pair, error) {
	return f.EnginesAt(ctx, netrig.Sender, netrig.Receiver, block, total, slots)
}

// EnginesAt is Engines for a sender and a receiver of the rig, or the other way round.
func (f *Field) EnginesAt(ctx context.Context, from, to netrig.Side, block int, total int64,
	slots int) (_ *Pair, err error) {
	pages := int(total / int64(block))
	layers := 1
	for layers < timeline.MaxLayers && pages%(2*layers) == 0 {
		layers *= 2
	}
	n := pages / layers
	p := &Pair{field: f, from: from, to: to, id: fmt.Sprintf("e%d", f.made), n: n,
		shape: connectortest.Shape{Layers: layers, NumBlocks: uint32(n * slots),
			TokensPerBlock: tokensPerBlock,
			TokenBytes:     uint64(block / tokensPerBlock)}, slots: make(chan []uint32, slots),
		checks: make(chan *Transfer, maxChecks),
		waits:  map[waitKey]chan connectortest.Completion{}}
	var seed [32]byte
	_, _ = crand.Read(seed[:]) // never fails
	random := rand.NewChaCha8(seed)
	p.rng = rand.New(random)
	defer func() {
		if err != nil {
			p.close()
		}
	}()
	for i := range p.region {
		if p.region[i], err = p.shape.Region(); err != nil {
			return nil, err
		}
	}
	b, _ := p.region[atSource].Bytes()
	_, _ = random.Read(b) // never fails
	b, _ = p.region[atDest].Bytes()
	for i := 0; i < len(b); i += 4096 {
		b[i] = 1 // resident, as an engine's cache is
	}
	perm := p.rng.Perm(n * slots)
	for i := range slots {
		t := make([]uint32, n)
		for k := range t {
			t[k] = uint32(perm[i*n+k])
		}
		p.slots <- t
	}
	if err := p.connect(ctx); err != nil {
		return nil, err
	}
	p.wg.Add(1)
	go p.compare()
	f.pairs = append(f.pairs, p)
	f.made++
	return p, nil
}

// connect registers both engines with the sidecars of now.
func (p *Pair) connect(ctx context.Context) (err error) {
	p.disconnect()
	dial := func(side netrig.Side, region *mem.Region) (*connectortest.Worker, error) {
		return connectortest.DialWorker(ctx, connectortest.Config{Socket: p.field.nodes[side].socket,
			Layout:  p.shape.Layout(),
			Regions: []*mem.Region{region}, Engine: msg.Engine{Name: "bench", Version: "1", ID: p.id}})
	}
	if p.src, err = dial(p.from, p.region[atSource]); err != nil {
		return fmt.Errorf("engine at the sending sidecar: %w\n%s", err, p.field.Logs())
	}
	if p.dst, err = dial(p.to, p.region[atDest]); err != nil {
		return fmt.Errorf("engine at the receiving sidecar: %w\n%s", err, p.field.Logs())
	}
	ctx, p.stop = context.WithCancel(context.Background())
	p.mu.Lock()
	p.err = nil
	p.mu.Unlock()
	p.takers.Add(2)
	go p.take(ctx, true, p.src)
	go p.take(ctx, false, p.dst)
	return nil
}

func (p *Pair) disconnect() {
	if p.stop != nil {
		p.stop()
		p.takers.Wait()
		p.stop = nil
	}
	for _, w := range []*connectortest.Worker{p.src, p.dst} {
		if w != nil {
			_ = w.Close()
		}
	}
	p.src, p.dst = nil, nil
}

// take hands completions to those who wait for them.
func (p *Pair) take(ctx context.Context, source bool, w *connectortest.Worker) {
	defer p.takers.Done()
	for {
		c, err := w.Wait(ctx)
		if err != nil {
			p.mu.Lock()
			if p.err = err; ctx.Err() != nil {
				p.err = errClosed
			}
			for k, ch := range p.waits {
				close(ch)
				delete(p.waits, k)
			}
			p.mu.Unlock()
			return
		}
		p.mu.Lock()
		k := waitKey{source, c.Lease}
		if ch := p.waits[k]; ch != nil {
			ch <- c
			delete(p.waits, k)
		}
		p.mu.Unlock()
	}
}

func (p *Pair) await(source bool, lease uint64) chan connectortest.Completion {
	ch := make(chan connectortest.Completion, 1)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err != nil {
		close(ch)
	} else {
		p.waits[waitKey{source, lease}] = ch
	}
	return ch
}

// expectNothing expects a prompt that is never sent.
func (p *Pair) expectNothing() (uint64, error) {
	t := <-p.slots
	p.slots <- t // nothing will be written
	var x [16]byte
	var h [32]byte
	_, _ = crand.Read(x[:])
	_, _ = crand.Read(h[:])
	return p.dst.Expect(msg.Expect{Xfer: x, Hash: h, Tokens: uint32(p.n) * tokensPerBlock,
		Peer: p.field.nodes[p.from].peer, Skip: []uint32{0},
		Blocks: [][]uint32{t}, MatchTimeoutMS: uint64(meetPatience.Milliseconds())})
}

// Order is how a transfer is wanted.
type Order struct {
	Priority uint32        // msg.PrioDecodeWaits is 0
	Deadline time.Duration // 0: the sidecar's default
}

// Begin starts a transfer of the pair's size from random blocks, once a slot is free.
func (p *Pair) Begin(ctx context.Context, o Order) (*Transfer, error) {
	t := &Transfer{pair: p, done: make(chan struct{}), landed: make(chan struct{}),
		Bytes: uint64(p.shape.Layers) * uint64(p.n) * p.shape.PageBytes()}
	select {
	case t.to = <-p.slots:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	p.mu.Lock()
	p.rng.Shuffle(p.n, func(i, j int) { t.to[i], t.to[j] = t.to[j], t.to[i] })
	for _, b := range p.rng.Perm(int(p.shape.NumBlocks))[:p.n] {
		t.from = append(t.from, uint32(b))
	}
	var x [16]byte
	var h [32]byte
	_, _ = crand.Read(x[:])
	_, _ = crand.Read(h[:])
	p.mu.Unlock()
	tokens := uint32(p.n) * tokensPerBlock
	lease, given := p.dst.NewLease(), p.src.NewLease()
	received, sent := p.await(false, lease), p.await(true, given)
	t.Began = time.Now()
	if err := p.src.IntentAs(given, msg.Intent{Xfer: x, Hash: h, Tokens: tokens, Fanout: 1,
		Blocks: [][]uint32{t.from}, Ready: tokens, Priority: o.Priority,
		DeadlineMS: uint64(o.Deadline.Milliseconds())}); err != nil {
		return nil, fmt.Errorf("intent: %w", err)
	}
	m := msg.Expect{Xfer: x, Hash: h, Tokens: tokens, Peer: p.field.nodes[p.from].peer,
		Skip: []uint32{0}, Blocks: [][]uint32{t.to},
		Priority: o.Priority, DeadlineMS: uint64(o.Deadline.Milliseconds())}
	if err := p.dst.Push(board.RecExpect, lease, m.Append(nil), false); err != nil {
		return nil, fmt.Errorf("expect: %w", err)
	}
	p.flights.Add(1)
	go func() {
		defer p.flights.Done()
		c, ok := <-received
		t.Ended = time.Now()
		if ok {
			t.Transport = c.Received.Transport
		}
		switch {
		case !ok:
			t.Err = p.broken()
		case c.Status != 0:
			t.Err = fmt.Errorf("status %d: %s", c.Status, c.Received.Reason)
			t.missing = c.Received.Recompute
			for _, r := range t.missing {
				t.Recompute += int(r[1] - r[0])
			}
		}
		close(t.landed)
		// Blocks at the source are free only when its engine has its completion, too.
		if s, ok := <-sent; t.Err == nil && (!ok || s.Status != 0) {
			t.Err = fmt.Errorf("the receiver committed, and the sender has status %d: %+v",
				s.Status, s.Sent)
		}
		p.checks <- t
	}()
	return t, nil
}

func (p *Pair) broken() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return fmt.Errorf("completions end: %w", p.err)
}

// Landed waits until the receiving engine has its completion.
func (t *Transfer) Landed() *Transfer {
	<-t.landed
	return t
}

// Wait waits until the content was compared, too.
func (t *Transfer) Wait() *Transfer {
	<-t.done
	return t
}

// Tokens is the length of the prompt that it carries.
func (t *Transfer) Tokens() int { return len(t.to) * tokensPerBlock }

// Done is closed when Landed would return.
func (t *Transfer) Done() <-chan struct{} { return t.landed }

// compare looks at what came, on a thread that gets only idle time.
func (p *Pair) compare() {
	defer p.wg.Done()
	runtime.LockOSThread() // for good: the thread's priority ends with it
	_ = unix.Setpriority(unix.PRIO_PROCESS, 0, compareNice)
	for t := range p.checks {
		if t.Err == nil || len(t.missing) > 0 { // no range at all proves nothing of what came
			t.Err = errors.Join(t.Err, p.same(t))
		}
		p.slots <- t.to
		close(t.done)
	}
}

// same compares what is not named as missing.
func (p *Pair) same(t *Transfer) error {
	named := make([]bool, len(t.to))
	for _, r := range t.missing {
		for k := r[0] / tokensPerBlock; k < min((r[1]+tokensPerBlock-1)/tokensPerBlock,
			uint32(len(named))); k++ {
			named[k] = true
		}
	}
	for l := range p.shape.Layers {
		for k := range t.to {
			if !named[k] && !bytes.Equal(p.shape.Page(p.region[atSource], l, t.from[k]),
				p.shape.Page(p.region[atDest], l, t.to[k])) {
				return fmt.Errorf("content differs: layer %d, block %d of the transfer", l, k)
			}
		}
	}
	return nil
}

// Scribble writes over the blocks of the receiver that a landed transfer used, as an engine that
// gives them to another prompt, and returns a function that reports whether a write came since.
func (t *Transfer) Scribble(mark byte) (intact func() bool) {
	p := t.pair
	each := func(f func(page []byte) bool) bool {
		for l := range p.shape.Layers {
			for _, b := range t.to {
				if !f(p.shape.Page(p.region[atDest], l, b)) {
					return false
				}
			}
		}
		return true
	}
	want := bytes.Repeat([]byte{mark}, int(p.shape.PageBytes()))
	each(func(page []byte) bool { copy(page, want); return true })
	return func() bool { return each(func(page []byte) bool { return bytes.Equal(page, want) }) }
}

func (p *Pair) close() {
	p.disconnect()
	p.flights.Wait()
	close(p.checks)
	p.wg.Wait()
	for _, r := range p.region {
		if r != nil {
			r.Release()
		}
	}
}
