/* Records of leases in the submission ring and in the completion ring. The sidecar writes the latter: a record is copied and
 * checked before it is used.
 */
#include <stdlib.h>

#include "client.h"

/* ---- the completion ring ---- */

static void completions_broken(kvs_client *c, const char *what)
{
	c->info.protocol_errors++;
	log_error(c, "protocol violation in the completion ring: %s; the session is replaced", what);
	c->ring_bad = true;
	session_break(c, "protocol error");
}

static void take_completion(kvs_client *c, const struct kvs_record *rec, const uint8_t *body)
{
	if (rec->type != KVS_REC_RECEIVED && rec->type != KVS_REC_SENT) {
		/* A newer minor version may add types. */
		c->info.dropped++;
		return;
	}
	struct lease *l = lease_find(c, rec->lease);
	if (!l || l->done || l->session != c->serial) {
		c->info.dropped++;
		return;
	}
	uint16_t want = l->type == KVS_REC_INTENT ? KVS_REC_SENT : KVS_REC_RECEIVED;
	if (rec->type != want || rec->status > KVS_REFUSED || !mp_is_map(body, rec->body_bytes)) {
		completions_broken(c, "completion of the wrong type, status or body");
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
		l->since_ms = kvs_now_ms(); /* from now on the engine waits for earlier processes that hold it */
	l->bound &= ~proc_bit(c->proc);
	if (!l->bound)
		lease_ready(c, l);
}

void completions_drain(kvs_client *c)
{
	if (c->state != READY || !c->rings)
		return;
	/* At most one ring: a sidecar that keeps writing must not block the engine. */
	for (uint32_t i = 0; i < c->completion_bytes / sizeof(struct kvs_record) && !c->ring_bad; i++) {
		int64_t n = kvs_ring_pop(&c->comp, c->record, c->completion_bytes);
		if (n == 0)
			return;
		if (n < 0) {
			completions_broken(c, "the length or the sequence number of a record is invalid");
			return;
		}
		struct kvs_record rec;
		memcpy(&rec, c->record, sizeof rec);
		take_completion(c, &rec, c->record + sizeof rec);
	}
}

void completions_drain_and_wake(kvs_client *c)
{
	uint32_t before = c->ready_count;
	completions_drain(c);
	if (c->ready_count != before)
		kvs_wake(c->cq_eventfd);
}

/* ---- the submission ring ---- */

int submit_record(kvs_client *c, uint16_t type, uint64_t lease, const void *body, uint32_t bytes)
{
	uint64_t epoch = __atomic_load_n(c->source_epoch, __ATOMIC_ACQUIRE);
	int rc = kvs_ring_push(&c->sub, type, 0, lease, epoch, body, bytes);
	if (rc == 0) {
		c->info.submitted++;
		if (kvs_ring_wake(&c->sub))
			kvs_wake(c->sq_eventfd);
	} else if (rc == KVS_E_FULL) {
		c->info.full++;
	} else if (rc == KVS_E_ARG) {
		c->info.protocol_errors++;
		log_error(c, "protocol violation in the submission ring: its tail is invalid; the session is replaced");
		session_break(c, "protocol error");
	}
	return rc;
}

int submit_or_replace(kvs_client *c, uint16_t type, uint64_t lease, const void *body, uint32_t bytes)
{
	if (!session_usable(c)) {
		c->info.kept++;
		return KVS_KEPT;
	}
	int rc = submit_record(c, type, lease, body, bytes);
	if (rc == 0)
		return 0;
	if (rc == KVS_E_FULL) {
		log_error(c, "submission ring of %u bytes is full: the sidecar does not read it; the session is replaced", c->submission_bytes);
		session_break(c, "submission ring full");
	}
	c->info.kept++;
	return KVS_KEPT;
}

bool record_fits(const kvs_client *c, uint64_t bytes)
{
	uint64_t length = sizeof(struct kvs_record) + bytes + 16; /* the deadline of a snapshot that is presented again may be encoded in more bytes */
	return length <= KVS_RECORD_MAX_BYTES && length <= c->submission_bytes / 2;
}

/* ---- source leases of an earlier session ---- */

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
	int rc = w.bad ? KVS_E_FULL : submit_record(c, KVS_REC_INTENT, l->id, w.buf, (uint32_t)w.len);
	mpw_free(&w);
	if (rc == 0) {
		l->session = c->serial;
		l->bound |= proc_bit(c->proc);
		c->info.represented++;
	}
	return rc;
}

/* Whether a record with this body leaves a quarter of the ring to the engine's next records. Without that room the next step would
 * find the ring full, and the session would be replaced again and again. */
static bool leaves_room(const kvs_client *c, uint64_t bytes)
{
	uint64_t used = c->sub.head - __atomic_load_n(&c->sub.ring->tail, __ATOMIC_ACQUIRE);
	if (!used || used > c->sub.bytes) /* kvs_ring_push reports an invalid tail */
		return true;
	return used + sizeof(struct kvs_record) + bytes <= c->sub.bytes / 4 * 3;
}

void leases_replay(kvs_client *c, int64_t now)
{
	if (!c->replaying || !session_usable(c))
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
	/* A thread in kvs_wait must announce its sleep in the new ring. */
	kvs_wake(c->cq_eventfd);
	log_line(c, "info", "connected to sidecar %s at %s, pid %u", c->info.node, c->path, c->procs[c->proc].pid);
}
