package gdr

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/kvspray/kvspray/internal/sys/verbs"
	"github.com/kvspray/kvspray/internal/sys/verbs/fake"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
	"github.com/kvspray/kvspray/transport/transporttest"
)

// What counts as landed must be in memory, in whatever order hardware does what it may do in any.
// The fabric's seed draws one; that these runs would find a gdr that relies on too much is shown
// with three that do.

// landsIn moves what two slots hold over three lanes at once in the order of a seed, each slice
// twice and some of them over each other, and counts the chunks that were not there when they
// counted as landed. change may put something between gdr and its devices.
func landsIn(t *testing.T, seed uint64, change func(*fake.Fabric) func(verbs.Device) verbs.Device) (
	wrong, landed int) {
	f, _ := rigWith(t, seed)
	wrap := func(d verbs.Device) verbs.Device { return d }
	if change != nil {
		wrap = change(f)
	}
	p := transporttest.NewPair(t, func(testing.TB) transport.Backend {
		c := config(f)
		rails, _ := c.Rails()
		inner := rails[0].Open
		rails[0].Open = func() (verbs.Device, error) {
			d, err := inner()
			if err != nil {
				return nil, err
			}
			return wrap(d), nil
		}
		return New(c)
	})
	var lanes []transport.Lane
	for range 3 {
		l, _ := p.Dial()
		lanes = append(lanes, l)
	}
	small := transporttest.Shape{Chunks: 12, BlockBytes: 512, Shuffle: true, TailBytes: 1000}
	small.BlockBytes <<= seed % 5
	var amiss atomic.Int64 // chunks that count as landed and are not there
	var all sync.WaitGroup
	var binds []*transporttest.Bind
	for slot := range transfer.Slot(2) {
		src, dst := transporttest.NewMemory(t, small), transporttest.NewMemory(t, small)
		content := 2*seed + uint64(slot) + 1
		src.Write(content)
		b := transporttest.NewBind(t, p.A, p.B, src, dst, slot, 1)
		b.Grant.Landed = func(l transport.Lane, r transfer.Range, fresh uint32) {
			f.Still(func() { // look at the memory while nothing moves
				for c := r.First; c < r.End(); c++ {
					if _, ok := b.Dest.Holds(content, int(c)); !ok {
						amiss.Add(1)
					}
				}
			})
			b.Dest.Landed(l, r, fresh)
		}
		binds = append(binds, b)
		for i := range uint32(6) {
			r := transfer.Range{First: i * 2, Count: min(3, src.Chunks()-i*2)}
			for attempt := range uint32(2) {
				all.Go(func() { p.A.MoveWait(lanes[(i+attempt)%3], b.Origin, r, 1+attempt) })
			}
		}
	}
	all.Wait()
	for _, b := range binds {
		landed += b.Dest.Count()
		b.End(t)
	}
	return int(amiss.Load()), landed
}

// TestAnyOrder: 100 orders, new ones each time; KVSPRAY_ATTACK_RUNS makes it more.
func TestAnyOrder(t *testing.T) {
	for range 10 * runsOf(t, 10) {
		seed := rand.Uint64() >> 8
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			if wrong, landed := landsIn(t, seed, nil); wrong > 0 || landed != 24 {
				t.Errorf("%d of 24 chunks landed, %d of them without their bytes", landed, wrong)
			}
		})
	}
}

// TestOrderMutants: what counts a slice as landed on anything less than an immediate behind its
// writes on their own queue pair is found.
func TestOrderMutants(t *testing.T) {
	for name, change := range map[string]func(*fake.Fabric) func(verbs.Device) verbs.Device{
		"the sender's completion is the evidence": func(*fake.Fabric) func(verbs.Device) verbs.Device {
			return newMutants(false).device
		},
		"an immediate on another queue pair": func(*fake.Fabric) func(verbs.Device) verbs.Device {
			return newMutants(true).device
		},
		"a device that keeps no order": func(f *fake.Fabric) func(verbs.Device) verbs.Device {
			f.Unordered("fake0")
			return func(d verbs.Device) verbs.Device { return d }
		},
	} {
		t.Run(name, func(t *testing.T) {
			const orders = 100
			for seed := range uint64(orders) {
				wrong := 0
				t.Run(fmt.Sprint(seed), func(t *testing.T) { wrong, _ = landsIn(t, seed, change) })
				if wrong > 0 {
					t.Logf("found in order %d", seed)
					return
				}
			}
			t.Errorf("not found in %d orders", orders)
		})
	}
}

// mutants are devices under which gdr's verdicts, the immediates, go another way: past the NIC as
// soon as they are posted, which gdr does when the slice's writes are complete to the sender, or,
// with twins, over a second queue pair beside each. In their place an empty write without an
// immediate brings the sender its completion.
type mutants struct {
	twins bool

	mu  sync.Mutex
	qps map[uint32]*mutantQP // guarded by mu
}

func newMutants(twins bool) *mutants { return &mutants{twins: twins, qps: map[uint32]*mutantQP{}} }

func (m *mutants) device(d verbs.Device) verbs.Device { return &mutantDevice{d, m} }

func (m *mutants) at(num uint32) *mutantQP {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.qps[num]
}

type mutantDevice struct {
	verbs.Device
	m *mutants
}

func (d *mutantDevice) NewDomain() (verbs.Domain, error) {
	p, err := d.Device.NewDomain()
	return &mutantDomain{p, d.m}, err
}

// mutantCQ has completions beside those of the device.
type mutantCQ struct {
	verbs.CompletionQueue
	ready  chan struct{}
	closed chan struct{}
	once   sync.Once
	wg     sync.WaitGroup

	mu    sync.Mutex
	extra []verbs.Completion // guarded by mu
}

func (d *mutantDevice) NewCompletionQueue(depth int) (verbs.CompletionQueue, error) {
	inner, err := d.Device.NewCompletionQueue(depth)
	if err != nil {
		return nil, err
	}
	q := &mutantCQ{CompletionQueue: inner, ready: make(chan struct{}, 1), closed: make(chan struct{})}
	q.wg.Go(func() {
		for {
			select {
			case <-inner.Ready():
				q.signal()
			case <-q.closed:
				return
			}
		}
	})
	return q, nil
}

func (q *mutantCQ) signal() {
	select {
	case q.ready <- struct{}{}:
	default:
	}
}

func (q *mutantCQ) add(c verbs.Completion) {
	q.mu.Lock()
	q.extra = append(q.extra, c)
	q.mu.Unlock()
	q.signal()
}

func (q *mutantCQ) Ready() <-chan struct{} { return q.ready }

func (q *mutantCQ) Poll(dst []verbs.Completion) (int, error) {
	q.mu.Lock()
	n := copy(dst, q.extra)
	q.extra = q.extra[n:]
	q.mu.Unlock()
	more, err := q.CompletionQueue.Poll(dst[n:])
	return n + more, err
}

func (q *mutantCQ) Close() error {
	q.once.Do(func() { close(q.closed) })
	q.wg.Wait()
	return q.CompletionQueue.Close()
}

type mutantDomain struct {
	verbs.Domain
	m *mutants
}

type mutantQP struct {
	verbs.QueuePair
	m     *mutants
	cq    *mutantCQ
	twin  verbs.QueuePair // nil: none
	other uint32          // at the other end

	mu sync.Mutex
	// of receives: the first are gdr's stock, the second replaces that of the proof; guarded by mu
	posts int
}

func (p *mutantDomain) NewQueuePair(cq verbs.CompletionQueue, sends, receives int) (verbs.QueuePair,
	error) {
	c := cq.(*mutantCQ)
	inner, err := p.Domain.NewQueuePair(c.CompletionQueue, sends, receives)
	if err != nil {
		return nil, err
	}
	q := &mutantQP{QueuePair: inner, m: p.m, cq: c}
	if p.m.twins {
		if q.twin, err = p.Domain.NewQueuePair(c.CompletionQueue, sends, receives); err != nil {
			return nil, errors.Join(err, inner.Close())
		}
	}
	p.m.mu.Lock()
	defer p.m.mu.Unlock()
	p.m.qps[q.Num()] = q
	return q, nil
}

func (q *mutantQP) ToReadyToReceive(a verbs.Address) error {
	q.other = a.QP
	err := q.QueuePair.ToReadyToReceive(a)
	if q.twin == nil || err != nil {
		return err
	}
	var stock [receives]uint64
	for i := range stock {
		stock[i] = receiveMark
	}
	return errors.Join(q.twin.ToInit(), q.twin.ToReadyToReceive(q.m.at(a.QP).twin.Address()),
		q.twin.PostReceive(stock[:]), q.twin.ToReadyToSend())
}

func (q *mutantQP) PostSend(batch []verbs.Work) (int, error) {
	for i := range batch {
		w := batch[i]
		if w.Op != verbs.WriteImm || w.Imm == proof {
			continue
		}
		batch[i] = verbs.Work{ID: w.ID, Op: verbs.Write, Signaled: true}
		if q.twin == nil {
			q.m.at(q.other).cq.add(verbs.Completion{ID: receiveMark, Op: verbs.Receive, Imm: w.Imm})
			continue
		}
		w.Signaled = false
		if _, err := q.twin.PostSend([]verbs.Work{w}); err != nil {
			return 0, err
		}
	}
	return q.QueuePair.PostSend(batch)
}

func (q *mutantQP) PostReceive(ids []uint64) error {
	q.mu.Lock()
	q.posts++
	stock := q.posts <= 2
	q.mu.Unlock()
	switch {
	case stock:
		return q.QueuePair.PostReceive(ids)
	case q.twin != nil:
		return q.twin.PostReceive(ids)
	}
	return nil // nothing was taken out
}

func (q *mutantQP) Close() error {
	if q.twin != nil {
		if err := q.twin.Close(); err != nil {
			return err
		}
	}
	return q.QueuePair.Close()
}
