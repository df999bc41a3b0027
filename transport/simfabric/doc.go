// Package simfabric is a network in virtual time: hosts with several rails, switches, links with rate, latency, jitter and
// loss, buffers that overflow, rails that flap, collapse, or swallow one direction. It implements the contract of package
// transport, so that what runs on sockets runs on it unmodified, with thousands of nodes, in one goroutine.
//
// What is modelled. A lane is a reliable stream over one pair of rails, much as TCP is: it sends chunks within a congestion
// window, takes them up again after three later acknowledgements or a timeout that backs off, and dies of a lost carrier, of
// its peer's end, or of silence. A chunk crosses its links first in, first out, cut through, and is dropped where a buffer
// is full. A chunk is read under the origin's guard when it first leaves and is then on its own, like bytes in a socket: it
// may land long after, and is written under the grant's guard and a Claim, chunk by chunk. So half-written slices, late
// writes and duplicates are what they are on a wire. Confirmations queue on the way back and can be lost.
//
// What is not: packets within a chunk (a lost one costs a round trip and half the window), CPU time, the kernel's buffers.
//
// Content is bytes where a Source and a Sink have memory, and one word per chunk where they implement WordSource and WordSink.
//
// Everything happens in Step and Run, in the order of time and then of scheduling; the only randomness is the seed's. The same seed and
// the same calls give the same events, of which Trace is a hash. No goroutine, no lock, no wall clock: a Fabric and all that
// hangs on it belong to one goroutine, which Host is called on too.
package simfabric
