/* The driver's entry points, under the names that it exports, and the ways in which a process looks them up: linked, by dlsym, by
 * cuGetProcAddress. The runtime library takes the last two.
 */
#include <dlfcn.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "preload.h"

/* What a sanitizer's runtime calls before it is ready. */
#define NOT_SANITIZED __attribute__((no_sanitize("address", "thread", "undefined")))
#define EXPORT __attribute__((visibility("default")))
enum { NOT_FOUND = 500, PER_THREAD_FLAG = 2, VERSION_V2 = 3020, VERSION_LOOKUP_V2 = 12000, VERSION_UNKNOWN = 14000, WRONG_SETTING = 78 /* EX_CONFIG */ };

/* What the driver exports, by the same names. */
static struct {
#define FIELD(name, params, args) int(*name) params;
	COPIES(FIELD) OTHERS(FIELD)
#undef FIELD
} real;

#define DECLARE_HOOK(name, params, args) EXPORT int name params;
COPIES(DECLARE_HOOK) OTHERS(DECLARE_HOOK)

/* Their addresses here, whatever other library is preloaded and has the same names. */
#define DECLARE_OURS(name, params, args) extern __typeof__(name) ours_##name __attribute__((alias(#name), visibility("hidden")));
COPIES(DECLARE_OURS) OTHERS(DECLARE_OURS)

static const struct hook {
	const char *name;
	void *ours;
	void **real;
} hooks[] = {
#define HOOK(name, params, args) {#name, (void *)ours_##name, (void **)&real.name},
	COPIES(HOOK) OTHERS(HOOK)
#undef HOOK
};

/* ---- settings ---- */

static struct settings set;
static pthread_once_t set_once = PTHREAD_ONCE_INIT;
static pthread_once_t count_once = PTHREAD_ONCE_INIT;
static _Atomic bool forked;

/* What is wrong with a variable; empty: nothing. */
static char wrong[256];

static uint64_t number(const char *name, uint64_t otherwise, uint64_t max)
{
	const char *v = getenv(name);
	if (!v || !*v)
		return otherwise;
	char *end;
	errno = 0;
	uint64_t n = strtoull(v, &end, 10);
	if (*v < '0' || *v > '9' || *end || errno || !n || n > max)
		snprintf(wrong, sizeof wrong, "%s is %.100s: set it to a whole number from 1 to %" PRIu64, name, v, max);
	return n;
}

/* A child of a process that has used the driver cannot use it. A child of another is a process like any. */
static void in_child(void)
{
	forked = forked || gate_started();
	count_nothing();
	count_once = (pthread_once_t)PTHREAD_ONCE_INIT;
}

static void read_settings(void)
{
	const char *v = getenv("KVSPRAY_PRELOAD");
	set.on = !v || strcmp(v, "0") != 0;
	set.report = v && strcmp(v, "report") == 0;
	set.socket = getenv("KVSPRAY_PRELOAD_SOCKET");
	set.threshold = number("KVSPRAY_PRELOAD_MIN_BYTES", 32u << 20, INT64_MAX);
	set.deadline_ms = (uint32_t)number("KVSPRAY_PRELOAD_DEADLINE_MS", 10000, INT32_MAX);
	if (v && *v && strcmp(v, "0") && strcmp(v, "1") && strcmp(v, "report"))
		snprintf(wrong, sizeof wrong, "KVSPRAY_PRELOAD is %.100s: set it to 0, 1 or report", v);
	pthread_atfork(NULL, NULL, in_child);
}

const struct settings *settings(void)
{
	pthread_once(&set_once, read_settings);
	return &set;
}

/* At a call of the driver, or a look-up for one: this process uses it. A wrong variable ends it here, and not programs that have no GPU. */
static bool on(void)
{
	if (!settings()->on || forked)
		return false;
	if (wrong[0]) {
		print_line("%s", wrong);
		_exit(WRONG_SETTING);
	}
	pthread_once(&count_once, count_begin);
	return true;
}

__attribute__((destructor)) static void ends(void)
{
	if (settings()->on && !forked && !wrong[0] && set.report)
		report();
}

/* ---- look-ups ---- */

typedef void *lookup(void *, const char *);

NOT_SANITIZED static lookup *next_lookup(void)
{
	static lookup *_Atomic found;
	static const char *const versions[] = {"GLIBC_2.34", "GLIBC_2.2.5", "GLIBC_2.17"};
	lookup *f = found;
	for (size_t i = 0; !f && i < sizeof versions / sizeof *versions; i++)
		f = (lookup *)dlvsym(RTLD_NEXT, "dlsym", versions[i]);
	if (!f) {
		print_line("dlsym was not found in the C library: do not preload this library here");
		abort();
	}
	return found = f;
}

void *kvs_real_dlsym(void *lib, const char *name)
{
	return next_lookup()(lib, name);
}

static const struct hook *hook_named(const char *name)
{
	for (size_t i = 0; i < ENTRIES; i++)
		if (strcmp(hooks[i].name, name) == 0)
			return &hooks[i];
	return NULL;
}

static void *driver(int flags)
{
	const char *name = getenv("KVSPRAY_LIBCUDA");
	return dlopen(name ? name : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL | flags);
}

bool driver_loaded(void)
{
	return driver(RTLD_NOLOAD) != NULL;
}

/* What the driver exports, by a handle of it alone: another library that has its names may call this one. Several threads may find the same at
 * once. */
static void *real_by(const struct hook *h, int flags)
{
	void *p = __atomic_load_n(h->real, __ATOMIC_RELAXED);
	if (p)
		return p;
	void *lib = driver(flags);
	p = lib ? kvs_real_dlsym(lib, h->name) : NULL;
	__atomic_store_n(h->real, p, __ATOMIC_RELAXED);
	return p;
}

static void *real_of(const struct hook *h)
{
	return real_by(h, 0);
}

/* The names of a driver that is not there stay unknown, and those of another library stay what they are. */
static void *instead_of(const struct hook *h, void *found)
{
	if (found == h->ours)
		return real_of(h) ? found : NULL;
	/* Loads nothing: this thread may be in a dlopen. */
	return found == real_by(h, RTLD_NOLOAD) ? h->ours : found;
}

EXPORT void *hooked_dlsym(void *lib, const char *name) __asm__("dlsym");

/* Ends with a jump: for RTLD_NEXT the C library looks at who calls it, and finds the next after that. */
NOT_SANITIZED __attribute__((optimize("O2", "optimize-sibling-calls"))) void *hooked_dlsym(void *lib, const char *name)
{
	if (lib != RTLD_NEXT && name && name[0] == 'c' && name[1] == 'u') {
		const struct hook *h = hook_named(name);
		if (h && on()) {
			void *found = kvs_real_dlsym(lib, name);
			return found ? instead_of(h, found) : NULL;
		}
	}
	return next_lookup()(lib, name);
}

/* The entry point that cuGetProcAddress means by a name, a version and flags, where its address is not the exported one. Batches have changed their
 * parameters, and newer versions of others may: they are recognised by their address alone. */
static const struct hook *hook_meant(const char *name, int version, uint64_t flags)
{
	if (strncmp(name, "cuMemcpyBatch", 13) == 0 || version < VERSION_V2 || version >= VERSION_UNKNOWN)
		return NULL;
	if (strcmp(name, "cuGetProcAddress") == 0)
		return hook_named(version < VERSION_LOOKUP_V2 ? "cuGetProcAddress" : "cuGetProcAddress_v2");
	const struct hook *best = NULL;
	size_t n = strlen(name);
	for (size_t i = 0; i < ENTRIES; i++) {
		const char *more = hooks[i].name + n;
		if (strncmp(hooks[i].name, name, n) != 0)
			continue;
		if (strncmp(more, "_v2", 3) == 0)
			more += 3;
		bool thread = strcmp(more, "_ptsz") == 0 || strcmp(more, "_ptds") == 0;
		if (!*more && !best)
			best = &hooks[i];
		else if (thread && (flags & PER_THREAD_FLAG))
			best = &hooks[i];
	}
	return best;
}

static void looked_up(const char *name, void **out, int version, uint64_t flags)
{
	if (!on() || !name || !out || !*out || strncmp(name, "cu", 2) != 0)
		return;
	for (size_t i = 0; i < ENTRIES; i++) {
		if (*out == real_of(&hooks[i])) {
			*out = hooks[i].ours;
			return;
		}
	}
	const struct hook *h = hook_meant(name, version, flags);
	if (h && real_of(h))
		*out = h->ours;
}

#define CALL(name, args)                                                                                \
	({                                                                                                      \
		__typeof__(real.name) call_ = (__typeof__(real.name))real_of(&hooks[ENTRY_##name]);                     \
		call_ ? call_ args : NOT_FOUND;                                                                         \
	})

int cuGetProcAddress(const char *name, void **out, int version, uint64_t flags)
{
	int rc = CALL(cuGetProcAddress, (name, out, version, flags));
	if (rc == CUDA_OK)
		looked_up(name, out, version, flags);
	return rc;
}

int cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *found)
{
	int rc = CALL(cuGetProcAddress_v2, (name, out, version, flags, found));
	if (rc == CUDA_OK)
		looked_up(name, out, version, flags);
	return rc;
}

/* ---- copies ---- */

/* A small copy costs no more than this. */
static bool worth(enum entry e, uint64_t n)
{
	if (!on())
		return false;
	if (n >= set.threshold && n)
		return true;
	count(e, OUT_SMALL, n);
	return false;
}

static bool taken(enum entry e, const void *host, devptr dev, uint64_t n, bool load, handle s)
{
	struct piece p = {(uint64_t)(uintptr_t)host, dev, n};
	return worth(e, n) && gate_copy(e, &p, 1, load, s);
}

/* Only the addresses show which side is which. */
static bool taken_any(enum entry e, devptr dst, devptr src, uint64_t n, handle s)
{
	if (!worth(e, n))
		return false;
	bool load = memory_is_ours(src), store = memory_is_ours(dst);
	struct piece p = load ? (struct piece){src, dst, n} : (struct piece){dst, src, n};
	if (load != store)
		return gate_copy(e, &p, 1, load, s);
	enum outcome why = memory_name(dst, src);
	count(e, why, n);
	return false;
}

static handle legacy(handle s) { return s ? s : STREAM_LEGACY; }
static handle per_thread(handle s) { return s ? s : STREAM_PER_THREAD; }

#define HTOD_ASYNC(name, stream)                                                                      \
	int name(devptr dst, const void *src, size_t n, handle s)                                             \
	{                                                                                                     \
		return taken(ENTRY_##name, src, dst, n, true, stream(s)) ? CUDA_OK : CALL(name, (dst, src, n, s));    \
	}
#define DTOH_ASYNC(name, stream)                                                                      \
	int name(void *dst, devptr src, size_t n, handle s)                                                   \
	{                                                                                                     \
		return taken(ENTRY_##name, dst, src, n, false, stream(s)) ? CUDA_OK : CALL(name, (dst, src, n, s));   \
	}
#define ANY_ASYNC(name, stream)                                                                       \
	int name(devptr dst, devptr src, size_t n, handle s)                                                  \
	{                                                                                                     \
		return taken_any(ENTRY_##name, dst, src, n, stream(s)) ? CUDA_OK : CALL(name, (dst, src, n, s));      \
	}
/* A synchronous copy is one in the default stream, and the wait for it, which returns what else has failed there. */
#define HTOD(name, stream)                                                                            \
	int name(devptr dst, const void *src, size_t n)                                                       \
	{                                                                                                     \
		return taken(ENTRY_##name, src, dst, n, true, stream) ? cu.StreamSynchronize(stream) : CALL(name, (dst, src, n)); \
	}
#define DTOH(name, stream)                                                                            \
	int name(void *dst, devptr src, size_t n)                                                             \
	{                                                                                                     \
		return taken(ENTRY_##name, dst, src, n, false, stream) ? cu.StreamSynchronize(stream) : CALL(name, (dst, src, n)); \
	}
#define ANY(name, stream)                                                                             \
	int name(devptr dst, devptr src, size_t n)                                                            \
	{                                                                                                     \
		return taken_any(ENTRY_##name, dst, src, n, stream) ? cu.StreamSynchronize(stream) : CALL(name, (dst, src, n)); \
	}

HTOD_ASYNC(cuMemcpyHtoDAsync_v2, legacy)
HTOD_ASYNC(cuMemcpyHtoDAsync_v2_ptsz, per_thread)
DTOH_ASYNC(cuMemcpyDtoHAsync_v2, legacy)
DTOH_ASYNC(cuMemcpyDtoHAsync_v2_ptsz, per_thread)
ANY_ASYNC(cuMemcpyAsync, legacy)
ANY_ASYNC(cuMemcpyAsync_ptsz, per_thread)
HTOD(cuMemcpyHtoD_v2, STREAM_LEGACY)
HTOD(cuMemcpyHtoD_v2_ptds, STREAM_PER_THREAD)
DTOH(cuMemcpyDtoH_v2, STREAM_LEGACY)
DTOH(cuMemcpyDtoH_v2_ptds, STREAM_PER_THREAD)
ANY(cuMemcpy, STREAM_LEGACY)
ANY(cuMemcpy_ptds, STREAM_PER_THREAD)

int driver_copy(const struct piece *p, bool load, handle stream)
{
	void *host = (void *)(uintptr_t)p->host;
	return load ? CALL(cuMemcpyHtoDAsync_v2, (p->dev, host, p->bytes, stream)) : CALL(cuMemcpyDtoHAsync_v2, (host, p->dev, p->bytes, stream));
}

/* Whether a batch is well formed, and asks for no more than the order of its stream, which the gate keeps. Sources that are read DURING_CALL are
 * the program's again once the call has returned. */
static bool in_order(const struct copy_attributes *attrs, const size_t *at, size_t nattrs, size_t count_of)
{
	if (!attrs || !at || !nattrs || nattrs > count_of || at[0] != 0)
		return false;
	for (size_t i = 0; i < nattrs; i++)
		if ((attrs[i].order != ORDER_STREAM && attrs[i].order != ORDER_ANY) || attrs[i].flags > PREFER_OVERLAP || at[i] >= count_of ||
		    (i > 0 && at[i] <= at[i - 1]))
			return false;
	return true;
}

/* One copy of many pieces. All of them go the same way, between one piece of host memory and one allocation, or the driver makes them. No batch
 * may be in the legacy stream: the driver returns the error. */
static bool taken_batch(enum entry e, const devptr *dst, const devptr *src, const size_t *n, size_t count_of, const void *attrs, const size_t *at,
                        size_t nattrs, handle s)
{
	if (!on() || !dst || !src || !n || !count_of)
		return false;
	uint64_t sum = 0;
	for (size_t i = 0; i < count_of; i++)
		sum += n[i];
	if (!worth(e, sum))
		return false;
	if (s == STREAM_LEGACY || !in_order(attrs, at, nattrs, count_of)) {
		count(e, OUT_ORDER, sum);
		return false;
	}
	bool load = memory_is_ours(src[0]);
	bool mixed = load == memory_is_ours(dst[0]) || count_of > KVS_MAX_COPY_BLOCKS;
	struct piece *pieces = mixed ? NULL : malloc(count_of * sizeof *pieces);
	for (size_t i = 0; pieces && i < count_of; i++) {
		pieces[i] = load ? (struct piece){src[i], dst[i], n[i]} : (struct piece){dst[i], src[i], n[i]};
		mixed |= !n[i];
	}
	bool done = pieces && !mixed && gate_copy(e, pieces, (uint32_t)count_of, load, s);
	if (!pieces || mixed)
		count(e, OUT_MIXED, sum);
	free(pieces);
	return done;
}

#define BATCH(name, stream)                                                                           \
	int name(devptr *dst, devptr *src, size_t *n, size_t count, void *attrs, size_t *at, size_t nattrs, size_t *failed, handle s) \
	{                                                                                                     \
		return taken_batch(ENTRY_##name, dst, src, n, count, attrs, at, nattrs, stream(s)) \
		           ? CUDA_OK : CALL(name, (dst, src, n, count, attrs, at, nattrs, failed, s));                \
	}
#define BATCH_V2(name, stream)                                                                        \
	int name(devptr *dst, devptr *src, size_t *n, size_t count, void *attrs, size_t *at, size_t nattrs, handle s) \
	{                                                                                                     \
		return taken_batch(ENTRY_##name, dst, src, n, count, attrs, at, nattrs, stream(s)) \
		           ? CUDA_OK : CALL(name, (dst, src, n, count, attrs, at, nattrs, s));                        \
	}

BATCH(cuMemcpyBatchAsync, legacy)
BATCH(cuMemcpyBatchAsync_ptsz, per_thread)
BATCH_V2(cuMemcpyBatchAsync_v2, legacy)
BATCH_V2(cuMemcpyBatchAsync_v2_ptsz, per_thread)

/* ---- memory that comes and goes ---- */

int cuMemHostAlloc(void **out, size_t n, unsigned flags)
{
	if (on() && out && n >= set.threshold && !(flags & HOST_WRITECOMBINED) && memory_host_alloc(out, n, flags))
		return CUDA_OK;
	return CALL(cuMemHostAlloc, (out, n, flags));
}

int cuMemAllocHost_v2(void **out, size_t n)
{
	if (on() && out && n >= set.threshold && memory_host_alloc(out, n, 0))
		return CUDA_OK;
	return CALL(cuMemAllocHost_v2, (out, n));
}

int cuMemFreeHost(void *p)
{
	if (!on())
		return CALL(cuMemFreeHost, (p));
	gate_close();
	int rc = memory_host_free(p) ? CUDA_OK : CALL(cuMemFreeHost, (p));
	gate_open();
	return rc;
}

int cuMemHostUnregister(void *p)
{
	if (!on())
		return CALL(cuMemHostUnregister, (p));
	if (memory_is_ours((uint64_t)(uintptr_t)p))
		return NOT_REGISTERED; /* by the program: it is of cuMemHostAlloc */
	gate_close();
	int rc = CALL(cuMemHostUnregister, (p));
	gate_open();
	return rc;
}

int cuMemHostGetFlags(unsigned *flags, void *p)
{
	return on() && flags && memory_host_flags(flags, p) ? CUDA_OK : CALL(cuMemHostGetFlags, (flags, p));
}

int cuMemFree_v2(devptr p)
{
	if (!on())
		return CALL(cuMemFree_v2, (p));
	gate_close();
	memory_device_gone(p, true);
	int rc = CALL(cuMemFree_v2, (p));
	gate_open();
	return rc;
}

int cuMemFreeAsync(devptr p, handle s)
{
	if (on())
		memory_device_gone(p, false);
	return CALL(cuMemFreeAsync, (p, s));
}

int cuMemFreeAsync_ptsz(devptr p, handle s)
{
	if (on())
		memory_device_gone(p, false);
	return CALL(cuMemFreeAsync_ptsz, (p, s));
}

int cuCtxDestroy_v2(handle c)
{
	if (on() && gate_uses(c))
		memory_all_gone("a context was destroyed");
	return CALL(cuCtxDestroy_v2, (c));
}

/* Others may have retained it, and the copies go on. */
int cuDevicePrimaryCtxRelease_v2(int d)
{
	bool was = on() && gate_active(d);
	int rc = CALL(cuDevicePrimaryCtxRelease_v2, (d));
	if (was && !gate_active(d))
		memory_all_gone("a primary context was released");
	return rc;
}

int cuDevicePrimaryCtxReset_v2(int d)
{
	if (on())
		memory_all_gone("a GPU was reset");
	return CALL(cuDevicePrimaryCtxReset_v2, (d));
}
