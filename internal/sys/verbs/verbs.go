// Package verbs is the part of RDMA verbs that kvspray needs: reliable connections, registered
// memory, one-sided writes with and without an immediate, preposted receives, completions. Device
// is implemented by internal/sys/verbs/fake, which is deterministic, and by Open over libibverbs,
// which is opened at run time and loads the NIC's provider (libmlx5 ...). A Device here is one port
// under one GID: a rail.
//
// Callers may rely on the following, and no more. An immediate arrives when every write posted
// before it on the same queue pair is in the receiver's memory. Until then the bytes may be there
// in any order or not at all, even if the sender's writes are complete, and nothing on another
// queue pair is evidence of them. A failed completion at the sender proves nothing about the
// receiver's memory: bytes may already be there, or still arrive, while the receiver's own queue
// pair is not in the error state and its key is valid. Nothing is written through a queue pair any
// more once ToError has returned at the receiver's side and then a receive that was posted before
// it has completed as Flushed: a NIC flushes after its current packet. The same holds for the keys
// of a registration once its Close has returned.
//
// C keeps no Go pointer: registered memory is off the heap, and work requests are copied when they
// are posted.
//
// Goroutines: Open starts one that waits for the device's events, NewCompletionQueue one that waits
// for completions; their Close joins them.
package verbs

import (
	"errors"
	"fmt"
	"math/bits"
)

// State of a queue pair.
type State uint8

// The states, in a queue pair's order.
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

// Op is the operation of a work request or a completion.
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
	Flushed                 // the queue pair entered the error state first
	LocalAccess             // the local key does not cover the range
	RemoteAccess            // the remote key does not cover the range, or is gone
	RetryExceeded           // no answer from the other end
	ReceiverNotReady        // no receive was posted there
	Broken                  // any other error; the queue pair is in the error state
)

var statusNames = [...]string{"ok", "flushed", "local access", "remote access", "retry exceeded",
	"receiver not ready", "broken"}

func (s Status) String() string {
	if int(s) < len(statusNames) {
		return statusNames[s]
	}
	return fmt.Sprintf("status(%d)", uint8(s))
}

// ErrNotSupported is wrapped if this host has no support; the text has reason and remedy.
var ErrNotSupported = errors.New("RDMA is not supported")

// ErrState is wrapped if a queue pair's state does not permit a call; ErrFull if a queue has no
// room.
var (
	ErrState = errors.New("the queue pair's state does not allow it")
	ErrFull  = errors.New("the queue is full")
)

// Address is the data for connecting to a queue pair.
type Address struct {
	GID  [16]byte
	QP   uint32
	PSN  uint32
	LID  uint16 // 0 on Ethernet
	MTU  MTU    // of the port
	Type GIDType
}

// MTU of a path, in the numbering of verbs: 256 << (MTU-1) bytes.
type MTU uint8

// MTU4096 is the largest.
const MTU4096 MTU = 5

// Bytes of payload in a packet.
func (m MTU) Bytes() int { return 128 << m }

// MTUOf is the MTU of that many bytes; 0: none.
func MTUOf(bytes int) MTU {
	if bytes <= 0 {
		return 0
	}
	return MTU(bits.Len(uint(bytes)) - 8)
}

// Valid reports whether m is an MTU.
func (m MTU) Valid() bool { return m >= 1 && m <= MTU4096 }

// EventKind is the kind of an event.
type EventKind uint8

// The kinds of events.
const (
	PortDown EventKind = iota + 1
	PortUp
	// the table of GIDs, or the LID, has changed: Active reports whether the device is still valid.
	GIDChange
	QueuePairFatal
	DeviceFatal // the device is unusable
)

var eventNames = [...]string{"", "port down", "port up", "GID change", "queue pair fatal",
	"device fatal"}

func (k EventKind) String() string {
	if int(k) < len(eventNames) {
		return eventNames[k]
	}
	return fmt.Sprintf("event(%d)", uint8(k))
}

// Event is a device's notification.
type Event struct {
	Kind EventKind
	QP   uint32 // of QueuePairFatal
}

// Work is one send request. The memory must stay registered until its completion, or until the
// queue pair is drained.
type Work struct {
	ID         uint64
	Op         Op
	LocalAddr  uint64
	LocalKey   uint32
	Len        uint32
	RemoteAddr uint64
	RemoteKey  uint32
	Imm        uint32
	Signaled   bool // failures always complete
	// the bytes are copied when the request is posted; host memory of at most MaxInline bytes
	Inline bool
}

// Completion ends one request.
type Completion struct {
	ID     uint64
	QP     uint32
	Op     Op // if Status is OK; a device does not report the kind of a failed request
	Status Status
	Imm    uint32
	Code   int // the library's status, if Status is not OK
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

// CompletionQueue collects completions of its queue pairs.
type CompletionQueue interface {
	// Poll returns up to len(dst) completions without blocking. An error is permanent: no more will
	// come.
	Poll(dst []Completion) (int, error)
	// Ready is signaled, at most one pending, after completions were added.
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
	// ToError flushes all posted requests, from any state but Reset.
	ToError() error
	ToReset() error
	// PostSend posts requests in order and returns their number. The rest was refused with the
	// error, and was not posted.
	PostSend(batch []Work) (int, error)
	PostReceive(ids []uint64) error
	// MaxInline is the largest size of an Inline request.
	MaxInline() int
	// Close destroys the queue pair: nothing goes through it any more. It fails if the device no
	// longer obeys.
	Close() error
}

// Domain is a protection domain: its queue pairs reach the memory registered in it, and its keys
// are invalid on other queue pairs.
type Domain interface {
	NewQueuePair(cq CompletionQueue, sends, receives int) (QueuePair, error)
	// Register pins b, which stays mapped until Close. Without remote, peers get no key to it.
	Register(b []byte, remote bool) (Memory, error)
	// RegisterDMABuf pins n bytes at off of the memory of a dma-buf descriptor, which the caller
	// may then close. Its addresses begin at off: the kernel requires equal offsets within a page.
	RegisterDMABuf(fd int, off, n uint64, remote bool) (Memory, error)
	// RegisterPeer pins n bytes of GPU memory at an address that its driver has mapped into this
	// process. It needs the kernel module nvidia-peermem, which resolves such addresses for NICs.
	RegisterPeer(addr, n uint64, remote bool) (Memory, error)
	// Close releases the domain. It fails while the domain is in use.
	Close() error
}

// OnDemand is a Domain that reports whether its device registers memory without pinning it. No
// other code uses that: it is for reports.
type OnDemand interface {
	OnDemand() bool
}

// Device makes the other objects.
type Device interface {
	Name() string
	// GID is the GID of the device's queue pairs.
	GID() GID
	// Limits of the device.
	Limits() Limits
	// Active reports whether the port can carry data now. An error: the device, or its GID, has
	// changed since Open.
	Active() (bool, error)
	NewCompletionQueue(depth int) (CompletionQueue, error)
	NewDomain() (Domain, error)
	// Events is closed by Close, and if the device is gone and no event will follow. Unread events
	// are dropped, oldest first, except DeviceFatal.
	Events() <-chan Event
	// Close ends the events. It fails, and can be retried, while a domain exists.
	Close() error
}
