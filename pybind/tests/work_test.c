/* SPDX-License-Identifier: Apache-2.0
 *
 * work_test: the thread that packs in the engine's context, on a driver that moves bytes without a GPU; this process is the sidecar, too.
 * Meant for the sanitizers.
 *
 *   work_test ROUNDS      KVSPRAY_LIBCUDA names the fake driver
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "capture.h"
#include "require.h"
#include "work.h"

enum { HOLD_NONE, HOLD_ALL, HOLD_NEXT }; /* of fake.hold */
enum { CACHE = 1 << 20, OTHER = 64 << 10, STAGING = 256 << 10, PATIENCE_MS = 20000, SLEEPY_US = 200 };

static struct {
	void (*lend)(void *, size_t);
	void (*hold)(int);
	void (*break_context)(int after);
	void (*order)(void);
	void (*fail)(const char *);
	void (*fail_later)(const char *, int skip);
	void *(*registered)(void);
	void (*replays)(int us);
	int (*astray)(void), (*moved)(void), (*live)(void), (*jobs)(void), (*in_graphs)(void);
} fake;

static uint8_t *cache, *other, *staging; /* regions 0 and 2; 1 is the host's */
static struct work_region regions[3];
static _Atomic int warnings;
static uint64_t rng = 1;

static uint64_t draw(uint64_t below)
{
	rng = rng * 6364136223846793005u + 1442695040888963407u;
	return (rng >> 33) % below;
}

static void says(void *arg, const char *level, const char *text)
{
	(void)arg;
	REQUIRE(strcmp(level, "warn") == 0 && text[0]);
	warnings++;
}

static _Atomic int overs; /* boards that are done with */

static void over(void *arg)
{
	(void)arg;
	overs++;
}

static void nap(long us)
{
	struct timespec t = {0, us * 1000};
	nanosleep(&t, NULL);
}

/* ---- the sidecar's end of a board ---- */

struct end {
	uint8_t *at;
	int bell;
	uint64_t seq[KVS_WORK_SLOTS];
};

static struct kvs_work_slot *slot_of(struct end *e, int i)
{
	return (struct kvs_work_slot *)(e->at + KVS_WORK_SLOT_TABLE) + i;
}

static struct kvs_work_run *list_of(struct end *e, int i)
{
	return (struct kvs_work_run *)(e->at + KVS_WORK_LISTS) + (size_t)i * KVS_WORK_RUNS;
}

static void begin(struct work *w, struct end *e)
{
	int fd, bell;
	int64_t until = kvs_now_ms() + PATIENCE_MS;
	while (!work_begin(w, &fd, &bell)) { /* two boards ago is still being closed */
		REQUIRE(kvs_now_ms() < until);
		nap(SLEEPY_US);
	}
	memset(e, 0, sizeof *e);
	/* As it would come by a socket: ours stays when theirs is gone. */
	e->bell = dup(bell);
	e->at = mmap(NULL, KVS_WORK_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	REQUIRE(e->at != MAP_FAILED && e->bell >= 0 && close(fd) == 0);
	const struct kvs_work_header *h = (void *)e->at;
	REQUIRE(h->magic == KVS_WORK_MAGIC && h->slots == KVS_WORK_SLOTS && h->runs == KVS_WORK_RUNS && h->total_bytes == KVS_WORK_BYTES);
}

static void end(struct end *e)
{
	munmap(e->at, KVS_WORK_BYTES);
	close(e->bell);
}

static uint64_t post(struct end *e, int i, uint32_t op, uint32_t runs, uint64_t dense, uint64_t bytes)
{
	struct kvs_work_slot *s = slot_of(e, i);
	uint32_t *sleeping = &((struct kvs_work_header *)e->at)->sleeping;
	fake.order();
	__atomic_store_n(&s->op, op, __ATOMIC_RELAXED);
	__atomic_store_n(&s->runs, runs, __ATOMIC_RELAXED);
	__atomic_store_n(&s->dense, dense, __ATOMIC_RELAXED);
	__atomic_store_n(&s->bytes, bytes, __ATOMIC_RELAXED);
	__atomic_store_n(&s->blocks, 16, __ATOMIC_RELAXED);
	__atomic_store_n(&s->state, ++e->seq[i] << KVS_WORK_STATE_BITS | KVS_WORK_POSTED, __ATOMIC_SEQ_CST);
	if (__atomic_load_n(sleeping, __ATOMIC_SEQ_CST) && __atomic_exchange_n(sleeping, 0, __ATOMIC_SEQ_CST) == 1) {
		uint64_t one = 1;
		REQUIRE(write(e->bell, &one, sizeof one) == sizeof one);
	}
	return e->seq[i];
}

static uint64_t state_of(struct end *e, int i)
{
	return __atomic_load_n(&slot_of(e, i)->state, __ATOMIC_ACQUIRE);
}

static bool done(struct end *e, int i)
{
	bool is = __atomic_load_n(&((struct kvs_flag *)(e->at + KVS_WORK_DONE))[i].value, __ATOMIC_ACQUIRE) == e->seq[i];
	return is && fake.moved() >= 0; /* moved: as fake_order, the other way */
}

/* 0: done; else why it was refused. */
static uint32_t outcome(struct end *e, int i)
{
	int64_t until = kvs_now_ms() + PATIENCE_MS;
	while (kvs_now_ms() < until) {
		if (done(e, i))
			return 0;
		if (state_of(e, i) == (e->seq[i] << KVS_WORK_STATE_BITS | KVS_WORK_REFUSED))
			return __atomic_load_n(&slot_of(e, i)->refusal, __ATOMIC_RELAXED);
		nap(20);
	}
	REQUIRE(!"the slot ends");
	return 0;
}

static bool take_back(struct end *e, int i)
{
	uint64_t posted = e->seq[i] << KVS_WORK_STATE_BITS | KVS_WORK_POSTED;
	return __atomic_compare_exchange_n(&slot_of(e, i)->state, &posted, e->seq[i] << KVS_WORK_STATE_BITS | KVS_WORK_FREE, false, __ATOMIC_ACQ_REL,
	                                   __ATOMIC_RELAXED);
}

static void run_at(struct end *e, int slot, int i, uint64_t region, uint64_t off, uint64_t stride, uint32_t len, uint32_t count)
{
	struct kvs_work_run r = {region << KVS_WORK_WHERE_BITS | off, stride, len, count}, *to = &list_of(e, slot)[i];
	__atomic_store_n(&to->where, r.where, __ATOMIC_RELAXED);
	__atomic_store_n(&to->stride, r.stride, __ATOMIC_RELAXED);
	__atomic_store_n(&to->len, r.len, __ATOMIC_RELAXED);
	__atomic_store_n(&to->count, r.count, __ATOMIC_RELAXED);
}

/* A run of rows is two of the list. */
static void rows_at(struct end *e, int slot, int i, uint64_t region, uint64_t off, uint64_t stride, uint32_t len, uint32_t count, uint64_t outer, uint32_t rows)
{
	run_at(e, slot, i, region, off, stride, len, count | KVS_WORK_ROWS);
	run_at(e, slot, i + 1, 0, 0, outer, 0, rows);
}

static uint32_t open_staging(struct end *e, const void *p, uint64_t bytes)
{
	memset(list_of(e, 0), 0, KVS_WORK_HANDLE_BYTES);
	memcpy(list_of(e, 0), &p, sizeof p);
	post(e, 0, KVS_WORK_OPEN, 0, 0, bytes);
	return outcome(e, 0);
}

/* ---- what is tested ---- */

/* Random runs of both regions, forwards and backwards, packed, compared, and unpacked into zeroes. */
static void content(struct end *e, int rounds)
{
	for (int round = 0; round < rounds; round++) {
		int slot = (int)draw(KVS_WORK_SLOTS);
		uint32_t runs = 0, pieces = 0, most = draw(4) ? 1 + (uint32_t)draw(200) : 1;
		uint64_t at[1024], used = 0, dense = draw(64) * 16;
		uint32_t lens[1024];
		bool uniform = draw(3) == 0;
		while (runs < most) {
			uint32_t region = draw(4) == 0 ? 2 : 0, len = uniform ? 256 : 16 * (1 + (uint32_t)draw(32)), count = uniform ? 1 : 1 + (uint32_t)draw(4);
			uint64_t size = region ? OTHER : CACHE, stride = 16 * (1 + draw(40)), outer = 16 * draw(24), off = 16 * draw((size - 8192) / 16) + 4096;
			uint32_t rows = count > 1 && draw(2) ? 2 + (uint32_t)draw(3) : 1;
			if (pieces + count * rows > 1024 || dense + used + (uint64_t)len * count * rows > STAGING)
				break;
			if (draw(2))
				stride = -stride;
			if (draw(2))
				outer = -outer;
			if (rows > 1) {
				rows_at(e, slot, (int)runs, region, off, stride, len, count, outer, rows);
				runs += 2;
			} else {
				run_at(e, slot, (int)runs++, region, off, stride, len, count);
			}
			for (uint32_t k = 0; k < count * rows; k++) {
				at[pieces] = (uint64_t)(uintptr_t)(region ? other : cache) + off + k / count * outer + k % count * stride;
				lens[pieces++] = len;
			}
			used += (uint64_t)len * count * rows;
		}
		for (int i = 0; i < CACHE; i += 8)
			*(uint64_t *)(cache + i) = draw(1ull << 31);
		for (int i = 0; i < OTHER; i += 8)
			*(uint64_t *)(other + i) = draw(1ull << 31);
		int before = fake.moved();
		post(e, slot, KVS_WORK_PACK, runs, dense, used);
		REQUIRE(outcome(e, slot) == 0 && fake.moved() == before + 1);
		for (uint32_t i = 0, from = 0; i < pieces; from += lens[i++])
			REQUIRE(memcmp(staging + dense + from, (void *)(uintptr_t)at[i], lens[i]) == 0);
		memset(cache, 0, CACHE);
		memset(other, 0, OTHER);
		post(e, slot, KVS_WORK_UNPACK, runs, dense, used);
		REQUIRE(outcome(e, slot) == 0);
		uint64_t written = 0;
		for (uint32_t i = 0, from = 0; i < pieces; from += lens[i++])
			written += memcmp(staging + dense + from, (void *)(uintptr_t)at[i], lens[i]) == 0;
		REQUIRE(written > 0); /* pieces may overlap: the last one stands for sure */
		REQUIRE(memcmp(staging + dense + used - lens[pieces - 1], (void *)(uintptr_t)at[pieces - 1], lens[pieces - 1]) == 0);
	}
	REQUIRE(fake.astray() == 0);
}

/* Whatever is wrong with a slot: it is refused, and no kernel runs. */
static void refusals(struct end *e)
{
	const uint64_t big = (uint64_t)1 << (KVS_WORK_WHERE_BITS - 1);
	const struct {
		uint32_t op, runs;
		uint64_t dense, bytes, region, off, stride;
		uint32_t len, count;
	} bad[] = {
		{9, 1, 0, 64, 0, 0, 0, 64, 1},                                 /* no such op */
		{KVS_WORK_OPEN, 1, 0, STAGING, 0, 0, 0, 64, 1},                /* twice */
		{KVS_WORK_PACK, 0, 0, 0, 0, 0, 0, 64, 1},                      /* nothing */
		{KVS_WORK_PACK, KVS_WORK_RUNS + 1, 0, 64, 0, 0, 0, 64, 1},     /* more than a list has */
		{KVS_WORK_PACK, UINT32_MAX, 0, 64, 0, 0, 0, 64, 1},
		{KVS_WORK_PACK, 1, STAGING, 64, 0, 0, 0, 64, 1},               /* beyond the dense buffer */
		{KVS_WORK_PACK, 1, UINT64_MAX - 15, 64, 0, 0, 0, 64, 1},
		{KVS_WORK_PACK, 1, 8, 64, 0, 0, 0, 64, 1},                     /* not aligned */
		{KVS_WORK_PACK, 1, 0, UINT64_MAX, 0, 0, 0, 64, 1},
		{KVS_WORK_PACK, 1, 0, 48, 0, 0, 0, 64, 1},                     /* bytes that are not the list's */
		{KVS_WORK_PACK, 1, 0, 80, 0, 0, 0, 64, 1},
		{KVS_WORK_UNPACK, 1, 0, 64, 1, 0, 0, 64, 1},                   /* host memory */
		{KVS_WORK_UNPACK, 1, 0, 64, 3, 0, 0, 64, 1},                   /* no such region */
		{KVS_WORK_UNPACK, 1, 0, 64, 0xffff, 0, 0, 64, 1},
		{KVS_WORK_UNPACK, 1, 0, 64, 0, CACHE - 48, 0, 64, 1},          /* past its end */
		{KVS_WORK_UNPACK, 1, 0, 64, 0, CACHE, 0, 64, 1},
		{KVS_WORK_UNPACK, 1, 0, 64, 0, big, 0, 64, 1},
		{KVS_WORK_UNPACK, 1, 0, 64, 0, 8, 0, 64, 1},                   /* not aligned */
		{KVS_WORK_UNPACK, 1, 0, 128, 0, 0, CACHE - 48, 64, 2},         /* the second piece past the end */
		{KVS_WORK_UNPACK, 1, 0, 128, 0, 48, (uint64_t)-64, 64, 2},     /* ... and before the start */
		{KVS_WORK_UNPACK, 1, 0, 192, 0, 0, (uint64_t)1 << 63, 64, 3},  /* strides that overflow */
		{KVS_WORK_UNPACK, 1, 0, 192, 0, 0, ((uint64_t)1 << 63) - 16, 64, 3},
		{KVS_WORK_UNPACK, 1, 0, 128, 0, 0, 8, 64, 2},
		{KVS_WORK_UNPACK, 1, 0, 0, 0, 0, 0, 64, 0},                    /* no pieces, no bytes */
		{KVS_WORK_UNPACK, 1, 0, 0, 0, 0, 0, 0, 1},
		{KVS_WORK_UNPACK, 1, 0, 40, 0, 0, 0, 40, 1},
		{KVS_WORK_UNPACK, 1, 0, 16ull * UINT32_MAX, 0, 0, 0, 16, UINT32_MAX},
	};
	memset(cache, 7, CACHE);
	memset(staging, 9, STAGING);
	int moved = fake.moved(), before = warnings;
	for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
		run_at(e, 1, 0, bad[i].region, bad[i].off, bad[i].stride, bad[i].len, bad[i].count);
		post(e, 1, bad[i].op, bad[i].runs, bad[i].dense, bad[i].bytes);
		if (outcome(e, 1) != KVS_WORK_BAD) {
			fprintf(stderr, "case %zu was taken\n", i);
			_exit(1);
		}
	}
	static const struct {
		uint64_t bytes, off, stride, outer, where2;
		uint32_t count, rows, len2, runs;
	} grids[] = {
		{256, CACHE - 128, 64, 64, 0, 2, 2, 0, 2},                                /* both axes together past the end */
		{256, 64, (uint64_t)-64, (uint64_t)-64, 0, 2, 2, 0, 2},                   /* ... and before the start */
		{256, CACHE - 64, 64, (uint64_t)-64, 0, 2, 2, 0, 2},                      /* forth before it is back */
		{256, 0, 64, (uint64_t)1 << 63, 0, 2, 2, 0, 2},                           /* rows that overflow */
		{384, 0, (uint64_t)1 << 63, (uint64_t)1 << 63, 0, 2, 3, 0, 2},
		{512, 0, (uint64_t)1 << 62, (uint64_t)1 << 62, 0, 2, 4, 0, 2},            /* a sum of both that overflows */
		{256, 0, 64, 8, 0, 2, 2, 0, 2},                                           /* not aligned */
		{128, 0, 64, 128, 0, 1, 2, 0, 2},                                         /* rows of one */
		{0, 0, 64, 128, 0, 0, 2, 0, 2},                                           /* ... of none */
		{128, 0, 64, 128, 0, 2, 1, 0, 2},                                         /* one row */
		{0, 0, 64, 128, 0, 2, 0, 0, 2},                                           /* none */
		{256, 0, 64, 128, 1, 2, 2, 0, 2},                                         /* not all else is 0 */
		{256, 0, 64, 128, 0, 2, 2, 64, 2},
		{256, 0, 64, 128, 0, 2, 2, 0, 1},                                         /* the list ends before the rows */
		{64 * (KVS_WORK_RUNS + 64), 0, 0, 0, 0, 64, KVS_WORK_RUNS / 64 + 1, 0, 2}, /* more pieces than a list may have */
		{0, 0, 0, 0, 0, 0x7fffffff, UINT32_MAX, 0, 2},
		{0, 0, 0, 0, 0, 1 << 30, 1 << 30, 0, 2},
		{64, 0, 0, 0, 0, 641, 6700417, 0, 2},                                     /* 2^32 + 1: one piece, if that is cut off */
	};
	for (size_t i = 0; i < sizeof grids / sizeof *grids; i++) {
		rows_at(e, 1, 0, 0, grids[i].off, grids[i].stride, 64, grids[i].count, grids[i].outer, grids[i].rows);
		list_of(e, 1)[1].where = grids[i].where2;
		list_of(e, 1)[1].len = grids[i].len2;
		post(e, 1, KVS_WORK_UNPACK, grids[i].runs, 0, grids[i].bytes);
		if (outcome(e, 1) != KVS_WORK_BAD) {
			fprintf(stderr, "run of rows %zu was taken\n", i);
			_exit(1);
		}
	}
	/* More pieces than a list may have in all, each run by itself is right. */
	run_at(e, 1, 0, 0, 0, 0, 16, KVS_WORK_RUNS);
	run_at(e, 1, 1, 0, 0, 0, 16, 1);
	post(e, 1, KVS_WORK_PACK, 2, 0, 16 * (KVS_WORK_RUNS + 1));
	REQUIRE(outcome(e, 1) == KVS_WORK_BAD);
	REQUIRE(fake.moved() == moved && fake.astray() == 0 && warnings == before + 1); /* the engine's log is not the sidecar's to fill */
	for (int i = 0; i < CACHE; i++)
		REQUIRE(cache[i] == 7);
	/* And the next one that is right is done. */
	run_at(e, 1, 0, 0, 64, 0, 64, 1);
	post(e, 1, KVS_WORK_PACK, 1, 0, 64);
	REQUIRE(outcome(e, 1) == 0);
}

/* Any bytes at all, with and without somebody who changes them while they are read: what passes the check lies where it may. */
static struct {
	struct kvs_work_slot slot;
	struct kvs_work_run list[KVS_WORK_RUNS];
} foreign;
static _Atomic bool stop_changing;

static void *change(void *arg)
{
	uint64_t x = 99;
	(void)arg;
	while (!stop_changing) {
		x = x * 6364136223846793005u + 1442695040888963407u;
		struct kvs_work_run *r = &foreign.list[(x >> 40) % 8];
		__atomic_store_n(&r->where, (x >> 20) % (2 * CACHE) / 16 * 16, __ATOMIC_RELAXED);
		__atomic_store_n(&r->len, (uint32_t)(x >> 50) / 16 * 16, __ATOMIC_RELAXED);
	}
	return NULL;
}

static void hostile(int rounds)
{
	struct work_list *out = malloc(sizeof *out);
	pthread_t other_end;
	int passed = 0, grids = 0;
	REQUIRE(out);
	for (int round = 0; round < rounds; round++) {
		if (round == rounds / 2) /* from here on somebody else writes, too */
			REQUIRE(passed > rounds / 20 && pthread_create(&other_end, NULL, change, NULL) == 0);
		uint32_t runs = 1 + (uint32_t)draw(8);
		uint64_t bytes = 0;
		for (uint32_t i = 0; i < runs; i++) {
			uint64_t wild = draw(40);
			uint64_t where = wild == 0 ? draw(1ull << 31) << 32 | draw(1ull << 31) : (draw(20) ? draw(2) * 2 : draw(4)) << KVS_WORK_WHERE_BITS | draw(OTHER / 16) * 16;
			uint64_t stride = wild == 1 ? draw(1ull << 31) << 33 : (draw(2) ? 1 : (uint64_t)-1) * 16 * draw(wild == 2 ? 65536 : 32);
			uint32_t len = wild == 3 ? (uint32_t)draw(1ull << 31) * 2 : 16 * (1 + (uint32_t)draw(8)), count = wild == 4 ? (uint32_t)draw(1ull << 31) : 1 + (uint32_t)draw(4);
			__atomic_store_n(&foreign.list[i].where, where, __ATOMIC_RELAXED);
			__atomic_store_n(&foreign.list[i].stride, stride, __ATOMIC_RELAXED);
			__atomic_store_n(&foreign.list[i].len, len, __ATOMIC_RELAXED);
			__atomic_store_n(&foreign.list[i].count, count, __ATOMIC_RELAXED);
			bytes += (uint64_t)len * count;
			if (count > 1 && count < 5 && i + 1 < runs && draw(2)) {
				uint32_t rows = draw(20) ? 2 + (uint32_t)draw(3) : (uint32_t)draw(1ull << 31);
				uint64_t outer = draw(20) ? (draw(2) ? 1 : (uint64_t)-1) * 16 * draw(256) : draw(1ull << 31) << 33;
				__atomic_store_n(&foreign.list[i].count, count | KVS_WORK_ROWS, __ATOMIC_RELAXED);
				i++;
				__atomic_store_n(&foreign.list[i].where, draw(20) ? 0 : 16, __ATOMIC_RELAXED);
				__atomic_store_n(&foreign.list[i].stride, outer, __ATOMIC_RELAXED);
				__atomic_store_n(&foreign.list[i].len, draw(20) ? 0 : 16, __ATOMIC_RELAXED);
				__atomic_store_n(&foreign.list[i].count, rows, __ATOMIC_RELAXED);
				bytes += (uint64_t)len * count * (rows - 1);
			}
		}
		__atomic_store_n(&foreign.slot.runs, draw(20) ? runs : (uint32_t)draw(1ull << 31), __ATOMIC_RELAXED);
		__atomic_store_n(&foreign.slot.dense, draw(20) ? 16 * draw(STAGING / 16) : draw(1ull << 31) << 32, __ATOMIC_RELAXED);
		__atomic_store_n(&foreign.slot.bytes, draw(20) ? bytes : draw(1ull << 31), __ATOMIC_RELAXED);
		const uint64_t base = 1ull << 40;
		if (!work_translate(regions, 3, &foreign.slot, foreign.list, base, STAGING, out))
			continue;
		passed++;
		uint32_t pieces = 0;
		for (uint32_t i = 0; i < out->count; i++) {
			const struct work_run *r = &out->runs[i];
			uint32_t mine = out->first[i + 1] - pieces;
			REQUIRE(out->first[i] == pieces && out->bases[i] == r->base && r->len % 16 == 0 && r->count && mine && mine % r->count == 0);
			REQUIRE(r->dense >= base && r->dense + (uint64_t)r->len * mine <= base + STAGING);
			grids += mine > r->count;
			for (uint32_t k = 0; k < mine; k++) {
				uint64_t p = r->base + k / r->count * r->outer + k % r->count * r->stride, c = (uint64_t)(uintptr_t)cache, o = (uint64_t)(uintptr_t)other;
				REQUIRE(p % 16 == 0 && ((p >= c && p + r->len <= c + CACHE) || (p >= o && p + r->len <= o + OTHER)));
			}
			pieces += mine;
		}
		REQUIRE(out->first[out->count] == pieces && pieces <= KVS_WORK_RUNS);
	}
	REQUIRE(grids > rounds / 20);
	stop_changing = true;
	pthread_join(other_end, NULL);
	free(out);
}

/* Of somebody who takes and somebody who revokes, one wins: what was revoked never runs. */
static void revocations(struct end *e, int rounds)
{
	int taken = 0, revoked = 0;
	run_at(e, 3, 0, 0, 0, 0, 64, 1);
	for (int i = 0; i < rounds; i++) {
		int before = fake.moved();
		post(e, 3, KVS_WORK_PACK, 1, 0, 64);
		for (uint64_t n = draw(4000); n; n--)
			__asm__ volatile("");
		if (take_back(e, 3)) {
			revoked++;
			nap(1);
			REQUIRE(fake.moved() == before && !done(e, 3));
		} else {
			taken++;
			REQUIRE(outcome(e, 3) == 0 && fake.moved() == before + 1);
		}
	}
	printf("revocations: %d taken, %d revoked\n", taken, revoked);
}

/* Until something is on its way to the GPU. */
static void launched(int jobs)
{
	int64_t until = kvs_now_ms() + PATIENCE_MS;
	while (fake.jobs() < jobs)
		REQUIRE(kvs_now_ms() < until);
}

/* A kernel that has to wait holds up the slots of its own stream, and no others; each slot is told when its own is done. */
static void beside(struct end *e)
{
	memset(cache, 3, CACHE);
	memset(staging, 4, STAGING);
	for (int i = 1; i < 4; i++)
		run_at(e, i, 0, 0, (uint64_t)i * 4096, 0, 4096, 1);
	fake.hold(HOLD_NEXT);
	post(e, 1, KVS_WORK_PACK, 1, 4096, 4096);
	launched(1);
	for (int i = 2; i < 4; i++) {
		post(e, i, KVS_WORK_PACK, 1, (uint64_t)i * 4096, 4096);
		REQUIRE(outcome(e, i) == 0 && memcmp(staging + i * 4096, cache + i * 4096, 4096) == 0);
	}
	REQUIRE(!done(e, 1) && staging[4096] == 4);
	fake.hold(HOLD_NONE);
	REQUIRE(outcome(e, 1) == 0 && staging[4096] == 3);
}

/* The context is lost after our own done word and before the sidecar's: it has to be told by a refusal, and of what was done before, nothing. */
static void torn(void)
{
	struct work *w = work_start(regions, 3, says, over, NULL);
	struct end e;
	REQUIRE(w);
	begin(w, &e);
	REQUIRE(open_staging(&e, staging, STAGING) == 0);
	content(&e, 3);
	run_at(&e, 1, 0, 0, 0, 0, 4096, 1);
	post(&e, 1, KVS_WORK_PACK, 1, 0, 4096);
	REQUIRE(outcome(&e, 1) == 0);
	uint64_t state = state_of(&e, 1);
	run_at(&e, 4, 0, 0, 0, 0, 4096, 1);
	fake.hold(HOLD_ALL);
	post(&e, 4, KVS_WORK_PACK, 1, 0, 4096);
	launched(3);
	fake.break_context(2);
	fake.hold(HOLD_NONE);
	REQUIRE(outcome(&e, 4) == KVS_WORK_GPU && state_of(&e, 1) == state);
	end(&e);
	work_stop(w);
	work_free(w);
	REQUIRE(fake.live() == 0);
}

int main(int argc, char **argv)
{
	int rounds = argc > 1 ? atoi(argv[1]) : 200;
	void *lib = dlopen(getenv("KVSPRAY_LIBCUDA"), RTLD_NOW);
	REQUIRE(lib);
#define RESOLVE(name, symbol) REQUIRE(*(void **)&fake.name = dlsym(lib, "fake_" symbol))
	RESOLVE(registered, "registered");
	RESOLVE(lend, "lend");
	RESOLVE(hold, "hold");
	RESOLVE(break_context, "break");
	RESOLVE(order, "order");
	RESOLVE(fail, "fail");
	RESOLVE(fail_later, "fail_later");
	RESOLVE(astray, "astray");
	RESOLVE(moved, "moved");
	RESOLVE(live, "live");
	RESOLVE(jobs, "jobs");
	RESOLVE(replays, "replays");
	RESOLVE(in_graphs, "in_graphs");
	cache = aligned_alloc(4096, CACHE);
	other = aligned_alloc(4096, OTHER);
	staging = aligned_alloc(4096, STAGING);
	REQUIRE(cache && other && staging);
	fake.lend(cache, CACHE);
	fake.lend(other, OTHER);
	fake.lend(staging, STAGING);
	regions[0] = (struct work_region){(uint64_t)(uintptr_t)cache, CACHE};
	regions[2] = (struct work_region){(uint64_t)(uintptr_t)other, OTHER};
	hostile(rounds * 100);

	struct work_region none = {0, 0};
	REQUIRE(work_start(&none, 1, says, over, NULL) == NULL);
	struct work *w = work_start(regions, 3, says, over, NULL);
	REQUIRE(w);
	struct end e, old;
	begin(w, &e);
	run_at(&e, 2, 0, 0, 0, 0, 64, 1);
	post(&e, 2, KVS_WORK_PACK, 1, 0, 64);
	REQUIRE(outcome(&e, 2) == KVS_WORK_BAD); /* nothing is open yet */
	REQUIRE(open_staging(&e, cache + CACHE + 4096, STAGING) == KVS_WORK_BAD);
	old = e;
	begin(w, &e);
	REQUIRE(open_staging(&e, staging, STAGING + 1) == KVS_WORK_BAD); /* longer than it is */
	end(&old);
	old = e;
	begin(w, &e);
	end(&old);
	REQUIRE(open_staging(&e, staging, STAGING) == 0);
	content(&e, rounds);
	refusals(&e);
	revocations(&e, rounds * 10);
	beside(&e);

	/* The same where replays of a captured graph come by, seldom and often, and when they have ended. */
	struct graph graph;
	capture(&graph, lib);
	REQUIRE(work_graph(w, &graph) && !work_graph(w, &graph));
	for (int us = 400; us >= 4; us /= 10) {
		fake.replays(us);
		content(&e, rounds / 4);
		revocations(&e, rounds);
		REQUIRE(fake.in_graphs() > 0);
		fake.replays(0);
	}
	/* A sidecar that says by itself that a list is done, and posts the slot anew, while it waits for a replay that does not come. */
	int refused = 0;
	for (int i = 0; i < 20 || !refused; i++) {
		REQUIRE(i < 2000);
		fake.replays(4);
		content(&e, 1);
		fake.replays(0);
		run_at(&e, 6, 0, 0, 0, 0, 4096, 1);
		int before = fake.moved();
		uint64_t first = post(&e, 6, KVS_WORK_PACK, 1, 0, 4096);
		while (state_of(&e, 6) != (first << KVS_WORK_STATE_BITS | KVS_WORK_TAKEN))
			nap(1);
		__atomic_store_n(&((struct kvs_flag *)(e.at + KVS_WORK_DONE))[6].value, first, __ATOMIC_SEQ_CST);
		post(&e, 6, KVS_WORK_PACK, 1, 0, 4096);
		uint32_t why = outcome(&e, 6);
		REQUIRE(why == 0 || why == KVS_WORK_BAD);
		refused += why != 0;
		int64_t patience = kvs_now_ms() + PATIENCE_MS;
		while (fake.moved() < before + 1 + (why == 0)) /* what waited is launched in the end */
			REQUIRE(kvs_now_ms() < patience);
	}
	int by_graphs = fake.in_graphs();
	content(&e, 10);
	REQUIRE(fake.in_graphs() == by_graphs && work_graph(w, NULL));
	graph_close(&graph);

	/* The lists that the GPU reads are no fork's: a page of theirs is never another one for us than for the GPU. */
	pid_t child = fork();
	int how = -1;
	if (child == 0)
		_exit(msync(fake.registered(), 1, MS_ASYNC) == -1 && errno == ENOMEM ? 0 : 1);
	REQUIRE(child > 0 && waitpid(child, &how, 0) == child && how == 0);

	/* A session ends in mid kernel: what was taken is done, on memory that is still there, and what comes to the old board never. */
	run_at(&e, 4, 0, 0, 0, 0, 4096, 1);
	run_at(&e, 5, 0, 0, 8192, 0, 4096, 1);
	memset(cache, 1, CACHE);
	memset(staging, 2, STAGING);
	fake.hold(1);
	post(&e, 4, KVS_WORK_PACK, 1, 0, 4096);
	int64_t until = kvs_now_ms() + PATIENCE_MS;
	while (fake.jobs() == 0)
		REQUIRE(kvs_now_ms() < until);
	REQUIRE(!take_back(&e, 4) && !done(&e, 4) && work_quiet(w));
	old = e;
	begin(w, &e);
	post(&old, 5, KVS_WORK_PACK, 1, 8192, 4096);
	int ended = overs;
	REQUIRE(!work_quiet(w));
	fake.hold(0);
	REQUIRE(outcome(&old, 4) == 0 && memcmp(staging, cache, 4096) == 0);
	while (overs == ended)
		REQUIRE(kvs_now_ms() < until);
	REQUIRE(work_quiet(w));
	REQUIRE(open_staging(&e, staging, STAGING) == 0);
	content(&e, 10);
	REQUIRE(!done(&old, 5) && take_back(&old, 5));
	end(&old);

	/* Two sessions end before the first is done with: the third has none, until it is. */
	fake.hold(1);
	run_at(&e, 4, 0, 0, 0, 0, 4096, 1);
	post(&e, 4, KVS_WORK_PACK, 1, 0, 4096);
	while (fake.jobs() == 0)
		REQUIRE(kvs_now_ms() < until);
	old = e;
	begin(w, &e);
	int fd, bell;
	REQUIRE(!work_begin(w, &fd, &bell));
	fake.hold(0);
	end(&old);
	end(&e);
	begin(w, &e);
	REQUIRE(open_staging(&e, staging, STAGING) == 0);

	/* A slot may not be posted anew while its kernel runs, whatever the sidecar writes: the list is the kernel's. */
	fake.hold(1);
	run_at(&e, 6, 0, 0, 0, 0, 4096, 1);
	post(&e, 6, KVS_WORK_PACK, 1, 0, 4096);
	while (fake.jobs() == 0)
		REQUIRE(kvs_now_ms() < until);
	__atomic_store_n(&((struct kvs_flag *)(e.at + KVS_WORK_DONE))[6].value, e.seq[6], __ATOMIC_SEQ_CST);
	post(&e, 6, KVS_WORK_PACK, 1, 0, 4096);
	REQUIRE(outcome(&e, 6) == KVS_WORK_BAD);
	fake.hold(0);

	/* The context is lost in mid kernel: who waits is told, once is logged, and there is no other. */
	content(&e, 3);
	int before = warnings;
	fake.hold(1);
	run_at(&e, 4, 0, 0, 0, 0, 4096, 1);
	post(&e, 4, KVS_WORK_PACK, 1, 0, 4096);
	while (fake.jobs() == 0)
		REQUIRE(kvs_now_ms() < until);
	fake.break_context(0);
	REQUIRE(outcome(&e, 4) == KVS_WORK_GPU && warnings == before + 1);
	post(&e, 4, KVS_WORK_PACK, 1, 0, 4096);
	REQUIRE(outcome(&e, 4) == KVS_WORK_GPU && warnings == before + 1);
	end(&e);
	work_stop(w);
	work_free(w);
	REQUIRE(fake.live() == 0);
	fake.hold(HOLD_NONE);
	fake.break_context(-1);
	torn();
	fake.break_context(-1);

	/* Memory that belongs to no context: the device's primary one is held for as long. */
	fake.fail("context");
	REQUIRE((w = work_start(regions, 3, says, over, NULL)));
	begin(w, &e);
	REQUIRE(open_staging(&e, staging, STAGING) == 0);
	end(&e);
	work_stop(w);
	work_free(w);
	REQUIRE(fake.live() == 0);

	/* A driver that refuses at the start, or the board's page in the middle of it: whatever was made is given back. */
	const struct {
		const char *call;
		int skip;
	} calls[] = {{"cuPointerGetAttribute", 0}, {"cuMemHostRegister", 0}, {"cuMemHostRegister", 1}, {"cuMemHostGetDevicePointer", 0},
	             {"cuMemHostGetDevicePointer", 1}, {"cuModuleLoadData", 0}, {"memops", 0}};
	for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
		before = warnings;
		fake.fail_later(calls[i].call, calls[i].skip);
		REQUIRE((w = work_start(regions, 3, says, over, NULL)));
		begin(w, &e);
		REQUIRE(open_staging(&e, staging, STAGING) == KVS_WORK_GPU && warnings == before + 1);
		end(&e);
		work_stop(w);
		work_free(w);
		fake.fail("");
		REQUIRE(fake.live() == 0);
	}
	/* Who has a board has its descriptor until it is sent, whoever stops the thread meanwhile: its number could be the engine's by then. */
	REQUIRE((w = work_start(regions, 3, says, over, NULL)));
	REQUIRE(work_begin(w, &fd, &bell));
	work_stop(w);
	REQUIRE(fcntl(fd, F_GETFD) >= 0 && close(fd) == 0);
	REQUIRE(!work_begin(w, &fd, &bell));
	work_free(w);
	REQUIRE(fake.live() == 0 && fake.astray() == 0);
	free(cache);
	free(other);
	free(staging);
	printf("ok\n");
	return 0;
}
