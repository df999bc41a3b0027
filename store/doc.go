// Package store holds KV cache pages of engines of one node: in memory, on disks below it, and in
// an object store below these.
//
// A page is named by page.Key, is immutable and is stored once. Requests come in batches of up to
// page.MaxBatch keys and are asynchronous: Get and Put return a Batch at once, whose Done channel
// closes when every page has a Result. Exists and Pin answer from the index, without I/O.
//
// # Ownership and the fence
//
// An engine names memory by blocks of a Pool. The store touches them from Get or Put until Done is
// closed, or, after Cancel, until Fence has returned: both mean that nothing is written to it any
// more, and nothing read from it, whatever disks and workers still do. It is transport.Guard, as
// for transfers, so the release rule of docs/design.md holds for blocks that a page is loaded into.
//
// # What a caller can rely on
//
// A page whose Result is Hit has the bytes that were put: its checksum, made once at the put, is
// compared where it leaves a disk, where it is copied out, and where it enters a disk later than
// with its put. Anything else is a Result that is no Hit, and the block is undefined. A page whose
// Result is durable survives kill -9 and the loss of power, until it is given up for others or its
// namespace is removed. A page goes only after all that follow it in its prompt, so a prompt's
// pages that are here are its first ones; damage and the loss of a disk's segment are the
// exceptions. A removed namespace does not come back.
//
// # Tiers
//
// store/memory, store/disk and store/object share store/catalog (index, policy and pins of one
// tier), which joins store/index and store/evict. A Put fills a slot of memory, and from there goes
// to the disk before its Result (write-through, the default) or after it (Config.WriteBack; Flush
// waits). A Get that finds a page only in a lower tier reads it into a slot of memory, where the
// next one finds it.
//
// The object tier takes what the lowest of the other tiers gives up, and with Config.ObjectAtPut
// every page at its put, too. Either way the page is copied into a buffer and uploaded in the
// background: no put waits for the object store, and Result.Durable is of the disk. Where all
// buffers wait for uploads, the page is not taken. Flush waits for uploads.
//
// # Other nodes
//
// Config.Peers have pages that memory and the disk lack; they are asked before the object tier. A
// page comes into a slot of memory, and is copied from there once its checksum agrees: nothing that
// another node sends is written to an engine's block. Stage pins pages for others to read. Changes
// and Walk report what this node holds.
//
// # Goroutines
//
// Open starts the workers of up to four stages, and Close joins them. A stage takes pieces of
// batches, and leaves what it lacks to a later one:
//
//	requests     Config.Workers     gets and puts in memory and on the disk
//	peerFinds    peerFinders        which pages other nodes have
//	peerReads    peerFetchers       reads from other nodes
//	objectReads  Config.Fetchers    reads from the object store
//
// Gets go before puts, of which one in eight turns is owed to puts; half of the workers are in puts
// at most, so that a get does not wait for writes. Blocking reads and writes of disks run on them.
// Pages that lie one after another in the object store come with one request, and a get of others
// waits for none of them. Of the packages below store only store/object starts goroutines, for
// uploads and cleaning.
//
// # What it is not yet
//
// A page from the object store is not written to the disk: it stays in memory, or is fetched again.
// Pages of a namespace that no engine has opened since the start do not go from the disk to the
// object store. Which pages were used last is not kept over a restart: the oldest ones go first
// then.
//
// # How engines use it
//
// Package sidecar/internal/pages serves a store over the engine protocol (docs/protocol.md).
// OPEN becomes a Pool of the worker's registered regions and a Space, which stays open as long as
// a pool of it. A GET or PUT on the submission ring is one Batch and one lease: at the lease's end
// the batch is canceled, and the completion waits for its Fence. EXISTS becomes Exists, or Pin for
// a time, and REMOVE becomes Remove. Blocks may lie in GPU memory: copies go through mem.Device.
// The sidecar's store.memory, store.disk and store.object are Config.
package store
