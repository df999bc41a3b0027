/* SPDX-License-Identifier: Apache-2.0
 *
 * work.h: what the engine's own GPU context does for the sidecar. board.h has the memory between the two, under "work".
 *
 * One thread for a worker with GPU memory, asleep while there is nothing to do. It needs no interpreter lock and touches no stream
 * of the engine, whose captured graphs may do it instead (graph.h); all that it has of the GPU it makes when the first sidecar opens a board: streams of its own, the kernels, lists. An error of
 * the driver ends it, is logged once, and is never the engine's.
 */
#ifndef KVSPRAY_WORK_H
#define KVSPRAY_WORK_H

#include "cuda.h"
#include "internal.h"

/* A region of REGISTER, in its order. bytes 0: none that this GPU has. */
struct work_region {
	uint64_t addr, bytes;
};

struct work;

/* Starts the thread. `log` is called by it, and `over` when a board is done with, both with no lock of this file held. NULL: there is no driver,
 * no memory of a GPU, or no thread. */
struct work *work_start(const struct work_region *regions, uint32_t n, void (*log)(void *arg, const char *level, const char *text), void (*over)(void *arg), void *arg);
/* A fresh board for a session, whose memfd is the caller's from now on; the doorbell stays ours until work_free. False: the one before is not
 * done with, there is no memory, or it was stopped. */
bool work_begin(struct work *w, int *memfd, int *bell);
/* The session is over: nothing of its board is begun any more. Does not wait. */
void work_end(struct work *w);
struct graph;
/* From now on lists go by captured graphs as they are replayed, where any are, and by a launch of the thread's where not. NULL: by launches alone,
 * and no graph has a list when this returns. False: another graph's have the work already. */
bool work_graph(struct work *w, struct graph *g);
/* Lists that were launched, and those that graphs have moved. */
void work_counts(struct work *w, uint64_t *launched, uint64_t *in_graphs);
/* Nothing runs, or will, of a session that is over. */
bool work_quiet(struct work *w);
/* Waits for what runs, and ends the thread; there is no other board after it. */
void work_stop(struct work *w);
/* After work_stop, or in a forked child. */
void work_free(struct work *w);

/* ---- what the kernels read; for the tests, too ---- */

/* struct kvs_run of kernels.cu. */
struct work_run {
	uint64_t base, stride, outer, dense;
	uint32_t len, count;
};

/* A list as the kernels read it; in memory that only we write. */
struct work_list {
	struct work_run runs[KVS_WORK_RUNS];
	uint64_t bases[KVS_WORK_RUNS];
	uint32_t first[KVS_WORK_RUNS + 1];
	uint32_t count;
	uint32_t len; /* not 0: pieces of one length and no runs, which go by their bases */
};

/* Copies `slot` and its list, which somebody else may be writing, checks the copy and writes it as addresses: every piece lies in a region,
 * and the bytes of all of them in the dense buffer of dense_bytes at `dense`. False: they do not, and *out means nothing. */
bool work_translate(const struct work_region *regions, uint32_t n, const struct kvs_work_slot *slot, const struct kvs_work_run *from, uint64_t dense,
                    uint64_t dense_bytes, struct work_list *out);

#endif
