package gdr

import (
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/kvspray/kvspray/internal/sys/verbs"
	"github.com/kvspray/kvspray/transport"
	"github.com/kvspray/kvspray/transport/transporttest"
)

// nullNet joins devices that move no payload: a write completes at once. The rest is what gdr
// itself costs.
type nullNet struct {
	mu  sync.Mutex
	qps map[uint32]*nullQP // guarded by mu

	message         uint32 // longest, of its devices; 0: more than any slice
	writes, longest atomic.Int64
}

type nullDevice struct {
	net    *nullNet
	events chan verbs.Event
}

func (d *nullDevice) Name() string   { return "null" }
func (d *nullDevice) GID() verbs.GID { return verbs.GID{} }
func (d *nullDevice) Limits() verbs.Limits {
	message := d.net.message
	if message == 0 {
		message = 1 << 30
	}
	return verbs.Limits{MaxRegistration: 1 << 40, MaxMessage: message, MaxWork: 1 << 14,
		MaxCompletions: 1 << 15}
}
func (d *nullDevice) Active() (bool, error)      { return true, nil }
func (d *nullDevice) Events() <-chan verbs.Event { return d.events }
func (d *nullDevice) Close() error               { return nil }

type nullDomain struct{ *nullDevice }

func (d *nullDevice) NewDomain() (verbs.Domain, error) { return nullDomain{d}, nil }

func (nullDomain) Register(b []byte, _ bool) (verbs.Memory, error) {
	return nullMemory(len(b)),
		nil
}

func (nullDomain) RegisterDMABuf(int, uint64, uint64, bool) (verbs.Memory, error) {
	return nil, verbs.ErrNotSupported
}

func (nullDomain) RegisterPeer(uint64, uint64, bool) (verbs.Memory, error) {
	return nil, verbs.ErrNotSupported
}

type nullMemory uint64

func (nullMemory) Addr() uint64      { return 1 << 40 }
func (m nullMemory) Len() uint64     { return uint64(m) }
func (nullMemory) LocalKey() uint32  { return 1 }
func (nullMemory) RemoteKey() uint32 { return 2 }
func (nullMemory) Close() error      { return nil }

type nullCQ struct {
	mu    sync.Mutex
	ring  [1 << 13]verbs.Completion // guarded by mu, as what follows
	head  int
	n     int
	ready chan struct{}
}

func (d *nullDevice) NewCompletionQueue(int) (verbs.CompletionQueue, error) {
	return &nullCQ{ready: make(chan struct{}, 1)}, nil
}

func (q *nullCQ) add(c verbs.Completion) {
	q.mu.Lock()
	q.ring[(q.head+q.n)%len(q.ring)] = c
	q.n++
	q.mu.Unlock()
	select {
	case q.ready <- struct{}{}:
	default:
	}
}

func (q *nullCQ) Poll(dst []verbs.Completion) (n int, err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for n < len(dst) && q.n > 0 {
		dst[n] = q.ring[q.head]
		q.head = (q.head + 1) % len(q.ring)
		q.n--
		n++
	}
	return n, nil
}

func (q *nullCQ) Ready() <-chan struct{} { return q.ready }
func (q *nullCQ) Close() error           { return nil }

type nullQP struct {
	d      *nullDevice
	cq     *nullCQ
	num    uint32
	remote *nullQP

	mu    sync.Mutex
	recvs int  // guarded by mu
	dead  bool // guarded by mu
}

func (p nullDomain) NewQueuePair(cq verbs.CompletionQueue, _, _ int) (verbs.QueuePair, error) {
	d := p.nullDevice
	d.net.mu.Lock()
	defer d.net.mu.Unlock()
	q := &nullQP{d: d, cq: cq.(*nullCQ), num: uint32(len(d.net.qps) + 1)}
	d.net.qps[q.num] = q
	return q, nil
}

func (q *nullQP) Num() uint32          { return q.num }
func (q *nullQP) State() verbs.State   { return verbs.ReadyToSend }
func (q *nullQP) MaxInline() int       { return 64 }
func (q *nullQP) ToInit() error        { return nil }
func (q *nullQP) ToReadyToSend() error { return nil }
func (q *nullQP) ToReset() error       { return nil }
func (q *nullQP) Close() error         { return nil }
func (q *nullQP) Address() verbs.Address {
	return verbs.Address{GID: [16]byte{15: 1}, QP: q.num, MTU: verbs.MTU4096, Type: verbs.GIDRoCEv2}
}

func (q *nullQP) ToReadyToReceive(a verbs.Address) error {
	q.d.net.mu.Lock()
	defer q.d.net.mu.Unlock()
	q.remote = q.d.net.qps[a.QP]
	return nil
}

func (q *nullQP) ToError() error {
	q.mu.Lock()
	n := q.recvs
	q.recvs, q.dead = 0, true
	q.mu.Unlock()
	for range n {
		q.cq.add(verbs.Completion{ID: receiveMark, Status: verbs.Flushed})
	}
	return nil
}

func (q *nullQP) PostSend(batch []verbs.Work) (int, error) {
	for i := range batch {
		w := &batch[i]
		if w.Op == verbs.Write {
			q.d.net.writes.Add(1)
			q.d.net.longest.Store(max(q.d.net.longest.Load(), int64(w.Len)))
		}
		if w.Op == verbs.WriteImm {
			r := q.remote
			r.mu.Lock()
			deliver := r.recvs > 0
			if deliver {
				r.recvs--
			}
			r.mu.Unlock()
			if deliver {
				r.cq.add(verbs.Completion{ID: receiveMark, Op: verbs.Receive, Imm: w.Imm})
			}
		}
		if w.Signaled {
			q.cq.add(verbs.Completion{ID: w.ID, Op: w.Op})
		}
	}
	return len(batch), nil
}

func (q *nullQP) PostReceive(ids []uint64) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.recvs += len(ids)
	return nil
}

func nullFactory() transporttest.Factory {
	return nullFactoryOf(
		&nullNet{qps: map[uint32]*nullQP{}})
}

func nullFactoryOf(n *nullNet) transporttest.Factory {
	return func(testing.TB) transport.Backend {
		open := func() (verbs.Device, error) {
			return &nullDevice{net: n, events: make(chan verbs.Event)},
				nil
		}
		rails := []Rail{{Name: "null", Open: open, Listen: "127.0.0.1:0", NUMA: -1}}
		return New(Config{Rails: func() ([]Rail, error) { return rails, nil }})
	}
}

// TestSlicesDoNotAllocate: both ends of a lane together, once their buffers have grown.
func TestSlicesDoNotAllocate(t *testing.T) {
	m := transporttest.NewMover(t, nullFactory(), transporttest.Shape{Chunks: 1024,
		BlockBytes: 16 << 10, Shuffle: true})
	m.Move(64, 4, 8)
	const slices = 500
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	m.Move(slices, 4, 8)
	runtime.ReadMemStats(&after)
	// The runtime itself allocates a little now and then; a slice that did would be seen 500 times.
	if n := after.Mallocs - before.Mallocs; n > slices/5 {
		t.Errorf("%d allocations in %d slices", n, slices)
	}
}

// TestWritesAreBounded: a mebibyte without a gap is four writes, or as many as the device's limit
// asks for.
func TestWritesAreBounded(t *testing.T) {
	for _, c := range []struct {
		message         uint32
		writes, longest int64
	}{{0, 4, maxWrite}, {maxWrite + 1, 4, maxWrite}, {100 << 10, 11, 100 << 10}} {
		n := &nullNet{qps: map[uint32]*nullQP{}, message: c.message}
		m := transporttest.NewMover(t, nullFactoryOf(n), transporttest.Shape{Chunks: 256,
			BlockBytes: 64 << 10, Gapless: true})
		n.writes.Store(0) // of the opening
		n.longest.Store(0)
		const slices = 6
		m.Move(slices, sliceBytes/(64<<10), 2)
		if w, l := n.writes.Load(), n.longest.Load(); w != slices*c.writes || l != c.longest {
			t.Errorf(
				"a device of %d bytes a message: %d writes for %d slices, the longest %d; want %d and %d",
				c.message, w, slices, l, slices*c.writes, c.longest)
		}
	}
}

// BenchmarkNoWire is gdr's own work for a 64 KiB slice of 16 KiB blocks: two ends, sockets and
// verdicts, no payload.
func BenchmarkNoWire(b *testing.B) {
	m := transporttest.NewMover(b, nullFactory(), transporttest.Shape{Chunks: 1024,
		BlockBytes: 16 << 10, Shuffle: true})
	m.Move(64, 1, 16)
	b.ReportAllocs()
	for b.Loop() {
		m.Move(16, 1, 16)
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/16, "ns/slice")
	b.ReportMetric(float64(b.N)*16*5/b.Elapsed().Seconds(), "posts/s") // four writes and a verdict
}
