/* One engine worker on the real C library: argv = socket, region bytes, layers, then in hex: layout, INTENT body, STEP body
 * with lease 1 in it. Opens the lease, begins the step, signals its layers one by one, and prints the completion.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvspray/kvspray.h"

static void die(const char *what, long long code)
{
	fprintf(stderr, "shim: %s: %lld (%s)\n", what, code, code < 0 ? kvs_strerror((int)code) : "");
	exit(1);
}

static uint8_t *unhex(const char *s, uint32_t *n)
{
	*n = (uint32_t)(strlen(s) / 2);
	uint8_t *b = malloc(*n + 1);
	for (uint32_t i = 0; i < *n; i++) {
		unsigned v;
		if (sscanf(s + 2 * i, "%2x", &v) != 1)
			die("hex", i);
		b[i] = (uint8_t)v;
	}
	return b;
}

int main(int argc, char **argv)
{
	if (argc != 7)
		die("arguments", argc);
	uint32_t layers = (uint32_t)atoi(argv[3]);
	uint32_t layout_n, intent_n, step_n;
	uint8_t *layout = unhex(argv[4], &layout_n), *intent = unhex(argv[5], &intent_n), *step = unhex(argv[6], &step_n);
	struct kvs_region region;
	int r = kvs_region_alloc(strtoull(argv[2], NULL, 10), &region);
	if (r < 0)
		die("region", r);
	struct kvs_config config = {.size = sizeof config, .role = KVS_WORKER, .socket_path = argv[1], .engine_name = "c", .engine_version = "1",
		.engine_id = "shim", .ranks = {0, 1, 0, 1, 0, 1, 0, 1, 0, 1}, .layers = layers};
	kvs_client *c;
	if ((r = kvs_open(&config, &c)) < 0)
		die("open", r);
	if ((r = kvs_start(c, &region, 1, layout, layout_n)) < 0)
		die("start", r);
	if (!kvs_wait_connected(c, 10000)) {
		struct kvs_info info = {.size = sizeof info};
		kvs_status_read(c, &info);
		fprintf(stderr, "shim: not connected: %s\n", info.error);
		exit(1);
	}
	int64_t lease = kvs_submit(c, KVS_REC_INTENT, intent, intent_n, 20000);
	if (lease != 1)
		die("submit", lease);
	struct kvs_snapshot snapshot = {.lease = 1, .body = intent, .body_bytes = intent_n};
	if ((r = kvs_step(c, step, step_n, &snapshot, 1)) != 0)
		die("step", r);
	for (uint32_t l = 0; l < layers; l++)
		kvs_signal_layer(c, l, 1);
	kvs_signal_step(c, 1);
	if ((r = kvs_hold(c, &snapshot)) != 0)
		die("hold", r);
	if (kvs_wait(c, 10000) != 1)
		die("wait", 0);
	static _Alignas(8) uint8_t buf[1 << 16];
	int64_t n = kvs_poll(c, buf, sizeof buf);
	if (n <= 0)
		die("poll", n);
	struct kvs_record *rec = (void *)buf;
	printf("%u %u %llu\n", rec->type, rec->status, (unsigned long long)rec->lease);
	fflush(stdout);
	kvs_close(c);
	kvs_region_free(&region);
	return 0;
}
