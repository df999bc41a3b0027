/* What every file of the client uses: its log, its errors, its wake-ups, and the generation of forks. */
#include <stdarg.h>
#include <stdio.h>

#include "client.h"

_Atomic uint32_t kvs_fork_gen;
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;

static void in_child(void)
{
	kvs_fork_gen++;
}

static void register_fork(void)
{
	pthread_atfork(NULL, NULL, in_child);
}

void watch_forks(void)
{
	pthread_once(&fork_once, register_fork);
}

void log_line(kvs_client *c, const char *level, const char *format, ...)
{
	char *line = c->log[c->log_head++ % LOG_LINES];
	if (c->log_head - c->log_tail > LOG_LINES)
		c->log_tail = c->log_head - LOG_LINES;
	int n = snprintf(line, LOG_LINE_BYTES, "%s ", level);
	va_list ap;
	va_start(ap, format);
	vsnprintf(line + n, (size_t)(LOG_LINE_BYTES - n), format, ap);
	va_end(ap);
	pthread_cond_signal(&c->logged);
}

void log_error(kvs_client *c, const char *format, ...)
{
	char text[sizeof c->info.error];
	va_list ap;
	va_start(ap, format);
	vsnprintf(text, sizeof text, format, ap);
	va_end(ap);
	if (strcmp(text, c->info.error) == 0)
		return;
	memcpy(c->info.error, text, sizeof text);
	log_line(c, "warn", "%s", text);
}

void copy_text(char *dst, size_t cap, const char *s, size_t n)
{
	if (n >= cap)
		n = cap - 1;
	if (n)
		memcpy(dst, s, n);
	dst[n] = 0;
}

void wake_by(kvs_client *c, int64_t at_ms)
{
	if (at_ms < c->due_ms) {
		c->due_ms = at_ms;
		kvs_wake(c->ctl_fd);
	}
}

void session_break(kvs_client *c, const char *why)
{
	if (c->state == IDLE || c->breaking[0])
		return;
	snprintf(c->breaking, sizeof c->breaking, "%s", why);
	kvs_wake(c->ctl_fd);
}

/* ---- public ---- */

const char *kvs_strerror(int error)
{
	static const char *const texts[] = {
		[0] = "ok",
		[-KVS_E_ARG] = "invalid argument",
		[-KVS_E_NOT_CONNECTED] = "not connected to a sidecar",
		[-KVS_E_FULL] = "submission ring is full",
		[-KVS_E_DEGRADED] = "session is being replaced or the sidecar drains",
		[-KVS_E_TOO_BIG] = "record exceeds 1 MiB or half the submission ring",
		[-KVS_E_UNKNOWN] = "no such open lease",
		[-KVS_E_LIMIT] = "too many open leases, copies, queries, requests or regions",
		[-KVS_E_FORKED] = "client belongs to the parent process",
		[-KVS_E_CLOSED] = "client is closed",
		[-KVS_E_SYS] = "system call failed",
		[-KVS_E_BUFFER] = "buffer is too small",
		[-KVS_E_UNSUPPORTED] = "the sidecar has no page store, or takes no segments",
		[-KVS_E_UNKILLABLE] = "this process may not kill the sidecar, and could wait for it for ever: run both as one user and in one PID namespace",
		[-KVS_E_GPU] = "the CUDA driver refused, or is missing",
	};
	if (error == KVS_KEPT)
		return "kept until a session exists";
	return error <= 0 && error > -(int)(sizeof texts / sizeof *texts) ? texts[-error] : "unknown error";
}

int kvs_wait_log(kvs_client *c, char *buf, uint64_t cap)
{
	CHECK(c);
	if (!buf || !cap)
		return KVS_E_ARG;
	int rc = 0;
	pthread_mutex_lock(&c->mu);
	while (c->log_tail == c->log_head && !c->log_ended)
		pthread_cond_wait(&c->logged, &c->mu);
	if (c->log_tail != c->log_head) {
		const char *line = c->log[c->log_tail++ % LOG_LINES];
		copy_text(buf, cap, line, strnlen(line, LOG_LINE_BYTES));
		rc = 1;
	}
	pthread_mutex_unlock(&c->mu);
	return rc;
}

int kvs_end_log(kvs_client *c)
{
	CHECK(c);
	pthread_mutex_lock(&c->mu);
	c->log_ended = true;
	pthread_cond_broadcast(&c->logged);
	pthread_mutex_unlock(&c->mu);
	return 0;
}

struct timespec at_ms(int64_t ms)
{
	return (struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
}
