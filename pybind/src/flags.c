/* SPDX-License-Identifier: Apache-2.0
 *
 * The flags memory of the board: layer flags, which the engine writes, and load flags, which the sidecar writes. A watchdog ends
 * waits for load flags, because a GPU stream waits without a time-out.
 */
#include <stdlib.h>
#include <unistd.h>

#include "client.h"

int flags_make(kvs_client *c)
{
	uint64_t layer = sizeof(struct kvs_flags_header);
	uint64_t load = layer + (uint64_t)(c->layers + 1) * sizeof(struct kvs_flag);
	uint64_t epoch = load + (uint64_t)c->layers * sizeof(struct kvs_flag);
	long page = sysconf(_SC_PAGESIZE);
	uint64_t replay = epoch + KVS_CACHE_LINE;
	uint64_t mark = replay + (uint64_t)(c->layers + 1) * sizeof(struct kvs_flag);
	uint64_t total = mark + KVS_CACHE_LINE;
	total = (total + (uint64_t)page - 1) / (uint64_t)page * (uint64_t)page;
	void *at = kvs_shared("kvspray-flags", total, &c->flags_fd);
	if (!at)
		return -1;
	struct kvs_flags_header h = {
		.magic = KVS_FLAGS_MAGIC,
		.major = KVS_BOARD_MAJOR,
		.minor = KVS_BOARD_MINOR,
		.layers = c->layers,
		.stride = KVS_CACHE_LINE,
		.layer_flags = layer,
		.load_flags = load,
		.source_epoch = epoch,
		.total_bytes = total,
		.features = KVS_FLAGS_REPLAYS | KVS_FLAGS_MARK,
		.replay_flags = replay,
		.stream_mark = mark,
	};
	memcpy(h.boot, c->boot, sizeof h.boot);
	memcpy(at, &h, sizeof h);
	c->flags = at;
	c->flags_bytes = total;
	c->layer_flags = (struct kvs_flag *)(c->flags + layer);
	c->load_flags = (struct kvs_flag *)(c->flags + load);
	c->source_epoch = (uint64_t *)(c->flags + epoch);
	return 0;
}

/* ---- public: layer flags ---- */

static void raise_flag(struct kvs_flag *f, uint64_t step)
{
	/* One writer: a plain comparison keeps it monotonic. */
	if (__atomic_load_n(&f->value, __ATOMIC_RELAXED) < step)
		__atomic_store_n(&f->value, step, __ATOMIC_RELEASE);
}

int kvs_signal_layer(kvs_client *c, uint32_t layer, uint64_t step)
{
	CHECK(c);
	if (layer > c->layers)
		return KVS_E_ARG;
	raise_flag(&c->layer_flags[layer], step);
	return 0;
}

int kvs_signal_step(kvs_client *c, uint64_t step)
{
	CHECK(c);
	raise_flag(&c->layer_flags[c->layers], step);
	return 0;
}

void *kvs_flags(kvs_client *c, uint64_t *bytes)
{
	if (!c || c->fork_gen != kvs_fork_gen)
		return NULL;
	if (bytes)
		*bytes = c->flags_bytes;
	return c->flags;
}

uint64_t kvs_bump_source_epoch(kvs_client *c)
{
	if (!c || c->fork_gen != kvs_fork_gen)
		return 0;
	return __atomic_add_fetch(c->source_epoch, 1, __ATOMIC_SEQ_CST);
}

/* ---- the watchdog ---- */

static void poison(kvs_client *c, struct load *w)
{
	for (uint32_t i = w->first; i < w->first + w->count; i++) {
		uint64_t *flag = &c->load_flags[i].value, old = __atomic_load_n(flag, __ATOMIC_ACQUIRE);
		while (old < w->step) { /* poison is the largest value */
			if (__atomic_compare_exchange_n(flag, &old, KVS_POISON, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
				c->info.poisoned++;
				break;
			}
		}
	}
	w->poisoned = true;
}

void loads_poison(kvs_client *c, uint32_t gone)
{
	for (int i = 0; i < KVS_MAX_LOADS; i++)
		if (c->loads[i].handle && !c->loads[i].poisoned && (c->loads[i].bound & gone))
			poison(c, &c->loads[i]);
}

int64_t loads_watch(kvs_client *c, int64_t now)
{
	int64_t due = INT64_MAX;
	for (int i = 0; i < KVS_MAX_LOADS; i++) {
		struct load *w = &c->loads[i];
		if (!w->handle || w->poisoned)
			continue;
		if (now >= w->end_ms)
			poison(c, w);
		else
			due = earlier(due, w->end_ms);
	}
	return due;
}

/* ---- what streams wait for ---- */

static void raise_load(kvs_client *c, uint32_t flag, uint64_t value)
{
	uint64_t *at = &c->load_flags[flag].value, old = __atomic_load_n(at, __ATOMIC_ACQUIRE);
	while (old < value && !__atomic_compare_exchange_n(at, &old, value, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
		;
}

struct landing *landing_new(const struct kvs_landing *at)
{
	struct landing *x = malloc(sizeof *x);
	if (x)
		*x = (struct landing){.at = *at};
	return x;
}

void landing_add(kvs_client *c, struct lease *l, struct landing *x)
{
	if (c->landing)
		c->last_landing->next = x;
	else
		c->landing = x;
	c->last_landing = l->landing = x;
}

/* A load counts only after the ones before it: the flag has the parts of all. */
void landings_settle(kvs_client *c)
{
	for (struct landing *x; (x = c->landing) && x->ended;) {
		const struct kvs_landing *at = &x->at;
		uint64_t now = kvs_load_value(c, at->flag), all = at->value + at->parts;
		if (now < all) {
			__atomic_store_n(at->arrived, now > at->value ? now - at->value : 0, __ATOMIC_RELAXED);
			raise_load(c, at->flag, all);
		}
		c->landing = x->next;
		free(x);
	}
}

void landings_free(kvs_client *c)
{
	for (struct landing *x; (x = c->landing);) {
		c->landing = x->next;
		free(x);
	}
}

/* ---- public: load flags ---- */

int64_t kvs_load_watch(kvs_client *c, uint32_t first, uint32_t count, uint64_t step, uint32_t timeout_ms)
{
	CHECK(c);
	if (c->role != KVS_WORKER || !count || first >= c->layers || count > c->layers - first || !step || step >= KVS_POISON)
		return KVS_E_ARG;
	int64_t rc = KVS_E_LIMIT, now = kvs_now_ms();
	pthread_mutex_lock(&c->mu);
	for (int i = 0; i < KVS_MAX_LOADS; i++) {
		struct load *w = &c->loads[i];
		if (w->handle)
			continue;
		*w = (struct load){++c->next_load, first, count, step, now + clamp_ms(timeout_ms, DEFAULT_DEADLINE_MS), proc_bit(c->proc), false};
		wake_by(c, w->end_ms);
		rc = w->handle;
		break;
	}
	pthread_mutex_unlock(&c->mu);
	return rc;
}

int kvs_load_done(kvs_client *c, int64_t handle)
{
	CHECK(c);
	int rc = KVS_E_UNKNOWN;
	pthread_mutex_lock(&c->mu);
	for (int i = 0; i < KVS_MAX_LOADS && handle > 0; i++) {
		struct load *w = &c->loads[i];
		if (w->handle != handle)
			continue;
		rc = 0;
		for (uint32_t f = w->first; f < w->first + w->count; f++)
			if (__atomic_load_n(&c->load_flags[f].value, __ATOMIC_ACQUIRE) == KVS_POISON)
				rc = 1;
		w->handle = 0;
		break;
	}
	pthread_mutex_unlock(&c->mu);
	return rc;
}

int kvs_load_ready(kvs_client *c, uint32_t flag, uint64_t step)
{
	CHECK(c);
	if (c->role != KVS_WORKER || flag >= c->layers || step >= KVS_POISON)
		return KVS_E_ARG;
	raise_load(c, flag, step);
	return 0;
}

uint64_t kvs_load_value(kvs_client *c, uint32_t flag)
{
	if (!c || c->fork_gen != kvs_fork_gen || flag >= c->layers)
		return 0;
	return __atomic_load_n(&c->load_flags[flag].value, __ATOMIC_ACQUIRE);
}

int kvs_load_reset(kvs_client *c, uint32_t first, uint32_t count)
{
	CHECK(c);
	if (c->role != KVS_WORKER || first > c->layers || count > c->layers - first)
		return KVS_E_ARG;
	for (uint32_t i = first; i < first + count; i++)
		__atomic_store_n(&c->load_flags[i].value, 0, __ATOMIC_RELEASE);
	return 0;
}
