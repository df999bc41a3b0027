// Package verbs is the small part of RDMA verbs that kvspray needs: reliable connections, registered memory, one-sided writes
// with and without an immediate, preposted receives, completions. Device is implemented by internal/verbs/fake, which is
// deterministic, and over libibverbs, opened at run time.
//
// What callers may rely on, and no more: writes of one queue pair take effect in order, and an immediate arrives after every
// write posted before it on the same queue pair. A failed completion at the sender proves nothing about the receiver's memory:
// bytes may already be there, or still arrive, as long as the receiver's own queue pair is not in the error state and its key is
// valid. Once ToError has returned on the receiver's side, nothing is written through that queue pair any more.
//
// The package holds types only; it starts no goroutine.
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
)

var statusNames = [...]string{"ok", "flushed", "local access", "remote access", "retry exceeded", "receiver not ready"}

func (s Status) String() string {
	if int(s) < len(statusNames) {
		return statusNames[s]
	}
	return fmt.Sprintf("status(%d)", uint8(s))
}

// ErrState is wrapped where a queue pair's state does not allow a call; ErrFull where a queue has no room.
var (
	ErrState = errors.New("the queue pair's state does not allow it")
	ErrFull  = errors.New("the queue is full")
)

// Address is what the other end needs to connect to a queue pair.
type Address struct {
	GID [16]byte
	QP  uint32
	PSN uint32
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
}

// Completion ends one request.
type Completion struct {
	ID     uint64
	QP     uint32
	Op     Op
	Status Status
	Imm    uint32
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
	// Poll takes up to len(dst) completions without blocking.
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
	// PostSend takes all of the batch or nothing.
	PostSend(batch []Work) error
	PostReceive(ids []uint64) error
	Close() error
}

// Device makes the rest.
type Device interface {
	Name() string
	NewCompletionQueue(depth int) (CompletionQueue, error)
	NewQueuePair(cq CompletionQueue, sends, receives int) (QueuePair, error)
	Register(b []byte) (Memory, error)
	Close() error
}
