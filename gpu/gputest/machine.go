// Package gputest is GPUs without a GPU, for tests: memory, devices, queues and events that behave
// as the driver's, and fail or wait where a test asks for it.
//
// Each Queue owns one goroutine, which Device.Close ends.
package gputest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvspray/kvspray/gpu/device"
	"github.com/kvspray/kvspray/internal/sys/cuda"
)

// Machine is memory and devices. A queue runs its work on a goroutine, in order. Only events order
// the work of several queues, as with CUDA streams.
type Machine struct {
	Mu   sync.Mutex
	Mem  map[cuda.Ptr][]byte // by base
	Next cuda.Ptr
}

// NewMachine makes a machine without devices.
func NewMachine() *Machine {
	return &Machine{Mem: map[cuda.Ptr][]byte{}, Next: 1 << 40}
}

// Alloc allocates n bytes at a new address.
func (m *Machine) Alloc(n uint64) cuda.Ptr {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	p := m.Next
	m.Next += cuda.Ptr(n+1<<20) &^ (1<<20 - 1)
	m.Mem[p] = make([]byte, n)
	return p
}

// At returns the bytes at p, or nil where they are not in one allocation.
func (m *Machine) At(p cuda.Ptr, n uint64) []byte {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	for base, b := range m.Mem {
		if p >= base && uint64(p-base)+n <= uint64(len(b)) {
			return b[p-base:][:n]
		}
	}
	return nil
}

// Device is a device.Packer on memory of a Machine.
type Device struct {
	machine   *Machine
	Allocated int
	Queues    []*Queue
	// FailAfter counts down copies; at zero all copies of the device fail. Negative: never.
	Mu        sync.Mutex
	FailAfter int
	Copies    int
	Bytes     uint64
	NoRows    bool // copies of rows are refused
	mps       device.MPS
	Gate      chan struct{}         // a copy waits for it when set
	Foreign   func(p cuda.Ptr) bool // addresses that the device does not reach; nil: none
	Recorded  func(device.Event)    // called for each recorded event; may be nil
}

// Device makes a device.
func (m *Machine) Device() *Device { return &Device{machine: m, FailAfter: -1} }

func (d *Device) MPS() device.MPS { return d.mps }

func (d *Device) Alloc(n uint64) (cuda.Ptr, error) {
	d.Allocated++
	return d.machine.Alloc(n), nil
}

func (d *Device) Free(p cuda.Ptr) error {
	d.machine.Mu.Lock()
	defer d.machine.Mu.Unlock()
	if _, ok := d.machine.Mem[p]; !ok {
		return errors.New("fake: free of what was not allocated")
	}
	delete(d.machine.Mem, p)
	d.Allocated--
	return nil
}

func (d *Device) AllocHost(n int) ([]byte, cuda.Ptr, error) {
	p := d.machine.Alloc(uint64(n))
	return d.machine.At(p, uint64(n)), p, nil
}

func (d *Device) Pack(q device.Queue, runs, first cuda.Ptr, n int) error {
	return q.(*Queue).rearrange(runs, first, n, true)
}

func (d *Device) Unpack(q device.Queue, runs, first cuda.Ptr, n int) error {
	return q.(*Queue).rearrange(runs, first, n, false)
}

func (d *Device) PackUniform(q device.Queue, bases cuda.Ptr, n int, dense cuda.Ptr,
	length uint64) error {
	return q.(*Queue).uniform(bases, n, dense, length, true)
}

func (d *Device) UnpackUniform(q device.Queue, bases cuda.Ptr, n int, dense cuda.Ptr,
	length uint64) error {
	return q.(*Queue).uniform(bases, n, dense, length, false)
}

func (q *Queue) uniform(bases cuda.Ptr, n int, dense cuda.Ptr, length uint64, pack bool) error {
	q.Work <- func() {
		if q.err != nil {
			return
		}
		list := q.Device.machine.At(bases, uint64(n)*8)
		for i := range uint64(n) {
			a, b := q.Device.machine.At(cuda.Ptr(binary.LittleEndian.Uint64(list[i*8:])), length),
				q.Device.machine.At(dense+cuda.Ptr(i*length), length)
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

// rearrange is the kernel of kernels.cu, piece by piece. It checks `first`, on which the kernel
// relies.
func (q *Queue) rearrange(runs, first cuda.Ptr, n int, pack bool) error {
	q.Work <- func() {
		if q.err != nil {
			return
		}
		r, f := q.Device.machine.At(runs, uint64(n*device.RunBytes)), q.Device.machine.At(first,
			uint64(n+1)*4)
		var pieces uint32
		for i := range n {
			e := r[i*device.RunBytes:]
			base, stride, outer := binary.LittleEndian.Uint64(e), binary.LittleEndian.Uint64(e[8:]),
				binary.LittleEndian.Uint64(e[16:])
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
				a, b := q.Device.machine.At(cuda.Ptr(base+k/row*outer+k%row*stride), size),
					q.Device.machine.At(cuda.Ptr(dense+k*size), size)
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

// Move is the kernel move of kernels.cu. Like rearrange, it checks `first`, and all that is moved
// counts as copied.
func (d *Device) Move(queue device.Queue, moves, first cuda.Ptr, n int) error {
	q := queue.(*Queue)
	q.Work <- func() {
		if q.err != nil {
			return
		}
		list, f := d.machine.At(moves, uint64(n*device.MoveBytes)), d.machine.At(first, uint64(n+1)*4)
		var pieces uint32
		for i := range n {
			e := list[i*device.MoveBytes:]
			word := func(at int) uint64 { return binary.LittleEndian.Uint64(e[at:]) }
			src, dst, srcStride, dstStride := word(0), word(8), word(16), word(24)
			size, count := binary.LittleEndian.Uint32(e[32:]), binary.LittleEndian.Uint32(e[36:])
			if got := binary.LittleEndian.Uint32(f[i*4:]); got != pieces || size == 0 || count == 0 {
				q.err = fmt.Errorf("fake: move %d: first is %d, %d pieces come before it; %d pieces of %d "+
					"bytes", i, got, pieces, count, size)
				return
			}
			if (src|dst|srcStride|dstStride|uint64(size))%device.Align != 0 {
				q.err = fmt.Errorf("fake: move %d is not in units of %d bytes", i, device.Align)
				return
			}
			for k := range uint64(count) {
				to, from := d.machine.At(cuda.Ptr(dst+k*dstStride), uint64(size)),
					d.machine.At(cuda.Ptr(src+k*srcStride), uint64(size))
				if to == nil || from == nil {
					q.err = errors.New("fake: kernel out of bounds")
					return
				}
				if q.err = d.copied(uint64(size)); q.err != nil {
					return
				}
				copy(to, from)
			}
			pieces += count
		}
		if got := binary.LittleEndian.Uint32(f[n*4:]); got != pieces {
			q.err = fmt.Errorf("fake: first[%d] is %d, %d pieces in all", n, got, pieces)
		}
	}
	return nil
}

// ErrBroken is the error of a broken device.
var ErrBroken = errors.New("fake: device fell off the bus")

func (d *Device) copied(n uint64) error {
	d.Mu.Lock()
	defer d.Mu.Unlock()
	if d.FailAfter == 0 {
		return ErrBroken
	}
	if d.FailAfter > 0 {
		d.FailAfter--
	}
	d.Copies++
	d.Bytes += n
	return nil
}

// Event is a device.Event.
type Event struct {
	mu   sync.Mutex
	last chan struct{} // closed when the work before the last mark is done
	err  *error
	Late time.Duration // delay of Done
}

func (e *Event) mark() (chan struct{}, *error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.last, e.err
}

func (e *Event) Sync() error {
	c, err := e.mark()
	if c == nil {
		return nil
	}
	<-c
	return *err
}

func (e *Event) Done() (bool, error) {
	c, err := e.mark()
	if c == nil {
		return true, nil
	}
	if e.Late > 0 {
		<-c
		<-time.After(e.Late)
	}
	select {
	case <-c:
		return true, *err
	default:
		return false, nil
	}
}

// Queue is a device.Queue.
type Queue struct {
	Device *Device
	Work   chan func()
	done   chan struct{}
	err    error // sticky, as a CUDA context's; owned by the queue's goroutine
}

func (d *Device) NewQueue() (device.Queue, error) {
	q := &Queue{Device: d, Work: make(chan func(), 1024), done: make(chan struct{})}
	go func() {
		defer close(q.done)
		for f := range q.Work {
			f()
		}
	}()
	d.Queues = append(d.Queues, q)
	return q, nil
}

func (d *Device) NewEvent() (device.Event, error) { return &Event{}, nil }

func (d *Device) NewPromptEvent() (device.Event, error) { return &Event{}, nil }

func (d *Device) Close() error {
	for _, q := range d.Queues {
		close(q.Work)
		<-q.done
	}
	d.Queues = nil
	return nil
}

func (q *Queue) Copy(dst, src cuda.Ptr, n uint64) error {
	q.Work <- func() {
		if q.Device.Gate != nil {
			<-q.Device.Gate
		}
		if q.err == nil {
			q.err = q.Device.copied(n)
		}
		if q.err != nil {
			return
		}
		to, from := q.Device.machine.At(dst, n), q.Device.machine.At(src, n)
		if q.Device.Foreign != nil && (q.Device.Foreign(dst) || q.Device.Foreign(src)) {
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

func (q *Queue) CopyBatch(dst, src []cuda.Ptr, n []uint64) error {
	for i := range dst {
		if err := q.Copy(dst[i], src[i], n[i]); err != nil {
			return err
		}
	}
	return nil
}

func (q *Queue) CopyRows(rows []cuda.Rows) error {
	for _, r := range rows {
		if q.Device.NoRows {
			return &cuda.Error{Op: "Memcpy2DAsync", Code: device.InvalidValue}
		}
		if r.Height > 1 && (r.DstPitch > cuda.MaxPitch || r.SrcPitch > cuda.MaxPitch || min(r.DstPitch,
			r.SrcPitch) < r.Width) {
			return fmt.Errorf("fake: rows %+v", r)
		}
		for k := range r.Height {
			if err := q.Copy(cuda.Ptr(r.Dst+k*r.DstPitch), cuda.Ptr(r.Src+k*r.SrcPitch),
				r.Width); err != nil {
				return err
			}
		}
	}
	return nil
}

func (q *Queue) Record(e device.Event) error {
	f := e.(*Event)
	c, err := make(chan struct{}), new(error)
	f.mu.Lock()
	f.last, f.err = c, err
	f.mu.Unlock()
	q.Work <- func() {
		*err = q.err
		close(c)
	}
	if q.Device.Recorded != nil {
		q.Device.Recorded(e)
	}
	return nil
}

func (q *Queue) CopySync(dst, src cuda.Ptr, n uint64) error {
	return errors.Join(q.Copy(dst, src, n), q.Sync())
}

func (q *Queue) Sync() error {
	c := make(chan error)
	q.Work <- func() { c <- q.err }
	return <-c
}

func (q *Queue) Wait(e device.Event) error {
	c, err := e.(*Event).mark()
	q.Work <- func() {
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
