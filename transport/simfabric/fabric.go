package simfabric

import (
	"math/rand/v2"
	"time"

	"github.com/kvspray/kvspray/transfer"
)

// Time is virtual: the duration since the fabric's start.
type Time = time.Duration

// Config is constant for the life of a fabric. Zero values take the defaults below.
type Config struct {
	Seed        uint64
	SliceBytes  int           // reported by the backend
	MaxInFlight int           // slices of a lane
	WindowBytes int           // the maximum that a lane has in the network
	RTO         time.Duration // least time until a chunk is retransmitted
	MaxRTO      time.Duration // longest time until a chunk is retransmitted
	// Resume is the time between the first confirmation after a timeout and the retransmission of
	// the rest. 0: none. Linux first checks whether the timeout was spurious (F-RTO): if a socket
	// has unsent data it sends some of that, and leaves the lost data to the next timeout.
	Resume      time.Duration
	UserTimeout time.Duration // silence after which a lane dies
	Carrier     time.Duration // from a rail's loss until its own host notices
	CarrierBack time.Duration // from its return until its host notices; default: Carrier
	RecvBuffer  int           // bytes of a lane that the kernel accepts for a stopped process
	// OneSided makes NICs write by themselves, like RDMA: from the claim of a slice's chunks until
	// its verdict or the end of the lane, whether the process runs or not.
	OneSided bool
	// Patient lanes survive the loss of the carrier, as connections do; others end with it, as they
	// do if the address disappears with the link.
	Patient bool
}

// Defaults of Config.
const (
	DefaultSliceBytes  = 256 << 10
	DefaultMaxInFlight = 64
	DefaultWindowBytes = 4 << 20
	DefaultRTO         = 200 * time.Millisecond
	DefaultMaxRTO      = time.Second // as package tcp configures the kernel
	DefaultUserTimeout = 20 * time.Second
	DefaultCarrier     = time.Millisecond
	DefaultRecvBuffer  = 1 << 20
)

// Stats counts events.
type Stats struct {
	Events    uint64
	Sent      uint64 // chunks, including retransmissions
	Again     uint64
	Delivered uint64
	Overflows uint64 // chunks that found a buffer full
	Swallowed uint64 // chunks and confirmations that a dead or silent link dropped
	Lost      uint64 // chunks that lost a packet on the way
	// Unattended counts chunks that a kernel accepted, or a NIC wrote, while the process was
	// stopped.
	Unattended uint64
	Ended      map[transfer.Outcome]uint64
}

// Fabric is one network.
type Fabric struct {
	cfg     Config
	now     Time
	queue   queue
	rng     *rand.Rand
	byAddr  map[string]*Rail
	lanes   uint64
	flights uint64
	trace   uint64
	stats   Stats
}

// New returns an empty fabric.
func New(cfg Config) *Fabric {
	num := func(v *int, d int) {
		if *v <= 0 {
			*v = d
		}
	}
	dur := func(v *time.Duration, d time.Duration) {
		if *v <= 0 {
			*v = d
		}
	}
	num(&cfg.SliceBytes, DefaultSliceBytes)
	num(&cfg.MaxInFlight, DefaultMaxInFlight)
	num(&cfg.WindowBytes, DefaultWindowBytes)
	num(&cfg.RecvBuffer, DefaultRecvBuffer)
	dur(&cfg.RTO, DefaultRTO)
	dur(&cfg.MaxRTO, DefaultMaxRTO)
	dur(&cfg.UserTimeout, DefaultUserTimeout)
	dur(&cfg.Carrier, DefaultCarrier)
	dur(&cfg.CarrierBack, cfg.Carrier)
	return &Fabric{cfg: cfg, rng: rand.New(rand.NewPCG(cfg.Seed, 0x5ab)), byAddr: map[string]*Rail{},
		trace: fnvOffset,
		stats: Stats{Ended: map[transfer.Outcome]uint64{}}}
}

// Now is the virtual time.
func (f *Fabric) Now() Time { return f.now }

// Rand is the fabric's source of randomness; drivers that draw from it stay reproducible.
func (f *Fabric) Rand() *rand.Rand { return f.rng }

// Stats of the run so far.
func (f *Fabric) Stats() Stats { return f.stats }

// Trace is a hash of every event so far: its time, kind and target.
func (f *Fabric) Trace() uint64 { return f.trace }

// After runs fn after d.
func (f *Fabric) After(d Time, fn func()) { f.at(f.now+max(d, 0), event{kind: evCall, fn: fn}) }

// Jitter draws from (0, d].
func (f *Fabric) Jitter(d Time) Time {
	if d <= 0 {
		return 0
	}
	return Time(f.rng.Int64N(int64(d))) + 1
}

// Next returns the time of the next event; false: there is none.
func (f *Fabric) Next() (Time, bool) {
	if len(f.queue.heap) == 0 {
		return 0, false
	}
	return f.queue.heap[0].at, true
}

// Step executes the next event and reports whether there was one.
func (f *Fabric) Step() bool {
	if len(f.queue.heap) == 0 {
		return false
	}
	at, ev := f.queue.pop()
	f.now = at
	f.stats.Events++
	f.note(uint64(at), uint64(ev.kind))
	if h := ev.owner(); h != nil && h.frozen {
		if ev.kind == evArrive {
			ev.fl.e.other.unattended(ev.fl, ev.idx)
		}
		h.held = append(h.held, ev)
		return true
	}
	switch ev.kind {
	case evCall:
		ev.fn()
	case evHop:
		f.note(ev.fl.id, uint64(ev.idx))
		f.cross(ev.fl, ev.idx, ev.hop, at, ev.tail)
	case evArrive:
		f.note(ev.fl.id, uint64(ev.idx))
		f.stats.Delivered++
		ev.fl.e.other.arrive(ev.fl, ev.idx)
	case evAck:
		f.note(ev.fl.id, uint64(ev.idx))
		ev.fl.e.acked(ev.fl, ev.idx, ev.final)
	case evTimeout:
		f.note(ev.end.id, 0)
		ev.end.timeout()
	}
	return true
}

// Run executes events until a time, or until stop returns true.
func (f *Fabric) Run(until Time, stop func() bool) {
	for stop == nil || !stop() {
		at, ok := f.Next()
		if !ok || at > until {
			f.now = max(f.now, until)
			return
		}
		f.Step()
	}
}

const (
	fnvOffset = 14695981039346656037
	fnvPrime  = 1099511628211
)

func (f *Fabric) note(a, b uint64) {
	h := (f.trace ^ a) * fnvPrime
	f.trace = (h ^ b) * fnvPrime
}

// Events.
const (
	evCall    uint8 = iota + 1 // fn
	evHop                      // the first byte of a chunk reaches link number hop
	evArrive                   // its last byte is at the receiver
	evAck                      // its confirmation is at the sender
	evTimeout                  // of an end
)

type event struct {
	kind  uint8
	hop   uint8
	final bool // evAck: the slice is decided
	idx   uint32
	tail  Time // evHop: when the last byte arrives
	fl    *flight
	end   *end
	host  *Host // evCall: host of the process, if any
	fn    func()
}

// owner is the host whose process must run for the event to have an effect; nil: the network
// itself.
func (ev *event) owner() *Host {
	switch ev.kind {
	case evCall:
		return ev.host
	case evArrive:
		return ev.fl.e.remote.host
	case evAck:
		return ev.fl.e.local.host
	case evTimeout:
		return ev.end.local.host
	}
	return nil
}

func (f *Fabric) at(t Time, ev event) { f.queue.push(max(t, f.now), ev) }

// queue is a heap of four children per node over a slab of events, so that little is moved.
type queue struct {
	heap []entry
	slab []event
	free []uint32
	seq  uint64
}

type entry struct {
	at   Time
	seq  uint64
	slot uint32
}

func (a entry) before(b entry) bool { return a.at < b.at || a.at == b.at && a.seq < b.seq }

func (q *queue) push(at Time, ev event) {
	var slot uint32
	if n := len(q.free); n > 0 {
		slot = q.free[n-1]
		q.free = q.free[:n-1]
		q.slab[slot] = ev
	} else {
		slot = uint32(len(q.slab))
		q.slab = append(q.slab, ev)
	}
	q.seq++
	x := entry{at, q.seq, slot}
	q.heap = append(q.heap, x)
	i := len(q.heap) - 1
	for i > 0 {
		p := (i - 1) / 4
		if !x.before(q.heap[p]) {
			break
		}
		q.heap[i] = q.heap[p]
		i = p
	}
	q.heap[i] = x
}

func (q *queue) pop() (Time, event) {
	top := q.heap[0]
	last := len(q.heap) - 1
	x := q.heap[last]
	q.heap = q.heap[:last]
	if last > 0 {
		i := 0
		for {
			c := 4*i + 1
			if c >= last {
				break
			}
			best := c
			for k := c + 1; k < min(c+4, last); k++ {
				if q.heap[k].before(q.heap[best]) {
					best = k
				}
			}
			if !q.heap[best].before(x) {
				break
			}
			q.heap[i] = q.heap[best]
			i = best
		}
		q.heap[i] = x
	}
	ev := q.slab[top.slot]
	q.slab[top.slot] = event{}
	q.free = append(q.free, top.slot)
	return top.at, ev
}
