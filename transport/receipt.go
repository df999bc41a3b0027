package transport

import (
	"iter"
	"sync/atomic"

	"github.com/kvspray/kvspray/transfer"
)

// MaxBackends bounds the transports that a Receipt distinguishes.
const MaxBackends = 8

// Receipt records what has landed of a grant: the chunks, by their claims, and the bytes by
// transport, by the grant's Landed. Both write to it concurrently.
type Receipt struct {
	chunks *transfer.Bitmap
	bytes  [MaxBackends]atomic.Uint64 // by index of the backend; duplicates count once
}

// Reset starts the record of a grant of n chunks.
func (r *Receipt) Reset(n uint32) { r.chunks = transfer.NewBitmap(n) }

// Chunks is the number of chunks of the grant.
func (r *Receipt) Chunks() uint32 { return r.chunks.Len() }

// Set records chunks, and returns how many of them were missing.
func (r *Receipt) Set(chunks transfer.Range) (fresh uint32) { return r.chunks.Set(chunks) }

// Landed is the number of chunks that have landed.
func (r *Receipt) Landed() uint32 { return r.chunks.Count() }

// Shares is how much of each equal part of the space has landed, in percent.
func (r *Receipt) Shares(into []uint8) { r.chunks.Shares(into) }

// Full reports whether no chunk is missing.
func (r *Receipt) Full() bool { return r.chunks.Full() }

// Missing lists the missing chunks.
func (r *Receipt) Missing() iter.Seq[transfer.Range] { return r.chunks.Missing() }

// Add counts bytes of chunks that were missing. full: no chunk is missing any more.
func (r *Receipt) Add(backend int, bytes uint64) (full bool) {
	r.bytes[backend].Add(bytes)
	return r.Full()
}

// Bytes returns the counted bytes of a backend.
func (r *Receipt) Bytes(backend int) uint64 { return r.bytes[backend].Load() }
