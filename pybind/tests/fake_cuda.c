/* SPDX-License-Identifier: Apache-2.0
 *
 * A CUDA driver without a GPU: it keeps what was enqueued on which stream, knows captures and their branches, and fails a call on
 * demand. KVSPRAY_LIBCUDA names it to the library, ctypes loads it too and reads the record.
 *
 * Memory of a GPU is the process's own, at its own address: what fake_lend was told. The pack kernels really move it, on streams that do one
 * thing after another each, in no order among them, and can be held.
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
#include <sys/prctl.h>
#include <time.h>

typedef void *handle;
typedef unsigned long long devptr;

enum { STREAMS = 12, EVENTS = 8, OPS = 4096 };

struct op {
	char what[12]; /* write, leaf, wait, kernel, step, take, move, record, follow */
	int stream;
	uint64_t address, value; /* kernel and take: flag, word; step: replay flags, step; move: what was taken, blocks */
	int captured;
};

static struct op ops[OPS];
static int op_count;
static int capturing[STREAMS + 1]; /* 1: the origin, 2: a branch that is not joined, 3: joined back */
static int event_of[EVENTS + 1];   /* stream that recorded it last, 0: none */
static int next_stream = 4, next_event = 1;
static int has_context = 1;
static char fail_call[32]; /* set while no other thread calls */
static int fail_skip;      /* calls of it that go well before */
static int blocked, waiting, gave_up; /* as with a queue that is full; guarded by lock */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t freed = PTHREAD_COND_INITIALIZER;
enum { REGISTRATIONS = 8 };
static void *registered[REGISTRATIONS];
static size_t registered_bytes;
static _Atomic int live; /* streams, events, modules, allocations, registrations */

static int failing(const char *call)
{
	return strcmp(fail_call, call) == 0 && fail_skip-- <= 0;
}

#define PATIENCE_S 5

/* Until somebody says fake_block(0); in vain after PATIENCE_S. */
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
void fake_fail(const char *call) { snprintf(fail_call, sizeof fail_call, "%s", call); fail_skip = 0; }
void fake_fail_later(const char *call, int skip) { fake_fail(call); fail_skip = skip; }

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
int cuCtxSetCurrent(handle c) { (void)c; return 0; }
int cuDevicePrimaryCtxRetain(handle *c, int d) { (void)d; *c = (handle)1; live++; return 0; }
int cuDevicePrimaryCtxRelease_v2(int d) { (void)d; live--; return 0; }
int cuThreadExchangeStreamCaptureMode(int *mode) { return *mode == 2 ? 0 : 1; }
int cuCtxGetDevice(int *d) { *d = 0; return 0; }
int cuCtxGetStreamPriorityRange(int *a, int *b) { *a = 0; *b = -5; return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) { (void)d; *v = a == 122 && !failing("memops"); return 0; }
int cuGetErrorName(int rc, const char **out) { *out = rc == 999 ? "CUDA_ERROR_UNKNOWN" : "CUDA_ERROR_OTHER"; return 0; }
/* One allocation of 1 MiB at 16 MiB by IPC handle, one of 1 MiB at 32 MiB by descriptor only. */
enum { ALLOCATION = 1 << 20, BY_IPC = 16 << 20, BY_FD = 32 << 20 };
static struct {
	devptr at;
	size_t bytes;
} lent[8]; /* by IPC handle, which holds the address */
static int lents;

void fake_lend(void *at, size_t bytes)
{
	lent[lents].at = (devptr)(uintptr_t)at;
	lent[lents++].bytes = bytes;
}

/* The allocation of fake_lend that has n bytes at p. */
static int lent_at(devptr p, uint64_t n)
{
	for (int i = 0; i < lents; i++)
		if (p >= lent[i].at && p - lent[i].at <= lent[i].bytes && n <= lent[i].bytes - (p - lent[i].at))
			return i;
	return -1;
}

static devptr allocation(devptr p)
{
	int i = lent_at(p, 1);
	if (i >= 0)
		return lent[i].at;
	return p >= BY_IPC && p < BY_IPC + ALLOCATION ? BY_IPC : p >= BY_FD && p < BY_FD + ALLOCATION ? BY_FD : 0;
}
int cuDeviceGetUuid_v2(unsigned char *id, int d) { memset(id, 0x70 + d, 16); return 0; }
int cuPointerGetAttribute(void *out, int a, devptr p)
{
	ENTER("cuPointerGetAttribute");
	if (a == 1)
		*(handle *)out = failing("context") ? NULL : (handle)1;
	else
		*(int *)out = 3;
	return (a == 9 || a == 1) && allocation(p) ? 0 : 1;
}
int cuMemGetAddressRange_v2(devptr *base, size_t *n, devptr p)
{
	int i = lent_at(p, 1);
	ENTER("cuMemGetAddressRange");
	*base = allocation(p);
	*n = i >= 0 ? lent[i].bytes : ALLOCATION;
	return *base ? 0 : 1;
}
int cuIpcGetMemHandle(unsigned char *h, devptr p) { memset(h, 0x5a, 64); return p == BY_IPC ? 0 : 1; }
struct ipc_handle {
	unsigned char bytes[64];
};
int cuIpcOpenMemHandle_v2(devptr *p, struct ipc_handle h, unsigned flags)
{
	ENTER("cuIpcOpenMemHandle");
	memcpy(p, h.bytes, sizeof *p);
	if (flags != 1 || lent_at(*p, 1) < 0)
		return 1;
	live++;
	return 0;
}
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
int cuModuleLoadData(handle *m, const void *p)
{
	ENTER("cuModuleLoadData");
	if (!strstr(p, ".entry kvs_flag") && !strstr(p, ".entry kvs_pack_v4"))
		return 200;
	*m = (handle)1;
	live++;
	return 0;
}
int cuModuleUnload(handle m) { (void)m; live--; return 0; }
static const char *const kernels[] = {"kvs_flag", "kvs_pack_v4", "kvs_unpack_v4", "kvs_pack_uniform_v4", "kvs_unpack_uniform_v4",
                                      "kvs_graph_take", "kvs_graph_move", "kvs_step"};
enum { KERNEL_FLAG, KERNEL_PACK, KERNEL_UNPACK, KERNEL_PACK_UNIFORM, KERNEL_UNPACK_UNIFORM, KERNEL_TAKE, KERNEL_MOVE, KERNEL_STEP, KERNELS };
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

/* ---- streams that work: the kernels that move bytes, and stores behind them ---- */

struct piece_run { /* struct kvs_run of kernels.cu */
	uint64_t base, stride, outer, dense;
	uint32_t len, count;
};

struct job {
	int kernel; /* KERNEL_FLAG: a store */
	uint64_t args[4];
};

enum { JOBS = 64, HOLD_NONE = 0, HOLD_ALL = 1, HOLD_NEXT = 2 };
static struct job jobs[STREAMS + 1][JOBS];
static int counts[STREAMS + 1];                /* of jobs; guarded by lock, as is what changes job_count */
static int hold, held_stream, context_broken;  /* HOLD_NEXT: the stream that is used next, and no other */
enum { BETWEEN = -2 };
static int jobs_left = -1;                     /* until the context breaks; -1: it does not; BETWEEN: between the two words of a list in a graph */
static _Atomic int job_count;                  /* of all streams */
static _Atomic int works[STREAMS + 1];         /* a pack kernel was launched there */
static _Atomic int astray, moved; /* kernels: out of what was lent; done */

static void piece(uint64_t scattered, uint64_t dense, uint64_t n, int pack)
{
	if (lent_at(scattered, n) < 0 || lent_at(dense, n) < 0) {
		astray++;
		return;
	}
	memcpy((void *)(uintptr_t)(pack ? dense : scattered), (void *)(uintptr_t)(pack ? scattered : dense), n);
}

static void run_job(const struct job *j)
{
	const uint64_t *a = j->args;
	int pack = j->kernel == KERNEL_PACK || j->kernel == KERNEL_PACK_UNIFORM;
	if (j->kernel == KERNEL_FLAG) {
		__atomic_store_n((uint64_t *)(uintptr_t)a[0], a[1], __ATOMIC_RELEASE);
		return;
	}
	if (j->kernel == KERNEL_PACK_UNIFORM || j->kernel == KERNEL_UNPACK_UNIFORM) {
		for (uint64_t i = 0; i < a[1]; i++)
			piece(((uint64_t *)(uintptr_t)a[0])[i], a[2] + i * a[3], a[3], pack);
	} else {
		const struct piece_run *r = (void *)(uintptr_t)a[0];
		const uint32_t *first = (void *)(uintptr_t)a[1];
		uint32_t pieces = 0;
		for (uint64_t i = 0; i < a[2]; i++, r++) {
			uint32_t n = first[i + 1] - first[i];
			if (first[i] != pieces || !r->count || n % r->count) {
				astray++;
				break;
			}
			for (uint32_t k = 0; k < n; k++)
				piece(r->base + k / r->count * r->outer + k % r->count * r->stride, r->dense + (uint64_t)k * r->len, r->len, pack);
			pieces += n;
		}
		if (first[a[2]] != pieces)
			astray++;
	}
	moved++;
}

/* The context is lost: nothing of it runs any more. */
static void lose(void)
{
	context_broken = 1;
	memset(counts, 0, sizeof counts);
	job_count = 0;
	pthread_cond_broadcast(&freed);
}

/* Those that came last go first: who relies on an order between streams is found out. */
static void work_off(void)
{
	for (int s = STREAMS; s > 0; s--) {
		if (hold == HOLD_ALL || (hold == HOLD_NEXT && held_stream == s))
			continue;
		for (int j = 0; j < counts[s]; j++) {
			if (jobs_left == 0) {
				lose();
				return;
			}
			jobs_left -= jobs_left > 0;
			run_job(&jobs[s][j]);
		}
		job_count -= counts[s];
		counts[s] = 0;
	}
	pthread_cond_broadcast(&freed);
}

static int job(int kernel, int stream, void **args, int n)
{
	int rc = 0;
	pthread_mutex_lock(&lock);
	works[stream] = 1;
	if (context_broken || counts[stream] == JOBS) {
		rc = 700;
	} else {
		struct job *to = &jobs[stream][counts[stream]++];
		to->kernel = kernel;
		for (int i = 0; i < n; i++)
			to->args[i] = *(uint64_t *)args[i];
		job_count++;
		if (hold == HOLD_NEXT && !held_stream)
			held_stream = stream;
		work_off();
	}
	pthread_mutex_unlock(&lock);
	return rc;
}

int cuIpcCloseMemHandle(devptr p)
{
	if (job_count)
		astray++; /* under a kernel */
	live--;
	return lent_at(p, 1) >= 0 ? 0 : 1;
}

void fake_hold(int what)
{
	pthread_mutex_lock(&lock);
	hold = what;
	held_stream = 0;
	work_off();
	pthread_mutex_unlock(&lock);
}

/* The context is lost after so many more kernels and stores; -1: it is a new one; BETWEEN: see there. */
void fake_break(int after)
{
	pthread_mutex_lock(&lock);
	jobs_left = after;
	context_broken = 0;
	if (after == 0)
		lose();
	pthread_mutex_unlock(&lock);
}

/* The same page at two addresses is two pages to the thread sanitizer: this says that what the caller did is before what jobs do next. */
void fake_order(void)
{
	pthread_mutex_lock(&lock);
	pthread_mutex_unlock(&lock);
}

int fake_astray(void) { return astray; }
int fake_moved(void) { return moved; }
int fake_jobs(void) { return job_count; }

/* ---- a captured graph that is replayed: kvs_graph_take and kvs_graph_move of kernels.cu, one thread at a time ---- */

struct graph_slot {
	uint64_t armed, revoked, taken, skipped, list, first, n, dense;
	uint32_t len, unpack;
	uint64_t own, done, seq, pad[4];
};
enum { SLOTS = 8, NODES = 64 };
struct batch { /* as large as that of the kernels, which is what was allocated */
	uint64_t n[SLOTS], pad[8];
	struct {
		uint64_t list, first, n, dense, len, unpack, own, done, ticket, seq;
	} jobs[SLOTS];
};
static struct node {
	int kernel, stream;
	uint64_t args[6];
} nodes[NODES]; /* guarded by lock, as the three below */
static int node_count, move_waits, in_graphs; /* in_graphs: moved by them */
static pthread_t replayer;
static _Atomic int replaying; /* microseconds between two layers at most; 0: no replays */

static uint64_t seen_of(uint64_t at) { return __atomic_load_n((uint64_t *)(uintptr_t)at, __ATOMIC_SEQ_CST); }
static void say(uint64_t at, uint64_t v) { __atomic_store_n((uint64_t *)(uintptr_t)at, v, __ATOMIC_SEQ_CST); }

static void pause_us(unsigned n)
{
	struct timespec t = {.tv_nsec = n * 1000L};
	nanosleep(&t, NULL);
}

static void graph_take(const uint64_t *a, unsigned *random)
{
	struct graph_slot *slots = (void *)(uintptr_t)a[3];
	uint64_t *last = (uint64_t *)(uintptr_t)a[4] + 1;
	struct batch *batch = (void *)(uintptr_t)a[5];
	say(a[2], seen_of(a[2]) + 1);
	for (int i = 0; i < SLOTS; i++) {
		struct graph_slot *s = &slots[i];
		uint64_t ticket = __atomic_load_n(&s->armed, __ATOMIC_SEQ_CST);
		int mine = ticket > last[i];
		if (mine) {
			last[i] = ticket;
			if (rand_r(random) % 3 == 0)
				pause_us(rand_r(random) % 100); /* whoever revokes does so now */
			__atomic_store_n(&s->taken, ticket, __ATOMIC_SEQ_CST);
			if (rand_r(random) % 3 == 0)
				pause_us(rand_r(random) % 100);
			mine = __atomic_load_n(&s->revoked, __ATOMIC_SEQ_CST) < ticket;
			if (!mine)
				__atomic_store_n(&s->skipped, ticket, __ATOMIC_SEQ_CST);
		}
		batch->n[i] = 0;
		if (mine) {
			batch->jobs[i].list = s->list, batch->jobs[i].first = s->first, batch->jobs[i].n = s->n, batch->jobs[i].dense = s->dense;
			batch->jobs[i].len = s->len, batch->jobs[i].unpack = s->unpack;
			batch->jobs[i].own = s->own, batch->jobs[i].done = s->done, batch->jobs[i].ticket = ticket, batch->jobs[i].seq = s->seq;
			batch->n[i] = s->n;
		}
	}
}

/* With lock held; it may be let go meanwhile. False: the context is lost. */
static int graph_move(const uint64_t *a)
{
	struct batch *batch = (void *)(uintptr_t)a[0];
	int any = 0;
	for (int i = 0; i < SLOTS; i++)
		any |= batch->n[i] != 0;
	while (any && hold == HOLD_ALL && !context_broken && replaying) {
		move_waits = 1;
		pthread_cond_wait(&freed, &lock);
	}
	move_waits = 0;
	for (int i = 0; i < SLOTS && !context_broken; i++) {
		if (!batch->n[i])
			continue;
		uint64_t list = batch->jobs[i].list, first = batch->jobs[i].first, n = batch->n[i], len = batch->jobs[i].len;
		int unpack = batch->jobs[i].unpack != 0;
		struct job uniform = {unpack ? KERNEL_UNPACK_UNIFORM : KERNEL_PACK_UNIFORM, {list, n, batch->jobs[i].dense, len}};
		struct job runs = {unpack ? KERNEL_UNPACK : KERNEL_PACK, {list, first, n}};
		run_job(len ? &uniform : &runs);
		in_graphs++;
		say(batch->jobs[i].done, batch->jobs[i].seq);
		if (jobs_left == BETWEEN) {
			lose();
			return 0;
		}
		if (rand() % 3 == 0)
			pause_us(rand() % 100); /* whoever posted it posts the next one now */
		say(batch->jobs[i].own, batch->jobs[i].ticket);
	}
	return !context_broken;
}

static void *replay(void *arg)
{
	unsigned random = 1;
	(void)arg;
	prctl(PR_SET_TIMERSLACK, 1UL);
	for (int us; (us = replaying);) {
		int well = 1;
		for (int i = 0; i < node_count && well; i++) {
			if (nodes[i].kernel == KERNEL_TAKE) {
				graph_take(nodes[i].args, &random);
			} else {
				pthread_mutex_lock(&lock);
				well = graph_move(nodes[i].args);
				pthread_mutex_unlock(&lock);
			}
			pause_us(rand_r(&random) % (unsigned)us);
		}
		if (!well)
			break;
	}
	return NULL;
}

/* A layer every so many microseconds at most, for ever; 0: no more. */
void fake_replays(int us)
{
	int before = replaying;
	pthread_mutex_lock(&lock);
	replaying = us;
	pthread_cond_broadcast(&freed);
	pthread_mutex_unlock(&lock);
	if (before && !us)
		pthread_join(replayer, NULL);
	else if (!before && us && pthread_create(&replayer, NULL, replay, NULL) != 0)
		abort();
}

int fake_in_graphs(void)
{
	pthread_mutex_lock(&lock);
	int n = in_graphs;
	pthread_mutex_unlock(&lock);
	return n;
}

int fake_move_waits(void)
{
	pthread_mutex_lock(&lock);
	int n = move_waits;
	pthread_mutex_unlock(&lock);
	return n;
}

/* A node of the graph that is being captured; there is one graph. */
static int capture(int kernel, int stream, void **args, int n)
{
	if ((capturing[stream] != 1 && capturing[stream] != 2) || node_count == NODES)
		return 900;
	struct node *to = &nodes[node_count];
	to->kernel = kernel;
	to->stream = stream;
	for (int i = 0; i < n; i++)
		to->args[i] = *(uint64_t *)args[i];
	__atomic_store_n(&node_count, node_count + 1, __ATOMIC_SEQ_CST);
	return 0;
}

int cuLaunchKernel(handle f, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned g, unsigned shared, handle s, void **args, void **extra)
{
	int kernel = (int)(intptr_t)f - 2;
	(void)shared, (void)extra;
	ENTER("cuLaunchKernel");
	if (kernel == KERNEL_TAKE) {
		push("take", (int)(intptr_t)s, *(devptr *)args[1], *(devptr *)args[0]);
		return a * b * c != 1 || d != SLOTS || e * g != 1 ? 1 : capture(kernel, (int)(intptr_t)s, args, 6);
	}
	if (kernel == KERNEL_MOVE) {
		push("move", (int)(intptr_t)s, *(devptr *)args[0], a);
		return d != 512 || b * c * e * g != 1 ? 1 : capture(kernel, (int)(intptr_t)s, args, 1);
	}
	if (kernel == KERNEL_STEP) {
		push("step", (int)(intptr_t)s, *(devptr *)args[2], *(uint64_t *)args[0]);
		return a != 1 || d != 128 || b * c * e * g != 1 || ops[op_count - 1].captured; /* a graph would always say the same step */
	}
	if (kernel != KERNEL_FLAG)
		return d != 512 ? 1 : job(kernel, (int)(intptr_t)s, args, kernel < KERNEL_PACK_UNIFORM ? 3 : 4);
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
	if (works[(intptr_t)s]) {
		void *args[] = {&p, &v};
		return job(KERNEL_FLAG, (int)(intptr_t)s, args, 2);
	}
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
int cuStreamDestroy_v2(handle s) { works[(intptr_t)s] = 0; next_stream--; live--; return 0; }
int cuStreamSynchronize(handle s)
{
	ENTER("cuStreamSynchronize");
	pthread_mutex_lock(&lock);
	while (counts[(intptr_t)s] && !context_broken)
		pthread_cond_wait(&freed, &lock);
	int rc = context_broken ? 700 : 0;
	pthread_mutex_unlock(&lock);
	return rc;
}
int cuStreamQuery(handle s)
{
	ENTER("cuStreamQuery");
	pthread_mutex_lock(&lock);
	int rc = context_broken ? 700 : counts[(intptr_t)s] ? 600 : 0;
	pthread_mutex_unlock(&lock);
	return rc;
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
