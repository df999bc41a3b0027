//go:build cgo && linux

package verbs

// #cgo LDFLAGS: -ldl
// #include "abi.h"
// #include "library.h"
import "C"

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	maxEvents = 64 // that nobody has received
	pollBatch = 64
	sendBatch = 64
	psnBits   = 24
	hopLimit  = 64
)

func check(op string, r C.int) error {
	if r == 0 {
		return nil
	}
	return fmt.Errorf("verbs: %s: %w", op, syscall.Errno(r))
}

// Library returns why libibverbs cannot be opened, or nil.
func Library() error {
	var why *C.char
	if C.kvv_open_library(&why) != 0 {
		return fmt.Errorf("%w: %s: install libibverbs1 and ibverbs-providers (rdma-core)", ErrNotSupported, C.GoString(why))
	}
	return nil
}

type device struct {
	c      *C.struct_kvv_device
	cfg    Config
	name   string
	gid    GID
	lid    uint16
	mtu    MTU
	limits Limits
	events chan Event
	file   *os.File // of asynchronous events
	wg     sync.WaitGroup

	mu      sync.Mutex
	closed  bool // guarded by mu
	domains int  // not released yet; guarded by mu

	memories, queuePairs atomic.Int64 // of this process
}

// Open opens the port of one device under one GID.
func Open(cfg Config) (Device, error) {
	if err := cfg.check(); err != nil {
		return nil, err
	}
	if err := Library(); err != nil {
		return nil, err
	}
	ports, err := Ports("/")
	if err != nil {
		return nil, err
	}
	cfg.Port = max(cfg.Port, 1)
	var port *Port
	var names []string
	for i := range ports {
		names = append(names, ports[i].Name())
		if ports[i].Device == cfg.Device && ports[i].Num == cfg.Port {
			port = &ports[i]
		}
	}
	if port == nil {
		return nil, fmt.Errorf("verbs: device %q has no port %d here: there are %v", cfg.Device, cfg.Port, names)
	}
	d := &device{cfg: cfg, name: port.Name(), lid: port.LID, events: make(chan Event, maxEvents)}
	if d.gid, _, err = ChooseGID(port, cfg.GIDIndex); err != nil {
		return nil, err
	}
	name := append([]byte(cfg.Device), 0)
	var fd C.int
	if r := C.kvv_device_open((*C.char)(unsafe.Pointer(&name[0])), &d.c, &fd); r != 0 {
		err := check("open "+cfg.Device, r)
		if errors.Is(err, syscall.ENOSYS) {
			return nil, fmt.Errorf("%w: this kernel has no RDMA subsystem", ErrNotSupported)
		}
		if errors.Is(err, syscall.EACCES) || errors.Is(err, syscall.EPERM) || errors.Is(err, syscall.ENOENT) {
			return nil, fmt.Errorf("%w: give the process (or its pod) /dev/infiniband/uverbs*", err)
		}
		return nil, err
	}
	fail := func(err error) (Device, error) {
		C.kvv_device_close(d.c)
		return nil, err
	}
	var l C.struct_kvv_limits
	if err := check("query "+d.name, C.kvv_device_limits(d.c, C.uint8_t(cfg.Port), &l)); err != nil {
		return fail(err)
	}
	d.limits = Limits{MaxRegistration: uint64(l.max_mr_size), MaxRegistrations: int(l.max_mr), MaxQueuePairs: int(l.max_qp), MaxMessage: uint32(l.max_msg),
		MaxWork: int(l.max_qp_wr), MaxCompletions: int(l.max_cqe)}
	d.mtu = MTU(l.active_mtu)
	if cfg.MTU != 0 {
		d.mtu = min(d.mtu, cfg.MTU)
	}
	// sysfs and the provider must use the same entry.
	if err := d.checkGID(); err != nil {
		return fail(err)
	}
	if d.file, err = watched(int(fd), "rdma-events"); err != nil {
		return fail(err)
	}
	d.wg.Go(d.follow)
	return d, nil
}

// checkGID checks that the table still holds the GID under the index that queue pairs use.
func (d *device) checkGID() error {
	var raw [16]byte
	if err := check(fmt.Sprintf("GID %d of %s", d.gid.Index, d.name),
		C.kvv_device_gid(d.c, C.uint8_t(d.cfg.Port), C.int(d.gid.Index), (*C.uint8_t)(&raw[0]))); err != nil {
		return err
	}
	if raw != d.gid.Raw {
		return fmt.Errorf("verbs: GID %d of %s was %s and has changed", d.gid.Index, d.name, d.gid.Addr())
	}
	return nil
}

// watched is a duplicate descriptor for the netpoller: libibverbs keeps and closes the original.
func watched(fd int, name string) (*os.File, error) {
	dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("verbs: duplicate a descriptor: %w", err)
	}
	return os.NewFile(uintptr(dup), name), nil
}

// await calls take, which must not block, whenever the file may be readable, until the file is
// closed.
func await(f *os.File, take func() C.int) {
	raw, err := f.SyscallConn()
	if err != nil {
		return
	}
	for {
		var r C.int
		if raw.Read(func(uintptr) bool {
			r = take()
			return r != C.int(syscall.EAGAIN)
		}) != nil || r != 0 {
			return
		}
	}
}

func (d *device) follow() {
	defer close(d.events)
	var kind C.int
	var what C.uint32_t
	await(d.file, func() C.int {
		r := C.kvv_device_event(d.c, &kind, &what)
		if r == 0 {
			d.event(int(kind), uint32(what))
		}
		return r
	})
}

func (d *device) event(kind int, what uint32) {
	var e Event
	switch kind {
	case C.KVI_EVENT_PORT_ERR:
		e.Kind = PortDown
	case C.KVI_EVENT_PORT_ACTIVE:
		e.Kind = PortUp
	case C.KVI_EVENT_GID_CHANGE, C.KVI_EVENT_LID_CHANGE:
		e.Kind = GIDChange
	case C.KVI_EVENT_QP_FATAL, C.KVI_EVENT_QP_REQ_ERR, C.KVI_EVENT_QP_ACCESS_ERR:
		e.Kind, e.QP = QueuePairFatal, what
	case C.KVI_EVENT_DEVICE_FATAL:
		e.Kind = DeviceFatal
	default:
		return
	}
	switch e.Kind {
	case PortDown, PortUp, GIDChange:
		if what != uint32(d.cfg.Port) {
			return
		}
	}
	for {
		select {
		case d.events <- e:
			return
		default:
		}
		select { // the oldest is dropped, unless it is the fatal one
		case old := <-d.events:
			if old.Kind == DeviceFatal {
				e = old
			}
		default:
		}
	}
}

func (d *device) Name() string         { return d.name }
func (d *device) GID() GID             { return d.gid }
func (d *device) Limits() Limits       { return d.limits }
func (d *device) Events() <-chan Event { return d.events }

func (d *device) Active() (bool, error) {
	var l C.struct_kvv_limits
	if err := check("query "+d.name, C.kvv_device_limits(d.c, C.uint8_t(d.cfg.Port), &l)); err != nil {
		return false, err
	}
	if err := d.checkGID(); err != nil {
		return false, err
	}
	if d.gid.Type == GIDInfiniBand && uint16(l.lid) != d.lid {
		return false, fmt.Errorf("verbs: the LID of %s was %d and is %d", d.name, d.lid, l.lid)
	}
	return l.port_state == C.KVI_PORT_ACTIVE, nil
}

func (d *device) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil
	}
	_ = d.file.Close() // the duplicate
	d.wg.Wait()
	if d.domains > 0 {
		return fmt.Errorf("verbs: close %s: %d protection domains are still there: %w", d.name, d.domains, syscall.EBUSY)
	}
	if err := check("close "+d.name, C.kvv_device_close(d.c)); err != nil {
		return err
	}
	d.closed = true
	return nil
}

type domain struct {
	d *device
	c *C.struct_kvv_domain

	mu     sync.Mutex
	closed bool // guarded by mu
}

func (d *device) NewDomain() (Domain, error) {
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		return nil, net.ErrClosed
	}
	d.domains++ // keeps the device open
	d.mu.Unlock()
	p := &domain{d: d}
	if err := check("allocate a protection domain with "+d.name, C.kvv_domain_alloc(d.c, &p.c)); err != nil {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.domains--
		return nil, err
	}
	return p, nil
}

func (p *domain) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil
	}
	if err := check("free a protection domain of "+p.d.name, C.kvv_domain_free(p.c)); err != nil {
		return err
	}
	p.closed = true
	p.d.mu.Lock()
	defer p.d.mu.Unlock()
	p.d.domains--
	return nil
}

type memory struct {
	d          *device
	h          unsafe.Pointer
	addr, len  uint64
	lkey, rkey uint32
	mu         sync.Mutex
	closed     bool // guarded by mu
}

func (p *domain) Register(b []byte, remote bool) (Memory, error) {
	if len(b) == 0 {
		return nil, errors.New("verbs: register: no bytes")
	}
	m := &memory{d: p.d, addr: uint64(uintptr(unsafe.Pointer(&b[0]))), len: uint64(len(b))}
	r := C.kvv_register(p.c, unsafe.Pointer(&b[0]), C.size_t(len(b)), flag(remote), &m.h, (*C.uint32_t)(&m.lkey), (*C.uint32_t)(&m.rkey))
	if r != 0 {
		return nil, p.d.refused(check(fmt.Sprintf("register %d bytes with %s", len(b), p.d.name), r), uint64(len(b)), lockedMemory())
	}
	p.d.memories.Add(1)
	return m, nil
}

func (p *domain) RegisterDMABuf(fd int, off, n uint64, remote bool) (Memory, error) {
	m := &memory{d: p.d, addr: off, len: n}
	r := C.kvv_register_dmabuf(p.c, C.uint64_t(off), C.size_t(n), C.uint64_t(off), C.int(fd), flag(remote), &m.h, (*C.uint32_t)(&m.lkey),
		(*C.uint32_t)(&m.rkey))
	if r != 0 {
		err := check(fmt.Sprintf("register %d bytes of a dma-buf with %s", n, p.d.name), r)
		if errors.Is(err, syscall.EOPNOTSUPP) || errors.Is(err, syscall.ENOSYS) {
			return nil, fmt.Errorf("%w: %w: this needs Linux 5.12, rdma-core 34, and a NIC driver that supports dma-bufs", ErrNotSupported, err)
		}
		return nil, p.d.refused(err, n, LockedMemory{Free: true}) // the exporter pins
	}
	p.d.memories.Add(1)
	return m, nil
}

func (p *domain) RegisterPeer(addr, n uint64, remote bool) (Memory, error) {
	m := &memory{d: p.d, addr: addr, len: n}
	r := C.kvv_register_peer(p.c, C.uint64_t(addr), C.size_t(n), flag(remote), &m.h, (*C.uint32_t)(&m.lkey), (*C.uint32_t)(&m.rkey))
	if r != 0 {
		err := check(fmt.Sprintf("register %d bytes of a GPU with %s", n, p.d.name), r)
		if errors.Is(err, syscall.EFAULT) { // for the kernel nothing is at that address
			return nil, fmt.Errorf("%w: %w: load nvidia-peermem", ErrNotSupported, err)
		}
		return nil, p.d.refused(err, n, LockedMemory{Free: true})
	}
	p.d.memories.Add(1)
	return m, nil
}

// refused explains a registration that failed.
func (d *device) refused(err error, n uint64, lock LockedMemory) error {
	return RefuseRegistration(err, d.name, n, int(d.memories.Load()), d.limits, lock)
}

func flag(b bool) C.int {
	if b {
		return 1
	}
	return 0
}

func (m *memory) Addr() uint64      { return m.addr }
func (m *memory) Len() uint64       { return m.len }
func (m *memory) LocalKey() uint32  { return m.lkey }
func (m *memory) RemoteKey() uint32 { return m.rkey }

func (m *memory) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return nil
	}
	if err := check("deregister", C.kvv_deregister(m.h)); err != nil {
		return err
	}
	m.d.memories.Add(-1)
	m.closed = true
	return nil
}

type completionQueue struct {
	c     *C.struct_kvv_cq
	file  *os.File
	ready chan struct{}
	wg    sync.WaitGroup

	mu     sync.Mutex
	closed bool // guarded by mu, as what follows
	n      C.int
	buf    [pollBatch]C.struct_kvv_done
}

func (d *device) NewCompletionQueue(depth int) (CompletionQueue, error) {
	if depth < 1 || depth > d.limits.MaxCompletions {
		return nil, fmt.Errorf("verbs: completion queue of %d with %s: 1 to %d: %w", depth, d.name, d.limits.MaxCompletions, ErrFull)
	}
	q := &completionQueue{ready: make(chan struct{}, 1)}
	var fd C.int
	if err := check("create a completion queue with "+d.name, C.kvv_cq_create(d.c, C.int(depth), &q.c, &fd)); err != nil {
		return nil, err
	}
	var err error
	if q.file, err = watched(int(fd), "rdma-completions"); err != nil {
		C.kvv_cq_destroy(q.c)
		return nil, err
	}
	q.wg.Go(func() {
		await(q.file, func() C.int {
			r := C.kvv_cq_event(q.c)
			if r == 0 {
				select {
				case q.ready <- struct{}{}:
				default:
				}
			}
			return r
		})
	})
	return q, nil
}

func (q *completionQueue) Ready() <-chan struct{} { return q.ready }

func (q *completionQueue) Poll(dst []Completion) (int, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return 0, net.ErrClosed
	}
	r := C.kvv_cq_poll(q.c, &q.buf[0], C.int(min(len(dst), pollBatch)), &q.n)
	for i := range int(q.n) {
		c := &q.buf[i]
		dst[i] = Completion{ID: uint64(c.id), QP: uint32(c.qp), Imm: uint32(c.imm), Status: status(c.status), Code: int(c.status)}
		if c.status == C.KVI_WC_SUCCESS && c.opcode == C.KVI_WC_RECV_RDMA_WITH_IMM {
			dst[i].Op = Receive
		} else if c.status == C.KVI_WC_SUCCESS {
			dst[i].Op = Write
		}
	}
	return int(q.n), check("poll", r)
}

func status(s C.int32_t) Status {
	switch s {
	case C.KVI_WC_SUCCESS:
		return OK
	case C.KVI_WC_WR_FLUSH_ERR:
		return Flushed
	case C.KVI_WC_LOC_PROT_ERR:
		return LocalAccess
	case C.KVI_WC_REM_ACCESS_ERR:
		return RemoteAccess
	case C.KVI_WC_RETRY_EXC_ERR:
		return RetryExceeded
	case C.KVI_WC_RNR_RETRY_EXC_ERR:
		return ReceiverNotReady
	}
	return Broken
}

func (q *completionQueue) Close() error {
	_ = q.file.Close() // the duplicate
	q.wg.Wait()
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return nil
	}
	if err := check("destroy a completion queue", C.kvv_cq_destroy(q.c)); err != nil {
		return err
	}
	q.closed = true
	return nil
}

type queuePair struct {
	d      *device
	num    uint32
	psn    uint32
	inline int

	mu     sync.Mutex
	c      *C.struct_kvv_qp // nil once closed; guarded by mu, as what follows
	state  State
	posted C.int
	work   [sendBatch]C.struct_kvv_work
}

func (p *domain) NewQueuePair(cq CompletionQueue, sends, receives int) (QueuePair, error) {
	c, ok := cq.(*completionQueue)
	if !ok {
		return nil, errors.New("verbs: queue pair: the completion queue is of another kind of device")
	}
	d := p.d
	if m := d.limits.MaxWork; sends < 1 || sends > m || receives < 1 || receives > m {
		return nil, fmt.Errorf("verbs: queue pair of %d sends and %d receives with %s: 1 to %d each: %w", sends, receives, d.name, m, ErrFull)
	}
	q := &queuePair{d: d, psn: rand.Uint32N(1 << psnBits)}
	var num C.uint32_t
	var inline C.int
	if r := C.kvv_qp_create(p.c, c.c, C.int(sends), C.int(receives), &q.c, &num, &inline); r != 0 {
		return nil, RefuseQueuePair(check("create a queue pair with "+d.name, r), d.name, int(d.queuePairs.Load()), d.limits)
	}
	d.queuePairs.Add(1)
	q.num, q.inline = uint32(num), int(inline)
	return q, nil
}

func (q *queuePair) Num() uint32    { return q.num }
func (q *queuePair) MaxInline() int { return q.inline }

func (q *queuePair) Address() Address {
	return Address{GID: q.d.gid.Raw, QP: q.num, PSN: q.psn, LID: q.d.lid, MTU: q.d.mtu, Type: q.d.gid.Type}
}

func (q *queuePair) State() State {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.state
}

// move makes one transition.
func (q *queuePair) move(to State, f func() C.int) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.c == nil {
		return net.ErrClosed
	}
	if err := check(fmt.Sprintf("queue pair %d of %s to %s", q.num, q.d.name, to), f()); err != nil {
		return err
	}
	q.state = to
	return nil
}

func (q *queuePair) ToInit() error {
	return q.move(Init, func() C.int { return C.kvv_qp_init(q.c, C.uint8_t(q.d.cfg.Port)) })
}

func (q *queuePair) ToReadyToReceive(remote Address) error {
	if err := CheckPeer(q.Address(), remote); err != nil {
		return err
	}
	p := C.struct_kvv_path{qp: C.uint32_t(remote.QP), psn: C.uint32_t(remote.PSN), lid: C.uint16_t(remote.LID), port: C.uint8_t(q.d.cfg.Port),
		gid_index: C.uint8_t(q.d.gid.Index), mtu: C.uint8_t(min(q.d.mtu, remote.MTU)), traffic_class: C.uint8_t(q.d.cfg.TrafficClass),
		service_level: C.uint8_t(q.d.cfg.ServiceLevel), hop_limit: hopLimit}
	// Within an InfiniBand subnet the LID suffices; otherwise routing is by GID.
	if remote.Type != GIDInfiniBand || remote.LID == 0 {
		p.is_global = 1
	}
	for i, b := range remote.GID {
		p.gid[i] = C.uint8_t(b)
	}
	return q.move(ReadyToReceive, func() C.int { return C.kvv_qp_rtr(q.c, &p) })
}

func (q *queuePair) ToReadyToSend() error {
	return q.move(ReadyToSend, func() C.int {
		return C.kvv_qp_rts(q.c, C.uint32_t(q.psn), C.uint8_t(q.d.cfg.Timer), C.uint8_t(q.d.cfg.Retries))
	})
}

func (q *queuePair) ToError() error {
	return q.move(Error, func() C.int { return C.kvv_qp_error(q.c) })
}
func (q *queuePair) ToReset() error {
	return q.move(Reset, func() C.int { return C.kvv_qp_reset(q.c) })
}

func (q *queuePair) PostSend(batch []Work) (taken int, err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.c == nil {
		return 0, net.ErrClosed
	}
	for taken < len(batch) {
		n := min(len(batch)-taken, sendBatch)
		for i := range n {
			w := &batch[taken+i]
			q.work[i] = C.struct_kvv_work{id: C.uint64_t(w.ID), local_addr: C.uint64_t(w.LocalAddr), remote_addr: C.uint64_t(w.RemoteAddr),
				local_key: C.uint32_t(w.LocalKey), remote_key: C.uint32_t(w.RemoteKey), len: C.uint32_t(w.Len), imm: C.uint32_t(w.Imm),
				with_imm: bit(w.Op == WriteImm), signaled: bit(w.Signaled), inlined: bit(w.Inline && w.Len > 0)}
		}
		r := C.kvv_qp_send(q.c, &q.work[0], C.int(n), &q.posted)
		taken += int(q.posted)
		if r != 0 {
			err := check(fmt.Sprintf("post to queue pair %d of %s", q.num, q.d.name), r)
			if errors.Is(err, syscall.ENOMEM) {
				err = fmt.Errorf("%w: %w", ErrFull, err)
			}
			return taken, err
		}
	}
	return taken, nil
}

func bit(b bool) C.uint8_t {
	if b {
		return 1
	}
	return 0
}

func (q *queuePair) PostReceive(ids []uint64) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.c == nil {
		return net.ErrClosed
	}
	if len(ids) == 0 {
		return nil
	}
	return check(fmt.Sprintf("post receives to queue pair %d of %s", q.num, q.d.name),
		C.kvv_qp_receive(q.c, (*C.uint64_t)(unsafe.Pointer(&ids[0])), C.int(len(ids))))
}

func (q *queuePair) Close() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.c == nil {
		return nil
	}
	if err := check(fmt.Sprintf("destroy queue pair %d of %s", q.num, q.d.name), C.kvv_qp_destroy(q.c)); err != nil {
		return err
	}
	q.d.queuePairs.Add(-1)
	q.c, q.state = nil, Reset
	return nil
}
