/* A program that uses the driver, for runs with the preload and without.
 *
 *   preload_test random SEED OPS    copies, kernels, events, captures, errors on eight streams; every byte is computed here as well
 *   preload_test threads SEED OPS   the same in four threads at once, without captures
 *   preload_test reasons            one copy of each kind that passes by
 *   preload_test batches            what the attributes of a batch ask for
 *   preload_test free PID           memory is freed while another thread copies and the sidecar PID is stopped
 *   preload_test stuck PID          the sidecar PID dies, and the driver hangs
 *   preload_test held HOW           the same while a copy waits in its stream: reset, release, released
 *   preload_test unseen             memory is freed by a way that the preload does not see
 *   preload_test refuse PID         the driver refuses the context for a while, in which the sidecar PID dies
 *   preload_test two COPIES         the same to one allocation, and then to another
 *   preload_test capturing          the first copy of an allocation beside a capture
 *   preload_test unregister         memory of cuMemHostAlloc stays pinned
 *   preload_test child              a child reads and writes pinned memory
 *   preload_test lookups            every way to an entry point
 *   preload_test large COPIES       large copies there and back, for a sidecar that is killed meanwhile
 *   preload_test many COPIES        copies that wait in one stream, all at once
 *   preload_test few COPIES         one after the other
 *   preload_test forked COPIES      the same in a child
 *   preload_test lost               an error ends the context while a copy waits in its stream
 *   preload_test ends HOW           a context is destroyed: reset, destroy, released; or not: other, release
 */
#include <dirent.h>
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "require.h"

typedef void *handle;
typedef unsigned long long devptr;

int cuMemcpyHtoDAsync_v2(devptr, const void *, size_t, handle), cuMemcpyHtoDAsync_v2_ptsz(devptr, const void *, size_t, handle);
int cuMemcpyDtoHAsync_v2(void *, devptr, size_t, handle), cuMemcpyDtoHAsync_v2_ptsz(void *, devptr, size_t, handle);
int cuMemcpyAsync(devptr, devptr, size_t, handle), cuMemcpyAsync_ptsz(devptr, devptr, size_t, handle);
int cuMemcpyHtoD_v2(devptr, const void *, size_t), cuMemcpyHtoD_v2_ptds(devptr, const void *, size_t);
int cuMemcpyDtoH_v2(void *, devptr, size_t), cuMemcpyDtoH_v2_ptds(void *, devptr, size_t);
int cuMemcpy(devptr, devptr, size_t), cuMemcpy_ptds(devptr, devptr, size_t);
int cuMemcpyBatchAsync(devptr *, devptr *, size_t *, size_t, void *, size_t *, size_t, size_t *, handle);
int cuMemcpyBatchAsync_v2_ptsz(devptr *, devptr *, size_t *, size_t, void *, size_t *, size_t, handle);
int cuMemAlloc_v2(devptr *, size_t), cuMemFree_v2(devptr), cuMemFreeAsync(devptr, handle), cuMemAllocManaged(devptr *, size_t, unsigned);
int cuMemHostAlloc(void **, size_t, unsigned), cuMemFreeHost(void *), cuMemHostGetFlags(unsigned *, void *);
int cuMemHostRegister_v2(void *, size_t, unsigned), cuMemHostUnregister(void *);
int cuLaunchHostFunc(handle, void (*)(void *), void *), cuLaunchHostFunc_ptsz(handle, void (*)(void *), void *);
int cuStreamCreate(handle *, unsigned), cuStreamDestroy_v2(handle), cuStreamSynchronize(handle), cuStreamWaitEvent(handle, handle, unsigned);
int cuStreamBeginCapture_v2(handle, int), cuStreamEndCapture(handle, handle *), cuGraphLaunch(handle, handle);
int cuEventCreate(handle *, unsigned), cuEventRecord(handle, handle), cuCtxSynchronize(void);
int cuDevicePrimaryCtxReset_v2(int), cuDevicePrimaryCtxRelease_v2(int), cuCtxDestroy_v2(handle);
int cuGetProcAddress_v2(const char *, void **, int, uint64_t, int *), cuGetProcAddress(const char *, void **, int, uint64_t);
int fake_far_stream(handle *), fake_free(devptr), fake_alloc_vmm(devptr *, size_t), fake_alloc_far(devptr *, size_t);
void fake_break(void), fake_hang(void), fake_refuse(int), fake_hold_frees(_Atomic int *, _Atomic int *);

#define P(x) ((uint64_t)(uintptr_t)(x))
#define PTR(x) ((void *)(uintptr_t)(x))
enum { BUFFERS = 6, BYTES = 256 << 10, STREAMS = 8, LEGACY = 0, OWN = 1, MADE = 2, KERNEL_BYTES = 16 << 10 };

/* CUmemcpyAttributes */
struct attributes {
	int order, hints[4];
	unsigned flags;
};

/* ---- a random program ---- */

struct buffer {
	uint64_t at;
	uint8_t *model;    /* what it holds once all that was issued is done */
	handle last[STREAMS]; /* events of the last use, by stream */
	bool used[STREAMS];
};

struct program {
	uint64_t rng, rcs; /* rcs: a hash of all return codes */
	struct buffer dev[BUFFERS], host[BUFFERS];
	void *arena;
	handle stream[STREAMS];
	int blocking[STREAMS];
	bool captures;
};

static uint64_t any(struct program *p, uint64_t below)
{
	p->rng ^= p->rng << 13;
	p->rng ^= p->rng >> 7;
	p->rng ^= p->rng << 17;
	return (p->rng >> 8) % below;
}

static uint64_t hash(uint64_t h, const void *data, size_t n)
{
	const uint8_t *b = data;
	for (size_t i = 0; i < n; i++)
		h = (h ^ b[i]) * 0x100000001b3u;
	return h;
}

static int rc_of(struct program *p, int rc)
{
	p->rcs = hash(p->rcs, &rc, sizeof rc);
	return rc;
}

static handle handle_of(const struct program *p, int s)
{
	return s == OWN ? (handle)2 : p->stream[s];
}

/* What was enqueued in other streams and uses the buffer, comes first. The legacy stream and the blocking ones do that by themselves. */
static void wait_for(struct program *p, struct buffer *b, int s)
{
	for (int i = 0; i < STREAMS; i++) {
		bool implicit = (i == LEGACY && p->blocking[s]) || (s == LEGACY && p->blocking[i]);
		if (b->used[i] && i != s && !implicit)
			REQUIRE(cuStreamWaitEvent(handle_of(p, s), b->last[i], 0) == 0);
	}
}

static void note(struct program *p, struct buffer *b, int s)
{
	b->used[s] = true;
	REQUIRE(cuEventRecord(b->last[s], handle_of(p, s)) == 0);
}

struct kernel {
	uint8_t *at;
	uint8_t by;
};

static void change(uint8_t *at, uint8_t by)
{
	for (int i = 0; i < KERNEL_BYTES; i++)
		at[i] = (uint8_t)(at[i] * 5 + by + (i >> 8));
}

static void kernel(void *arg)
{
	struct kernel *k = arg;
	change(k->at, k->by);
}

/* Enqueues one copy by one of the entry points that mean the same. */
static int copy(struct program *p, bool load, uint64_t dev, uint64_t host, size_t n, int s)
{
	handle h = s == OWN ? NULL : p->stream[s];
	bool own = s == OWN, unified = any(p, 3) == 0;
	void *f = NULL;
	if (unified && load)
		return own ? cuMemcpyAsync_ptsz(dev, host, n, h) : cuMemcpyAsync(dev, host, n, h);
	if (unified)
		return own ? cuMemcpyAsync_ptsz(host, dev, n, h) : cuMemcpyAsync(host, dev, n, h);
	switch (any(p, 3)) {
	case 0: /* linked */
		if (load)
			return own ? cuMemcpyHtoDAsync_v2_ptsz(dev, PTR(host), n, h) : cuMemcpyHtoDAsync_v2(dev, PTR(host), n, h);
		return own ? cuMemcpyDtoHAsync_v2_ptsz(PTR(host), dev, n, h) : cuMemcpyDtoHAsync_v2(PTR(host), dev, n, h);
	case 1:
		f = load ? dlsym(RTLD_DEFAULT, own ? "cuMemcpyHtoDAsync_v2_ptsz" : "cuMemcpyHtoDAsync_v2")
		         : dlsym(RTLD_DEFAULT, own ? "cuMemcpyDtoHAsync_v2_ptsz" : "cuMemcpyDtoHAsync_v2");
		break;
	default:
		REQUIRE(cuGetProcAddress_v2(load ? "cuMemcpyHtoDAsync" : "cuMemcpyDtoHAsync", &f, 12040, own ? 2 : 1, NULL) == 0);
	}
	REQUIRE(f);
	if (load)
		return ((int (*)(devptr, const void *, size_t, handle))f)(dev, PTR(host), n, h);
	return ((int (*)(void *, devptr, size_t, handle))f)(PTR(host), dev, n, h);
}

static void copy_now(struct program *p, bool load, struct buffer *d, struct buffer *h, size_t at, size_t n)
{
	bool own = any(p, 2), unified = any(p, 2);
	int s = own ? OWN : LEGACY;
	wait_for(p, d, s);
	wait_for(p, h, s);
	int rc = !load ? unified ? own ? cuMemcpy_ptds(h->at + at, d->at + at, n) : cuMemcpy(h->at + at, d->at + at, n)
	                 : own   ? cuMemcpyDtoH_v2_ptds(PTR(h->at + at), d->at + at, n)
	                         : cuMemcpyDtoH_v2(PTR(h->at + at), d->at + at, n)
	         : unified ? own ? cuMemcpy_ptds(d->at + at, h->at + at, n) : cuMemcpy(d->at + at, h->at + at, n)
	         : own     ? cuMemcpyHtoD_v2_ptds(d->at + at, PTR(h->at + at), n)
	                   : cuMemcpyHtoD_v2(d->at + at, PTR(h->at + at), n);
	REQUIRE(rc_of(p, rc) == 0);
	/* It is over. */
	REQUIRE(memcmp(PTR(h->at + at), load ? h->model + at : d->model + at, n) == 0);
}

static void batch(struct program *p, bool load, struct buffer *d, struct buffer *h, int s)
{
	devptr dst[8], src[8];
	size_t n[8], failed = 0;
	size_t piece = BYTES / 8;
	for (size_t i = 0; i < 8; i++) {
		devptr dev = d->at + i * piece, host = h->at + i * piece;
		dst[i] = load ? dev : host;
		src[i] = load ? host : dev;
		n[i] = piece;
	}
	struct attributes attrs[] = {{.order = 1}, {.order = 3, .flags = 1}};
	size_t at[] = {0, 3};
	int rc = s == OWN ? cuMemcpyBatchAsync_v2_ptsz(dst, src, n, 8, attrs, at, 2, NULL)
	                  : cuMemcpyBatchAsync(dst, src, n, 8, attrs, at, 1, &failed, p->stream[s]);
	REQUIRE(rc_of(p, rc) == 0);
}

static void fill(struct program *p, struct buffer *b)
{
	for (size_t i = 0; i < BYTES; i++)
		b->model[i] = (uint8_t)(p->rng >> (i % 32)) + (uint8_t)(i * 7);
	any(p, 2);
}

static void device_new(struct program *p, struct buffer *b)
{
	REQUIRE(rc_of(p, cuMemAlloc_v2((devptr *)&b->at, BYTES)) == 0);
	fill(p, b);
	REQUIRE(cuMemcpyHtoD_v2(b->at, b->model, BYTES) == 0); /* pageable */
	memset(b->used, 0, sizeof b->used);
}

static void stream_new(struct program *p, int s)
{
	p->blocking[s] = any(p, 2);
	REQUIRE(cuStreamCreate(&p->stream[s], p->blocking[s] ? 0 : 1) == 0);
}

static void begin(struct program *p, uint64_t seed)
{
	memset(p, 0, sizeof *p);
	p->rng = seed * 0x9e3779b97f4a7c15u + 1;
	p->blocking[OWN] = 1;
	for (int s = MADE; s < STREAMS; s++)
		stream_new(p, s);
	REQUIRE(cuMemHostAlloc(&p->arena, BUFFERS * BYTES, 0) == 0);
	for (int i = 0; i < BUFFERS; i++) {
		struct buffer *both[] = {&p->dev[i], &p->host[i]};
		for (int k = 0; k < 2; k++) {
			both[k]->model = malloc(BYTES);
			for (int s = 0; s < STREAMS; s++)
				REQUIRE(cuEventCreate(&both[k]->last[s], 2) == 0);
		}
		device_new(p, &p->dev[i]);
		p->host[i].at = P(p->arena) + (uint64_t)i * BYTES;
		fill(p, &p->host[i]);
		memcpy(PTR(p->host[i].at), p->host[i].model, BYTES);
	}
}

/* Copies and kernels in a graph, which runs twice. */
static void capture(struct program *p, struct buffer *d, struct buffer *h, struct kernel *k, int s)
{
	handle graph;
	if (s < MADE)
		s = MADE;
	for (int i = 0; i < STREAMS; i++)
		REQUIRE(cuStreamSynchronize(handle_of(p, i)) == 0);
	REQUIRE(cuStreamBeginCapture_v2(p->stream[s], 0) == 0);
	/* In the default stream nothing may be enqueued meanwhile, if a blocking one captures. */
	int rc = cuMemcpyHtoDAsync_v2(d->at, PTR(h->at), BYTES, NULL);
	rc_of(p, rc);
	REQUIRE(rc == (p->blocking[s] ? 906 : 0));
	if (rc == 0)
		memcpy(d->model, h->model, BYTES);
	REQUIRE(rc_of(p, copy(p, true, d->at, h->at, BYTES / 2, s)) == 0);
	REQUIRE(cuLaunchHostFunc(p->stream[s], kernel, k) == 0);
	REQUIRE(rc_of(p, copy(p, false, d->at, h->at, BYTES, s)) == 0);
	REQUIRE(cuStreamEndCapture(p->stream[s], &graph) == 0);
	for (int i = 0; i < STREAMS; i++)
		REQUIRE(i == s || cuStreamSynchronize(handle_of(p, i)) == 0);
	for (int i = 0; i < 2; i++) {
		REQUIRE(rc_of(p, cuGraphLaunch(graph, p->stream[s])) == 0);
		memcpy(d->model, h->model, BYTES / 2);
		change(d->model, k->by);
		memcpy(h->model, d->model, BYTES);
	}
	note(p, d, s);
	note(p, h, s);
}

static void one(struct program *p, struct kernel *k)
{
	struct buffer *d = &p->dev[any(p, BUFFERS)], *h = &p->host[any(p, BUFFERS)];
	int s = (int)any(p, STREAMS);
	size_t n = any(p, 4) ? BYTES / 2 + any(p, BYTES / 2) : 1 + any(p, BYTES / 8), at = any(p, BYTES - n + 1);
	bool load = any(p, 2);
	uint8_t *dst = load ? d->model : h->model, *src = load ? h->model : d->model;
	uint64_t what = any(p, 100);
	*k = (struct kernel){PTR(d->at), (uint8_t)any(p, 256)};
	if (what < 50) {
		wait_for(p, d, s);
		wait_for(p, h, s);
		REQUIRE(rc_of(p, copy(p, load, d->at + at, h->at + at, n, s)) == 0);
		note(p, d, s);
		note(p, h, s);
		memcpy(dst + at, src + at, n);
	} else if (what < 70) {
		wait_for(p, d, s);
		REQUIRE((s == OWN ? cuLaunchHostFunc_ptsz(NULL, kernel, k) : cuLaunchHostFunc(p->stream[s], kernel, k)) == 0);
		note(p, d, s);
		change(d->model, k->by);
	} else if (what < 78) {
		memcpy(dst + at, src + at, n);
		copy_now(p, load, d, h, at, n);
	} else if (what < 84) {
		s = s == LEGACY ? OWN : s;
		wait_for(p, d, s);
		wait_for(p, h, s);
		batch(p, load, d, h, s);
		note(p, d, s);
		note(p, h, s);
		memcpy(dst, src, BYTES);
	} else if (what < 88) { /* an error, and nothing moves */
		REQUIRE(rc_of(p, copy(p, load, d->at + BYTES / 2, h->at, BYTES, s)) != 0);
	} else if (what < 92 && p->captures) {
		capture(p, d, h, k, s);
	} else if (what < 96) { /* with work in it */
		s = MADE + (int)any(p, STREAMS - MADE);
		REQUIRE(rc_of(p, cuStreamDestroy_v2(p->stream[s])) == 0);
		stream_new(p, s);
		for (int i = 0; i < BUFFERS; i++) { /* its events stay */
			struct buffer *both[] = {&p->dev[i], &p->host[i]};
			for (int b = 0; b < 2; b++)
				if (both[b]->used[s])
					REQUIRE(cuStreamWaitEvent(p->stream[s], both[b]->last[s], 0) == 0);
		}
	} else { /* the next allocation may have the same address */
		REQUIRE(rc_of(p, cuMemFree_v2(d->at)) == 0);
		device_new(p, d);
	}
}

static void end(struct program *p, const char *name)
{
	uint64_t h = 0xcbf29ce484222325u;
	for (int s = 0; s < STREAMS; s++)
		REQUIRE(cuStreamSynchronize(handle_of(p, s)) == 0);
	for (int i = 0; i < BUFFERS; i++) {
		void *back = malloc(BYTES);
		REQUIRE(cuMemcpyDtoH_v2(back, p->dev[i].at, BYTES) == 0);
		h = hash(h, back, BYTES);
		h = hash(h, PTR(p->host[i].at), BYTES);
		if (memcmp(back, p->dev[i].model, BYTES) || memcmp(PTR(p->host[i].at), p->host[i].model, BYTES)) {
			printf("wrong bytes in buffer %d\n", i);
			exit(3);
		}
		free(back);
		REQUIRE(cuMemFree_v2(p->dev[i].at) == 0);
		free(p->dev[i].model);
		free(p->host[i].model);
	}
	for (int s = MADE; s < STREAMS; s++)
		REQUIRE(cuStreamDestroy_v2(p->stream[s]) == 0);
	REQUIRE(cuMemFreeHost(p->arena) == 0);
	printf("%s %016llx %016llx\n", name, (unsigned long long)h, (unsigned long long)p->rcs);
}

static void play(uint64_t seed, int n, bool captures, char *name)
{
	struct program p;
	begin(&p, seed);
	p.captures = captures;
	struct kernel *kernels = calloc((size_t)n, sizeof *kernels);
	for (int i = 0; i < n; i++)
		one(&p, &kernels[i]);
	end(&p, name);
	free(kernels);
}

static uint64_t thread_seed;
static int thread_ops;

static void *in_thread(void *arg)
{
	char name[32];
	snprintf(name, sizeof name, "thread %d", (int)(intptr_t)arg);
	play(thread_seed * 4 + P(arg), thread_ops, false, name);
	return NULL;
}

/* ---- the rest ---- */

enum { LARGE = 8 << 20 };

static void *host_of(size_t n)
{
	void *p;
	REQUIRE(cuMemHostAlloc(&p, n, 0) == 0);
	memset(p, 0x5a, n);
	return p;
}

static void reasons(void)
{
	devptr d, e, vmm, far, managed;
	void *pageable = malloc(BYTES), *registered = aligned_alloc(4096, BYTES), *h = host_of(BYTES), *combined;
	handle s, graph;
	unsigned flags = 9;
	REQUIRE(cuMemAlloc_v2(&d, BYTES) == 0 && cuMemAlloc_v2(&e, BYTES) == 0 && fake_alloc_vmm(&vmm, BYTES) == 0 && fake_alloc_far(&far, BYTES) == 0);
	REQUIRE(cuMemAllocManaged(&managed, BYTES, 1) == 0 && cuMemHostRegister_v2(registered, BYTES, 3) == 0 && cuStreamCreate(&s, 1) == 0);
	REQUIRE(cuMemHostAlloc(&combined, BYTES, 4) == 0);
	REQUIRE(cuMemHostGetFlags(&flags, h) == 0 && flags == 0);
	REQUIRE(cuMemcpyHtoDAsync_v2(d, h, 16, s) == 0);
	REQUIRE(cuMemcpyHtoDAsync_v2(d, pageable, BYTES, s) == 0);
	REQUIRE(cuMemcpyHtoDAsync_v2(d, registered, BYTES, s) == 0);
	REQUIRE(cuMemcpyHtoDAsync_v2(d, combined, BYTES, s) == 0);
	REQUIRE(cuMemcpyHtoDAsync_v2(managed, h, BYTES, s) == 0);
	REQUIRE(cuMemcpyHtoDAsync_v2(vmm, h, BYTES, s) == 0);
	REQUIRE(cuMemcpyHtoDAsync_v2(vmm, h, BYTES, s) == 0);
	REQUIRE(cuMemcpyHtoDAsync_v2(far, h, BYTES, s) == 0);
	REQUIRE(cuMemcpyAsync(d, e, BYTES, s) == 0);
	REQUIRE(cuMemcpyAsync(P(h), P(pageable), BYTES, s) == 0);
	REQUIRE(cuMemcpyAsync(P(pageable), d, BYTES, s) == 0);
	REQUIRE(cuStreamBeginCapture_v2(s, 0) == 0 && cuMemcpyHtoDAsync_v2(d, h, BYTES, s) == 0 && cuStreamEndCapture(s, &graph) == 0);
	devptr dst[] = {d, e}, src[] = {P(h), P(h)};
	size_t n[] = {BYTES / 2, BYTES / 2};
	for (int i = 0; i < 200; i++)
		REQUIRE(cuMemcpyHtoDAsync_v2(d, h, BYTES, s) == 0 && cuMemcpyHtoDAsync_v2(e, h, BYTES, s) == 0 && cuStreamSynchronize(s) == 0);
	REQUIRE(fake_far_stream(&graph) == 0 && cuMemcpyHtoDAsync_v2(d, h, BYTES, graph) == 0 && cuStreamSynchronize(graph) == 0);
	struct attributes attrs = {.order = 1};
	size_t first = 0;
	REQUIRE(cuMemcpyBatchAsync(dst, src, n, 2, &attrs, &first, 1, NULL, s) == 0);
	REQUIRE(cuStreamSynchronize(s) == 0);
	REQUIRE(cuMemFreeAsync(d, s) == 0 && cuStreamSynchronize(s) == 0 && cuMemFree_v2(e) == 0 && cuMemFreeHost(h) == 0);
}

static void lookups(void)
{
	void *lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL), *f = NULL;
	int (*look)(const char *, void **, int, uint64_t, int *), (*look_old)(const char *, void **, int, uint64_t), found = 9;
	*(void **)&look = dlsym(lib, "cuGetProcAddress_v2");
	*(void **)&look_old = dlsym(lib, "cuGetProcAddress");
	REQUIRE(lib && look == cuGetProcAddress_v2 && look_old == cuGetProcAddress);
	REQUIRE(dlsym(lib, "cuMemcpyHtoDAsync_v2") == (void *)cuMemcpyHtoDAsync_v2 && dlsym(RTLD_DEFAULT, "cuMemcpyDtoH_v2") == (void *)cuMemcpyDtoH_v2);
	REQUIRE(!dlsym(lib, "cuMemcpyNothing") && dlsym(lib, "cuStreamCreate"));
	REQUIRE(look("cuMemcpyHtoDAsync", &f, 12000, 0, &found) == 0 && f == (void *)cuMemcpyHtoDAsync_v2 && found == 0);
	REQUIRE(look("cuMemcpyDtoHAsync", &f, 12000, 2, NULL) == 0 && f == (void *)cuMemcpyDtoHAsync_v2_ptsz);
	REQUIRE(look_old("cuMemcpyAsync", &f, 11030, 2) == 0 && f == (void *)cuMemcpyAsync_ptsz);
	REQUIRE(look("cuMemcpyHtoD", &f, 12000, 2, NULL) == 0 && f == (void *)cuMemcpyHtoD_v2_ptds);
	REQUIRE(look("cuMemcpyBatchAsync", &f, 12080, 0, NULL) == 0 && f == (void *)cuMemcpyBatchAsync);
	REQUIRE(look("cuMemcpyBatchAsync", &f, 13000, 2, NULL) == 0 && f == (void *)cuMemcpyBatchAsync_v2_ptsz);
	REQUIRE(look("cuGetProcAddress", &f, 12000, 0, NULL) == 0 && f == (void *)cuGetProcAddress_v2);
	REQUIRE(look("cuNothing", &f, 12000, 0, &found) == 500 && found == 1);
	/* RTLD_NEXT counts from here, not from the library that passes the call on. */
	REQUIRE(dlsym(RTLD_NEXT, "dlsym") == dlsym(RTLD_DEFAULT, "dlsym") && dlsym(RTLD_NEXT, "malloc") && !dlsym(RTLD_NEXT, "main"));
	pid_t child = fork();
	REQUIRE(child >= 0);
	if (child == 0)
		_exit(dlsym(lib, "cuMemcpyHtoDAsync_v2") ? 0 : 1);
	int status;
	REQUIRE(waitpid(child, &status, 0) == child && status == 0);
	puts("ok");
}

static void large(int copies)
{
	devptr d, other;
	handle s;
	uint8_t *a = host_of(LARGE), *b = host_of(LARGE);
	uint64_t *x = (uint64_t *)a, *y = (uint64_t *)b;
	REQUIRE(cuMemAlloc_v2(&d, LARGE) == 0 && cuStreamCreate(&s, 1) == 0);
	for (int i = 0; i < copies; i++) {
		for (size_t k = 0; k < LARGE / 8; k += 64)
			x[k] = (uint64_t)i << 32 | k;
		REQUIRE(cuMemAlloc_v2(&other, BYTES) == 0);
		REQUIRE(cuMemcpyHtoDAsync_v2(d, a, LARGE, s) == 0 && cuMemcpyDtoHAsync_v2(b, d, LARGE, s) == 0);
		REQUIRE(cuMemFree_v2(other) == 0); /* the driver waits for the stream, and other threads for the driver */
		REQUIRE(cuStreamSynchronize(s) == 0);
		for (size_t k = 0; k < LARGE / 8; k += 64)
			REQUIRE(y[k] == ((uint64_t)i << 32 | k));
		memset(b, 0xee, LARGE); /* a late write would be seen */
		if (i % 16 == 0)
			usleep(3000);
		for (size_t k = 0; k < LARGE / 8; k += 64)
			REQUIRE(y[k] == 0xeeeeeeeeeeeeeeeeu);
	}
	REQUIRE(cuMemFree_v2(d) == 0 && cuMemFreeHost(a) == 0 && cuMemFreeHost(b) == 0);
	puts("ok");
}

static void held_until(void *arg)
{
	while (!*(_Atomic int *)arg)
		usleep(100);
}

/* More copies in a stream than there are slots, and few. */
static void many(int copies, bool held)
{
	devptr d;
	handle s;
	uint8_t *h = host_of(2 * BYTES), *back = malloc(BYTES);
	_Atomic int go = 0;
	REQUIRE(cuMemAlloc_v2(&d, BYTES) == 0 && cuStreamCreate(&s, 1) == 0);
	if (held)
		REQUIRE(cuLaunchHostFunc(s, held_until, (void *)&go) == 0);
	for (int i = 0; i < copies; i++) {
		h[i] = (uint8_t)i;
		REQUIRE(cuMemcpyHtoDAsync_v2(d, h + i, BYTES, s) == 0);
		REQUIRE(held || cuStreamSynchronize(s) == 0);
	}
	go = 1;
	REQUIRE(cuMemcpyDtoHAsync_v2(back, d, BYTES, s) == 0 && cuStreamSynchronize(s) == 0);
	REQUIRE(memcmp(back, h + copies - 1, BYTES) == 0);
	puts("ok");
}

static void sleeps(void *arg)
{
	(void)arg;
	usleep(200000);
	fake_break();
}

/* Until a copy is taken, which the count of the report shows. */
static void warm(devptr d, void *h, handle s)
{
	for (int i = 0; i < 200; i++)
		REQUIRE(cuMemcpyHtoDAsync_v2(d, h, BYTES, s) == 0 && cuStreamSynchronize(s) == 0);
}

static void lost(void)
{
	devptr d;
	handle s;
	void *h = host_of(BYTES);
	REQUIRE(cuMemAlloc_v2(&d, BYTES) == 0 && cuStreamCreate(&s, 1) == 0);
	warm(d, h, s);
	REQUIRE(cuLaunchHostFunc(s, sleeps, NULL) == 0 && cuMemcpyHtoDAsync_v2(d, h, BYTES, s) == 0);
	REQUIRE(cuStreamSynchronize(s) == 700 && cuMemcpyHtoD_v2(d, h, BYTES) == 700);
	REQUIRE(cuMemFree_v2(d) == 700); /* and does not hang */
	puts("ok");
}

static void *freed(void *p)
{
	REQUIRE(cuMemFree_v2(P(p)) == 0);
	return NULL;
}

static void free_beside(pid_t sidecar)
{
	devptr d, e;
	handle s;
	pthread_t t;
	static _Atomic int begun, go;
	void *h = host_of(BYTES);
	REQUIRE(cuMemAlloc_v2(&d, BYTES) == 0 && cuMemAlloc_v2(&e, BYTES) == 0 && cuStreamCreate(&s, 1) == 0);
	warm(d, h, s);
	warm(e, h, s);
	fake_hold_frees(&begun, &go);
	REQUIRE(kill(sidecar, SIGSTOP) == 0 && pthread_create(&t, NULL, freed, PTR(d)) == 0);
	while (!begun) /* the thread has waited for the sidecar, and waits for the GPU next */
		usleep(1000);
	REQUIRE(cuMemcpyHtoDAsync_v2(e, h, BYTES, s) == 0);
	go = 1;
	REQUIRE(cuStreamSynchronize(s) == 0);
	pthread_join(t, NULL);
	puts("ok");
}

static void stuck(pid_t sidecar)
{
	devptr d;
	handle s;
	_Atomic int go = 0;
	void *h = host_of(BYTES);
	REQUIRE(cuMemAlloc_v2(&d, BYTES) == 0 && cuStreamCreate(&s, 1) == 0);
	warm(d, h, s);
	REQUIRE(cuLaunchHostFunc(s, held_until, (void *)&go) == 0 && cuMemcpyHtoDAsync_v2(d, h, BYTES, s) == 0);
	REQUIRE(kill(sidecar, SIGKILL) == 0);
	fake_hang();
	go = 1;
	cuStreamSynchronize(s);
	puts("ok");
}

static int descriptors(void)
{
	int n = 0;
	DIR *d = opendir("/proc/self/fd");
	while (readdir(d))
		n++;
	closedir(d);
	return n;
}

static void unseen(void)
{
	devptr d, next;
	handle s;
	void *h = host_of(BYTES);
	REQUIRE(cuMemAlloc_v2(&d, BYTES) == 0 && cuStreamCreate(&s, 1) == 0);
	int before = descriptors();
	warm(d, h, s);
	REQUIRE(fake_free(d) == 0 && cuMemAlloc_v2(&next, BYTES) == 0 && next == d);
	warm(next, h, s);
	REQUIRE(cuMemFree_v2(next) == 0 && cuMemAlloc_v2(&d, BYTES) == 0);
	printf("%d descriptors are left\n", descriptors() - before);
}

static void refuse(pid_t sidecar)
{
	devptr d;
	handle s;
	_Atomic int go = 0;
	uint8_t *h = host_of(BYTES), *back = malloc(BYTES);
	REQUIRE(cuMemAlloc_v2(&d, BYTES) == 0 && cuStreamCreate(&s, 1) == 0);
	warm(d, h, s);
	fake_refuse(2);
	REQUIRE(cuLaunchHostFunc(s, held_until, (void *)&go) == 0 && cuMemcpyHtoDAsync_v2(d, h, BYTES, s) == 0);
	usleep(300000); /* it waits, and its context is looked at */
	memset(h, 9, BYTES);
	REQUIRE(kill(sidecar, SIGKILL) == 0);
	go = 1;
	usleep(700000); /* it has failed */
	fake_refuse(0);
	REQUIRE(cuStreamSynchronize(s) == 0 && cuMemcpyDtoH_v2(back, d, BYTES) == 0 && back[0] == 9 && back[BYTES - 1] == 9);
	puts("ok");
}

static void two(int copies)
{
	devptr d[2];
	handle s;
	uint8_t *h = host_of(BYTES), *back = malloc(BYTES);
	REQUIRE(cuMemAlloc_v2(&d[0], BYTES) == 0 && cuMemAlloc_v2(&d[1], BYTES) == 0 && cuStreamCreate(&s, 1) == 0);
	for (int i = 0; i < 2 * copies; i++)
		REQUIRE(cuMemcpyHtoDAsync_v2(d[i / copies], h, BYTES, s) == 0 && cuStreamSynchronize(s) == 0);
	REQUIRE(cuMemcpyDtoH_v2(back, d[0], BYTES) == 0 && memcmp(back, h, BYTES) == 0);
	puts("ok");
}

static void capturing(void)
{
	devptr d, e;
	handle s, beside, graph;
	void *h = host_of(BYTES);
	REQUIRE(cuMemAlloc_v2(&d, BYTES) == 0 && cuMemAlloc_v2(&e, BYTES) == 0 && cuStreamCreate(&s, 1) == 0 && cuStreamCreate(&beside, 1) == 0);
	warm(d, h, s);
	REQUIRE(cuStreamBeginCapture_v2(beside, 0) == 0);
	warm(e, h, s);
	REQUIRE(cuStreamEndCapture(beside, &graph) == 0);
	puts("ok");
}

static void unregister(void)
{
	devptr d;
	handle s;
	void *h = host_of(BYTES), *own = aligned_alloc(4096, BYTES);
	REQUIRE(cuMemAlloc_v2(&d, BYTES) == 0 && cuStreamCreate(&s, 1) == 0);
	REQUIRE(cuMemHostUnregister(h) == 713);
	warm(d, h, s);
	REQUIRE(cuMemHostRegister_v2(own, BYTES, 3) == 0 && cuMemHostUnregister(own) == 0 && cuMemHostUnregister(own) == 713);
	REQUIRE(cuMemFreeHost(h) == 0);
	puts("ok");
}

static void child(void)
{
	devptr d;
	handle s;
	int status;
	uint8_t *h = host_of(BYTES), *back = malloc(BYTES);
	REQUIRE(cuMemAlloc_v2(&d, BYTES) == 0 && cuStreamCreate(&s, 1) == 0);
	warm(d, h, s);
	pid_t pid = fork();
	REQUIRE(pid >= 0);
	if (pid == 0) {
		bool same = h[BYTES - 1] == 0x5a;
		memset(h, 9, BYTES);
		_exit(same ? 0 : 1);
	}
	REQUIRE(waitpid(pid, &status, 0) == pid && status == 0);
	REQUIRE(cuMemcpyHtoDAsync_v2(d, h, BYTES, s) == 0 && cuStreamSynchronize(s) == 0);
	REQUIRE(cuMemcpyDtoH_v2(back, d, BYTES) == 0 && back[0] == 9 && back[BYTES - 1] == 9);
	puts("ok");
}

static void batches(void)
{
	devptr d;
	handle s;
	uint8_t *h = host_of(BYTES), *back = malloc(BYTES);
	_Atomic int go = 0;
	REQUIRE(cuMemAlloc_v2(&d, BYTES) == 0 && cuStreamCreate(&s, 1) == 0);
	warm(d, h, s);
	devptr dst[] = {d, d + BYTES / 2}, src[] = {P(h), P(h) + BYTES / 2};
	size_t n[] = {BYTES / 2, BYTES / 2}, at[] = {0, 1}, twice[] = {0, 0}, late[] = {1, 2};
	struct attributes a[] = {{.order = 1}, {.order = 2}}, wrong = {.order = 9}, flags = {.order = 1, .flags = 8};
	/* The second half is the program's again at once, the first is read in the stream. */
	memset(h, 7, BYTES);
	REQUIRE(cuLaunchHostFunc(s, held_until, (void *)&go) == 0 && cuMemcpyBatchAsync(dst, src, n, 2, a, at, 2, NULL, s) == 0);
	memset(h, 9, BYTES);
	go = 1;
	REQUIRE(cuStreamSynchronize(s) == 0 && cuMemcpyDtoH_v2(back, d, BYTES) == 0 && back[0] == 9 && back[BYTES - 1] == 7);
	/* Errors are the driver's. */
	REQUIRE(cuMemcpyBatchAsync(dst, src, n, 2, NULL, NULL, 0, NULL, s) == 1 && cuMemcpyBatchAsync(dst, src, n, 2, &wrong, at, 1, NULL, s) == 1);
	REQUIRE(cuMemcpyBatchAsync(dst, src, n, 2, &flags, at, 1, NULL, s) == 1 && cuMemcpyBatchAsync(dst, src, n, 2, a, twice, 2, NULL, s) == 1);
	REQUIRE(cuMemcpyBatchAsync(dst, src, n, 2, a, late, 1, NULL, s) == 1 && cuMemcpyBatchAsync(dst, src, n, 2, a, at, 1, NULL, NULL) == 1);
	REQUIRE(cuMemcpyBatchAsync(dst, src, n, 2, a, at, 1, NULL, (handle)1) == 1);
	REQUIRE(cuMemcpyBatchAsync(dst, src, n, 2, a, at, 1, NULL, s) == 0 && cuStreamSynchronize(s) == 0);
	puts("ok");
}

static void ends(const char *how)
{
	devptr d;
	handle s;
	void *h = host_of(BYTES);
	REQUIRE(cuMemAlloc_v2(&d, BYTES) == 0 && cuStreamCreate(&s, 1) == 0);
	warm(d, h, s);
	REQUIRE(cuMemcpyHtoDAsync_v2(d, h, BYTES, s) == 0);
	int rc = strcmp(how, "other") == 0 ? cuCtxDestroy_v2((handle)5) : strcmp(how, "reset") == 0 ? cuDevicePrimaryCtxReset_v2(0)
	         : strcmp(how, "destroy") == 0 ? cuCtxDestroy_v2((handle)1) : cuDevicePrimaryCtxRelease_v2(0);
	if (strcmp(how, "released") == 0)
		rc |= cuDevicePrimaryCtxRelease_v2(0);
	REQUIRE(rc == 0);
	warm(d, h, s);
	puts("ok");
}

static void held_and(const char *how)
{
	devptr d;
	handle s;
	uint8_t *h = host_of(BYTES), *back = malloc(BYTES);
	_Atomic int go = 0;
	REQUIRE(cuMemAlloc_v2(&d, BYTES) == 0 && cuStreamCreate(&s, 1) == 0);
	warm(d, h, s);
	REQUIRE(cuLaunchHostFunc(s, held_until, (void *)&go) == 0 && cuMemcpyHtoDAsync_v2(d, h, BYTES, s) == 0);
	memset(h, 9, BYTES);
	REQUIRE((strcmp(how, "reset") == 0 ? cuDevicePrimaryCtxReset_v2(0) : cuDevicePrimaryCtxRelease_v2(0)) == 0);
	REQUIRE(strcmp(how, "released") != 0 || cuDevicePrimaryCtxRelease_v2(0) == 0);
	go = 1;
	REQUIRE(cuStreamSynchronize(s) == 0 && cuMemcpyDtoH_v2(back, d, BYTES) == 0 && back[0] == 9 && back[BYTES - 1] == 9);
	REQUIRE(cuMemFree_v2(d) == 0 && cuMemFreeHost(h) == 0);
	puts("ok");
}

int main(int argc, char **argv)
{
	const char *what = argc > 1 ? argv[1] : "";
	if (strcmp(what, "random") == 0 && argc == 4) {
		play(strtoull(argv[2], NULL, 10), atoi(argv[3]), true, "random");
	} else if (strcmp(what, "threads") == 0 && argc == 4) {
		pthread_t t[4];
		thread_seed = strtoull(argv[2], NULL, 10);
		thread_ops = atoi(argv[3]);
		for (intptr_t i = 0; i < 4; i++)
			REQUIRE(pthread_create(&t[i], NULL, in_thread, (void *)i) == 0);
		for (int i = 0; i < 4; i++)
			pthread_join(t[i], NULL);
	} else if (strcmp(what, "reasons") == 0) {
		reasons();
	} else if (strcmp(what, "free") == 0 && argc == 3) {
		free_beside(atoi(argv[2]));
	} else if (strcmp(what, "stuck") == 0 && argc == 3) {
		stuck(atoi(argv[2]));
	} else if (strcmp(what, "held") == 0 && argc == 3) {
		held_and(argv[2]);
	} else if (strcmp(what, "unseen") == 0) {
		unseen();
	} else if (strcmp(what, "refuse") == 0 && argc == 3) {
		refuse(atoi(argv[2]));
	} else if (strcmp(what, "two") == 0 && argc == 3) {
		two(atoi(argv[2]));
	} else if (strcmp(what, "capturing") == 0) {
		capturing();
	} else if (strcmp(what, "unregister") == 0) {
		unregister();
	} else if (strcmp(what, "child") == 0) {
		child();
	} else if (strcmp(what, "batches") == 0) {
		batches();
	} else if (strcmp(what, "lookups") == 0) {
		lookups();
	} else if (strcmp(what, "large") == 0 && argc == 3) {
		large(atoi(argv[2]));
	} else if (strcmp(what, "many") == 0 && argc == 3) {
		many(atoi(argv[2]), true);
	} else if (strcmp(what, "few") == 0 && argc == 3) {
		many(atoi(argv[2]), false);
	} else if (strcmp(what, "lost") == 0) {
		lost();
	} else if (strcmp(what, "forked") == 0 && argc == 3) {
		/* As engines start their workers: only these use the GPU. */
		int status;
		pid_t child = fork();
		if (child == 0)
			many(atoi(argv[2]), false);
		else
			REQUIRE(waitpid(child, &status, 0) == child && status == 0);
	} else if (strcmp(what, "ends") == 0 && argc == 3) {
		ends(argv[2]);
	} else {
		return 2;
	}
	return 0;
}
