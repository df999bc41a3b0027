// Package verbs is the small part of RDMA verbs that kvspray needs: reliable connections, registered memory, one-sided writes
// with and without an immediate, preposted receives, completions. Device is implemented by internal/verbs/fake, which is
// deterministic, and by Open over libibverbs, which is opened at run time and brings the provider of the NIC (libmlx5 ...)
// with it. A Device here is one port under one GID: a rail.
//
// What callers may rely on, and no more: an immediate arrives when every write posted before it on the same queue pair is in the receiver's
// memory. Until then their bytes may be there in any order or not at all, even where the sender was told that they are complete, and
// nothing that comes over another queue pair says anything of them. A failed completion at the sender proves nothing about the receiver's memory:
// bytes may already be there, or still arrive, as long as the receiver's own queue pair is not in the error state and its key is
// valid. Nothing is written through a queue pair any more once ToError has returned at the receiver's side and then a receive
// that was posted before it has completed as Flushed: a NIC flushes behind the packet that it is at. The same holds once Close
// of a registration has returned, for its keys.
//
// No pointer of Go's is kept by C: registered memory is off the heap, and work requests are copied as they are posted.
//
// Goroutines: Open starts one that waits for the device's events, NewCompletionQueue one that waits for completions; their
// Close joins them.
package verbs

import (
	"errors"
	"fmt"
)

// State of a queue pair.
type State uint8

// The states, in the order in which a queue pair passes them.
const (
	Reset State = iota
	Init
	ReadyToReceive
	ReadyToSend
	Error
	numStates
)

var stateNames = [numStates]string{"RESET", "INIT", "RTR", "RTS", "ERR"}

func (s State) String() string {
	if s < numStates {
		return stateNames[s]
	}
	return fmt.Sprintf("state(%d)", uint8(s))
}

// Op is what a work request does, or what a completion ends.
type Op uint8

// The operations.
const (
	Write    Op = iota + 1
	WriteImm    // consumes one receive at the other end and completes it with the immediate
	Receive
)

// Status of a completion.
type Status uint8

// The statuses.
const (
	OK               Status = iota
	Flushed                 // the queue pair went to the error state first
	LocalAccess             // the local key does not cover the range
	RemoteAccess            // the remote key does not cover the range, or is gone
	RetryExceeded           // no answer from the other end
	ReceiverNotReady        // no receive was posted there
	Broken                  // anything else; the queue pair is in the error state
)

var statusNames = [...]string{"ok", "flushed", "local access", "remote access", "retry exceeded", "receiver not ready", "broken"}

func (s Status) String() string {
	if int(s) < len(statusNames) {
		return statusNames[s]
	}
	return fmt.Sprintf("status(%d)", uint8(s))
}

// ErrNotSupported is wrapped where this host cannot do it; the text gives the reason and the remedy.
var ErrNotSupported = errors.New("RDMA is not supported")

// ErrState is wrapped where a queue pair's state does not allow a call; ErrFull where a queue has no room.
var (
	ErrState = errors.New("the queue pair's state does not allow it")
	ErrFull  = errors.New("the queue is full")
)

// Address is what the other end needs to connect to a queue pair.
type Address struct {
	GID  [16]byte
	QP   uint32
	PSN  uint32
	LID  uint16 // 0 on Ethernet
	MTU  MTU    // of the port
	Type GIDType
}

// MTU of a path, as verbs number it: 256 << (MTU-1) bytes.
type MTU uint8

// MTU4096 is the largest.
const MTU4096 MTU = 5

// Bytes of payload in a packet.
func (m MTU) Bytes() int { return 128 << m }

// Valid reports whether m is an MTU.
func (m MTU) Valid() bool { return m >= 1 && m <= MTU4096 }

// EventKind says what happened to a device.
type EventKind uint8

// The kinds of events.
const (
	PortDown EventKind = iota + 1
	PortUp
	GIDChange // the table of GIDs, or the LID, is another: Active says whether what was opened still holds
	QueuePairFatal
	DeviceFatal // nothing of the device works any more
)

var eventNames = [...]string{"", "port down", "port up", "GID change", "queue pair fatal", "device fatal"}

func (k EventKind) String() string {
	if int(k) < len(eventNames) {
		return eventNames[k]
	}
	return fmt.Sprintf("event(%d)", uint8(k))
}

// Event is what a device says by itself.
type Event struct {
	Kind EventKind
	QP   uint32 // of QueuePairFatal
}

// Work is one send request. The memory must stay registered until its completion, or until the queue pair is drained.
type Work struct {
	ID         uint64
	Op         Op
	LocalAddr  uint64
	LocalKey   uint32
	Len        uint32
	RemoteAddr uint64
	RemoteKey  uint32
	Imm        uint32
	Signaled   bool // failures complete always
	Inline     bool // the bytes are copied as the request is posted; host memory of at most MaxInline bytes
}

// Completion ends one request.
type Completion struct {
	ID     uint64
	QP     uint32
	Op     Op // where Status is OK; a device does not say of what kind a failed request was
	Status Status
	Imm    uint32
	Code   int // the library's own status, where Status is not OK
}

// Memory is a registered range.
type Memory interface {
	Addr() uint64
	Len() uint64
	LocalKey() uint32
	RemoteKey() uint32
	// Close invalidates both keys: nothing reads or writes through them once it has returned.
	Close() error
}

// CompletionQueue collects completions of the queue pairs that were made with it.
type CompletionQueue interface {
	// Poll takes up to len(dst) completions without blocking. An error is for good: no more will come.
	Poll(dst []Completion) (int, error)
	// Ready is signalled, at most one pending, after completions were added.
	Ready() <-chan struct{}
	Close() error
}

// QueuePair is one end of a reliable connection. Safe for concurrent use.
type QueuePair interface {
	Num() uint32
	Address() Address
	State() State
	ToInit() error
	ToReadyToReceive(remote Address) error
	ToReadyToSend() error
	// ToError flushes everything that is posted, from any state but Reset.
	ToError() error
	ToReset() error
	// PostSend takes requests in order and says how many. The rest is refused with the error, and was not posted.
	PostSend(batch []Work) (int, error)
	PostReceive(ids []uint64) error
	// MaxInline is how many bytes a request may carry Inline.
	MaxInline() int
	// Close destroys the queue pair: nothing goes through it any more. It fails where the device no longer obeys.
	Close() error
}

// Domain is a protection domain: its queue pairs reach the memory that is registered in it, and a key is worth nothing at any other's.
type Domain interface {
	NewQueuePair(cq CompletionQueue, sends, receives int) (QueuePair, error)
	// Register pins b, which stays mapped until Close. Without remote, others get no key to it.
	Register(b []byte, remote bool) (Memory, error)
	// RegisterDMABuf pins n bytes at off of the memory behind a dma-buf descriptor, which the caller may close then. Its addresses begin
	// at off: the kernel wants both to lie alike in a page.
	RegisterDMABuf(fd int, off, n uint64, remote bool) (Memory, error)
	// RegisterPeer pins n bytes of a GPU's memory at an address that its driver has mapped into this process. That takes a module of
	// the kernel by which the driver tells NICs where such an address leads: nvidia-peermem.
	RegisterPeer(addr, n uint64, remote bool) (Memory, error)
	// Close gives the domain back. It fails while something is in it.
	Close() error
}

// Device makes the rest.
type Device interface {
	Name() string
	// GID is the one that queue pairs of the device use.
	GID() GID
	// Limits of the device.
	Limits() Limits
	// Active reports whether the port can carry anything now. An error: the device, or its GID, is not what was opened.
	Active() (bool, error)
	NewCompletionQueue(depth int) (CompletionQueue, error)
	NewDomain() (Domain, error)
	// Events is closed by Close, and where the device is gone and nothing will come any more. What nobody takes in time is dropped, oldest first, except that DeviceFatal stays.
	Events() <-chan Event
	// Close ends the events. It fails, and can be tried again, while a domain is still there.
	Close() error
}
