/* SPDX-License-Identifier: Apache-2.0
 *
 * Serves posted slots: by a launch, or by a captured graph that takes the list as it is replayed.
 */
#include <time.h>

#include "work_state.h"

#ifndef ARMED_US /* a test has replays at about that time */
#define ARMED_US 300
#endif

enum { ARMED_NS = ARMED_US * 1000 }; /* a list waits for a replay; layers that take longer leave it to a launch */

static void refuse(const struct board *b, uint32_t i, uint64_t seq, uint32_t why)
{
	struct kvs_work_slot *s = slot_at(b, i);
	__atomic_store_n(&s->refusal, why, __ATOMIC_RELAXED);
	__atomic_store_n(&s->state, seq << KVS_WORK_STATE_BITS | KVS_WORK_REFUSED, __ATOMIC_RELEASE);
}

/* Whether the sidecar has its done word. */
static bool told(const struct work *w, const struct board *b, uint32_t i)
{
	const struct kvs_flag *done = (const struct kvs_flag *)(b->at + KVS_WORK_DONE);
	return !w->seqs[i] || __atomic_load_n(&done[i].value, __ATOMIC_ACQUIRE) == w->seqs[i];
}

/* ---- lists that captured graphs take ---- */

static struct graph_slot *graph_slot(const struct work *w, uint32_t i)
{
	return &w->graph->at->slots[i];
}

static uint64_t pulse(const struct work *w)
{
	return __atomic_load_n(&w->graph->at->pulse, __ATOMIC_RELAXED);
}

/* Leaves a list to the next layer of a replay. False: no graph is replayed. */
static bool arm(struct work *w, struct board *b, uint32_t i, bool unpack, uint64_t seq, uint32_t blocks)
{
	if (!w->graph || w->graph->context != w->context || pulse(w) == w->missed)
		return false;
	const struct work_list *l = &w->own->lists[i];
	devptr list = w->own_dev + offsetof(struct own, lists) + i * sizeof *l;
	struct graph_slot *s = graph_slot(w, i);
	w->tickets[i] = ++w->ticket;
	w->seqs[i] = seq;
	w->running = true;
	w->arms[i] = (struct arm){b, seq, blocks, unpack, false, kvs_now_ns() + ARMED_NS};
	w->armed++;
	s->list = list + (l->len ? offsetof(struct work_list, bases) : offsetof(struct work_list, runs));
	s->first = list + offsetof(struct work_list, first);
	s->n = l->count;
	s->dense = l->runs[0].dense;
	s->len = l->len;
	s->unpack = unpack;
	s->own = w->own_dev + offsetof(struct own, done) + i * sizeof(struct kvs_flag);
	s->done = b->first + KVS_WORK_DONE + i * sizeof(struct kvs_flag);
	s->seq = seq;
	__atomic_store_n(&s->armed, w->tickets[i], __ATOMIC_RELEASE);
	return true;
}

static void disarm(struct work *w, uint32_t i)
{
	w->arms[i].board = NULL;
	w->armed--;
}

static bool taken(const struct work *w, uint32_t i)
{
	return __atomic_load_n(&graph_slot(w, i)->taken, __ATOMIC_SEQ_CST) == w->tickets[i];
}

enum fate { ARMED, MOVED, OURS };

/* The state of an armed list. OURS: no graph has taken it or will. */
static enum fate fate(struct work *w, uint32_t i, bool revoke)
{
	struct graph_slot *s = graph_slot(w, i);
	uint64_t ticket = w->tickets[i];
	if (revoke && !w->arms[i].revoked) {
		w->arms[i].revoked = true;
		__atomic_store_n(&s->revoked, ticket, __ATOMIC_SEQ_CST); /* ordered before the next load */
		if (!taken(w, i)) {
			w->missed = pulse(w);
			return OURS;
		}
	}
	if (idle(w, i)) {
		w->in_graphs++;
		return MOVED;
	}
	return __atomic_load_n(&s->skipped, __ATOMIC_ACQUIRE) == ticket ? OURS : ARMED;
}

/* Waits until the list is no longer armed. ARMED: the context is lost and runs nothing more. */
static enum fate await_fate(struct work *w, uint32_t i, bool revoke)
{
	const struct timespec pause = {.tv_nsec = 1000};
	enum fate f;
	while ((f = fate(w, i, revoke)) == ARMED) {
		int rc = cu.StreamQuery(w->streams[0]);
		if (rc != NOT_READY && work_fail(w, rc, "cuStreamQuery"))
			break;
		nanosleep(&pause, NULL);
	}
	return f;
}

void work_settle(struct work *w)
{
	int64_t now = w->armed ? kvs_now_ns() : 0;
	for (uint32_t i = 0; i < KVS_WORK_SLOTS && w->armed; i++) {
		struct arm a = w->arms[i];
		enum fate f = a.board ? fate(w, i, now >= a.until_ns) : ARMED;
		if (f == ARMED)
			continue;
		disarm(w, i);
		if (f == OURS && !work_launch(w, a.board, i, a.unpack, a.seq, a.blocks))
			refuse(a.board, i, a.seq, KVS_WORK_GPU);
	}
}

void work_take_back(struct work *w, const struct board *b)
{
	for (uint32_t i = 0; i < KVS_WORK_SLOTS; i++) {
		struct board *of = w->arms[i].board;
		if (!of || (b && of != b))
			continue;
		enum fate f = await_fate(w, i, true);
		struct arm a = w->arms[i];
		disarm(w, i);
		if (f == MOVED || (f == OURS && work_launch(w, of, i, a.unpack, a.seq, a.blocks)))
			continue;
		bool informed = told(w, of, i);
		work_forget(w, i);
		if (!informed)
			refuse(of, i, a.seq, KVS_WORK_GPU);
	}
}

/* Does what a slot of this number asks for, or refuses it. */
static void serve(struct work *w, struct board *b, uint32_t i, uint64_t seq)
{
	const struct kvs_work_slot *s = slot_at(b, i);
	uint32_t op = READ(s->op), blocks = READ(s->blocks), why = KVS_WORK_BAD;
	bool ok = false;
	/* A graph stores the sidecar's done word first, and this process's directly behind it. The former is no proof, because the sidecar can write it. */
	if (w->arms[i].board && told(w, b, i) && taken(w, i) && await_fate(w, i, false) == MOVED)
		disarm(w, i);
	if (op == KVS_WORK_OPEN) {
		ok = work_open_staging(w, b, s, list_at(b, i));
		if (ok)
			__atomic_store_n(&((struct kvs_flag *)(b->at + KVS_WORK_DONE))[i].value, seq, __ATOMIC_RELEASE);
	} else if ((op == KVS_WORK_PACK || op == KVS_WORK_UNPACK) && !w->off && b->staging_bytes && blocks && blocks <= KVS_WORK_MAX_BLOCKS && idle(w, i) && !w->arms[i].board) {
		bool unpack = op == KVS_WORK_UNPACK;
		ok = work_translate(w->regions, w->region_count, s, list_at(b, i), b->staging, b->staging_bytes, &w->own->lists[i]) &&
		     (arm(w, b, i, unpack, seq, blocks) || work_launch(w, b, i, unpack, seq, blocks));
	}
	if (ok)
		return;
	if (w->off)
		why = KVS_WORK_GPU;
	else if (!b->defect)
		w->log(w->arg, "warn", "protocol violation: the sidecar requested invalid work on the GPU; logged once in a session");
	b->defect = true;
	refuse(b, i, seq, why);
}

bool work_take(struct work *w, struct board *b)
{
	bool any = false;
	for (uint32_t i = 0; i < KVS_WORK_SLOTS; i++) {
		/* In one order with `sleeping`, which was set before: Post stores the one and then reads the other. */
		uint64_t *state = &slot_at(b, i)->state, s = __atomic_load_n(state, __ATOMIC_SEQ_CST), seq = s >> KVS_WORK_STATE_BITS;
		if ((s & ((1 << KVS_WORK_STATE_BITS) - 1)) != KVS_WORK_POSTED)
			continue;
		if (__atomic_compare_exchange_n(state, &s, seq << KVS_WORK_STATE_BITS | KVS_WORK_TAKEN, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
			serve(w, b, i, seq);
		any = true;
	}
	return any;
}

void work_look(struct work *w, struct board *b)
{
	bool broken[STREAMS] = {false};
	w->running = w->armed > 0;
	for (int i = 0; i < STREAMS; i++) {
		int rc = cu.StreamQuery(w->streams[i]);
		if (rc == NOT_READY)
			w->running = true;
		else
			broken[i] = work_fail(w, rc, "cuStreamQuery");
	}
	for (uint32_t i = 0; b && i < KVS_WORK_SLOTS; i++) {
		uint64_t seq = w->seqs[i];
		bool informed = told(w, b, i);
		if (!broken[i % STREAMS] || (idle(w, i) && informed))
			continue;
		if (w->arms[i].board)
			disarm(w, i);
		work_forget(w, i);
		if (!informed) /* else the sidecar may have posted the slot again */
			refuse(b, i, seq, KVS_WORK_GPU);
	}
}
