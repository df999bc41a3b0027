/* A CUDA driver without a GPU: it keeps what was enqueued on which stream, has captures and their branches, and fails a call on
 * demand. KVSPRAY_LIBCUDA names it to the library, ctypes loads it too and reads the record.
 *
 * A capture holds what real ones hold us to: a stream joins it by waiting for an event that was recorded inside it, and the end fails
 * when a stream that joined was not joined back. A node that is added to the graph by hand belongs to no stream.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

typedef void *handle;
typedef unsigned long long devptr;

enum { STREAMS = 12, EVENTS = 8, OPS = 4096 };

struct op {
	char what[12]; /* write, leaf, wait, kernel, step, record, follow */
	int stream;
	uint64_t address, value; /* kernel: flag, word; step: replay flags, step */
	int captured;
};

static struct op ops[OPS];
static int op_count;
static int capturing[STREAMS + 1]; /* 1: the origin, 2: a branch that is not joined, 3: joined back */
static int event_of[EVENTS + 1];   /* stream that recorded it last, 0: none */
static int next_stream = 4, next_event = 1;
static int has_context = 1;
static char fail_call[32]; /* set while no other thread calls */
static int blocked, waiting, gave_up; /* as with a queue that is full; guarded by lock */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t freed = PTHREAD_COND_INITIALIZER;
enum { REGISTRATIONS = 8 };
static void *registered[REGISTRATIONS];
static size_t registered_bytes;
static _Atomic int live; /* streams, events, modules, allocations, registrations */

static int failing(const char *call)
{
	return strcmp(fail_call, call) == 0;
}

#define PATIENCE_S 5

/* Waits for a call of fake_block(0), and gives up after PATIENCE_S. */
static int stuck(void)
{
	struct timespec end;
	clock_gettime(CLOCK_REALTIME, &end);
	end.tv_sec += PATIENCE_S;
	pthread_mutex_lock(&lock);
	waiting = blocked;
	while (blocked && !gave_up)
		gave_up = pthread_cond_timedwait(&freed, &lock, &end) != 0;
	int vain = blocked;
	if (!vain)
		waiting = 0;
	pthread_mutex_unlock(&lock);
	return vain;
}

#define ENTER(call)                     \
	do {                                \
		if (failing(call) || stuck())   \
			return 999;                 \
	} while (0)

static void push(const char *what, int stream, uint64_t address, uint64_t value)
{
	if (op_count == OPS)
		abort();
	struct op *o = &ops[op_count++];
	snprintf(o->what, sizeof o->what, "%s", what);
	o->stream = stream;
	o->address = address;
	o->value = value;
	o->captured = capturing[stream] == 1 || capturing[stream] == 2;
}

/* for the test */
struct op *fake_ops(int *n) { *n = op_count; return ops; }
void fake_clear(void) { op_count = 0; }
void fake_context(int there) { has_context = there; }
void fake_fail(const char *call) { snprintf(fail_call, sizeof fail_call, "%s", call); }

void fake_block(int on)
{
	pthread_mutex_lock(&lock);
	blocked = on;
	pthread_cond_broadcast(&freed);
	pthread_mutex_unlock(&lock);
}

int fake_waiting(void) { return __atomic_load_n(&waiting, __ATOMIC_SEQ_CST); }
int fake_gave_up(void) { return gave_up; }
int fake_live(void) { return live; }
void *fake_registered(void) { return registered[0]; }
void fake_capture_begin(int stream) { capturing[stream] = 1; }
int fake_capture_end(int stream)
{
	int unjoined = 0;
	for (int i = 1; i <= STREAMS; i++) {
		unjoined |= capturing[i] == 2;
		capturing[i] = 0;
	}
	(void)stream;
	return unjoined;
}

int cuCtxGetCurrent(handle *out) { ENTER("cuCtxGetCurrent"); *out = has_context ? (handle)1 : NULL; return 0; }
int cuCtxPushCurrent_v2(handle c) { (void)c; return 0; }
int cuCtxPopCurrent_v2(handle *c) { (void)c; return 0; }
int cuCtxGetDevice(int *d) { *d = 0; return 0; }
int cuCtxGetStreamPriorityRange(int *a, int *b) { *a = 0; *b = -5; return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) { (void)d; *v = a == 122 && !failing("memops"); return 0; }
int cuGetErrorName(int rc, const char **out) { *out = rc == 999 ? "CUDA_ERROR_UNKNOWN" : "CUDA_ERROR_OTHER"; return 0; }
/* One allocation of 1 MiB at 16 MiB by IPC handle, one of 1 MiB at 32 MiB by descriptor only. */
enum { ALLOCATION = 1 << 20, BY_IPC = 16 << 20, BY_FD = 32 << 20 };
static devptr allocation(devptr p)
{
	return p >= BY_IPC && p < BY_IPC + ALLOCATION ? BY_IPC : p >= BY_FD && p < BY_FD + ALLOCATION ? BY_FD : 0;
}
int cuDeviceGetUuid_v2(unsigned char *id, int d) { memset(id, 0x70 + d, 16); return 0; }
int cuPointerGetAttribute(void *out, int a, devptr p)
{
	ENTER("cuPointerGetAttribute");
	*(int *)out = 3;
	return a == 9 && allocation(p) ? 0 : 1;
}
int cuMemGetAddressRange_v2(devptr *base, size_t *n, devptr p)
{
	ENTER("cuMemGetAddressRange");
	*base = allocation(p);
	*n = ALLOCATION;
	return *base ? 0 : 1;
}
int cuIpcGetMemHandle(unsigned char *h, devptr p) { memset(h, 0x5a, 64); return p == BY_IPC ? 0 : 1; }
int cuMemRetainAllocationHandle(uint64_t *m, void *p) { *m = (uint64_t)(uintptr_t)p; live++; return 0; }
int cuMemExportToShareableHandle(void *fd, uint64_t m, int kind, unsigned long long flags)
{
	(void)m;
	ENTER("cuMemExportToShareableHandle");
	if (kind != 1 || flags)
		return 1;
	*(int *)fd = memfd_create("allocation", 0);
	return 0;
}
int cuMemRelease(uint64_t m) { (void)m; live--; return 0; }
/* Memory that is mapped, and the range that was. */
static devptr mapped_at;
static size_t mapped_bytes;
int cuMemCreate(uint64_t *m, size_t bytes, const int *kind, unsigned long long flags)
{
	ENTER("cuMemCreate");
	/* pinned, POSIX descriptors, GPU 3 */
	if (kind[0] != 1 || kind[1] != 1 || kind[2] != 1 || kind[3] != 3 || !bytes || flags)
		return 1;
	*m = 77;
	live++;
	return 0;
}
int cuMemMap(devptr p, size_t bytes, size_t offset, uint64_t m, unsigned long long flags)
{
	ENTER("cuMemMap");
	if (offset || m != 77 || flags || mapped_at)
		return 1;
	mapped_at = p;
	mapped_bytes = bytes;
	return 0;
}
int cuMemUnmap(devptr p, size_t bytes)
{
	if (p != mapped_at || bytes != mapped_bytes)
		return 1;
	mapped_at = 0;
	return 0;
}
int cuMemSetAccess(devptr p, size_t bytes, const int *access, size_t n)
{
	ENTER("cuMemSetAccess");
	return p == mapped_at && bytes == mapped_bytes && access[0] == 1 && access[1] == 3 && access[2] == 3 && n == 1 ? 0 : 1;
}
devptr fake_mapped(void) { return mapped_at; }
int cuModuleLoadData(handle *m, const void *p)
{
	ENTER("cuModuleLoadData");
	if (!strstr(p, ".entry kvs_flag"))
		return 200;
	*m = (handle)1;
	live++;
	return 0;
}
int cuModuleUnload(handle m) { (void)m; live--; return 0; }
static const char *const kernels[] = {"kvs_flag", "kvs_step"};
enum { KERNEL_FLAG, KERNEL_STEP, KERNELS };
int cuModuleGetFunction(handle *f, handle m, const char *name)
{
	(void)m;
	for (intptr_t i = 0; i < KERNELS; i++) {
		if (strcmp(name, kernels[i]) == 0) {
			*f = (handle)(i + 2);
			return 0;
		}
	}
	return 500;
}

int cuLaunchKernel(handle f, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned g, unsigned shared, handle s, void **args, void **extra)
{
	int kernel = (int)(intptr_t)f - 2;
	(void)shared, (void)extra;
	ENTER("cuLaunchKernel");
	if (kernel == KERNEL_STEP) {
		push("step", (int)(intptr_t)s, *(devptr *)args[2], *(uint64_t *)args[0]);
		return a != 1 || d != 128 || b * c * e * g != 1 || ops[op_count - 1].captured; /* a graph would always report the same step */
	}
	if (a * b * c * d * e * g != 1)
		return 1;
	push("kernel", (int)(intptr_t)s, *(devptr *)args[1], *(devptr *)args[0]);
	return 0;
}
int cuMemAlloc_v2(devptr *p, size_t n) { ENTER("cuMemAlloc"); *p = (devptr)(uintptr_t)calloc(1, n); live++; return 0; }
int cuMemFree_v2(devptr p) { free((void *)(uintptr_t)p); live--; return 0; }
int cuMemsetD32_v2(devptr p, unsigned v, size_t n) { (void)p, (void)v, (void)n; return 0; }
int cuMemHostRegister_v2(void *p, size_t n, unsigned flags)
{
	ENTER("cuMemHostRegister");
	if ((uintptr_t)p % 4096 || flags != 3)
		return 1;
	for (int i = 0; i < REGISTRATIONS; i++)
		if (registered[i] == p)
			return 712;
	for (int i = 0; i < REGISTRATIONS; i++) {
		if (!registered[i]) {
			registered[i] = p;
			registered_bytes = n;
			live++;
			return 0;
		}
	}
	return 1;
}
int cuMemHostUnregister(void *p)
{
	for (int i = 0; i < REGISTRATIONS; i++) {
		if (registered[i] == p) {
			registered[i] = NULL;
			live--;
			return 0;
		}
	}
	return 713;
}
int cuMemHostGetDevicePointer_v2(devptr *out, void *p, unsigned flags)
{
	(void)flags;
	ENTER("cuMemHostGetDevicePointer");
	*out = (devptr)(uintptr_t)p;
	return 0;
}
int cuStreamWriteValue64_v2(handle s, devptr p, uint64_t v, unsigned flags)
{
	ENTER("cuStreamWriteValue64");
	if (flags)
		return 1;
	push("write", (int)(intptr_t)s, p, v);
	return 0;
}
int cuStreamWaitValue64_v2(handle s, devptr p, uint64_t v, unsigned flags)
{
	ENTER("cuStreamWaitValue64");
	if (flags)
		return 1;
	push("wait", (int)(intptr_t)s, p, v);
	return 0;
}
int cuStreamCreateWithPriority(handle *out, unsigned flags, int priority)
{
	if (flags != 1 || priority != -5 || next_stream > STREAMS)
		return 1;
	*out = (handle)(intptr_t)next_stream++;
	live++;
	return 0;
}
int cuStreamDestroy_v2(handle s) { (void)s; next_stream--; live--; return 0; }
int cuStreamSynchronize(handle s)
{
	(void)s;
	ENTER("cuStreamSynchronize");
	return 0;
}
int cuStreamIsCapturing(handle s, int *out)
{
	int c = capturing[(intptr_t)s];
	ENTER("cuStreamIsCapturing");
	*out = failing("invalidated") ? 2 : c == 1 || c == 2;
	return 0;
}
/* The graph of a capture is its stream, which is all that a new node depends on, by an edge that is no plain one. */
struct graph_edge {
	unsigned char from_port, to_port, type, reserved[5];
};
int cuStreamGetCaptureInfo_v3(handle s, int *status, uint64_t *id, handle *graph, const handle **behind, const struct graph_edge **edges, size_t *n)
{
	static handle last;
	static const struct graph_edge programmatic = {.type = 1};
	ENTER("cuStreamGetCaptureInfo");
	if (capturing[(intptr_t)s] != 1 || !edges)
		return 915; /* CUDA_ERROR_LOSSY_QUERY */
	last = s;
	*status = 1;
	*id = 1;
	*graph = s;
	*behind = &last;
	*edges = &programmatic;
	*n = 1;
	return 0;
}
struct memop {
	unsigned operation;
	devptr address;
	uint64_t value;
	unsigned flags;
	devptr alias;
	uint64_t pad;
};
struct memop_node {
	handle context;
	unsigned count;
	struct memop *ops;
	unsigned flags;
};
int cuGraphAddBatchMemOpNode(handle *node, handle graph, const handle *behind, size_t n, const struct memop_node *p)
{
	ENTER("cuGraphAddBatchMemOpNode");
	if (n != 1 || behind[0] != graph || p->count != 1 || p->ops->operation != 5 || p->flags || p->ops->flags || p->context != (handle)1)
		return 1;
	*node = (handle)1;
	push("leaf", (int)(intptr_t)graph, p->ops->address, p->ops->value);
	return 0;
}
int cuEventCreate(handle *out, unsigned flags)
{
	if (flags != 2 || next_event > EVENTS)
		return 1;
	*out = (handle)(intptr_t)next_event++;
	live++;
	return 0;
}
int cuEventDestroy_v2(handle e) { (void)e; next_event--; live--; return 0; }
int cuEventRecord(handle e, handle s)
{
	ENTER("cuEventRecord");
	event_of[(intptr_t)e] = (int)(intptr_t)s;
	push("record", (int)(intptr_t)s, (uint64_t)(intptr_t)e, 0);
	return 0;
}
int cuStreamWaitEvent(handle s, handle e, unsigned flags)
{
	int from = event_of[(intptr_t)e], to = (int)(intptr_t)s;
	(void)flags;
	if (!from)
		return 400;
	push("follow", to, (uint64_t)(intptr_t)e, (uint64_t)from);
	if ((capturing[from] == 1 || capturing[from] == 2) && capturing[to] != 1)
		capturing[to] = 2; /* a branch, or a branch of one */
	else if (capturing[from] == 2 && capturing[to] == 1)
		capturing[from] = 3; /* joined back */
	return 0;
}
