/* kvspray.h: the engine side of kvspray, as one small C library (libkvspray.so, libc and pthread only).
 *
 * A client is one session holder: a worker (one engine rank, with a board) or a scheduler (admission only). It owns
 *   - the unix SOCK_SEQPACKET connection to the sidecar and its reconnection,
 *   - the board: a flags memfd that lives as long as the client, and a rings memfd that is fresh on every connection,
 *   - the list of open leases, and a snapshot of each, which is presented to the next session,
 *   - a pidfd of every sidecar process that may still access blocks of an open lease,
 *   - one background thread, which needs no interpreter lock and calls nothing outside this library,
 *   - with regions of a GPU, another such thread: it packs and unpacks blocks there for the sidecar, on a stream of its own in the context
 *     that the regions belong to. kvs_end waits for what it has launched.
 *
 * Threads. Every function may be called from any thread. None blocks but kvs_wait, kvs_wait_connected, kvs_end and kvs_close; the
 * others take one mutex that is held for copies only. kvs_signal_* take no lock: one store each.
 *
 * Fork. A forked child's client is inert: every call returns KVS_E_FORKED (kvs_close only unmaps and closes).
 *
 * Release rule. A lease completes exactly once, through kvs_poll: by the sidecar's record, or by a record of this library.
 * The latter needs the proved exit (by pidfd) of every sidecar process that could access its blocks, or the sidecar's report
 * that it has fenced the earlier session. Time alone never completes a lease that a running process holds.
 */
#ifndef KVSPRAY_KVSPRAY_H
#define KVSPRAY_KVSPRAY_H

#include <stddef.h>
#include <stdint.h>

#include "board.h"

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

#define KVS_PROTOCOL_MAJOR 1
#define KVS_PROTOCOL_MINOR 0
#define KVS_PACKET_MAX_BYTES (1u << 20) /* type and body of one socket packet */
#define KVS_PACKET_MAX_FDS 32
#define KVS_MAX_REGIONS 1024    /* of a client, in all */
#define KVS_MAX_REGION_FILES 256 /* that its regions lie in: each takes a descriptor here and in the sidecar */
#define KVS_MAX_LEASES 65536    /* open at once; WELCOME may lower it */
#define KVS_MAX_AWAITS 4096     /* open admission questions of a scheduler */
#define KVS_MAX_REQUESTS 256    /* about pages of the store, until their answers were fetched */
#define KVS_MAX_REQ_BYTES 128   /* of a request's name */
#define KVS_MAX_RANKS 1024      /* of an engine, that a decline names */
#define KVS_MAX_DECLINES 1024   /* of a scheduler, while the socket takes none */
#define KVS_MAX_ENDS 256        /* of pins and of namespaces, while the socket takes none */
#define KVS_MAX_HOLD_MS 600000  /* from HOLD until HELD has no effect; transfer.hold_timeout of a sidecar is not longer */
#define KVS_MAX_SIDECARS 16     /* sidecar processes that may still access blocks of an open lease */
#define KVS_LOAD_GRACES 10      /* further ones, for a sidecar that answers but does not end a load: see kvs_submit_load */

/* Results below zero. */
enum kvs_error {
	KVS_E_ARG = -1,           /* an argument is invalid; kvs_info.error names it */
	KVS_E_NOT_CONNECTED = -2, /* no registered session: prefill locally */
	KVS_E_FULL = -3,          /* the submission ring has no room: prefill locally */
	KVS_E_DEGRADED = -4,      /* the session is being replaced, or the sidecar drains */
	KVS_E_TOO_BIG = -5,       /* the record exceeds KVS_RECORD_MAX_BYTES or half the ring */
	KVS_E_UNKNOWN = -6,       /* no such open lease (already complete: a race, not an error) */
	KVS_E_LIMIT = -7,         /* a bounded table is full */
	KVS_E_FORKED = -8,        /* this process is a fork of the client's owner */
	KVS_E_CLOSED = -9,
	KVS_E_SYS = -10,          /* a system call failed; errno is kept */
	KVS_E_BUFFER = -11,       /* the caller's buffer cannot hold the next record */
	KVS_E_GPU = -12,          /* the CUDA driver refused, or is missing; kvs_gpu_error has the reason */
	KVS_E_UNSUPPORTED = -13,  /* this sidecar has no page store, or takes no segments */
	KVS_E_UNKILLABLE = -14,   /* a COPY or LOAD, whose end the engine may wait for, and this process may not kill the sidecar */
};

/* Result of calls on an open lease without a session: the state is kept and presented to the next session. */
#define KVS_KEPT 1

const char *kvs_strerror(int error);

/* ---- memory that the sidecar may access ---------------------------------------------------------------------------- */

enum kvs_region_kind {
	KVS_REGION_MEMFD = 1,   /* allocated by this library in a sealed memfd */
	KVS_REGION_PROCESS = 2, /* this process's memory through its own /proc/self/mem descriptor */
	KVS_REGION_DEVICE = 3,  /* memory of a GPU, imported by the sidecar */
};

#define KVS_MAX_COPY_BLOCKS 32768 /* of one COPY */
#define KVS_HANDLE_BYTES 104 /* docs/protocol.md section 1.1 */

struct kvs_region {
	uint8_t id[16]; /* random, never reused */
	int32_t kind;   /* enum kvs_region_kind */
	int32_t fd;     /* -1: none (DEVICE by an IPC handle) */
	uint64_t addr; /* where it is mapped in this process */
	uint64_t bytes;
	uint8_t handle[KVS_HANDLE_BYTES]; /* DEVICE only */
	uint64_t offset; /* MEMFD: where in the file of fd it begins */
	uint32_t part;   /* 1: fd and mapping belong to the region that it is a part of */
	uint32_t reserved;
};

/* A sealed memfd (SHRINK, GROW, SEAL), mapped shared; bytes is rounded up to pages. All of it is allocated by this call, with
 * several threads where it is large. KVS_E_SYS, errno ENOMEM or ENOSPC: there is not that much memory. */
int kvs_region_alloc(uint64_t bytes, struct kvs_region *out);

/* As kvs_region_alloc, without any memory yet. kvs_region_populate must have returned 0 for a range before this process or the sidecar uses it: an
 * access without memory raises SIGBUS. */
int kvs_region_reserve(uint64_t bytes, struct kvs_region *out);

/* Allocates a range of a MEMFD region, whose offset is a multiple of the page size. Huge pages need one of 2 MiB. Memory that is allocated already
 * keeps its bytes. KVS_E_SYS, errno ENOMEM or ENOSPC: there is not that much memory, and a part of the range may have some. */
int kvs_region_populate(const struct kvs_region *region, uint64_t offset, uint64_t bytes);

/* Any readable and writable range of this process. */
int kvs_region_process(uint64_t addr, uint64_t bytes, struct kvs_region *out);

/* A part of a MEMFD region, as a region of its own: `offset` is a multiple of the page size. Many parts use one descriptor. The whole
 * must outlive them, and bytes that two regions share are refused by the sidecar. */
int kvs_region_part(const struct kvs_region *whole, uint64_t offset, uint64_t bytes, struct kvs_region *out);

/* A range of one GPU allocation of this process: any slice of an allocation of cudaMalloc (such as torch's allocator
 * returns), or of cuMemCreate with POSIX descriptors allowed. The allocation must exist until its leases have ended. KVS_E_GPU: `error`
 * has the reason why the sidecar could not import it, and the remedy. */
int kvs_region_gpu(uint64_t addr, uint64_t bytes, struct kvs_region *out, char *error, uint32_t error_bytes);

/* Maps new memory of a GPU, by its number in this process, at `addr`: a range that cuMemAddressReserve has returned and that maps nothing. The
 * memory can be made a region. The caller ends it with cuMemUnmap and cuMemRelease(*memory). KVS_E_GPU: nothing is mapped; `error` has the reason. */
int kvs_gpu_map(uint32_t device, uint64_t addr, uint64_t bytes, uint64_t *memory, char *error, uint32_t error_bytes);

/* Closes the descriptor; unmaps MEMFD regions, leaves process memory as it is. Only once no open lease names
 * its blocks. */
void kvs_region_free(struct kvs_region *region);

/* ---- client ------------------------------------------------------------------------------------------------------- */

enum kvs_role { KVS_WORKER = 1, KVS_SCHEDULER = 2 };

struct kvs_config {
	uint32_t size;           /* sizeof(struct kvs_config) of the caller */
	uint32_t role;           /* enum kvs_role */
	const char *socket_path; /* NULL: the default of docs/protocol.md section 1 */
	const char *engine_name;
	const char *engine_version;
	const char *engine_id;
	uint32_t ranks[10];        /* dp, pp, tp, pcp, dcp: rank, size */
	uint32_t layers;           /* worker: flags on the board, 1..KVS_MAX_LAYERS */
	uint32_t submission_bytes; /* ring sizes, powers of two; 0: 4 MiB and 256 KiB */
	uint32_t completion_bytes;
	uint32_t deadline_ms; /* of a lease; 0: that of WELCOME, 30,000 before it */
	uint32_t grace_ms;    /* at most this after a deadline, then a sidecar that does not answer is killed; 0: that of WELCOME */
	const char *release;  /* of the package that contains this library, for errors and logs; NULL: unknown */
	const char *engine_api;  /* URL of the engine's API server, for routers; NULL: unknown */
	const char *engine_role; /* prefill, decode or both, for routers; NULL: unknown */
	/* Callers whose size ends here have none of the following. */
	const char *engine_events; /* endpoint of its KV events, for routers, such as tcp://x:5557, where x may be an asterisk; NULL: none */
	const char *engine_replay; /* of their replay; NULL: none */
};

typedef struct kvs_client kvs_client;

/* Makes the client and its board. It does not connect. */
int kvs_open(const struct kvs_config *config, kvs_client **out);

/* Starts the background connection. Worker: `regions` (their descriptors are duplicated) and `layout`, one msgpack map
 * (docs/protocol.md section 3), are presented on every connection. They have the numbers from 0 on. Without a layout the worker takes part in no
 * transfer, only in copies and in gets and puts of the store. Scheduler: n = 0, layout NULL. Once. */
int kvs_start(kvs_client *c, const struct kvs_region *regions, uint32_t n, const void *layout, uint32_t layout_bytes);

/* Worker, after kvs_start: adds regions, which are presented on every connection until they are dropped. Returns the number of the first one, which
 * is used only once, or KVS_E_LIMIT. It does not wait for the sidecar; if that refuses them, kvs_info.error has the
 * reason, and so has the refusal of what uses them. */
int64_t kvs_regions_add(kvs_client *c, const struct kvs_region *regions, uint32_t n);

/* Waits until the sidecar has answered for all regions that were added. A request may reach it before its regions do, unless it waits for this.
 * 1: it has answered; what it refused is in the log, and refused in each request. 0: not within timeout_ms (negative: for ever), or no session. */
int kvs_regions_wait(kvs_client *c, int timeout_ms);

/* Takes back regions that were added. New leases cannot use them. Returns a request for kvs_answer, whose answer, DONE (type 19), comes once nothing
 * accesses them; 0: there is no session. Without DONE the memory may be used for something else once every lease that used it has completed
 * through kvs_poll. */
int64_t kvs_regions_drop(kvs_client *c, const uint32_t *numbers, uint32_t n);

/* Worker: replaces the layout of the same memory, for example because the engine has other weights. Every open source lease is
 * released, and the session is replaced by one that presents this layout; running loads fail. KVS_E_ARG before kvs_start. */
int kvs_describe(kvs_client *c, const void *layout, uint32_t layout_bytes);

/* Worker: replaces the regions and the layout of kvs_start. With n 0 and layout NULL, the engine takes its memory back for a while. As for
 * kvs_describe, a new session follows. When kvs_connected returns 1, the sidecar no longer accesses the former regions, and the caller may free
 * them. KVS_E_ARG before kvs_start, and while there are regions of kvs_regions_add. */
int kvs_replace(kvs_client *c, const struct kvs_region *regions, uint32_t n, const void *layout, uint32_t layout_bytes);

/* Sends BYE and joins the background thread. Waits of other threads return, and from now on every call behaves as without a sidecar. Open leases
 * are forgotten: the sidecar fences them when this process ends. One thread calls it, once or more often. */
void kvs_end(kvs_client *c);

/* kvs_end; then it unmaps the board and frees the client. No other call may run, or follow. */
void kvs_close(kvs_client *c);

/* 1: there is a registered session, 0: none. */
int kvs_connected(kvs_client *c);
/* Waits until connected or until timeout_ms have passed (negative: no limit). 1 or 0. */
int kvs_wait_connected(kvs_client *c, int timeout_ms);

/* ---- worker: records of the engine --------------------------------------------------------------------------------- */

/* Flags. Monotonic per layer; layer == layers is the end of the step. No lock, no system call. */
int kvs_signal_layer(kvs_client *c, uint32_t layer, uint64_t step);
int kvs_signal_step(kvs_client *c, uint64_t step);
/* The board's flags memfd, for registration with a GPU; valid until kvs_close. */
void *kvs_flags(kvs_client *c, uint64_t *bytes);

/* Deadline of a lease and match timeout of the latest WELCOME: ms << 32 | ms. No lock. */
uint64_t kvs_deadlines(kvs_client *c);

/* What presents a lease to another session: one complete INTENT body. */
struct kvs_snapshot {
	uint64_t lease;
	const void *body;
	uint64_t body_bytes;
};

/* Opens a lease with an INTENT, EXPECT, COPY, LOAD, GET or PUT body. COPY makes the sidecar copy blocks from one region of kvs_start to another, or to another
 * place in the same: between a cache in host memory and one on a GPU, weights back to where they were. The blocks, read and written, are the
 * sidecar's until the lease completes with KVS_REC_RECEIVED; KVS_OK: all of them arrived; else an unknown part of them may have. Copies run at
 * once and in no order; kvs_cancel ends one soon. LOAD is as COPY, for the same pages of several tensors in order. It raises a load flag as
 * they arrive, unless the flag is below the load's value: begin a load (`after`) only when the flag has reached it. Bodies: docs/protocol.md section 2. deadline_ms is the body's own. Returns the lease id (> 0) or an error, after
 * which nothing is open and nothing was sent. */
int64_t kvs_submit(kvs_client *c, uint16_t type, const void *body, uint32_t bytes, uint32_t deadline_ms);

/* What a stream waits for with a LOAD: its flag and value, and the number of its parts. */
struct kvs_landing {
	uint32_t flag;
	uint64_t value, parts;
	uint64_t *arrived; /* valid until this lease and those of all loads before it have completed */
};

/* As kvs_submit of a LOAD, of which a stream waits for flag >= value + parts. If the lease ends before all parts are there, the library writes
 * the number of those that are to *arrived, and then raises the flag to value + parts: the stream itself has to copy the others. It does so after
 * the loads before this one have ended, in a thread of its own, within some 10 ms, whatever the engine's threads do. A sidecar that answers but
 * does not end the lease is killed KVS_LOAD_GRACES further graces after deadline and grace, and kvs_end waits until then. Loads are submitted in
 * the order of their values, of all flags together. */
int64_t kvs_submit_load(kvs_client *c, const void *body, uint32_t bytes, uint32_t deadline_ms, const struct kvs_landing *landing);

/* One STEP record, and the snapshots as of it. 0 or KVS_KEPT; both mean that the library has the state. If the ring has no
 * room the session is replaced in the background and the snapshots are presented in the new one. Errors: KVS_E_TOO_BIG (split
 * it), KVS_E_ARG. */
int kvs_step(kvs_client *c, const void *body, uint32_t bytes, const struct kvs_snapshot *snapshots, uint32_t n);

/* Preempt and hold carry the lease's new snapshot. Preempt moves the source epoch first, whatever is wrong with its argument: the
 * blocks are lost. A lease whose snapshot cannot be kept is released. */
int kvs_preempt(kvs_client *c, const struct kvs_snapshot *snapshot);
int kvs_hold(kvs_client *c, const struct kvs_snapshot *snapshot);
/* The engine needs the blocks of a source lease that is held: no receiver binds any more, and bound ones finish. */
int kvs_yield(kvs_client *c, uint64_t lease);
/* Releases a lease; it still completes through kvs_poll. For a source lease it moves the source epoch first. */
int kvs_cancel(kvs_client *c, uint64_t lease, const char *reason);

/* Copies completions into buf: struct kvs_record, body, padded to 8 bytes, one after the other. Returns the bytes used, 0 when
 * there are none. Records of the library itself have an empty map as body (KVS_LOST), or {"reason": str}. */
int64_t kvs_poll(kvs_client *c, void *buf, uint64_t cap);
/* Waits until kvs_poll would return something (1), or timeout_ms have passed (0; negative: no limit). With an open lease a process with
 * four or more processors polls for up to 300 us before it sleeps, unless its last wait took longer. */
int kvs_wait(kvs_client *c, int timeout_ms);

/* The value of a load flag; 0 if the client has no such flag. */
uint64_t kvs_load_value(kvs_client *c, uint32_t flag);

/* ---- worker: signals by the GPU itself ----------------------------------------------------------------------------- */

/* Uses the board's flags from a GPU, by the CUDA driver opened at run time (libcuda.so.1). Streams are CUstream of the engine's
 * context. One thread at a time. No call waits for the GPU but kvs_gpu_close; the driver may let one wait where the stream's queue
 * is full. After KVS_E_GPU a flag may be missing: the step must not be announced, or its leases end at their deadline. */
typedef struct kvs_gpu kvs_gpu;

/* In a thread whose current CUDA context is the engine's. KVS_E_GPU: `error` names what is missing. */
int kvs_gpu_open(kvs_client *c, kvs_gpu **out, char *error, uint32_t error_bytes);
/* Waits for what was enqueued on its side branch. When no graph with its signals runs any more; before kvs_close or after it, the flags stay
 * mapped until both were called. */
void kvs_gpu_close(kvs_gpu *g);
/* The first failure, for a log. */
const char *kvs_gpu_error(kvs_gpu *g);

/* Before the step's first kernel, or before the launch of its graph, on the same stream and outside a capture: this is step
 * `step`. Steps never fall. */
int kvs_gpu_step(kvs_gpu *g, uint64_t step, void *stream);
/* After the layer's last write to its cache. Eager: one stream write. In a capture: a leaf of the graph, which marks the layer complete in the
 * step that kvs_gpu_step set before the replay. */
int kvs_gpu_signal_layer(kvs_gpu *g, uint32_t layer, void *stream);
/* The end of the step, all layers; in a capture it joins its side branch as well. Each step has to have one, in the graph or behind its replay:
 * the flags of its layers are cleared with the next step. */
int kvs_gpu_signal_step(kvs_gpu *g, void *stream);
/* Outside a capture: *mark is a number for the `after` of a record, which takes effect once everything that the stream holds by now is done. */
int kvs_gpu_mark(kvs_gpu *g, void *stream, uint64_t *mark);
/* 1: the stream has reached this mark, 0: not yet. All marks have to be of one stream. Any thread; makes no call to CUDA. */
int kvs_gpu_reached(kvs_gpu *g, uint64_t mark);
/* The stream goes on once load_flags[layer] >= value. In a graph the value is baked in. */
int kvs_gpu_wait_layer(kvs_gpu *g, uint32_t layer, uint64_t value, void *stream);

/* ---- scheduler: admission ----------------------------------------------------------------------------------------- */

enum kvs_admission_state {
	KVS_ADMISSION_NONE = 0, /* never asked, or forgotten */
	KVS_ADMISSION_PENDING = 1,
	KVS_ADMISSION_ADMITTED = 2,
	KVS_ADMISSION_REFUSED = 3,
	KVS_ADMISSION_GONE = 4, /* reported by the sidecar, or ttl passed without an answer */
};

struct kvs_admission {
	uint32_t state;
	uint32_t tokens;
	char message[232];
};

/* Asks once per (xfer, hash): further calls add an asker to the same query. Sent again after a reconnection. Dropped at ttl_ms + 60 s. */
int kvs_await(kvs_client *c, const uint8_t xfer[16], const uint8_t hash[32], const char *peer, uint32_t tokens,
              uint32_t ttl_ms);
int kvs_admission(kvs_client *c, const uint8_t xfer[16], const uint8_t hash[32], struct kvs_admission *out);
/* The ranks of this engine expect that prompt's KV from now on: one asker needs no further answer. A query without askers is not sent again after a
 * reconnection: an EXPECT ends with its sidecar, and for the query the source's engine would keep the blocks until the hold timeout. */
int kvs_expected(kvs_client *c, const uint8_t xfer[16], const uint8_t hash[32]);

/* Ranks of this engine will not expect that prompt's KV: the source's engine need not keep it for them. req: the request, as its ranks name it in
 * kvs_expect; then each rank declines once, whatever the others do. NULL or empty: a request that no rank expects anything for. ranks: count numbers
 * (stage * tensor-parallel size + rank) of those that decline, with a req; count 0: all, as many as the sizes of the config give. asked: 1 also
 * withdraws one asker of the prompt's query, which is dropped with its last asker. 0: the request never asked, or kvs_expected has withdrawn its
 * asker, so the query belongs to other requests. The background thread sends the decline, if necessary after a reconnection. If it cannot be sent
 * within the match timeout, it is dropped, and the source waits for that time. */
int kvs_decline(kvs_client *c, const uint8_t xfer[16], const uint8_t hash[32], const char *peer, const char *reason, const char *req,
                const uint32_t *ranks, uint32_t count, int asked);

/* ---- pages of the store: docs/protocol.md section 5 ------------------------------------------------------------------------- */

/* Sends OPEN (11), EXISTS (13) or REMOVE (16). body: a msgpack map without "id". Returns a handle for the answer, or an error:
 * KVS_E_UNSUPPORTED if the sidecar has no store. Opened namespaces belong to the session: after a reconnection they are opened again. */
int64_t kvs_request(kvs_client *c, uint32_t type, const void *body, uint32_t bytes);
/* The answer's body, OPENED (12), FOUND (14), DONE (19) or ERROR (5), and its type. Returns its bytes; 0: none within timeout_ms (0: do not
 * wait, negative: no limit); KVS_E_NOT_CONNECTED: the session ended before; KVS_E_BUFFER: the answer is kept for a larger buffer. */
int64_t kvs_answer(kvs_client *c, int64_t request, int timeout_ms, uint32_t *type, void *buf, uint64_t cap);
/* No answer is wanted any more. */
int kvs_request_forget(kvs_client *c, int64_t request);
/* Ends the pins of an EXISTS. Its answer may have been fetched. While the socket takes none, KVS_MAX_ENDS wait; KVS_E_FULL: they do. */
int kvs_unpin(kvs_client *c, int64_t request);
/* Closes the namespace of an OPEN, once the session's gets and puts in it have ended. Its answer may not have come yet.
 * Waits like kvs_unpin. */
int kvs_close_space(kvs_client *c, int64_t request);

/* ---- segments and batches: docs/segments.md --------------------------------------------------------------------------------- */

#define KVS_MAX_NAME_BYTES 256
#define KVS_MAX_GRANTS 64             /* of a segment */
#define KVS_MAX_BATCH_ENTRIES 100000
#define KVS_MAX_BATCH_PIECES (1u << 17) /* of all entries */
#define KVS_MAX_BATCH_REGIONS 64      /* of this client, that a batch's entries lie in */
#define KVS_MAX_NOTE_BYTES 64
#define KVS_MAX_PATH_BYTES 1024       /* of a file */
#define KVS_MAX_NOTES 256             /* of one answer */

/* Lets a node use a range of a segment. */
struct kvs_grant {
	const char *to; /* name of a node; "*": every node of the cluster */
	uint32_t read, write;
	uint64_t offset, bytes; /* bytes 0: to the end of the segment */
	uint64_t end_ms;        /* from now; 0: until the segment is revoked */
};

/* Makes a range of a region, by its number, a segment. A worker with a layout names regions of kvs_regions_add. Names of a node's segments are
 * unique. Returns a request for kvs_answer: DONE (19), or ERROR (5). A segment ends with the session: register it again after a reconnection. */
int64_t kvs_segment(kvs_client *c, const char *name, uint32_t region, uint64_t offset, uint64_t bytes, const struct kvs_grant *grants, uint32_t n);
/* The same of a file. path begins at segments.root of the sidecar; bytes 0: to the present end. */
int64_t kvs_segment_file(kvs_client *c, const char *name, const char *path, uint64_t offset, uint64_t bytes, const struct kvs_grant *grants, uint32_t n);

/* Ends a segment; with `to`, only its grants to that node. DONE comes once every batch that used them is fenced: from then on no batch reads or writes
 * a byte for them. */
int64_t kvs_segment_revoke(kvs_client *c, const char *name, const char *to);

/* Asks a sidecar for a segment. peer: its endpoint, or the name of its node; NULL or empty: this node's sidecar. LOCATED (25), or ERROR (5). */
int64_t kvs_locate(kvs_client *c, const char *peer, const char *name, uint32_t deadline_ms);

struct kvs_located {
	uint64_t bytes;
	uint32_t read, write; /* 1: this node may read, may write some of it */
	uint64_t end_ms;      /* until the last grant ends, from the answer on; 0: one of them has no end */
};
/* Reads the body of LOCATED. 0 or KVS_E_ARG. */
int kvs_read_located(const void *body, uint64_t bytes, struct kvs_located *out);

/* Fetches the notifications of batches that used this worker's segments. NOTED (27) comes once there is one, or after wait_ms, with at most
 * KVS_MAX_NOTES. The bytes of a batch are visible to this process before its notification comes. GPU work that is enqueued after that also reads
 * them. */
int64_t kvs_notes(kvs_client *c, uint32_t wait_ms);

struct kvs_note {
	char segment[KVS_MAX_NAME_BYTES + 1], from[KVS_MAX_NAME_BYTES + 1]; /* from: node of the engine that sent the batch */
	uint32_t write, note_bytes;
	uint64_t bytes; /* of the batch */
	uint8_t note[KVS_MAX_NOTE_BYTES];
};
/* Reads the body of NOTED. Returns the number of notifications, KVS_E_BUFFER (more than cap), or KVS_E_ARG. */
int kvs_read_notes(const void *body, uint64_t bytes, struct kvs_note *out, uint32_t cap);

/* A range of bytes, or `count` ranges at equal distances. */
struct kvs_entry {
	uint64_t local, remote; /* offset in the local region; in the segment */
	uint64_t bytes;         /* of one piece */
	uint64_t local_stride, remote_stride;
	uint32_t count;  /* pieces; 1: the strides are not used */
	uint32_t region; /* index into the batch's regions */
};

/* Entries, in memory that the sidecar reads: the caller writes entries[0..count). It may be used again once the lease of its last submission has completed. */
struct kvs_batch {
	struct kvs_region list;
	uint32_t number; /* of that region */
	uint32_t capacity, count;
	struct kvs_entry *entries;
};

/* Makes room for entries, and passes the memory to the sidecar; kvs_regions_wait waits for that. */
int kvs_batch_open(kvs_client *c, uint32_t capacity, struct kvs_batch *out);
/* Releases the memory. Call it only when no lease of the batch is open. */
void kvs_batch_close(kvs_client *c, struct kvs_batch *batch);

struct kvs_batch_options {
	uint32_t size;       /* sizeof(struct kvs_batch_options) of the caller */
	uint32_t write;      /* 1: into the segment, 0: out of it */
	const char *peer;    /* as in kvs_locate */
	const char *segment;
	const uint32_t *regions; /* numbers of local regions */
	uint32_t region_count;
	uint32_t priority;    /* 0 decode waits, 1 stream, 2 background */
	uint32_t deadline_ms; /* 0: as for other leases; at most an hour */
	uint32_t wait;        /* 1: the batch waits for open batches that exclude it; 0: it is refused */
	const void *note;     /* for the segment's engine, once the bytes are there; NULL: none */
	uint32_t note_bytes;
	uint32_t durable;     /* 1: a write to a file completes once its data is on the disk */
	const char *req;      /* for traces; NULL: none */
	uint64_t stream_mark; /* of kvs_gpu_mark; 0: at once */
};

/* Opens a lease that moves the entries. It completes with KVS_REC_RECEIVED, after its fence. KVS_OK: all bytes are visible: of a read to this process, of
 * a write to the segment's. KVS_REFUSED: nothing was read or written. Else the body's "entries" has a bit for each entry that has arrived; of the
 * others any part may have. kvs_cancel ends it soon. Returns the lease, or an error, after which nothing is open. */
int64_t kvs_batch_submit(kvs_client *c, const struct kvs_batch *batch, const struct kvs_batch_options *options);

/* ---- status, log, statistics --------------------------------------------------------------------------------------------- */

struct kvs_info {
	uint32_t size;      /* in: sizeof(struct kvs_info) of the caller */
	uint32_t connected; /* 1: registered session */
	uint32_t degraded;  /* 1: the session is being replaced, or the sidecar drains or refused it */
	uint32_t quarantined; /* leases that wait for the exit of a sidecar that cannot be killed */
	uint32_t sidecar_pid; /* of the current session; 0: none, or not visible here */
	uint32_t version;     /* chosen by WELCOME, major << 16 | minor */
	uint32_t deadline_ms, match_timeout_ms, grace_ms;
	uint32_t leases;      /* open */
	uint32_t sidecars;    /* processes that may still access blocks of open leases, including the current one */
	uint32_t awaits;
	uint8_t boot[16];         /* of this client */
	uint8_t sidecar_boot[16]; /* of the current or latest session */
	uint64_t source_epoch;
	/* counters since kvs_open */
	uint64_t connects;     /* sessions that were registered */
	uint64_t refusals;     /* ERROR messages */
	uint64_t submitted;    /* records written */
	uint64_t kept;         /* records not written: no session */
	uint64_t full;         /* records not written: no room */
	uint64_t completed;    /* completions returned to the engine */
	uint64_t synthesised;  /* of these, by the library */
	uint64_t represented;  /* source leases that were presented again */
	uint64_t dropped;      /* completions of unknown or complete leases */
	uint64_t protocol_errors; /* malformed packets, rings or records of the sidecar */
	uint64_t kills;        /* sidecars killed by the watchdog */
	uint64_t sidecar_exits; /* proved */
	char node[64];
	char endpoint[256];  /* that peers dial; empty before the first WELCOME */
	char error[512];     /* the latest; empty: none */
	uint32_t killable;    /* 1: this process may kill the sidecar of the current session, and can prove its exit */
	uint32_t has_regions; /* 1: kvs_regions_wait would return 1 at once. The sidecar may have refused some regions */
};

int kvs_status_read(kvs_client *c, struct kvs_info *info);

/* Waits for a log line ("level message") and copies the oldest unread one into buf, zero-terminated: 1. 0: the log has ended, and all of
 * it was read. At most 256 are kept; the oldest are dropped. */
int kvs_wait_log(kvs_client *c, char *buf, uint64_t cap);

/* Ends the log: kvs_wait_log returns, which must have happened before kvs_close. */
int kvs_end_log(kvs_client *c);

/* ---- content digest (docs/content-digest.md): no client, any memory that this process reads ---------------------------- */

#define KVS_DIGEST_SEED_BYTES 16

typedef struct kvs_digest kvs_digest; /* the weights of a seed; for one thread at a time */

/* Rows [first_row, +rows) and heads [first_head, +heads) of one plane. A cell lies at
 * off + table[row / (tile_rows * tiles)] * block + tile_of_block * tile + row_of_tile * row + (head - first_head) * head + column * col. */
typedef struct kvs_units {
	const char *layer; /* of the model */
	uint32_t role;     /* of the plane, as layout.Role counts them */
	uint32_t reserved;
	uint64_t off, block, tile, row, head, col; /* bytes */
	uint64_t tile_rows, tiles;                 /* of a block */
	uint64_t cell, cols;                       /* bytes of a cell, columns of a unit */
	uint64_t first_head, heads, first_row, rows;
} kvs_units;

int kvs_digest_open(const uint8_t seed[KVS_DIGEST_SEED_BYTES], kvs_digest **out);
void kvs_digest_close(kvs_digest *d);

/* Stores the digest of the units in a region. KVS_E_ARG: they are no units of a plane, or lie outside of the region or the table. */
int kvs_digest_sum(kvs_digest *d, const void *region, uint64_t bytes, const kvs_units *u, const uint32_t *table, uint32_t blocks,
                   uint64_t *sum);

/* The weights themselves, for sums that a GPU computes: of words (axis 1), rows (2) or heads (3), and of a plane. */
int kvs_digest_weights(const kvs_digest *d, uint32_t axis, uint64_t first, uint64_t count, uint64_t *out);
uint64_t kvs_digest_plane(const kvs_digest *d, uint32_t role, const char *layer);

/* ---- ring primitives: for tests and for tools; the client uses the same code --------------------------------------- */

/* One end of a ring, in private memory. It does not read back its own shared words. */
struct kvs_ring_end {
	struct kvs_ring *ring;
	uint8_t *data;
	uint64_t bytes; /* of data, a power of two */
	uint64_t head, tail; /* own word: authoritative; the other's word: last valid value */
	uint64_t seq;        /* last one written or read */
};

void kvs_ring_attach(struct kvs_ring_end *end, struct kvs_ring *ring, uint64_t data_bytes);
/* Appends one record; the caller wakes the consumer (kvs_ring_wake). 0, KVS_E_FULL, KVS_E_TOO_BIG, or KVS_E_ARG if the
 * consumer's word is invalid. */
int kvs_ring_push(struct kvs_ring_end *end, uint16_t type, uint16_t status, uint64_t lease, uint64_t epoch,
                  const void *body, uint32_t bytes);
/* 1: the consumer slept and its eventfd must be written. */
int kvs_ring_wake(struct kvs_ring_end *end);
/* Copies the next record (header and body, without padding) into buf. Its bytes, 0: empty, KVS_E_ARG: the ring is broken,
 * KVS_E_BUFFER: cap is too small. */
int64_t kvs_ring_pop(struct kvs_ring_end *end, void *buf, uint64_t cap);
/* Announces sleep. 1: still empty, wait on the eventfd; 0: there is something. */
int kvs_ring_sleep(struct kvs_ring_end *end);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
