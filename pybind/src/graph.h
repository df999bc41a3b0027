/* SPDX-License-Identifier: Apache-2.0
 *
 * graph.h: captured graphs of the engine that pack and unpack for the sidecar (work.h) as they are replayed.
 *
 * A captured layer that signals has two nodes then: a kernel sets its flag, where a stream write would do otherwise (gpu.c), and also takes what is
 * armed in the slots below, and one on a branch of its own moves that, so that no flag waits for it. What is moved is in memory, as a list that the
 * thread of work.c has checked: a replay needs no argument and no launch. If no replay runs, the thread takes back the armed list and launches it.
 *
 * One replay at a time, as for flags: the device has one word with the step (gpu.c). What a layer takes has one place in a graph: where a capture
 * signals a layer twice, the second signal is a flag alone, by a stream write.
 */
#ifndef KVSPRAY_GRAPH_H
#define KVSPRAY_GRAPH_H

#include "cuda.h"
#include "internal.h"

/* struct kvs_graph_slot of kernels.cu. The host fills `list` to `seq` and stores `armed`, a ticket that grows. It may store the ticket as `revoked`,
 * and looks at `taken` then, while the GPU stores `taken` and looks at `revoked` then, each with a fence between: not taken means that it never
 * will be moved; taken means that `own` or `skipped` becomes the ticket, behind everything else that the GPU stores for it. */
struct graph_slot {
	uint64_t armed, revoked;
	uint64_t taken, skipped; /* by the GPU */
	uint64_t list, first, n, dense;
	uint32_t len, unpack;
	uint64_t own, done, seq;
	uint64_t pad[4];
};
_Static_assert(sizeof(struct graph_slot) == 128, "as in kernels.cu");

/* Of the process, seen by the GPU. */
struct graph_board {
	uint64_t pulse; /* by the GPU: layers of replays that have looked here */
	uint64_t pad[15];
	struct graph_slot slots[KVS_WORK_SLOTS];
};

struct graph {
	struct graph_board *at;
	handle context;
	devptr board, seen, batches; /* ... as the GPU sees it; of the GPU alone: what it has seen, and of each layer what it has taken */
	bool registered;
	handle module, take, move, branch, fork, join;
	uint32_t blocks; /* of a move */
	uint8_t *captured; /* for each layer: it is part of the capture that has not joined the branch */
	uint32_t layers;
	bool forked; /* the branch is part of a capture that has not joined it */
};

/* In the engine's context. Where a call fails *call names it, and graph_close is due. */
int graph_open(struct graph *g, uint32_t layers, uint32_t blocks, const char **call);
void graph_close(struct graph *g);
/* Whether graph_capture may have the layer. */
bool graph_wants(const struct graph *g, uint32_t layer);
/* Adds the nodes of a layer to the capture that `side` is part of: its flag is set from the word, as by kvs_flag. */
int graph_capture(struct graph *g, uint32_t layer, devptr word, devptr flag, handle side, const char **call);
/* Joins the branch to `stream`, if it is part of its capture, and not of one that was given up. */
int graph_join(struct graph *g, handle stream, const char **call);

#endif
