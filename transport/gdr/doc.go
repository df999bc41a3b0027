// Package gdr is the RDMA transport: the source writes with one-sided operations straight to the final offsets.
//
// How a slice moves. The source ASKs on the lane's socket; the destination claims the chunks and answers GO with the remote
// address, length and key of every block that is still to be written, so here too the receiver alone maps chunks to memory.
// The source's NIC writes. When the last write has completed, the source looks whether what the NIC read was still valid, and
// sends its verdict as the immediate of an empty write on the same queue pair. On a reliable connection that arrives after
// every write ahead of it: it is the trailer of the slice, and the receiver's evidence. The receiver reports Landed and
// answers END. A completion at the sender alone is never success, and an immediate that rode on the last payload write could
// not carry the verdict, since nothing has been read when it is posted.
//
// Who may write. A claim keeps chunks for one writer, from GO until the verdict, and a chunk that landed is never offered
// again. A later attempt waits for a claim whose lane moves (Config.Patience, or as long as that lane's slices take), then stops that
// lane. Fence waits for Config.Patience and does the same with what is still claimed in its grant.
// Stopping a lane is the receiver's alone: its queue pair goes to the error state, and once it has flushed the receives that were
// posted before, its NIC writes nothing more, whatever a frozen or confused peer still sends. If the NIC does not obey, the keys
// under which the slice could write are invalidated instead.
// Keys belong to one peer, in a protection domain with the queue pairs to that peer alone: at any other's they are worth nothing. They
// die when that peer has not used them for a while; the next use makes a new generation.
//
// Invariants: receives for every verdict that may come are posted ahead, and one more, so there is always one to flush; each
// work request's id is its place in the order of posting; what was posted is counted, so drained is known, not waited for; a
// slice whose writes were posted and whose END did not come is InDoubt; the hot path allocates nothing once its buffers have
// grown to the largest slice.
//
// Goroutines: per rail an acceptor and one that follows the device's events; one that looks for silent lanes and idle keys;
// per lane one each that follows completions, reads the socket, writes the socket, and lands; one per ASK that waits for a
// claim, at most maxInFlight a lane; one per accepted connection until its lane is up, at most maxHalfOpen a rail. Close joins all.
package gdr
