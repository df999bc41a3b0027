/* Requests and their answers: about the pages of the store (OPEN, EXISTS, REMOVE), whose bodies are the caller's, and DROP_REGIONS. The end of
 * pins (UNPIN) and of namespaces (CLOSE).
 */
#include <errno.h>
#include <stdlib.h>

#include "client.h"

/* One request until its answer was fetched. Its handle is the session's serial and the message's id, so that an answer of another session
 * is never taken for it. */
struct request {
	int64_t handle;
	uint32_t type; /* of the answer; 0: there is none yet */
	bool lost;     /* the session ended before */
	uint8_t *body;
	uint32_t bytes;
	struct request *next;
};

static int64_t handle_of(const kvs_client *c, uint64_t msg)
{
	return (int64_t)((c->serial & INT32_MAX) << 32 | (uint32_t)msg);
}

static struct request **request_find(kvs_client *c, int64_t handle)
{
	struct request **at = &c->requests;
	while (*at && (*at)->handle != handle)
		at = &(*at)->next;
	return at;
}

static void request_drop(kvs_client *c, struct request **at)
{
	struct request *r = *at;
	*at = r->next;
	free(r->body);
	free(r);
	c->request_count--;
}

bool requests_answer(kvs_client *c, uint32_t type, uint64_t msg, const uint8_t *body, size_t bytes)
{
	struct request *r = *request_find(c, handle_of(c, msg));
	if (!msg || !r || r->type || r->lost)
		return false;
	r->body = malloc(bytes);
	if (r->body) {
		memcpy(r->body, body, bytes);
		r->bytes = (uint32_t)bytes;
		r->type = type;
	} else {
		r->lost = true;
	}
	pthread_cond_broadcast(&c->changed);
	return true;
}

void requests_lose(kvs_client *c)
{
	for (struct request *r = c->requests; r; r = r->next)
		r->lost |= !r->type;
	if (c->requests)
		pthread_cond_broadcast(&c->changed);
}

void requests_free(kvs_client *c)
{
	while (c->requests)
		request_drop(c, &c->requests);
}

/* Sends a packet from the engine's thread. */
static int send_now(kvs_client *c, uint32_t type, struct mpw *w)
{
	int rc = message_send(c, type, w, NULL, 0), err = errno;
	mpw_free(w);
	if (rc == 0)
		return 0;
	if (err == EAGAIN || err == EINTR || err == ENOBUFS)
		return KVS_E_FULL;
	if (err == EMSGSIZE)
		return KVS_E_TOO_BIG;
	session_break(c, strerror(err));
	return KVS_E_DEGRADED;
}

int64_t request_post(kvs_client *c, uint32_t type, uint32_t keys, const struct mpw *body)
{
	if (c->request_count >= KVS_MAX_REQUESTS)
		return KVS_E_LIMIT;
	struct request *q = calloc(1, sizeof *q);
	if (!q)
		return KVS_E_LIMIT;
	struct mpw w = {.bad = body->bad};
	mpw_map(&w, keys + 1);
	mpw_put_uint(&w, "id", c->msg + 1);
	mpw_raw(&w, body->buf, body->len);
	int rc = send_now(c, type, &w);
	if (rc < 0) {
		free(q);
		return rc;
	}
	q->handle = handle_of(c, ++c->msg);
	q->next = c->requests;
	c->requests = q;
	c->request_count++;
	return q->handle;
}

/* ---- public ---- */

int64_t kvs_request(kvs_client *c, uint32_t type, const void *body, uint32_t bytes)
{
	CHECK(c);
	uint32_t n;
	struct mpr r = mpr_make(body, bytes);
	if ((type != MSG_OPEN && type != MSG_EXISTS && type != MSG_REMOVE) || !body || !mp_is_map(body, bytes) || !mpr_map(&r, &n))
		return KVS_E_ARG;
	int64_t rc;
	struct mpw rest = {0};
	mpw_raw(&rest, r.p, (size_t)(r.end - r.p));
	pthread_mutex_lock(&c->mu);
	if (!session_connected(c))
		rc = c->state == READY ? KVS_E_DEGRADED : KVS_E_NOT_CONNECTED;
	else if (!c->can_store)
		rc = KVS_E_UNSUPPORTED;
	else
		rc = request_post(c, type, n, &rest);
	pthread_mutex_unlock(&c->mu);
	mpw_free(&rest);
	return rc;
}

int64_t kvs_answer(kvs_client *c, int64_t request, int timeout_ms, uint32_t *type, void *buf, uint64_t cap)
{
	CHECK(c);
	if (!type || (!buf && cap))
		return KVS_E_ARG;
	struct timespec end = at_ms(kvs_now_ms() + (timeout_ms < 0 ? 0 : timeout_ms));
	int64_t rc = 0;
	pthread_mutex_lock(&c->mu);
	struct request **at;
	for (bool late = timeout_ms == 0;;) {
		at = request_find(c, request);
		if (!*at || (*at)->type || (*at)->lost || c->closing || late)
			break;
		late = (timeout_ms < 0 ? pthread_cond_wait(&c->changed, &c->mu) : pthread_cond_timedwait(&c->changed, &c->mu, &end)) == ETIMEDOUT;
	}
	struct request *q = *at;
	*type = q ? q->type : 0;
	if (!q) {
		rc = KVS_E_UNKNOWN;
	} else if (q->type && q->bytes > cap) {
		rc = KVS_E_BUFFER;
	} else if (q->type) {
		memcpy(buf, q->body, q->bytes);
		rc = q->bytes;
		request_drop(c, at);
	} else if (q->lost) {
		rc = KVS_E_NOT_CONNECTED;
		request_drop(c, at);
	}
	pthread_mutex_unlock(&c->mu);
	return rc;
}

int kvs_request_forget(kvs_client *c, int64_t request)
{
	CHECK(c);
	pthread_mutex_lock(&c->mu);
	struct request **at = request_find(c, request);
	if (*at)
		request_drop(c, at);
	pthread_mutex_unlock(&c->mu);
	return 0;
}

static int end_send(kvs_client *c, struct end e)
{
	struct mpw w = {0};
	mpw_map(&w, 1);
	mpw_put_uint(&w, e.type == MSG_CLOSE ? "open" : "pin", e.request);
	return send_now(c, e.type, &w);
}

void ends_send(kvs_client *c)
{
	uint32_t n = 0;
	while (n < c->end_count && session_usable(c) && end_send(c, c->ends[n]) != KVS_E_FULL)
		n++;
	c->end_count -= n;
	memmove(c->ends, c->ends + n, c->end_count * sizeof *c->ends);
}

/* Ends what a request of this session has begun. That of an earlier session ended with it. */
static int end_of(kvs_client *c, int64_t request, uint32_t type)
{
	CHECK(c);
	int rc = 0;
	pthread_mutex_lock(&c->mu);
	if (session_usable(c) && handle_of(c, (uint64_t)request) == request) {
		struct end e = {type, (uint32_t)request};
		rc = end_send(c, e);
		if (rc == KVS_E_FULL && c->end_count < KVS_MAX_ENDS) {
			c->ends[c->end_count++] = e;
			kvs_wake(c->ctl_fd);
			rc = 0;
		} else if (rc == KVS_E_FULL) {
			log_error(c, "the sidecar at %s reads nothing, and %d ends of pins and namespaces wait: one is lost", c->path, KVS_MAX_ENDS);
		}
	}
	pthread_mutex_unlock(&c->mu);
	return rc;
}

int kvs_unpin(kvs_client *c, int64_t request)
{
	return end_of(c, request, MSG_UNPIN);
}

int kvs_close_space(kvs_client *c, int64_t request)
{
	return end_of(c, request, MSG_CLOSE);
}
