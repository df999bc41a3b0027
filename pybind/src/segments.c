/* Segments: memory of this worker that peers may use by a name. Batches: reads and writes of segments of other engines. Requests about segments are
 * ordinary requests. A batch is a lease; its entries lie in memory of their own, which the sidecar reads once.
 */
#include <errno.h>
#include <stdlib.h>

#include "client.h"

#define ENTRY_MAX_DEADLINE_MS 3600000u

static void put_bool(struct mpw *w, const char *key, bool v)
{
	mpw_str(w, key);
	mpw_bool(w, v);
}

static bool fits(const char *s, bool empty)
{
	return s && strlen(s) <= KVS_MAX_NAME_BYTES && (empty || *s);
}

static int64_t post(kvs_client *c, uint32_t type, uint32_t keys, struct mpw *w)
{
	int64_t rc;
	pthread_mutex_lock(&c->mu);
	if (!session_connected(c))
		rc = c->state == READY ? KVS_E_DEGRADED : KVS_E_NOT_CONNECTED;
	else if (!c->can_segments)
		rc = KVS_E_UNSUPPORTED;
	else
		rc = request_post(c, type, keys, w);
	pthread_mutex_unlock(&c->mu);
	mpw_free(w);
	return rc;
}

/* path: of a file; NULL: a region. */
static int64_t segment(kvs_client *c, const char *name, const char *path, uint32_t region, uint64_t offset, uint64_t bytes, const struct kvs_grant *grants,
		       uint32_t n)
{
	CHECK(c);
	if (!fits(name, false) || (n && !grants) || n > KVS_MAX_GRANTS)
		return KVS_E_ARG;
	for (uint32_t i = 0; i < n; i++)
		if (!fits(grants[i].to, false) || !(grants[i].read || grants[i].write))
			return KVS_E_ARG;
	struct mpw w = {0};
	mpw_put_str(&w, "name", name);
	if (path)
		mpw_put_str(&w, "path", path);
	else
		mpw_put_uint(&w, "region", region);
	mpw_put_uint(&w, "offset", offset);
	mpw_put_uint(&w, "bytes", bytes);
	mpw_str(&w, "grants");
	mpw_array(&w, n);
	for (uint32_t i = 0; i < n; i++) {
		const struct kvs_grant *g = &grants[i];
		mpw_map(&w, 6);
		mpw_put_str(&w, "to", g->to);
		put_bool(&w, "read", g->read);
		put_bool(&w, "write", g->write);
		mpw_put_uint(&w, "offset", g->offset);
		mpw_put_uint(&w, "bytes", g->bytes);
		mpw_put_uint(&w, "end_ms", g->end_ms);
	}
	return post(c, MSG_SEGMENT, 5, &w);
}

int64_t kvs_segment(kvs_client *c, const char *name, uint32_t region, uint64_t offset, uint64_t bytes, const struct kvs_grant *grants, uint32_t n)
{
	return bytes ? segment(c, name, NULL, region, offset, bytes, grants, n) : KVS_E_ARG;
}

int64_t kvs_segment_file(kvs_client *c, const char *name, const char *path, uint64_t offset, uint64_t bytes, const struct kvs_grant *grants, uint32_t n)
{
	if (!path || !*path || strlen(path) > KVS_MAX_PATH_BYTES)
		return KVS_E_ARG;
	return segment(c, name, path, 0, offset, bytes, grants, n);
}

int64_t kvs_segment_revoke(kvs_client *c, const char *name, const char *to)
{
	CHECK(c);
	if (!fits(name, false) || (to && !fits(to, true)))
		return KVS_E_ARG;
	struct mpw w = {0};
	mpw_put_str(&w, "name", name);
	mpw_put_str(&w, "to", to ? to : "");
	return post(c, MSG_REVOKE, 2, &w);
}

int64_t kvs_locate(kvs_client *c, const char *peer, const char *name, uint32_t deadline_ms)
{
	CHECK(c);
	if (!fits(name, false) || (peer && !fits(peer, true)))
		return KVS_E_ARG;
	struct mpw w = {0};
	mpw_put_str(&w, "peer", peer ? peer : "");
	mpw_put_str(&w, "name", name);
	mpw_put_uint(&w, "deadline_ms", deadline_ms);
	return post(c, MSG_LOCATE, 3, &w);
}

int64_t kvs_notes(kvs_client *c, uint32_t wait_ms)
{
	CHECK(c);
	struct mpw w = {0};
	mpw_put_uint(&w, "wait_ms", wait_ms);
	return post(c, MSG_NOTES, 1, &w);
}

/* ---- answers ---- */

int kvs_read_located(const void *body, uint64_t bytes, struct kvs_located *out)
{
	struct mpr r = mpr_make(body, bytes);
	uint32_t n;
	if (!out || !mpr_map(&r, &n))
		return KVS_E_ARG;
	*out = (struct kvs_located){0};
	while (n--) {
		const char *k;
		uint32_t kn;
		bool flag = false, good;
		if (!mpr_str(&r, &k, &kn))
			return KVS_E_ARG;
		if (mp_key(k, kn, "bytes")) {
			good = mpr_uint(&r, &out->bytes);
		} else if (mp_key(k, kn, "end_ms")) {
			good = mpr_uint(&r, &out->end_ms);
		} else if (mp_key(k, kn, "read")) {
			good = mpr_bool(&r, &flag);
			out->read = flag;
		} else if (mp_key(k, kn, "write")) {
			good = mpr_bool(&r, &flag);
			out->write = flag;
		} else {
			good = mpr_skip(&r);
		}
		if (!good)
			return KVS_E_ARG;
	}
	return 0;
}

static bool read_note(struct mpr *r, struct kvs_note *out)
{
	uint32_t n;
	*out = (struct kvs_note){0};
	if (!mpr_map(r, &n))
		return false;
	while (n--) {
		const char *k, *s;
		const uint8_t *b;
		uint32_t kn, len;
		bool flag = false, good;
		if (!mpr_str(r, &k, &kn))
			return false;
		if (mp_key(k, kn, "segment") || mp_key(k, kn, "from")) {
			good = mpr_str(r, &s, &len);
			if (good)
				copy_text(*k == 's' ? out->segment : out->from, sizeof out->from, s, len);
		} else if (mp_key(k, kn, "write")) {
			good = mpr_bool(r, &flag);
			out->write = flag;
		} else if (mp_key(k, kn, "bytes")) {
			good = mpr_uint(r, &out->bytes);
		} else if (mp_key(k, kn, "note")) {
			good = mpr_bin(r, &b, &len) && len <= KVS_MAX_NOTE_BYTES;
			if (good) {
				memcpy(out->note, b, len);
				out->note_bytes = len;
			}
		} else {
			good = mpr_skip(r);
		}
		if (!good)
			return false;
	}
	return true;
}

int kvs_read_notes(const void *body, uint64_t bytes, struct kvs_note *out, uint32_t cap)
{
	size_t off, len;
	uint32_t n;
	if (!body || (!out && cap) || !mp_find(body, bytes, "notes", &off, &len))
		return KVS_E_ARG;
	struct mpr r = mpr_make((const uint8_t *)body + off, len);
	if (!mpr_array(&r, &n))
		return KVS_E_ARG;
	if (n > cap)
		return KVS_E_BUFFER;
	for (uint32_t i = 0; i < n; i++)
		if (!read_note(&r, &out[i]))
			return KVS_E_ARG;
	return (int)n;
}

/* ---- batches ---- */

int kvs_batch_open(kvs_client *c, uint32_t capacity, struct kvs_batch *out)
{
	CHECK(c);
	if (!out || !capacity || capacity > KVS_MAX_BATCH_ENTRIES)
		return KVS_E_ARG;
	*out = (struct kvs_batch){.list = {.fd = -1}};
	int rc = kvs_region_alloc((uint64_t)capacity * sizeof(struct kvs_entry), &out->list);
	if (rc < 0)
		return rc;
	int64_t number = kvs_regions_add(c, &out->list, 1);
	if (number < 0) {
		kvs_region_free(&out->list);
		return (int)number;
	}
	out->number = (uint32_t)number;
	out->capacity = capacity;
	out->entries = (struct kvs_entry *)(uintptr_t)out->list.addr;
	return 0;
}

void kvs_batch_close(kvs_client *c, struct kvs_batch *b)
{
	if (!b || b->list.fd < 0)
		return;
	int64_t request = c ? kvs_regions_drop(c, &b->number, 1) : KVS_E_CLOSED;
	if (request > 0)
		kvs_request_forget(c, request);
	kvs_region_free(&b->list);
	*b = (struct kvs_batch){.list = {.fd = -1}};
}

int64_t kvs_batch_submit(kvs_client *c, const struct kvs_batch *b, const struct kvs_batch_options *o)
{
	CHECK(c);
	if (!b || !o || b->list.fd < 0 || o->size < sizeof *o || !b->count || b->count > b->capacity || !fits(o->segment, false) ||
	    (o->peer && !fits(o->peer, true)) || !o->regions || !o->region_count || o->region_count > KVS_MAX_BATCH_REGIONS ||
	    o->note_bytes > KVS_MAX_NOTE_BYTES || (o->note_bytes && !o->note) || (o->req && strlen(o->req) > KVS_MAX_REQ_BYTES))
		return KVS_E_ARG;
	/* A sidecar shortens a longer one. */
	uint32_t deadline = o->deadline_ms ? o->deadline_ms : (uint32_t)(kvs_deadlines(c) >> 32);
	if (!deadline)
		deadline = DEFAULT_DEADLINE_MS;
	if (deadline > ENTRY_MAX_DEADLINE_MS)
		deadline = ENTRY_MAX_DEADLINE_MS;
	uint8_t regions[4 * KVS_MAX_BATCH_REGIONS];
	for (uint32_t i = 0; i < o->region_count; i++)
		for (int k = 0; k < 4; k++)
			regions[4 * i + k] = (uint8_t)(o->regions[i] >> 8 * k);
	struct mpw w = {0};
	mpw_map(&w, o->note_bytes ? 13 : 12);
	mpw_put_str(&w, "peer", o->peer ? o->peer : "");
	mpw_put_str(&w, "segment", o->segment);
	put_bool(&w, "write", o->write);
	mpw_put_uint(&w, "list", b->number);
	mpw_put_uint(&w, "entries", b->count);
	mpw_put_bin(&w, "regions", regions, 4 * (size_t)o->region_count);
	mpw_put_uint(&w, "priority", o->priority);
	mpw_put_uint(&w, "deadline_ms", deadline);
	put_bool(&w, "wait", o->wait);
	if (o->note_bytes)
		mpw_put_bin(&w, "note", o->note, o->note_bytes);
	put_bool(&w, "durable", o->durable);
	mpw_put_str(&w, "req", o->req ? o->req : "");
	mpw_put_uint(&w, "stream_mark", o->stream_mark);
	int64_t rc = w.bad ? KVS_E_LIMIT : kvs_submit(c, KVS_REC_BATCH, w.buf, (uint32_t)w.len, deadline);
	mpw_free(&w);
	return rc;
}
