/* memcpy.c: what `kvspray-bench copy --transport shm` is measured against: C memcpy of scattered blocks between two memfds, with
 * as many threads as the transport has lanes.
 *
 * Descriptors 3 and 4 are the source and destination memfds. Standard input, little-endian: u64 region bytes, u64 block bytes,
 * u64 blocks, u64 threads, u64 bytes of all (the last block may be used in part); then u64 source offsets and u64 destination offsets, one per block; then one byte per round. After
 * each round two decimal numbers go to standard output: wall nanoseconds and CPU nanoseconds.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static uint64_t head[5];
static uint64_t *from, *to;
static char *src, *dst;
static pthread_barrier_t begin, end;

static void die(const char *what)
{
	perror(what);
	exit(1);
}

static void fill(void *p, size_t n)
{
	size_t at = 0;
	while (at < n) {
		ssize_t k = read(0, (char *)p + at, n - at);
		if (k <= 0)
			die("read the block list");
		at += (size_t)k;
	}
}

static void *copier(void *arg)
{
	uint64_t me = (uint64_t)(uintptr_t)arg, bytes = head[1], n = head[2], threads = head[3];
	uint64_t last = head[4] - (n - 1) * bytes;
	for (;;) {
		pthread_barrier_wait(&begin);
		for (uint64_t i = n * me / threads; i < n * (me + 1) / threads; i++)
			memcpy(dst + to[i], src + from[i], i == n - 1 ? last : bytes);
		pthread_barrier_wait(&end);
	}
	return NULL;
}

/* Where huge pages can be mapped as such, as the other side does it. */
static void *map(int fd, uint64_t bytes, int prot)
{
	const uint64_t huge = 2 << 20;
	char *span = mmap(NULL, bytes + huge, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (span == MAP_FAILED)
		die("mmap");
	void *at = mmap(span + (-(uintptr_t)span & (huge - 1)), bytes, prot, MAP_SHARED | MAP_POPULATE | MAP_FIXED, fd, 0);
	if (at == MAP_FAILED)
		die("mmap");
	return at;
}

static uint64_t ns(clockid_t c)
{
	struct timespec t;
	clock_gettime(c, &t);
	return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

int main(void)
{
	char go;
	fill(head, sizeof head);
	if (head[1] == 0 || head[2] == 0 || head[2] > (1ull << 26) || head[3] == 0 || head[3] > 256 ||
	    head[4] <= (head[2] - 1) * head[1] || head[4] > head[2] * head[1])
		return 2;
	from = calloc(head[2], 8);
	to = calloc(head[2], 8);
	if (!from || !to)
		die("calloc");
	fill(from, head[2] * 8);
	fill(to, head[2] * 8);
	for (uint64_t i = 0; i < head[2]; i++)
		if (from[i] > head[0] || to[i] > head[0] || head[1] > head[0] - from[i] || head[1] > head[0] - to[i])
			return 2;
	src = map(3, head[0], PROT_READ);
	dst = map(4, head[0], PROT_READ | PROT_WRITE);
	pthread_barrier_init(&begin, NULL, (unsigned)head[3] + 1);
	pthread_barrier_init(&end, NULL, (unsigned)head[3] + 1);
	for (uint64_t i = 0; i < head[3]; i++) {
		pthread_t t;
		if (pthread_create(&t, NULL, copier, (void *)(uintptr_t)i))
			die("pthread_create");
	}
	while (read(0, &go, 1) == 1) {
		uint64_t wall = ns(CLOCK_MONOTONIC), cpu = ns(CLOCK_PROCESS_CPUTIME_ID);
		pthread_barrier_wait(&begin);
		pthread_barrier_wait(&end);
		printf("%llu %llu\n", (unsigned long long)(ns(CLOCK_MONOTONIC) - wall),
		       (unsigned long long)(ns(CLOCK_PROCESS_CPUTIME_ID) - cpu));
		fflush(stdout);
	}
	return 0;
}
