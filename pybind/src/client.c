/* SPDX-License-Identifier: Apache-2.0
 *
 * The client: sessions, leases, the watchdog, and the one background thread.
 *
 * Everything in struct kvs_client below `mu` is guarded by it. The lock is held for copies and non-blocking system calls
 * only, so that an engine thread never waits for the sidecar. Sockets and pidfds are closed by the background thread alone
 * (or after it was joined), so it may poll them without the lock.
 *
 * What holds a lease. Lease.bound is a set of sidecar processes (struct proc) that were told of its blocks and have not been
 * proved harmless since. A process leaves the set when it completes the lease, when it says that an earlier session is fenced,
 * or when its pidfd says that it has exited. A lease is over for the engine only once the set is empty.
 */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "internal.h"

#define BACKOFF_MIN_MS 10
#define BACKOFF_MAX_MS 500
#define BACKOFF_RESET_MS 1000    /* a session that lasted so long was a good one */
#define REFUSED_MIN_MS 2000      /* after an ERROR to HELLO or REGISTER: an upgrade may cure it, doubled each time */
#define REFUSED_MAX_MS 10000
#define HANDSHAKE_TIMEOUT_MS 15000 /* longer than a sidecar's wait for the fence of an earlier session */
#define REPLAY_RETRY_MS 5        /* while the ring is full of leases presented afresh */
#define SEND_RETRY_MS 5          /* while the socket has no room for an AWAIT */
#define KILL_RETRY_MS 1000
#define AWAIT_KEEP_MS 60000      /* an answer outlives its question's ttl by so much */
#define DEFAULT_DEADLINE_MS 30000
#define DEFAULT_PARTNER_MS 10000
#define DEFAULT_GRACE_MS 5000
#define MAX_DURATION_MS 86400000u /* of anything a sidecar states */
#define DEFAULT_SUBMISSION_BYTES (4u << 20)
#define DEFAULT_COMPLETION_BYTES (256u << 10)
#define BUCKETS 1024
#define LOG_LINES 256
#define LOG_LINE_BYTES 256
#define PACKETS_PER_TURN 64
#define BOARD_FDS 4 /* flags, rings, doorbell, bell: the first of a REGISTER packet */
#define STATS_MAX_BYTES (64u << 10)

enum session_state { IDLE, WELCOMING, REGISTERING, READY };

struct lease {
	uint64_t id;
	uint16_t type; /* KVS_REC_INTENT or KVS_REC_EXPECT */
	bool held, cancelled, done;
	uint32_t bound; /* set of procs */
	uint64_t session; /* serial of the session that it was last presented in */
	uint32_t deadline_ms;
	int64_t end_ms;   /* deadline, as a time; of a source it counts from the engine's last word: INTENT, STEP or HOLD */
	int64_t since_ms; /* source: since when the engine waits for it; 0: it does not */
	uint8_t *snap;    /* source: the latest INTENT body */
	uint32_t snap_bytes;
	uint16_t status; /* once done */
	bool synthesised;
	uint8_t *body;
	uint32_t body_bytes;
	struct lease *hash_next, *prev, *next; /* open list, then ready list */
};

struct lease_list {
	struct lease *first, *last;
};

/* One sidecar process. */
struct proc {
	bool used, exited, killed, denied;
	uint8_t boot[16];
	int pidfd; /* -1: none, its exit cannot be proved */
	uint32_t pid;
	int64_t kill_ms; /* of the last attempt */
};

struct await {
	uint8_t key[48]; /* xfer, hash */
	char peer[256];
	uint32_t tokens;
	uint64_t msg; /* id of the message that asked; 0: to be asked */
	int64_t end_ms;
	struct kvs_admission answer;
	struct await *hash_next;
};

struct region {
	uint8_t id[16];
	int32_t kind;
	uint32_t fd_index; /* in the packet; 0: none */
	uint64_t addr, bytes;
	uint8_t handle[KVS_HANDLE_BYTES];
};

struct load {
	int64_t handle; /* 0: free */
	uint32_t first, count;
	uint64_t step;
	int64_t end_ms;
	uint32_t bound; /* the sidecar that was to fill it */
	bool poisoned;
};

struct kvs_client {
	/* set once */
	uint32_t role, layers, fork_gen;
	uint8_t boot[16];
	char path[sizeof ((struct sockaddr_un *)0)->sun_path];
	bool default_path;
	char *engine_name, *engine_version, *engine_id;
	uint32_t ranks[10];
	uint32_t submission_bytes, completion_bytes;
	int flags_fd, bell_fd, ctl_fd;
	_Atomic uint64_t deadlines; /* of kvs_deadlines; written under mu, read without */
	uint8_t *flags;
	uint64_t flags_bytes;
	struct kvs_flag *layer_flags, *load_flags;
	uint64_t *source_epoch;
	struct region *regions;
	uint32_t region_count, region_fd_count;
	int region_fds[KVS_PACKET_MAX_FDS - BOARD_FDS];
	uint8_t *layout;
	uint32_t layout_bytes;
	pthread_t thread;

	pthread_mutex_t mu; /* guards all below */
	pthread_cond_t changed; /* connected went up */
	bool started, closing;

	/* the session */
	enum session_state state;
	uint64_t serial; /* of sessions */
	int sock, doorbell_fd, new_pidfd;
	uint32_t new_pid;
	int proc; /* index, from WELCOME on; else -1 */
	bool draining, replaying;
	char breaking[160]; /* why the session must be replaced; empty: it need not */
	int64_t handshake_end_ms, next_try_ms;
	uint32_t backoff_ms, refused_ms;
	uint64_t msg; /* last message id */
	uint64_t hello_msg, register_msg;
	uint8_t session_id[16];
	uint8_t *rings;
	uint64_t rings_bytes;
	int rings_fd;
	struct kvs_ring_end sub, comp;
	bool ring_bad; /* the sidecar broke it: nothing in it is believed */
	int64_t ready_since_ms;
	uint64_t rng;

	struct proc procs[KVS_MAX_SIDECARS];
	uint64_t next_lease;
	uint32_t lease_limit;
	struct lease *buckets[BUCKETS];
	struct lease_list open, ready;
	uint32_t lease_count, ready_count;
	uint64_t out_seq;
	int64_t due_ms; /* when the background thread wakes by itself */
	uint64_t nudged; /* serial of the session that was replaced because of a late lease */
	int64_t nudge_ms; /* when that was */
	struct load loads[KVS_MAX_LOADS];
	int64_t next_load;
	struct await *await_buckets[BUCKETS];
	uint32_t await_count;
	bool await_unsent;

	struct kvs_info info; /* counters, texts, limits; the rest is filled in by kvs_status_read */
	uint8_t *stats;
	uint32_t stats_bytes;
	char log[LOG_LINES][LOG_LINE_BYTES];
	uint32_t log_head, log_tail;
	uint8_t *packet; /* receive buffer, background thread only */
	uint8_t *record; /* pop buffer */
};

static _Atomic uint32_t fork_gen;
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;

static void in_child(void)
{
	fork_gen++;
}

static void watch_forks(void)
{
	pthread_atfork(NULL, NULL, in_child);
}

#define CHECK(c)                                 \
	do {                                     \
		if (!(c))                        \
			return KVS_E_CLOSED;     \
		if ((c)->fork_gen != fork_gen)   \
			return KVS_E_FORKED;     \
	} while (0)

const char *kvs_strerror(int error)
{
	switch (error) {
	case 0:
		return "ok";
	case KVS_KEPT:
		return "kept until there is a session";
	case KVS_E_ARG:
		return "impossible argument";
	case KVS_E_NOT_CONNECTED:
		return "not connected to a sidecar";
	case KVS_E_FULL:
		return "submission ring is full";
	case KVS_E_DEGRADED:
		return "session is being replaced or the sidecar drains";
	case KVS_E_TOO_BIG:
		return "record exceeds 1 MiB or half the submission ring";
	case KVS_E_UNKNOWN:
		return "no such open lease";
	case KVS_E_LIMIT:
		return "too many open leases, questions or watches";
	case KVS_E_FORKED:
		return "client belongs to the parent process";
	case KVS_E_CLOSED:
		return "client is closed";
	case KVS_E_SYS:
		return "system call failed";
	case KVS_E_BUFFER:
		return "buffer is too small";
	case KVS_E_GPU:
		return "the CUDA driver refused, or there is none";
	}
	return "unknown error";
}

const char *kvs_library_version(void)
{
	return "0.1.0";
}

/* ---- small things ---- */

__attribute__((format(printf, 3, 4))) static void say(kvs_client *c, const char *level, const char *format, ...)
{
	char *line = c->log[c->log_head++ % LOG_LINES];
	if (c->log_head - c->log_tail > LOG_LINES)
		c->log_tail = c->log_head - LOG_LINES;
	int n = snprintf(line, LOG_LINE_BYTES, "%s ", level);
	va_list ap;
	va_start(ap, format);
	vsnprintf(line + n, (size_t)(LOG_LINE_BYTES - n), format, ap);
	va_end(ap);
}

/* Remembers an error for kvs_status_read, and logs it unless it repeats itself. */
__attribute__((format(printf, 2, 3))) static void fail(kvs_client *c, const char *format, ...)
{
	char text[sizeof c->info.error];
	va_list ap;
	va_start(ap, format);
	vsnprintf(text, sizeof text, format, ap);
	va_end(ap);
	if (strcmp(text, c->info.error) == 0)
		return;
	memcpy(c->info.error, text, sizeof text);
	say(c, "warn", "%s", text);
}

static void ring_fd(int fd)
{
	uint64_t one = 1;
	/* An eventfd that is full wakes its reader all the same. */
	ssize_t n = write(fd, &one, sizeof one);
	(void)n;
}

static void clear_fd(int fd)
{
	uint64_t n;
	ssize_t got = read(fd, &n, sizeof n);
	(void)got;
}

static void close_fd(int *fd)
{
	if (*fd >= 0)
		close(*fd);
	*fd = -1;
}

static uint32_t clamp_ms(uint64_t ms, uint32_t otherwise)
{
	if (!ms)
		return otherwise;
	return ms > MAX_DURATION_MS ? MAX_DURATION_MS : (uint32_t)ms;
}

static uint32_t bit(int proc)
{
	return proc < 0 ? 0 : 1u << proc;
}

static bool usable_locked(const kvs_client *c)
{
	return c->state == READY && !c->breaking[0];
}

static bool connected_locked(const kvs_client *c)
{
	return usable_locked(c) && !c->draining && !c->replaying;
}

static void break_session(kvs_client *c, const char *why)
{
	if (c->state == IDLE || c->breaking[0])
		return;
	snprintf(c->breaking, sizeof c->breaking, "%s", why);
	ring_fd(c->ctl_fd);
}

/* The background thread must look at something by then. */
static void due_by(kvs_client *c, int64_t at_ms)
{
	if (at_ms < c->due_ms) {
		c->due_ms = at_ms;
		ring_fd(c->ctl_fd);
	}
}

/* ---- leases ---- */

static void list_add(struct lease_list *l, struct lease *x)
{
	x->next = NULL;
	x->prev = l->last;
	if (l->last)
		l->last->next = x;
	else
		l->first = x;
	l->last = x;
}

static void list_del(struct lease_list *l, struct lease *x)
{
	if (x->prev)
		x->prev->next = x->next;
	else
		l->first = x->next;
	if (x->next)
		x->next->prev = x->prev;
	else
		l->last = x->prev;
}

static struct lease *lease_find(kvs_client *c, uint64_t id)
{
	struct lease *l = c->buckets[id % BUCKETS];
	while (l && l->id != id)
		l = l->hash_next;
	return l;
}

static void lease_free(struct lease *l)
{
	free(l->snap);
	free(l->body);
	free(l);
}

/* Takes a delivered lease out of the table. */
static void lease_forget(kvs_client *c, struct lease *l)
{
	struct lease **at = &c->buckets[l->id % BUCKETS];
	while (*at != l)
		at = &(*at)->hash_next;
	*at = l->hash_next;
	c->lease_count--;
	lease_free(l);
}

static void lease_ready(kvs_client *c, struct lease *l)
{
	list_del(&c->open, l);
	list_add(&c->ready, l);
	c->ready_count++;
}

/* Ends a lease that no process holds any more, in our own name. */
static void lease_end(kvs_client *c, struct lease *l, uint16_t status, const char *reason)
{
	struct mpw w = {0};
	mpw_map(&w, 1);
	mpw_str(&w, "reason");
	mpw_str(&w, reason);
	l->done = true;
	l->status = status;
	l->synthesised = true;
	if (w.bad) {
		mpw_free(&w);
	} else {
		l->body = w.buf;
		l->body_bytes = (uint32_t)w.len;
	}
	lease_ready(c, l);
}

/* A process has left the lease's set. `status` is what the engine gets if nothing else ends the lease. True: it moved to the
 * ready list. */
static bool lease_unbind(kvs_client *c, struct lease *l, uint32_t gone, uint16_t status, const char *reason)
{
	if (!(l->bound & gone))
		return false;
	l->bound &= ~gone;
	if (l->bound)
		return false;
	if (l->done)
		lease_ready(c, l);
	else if (l->type == KVS_REC_EXPECT || l->cancelled)
		lease_end(c, l, status == KVS_FAILED && l->cancelled ? KVS_CANCELLED : status, reason);
	else
		return false; /* a source lease waits for a new session, or for its deadline */
	return true;
}

static void unbind_all(kvs_client *c, uint32_t gone, uint16_t status, const char *reason)
{
	bool any = false;
	for (struct lease *l = c->open.first, *next; l; l = next) {
		next = l->next;
		any |= lease_unbind(c, l, gone, status, reason);
	}
	if (any)
		ring_fd(c->bell_fd);
}

/* ---- load flags ---- */

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

/* Of sidecars that are no more. */
static void poison_of(kvs_client *c, uint32_t gone)
{
	for (int i = 0; i < KVS_MAX_LOADS; i++)
		if (c->loads[i].handle && !c->loads[i].poisoned && (c->loads[i].bound & gone))
			poison(c, &c->loads[i]);
}

/* ---- the completion ring ---- */

static void ring_broken(kvs_client *c, const char *what)
{
	c->info.protocol_errors++;
	fail(c, "sidecar broke the completion ring: %s; its session is replaced", what);
	c->ring_bad = true;
	break_session(c, "protocol error");
}

static void take_completion(kvs_client *c, const struct kvs_record *rec, const uint8_t *body)
{
	if (rec->type != KVS_REC_RECEIVED && rec->type != KVS_REC_SENT) {
		/* A newer minor version may add kinds; what it does not name a lease of ours by is no concern. */
		c->info.dropped++;
		return;
	}
	struct lease *l = lease_find(c, rec->lease);
	if (!l || l->done || l->session != c->serial) {
		c->info.dropped++;
		return;
	}
	uint16_t want = l->type == KVS_REC_EXPECT ? KVS_REC_RECEIVED : KVS_REC_SENT;
	if (rec->type != want || rec->status > KVS_REFUSED || !mp_is_map(body, rec->body_bytes)) {
		ring_broken(c, "completion of the wrong type, status or body");
		return;
	}
	uint8_t *copy = malloc(rec->body_bytes);
	if (copy) {
		memcpy(copy, body, rec->body_bytes);
		l->body = copy;
		l->body_bytes = rec->body_bytes;
	}
	l->done = true;
	l->status = rec->status;
	if (!l->since_ms)
		l->since_ms = kvs_now_ms(); /* an earlier process that still holds it is waited for from now on */
	l->bound &= ~bit(c->proc);
	if (!l->bound)
		lease_ready(c, l);
}

/* Moves what the sidecar has said into the lease table. */
static void drain(kvs_client *c)
{
	if (c->state != READY || !c->rings)
		return;
	/* A ringful at most: a sidecar that writes without end must not hold up the engine. */
	for (uint32_t i = 0; i < c->completion_bytes / sizeof(struct kvs_record) && !c->ring_bad; i++) {
		int64_t n = kvs_ring_pop(&c->comp, c->record, c->completion_bytes);
		if (n == 0)
			return;
		if (n < 0) {
			ring_broken(c, "a record, its length or its sequence number is impossible");
			return;
		}
		struct kvs_record rec;
		memcpy(&rec, c->record, sizeof rec);
		take_completion(c, &rec, c->record + sizeof rec);
	}
}

/* drain by somebody who is not about to return what came. */
static void drain_and_ring(kvs_client *c)
{
	uint32_t before = c->ready_count;
	drain(c);
	if (c->ready_count != before)
		ring_fd(c->bell_fd);
}

/* ---- the submission ring ---- */

static int push(kvs_client *c, uint16_t type, uint64_t lease, const void *body, uint32_t bytes)
{
	uint64_t epoch = __atomic_load_n(c->source_epoch, __ATOMIC_ACQUIRE);
	int rc = kvs_ring_push(&c->sub, type, 0, lease, epoch, body, bytes);
	if (rc == 0) {
		c->info.submitted++;
		if (kvs_ring_wake(&c->sub))
			ring_fd(c->doorbell_fd);
	} else if (rc == KVS_E_FULL) {
		c->info.full++;
	} else if (rc == KVS_E_ARG) {
		c->info.protocol_errors++;
		fail(c, "sidecar broke the submission ring: its tail is impossible; its session is replaced");
		break_session(c, "protocol error");
	}
	return rc;
}

/* A record that must not get lost: without room the session is replaced, and the snapshots say it all in the new one. */
static int push_or_replace(kvs_client *c, uint16_t type, uint64_t lease, const void *body, uint32_t bytes)
{
	if (!usable_locked(c)) {
		c->info.kept++;
		return KVS_KEPT;
	}
	int rc = push(c, type, lease, body, bytes);
	if (rc == 0)
		return 0;
	if (rc == KVS_E_FULL) {
		fail(c, "submission ring of %u bytes is full: the sidecar does not read it; its session is replaced", c->submission_bytes);
		break_session(c, "submission ring full");
	}
	c->info.kept++;
	return KVS_KEPT;
}

static bool record_fits(const kvs_client *c, uint64_t bytes)
{
	uint64_t length = sizeof(struct kvs_record) + bytes + 16; /* a presented snapshot may gain a wider deadline */
	return length <= KVS_RECORD_MAX_BYTES && length <= c->submission_bytes / 2;
}

/* Presents one source lease in the current session. */
static int present(kvs_client *c, struct lease *l, int64_t now)
{
	size_t off, len;
	struct mpw w = {0};
	int64_t left = l->end_ms - now;
	if (mp_find(l->snap, l->snap_bytes, "deadline_ms", &off, &len)) {
		mpw_raw(&w, l->snap, off);
		mpw_uint(&w, left > 1 ? (uint64_t)left : 1);
		mpw_raw(&w, l->snap + off + len, l->snap_bytes - off - len);
	} else {
		mpw_raw(&w, l->snap, l->snap_bytes);
	}
	int rc = w.bad ? KVS_E_FULL : push(c, KVS_REC_INTENT, l->id, w.buf, (uint32_t)w.len);
	mpw_free(&w);
	if (rc == 0) {
		l->session = c->serial;
		l->bound |= bit(c->proc);
		c->info.represented++;
	}
	return rc;
}

/* Whether a record of so many body bytes leaves a quarter of the ring to what the engine says meanwhile. Without that room its next
 * step would find the ring full, the session would be replaced, and all leases would be presented once more, and so on. */
static bool leaves_room(const kvs_client *c, uint64_t bytes)
{
	uint64_t used = c->sub.head - __atomic_load_n(&c->sub.ring->tail, __ATOMIC_ACQUIRE);
	if (!used || used > c->sub.bytes) /* an impossible tail is for push to find */
		return true;
	return used + sizeof(struct kvs_record) + bytes <= c->sub.bytes / 4 * 3;
}

static void replay(kvs_client *c, int64_t now)
{
	if (!c->replaying || !usable_locked(c))
		return;
	for (struct lease *l = c->open.first; l; l = l->next) {
		if (l->type != KVS_REC_INTENT || l->done || l->cancelled || l->session == c->serial)
			continue;
		if (!leaves_room(c, l->snap_bytes))
			return;
		int rc = present(c, l, now);
		if (rc == KVS_E_FULL)
			return;
		if (rc < 0)
			return; /* the session is being replaced */
	}
	c->replaying = false;
	c->info.connects++;
	pthread_cond_broadcast(&c->changed);
	/* Whoever waits for completions must announce its sleep in the new ring. */
	ring_fd(c->bell_fd);
	say(c, "info", "connected to sidecar %s at %s, pid %u", c->info.node, c->path, c->procs[c->proc].pid);
}

/* ---- sidecar processes ---- */

static void proc_release(struct proc *p)
{
	close_fd(&p->pidfd);
	p->used = false;
}

/* The exit of procs[i] is proved. */
static void proc_exited(kvs_client *c, int i)
{
	struct proc *p = &c->procs[i];
	if (c->proc == i)
		drain_and_ring(c); /* what it said before it died counts */
	p->exited = true;
	c->info.sidecar_exits++;
	say(c, "warn", "sidecar pid %u has exited", p->pid);
	poison_of(c, bit(i));
	unbind_all(c, bit(i), KVS_LOST, "the sidecar's exit was proved");
	c->backoff_ms = BACKOFF_MIN_MS; /* whoever comes next is another process */
	if (c->proc == i)
		break_session(c, "the sidecar has exited"); /* somebody else may hold its end of the socket open */
	else
		proc_release(p);
}

static bool proc_bound(const kvs_client *c, int i)
{
	for (const struct lease *l = c->open.first; l; l = l->next)
		if (l->bound & bit(i))
			return true;
	return false;
}

/* The entry for a sidecar that said WELCOME: its old one, or a fresh one that takes over the session's pidfd. -1: the table is
 * full of processes that hold leases. */
static int proc_enter(kvs_client *c, const uint8_t boot[16], bool *known)
{
	int free_at = -1;
	*known = false;
	for (int i = 0; i < KVS_MAX_SIDECARS; i++) {
		struct proc *p = &c->procs[i];
		if (p->used && !p->exited && memcmp(p->boot, boot, 16) == 0) {
			*known = true;
			close_fd(&c->new_pidfd);
			return i;
		}
		if (p->used && !proc_bound(c, i))
			proc_release(p);
		if (!p->used && free_at < 0)
			free_at = i;
	}
	if (free_at < 0)
		return -1;
	struct proc *p = &c->procs[free_at];
	memset(p, 0, sizeof *p);
	p->used = true;
	memcpy(p->boot, boot, 16);
	p->pidfd = c->new_pidfd;
	p->pid = c->new_pid;
	c->new_pidfd = -1;
	return free_at;
}

/* ---- the socket ---- */

static int send_packet(kvs_client *c, uint32_t type, const struct mpw *body, const int *fds, uint32_t nfds)
{
	uint8_t head[4] = {(uint8_t)type, (uint8_t)(type >> 8), (uint8_t)(type >> 16), (uint8_t)(type >> 24)};
	struct iovec iov[2] = {{head, sizeof head}, {body->buf, body->len}};
	union {
		struct cmsghdr align;
		char buf[CMSG_SPACE(sizeof(int) * KVS_PACKET_MAX_FDS)];
	} control;
	struct msghdr msg = {.msg_iov = iov, .msg_iovlen = 2};
	if (body->bad || body->len + sizeof head > KVS_PACKET_MAX_BYTES) {
		errno = EMSGSIZE;
		return -1;
	}
	if (nfds) {
		memset(&control, 0, sizeof control);
		msg.msg_control = control.buf;
		msg.msg_controllen = CMSG_SPACE(sizeof(int) * nfds);
		struct cmsghdr *cm = CMSG_FIRSTHDR(&msg);
		cm->cmsg_level = SOL_SOCKET;
		cm->cmsg_type = SCM_RIGHTS;
		cm->cmsg_len = CMSG_LEN(sizeof(int) * nfds);
		memcpy(CMSG_DATA(cm), fds, sizeof(int) * nfds);
	}
	return sendmsg(c->sock, &msg, MSG_NOSIGNAL | MSG_DONTWAIT) < 0 ? -1 : 0;
}

static int send_hello(kvs_client *c)
{
	static const char *const rank_names[5] = {"dp", "pp", "tp", "pcp", "dcp"};
	const uint32_t version = KVS_PROTOCOL_MAJOR << 16 | KVS_PROTOCOL_MINOR;
	struct mpw w = {0};
	c->hello_msg = ++c->msg;
	mpw_map(&w, 9);
	mpw_str(&w, "id");
	mpw_uint(&w, c->hello_msg);
	mpw_str(&w, "min");
	mpw_uint(&w, version);
	mpw_str(&w, "max");
	mpw_uint(&w, version);
	mpw_str(&w, "role");
	mpw_str(&w, c->role == KVS_WORKER ? "worker" : "scheduler");
	mpw_str(&w, "boot");
	mpw_bin(&w, c->boot, 16);
	mpw_str(&w, "engine");
	mpw_map(&w, 3);
	mpw_str(&w, "name");
	mpw_str(&w, c->engine_name);
	mpw_str(&w, "version");
	mpw_str(&w, c->engine_version);
	mpw_str(&w, "id");
	mpw_str(&w, c->engine_id);
	mpw_str(&w, "ranks");
	mpw_map(&w, 5);
	for (int i = 0; i < 5; i++) {
		mpw_str(&w, rank_names[i]);
		mpw_array(&w, 2);
		mpw_uint(&w, c->ranks[2 * i]);
		mpw_uint(&w, c->ranks[2 * i + 1]);
	}
	mpw_str(&w, "pid");
	mpw_uint(&w, (uint64_t)getpid());
	mpw_str(&w, "features");
	mpw_array(&w, 0);
	int rc = send_packet(c, 1, &w, NULL, 0);
	mpw_free(&w);
	return rc;
}

static void register_body(kvs_client *c, struct mpw *w)
{
	static const char *const kinds[] = {"", "memfd", "adopted", "process", "device"};
	mpw_map(w, 5);
	mpw_str(w, "id");
	mpw_uint(w, c->register_msg);
	mpw_str(w, "session");
	mpw_bin(w, c->session_id, 16);
	mpw_str(w, "regions");
	mpw_array(w, c->region_count);
	for (uint32_t i = 0; i < c->region_count; i++) {
		const struct region *r = &c->regions[i];
		bool process = r->kind == KVS_REGION_PROCESS, device = r->kind == KVS_REGION_DEVICE;
		mpw_map(w, 3 + process + device + (r->fd_index != 0));
		mpw_str(w, "region");
		mpw_bin(w, r->id, 16);
		mpw_str(w, "kind");
		mpw_str(w, kinds[r->kind]);
		mpw_str(w, "bytes");
		mpw_uint(w, r->bytes);
		if (process) {
			mpw_str(w, "addr");
			mpw_uint(w, r->addr);
		}
		if (device) {
			mpw_str(w, "handle");
			mpw_bin(w, r->handle, sizeof r->handle);
		}
		if (r->fd_index) {
			mpw_str(w, "fd");
			mpw_uint(w, r->fd_index);
		}
	}
	mpw_str(w, "layout");
	mpw_raw(w, c->layout, c->layout_bytes);
	mpw_str(w, "fds");
	mpw_map(w, 4);
	mpw_str(w, "flags");
	mpw_uint(w, 0);
	mpw_str(w, "rings");
	mpw_uint(w, 1);
	mpw_str(w, "doorbell");
	mpw_uint(w, 2);
	mpw_str(w, "bell");
	mpw_uint(w, 3);
}

/* Fresh rings and a fresh doorbell for this connection. */
static int make_rings(kvs_client *c)
{
	uint64_t completion = sizeof(struct kvs_rings_header) + sizeof(struct kvs_ring) + c->submission_bytes;
	uint64_t total = completion + sizeof(struct kvs_ring) + c->completion_bytes;
	if (kvs_random(c->session_id, sizeof c->session_id) < 0)
		return -1;
	c->rings_fd = kvs_memfd("kvspray-rings", total);
	if (c->rings_fd < 0)
		return -1;
	void *at = mmap(NULL, total, PROT_READ | PROT_WRITE, MAP_SHARED, c->rings_fd, 0);
	if (at == MAP_FAILED)
		return -1;
	c->rings = at;
	c->rings_bytes = total;
	struct kvs_rings_header h = {
		.magic = KVS_RINGS_MAGIC,
		.major = KVS_BOARD_MAJOR,
		.minor = KVS_BOARD_MINOR,
		.submission = sizeof h,
		.completion = completion,
		.submission_bytes = c->submission_bytes,
		.completion_bytes = c->completion_bytes,
		.total_bytes = total,
	};
	memcpy(h.session, c->session_id, sizeof h.session);
	memcpy(at, &h, sizeof h);
	kvs_ring_attach(&c->sub, (struct kvs_ring *)(c->rings + h.submission), c->submission_bytes);
	kvs_ring_attach(&c->comp, (struct kvs_ring *)(c->rings + h.completion), c->completion_bytes);
	c->doorbell_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	return c->doorbell_fd < 0 ? -1 : 0;
}

static int send_register(kvs_client *c)
{
	int fds[KVS_PACKET_MAX_FDS] = {c->flags_fd, c->rings_fd, c->doorbell_fd, c->bell_fd};
	memcpy(fds + BOARD_FDS, c->region_fds, sizeof(int) * c->region_fd_count);
	struct mpw w = {0};
	c->register_msg = ++c->msg;
	register_body(c, &w);
	int rc = send_packet(c, 3, &w, fds, BOARD_FDS + c->region_fd_count);
	mpw_free(&w);
	return rc;
}

/* Ends the current session. Leases stay bound to its process. */
static void session_end(kvs_client *c, int64_t now, uint32_t wait_ms)
{
	if (c->state == READY)
		drain_and_ring(c);
	close_fd(&c->sock);
	close_fd(&c->doorbell_fd);
	close_fd(&c->rings_fd);
	close_fd(&c->new_pidfd);
	if (c->rings)
		munmap(c->rings, c->rings_bytes);
	c->rings = NULL;
	c->ring_bad = false;
	if (c->state == READY && now - c->ready_since_ms >= BACKOFF_RESET_MS)
		c->backoff_ms = BACKOFF_MIN_MS;
	c->state = IDLE;
	c->breaking[0] = 0;
	c->draining = false;
	c->replaying = false;
	if (c->proc >= 0 && c->procs[c->proc].exited)
		proc_release(&c->procs[c->proc]);
	c->proc = -1;
	for (int i = 0; i < BUCKETS; i++)
		for (struct await *a = c->await_buckets[i]; a; a = a->hash_next)
			if (a->answer.state == KVS_ADMISSION_PENDING)
				a->msg = 0, c->await_unsent = true;
	if (!wait_ms) {
		wait_ms = c->backoff_ms;
		c->backoff_ms = c->backoff_ms * 2 > BACKOFF_MAX_MS ? BACKOFF_MAX_MS : c->backoff_ms * 2;
		/* Ranks of one engine must not come back in step. */
		c->rng = c->rng * 6364136223846793005u + 1442695040888963407u;
		wait_ms += (uint32_t)(c->rng >> 33) % (wait_ms / 2 + 1);
	}
	c->next_try_ms = now + wait_ms;
}

/* Ends a session that will be refused again until somebody mends something. */
static void session_refused(kvs_client *c, int64_t now)
{
	session_end(c, now, c->refused_ms);
	c->refused_ms = c->refused_ms * 2 > REFUSED_MAX_MS ? REFUSED_MAX_MS : c->refused_ms * 2;
}

static void session_begin(kvs_client *c, int64_t now)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	memcpy(addr.sun_path, c->path, sizeof addr.sun_path);
	c->serial++;
	c->msg = 0;
	c->handshake_end_ms = now + HANDSHAKE_TIMEOUT_MS;
	c->sock = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (c->sock < 0) {
		fail(c, "socket: %s", strerror(errno));
		session_end(c, now, 0);
		return;
	}
	int big = KVS_PACKET_MAX_BYTES;
	setsockopt(c->sock, SOL_SOCKET, SO_SNDBUF, &big, sizeof big);
	if (connect(c->sock, (struct sockaddr *)&addr, sizeof addr) < 0) {
		fail(c, "no sidecar at %s: %s", c->path, strerror(errno));
		session_end(c, now, 0);
		return;
	}
	struct ucred cred = {0};
	socklen_t len = sizeof cred;
	if (c->default_path && getsockopt(c->sock, SOL_SOCKET, SO_PEERCRED, &cred, &len) == 0 && cred.uid != 0 && cred.uid != geteuid()) {
		fail(c, "%s belongs to uid %u, not to us (%u): name the socket explicitly if that is meant", c->path, cred.uid, geteuid());
		session_refused(c, now);
		return;
	}
	c->new_pidfd = kvs_pidfd_of_peer(c->sock, &c->new_pid);
	if (c->new_pidfd < 0 && errno == EREMOTE) {
		fail(c, "the sidecar at %s is in another pid namespace and this kernel has no SO_PEERPIDFD, so its death could not be proved: share the "
			"pid namespace (shareProcessNamespace in a pod), or use Linux 6.5 or later", c->path);
		session_refused(c, now);
		return;
	}
	if (c->new_pidfd < 0 && (errno == ESRCH || errno == ENODATA || errno == EINVAL)) {
		/* The listener died between our connect and now. */
		session_end(c, now, 0);
		return;
	}
	if (send_hello(c) < 0) {
		fail(c, "HELLO to %s: %s", c->path, strerror(errno));
		session_end(c, now, 0);
		return;
	}
	c->state = WELCOMING;
}

/* The session is up: registered, or a scheduler that was welcomed. */
static void session_ready(kvs_client *c, int64_t now)
{
	c->state = READY;
	c->ready_since_ms = now;
	c->refused_ms = REFUSED_MIN_MS;
	c->replaying = true;
	c->info.error[0] = 0;
	replay(c, now);
}

struct welcome {
	uint64_t id, version, leases, deadline_ms, partner_ms, grace_ms;
	bool fenced;
	const uint8_t *boot;
	const char *node, *endpoint;
	uint32_t node_bytes, endpoint_bytes;
};

static bool read_limits(struct mpr *r, struct welcome *m)
{
	uint32_t n;
	if (!mpr_map(r, &n))
		return false;
	while (n--) {
		const char *k;
		uint32_t kn;
		if (!mpr_str(r, &k, &kn) || !(mp_key(k, kn, "leases") ? mpr_uint(r, &m->leases) : mpr_skip(r)))
			return false;
	}
	return true;
}

static bool read_welcome(const uint8_t *body, size_t bytes, struct welcome *m)
{
	struct mpr r = mpr_make(body, bytes);
	uint32_t n;
	memset(m, 0, sizeof *m);
	if (!mpr_map(&r, &n))
		return false;
	while (n--) {
		const char *k;
		uint32_t kn, bn = 0;
		if (!mpr_str(&r, &k, &kn))
			return false;
		if (mp_key(k, kn, "id"))
			mpr_uint(&r, &m->id);
		else if (mp_key(k, kn, "version"))
			mpr_uint(&r, &m->version);
		else if (mp_key(k, kn, "boot")) {
			if (mpr_bin(&r, &m->boot, &bn) && bn != 16)
				return false;
		} else if (mp_key(k, kn, "node"))
			mpr_str(&r, &m->node, &m->node_bytes);
		else if (mp_key(k, kn, "endpoint"))
			mpr_str(&r, &m->endpoint, &m->endpoint_bytes);
		else if (mp_key(k, kn, "fenced"))
			mpr_bool(&r, &m->fenced);
		else if (mp_key(k, kn, "limits"))
			read_limits(&r, m);
		else if (mp_key(k, kn, "deadline_ms"))
			mpr_uint(&r, &m->deadline_ms);
		else if (mp_key(k, kn, "partner_ms"))
			mpr_uint(&r, &m->partner_ms);
		else if (mp_key(k, kn, "grace_ms"))
			mpr_uint(&r, &m->grace_ms);
		else
			mpr_skip(&r);
		if (r.bad)
			return false;
	}
	return m->boot != NULL;
}

static void copy_text(char *dst, size_t cap, const char *s, size_t n)
{
	if (n >= cap)
		n = cap - 1;
	if (n)
		memcpy(dst, s, n);
	dst[n] = 0;
}

static void protocol_error(kvs_client *c, int64_t now, const char *what)
{
	c->info.protocol_errors++;
	fail(c, "sidecar at %s sent %s", c->path, what);
	session_end(c, now, 0);
}

static void on_welcome(kvs_client *c, int64_t now, const uint8_t *body, size_t bytes)
{
	struct welcome m;
	if (!read_welcome(body, bytes, &m) || m.id != c->hello_msg) {
		protocol_error(c, now, "a malformed WELCOME");
		return;
	}
	if (m.version >> 16 != KVS_PROTOCOL_MAJOR || (m.version & 0xffff) > KVS_PROTOCOL_MINOR) {
		fail(c, "sidecar chose protocol %u.%u, this library speaks %u.%u: upgrade the older of the two", (unsigned)(m.version >> 16),
		     (unsigned)(m.version & 0xffff), KVS_PROTOCOL_MAJOR, KVS_PROTOCOL_MINOR);
		c->info.refusals++;
		session_refused(c, now);
		return;
	}
	bool known;
	int proc = proc_enter(c, m.boot, &known);
	if (proc < 0) {
		fail(c, "%d earlier sidecar processes still hold leases: no further one is admitted", KVS_MAX_SIDECARS);
		session_end(c, now, 0);
		return;
	}
	if (known) {
		if (m.fenced) {
			unbind_all(c, bit(proc), KVS_FAILED, "the session was replaced; the sidecar has fenced the lease");
		} else if (proc_bound(c, proc)) {
			fail(c, "sidecar pid %u has not fenced the earlier session yet", c->procs[proc].pid);
			session_end(c, now, 0);
			return;
		}
	}
	c->proc = proc;
	if (c->procs[proc].pidfd < 0)
		fail(c, "no pidfd of the sidecar: its death cannot be proved, leases may stay in quarantine");
	memcpy(c->info.sidecar_boot, m.boot, 16);
	copy_text(c->info.node, sizeof c->info.node, m.node, m.node_bytes);
	if (m.endpoint_bytes >= sizeof c->info.endpoint) {
		fail(c, "the sidecar's endpoint has %u bytes, at most %zu: it is not handed out", m.endpoint_bytes, sizeof c->info.endpoint - 1);
		m.endpoint_bytes = 0; /* a part of it would name somebody else */
	}
	copy_text(c->info.endpoint, sizeof c->info.endpoint, m.endpoint, m.endpoint_bytes);
	c->info.version = (uint32_t)m.version;
	c->info.deadline_ms = clamp_ms(m.deadline_ms, c->info.deadline_ms);
	c->info.partner_ms = clamp_ms(m.partner_ms, c->info.partner_ms);
	c->info.grace_ms = clamp_ms(m.grace_ms, c->info.grace_ms);
	c->deadlines = (uint64_t)c->info.deadline_ms << 32 | c->info.partner_ms;
	c->lease_limit = m.leases && m.leases < KVS_MAX_LEASES ? (uint32_t)m.leases : KVS_MAX_LEASES;
	if (c->role == KVS_SCHEDULER) {
		session_ready(c, now);
		return;
	}
	if (make_rings(c) < 0 || send_register(c) < 0) {
		fail(c, "REGISTER to %s: %s", c->path, strerror(errno));
		session_end(c, now, 0);
		return;
	}
	c->state = REGISTERING;
}

/* Reads up to four named values of a map: u64 or str, whichever pointer is set. */
struct want {
	const char *key;
	uint64_t *num;
	const char **str;
	uint32_t *str_bytes;
	bool *flag;
};

static bool read_map(const uint8_t *body, size_t bytes, const struct want *want, int wants)
{
	struct mpr r = mpr_make(body, bytes);
	uint32_t n;
	if (!mpr_map(&r, &n))
		return false;
	while (n--) {
		const char *k;
		uint32_t kn;
		if (!mpr_str(&r, &k, &kn))
			return false;
		int i = 0;
		while (i < wants && !mp_key(k, kn, want[i].key))
			i++;
		bool ok = i == wants          ? mpr_skip(&r)
			  : want[i].num       ? mpr_uint(&r, want[i].num)
			  : want[i].flag      ? mpr_bool(&r, want[i].flag)
					      : mpr_str(&r, want[i].str, want[i].str_bytes);
		if (!ok)
			return false;
	}
	return true;
}

static void on_error(kvs_client *c, int64_t now, const uint8_t *body, size_t bytes)
{
	uint64_t id = 0;
	const char *code = "", *message = "", *field = "", *remedy = "";
	uint32_t code_n = 0, message_n = 0, field_n = 0, remedy_n = 0;
	bool fatal = false;
	struct want want[] = {{.key = "id", .num = &id},
			      {.key = "code", .str = &code, .str_bytes = &code_n},
			      {.key = "message", .str = &message, .str_bytes = &message_n},
			      {.key = "field", .str = &field, .str_bytes = &field_n},
			      {.key = "remedy", .str = &remedy, .str_bytes = &remedy_n},
			      {.key = "fatal", .flag = &fatal}};
	if (!read_map(body, bytes, want, sizeof want / sizeof *want)) {
		protocol_error(c, now, "a malformed ERROR");
		return;
	}
	c->info.refusals++;
	bool answer = c->state != READY && id && (id == c->hello_msg || id == c->register_msg);
	fail(c, "sidecar says %.*s: %.*s%s%.*s%s%.*s", (int)code_n, code, (int)message_n, message, field_n ? "; field " : "", (int)field_n,
	     field, remedy_n ? "; remedy: " : "", (int)remedy_n, remedy);
	for (int i = 0; i < BUCKETS && c->role == KVS_SCHEDULER && c->state == READY && id; i++) {
		for (struct await *a = c->await_buckets[i]; a; a = a->hash_next) {
			if (a->msg != id || a->answer.state != KVS_ADMISSION_PENDING)
				continue;
			a->answer.state = KVS_ADMISSION_REFUSED;
			copy_text(a->answer.message, sizeof a->answer.message, message, message_n);
		}
	}
	/* These pass by themselves; anything else waits for somebody to mend it. */
	bool passing = mp_key(code, code_n, "fencing") || mp_key(code, code_n, "draining") || mp_key(code, code_n, "state") ||
		       mp_key(code, code_n, "superseded") || mp_key(code, code_n, "limit");
	if (!answer && !fatal)
		return;
	if (passing)
		session_end(c, now, 0);
	else
		session_refused(c, now);
}

static void on_registered(kvs_client *c, int64_t now, const uint8_t *body, size_t bytes)
{
	uint64_t id = 0;
	struct want want[] = {{.key = "id", .num = &id}};
	if (c->state != REGISTERING || !read_map(body, bytes, want, 1) || id != c->register_msg) {
		protocol_error(c, now, "an unexpected or malformed REGISTERED");
		return;
	}
	session_ready(c, now);
}

static void on_admitted(kvs_client *c, int64_t now, const uint8_t *body, size_t bytes)
{
	uint64_t id = 0, tokens = 0;
	const char *state = "", *message = "";
	uint32_t state_n = 0, message_n = 0;
	struct want want[] = {{.key = "id", .num = &id},
			      {.key = "state", .str = &state, .str_bytes = &state_n},
			      {.key = "tokens", .num = &tokens},
			      {.key = "message", .str = &message, .str_bytes = &message_n}};
	if (!read_map(body, bytes, want, sizeof want / sizeof *want)) {
		protocol_error(c, now, "a malformed ADMITTED");
		return;
	}
	for (int i = 0; i < BUCKETS; i++) {
		for (struct await *a = c->await_buckets[i]; a; a = a->hash_next) {
			if (a->msg != id || !id || a->answer.state != KVS_ADMISSION_PENDING)
				continue;
			a->answer.state = mp_key(state, state_n, "admitted")  ? KVS_ADMISSION_ADMITTED
					  : mp_key(state, state_n, "refused") ? KVS_ADMISSION_REFUSED
									      : KVS_ADMISSION_GONE;
			a->answer.tokens = tokens > UINT32_MAX ? UINT32_MAX : (uint32_t)tokens;
			copy_text(a->answer.message, sizeof a->answer.message, message, message_n);
			return;
		}
	}
	c->info.dropped++; /* forgotten meanwhile */
}

static void on_packet(kvs_client *c, int64_t now, const uint8_t *p, size_t n)
{
	if (n < 5) {
		protocol_error(c, now, "a packet without a body");
		return;
	}
	uint32_t type = p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
	const uint8_t *body = p + 4;
	n -= 4;
	switch (type) {
	case 2:
		if (c->state == WELCOMING)
			on_welcome(c, now, body, n);
		else
			protocol_error(c, now, "a second WELCOME");
		return;
	case 4:
		on_registered(c, now, body, n);
		return;
	case 5:
		on_error(c, now, body, n);
		return;
	case 7:
		on_admitted(c, now, body, n);
		return;
	case 8:
		c->draining = true;
		say(c, "info", "sidecar pid %u drains", c->proc >= 0 ? c->procs[c->proc].pid : 0);
		return;
	case 9:
		if (n <= STATS_MAX_BYTES && mp_is_map(body, n)) {
			uint8_t *copy = malloc(n);
			if (copy) {
				memcpy(copy, body, n);
				free(c->stats);
				c->stats = copy;
				c->stats_bytes = (uint32_t)n;
			}
		}
		return;
	default: /* a newer minor version */
		return;
	}
}

/* Closes descriptors that came with a packet: a sidecar has none to give. */
static void drop_fds(struct msghdr *msg)
{
	for (struct cmsghdr *cm = CMSG_FIRSTHDR(msg); cm; cm = CMSG_NXTHDR(msg, cm)) {
		if (cm->cmsg_level != SOL_SOCKET || cm->cmsg_type != SCM_RIGHTS)
			continue;
		size_t n = (cm->cmsg_len - CMSG_LEN(0)) / sizeof(int);
		for (size_t i = 0; i < n; i++) {
			int fd;
			memcpy(&fd, CMSG_DATA(cm) + i * sizeof fd, sizeof fd);
			close(fd);
		}
	}
}

static void receive(kvs_client *c, int64_t now)
{
	for (int i = 0; i < PACKETS_PER_TURN && c->state != IDLE; i++) {
		union {
			struct cmsghdr align;
			char buf[CMSG_SPACE(sizeof(int) * KVS_PACKET_MAX_FDS)];
		} control;
		struct iovec iov = {c->packet, KVS_PACKET_MAX_BYTES};
		struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.buf, .msg_controllen = sizeof control.buf};
		ssize_t n = recvmsg(c->sock, &msg, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
		if (n < 0 && (errno == EAGAIN || errno == EINTR))
			return;
		if (n <= 0) {
			fail(c, "sidecar at %s closed the connection%s%s", c->path, n < 0 ? ": " : "", n < 0 ? strerror(errno) : "");
			session_end(c, now, 0);
			return;
		}
		drop_fds(&msg);
		if (msg.msg_flags & MSG_TRUNC) {
			protocol_error(c, now, "a packet of more than 1 MiB");
			return;
		}
		on_packet(c, now, c->packet, (size_t)n);
	}
}

/* ---- admission ---- */

static struct await **await_slot(kvs_client *c, const uint8_t xfer[16], const uint8_t hash[32])
{
	uint8_t key[48];
	uint64_t h, x;
	memcpy(key, xfer, 16);
	memcpy(key + 16, hash, 32);
	memcpy(&h, hash, sizeof h);
	memcpy(&x, xfer, sizeof x);
	struct await **at = &c->await_buckets[(h ^ x) % BUCKETS];
	while (*at && memcmp((*at)->key, key, sizeof key) != 0)
		at = &(*at)->hash_next;
	return at;
}

/* Sends what has not been asked in this session. */
static void ask(kvs_client *c, int64_t now)
{
	if (!usable_locked(c) || !c->await_unsent)
		return;
	for (int i = 0; i < BUCKETS; i++) {
		for (struct await *a = c->await_buckets[i]; a; a = a->hash_next) {
			if (a->msg || a->answer.state != KVS_ADMISSION_PENDING || a->end_ms <= now)
				continue;
			struct mpw w = {0};
			uint64_t id = c->msg + 1;
			mpw_map(&w, 6);
			mpw_str(&w, "id");
			mpw_uint(&w, id);
			mpw_str(&w, "xfer");
			mpw_bin(&w, a->key, 16);
			mpw_str(&w, "hash");
			mpw_bin(&w, a->key + 16, 32);
			mpw_str(&w, "peer");
			mpw_str(&w, a->peer);
			mpw_str(&w, "tokens");
			mpw_uint(&w, a->tokens);
			mpw_str(&w, "ttl_ms");
			mpw_uint(&w, (uint64_t)(a->end_ms - now));
			int rc = send_packet(c, 6, &w, NULL, 0);
			int err = errno;
			mpw_free(&w);
			if (rc < 0) {
				if (err != EAGAIN && err != EINTR)
					break_session(c, strerror(err));
				return;
			}
			a->msg = c->msg = id;
		}
	}
	c->await_unsent = false;
}

/* ---- the watchdog ---- */

static void kill_proc(kvs_client *c, int i, int64_t now)
{
	struct proc *p = &c->procs[i];
	if (!p->used || p->exited || (p->kill_ms && now - p->kill_ms < KILL_RETRY_MS))
		return;
	p->kill_ms = now;
	int rc = p->pid == (uint32_t)getpid() ? -EPERM : p->pidfd < 0 ? -EBADF : kvs_pidfd_kill(p->pidfd);
	if (rc == 0 || rc == -ESRCH) {
		if (!p->killed) {
			c->info.kills++;
			fail(c, "sidecar pid %u was silent past deadline and grace: killed", p->pid);
		}
		p->killed = true;
		p->denied = false;
		return;
	}
	p->denied = true;
	fail(c, "sidecar pid %u is silent past deadline and grace and may not be killed (%s): its leases stay in quarantine until it exits",
	     p->pid, strerror(-rc));
}

/* When the engine's patience with the holders of a lease ends; INT64_MAX: it does not wait. */
static int64_t lease_limit_ms(const kvs_client *c, const struct lease *l)
{
	if (!l->bound)
		return INT64_MAX;
	int64_t end = l->end_ms;
	if (l->type == KVS_REC_INTENT) {
		if (!l->since_ms)
			return INT64_MAX;
		/* A sidecar may count a source's deadline from the moment the engine began to wait. */
		end = l->since_ms + l->deadline_ms;
		if (end < l->end_ms)
			end = l->end_ms;
	}
	return end + c->info.grace_ms;
}

static int64_t earlier(int64_t a, int64_t b)
{
	return a < b ? a : b;
}

/* Looks at every clock of ours. Returns when to look again. */
static int64_t watch(kvs_client *c, int64_t now)
{
	int64_t due = INT64_MAX;
	bool late = false;
	for (struct lease *l = c->open.first; l && !late; l = l->next)
		late = now >= earlier(lease_limit_ms(c, l) - c->info.grace_ms / 2, l->end_ms);
	if (late)
		drain_and_ring(c); /* what is said already counts */
	uint32_t guilty = 0;
	bool ended = false;
	c->info.quarantined = 0;
	for (struct lease *l = c->open.first, *next; l; l = next) {
		next = l->next;
		if (l->type == KVS_REC_INTENT && !l->bound && !l->done && l->session != c->serial) {
			if (now >= l->end_ms) {
				lease_end(c, l, KVS_LOST, "no sidecar until the deadline");
				ended = true;
			} else {
				due = earlier(due, l->end_ms);
			}
			continue;
		}
		int64_t limit = lease_limit_ms(c, l);
		if (limit == INT64_MAX)
			continue;
		/* Half the grace is for a sidecar that lives but has lost track: a new session makes it fence the old one. */
		int64_t nudge = limit - c->info.grace_ms / 2;
		if (now >= nudge && c->nudged != c->serial && usable_locked(c) && (l->bound & bit(c->proc))) {
			fail(c, "lease %llu is open past its deadline; asking sidecar pid %u to fence by a new session", (unsigned long long)l->id,
			     c->procs[c->proc].pid);
			c->nudged = c->serial;
			c->nudge_ms = now;
			break_session(c, "a lease is open past its deadline");
		}
		/* Where we ourselves have not run for a while, the sidecar may not have either (a host that was paused): its half of
		 * the grace counts from the nudge. */
		if (limit < c->nudge_ms + c->info.grace_ms / 2)
			limit = c->nudge_ms + c->info.grace_ms / 2;
		if (now >= limit) {
			guilty |= l->bound;
			due = earlier(due, now + KILL_RETRY_MS);
		} else {
			due = earlier(due, now < nudge ? nudge : limit);
		}
	}
	if (ended)
		ring_fd(c->bell_fd);
	for (int i = 0; i < KVS_MAX_SIDECARS; i++)
		if (guilty & bit(i))
			kill_proc(c, i, now);
	if (guilty) {
		uint32_t denied = 0;
		for (int i = 0; i < KVS_MAX_SIDECARS; i++)
			denied |= c->procs[i].used && c->procs[i].denied ? bit(i) : 0;
		for (struct lease *l = c->open.first; l; l = l->next)
			c->info.quarantined += now >= lease_limit_ms(c, l) && (l->bound & denied);
	}
	for (int i = 0; i < KVS_MAX_LOADS; i++) {
		struct load *w = &c->loads[i];
		if (!w->handle || w->poisoned)
			continue;
		if (now >= w->end_ms)
			poison(c, w);
		else
			due = earlier(due, w->end_ms);
	}
	for (int i = 0; i < BUCKETS && c->await_count; i++) {
		for (struct await **at = &c->await_buckets[i], *a; (a = *at);) {
			if (a->answer.state == KVS_ADMISSION_PENDING && now >= a->end_ms) {
				a->answer.state = KVS_ADMISSION_GONE;
				copy_text(a->answer.message, sizeof a->answer.message, "no answer in time", 17);
			}
			if (now >= a->end_ms + AWAIT_KEEP_MS) {
				*at = a->hash_next;
				free(a);
				c->await_count--;
				continue;
			}
			due = earlier(due, a->answer.state == KVS_ADMISSION_PENDING ? a->end_ms : a->end_ms + AWAIT_KEEP_MS);
			at = &a->hash_next;
		}
	}
	return due;
}

/* ---- the background thread ---- */

/* One turn's descriptors: ctl, the socket, the pidfds. */
#define POLL_FDS (2 + KVS_MAX_SIDECARS)

static void *background(void *arg)
{
	kvs_client *c = arg;
	prctl(PR_SET_NAME, "kvspray");
	pthread_mutex_lock(&c->mu);
	while (!c->closing) {
		int64_t now = kvs_now_ms();
		if (c->breaking[0]) {
			say(c, "info", "session is replaced: %s", c->breaking);
			session_end(c, now, 0);
		}
		if (c->state == IDLE && now >= c->next_try_ms)
			session_begin(c, now);
		if ((c->state == WELCOMING || c->state == REGISTERING) && now >= c->handshake_end_ms) {
			fail(c, "sidecar at %s did not answer within %d ms", c->path, HANDSHAKE_TIMEOUT_MS);
			session_end(c, now, 0);
		}
		replay(c, now);
		ask(c, now);
		int64_t due = watch(c, now); /* last: it looks at what was just presented too */
		if (c->state == IDLE)
			due = earlier(due, c->next_try_ms);
		else if (c->state != READY)
			due = earlier(due, c->handshake_end_ms);
		else if (c->replaying)
			due = earlier(due, now + REPLAY_RETRY_MS);
		else if (c->await_unsent)
			due = earlier(due, now + SEND_RETRY_MS);
		if (c->breaking[0])
			due = now;
		c->due_ms = due;

		struct pollfd fds[POLL_FDS];
		for (int i = 0; i < POLL_FDS; i++)
			fds[i] = (struct pollfd){.fd = -1, .events = POLLIN};
		fds[0].fd = c->ctl_fd;
		fds[1].fd = c->sock;
		for (int i = 0; i < KVS_MAX_SIDECARS; i++)
			if (c->procs[i].used && !c->procs[i].exited)
				fds[2 + i].fd = c->procs[i].pidfd;
		int64_t wait = due == INT64_MAX ? -1 : due > now ? earlier(due - now, INT_MAX) : 0;
		pthread_mutex_unlock(&c->mu);
		int n = poll(fds, POLL_FDS, (int)wait);
		pthread_mutex_lock(&c->mu);
		if (n <= 0)
			continue;
		now = kvs_now_ms();
		if (fds[0].revents)
			clear_fd(c->ctl_fd);
		/* The death first: what follows an end of file is then judged with that knowledge. */
		for (int i = 0; i < KVS_MAX_SIDECARS; i++)
			if (fds[2 + i].revents & POLLIN)
				proc_exited(c, i);
		if (fds[1].revents && c->state != IDLE)
			receive(c, now);
	}
	pthread_mutex_unlock(&c->mu);
	return NULL;
}

/* ---- public: life ---- */

static bool ring_size_ok(uint32_t n)
{
	return n >= KVS_RING_MIN_BYTES && n <= KVS_RING_MAX_BYTES && (n & (n - 1)) == 0;
}

static int set_path(kvs_client *c, const char *path)
{
	int n;
	const char *run = getenv("XDG_RUNTIME_DIR");
	c->default_path = !path;
	if (path)
		n = snprintf(c->path, sizeof c->path, "%s", path);
	else if (run && *run)
		n = snprintf(c->path, sizeof c->path, "%s/kvspray.sock", run);
	else
		n = snprintf(c->path, sizeof c->path, "/tmp/kvspray-%u/kvspray.sock", (unsigned)geteuid());
	return n > 0 && (size_t)n < sizeof c->path ? 0 : KVS_E_ARG;
}

static int make_flags(kvs_client *c)
{
	uint64_t layer = sizeof(struct kvs_flags_header);
	uint64_t load = layer + (uint64_t)(c->layers + 1) * sizeof(struct kvs_flag);
	uint64_t epoch = load + (uint64_t)c->layers * sizeof(struct kvs_flag);
	long page = sysconf(_SC_PAGESIZE);
	uint64_t total = epoch + KVS_CACHE_LINE;
	total = (total + (uint64_t)page - 1) / (uint64_t)page * (uint64_t)page;
	c->flags_fd = kvs_memfd("kvspray-flags", total);
	if (c->flags_fd < 0)
		return -1;
	void *at = mmap(NULL, total, PROT_READ | PROT_WRITE, MAP_SHARED, c->flags_fd, 0);
	if (at == MAP_FAILED)
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

static void client_free(kvs_client *c)
{
	for (int i = 0; i < BUCKETS; i++) {
		for (struct lease *l = c->buckets[i], *next; l; l = next) {
			next = l->hash_next;
			lease_free(l);
		}
		for (struct await *a = c->await_buckets[i], *next; a; a = next) {
			next = a->hash_next;
			free(a);
		}
	}
	for (int i = 0; i < KVS_MAX_SIDECARS; i++)
		close_fd(&c->procs[i].pidfd);
	for (uint32_t i = 0; i < c->region_fd_count; i++)
		close_fd(&c->region_fds[i]);
	if (c->rings)
		munmap(c->rings, c->rings_bytes);
	if (c->flags)
		munmap(c->flags, c->flags_bytes);
	close_fd(&c->sock);
	close_fd(&c->doorbell_fd);
	close_fd(&c->rings_fd);
	close_fd(&c->new_pidfd);
	close_fd(&c->flags_fd);
	close_fd(&c->bell_fd);
	close_fd(&c->ctl_fd);
	free(c->engine_name);
	free(c->engine_version);
	free(c->engine_id);
	free(c->regions);
	free(c->layout);
	free(c->stats);
	free(c->packet);
	free(c->record);
	free(c);
}

int kvs_open(const struct kvs_config *config, kvs_client **out)
{
	if (!config || !out || config->size < sizeof *config)
		return KVS_E_ARG;
	uint32_t sub = config->submission_bytes ? config->submission_bytes : DEFAULT_SUBMISSION_BYTES;
	uint32_t comp = config->completion_bytes ? config->completion_bytes : DEFAULT_COMPLETION_BYTES;
	bool worker = config->role == KVS_WORKER;
	if (!worker && config->role != KVS_SCHEDULER)
		return KVS_E_ARG;
	if ((worker && (config->layers < 1 || config->layers > KVS_MAX_LAYERS)) || !ring_size_ok(sub) || !ring_size_ok(comp))
		return KVS_E_ARG;
	pthread_once(&fork_once, watch_forks);
	kvs_client *c = calloc(1, sizeof *c);
	if (!c)
		return KVS_E_SYS;
	c->role = config->role;
	c->layers = worker ? config->layers : 1; /* a scheduler's flags are never passed on */
	c->fork_gen = fork_gen;
	c->submission_bytes = sub;
	c->completion_bytes = comp;
	c->flags_fd = c->bell_fd = c->ctl_fd = c->sock = c->doorbell_fd = c->rings_fd = c->new_pidfd = -1;
	c->proc = -1;
	c->backoff_ms = BACKOFF_MIN_MS;
	c->refused_ms = REFUSED_MIN_MS;
	c->due_ms = INT64_MAX;
	c->lease_limit = KVS_MAX_LEASES;
	c->info.deadline_ms = clamp_ms(config->deadline_ms, DEFAULT_DEADLINE_MS);
	c->info.partner_ms = DEFAULT_PARTNER_MS;
	c->info.grace_ms = DEFAULT_GRACE_MS;
	c->deadlines = (uint64_t)c->info.deadline_ms << 32 | c->info.partner_ms;
	memcpy(c->ranks, config->ranks, sizeof c->ranks);
	for (int i = 0; i < KVS_MAX_SIDECARS; i++)
		c->procs[i].pidfd = -1;
	int rc = set_path(c, config->socket_path);
	if (rc < 0) {
		client_free(c);
		return rc;
	}
	c->engine_name = strdup(config->engine_name ? config->engine_name : "");
	c->engine_version = strdup(config->engine_version ? config->engine_version : "");
	c->engine_id = strdup(config->engine_id ? config->engine_id : "");
	c->packet = malloc(KVS_PACKET_MAX_BYTES);
	c->record = malloc(comp);
	c->bell_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	c->ctl_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (!c->engine_name || !c->engine_version || !c->engine_id || !c->packet || !c->record || c->bell_fd < 0 || c->ctl_fd < 0 ||
	    kvs_random(c->boot, sizeof c->boot) < 0 || kvs_random(&c->rng, sizeof c->rng) < 0 || make_flags(c) < 0) {
		int err = errno;
		client_free(c);
		errno = err;
		return KVS_E_SYS;
	}
	pthread_condattr_t attr;
	pthread_condattr_init(&attr);
	pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	pthread_cond_init(&c->changed, &attr);
	pthread_condattr_destroy(&attr);
	pthread_mutex_init(&c->mu, NULL);
	*out = c;
	return 0;
}

static int start_locked(kvs_client *c, const struct kvs_region *regions, uint32_t n, const void *layout, uint32_t layout_bytes)
{
	if (c->started) {
		fail(c, "start: the client has been started already");
		return KVS_E_ARG;
	}
	if (c->role == KVS_SCHEDULER ? n != 0 : (n < 1 || n > KVS_MAX_REGIONS || !regions)) {
		fail(c, "start: %u regions; a worker has 1..%d, a scheduler none", n, KVS_MAX_REGIONS);
		return KVS_E_ARG;
	}
	if (c->role == KVS_WORKER && (!layout || !mp_is_map(layout, layout_bytes))) {
		fail(c, "start: the layout is not one msgpack map");
		return KVS_E_ARG;
	}
	if (layout_bytes > KVS_PACKET_MAX_BYTES - 64 * 1024) {
		fail(c, "start: a layout of %u bytes does not fit a packet of %u", layout_bytes, KVS_PACKET_MAX_BYTES);
		return KVS_E_TOO_BIG;
	}
	c->regions = calloc(n ? n : 1, sizeof *c->regions);
	c->layout = malloc(layout_bytes ? layout_bytes : 1);
	if (!c->regions || !c->layout)
		return KVS_E_SYS;
	for (uint32_t i = 0; i < n; i++) {
		const struct kvs_region *r = &regions[i];
		if (r->kind < KVS_REGION_MEMFD || r->kind > KVS_REGION_DEVICE) {
			fail(c, "start: region %u has kind %d, want 1..4", i, r->kind);
			return KVS_E_ARG;
		}
		struct region *to = &c->regions[i];
		memcpy(to->id, r->id, sizeof to->id);
		to->kind = r->kind;
		to->addr = r->addr;
		to->bytes = r->bytes;
		memcpy(to->handle, r->handle, sizeof to->handle);
		c->region_count = i + 1;
		if (r->kind == KVS_REGION_DEVICE && r->fd < 0)
			continue;
		if (c->region_fd_count == KVS_PACKET_MAX_FDS - BOARD_FDS) {
			fail(c, "start: %u regions, at most %d descriptors fit one packet: allocate the cache in one memfd, or span it with one process region",
			     n, KVS_PACKET_MAX_FDS - BOARD_FDS);
			return KVS_E_LIMIT;
		}
		int fd = fcntl(r->fd, F_DUPFD_CLOEXEC, 3);
		if (fd < 0)
			return KVS_E_SYS;
		to->fd_index = BOARD_FDS + c->region_fd_count;
		c->region_fds[c->region_fd_count++] = fd;
	}
	if (layout_bytes)
		memcpy(c->layout, layout, layout_bytes);
	c->layout_bytes = layout_bytes;
	/* The engine's signals are not for us. */
	sigset_t all, old;
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	int err = pthread_create(&c->thread, NULL, background, c);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (err) {
		errno = err;
		return KVS_E_SYS;
	}
	c->started = true;
	return 0;
}

int kvs_start(kvs_client *c, const struct kvs_region *regions, uint32_t n, const void *layout, uint32_t layout_bytes)
{
	CHECK(c);
	pthread_mutex_lock(&c->mu);
	int rc = start_locked(c, regions, n, layout, layout_bytes);
	if (rc < 0 && !c->started) {
		int err = errno;
		for (uint32_t i = 0; i < c->region_fd_count; i++)
			close_fd(&c->region_fds[i]);
		c->region_count = c->region_fd_count = 0;
		free(c->regions);
		free(c->layout);
		c->regions = NULL;
		c->layout = NULL;
		errno = err;
	}
	pthread_mutex_unlock(&c->mu);
	return rc;
}

void kvs_close(kvs_client *c)
{
	if (!c)
		return;
	if (c->fork_gen != fork_gen) {
		client_free(c); /* the thread, and perhaps a held mutex, stayed in the parent */
		return;
	}
	pthread_mutex_lock(&c->mu);
	c->closing = true;
	bool started = c->started;
	ring_fd(c->ctl_fd);
	ring_fd(c->bell_fd);
	pthread_mutex_unlock(&c->mu);
	if (started)
		pthread_join(c->thread, NULL);
	if (c->sock >= 0 && c->state == READY) {
		struct mpw w = {0};
		mpw_map(&w, 1);
		mpw_str(&w, "reason");
		mpw_str(&w, "closed");
		send_packet(c, 8, &w, NULL, 0);
		mpw_free(&w);
	}
	pthread_mutex_destroy(&c->mu);
	pthread_cond_destroy(&c->changed);
	client_free(c);
}

int kvs_connected(kvs_client *c)
{
	CHECK(c);
	pthread_mutex_lock(&c->mu);
	int up = connected_locked(c);
	pthread_mutex_unlock(&c->mu);
	return up;
}

static struct timespec at_ms(int64_t ms)
{
	return (struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
}

int kvs_wait_connected(kvs_client *c, int timeout_ms)
{
	CHECK(c);
	struct timespec end = at_ms(kvs_now_ms() + (timeout_ms < 0 ? 0 : timeout_ms));
	pthread_mutex_lock(&c->mu);
	while (!connected_locked(c) && !c->closing) {
		int rc = timeout_ms < 0 ? pthread_cond_wait(&c->changed, &c->mu) : pthread_cond_timedwait(&c->changed, &c->mu, &end);
		if (rc == ETIMEDOUT)
			break;
	}
	int up = connected_locked(c);
	pthread_mutex_unlock(&c->mu);
	return up;
}

/* ---- public: flags ---- */

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

int kvs_signal_all(kvs_client *c, uint64_t step)
{
	CHECK(c);
	for (uint32_t i = 0; i <= c->layers; i++)
		raise_flag(&c->layer_flags[i], step);
	return 0;
}

void *kvs_flags(kvs_client *c, uint64_t *bytes)
{
	if (!c || c->fork_gen != fork_gen)
		return NULL;
	if (bytes)
		*bytes = c->flags_bytes;
	return c->flags;
}

uint64_t kvs_bump_source_epoch(kvs_client *c)
{
	if (!c || c->fork_gen != fork_gen)
		return 0;
	return __atomic_add_fetch(c->source_epoch, 1, __ATOMIC_SEQ_CST);
}

/* ---- public: leases ---- */

uint64_t kvs_deadlines(kvs_client *c)
{
	return c && c->fork_gen == fork_gen ? c->deadlines : 0;
}

static int open_lease(kvs_client *c, uint16_t type, const void *body, uint32_t bytes, uint32_t deadline_ms, int64_t now, uint64_t *id)
{
	if (!usable_locked(c))
		return c->state == READY ? KVS_E_DEGRADED : KVS_E_NOT_CONNECTED;
	if (c->draining)
		return KVS_E_DEGRADED;
	if (c->replaying)
		return KVS_E_FULL;
	if (c->lease_count >= c->lease_limit)
		return KVS_E_LIMIT;
	struct lease *l = calloc(1, sizeof *l);
	if (!l)
		return KVS_E_LIMIT;
	if (type == KVS_REC_INTENT) {
		l->snap = malloc(bytes);
		if (!l->snap) {
			free(l);
			return KVS_E_LIMIT;
		}
		memcpy(l->snap, body, bytes);
		l->snap_bytes = bytes;
		size_t off, len;
		bool held = false;
		if (mp_find(body, bytes, "held", &off, &len)) {
			struct mpr r = mpr_make((const uint8_t *)body + off, len);
			l->held = mpr_bool(&r, &held) && held;
			l->since_ms = l->held ? now : 0;
		}
	}
	l->id = c->next_lease + 1;
	int rc = push(c, type, l->id, body, bytes);
	if (rc < 0) {
		lease_free(l);
		return rc == KVS_E_ARG ? KVS_E_DEGRADED : rc;
	}
	c->next_lease++;
	l->type = type;
	l->deadline_ms = clamp_ms(deadline_ms, c->info.deadline_ms);
	l->end_ms = now + l->deadline_ms;
	l->bound = bit(c->proc);
	l->session = c->serial;
	l->hash_next = c->buckets[l->id % BUCKETS];
	c->buckets[l->id % BUCKETS] = l;
	list_add(&c->open, l);
	c->lease_count++;
	int64_t limit = lease_limit_ms(c, l);
	if (limit != INT64_MAX)
		due_by(c, limit - c->info.grace_ms / 2);
	*id = l->id;
	return 0;
}

int64_t kvs_submit(kvs_client *c, uint16_t type, const void *body, uint32_t bytes, uint32_t deadline_ms)
{
	CHECK(c);
	if ((type != KVS_REC_INTENT && type != KVS_REC_EXPECT) || !body || !mp_is_map(body, bytes))
		return KVS_E_ARG;
	int64_t now = kvs_now_ms();
	uint64_t id = 0;
	pthread_mutex_lock(&c->mu);
	int rc = c->role != KVS_WORKER ? KVS_E_ARG : !record_fits(c, bytes) ? KVS_E_TOO_BIG : open_lease(c, type, body, bytes, deadline_ms, now, &id);
	pthread_mutex_unlock(&c->mu);
	return rc < 0 ? rc : (int64_t)id;
}

/* Replaces the snapshot of an open source lease. */
static int snapshot(struct lease *l, const struct kvs_snapshot *s, int64_t now)
{
	uint8_t *copy = malloc(s->body_bytes);
	if (!copy)
		return KVS_E_LIMIT;
	memcpy(copy, s->body, s->body_bytes);
	free(l->snap);
	l->snap = copy;
	l->snap_bytes = (uint32_t)s->body_bytes;
	/* A prefill may compute for longer than the deadline; what must not last is the silence after it. */
	if (!l->since_ms)
		l->end_ms = now + l->deadline_ms;
	return 0;
}

static int check_snapshot(const kvs_client *c, const struct kvs_snapshot *s)
{
	if (!s || !s->body || !mp_is_map(s->body, s->body_bytes))
		return KVS_E_ARG;
	return record_fits(c, s->body_bytes) ? 0 : KVS_E_TOO_BIG;
}

static struct lease *open_source(kvs_client *c, uint64_t id)
{
	struct lease *l = lease_find(c, id);
	return l && l->type == KVS_REC_INTENT && !l->done ? l : NULL;
}

int kvs_step(kvs_client *c, const void *body, uint32_t bytes, const struct kvs_snapshot *snapshots, uint32_t n)
{
	CHECK(c);
	if (!body || !mp_is_map(body, bytes) || (n && !snapshots))
		return KVS_E_ARG;
	if (!record_fits(c, bytes))
		return KVS_E_TOO_BIG;
	for (uint32_t i = 0; i < n; i++) {
		int rc = check_snapshot(c, &snapshots[i]);
		if (rc < 0)
			return rc;
	}
	int64_t now = kvs_now_ms();
	pthread_mutex_lock(&c->mu);
	int rc = 0;
	for (uint32_t i = 0; i < n && rc == 0; i++) {
		struct lease *l = open_source(c, snapshots[i].lease);
		if (l && !l->cancelled)
			rc = snapshot(l, &snapshots[i], now);
	}
	if (rc == 0)
		rc = push_or_replace(c, KVS_REC_STEP, 0, body, bytes);
	pthread_mutex_unlock(&c->mu);
	return rc;
}

static const uint8_t empty_map[1] = {0x80};

/* Gives a lease back; the epoch has grown already where it is a source. */
static int give_back(kvs_client *c, struct lease *l, const void *body, uint32_t bytes, int64_t now)
{
	int rc = 0;
	l->cancelled = true;
	if (l->type == KVS_REC_INTENT && !l->since_ms)
		l->since_ms = now;
	/* Where only an earlier process has it, that one's end is awaited; of a source the record is written all the same, because
	 * the epoch has grown. */
	if (usable_locked(c) && l->session != c->serial && l->type == KVS_REC_EXPECT)
		rc = KVS_KEPT;
	else if (usable_locked(c) || l->bound)
		rc = push_or_replace(c, KVS_REC_CANCEL, l->id, body, bytes);
	if (l->bound) {
		due_by(c, lease_limit_ms(c, l) - c->info.grace_ms / 2);
	} else {
		lease_end(c, l, KVS_CANCELLED, "cancelled while no sidecar had it");
		ring_fd(c->bell_fd);
	}
	return rc;
}

static int restate(kvs_client *c, const struct kvs_snapshot *s, uint16_t type)
{
	int64_t now = kvs_now_ms();
	if (!s)
		return KVS_E_ARG;
	int rc = check_snapshot(c, s);
	pthread_mutex_lock(&c->mu);
	struct lease *l = open_source(c, s->lease);
	bool open = l && !l->cancelled;
	if (rc == 0)
		rc = open ? snapshot(l, s, now) : KVS_E_UNKNOWN;
	/* A lease whose snapshot does not say what is so could be presented with blocks that are somebody else's: it ends. */
	bool end = rc < 0 && open;
	/* Blocks are lost whether or not anybody still wants them, and no growth of the epoch is without its record. */
	if (type == KVS_REC_PREEMPT || end)
		kvs_bump_source_epoch(c);
	if (end)
		give_back(c, l, empty_map, sizeof empty_map, now);
	else if (rc < 0 && type == KVS_REC_PREEMPT)
		push_or_replace(c, type, s->lease, empty_map, sizeof empty_map);
	if (rc == 0) {
		if (type == KVS_REC_HOLD && !l->held) {
			l->held = true;
			l->since_ms = now;
			if (l->bound)
				due_by(c, lease_limit_ms(c, l) - c->info.grace_ms / 2);
		}
		if (usable_locked(c) && l->session != c->serial) {
			c->info.kept++; /* it will be presented as it is now */
			rc = KVS_KEPT;
		} else {
			rc = push_or_replace(c, type, l->id, empty_map, sizeof empty_map);
		}
	}
	pthread_mutex_unlock(&c->mu);
	return rc;
}

int kvs_preempt(kvs_client *c, const struct kvs_snapshot *s)
{
	CHECK(c);
	return restate(c, s, KVS_REC_PREEMPT);
}

int kvs_hold(kvs_client *c, const struct kvs_snapshot *s)
{
	CHECK(c);
	return restate(c, s, KVS_REC_HOLD);
}

int kvs_cancel(kvs_client *c, uint64_t lease, const char *reason)
{
	CHECK(c);
	int64_t now = kvs_now_ms();
	struct mpw w = {0};
	mpw_map(&w, 1);
	mpw_str(&w, "reason");
	mpw_strn(&w, reason ? reason : "", reason ? strnlen(reason, 1024) : 0);
	if (w.bad) {
		mpw_free(&w);
		return KVS_E_LIMIT;
	}
	int rc = 0;
	pthread_mutex_lock(&c->mu);
	struct lease *l = lease_find(c, lease);
	if (!l || l->done) {
		rc = KVS_E_UNKNOWN;
	} else if (!l->cancelled) {
		if (l->type == KVS_REC_INTENT)
			kvs_bump_source_epoch(c);
		rc = give_back(c, l, w.buf, (uint32_t)w.len, now);
	}
	pthread_mutex_unlock(&c->mu);
	mpw_free(&w);
	return rc;
}

int64_t kvs_poll(kvs_client *c, void *buf, uint64_t cap)
{
	CHECK(c);
	uint64_t used = 0;
	int64_t rc = 0;
	pthread_mutex_lock(&c->mu);
	drain(c);
	while (c->ready.first) {
		struct lease *l = c->ready.first;
		const uint8_t *body = l->body ? l->body : empty_map;
		uint32_t bytes = l->body ? l->body_bytes : sizeof empty_map;
		uint64_t length = (sizeof(struct kvs_record) + (uint64_t)bytes + 7) & ~7ull;
		if (length > cap - used) {
			rc = used ? 0 : KVS_E_BUFFER;
			break;
		}
		struct kvs_record rec = {
			.length = (uint32_t)length,
			.type = l->type == KVS_REC_EXPECT ? KVS_REC_RECEIVED : KVS_REC_SENT,
			.status = l->status,
			.seq = ++c->out_seq,
			.lease = l->id,
			.body_bytes = bytes,
		};
		uint8_t *at = (uint8_t *)buf + used;
		memcpy(at, &rec, sizeof rec);
		memcpy(at + sizeof rec, body, bytes);
		memset(at + sizeof rec + bytes, 0, length - sizeof rec - bytes);
		used += length;
		c->info.completed++;
		c->info.synthesised += l->synthesised;
		list_del(&c->ready, l);
		c->ready_count--;
		lease_forget(c, l);
	}
	pthread_mutex_unlock(&c->mu);
	return rc < 0 ? rc : (int64_t)used;
}

int kvs_wait(kvs_client *c, int timeout_ms)
{
	CHECK(c);
	int64_t end = timeout_ms < 0 ? INT64_MAX : kvs_now_ms() + timeout_ms;
	for (;;) {
		pthread_mutex_lock(&c->mu);
		drain(c);
		bool closing = c->closing, there = c->ready.first != NULL;
		bool again = !there && usable_locked(c) && c->rings && !kvs_ring_sleep(&c->comp);
		pthread_mutex_unlock(&c->mu);
		if (there)
			return 1;
		int64_t now = kvs_now_ms();
		if (closing || now >= end)
			return 0;
		if (again)
			continue;
		struct pollfd p = {.fd = c->bell_fd, .events = POLLIN};
		int64_t left = end == INT64_MAX ? -1 : earlier(end - now, INT_MAX);
		if (poll(&p, 1, (int)left) > 0)
			clear_fd(c->bell_fd);
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
		*w = (struct load){++c->next_load, first, count, step, now + clamp_ms(timeout_ms, DEFAULT_DEADLINE_MS), bit(c->proc), false};
		due_by(c, w->end_ms);
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

int kvs_load_reset(kvs_client *c, uint32_t first, uint32_t count)
{
	CHECK(c);
	if (c->role != KVS_WORKER || first > c->layers || count > c->layers - first)
		return KVS_E_ARG;
	for (uint32_t i = first; i < first + count; i++)
		__atomic_store_n(&c->load_flags[i].value, 0, __ATOMIC_RELEASE);
	return 0;
}

/* ---- public: admission ---- */

/* Makes room for a question: of those that are answered, the one whose time ends first goes. */
static void await_evict(kvs_client *c)
{
	struct await **oldest = NULL;
	for (int i = 0; i < BUCKETS; i++)
		for (struct await **at = &c->await_buckets[i]; *at; at = &(*at)->hash_next)
			if ((*at)->answer.state != KVS_ADMISSION_PENDING && (!oldest || (*at)->end_ms < (*oldest)->end_ms))
				oldest = at;
	if (!oldest)
		return;
	struct await *a = *oldest;
	*oldest = a->hash_next;
	free(a);
	c->await_count--;
}

int kvs_await(kvs_client *c, const uint8_t xfer[16], const uint8_t hash[32], const char *peer, uint32_t tokens, uint32_t ttl_ms)
{
	CHECK(c);
	if (c->role != KVS_SCHEDULER || !xfer || !hash || !peer || !*peer || strlen(peer) >= sizeof((struct await *)0)->peer)
		return KVS_E_ARG;
	int rc = 0;
	int64_t now = kvs_now_ms();
	pthread_mutex_lock(&c->mu);
	struct await **at = await_slot(c, xfer, hash);
	if (!*at && c->await_count >= KVS_MAX_AWAITS) {
		await_evict(c);
		at = await_slot(c, xfer, hash); /* what it pointed into may be gone */
	}
	if (!*at) {
		struct await *a = c->await_count < KVS_MAX_AWAITS ? calloc(1, sizeof *a) : NULL;
		if (!a) {
			rc = KVS_E_LIMIT;
		} else {
			memcpy(a->key, xfer, 16);
			memcpy(a->key + 16, hash, 32);
			strcpy(a->peer, peer);
			a->tokens = tokens;
			a->end_ms = now + clamp_ms(ttl_ms, DEFAULT_DEADLINE_MS);
			a->answer.state = KVS_ADMISSION_PENDING;
			*at = a;
			c->await_count++;
			c->await_unsent = true;
			ring_fd(c->ctl_fd);
		}
	}
	pthread_mutex_unlock(&c->mu);
	return rc;
}

int kvs_admission(kvs_client *c, const uint8_t xfer[16], const uint8_t hash[32], struct kvs_admission *out)
{
	CHECK(c);
	if (!xfer || !hash || !out)
		return KVS_E_ARG;
	pthread_mutex_lock(&c->mu);
	struct await *a = *await_slot(c, xfer, hash);
	if (a)
		*out = a->answer;
	else
		memset(out, 0, sizeof *out);
	pthread_mutex_unlock(&c->mu);
	return 0;
}

int kvs_await_forget(kvs_client *c, const uint8_t xfer[16], const uint8_t hash[32])
{
	CHECK(c);
	if (!xfer || !hash)
		return KVS_E_ARG;
	pthread_mutex_lock(&c->mu);
	struct await **at = await_slot(c, xfer, hash), *a = *at;
	if (a) {
		*at = a->hash_next;
		free(a);
		c->await_count--;
	}
	pthread_mutex_unlock(&c->mu);
	return 0;
}

/* ---- public: what is going on ---- */

int kvs_status_read(kvs_client *c, struct kvs_info *info)
{
	CHECK(c);
	if (!info || info->size < sizeof *info)
		return KVS_E_ARG;
	pthread_mutex_lock(&c->mu);
	uint32_t size = info->size;
	*info = c->info;
	info->size = size;
	info->connected = connected_locked(c);
	info->degraded = c->draining || c->breaking[0] || c->replaying;
	info->sidecar_pid = c->proc >= 0 ? c->procs[c->proc].pid : 0;
	info->leases = c->lease_count;
	info->awaits = c->await_count;
	for (int i = 0; i < KVS_MAX_SIDECARS; i++)
		info->sidecars += c->procs[i].used && !c->procs[i].exited && (i == c->proc || proc_bound(c, i));
	memcpy(info->boot, c->boot, sizeof info->boot);
	info->source_epoch = __atomic_load_n(c->source_epoch, __ATOMIC_ACQUIRE);
	pthread_mutex_unlock(&c->mu);
	return 0;
}

int kvs_next_log(kvs_client *c, char *buf, uint64_t cap)
{
	CHECK(c);
	if (!buf || !cap)
		return KVS_E_ARG;
	int rc = 0;
	pthread_mutex_lock(&c->mu);
	if (c->log_tail != c->log_head) {
		const char *line = c->log[c->log_tail++ % LOG_LINES];
		copy_text(buf, cap, line, strnlen(line, LOG_LINE_BYTES));
		rc = 1;
	}
	pthread_mutex_unlock(&c->mu);
	return rc;
}

int64_t kvs_stats(kvs_client *c, void *buf, uint64_t cap)
{
	CHECK(c);
	int64_t rc = 0;
	pthread_mutex_lock(&c->mu);
	if (c->stats) {
		rc = c->stats_bytes <= cap ? (int64_t)c->stats_bytes : KVS_E_BUFFER;
		if (rc > 0)
			memcpy(buf, c->stats, c->stats_bytes);
	}
	pthread_mutex_unlock(&c->mu);
	return rc;
}
