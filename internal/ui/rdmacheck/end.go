package rdmacheck

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/gpu/device"
	"github.com/kvspray/kvspray/internal/sys/verbs"
)

// Bounds of an end. A peer's requests are checked against them.
const (
	maxBuffers  = 4
	maxQueues   = 16
	maxBytes    = 64 << 20         // of one buffer
	maxMessages = 1 << 14          // of one write
	maxWait     = 30 * time.Second // of one request
	depth       = 256              // requests and receives of a queue pair
	window      = 32               // messages in flight, of all queue pairs of a request
	minWindow   = 4                // of each
	maxEvents   = 64               // of a device, that are reported
	receiveBit  = 1 << 63          // of the ids of receives
)

// caller is one end of a test: this process, or a peer's.
type caller interface {
	call(ctx context.Context, q *request) (*answer, error)
}

// op is what an end is asked to do.
type op string

const (
	opHello      op = "hello"      // its rails and the checks of its host
	opOpen       op = "open"       // a rail; what was open is closed
	opRegister   op = "register"   // a new buffer
	opDeregister op = "deregister" // the keys of a buffer; its bytes stay
	opFill       op = "fill"       // a range of a buffer with the pattern of a seed; 0: the canary
	opCheck      op = "check"      // that range against the pattern
	opQueue      op = "queue"      // a new queue pair
	opConnect    op = "connect"    // a queue pair with the peer's
	opWrite      op = "write"      // messages to the peer's memory, until all have completed
	opExpect     op = "expect"     // their immediates, and the bytes behind each
	opStream     op = "stream"     // messages without end, until halt or a failure
	opProgress   op = "progress"   // of the stream
	opHalt       op = "halt"       // the end of the stream
	opLive       op = "live"       // wait until a stream of the peer's overwrites a canary
	opRevoke     op = "revoke"     // stop queue pairs, wait for their flush, then write canaries
	opDestroy    op = "destroy"    // queue pairs
	opOnDemand   op = "on demand"  // whether the device registers memory without pinning it
	opCounters   op = "counters"   // of the rail, and events of its device
	opBaseline   op = "baseline"   // ib_write_bw, as server or as client
	opBaseEnd    op = "base end"   // the end of that server
)

// request is a call to an end. Fields that an operation does not use are zero.
type request struct {
	Op        op             `json:"op"`
	Rail      string         `json:"rail,omitempty"`
	MTU       verbs.MTU      `json:"mtu,omitempty"`
	GPU       bool           `json:"gpu,omitempty"` // the buffer is in a GPU
	Buffer    int            `json:"buffer,omitempty"`
	Off       uint64         `json:"off,omitempty"`
	Bytes     uint64         `json:"bytes,omitempty"` // of a buffer, of a range, or of one message
	Seed      uint64         `json:"seed,omitempty"`
	Queues    []int          `json:"queues,omitempty"`
	Address   *verbs.Address `json:"address,omitempty"`
	Count     int            `json:"count,omitempty"` // of messages of a queue pair
	To        uint64         `json:"to,omitempty"`    // address in the peer's memory
	Key       uint32         `json:"key,omitempty"`   // and its key
	Immediate bool           `json:"immediate,omitempty"`
	Again     bool           `json:"again,omitempty"` // expect goes on where it ended
	Wait      time.Duration  `json:"wait,omitempty"`
	Host      string         `json:"host,omitempty"` // of the baseline's server; empty: be the server
	GID       int            `json:"gid,omitempty"`
	Lanes     int            `json:"lanes,omitempty"` // queue pairs of the baseline
}

// answer is the result of a request.
type answer struct {
	Error     string         `json:"error,omitempty"`
	Code      string         `json:"code,omitempty"` // of an error that has one
	Version   string         `json:"version,omitempty"`
	Rails     []Rail         `json:"rails,omitempty"`
	Host      []Line         `json:"host,omitempty"`
	ID        int            `json:"id,omitempty"`
	Addr      uint64         `json:"addr,omitempty"`
	Key       uint32         `json:"key,omitempty"`
	Address   *verbs.Address `json:"address,omitempty"`
	GID       int            `json:"gid,omitempty"`
	How       string         `json:"how,omitempty"`  // GPU memory was registered
	Took      time.Duration  `json:"took,omitempty"` // of the operation
	Queues    []state        `json:"queues,omitempty"`
	Wrong     int            `json:"wrong,omitempty"`     // messages whose bytes were not there
	Misplaced int            `json:"misplaced,omitempty"` // immediates out of their order
	Early     int            `json:"early,omitempty"`     // messages whose end was seen first
	Differ    int64          `json:"differ,omitempty"`    // first byte that differs, from 1; 0: none
	Yes       bool           `json:"yes,omitempty"`
	Resent    uint64         `json:"resent,omitempty"`
	Events    []string       `json:"events,omitempty"`
	MiBps     float64        `json:"mibps,omitempty"`
}

// local is an end in this process. One request at a time; a stream has a goroutine of its own.
type local struct {
	env     Env
	life    context.Context // ended by close
	finish  context.CancelFunc
	rail    string
	dev     verbs.Device
	domain  verbs.Domain
	cq      verbs.CompletionQueue
	running *running
	buffers map[int]*buffer
	queues  map[int]*queue
	next    int
	card    device.Card // of the buffer of GPU memory
	packer  device.Packer
	tries   int // to register memory of the card
	base    *baseline
	events  []string
}

func newLocal(ctx context.Context, env Env) *local {
	l := &local{env: env, buffers: map[int]*buffer{}, queues: map[int]*queue{}}
	l.life, l.finish = context.WithCancel(ctx)
	return l
}

// errRequest: a field of a request is out of bounds.
var errRequest = errors.New("rdmacheck: request out of bounds")

func (l *local) call(ctx context.Context, q *request) (*answer, error) {
	a := &answer{}
	if q.Wait > maxWait || q.Bytes > maxBytes || q.Off > maxBytes || q.Count > maxMessages ||
		q.Count < 0 || len(q.Queues) > maxQueues || q.MTU > verbs.MTU4096 {
		return nil, errRequest
	}
	began := time.Now()
	err := l.do(ctx, q, a)
	if a.Took == 0 {
		a.Took = time.Since(began)
	}
	if err != nil {
		return nil, err
	}
	return a, nil
}

func (l *local) do(ctx context.Context, q *request, a *answer) error {
	switch q.Op {
	case opHello:
		a.Version, a.Rails, a.Host = l.env.Version, l.env.Rails, l.env.Host
		return nil
	case opOpen:
		return l.open(q, a)
	case opBaseline:
		return l.baseline(ctx, q, a)
	case opBaseEnd:
		l.base.end()
		l.base = nil
		return nil
	}
	switch {
	case l.dev == nil:
		return fmt.Errorf("rdmacheck: %s: no rail is open", q.Op)
	case q.Op == opProgress:
		return l.progress(a)
	case q.Op == opHalt:
		return l.halt(a)
	case l.running != nil:
		return fmt.Errorf("%w: %q during a stream", errRequest, q.Op)
	}
	switch q.Op {
	case opRegister:
		return l.register(q, a)
	case opOnDemand:
		if d, ok := l.domain.(verbs.OnDemand); ok {
			a.Yes = d.OnDemand()
		}
		return nil
	case opQueue:
		return l.queue(a)
	case opCounters:
		return l.counters(a)
	case opDeregister, opFill, opCheck, opLive:
		b := l.buffers[q.Buffer]
		if b == nil {
			return fmt.Errorf("%w: buffer %d", errRequest, q.Buffer)
		}
		return l.onBuffer(ctx, b, q, a)
	}
	all, err := l.named(q)
	if err != nil {
		return err
	}
	switch q.Op {
	case opConnect:
		if q.Address == nil {
			return errRequest
		}
		if err := all[0].connect(*q.Address); err != nil {
			return err
		}
		if l.env.connected != nil {
			l.env.connected(l.rail, all[0].q)
		}
		return nil
	case opDestroy:
		for i, x := range all {
			delete(l.queues, q.Queues[i])
			err = errors.Join(err, x.q.Close())
		}
		return err
	}
	b := l.buffers[q.Buffer]
	if b == nil {
		return fmt.Errorf("%w: buffer %d", errRequest, q.Buffer)
	}
	if q.Op == opRevoke {
		return l.revoke(ctx, all, b, q, a)
	}
	if err := b.slots(q); err != nil {
		return err
	}
	switch q.Op {
	case opWrite:
		return l.write(ctx, all, b, q, a)
	case opExpect:
		return l.expect(ctx, all, b, q, a)
	case opStream:
		return l.stream(all, b, q)
	}
	return fmt.Errorf("%w: operation %q", errRequest, q.Op)
}

func (l *local) onBuffer(ctx context.Context, b *buffer, q *request, a *answer) error {
	if q.Op != opDeregister && !b.holds(q.Off, q.Bytes) {
		return errRequest
	}
	switch q.Op {
	case opDeregister:
		return b.m.Close()
	case opFill:
		return b.fill(q.Off, q.Bytes, q.Seed)
	case opCheck:
		return l.look(func() (err error) {
			a.Differ, err = b.check(q.Off, q.Bytes, q.Seed)
			return err
		})
	}
	// Live: the canary lies on the last byte of the message.
	if b.bytes == nil || q.Bytes == 0 {
		return errRequest
	}
	last := q.Off + q.Bytes - 1
	want := patternByte(q.Seed, last)
	if err := l.look(func() error { b.bytes[last] = ^want; return nil }); err != nil {
		return err
	}
	deadline := time.Now().Add(q.Wait)
	for time.Now().Before(deadline) && ctx.Err() == nil && !a.Yes {
		_ = l.look(func() error { a.Yes = b.bytes[last] == want; return nil })
	}
	return ctx.Err()
}

// look runs f while nothing moves, if this is a simulation.
func (l *local) look(f func() error) (err error) {
	if l.env.still == nil {
		return f()
	}
	l.env.still(func() { err = f() })
	return err
}

func (l *local) open(q *request, a *answer) (err error) {
	if err := l.shut(); err != nil {
		return err
	}
	if l.env.Open == nil { // this host has no device
		return fmt.Errorf("%w: rail %q", errRequest, q.Rail)
	}
	if l.dev, err = l.env.Open(q.Rail, q.MTU); err != nil {
		return err
	}
	l.rail = q.Rail
	if l.domain, err = l.dev.NewDomain(); err != nil {
		return errors.Join(err, l.shut())
	}
	room := min(2*depth*maxQueues, l.dev.Limits().MaxCompletions)
	if l.cq, err = l.dev.NewCompletionQueue(room); err != nil {
		return errors.Join(err, l.shut())
	}
	a.GID = l.dev.GID().Index
	return nil
}

func (l *local) register(q *request, a *answer) (err error) {
	if len(l.buffers) >= maxBuffers || q.Bytes == 0 {
		return errRequest
	}
	b := &buffer{size: q.Bytes}
	if q.GPU {
		if l.tries++; l.tries > maxBuffers { // each has taken pinned memory until the card is closed
			return errRequest
		}
		err = l.registerGPU(b, a)
	} else {
		b.bytes, err = unix.Mmap(-1, 0, int(q.Bytes), unix.PROT_READ|unix.PROT_WRITE,
			unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
		if err == nil {
			b.bytes[0] = 1 // the first touch of the page is not part of the registration
			began := time.Now()
			b.m, err = l.domain.Register(b.bytes, true)
			a.Took = time.Since(began)
		}
	}
	if err != nil {
		return errors.Join(err, b.close())
	}
	l.next++
	l.buffers[l.next] = b
	a.ID, a.Addr, a.Key = l.next, b.m.Addr(), b.m.RemoteKey()
	return nil
}

func (l *local) queue(a *answer) error {
	if len(l.queues) >= maxQueues {
		return fmt.Errorf("%w: more than %d queue pairs", errRequest, maxQueues)
	}
	qp, err := l.domain.NewQueuePair(l.cq, depth, depth)
	if err != nil {
		return err
	}
	l.next++
	l.queues[l.next] = &queue{q: qp}
	address := qp.Address()
	a.ID, a.Address = l.next, &address
	return nil
}

// revoke does what a fence of the transport does, and then the engine: stop the queue pairs, wait
// for the flush of a receive that was posted before, and use the memory for something else.
func (l *local) revoke(ctx context.Context, all []*queue, b *buffer, q *request, a *answer) error {
	if !b.holds(q.Off, q.Bytes) {
		return errRequest
	}
	began := time.Now()
	for _, x := range all {
		if err := x.q.ToError(); err != nil {
			return err
		}
	}
	if err := l.flushed(ctx, all, q.Wait); err != nil {
		return err
	}
	a.Took = time.Since(began)
	return l.look(func() error { return b.fill(q.Off, q.Bytes, q.Seed) })
}

func (l *local) counters(a *answer) error {
	for {
		select {
		case e, open := <-l.dev.Events():
			if open && len(l.events) < maxEvents {
				l.events = append(l.events, e.Kind.String())
			}
			if open {
				continue
			}
		default:
		}
		break
	}
	a.Events = slices.Clone(l.events)
	if l.env.Resent != nil {
		a.Resent = l.env.Resent(l.rail)
	}
	return nil
}

// shut closes the rail and all that was made on it.
func (l *local) shut() (err error) {
	for _, x := range l.queues {
		_ = x.q.ToError() // what is in flight need not wait for its time-outs
	}
	if l.running != nil {
		l.running.stop()
		l.running.ended.Wait()
		l.running = nil
	}
	for id, x := range l.queues {
		err = errors.Join(err, x.q.Close())
		delete(l.queues, id)
	}
	for id, b := range l.buffers {
		if b.m != nil {
			err = errors.Join(err, b.m.Close())
		}
		err = errors.Join(err, b.close())
		delete(l.buffers, id)
	}
	if l.packer != nil { // the next rail may have another GPU beside it
		err = errors.Join(err, l.packer.Close())
	}
	if l.card != nil {
		err = errors.Join(err, l.card.Close())
	}
	l.packer, l.card, l.events, l.tries = nil, nil, nil, 0
	if l.cq != nil {
		err = errors.Join(err, l.cq.Close())
		l.cq = nil
	}
	if l.domain != nil {
		err = errors.Join(err, l.domain.Close())
		l.domain = nil
	}
	if l.dev != nil {
		err = errors.Join(err, l.dev.Close())
		l.dev = nil
	}
	if l.packer != nil {
		err = errors.Join(err, l.packer.Close())
		l.packer = nil
	}
	if l.card != nil {
		err = errors.Join(err, l.card.Close())
		l.card = nil
	}
	return err
}

func (l *local) close() error {
	l.finish()
	l.base.end()
	return l.shut()
}
