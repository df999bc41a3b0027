/* SPDX-License-Identifier: Apache-2.0
 *
 * The thread that packs and unpacks in the engine's GPU context, the boards of its sessions, and the calls of the client.
 */
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include "work_state.h"

enum {
	LOOK_MS = 20,          /* at the stream, while something runs: nothing reports a context that is lost */
	ARMED_LOOK_NS = 50000, /* while a list is armed */
	CAPTURE_RELAXED = 2,   /* CU_STREAM_CAPTURE_MODE_RELAXED */
};

/* Waits for the session's work, and releases its memory. */
static void close_board(struct work *w, struct board *b)
{
	work_take_back(w, b);
	for (int i = 0; i < STREAMS; i++)
		if (w->streams[i])
			work_fail(w, cu.StreamSynchronize(w->streams[i]), "cuStreamSynchronize");
	w->running = false;
	memset(w->seqs, 0, sizeof w->seqs);
	if (b->registered)
		work_fail(w, cu.MemHostUnregister(b->at), "cuMemHostUnregister");
	if (b->staging)
		work_fail(w, cu.IpcCloseMemHandle(b->staging), "cuIpcCloseMemHandle");
	munmap(b->at, KVS_WORK_BYTES);
	pthread_mutex_lock(&w->mu);
	memset(b, 0, sizeof *b);
	pthread_mutex_unlock(&w->mu);
	w->over(w->arg);
}

/* ---- the thread ---- */

/* Changes to other graphs, or to none: armed lists are taken back first. */
static void change_graph(struct work *w, struct graph *to)
{
	work_take_back(w, NULL);
	w->missed = 0; /* of its pulse, before the first replay */
	pthread_mutex_lock(&w->mu);
	w->graph = to;
	pthread_cond_broadcast(&w->settled);
	pthread_mutex_unlock(&w->mu);
}

/* The board to serve, after those that are over were closed. *stop: none, and the thread is to end. */
static struct board *current(struct work *w, bool *stop)
{
	struct board *live = NULL;
	enum board_state states[2];
	pthread_mutex_lock(&w->mu);
	for (int i = 0; i < 2; i++)
		states[i] = w->boards[i].state;
	*stop = w->stop;
	struct graph *wanted = w->wanted;
	pthread_mutex_unlock(&w->mu);
	if (wanted != w->graph)
		change_graph(w, wanted);
	for (int i = 0; i < 2; i++) {
		if (states[i] == BOARD_ENDING)
			close_board(w, &w->boards[i]);
		else if (states[i] == BOARD_LIVE)
			live = &w->boards[i];
	}
	return live;
}

static void *run(void *arg)
{
	struct work *w = arg;
	int mode = CAPTURE_RELAXED;
	bool stop = false;
	prctl(PR_SET_NAME, "kvspray-work");
	/* While the engine captures a graph in the strict mode, a call of another thread would invalidate the capture. */
	work_fail(w, cu.ThreadExchangeStreamCaptureMode(&mode), "cuThreadExchangeStreamCaptureMode");
	for (;;) {
		struct board *b = current(w, &stop);
		if (stop)
			break;
		work_settle(w);
		if (b && work_take(w, b))
			continue;
		if (b) {
			uint32_t *sleeping = &((struct kvs_work_header *)b->at)->sleeping;
			__atomic_store_n(sleeping, 1, __ATOMIC_SEQ_CST);
			if (work_take(w, b)) {
				__atomic_store_n(sleeping, 0, __ATOMIC_SEQ_CST);
				continue;
			}
		}
		struct pollfd p = {.fd = w->bell, .events = POLLIN};
		const struct timespec soon = {.tv_nsec = ARMED_LOOK_NS}, later = {.tv_nsec = LOOK_MS * 1000000};
		if (ppoll(&p, 1, w->armed ? &soon : w->running ? &later : NULL, NULL) == 1)
			kvs_clear(w->bell);
		if (w->running && (!w->armed || kvs_now_ns() >= w->look_ns)) {
			work_look(w, b);
			w->look_ns = kvs_now_ns() + LOOK_MS * 1000000;
		}
	}
	work_tear_down(w);
	pthread_mutex_lock(&w->mu);
	w->ended = true;
	pthread_cond_broadcast(&w->settled);
	pthread_mutex_unlock(&w->mu);
	return NULL;
}

struct work *work_start(const struct work_region *regions, uint32_t n, void (*log)(void *arg, const char *level, const char *text), void (*over)(void *arg), void *arg)
{
	bool any = false;
	for (uint32_t i = 0; i < n; i++)
		any = any || regions[i].bytes;
	if (!any || cuda_open())
		return NULL;
	struct work *w = calloc(1, sizeof *w);
	if (!w)
		return NULL;
	w->regions = calloc(n, sizeof *w->regions);
	w->region_count = n;
	w->log = log;
	w->over = over;
	w->arg = arg;
	w->bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	pthread_mutex_init(&w->mu, NULL);
	pthread_cond_init(&w->settled, NULL);
	int err = !w->regions || w->bell < 0;
	if (!err) {
		memcpy(w->regions, regions, n * sizeof *regions);
		err = kvs_thread(&w->thread, run, w);
	}
	if (!err)
		return w;
	work_free(w);
	return NULL;
}

bool work_begin(struct work *w, int *memfd, int *bell)
{
	const struct kvs_work_header h = {
		.magic = KVS_WORK_MAGIC,
		.major = KVS_BOARD_MAJOR,
		.minor = KVS_WORK_MINOR,
		.slots = KVS_WORK_SLOTS,
		.runs = KVS_WORK_RUNS,
		.total_bytes = KVS_WORK_BYTES,
	};
	work_end(w);
	pthread_mutex_lock(&w->mu);
	struct board *b = w->boards[0].state == BOARD_NONE ? &w->boards[0] : w->boards[1].state == BOARD_NONE ? &w->boards[1] : NULL;
	void *at = b && !w->stop ? kvs_shared("kvspray-work", KVS_WORK_BYTES, memfd) : NULL;
	if (at) {
		memcpy(at, &h, sizeof h);
		b->at = at;
		b->state = BOARD_LIVE;
		*bell = w->bell;
	}
	pthread_mutex_unlock(&w->mu);
	kvs_wake(w->bell); /* the thread now finds the new board */
	return at != NULL;
}

/* stop: there will be no other board, either. */
static void end_boards(struct work *w, bool stop)
{
	bool any = stop;
	pthread_mutex_lock(&w->mu);
	for (int i = 0; i < 2; i++) {
		if (w->boards[i].state == BOARD_LIVE) {
			w->boards[i].state = BOARD_ENDING;
			any = true;
		}
	}
	w->stop = w->stop || stop;
	pthread_mutex_unlock(&w->mu);
	if (any)
		kvs_wake(w->bell);
}

void work_end(struct work *w)
{
	end_boards(w, false);
}

void work_counts(struct work *w, uint64_t *launched, uint64_t *in_graphs)
{
	*launched = w->launched;
	*in_graphs = w->in_graphs;
}

bool work_graph(struct work *w, struct graph *g)
{
	pthread_mutex_lock(&w->mu);
	struct graph *old = w->wanted;
	bool ours = !g || !old;
	if (ours) {
		w->wanted = g;
		kvs_wake(w->bell);
	}
	while (ours && (g ? w->wanted == g && w->graph != g : old && w->graph == old) && !w->ended)
		pthread_cond_wait(&w->settled, &w->mu);
	pthread_mutex_unlock(&w->mu);
	return ours;
}

bool work_quiet(struct work *w)
{
	bool quiet = true;
	pthread_mutex_lock(&w->mu);
	for (int i = 0; i < 2; i++)
		quiet = quiet && w->boards[i].state != BOARD_ENDING;
	pthread_mutex_unlock(&w->mu);
	return quiet;
}

void work_stop(struct work *w)
{
	end_boards(w, true);
	pthread_join(w->thread, NULL);
}

void work_free(struct work *w)
{
	if (w->bell >= 0)
		close(w->bell);
	free(w->regions);
	free(w);
}
