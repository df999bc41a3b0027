// Package simfabric is a network in virtual time: hosts with several rails, switches, links with
// rate, latency, jitter and loss, buffers that overflow, rails that flap, collapse, or drop one
// direction. It implements the contract of package transport, so that code for sockets runs on it
// unmodified, with thousands of nodes, in one goroutine.
//
// Modeled: a lane is a reliable stream over one rail pair, similar to TCP. It sends chunks within
// a congestion window, retransmits them after three later acknowledgements or a timeout with
// backoff, and dies of a lost carrier, of its peer's end, or of silence. A chunk crosses its links
// first in, first out, cut through, and is dropped if a buffer is full. A chunk is read under the
// origin's guard when it first leaves and is then independent, like bytes in a socket: it may land
// long after, and is written under the grant's guard and a Claim, chunk by chunk. Half-written
// slices, late writes and duplicates therefore occur as on a real network. Confirmations queue on
// the way back and can be lost.
//
// Not modeled: packets within a chunk (a lost one costs a round trip and half the window), CPU
// time, the kernel's buffers.
//
// Content is bytes, and one word per chunk if the memories of an origin and a grant implement
// WordSource and WordMemory.
//
// Everything happens in Step and Run, in the order of time and then of scheduling; the only
// randomness is the seed's. The same seed and the same calls give the same events, of which Trace
// is a hash. No goroutine, no lock, no wall clock: a Fabric and all its parts belong to one
// goroutine, on which Host is called too.
package simfabric
