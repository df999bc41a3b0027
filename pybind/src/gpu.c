/* Signals by the GPU itself: layer flags that a stream or a captured graph sets, load flags that a stream waits for.
 *
 * libcuda is opened at run time and used in the engine's own context; without it the rest of the library works.
 *
 * The flags are the board's, registered as host-mapped memory. Outside a capture a flag is one stream write of the step. In a graph the value would
 * be constant, so there it is a memory node that writes 1 to the layer's replay flag; kvs_gpu_step clears these flags before each replay and stores
 * their step. The node needs no multiprocessor; a kernel would wait for one. It is a leaf: it depends on what the stream has captured so far, and no
 * later node depends on it. So the next layer does not wait for it, no branch must be joined before the capture ends, and the graph ends after it,
 * which orders a step's flags before the next step's zeros.
 *
 * The end of the step, where a capture holds it, is a one-thread kernel on a side branch, which is joined there; it copies the step from a device
 * word that kvs_gpu_step sets.
 */
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client.h"
#include "cuda.h"
#include "flag_ptx.h"

enum {
	WAIT_GEQ = 0, /* cyclic: (int64)(flag - value) >= 0, which is why values are below KVS_FLAG_LIMIT */
	CAPTURE_NONE = 0,
	CAPTURE_ACTIVE = 1,
	WORD_BYTES = 256,
	STEP_THREADS = 128,
};

struct kvs_gpu {
	handle context, module, flag_kernel, step_kernel, side, fork, join;
	devptr word;      /* on the device: the step that replays report as complete */
	devptr flags;     /* the board's flags as the device sees them */
	devptr mark;      /* the stream mark, likewise */
	void *host_flags; /* ... and as this process does */
	uint64_t layer_flags, load_flags, replay_flags; /* offsets */
	uint32_t layers;
	uint64_t step;  /* the latest that kvs_gpu_step enqueued */
	int forked;     /* the side stream is part of a capture that has not joined it */
	int replays;    /* a graph sets replay flags; from then on each step clears them */
	kvs_client *client;
	char error[160]; /* of the first call that failed */
};

/* 0, or KVS_E_GPU and the first error kept. */
static int check(struct kvs_gpu *g, int rc, const char *call)
{
	if (rc == 0)
		return 0;
	if (!g->error[0])
		snprintf(g->error, sizeof g->error, "%s: %s (%d)", call, cuda_error_name(rc), rc);
	return KVS_E_GPU;
}

#define TRY(g, call, ...)                                                    \
	do {                                                                     \
		int rc_ = check((g), cu.call(__VA_ARGS__), "cu" #call);              \
		if (rc_)                                                             \
			return rc_;                                                      \
	} while (0)

static int set_up(struct kvs_gpu *g, kvs_client *c)
{
	uint64_t bytes = 0;
	int device, memops = 0, low_priority, high_priority;
	TRY(g, CtxGetCurrent, &g->context);
	if (!g->context) {
		snprintf(g->error, sizeof g->error, "no CUDA context is current in this thread: call this after the engine has chosen its GPU");
		return KVS_E_GPU;
	}
	TRY(g, CtxGetDevice, &device);
	TRY(g, DeviceGetAttribute, &memops, ATTRIBUTE_64_BIT_STREAM_MEM_OPS, device);
	if (!memops) {
		snprintf(g->error, sizeof g->error, "GPU %d has no 64-bit stream memory operations", device);
		return KVS_E_GPU;
	}
	void *flags = kvs_flags(c, &bytes);
	if (!flags)
		return KVS_E_ARG;
	const struct kvs_flags_header *h = flags;
	g->layers = h->layers;
	g->layer_flags = h->layer_flags;
	g->load_flags = h->load_flags;
	g->replay_flags = h->replay_flags;
	uint64_t mark = h->stream_mark;
	TRY(g, MemHostRegister, flags, bytes, HOST_PORTABLE | HOST_DEVICEMAP);
	g->host_flags = flags;
	TRY(g, MemHostGetDevicePointer, &g->flags, flags, 0);
	g->mark = g->flags + mark;
	TRY(g, MemAlloc, &g->word, WORD_BYTES);
	TRY(g, MemsetD32, g->word, 0, WORD_BYTES / 4);
	TRY(g, ModuleLoadData, &g->module, flag_ptx);
	TRY(g, ModuleGetFunction, &g->flag_kernel, g->module, "kvs_flag");
	TRY(g, ModuleGetFunction, &g->step_kernel, g->module, "kvs_step");
	TRY(g, CtxGetStreamPriorityRange, &low_priority, &high_priority);
	TRY(g, StreamCreateWithPriority, &g->side, STREAM_NON_BLOCKING, high_priority);
	TRY(g, EventCreate, &g->fork, EVENT_DISABLE_TIMING);
	TRY(g, EventCreate, &g->join, EVENT_DISABLE_TIMING);
	return 0;
}

int kvs_gpu_open(kvs_client *c, kvs_gpu **out, char *error, uint32_t error_bytes)
{
	if (error && error_bytes)
		error[0] = 0;
	if (!c || !out)
		return KVS_E_ARG;
	*out = NULL;
	const char *missing = cuda_open();
	if (missing) {
		if (error)
			snprintf(error, error_bytes, "%s", missing);
		return KVS_E_GPU;
	}
	struct kvs_gpu *g = calloc(1, sizeof *g);
	if (!g)
		return KVS_E_SYS;
	g->client = c;
	c->users++;
	int rc = set_up(g, c);
	if (rc) {
		if (error)
			snprintf(error, error_bytes, "%s", g->error[0] ? g->error : kvs_strerror(rc));
		kvs_gpu_close(g);
		return rc;
	}
	*out = g;
	return 0;
}

void kvs_gpu_close(kvs_gpu *g)
{
	if (!g)
		return;
	if (g->context && cu.CtxPushCurrent(g->context) == 0) {
		if (g->side)
			cu.StreamSynchronize(g->side);
		if (g->join)
			cu.EventDestroy(g->join);
		if (g->fork)
			cu.EventDestroy(g->fork);
		if (g->side)
			cu.StreamDestroy(g->side);
		if (g->module)
			cu.ModuleUnload(g->module);
		if (g->word)
			cu.MemFree(g->word);
		if (g->host_flags)
			cu.MemHostUnregister(g->host_flags);
		cu.CtxPopCurrent(&g->context);
	}
	client_put(g->client);
	free(g);
}

const char *kvs_gpu_error(kvs_gpu *g)
{
	return g ? g->error : "";
}

static devptr layer_flag(const struct kvs_gpu *g, uint32_t i)
{
	return g->flags + g->layer_flags + (devptr)i * sizeof(struct kvs_flag);
}

static devptr replay_flag(const struct kvs_gpu *g, uint32_t i)
{
	return g->flags + g->replay_flags + (devptr)i * sizeof(struct kvs_flag);
}

int kvs_gpu_step(kvs_gpu *g, uint64_t step, void *stream)
{
	if (!g || step < g->step || step >= KVS_FLAG_LIMIT)
		return KVS_E_ARG; /* flags only grow */
	devptr replay = replay_flag(g, 0);
	void *args[] = {&step, &g->word, &replay, &g->layers};
	if (g->replays)
		TRY(g, LaunchKernel, g->step_kernel, 1, 1, 1, STEP_THREADS, 1, 1, 0, stream, args, NULL);
	else
		TRY(g, StreamWriteValue64, stream, g->word, step, 0);
	g->step = step;
	return 0;
}

int kvs_gpu_mark(kvs_gpu *g, void *stream, uint64_t *mark)
{
	if (!g || !mark)
		return KVS_E_ARG;
	TRY(g, StreamWriteValue64, stream, g->mark, g->client->mark + 1, 0);
	*mark = ++g->client->mark;
	return 0;
}

int kvs_gpu_reached(kvs_gpu *g, uint64_t mark)
{
	if (!g)
		return KVS_E_ARG;
	const struct kvs_flags_header *h = (const struct kvs_flags_header *)g->client->flags;
	return __atomic_load_n((const uint64_t *)(g->client->flags + h->stream_mark), __ATOMIC_ACQUIRE) >= mark;
}

/* Adds a leaf to the graph that `stream` is being captured into: what the stream holds by now, then 1 to the layer's replay flag. */
static int add_leaf(kvs_gpu *g, uint32_t layer, void *stream)
{
	int status = CAPTURE_NONE;
	uint64_t id;
	handle graph, node;
	const handle *behind = NULL;
	const struct graph_edge *edges = NULL; /* required by the call and not used */
	size_t n = 0;
	TRY(g, StreamGetCaptureInfo, stream, &status, &id, &graph, &behind, &edges, &n);
	struct memop op = {.operation = MEMOP_WRITE_VALUE_64, .address = replay_flag(g, layer), .value = 1};
	struct memop_node params = {.context = g->context, .count = 1, .ops = &op};
	TRY(g, GraphAddBatchMemOpNode, &node, graph, behind, n, &params);
	g->replays = 1;
	return 0;
}

/* Sets a flag once everything that `stream` holds by now is done. *capturing: whether that became a part of a graph. */
static int set_flag(kvs_gpu *g, uint32_t i, void *stream, int *capturing)
{
	int status = CAPTURE_NONE;
	devptr flag = layer_flag(g, i);
	TRY(g, StreamIsCapturing, stream, &status);
	*capturing = status == CAPTURE_ACTIVE;
	if (status == CAPTURE_NONE) {
		TRY(g, StreamWriteValue64, stream, flag, g->step, 0);
		return 0;
	}
	if (!*capturing) {
		if (!g->error[0])
			snprintf(g->error, sizeof g->error, "the stream's capture is invalid");
		return KVS_E_GPU;
	}
	if (i < g->layers)
		return add_leaf(g, i, stream);
	void *args[] = {&g->word, &flag};
	TRY(g, EventRecord, g->fork, stream);
	TRY(g, StreamWaitEvent, g->side, g->fork, 0);
	g->forked = 1;
	TRY(g, LaunchKernel, g->flag_kernel, 1, 1, 1, 1, 1, 1, 0, g->side, args, NULL);
	return 0;
}

int kvs_gpu_signal_layer(kvs_gpu *g, uint32_t layer, void *stream)
{
	int capturing;
	if (!g || layer >= g->layers)
		return KVS_E_ARG;
	return set_flag(g, layer, stream, &capturing);
}

/* Joins the side branch of a capture. */
static int join(kvs_gpu *g, void *stream)
{
	if (!g->forked)
		return 0;
	g->forked = 0;
	int status = CAPTURE_NONE;
	TRY(g, StreamIsCapturing, g->side, &status);
	if (status != CAPTURE_NONE) { /* else that capture was abandoned */
		TRY(g, EventRecord, g->join, g->side);
		TRY(g, StreamWaitEvent, stream, g->join, 0);
	}
	return 0;
}

int kvs_gpu_signal_step(kvs_gpu *g, void *stream)
{
	int capturing = 0; /* if the query failed */
	if (!g)
		return KVS_E_ARG;
	int rc = set_flag(g, g->layers, stream, &capturing);
	int joined = capturing ? join(g, stream) : 0;
	return rc ? rc : joined;
}

int kvs_gpu_wait_layer(kvs_gpu *g, uint32_t layer, uint64_t value, void *stream)
{
	if (!g || layer >= g->layers || value == 0 || value >= KVS_FLAG_LIMIT)
		return KVS_E_ARG;
	TRY(g, StreamWaitValue64, stream, g->flags + g->load_flags + (devptr)layer * sizeof(struct kvs_flag), value, WAIT_GEQ);
	return 0;
}

/* ---- memory that the sidecar imports ---- */

enum { HANDLE_IPC = 1, HANDLE_FD = 2 };

static void put64(uint8_t *at, uint64_t v)
{
	for (int i = 0; i < 8; i++)
		at[i] = (uint8_t)(v >> (8 * i));
}

static int region_failed(char *error, uint32_t n, int rc, const char *what, const char *remedy)
{
	if (!error || !n)
		return KVS_E_GPU;
	if (!rc)
		snprintf(error, n, "%s; %s", what, remedy);
	else
		snprintf(error, n, "%s: %s (%d); %s", what, cuda_error_name(rc), rc, remedy);
	return KVS_E_GPU;
}

int kvs_region_gpu(uint64_t addr, uint64_t bytes, struct kvs_region *out, char *error, uint32_t error_bytes)
{
	if (error && error_bytes)
		error[0] = 0;
	if (!out || !addr || !bytes || addr > UINT64_MAX - bytes)
		return KVS_E_ARG;
	memset(out, 0, sizeof *out);
	out->fd = -1;
	const char *missing = cuda_open();
	if (missing) {
		if (error && error_bytes)
			snprintf(error, error_bytes, "%s", missing);
		return KVS_E_GPU;
	}
	int device = 0, rc;
	devptr base = 0;
	size_t size = 0;
	uint8_t *h = out->handle;
	if ((rc = cu.PointerGetAttribute(&device, POINTER_DEVICE_ORDINAL, addr)) != 0)
		return region_failed(error, error_bytes, rc, "this is no memory of a GPU", "pass data_ptr() of a tensor on a GPU");
	if ((rc = cu.MemGetAddressRange(&base, &size, addr)) != 0 || (rc = cu.DeviceGetUuid(h + 8, device)) != 0)
		return region_failed(error, error_bytes, rc, "the allocation around it is not known", "pass memory that is still allocated");
	if (addr - base > size || bytes > size - (addr - base))
		return region_failed(error, error_bytes, 0, "the range ends beyond its allocation", "register each allocation as a region of its own");
	if (cu.IpcGetMemHandle(h + 40, base) == 0) {
		put64(h, HANDLE_IPC);
	} else {
		/* Made by cuMemCreate: one descriptor for one allocation, which must hold the whole range. */
		uint64_t memory;
		memset(h + 40, 0, 64);
		if ((rc = cu.MemRetainAllocationHandle(&memory, (void *)(uintptr_t)addr)) != 0)
			return region_failed(error, error_bytes, rc, "the driver names the allocation neither by IPC nor by a handle",
			                     "allocate the cache with cudaMalloc, or with cuMemCreate and POSIX descriptors");
		rc = cu.MemExportToShareableHandle(&out->fd, memory, HANDLE_POSIX_FD, 0);
		cu.MemRelease(memory);
		if (rc) {
			out->fd = -1;
			return region_failed(error, error_bytes, rc, "the allocation cannot be exported as a descriptor",
			                     "allocate it with CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR; with torch, unset expandable_segments");
		}
		put64(h, HANDLE_FD);
	}
	put64(h + 24, addr - base);
	put64(h + 32, size);
	if (kvs_random(out->id, sizeof out->id) < 0) {
		kvs_region_free(out);
		return KVS_E_SYS;
	}
	out->kind = KVS_REGION_DEVICE;
	out->addr = addr;
	out->bytes = bytes;
	return 0;
}

int kvs_gpu_map(uint32_t device, uint64_t addr, uint64_t bytes, uint64_t *memory, char *error, uint32_t error_bytes)
{
	if (error && error_bytes)
		error[0] = 0;
	if (!addr || !bytes || !memory)
		return KVS_E_ARG;
	const char *missing = cuda_open();
	if (missing) {
		if (error && error_bytes)
			snprintf(error, error_bytes, "%s", missing);
		return KVS_E_GPU;
	}
	struct memory_location here = {LOCATION_DEVICE, (int)device};
	struct memory_kind kind = {.type = MEMORY_PINNED, .handles = HANDLE_POSIX_FD, .location = here};
	struct memory_access access = {here, ACCESS_READ_WRITE};
	int rdma = 0, rc;
	if (cu.DeviceGetAttribute(&rdma, ATTRIBUTE_RDMA_WITH_VMM, (int)device) == 0 && rdma)
		kind.rdma = 1;
	uint64_t m;
	if ((rc = cu.MemCreate(&m, bytes, &kind, 0)) != 0)
		return region_failed(error, error_bytes, rc, "no memory was allocated", "free memory of this GPU, and try again");
	if ((rc = cu.MemMap(addr, bytes, 0, m, 0)) == 0) {
		if ((rc = cu.MemSetAccess(addr, bytes, &access, 1)) == 0) {
			*memory = m;
			return 0;
		}
		cu.MemUnmap(addr, bytes);
	}
	cu.MemRelease(m);
	return region_failed(error, error_bytes, rc, "the memory was not mapped", "pass a reserved range that maps nothing");
}
