package gpu

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvspray/kvspray/internal/sys/cuda"
)

// fakeMachine is memory and devices without a GPU. Queues run their work on goroutines, in order within a queue and in no
// order between queues but what events say, as streams do.
type fakeMachine struct {
	mu   sync.Mutex
	mem  map[cuda.Ptr][]byte // by base
	next cuda.Ptr

	base   cuda.Ptr // of shared
	shared []byte   // where all memory lies, if another process has it, too
}

func newFakeMachine() *fakeMachine {
	return &fakeMachine{mem: map[cuda.Ptr][]byte{}, next: 1 << 40}
}

func (m *fakeMachine) alloc(n uint64) cuda.Ptr {
	m.mu.Lock()
	defer m.mu.Unlock()
	p := m.next
	m.next += cuda.Ptr(n+1<<20) &^ (1<<20 - 1)
	if m.shared != nil {
		m.mem[p] = m.shared[p-m.base:][:n:n]
	} else {
		m.mem[p] = make([]byte, n)
	}
	return p
}

// at returns the bytes at p, which must lie in one allocation.
func (m *fakeMachine) at(p cuda.Ptr, n uint64) []byte {
	m.mu.Lock()
	defer m.mu.Unlock()
	for base, b := range m.mem {
		if p >= base && uint64(p-base)+n <= uint64(len(b)) {
			return b[p-base:][:n]
		}
	}
	return nil
}

type fakeDevice struct {
	m         *fakeMachine
	allocated int
	queues    []*fakeQueue
	// failAfter counts down copies; at zero every call on the device's queues fails. Negative: never.
	mu        sync.Mutex
	failAfter int
	copies    int
	bytes     uint64
	noRows    bool // copies of rows are refused
	mps       MPS
	gate      chan struct{}         // a copy waits for it when set
	foreign   func(p cuda.Ptr) bool // addresses that this device does not reach; nil: none
	recorded  func(Event)           // is told of each event that is recorded on the device's queues; nil: nobody is
}

func (m *fakeMachine) device() *fakeDevice { return &fakeDevice{m: m, failAfter: -1} }

func (d *fakeDevice) MPS() MPS { return d.mps }

func (d *fakeDevice) Alloc(n uint64) (cuda.Ptr, error) {
	d.allocated++
	return d.m.alloc(n), nil
}

func (d *fakeDevice) Free(p cuda.Ptr) error {
	d.m.mu.Lock()
	defer d.m.mu.Unlock()
	if _, ok := d.m.mem[p]; !ok {
		return errors.New("fake: free of what was not allocated")
	}
	delete(d.m.mem, p)
	d.allocated--
	return nil
}

func (d *fakeDevice) AllocHost(n int) ([]byte, cuda.Ptr, error) {
	p := d.m.alloc(uint64(n))
	return d.m.at(p, uint64(n)), p, nil
}

func (d *fakeDevice) Pack(q Queue, runs, first cuda.Ptr, n int) error {
	return q.(*fakeQueue).rearrange(runs, first, n, true)
}

func (d *fakeDevice) Unpack(q Queue, runs, first cuda.Ptr, n int) error {
	return q.(*fakeQueue).rearrange(runs, first, n, false)
}

func (d *fakeDevice) PackUniform(q Queue, bases cuda.Ptr, n int, dense cuda.Ptr, length uint64) error {
	return q.(*fakeQueue).uniform(bases, n, dense, length, true)
}

func (d *fakeDevice) UnpackUniform(q Queue, bases cuda.Ptr, n int, dense cuda.Ptr, length uint64) error {
	return q.(*fakeQueue).uniform(bases, n, dense, length, false)
}

func (q *fakeQueue) uniform(bases cuda.Ptr, n int, dense cuda.Ptr, length uint64, pack bool) error {
	q.work <- func() {
		if q.err != nil {
			return
		}
		list := q.d.m.at(bases, uint64(n)*8)
		for i := range uint64(n) {
			a, b := q.d.m.at(cuda.Ptr(binary.LittleEndian.Uint64(list[i*8:])), length), q.d.m.at(dense+cuda.Ptr(i*length), length)
			if a == nil || b == nil {
				q.err = errors.New("fake: kernel out of bounds")
				return
			}
			if pack {
				copy(b, a)
			} else {
				copy(a, b)
			}
		}
	}
	return nil
}

// rearrange does what kernels.cu says, one piece after the other, and checks `first` as the kernel relies on it.
func (q *fakeQueue) rearrange(runs, first cuda.Ptr, n int, pack bool) error {
	q.work <- func() {
		if q.err != nil {
			return
		}
		r, f := q.d.m.at(runs, uint64(n*runBytes)), q.d.m.at(first, uint64(n+1)*4)
		var pieces uint32
		for i := range n {
			e := r[i*runBytes:]
			base, stride, outer := binary.LittleEndian.Uint64(e), binary.LittleEndian.Uint64(e[8:]), binary.LittleEndian.Uint64(e[16:])
			dense, size := binary.LittleEndian.Uint64(e[24:]), uint64(binary.LittleEndian.Uint32(e[32:]))
			row := uint64(binary.LittleEndian.Uint32(e[36:]))
			count := binary.LittleEndian.Uint32(f[i*4+4:]) - pieces
			if got := binary.LittleEndian.Uint32(f[i*4:]); got != pieces {
				q.err = fmt.Errorf("fake: first[%d] is %d, %d pieces come before it", i, got, pieces)
				return
			}
			if row == 0 || uint64(count)%row != 0 {
				q.err = fmt.Errorf("fake: run %d has %d pieces in rows of %d", i, count, row)
				return
			}
			for k := range uint64(count) {
				a, b := q.d.m.at(cuda.Ptr(base+k/row*outer+k%row*stride), size), q.d.m.at(cuda.Ptr(dense+k*size), size)
				if a == nil || b == nil {
					q.err = errors.New("fake: kernel out of bounds")
					return
				}
				if pack {
					copy(b, a)
				} else {
					copy(a, b)
				}
			}
			pieces += count
		}
		if got := binary.LittleEndian.Uint32(f[n*4:]); got != pieces {
			q.err = fmt.Errorf("fake: first[%d] is %d, %d pieces in all", n, got, pieces)
		}
	}
	return nil
}

var errFake = errors.New("fake: device fell off the bus")

func (d *fakeDevice) copied(n uint64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.failAfter == 0 {
		return errFake
	}
	if d.failAfter > 0 {
		d.failAfter--
	}
	d.copies++
	d.bytes += n
	return nil
}

type fakeEvent struct {
	mu   sync.Mutex
	last chan struct{} // closed when the work before the last mark is done
	err  *error
	late time.Duration // after which it is first looked at, and done
}

func (e *fakeEvent) mark() (chan struct{}, *error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.last, e.err
}

func (e *fakeEvent) Sync() error {
	c, err := e.mark()
	if c == nil {
		return nil
	}
	<-c
	return *err
}

func (e *fakeEvent) Done() (bool, error) {
	c, err := e.mark()
	if c == nil {
		return true, nil
	}
	if e.late > 0 {
		<-c
		<-time.After(e.late)
	}
	select {
	case <-c:
		return true, *err
	default:
		return false, nil
	}
}

type fakeQueue struct {
	d    *fakeDevice
	work chan func()
	done chan struct{}
	err  error // sticky, as a CUDA context's; owned by the queue's goroutine
}

func (d *fakeDevice) NewQueue() (Queue, error) {
	q := &fakeQueue{d: d, work: make(chan func(), 1024), done: make(chan struct{})}
	go func() {
		defer close(q.done)
		for f := range q.work {
			f()
		}
	}()
	d.queues = append(d.queues, q)
	return q, nil
}

func (d *fakeDevice) NewEvent() (Event, error) { return &fakeEvent{}, nil }

func (d *fakeDevice) NewPromptEvent() (Event, error) { return &fakeEvent{}, nil }

func (d *fakeDevice) Close() error {
	for _, q := range d.queues {
		close(q.work)
		<-q.done
	}
	d.queues = nil
	return nil
}

func (q *fakeQueue) Copy(dst, src cuda.Ptr, n uint64) error {
	q.work <- func() {
		if q.d.gate != nil {
			<-q.d.gate
		}
		if q.err == nil {
			q.err = q.d.copied(n)
		}
		if q.err != nil {
			return
		}
		to, from := q.d.m.at(dst, n), q.d.m.at(src, n)
		if q.d.foreign != nil && (q.d.foreign(dst) || q.d.foreign(src)) {
			to = nil
		}
		if to == nil || from == nil {
			q.err = errors.New("fake: copy out of bounds")
			return
		}
		copy(to, from)
	}
	return nil
}

func (q *fakeQueue) CopyBatch(dst, src []cuda.Ptr, n []uint64) error {
	for i := range dst {
		if err := q.Copy(dst[i], src[i], n[i]); err != nil {
			return err
		}
	}
	return nil
}

func (q *fakeQueue) CopyRows(rows []cuda.Rows) error {
	for _, r := range rows {
		if q.d.noRows {
			return &cuda.Error{Op: "Memcpy2DAsync", Code: invalidValue}
		}
		if r.Height > 1 && (r.DstPitch > cuda.MaxPitch || r.SrcPitch > cuda.MaxPitch || min(r.DstPitch, r.SrcPitch) < r.Width) {
			return fmt.Errorf("fake: rows %+v", r)
		}
		for k := range r.Height {
			if err := q.Copy(cuda.Ptr(r.Dst+k*r.DstPitch), cuda.Ptr(r.Src+k*r.SrcPitch), r.Width); err != nil {
				return err
			}
		}
	}
	return nil
}

func (q *fakeQueue) Record(e Event) error {
	f := e.(*fakeEvent)
	c, err := make(chan struct{}), new(error)
	f.mu.Lock()
	f.last, f.err = c, err
	f.mu.Unlock()
	q.work <- func() {
		*err = q.err
		close(c)
	}
	if q.d.recorded != nil {
		q.d.recorded(e)
	}
	return nil
}

func (q *fakeQueue) CopySync(dst, src cuda.Ptr, n uint64) error {
	return errors.Join(q.Copy(dst, src, n), q.Sync())
}

func (q *fakeQueue) Sync() error {
	c := make(chan error)
	q.work <- func() { c <- q.err }
	return <-c
}

func (q *fakeQueue) Wait(e Event) error {
	c, err := e.(*fakeEvent).mark()
	q.work <- func() {
		if c == nil {
			return
		}
		<-c
		if q.err == nil {
			q.err = *err
		}
	}
	return nil
}
