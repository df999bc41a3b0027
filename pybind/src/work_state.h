/* SPDX-License-Identifier: Apache-2.0
 *
 * work_state.h: the state of the thread that packs in the engine's context (work.h), for its files:
 *
 *   work_list.c   checks the sidecar's lists and writes them as addresses
 *   work_gpu.c    what the thread has of the GPU: streams, kernels, the sidecar's buffer
 *   work_slots.c  serves posted slots: by a launch, or by a captured graph
 *   work.c        boards of sessions, the thread, the calls of the client
 *
 * Each file calls only files above it in this list.
 */
#ifndef KVSPRAY_WORK_STATE_H
#define KVSPRAY_WORK_STATE_H

#include <pthread.h>

#include "graph.h"
#include "work.h"

enum {
	STREAMS = 4, /* slots take them by turns, so that a kernel that waits for room holds up few. [measured, H200] 14.4 GB/s and
	              * 2.0% of a busy engine, where one stream gave 13.9 and 1.4% */
	NOT_READY = 600, /* CUDA_ERROR_NOT_READY */
};

enum board_state { BOARD_NONE, BOARD_LIVE, BOARD_ENDING };

struct board {
	enum board_state state; /* guarded by mu; work_begin leaves NONE, work_end leaves LIVE, the thread leaves ENDING */
	uint8_t *at;
	/* the thread's own */
	bool registered; /* the first page is */
	bool defect;     /* a protocol violation was logged */
	devptr first;    /* the first page, as the GPU sees it; 0: OPEN was not served */
	devptr staging; /* the sidecar's dense buffer; 0: not opened */
	uint64_t staging_bytes;
};

/* Memory that the GPU reads and writes and that no other process sees. */
struct own {
	struct work_list lists[KVS_WORK_SLOTS];
	struct kvs_flag done[KVS_WORK_SLOTS]; /* tickets */
};

/* A list that waits for the replay of a captured graph. */
struct arm {
	struct board *board; /* NULL: there is none */
	uint64_t seq;
	uint32_t blocks;
	bool unpack;
	bool revoked;
	int64_t until_ns;
};

struct work {
	/* set once */
	struct work_region *regions;
	uint32_t region_count;
	void (*log)(void *, const char *, const char *);
	void (*over)(void *);
	void *arg;
	int bell;
	pthread_t thread;

	pthread_mutex_t mu; /* guards the states of boards, and what follows; held for copies only */
	struct board boards[2]; /* of this session, and of the one before until it is done with */
	bool stop, ended;
	struct graph *wanted; /* by work_graph */
	struct graph *graph;  /* in use; changed by the thread alone */
	pthread_cond_t settled; /* graph is what is wanted, or the thread has ended */
	_Atomic uint64_t launched, in_graphs;

	/* the thread's own */
	handle context, module, streams[STREAMS];
	int device;
	bool retained, off, running;
	handle pack, unpack, pack_uniform, unpack_uniform;
	struct own *own;
	devptr own_dev;
	uint64_t ticket;                  /* of the last launch, over all boards */
	uint64_t tickets[KVS_WORK_SLOTS]; /* of each list's last launch */
	uint64_t seqs[KVS_WORK_SLOTS];    /* ... and its number on the board; 0: none of this board */
	struct arm arms[KVS_WORK_SLOTS];
	uint32_t armed;  /* of arms */
	int64_t look_ns; /* while something is armed: not before */
	uint64_t missed; /* pulse of the graph when a list was not taken: no replay has run since */
};

#define READ(field) __atomic_load_n(&(field), __ATOMIC_RELAXED)

static inline struct kvs_work_slot *slot_at(const struct board *b, uint32_t i)
{
	return (struct kvs_work_slot *)(b->at + KVS_WORK_SLOT_TABLE) + i;
}

static inline struct kvs_work_run *list_at(const struct board *b, uint32_t i)
{
	return (struct kvs_work_run *)(b->at + KVS_WORK_LISTS) + (size_t)i * KVS_WORK_RUNS;
}

/* Whether the last launch that reads this list is complete, by the private done word. */
static inline bool idle(const struct work *w, uint32_t i)
{
	return __atomic_load_n(&w->own->done[i].value, __ATOMIC_ACQUIRE) == w->tickets[i];
}

/* ---- work_gpu.c ---- */

/* The first failure is logged and ends the work on the GPU. True: rc is one. */
bool work_fail(struct work *w, int rc, const char *call);
#define FAILS(w, call, ...) work_fail((w), cu.call(__VA_ARGS__), "cu" #call)
/* Maps the sidecar's dense buffer. False: not; w->off reports whether the driver refused. */
bool work_open_staging(struct work *w, struct board *b, const struct kvs_work_slot *slot, const struct kvs_work_run *list);
void work_tear_down(struct work *w);
/* Writes what a slot asks for to a stream. False: the driver refused, and nothing of it runs. */
bool work_launch(struct work *w, const struct board *b, uint32_t i, bool unpack, uint64_t seq, uint32_t blocks);
/* Nothing of this list runs or will run. */
void work_forget(struct work *w, uint32_t i);

/* ---- work_slots.c ---- */

/* Takes what is posted. Returns whether there was anything. */
bool work_take(struct work *w, struct board *b);
/* Looks at what is armed, and launches what no replay has taken in time. */
void work_settle(struct work *w);
/* No graph has, or will have, a list that is armed for this board, or for any (NULL). The lists that no graph has taken are launched, because the
 * sidecar waits for them. */
void work_take_back(struct work *w, const struct board *b);
/* Finds a context that is lost: it runs nothing more and writes no done word, so what the sidecar waits for is refused. */
void work_look(struct work *w, struct board *b);

#endif
