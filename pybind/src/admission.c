/* SPDX-License-Identifier: Apache-2.0
 *
 * A scheduler's questions whether a prefill has admitted a request, and the answers, kept for a while; and its word that it will not
 * come for one.
 */
#include <errno.h>
#include <stdlib.h>

#include "client.h"

#define AWAIT_KEEP_MS 60000      /* an answer outlives its question's ttl by so much */

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

void awaits_ask(kvs_client *c, int64_t now)
{
	if (!session_usable(c) || !c->await_unsent)
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
			int rc = session_send(c, MSG_AWAIT, &w, NULL, 0);
			int err = errno;
			mpw_free(&w);
			if (rc < 0) {
				if (err != EAGAIN && err != EINTR)
					session_break(c, strerror(err));
				return;
			}
			a->msg = c->msg = id;
		}
	}
	c->await_unsent = false;
}

void awaits_ask_again(kvs_client *c)
{
	for (int i = 0; i < BUCKETS; i++)
		for (struct await *a = c->await_buckets[i]; a; a = a->hash_next)
			if (a->answer.state == KVS_ADMISSION_PENDING)
				a->msg = 0, c->await_unsent = true;
}

bool awaits_answer(kvs_client *c, uint64_t id, uint32_t state, uint64_t tokens, const char *message, uint32_t bytes)
{
	for (int i = 0; i < BUCKETS && id; i++) {
		for (struct await *a = c->await_buckets[i]; a; a = a->hash_next) {
			if (a->msg != id || a->answer.state != KVS_ADMISSION_PENDING)
				continue;
			a->answer.state = state;
			a->answer.tokens = tokens > UINT32_MAX ? UINT32_MAX : (uint32_t)tokens;
			copy_text(a->answer.message, sizeof a->answer.message, message, bytes);
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
	/* Without a sidecar that takes them they are of no use later: by then the source has waited for its partner in vain. */
	while (c->declines && (c->declines->end_ms <= now || (session_usable(c) && !c->can_decline)))
		decline_drop(c);
	while (c->declines && session_usable(c)) {
		struct decline *d = c->declines;
		struct mpw w = {0};
		uint64_t id = c->msg + 1;
		mpw_map(&w, 5);
		mpw_str(&w, "id");
		mpw_uint(&w, id);
		mpw_str(&w, "xfer");
		mpw_bin(&w, d->key, 16);
		mpw_str(&w, "hash");
		mpw_bin(&w, d->key + 16, 32);
		mpw_str(&w, "peer");
		mpw_str(&w, d->peer);
		mpw_str(&w, "reason");
		mpw_str(&w, d->reason);
		int rc = session_send(c, MSG_DECLINE, &w, NULL, 0);
		int err = errno;
		mpw_free(&w);
		if (rc < 0) {
			if (err != EAGAIN && err != EINTR)
				session_break(c, strerror(err));
			return;
		}
		c->msg = id;
		decline_drop(c);
	}
}

void awaits_free(kvs_client *c)
{
	while (c->declines)
		decline_drop(c);
	for (int i = 0; i < BUCKETS; i++) {
		for (struct await *a = c->await_buckets[i], *next; a; a = next) {
			next = a->hash_next;
			free(a);
		}
	}
}

/* ---- public ---- */

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
			wake_fd(c->ctl_fd);
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

int kvs_decline(kvs_client *c, const uint8_t xfer[16], const uint8_t hash[32], const char *peer, const char *reason)
{
	CHECK(c);
	if (c->role != KVS_SCHEDULER || !xfer || !hash || !peer || !*peer || strlen(peer) >= sizeof((struct decline *)0)->peer)
		return KVS_E_ARG;
	kvs_await_forget(c, xfer, hash);
	struct decline *d = calloc(1, sizeof *d);
	if (!d)
		return KVS_E_LIMIT;
	memcpy(d->key, xfer, 16);
	memcpy(d->key + 16, hash, 32);
	strcpy(d->peer, peer);
	copy_text(d->reason, sizeof d->reason, reason ? reason : "", reason ? strlen(reason) : 0);
	int rc = 0;
	pthread_mutex_lock(&c->mu);
	d->end_ms = kvs_now_ms() + c->info.partner_ms;
	if (session_usable(c) && !c->can_decline) {
		rc = KVS_E_UNSUPPORTED;
	} else if (c->decline_count >= KVS_MAX_DECLINES) {
		rc = KVS_E_LIMIT;
	} else {
		*(c->declines_end ? c->declines_end : &c->declines) = d;
		c->declines_end = &d->next;
		c->decline_count++;
		d = NULL;
		wake_fd(c->ctl_fd);
	}
	pthread_mutex_unlock(&c->mu);
	free(d);
	return rc;
}
