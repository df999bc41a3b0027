/* preload.h: libkvspray_preload.so, for LD_PRELOAD. It takes large copies between pinned host memory and a GPU out of a process that has no
 * plug-in, and has the sidecar make them.
 *
 *   hooks.c   the driver's entry points under their own names, and the look-ups that lead to them
 *   memory.c  the memory that the sidecar has: pinned host memory, and allocations of GPUs
 *   gate.c    a copy in its stream: the sidecar begins when the stream has come to it, and the stream waits for its end
 *   count.c   what was taken, and what passed by and why
 *
 * The runtime API needs no entry points of its own: it looks the driver's up, and gets these.
 *
 * A copy that is not taken is the driver's, in the same place of its stream, so each doubt ends there. A copy that was taken ends in one of four
 * ways: the sidecar reports all bytes; or its lease has ended otherwise, and the driver makes the copy again; or the context is lost, which the
 * program sees by itself; or the driver refuses the copy, or has not made it after 60 s, and abort ends the process. Until one of them, the stream
 * waits.
 *
 * Locks: `mu` of gate.c guards the tables. No call to the driver is made with it held, because the driver may wait for the stream, and the stream
 * for the thread that opens its gate.
 */
#ifndef KVSPRAY_PRELOAD_H
#define KVSPRAY_PRELOAD_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cuda.h"
#include "kvspray/kvspray.h"

enum {
	CUDA_OK = 0,
	CUDA_NOT_READY = 600,
	NOT_REGISTERED = 713, /* CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED */
	CAPTURE_IMPLICIT = 906,
	CAPTURE_MODE_RELAXED = 2,
	POINTER_MEMORY_TYPE = 2,
	POINTER_BUFFER_ID = 7,
	POINTER_IS_MANAGED = 8,
	MEMORY_HOST = 1,
	MEMORY_DEVICE = 2,
	HOST_WRITECOMBINED = 4,
};
/* setup.py defines it: the release of the package, for errors and logs of the sidecar. */
#ifndef KVS_RELEASE
#define KVS_RELEASE ""
#endif
#define STREAM_LEGACY ((handle)1)
#define STREAM_PER_THREAD ((handle)2)

/* CUmemcpyAttributes, of CUDA 12.8 and of 13.0 */
struct copy_attributes {
	int order;
	struct memory_location src, dst; /* hints */
	unsigned flags;
};
_Static_assert(sizeof(struct copy_attributes) == 24, "as the driver has it");
enum { ORDER_STREAM = 1, ORDER_DURING_CALL = 2, ORDER_ANY = 3, PREFER_OVERLAP = 1 };

/* X(exported name, parameters, arguments): copies. */
#define COPIES(X)                                                                                   \
	X(cuMemcpyHtoDAsync_v2, (devptr dst, const void *src, size_t n, handle s), (dst, src, n, s))         \
	X(cuMemcpyHtoDAsync_v2_ptsz, (devptr dst, const void *src, size_t n, handle s), (dst, src, n, s))    \
	X(cuMemcpyDtoHAsync_v2, (void *dst, devptr src, size_t n, handle s), (dst, src, n, s))               \
	X(cuMemcpyDtoHAsync_v2_ptsz, (void *dst, devptr src, size_t n, handle s), (dst, src, n, s))          \
	X(cuMemcpyAsync, (devptr dst, devptr src, size_t n, handle s), (dst, src, n, s))                     \
	X(cuMemcpyAsync_ptsz, (devptr dst, devptr src, size_t n, handle s), (dst, src, n, s))                \
	X(cuMemcpyHtoD_v2, (devptr dst, const void *src, size_t n), (dst, src, n))                           \
	X(cuMemcpyHtoD_v2_ptds, (devptr dst, const void *src, size_t n), (dst, src, n))                      \
	X(cuMemcpyDtoH_v2, (void *dst, devptr src, size_t n), (dst, src, n))                                 \
	X(cuMemcpyDtoH_v2_ptds, (void *dst, devptr src, size_t n), (dst, src, n))                            \
	X(cuMemcpy, (devptr dst, devptr src, size_t n), (dst, src, n))                                       \
	X(cuMemcpy_ptds, (devptr dst, devptr src, size_t n), (dst, src, n))                                  \
	X(cuMemcpyBatchAsync,                                                                                \
	  (devptr *dst, devptr *src, size_t *n, size_t count, void *attrs, size_t *at, size_t nattrs, size_t *failed, handle s), \
	  (dst, src, n, count, attrs, at, nattrs, failed, s))                                                \
	X(cuMemcpyBatchAsync_ptsz,                                                                           \
	  (devptr *dst, devptr *src, size_t *n, size_t count, void *attrs, size_t *at, size_t nattrs, size_t *failed, handle s), \
	  (dst, src, n, count, attrs, at, nattrs, failed, s))                                                \
	X(cuMemcpyBatchAsync_v2,                                                                             \
	  (devptr *dst, devptr *src, size_t *n, size_t count, void *attrs, size_t *at, size_t nattrs, handle s), \
	  (dst, src, n, count, attrs, at, nattrs, s))                                                        \
	X(cuMemcpyBatchAsync_v2_ptsz,                                                                        \
	  (devptr *dst, devptr *src, size_t *n, size_t count, void *attrs, size_t *at, size_t nattrs, handle s), \
	  (dst, src, n, count, attrs, at, nattrs, s))

/* Memory and contexts that come and go, and the driver's own look-up. */
#define OTHERS(X)                                                                                   \
	X(cuMemHostAlloc, (void **out, size_t n, unsigned flags), (out, n, flags))                           \
	X(cuMemAllocHost_v2, (void **out, size_t n), (out, n))                                               \
	X(cuMemFreeHost, (void *p), (p))                                                                     \
	X(cuMemHostUnregister, (void *p), (p))                                                               \
	X(cuMemHostGetFlags, (unsigned *flags, void *p), (flags, p))                                         \
	X(cuMemFree_v2, (devptr p), (p))                                                                     \
	X(cuMemFreeAsync, (devptr p, handle s), (p, s))                                                      \
	X(cuMemFreeAsync_ptsz, (devptr p, handle s), (p, s))                                                 \
	X(cuCtxDestroy_v2, (handle c), (c))                                                                  \
	X(cuDevicePrimaryCtxRelease_v2, (int d), (d))                                                        \
	X(cuDevicePrimaryCtxReset_v2, (int d), (d))                                                          \
	X(cuGetProcAddress, (const char *name, void **out, int version, uint64_t flags), (name, out, version, flags)) \
	X(cuGetProcAddress_v2, (const char *name, void **out, int version, uint64_t flags, int *found), (name, out, version, flags, found))

enum entry {
#define ENTRY(name, params, args) ENTRY_##name,
	COPIES(ENTRY) ENTRY_COPIES,
	OTHERS_FIRST = ENTRY_COPIES - 1,
	OTHERS(ENTRY) ENTRIES
#undef ENTRY
};

/* ---- count.c ---- */

#define OUTCOMES(X)                                                  \
	X(CAUGHT, "copied by the sidecar")                               \
	X(SMALL, "below the threshold")                                  \
	X(CAPTURE, "in a capture")                                       \
	X(PAGEABLE, "pageable memory")                                   \
	X(MANAGED, "managed memory")                                     \
	X(DEVICE, "device to device")                                    \
	X(HOST, "host to host")                                          \
	X(FOREIGN, "pinned memory that was not allocated here")          \
	X(OTHER_GPU, "memory of another GPU")                            \
	X(OTHER_CONTEXT, "a stream of another context")                  \
	X(RANGE, "a range that no allocation has")                       \
	X(UNSHARED, "GPU memory that cannot be shared")                  \
	X(MIXED, "a batch of several directions or sizes")               \
	X(ORDER, "a batch that has not the order of its stream")         \
	X(FRESH, "memory that the sidecar has not mapped yet")           \
	X(REFUSED, "memory that the sidecar refuses")                    \
	X(NO_SIDECAR, "no sidecar")                                      \
	X(FAILING, "after failures of the sidecar")                      \
	X(BUSY, "too many open copies")                                  \
	X(CLOSED, "while memory is freed")                               \
	X(ENDED, "after a context has ended")                            \
	X(DRIVER, "the driver refuses stream memory operations")

enum outcome {
#define OUTCOME(name, text) OUT_##name,
	OUTCOMES(OUTCOME) OUT_COUNT
#undef OUTCOME
};

void count(enum entry e, enum outcome why, uint64_t bytes);
/* A copy that the sidecar had taken and the driver made again. */
void count_again(uint64_t bytes);
/* Before the first of them: from here on kvspray doctor can read the counters. */
void count_begin(void);
/* In a child: the counters are its parent's. */
void count_nothing(void);
/* To stderr. Each is a line of its own. */
__attribute__((format(printf, 1, 2))) void print_line(const char *format, ...);
void report(void);

/* ---- hooks.c ---- */

/* dlsym of the C library. With -Ddlsym=kvs_real_dlsym the client's files call it, too. */
void *kvs_real_dlsym(void *lib, const char *name);

/* Whether this process uses the driver. */
bool driver_loaded(void);
/* The driver's own copy. */
struct piece;
int driver_copy(const struct piece *p, bool load, handle stream);

/* Read from the environment, once. */
struct settings {
	bool on, report;
	const char *socket;
	uint64_t threshold; /* bytes */
	uint32_t deadline_ms;
};
const struct settings *settings(void);

/* ---- memory.c ---- */

struct piece {
	uint64_t host, dev, bytes;
};

enum { MAX_MEMORY = 512 };

enum memory_state {
	MEMORY_FREE,
	MEMORY_FRESH,   /* the sidecar has not answered yet */
	MEMORY_READY,
	MEMORY_UNSHARED, /* the driver does not export it */
	MEMORY_REFUSED, /* too often, by the sidecar */
	MEMORY_GOING,   /* it is being freed: no copy begins */
};

struct memory {
	enum memory_state state;
	bool device;
	uint64_t addr, bytes, buffer; /* buffer: the driver's id of an allocation, never used again */
	unsigned flags;               /* of cuMemHostAlloc */
	int64_t number;               /* in COPY; below 0: the client does not have it */
	int open;                     /* copies that use it */
	int refusals;                 /* in a row */
	bool late;                    /* goes once `open` is 0 */
	struct kvs_region region;
};

/* Pinned host memory in a memory file, so that the sidecar can map it. False: nothing is allocated, and the driver is to do it. */
bool memory_host_alloc(void **out, size_t n, unsigned flags);
/* False: not from memory_host_alloc. */
bool memory_host_free(void *p);
bool memory_host_flags(unsigned *flags, const void *p);
/* Before an allocation of a GPU is freed: no copy of it is open afterwards, and the sidecar has unmapped it. wait: false where it is freed later. */
void memory_device_gone(devptr p, bool wait);
/* Before a context is destroyed: as above, for all memory, but copies that wait for their streams stay open. Nothing is taken any more. */
void memory_all_gone(const char *why);
/* Finds both ends of a copy and holds them, or names *why not. load: to the GPU. The driver is asked. */
bool memory_find(const struct piece *p, bool load, struct memory **h, struct memory **d, enum outcome *why);
/* Why a copy between two addresses that are both or neither in such memory is not taken. */
enum outcome memory_name(uint64_t dst, uint64_t src);
/* Whether an address is in memory of memory_host_alloc. */
bool memory_is_ours(uint64_t p);
/* Whether it has a range. It is held, so that it does not change. */
bool memory_within(const struct memory *m, uint64_t at, uint64_t n);
/* With mu held: a copy of it has ended; the sidecar has refused one, or has not. */
void memory_put(struct memory *m);
void memory_refused(struct memory *m, bool refused);

/* ---- gate.c ---- */

extern pthread_mutex_t mu;
extern pthread_cond_t moved; /* a copy has ended */
extern kvs_client *client;   /* set once; NULL before */

/* Makes the client and the thread, once. False: off. */
bool gate_start(void);
bool gate_started(void);
/* Waits until *open is 0. With mu held. */
void gate_wait(const int *open);
/* Waits for the copies that the sidecar makes now or has failed to make, and not longer than they may take. With mu held. */
void gate_drain(void);
/* Around calls in which the driver waits for the whole GPU, until they have returned: copies could not be made again meanwhile. None is taken
 * between the two, and those that this thread's context has open have ended after the first. They nest. */
void gate_close(void);
void gate_open(void);
/* Exchanges this thread's capture mode: calls in CAPTURE_MODE_RELAXED end no capture of the program's. */
void gate_mode(int *mode);
/* Whether copies were made in a context; whether a GPU's primary context exists, after any copy was. */
bool gate_uses(handle context);
bool gate_active(int device);

/* Puts copies into a stream. False: it was counted why, and the driver is to make them. stream: no NULL. */
bool gate_copy(enum entry e, const struct piece *pieces, uint32_t n, bool load, handle stream);

#endif
