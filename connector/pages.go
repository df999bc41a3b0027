// SPDX-License-Identifier: Apache-2.0

package connector

import (
	"time"

	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/store/page"
	"github.com/kvspray/kvspray/transfer"
)

// Store serves the pages of this node's store. Its methods may be called from any goroutine.
type Store interface {
	// Open adds a pool of a worker, until the worker's leases are fenced.
	Open(*engines.Worker, Pool) (page.ID, error)
	// Start opens a lease, in the order of the worker's ring. It does not block.
	Start(*engines.Worker, Pages)
	// Exists reports which pages are in all of the namespaces.
	Exists(namespaces []page.ID, h page.Hashes) (page.Bitmap, error)
	// Pin is Exists, and keeps what is there for a time, or until unpin.
	Pin(namespaces []page.ID, h page.Hashes, d time.Duration) (found page.Bitmap, unpin func(),
		err error)
	// Remove forgets all pages of a namespace that a pool of the worker belongs to.
	Remove(*engines.Worker, page.ID) error
}

// Pool is memory of a worker in which the pages of one namespace of the store lie: block i has its
// pieces at Base + i*Stride of their regions.
type Pool struct {
	ID        uint32 // the engine's number for it
	Namespace page.Namespace
	Pieces    []PoolPiece
	Blocks    uint32
}

// PoolPiece is a part of every block of a Pool.
type PoolPiece struct {
	Region            int // index into Worker.Regions
	Base, Stride, Len uint64
}

// Pages is a lease to get pages of the store into blocks of a pool, or to put them into the store.
// It ends like a destination lease.
type Pages struct {
	Lease    transfer.LeaseID
	Put      bool
	Pool     uint32
	Hashes   page.Hashes // of the pages, in the order of their prompt
	Before   []byte      // hash of the page before the first one; nil: none
	Blocks   []uint32    // one for each page
	Deadline time.Duration
	Req      string // for traces
}

// Bits of a page's result in Completion.Pages: the outcome, the tier that a get found it in, and
// whether a put is durable.
const (
	pageTierShift = 4
	pageDurable   = 1 << 7
)

// PageResult is the byte of one page.
func PageResult(outcome, tier uint8, durable bool) byte {
	b := outcome | tier<<pageTierShift
	if durable {
		b |= pageDurable
	}
	return b
}

// SplitPageResult is the reverse.
func SplitPageResult(b byte) (outcome, tier uint8) {
	return b & (1<<pageTierShift - 1), b &^ pageDurable >> pageTierShift
}
