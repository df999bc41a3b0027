/* The release rule, and the engine's calls on leases. client.h describes what holds a lease. */
#include <stdlib.h>

#include "client.h"

#define REASON_MAX_BYTES 1024
#define LANDING_LOOK_MS 10

/* ---- the release rule ---- */

/* When a sidecar that still holds the lease is killed; INT64_MAX: the engine does not wait for it. */
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

int64_t leases_watch(kvs_client *c, int64_t now)
{
	int64_t due = INT64_MAX;
	bool late = false;
	for (struct lease *l = c->open.first; l && !late; l = l->next)
		late = l->landing || now >= earlier(lease_limit_ms(c, l) - c->info.grace_ms / 2, l->end_ms);
	if (late)
		completions_drain_and_wake(c); /* completions that are in the ring count */
	if (c->landing)
		due = now + LANDING_LOOK_MS; /* the engine may take no completion while its stream waits */
	uint32_t guilty = 0, waited_for = 0;
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
		/* After half the grace a new session makes a sidecar that has lost the lease fence the old session. */
		int64_t nudge = limit - c->info.grace_ms / 2;
		if (now >= nudge && c->nudged != c->serial && session_usable(c) && (l->bound & proc_bit(c->proc))) {
			log_error(c, "lease %llu is open past its deadline; a new session makes sidecar pid %u fence it", (unsigned long long)l->id,
			          c->procs[c->proc].pid);
			c->nudged = c->serial;
			c->nudge_ms = now;
			session_break(c, "a lease is open past its deadline");
		}
		/* The sidecar has the grace to answer: after a pause of the host it may not have run, like this process. */
		if (limit < c->nudge_ms + c->info.grace_ms)
			limit = c->nudge_ms + c->info.grace_ms;
		if (l->landing && now >= limit + KVS_LOAD_GRACES * (int64_t)c->info.grace_ms)
			waited_for |= l->bound;
		if (now >= limit) {
			guilty |= l->bound;
			due = earlier(due, now + KILL_RETRY_MS);
		} else {
			due = earlier(due, now < nudge ? nudge : limit);
		}
	}
	if (ended)
		kvs_wake(c->cq_eventfd);
	if (guilty) {
		uint32_t kept = 0; /* by processes that still run */
		for (int i = 0; i < KVS_MAX_SIDECARS; i++) {
			bool runs = (guilty & proc_bit(i)) && proc_runs(c, i, now);
			if ((guilty & proc_bit(i)) && (!runs || (waited_for & proc_bit(i))))
				proc_kill(c, i, now, runs ? "did not end a load" : "did not respond within deadline and grace");
			kept |= runs || (c->procs[i].used && c->procs[i].denied) ? proc_bit(i) : 0;
		}
		for (struct lease *l = c->open.first; l; l = l->next)
			c->info.quarantined += now >= lease_limit_ms(c, l) && (l->bound & kept);
	}
	return due;
}

/* ---- public: open, change, release ---- */

uint64_t kvs_deadlines(kvs_client *c)
{
	return c && c->fork_gen == kvs_fork_gen ? c->deadlines : 0;
}

static int open_lease(kvs_client *c, uint16_t type, const void *body, uint32_t bytes, uint32_t deadline_ms,
                      const struct kvs_landing *landing, int64_t now, uint64_t *id)
{
	if (!session_usable(c))
		return c->state == READY ? KVS_E_DEGRADED : KVS_E_NOT_CONNECTED;
	if (c->draining)
		return KVS_E_DEGRADED;
	if (c->replaying)
		return KVS_E_FULL;
	if (c->lease_count >= c->lease_limit || (is_copy(type) && c->copy_count >= c->copy_limit))
		return KVS_E_LIMIT;
	/* A sidecar that hangs ends such a lease only when it is killed. */
	if (is_copy(type) && !(c->proc >= 0 && kvs_pidfd_killable(c->procs[c->proc].pidfd)))
		return KVS_E_UNKILLABLE;
	if (((type == KVS_REC_GET || type == KVS_REC_PUT) && !c->can_store) || (type == KVS_REC_BATCH && !c->can_segments))
		return KVS_E_UNSUPPORTED;
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
			if (mpr_bool(&r, &held) && held)
				l->held_ms = l->since_ms = now;
		}
	}
	l->id = c->next_lease + 1;
	struct landing *x = landing ? landing_new(landing) : NULL;
	int rc = landing && !x ? KVS_E_LIMIT : submit_record(c, type, l->id, body, bytes);
	if (rc < 0) {
		free(x);
		lease_free(l);
		return rc == KVS_E_ARG ? KVS_E_DEGRADED : rc;
	}
	if (x)
		landing_add(c, l, x);
	c->next_lease++;
	l->type = type;
	l->deadline_ms = clamp_ms(deadline_ms, c->info.deadline_ms);
	l->end_ms = now + l->deadline_ms;
	l->bound = proc_bit(c->proc);
	l->session = c->serial;
	lease_add(c, l);
	int64_t limit = lease_limit_ms(c, l);
	if (limit != INT64_MAX)
		wake_by(c, limit - c->info.grace_ms / 2);
	*id = l->id;
	return 0;
}

int64_t kvs_submit_load(kvs_client *c, const void *body, uint32_t bytes, uint32_t deadline_ms, const struct kvs_landing *at)
{
	CHECK(c);
	if (!at || !at->arrived || at->flag >= c->layers || at->value >= KVS_FLAG_LIMIT || at->parts >= KVS_FLAG_LIMIT - at->value || !body || !mp_is_map(body, bytes))
		return KVS_E_ARG;
	int64_t now = kvs_now_ms();
	uint64_t id = 0;
	pthread_mutex_lock(&c->mu);
	int rc = c->role != KVS_WORKER ? KVS_E_ARG : !record_fits(c, bytes) ? KVS_E_TOO_BIG : open_lease(c, KVS_REC_LOAD, body, bytes, deadline_ms, at, now, &id);
	if (rc == 0)
		wake_by(c, now + LANDING_LOOK_MS);
	pthread_mutex_unlock(&c->mu);
	return rc < 0 ? rc : (int64_t)id;
}

int64_t kvs_submit(kvs_client *c, uint16_t type, const void *body, uint32_t bytes, uint32_t deadline_ms)
{
	CHECK(c);
	bool known = type == KVS_REC_INTENT || type == KVS_REC_EXPECT || type == KVS_REC_COPY || type == KVS_REC_GET || type == KVS_REC_PUT || type == KVS_REC_LOAD ||
		     type == KVS_REC_BATCH;
	if (!known || !body || !mp_is_map(body, bytes))
		return KVS_E_ARG;
	int64_t now = kvs_now_ms();
	uint64_t id = 0;
	pthread_mutex_lock(&c->mu);
	int rc = c->role != KVS_WORKER ? KVS_E_ARG : !record_fits(c, bytes) ? KVS_E_TOO_BIG : open_lease(c, type, body, bytes, deadline_ms, NULL, now, &id);
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
	/* A prefill may take longer than the deadline, which counts from the engine's last record. */
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
		rc = submit_or_replace(c, KVS_REC_STEP, 0, body, bytes);
	pthread_mutex_unlock(&c->mu);
	return rc;
}

static const uint8_t empty_map[1] = {0x80};

/* Releases a lease. Of a source lease the caller has raised the epoch. */
static int release_lease(kvs_client *c, struct lease *l, const void *body, uint32_t bytes, int64_t now)
{
	int rc = 0;
	l->cancelled = true;
	if (l->type == KVS_REC_INTENT)
		l->since_ms = now;
	/* A destination lease that only an earlier process holds needs no record. A source lease does, because the epoch has grown. */
	if (session_usable(c) && l->session != c->serial && l->type != KVS_REC_INTENT)
		rc = KVS_KEPT;
	else if (session_usable(c) || l->bound)
		rc = submit_or_replace(c, KVS_REC_CANCEL, l->id, body, bytes);
	if (l->bound) {
		wake_by(c, lease_limit_ms(c, l) - c->info.grace_ms / 2);
	} else {
		lease_end(c, l, KVS_CANCELLED, "cancelled while no sidecar held it");
		kvs_wake(c->cq_eventfd);
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
	/* A lease with an outdated snapshot could be presented with blocks of another request: it ends. */
	bool end = rc < 0 && open;
	/* The blocks are lost in any case, and each growth of the epoch has a record. */
	if (type == KVS_REC_PREEMPT || end)
		epoch_bump(c);
	if (end)
		release_lease(c, l, empty_map, sizeof empty_map, now);
	else if (rc < 0 && type == KVS_REC_PREEMPT)
		submit_or_replace(c, type, s->lease, empty_map, sizeof empty_map);
	if (rc == 0) {
		if (type == KVS_REC_HOLD && !l->held_ms) {
			l->held_ms = l->since_ms = now;
			if (l->bound)
				wake_by(c, lease_limit_ms(c, l) - c->info.grace_ms / 2);
		}
		/* A session without this lease will be presented the new snapshot, but needs the record of the epoch now. */
		if (session_usable(c) && l->session != c->serial && type != KVS_REC_PREEMPT) {
			c->info.kept++;
			rc = KVS_KEPT;
		} else {
			rc = submit_or_replace(c, type, l->id, empty_map, sizeof empty_map);
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

void lease_held_on(kvs_client *c, uint64_t id, int64_t now)
{
	struct lease *l = open_source(c, id);
	if (l && l->held_ms && !l->cancelled && now < l->held_ms + KVS_MAX_HOLD_MS) {
		l->since_ms = now;
		l->end_ms = now + l->deadline_ms;
	}
}

int kvs_yield(kvs_client *c, uint64_t lease)
{
	CHECK(c);
	int rc = KVS_E_UNKNOWN;
	pthread_mutex_lock(&c->mu);
	struct lease *l = open_source(c, lease);
	/* A lease that no sidecar has waits for no receiver, and ends by its deadline. */
	if (l && l->held_ms && !l->cancelled)
		rc = session_usable(c) && l->session == c->serial ? submit_or_replace(c, KVS_REC_YIELD, lease, empty_map, sizeof empty_map) : KVS_KEPT;
	pthread_mutex_unlock(&c->mu);
	return rc;
}

int kvs_cancel(kvs_client *c, uint64_t lease, const char *reason)
{
	CHECK(c);
	int64_t now = kvs_now_ms();
	struct mpw w = {0};
	mpw_reason(&w, reason ? reason : "", REASON_MAX_BYTES);
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
			epoch_bump(c);
		rc = release_lease(c, l, w.buf, (uint32_t)w.len, now);
	}
	pthread_mutex_unlock(&c->mu);
	mpw_free(&w);
	return rc;
}

void leases_disown(kvs_client *c, int64_t now)
{
	for (struct lease *l = c->open.first, *next; l; l = next) {
		next = l->next;
		if (l->type != KVS_REC_INTENT || l->done || l->cancelled)
			continue;
		epoch_bump(c);
		release_lease(c, l, empty_map, sizeof empty_map, now);
	}
}

/* ---- public: what has ended ---- */

int64_t kvs_poll(kvs_client *c, void *buf, uint64_t cap)
{
	CHECK(c);
	uint64_t used = 0;
	int64_t rc = 0;
	pthread_mutex_lock(&c->mu);
	completions_drain(c);
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
			.type = l->type == KVS_REC_INTENT ? KVS_REC_SENT : KVS_REC_RECEIVED,
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
		lease_delivered(c, l);
	}
	pthread_mutex_unlock(&c->mu);
	return rc < 0 ? rc : (int64_t)used;
}
