/* One connection to a sidecar: HELLO, REGISTER and their answers, and its end. Leases outlive connections. */
#include <errno.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include "client.h"

#define BACKOFF_MAX_MS 500
#define BACKOFF_RESET_MS 1000 /* a session that lasted as long as this was a good one */
#define REFUSED_MAX_MS 10000
#define PACKETS_PER_TURN 64

/* ---- HELLO and REGISTER ---- */

static int send_hello(kvs_client *c)
{
	struct mpw w = {0};
	c->hello_msg = ++c->msg;
	write_hello(c, &w);
	int rc = message_send(c, MSG_HELLO, &w, NULL, 0);
	mpw_free(&w);
	return rc;
}

/* New rings and a new SQ eventfd for this connection. */
static int make_rings(kvs_client *c)
{
	uint64_t completion = sizeof(struct kvs_rings_header) + sizeof(struct kvs_ring) + c->submission_bytes;
	uint64_t total = completion + sizeof(struct kvs_ring) + c->completion_bytes;
	if (kvs_random(c->session_id, sizeof c->session_id) < 0)
		return -1;
	void *at = kvs_shared("kvspray-rings", total, &c->rings_fd);
	if (!at)
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
	c->sq_eventfd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	return c->sq_eventfd < 0 ? -1 : 0;
}

static int send_register(kvs_client *c)
{
	int fds[KVS_PACKET_MAX_FDS] = {c->flags_fd, c->rings_fd, c->sq_eventfd, c->cq_eventfd};
	struct region_packet p;
	if (regions_stage(c, &p) < 0)
		return -1;
	uint32_t n = BOARD_FDS + p.nfds;
	memcpy(fds + BOARD_FDS, p.fds, sizeof(int) * p.nfds);
	struct mpw w = {0};
	c->register_msg = ++c->msg;
	write_register(c, &w, &p);
	int rc = message_send(c, MSG_REGISTER, &w, fds, n);
	mpw_free(&w);
	if (rc == 0)
		rc = regions_send(c, c->registered, c->region_count);
	return rc;
}

/* ---- its life ---- */

void session_end(kvs_client *c, int64_t now, uint32_t wait_ms)
{
	if (c->state == READY)
		completions_drain_and_wake(c);
	close_fd(&c->sock);
	close_fd(&c->sq_eventfd);
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
	if (c->proc >= 0 && c->procs[c->proc].harmless)
		proc_release(&c->procs[c->proc]);
	c->proc = -1;
	awaits_ask_again(c);
	requests_lose(c);
	c->end_count = 0;
	if (!wait_ms) {
		wait_ms = c->backoff_ms;
		c->backoff_ms = c->backoff_ms * 2 > BACKOFF_MAX_MS ? BACKOFF_MAX_MS : c->backoff_ms * 2;
		/* Spread the reconnections of an engine's ranks. */
		c->rng = c->rng * 6364136223846793005u + 1442695040888963407u;
		wait_ms += (uint32_t)(c->rng >> 33) % (wait_ms / 2 + 1);
	}
	c->next_try_ms = now + wait_ms;
}

/* Ends a session that will be refused until an operator corrects the cause. */
static void session_refused(kvs_client *c, int64_t now)
{
	session_end(c, now, c->refused_ms);
	c->refused_ms = c->refused_ms * 2 > REFUSED_MAX_MS ? REFUSED_MAX_MS : c->refused_ms * 2;
}

void session_begin(kvs_client *c, int64_t now)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	memcpy(addr.sun_path, c->path, sizeof addr.sun_path);
	c->serial++;
	c->msg = c->regions_msg = c->regions_answered = 0;
	c->handshake_end_ms = now + HANDSHAKE_TIMEOUT_MS;
	c->sock = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (c->sock < 0) {
		log_error(c, "socket: %s", strerror(errno));
		session_end(c, now, 0);
		return;
	}
	int big = KVS_PACKET_MAX_BYTES;
	setsockopt(c->sock, SOL_SOCKET, SO_SNDBUF, &big, sizeof big);
	if (connect(c->sock, (struct sockaddr *)&addr, sizeof addr) < 0) {
		int why = errno;
		if (why == EACCES)
			log_error(c,
			          "this user (uid %u) may not use the sidecar at %s; run both as one user, or name the uid in "
			          "the sidecar's engine.allowed_uids: %s",
			          (unsigned)geteuid(), c->path, strerror(why));
		else
			log_error(c,
			          "no sidecar at %s; start 'kvspray serve' as this user, or set the engine's socket to the "
			          "sidecar's engine.socket: %s",
			          c->path, strerror(why));
		session_end(c, now, 0);
		return;
	}
	struct ucred cred = {0};
	socklen_t len = sizeof cred;
	if (c->default_path && getsockopt(c->sock, SOL_SOCKET, SO_PEERCRED, &cred, &len) == 0 && cred.uid != 0 && cred.uid != geteuid()) {
		log_error(c, "%s belongs to uid %u, not to this process's uid %u: configure the socket's path if this is intended", c->path, cred.uid, geteuid());
		session_refused(c, now);
		return;
	}
	c->new_pidfd = kvs_pidfd_of_peer(c->sock, &c->new_pid);
	if (c->new_pidfd < 0 && errno == EREMOTE) {
		log_error(c, "the sidecar at %s is in another pid namespace and this kernel has no SO_PEERPIDFD, so its exit could not be proved: share the "
		          "pid namespace (shareProcessNamespace in a pod), or use Linux 6.5 or later", c->path);
		session_refused(c, now);
		return;
	}
	if (c->new_pidfd < 0 && (errno == ESRCH || errno == ENODATA || errno == EINVAL)) {
		/* The listener exited after the connect. */
		session_end(c, now, 0);
		return;
	}
	if (send_hello(c) < 0 && errno != EPIPE) { /* the sidecar may have sent a reason before it closed */
		log_error(c, "HELLO to %s: %s", c->path, strerror(errno));
		session_end(c, now, 0);
		return;
	}
	c->state = WELCOMING;
}

/* The session is up: a worker is registered, or a scheduler has its WELCOME. */
static void session_ready(kvs_client *c, int64_t now)
{
	c->state = READY;
	c->ready_since_ms = now;
	c->refused_ms = REFUSED_MIN_MS;
	c->replaying = true;
	c->info.error[0] = 0;
	leases_replay(c, now);
}

/* ---- what the sidecar sends ---- */

static void protocol_error(kvs_client *c, int64_t now, const char *what)
{
	c->info.protocol_errors++;
	log_error(c, "sidecar at %s sent %s", c->path, what);
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
		log_error(c, "sidecar (release \"%.*s\") chose protocol %u.%u, this library (release \"%s\") supports %u.%u: upgrade the older of the two",
		          (int)(m.release_bytes > 64 ? 64 : m.release_bytes), m.release_bytes ? m.release : "", (unsigned)(m.version >> 16),
		          (unsigned)(m.version & 0xffff), c->release, KVS_PROTOCOL_MAJOR, KVS_PROTOCOL_MINOR);
		c->info.refusals++;
		session_refused(c, now);
		return;
	}
	bool known;
	int proc = proc_enter(c, m.boot, &known);
	if (proc < 0) {
		log_error(c, "%d earlier sidecar processes still hold leases: no other one is accepted", KVS_MAX_SIDECARS);
		session_end(c, now, 0);
		return;
	}
	if (known) {
		if (m.fenced) {
			leases_unbind(c, proc_bit(proc), KVS_FAILED, "the session was replaced; the sidecar has fenced the lease");
			c->procs[proc].alive_ms = 0;
			c->procs[proc].stuck = false;
		} else if (proc_bound(c, proc)) {
			log_error(c, "sidecar pid %u has not fenced the earlier session yet", c->procs[proc].pid);
			session_end(c, now, 0);
			return;
		}
	}
	c->proc = proc;
	if (c->procs[proc].pidfd < 0)
		log_error(c, "no pidfd of the sidecar: its exit cannot be proved, so leases may stay in quarantine");
	memcpy(c->info.sidecar_boot, m.boot, 16);
	copy_text(c->info.node, sizeof c->info.node, m.node, m.node_bytes);
	if (m.endpoint_bytes >= sizeof c->info.endpoint) {
		log_error(c, "the sidecar's endpoint has %u bytes, at most %zu: it is not used", m.endpoint_bytes, sizeof c->info.endpoint - 1);
		m.endpoint_bytes = 0; /* a part of it would name another host */
	}
	copy_text(c->info.endpoint, sizeof c->info.endpoint, m.endpoint, m.endpoint_bytes);
	c->info.version = (uint32_t)m.version;
	c->info.deadline_ms = clamp_ms(m.deadline_ms, c->info.deadline_ms);
	c->info.match_timeout_ms = clamp_ms(m.match_timeout_ms, c->info.match_timeout_ms);
	c->info.grace_ms = clamp_ms(m.grace_ms, c->info.grace_ms);
	if (c->info.grace_ms > c->grace_limit_ms)
		c->info.grace_ms = c->grace_limit_ms;
	c->can_store = m.can_store;
	c->can_segments = m.can_segments;
	c->deadlines = (uint64_t)c->info.deadline_ms << 32 | c->info.match_timeout_ms;
	c->lease_limit = m.leases && m.leases < KVS_MAX_LEASES ? (uint32_t)m.leases : KVS_MAX_LEASES;
	c->copy_limit = m.copies && m.copies < c->lease_limit ? (uint32_t)m.copies : c->lease_limit;
	if (c->role == KVS_SCHEDULER) {
		session_ready(c, now);
		return;
	}
	if (make_rings(c) < 0 || send_register(c) < 0) {
		log_error(c, "REGISTER to %s: %s", c->path, strerror(errno));
		session_end(c, now, 0);
		return;
	}
	c->state = REGISTERING;
}

static void on_error(kvs_client *c, int64_t now, const uint8_t *body, size_t bytes)
{
	struct refusal m;
	if (!read_error(body, bytes, &m)) {
		protocol_error(c, now, "a malformed ERROR");
		return;
	}
	c->info.refusals++;
	/* Regions that REGISTER needs come before it; a region that was added later and is refused is missed by what uses it. */
	bool answer = c->state != READY && m.id && m.id <= (c->state == REGISTERING ? c->register_msg : c->hello_msg);
	if (answer && mp_key(m.code, m.code_bytes, "fencing"))
		proc_alive(c, now);
	log_error(c, "sidecar reports %.*s: %.*s%s%.*s%s%.*s", (int)m.code_bytes, m.code, (int)m.message_bytes, m.message,
	          m.field_bytes ? "; field " : "", (int)m.field_bytes, m.field, m.remedy_bytes ? "; remedy: " : "", (int)m.remedy_bytes, m.remedy);
	if (c->role == KVS_SCHEDULER && c->state == READY)
		awaits_answer(c, &(struct admitted){.id = m.id, .state = KVS_ADMISSION_REFUSED, .message = m.message, .message_bytes = m.message_bytes});
	if (c->state == READY)
		requests_answer(c, MSG_ERROR, m.id, body, bytes);
	regions_answer(c, m.id);
	/* These causes end by themselves; an operator must correct the others. */
	bool passing = mp_key(m.code, m.code_bytes, "fencing") || mp_key(m.code, m.code_bytes, "draining") || mp_key(m.code, m.code_bytes, "state") ||
		       mp_key(m.code, m.code_bytes, "superseded") || mp_key(m.code, m.code_bytes, "limit");
	if (!answer && !m.fatal)
		return;
	if (passing)
		session_end(c, now, 0);
	else
		session_refused(c, now);
}

static void on_registered(kvs_client *c, int64_t now, const uint8_t *body, size_t bytes)
{
	uint64_t id;
	if (c->state != REGISTERING || !read_id(body, bytes, &id) || id != c->register_msg) {
		protocol_error(c, now, "an unexpected or malformed REGISTERED");
		return;
	}
	session_ready(c, now);
}

static void on_admitted(kvs_client *c, int64_t now, const uint8_t *body, size_t bytes)
{
	struct admitted m;
	if (!read_admitted(body, bytes, &m))
		protocol_error(c, now, "a malformed ADMITTED");
	else if (!awaits_answer(c, &m))
		c->info.dropped++; /* forgotten meanwhile */
}

static void on_answer(kvs_client *c, int64_t now, uint32_t type, const uint8_t *body, size_t bytes)
{
	uint64_t id;
	if (!read_id(body, bytes, &id)) {
		protocol_error(c, now, "a malformed answer");
		return;
	}
	if (requests_answer(c, type, id, body, bytes))
		return;
	if (type == MSG_DONE)
		regions_answer(c, id);
	else
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
	case MSG_WELCOME:
		if (c->state == WELCOMING)
			on_welcome(c, now, body, n);
		else
			protocol_error(c, now, "a second WELCOME");
		return;
	case MSG_REGISTERED:
		on_registered(c, now, body, n);
		return;
	case MSG_ERROR:
		on_error(c, now, body, n);
		return;
	case MSG_ADMITTED:
		on_admitted(c, now, body, n);
		return;
	case MSG_OPENED:
	case MSG_FOUND:
	case MSG_DONE:
	case MSG_LOCATED:
	case MSG_NOTED:
		on_answer(c, now, type, body, n);
		return;
	case MSG_BYE:
		c->draining = true;
		log_line(c, "info", "sidecar pid %u drains", c->proc >= 0 ? c->procs[c->proc].pid : 0);
		return;
	case MSG_HELD: {
		uint64_t lease;
		if (read_held(body, n, &lease))
			lease_held_on(c, lease, now);
		return;
	}
	default: /* a newer minor version */
		return;
	}
}

void session_receive(kvs_client *c, int64_t now)
{
	for (int i = 0; i < PACKETS_PER_TURN && c->state != IDLE; i++) {
		bool truncated;
		ssize_t n = message_receive(c, &truncated);
		if (n < 0 && errno == ECONNRESET) /* reported once, ahead of packets that came earlier */
			n = message_receive(c, &truncated);
		if (n < 0 && (errno == EAGAIN || errno == EINTR))
			return;
		if (n <= 0) {
			log_error(c, "sidecar at %s closed the connection%s%s", c->path, n < 0 ? ": " : "", n < 0 ? strerror(errno) : "");
			session_end(c, now, 0);
			return;
		}
		if (truncated) {
			protocol_error(c, now, "a packet of more than 1 MiB");
			return;
		}
		on_packet(c, now, c->packet, (size_t)n);
	}
}
