/* internal.h: what files without a client use: msgpack.c and system.c. Nothing here is exported. */
#ifndef KVSPRAY_INTERNAL_H
#define KVSPRAY_INTERNAL_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <unistd.h>

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
/* A key of a map, and its value. */
void mpw_put_uint(struct mpw *w, const char *key, uint64_t v);
void mpw_put_bin(struct mpw *w, const char *key, const void *data, size_t n);
void mpw_put_str(struct mpw *w, const char *key, const char *s);
/* The map {"reason": s}, of at most n bytes of s. */
void mpw_reason(struct mpw *w, const char *s, size_t n);

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
int64_t kvs_now_ns(void);
int kvs_random(void *buf, size_t n);
/* A thread that takes none of the engine's signals. 0 or an errno. */
int kvs_thread(pthread_t *thread, void *(*run)(void *), void *arg);
int kvs_memfd(const char *name, uint64_t bytes); /* sealed SHRINK, GROW, SEAL; -1: errno */
void *kvs_shared(const char *name, uint64_t bytes, int *fd); /* such a memfd, mapped; NULL: errno, and *fd is -1 */
int kvs_pidfd_of_peer(int sock, uint32_t *pid); /* -1: errno; EREMOTE: a process of a pid namespace that is not visible here */
int kvs_pidfd_kill(int pidfd);                  /* 0 or -errno */
bool kvs_pidfd_killable(int pidfd);             /* this process may kill it */

static inline void kvs_wake(int eventfd)
{
	uint64_t one = 1;
	/* An eventfd that is full wakes its reader all the same. */
	ssize_t n = write(eventfd, &one, sizeof one);
	(void)n;
}

static inline void kvs_clear(int eventfd)
{
	uint64_t n;
	ssize_t got = read(eventfd, &n, sizeof n);
	(void)got;
}

static inline void close_fd(int *fd)
{
	if (*fd >= 0)
		close(*fd);
	*fd = -1;
}

#endif
