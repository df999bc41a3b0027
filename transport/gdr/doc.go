// Package gdr is the RDMA transport: the source writes with one-sided operations straight to the final offsets.
//
// How the contract fits. Grant registers the grant's regions with keys of its own and returns them, with every block's
// address, as the token; the source computes the remote addresses of a slice from it. The last write of each chunk carries
// (slot, chunk) as its immediate; on a reliable connection it arrives after all writes ahead of it, so it is the receiver's
// evidence. The receiver reports Landed and confirms on the lane's socket; the sender's own completion is never success.
// Fence invalidates the grant's keys: a write that comes later, whenever its NIC gets to it, is refused and takes its queue
// pair down with it, and nobody else's memory. CloseOrigin waits for the completions of the origin's writes; where they do
// not come in time the queue pair goes to the error state, which flushes them. One-sided writes have no trailer, so the
// source's validity is looked at after the reads, when the completions are in, and a slice that fails it ends NotLanded; its
// chunks may have landed, and the commit needs the source's word at its close.
//
// Invariants: receives are posted ahead for every chunk that may be in flight; a failed completion ends InDoubt; slots are
// bound to a grant from Grant to Fence.
//
// Goroutines: an acceptor; per lane one that follows completions and one that reads the socket. Close joins all.
package gdr
