/* Bytes of a sidecar that is broken or hostile: messages with changed bytes and lengths, and rings whose shared words and data change at any time.
 * The sanitizers see an access outside of a message or a ring.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client.h"
#include "require.h"

#define RING_BYTES 65536
#define OPS 200
#define BODY_MAX_BYTES 1500
#define POP_BYTES 2000

static uint64_t state = 88172645463325252ull;

static uint64_t any(void)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return state;
}

static uint64_t below(uint64_t n)
{
	return any() % n;
}

/* A message that has the keys of all. */
static struct mpw message(void)
{
	static const uint8_t boot[16] = {7};
	struct mpw w = {0};
	mpw_map(&w, below(9) ? 10 : (uint32_t)any());
	mpw_put_uint(&w, "id", any() >> below(64));
	mpw_put_uint(&w, "version", 1 << 16);
	mpw_put_bin(&w, "boot", boot, below(17));
	mpw_put_str(&w, "node", "a node");
	mpw_put_str(&w, "endpoint", "10.0.0.1:7650");
	mpw_str(&w, "fenced");
	mpw_bool(&w, below(2));
	mpw_str(&w, "features");
	mpw_array(&w, 2);
	mpw_str(&w, "copy");
	mpw_str(&w, "store");
	mpw_put_str(&w, "message", "a text");
	mpw_put_str(&w, "state", "admitted");
	mpw_put_str(&w, "code", "limit");
	REQUIRE(!w.bad);
	return w;
}

static void read_all(const uint8_t *body, size_t n)
{
	struct welcome welcome;
	struct refusal refusal;
	struct admitted admitted;
	uint64_t id;
	size_t off, len;
	read_welcome(body, n, &welcome);
	read_error(body, n, &refusal);
	read_admitted(body, n, &admitted);
	read_id(body, n, &id);
	mp_is_map(body, n);
	if (mp_find(body, n, "message", &off, &len))
		REQUIRE(off <= n && len <= n - off);
}

static void messages(long rounds)
{
	for (long i = 0; i < rounds; i++) {
		struct mpw w = message();
		for (uint64_t m = below(6); m; m--)
			w.buf[below(w.len)] = (uint8_t)any();
		size_t n = below(3) ? w.len : below(w.len + 1);
		uint8_t *exact = malloc(n ? n : 1); /* what is behind it is not ours */
		REQUIRE(exact);
		memcpy(exact, w.buf, n);
		read_all(exact, n);
		free(exact);
		mpw_free(&w);
	}
}

static void rings(long rounds)
{
	uint8_t out[POP_BYTES], body[BODY_MAX_BYTES];
	memset(body, 1, sizeof body);
	for (long i = 0; i < rounds; i++) {
		struct kvs_ring *r = aligned_alloc(KVS_CACHE_LINE, sizeof *r + RING_BYTES);
		REQUIRE(r);
		memset(r, 0, sizeof *r + RING_BYTES);
		struct kvs_ring_end reads, writes;
		kvs_ring_attach(&reads, r, RING_BYTES);
		kvs_ring_attach(&writes, r, RING_BYTES);
		for (int op = 0; op < OPS; op++) {
			if (below(2))
				kvs_ring_push(&writes, (uint16_t)below(40), 0, any(), 0, body, (uint32_t)below(sizeof body));
			if (!below(4))
				r->head += below(3) * 8;
			if (!below(8))
				r->tail = any();
			if (!below(3))
				((uint8_t *)(r + 1))[below(RING_BYTES)] = (uint8_t)any();
			if (kvs_ring_pop(&reads, out, sizeof out) < 0 && below(2))
				break;
		}
		free(r);
	}
}

/* A sidecar that reports HELD without an end: the engine has its blocks back all the same. */
static void holds(void)
{
	struct kvs_config config = {.size = sizeof config, .role = KVS_WORKER, .layers = 1, .socket_path = "/none"};
	kvs_client *c;
	struct lease *l = calloc(1, sizeof *l);
	REQUIRE(kvs_open(&config, &c) == 0 && l);
	*l = (struct lease){.id = 1, .type = KVS_REC_INTENT, .deadline_ms = 60000, .held_ms = 5000, .since_ms = 5000};
	lease_add(c, l);
	int64_t last = 0;
	for (int64_t now = 5000; now < 5000 + 3 * KVS_MAX_HOLD_MS; now += 1000) {
		lease_held_on(c, 1, now);
		last = l->since_ms == now ? now : last;
	}
	REQUIRE(last == 5000 + KVS_MAX_HOLD_MS - 1000 && l->end_ms == last + 60000);
	kvs_close(c);
}

int main(int argc, char **argv)
{
	long rounds = argc > 1 ? atol(argv[1]) : 20000;
	messages(rounds);
	rings(rounds / 20);
	holds();
	puts("ok");
	return 0;
}
