// Package shm is the transport between two sidecars of one host: the destination's sidecar maps the
// source's memfds read-only and copies.
//
// A lane is one unix SOCK_SEQPACKET connection, proved by internal/wire like every lane. It carries
// requests and answers, and payload only if it is tiny. Move sends a pull (pieces of source
// regions). The destination checks it against its own grant, copies in bounded pieces under the
// grant's guard, and reports that. The source then checks whether the bytes were still valid
// (Source.Valid). Only with the source's verdict does the destination report Landed and confirm.
// Requests are pipelined and answers batched, so that the two round trips cost latency and no
// throughput.
//
// For at most pushBytes of host memory latency would dominate, so they are pushed. The source
// copies them into the frame and then checks whether they are still valid. A push is therefore its
// own verdict, and the destination lands and confirms at once.
//
// Fence is the receiver's guard alone: the peer holds nothing that can write. CloseOrigin waits
// until the peer has answered every pull of the origin. If it does not answer in time its lanes are
// closed: bytes that it may still read can never become Landed, because the required verdict will
// not arrive.
//
// Movers move GPU memory, a batch of pulls at a time. Large copies between host memory and a GPU
// use every PCIe link to the GPU (Config.Links), the rest goes through buffers. On either path the
// claims of a batch are entered before and left after.
//
// Invariants: a foreign region is mapped read-only, and only with seals against shrinking and
// growing. Each slice that Move accepted ends once. In-flight pulls are bounded by maxPulls in both
// directions, and a slice without a free pull waits for one.
//
// Goroutines: the backend owns an acceptor for its socket, a pool of copiers and a sweeper for
// freed regions; each lane a reader and a writer. Close joins all. Readers, writers and copiers
// call Host without any lock.
package shm
