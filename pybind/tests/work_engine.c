/* SPDX-License-Identifier: Apache-2.0
 *
 * work_engine: an engine's process for tests of the sidecar's side: the real thread of work.c, on a driver without a GPU.
 *
 *   work_engine BASE BYTES     KVSPRAY_LIBCUDA names the fake driver
 *
 * Descriptor 3 is a SOCK_SEQPACKET socket, a command and its answer in a packet each. Descriptor 4 is a file that stands for the GPU's memory;
 * it is mapped at BASE, so that addresses mean the same in both processes.
 */
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "capture.h"
#include "require.h"
#include "work.h"

enum { SOCKET = 3, MEMORY = 4, REGIONS = 16, COMMAND_BYTES = 512 };

static void answer(int fd, int bell, const char *format, ...)
{
	char text[COMMAND_BYTES];
	union {
		struct cmsghdr head;
		char bytes[CMSG_SPACE(2 * sizeof(int))];
	} control;
	va_list args;
	va_start(args, format);
	vsnprintf(text, sizeof text, format, args);
	va_end(args);
	struct iovec v = {text, strlen(text)};
	struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1};
	if (fd >= 0) {
		int fds[2] = {fd, bell};
		memset(&control, 0, sizeof control);
		m.msg_control = &control;
		m.msg_controllen = sizeof control;
		struct cmsghdr *c = CMSG_FIRSTHDR(&m);
		c->cmsg_level = SOL_SOCKET;
		c->cmsg_type = SCM_RIGHTS;
		c->cmsg_len = CMSG_LEN(sizeof fds);
		memcpy(CMSG_DATA(c), fds, sizeof fds);
	}
	REQUIRE(sendmsg(SOCKET, &m, MSG_NOSIGNAL) == (ssize_t)strlen(text));
}

static void says(void *arg, const char *level, const char *text)
{
	(void)arg;
	fprintf(stderr, "%s: %s\n", level, text);
}

static _Atomic int overs;

static void over(void *arg)
{
	(void)arg;
	overs++;
}

int main(int argc, char **argv)
{
	REQUIRE(argc == 3);
	void *lib = dlopen(getenv("KVSPRAY_LIBCUDA"), RTLD_NOW), *base = (void *)strtoull(argv[1], NULL, 0);
	REQUIRE(lib);
	void (*lend)(void *, size_t), (*hold)(int), (*break_context)(int);
	int (*moved)(void), (*astray)(void), (*jobs)(void), (*live)(void), (*in_graphs)(void), (*move_waits)(void);
	void (*replays)(int);
#define RESOLVE(name, symbol) REQUIRE(*(void **)&name = dlsym(lib, "fake_" symbol))
	RESOLVE(lend, "lend");
	RESOLVE(hold, "hold");
	RESOLVE(break_context, "break");
	RESOLVE(moved, "moved");
	RESOLVE(astray, "astray");
	RESOLVE(jobs, "jobs");
	RESOLVE(live, "live");
	RESOLVE(in_graphs, "in_graphs");
	RESOLVE(move_waits, "move_waits");
	RESOLVE(replays, "replays");
	struct graph graph = {0};
	REQUIRE(mmap(base, strtoull(argv[2], NULL, 0), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED_NOREPLACE, MEMORY, 0) == base);
	struct work_region regions[REGIONS];
	uint32_t n = 0;
	struct work *w = NULL;
	char line[COMMAND_BYTES];
	for (ssize_t got; (got = recv(SOCKET, line, sizeof line - 1, 0)) > 0;) {
		unsigned long long at = 0, bytes = 0;
		int fd = -1, bell = -1, number = 0;
		line[got] = 0;
		if (sscanf(line, "lend %llu %llu", &at, &bytes) == 2) { /* what the GPU knows as an allocation */
			lend((void *)at, bytes);
		} else if (sscanf(line, "region %llu %llu", &at, &bytes) == 2) {
			REQUIRE(n < REGIONS);
			regions[n++] = (struct work_region){at, bytes};
		} else if (strcmp(line, "begin") == 0) {
			if (!w)
				REQUIRE((w = work_start(regions, n, says, over, NULL)));
			REQUIRE(work_begin(w, &fd, &bell));
		} else if (strcmp(line, "graph") == 0) {
			capture(&graph, lib);
			REQUIRE(work_graph(w, &graph) && !work_graph(w, &graph));
		} else if (strcmp(line, "no graph") == 0) {
			REQUIRE(work_graph(w, NULL));
		} else if (strcmp(line, "again") == 0) {
			REQUIRE(work_graph(w, &graph));
		} else if (sscanf(line, "replay %d", &number) == 1) { /* a layer in so many microseconds at most; 0: none */
			replays(number);
		} else if (strcmp(line, "end") == 0) {
			work_end(w);
		} else if (sscanf(line, "hold %d", &number) == 1) {
			hold(number);
		} else if (sscanf(line, "break %d", &number) == 1) {
			break_context(number);
		} else {
			REQUIRE(strcmp(line, "look") == 0);
		}
		answer(fd, bell, "%d %d %d %d %d %d", moved(), astray(), jobs(), (int)overs, in_graphs(), move_waits());
		if (fd >= 0)
			REQUIRE(close(fd) == 0);
	}
	if (w) {
		work_stop(w);
		work_free(w);
	}
	replays(0);
	graph_close(&graph);
	REQUIRE(live() == 0 && astray() == 0);
	return 0;
}
