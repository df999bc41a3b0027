/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "graph.h"

enum {
	BATCH_BYTES = 128 + 80 * KVS_WORK_SLOTS, /* sizeof(struct kvs_graph_batch) */
	SEEN_BYTES = 128,                /* ... of kvs_graph_seen, and more */
};
_Static_assert(KVS_WORK_SLOTS == 8, "GRAPH_SLOTS of kernels.cu");

#define TRY(name, ...)                   \
	do {                                 \
		int rc_ = cu.name(__VA_ARGS__);  \
		if (rc_) {                       \
			*call = "cu" #name;          \
			return rc_;                  \
		}                                \
	} while (0)

int graph_open(struct graph *g, uint32_t layers, uint32_t blocks, const char **call)
{
	int least, greatest;
	memset(g, 0, sizeof *g);
	g->blocks = blocks;
	g->layers = layers;
	*call = "calloc";
	if (!(g->captured = calloc(layers, 1)))
		return 2; /* CUDA_ERROR_OUT_OF_MEMORY */
	g->at = mmap(NULL, sizeof *g->at, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	*call = "mmap";
	if (g->at == MAP_FAILED) {
		g->at = NULL;
		return 2;
	}
	*call = "madvise"; /* as for the lists of work.c */
	if (madvise(g->at, sizeof *g->at, MADV_DONTFORK) != 0)
		return 2;
	TRY(CtxGetCurrent, &g->context);
	TRY(MemHostRegister, g->at, sizeof *g->at, HOST_PORTABLE | HOST_DEVICEMAP);
	g->registered = true;
	TRY(MemHostGetDevicePointer, &g->board, g->at, 0);
	TRY(MemAlloc, &g->seen, SEEN_BYTES);
	TRY(MemsetD32, g->seen, 0, SEEN_BYTES / 4);
	TRY(MemAlloc, &g->batches, (size_t)layers * BATCH_BYTES);
	TRY(MemsetD32, g->batches, 0, (size_t)layers * BATCH_BYTES / 4);
	TRY(StreamSynchronize, NULL); /* no replay comes before the zeros */
	TRY(ModuleLoadData, &g->module, cuda_kernels);
	TRY(ModuleGetFunction, &g->take, g->module, "kvs_graph_take");
	TRY(ModuleGetFunction, &g->move, g->module, "kvs_graph_move");
	TRY(CtxGetStreamPriorityRange, &least, &greatest);
	TRY(StreamCreateWithPriority, &g->branch, STREAM_NON_BLOCKING, greatest);
	TRY(EventCreate, &g->fork, EVENT_DISABLE_TIMING);
	TRY(EventCreate, &g->join, EVENT_DISABLE_TIMING);
	*call = NULL;
	return 0;
}

void graph_close(struct graph *g)
{
	if (g->join)
		cu.EventDestroy(g->join);
	if (g->fork)
		cu.EventDestroy(g->fork);
	if (g->branch)
		cu.StreamDestroy(g->branch);
	if (g->module)
		cu.ModuleUnload(g->module);
	if (g->batches)
		cu.MemFree(g->batches);
	if (g->seen)
		cu.MemFree(g->seen);
	if (g->registered)
		cu.MemHostUnregister(g->at);
	if (g->at)
		munmap(g->at, sizeof *g->at);
	free(g->captured);
	memset(g, 0, sizeof *g);
}

bool graph_wants(const struct graph *g, uint32_t layer)
{
	return g->at && layer < g->layers && !g->captured[layer];
}

int graph_capture(struct graph *g, uint32_t layer, devptr word, devptr flag, handle side, const char **call)
{
	devptr pulse = g->board + offsetof(struct graph_board, pulse), slots = g->board + offsetof(struct graph_board, slots);
	devptr batch = g->batches + (devptr)layer * BATCH_BYTES;
	void *taking[] = {&word, &flag, &pulse, &slots, &g->seen, &batch}, *moving[] = {&batch};
	g->captured[layer] = 1;
	TRY(LaunchKernel, g->take, 1, 1, 1, KVS_WORK_SLOTS, 1, 1, 0, side, taking, NULL);
	TRY(EventRecord, g->fork, side);
	TRY(StreamWaitEvent, g->branch, g->fork, 0);
	g->forked = true;
	TRY(LaunchKernel, g->move, g->blocks, 1, 1, PACK_THREADS, 1, 1, 0, g->branch, moving, NULL);
	return 0;
}

int graph_join(struct graph *g, handle stream, const char **call)
{
	if (!g->forked)
		return 0;
	int status = 0;
	g->forked = false;
	memset(g->captured, 0, g->layers);
	TRY(StreamIsCapturing, g->branch, &status);
	if (!status)
		return 0;
	TRY(EventRecord, g->join, g->branch);
	TRY(StreamWaitEvent, stream, g->join, 0);
	return 0;
}
