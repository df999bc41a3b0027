// Package gdr is the RDMA transport: the source writes with one-sided operations straight to the
// final offsets.
//
// How a slice moves. The source sends ASK on the lane's socket. The destination claims the chunks
// and answers GO with the remote address, length and key of every block that is still to be
// written, so here too only the receiver maps chunks to memory. The source's NIC writes. When the
// last write has completed, the source checks whether the bytes that the NIC read were still valid,
// and sends its verdict as the immediate of an empty write on the same queue pair. On a reliable
// connection that arrives after every earlier write: it is the slice's trailer and the receiver's
// evidence. The receiver reports Landed and answers END. A completion at the sender alone is never
// success. An immediate on the last payload write could not carry the verdict, because nothing has
// been read when it is posted.
//
// Writers. A claim reserves chunks for one writer, from GO until the verdict, and a landed
// chunk is never offered again. A later attempt waits for a claim whose lane makes progress
// (Config.Patience, or as long as that lane's slices take), then stops that lane. Fence waits for
// Config.Patience and does the same with the remaining claims of its grant. Only the receiver can
// stop a lane: it moves its queue pair to the error state. Once the queue pair has flushed the
// receives that were posted before, its NIC writes nothing more, whatever a frozen or faulty peer
// still sends. If the NIC does not obey, the receiver invalidates the keys under which the slice
// could write. Keys belong to one peer, in a protection domain with the queue pairs to that peer
// alone: at other queue pairs they are invalid. A key ends when its peer has not used it for a
// while; the next use makes a new generation.
//
// Staged slices. Where a NIC does not reach memory, that end puts a slab between them: at the
// source it is filled after GO, at the destination GO names it. The protocol is the same. The NIC
// writes no memory of the grant then: after the verdict the lander copies the slab, under claim and
// guard. So a fence waits for that copy alone, and a later attempt stops no lane. A slab stays with
// its slice until the verdict, or until the lane is drained. Memory of a GPU that the NIC does
// reach takes the faster of the two ways (ways).
//
// Invariants: receives for every possible verdict are posted in advance, and one more, so that
// there is always one to flush. The id of a work request is its position in the order of posting.
// Posted requests are counted, so the drained state is known without waiting. A slice whose writes
// were posted and whose END did not arrive is InDoubt. The hot path allocates nothing once its
// buffers have grown to the largest slice.
//
// Goroutines: per rail an acceptor and one for the device's events; one that checks for silent
// lanes and idle keys; per lane one each that follows completions, reads the socket, writes the
// socket, and lands; one per slice that waits for a claim, a registration, a slab or a copy, at
// most 2 maxInFlight per lane; one per accepted connection until its lane is up, at most
// maxUnproved per rail without a proof. Close joins all.
package gdr
