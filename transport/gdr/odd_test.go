package gdr

import (
	"errors"
	"sync"

	"github.com/kvspray/kvspray/internal/sys/verbs"
)

// oddDevice is a device of the fake that does not always obey.
type oddDevice struct {
	verbs.Device

	mu sync.Mutex
	// guarded by mu
	// queue pairs take no error state: nothing is flushed, and what is on the wire still arrives
	noFlush   bool
	keepsQPs  bool  // nor are they destroyed
	keepsKeys bool  // nor registrations given back
	refuses   error // what registrations are refused with
	// the sends of the next batch that are taken; the rest is refused; -1: all
	takes int
	// what work requests without access to memory fail with; OK: their own status
	blames verbs.Status
	badCQ  bool // completion queues have nothing but errors
	polls  int  // of completion queues, counted while they are bad or asleep
	// polls of completion queues wait for it, as if the process did not run; nil: they
	// do not
	asleep     <-chan struct{}
	slow       <-chan struct{} // what asks the device waits for it; nil: it does not
	waiting    int             // commands that do
	registered int             // registrations that were not given back
	domains    int             // likewise
	inlined    int             // writes whose bytes the CPU copies
}

var errOdd = errors.New("odd device: no")

func odd(d verbs.Device) *oddDevice { return &oddDevice{Device: d, takes: -1} }

// set changes what the device does.
func (d *oddDevice) set(f func(*oddDevice)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	f(d)
}

func (d *oddDevice) is(f func(*oddDevice) bool) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return f(d)
}

// wait is a command to the device.
func (d *oddDevice) wait() {
	d.mu.Lock()
	slow := d.slow
	if slow != nil {
		d.waiting++
	}
	d.mu.Unlock()
	if slow != nil {
		<-slow
		d.set(func(d *oddDevice) { d.waiting-- })
	}
}

func (d *oddDevice) Active() (bool, error) {
	d.wait()
	return d.Device.Active()
}

func (d *oddDevice) NewCompletionQueue(depth int) (verbs.CompletionQueue, error) {
	q, err := d.Device.NewCompletionQueue(depth)
	if err != nil {
		return nil, err
	}
	return &oddCQ{CompletionQueue: q, d: d}, nil
}

type oddCQ struct {
	verbs.CompletionQueue
	d *oddDevice
}

func (q *oddCQ) Poll(dst []verbs.Completion) (int, error) {
	q.d.mu.Lock()
	bad, asleep, blames := q.d.badCQ, q.d.asleep, q.d.blames
	if bad || asleep != nil {
		q.d.polls++
	}
	q.d.mu.Unlock()
	if asleep != nil {
		<-asleep
	}
	if bad {
		return 0, errOdd
	}
	n, err := q.CompletionQueue.Poll(dst)
	for i := range dst[:n] {
		if blames != verbs.OK && dst[i].Status == verbs.RemoteAccess {
			dst[i].Status = blames
		}
	}
	return n, err
}

func (d *oddDevice) NewDomain() (verbs.Domain, error) {
	d.wait()
	p, err := d.Device.NewDomain()
	if err != nil {
		return nil, err
	}
	d.set(func(d *oddDevice) { d.domains++ })
	return &oddDomain{Domain: p, d: d}, nil
}

type oddDomain struct {
	verbs.Domain
	d *oddDevice
}

func (p *oddDomain) Close() error {
	p.d.wait()
	if err := p.Domain.Close(); err != nil {
		return err
	}
	p.d.set(func(d *oddDevice) { d.domains-- })
	return nil
}

func (p *oddDomain) Register(b []byte, remote bool) (verbs.Memory, error) {
	d := p.d
	d.wait()
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.refuses != nil {
		return nil, d.refuses
	}
	m, err := p.Domain.Register(b, remote)
	if err != nil {
		return nil, err
	}
	d.registered++
	return &oddMemory{Memory: m, d: d}, nil
}

func (p *oddDomain) NewQueuePair(cq verbs.CompletionQueue, sends, receives int) (verbs.QueuePair,
	error) {
	q, err := p.Domain.NewQueuePair(cq.(*oddCQ).CompletionQueue, sends, receives)
	if err != nil {
		return nil, err
	}
	return &oddQP{QueuePair: q, d: p.d}, nil
}

type oddMemory struct {
	verbs.Memory
	d      *oddDevice
	closed bool // guarded by d.mu
}

func (m *oddMemory) Close() error {
	m.d.wait()
	m.d.mu.Lock()
	defer m.d.mu.Unlock()
	if m.d.keepsKeys {
		return errOdd
	}
	if !m.closed {
		m.closed = true
		m.d.registered--
	}
	return m.Memory.Close()
}

type oddQP struct {
	verbs.QueuePair
	d *oddDevice
}

func (q *oddQP) ToError() error {
	q.d.wait()
	if q.d.is(func(d *oddDevice) bool { return d.noFlush }) {
		return errOdd
	}
	return q.QueuePair.ToError()
}

func (q *oddQP) Close() error {
	q.d.wait()
	if q.d.is(func(d *oddDevice) bool { return d.keepsQPs }) {
		return errOdd
	}
	return q.QueuePair.Close()
}

func (q *oddQP) PostSend(batch []verbs.Work) (int, error) {
	q.d.mu.Lock()
	n := q.d.takes
	q.d.takes = -1
	for i := range batch {
		if batch[i].Inline && batch[i].Len > 0 {
			q.d.inlined++
		}
	}
	q.d.mu.Unlock()
	if n < 0 {
		return q.QueuePair.PostSend(batch)
	}
	taken, err := q.QueuePair.PostSend(batch[:n])
	if err == nil {
		err = errOdd
	}
	return taken, err
}
