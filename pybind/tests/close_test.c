/* close_test: a client and the users of its flags on a GPU, closed in any order. Meant for the
 * sanitizers.
 *
 *   close_test ROUNDS      KVSPRAY_LIBCUDA names the fake driver
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kvspray/kvspray.h"
#include "require.h"

enum { LAYERS = 4, GPUS = 3, CACHE = 1 << 20, CACHE_AT = 16 << 20 /* an allocation of the fake driver */ };

static int (*live)(void);
static void *stream = (void *)1;

static uint64_t flag_of(kvs_client *c, uint32_t layer)
{
	uint64_t bytes;
	const uint8_t *flags = kvs_flags(c, &bytes);
	const struct kvs_flags_header *h = (const void *)flags;
	return *(const uint64_t *)(flags + h->layer_flags + layer * sizeof(struct kvs_flag));
}

static kvs_client *opened(void)
{
	struct kvs_config config = {.size = sizeof config, .role = KVS_WORKER,
	                            .socket_path = "/nonexistent/kvspray.sock", .engine_name = "test",
	                            .engine_version = "1", .engine_id = "close", .layers = LAYERS};
	for (int i = 0; i < 5; i++)
		config.ranks[2 * i + 1] = 1;
	kvs_client *c;
	REQUIRE(kvs_open(&config, &c) == 0);
	return c;
}

/* Opens a client with some users of its GPU flags, and closes them one after another, the client
 * as number client_at. */
static void round_of(int client_at, int gpus, int started)
{
	kvs_client *c = opened();
	kvs_gpu *g[GPUS] = {0};
	struct kvs_region region;
	char error[256];
	int before = live();
	if (started) {
		const uint8_t layout[] = {0x80};
		REQUIRE(kvs_region_gpu(CACHE_AT, CACHE, &region, error, sizeof error) == 0);
		REQUIRE(kvs_start(c, &region, 1, layout, sizeof layout) == 0);
	}
	for (int i = 0; i < gpus; i++) {
		int rc = kvs_gpu_open(c, &g[i], error, sizeof error);
		REQUIRE(rc == 0 || (i > 0 && rc == KVS_E_GPU)); /* the driver registers memory once */
	}
	if (g[0]) {
		REQUIRE(kvs_gpu_step(g[0], 7, stream) == 0 && kvs_gpu_signal_layer(g[0], 1, stream) == 0);
		REQUIRE(flag_of(c, 1) == 7 || flag_of(c, 1) == 0); /* the driver may keep the record only */
	}
	for (int i = 0; i <= gpus; i++) {
		if (i == client_at)
			kvs_close(c);
		if (i < gpus && g[i]) {
			if (i >= client_at) { /* its flags are still there */
				REQUIRE(kvs_gpu_step(g[i], 8, stream) == 0);
				REQUIRE(kvs_gpu_signal_layer(g[i], 2, stream) == 0);
				REQUIRE(kvs_gpu_signal_step(g[i], stream) == 0);
			}
			kvs_gpu_close(g[i]);
		}
	}
	if (started)
		kvs_region_free(&region);
	REQUIRE(live() == before);
}

/* A forked child closes what it has, the client first or last. */
static void forked(int client_first)
{
	kvs_client *c = opened();
	kvs_gpu *g;
	char error[256];
	REQUIRE(kvs_gpu_open(c, &g, error, sizeof error) == 0);
	pid_t child = fork();
	if (child == 0) {
		if (client_first)
			kvs_close(c);
		kvs_gpu_close(g);
		if (!client_first)
			kvs_close(c);
		_exit(0);
	}
	int status;
	REQUIRE(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
	kvs_close(c);
	kvs_gpu_close(g);
}

int main(int argc, char **argv)
{
	void *driver = dlopen(getenv("KVSPRAY_LIBCUDA"), RTLD_NOW);
	REQUIRE(argc == 2 && driver);
	*(void **)&live = dlsym(driver, "fake_live");
	REQUIRE(live);
	for (int i = 0; i < atoi(argv[1]); i++)
		for (int gpus = 0; gpus <= GPUS; gpus++)
			for (int at = 0; at <= gpus; at++)
				for (int started = 0; started < 2; started++)
					round_of(at, gpus, started);
	forked(0);
	forked(1);
	puts("ok");
	return 0;
}
