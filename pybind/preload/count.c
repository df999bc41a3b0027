/* What was taken, what passed by and why, by entry point. */
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "preload.h"

struct counter {
	_Atomic uint64_t copies, bytes;
};

/* Of a memory file with the name kvspray-preload, which `kvspray doctor` reads (internal/ui/doctor/preload_linux.go). Texts end with a zero byte. */
struct table {
	char magic[8];
	uint32_t pid; /* of whom the counters are: a child inherits the file */
	uint32_t entries, outcomes, text_bytes;
	struct counter again;
	struct counter counters[ENTRY_COPIES][OUT_COUNT];
	char entry[ENTRY_COPIES][64], outcome[OUT_COUNT][64];
};

static struct table unread; /* without a file: for the report alone */
static struct table *table = &unread;
static int file = -1;

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

enum { FILE_FROM = 512 }; /* above the descriptors that programs number themselves */

void count_begin(void)
{
	int low = memfd_create("kvspray-preload", MFD_CLOEXEC), fd = low < 0 ? -1 : fcntl(low, F_DUPFD_CLOEXEC, FILE_FROM);
	struct table *t = MAP_FAILED;
	if (fd < 0)
		fd = low;
	else
		close(low);
	if (fd >= 0 && ftruncate(fd, sizeof *t) == 0)
		t = mmap(NULL, sizeof *t, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (t == MAP_FAILED) {
		if (fd >= 0)
			close(fd);
		return; /* the report at the end has the counters all the same */
	}
	memcpy(t->magic, "kvspray1", sizeof t->magic);
	t->entries = ENTRY_COPIES;
	t->outcomes = OUT_COUNT;
	t->text_bytes = sizeof t->entry[0];
	for (int e = 0; e < ENTRY_COPIES; e++)
		snprintf(t->entry[e], sizeof t->entry[e], "%s", entries[e]);
	for (int o = 0; o < OUT_COUNT; o++)
		snprintf(t->outcome[o], sizeof t->outcome[o], "%s", outcomes[o]);
	__atomic_store_n(&t->pid, (uint32_t)getpid(), __ATOMIC_RELEASE); /* last: from here on the file is whole */
	file = fd;
	table = t;
}

static void add(struct counter *c, uint64_t bytes)
{
	__atomic_fetch_add(&c->copies, 1, __ATOMIC_RELAXED);
	__atomic_fetch_add(&c->bytes, bytes, __ATOMIC_RELAXED);
}

void count(enum entry e, enum outcome why, uint64_t bytes)
{
	add(&table->counters[e][why], bytes);
}

void count_again(uint64_t bytes)
{
	add(&table->again, bytes);
}

void count_nothing(void)
{
	if (file >= 0)
		close(file);
	file = -1;
	memset(&unread, 0, sizeof unread);
	table = &unread;
}

/* By one write: lines of several processes do not mix. */
void print_line(const char *format, ...)
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
			struct counter *c = &table->counters[e][o];
			seen += c->copies;
			if (c->copies)
				print_line("%s: %" PRIu64 " copies, %" PRIu64 " bytes: %s", entries[e], c->copies, c->bytes, outcomes[o]);
		}
	}
	if (table->again.copies)
		print_line("of these %" PRIu64 " copies, %" PRIu64 " bytes were made again by the driver: the sidecar did not finish them", table->again.copies, table->again.bytes);
	if (!seen && driver_loaded())
		print_line("no copy of this process came by");
	struct kvs_info info = {.size = sizeof info};
	if (client && kvs_status_read(client, &info) == 0 && info.error[0])
		print_line("the last error of the session: %s", info.error);
}
