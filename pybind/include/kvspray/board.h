/* board.h: the shared memory between an engine worker and its sidecar, to the byte.
 *
 * This header is the source of truth. The Go mirror (internal/board/zz_generated_board.go) is generated from it, and both
 * sides assert the same sizes and offsets.
 *
 * The board is memfds, all created and sealed (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) by the shim:
 *
 *   flags  lives as long as the engine. Captured GPU graphs bake addresses in it, so it never moves.
 *   rings  one per connection. A sidecar that resumes after a pause then writes into rings that are not read.
 *
 * One writer per word. All integers are little-endian. A reader copies an entry once and then validates and uses the copy,
 * because the other side can still write to the original.
 */
#ifndef KVSPRAY_BOARD_H
#define KVSPRAY_BOARD_H

#include <stdint.h>

#define KVS_FLAGS_MAGIC 0x464c5350u /* "PSLF" in memory order */
#define KVS_RINGS_MAGIC 0x52495350u /* "PSIR" in memory order */

/* A reader refuses another major; a higher minor only adds. */
#define KVS_BOARD_MAJOR 1
#define KVS_BOARD_MINOR 0

#define KVS_CACHE_LINE 64
#define KVS_MAX_LAYERS 1024
/* Every value of a flag is below. A stream's wait for "at least v" compares cyclically, (int64)(flag - v) >= 0 (CUstreamWaitValue_flags). */
#define KVS_FLAG_LIMIT ((uint64_t)INT64_MAX)

#define KVS_RING_MIN_BYTES (64u << 10)
#define KVS_RING_MAX_BYTES (16u << 20) /* a power of two in between */
#define KVS_RECORD_MAX_BYTES (1u << 20) /* and at most half its ring */

/* Offset 0 of the flags memfd. Written once by the shim before the memfd is passed on. */
struct kvs_flags_header {
	uint32_t magic;
	uint16_t major;
	uint16_t minor;
	uint8_t boot[16];          /* boot id of the engine worker */
	uint32_t layers;           /* layer flags, and load flags, 1..KVS_MAX_LAYERS */
	uint32_t stride;           /* bytes from one flag to the next: KVS_CACHE_LINE */
	uint64_t layer_flags;      /* byte offset of `layers` + 1 flags; the last one is the end of the step */
	uint64_t load_flags;       /* byte offset of `layers` flags */
	uint64_t source_epoch;     /* byte offset of one u64 */
	uint64_t total_bytes;      /* size of the memfd */
	uint64_t features;         /* bit set; none defined in 1.0 */
	uint64_t replay_flags;     /* byte offset of `layers` + 1 flags */
	uint64_t stream_mark;      /* byte offset of one u64 */
	uint8_t reserved[40];
};

/* layer_flags[l]: GPU (or CPU engine) -> sidecar. The last step for which layer l is complete; only grows.
 *     layer_flags[layers] is the end of the step: all layers, also those that have no hook.
 * replay_flags[l]: GPU -> sidecar. A captured graph cannot write the step, which would be constant in it: it writes 1 when layer l of the
 *     step in replay_flags[layers] is complete; else the flag is 0. replay_flags[layers] is 0 before the first such step. Before each replay
 *     the flags of all layers are cleared, and the step is stored when that is visible. A reader loads the step *before* the layer's flag: a 1
 *     then means that the layer is complete in that step or a later one. The layer's state is the greater of this and of layer_flags[l], which
 *     streams outside a graph still set. A flag that was not read is lost with the next step. The end of the step is not: graphs set it in
 *     layer_flags. So an engine whose graphs signal layers signals the end of each step.
 * load_flags[l]: sidecar -> GPU. Data of step s is present. Two writers, the other is the shim for a load that has ended: compare-and-swap, it
 *     only grows.
 * source_epoch: shim -> sidecar. Grows *before* the engine may reuse any block that an intent named (preemption, abort,
 *     free), and before the record that lists them. Bytes read from source blocks count only if the epoch is unchanged
 *     after the read, or the ring was drained up to that epoch and names other blocks. So each growth has one naming record
 *     (PREEMPT, or CANCEL of a source lease), and no other record is between the two: a reader that has drained a record of
 *     epoch e has the names of all blocks that were released until e.
 * stream_mark: GPU -> sidecar. Everything that the engine had enqueued on its stream before mark m is complete once the word is at least m; only
 *     grows. A record with `after` = m takes effect then: the sidecar writes no block of it while an earlier step of the engine may still do so. */
struct kvs_flag {
	uint64_t value;
	uint8_t pad[KVS_CACHE_LINE - 8];
};

/* Offset 0 of the rings memfd. */
struct kvs_rings_header {
	uint32_t magic;
	uint16_t major;
	uint16_t minor;
	uint8_t session[16];       /* random per connection; named in REGISTER */
	uint64_t submission;       /* byte offset of the kvs_ring shim -> sidecar */
	uint64_t completion;       /* byte offset of the kvs_ring sidecar -> shim */
	uint32_t submission_bytes; /* data bytes, a power of two */
	uint32_t completion_bytes;
	uint64_t total_bytes;
	uint64_t features;
	uint8_t reserved[64];
};

/* A single-producer single-consumer ring of variable records. head and tail count bytes and never wrap; the position is
 * value & (bytes - 1). The producer stores head with release after the record, the consumer stores tail with release
 * after its copy. A record never straddles the end: a KVS_REC_PAD record fills up the rest. The rest can be as short as
 * 8 bytes, so of a PAD only `length`, `type` and `status` are there (length = the whole rest), and it takes no seq.
 *
 * Wake-up: before it sleeps, the consumer sets `sleeping` = 1 (sequentially consistent), looks at head once more, and
 * only then waits on its eventfd. A producer that has stored head and then exchanges `sleeping` from 1 to 0 writes 1 to
 * the eventfd. */
struct kvs_ring {
	uint64_t head; /* producer */
	uint8_t pad0[KVS_CACHE_LINE - 8];
	uint64_t tail; /* consumer */
	uint8_t pad1[KVS_CACHE_LINE - 8];
	uint32_t sleeping; /* consumer sets, producer clears */
	uint8_t pad2[KVS_CACHE_LINE - 4];
	/* data follows: submission_bytes or completion_bytes */
};

/* Every record starts with this header and is padded to 8 bytes. The body is one msgpack map (docs/protocol.md) of
 * body_bytes; length = sizeof header + body_bytes rounded up to 8. */
struct kvs_record {
	uint32_t length;
	uint16_t type;       /* enum kvs_record_type */
	uint16_t status;     /* completions: enum kvs_status; submissions: 0 */
	uint64_t seq;        /* 1, 2, 3 ... per ring; a gap is a protocol error */
	uint64_t lease;      /* shim-chosen lease id, never reused in one boot; 0 where none applies */
	uint64_t epoch;      /* submissions: value of source_epoch when written; completions: 0 */
	uint32_t body_bytes;
	uint32_t reserved;
};

enum kvs_record_type {
	KVS_REC_PAD = 0,
	/* submission ring: all changes of block ownership, in one order */
	KVS_REC_STEP = 1,    /* step begin: the tokens that leases gain when this step's flags arrive */
	KVS_REC_INTENT = 2,  /* source lease: these blocks hold, or will hold, a prompt's KV */
	KVS_REC_EXPECT = 3,  /* destination lease: requests a prompt's KV for these blocks */
	KVS_REC_CANCEL = 4,  /* release the lease: fence, then complete it */
	KVS_REC_PREEMPT = 5, /* source blocks are lost; the lease stays open for a later attempt */
	KVS_REC_HOLD = 6,    /* the request is finished and keeps its blocks only for the transfer: the match timeout runs */
	KVS_REC_COPY = 7,    /* a lease of its own: blocks from one registered region to another; ends with RECEIVED */
	KVS_REC_GET = 8,     /* a lease of its own: pages of the store into registered memory; ends with RECEIVED */
	KVS_REC_PUT = 9,     /* the same, out of registered memory */
	KVS_REC_LOAD = 10,   /* as COPY, for the same pages of several tensors; raises a load flag */
	KVS_REC_YIELD = 11,  /* the engine needs the blocks of a held source lease: no receiver binds any more, and bound ones finish */
	KVS_REC_BATCH = 12,  /* a lease of its own: ranges of a segment into registered memory, or out of it; ends with RECEIVED */
	/* completion ring */
	KVS_REC_RECEIVED = 32, /* ends a destination lease or a copy: complete and fenced, or failed and fenced */
	KVS_REC_SENT = 33,     /* ends a source lease: no process can read the blocks for the sidecar any more */
};

enum kvs_status {
	KVS_OK = 0,
	KVS_FAILED = 1,    /* fenced; the engine recomputes */
	KVS_CANCELLED = 2, /* fenced, at the engine's request */
	KVS_EXPIRED = 3,   /* fenced; deadline or match timeout passed */
	KVS_REFUSED = 4,   /* bad input, mismatch; nothing was ever written */
	KVS_LOST = 5,      /* the sidecar's exit was proved: written by the shim itself, never on the ring */
};

_Static_assert(sizeof(struct kvs_flags_header) == 128, "flags header");
_Static_assert(sizeof(struct kvs_flag) == KVS_CACHE_LINE, "flag");
_Static_assert(sizeof(struct kvs_rings_header) == 128, "rings header");
_Static_assert(sizeof(struct kvs_ring) == 3 * KVS_CACHE_LINE, "ring");
_Static_assert(sizeof(struct kvs_record) == 40, "record");

#endif
