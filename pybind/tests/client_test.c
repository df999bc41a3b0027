/* client_test: one client used by several threads at once, against a sidecar that dies after every few thousand records and
 * is started again by a supervisor. Each lease completes exactly once. Meant for the thread and the address sanitizer (leaks).
 *
 *   client_test SOCKET LEASES
 */
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "require.h"
#include "client.h"

#define RECORDS_PER_LIFE 3000
#define OPEN_MAX_LEASES 200
#define PATIENCE_MS 60000

/* ---- the sidecar: one life ---- */

static uint64_t id_of(const uint8_t *body, size_t n)
{
	size_t off, len;
	uint64_t id = 0;
	REQUIRE(mp_find(body, n, "id", &off, &len));
	struct mpr r = mpr_make(body + off, len);
	REQUIRE(mpr_uint(&r, &id));
	return id;
}

/* An intent presented afresh has that in itself. */
static bool held(const uint8_t *body, size_t n)
{
	size_t off, len;
	return mp_find(body, n, "held", &off, &len) && body[off] == 0xc3;
}

static ssize_t get(int sock, uint8_t *buf, size_t cap, int *fds)
{
	union {
		struct cmsghdr align;
		char buf[CMSG_SPACE(sizeof(int) * KVS_PACKET_MAX_FDS)];
	} control;
	struct iovec iov = {buf, cap};
	struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.buf, .msg_controllen = sizeof control.buf};
	ssize_t n = recvmsg(sock, &msg, MSG_CMSG_CLOEXEC);
	struct cmsghdr *cm = CMSG_FIRSTHDR(&msg);
	if (n > 0 && cm && cm->cmsg_type == SCM_RIGHTS)
		memcpy(fds, CMSG_DATA(cm), cm->cmsg_len - CMSG_LEN(0));
	return n;
}

static void put(int sock, uint8_t type, struct mpw *w)
{
	uint8_t packet[1024] = {type};
	REQUIRE(w->len + 4 <= sizeof packet);
	memcpy(packet + 4, w->buf, w->len);
	ssize_t n = send(sock, packet, w->len + 4, MSG_NOSIGNAL);
	(void)n; /* the other side may have gone */
	mpw_free(w);
}

static void serve(int listener)
{
	static uint8_t buf[1 << 20];
	uint8_t boot[16];
	int fds[KVS_PACKET_MAX_FDS];
	kvs_random(boot, sizeof boot);
	int sock = accept(listener, NULL, NULL);
	ssize_t n = get(sock, buf, sizeof buf, fds);
	if (n <= 4)
		return;
	struct mpw w = {0};
	mpw_map(&w, 4);
	mpw_str(&w, "id");
	mpw_uint(&w, id_of(buf + 4, (size_t)n - 4));
	mpw_str(&w, "version");
	mpw_uint(&w, 1 << 16);
	mpw_str(&w, "boot");
	mpw_bin(&w, boot, 16);
	mpw_str(&w, "fenced");
	mpw_bool(&w, true);
	put(sock, 2, &w);
	n = get(sock, buf, sizeof buf, fds);
	if (n <= 4)
		return;
	struct stat st;
	REQUIRE(fstat(fds[1], &st) == 0);
	uint8_t *rings = mmap(NULL, (size_t)st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fds[1], 0);
	REQUIRE(rings != MAP_FAILED);
	struct kvs_rings_header h;
	memcpy(&h, rings, sizeof h);
	struct kvs_ring_end sub, comp;
	kvs_ring_attach(&sub, (struct kvs_ring *)(rings + h.submission), h.submission_bytes);
	kvs_ring_attach(&comp, (struct kvs_ring *)(rings + h.completion), h.completion_bytes);
	w = (struct mpw){0};
	mpw_map(&w, 1);
	mpw_str(&w, "id");
	mpw_uint(&w, id_of(buf + 4, (size_t)n - 4));
	put(sock, 4, &w);
	for (int records = 0; records < RECORDS_PER_LIFE;) {
		int64_t got = kvs_ring_pop(&sub, buf, sizeof buf);
		REQUIRE(got >= 0);
		if (got == 0) {
			if (kvs_ring_sleep(&sub)) {
				struct pollfd p[2] = {{.fd = fds[2], .events = POLLIN}, {.fd = sock, .events = POLLIN}};
				poll(p, 2, -1);
				uint64_t count;
				if (p[0].revents && read(fds[2], &count, sizeof count) < 0)
					REQUIRE(errno == EAGAIN);
				if (p[1].revents && recv(sock, buf, sizeof buf, 0) <= 0)
					return;
			}
			continue;
		}
		records++;
		struct kvs_record r;
		memcpy(&r, buf, sizeof r);
		static const uint8_t body[] = {0x81, 0xa5, 'b', 'y', 't', 'e', 's', 1};
		int rc = 0;
		if (r.type == KVS_REC_EXPECT)
			rc = kvs_ring_push(&comp, KVS_REC_RECEIVED, KVS_OK, r.lease, 0, body, sizeof body);
		else if (r.type == KVS_REC_HOLD || r.type == KVS_REC_CANCEL || (r.type == KVS_REC_INTENT && held(buf + sizeof r, r.body_bytes)))
			rc = kvs_ring_push(&comp, KVS_REC_SENT, KVS_OK, r.lease, 0, body, sizeof body);
		REQUIRE(rc == 0);
		if (kvs_ring_wake(&comp)) {
			uint64_t one = 1;
			REQUIRE(write(fds[3], &one, sizeof one) == sizeof one);
		}
	}
}

/* Ends with its parent, which may have ended since the fork: nothing would report it then. */
static void end_with(pid_t parent)
{
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (getppid() != parent)
		_exit(0);
}

static void supervise(const char *path, pid_t parent)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	snprintf(addr.sun_path, sizeof addr.sun_path, "%s", path);
	end_with(parent);
	for (;;) {
		pid_t self = getpid(), pid = fork();
		if (pid == 0) {
			end_with(self);
			unlink(path);
			/* Made in each life: the peer of a connection is the process that called listen. */
			int listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
			REQUIRE(bind(listener, (struct sockaddr *)&addr, sizeof addr) == 0 && listen(listener, 4) == 0);
			serve(listener);
			_exit(0);
		}
		int status;
		waitpid(pid, &status, 0);
		if (status)
			_exit(1);
	}
}

/* ---- the engine ---- */

static kvs_client *client;
static uint64_t total;
static _Atomic uint64_t opened, completed;
static _Atomic bool over;
static uint8_t *state; /* per lease: 1 open, 2 complete; guarded by the poller alone once opened */

static void make_body(struct mpw *w, bool is_held)
{
	mpw_map(w, 3);
	mpw_str(w, "deadline_ms");
	mpw_uint(w, 30000);
	mpw_str(w, "blocks");
	mpw_bin(w, "12345678", 8);
	mpw_str(w, "held");
	mpw_bool(w, is_held);
}

static void *submitter(void *arg)
{
	(void)arg;
	struct mpw w = {0}, h = {0};
	make_body(&w, false);
	make_body(&h, true);
	for (uint64_t i = 0, step = 1; atomic_load(&opened) < total; i++) {
		if (atomic_load(&opened) - atomic_load(&completed) > OPEN_MAX_LEASES) {
			sched_yield();
			continue;
		}
		uint16_t type = i & 1 ? KVS_REC_INTENT : KVS_REC_EXPECT;
		int64_t lease = kvs_submit(client, type, w.buf, (uint32_t)w.len, 30000);
		if (lease <= 0) {
			REQUIRE(lease == KVS_E_NOT_CONNECTED || lease == KVS_E_FULL || lease == KVS_E_DEGRADED);
			kvs_wait_connected(client, 100);
			continue;
		}
		atomic_fetch_add(&opened, 1);
		if (type == KVS_REC_INTENT) {
			struct kvs_snapshot s = {(uint64_t)lease, w.buf, w.len};
			int rc = kvs_step(client, w.buf, (uint32_t)w.len, &s, 1);
			REQUIRE(rc == 0 || rc == KVS_KEPT);
			kvs_signal_layer(client, 0, step);
			kvs_signal_step(client, step++);
			if (i % 8 == 1)
				kvs_preempt(client, &s);
			struct kvs_snapshot last = {(uint64_t)lease, h.buf, h.len};
			rc = i % 4 == 1 ? kvs_hold(client, &last) : kvs_cancel(client, (uint64_t)lease, "test");
			REQUIRE(rc == 0 || rc == KVS_KEPT);
		}
	}
	mpw_free(&w);
	mpw_free(&h);
	return NULL;
}

static void *poller(void *arg)
{
	(void)arg;
	uint8_t buf[4096];
	int64_t end = kvs_now_ms() + PATIENCE_MS; /* without a completion */
	while (atomic_load(&completed) < total || atomic_load(&completed) < atomic_load(&opened)) {
		REQUIRE(kvs_now_ms() < end);
		if (!kvs_wait(client, 100))
			continue;
		int64_t n = kvs_poll(client, buf, sizeof buf);
		REQUIRE(n >= 0);
		for (int64_t at = 0; at < n;) {
			struct kvs_record r;
			memcpy(&r, buf + at, sizeof r);
			REQUIRE(r.lease > 0 && r.lease <= 2 * total && !state[r.lease]);
			state[r.lease] = 1;
			atomic_fetch_add(&completed, 1);
			end = kvs_now_ms() + PATIENCE_MS;
			at += r.length;
		}
	}
	atomic_store(&over, true);
	return NULL;
}

static void *watcher(void *arg)
{
	(void)arg;
	while (!atomic_load(&over)) {
		struct kvs_info info = {.size = sizeof info};
		REQUIRE(kvs_status_read(client, &info) == 0);
		kvs_connected(client);
		poll(NULL, 0, 1);
	}
	return NULL;
}

static void *reader(void *arg)
{
	(void)arg;
	char line[300];
	while (kvs_wait_log(client, line, sizeof line) == 1)
		;
	return NULL;
}

static int64_t cpu_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
	return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Waits 5 times for a lease that does not end. Returns CPU time: the minimum where each last wait was long, else the maximum. */
static int64_t look(bool last_was_long)
{
	int64_t shortest = INT64_MAX, longest = 0;
	for (int i = 0; i < 5; i++) {
		pthread_mutex_lock(&client->mu);
		client->wait_was_long = last_was_long;
		pthread_mutex_unlock(&client->mu);
		int64_t began = cpu_ns(), slept = kvs_now_ms();
		REQUIRE(kvs_wait(client, 20) == 0);
		REQUIRE(kvs_now_ms() - slept >= 20);
		int64_t took = cpu_ns() - began;
		shortest = took < shortest ? took : shortest;
		longest = took > longest ? took : longest;
		REQUIRE(client->wait_was_long); /* whether it looked or not */
	}
	return last_was_long ? shortest : longest;
}

/* A wait looks for a while before it sleeps, for an open lease only, and not after a wait that was long. */
static void looks(void)
{
	struct mpw w = {0};
	make_body(&w, false);
	REQUIRE(kvs_wait_connected(client, 10000) == 1);
	client->wait_was_long = false;
	int64_t began = cpu_ns();
	REQUIRE(kvs_wait(client, 20) == 0 && !client->wait_was_long);
	int64_t idle = cpu_ns() - began;
	int64_t lease;
	while ((lease = kvs_submit(client, KVS_REC_INTENT, w.buf, (uint32_t)w.len, 30000)) <= 0)
		REQUIRE(kvs_wait_connected(client, 10000) == 1);
	int64_t sleeping = look(true), looking = look(false);
	REQUIRE(client->may_poll ? looking > 2 * sleeping && looking > 2 * idle && looking > 100000 : looking < 2 * sleeping + 200000);
	REQUIRE(kvs_cancel(client, (uint64_t)lease, "over") >= 0);
	uint8_t buf[4096];
	while (kvs_poll(client, buf, sizeof buf) == 0)
		REQUIRE(kvs_wait(client, 10000) == 1);
	mpw_free(&w);
}

int main(int argc, char **argv)
{
	if (argc != 3) {
		fprintf(stderr, "usage: client_test SOCKET LEASES\n");
		return 2;
	}
	total = strtoull(argv[2], NULL, 0);
	state = calloc(2 * total + 1, 1);
	pid_t self = getpid(), supervisor = fork();
	if (supervisor == 0)
		supervise(argv[1], self);
	struct kvs_config config = {.size = sizeof config, .role = KVS_WORKER, .socket_path = argv[1], .layers = 4, .submission_bytes = 65536,
				    .completion_bytes = 65536};
	struct kvs_region region;
	REQUIRE(kvs_region_alloc(8192, &region) == 0);
	REQUIRE(kvs_open(&config, &client) == 0);
	REQUIRE(kvs_start(client, &region, 1, "\x80", 1) == 0);
	REQUIRE(kvs_start(client, &region, 1, "\x80", 1) == KVS_E_ARG);
	REQUIRE(kvs_wait_connected(client, 10000) == 1);
	pthread_t t[4];
	void *(*const run[4])(void *) = {submitter, poller, watcher, reader};
	for (int i = 0; i < 4; i++)
		REQUIRE(pthread_create(&t[i], NULL, run[i], NULL) == 0);
	for (int i = 0; i < 4; i++) {
		if (run[i] == reader)
			kvs_end_log(client);
		pthread_join(t[i], NULL);
	}
	looks();
	struct kvs_info info = {.size = sizeof info};
	REQUIRE(kvs_status_read(client, &info) == 0);
	REQUIRE(info.leases == 0 && info.kills == 0 && info.protocol_errors == 0 && info.completed == atomic_load(&opened) + 1);
	printf("%llu leases, %llu sessions, %llu ended by the shim, %llu presented afresh\n", (unsigned long long)info.completed,
	       (unsigned long long)info.connects, (unsigned long long)info.synthesised, (unsigned long long)info.represented);
	kvs_close(client);
	kvs_region_free(&region);
	kill(supervisor, SIGKILL);
	waitpid(supervisor, NULL, 0);
	free(state);
	return info.connects > 1 ? 0 : 1;
}
