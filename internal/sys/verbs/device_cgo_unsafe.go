//go:build cgo && linux

package verbs

// #cgo LDFLAGS: -ldl
// #include "abi.h"
// #include "library.h"
import "C"

import (
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	maxEvents = 64 // that wait to be received
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
		return fmt.Errorf("%w: %s: install libibverbs1 and ibverbs-providers (rdma-core)",
			ErrNotSupported, C.GoString(why))
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
	reads  uint8 // that a queue pair reserves: none is posted, and some devices have none
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
		return nil, fmt.Errorf("verbs: device %q has no port %d here: there are %v", cfg.Device,
			cfg.Port, names)
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
		if errors.Is(err, syscall.EACCES) || errors.Is(err, syscall.EPERM) || errors.Is(err,
			syscall.ENOENT) {
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
	d.limits = Limits{MaxRegistration: uint64(l.max_mr_size), MaxRegistrations: int(l.max_mr),
		MaxQueuePairs: int(l.max_qp), MaxMessage: uint32(l.max_msg),
		MaxWork: int(l.max_qp_wr), MaxCompletions: int(l.max_cqe)}
	d.mtu, d.reads = MTU(l.active_mtu), uint8(max(min(l.max_reads, 1), 0))
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
		C.kvv_device_gid(d.c, C.uint8_t(d.cfg.Port), C.int(d.gid.Index), (*C.uint8_t)(&raw[0]))); err !=
		nil {
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
		return fmt.Errorf("verbs: close %s: %d protection domains are still there: %w", d.name, d.domains,
			syscall.EBUSY)
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
	if err := check("allocate a protection domain with "+d.name, C.kvv_domain_alloc(d.c,
		&p.c)); err != nil {
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
	r := C.kvv_register(p.c, unsafe.Pointer(&b[0]), C.size_t(len(b)), flag(remote), &m.h,
		(*C.uint32_t)(&m.lkey), (*C.uint32_t)(&m.rkey))
	if r != 0 {
		return nil, p.d.refused(check(fmt.Sprintf("register %d bytes with %s", len(b), p.d.name), r),
			uint64(len(b)), lockedMemory())
	}
	p.d.memories.Add(1)
	return m, nil
}

func (p *domain) RegisterDMABuf(fd int, off, n uint64, remote bool) (Memory, error) {
	m := &memory{d: p.d, addr: off, len: n}
	r := C.kvv_register_dmabuf(p.c, C.uint64_t(off), C.size_t(n), C.uint64_t(off), C.int(fd),
		flag(remote), &m.h, (*C.uint32_t)(&m.lkey),
		(*C.uint32_t)(&m.rkey))
	if r != 0 {
		err := check(fmt.Sprintf("register %d bytes of a dma-buf with %s", n, p.d.name), r)
		if errors.Is(err, syscall.EOPNOTSUPP) || errors.Is(err, syscall.ENOSYS) {
			return nil, fmt.Errorf("%w: %w: this needs Linux 5.12, rdma-core 34, and a NIC driver that "+
				"supports dma-bufs", ErrNotSupported, err)
		}
		return nil, p.d.refused(err, n, LockedMemory{Free: true}) // the exporter pins
	}
	p.d.memories.Add(1)
	return m, nil
}

func (p *domain) RegisterPeer(addr, n uint64, remote bool) (Memory, error) {
	m := &memory{d: p.d, addr: addr, len: n}
	r := C.kvv_register_peer(p.c, C.uint64_t(addr), C.size_t(n), flag(remote), &m.h,
		(*C.uint32_t)(&m.lkey), (*C.uint32_t)(&m.rkey))
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

// OnDemand registers a page, and undoes that.
func (p *domain) OnDemand() bool {
	b, err := unix.Mmap(-1, 0, page, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return false
	}
	defer func() { _ = unix.Munmap(b) }()
	return C.kvv_on_demand(p.c, unsafe.Pointer(&b[0]), page) == 0
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
