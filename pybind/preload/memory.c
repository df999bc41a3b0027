/* The memory that the sidecar has. Pinned host memory that the driver allocates cannot be mapped by another process, so large allocations come from
 * memory files here, which the driver pins. An allocation of a GPU is shared at its first copy.
 *
 * The sidecar's mapping outlives the allocation, and the next one may have the same address. So an entry holds the driver's id of its allocation,
 * which each copy compares, and it goes before the memory does.
 */
#include <string.h>
#include <sys/mman.h>

#include "internal.h"
#include "preload.h"

enum { MAX_REFUSALS = 3, DROP_MS = 1000, HANDLE_BY_IPC = 1 };
enum { LEND_MS = 100 }; /* for the sidecar to map new memory; its copies pass by until it has */

static struct memory table[MAX_MEMORY]; /* guarded by mu */
static bool ended;                      /* likewise: contexts go */

static bool holds(const struct memory *m, uint64_t at, uint64_t n)
{
	return at >= m->addr && at - m->addr <= m->bytes && n <= m->bytes - (at - m->addr);
}

static struct memory *host_at(uint64_t at)
{
	for (struct memory *m = table; m < table + MAX_MEMORY; m++)
		if (m->state != MEMORY_FREE && m->state != MEMORY_GOING && !m->device && holds(m, at, 1))
			return m;
	return NULL;
}

/* A free entry, as GOING until it is complete. Entries of memory that cannot be shared give way. */
static struct memory *claim(void)
{
	struct memory *found = NULL;
	for (struct memory *m = table; m < table + MAX_MEMORY; m++) {
		if (m->state == MEMORY_FREE || (!found && m->state == MEMORY_UNSHARED))
			found = m;
		if (m->state == MEMORY_FREE)
			break;
	}
	if (found)
		*found = (struct memory){.state = MEMORY_GOING, .number = -1, .region = {.fd = -1}};
	return found;
}

static void set_state(struct memory *m, enum memory_state state)
{
	pthread_mutex_lock(&mu);
	m->state = state;
	pthread_mutex_unlock(&mu);
}

/* Nothing uses it any more. The sidecar's answer, a request for kvs_answer; 0: there is none. With mu held, which kvs_regions_drop may be. */
static int64_t drop(struct memory *m)
{
	uint32_t number = (uint32_t)m->number;
	int64_t request = m->number >= 0 ? kvs_regions_drop(client, &number, 1) : 0;
	m->number = -1;
	return request;
}

void memory_put(struct memory *m)
{
	m->open--;
	if (m->open == 0 && m->state == MEMORY_GOING && m->device && m->late) {
		int64_t request = drop(m);
		if (request > 0)
			kvs_request_forget(client, request);
		kvs_region_free(&m->region);
		m->state = MEMORY_FREE;
	}
	pthread_cond_broadcast(&moved);
}

/* Until the sidecar has unmapped it, or a time. If it does not answer, it is its own mapping, and no copy is open. */
static void await_drop(int64_t request, int64_t until_ms)
{
	uint8_t answer[1024];
	uint32_t type;
	int64_t left = until_ms - kvs_now_ms();
	if (request > 0 && kvs_answer(client, request, left > 0 ? (int)left : 0, &type, answer, sizeof answer) <= 0)
		kvs_request_forget(client, request);
}

static bool lend(struct memory *m)
{
	m->number = kvs_regions_add(client, &m->region, 1);
	return m->number >= 0;
}

/* ---- host memory ---- */

bool memory_host_alloc(void **out, size_t n, unsigned flags)
{
	devptr seen = 0;
	if (!gate_start())
		return false;
	pthread_mutex_lock(&mu);
	struct memory *m = ended ? NULL : claim();
	pthread_mutex_unlock(&mu);
	if (!m)
		return false;
	if (kvs_region_alloc(n, &m->region) < 0) {
		set_state(m, MEMORY_FREE);
		return false;
	}
	void *at = (void *)(uintptr_t)m->region.addr; /* a child shares it, as it does the driver's */
	bool pinned = cu.MemHostRegister(at, m->region.bytes, HOST_PORTABLE | HOST_DEVICEMAP) == CUDA_OK;
	/* The GPU must see it at the same address, as it does with memory of the driver's own. */
	if (!pinned || cu.MemHostGetDevicePointer(&seen, at, 0) != CUDA_OK || seen != m->region.addr || !lend(m)) {
		if (pinned) {
			gate_close();
			cu.MemHostUnregister(at);
			gate_open();
		}
		kvs_region_free(&m->region);
		set_state(m, MEMORY_FREE);
		return false;
	}
	kvs_regions_wait(client, LEND_MS);
	pthread_mutex_lock(&mu);
	m->addr = m->region.addr;
	m->bytes = m->region.bytes;
	m->flags = flags;
	m->state = MEMORY_FRESH;
	pthread_mutex_unlock(&mu);
	*out = at;
	return true;
}

bool memory_host_free(void *p)
{
	pthread_mutex_lock(&mu);
	struct memory *m = host_at((uint64_t)(uintptr_t)p);
	if (!m || m->addr != (uint64_t)(uintptr_t)p) {
		pthread_mutex_unlock(&mu);
		return false;
	}
	m->state = MEMORY_GOING;
	gate_wait(&m->open);
	int64_t request = drop(m);
	pthread_mutex_unlock(&mu);
	await_drop(request, kvs_now_ms() + DROP_MS);
	cu.MemHostUnregister(p);
	kvs_region_free(&m->region);
	set_state(m, MEMORY_FREE);
	return true;
}

bool memory_host_flags(unsigned *flags, const void *p)
{
	pthread_mutex_lock(&mu);
	struct memory *m = host_at((uint64_t)(uintptr_t)p);
	if (m)
		*flags = m->flags;
	pthread_mutex_unlock(&mu);
	return m != NULL;
}

bool memory_is_ours(uint64_t p)
{
	pthread_mutex_lock(&mu);
	bool ours = host_at(p) != NULL;
	pthread_mutex_unlock(&mu);
	return ours;
}

/* ---- memory of GPUs ---- */

void memory_device_gone(devptr p, bool wait)
{
	int64_t requests[MAX_MEMORY], until = kvs_now_ms() + DROP_MS;
	uint32_t n = 0;
	pthread_mutex_lock(&mu);
	/* There are several where an earlier allocation of the address was freed unseen. */
	for (struct memory *m = table; m < table + MAX_MEMORY; m++) {
		if (!m->device || m->addr != p || m->state == MEMORY_FREE || m->state == MEMORY_GOING)
			continue;
		m->state = MEMORY_GOING;
		m->late = !wait;
		if (wait)
			gate_wait(&m->open);
		if (m->open == 0) {
			requests[n++] = drop(m);
			kvs_region_free(&m->region);
			m->state = MEMORY_FREE;
		}
	}
	pthread_mutex_unlock(&mu);
	for (uint32_t i = 0; i < n; i++)
		await_drop(requests[i], wait ? until : 0);
}

void memory_all_gone(const char *why)
{
	pthread_mutex_lock(&mu);
	if (!ended && client) {
		ended = true;
		gate_drain();
		for (struct memory *m = table; m < table + MAX_MEMORY; m++) {
			if (!m->device || m->state == MEMORY_FREE || m->state == MEMORY_GOING)
				continue;
			m->state = MEMORY_GOING;
			m->late = true;
			if (m->open == 0) {
				int64_t request = drop(m);
				if (request > 0)
					kvs_request_forget(client, request);
				kvs_region_free(&m->region);
				m->state = MEMORY_FREE;
			}
		}
		if (settings()->report)
			print_line("%s: no more copies are taken", why);
	}
	pthread_mutex_unlock(&mu);
}

/* What an address is: MEMORY_DEVICE, MEMORY_HOST if pinned, 0 if it is none of the driver's. */
static int kind_of(uint64_t at, bool *managed)
{
	unsigned shared = 0;
	int type = 0;
	if (cu.PointerGetAttribute(&type, POINTER_MEMORY_TYPE, at) != CUDA_OK)
		type = 0;
	*managed = type && cu.PointerGetAttribute(&shared, POINTER_IS_MANAGED, at) == CUDA_OK && shared;
	return type;
}

enum outcome memory_name(uint64_t dst, uint64_t src)
{
	bool managed_dst, managed_src;
	if (cuda_open())
		return OUT_DRIVER;
	int to = kind_of(dst, &managed_dst), from = kind_of(src, &managed_src);
	if (managed_dst || managed_src)
		return OUT_MANAGED;
	if (to == MEMORY_DEVICE && from == MEMORY_DEVICE)
		return OUT_DEVICE;
	if (to != MEMORY_DEVICE && from != MEMORY_DEVICE)
		return OUT_HOST;
	return to && from ? OUT_FOREIGN : OUT_PAGEABLE;
}

/* The allocation around an address, whose number in the driver is `buffer`. With mu held. */
static struct memory *device_at(uint64_t at, uint64_t buffer)
{
	for (struct memory *m = table; m < table + MAX_MEMORY; m++)
		if (m->device && m->state != MEMORY_FREE && m->state != MEMORY_GOING && m->buffer == buffer && holds(m, at, 1))
			return m;
	return NULL;
}

/* An entry for a new allocation. NULL: there is none, or another thread has one. With mu held. */
static struct memory *claim_device(uint64_t base, uint64_t size, uint64_t buffer)
{
	for (struct memory *m = table; m < table + MAX_MEMORY; m++)
		if (m->device && m->state != MEMORY_FREE && m->buffer == buffer && m->addr == base)
			return NULL;
	struct memory *m = ended ? NULL : claim();
	if (m) {
		m->device = true;
		m->addr = base;
		m->bytes = size;
		m->buffer = buffer;
	}
	return m;
}

/* Copies of other threads pass by meanwhile. */
static enum outcome share_relaxed(uint64_t at, uint64_t buffer)
{
	char error[200];
	devptr base = 0;
	size_t size = 0;
	if (cu.MemGetAddressRange(&base, &size, at) != CUDA_OK)
		return OUT_UNSHARED;
	pthread_mutex_lock(&mu);
	struct memory *m = claim_device(base, size, buffer);
	pthread_mutex_unlock(&mu);
	if (!m)
		return OUT_FRESH;
	/* Memory of cuMemCreate can be unmapped under an address, which no entry point here sees. */
	int rc = kvs_region_gpu(base, size, &m->region, error, sizeof error);
	bool shared = rc == 0 && (m->region.kind != KVS_REGION_DEVICE || m->region.handle[0] == HANDLE_BY_IPC);
	if (rc == 0 && (!shared || !lend(m))) {
		kvs_region_free(&m->region);
		shared = false;
	}
	if (shared)
		kvs_regions_wait(client, LEND_MS);
	set_state(m, shared ? MEMORY_FRESH : MEMORY_UNSHARED);
	return shared ? OUT_CAUGHT : OUT_UNSHARED;
}

/* Shares a new allocation. */
static enum outcome share(uint64_t at, uint64_t buffer)
{
	int mode = CAPTURE_MODE_RELAXED;
	gate_mode(&mode);
	enum outcome why = share_relaxed(at, buffer);
	gate_mode(&mode);
	return why;
}

/* Whether a copy can use it now. With mu held. */
static enum outcome usable(struct memory *m)
{
	if (m->state == MEMORY_FRESH && kvs_regions_wait(client, 0) == 1)
		m->state = MEMORY_READY;
	return m->state == MEMORY_READY ? OUT_CAUGHT : m->state == MEMORY_FRESH ? OUT_FRESH : m->state == MEMORY_REFUSED ? OUT_REFUSED : OUT_UNSHARED;
}

/* unknown: the allocation is new. */
static enum outcome hold(const struct piece *p, uint64_t buffer, struct memory **host, struct memory **dev, bool *unknown)
{
	pthread_mutex_lock(&mu);
	struct memory *h = host_at(p->host), *d = device_at(p->dev, buffer);
	/* A range that ends elsewhere is an error, which the driver returns. */
	bool whole = h && holds(h, p->host, p->bytes) && (!d || holds(d, p->dev, p->bytes));
	*unknown = whole && !ended && !d;
	enum outcome why = ended ? OUT_ENDED : !whole ? OUT_RANGE : !d ? OUT_FRESH : usable(d);
	if (why == OUT_CAUGHT)
		why = usable(h);
	if (why == OUT_CAUGHT) {
		h->open++;
		d->open++;
		*host = h;
		*dev = d;
	}
	pthread_mutex_unlock(&mu);
	return why;
}

bool memory_find(const struct piece *p, bool load, struct memory **host, struct memory **dev, enum outcome *why)
{
	int here = 0, ordinal = 0;
	uint64_t buffer = 0;
	bool managed = false;
	if (!memory_is_ours(p->host)) {
		*why = load ? memory_name(p->dev, p->host) : memory_name(p->host, p->dev);
		return false;
	}
	int kind = kind_of(p->dev, &managed);
	*why = managed ? OUT_MANAGED : kind != MEMORY_DEVICE ? OUT_HOST : OUT_CAUGHT;
	if (*why != OUT_CAUGHT)
		return false;
	if (cu.PointerGetAttribute(&buffer, POINTER_BUFFER_ID, p->dev) != CUDA_OK ||
	    cu.PointerGetAttribute(&ordinal, POINTER_DEVICE_ORDINAL, p->dev) != CUDA_OK || cu.CtxGetDevice(&here) != CUDA_OK) {
		*why = OUT_UNSHARED;
		return false;
	}
	if (ordinal != here) {
		*why = OUT_OTHER_GPU;
		return false;
	}
	if (!kvs_connected(client)) {
		*why = OUT_NO_SIDECAR;
		return false;
	}
	bool unknown = false;
	*why = hold(p, buffer, host, dev, &unknown);
	if (unknown && (*why = share(p->dev, buffer)) == OUT_CAUGHT)
		*why = hold(p, buffer, host, dev, &unknown);
	return *why == OUT_CAUGHT;
}

bool memory_within(const struct memory *m, uint64_t at, uint64_t n)
{
	return holds(m, at, n);
}

void memory_refused(struct memory *m, bool refused)
{
	m->refusals = refused ? m->refusals + 1 : 0;
	if (m->refusals >= MAX_REFUSALS && m->state == MEMORY_READY)
		m->state = MEMORY_REFUSED;
}
