/* The C half of the litmus test: takes records from the submission ring with the shim's own ring code, checks each against
 * the pattern, and sends it back on the completion ring. Descriptors: 3 rings memfd, 4 SQ eventfd (wakes us), 5 CQ eventfd (wakes
 * Go). argv[1]: how many records.
 */
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "internal.h"

static void die(const char *what, unsigned long long a, unsigned long long b)
{
	fprintf(stderr, "litmus: %s: %llu, want %llu\n", what, a, b);
	exit(1);
}

static uint64_t mix(uint64_t x)
{
	x ^= x >> 33;
	x *= 0xff51afd7ed558ccdull;
	x ^= x >> 33;
	return x;
}

/* The same as size() in litmus_test.go. */
static uint32_t size_of(uint64_t seq)
{
	uint64_t r = mix(seq);
	if (r % 61 == 0)
		return (uint32_t)((r >> 8) % 30000);
	return (uint32_t)((r >> 8) % 200);
}

int main(int argc, char **argv)
{
	uint64_t want = argc > 1 ? strtoull(argv[1], NULL, 10) : 0;
	struct stat st;
	if (fstat(3, &st))
		die("fstat", 0, 1);
	uint8_t *base = mmap(NULL, (size_t)st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, 3, 0);
	if (base == MAP_FAILED)
		die("mmap", 0, 1);
	struct kvs_rings_header *h = (void *)base;
	struct kvs_ring_end sub, comp;
	kvs_ring_attach(&sub, (struct kvs_ring *)(base + h->submission), h->submission_bytes);
	kvs_ring_attach(&comp, (struct kvs_ring *)(base + h->completion), h->completion_bytes);
	static _Alignas(8) uint8_t buf[KVS_RECORD_MAX_BYTES];
	for (uint64_t seq = 1; seq <= want;) {
		int64_t n = kvs_ring_pop(&sub, buf, sizeof buf);
		if (n < 0)
			die("pop", (unsigned long long)n, 0);
		if (n == 0) {
			if (!kvs_ring_sleep(&sub))
				continue;
			struct pollfd p = {.fd = 4, .events = POLLIN};
			/* A lost wake-up shows as this time-out. */
			if (poll(&p, 1, 30000) != 1)
				die("no wake-up, records so far", seq - 1, want);
			uint64_t count;
			if (read(4, &count, sizeof count) != sizeof count)
				die("read the SQ eventfd", 0, 1);
			continue;
		}
		struct kvs_record *rec = (void *)buf;
		uint8_t *body = buf + sizeof *rec;
		if (rec->seq != seq)
			die("seq", rec->seq, seq);
		if (rec->lease != seq * 3 || rec->epoch != seq >> 4)
			die("lease", rec->lease, seq * 3);
		if (rec->body_bytes != size_of(seq))
			die("body_bytes", rec->body_bytes, size_of(seq));
		for (uint32_t i = 0; i < rec->body_bytes; i++)
			if (body[i] != (uint8_t)(seq * 131 + i * 7))
				die("byte", body[i], (uint8_t)(seq * 131 + i * 7));
		for (;;) {
			int r = kvs_ring_push(&comp, rec->type, (uint16_t)seq, rec->lease, rec->epoch, body, rec->body_bytes);
			if (r == 0)
				break;
			if (r != KVS_E_FULL)
				die("push", (unsigned long long)(int64_t)r, 0);
			sched_yield();
		}
		if (kvs_ring_wake(&comp)) {
			uint64_t one = 1;
			if (write(5, &one, sizeof one) != sizeof one)
				die("write bell", 0, 1);
		}
		seq++;
	}
	return 0;
}
