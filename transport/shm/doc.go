// Package shm is the transport between two sidecars of one host: the destination's sidecar maps the source's memfds read-only
// and copies.
//
// A lane is one unix SOCK_SEQPACKET connection, proved by internal/wire like every lane. It carries requests and answers, and payload
// only where there is next to none. Move sends a pull (pieces of source regions); the destination checks it against its own grant,
// copies in bounded pieces under the grant's guard, and says so; the source then looks whether what was read was still
// promised (Source.Valid), and only its verdict lets the destination report Landed and confirm. Requests are pipelined and
// answers batched, so that the two round trips cost latency and no throughput.
//
// Of at most pushBytes of host memory the latency would be all: they are pushed. The source copies them into the frame and only then
// looks whether they were still promised, so that what it sends is its verdict too, and the destination lands and confirms at once.
//
// Fence is the receiver's guard alone: the peer holds nothing that can write. CloseOrigin waits until the peer has answered
// every pull of the origin. Where it does not answer in time its lanes are closed: what it may still read can never become
// Landed, because the verdict that this takes will not come.
//
// Memory of GPUs is moved by movers, a batch of pulls at a time. What is large between host memory and a GPU goes over every PCIe link
// that leads there (Config.Links), the rest through buffers; the claims of a batch are entered before and left after, whichever way it takes.
//
// Invariants: a foreign region is mapped read-only, and only with seals against shrinking and growing; each slice that Move took
// ends once; in-flight pulls are bounded by maxPulls in both directions, and a slice for which none is left waits for one.
//
// Goroutines: the backend owns an acceptor for its socket, a pool of copiers and a sweeper for freed regions; each lane a
// reader and a writer. Close joins all. Host is called from readers, writers and copiers, under no lock.
package shm
