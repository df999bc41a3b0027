/* The client's life and its status. */
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/mman.h>

#include "client.h"

#define DEFAULT_MATCH_TIMEOUT_MS 10000
#define DEFAULT_GRACE_MS 5000
#define DEFAULT_SUBMISSION_BYTES (4u << 20)
#define DEFAULT_COMPLETION_BYTES (256u << 10)
#define LAYOUT_MAX_BYTES (KVS_PACKET_MAX_BYTES - (64u << 10)) /* leaves room for the regions in one packet */

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
	requests_free(c);
	for (int i = 0; i < KVS_MAX_SIDECARS; i++)
		close_fd(&c->procs[i].pidfd);
	regions_free(c);
	if (c->rings)
		munmap(c->rings, c->rings_bytes);
	if (c->flags)
		munmap(c->flags, c->flags_bytes);
	close_fd(&c->sock);
	close_fd(&c->sq_eventfd);
	close_fd(&c->rings_fd);
	close_fd(&c->new_pidfd);
	close_fd(&c->flags_fd);
	close_fd(&c->cq_eventfd);
	close_fd(&c->ctl_fd);
	landings_free(c);
	free(c->engine_name);
	free(c->engine_version);
	free(c->release);
	free(c->engine_id);
	free(c->engine_api);
	free(c->engine_role);
	free(c->engine_events);
	free(c->engine_replay);
	free(c->layout);
	free(c->packet);
	free(c->record);
	free(c);
}

int kvs_open(const struct kvs_config *config, kvs_client **out)
{
	if (!config || !out || config->size < offsetof(struct kvs_config, engine_events))
		return KVS_E_ARG;
	uint32_t sub = config->submission_bytes ? config->submission_bytes : DEFAULT_SUBMISSION_BYTES;
	uint32_t comp = config->completion_bytes ? config->completion_bytes : DEFAULT_COMPLETION_BYTES;
	bool worker = config->role == KVS_WORKER;
	if (!worker && config->role != KVS_SCHEDULER)
		return KVS_E_ARG;
	if ((worker && (config->layers < 1 || config->layers > KVS_MAX_LAYERS)) || !ring_size_ok(sub) || !ring_size_ok(comp))
		return KVS_E_ARG;
	watch_forks();
	kvs_client *c = calloc(1, sizeof *c);
	if (!c)
		return KVS_E_SYS;
	c->users = 1;
	c->role = config->role;
	c->layers = worker ? config->layers : 1; /* a scheduler's flags are not sent to a sidecar */
	c->fork_gen = kvs_fork_gen;
	c->may_poll = wait_may_poll();
	c->submission_bytes = sub;
	c->completion_bytes = comp;
	c->flags_fd = c->cq_eventfd = c->ctl_fd = c->sock = c->sq_eventfd = c->rings_fd = c->new_pidfd = -1;
	c->proc = -1;
	c->backoff_ms = BACKOFF_MIN_MS;
	c->refused_ms = REFUSED_MIN_MS;
	c->due_ms = INT64_MAX;
	c->lease_limit = KVS_MAX_LEASES;
	c->info.deadline_ms = clamp_ms(config->deadline_ms, DEFAULT_DEADLINE_MS);
	c->info.match_timeout_ms = DEFAULT_MATCH_TIMEOUT_MS;
	c->grace_limit_ms = config->grace_ms ? config->grace_ms : UINT32_MAX;
	c->info.grace_ms = DEFAULT_GRACE_MS < c->grace_limit_ms ? DEFAULT_GRACE_MS : c->grace_limit_ms;
	c->deadlines = (uint64_t)c->info.deadline_ms << 32 | c->info.match_timeout_ms;
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
	c->release = strdup(config->release ? config->release : "");
	c->engine_id = strdup(config->engine_id ? config->engine_id : "");
	c->engine_api = strdup(config->engine_api ? config->engine_api : "");
	c->engine_role = strdup(config->engine_role ? config->engine_role : "");
	bool whole = config->size >= sizeof *config; /* of this release */
	c->engine_events = strdup(whole && config->engine_events ? config->engine_events : "");
	c->engine_replay = strdup(whole && config->engine_replay ? config->engine_replay : "");
	c->packet = malloc(KVS_PACKET_MAX_BYTES);
	c->record = malloc(comp);
	c->cq_eventfd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	c->ctl_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (!c->engine_name || !c->engine_version || !c->engine_id || !c->engine_api || !c->engine_role || !c->engine_events || !c->engine_replay || !c->release || !c->packet || !c->record || c->cq_eventfd < 0 || c->ctl_fd < 0 ||
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

/* Checks what a worker presents: regions with a layout, regions alone, or nothing. */
static int presentable(kvs_client *c, const char *call, const struct kvs_region *regions, uint32_t n, const void *layout, uint32_t layout_bytes)
{
	if (c->role == KVS_SCHEDULER ? n != 0 : n > KVS_MAX_REGIONS || (n && !regions) || (!n && layout)) {
		log_error(c, "%s: %u regions; a worker has 1..%d, or 0 without a layout, a scheduler none", call, n, KVS_MAX_REGIONS);
		return KVS_E_ARG;
	}
	if (layout ? c->role == KVS_SCHEDULER || !mp_is_map(layout, layout_bytes) : layout_bytes != 0) {
		log_error(c, "%s: the layout is not one msgpack map", call);
		return KVS_E_ARG;
	}
	if (layout_bytes > LAYOUT_MAX_BYTES) {
		log_error(c, "%s: a layout of %u bytes exceeds %u", call, layout_bytes, LAYOUT_MAX_BYTES);
		return KVS_E_TOO_BIG;
	}
	return 0;
}

static uint8_t *copy_layout(const void *layout, uint32_t layout_bytes)
{
	uint8_t *copy = malloc(layout_bytes ? layout_bytes : 1);
	if (copy && layout_bytes)
		memcpy(copy, layout, layout_bytes);
	return copy;
}

/* Takes ownership of the copy. */
static void set_layout(kvs_client *c, uint8_t *copy, uint32_t layout_bytes)
{
	free(c->layout);
	c->layout = copy;
	c->layout_bytes = layout_bytes;
}

static int start_locked(kvs_client *c, const struct kvs_region *regions, uint32_t n, const void *layout, uint32_t layout_bytes)
{
	if (c->closing)
		return KVS_E_CLOSED;
	if (c->started) {
		log_error(c, "start: the client has been started already");
		return KVS_E_ARG;
	}
	int rc = presentable(c, "start", regions, n, layout, layout_bytes);
	uint8_t *copy = NULL;
	if (rc == 0 && !(copy = copy_layout(layout, layout_bytes)))
		rc = KVS_E_SYS;
	if (rc < 0)
		return rc;
	set_layout(c, copy, layout_bytes);
	rc = regions_add(c, regions, n);
	if (rc < 0)
		return rc;
	c->registered = n;
	int err = kvs_thread(&c->thread, client_loop, c);
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
		regions_free(c);
		c->registered = 0;
		free(c->layout);
		c->layout = NULL;
		errno = err;
	}
	pthread_mutex_unlock(&c->mu);
	return rc;
}

/* Begins a new session. Everything that is open belongs to the old one. */
static void present_anew(kvs_client *c, const char *why)
{
	leases_disown(c, kvs_now_ms());
	session_break(c, why);
}

int kvs_describe(kvs_client *c, const void *layout, uint32_t layout_bytes)
{
	CHECK(c);
	if (c->role != KVS_WORKER || !layout || !mp_is_map(layout, layout_bytes))
		return KVS_E_ARG;
	if (layout_bytes > LAYOUT_MAX_BYTES)
		return KVS_E_TOO_BIG;
	uint8_t *copy = copy_layout(layout, layout_bytes);
	if (!copy)
		return KVS_E_SYS;
	pthread_mutex_lock(&c->mu);
	int rc = c->started ? 0 : KVS_E_ARG;
	if (rc == 0) {
		set_layout(c, copy, layout_bytes);
		present_anew(c, "the layout was replaced");
	} else {
		free(copy);
		log_error(c, "describe: the client has not been started");
	}
	pthread_mutex_unlock(&c->mu);
	return rc;
}

int kvs_replace(kvs_client *c, const struct kvs_region *regions, uint32_t n, const void *layout, uint32_t layout_bytes)
{
	CHECK(c);
	if (c->role != KVS_WORKER)
		return KVS_E_ARG;
	pthread_mutex_lock(&c->mu);
	int rc = presentable(c, "replace", regions, n, layout, layout_bytes);
	if (rc == 0 && (!c->started || c->region_count > c->registered)) {
		log_error(c, "replace: the client %s", c->started ? "has regions that were added: drop them first" : "has not been started");
		rc = KVS_E_ARG;
	}
	uint8_t *copy = NULL;
	if (rc == 0 && !(copy = copy_layout(layout, layout_bytes)))
		rc = KVS_E_SYS;
	if (rc == 0)
		rc = regions_replace(c, regions, n);
	if (rc == 0) {
		set_layout(c, copy, layout_bytes);
		copy = NULL;
		present_anew(c, "the memory was replaced");
	}
	free(copy);
	pthread_mutex_unlock(&c->mu);
	return rc;
}

void kvs_end(kvs_client *c)
{
	if (!c || c->fork_gen != kvs_fork_gen)
		return; /* the thread, and perhaps a held mutex, stayed in the parent */
	pthread_mutex_lock(&c->mu);
	bool join = c->started && !c->closing;
	c->closing = true;
	kvs_wake(c->ctl_fd);
	kvs_wake(c->cq_eventfd);
	pthread_cond_broadcast(&c->changed);
	pthread_mutex_unlock(&c->mu);
	if (join)
		pthread_join(c->thread, NULL);
	pthread_mutex_lock(&c->mu);
	if (c->sock >= 0 && c->state == READY) {
		struct mpw w = {0};
		mpw_reason(&w, "closed", SIZE_MAX);
		message_send(c, MSG_BYE, &w, NULL, 0);
		mpw_free(&w);
	}
	session_end(c, kvs_now_ms(), 0);
	pthread_mutex_unlock(&c->mu);
}

void kvs_close(kvs_client *c)
{
	if (!c)
		return;
	kvs_end(c);
	if (c->fork_gen == kvs_fork_gen) {
		pthread_mutex_destroy(&c->mu);
		pthread_cond_destroy(&c->changed);
		pthread_cond_destroy(&c->logged);
	}
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
	info->killable = c->proc >= 0 && kvs_pidfd_killable(c->procs[c->proc].pidfd);
	info->has_regions = session_connected(c) && c->regions_answered >= c->regions_msg;
	info->leases = c->lease_count;
	info->awaits = c->await_count;
	for (int i = 0; i < KVS_MAX_SIDECARS; i++)
		info->sidecars += c->procs[i].used && !c->procs[i].harmless && (i == c->proc || proc_bound(c, i));
	memcpy(info->boot, c->boot, sizeof info->boot);
	info->source_epoch = __atomic_load_n(c->source_epoch, __ATOMIC_ACQUIRE);
	pthread_mutex_unlock(&c->mu);
	return 0;
}
