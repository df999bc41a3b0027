//go:build cgo

package cuda

// #cgo LDFLAGS: -ldl
// #include "driver.h"
import "C"

import (
	"fmt"
	"runtime"
	"unsafe"
)

// Driver is the opened CUDA driver.
type Driver struct {
	Version int // 1000*major + 10*minor
	Devices []Device
}

func check(op string, r C.int) error {
	if r == 0 {
		return nil
	}
	return &Error{Op: op, Code: int(r), Name: C.GoString(C.kvc_error_name(r))}
}

// Open opens libcuda.so.1 and lists the devices. Its outcome does not change in a process's life.
func Open() (*Driver, error) {
	var why *C.char
	switch r := C.kvc_open(&why); {
	case r < 0:
		return nil, fmt.Errorf("%w: %s", ErrNotSupported, C.GoString(why))
	case r > 0:
		return nil, fmt.Errorf("%w: %w", ErrNotSupported, check("Init", r))
	}
	var version, count C.int
	if err := check("DriverGetVersion", C.kvc_driver_version(&version)); err != nil {
		return nil, err
	}
	if err := check("DeviceGetCount", C.kvc_device_count(&count)); err != nil {
		return nil, err
	}
	d := &Driver{Version: int(version)}
	for i := range int(count) {
		d.Devices = append(d.Devices, Device(i))
	}
	return d, nil
}

// Name is the product name.
func (d Device) Name() (string, error) {
	var buf [128]C.char
	err := check("DeviceGetName", C.kvc_device_name(C.int(d), &buf[0], C.int(len(buf))))
	return C.GoString(&buf[0]), err
}

// PCI is the bus id, "0000:1b:00.0".
func (d Device) PCI() (string, error) {
	var buf [32]C.char
	err := check("DeviceGetPCIBusId", C.kvc_device_pci(C.int(d), &buf[0], C.int(len(buf))))
	return C.GoString(&buf[0]), err
}

// UUID names the device across processes.
func (d Device) UUID() (id [16]byte, err error) {
	err = check("DeviceGetUuid", C.kvc_device_uuid(C.int(d), (*C.uchar)(&id[0])))
	return id, err
}

// Attribute reads one attribute.
func (d Device) Attribute(a Attribute) (int, error) {
	var v C.int
	err := check("DeviceGetAttribute", C.kvc_device_attribute(C.int(d), C.int(a), &v))
	return int(v), err
}

// CanAccess reports whether d can map peer's memory.
func (d Device) CanAccess(peer Device) (bool, error) {
	var yes C.int
	err := check("DeviceCanAccessPeer", C.kvc_can_access_peer(C.int(d), C.int(peer), &yes))
	return yes != 0, err
}

// Context is a retained primary context.
type Context struct {
	Device Device
	h      C.kvc_handle
}

// Retain makes the primary context of d usable; Release gives it back.
func (d Device) Retain() (*Context, error) {
	c := &Context{Device: d}
	if err := check("DevicePrimaryCtxRetain", C.kvc_context_retain(C.int(d), &c.h)); err != nil {
		return nil, err
	}
	return c, nil
}

// Release gives the primary context back.
func (c *Context) Release() error {
	return check("DevicePrimaryCtxRelease", C.kvc_context_release(C.int(c.Device)))
}

// EnablePeer lets c reach peer's memory. Idempotent.
func (c *Context) EnablePeer(peer *Context) error {
	return check("CtxEnablePeerAccess", C.kvc_enable_peer(c.h, peer.h))
}

// PriorityRange is (lowest, highest); higher priority is a smaller number.
func (c *Context) PriorityRange() (lowest, highest int, err error) {
	var l, g C.int
	err = check("CtxGetStreamPriorityRange", C.kvc_stream_range(c.h, &l, &g))
	return int(l), int(g), err
}

// Module is loaded code; Function one kernel of it.
type (
	Module struct {
		c *Context
		h C.kvc_handle
	}
	Function struct {
		c *Context
		h C.kvc_handle
	}
)

// Load loads PTX (a trailing zero byte is added) or a cubin.
func (c *Context) Load(image []byte) (*Module, error) {
	image = append(append([]byte(nil), image...), 0)
	m := &Module{c: c}
	err := check("ModuleLoadData", C.kvc_module_load(c.h, unsafe.Pointer(&image[0]), &m.h))
	if err != nil {
		return nil, err
	}
	return m, nil
}

// Unload frees the module.
func (m *Module) Unload() error { return check("ModuleUnload", C.kvc_module_unload(m.c.h, m.h)) }

// Function finds a kernel by name.
func (m *Module) Function(name string) (*Function, error) {
	n := append([]byte(name), 0)
	f := &Function{c: m.c}
	if err := check("ModuleGetFunction "+name, C.kvc_function(m.c.h, m.h,
		(*C.char)(unsafe.Pointer(&n[0])), &f.h)); err != nil {
		return nil, err
	}
	return f, nil
}

// LaunchWords launches f with parameters that are all 64-bit words, or 32-bit ones packed in pairs.
func (f *Function) LaunchWords(s *Stream, grid, block int, params ...uint64) error {
	// params is stack or heap memory of Go; the driver copies it before it returns
	var p runtime.Pinner
	defer p.Unpin()
	p.Pin(&params[0])
	return check("LaunchKernel", C.kvc_launch(f.c.h, f.h, C.uint(grid), C.uint(block), s.h,
		unsafe.Pointer(&params[0]), C.size_t(8*len(params))))
}

// Alloc allocates device memory.
func (c *Context) Alloc(n uint64) (Ptr, error) {
	var p C.kvc_ptr
	err := check("MemAlloc", C.kvc_alloc(c.h, C.size_t(n), &p))
	return Ptr(p), err
}

// Free frees what Alloc gave.
func (c *Context) Free(p Ptr) error { return check("MemFree", C.kvc_free(c.h, C.kvc_ptr(p))) }

// MemInfo returns free and total bytes.
func (c *Context) MemInfo() (free, total uint64, err error) {
	var f, t C.size_t
	err = check("MemGetInfo", C.kvc_mem_info(c.h, &f, &t))
	return uint64(f), uint64(t), err
}

// AllocHost allocates pinned, mapped host memory, reachable from every context at the same address.
func (c *Context) AllocHost(n int) ([]byte, Ptr, error) {
	var p unsafe.Pointer
	if err := check("MemHostAlloc", C.kvc_host_alloc(c.h, C.size_t(n), &p)); err != nil {
		return nil, 0, err
	}
	return unsafe.Slice((*byte)(p), n), Ptr(uintptr(p)), nil
}

// FreeHost frees what AllocHost gave.
func (c *Context) FreeHost(b []byte) error {
	return check("MemFreeHost", C.kvc_host_free(c.h, unsafe.Pointer(&b[0])))
}

// Register pins mapped host memory and returns its device address. The memory must be off the Go
// heap.
func (c *Context) Register(b []byte) (Ptr, error) { return c.register(b, 0) }

// RegisterReadOnly is Register for memory that is mapped for reading only, where the driver can.
func (c *Context) RegisterReadOnly(b []byte) (Ptr, error) { return c.register(b, 1) }

func (c *Context) register(b []byte, readOnly C.int) (Ptr, error) {
	if err := check("MemHostRegister", C.kvc_host_register(c.h, unsafe.Pointer(&b[0]),
		C.size_t(len(b)), readOnly)); err != nil {
		return 0, err
	}
	var p C.kvc_ptr
	err := check("MemHostGetDevicePointer", C.kvc_host_device_pointer(c.h, unsafe.Pointer(&b[0]), &p))
	return Ptr(p), err
}

// Unregister undoes Register and RegisterReadOnly.
func (c *Context) Unregister(b []byte) error {
	return check("MemHostUnregister", C.kvc_host_unregister(c.h, unsafe.Pointer(&b[0])))
}

// AddressRange returns the allocation that p lies in: what IPC handles name.
func (c *Context) AddressRange(p Ptr) (base Ptr, n uint64, err error) {
	var b C.kvc_ptr
	var size C.size_t
	err = check("MemGetAddressRange", C.kvc_address_range(c.h, C.kvc_ptr(p), &b, &size))
	return Ptr(b), uint64(size), err
}

// ExportIPC names the allocation at base to another process.
func (c *Context) ExportIPC(base Ptr) (h IPCHandle, err error) {
	err = check("IpcGetMemHandle", C.kvc_ipc_export(c.h, C.kvc_ptr(base), (*C.uchar)(&h[0])))
	return h, err
}

// OpenIPC maps another process's allocation; CloseIPC unmaps it.
func (c *Context) OpenIPC(h IPCHandle) (Ptr, error) {
	var p C.kvc_ptr
	err := check("IpcOpenMemHandle", C.kvc_ipc_open(c.h, (*C.uchar)(&h[0]), &p))
	return Ptr(p), err
}

// CloseIPC unmaps what OpenIPC mapped.
func (c *Context) CloseIPC(p Ptr) error {
	return check("IpcCloseMemHandle", C.kvc_ipc_close(c.h, C.kvc_ptr(p)))
}

// ExportDMABuf makes a dma-buf descriptor, the caller's, of a range that begins and ends with a
// page of the host.
func (c *Context) ExportDMABuf(p Ptr, n uint64) (fd int, err error) {
	v := C.int(-1)
	err = check("MemGetHandleForAddressRange", C.kvc_dmabuf_export(c.h, C.kvc_ptr(p), C.size_t(n), &v))
	return int(v), err
}

// FlushRDMAWrites returns when what NICs have written to the GPU is visible to the context that
// owns the memory.
func (c *Context) FlushRDMAWrites() error {
	return check("FlushGPUDirectRDMAWrites", C.kvc_flush_rdma_writes(c.h))
}

// ImportFD maps bytes of an allocation that another process exported as a descriptor, which stays
// the caller's. CloseImport unmaps it.
func (c *Context) ImportFD(fd int, bytes uint64) (Ptr, error) {
	var p C.kvc_ptr
	err := check("MemImportFromShareableHandle and MemMap", C.kvc_import_fd(c.h, C.int(c.Device),
		C.int(fd), C.size_t(bytes), &p))
	return Ptr(p), err
}

// CloseImport unmaps what ImportFD mapped.
func (c *Context) CloseImport(p Ptr, bytes uint64) error {
	return check("MemUnmap and MemAddressFree", C.kvc_import_close(c.h, C.kvc_ptr(p), C.size_t(bytes)))
}

// Stream is a queue of device work.
type Stream struct {
	c *Context
	h C.kvc_handle
}

// NewStream makes a non-blocking stream.
func (c *Context) NewStream(priority int) (*Stream, error) {
	s := &Stream{c: c}
	if err := check("StreamCreateWithPriority", C.kvc_stream_create(c.h, C.int(priority),
		&s.h)); err != nil {
		return nil, err
	}
	return s, nil
}

// Destroy frees the stream once its work is done.
func (s *Stream) Destroy() error { return check("StreamDestroy", C.kvc_stream_destroy(s.c.h, s.h)) }

// Sync blocks its thread until the work is done.
func (s *Stream) Sync() error { return check("StreamSynchronize", C.kvc_stream_sync(s.c.h, s.h)) }

// Copy enqueues a copy between any two addresses that s's context can reach.
func (s *Stream) Copy(dst, src Ptr, n uint64) error {
	return check("MemcpyAsync", C.kvc_copy_async(s.c.h, C.kvc_ptr(dst), C.kvc_ptr(src),
		C.size_t(n), s.h))
}

// CopyRows enqueues copies of rows, in order; at least one.
func (s *Stream) CopyRows(rows []Rows) error {
	return check("Memcpy2DAsync", C.kvc_copy_rows(s.c.h,
		(*C.struct_kvc_rows)(unsafe.Pointer(&rows[0])), C.size_t(len(rows)), s.h))
}

// CopyBatch enqueues copies in one call into the driver, in no order among each other. The slices
// have equal lengths, at least 1.
func (s *Stream) CopyBatch(dst, src []Ptr, n []uint64) error {
	return check("MemcpyBatchAsync", C.kvc_copy_batch(s.c.h, (*C.kvc_ptr)(unsafe.Pointer(&dst[0])),
		(*C.kvc_ptr)(unsafe.Pointer(&src[0])),
		(*C.size_t)(unsafe.Pointer(&n[0])), C.size_t(len(dst)), s.h))
}

// CopySync copies and returns when the stream is idle.
func (s *Stream) CopySync(dst, src Ptr, n uint64) error {
	return check("MemcpyAsync and StreamSynchronize", C.kvc_copy_sync(s.c.h, C.kvc_ptr(dst),
		C.kvc_ptr(src), C.size_t(n), s.h))
}

// Set32 enqueues a fill.
func (s *Stream) Set32(dst Ptr, value uint32, words uint64) error {
	return check("MemsetD32Async", C.kvc_set32_async(s.c.h, C.kvc_ptr(dst), C.uint32_t(value),
		C.size_t(words), s.h))
}

// Write64 enqueues a 64-bit store after all earlier work of the stream.
func (s *Stream) Write64(p Ptr, v uint64) error {
	return check("StreamWriteValue64", C.kvc_write64(s.c.h, s.h, C.kvc_ptr(p), C.uint64_t(v)))
}

// Wait64 makes the stream wait until *p >= v.
func (s *Stream) Wait64(p Ptr, v uint64) error {
	return check("StreamWaitValue64", C.kvc_wait64(s.c.h, s.h, C.kvc_ptr(p), C.uint64_t(v)))
}

// Wait makes later work of s wait for e.
func (s *Stream) Wait(e *Event) error {
	return check("StreamWaitEvent", C.kvc_stream_wait(s.c.h, s.h, e.h))
}

// Event marks a point in a stream.
type Event struct {
	c *Context
	h C.kvc_handle
}

// EventKind is the purpose of an event.
type EventKind int

// The kinds of events.
const (
	OrderEvent EventKind = iota // orders streams, can be queried
	SleepEvent                  // Sync on it sleeps instead of spinning
	TimeEvent                   // Since works on it
)

// NewEvent makes an event.
func (c *Context) NewEvent(kind EventKind) (*Event, error) {
	e := &Event{c: c}
	var timing, blocking C.int
	switch kind {
	case SleepEvent:
		blocking = 1
	case TimeEvent:
		timing = 1
	}
	if err := check("EventCreate", C.kvc_event_create(c.h, timing, blocking, &e.h)); err != nil {
		return nil, err
	}
	return e, nil
}

// Sync waits for the work before the event.
func (e *Event) Sync() error { return check("EventSynchronize", C.kvc_event_sync(e.c.h, e.h)) }

// Destroy frees the event.
func (e *Event) Destroy() error { return check("EventDestroy", C.kvc_event_destroy(e.c.h, e.h)) }

// Record marks s's present end.
func (e *Event) Record(s *Stream) error {
	return check("EventRecord", C.kvc_event_record(s.c.h, e.h, s.h))
}

const notReady = 600 // CUDA_ERROR_NOT_READY

// Done reports whether the work before the event is done.
func (e *Event) Done() (bool, error) {
	r := C.kvc_event_query(e.c.h, e.h)
	if r == notReady {
		return false, nil
	}
	return r == 0, check("EventQuery", r)
}

// Since is the device time from start to e in milliseconds.
func (e *Event) Since(start *Event) (float64, error) {
	var ms C.float
	err := check("EventElapsedTime", C.kvc_event_elapsed(e.c.h, start.h, e.h, &ms))
	return float64(ms), err
}
