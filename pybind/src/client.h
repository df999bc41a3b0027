/* client.h: the client, as its files see it.
 *
 * Its files; each calls only those above it in this list (and ring.c, msgpack.c, system.c):
 *
 *   util.c       log, errors, wake-ups, forks
 *   message.c    messages on the socket: bodies and packets
 *   table.c      open leases and their ends
 *   record.c     records of leases in the two rings
 *   flags.c      the flags memory of the board
 *   proc.c       sidecar processes, and the proof that they have ended
 *   lease.c      the release rule, and the engine's calls on leases
 *   wait.c       waiting for completions
 *   admission.c  admission queries and cancellations of a scheduler
 *   request.c    requests about the pages of the store
 *   memory.c     regions, and the packets that pass them
 *   segments.c   named memory for peers, and batches
 *   session.c    one connection: handshake, messages, end
 *   loop.c       the background thread
 *   client.c     the client's life and status
 *   gpu.c        flags and streams of a GPU
 *
 * Everything in struct kvs_client below `mu` is guarded by it, and every function here is called with it. The lock is held for
 * copies and non-blocking system calls only, so that an engine thread never waits for the sidecar. Sockets and pidfds are closed by
 * the background thread alone (or after it was joined), so it may poll them without the lock.
 *
 * What holds a lease. Lease.bound is the set of sidecar processes (struct proc) that may still access its blocks. A process leaves
 * the set when it completes the lease, when it reports that an earlier session is fenced, or when its pidfd proves its exit. The
 * engine gets the lease back only when the set is empty.
 */
#ifndef KVSPRAY_CLIENT_H
#define KVSPRAY_CLIENT_H

#include <pthread.h>
#include <string.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "internal.h"

#define BACKOFF_MIN_MS 10
#define REFUSED_MIN_MS 2000      /* after an ERROR to HELLO or REGISTER; doubled each time */
#define DEFAULT_DEADLINE_MS 30000
#define MAX_DURATION_MS 86400000u /* the longest duration that is accepted from a sidecar */
#define HANDSHAKE_TIMEOUT_MS 15000 /* longer than a sidecar's wait for the fence of an earlier session */
#define KILL_RETRY_MS 1000
#define BUCKETS 1024
#define LOG_LINES 256
#define LOG_LINE_BYTES 256
#define MAX_PACKET_REGIONS 256 /* fits KVS_PACKET_MAX_BYTES */
#define MAX_REGION_NUMBER (1u << 30)
#define BOARD_FDS 4 /* flags, rings, SQ eventfd, CQ eventfd: the first of a REGISTER packet */

/* Of packets on the socket: docs/protocol.md section 1. */
enum message { MSG_HELLO = 1, MSG_WELCOME, MSG_REGISTER, MSG_REGISTERED, MSG_ERROR, MSG_AWAIT, MSG_ADMITTED, MSG_BYE, MSG_DECLINE = 10,
	       MSG_OPEN, MSG_OPENED, MSG_EXISTS, MSG_FOUND, MSG_UNPIN, MSG_REMOVE, MSG_ADD_REGIONS, MSG_DROP_REGIONS, MSG_DONE,
	       MSG_CLOSE, MSG_HELD, MSG_SEGMENT, MSG_REVOKE, MSG_LOCATE, MSG_LOCATED, MSG_NOTES, MSG_NOTED };

enum session_state { IDLE, WELCOMING, REGISTERING, READY };

/* A LOAD for whose parts a stream waits. */
struct landing {
	struct kvs_landing at;
	bool ended; /* its lease */
	struct landing *next;
};

struct lease {
	uint64_t id;
	uint16_t type; /* KVS_REC_INTENT: of a source; any other: of a destination */
	bool cancelled, done;
	uint32_t bound; /* set of procs */
	uint64_t session; /* serial of the session that it was last presented in */
	uint32_t deadline_ms;
	int64_t end_ms;   /* deadline, as a time; of a source it counts from the engine's last INTENT, STEP or HOLD */
	int64_t since_ms; /* source: when the engine began to wait for it; 0: it does not */
	int64_t held_ms;  /* source: when it was held first; 0: it is not */
	uint8_t *snap;    /* source: the latest INTENT body */
	uint32_t snap_bytes;
	uint16_t status; /* once done */
	bool synthesised;
	uint8_t *body;
	uint32_t body_bytes;
	struct landing *landing; /* NULL: no stream waits, or the lease has ended */
	struct lease *hash_next, *prev, *next; /* open list, then ready list */
};

struct lease_list {
	struct lease *first, *last;
};

/* One sidecar process. */
struct proc {
	bool used, killed, denied;
	bool exit_proved;   /* by its pidfd */
	bool harmless; /* ... and no work of it runs any more */
	uint8_t boot[16];
	int pidfd; /* -1: none, its exit cannot be proved */
	uint32_t pid;
	int64_t kill_ms; /* of the last attempt */
	int64_t alive_ms; /* when it last answered; 0: not since a lease was late */
	bool stuck;       /* it runs but does not fence late leases: logged once */
};

struct await {
	uint8_t key[48]; /* xfer, hash */
	char peer[256];
	uint32_t tokens;
	uint32_t askers; /* requests that asked, and neither load nor have withdrawn: samples of one prompt */
	uint64_t msg; /* id of the message that asked; 0: to be asked */
	int64_t end_ms;
	struct kvs_admission answer;
	struct await *hash_next;
};

/* A cancellation that waits for the socket. */
struct decline {
	uint8_t key[48]; /* xfer, hash */
	char peer[256], reason[256], req[KVS_MAX_REQ_BYTES + 1];
	int64_t end_ms; /* then the source gives up by itself */
	struct decline *next;
	uint32_t count;
	uint32_t ranks[]; /* none: all */
};

/* The end of pins or of a namespace that waits for the socket. */
struct end {
	uint32_t type;    /* UNPIN, CLOSE */
	uint32_t request; /* id of this session's message */
};

struct region_file {
	int fd;
	uint32_t users; /* 0: free */
};

struct region {
	uint8_t id[16];
	int32_t kind;
	int file; /* index into files; -1: none */
	uint32_t number;
	uint64_t addr, bytes, offset;
	uint8_t handle[KVS_HANDLE_BYTES];
};

struct kvs_client {
	/* set once */
	uint32_t role, layers, fork_gen;
	bool may_poll; /* a wait polls before it sleeps */
	uint8_t boot[16];
	char path[sizeof ((struct sockaddr_un *)0)->sun_path];
	bool default_path;
	char *engine_name, *engine_version, *engine_id, *engine_api, *engine_role, *engine_events, *engine_replay, *release;
	uint32_t ranks[10];
	uint32_t submission_bytes, completion_bytes;
	int flags_fd, cq_eventfd, ctl_fd;
	_Atomic uint64_t deadlines; /* of kvs_deadlines; written under mu, read without */
	uint8_t *flags;
	uint64_t flags_bytes;
	struct kvs_flag *layer_flags, *load_flags;
	uint64_t *source_epoch;
	pthread_t thread;
	_Atomic uint32_t users; /* the client's owner, until kvs_close, and each kvs_gpu: the last one frees it */

	pthread_mutex_t mu; /* guards all below */
	pthread_cond_t changed; /* connected went up */
	pthread_cond_t logged;  /* a line, or the end of the log */
	bool started, closing, log_ended;
	struct region *regions; /* by number */
	uint32_t region_count, registered, next_region; /* registered: those of kvs_start */
	uint64_t regions_msg, regions_answered;         /* ids of this session's last ADD_REGIONS, and of the last that was answered */
	struct region_file files[KVS_MAX_REGION_FILES];
	uint8_t *layout; /* of the regions, for REGISTER; of no bytes: none */
	uint32_t layout_bytes;

	/* the session */
	enum session_state state;
	uint64_t serial; /* of sessions */
	int sock, sq_eventfd, new_pidfd;
	uint32_t new_pid;
	int proc; /* index, from WELCOME on; else -1 */
	bool draining, replaying;
	bool can_store, can_segments; /* features of WELCOME */
	uint64_t mark;                     /* the last one that kvs_gpu_mark gave out */
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
	bool ring_bad; /* after a protocol violation: it is not read any more */
	int64_t ready_since_ms;
	uint64_t rng;

	struct proc procs[KVS_MAX_SIDECARS];
	uint64_t next_lease;
	uint32_t lease_limit, copy_limit; /* of WELCOME */
	uint32_t grace_limit_ms; /* the engine does not wait longer */
	struct lease *buckets[BUCKETS];
	struct lease_list open, ready;
	uint32_t lease_count, ready_count;
	uint32_t copy_count; /* of lease_count, copies and loads */
	uint64_t out_seq;
	bool wait_was_long; /* the last kvs_wait: polling would have been useless */
	int64_t due_ms; /* when the background thread wakes by itself */
	uint64_t nudged; /* serial of the session that was replaced because of a late lease */
	int64_t nudge_ms; /* when that was */
	struct landing *landing, *last_landing; /* in the order of their values */
	struct await *await_buckets[BUCKETS];
	uint32_t await_count;
	bool await_unsent;
	struct decline *declines, **declines_end; /* oldest first */
	uint32_t decline_count;
	struct request *requests; /* latest first */
	uint32_t request_count;
	struct end ends[KVS_MAX_ENDS]; /* of this session, oldest first */
	uint32_t end_count;

	struct kvs_info info; /* counters, texts, limits; the rest is filled in by kvs_status_read */
	char log[LOG_LINES][LOG_LINE_BYTES];
	uint32_t log_head, log_tail;
	uint8_t *packet; /* receive buffer, background thread only */
	uint8_t *record; /* pop buffer */
};

extern _Atomic uint32_t kvs_fork_gen; /* grows in a forked child */

#define CHECK(c)                                 \
	do {                                     \
		if (!(c))                        \
			return KVS_E_CLOSED;     \
		if ((c)->fork_gen != kvs_fork_gen)   \
			return KVS_E_FORKED;     \
	} while (0)

/* ---- small things ---- */

static inline uint32_t clamp_ms(uint64_t ms, uint32_t otherwise)
{
	if (!ms)
		return otherwise;
	return ms > MAX_DURATION_MS ? MAX_DURATION_MS : (uint32_t)ms;
}

static inline uint32_t proc_bit(int proc)
{
	return proc < 0 ? 0 : 1u << proc;
}

static inline int64_t earlier(int64_t a, int64_t b)
{
	return a < b ? a : b;
}

static inline bool session_usable(const kvs_client *c)
{
	return c->state == READY && !c->breaking[0];
}

static inline bool session_connected(const kvs_client *c)
{
	return session_usable(c) && !c->draining && !c->replaying;
}

/* ---- util.c ---- */

void watch_forks(void);
__attribute__((format(printf, 3, 4))) void log_line(kvs_client *c, const char *level, const char *format, ...);
/* Keeps an error for kvs_status_read, and logs it unless it is the same as the last one. */
__attribute__((format(printf, 2, 3))) void log_error(kvs_client *c, const char *format, ...);
void copy_text(char *dst, size_t cap, const char *s, size_t n); /* cut to cap, zero-terminated */
struct timespec at_ms(int64_t ms); /* a time of kvs_now_ms, for conditions */
/* The background thread wakes by then. */
void wake_by(kvs_client *c, int64_t at_ms);

/* Has the background thread replace the session. */
void session_break(kvs_client *c, const char *why);

/* ---- message.c ---- */

/* Texts are not zero-terminated and lie in the packet. */
struct welcome {
	uint64_t id, version, leases, copies, deadline_ms, match_timeout_ms, grace_ms;
	bool fenced, can_store, can_segments;
	const uint8_t *boot;
	const char *node, *endpoint, *release;
	uint32_t node_bytes, endpoint_bytes, release_bytes;
};

struct refusal { /* ERROR */
	uint64_t id;
	bool fatal;
	const char *code, *message, *field, *remedy;
	uint32_t code_bytes, message_bytes, field_bytes, remedy_bytes;
};

struct admitted {
	uint64_t id, tokens;
	uint32_t state; /* enum kvs_admission_state */
	const char *message;
	uint32_t message_bytes;
};

/* Regions of one packet, with consecutive numbers. */
struct region_packet {
	const struct region *regions;
	uint32_t count, nfds;
	int fds[KVS_PACKET_MAX_FDS];
	uint32_t index[MAX_PACKET_REGIONS]; /* of their descriptors */
};

/* One packet to the sidecar, without waiting. -1: errno. */
int message_send(kvs_client *c, uint32_t type, const struct mpw *body, const int *fds, uint32_t nfds);
/* One packet into c->packet, as recvmsg. Descriptors in it are closed: a sidecar has none to give. */
ssize_t message_receive(kvs_client *c, bool *truncated);
void write_hello(const kvs_client *c, struct mpw *w);
void write_register(const kvs_client *c, struct mpw *w, const struct region_packet *p);
void write_add_regions(struct mpw *w, uint64_t id, const struct region_packet *p);
/* False: the body is malformed. */
bool read_welcome(const uint8_t *body, size_t bytes, struct welcome *m);
bool read_held(const uint8_t *body, size_t bytes, uint64_t *lease);
bool read_id(const uint8_t *body, size_t bytes, uint64_t *id); /* of any message; 0: it has none */
bool read_error(const uint8_t *body, size_t bytes, struct refusal *m);
bool read_admitted(const uint8_t *body, size_t bytes, struct admitted *m);

/* ---- table.c ---- */

/* The engine's thread or stream may wait for the end of such a lease. */
static inline bool is_copy(uint16_t type)
{
	return type == KVS_REC_COPY || type == KVS_REC_LOAD;
}

struct lease *lease_find(kvs_client *c, uint64_t id);
void lease_free(struct lease *l);
/* Enters a lease whose record the sidecar has. */
void lease_add(kvs_client *c, struct lease *l);
/* Ends a lease that no process holds, with a record of this library. */
void lease_end(kvs_client *c, struct lease *l, uint16_t status, const char *reason);
/* Frees a lease whose end the engine has fetched. */
void lease_delivered(kvs_client *c, struct lease *l);
/* To the ready list: kvs_poll hands it out. */
void lease_ready(kvs_client *c, struct lease *l);
/* Removes processes from every lease's set. `status` completes a lease that nothing else ends. */
void leases_unbind(kvs_client *c, uint32_t gone, uint16_t status, const char *reason);
/* ---- record.c ---- */

bool record_fits(const kvs_client *c, uint64_t bytes);
int submit_record(kvs_client *c, uint16_t type, uint64_t lease, const void *body, uint32_t bytes);
/* A record that must not be lost: without room the session is replaced, and the snapshots are presented in the new one. */
int submit_or_replace(kvs_client *c, uint16_t type, uint64_t lease, const void *body, uint32_t bytes);
/* Presents the source leases of earlier sessions in this one while its ring has room. */
void leases_replay(kvs_client *c, int64_t now);
/* Moves completions into the lease table. */
void completions_drain(kvs_client *c);
/* The same, and wakes a thread in kvs_wait. */
void completions_drain_and_wake(kvs_client *c);

/* ---- proc.c ---- */

/* The entry of the sidecar that sent WELCOME: its old one, or a new one that takes over the session's pidfd. -1: the table is
 * full of processes that hold leases. */
int proc_enter(kvs_client *c, const uint8_t boot[16], bool *known);
bool proc_bound(const kvs_client *c, int i);
void proc_exited(kvs_client *c, int i); /* its exit is proved */
void proc_release(struct proc *p);
void proc_kill(kvs_client *c, int i, int64_t now, const char *why);
/* The process at the other end of the socket has answered that it still fences an earlier session: it runs. */
void proc_alive(kvs_client *c, int64_t now);
/* Whether it has answered within the grace. Such a process is not killed, because it may serve other engines. */
bool proc_runs(const kvs_client *c, int i, int64_t now);

/* ---- flags.c ---- */
struct landing *landing_new(const struct kvs_landing *at); /* NULL: no memory */
void landing_add(kvs_client *c, struct lease *l, struct landing *x);
void landings_settle(kvs_client *c);
void landings_free(kvs_client *c);

int flags_make(kvs_client *c); /* -1: errno */
void epoch_bump(kvs_client *c); /* reads of source blocks that are running do not count */

/* ---- lease.c ---- */

/* Releases all open source leases: their blocks are no longer offered. */
void leases_disown(kvs_client *c, int64_t now);
void lease_held_on(kvs_client *c, uint64_t id, int64_t now); /* the sidecar holds a source lease on: its deadline counts anew */
/* Ends what is due, asks a sidecar with late leases to fence them, kills one that is silent. Returns when to look again. */
int64_t leases_watch(kvs_client *c, int64_t now);

/* ---- wait.c ---- */

/* Whether this process has enough processors for a wait that looks before it sleeps. */
bool wait_may_poll(void);

/* ---- admission.c ---- */

void awaits_ask(kvs_client *c, int64_t now); /* sends what has not been asked in this session */
void awaits_ask_again(kvs_client *c);        /* another session */
/* The answer to the question in message m->id. False: the question was forgotten. */
bool awaits_answer(kvs_client *c, const struct admitted *m);
int64_t awaits_watch(kvs_client *c, int64_t now); /* returns when to look again */
void awaits_free(kvs_client *c);
void declines_send(kvs_client *c, int64_t now);

/* ---- request.c ---- */

/* The answer to the request in message msg. False: the request was forgotten. */
bool requests_answer(kvs_client *c, uint32_t type, uint64_t msg, const uint8_t *body, size_t bytes);
void requests_lose(kvs_client *c); /* the session ends */
void requests_free(kvs_client *c);
void ends_send(kvs_client *c); /* the ends for which the socket had no room */
/* Sends a request, whose body has `keys` more keys in w. Its handle, or an error. */
int64_t request_post(kvs_client *c, uint32_t type, uint32_t keys, const struct mpw *w);

/* ---- memory.c ---- */

/* Takes regions with the next numbers; their descriptors are duplicated. After an error none was added. */
int regions_add(kvs_client *c, const struct kvs_region *all, uint32_t n);
/* Replaces the regions of kvs_start. There must be no others. After an error they are as before. */
int regions_replace(kvs_client *c, const struct kvs_region *all, uint32_t n);
void regions_free(kvs_client *c);
/* The regions of REGISTER. If they do not fit its packet, *p has none, and others have passed them. -1: errno. */
int regions_stage(kvs_client *c, struct region_packet *p);
/* Passes regions by ADD_REGIONS. -1: errno. */
/* An answer to an ADD_REGIONS, whichever it is; other ids are ignored. */
void regions_answer(kvs_client *c, uint64_t msg);
int regions_send(kvs_client *c, uint32_t from, uint32_t end);

/* ---- session.c ---- */

void session_begin(kvs_client *c, int64_t now);
/* Ends the current session. Leases stay bound to its process. wait_ms: until the next; 0: the backoff of the last failures. */
void session_end(kvs_client *c, int64_t now, uint32_t wait_ms);
/* Reads what the sidecar has sent. */
void session_receive(kvs_client *c, int64_t now);

/* ---- loop.c ---- */

void *client_loop(void *client);

/* ---- client.c ---- */

/* Frees the client if this was its last user. */
void client_put(kvs_client *c);

#endif
