/* A copy in its stream. The caller's thread puts two stream memory operations there: a write to the slot's `start`, behind the stream's earlier
 * work, and a wait for its `end`, ahead of the later. One thread sees the start, has the sidecar copy, and writes the end. Neither needs a
 * multiprocessor, and the caller waits for nothing. That thread never calls the driver, whose calls can block behind one of the program's that waits
 * for the stream.
 *
 * The lease of a copy ends when the sidecar can write no more of it (kvspray.h, release rule), whether it lives or not. Only then does the driver
 * make the copy again, on a stream of this library's own: not in the caller's, which waits. A second thread does this.
 */
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>

#include "internal.h"
#include "preload.h"

/* A test for each of the two operations builds the library without it, and has to fail. */
#ifndef KVS_MUTANT
#define KVS_MUTANT 0
#endif
enum { MUTANT_NO_END = 1, MUTANT_NO_START = 2 };
#ifndef KVS_AGAIN_MS
#define KVS_AGAIN_MS 60000
#endif
#ifndef KVS_PASS_MS
#define KVS_PASS_MS 5000
#endif

enum {
	SLOTS = 128,      /* copies in streams; more pass by */
	MAX_CONTEXTS = 16,
	WAIT_GEQ = 0,
	CAPTURE_NONE = 0,
	LOOK_NS = 20000,       /* between two looks at the flags: a GPU's write is seen after 5 us */
	LOOK_LATER_NS = 200000, /* in a stream that has not come to its copy for LONG_MS */
	LONG_MS = 5,
	CHECK_MS = 100,      /* between two looks at the contexts */
	AGAIN_MS = KVS_AGAIN_MS, /* for a copy by the driver, since the sidecar's failed */
	CONNECT_MS = 300,    /* for the first session; without it copies pass by until it is there */
	REPLY_BYTES = 64 << 10,
	MAX_FAILURES = 3, /* in a row */
	PASS_MS = KVS_PASS_MS, /* for which copies pass by after them */
};

struct slot {
	uint64_t start; /* the stream's */
	uint8_t pad0[KVS_CACHE_LINE - 8];
	uint64_t end; /* ours */
	uint8_t pad1[KVS_CACHE_LINE - 8];
};

struct context {
	handle context, own; /* own: a stream for copies that are made again */
	devptr flags;        /* the slots as its GPU sees them; 0: it cannot be used */
};

enum op_state { OP_FREE, OP_MAKING, OP_VOID, OP_WAITING, OP_COPYING, OP_FAILED, OP_AGAIN };

struct op {
	enum op_state state;
	bool load;
	uint64_t id, seq, bytes; /* seq: of the slot */
	struct piece one, *pieces; /* pieces: &one, or allocated */
	uint32_t count;
	struct memory *host, *dev;
	struct context *context;
	int64_t lease, since_ms; /* since_ms: it failed */
	uint64_t session;        /* that of its lease */
};

pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t moved = PTHREAD_COND_INITIALIZER;
kvs_client *client;

static pthread_cond_t wanted = PTHREAD_COND_INITIALIZER; /* an op began */
static pthread_cond_t failed = PTHREAD_COND_INITIALIZER; /* an op is for the driver */
static pthread_mutex_t setting_up = PTHREAD_MUTEX_INITIALIZER; /* of callers only: the driver is called with it held */
static struct op ops[SLOTS];                             /* guarded by mu, and the rest */
static uint32_t busy, leases;                            /* not OP_FREE; OP_COPYING */
static struct {
	uint32_t in_a_row;
	int64_t until_ms;
	uint64_t session; /* in which they were */
	bool logged;
} failures;
static uint32_t closed;                                  /* gate_close without gate_open */
static uint64_t last_id;
static struct context contexts[MAX_CONTEXTS];
static uint32_t context_count; /* guarded by setting_up; a context that an op names does not change */
static struct slot *slots;
static int (*stream_query)(handle);
static int (*stream_context)(handle, handle *);
static int (*exchange_mode)(int *);
static int (*context_state)(int, unsigned *, int *);

/* ---- the end of a copy ---- */

static struct slot *slot_of(const struct op *o)
{
	return &slots[o - ops];
}

static void op_free(struct op *o)
{
	if (o->pieces != &o->one)
		free(o->pieces);
	o->pieces = NULL;
	memory_put(o->host);
	memory_put(o->dev);
	o->state = OP_FREE;
	busy--;
}

static void finish(struct op *o)
{
	__atomic_store_n(&slot_of(o)->end, o->seq, __ATOMIC_RELEASE);
	op_free(o);
}

void gate_wait(const int *open)
{
	while (*open)
		pthread_cond_wait(&moved, &mu);
}

static bool under_way(void)
{
	for (struct op *o = ops; o < ops + SLOTS; o++)
		if (o->state == OP_COPYING || o->state == OP_FAILED || o->state == OP_AGAIN)
			return true;
	return false;
}

void gate_drain(void)
{
	struct kvs_info info = {.size = sizeof info};
	struct timespec end;
	kvs_status_read(client, &info);
	clock_gettime(CLOCK_REALTIME, &end);
	end.tv_sec += (time_t)((settings()->deadline_ms + (uint64_t)info.grace_ms) / 1000 + 1);
	while (under_way() && pthread_cond_timedwait(&moved, &mu, &end) == 0)
		;
}

static bool open_until(uint64_t id, handle context)
{
	for (struct op *o = ops; o < ops + SLOTS; o++)
		if (o->state != OP_FREE && o->id <= id && o->context->context == context)
			return true;
	return false;
}

void gate_open(void)
{
	pthread_mutex_lock(&mu);
	closed--;
	pthread_mutex_unlock(&mu);
}

void gate_close(void)
{
	handle here = NULL;
	pthread_mutex_lock(&mu);
	closed++;
	bool idle = busy == 0;
	uint64_t id = last_id;
	pthread_mutex_unlock(&mu);
	if (idle || cu.CtxGetCurrent(&here) != CUDA_OK)
		return;
	pthread_mutex_lock(&mu);
	while (open_until(id, here))
		pthread_cond_wait(&moved, &mu);
	pthread_mutex_unlock(&mu);
}

/* No error can reach the program by the stream, and bytes are missing in it. */
static void give_up(const struct op *o, const char *what, int rc)
{
	print_line("%s: %s (%d), of %llu bytes that the sidecar did not copy either: this process ends, as it would go on with wrong bytes", what,
	    cuda_error_name(rc), rc, (unsigned long long)o->bytes);
	abort();
}

/* With mu held. The lease, if there was one, has ended. */
static void fail(struct op *o)
{
	o->state = OP_FAILED;
	o->since_ms = kvs_now_ms();
	pthread_cond_signal(&failed);
}

/* Whether the context or the process can do nothing more, which the program sees by itself. Any other error may pass. */
static bool fatal(int rc)
{
	static const int all[] = {
		3, 4,                    /* not initialized, deinitialized */
		201, 400, 709,           /* no such context, or none that has this library's stream any more */
		214, 220, 226, 721,      /* of the memory, of the link; contained; of a tensor */
		700, 702, 710, 714, 715, /* of a kernel */
		716, 717, 718, 719,
		810, 911, 999,           /* the client of MPS was ended; a device outside; unknown */
	};
	for (size_t i = 0; i < sizeof all / sizeof *all; i++)
		if (all[i] == rc)
			return true;
	return false;
}

/* Has the driver make the copy. It stays FAILED, and is tried again, where its context cannot be entered now. */
static void again(struct op *o)
{
	handle was = NULL;
	int rc = cu.CtxPushCurrent(o->context->context), state = rc;
	if (rc != CUDA_OK && !fatal(rc))
		return;
	count_again(o->bytes);
	if (rc == CUDA_OK) {
		for (uint32_t i = 0; rc == CUDA_OK && i < o->count; i++)
			rc = driver_copy(&o->pieces[i], o->load, o->context->own);
		state = stream_query(o->context->own);
		cu.CtxPopCurrent(&was);
	}
	if (rc != CUDA_OK && !fatal(rc) && !fatal(state))
		give_up(o, "a copy by the driver failed", rc);
	pthread_mutex_lock(&mu);
	if (rc == CUDA_OK)
		o->state = OP_AGAIN;
	else
		finish(o);
	pthread_mutex_unlock(&mu);
}

/* Whether a stream may never come to it, because of an error. */
static bool before_start(const struct op *o)
{
	return o->state == OP_WAITING || o->state == OP_VOID;
}

/* Ends what the driver has copied again, and what an error in the context has ended. */
static void look_at(struct context *x)
{
	handle was = NULL;
	int rc = cu.CtxPushCurrent(x->context);
	if (rc == CUDA_OK) {
		rc = stream_query(x->own);
		cu.CtxPopCurrent(&was);
	}
	pthread_mutex_lock(&mu);
	for (struct op *o = ops; o < ops + SLOTS; o++) {
		if (o->context != x)
			continue;
		if ((o->state == OP_AGAIN && (rc == CUDA_OK || fatal(rc))) || (before_start(o) && fatal(rc)))
			finish(o);
	}
	pthread_mutex_unlock(&mu);
}

static void look_at_contexts(bool all)
{
	for (struct context *x = contexts; x < contexts + MAX_CONTEXTS; x++) {
		bool some = false;
		pthread_mutex_lock(&mu);
		for (struct op *o = ops; o < ops + SLOTS; o++)
			some |= o->context == x && (o->state == OP_AGAIN || (all && before_start(o)));
		pthread_mutex_unlock(&mu);
		if (some)
			look_at(x);
	}
}

static void pause_ns(long ns)
{
	struct timespec t = {.tv_nsec = ns};
	nanosleep(&t, NULL);
}

/* The thread that calls the driver. */
static void *repair(void *arg)
{
	(void)arg;
	prctl(PR_SET_NAME, "kvspray-again");
	int mode = CAPTURE_MODE_RELAXED; /* queries of this thread disturb no capture of another */
	exchange_mode(&mode);
	int64_t checked = kvs_now_ms();
	for (;;) {
		uint32_t now = 0; /* ops for the driver */
		for (struct op *o = ops; o < ops + SLOTS; o++) {
			pthread_mutex_lock(&mu);
			bool mine = o->state == OP_FAILED;
			now += mine || o->state == OP_AGAIN;
			pthread_mutex_unlock(&mu);
			if (mine)
				again(o);
		}
		bool check = kvs_now_ms() - checked >= CHECK_MS;
		look_at_contexts(check);
		if (check)
			checked = kvs_now_ms();
		if (now) {
			pause_ns(LOOK_NS);
			continue;
		}
		struct timespec end;
		clock_gettime(CLOCK_REALTIME, &end);
		end.tv_nsec += CHECK_MS * 1000000L;
		end.tv_sec += end.tv_nsec / 1000000000;
		end.tv_nsec %= 1000000000;
		pthread_mutex_lock(&mu);
		while (busy == 0)
			pthread_cond_wait(&failed, &mu);
		pthread_cond_timedwait(&failed, &mu, &end);
		pthread_mutex_unlock(&mu);
	}
	return NULL;
}

/* ---- the sidecar's part ---- */

/* Sessions count from 1. */
static uint64_t session_now(void)
{
	struct kvs_info info = {.size = sizeof info};
	return kvs_status_read(client, &info) == 0 ? info.connects : 0;
}

/* Whether copies pass by. Another session is another sidecar, or it was mended. With mu held. */
static bool failing(void)
{
	return failures.in_a_row >= MAX_FAILURES && kvs_now_ms() < failures.until_ms && session_now() == failures.session;
}

/* Whether that is to be logged. With mu held. */
static bool note_failure(uint64_t session)
{
	if (session != session_now())
		return false;
	if (session != failures.session) {
		failures.in_a_row = 0;
		failures.logged = false;
		failures.session = session;
	}
	if (++failures.in_a_row < MAX_FAILURES)
		return false;
	failures.until_ms = kvs_now_ms() + PASS_MS;
	bool first = !failures.logged;
	failures.logged = true;
	return first;
}

/* The reason in the body of a completion. */
static void read_reason(const uint8_t *body, uint32_t bytes, char *out, size_t cap)
{
	struct mpr r = mpr_make(body, bytes);
	uint32_t n = 0, length;
	const char *key, *s;
	out[0] = 0;
	if (!mpr_map(&r, &n))
		return;
	for (; n; n--) {
		if (!mpr_str(&r, &key, &length))
			return;
		bool reason = length == 6 && memcmp(key, "reason", 6) == 0;
		if (reason ? !mpr_str(&r, &s, &length) : !mpr_skip(&r))
			return;
		if (reason) {
			length = length < cap ? length : (uint32_t)cap - 1;
			memcpy(out, s, length);
			out[length] = 0;
		}
	}
}

/* With mu held: the client only writes to its ring. */
static bool submit(struct op *o)
{
	struct mpw w = {0};
	struct memory *src = o->load ? o->host : o->dev, *dst = o->load ? o->dev : o->host;
	uint64_t *rows = malloc(o->count * 3 * sizeof *rows);
	for (uint32_t i = 0; rows && i < o->count; i++) {
		const struct piece *p = &o->pieces[i];
		uint64_t *row = rows + 3 * (size_t)i; /* little-endian, as every host with such a GPU */
		row[0] = (o->load ? p->host : p->dev) - src->addr;
		row[1] = (o->load ? p->dev : p->host) - dst->addr;
		row[2] = p->bytes;
	}
	mpw_map(&w, 5);
	mpw_put_uint(&w, "src", (uint64_t)src->number);
	mpw_put_uint(&w, "dst", (uint64_t)dst->number);
	mpw_put_bin(&w, "blocks", rows, rows ? o->count * 3 * sizeof *rows : 0);
	mpw_put_uint(&w, "deadline_ms", settings()->deadline_ms);
	mpw_put_str(&w, "req", "preload");
	o->lease = w.bad || !rows ? KVS_E_SYS : kvs_submit(client, KVS_REC_COPY, w.buf, (uint32_t)w.len, settings()->deadline_ms);
	free(rows);
	mpw_free(&w);
	o->session = session_now();
	return o->lease > 0;
}

/* Here, because the other thread may be in a call of the driver that does not return. */
static void watch(void)
{
	pthread_mutex_lock(&mu);
	for (struct op *o = ops; o < ops + SLOTS; o++) {
		if ((o->state != OP_FAILED && o->state != OP_AGAIN) || kvs_now_ms() - o->since_ms <= AGAIN_MS)
			continue;
		print_line("the driver has not made a copy of %llu bytes within %d s, and the sidecar did not finish it: this process ends, as it would hang",
		    (unsigned long long)o->bytes, AGAIN_MS / 1000);
		abort();
	}
	pthread_mutex_unlock(&mu);
}

/* Ops whose streams have come to them. Returns whether any has not begun. */
static bool begin(void)
{
	static bool logged;
	bool some = false, unkillable = false;
	for (struct op *o = ops; o < ops + SLOTS; o++) {
		pthread_mutex_lock(&mu);
		bool reached = before_start(o) &&
		               (KVS_MUTANT == MUTANT_NO_START || __atomic_load_n(&slot_of(o)->start, __ATOMIC_ACQUIRE) >= o->seq);
		if (reached && o->state == OP_VOID) {
			finish(o);
		} else if (reached) {
			if (submit(o)) {
				o->state = OP_COPYING;
				leases++;
			} else if (leases == 0 || (o->lease != KVS_E_LIMIT && o->lease != KVS_E_FULL)) { /* else the end of one makes room */
				unkillable |= o->lease == KVS_E_UNKILLABLE;
				fail(o);
			}
		}
		some |= before_start(o);
		pthread_mutex_unlock(&mu);
	}
	if (unkillable && !logged)
		print_line("the driver makes all copies: %s", kvs_strerror(KVS_E_UNKILLABLE));
	logged |= unkillable;
	return some;
}

static void ended(uint64_t lease, uint16_t status, const char *reason)
{
	struct op *o = ops;
	bool log = false;
	pthread_mutex_lock(&mu);
	while (o < ops + SLOTS && (o->state != OP_COPYING || o->lease != (int64_t)lease))
		o++;
	if (o < ops + SLOTS) {
		leases--;
		bool src = strncmp(reason, "COPY.src:", 9) == 0, dst = strncmp(reason, "COPY.dst:", 9) == 0;
		if (status == KVS_REFUSED && (src || dst)) {
			memory_refused(src == o->load ? o->host : o->dev, true);
		} else if (status == KVS_OK) {
			memory_refused(o->host, false);
			memory_refused(o->dev, false);
			failures.in_a_row = 0;
		} else if (status != KVS_LOST) {
			log = note_failure(o->session);
		}
		if (status == KVS_OK)
			finish(o);
		else
			fail(o);
	}
	pthread_mutex_unlock(&mu);
	if (log)
		print_line("the sidecar has failed %d copies in a row: copies pass by for %d s after each more: %.300s", MAX_FAILURES, PASS_MS / 1000, reason);
}

static void take_ends(void)
{
	static uint8_t buf[REPLY_BYTES];
	int64_t n = kvs_poll(client, buf, sizeof buf);
	for (int64_t at = 0; at < n;) {
		struct kvs_record r;
		char reason[320];
		memcpy(&r, buf + at, sizeof r);
		read_reason(buf + at + sizeof r, r.body_bytes, reason, sizeof reason);
		ended(r.lease, r.status, reason);
		at += r.length;
	}
}

static void *run(void *arg)
{
	(void)arg;
	prctl(PR_SET_NAME, "kvspray-preload");
	prctl(PR_SET_TIMERSLACK, 1000); /* ns; else each of its short sleeps is 50 us longer */
	int64_t idle_since = kvs_now_ms();
	for (;;) {
		pthread_mutex_lock(&mu);
		uint32_t before = busy;
		while (busy == 0) {
			pthread_cond_wait(&wanted, &mu);
			idle_since = kvs_now_ms();
		}
		pthread_mutex_unlock(&mu);
		bool waiting = begin();
		take_ends();
		watch();
		int64_t now = kvs_now_ms();
		pthread_mutex_lock(&mu);
		if (busy != before || !waiting)
			idle_since = now;
		pthread_mutex_unlock(&mu);
		pause_ns(now - idle_since > LONG_MS ? LOOK_LATER_NS : LOOK_NS);
	}
	return NULL;
}

/* ---- set-up ---- */

static bool open_client(void)
{
	struct kvs_config config = {.size = sizeof config,
	                            .role = KVS_WORKER,
	                            .socket_path = settings()->socket,
	                            .engine_name = "preload",
	                            .engine_version = "1",
	                            .engine_id = "preload",
	                            .release = KVS_RELEASE,
	                            .ranks = {0, 1, 0, 1, 0, 1, 0, 1, 0, 1},
	                            .layers = 1,
	                            .deadline_ms = settings()->deadline_ms};
	kvs_client *c = NULL;
	pthread_t thread;
	void *lib = dlopen(getenv("KVSPRAY_LIBCUDA") ? getenv("KVSPRAY_LIBCUDA") : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
	if (!lib || cuda_open())
		return false;
	*(void **)&stream_query = kvs_real_dlsym(lib, "cuStreamQuery");
	*(void **)&stream_context = kvs_real_dlsym(lib, "cuStreamGetCtx");
	*(void **)&exchange_mode = kvs_real_dlsym(lib, "cuThreadExchangeStreamCaptureMode");
	*(void **)&context_state = kvs_real_dlsym(lib, "cuDevicePrimaryCtxGetState");
	if (!stream_query || !stream_context || !exchange_mode || !context_state)
		return false;
	void *at = mmap(NULL, SLOTS * sizeof *slots, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (at == MAP_FAILED)
		return false;
	madvise(at, SLOTS * sizeof *slots, MADV_DONTFORK); /* a child's first write would give this process a page that no GPU has mapped */
	slots = at;
	for (struct op *o = ops; o < ops + SLOTS; o++)
		o->pieces = &o->one;
	if (kvs_open(&config, &c) < 0)
		return false;
	if (kvs_start(c, NULL, 0, NULL, 0) < 0) {
		kvs_close(c);
		return false;
	}
	pthread_mutex_lock(&mu);
	client = c;
	pthread_mutex_unlock(&mu);
	if (kvs_thread(&thread, run, NULL) != 0 || kvs_thread(&thread, repair, NULL) != 0)
		return false;
	kvs_wait_connected(c, CONNECT_MS);
	return true;
}

static _Atomic int state; /* of gate_start: 1: on, 2: off */

bool gate_started(void)
{
	return state != 0;
}

bool gate_start(void)
{
	if (!state) {
		pthread_mutex_lock(&setting_up);
		if (!state) {
			bool up = open_client();
			if (!up)
				print_line("off: there is no driver of CUDA 12.3 or later, or no memory for the session");
			state = up ? 1 : 2;
		}
		pthread_mutex_unlock(&setting_up);
	}
	return state == 1;
}

void gate_mode(int *mode)
{
	exchange_mode(mode);
}

bool gate_uses(handle context)
{
	bool found = false;
	pthread_mutex_lock(&setting_up);
	for (uint32_t i = 0; i < context_count; i++)
		found |= contexts[i].context == context;
	pthread_mutex_unlock(&setting_up);
	return found;
}

bool gate_active(int device)
{
	unsigned flags;
	int active = 0;
	pthread_mutex_lock(&mu);
	bool started = client != NULL;
	pthread_mutex_unlock(&mu);
	return started && context_state(device, &flags, &active) == CUDA_OK && active;
}

static bool set_up(struct context *x)
{
	static bool registered;
	int device = 0, memops = 0, low_priority = 0, high_priority = 0;
	if (cu.CtxGetDevice(&device) != CUDA_OK || cu.DeviceGetAttribute(&memops, ATTRIBUTE_64_BIT_STREAM_MEM_OPS, device) != CUDA_OK || !memops)
		return false;
	if (!registered && cu.MemHostRegister(slots, SLOTS * sizeof *slots, HOST_PORTABLE | HOST_DEVICEMAP) != CUDA_OK)
		return false;
	registered = true;
	/* Of the highest priority: with few hardware queues a stream may stand behind one that waits for it. */
	if (cu.CtxGetStreamPriorityRange(&low_priority, &high_priority) != CUDA_OK || cu.StreamCreateWithPriority(&x->own, STREAM_NON_BLOCKING, high_priority) != CUDA_OK)
		return false;
	return cu.MemHostGetDevicePointer(&x->flags, slots, 0) == CUDA_OK;
}

/* That of the calling thread; NULL: it cannot be used. */
static struct context *context_here(void)
{
	handle now = NULL;
	if (cu.CtxGetCurrent(&now) != CUDA_OK || !now)
		return NULL;
	pthread_mutex_lock(&setting_up);
	struct context *x = contexts;
	while (x < contexts + context_count && x->context != now)
		x++;
	if (x == contexts + context_count && context_count < MAX_CONTEXTS) {
		int mode = CAPTURE_MODE_RELAXED;
		exchange_mode(&mode);
		x->context = now;
		if (!set_up(x))
			x->flags = 0;
		exchange_mode(&mode);
		context_count++;
	}
	bool usable = x < contexts + MAX_CONTEXTS && x->flags;
	pthread_mutex_unlock(&setting_up);
	return usable ? x : NULL;
}

/* ---- the caller's part ---- */

/* One slot, with its list. NULL: there is none, and *why. */
static struct op *op_new(const struct piece *pieces, uint32_t n, bool load, struct memory *h, struct memory *d, struct context *x, enum outcome *why)
{
	struct piece *list = n > 1 ? malloc(n * sizeof *list) : NULL;
	*why = OUT_BUSY;
	if (n > 1 && !list)
		return NULL;
	pthread_mutex_lock(&mu);
	struct op *o = ops;
	while (o < ops + SLOTS && o->state != OP_FREE)
		o++;
	bool passes = failing();
	if (closed || passes || o == ops + SLOTS) {
		*why = closed ? OUT_CLOSED : passes ? OUT_FAILING : OUT_BUSY;
		pthread_mutex_unlock(&mu);
		free(list);
		return NULL;
	}
	busy++;
	o->state = OP_MAKING;
	o->id = ++last_id;
	o->seq++;
	o->load = load;
	o->host = h;
	o->dev = d;
	o->context = x;
	o->count = n;
	o->bytes = 0;
	o->pieces = list ? list : &o->one;
	memcpy(o->pieces, pieces, n * sizeof *pieces);
	for (uint32_t i = 0; i < n; i++)
		o->bytes += pieces[i].bytes;
	*why = OUT_CAUGHT;
	pthread_mutex_unlock(&mu);
	return o;
}

static void set_op(struct op *o, enum op_state state)
{
	pthread_mutex_lock(&mu);
	if (state == OP_FREE)
		op_free(o);
	else
		o->state = state;
	pthread_cond_signal(&wanted);
	pthread_cond_signal(&failed);
	pthread_mutex_unlock(&mu);
}

/* The default streams are those of the current context. */
static bool stream_is_here(handle stream)
{
	handle of = NULL, here = NULL;
	return stream == STREAM_LEGACY || stream == STREAM_PER_THREAD ||
	       (stream_context(stream, &of) == CUDA_OK && cu.CtxGetCurrent(&here) == CUDA_OK && of == here);
}

static enum outcome enter(const struct piece *pieces, uint32_t n, bool load, handle stream)
{
	int capture = CAPTURE_NONE;
	enum outcome why = OUT_DRIVER;
	struct memory *h = NULL, *d = NULL;
	if (!gate_start())
		return OUT_DRIVER;
	int rc = cu.StreamIsCapturing(stream, &capture);
	if (rc == CAPTURE_IMPLICIT || capture != CAPTURE_NONE)
		return OUT_CAPTURE; /* in this stream, or one that forbids work in the default stream */
	if (rc != CUDA_OK)
		return OUT_DRIVER;
	if (!stream_is_here(stream))
		return OUT_OTHER_CONTEXT;
	if (!memory_find(&pieces[0], load, &h, &d, &why))
		return why;
	why = OUT_CAUGHT;
	for (uint32_t i = 1; i < n && why == OUT_CAUGHT; i++)
		if (!memory_within(h, pieces[i].host, pieces[i].bytes) || !memory_within(d, pieces[i].dev, pieces[i].bytes))
			why = OUT_MIXED;
	struct context *x = why == OUT_CAUGHT ? context_here() : NULL;
	if (why == OUT_CAUGHT && !x)
		why = OUT_DRIVER;
	struct op *o = x ? op_new(pieces, n, load, h, d, x, &why) : NULL;
	if (!o) {
		pthread_mutex_lock(&mu);
		memory_put(h);
		memory_put(d);
		pthread_mutex_unlock(&mu);
		return why;
	}
	devptr at = x->flags + (devptr)(uintptr_t)slot_of(o) - (devptr)(uintptr_t)slots;
	if (cu.StreamWriteValue64(stream, at + offsetof(struct slot, start), o->seq, 0) != CUDA_OK) {
		o->seq--; /* no stream has written it */
		set_op(o, OP_FREE);
		return OUT_DRIVER;
	}
	if (KVS_MUTANT != MUTANT_NO_END && cu.StreamWaitValue64(stream, at + offsetof(struct slot, end), o->seq, WAIT_GEQ) != CUDA_OK) {
		set_op(o, OP_VOID); /* the slot is free again once the write was seen */
		return OUT_DRIVER;
	}
	set_op(o, OP_WAITING);
	return OUT_CAUGHT;
}

bool gate_copy(enum entry e, const struct piece *pieces, uint32_t n, bool load, handle stream)
{
	uint64_t bytes = 0;
	for (uint32_t i = 0; i < n; i++)
		bytes += pieces[i].bytes;
	enum outcome why = enter(pieces, n, load, stream);
	count(e, why, bytes);
	return why == OUT_CAUGHT;
}
