/* SPDX-License-Identifier: Apache-2.0
 *
 * The thread that packs and unpacks in the engine's GPU context.
 */
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include "graph.h"
#include "work.h"

#ifndef ARMED_US /* a test has replays that come by at about that time */
#define ARMED_US 300
#endif

enum {
	THREADS = 512,         /* of a block: as the sidecar launches it */
	STREAMS = 4,           /* slots take them by turns, so that a kernel that waits for room holds up few. [measured, H200] 14.4 GB/s and 2.0% of a
	                        * busy engine, where one stream gave 13.9 and 1.4% */
	LOOK_MS = 20,          /* at the stream, while something runs: a context that broke tells nobody */
	ARMED_NS = ARMED_US * 1000, /* a list waits for a replay; layers that take longer leave it to a launch */
	ARMED_LOOK_NS = 50000, /* meanwhile */
	CAPTURE_RELAXED = 2,   /* CU_STREAM_CAPTURE_MODE_RELAXED */
	IPC_LAZY_PEER_ACCESS = 1,
	NOT_READY = 600,       /* CUDA_ERROR_NOT_READY */
};

enum board_state { BOARD_NONE, BOARD_LIVE, BOARD_ENDING };

struct board {
	enum board_state state; /* guarded by mu; NONE and LIVE: nobody but work_begin and work_end leave them, ENDING: nobody but the thread */
	uint8_t *at;
	/* the thread's own */
	bool registered; /* the first page is */
	bool defect;     /* that the sidecar asked for what is impossible was said */
	devptr first;    /* the first page, as the GPU sees it; 0: OPEN has not come so far */
	devptr staging; /* the sidecar's dense buffer; 0: not opened */
	uint64_t staging_bytes;
};

/* Behind the lists, in memory that the GPU reads and writes and no other process sees. */
struct own {
	struct work_list lists[KVS_WORK_SLOTS];
	struct kvs_flag done[KVS_WORK_SLOTS]; /* tickets */
};

/* A list that waits for the replay of a captured graph. */
struct arm {
	struct board *board; /* NULL: there is none */
	uint64_t seq;
	uint32_t blocks;
	bool unpack;
	bool revoked;
	int64_t until_ns;
};

struct work {
	/* set once */
	struct work_region *regions;
	uint32_t region_count;
	void (*log)(void *, const char *, const char *);
	void (*over)(void *);
	void *arg;
	int bell;
	pthread_t thread;

	pthread_mutex_t mu; /* guards the states of boards, and what follows; held for copies only */
	struct board boards[2]; /* of this session, and of the one before until it is done with */
	bool stop, ended;
	struct graph *wanted; /* by work_graph */
	struct graph *graph;  /* in use; changed by the thread alone */
	pthread_cond_t settled; /* graph is what is wanted, or the thread has ended */
	_Atomic uint64_t launched, in_graphs;

	/* the thread's own */
	handle context, module, streams[STREAMS];
	int device;
	bool retained, off, running;
	handle pack, unpack, pack_uniform, unpack_uniform;
	struct own *own;
	devptr own_dev;
	uint64_t ticket;                  /* of the last launch, over all boards */
	uint64_t tickets[KVS_WORK_SLOTS]; /* of each list's last launch */
	uint64_t seqs[KVS_WORK_SLOTS];    /* ... and its number on the board; 0: none of this board */
	struct arm arms[KVS_WORK_SLOTS];
	uint32_t armed;  /* of arms */
	int64_t look_ns; /* while something is armed: not before */
	uint64_t missed; /* pulse of the graph when a list was not taken: no replay has come by since */
};

/* ---- what the sidecar says ---- */

#define READ(field) __atomic_load_n(&(field), __ATOMIC_RELAXED)

/* Takes what an axis needs off the room on its side, if there is as much. */
static bool reach(uint64_t *before, uint64_t *behind, uint64_t stride, uint32_t steps)
{
	bool back = stride >> 63;
	uint64_t *room = back ? before : behind, span;
	if (__builtin_mul_overflow(back ? -stride : stride, (uint64_t)steps, &span) || span > *room)
		return false;
	*room -= span;
	return true;
}

/* The pieces farthest apart are a sum of both axes. */
static bool within(const struct work_region *r, uint64_t off, const struct kvs_work_run *row, uint64_t outer, uint32_t rows)
{
	if (off > r->bytes || row->len > r->bytes - off)
		return false;
	uint64_t before = off, behind = r->bytes - off - row->len;
	return reach(&before, &behind, row->stride, row->count - 1) && reach(&before, &behind, outer, rows - 1);
}

bool work_translate(const struct work_region *regions, uint32_t n, const struct kvs_work_slot *slot, const struct kvs_work_run *from, uint64_t dense,
                    uint64_t dense_bytes, struct work_list *out)
{
	const uint64_t mask = ((uint64_t)1 << KVS_WORK_WHERE_BITS) - 1;
	uint64_t off = READ(slot->dense), bytes = READ(slot->bytes), used = 0;
	uint32_t runs = READ(slot->runs), pieces = 0, made = 0;
	bool uniform = true;
	if (!runs || runs > KVS_WORK_RUNS || off > dense_bytes || bytes > dense_bytes - off || off % KVS_WORK_ALIGN)
		return false;
	for (uint32_t i = 0; i < runs; i++, made++) {
		struct kvs_work_run r = {READ(from[i].where), READ(from[i].stride), READ(from[i].len), READ(from[i].count)}, rows = {.count = 1};
		if (r.count & KVS_WORK_ROWS) {
			if (++i == runs)
				return false;
			rows = (struct kvs_work_run){READ(from[i].where), READ(from[i].stride), READ(from[i].len), READ(from[i].count)};
			r.count -= KVS_WORK_ROWS;
			if (r.count < 2 || rows.count < 2 || rows.where || rows.len)
				return false;
		}
		uint64_t region = r.where >> KVS_WORK_WHERE_BITS, at = r.where & mask, count = (uint64_t)r.count * rows.count;
		if (region >= n || !r.len || !count || count > KVS_WORK_RUNS - pieces || (r.len | r.stride | rows.stride) % KVS_WORK_ALIGN)
			return false;
		uint64_t base = regions[region].addr + at;
		if (base % KVS_WORK_ALIGN || !within(&regions[region], at, &r, rows.stride, rows.count))
			return false;
		out->runs[made] = (struct work_run){base, r.stride, rows.stride, dense + off + used, r.len, r.count};
		out->bases[made] = base;
		out->first[made] = pieces;
		uniform = uniform && count == 1 && r.len == out->runs[0].len;
		pieces += (uint32_t)count;
		used += r.len * count; /* 2^44 at most, 2^12 times */
	}
	out->first[made] = pieces;
	out->count = made;
	out->len = uniform ? out->runs[0].len : 0;
	return used == bytes;
}

/* ---- the GPU ---- */

/* What fails first is logged, and ends what we do on the GPU. */
static bool fail(struct work *w, int rc, const char *call)
{
	char line[256];
	if (rc == 0)
		return false;
	snprintf(line, sizeof line, "the sidecar packs by itself, which slows this engine: in the engine's context %s: %s (%d)", call, cuda_error_name(rc), rc);
	if (!w->off)
		w->log(w->arg, "warn", line);
	w->off = true;
	return true;
}

#define FAILS(w, call, ...) fail((w), cu.call(__VA_ARGS__), "cu" #call)

static bool set_up(struct work *w)
{
	static const struct {
		const char *name;
		size_t at;
	} kernels[] = {{"kvs_pack_v4", offsetof(struct work, pack)},
	               {"kvs_unpack_v4", offsetof(struct work, unpack)},
	               {"kvs_pack_uniform_v4", offsetof(struct work, pack_uniform)},
	               {"kvs_unpack_uniform_v4", offsetof(struct work, unpack_uniform)}};
	int memops = 0, least, greatest, device;
	uint32_t first = 0;
	if (w->streams[STREAMS - 1] || w->off)
		return !w->off;
	while (!w->regions[first].bytes)
		first++; /* work_start saw one */
	devptr addr = w->regions[first].addr;
	if (FAILS(w, PointerGetAttribute, &w->device, POINTER_DEVICE_ORDINAL, addr))
		return false;
	for (uint32_t i = first; i < w->region_count; i++)
		if (w->regions[i].bytes && (cu.PointerGetAttribute(&device, POINTER_DEVICE_ORDINAL, w->regions[i].addr) != 0 || device != w->device))
			w->regions[i].bytes = 0;
	/* Memory of cuMemCreate belongs to no context: then the one that the runtime API uses. */
	if (cu.PointerGetAttribute(&w->context, POINTER_CONTEXT, addr) != 0 || !w->context) {
		if (FAILS(w, DevicePrimaryCtxRetain, &w->context, w->device))
			return false;
		w->retained = true;
	}
	if (FAILS(w, CtxSetCurrent, w->context) || FAILS(w, DeviceGetAttribute, &memops, ATTRIBUTE_64_BIT_STREAM_MEM_OPS, w->device))
		return false;
	if (!memops)
		return !fail(w, 801 /* CUDA_ERROR_NOT_SUPPORTED */, "64-bit stream memory operations");
	void *own = mmap(NULL, sizeof *w->own, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (own == MAP_FAILED)
		return !fail(w, 2 /* CUDA_ERROR_OUT_OF_MEMORY */, "mmap");
	/* Where the kernel does not copy pinned pages for the child of a fork, our next store would go to a fresh page, and the GPU read the old list. */
	if (madvise(own, sizeof *w->own, MADV_DONTFORK) != 0) {
		munmap(own, sizeof *w->own);
		return !fail(w, 2 /* CUDA_ERROR_OUT_OF_MEMORY */, "madvise");
	}
	if (FAILS(w, MemHostRegister, own, sizeof *w->own, HOST_PORTABLE | HOST_DEVICEMAP)) {
		munmap(own, sizeof *w->own);
		return false;
	}
	w->own = own;
	if (FAILS(w, MemHostGetDevicePointer, &w->own_dev, own, 0) || FAILS(w, ModuleLoadData, &w->module, cuda_kernels))
		return false;
	for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++)
		if (FAILS(w, ModuleGetFunction, (handle *)((char *)w + kernels[i].at), w->module, kernels[i].name))
			return false;
	if (FAILS(w, CtxGetStreamPriorityRange, &least, &greatest))
		return false;
	for (int i = 0; i < STREAMS; i++)
		if (FAILS(w, StreamCreateWithPriority, &w->streams[i], STREAM_NON_BLOCKING, greatest))
			return false;
	return true;
}

static void tear_down(struct work *w)
{
	for (int i = 0; i < STREAMS; i++)
		if (w->streams[i])
			cu.StreamDestroy(w->streams[i]);
	if (w->module)
		cu.ModuleUnload(w->module);
	if (w->own) {
		cu.MemHostUnregister(w->own);
		munmap(w->own, sizeof *w->own);
	}
	if (w->context)
		cu.CtxSetCurrent(NULL);
	if (w->retained)
		cu.DevicePrimaryCtxRelease(w->device);
}

/* Maps the sidecar's dense buffer. False: not; w->off says whether that is the driver's word. */
static bool open_staging(struct work *w, struct board *b, const struct kvs_work_slot *slot, const struct kvs_work_run *list)
{
	struct ipc_handle h;
	devptr p = 0, base = 0;
	size_t size = 0;
	uint64_t bytes = READ(slot->bytes);
	if (b->registered || !bytes)
		return false;
	memcpy(&h, list, sizeof h);
	if (!set_up(w) || FAILS(w, MemHostRegister, b->at, KVS_WORK_LISTS, HOST_PORTABLE | HOST_DEVICEMAP))
		return false;
	b->registered = true;
	if (FAILS(w, MemHostGetDevicePointer, &b->first, b->at, 0))
		return false;
	if (cu.IpcOpenMemHandle(&p, h, IPC_LAZY_PEER_ACCESS) != 0)
		return false; /* a handle that names nothing is no fault of this context */
	b->staging = p;
	/* Its word is not taken for the length: a kernel past the end would take the engine's context. */
	if (FAILS(w, MemGetAddressRange, &base, &size, p))
		return false;
	b->staging_bytes = base == p && bytes <= size ? bytes : 0;
	return b->staging_bytes != 0;
}

static void take_back_all(struct work *w, const struct board *b);

/* The session is over: what runs is waited for, and its memory is let go. */
static void close_board(struct work *w, struct board *b)
{
	take_back_all(w, b);
	for (int i = 0; i < STREAMS; i++)
		if (w->streams[i])
			fail(w, cu.StreamSynchronize(w->streams[i]), "cuStreamSynchronize");
	w->running = false;
	memset(w->seqs, 0, sizeof w->seqs);
	if (b->registered)
		fail(w, cu.MemHostUnregister(b->at), "cuMemHostUnregister");
	if (b->staging)
		fail(w, cu.IpcCloseMemHandle(b->staging), "cuIpcCloseMemHandle");
	munmap(b->at, KVS_WORK_BYTES);
	pthread_mutex_lock(&w->mu);
	memset(b, 0, sizeof *b);
	pthread_mutex_unlock(&w->mu);
	w->over(w->arg);
}

/* ---- slots ---- */

static struct kvs_work_slot *slot_at(const struct board *b, uint32_t i)
{
	return (struct kvs_work_slot *)(b->at + KVS_WORK_SLOT_TABLE) + i;
}

static struct kvs_work_run *list_at(const struct board *b, uint32_t i)
{
	return (struct kvs_work_run *)(b->at + KVS_WORK_LISTS) + (size_t)i * KVS_WORK_RUNS;
}

static void refuse(const struct board *b, uint32_t i, uint64_t seq, uint32_t why)
{
	struct kvs_work_slot *s = slot_at(b, i);
	__atomic_store_n(&s->refusal, why, __ATOMIC_RELAXED);
	__atomic_store_n(&s->state, seq << KVS_WORK_STATE_BITS | KVS_WORK_REFUSED, __ATOMIC_RELEASE);
}

/* Whether the last launch that reads this list is done, by our own word. */
static bool idle(const struct work *w, uint32_t i)
{
	return __atomic_load_n(&w->own->done[i].value, __ATOMIC_ACQUIRE) == w->tickets[i];
}

/* Whether the sidecar has been told so. */
static bool told(const struct work *w, const struct board *b, uint32_t i)
{
	const struct kvs_flag *done = (const struct kvs_flag *)(b->at + KVS_WORK_DONE);
	return !w->seqs[i] || __atomic_load_n(&done[i].value, __ATOMIC_ACQUIRE) == w->seqs[i];
}

/* Nothing of this list runs or will run. */
static void forget(struct work *w, uint32_t i)
{
	w->tickets[i] = __atomic_load_n(&w->own->done[i].value, __ATOMIC_ACQUIRE);
	w->seqs[i] = 0;
}

/* False: the driver refused, and nothing of it runs. */
static bool launch(struct work *w, const struct board *b, uint32_t i, bool unpack, uint64_t seq, uint32_t blocks)
{
	const struct work_list *l = &w->own->lists[i];
	devptr list = w->own_dev + offsetof(struct own, lists) + i * sizeof *l;
	devptr bases = list + offsetof(struct work_list, bases), first = list + offsetof(struct work_list, first);
	uint64_t n = l->count, len = l->len, dense = l->runs[0].dense;
	void *by_runs[] = {&list, &first, &n}, *by_bases[] = {&bases, &n, &dense, &len};
	handle kernel = len ? unpack ? w->unpack_uniform : w->pack_uniform : unpack ? w->unpack : w->pack, stream = w->streams[i % STREAMS];
	w->tickets[i] = ++w->ticket;
	w->seqs[i] = seq;
	w->running = true;
	/* The sidecar's word comes last: it may post the slot anew as soon as it is there. A slot is always in the same stream. */
	if (!FAILS(w, LaunchKernel, kernel, blocks, 1, 1, THREADS, 1, 1, 0, stream, len ? by_bases : by_runs, NULL) &&
	    !FAILS(w, StreamWriteValue64, stream, w->own_dev + offsetof(struct own, done) + i * sizeof(struct kvs_flag), w->ticket, 0) &&
	    !FAILS(w, StreamWriteValue64, stream, b->first + KVS_WORK_DONE + i * sizeof(struct kvs_flag), seq, 0)) {
		w->launched++;
		return true;
	}
	cu.StreamSynchronize(stream);
	forget(w, i);
	return false;
}

/* ---- lists that captured graphs take ---- */

static int64_t now_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static struct graph_slot *graph_slot(const struct work *w, uint32_t i)
{
	return &w->graph->at->slots[i];
}

static uint64_t pulse(const struct work *w)
{
	return __atomic_load_n(&w->graph->at->pulse, __ATOMIC_RELAXED);
}

/* Leaves a list to the next layer of a replay. False: there are none. */
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
	w->arms[i] = (struct arm){b, seq, blocks, unpack, false, now_ns() + ARMED_NS};
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

/* What became of a list that is armed. OURS: no graph has taken it, or will. */
static enum fate fate(struct work *w, uint32_t i, bool revoke)
{
	struct graph_slot *s = graph_slot(w, i);
	uint64_t ticket = w->tickets[i];
	if (revoke && !w->arms[i].revoked) {
		w->arms[i].revoked = true;
		__atomic_store_n(&s->revoked, ticket, __ATOMIC_SEQ_CST); /* not behind what is looked at next */
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

/* Waits for that. ARMED: the context is lost, and runs nothing any more. */
static enum fate await_fate(struct work *w, uint32_t i, bool revoke)
{
	const struct timespec pause = {.tv_nsec = 1000};
	enum fate f;
	while ((f = fate(w, i, revoke)) == ARMED) {
		int rc = cu.StreamQuery(w->streams[0]);
		if (rc != NOT_READY && fail(w, rc, "cuStreamQuery"))
			break;
		nanosleep(&pause, NULL);
	}
	return f;
}

/* Looks at what is armed, and launches what no replay came by for. */
static void settle(struct work *w)
{
	int64_t now = w->armed ? now_ns() : 0;
	for (uint32_t i = 0; i < KVS_WORK_SLOTS && w->armed; i++) {
		struct arm a = w->arms[i];
		enum fate f = a.board ? fate(w, i, now >= a.until_ns) : ARMED;
		if (f == ARMED)
			continue;
		disarm(w, i);
		if (f == OURS && !launch(w, a.board, i, a.unpack, a.seq, a.blocks))
			refuse(a.board, i, a.seq, KVS_WORK_GPU);
	}
}

/* No graph has, or will have, anything of what is armed for a board, or for any. What no graph has taken is launched: whoever posted it waits for it. */
static void take_back_all(struct work *w, const struct board *b)
{
	for (uint32_t i = 0; i < KVS_WORK_SLOTS; i++) {
		struct board *of = w->arms[i].board;
		if (!of || (b && of != b))
			continue;
		enum fate f = await_fate(w, i, true);
		struct arm a = w->arms[i];
		disarm(w, i);
		if (f == MOVED || (f == OURS && launch(w, of, i, a.unpack, a.seq, a.blocks)))
			continue;
		bool knows = told(w, of, i);
		forget(w, i);
		if (!knows)
			refuse(of, i, a.seq, KVS_WORK_GPU);
	}
}

/* Does what a slot of this number asks for, or refuses it. */
static void serve(struct work *w, struct board *b, uint32_t i, uint64_t seq)
{
	const struct kvs_work_slot *s = slot_at(b, i);
	uint32_t op = READ(s->op), blocks = READ(s->blocks), why = KVS_WORK_BAD;
	bool ok = false;
	/* A graph stores the sidecar's word first, and ours right behind it. That word alone proves nothing: the sidecar could have written it. */
	if (w->arms[i].board && told(w, b, i) && taken(w, i) && await_fate(w, i, false) == MOVED)
		disarm(w, i);
	if (op == KVS_WORK_OPEN) {
		ok = open_staging(w, b, s, list_at(b, i));
		if (ok)
			__atomic_store_n(&((struct kvs_flag *)(b->at + KVS_WORK_DONE))[i].value, seq, __ATOMIC_RELEASE);
	} else if ((op == KVS_WORK_PACK || op == KVS_WORK_UNPACK) && !w->off && b->staging_bytes && blocks && blocks <= KVS_WORK_MAX_BLOCKS && idle(w, i) && !w->arms[i].board) {
		bool unpack = op == KVS_WORK_UNPACK;
		ok = work_translate(w->regions, w->region_count, s, list_at(b, i), b->staging, b->staging_bytes, &w->own->lists[i]) &&
		     (arm(w, b, i, unpack, seq, blocks) || launch(w, b, i, unpack, seq, blocks));
	}
	if (ok)
		return;
	if (w->off)
		why = KVS_WORK_GPU;
	else if (!b->defect)
		w->log(w->arg, "warn", "the sidecar asked for work on the GPU that is impossible; this is a defect of it, and said once in a session");
	b->defect = true;
	refuse(b, i, seq, why);
}

/* Takes what is posted. Returns whether there was anything. */
static bool take(struct work *w, struct board *b)
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

/* A context that broke runs nothing any more, and writes no done word: whoever waits for one is told, also where the break came between our
 * word and the sidecar's. */
static void look(struct work *w, struct board *b)
{
	bool broken[STREAMS] = {false};
	w->running = w->armed > 0;
	for (int i = 0; i < STREAMS; i++) {
		int rc = cu.StreamQuery(w->streams[i]);
		if (rc == NOT_READY)
			w->running = true;
		else
			broken[i] = fail(w, rc, "cuStreamQuery");
	}
	for (uint32_t i = 0; b && i < KVS_WORK_SLOTS; i++) {
		uint64_t seq = w->seqs[i];
		bool knows = told(w, b, i);
		if (!broken[i % STREAMS] || (idle(w, i) && knows))
			continue;
		if (w->arms[i].board)
			disarm(w, i);
		forget(w, i);
		if (!knows) /* who does may have posted the slot anew */
			refuse(b, i, seq, KVS_WORK_GPU);
	}
}

/* ---- the thread ---- */

/* Other graphs, or none: what is armed is taken back first. */
static void change_graph(struct work *w, struct graph *to)
{
	take_back_all(w, NULL);
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
	/* While the engine captures a graph in the strict mode, a call of another thread would spoil its capture. */
	fail(w, cu.ThreadExchangeStreamCaptureMode(&mode), "cuThreadExchangeStreamCaptureMode");
	for (;;) {
		struct board *b = current(w, &stop);
		if (stop)
			break;
		settle(w);
		if (b && take(w, b))
			continue;
		if (b) {
			uint32_t *sleeping = &((struct kvs_work_header *)b->at)->sleeping;
			__atomic_store_n(sleeping, 1, __ATOMIC_SEQ_CST);
			if (take(w, b)) {
				__atomic_store_n(sleeping, 0, __ATOMIC_SEQ_CST);
				continue;
			}
		}
		struct pollfd p = {.fd = w->bell, .events = POLLIN};
		const struct timespec soon = {.tv_nsec = ARMED_LOOK_NS}, later = {.tv_nsec = LOOK_MS * 1000000};
		if (ppoll(&p, 1, w->armed ? &soon : w->running ? &later : NULL, NULL) == 1) {
			uint64_t n;
			ssize_t got = read(w->bell, &n, sizeof n);
			(void)got;
		}
		if (w->running && (!w->armed || now_ns() >= w->look_ns)) {
			look(w, b);
			w->look_ns = now_ns() + LOOK_MS * 1000000;
		}
	}
	tear_down(w);
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
		/* The engine's signals are not for us. */
		sigset_t all, old;
		sigfillset(&all);
		pthread_sigmask(SIG_SETMASK, &all, &old);
		err = pthread_create(&w->thread, NULL, run, w);
		pthread_sigmask(SIG_SETMASK, &old, NULL);
	}
	if (!err)
		return w;
	work_free(w);
	return NULL;
}

static void ring(struct work *w)
{
	uint64_t one = 1;
	ssize_t n = write(w->bell, &one, sizeof one);
	(void)n;
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
	int fd = b && !w->stop ? kvs_memfd("kvspray-work", KVS_WORK_BYTES) : -1;
	void *at = fd < 0 ? MAP_FAILED : mmap(NULL, KVS_WORK_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (at != MAP_FAILED) {
		memcpy(at, &h, sizeof h);
		b->at = at;
		b->state = BOARD_LIVE;
		*memfd = fd;
		*bell = w->bell;
	} else if (fd >= 0) {
		close(fd);
	}
	pthread_mutex_unlock(&w->mu);
	ring(w); /* it looks at no board that it does not know */
	return at != MAP_FAILED;
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
		ring(w);
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
		ring(w);
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
