// Package mem owns the memory that engines lend to the sidecar: mapped memfds, adopted mappings and, where nothing can be
// shared, another process's memory behind an open /proc/PID/mem descriptor.
//
// Invariants: a Region's id is random and never reused; its bytes stay mapped while any reference is held; a memfd is mapped
// only after its seals prove that it cannot shrink under us.
package mem

import "encoding/hex"

// ID names a region across the node. Random, never reused.
type ID [16]byte

func (id ID) String() string { return hex.EncodeToString(id[:]) }

// Kind says how the bytes of a region are reached.
type Kind uint8

// The kinds of a region, best first.
const (
	KindMemfd   Kind = iota + 1 // a sealed memfd that the engine allocated its cache in; mapped
	KindAdopted                 // pages of an existing allocation moved into a memfd; mapped
	KindProcess                 // another process's memory through its own /proc/self/mem descriptor; syscalls only
)

// Block is a contiguous piece of a region: what a transport reads or writes.
type Block struct {
	Region *Region
	Off    uint64 // bytes from the start of the region
	Len    uint64 // bytes
}
