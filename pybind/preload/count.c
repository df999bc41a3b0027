/* SPDX-License-Identifier: Apache-2.0
 *
 * What was taken, what passed by and why, by entry point.
 */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

#include "preload.h"

struct counter {
	_Atomic uint64_t copies, bytes;
};

static struct counter counters[ENTRY_COPIES][OUT_COUNT], again;

static const char *const entries[] = {
#define NAME(name, params, args) #name,
	COPIES(NAME)
#undef NAME
};

static const char *const outcomes[] = {
#define TEXT(name, text) text,
	OUTCOMES(TEXT)
#undef TEXT
};

static void add(struct counter *c, uint64_t bytes)
{
	__atomic_fetch_add(&c->copies, 1, __ATOMIC_RELAXED);
	__atomic_fetch_add(&c->bytes, bytes, __ATOMIC_RELAXED);
}

void count(enum entry e, enum outcome why, uint64_t bytes)
{
	add(&counters[e][why], bytes);
}

void count_again(uint64_t bytes)
{
	add(&again, bytes);
}

void count_nothing(void)
{
	for (int e = 0; e < ENTRY_COPIES; e++)
		for (int o = 0; o < OUT_COUNT; o++)
			counters[e][o] = (struct counter){0, 0};
	again = (struct counter){0, 0};
}

/* By one write: lines of several processes do not mix. */
void say(const char *format, ...)
{
	char line[512];
	int at = snprintf(line, sizeof line, "kvspray preload [%d]: ", (int)getpid());
	va_list ap;
	va_start(ap, format);
	int n = vsnprintf(line + at, sizeof line - (size_t)at - 1, format, ap);
	va_end(ap);
	at = n < 0 ? at : at + n < (int)sizeof line - 1 ? at + n : (int)sizeof line - 2;
	line[at++] = '\n';
	ssize_t written = write(STDERR_FILENO, line, (size_t)at);
	(void)written;
}

void report(void)
{
	uint64_t seen = 0;
	for (int e = 0; e < ENTRY_COPIES; e++) {
		for (int o = 0; o < OUT_COUNT; o++) {
			struct counter *c = &counters[e][o];
			seen += c->copies;
			if (c->copies)
				say("%s: %" PRIu64 " copies, %" PRIu64 " bytes: %s", entries[e], c->copies, c->bytes, outcomes[o]);
		}
	}
	if (again.copies)
		say("of these %" PRIu64 " copies, %" PRIu64 " bytes were made again by the driver: the sidecar did not finish them", again.copies, again.bytes);
	if (!seen && driver_loaded())
		say("no copy of this process came by");
	struct kvs_info info = {.size = sizeof info};
	if (client && kvs_status_read(client, &info) == 0 && info.error[0])
		say("the last error of the session: %s", info.error);
}
