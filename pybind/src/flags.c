/* The flags memory of the board: layer flags, which the engine writes, and load flags, which the sidecar writes. */
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

void epoch_bump(kvs_client *c)
{
	__atomic_add_fetch(c->source_epoch, 1, __ATOMIC_SEQ_CST);
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

uint64_t kvs_load_value(kvs_client *c, uint32_t flag)
{
	if (!c || c->fork_gen != kvs_fork_gen || flag >= c->layers)
		return 0;
	return __atomic_load_n(&c->load_flags[flag].value, __ATOMIC_ACQUIRE);
}
