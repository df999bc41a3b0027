/* SPDX-License-Identifier: Apache-2.0
 *
 * The client's life, and its one background thread. client.h says what the other files do, and what the lock guards.
 */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>

#include "client.h"

#define REPLAY_RETRY_MS 5        /* while the ring is full of leases presented afresh */
#define SEND_RETRY_MS 5          /* while the socket has no room for an AWAIT or a DECLINE */
#define DEFAULT_PARTNER_MS 10000
#define DEFAULT_GRACE_MS 5000
#define DEFAULT_SUBMISSION_BYTES (4u << 20)
#define DEFAULT_COMPLETION_BYTES (256u << 10)
#define LAYOUT_MAX_BYTES (KVS_PACKET_MAX_BYTES - (64u << 10)) /* leaves room for the regions in one packet */

_Atomic uint32_t kvs_fork_gen;
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;

static void in_child(void)
{
	kvs_fork_gen++;
}

static void watch_forks(void)
{
	pthread_atfork(NULL, NULL, in_child);
}

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
	case KVS_E_UNSUPPORTED:
		return "the sidecar is older than this library and does not know of it";
	case KVS_E_GPU:
		return "the CUDA driver refused, or there is none";
	}
	return "unknown error";
}

const char *kvs_library_version(void)
{
	return "0.1.0";
}

/* ---- log ---- */

__attribute__((format(printf, 3, 4))) void log_line(kvs_client *c, const char *level, const char *format, ...)
{
	char *line = c->log[c->log_head++ % LOG_LINES];
	if (c->log_head - c->log_tail > LOG_LINES)
		c->log_tail = c->log_head - LOG_LINES;
	int n = snprintf(line, LOG_LINE_BYTES, "%s ", level);
	va_list ap;
	va_start(ap, format);
	vsnprintf(line + n, (size_t)(LOG_LINE_BYTES - n), format, ap);
	va_end(ap);
	pthread_cond_signal(&c->logged);
}

__attribute__((format(printf, 2, 3))) void log_error(kvs_client *c, const char *format, ...)
{
	char text[sizeof c->info.error];
	va_list ap;
	va_start(ap, format);
	vsnprintf(text, sizeof text, format, ap);
	va_end(ap);
	if (strcmp(text, c->info.error) == 0)
		return;
	memcpy(c->info.error, text, sizeof text);
	log_line(c, "warn", "%s", text);
}

void copy_text(char *dst, size_t cap, const char *s, size_t n)
{
	if (n >= cap)
		n = cap - 1;
	if (n)
		memcpy(dst, s, n);
	dst[n] = 0;
}

void wake_by(kvs_client *c, int64_t at_ms)
{
	if (at_ms < c->due_ms) {
		c->due_ms = at_ms;
		wake_fd(c->ctl_fd);
	}
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
		for (int i = 0; i < KVS_MAX_SIDECARS; i++)
			if (c->procs[i].used && c->procs[i].dead && !c->procs[i].exited)
				proc_exited(c, i);
		if (c->breaking[0]) {
			log_line(c, "info", "session is replaced: %s", c->breaking);
			session_end(c, now, 0);
		}
		if (c->state == IDLE && now >= c->next_try_ms)
			session_begin(c, now);
		if ((c->state == WELCOMING || c->state == REGISTERING) && now >= c->handshake_end_ms) {
			log_error(c, "sidecar at %s did not answer within %d ms", c->path, HANDSHAKE_TIMEOUT_MS);
			session_end(c, now, 0);
		}
		leases_replay(c, now);
		awaits_ask(c, now);
		declines_send(c, now);
		/* Last: they look at what was just presented, too. */
		int64_t due = earlier(leases_watch(c, now), earlier(loads_watch(c, now), awaits_watch(c, now)));
		if (c->state == IDLE)
			due = earlier(due, c->next_try_ms);
		else if (c->state != READY)
			due = earlier(due, c->handshake_end_ms);
		else if (c->replaying)
			due = earlier(due, now + REPLAY_RETRY_MS);
		else if (c->await_unsent || c->declines)
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
			if (c->procs[i].used && !c->procs[i].dead)
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
			session_receive(c, now);
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

void client_put(kvs_client *c)
{
	if (atomic_fetch_sub(&c->users, 1) > 1)
		return;
	for (int i = 0; i < BUCKETS; i++) {
		for (struct lease *l = c->buckets[i], *next; l; l = next) {
			next = l->hash_next;
			lease_free(l);
		}
	}
	awaits_free(c);
	if (c->work)
		work_free(c->work);
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
	c->users = 1;
	c->role = config->role;
	c->layers = worker ? config->layers : 1; /* a scheduler's flags are never passed on */
	c->fork_gen = kvs_fork_gen;
	c->may_look = wait_may_look();
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
		client_put(c);
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
	    kvs_random(c->boot, sizeof c->boot) < 0 || kvs_random(&c->rng, sizeof c->rng) < 0 || flags_make(c) < 0) {
		int err = errno;
		client_put(c);
		errno = err;
		return KVS_E_SYS;
	}
	pthread_condattr_t attr;
	pthread_condattr_init(&attr);
	pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	pthread_cond_init(&c->changed, &attr);
	pthread_condattr_destroy(&attr);
	pthread_cond_init(&c->logged, NULL);
	pthread_mutex_init(&c->mu, NULL);
	*out = c;
	return 0;
}

static void work_says(void *client, const char *level, const char *text)
{
	kvs_client *c = client;
	pthread_mutex_lock(&c->mu);
	log_line(c, level, "%s", text);
	pthread_mutex_unlock(&c->mu);
}

static void work_over(void *client)
{
	wake_fd(((kvs_client *)client)->ctl_fd);
}

static int start_locked(kvs_client *c, const struct kvs_region *regions, uint32_t n, const void *layout, uint32_t layout_bytes)
{
	if (c->started) {
		log_error(c, "start: the client has been started already");
		return KVS_E_ARG;
	}
	if (c->role == KVS_SCHEDULER ? n != 0 : (n < 1 || n > KVS_MAX_REGIONS || !regions)) {
		log_error(c, "start: %u regions; a worker has 1..%d, a scheduler none", n, KVS_MAX_REGIONS);
		return KVS_E_ARG;
	}
	if (c->role == KVS_WORKER && (!layout || !mp_is_map(layout, layout_bytes))) {
		log_error(c, "start: the layout is not one msgpack map");
		return KVS_E_ARG;
	}
	if (layout_bytes > LAYOUT_MAX_BYTES) {
		log_error(c, "start: a layout of %u bytes exceeds %u", layout_bytes, LAYOUT_MAX_BYTES);
		return KVS_E_TOO_BIG;
	}
	c->regions = calloc(n ? n : 1, sizeof *c->regions);
	c->layout = malloc(layout_bytes ? layout_bytes : 1);
	if (!c->regions || !c->layout)
		return KVS_E_SYS;
	for (uint32_t i = 0; i < n; i++) {
		const struct kvs_region *r = &regions[i];
		if (r->kind < KVS_REGION_MEMFD || r->kind > KVS_REGION_DEVICE) {
			log_error(c, "start: region %u has kind %d, want 1..4", i, r->kind);
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
			log_error(c, "start: %u regions, at most %d descriptors fit one packet: allocate the cache in one memfd, or span it with one process region",
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
	struct work_region gpu[KVS_MAX_REGIONS] = {{0, 0}};
	for (uint32_t i = 0; i < n; i++)
		if (regions[i].kind == KVS_REGION_DEVICE)
			gpu[i] = (struct work_region){regions[i].addr, regions[i].bytes};
	c->work = work_start(gpu, n, work_says, work_over, c);
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

int kvs_describe(kvs_client *c, const void *layout, uint32_t layout_bytes)
{
	CHECK(c);
	if (c->role != KVS_WORKER || !layout || !mp_is_map(layout, layout_bytes))
		return KVS_E_ARG;
	if (layout_bytes > LAYOUT_MAX_BYTES)
		return KVS_E_TOO_BIG;
	uint8_t *copy = malloc(layout_bytes);
	if (!copy)
		return KVS_E_SYS;
	memcpy(copy, layout, layout_bytes);
	int64_t now = kvs_now_ms();
	pthread_mutex_lock(&c->mu);
	int rc = 0;
	if (c->started) {
		uint8_t *old = c->layout;
		c->layout = copy;
		c->layout_bytes = layout_bytes;
		copy = old;
		leases_disown(c, now);
		session_break(c, "the layout was described anew");
	} else {
		log_error(c, "describe: the client has not been started");
		rc = KVS_E_ARG;
	}
	pthread_mutex_unlock(&c->mu);
	free(copy);
	return rc;
}

void kvs_close(kvs_client *c)
{
	if (!c)
		return;
	if (c->fork_gen != kvs_fork_gen) {
		client_put(c); /* the thread, and perhaps a held mutex, stayed in the parent */
		return;
	}
	/* Before the watchdog goes: it ends what a stream may wait for, and our own work may be behind that. */
	if (c->work)
		work_stop(c->work);
	pthread_mutex_lock(&c->mu);
	c->closing = true;
	bool started = c->started;
	wake_fd(c->ctl_fd);
	wake_fd(c->bell_fd);
	pthread_mutex_unlock(&c->mu);
	if (started)
		pthread_join(c->thread, NULL);
	if (c->sock >= 0 && c->state == READY) {
		struct mpw w = {0};
		mpw_map(&w, 1);
		mpw_str(&w, "reason");
		mpw_str(&w, "closed");
		session_send(c, MSG_BYE, &w, NULL, 0);
		mpw_free(&w);
	}
	pthread_mutex_destroy(&c->mu);
	pthread_cond_destroy(&c->changed);
	pthread_cond_destroy(&c->logged);
	/* A GPU may have the flags registered: they stay mapped until its kvs_gpu is closed, too. */
	client_put(c);
}

int kvs_connected(kvs_client *c)
{
	CHECK(c);
	pthread_mutex_lock(&c->mu);
	int up = session_connected(c);
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
	while (!session_connected(c) && !c->closing) {
		int rc = timeout_ms < 0 ? pthread_cond_wait(&c->changed, &c->mu) : pthread_cond_timedwait(&c->changed, &c->mu, &end);
		if (rc == ETIMEDOUT)
			break;
	}
	int up = session_connected(c);
	pthread_mutex_unlock(&c->mu);
	return up;
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
	info->connected = session_connected(c);
	info->degraded = c->draining || c->breaking[0] || c->replaying;
	info->sidecar_pid = c->proc >= 0 ? c->procs[c->proc].pid : 0;
	info->leases = c->lease_count;
	info->awaits = c->await_count;
	for (int i = 0; i < KVS_MAX_SIDECARS; i++)
		info->sidecars += c->procs[i].used && !c->procs[i].exited && (i == c->proc || proc_bound(c, i));
	memcpy(info->boot, c->boot, sizeof info->boot);
	info->source_epoch = __atomic_load_n(c->source_epoch, __ATOMIC_ACQUIRE);
	if (c->work)
		work_counts(c->work, &info->packs_launched, &info->packs_in_graphs);
	pthread_mutex_unlock(&c->mu);
	return 0;
}

static int log_read(kvs_client *c, char *buf, uint64_t cap, bool wait)
{
	CHECK(c);
	if (!buf || !cap)
		return KVS_E_ARG;
	int rc = 0;
	pthread_mutex_lock(&c->mu);
	while (wait && c->log_tail == c->log_head && !c->log_ended)
		pthread_cond_wait(&c->logged, &c->mu);
	if (c->log_tail != c->log_head) {
		const char *line = c->log[c->log_tail++ % LOG_LINES];
		copy_text(buf, cap, line, strnlen(line, LOG_LINE_BYTES));
		rc = 1;
	}
	pthread_mutex_unlock(&c->mu);
	return rc;
}

int kvs_next_log(kvs_client *c, char *buf, uint64_t cap)
{
	return log_read(c, buf, cap, false);
}

int kvs_wait_log(kvs_client *c, char *buf, uint64_t cap)
{
	return log_read(c, buf, cap, true);
}

int kvs_end_log(kvs_client *c)
{
	CHECK(c);
	pthread_mutex_lock(&c->mu);
	c->log_ended = true;
	pthread_cond_broadcast(&c->logged);
	pthread_mutex_unlock(&c->mu);
	return 0;
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
