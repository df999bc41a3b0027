/* SPDX-License-Identifier: Apache-2.0
 *
 * work.h: work for the sidecar in the engine's GPU context. board.h has the memory between the two, under "work".
 *
 * One thread for a worker with GPU memory, which sleeps while it has no work. It needs no interpreter lock and uses no stream of the
 * engine. The engine's captured graphs may do the work instead (graph.h). The thread creates its streams, kernels and lists when the
 * first sidecar opens a board. An error of the driver ends the work and is logged once; the engine is not affected.
 */
#ifndef KVSPRAY_WORK_H
#define KVSPRAY_WORK_H

#include "cuda.h"
#include "internal.h"

/* A region of REGISTER, in its order. bytes 0: it is not memory of this GPU. */
struct work_region {
	uint64_t addr, bytes;
};

struct work;

/* Starts the thread. It calls `log`, and `over` when a board was closed, both without a lock of work.c. NULL: there is no driver,
 * no memory of a GPU, or no thread. */
struct work *work_start(const struct work_region *regions, uint32_t n, void (*log)(void *arg, const char *level, const char *text), void (*over)(void *arg), void *arg);
/* A new board for a session. The caller owns its memfd; the eventfd stays open until work_free. False: both boards are in use, there is no
 * memory, or the thread was stopped. */
bool work_begin(struct work *w, int *memfd, int *bell);
/* Ends the session's board: no other work of it begins. Does not wait. */
void work_end(struct work *w);
struct graph;
/* From now on replays of captured graphs take the lists, and the thread launches those that no replay takes. NULL: the thread launches all, and
 * no graph has a list when this returns. False: other graphs are in use. */
bool work_graph(struct work *w, struct graph *g);
/* Lists that were launched, and those that graphs have moved. */
void work_counts(struct work *w, uint64_t *launched, uint64_t *in_graphs);
/* Whether no work of an ended session runs or will run. */
bool work_quiet(struct work *w);
/* Waits for running work and ends the thread. */
void work_stop(struct work *w);
/* After work_stop, or in a forked child. */
void work_free(struct work *w);

/* ---- what the kernels read; for the tests, too ---- */

/* struct kvs_run of kernels.cu. */
struct work_run {
	uint64_t base, stride, outer, dense;
	uint32_t len, count;
};

/* A list as the kernels read it, in private memory. */
struct work_list {
	struct work_run runs[KVS_WORK_RUNS];
	uint64_t bases[KVS_WORK_RUNS];
	uint32_t first[KVS_WORK_RUNS + 1];
	uint32_t count;
	uint32_t len; /* not 0: pieces of one length and no runs, which go by their bases */
};

/* Copies `slot` and its list, which the sidecar may write meanwhile, checks the copy and writes it as addresses: every piece lies in a region,
 * and the bytes of all of them in the dense buffer of dense_bytes at `dense`. False: they do not, and *out means nothing. */
bool work_translate(const struct work_region *regions, uint32_t n, const struct kvs_work_slot *slot, const struct kvs_work_run *from, uint64_t dense,
                    uint64_t dense_bytes, struct work_list *out);

#endif
