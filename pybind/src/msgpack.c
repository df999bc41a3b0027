#include <stdlib.h>
#include <string.h>

#include "internal.h"

void mpw_free(struct mpw *w)
{
	free(w->buf);
	memset(w, 0, sizeof *w);
}

static uint8_t *mpw_room(struct mpw *w, size_t n)
{
	if (w->bad)
		return NULL;
	if (w->cap - w->len < n) {
		size_t cap = w->cap ? w->cap : 256;
		while (cap - w->len < n)
			cap *= 2;
		uint8_t *buf = realloc(w->buf, cap);
		if (!buf) {
			w->bad = true;
			return NULL;
		}
		w->buf = buf;
		w->cap = cap;
	}
	uint8_t *at = w->buf + w->len;
	w->len += n;
	return at;
}

void mpw_raw(struct mpw *w, const void *data, size_t n)
{
	uint8_t *at = n ? mpw_room(w, n) : NULL;
	if (at)
		memcpy(at, data, n);
}

/* One code byte and n big-endian bytes of v. */
static void mpw_code(struct mpw *w, uint8_t code, uint64_t v, unsigned n)
{
	uint8_t *at = mpw_room(w, 1 + n);
	if (!at)
		return;
	*at++ = code;
	while (n--)
		*at++ = (uint8_t)(v >> (8 * n));
}

void mpw_map(struct mpw *w, uint32_t n)
{
	if (n < 16)
		mpw_code(w, (uint8_t)(0x80 | n), 0, 0);
	else if (n < 65536)
		mpw_code(w, 0xde, n, 2);
	else
		mpw_code(w, 0xdf, n, 4);
}

void mpw_array(struct mpw *w, uint32_t n)
{
	if (n < 16)
		mpw_code(w, (uint8_t)(0x90 | n), 0, 0);
	else if (n < 65536)
		mpw_code(w, 0xdc, n, 2);
	else
		mpw_code(w, 0xdd, n, 4);
}

void mpw_uint(struct mpw *w, uint64_t v)
{
	if (v < 128)
		mpw_code(w, (uint8_t)v, 0, 0);
	else if (v < 256)
		mpw_code(w, 0xcc, v, 1);
	else if (v < 65536)
		mpw_code(w, 0xcd, v, 2);
	else if (v <= UINT32_MAX)
		mpw_code(w, 0xce, v, 4);
	else
		mpw_code(w, 0xcf, v, 8);
}

void mpw_bool(struct mpw *w, bool v)
{
	mpw_code(w, v ? 0xc3 : 0xc2, 0, 0);
}

void mpw_bin(struct mpw *w, const void *data, size_t n)
{
	if (n < 256)
		mpw_code(w, 0xc4, n, 1);
	else if (n < 65536)
		mpw_code(w, 0xc5, n, 2);
	else
		mpw_code(w, 0xc6, n, 4);
	mpw_raw(w, data, n);
}

void mpw_strn(struct mpw *w, const char *s, size_t n)
{
	if (n < 32)
		mpw_code(w, (uint8_t)(0xa0 | n), 0, 0);
	else if (n < 256)
		mpw_code(w, 0xd9, n, 1);
	else if (n < 65536)
		mpw_code(w, 0xda, n, 2);
	else
		mpw_code(w, 0xdb, n, 4);
	mpw_raw(w, s, n);
}

void mpw_str(struct mpw *w, const char *s)
{
	mpw_strn(w, s, strlen(s));
}

void mpw_put_uint(struct mpw *w, const char *key, uint64_t v)
{
	mpw_str(w, key);
	mpw_uint(w, v);
}

void mpw_put_bin(struct mpw *w, const char *key, const void *data, size_t n)
{
	mpw_str(w, key);
	mpw_bin(w, data, n);
}

void mpw_put_str(struct mpw *w, const char *key, const char *s)
{
	mpw_str(w, key);
	mpw_str(w, s);
}

void mpw_reason(struct mpw *w, const char *s, size_t n)
{
	mpw_map(w, 1);
	mpw_str(w, "reason");
	mpw_strn(w, s, strnlen(s, n));
}

struct mpr mpr_make(const void *data, size_t n)
{
	return (struct mpr){.p = data, .end = (const uint8_t *)data + n};
}

static bool mpr_fail(struct mpr *r)
{
	r->bad = true;
	r->p = r->end;
	return false;
}

/* Reads n big-endian bytes. */
static bool mpr_be(struct mpr *r, unsigned n, uint64_t *v)
{
	if ((size_t)(r->end - r->p) < n)
		return mpr_fail(r);
	*v = 0;
	while (n--)
		*v = *v << 8 | *r->p++;
	return true;
}

enum mp_class { MP_UINT, MP_INT, MP_NIL, MP_BOOL, MP_FLOAT, MP_STR, MP_BIN, MP_EXT, MP_ARRAY, MP_MAP };

/* Reads one head. For STR, BIN and EXT *v is the payload's length and it is there; for ARRAY and MAP the count, at most as many
 * as bytes are left; for UINT and BOOL the value; INT stands for negative numbers. */
static bool mpr_head(struct mpr *r, enum mp_class *cls, uint64_t *v)
{
	if (r->bad || r->p == r->end)
		return mpr_fail(r);
	uint8_t c = *r->p++;
	*v = 0;
	if (c < 0x80) {
		*cls = MP_UINT, *v = c;
	} else if (c < 0x90) {
		*cls = MP_MAP, *v = c & 15;
	} else if (c < 0xa0) {
		*cls = MP_ARRAY, *v = c & 15;
	} else if (c < 0xc0) {
		*cls = MP_STR, *v = c & 31;
	} else if (c >= 0xe0) {
		*cls = MP_INT;
	} else {
		switch (c) {
		case 0xc0:
			*cls = MP_NIL;
			break;
		case 0xc2:
		case 0xc3:
			*cls = MP_BOOL, *v = c & 1;
			break;
		case 0xc4:
		case 0xc5:
		case 0xc6:
			*cls = MP_BIN;
			if (!mpr_be(r, 1u << (c - 0xc4), v))
				return false;
			break;
		case 0xc7:
		case 0xc8:
		case 0xc9:
			*cls = MP_EXT;
			if (!mpr_be(r, 1u << (c - 0xc7), v))
				return false;
			*v += 1;
			break;
		case 0xca:
		case 0xcb:
			*cls = MP_FLOAT;
			if (!mpr_be(r, c == 0xca ? 4 : 8, v))
				return false;
			break;
		case 0xcc:
		case 0xcd:
		case 0xce:
		case 0xcf:
			*cls = MP_UINT;
			if (!mpr_be(r, 1u << (c - 0xcc), v))
				return false;
			break;
		case 0xd0:
		case 0xd1:
		case 0xd2:
		case 0xd3: {
			unsigned n = 1u << (c - 0xd0);
			if (!mpr_be(r, n, v))
				return false;
			/* A writer may use the signed form for a value that is not negative. */
			*cls = *v >> (8 * n - 1) ? MP_INT : MP_UINT;
			break;
		}
		case 0xd4:
		case 0xd5:
		case 0xd6:
		case 0xd7:
		case 0xd8:
			*cls = MP_EXT, *v = (1u << (c - 0xd4)) + 1u;
			break;
		case 0xd9:
		case 0xda:
		case 0xdb:
			*cls = MP_STR;
			if (!mpr_be(r, 1u << (c - 0xd9), v))
				return false;
			break;
		case 0xdc:
		case 0xdd:
			*cls = MP_ARRAY;
			if (!mpr_be(r, c == 0xdc ? 2 : 4, v))
				return false;
			break;
		case 0xde:
		case 0xdf:
			*cls = MP_MAP;
			if (!mpr_be(r, c == 0xde ? 2 : 4, v))
				return false;
			break;
		default: /* 0xc1: never used */
			return mpr_fail(r);
		}
	}
	switch (*cls) {
	case MP_STR:
	case MP_BIN:
	case MP_EXT:
	case MP_ARRAY:
		return *v <= (size_t)(r->end - r->p) ? true : mpr_fail(r);
	case MP_MAP:
		return *v <= (size_t)(r->end - r->p) / 2 ? true : mpr_fail(r);
	default:
		return true;
	}
}

static bool mpr_want(struct mpr *r, enum mp_class want, uint64_t *v)
{
	enum mp_class cls;
	if (!mpr_head(r, &cls, v))
		return false;
	return cls == want ? true : mpr_fail(r);
}

bool mpr_map(struct mpr *r, uint32_t *n)
{
	uint64_t v;
	if (!mpr_want(r, MP_MAP, &v))
		return false;
	*n = (uint32_t)v;
	return true;
}

bool mpr_array(struct mpr *r, uint32_t *n)
{
	uint64_t v;
	if (!mpr_want(r, MP_ARRAY, &v))
		return false;
	*n = (uint32_t)v;
	return true;
}

bool mpr_uint(struct mpr *r, uint64_t *v)
{
	return mpr_want(r, MP_UINT, v);
}

bool mpr_bool(struct mpr *r, bool *v)
{
	uint64_t u;
	if (!mpr_want(r, MP_BOOL, &u))
		return false;
	*v = u != 0;
	return true;
}

static bool mpr_bytes(struct mpr *r, enum mp_class want, const uint8_t **p, uint32_t *n)
{
	uint64_t v;
	if (!mpr_want(r, want, &v))
		return false;
	*p = r->p;
	*n = (uint32_t)v;
	r->p += v;
	return true;
}

bool mpr_bin(struct mpr *r, const uint8_t **p, uint32_t *n)
{
	return mpr_bytes(r, MP_BIN, p, n);
}

bool mpr_str(struct mpr *r, const char **s, uint32_t *n)
{
	const uint8_t *p;
	if (!mpr_bytes(r, MP_STR, &p, n))
		return false;
	*s = (const char *)p;
	return true;
}

bool mpr_skip(struct mpr *r)
{
	/* Every value takes a byte, so `left` values need as many bytes: the loop is bounded by the input. */
	uint64_t left = 1;
	while (left--) {
		enum mp_class cls;
		uint64_t v;
		if (!mpr_head(r, &cls, &v))
			return false;
		if (cls == MP_STR || cls == MP_BIN || cls == MP_EXT)
			r->p += v;
		else if (cls == MP_ARRAY)
			left += v;
		else if (cls == MP_MAP)
			left += 2 * v;
		if (left > (size_t)(r->end - r->p))
			return mpr_fail(r);
	}
	return true;
}

bool mp_key(const char *s, uint32_t n, const char *want)
{
	return strlen(want) == n && memcmp(s, want, n) == 0;
}

bool mp_is_map(const void *data, size_t n)
{
	struct mpr r = mpr_make(data, n), probe = r;
	uint32_t count;
	return mpr_map(&probe, &count) && mpr_skip(&r) && r.p == r.end;
}

bool mp_find(const void *data, size_t n, const char *key, size_t *off, size_t *len)
{
	struct mpr r = mpr_make(data, n);
	uint32_t count;
	if (!mpr_map(&r, &count))
		return false;
	while (count--) {
		const char *s;
		uint32_t sn;
		if (!mpr_str(&r, &s, &sn))
			return false;
		const uint8_t *start = r.p;
		if (!mpr_skip(&r))
			return false;
		if (mp_key(s, sn, key)) {
			*off = (size_t)(start - (const uint8_t *)data);
			*len = (size_t)(r.p - start);
			return true;
		}
	}
	return false;
}
