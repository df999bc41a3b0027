/* SPDX-License-Identifier: Apache-2.0
 *
 * internal.h: what the C files of libkvspray share. Nothing here is exported.
 */
#ifndef KVSPRAY_INTERNAL_H
#define KVSPRAY_INTERNAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvspray/kvspray.h"

/* ---- msgpack: a bounded reader and a growing writer ---- */

/* A failed allocation sets bad; later writes are dropped. */
struct mpw {
	uint8_t *buf;
	size_t len, cap;
	bool bad;
};

void mpw_free(struct mpw *w);
void mpw_raw(struct mpw *w, const void *data, size_t n);
void mpw_map(struct mpw *w, uint32_t n);
void mpw_array(struct mpw *w, uint32_t n);
void mpw_uint(struct mpw *w, uint64_t v);
void mpw_bool(struct mpw *w, bool v);
void mpw_bin(struct mpw *w, const void *data, size_t n);
void mpw_strn(struct mpw *w, const char *s, size_t n);
void mpw_str(struct mpw *w, const char *s);

/* Reads foreign bytes. Every function returns false and sets bad when the input is short or of another type; lengths and
 * counts never exceed what is left. */
struct mpr {
	const uint8_t *p, *end;
	bool bad;
};

struct mpr mpr_make(const void *data, size_t n);
bool mpr_map(struct mpr *r, uint32_t *n);
bool mpr_array(struct mpr *r, uint32_t *n);
bool mpr_uint(struct mpr *r, uint64_t *v);
bool mpr_bool(struct mpr *r, bool *v);
bool mpr_bin(struct mpr *r, const uint8_t **p, uint32_t *n);
bool mpr_str(struct mpr *r, const char **s, uint32_t *n);
/* Skips one value of any type, without recursion. */
bool mpr_skip(struct mpr *r);
bool mp_key(const char *s, uint32_t n, const char *want);
/* One map and nothing behind it. */
bool mp_is_map(const void *data, size_t n);
/* Byte range of the value of a key of the outermost map. */
bool mp_find(const void *data, size_t n, const char *key, size_t *off, size_t *len);

/* ---- system ---- */

int64_t kvs_now_ms(void); /* CLOCK_MONOTONIC */
int kvs_random(void *buf, size_t n);
int kvs_memfd(const char *name, uint64_t bytes); /* sealed SHRINK, GROW, SEAL; -1: errno */
int kvs_pidfd_of_peer(int sock, uint32_t *pid);  /* -1: errno; EREMOTE: a process that this kernel cannot show us */
int kvs_pidfd_kill(int pidfd);                   /* 0 or -errno */
bool kvs_pidfd_exited(int pidfd);

#endif
