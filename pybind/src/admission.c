/* Admission queries of a scheduler (AWAIT) with their answers, and its cancellations before a lease (DECLINE). */
#include <errno.h>
#include <stdlib.h>

#include "client.h"

#define AWAIT_KEEP_MS 60000      /* how long an answer is kept after its query's ttl */

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

/* The keys that AWAIT and DECLINE share, of a map of n keys. */
static void write_question(struct mpw *w, uint32_t n, uint64_t id, const uint8_t key[48], const char *peer)
{
	mpw_map(w, n);
	mpw_put_uint(w, "id", id);
	mpw_put_bin(w, "xfer", key, 16);
	mpw_put_bin(w, "hash", key + 16, 32);
	mpw_put_str(w, "peer", peer);
}

/* Sends the message c->msg + 1. False: the socket has no room now, or the session is replaced. */
static bool sent(kvs_client *c, uint32_t type, struct mpw *w)
{
	int rc = message_send(c, type, w, NULL, 0);
	int err = errno;
	mpw_free(w);
	if (rc == 0)
		c->msg++;
	else if (err != EAGAIN && err != EINTR)
		session_break(c, strerror(err));
	return rc == 0;
}

/* Frees the query at *at. */
static void await_drop(kvs_client *c, struct await **at)
{
	struct await *a = *at;
	*at = a->hash_next;
	free(a);
	c->await_count--;
}

void awaits_ask(kvs_client *c, int64_t now)
{
	if (!session_usable(c) || !c->await_unsent)
		return;
	for (int i = 0; i < BUCKETS; i++) {
		for (struct await *a = c->await_buckets[i]; a; a = a->hash_next) {
			if (a->msg || a->answer.state != KVS_ADMISSION_PENDING || a->end_ms <= now)
				continue;
			struct mpw w = {0};
			write_question(&w, 6, c->msg + 1, a->key, a->peer);
			mpw_put_uint(&w, "tokens", a->tokens);
			mpw_put_uint(&w, "ttl_ms", (uint64_t)(a->end_ms - now));
			if (!sent(c, MSG_AWAIT, &w))
				return;
			a->msg = c->msg;
		}
	}
	c->await_unsent = false;
}

void awaits_ask_again(kvs_client *c)
{
	for (int i = 0; i < BUCKETS; i++) {
		for (struct await **at = &c->await_buckets[i], *a; (a = *at);) {
			if (a->answer.state == KVS_ADMISSION_PENDING && !a->askers) {
				await_drop(c, at);
				continue;
			}
			if (a->answer.state == KVS_ADMISSION_PENDING)
				a->msg = 0, c->await_unsent = true;
			at = &a->hash_next;
		}
	}
}

bool awaits_answer(kvs_client *c, const struct admitted *m)
{
	for (int i = 0; i < BUCKETS && m->id; i++) {
		for (struct await *a = c->await_buckets[i]; a; a = a->hash_next) {
			if (a->msg != m->id || a->answer.state != KVS_ADMISSION_PENDING)
				continue;
			a->answer.state = m->state;
			a->answer.tokens = m->tokens > UINT32_MAX ? UINT32_MAX : (uint32_t)m->tokens;
			copy_text(a->answer.message, sizeof a->answer.message, m->message, m->message_bytes);
			return true;
		}
	}
	return false;
}

int64_t awaits_watch(kvs_client *c, int64_t now)
{
	int64_t due = INT64_MAX;
	for (int i = 0; i < BUCKETS && c->await_count; i++) {
		for (struct await **at = &c->await_buckets[i], *a; (a = *at);) {
			if (a->answer.state == KVS_ADMISSION_PENDING && now >= a->end_ms) {
				a->answer.state = KVS_ADMISSION_GONE;
				copy_text(a->answer.message, sizeof a->answer.message, "no answer in time", 17);
			}
			if (now >= a->end_ms + AWAIT_KEEP_MS) {
				await_drop(c, at);
				continue;
			}
			due = earlier(due, a->answer.state == KVS_ADMISSION_PENDING ? a->end_ms : a->end_ms + AWAIT_KEEP_MS);
			at = &a->hash_next;
		}
	}
	return due;
}

static void decline_drop(kvs_client *c)
{
	struct decline *d = c->declines;
	c->declines = d->next;
	if (!c->declines)
		c->declines_end = NULL;
	c->decline_count--;
	free(d);
}

void declines_send(kvs_client *c, int64_t now)
{
	/* After the match timeout a cancellation is useless: the source has given up by itself. */
	while (c->declines && c->declines->end_ms <= now)
		decline_drop(c);
	while (c->declines && session_usable(c)) {
		struct decline *d = c->declines;
		struct mpw w = {0};
		write_question(&w, 5 + !!*d->req + !!d->count, c->msg + 1, d->key, d->peer);
		mpw_put_str(&w, "reason", d->reason);
		if (*d->req)
			mpw_put_str(&w, "req", d->req);
		if (d->count)
			mpw_put_bin(&w, "ranks", d->ranks, d->count * sizeof *d->ranks);
		if (!sent(c, MSG_DECLINE, &w))
			return;
		decline_drop(c);
	}
}

void awaits_free(kvs_client *c)
{
	while (c->declines)
		decline_drop(c);
	for (int i = 0; i < BUCKETS; i++)
		while (c->await_buckets[i])
			await_drop(c, &c->await_buckets[i]);
}

/* ---- public ---- */

/* Makes room for a query: drops the answered one that expires first. */
static void await_evict(kvs_client *c)
{
	struct await **oldest = NULL;
	for (int i = 0; i < BUCKETS; i++)
		for (struct await **at = &c->await_buckets[i]; *at; at = &(*at)->hash_next)
			if ((*at)->answer.state != KVS_ADMISSION_PENDING && (!oldest || (*at)->end_ms < (*oldest)->end_ms))
				oldest = at;
	if (oldest)
		await_drop(c, oldest);
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
		at = await_slot(c, xfer, hash); /* it may have pointed into the query that was dropped */
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
			a->askers = 1;
			a->end_ms = now + clamp_ms(ttl_ms, DEFAULT_DEADLINE_MS);
			a->answer.state = KVS_ADMISSION_PENDING;
			*at = a;
			c->await_count++;
			c->await_unsent = true;
			kvs_wake(c->ctl_fd);
		}
	} else if ((*at)->askers < UINT32_MAX) {
		(*at)->askers++;
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

int kvs_expected(kvs_client *c, const uint8_t xfer[16], const uint8_t hash[32])
{
	CHECK(c);
	if (!xfer || !hash)
		return KVS_E_ARG;
	pthread_mutex_lock(&c->mu);
	struct await **at = await_slot(c, xfer, hash);
	if (*at && (*at)->askers && --(*at)->askers == 0 && !session_usable(c))
		await_drop(c, at);
	pthread_mutex_unlock(&c->mu);
	return 0;
}

int kvs_decline(kvs_client *c, const uint8_t xfer[16], const uint8_t hash[32], const char *peer, const char *reason, const char *req,
                const uint32_t *ranks, uint32_t count, int asked)
{
	CHECK(c);
	if (c->role != KVS_SCHEDULER || !xfer || !hash || !peer || !*peer || strlen(peer) >= sizeof((struct decline *)0)->peer ||
	    (req && strlen(req) > KVS_MAX_REQ_BYTES) || count > KVS_MAX_RANKS || (count && (!ranks || !req || !*req)))
		return KVS_E_ARG;
	struct decline *d = calloc(1, sizeof *d + count * sizeof *ranks);
	if (!d)
		return KVS_E_LIMIT;
	if (req)
		strcpy(d->req, req);
	if (count)
		memcpy(d->ranks, ranks, count * sizeof *ranks);
	d->count = count;
	memcpy(d->key, xfer, 16);
	memcpy(d->key + 16, hash, 32);
	strcpy(d->peer, peer);
	copy_text(d->reason, sizeof d->reason, reason ? reason : "", reason ? strlen(reason) : 0);
	int rc = 0;
	pthread_mutex_lock(&c->mu);
	struct await **at = await_slot(c, xfer, hash);
	if (*at && asked && (*at)->askers > 1)
		(*at)->askers--;
	else if (*at && (asked || !(*at)->askers))
		await_drop(c, at);
	d->end_ms = kvs_now_ms() + c->info.match_timeout_ms;
	if (c->decline_count >= KVS_MAX_DECLINES) {
		rc = KVS_E_LIMIT;
	} else {
		*(c->declines_end ? c->declines_end : &c->declines) = d;
		c->declines_end = &d->next;
		c->decline_count++;
		d = NULL;
		kvs_wake(c->ctl_fd);
	}
	pthread_mutex_unlock(&c->mu);
	free(d);
	return rc;
}
