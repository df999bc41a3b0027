/* SPDX-License-Identifier: Apache-2.0
 *
 * One connection to a sidecar: HELLO, REGISTER and what they are answered with, and its end. Another one follows; leases outlive them
 * all.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include "client.h"

#define BACKOFF_MAX_MS 500
#define BACKOFF_RESET_MS 1000    /* a session that lasted so long was a good one */
#define REFUSED_MAX_MS 10000
#define PACKETS_PER_TURN 64
#define STATS_MAX_BYTES (64u << 10)

/* ---- what we say ---- */

int session_send(kvs_client *c, uint32_t type, const struct mpw *body, const int *fds, uint32_t nfds)
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
	int rc = session_send(c, MSG_HELLO, &w, NULL, 0);
	mpw_free(&w);
	return rc;
}

/* work: the index of its two descriptors in the packet; 0: there are none. */
static void register_body(kvs_client *c, struct mpw *w, uint32_t work)
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
	mpw_map(w, work ? 6 : 4);
	mpw_str(w, "flags");
	mpw_uint(w, 0);
	mpw_str(w, "rings");
	mpw_uint(w, 1);
	mpw_str(w, "doorbell");
	mpw_uint(w, 2);
	mpw_str(w, "bell");
	mpw_uint(w, 3);
	if (!work)
		return;
	mpw_str(w, "work");
	mpw_uint(w, work);
	mpw_str(w, "work_bell");
	mpw_uint(w, work + 1);
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
	uint32_t n = BOARD_FDS + c->region_fd_count, work = 0;
	memcpy(fds + BOARD_FDS, c->region_fds, sizeof(int) * c->region_fd_count);
	if (c->work && c->can_work && n + 2 <= KVS_PACKET_MAX_FDS && work_begin(c->work, &fds[n], &fds[n + 1])) {
		work = n;
		n += 2;
	}
	struct mpw w = {0};
	c->register_msg = ++c->msg;
	register_body(c, &w, work);
	int rc = session_send(c, MSG_REGISTER, &w, fds, n);
	mpw_free(&w);
	if (work)
		close_fd(&fds[work]);
	return rc;
}

/* ---- its life ---- */

void session_break(kvs_client *c, const char *why)
{
	if (c->state == IDLE || c->breaking[0])
		return;
	snprintf(c->breaking, sizeof c->breaking, "%s", why);
	wake_fd(c->ctl_fd);
}

void session_end(kvs_client *c, int64_t now, uint32_t wait_ms)
{
	if (c->state == READY)
		completions_drain_and_wake(c);
	close_fd(&c->sock);
	close_fd(&c->doorbell_fd);
	close_fd(&c->rings_fd);
	close_fd(&c->new_pidfd);
	if (c->work)
		work_end(c->work);
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
	awaits_ask_again(c);
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

void session_begin(kvs_client *c, int64_t now)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	memcpy(addr.sun_path, c->path, sizeof addr.sun_path);
	c->serial++;
	c->msg = 0;
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
		log_error(c, "no sidecar at %s: %s", c->path, strerror(errno));
		session_end(c, now, 0);
		return;
	}
	struct ucred cred = {0};
	socklen_t len = sizeof cred;
	if (c->default_path && getsockopt(c->sock, SOL_SOCKET, SO_PEERCRED, &cred, &len) == 0 && cred.uid != 0 && cred.uid != geteuid()) {
		log_error(c, "%s belongs to uid %u, not to us (%u): name the socket explicitly if that is meant", c->path, cred.uid, geteuid());
		session_refused(c, now);
		return;
	}
	c->new_pidfd = kvs_pidfd_of_peer(c->sock, &c->new_pid);
	if (c->new_pidfd < 0 && errno == EREMOTE) {
		log_error(c, "the sidecar at %s is in another pid namespace and this kernel has no SO_PEERPIDFD, so its death could not be proved: share the "
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
		log_error(c, "HELLO to %s: %s", c->path, strerror(errno));
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
	leases_replay(c, now);
}

/* ---- what the sidecar says ---- */

struct welcome {
	uint64_t id, version, leases, deadline_ms, partner_ms, grace_ms;
	bool fenced, can_copy, can_work, can_wait, can_decline;
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

static bool read_features(struct mpr *r, struct welcome *m)
{
	uint32_t n;
	if (!mpr_array(r, &n))
		return false;
	while (n--) {
		const char *k;
		uint32_t kn;
		if (!mpr_str(r, &k, &kn))
			return false;
		m->can_copy |= mp_key(k, kn, "copy");
		m->can_work |= mp_key(k, kn, "work");
		m->can_wait |= mp_key(k, kn, "after");
		m->can_decline |= mp_key(k, kn, "decline");
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
		else if (mp_key(k, kn, "features"))
			read_features(&r, m);
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
		log_error(c, "sidecar chose protocol %u.%u, this library speaks %u.%u: upgrade the older of the two", (unsigned)(m.version >> 16),
		          (unsigned)(m.version & 0xffff), KVS_PROTOCOL_MAJOR, KVS_PROTOCOL_MINOR);
		c->info.refusals++;
		session_refused(c, now);
		return;
	}
	bool known;
	int proc = proc_enter(c, m.boot, &known);
	if (proc < 0) {
		log_error(c, "%d earlier sidecar processes still hold leases: no further one is admitted", KVS_MAX_SIDECARS);
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
		log_error(c, "no pidfd of the sidecar: its death cannot be proved, leases may stay in quarantine");
	memcpy(c->info.sidecar_boot, m.boot, 16);
	copy_text(c->info.node, sizeof c->info.node, m.node, m.node_bytes);
	if (m.endpoint_bytes >= sizeof c->info.endpoint) {
		log_error(c, "the sidecar's endpoint has %u bytes, at most %zu: it is not handed out", m.endpoint_bytes, sizeof c->info.endpoint - 1);
		m.endpoint_bytes = 0; /* a part of it would name somebody else */
	}
	copy_text(c->info.endpoint, sizeof c->info.endpoint, m.endpoint, m.endpoint_bytes);
	c->info.version = (uint32_t)m.version;
	c->info.deadline_ms = clamp_ms(m.deadline_ms, c->info.deadline_ms);
	c->info.partner_ms = clamp_ms(m.partner_ms, c->info.partner_ms);
	c->info.grace_ms = clamp_ms(m.grace_ms, c->info.grace_ms);
	c->can_copy = m.can_copy;
	c->can_work = m.can_work;
	c->can_wait = m.can_wait;
	c->can_decline = m.can_decline;
	c->deadlines = (uint64_t)c->info.deadline_ms << 32 | c->info.partner_ms;
	c->lease_limit = m.leases && m.leases < KVS_MAX_LEASES ? (uint32_t)m.leases : KVS_MAX_LEASES;
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
	if (answer && mp_key(code, code_n, "fencing"))
		proc_alive(c, now);
	log_error(c, "sidecar says %.*s: %.*s%s%.*s%s%.*s", (int)code_n, code, (int)message_n, message, field_n ? "; field " : "", (int)field_n,
	          field, remedy_n ? "; remedy: " : "", (int)remedy_n, remedy);
	if (c->role == KVS_SCHEDULER && c->state == READY)
		awaits_answer(c, id, KVS_ADMISSION_REFUSED, 0, message, message_n);
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
	uint32_t said = mp_key(state, state_n, "admitted")  ? KVS_ADMISSION_ADMITTED
			: mp_key(state, state_n, "refused") ? KVS_ADMISSION_REFUSED
							    : KVS_ADMISSION_GONE;
	if (!awaits_answer(c, id, said, tokens, message, message_n))
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
	case MSG_BYE:
		c->draining = true;
		log_line(c, "info", "sidecar pid %u drains", c->proc >= 0 ? c->procs[c->proc].pid : 0);
		return;
	case MSG_STATS:
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

void session_receive(kvs_client *c, int64_t now)
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
			log_error(c, "sidecar at %s closed the connection%s%s", c->path, n < 0 ? ": " : "", n < 0 ? strerror(errno) : "");
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
