/* ring_litmus: the rings under load, between threads (heap memory, so that a thread sanitizer sees it), between processes
 * (memfd), and one end of either for a test in another language.
 *
 *   ring_litmus threads N BYTES    N records through a ring of BYTES on the heap, producer and consumer in two threads
 *   ring_litmus processes N BYTES  the same through a memfd between two processes
 *   ring_litmus produce FD OFFSET BYTES BELL N   writes N records into the ring at OFFSET of FD, waking eventfd BELL
 *   ring_litmus consume FD OFFSET BYTES BELL N   reads N records, sleeping on BELL
 *   ring_litmus mutate N           pops from N randomly damaged rings: must never read outside, whatever it contains
 *
 * Record i (from 1): type 1 + i % 6, lease i * 3, epoch i / 7, body of i * 37 % 301 bytes, byte k = (i + k) & 255.
 */
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kvspray/kvspray.h"

#define BODY_MAX 301
#define WAIT_MS 20000

struct side {
	struct kvs_ring_end end;
	int bell;
	uint64_t n;
	uint64_t sleeps;
};

static void die(const char *what, uint64_t i)
{
	fprintf(stderr, "ring_litmus: %s at record %llu\n", what, (unsigned long long)i);
	exit(1);
}

static uint32_t body_of(uint64_t i, uint8_t *body)
{
	uint32_t n = (uint32_t)(i * 37 % BODY_MAX);
	for (uint32_t k = 0; k < n; k++)
		body[k] = (uint8_t)(i + k);
	return n;
}

static void wake(int bell)
{
	uint64_t one = 1;
	if (write(bell, &one, sizeof one) != sizeof one)
		die("write to the bell", 0);
}

static void *produce(void *arg)
{
	struct side *s = arg;
	uint8_t body[BODY_MAX];
	for (uint64_t i = 1; i <= s->n; i++) {
		uint32_t n = body_of(i, body);
		int rc;
		while ((rc = kvs_ring_push(&s->end, (uint16_t)(1 + i % 6), 0, i * 3, i / 7, body, n)) == KVS_E_FULL)
			poll(NULL, 0, 0);
		if (rc)
			die("push failed", i);
		if (kvs_ring_wake(&s->end)) {
			s->sleeps++;
			wake(s->bell);
		}
		/* Pauses let the consumer reach its sleep: the races are there. */
		if (i % 64 == 0)
			sched_yield();
	}
	return NULL;
}

static void *consume(void *arg)
{
	struct side *s = arg;
	uint8_t want[BODY_MAX], buf[sizeof(struct kvs_record) + BODY_MAX];
	for (uint64_t i = 1; i <= s->n;) {
		int64_t got = kvs_ring_pop(&s->end, buf, sizeof buf);
		if (got < 0)
			die("pop failed", i);
		if (got == 0) {
			if (kvs_ring_sleep(&s->end)) {
				struct pollfd p = {.fd = s->bell, .events = POLLIN};
				uint64_t count;
				if (poll(&p, 1, WAIT_MS) != 1)
					die("lost wake-up", i);
				if (read(s->bell, &count, sizeof count) != sizeof count)
					die("read of the bell", i);
			}
			continue;
		}
		struct kvs_record r;
		memcpy(&r, buf, sizeof r);
		uint32_t n = body_of(i, want);
		if (r.seq != i || r.type != 1 + i % 6 || r.lease != i * 3 || r.epoch != i / 7 || r.body_bytes != n ||
		    got != (int64_t)(sizeof r + n) || memcmp(buf + sizeof r, want, n) != 0)
			die("wrong record", i);
		i++;
	}
	return NULL;
}

static int run(uint64_t n, uint64_t bytes, int processes)
{
	uint64_t total = sizeof(struct kvs_ring) + bytes;
	struct kvs_ring *ring;
	if (processes)
		ring = mmap(NULL, total, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	else
		ring = aligned_alloc(KVS_CACHE_LINE, total);
	memset(ring, 0, total);
	struct side in = {.bell = eventfd(0, 0), .n = n}, out;
	kvs_ring_attach(&in.end, ring, bytes);
	out = in;
	if (processes) {
		pid_t pid = fork();
		if (pid == 0) {
			consume(&out);
			_exit(0);
		}
		produce(&in);
		int status;
		waitpid(pid, &status, 0);
		munmap(ring, total);
		if (status)
			return 1;
	} else {
		pthread_t a, b;
		pthread_create(&a, NULL, produce, &in);
		pthread_create(&b, NULL, consume, &out);
		pthread_join(a, NULL);
		pthread_join(b, NULL);
		free(ring);
	}
	close(in.bell);
	printf("%llu records, %llu wake-ups\n", (unsigned long long)n, (unsigned long long)in.sleeps);
	return 0;
}

static int one_end(char **argv, int producer)
{
	int fd = atoi(argv[2]);
	uint64_t offset = strtoull(argv[3], NULL, 0), bytes = strtoull(argv[4], NULL, 0);
	uint64_t total = offset + sizeof(struct kvs_ring) + bytes;
	uint8_t *at = mmap(NULL, total, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (at == MAP_FAILED)
		die("mmap", 0);
	struct side s = {.bell = atoi(argv[5]), .n = strtoull(argv[6], NULL, 0)};
	kvs_ring_attach(&s.end, (struct kvs_ring *)(at + offset), bytes);
	if (producer)
		produce(&s);
	else
		consume(&s);
	return 0;
}

/* Exactly as many bytes as the ring has, so that a sanitizer sees a read behind it. */
static int mutate(uint64_t n)
{
	const uint64_t bytes = KVS_RING_MIN_BYTES;
	struct kvs_ring *ring = aligned_alloc(KVS_CACHE_LINE, sizeof *ring + bytes);
	uint8_t *data = (uint8_t *)(ring + 1), body[BODY_MAX], *buf = malloc(bytes);
	uint64_t rng = 88172645463325252ull, popped = 0, refused = 0;
	/* Pads of a whole ring, one after the other, would keep the reader for as long as the writer likes. */
	memset(ring, 0, sizeof *ring);
	struct kvs_ring_end reader;
	kvs_ring_attach(&reader, ring, bytes);
	uint32_t pad[2] = {(uint32_t)bytes, KVS_REC_PAD};
	memcpy(data, pad, sizeof pad);
	ring->head = bytes;
	if (kvs_ring_pop(&reader, buf, bytes) != KVS_E_ARG || ring->tail != 0)
		die("a pad of the whole ring was taken", 0);
	for (uint64_t round = 0; round < n; round++) {
#define RANDOM() (rng ^= rng << 13, rng ^= rng >> 7, rng ^= rng << 17)
		memset(ring, 0, sizeof *ring);
		struct kvs_ring_end in, out;
		kvs_ring_attach(&in, ring, bytes);
		kvs_ring_attach(&out, ring, bytes);
		/* Start anywhere, so that records wrap. */
		uint64_t start = (RANDOM() % 4096) * 8;
		in.head = in.tail = out.tail = ring->head = ring->tail = start;
		uint64_t k = 1 + RANDOM() % 8;
		for (uint64_t i = 1; i <= k; i++)
			kvs_ring_push(&in, 1, 0, i, 0, body, body_of(i, body));
		for (uint64_t damage = RANDOM() % 4; damage; damage--) {
			uint64_t used = in.head - start, pos = (start + RANDOM() % (used + 8)) & (bytes - 1);
			switch (RANDOM() % 3) {
			case 0:
				data[pos] ^= (uint8_t)(1u << (RANDOM() & 7));
				break;
			case 1:
				memset(data + (pos & ~7ull), (int)(RANDOM() & 255), 4);
				break;
			default:
				ring->head = RANDOM() % 5 ? ring->head + RANDOM() % 64 : RANDOM();
			}
		}
		uint64_t cap = RANDOM() % 8 ? bytes : RANDOM() % 128;
		for (uint64_t i = 0; i <= k; i++) {
			int64_t got = kvs_ring_pop(&out, buf, cap);
			popped += got > 0;
			refused += got < 0;
			if (got > (int64_t)cap)
				die("pop wrote more than it may", round);
			if (got <= 0)
				break;
		}
	}
	free(ring);
	free(buf);
	printf("%llu popped, %llu refused\n", (unsigned long long)popped, (unsigned long long)refused);
	return popped && refused ? 0 : 1;
}

int main(int argc, char **argv)
{
	if (argc == 4 && !strcmp(argv[1], "threads"))
		return run(strtoull(argv[2], NULL, 0), strtoull(argv[3], NULL, 0), 0);
	if (argc == 4 && !strcmp(argv[1], "processes"))
		return run(strtoull(argv[2], NULL, 0), strtoull(argv[3], NULL, 0), 1);
	if (argc == 7 && !strcmp(argv[1], "produce"))
		return one_end(argv, 1);
	if (argc == 7 && !strcmp(argv[1], "consume"))
		return one_end(argv, 0);
	if (argc == 3 && !strcmp(argv[1], "mutate"))
		return mutate(strtoull(argv[2], NULL, 0));
	fprintf(stderr, "usage: ring_litmus threads|processes N BYTES | produce|consume FD OFFSET BYTES BELL N | mutate N\n");
	return 2;
}
