package verbs

import (
	"errors"
	"fmt"
	"syscall"
)

// Limits of a device and its port.
type Limits struct {
	MaxRegistration  uint64 // bytes of one
	MaxRegistrations int    // of all processes
	MaxQueuePairs    int    // of all processes
	MaxMessage       uint32 // bytes of one write
	MaxWork          int    // of one queue
	MaxCompletions   int    // of one completion queue
}

const page = 4 << 10 // unit of the limit

// LockedMemory is the memory that this process may lock; a registration locks its pages.
type LockedMemory struct {
	Limit  uint64 // bytes
	Locked uint64 // so far
	Free   bool   // the limit does not hold for this process
}

// RefuseRegistration explains why a device refuses to register n bytes beside this process's
// registrations, as far as the error shows: a kernel uses the same errors for locked memory and for
// the device's tables. Any other error is returned unchanged.
func RefuseRegistration(err error, device string, n uint64, own int, l Limits,
	lock LockedMemory) error {
	full := errors.Is(err, syscall.ENOMEM) || errors.Is(err, syscall.EAGAIN) || errors.Is(err,
		syscall.ENOSPC)
	pages := (n + page - 1) &^ (page - 1)
	beyond := !lock.Free && (pages > lock.Limit || lock.Locked > lock.Limit-pages)
	switch {
	case n > l.MaxRegistration:
		return fmt.Errorf("%w: %w: one registration of %s has %d bytes at most: register in parts", err,
			ErrFull, device, l.MaxRegistration)
	case beyond && (full || errors.Is(err, syscall.EPERM)):
		return fmt.Errorf("%w: the limit of locked memory is %d bytes, of which %d are locked: run "+
			"'ulimit -l unlimited', or set LimitMEMLOCK=infinity or the pod's capability IPC_LOCK",
			err, lock.Limit, lock.Locked)
	// soft-RoCE's error for a full table
	case full || own >= l.MaxRegistrations && errors.Is(err, syscall.EINVAL):
		return fmt.Errorf("%w: %w: %s has room for %d registrations, and this process holds %d: remove "+
			"it from transports.gdr.rails, or serve fewer engines and peers from this sidecar. "+
			"If these differ widely the host has no memory left", err, ErrFull, device,
			l.MaxRegistrations, own)
	}
	return err
}

// RefuseQueuePair is like RefuseRegistration, for queue pairs.
func RefuseQueuePair(err error, device string, own int, l Limits) error {
	if !errors.Is(err, syscall.ENOMEM) && !errors.Is(err, syscall.EAGAIN) && !errors.Is(err,
		syscall.ENOSPC) && (own < l.MaxQueuePairs || !errors.Is(err, syscall.EINVAL)) {
		return err
	}
	return fmt.Errorf("%w: %w: %s has room for %d queue pairs, and this process holds %d: lower "+
		"transports.gdr.queue_pairs, or serve fewer peers from this sidecar. "+
		"If these differ widely the host has no memory left", err, ErrFull, device, l.MaxQueuePairs, own)
}
