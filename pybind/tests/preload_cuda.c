/* A libcuda.so.1 whose streams really run: each is a thread that executes copies, host functions, stream memory operations and waits, in order, while
 * the others go on. A call that frees memory waits for all of them, and the calls of other threads wait for it. The legacy default stream waits for the blocking streams and they for it. A capture records, and runs when its graph is launched.
 *
 * Memory of the GPU is a memory file. A new allocation gets the address of an old one where it can: what still has the old file, reads or writes
 * other bytes than the program.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef void *handle;
typedef unsigned long long devptr;

enum {
	OK, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700, NOT_REGISTERED = 713,
	NOT_SUPPORTED = 801, CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, CAPTURE_IMPLICIT = 906,
	STREAMS = 4096, EVENTS = 65536, ALLOCATIONS = 1024, GRAPHS = 4096, PAGE = 4096, CHUNK = 64 << 10,
	KIND_DEVICE = 1, KIND_HOST, KIND_MANAGED, KIND_REGISTERED, KIND_VMM,
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t progress = PTHREAD_COND_INITIALIZER;
static pthread_mutex_t driver = PTHREAD_MUTEX_INITIALIZER; /* held while memory is freed: a driver at its worst */
static _Atomic int sticky; /* the error that has ended the context */

/* ---- memory ---- */

struct allocation {
	uint64_t at, bytes, id;
	int kind, fd, ordinal;
};
static struct allocation allocations[ALLOCATIONS];
static uint64_t next_id = 1;
struct hole {
	uint64_t at, bytes;
};
static struct hole holes[ALLOCATIONS];
static int hole_count;

static struct allocation *find(uint64_t at)
{
	for (struct allocation *a = allocations; a < allocations + ALLOCATIONS; a++)
		if (a->bytes && at >= a->at && at - a->at < a->bytes)
			return a;
	return NULL;
}

static struct allocation *fresh(uint64_t at, uint64_t bytes, int kind, int fd)
{
	for (struct allocation *a = allocations; a < allocations + ALLOCATIONS; a++) {
		if (a->bytes)
			continue;
		*a = (struct allocation){.at = at, .bytes = bytes, .id = next_id++, .kind = kind, .fd = fd};
		return a;
	}
	abort();
}

static int device_alloc(devptr *out, size_t n, int kind)
{
	void *at = NULL;
	n = (n + PAGE - 1) / PAGE * PAGE;
	if (!out || !n)
		return INVALID_VALUE;
	int fd = memfd_create("gpu", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (fd < 0 || ftruncate(fd, (off_t)n) < 0 || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0)
		return OUT_OF_MEMORY;
	pthread_mutex_lock(&lock);
	for (int i = hole_count - 1; i >= 0 && !at; i--) {
		if (holes[i].bytes == n) {
			at = (void *)(uintptr_t)holes[i].at;
			holes[i] = holes[--hole_count];
		}
	}
	at = mmap(at, n, PROT_READ | PROT_WRITE, MAP_SHARED | (at ? MAP_FIXED : 0), fd, 0);
	if (at == MAP_FAILED)
		abort();
	fresh((uintptr_t)at, n, kind, fd);
	pthread_mutex_unlock(&lock);
	*out = (uintptr_t)at;
	return OK;
}

/* ---- streams ---- */

struct stream;
struct dep {
	struct stream *stream;
	uint64_t count;
};
struct item {
	struct item *next;
	enum { COPY, CALL, WRITE, WAIT, FOLLOW } what;
	uint64_t dst, src, n;
	void (*fn)(void *);
	void *arg;
	struct dep behind; /* FOLLOW */
	struct dep *deps;
	int dep_count;
};
struct stream {
	pthread_t thread;
	struct item *first, **last;
	uint64_t issued, done;
	bool used, blocking, closing, far; /* far: of another context */
	struct item *capture, **capture_last;
	bool capturing, invalid; /* invalid: its capture */
};
static struct stream streams[STREAMS]; /* 0: legacy */
static int stream_count;
static __thread struct stream *own_thread;
static __thread int capture_mode;
static const handle context = (handle)1;
static __thread handle current_context = (handle)1;

static bool at_least(uint64_t address, uint64_t v)
{
	return (int64_t)(__atomic_load_n((uint64_t *)(uintptr_t)address, __ATOMIC_ACQUIRE) - v) >= 0;
}

static void execute(struct item *x)
{
	switch (x->what) {
	case COPY:
		for (uint64_t at = 0; at < x->n && !sticky; at += CHUNK) {
			memcpy((void *)(uintptr_t)(x->dst + at), (void *)(uintptr_t)(x->src + at), x->n - at < CHUNK ? x->n - at : CHUNK);
			sched_yield();
		}
		break;
	case CALL:
		x->fn(x->arg);
		break;
	case WRITE:
		__atomic_store_n((uint64_t *)(uintptr_t)x->dst, x->n, __ATOMIC_RELEASE);
		break;
	case WAIT:
		while (!at_least(x->dst, x->n) && !sticky)
			usleep(20);
		break;
	case FOLLOW:
		pthread_mutex_lock(&lock);
		while (x->behind.stream && x->behind.stream->done < x->behind.count && !sticky)
			pthread_cond_wait(&progress, &lock);
		pthread_mutex_unlock(&lock);
		break;
	}
}

static void *stream_thread(void *arg)
{
	struct stream *s = arg;
	pthread_mutex_lock(&lock);
	for (;;) {
		while (!s->first && !s->closing)
			pthread_cond_wait(&progress, &lock);
		struct item *x = s->first;
		if (!x)
			break;
		for (int i = 0; i < x->dep_count; i++)
			while (x->deps[i].stream->done < x->deps[i].count && !sticky)
				pthread_cond_wait(&progress, &lock);
		pthread_mutex_unlock(&lock);
		if (!sticky)
			execute(x);
		pthread_mutex_lock(&lock);
		s->first = x->next;
		if (!s->first)
			s->last = &s->first;
		free(x->deps);
		free(x);
		s->done++;
		pthread_cond_broadcast(&progress);
	}
	pthread_mutex_unlock(&lock);
	return NULL;
}

/* With the lock. */
static struct stream *stream_new(bool blocking)
{
	if (stream_count == STREAMS)
		abort();
	struct stream *s = &streams[stream_count++];
	s->used = true;
	s->blocking = blocking;
	s->last = &s->first;
	pthread_create(&s->thread, NULL, stream_thread, s);
	return s;
}

/* With the lock. */
static struct stream *stream_of(handle h)
{
	if (!stream_count)
		stream_new(false); /* legacy */
	if (!h || h == (handle)1)
		return &streams[0];
	if (h == (handle)2) {
		if (!own_thread)
			own_thread = stream_new(true);
		return own_thread;
	}
	struct stream *s = h;
	return s > streams && s < streams + stream_count && s->used ? s : NULL;
}

/* With the lock. */
static bool capture_somewhere(void)
{
	for (int i = 1; i < stream_count; i++)
		if (streams[i].used && streams[i].blocking && streams[i].capturing)
			return true;
	return false;
}

/* With the lock. */
static void append(struct stream *s, struct item *x)
{
	*s->last = x;
	s->last = &x->next;
	s->issued++;
	pthread_cond_broadcast(&progress);
}

/* For the test's sidecar, which has no GPU. It is a call that no capture of another thread allows. */
int fake_export(devptr p, int *fd, devptr *base, size_t *bytes, int *vmm)
{
	pthread_mutex_lock(&lock);
	struct allocation *a = find(p);
	bool there = a && (a->kind == KIND_DEVICE || a->kind == KIND_VMM) && a->ordinal == 0;
	for (int i = 0; i < stream_count && capture_mode == 0; i++) {
		streams[i].invalid |= streams[i].capturing;
		there &= !streams[i].capturing;
	}
	if (there) {
		*fd = fcntl(a->fd, F_DUPFD_CLOEXEC, 3);
		*base = a->at;
		*bytes = a->bytes;
		*vmm = a->kind == KIND_VMM;
	}
	pthread_mutex_unlock(&lock);
	return there ? OK : INVALID_VALUE;
}

static struct item *item_new(const struct item *from)
{
	struct item *x = malloc(sizeof *x);
	*x = *from;
	x->next = NULL;
	return x;
}

/* The implicit order of the legacy stream. With the lock. */
static void order(struct stream *s, struct item *x)
{
	if (s == &streams[0]) {
		x->deps = realloc(x->deps, sizeof *x->deps * (size_t)(x->dep_count + stream_count));
		for (int i = 1; i < stream_count; i++)
			if (streams[i].blocking)
				x->deps[x->dep_count++] = (struct dep){&streams[i], streams[i].issued};
	} else if (s->blocking) {
		x->deps = realloc(x->deps, sizeof *x->deps * (size_t)(x->dep_count + 1));
		x->deps[x->dep_count++] = (struct dep){&streams[0], streams[0].issued};
	}
}

static void enter(void)
{
	pthread_mutex_lock(&driver);
	pthread_mutex_unlock(&driver);
}

static int enqueue(handle h, struct item from)
{
	enter();
	int rc = sticky;
	pthread_mutex_lock(&lock);
	struct stream *s = stream_of(h);
	if (rc == OK && !s)
		rc = INVALID_HANDLE;
	if (rc == OK && s == &streams[0] && capture_somewhere())
		rc = CAPTURE_IMPLICIT;
	if (rc == OK) {
		struct item *x = item_new(&from);
		if (s->capturing) {
			*s->capture_last = x;
			s->capture_last = &x->next;
		} else {
			order(s, x);
			append(s, x);
		}
	}
	pthread_mutex_unlock(&lock);
	return rc;
}

static int await(handle h)
{
	pthread_mutex_lock(&lock);
	struct stream *s = stream_of(h);
	int rc = !s ? INVALID_HANDLE : s->capturing || (s == &streams[0] && capture_somewhere()) ? CAPTURE_UNSUPPORTED : OK;
	uint64_t issued = s ? s->issued : 0;
	while (rc == OK && s->done < issued && !sticky)
		pthread_cond_wait(&progress, &lock);
	pthread_mutex_unlock(&lock);
	return sticky ? sticky : rc;
}

static void await_all(void)
{
	pthread_mutex_lock(&lock);
	for (int i = 0; i < stream_count; i++)
		for (uint64_t issued = streams[i].issued; streams[i].done < issued && !sticky;)
			pthread_cond_wait(&progress, &lock);
	pthread_mutex_unlock(&lock);
}

static void await_all_alone(void)
{
	pthread_mutex_lock(&driver);
	await_all();
	pthread_mutex_unlock(&driver);
}

static bool within(uint64_t at, uint64_t n, bool device)
{
	pthread_mutex_lock(&lock);
	struct allocation *a = find(at);
	bool gpu = a && (a->kind == KIND_DEVICE || a->kind == KIND_MANAGED || a->kind == KIND_VMM);
	bool ok = device ? gpu && n <= a->bytes - (at - a->at) : at != 0 && (!a || n <= a->bytes - (at - a->at));
	pthread_mutex_unlock(&lock);
	return ok;
}

static int copy(handle s, uint64_t dst, uint64_t src, size_t n, bool dst_gpu, bool src_gpu)
{
	if (sticky)
		return sticky;
	if (!within(dst, n, dst_gpu) || !within(src, n, src_gpu))
		return INVALID_VALUE;
	return enqueue(s, (struct item){.what = COPY, .dst = dst, .src = src, .n = n});
}

static int copy_now(handle s, uint64_t dst, uint64_t src, size_t n, bool dst_gpu, bool src_gpu)
{
	int rc = copy(s, dst, src, n, dst_gpu, src_gpu);
	return rc ? rc : await(s);
}

static handle mine(handle s) { return s ? s : (handle)2; }
#define P(x) ((uint64_t)(uintptr_t)(x))

int cuMemcpyHtoDAsync_v2(devptr d, const void *h, size_t n, handle s) { return copy(s, d, P(h), n, true, false); }
int cuMemcpyHtoDAsync_v2_ptsz(devptr d, const void *h, size_t n, handle s) { return copy(mine(s), d, P(h), n, true, false); }
int cuMemcpyDtoHAsync_v2(void *h, devptr d, size_t n, handle s) { return copy(s, P(h), d, n, false, true); }
int cuMemcpyDtoHAsync_v2_ptsz(void *h, devptr d, size_t n, handle s) { return copy(mine(s), P(h), d, n, false, true); }
int cuMemcpyAsync(devptr d, devptr h, size_t n, handle s) { return copy(s, d, h, n, false, false); }
int cuMemcpyAsync_ptsz(devptr d, devptr h, size_t n, handle s) { return copy(mine(s), d, h, n, false, false); }
int cuMemcpyHtoD_v2(devptr d, const void *h, size_t n) { return copy_now(NULL, d, P(h), n, true, false); }
int cuMemcpyHtoD_v2_ptds(devptr d, const void *h, size_t n) { return copy_now((handle)2, d, P(h), n, true, false); }
int cuMemcpyDtoH_v2(void *h, devptr d, size_t n) { return copy_now(NULL, P(h), d, n, false, true); }
int cuMemcpyDtoH_v2_ptds(void *h, devptr d, size_t n) { return copy_now((handle)2, P(h), d, n, false, true); }
int cuMemcpy(devptr d, devptr h, size_t n) { return copy_now(NULL, d, h, n, false, false); }
int cuMemcpy_ptds(devptr d, devptr h, size_t n) { return copy_now((handle)2, d, h, n, false, false); }

struct attributes {
	int order, hints[4];
	unsigned flags;
};

/* Order 2: all sources are read before the call returns. */
static int batch(devptr *d, devptr *h, size_t *n, size_t count, const struct attributes *a, const size_t *at, size_t k, handle s)
{
	if (!k || !a || !at || at[0] != 0 || s == (handle)1)
		return INVALID_VALUE;
	for (size_t i = 0; i < k; i++)
		if (a[i].order < 1 || a[i].order > 3 || a[i].flags > 1 || at[i] >= count || (i && at[i] <= at[i - 1]))
			return INVALID_VALUE;
	for (size_t i = 0, of = 0; i < count; i++) {
		of += of + 1 < k && at[of + 1] == i;
		if (a[of].order != 2) {
			int rc = copy(s, d[i], h[i], n[i], false, false);
			if (rc)
				return rc;
			continue;
		}
		if (!within(d[i], n[i], false) || !within(h[i], n[i], false))
			return INVALID_VALUE;
		void *now = malloc(n[i]);
		memcpy(now, (void *)(uintptr_t)h[i], n[i]);
		int rc = enqueue(s, (struct item){.what = COPY, .dst = d[i], .src = P(now), .n = n[i]});
		rc = rc ? rc : enqueue(s, (struct item){.what = CALL, .fn = free, .arg = now});
		if (rc)
			return rc;
	}
	return OK;
}

int cuMemcpyBatchAsync(devptr *d, devptr *h, size_t *n, size_t count, void *a, size_t *i, size_t k, size_t *failed, handle s)
{
	(void)failed;
	return !s ? INVALID_VALUE : batch(d, h, n, count, a, i, k, s);
}
int cuMemcpyBatchAsync_ptsz(devptr *d, devptr *h, size_t *n, size_t count, void *a, size_t *i, size_t k, size_t *failed, handle s)
{
	(void)failed;
	return batch(d, h, n, count, a, i, k, mine(s));
}
int cuMemcpyBatchAsync_v2(devptr *d, devptr *h, size_t *n, size_t count, void *a, size_t *i, size_t k, handle s)
{
	return !s ? INVALID_VALUE : batch(d, h, n, count, a, i, k, s);
}
int cuMemcpyBatchAsync_v2_ptsz(devptr *d, devptr *h, size_t *n, size_t count, void *a, size_t *i, size_t k, handle s)
{
	return batch(d, h, n, count, a, i, k, mine(s));
}

int cuLaunchHostFunc(handle s, void (*fn)(void *), void *arg) { return enqueue(s, (struct item){.what = CALL, .fn = fn, .arg = arg}); }
int cuLaunchHostFunc_ptsz(handle s, void (*fn)(void *), void *arg) { return cuLaunchHostFunc(mine(s), fn, arg); }

int cuStreamCreate(handle *out, unsigned flags)
{
	if (sticky)
		return sticky;
	pthread_mutex_lock(&lock);
	stream_of(NULL);
	*out = stream_new(flags == 0);
	pthread_mutex_unlock(&lock);
	return OK;
}
int cuStreamCreateWithPriority(handle *out, unsigned flags, int priority) { (void)priority; return cuStreamCreate(out, flags); }

int fake_far_stream(handle *out)
{
	int rc = cuStreamCreate(out, 1);
	((struct stream *)*out)->far = true;
	return rc;
}
int cuStreamGetCtx(handle h, handle *out)
{
	pthread_mutex_lock(&lock);
	struct stream *s = stream_of(h);
	*out = s && s->far ? (handle)5 : context;
	pthread_mutex_unlock(&lock);
	return s ? OK : INVALID_HANDLE;
}

/* Its work still runs. */
int cuStreamDestroy_v2(handle h)
{
	pthread_mutex_lock(&lock);
	struct stream *s = stream_of(h);
	int rc = !s || s == &streams[0] ? INVALID_HANDLE : OK;
	if (rc == OK) {
		s->used = false;
		s->closing = true;
		pthread_detach(s->thread);
		pthread_cond_broadcast(&progress);
	}
	pthread_mutex_unlock(&lock);
	return rc;
}

int cuStreamSynchronize(handle s) { return sticky ? sticky : await(s); }
int cuStreamQuery(handle h)
{
	enter();
	pthread_mutex_lock(&lock);
	struct stream *s = stream_of(h);
	int rc = sticky ? sticky : !s ? INVALID_HANDLE : s->done < s->issued ? NOT_READY : OK;
	pthread_mutex_unlock(&lock);
	return rc;
}
int cuCtxSynchronize(void) { await_all(); return sticky; }
int cuThreadExchangeStreamCaptureMode(int *mode) { int was = capture_mode; capture_mode = *mode; *mode = was; return OK; }

static bool registered(uint64_t at)
{
	pthread_mutex_lock(&lock);
	struct allocation *a = find(at);
	bool ok = a && at % 8 == 0 && a->kind == KIND_REGISTERED;
	pthread_mutex_unlock(&lock);
	return ok;
}
int cuStreamWriteValue64_v2(handle s, devptr p, uint64_t v, unsigned flags)
{
	return flags || !registered(p) ? INVALID_VALUE : enqueue(s, (struct item){.what = WRITE, .dst = p, .n = v});
}
int cuStreamWaitValue64_v2(handle s, devptr p, uint64_t v, unsigned flags)
{
	return flags || !registered(p) ? INVALID_VALUE : enqueue(s, (struct item){.what = WAIT, .dst = p, .n = v});
}

/* ---- events, captures ---- */

static struct dep events[EVENTS];
static _Atomic int event_count = 1;

int cuEventCreate(handle *out, unsigned flags)
{
	(void)flags;
	int i = event_count++;
	if (i >= EVENTS)
		abort();
	*out = (handle)(intptr_t)i;
	return OK;
}
int cuEventDestroy_v2(handle e) { (void)e; return OK; }
int cuEventRecord(handle e, handle h)
{
	int rc = sticky ? sticky : enqueue(h, (struct item){.what = FOLLOW});
	if (rc)
		return rc;
	pthread_mutex_lock(&lock);
	struct stream *s = stream_of(h);
	events[(intptr_t)e] = (struct dep){s, s->issued};
	pthread_mutex_unlock(&lock);
	return OK;
}
int cuStreamWaitEvent(handle s, handle e, unsigned flags)
{
	(void)flags;
	pthread_mutex_lock(&lock);
	struct dep behind = events[(intptr_t)e];
	pthread_mutex_unlock(&lock);
	return enqueue(s, (struct item){.what = FOLLOW, .behind = behind});
}

static struct item *graphs[GRAPHS];
static int graph_count = 1;

int cuStreamBeginCapture_v2(handle h, int mode)
{
	(void)mode;
	pthread_mutex_lock(&lock);
	struct stream *s = stream_of(h);
	int rc = !s || s == &streams[0] ? CAPTURE_UNSUPPORTED : OK;
	if (rc == OK) {
		s->capturing = true;
		s->invalid = false;
		s->capture = NULL;
		s->capture_last = &s->capture;
	}
	pthread_mutex_unlock(&lock);
	return rc;
}
int cuStreamEndCapture(handle h, handle *graph)
{
	pthread_mutex_lock(&lock);
	struct stream *s = stream_of(h);
	if (graph_count == GRAPHS)
		abort();
	s->capturing = false;
	*graph = (handle)(intptr_t)graph_count;
	graphs[graph_count++] = s->capture;
	int rc = s->invalid ? CAPTURE_INVALIDATED : OK;
	pthread_mutex_unlock(&lock);
	return rc;
}
int cuGraphLaunch(handle graph, handle s)
{
	for (struct item *x = graphs[(intptr_t)graph]; x; x = x->next) {
		int rc = enqueue(s, *x);
		if (rc)
			return rc;
	}
	return OK;
}
int cuStreamIsCapturing(handle h, int *out)
{
	pthread_mutex_lock(&lock);
	struct stream *s = stream_of(h);
	int rc = !s ? INVALID_HANDLE : s == &streams[0] && capture_somewhere() ? CAPTURE_IMPLICIT : OK;
	*out = s && s->capturing;
	pthread_mutex_unlock(&lock);
	return sticky ? sticky : rc;
}

/* ---- memory, by the driver's calls ---- */

int cuMemAlloc_v2(devptr *p, size_t n) { return sticky ? sticky : device_alloc(p, n, KIND_DEVICE); }
int fake_alloc_vmm(devptr *p, size_t n) { return device_alloc(p, n, KIND_VMM); }
int fake_alloc_far(devptr *p, size_t n)
{
	int rc = device_alloc(p, n, KIND_DEVICE);
	pthread_mutex_lock(&lock);
	find(*p)->ordinal = 1;
	pthread_mutex_unlock(&lock);
	return rc;
}
int cuMemAllocManaged(devptr *p, size_t n, unsigned flags) { (void)flags; return device_alloc(p, n, KIND_MANAGED); }
/* Until *go is set, what is freed waits; once that begins, *begun is set. */
static struct {
	_Atomic int *begun, *go;
} hold;
void fake_hold_frees(_Atomic int *begun, _Atomic int *go)
{
	hold.begun = begun;
	hold.go = go;
}
int cuMemFree_v2(devptr p)
{
	if (sticky)
		return sticky;
	if (hold.begun) {
		*hold.begun = 1;
		while (!*hold.go)
			usleep(1000);
	}
	await_all_alone();
	pthread_mutex_lock(&lock);
	struct allocation *a = find(p);
	int rc = a && a->at == p && a->fd >= 0 && hole_count < ALLOCATIONS ? OK : INVALID_VALUE;
	if (rc == OK) {
		mmap((void *)(uintptr_t)a->at, a->bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
		holes[hole_count++] = (struct hole){a->at, a->bytes};
		close(a->fd);
		a->bytes = 0;
	}
	pthread_mutex_unlock(&lock);
	return rc;
}
/* By a way that no other library sees. */
int fake_free(devptr p) { return cuMemFree_v2(p); }
static void free_later(void *p)
{
	pthread_mutex_lock(&lock);
	struct allocation *a = find(P(p));
	mmap(p, a->bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
	close(a->fd);
	a->bytes = 0;
	pthread_mutex_unlock(&lock);
}
int cuMemFreeAsync(devptr p, handle s) { return cuLaunchHostFunc(s, free_later, (void *)(uintptr_t)p); }
int cuMemFreeAsync_ptsz(devptr p, handle s) { return cuMemFreeAsync(p, mine(s)); }

int cuMemHostAlloc(void **out, size_t n, unsigned flags)
{
	(void)flags;
	if (!n)
		return INVALID_VALUE;
	n = (n + PAGE - 1) / PAGE * PAGE;
	*out = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0); /* as nv-mmap.c does */
	pthread_mutex_lock(&lock);
	fresh(P(*out), n, KIND_HOST, -1);
	pthread_mutex_unlock(&lock);
	return OK;
}
int cuMemAllocHost_v2(void **out, size_t n) { return cuMemHostAlloc(out, n, 0); }
int cuMemHostGetFlags(unsigned *flags, void *p) { *flags = 0; return p ? OK : INVALID_VALUE; }
static int host_gone(void *p, int kind)
{
	await_all_alone();
	pthread_mutex_lock(&lock);
	struct allocation *a = find(P(p));
	int rc = a && a->at == P(p) && a->kind == kind ? OK : kind == KIND_REGISTERED ? NOT_REGISTERED : INVALID_VALUE;
	if (rc == OK) {
		if (kind == KIND_HOST)
			munmap(p, a->bytes);
		a->bytes = 0;
	}
	pthread_mutex_unlock(&lock);
	return rc;
}
int cuMemFreeHost(void *p) { return host_gone(p, KIND_HOST); }
int cuMemHostUnregister(void *p) { return host_gone(p, KIND_REGISTERED); }
int cuMemHostRegister_v2(void *p, size_t n, unsigned flags)
{
	if (sticky)
		return sticky;
	if (flags != 3 && flags != 0)
		return INVALID_VALUE;
	pthread_mutex_lock(&lock);
	fresh(P(p), n, KIND_REGISTERED, -1);
	pthread_mutex_unlock(&lock);
	return OK;
}
int cuMemHostGetDevicePointer_v2(devptr *out, void *p, unsigned flags) { (void)flags; *out = P(p); return OK; }
int cuMemGetAddressRange_v2(devptr *base, size_t *n, devptr p)
{
	pthread_mutex_lock(&lock);
	struct allocation *a = find(p);
	if (a) {
		*base = a->at;
		*n = a->bytes;
	}
	pthread_mutex_unlock(&lock);
	return a ? OK : INVALID_VALUE;
}
int cuPointerGetAttribute(void *out, int what, devptr p)
{
	pthread_mutex_lock(&lock);
	struct allocation *a = find(p);
	int rc = a ? OK : INVALID_VALUE;
	if (a && what == 2)
		*(int *)out = a->kind == KIND_HOST || a->kind == KIND_REGISTERED ? 1 : 2;
	else if (a && what == 7)
		*(uint64_t *)out = a->id;
	else if (a && what == 8)
		*(unsigned *)out = a->kind == KIND_MANAGED;
	else if (a && what == 9)
		*(int *)out = a->ordinal;
	else
		rc = INVALID_VALUE;
	pthread_mutex_unlock(&lock);
	return rc;
}

/* ---- contexts, and functions that are not called here ---- */

void fake_break(void)
{
	sticky = ILLEGAL_ADDRESS;
	pthread_mutex_lock(&lock);
	pthread_cond_broadcast(&progress);
	pthread_mutex_unlock(&lock);
}
/* Its calls do not return any more. */
void fake_hang(void) { pthread_mutex_lock(&driver); }
int cuCtxGetCurrent(handle *out) { *out = current_context; return OK; }
/* Contexts cannot be entered, for a reason that passes. */
static _Atomic int refusing;
void fake_refuse(int rc) { refusing = rc; }
int cuCtxPushCurrent_v2(handle c) { enter(); return refusing ? refusing : c == context ? OK : INVALID_CONTEXT; }
int cuCtxPopCurrent_v2(handle *c) { *c = context; return OK; }
int cuCtxGetDevice(int *d) { *d = 0; return OK; }
int cuCtxGetStreamPriorityRange(int *a, int *b) { *a = 0; *b = -5; return OK; }
int cuCtxDestroy_v2(handle c) { (void)c; await_all(); return OK; }
static int retained = 2; /* by the runtime, and by another library */
int cuDevicePrimaryCtxRelease_v2(int d) { (void)d; retained--; return OK; }
int cuDevicePrimaryCtxGetState(int d, unsigned *flags, int *active) { (void)d; *flags = 0; *active = retained > 0; return OK; }
int cuDevicePrimaryCtxReset_v2(int d) { (void)d; return OK; }
int cuDeviceGetAttribute(int *v, int a, int d) { (void)d; *v = a == 122 && !getenv("FAKE_NO_MEMOPS"); return OK; }
int cuGetErrorName(int rc, const char **out) { *out = rc == ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_OTHER"; return OK; }
#define UNUSED(name) int name(void); int name(void) { return NOT_SUPPORTED; }
UNUSED(cuDeviceGetUuid_v2) UNUSED(cuIpcGetMemHandle) UNUSED(cuMemRetainAllocationHandle) UNUSED(cuMemExportToShareableHandle)
UNUSED(cuMemRelease) UNUSED(cuMemCreate) UNUSED(cuMemMap) UNUSED(cuMemUnmap) UNUSED(cuMemSetAccess) UNUSED(cuModuleLoadData) UNUSED(cuModuleUnload)
UNUSED(cuModuleGetFunction) UNUSED(cuLaunchKernel) UNUSED(cuMemsetD32_v2) UNUSED(cuStreamGetCaptureInfo_v3) UNUSED(cuGraphAddBatchMemOpNode)

/* ---- look-ups ---- */

int cuGetProcAddress(const char *name, void **out, int version, uint64_t flags);
int cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *found);

/* As a driver whose look-up returns other addresses than it exports. */
static int other_htod(devptr d, const void *h, size_t n, handle s) { return copy(s, d, P(h), n, true, false); }
static int other_dtoh_thread(void *h, devptr d, size_t n, handle s) { return copy(mine(s), P(h), d, n, false, true); }

static const struct {
	const char *name;
	void *plain, *thread;
} names[] = {
	{"cuMemcpyHtoDAsync", (void *)cuMemcpyHtoDAsync_v2, (void *)cuMemcpyHtoDAsync_v2_ptsz},
	{"cuMemcpyDtoHAsync", (void *)cuMemcpyDtoHAsync_v2, (void *)cuMemcpyDtoHAsync_v2_ptsz},
	{"cuMemcpyAsync", (void *)cuMemcpyAsync, (void *)cuMemcpyAsync_ptsz},
	{"cuMemcpyHtoD", (void *)cuMemcpyHtoD_v2, (void *)cuMemcpyHtoD_v2_ptds},
	{"cuMemcpyDtoH", (void *)cuMemcpyDtoH_v2, (void *)cuMemcpyDtoH_v2_ptds},
	{"cuMemcpy", (void *)cuMemcpy, (void *)cuMemcpy_ptds},
	{"cuMemcpyBatchAsync", (void *)cuMemcpyBatchAsync_v2, (void *)cuMemcpyBatchAsync_v2_ptsz},
	{"cuLaunchHostFunc", (void *)cuLaunchHostFunc, (void *)cuLaunchHostFunc_ptsz},
	{"cuMemHostAlloc", (void *)cuMemHostAlloc, (void *)cuMemHostAlloc},
	{"cuGetProcAddress", (void *)cuGetProcAddress_v2, (void *)cuGetProcAddress_v2},
};

int cuGetProcAddress(const char *name, void **out, int version, uint64_t flags)
{
	if (getenv("FAKE_OTHER_ADDRESSES")) {
		if (!strcmp(name, "cuMemcpyHtoDAsync") && !(flags & 2))
			return *out = (void *)other_htod, OK;
		if (!strcmp(name, "cuMemcpyDtoHAsync") && (flags & 2))
			return *out = (void *)other_dtoh_thread, OK;
	}
	for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
		if (strcmp(names[i].name, name) == 0) {
			*out = flags & 2 ? names[i].thread : names[i].plain;
			if (strcmp(name, "cuMemcpyBatchAsync") == 0 && version < 13000)
				*out = flags & 2 ? (void *)cuMemcpyBatchAsync_ptsz : (void *)cuMemcpyBatchAsync;
			return OK;
		}
	}
	*out = NULL;
	return NOT_FOUND;
}
int cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *found)
{
	int rc = cuGetProcAddress(name, out, version, flags);
	if (found)
		*found = rc ? 1 : 0;
	return rc;
}
