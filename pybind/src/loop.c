/* The background thread: it connects, watches deadlines and the sidecar processes, and sends what waits for the socket. */
#include <limits.h>
#include <poll.h>
#include <sys/prctl.h>

#include "client.h"

#define REPLAY_RETRY_MS 5 /* while the ring is full of leases that are presented again */
#define SEND_RETRY_MS 5   /* while the socket has no room */

/* One turn's descriptors: ctl, the socket, the pidfds. */
#define POLL_FDS (2 + KVS_MAX_SIDECARS)

void *client_loop(void *arg)
{
	kvs_client *c = arg;
	prctl(PR_SET_NAME, "kvspray");
	pthread_mutex_lock(&c->mu);
	/* A stream that waits for a load would wait for ever. Each load ends: see KVS_LOAD_GRACES. */
	while (!c->closing || c->landing) {
		int64_t now = kvs_now_ms();
		for (int i = 0; i < KVS_MAX_SIDECARS; i++)
			if (c->procs[i].used && c->procs[i].exit_proved && !c->procs[i].harmless)
				proc_exited(c, i);
		if (c->breaking[0]) {
			log_line(c, "info", "session is replaced: %s", c->breaking);
			session_end(c, now, 0);
		}
		if (c->state == IDLE && now >= c->next_try_ms)
			session_begin(c, now);
		if ((c->state == WELCOMING || c->state == REGISTERING) && now >= c->handshake_end_ms) {
			log_error(c, "sidecar at %s did not answer within %d ms", c->path, HANDSHAKE_TIMEOUT_MS);
			session_end(c, now, 0);
		}
		leases_replay(c, now);
		awaits_ask(c, now);
		declines_send(c, now);
		ends_send(c);
		/* Last, because they also look at leases that were just presented. */
		int64_t due = earlier(leases_watch(c, now), awaits_watch(c, now));
		if (c->closing && !c->landing)
			break;
		if (c->state == IDLE)
			due = earlier(due, c->next_try_ms);
		else if (c->state != READY)
			due = earlier(due, c->handshake_end_ms);
		else if (c->replaying)
			due = earlier(due, now + REPLAY_RETRY_MS);
		else if (c->await_unsent || c->declines || c->end_count)
			due = earlier(due, now + SEND_RETRY_MS);
		if (c->breaking[0])
			due = now;
		c->due_ms = due;

		struct pollfd fds[POLL_FDS];
		for (int i = 0; i < POLL_FDS; i++)
			fds[i] = (struct pollfd){.fd = -1, .events = POLLIN};
		fds[0].fd = c->ctl_fd;
		fds[1].fd = c->sock;
		for (int i = 0; i < KVS_MAX_SIDECARS; i++)
			if (c->procs[i].used && !c->procs[i].exit_proved)
				fds[2 + i].fd = c->procs[i].pidfd;
		int64_t wait = due == INT64_MAX ? -1 : due > now ? earlier(due - now, INT_MAX) : 0;
		pthread_mutex_unlock(&c->mu);
		int n = poll(fds, POLL_FDS, (int)wait);
		pthread_mutex_lock(&c->mu);
		if (n <= 0)
			continue;
		now = kvs_now_ms();
		if (fds[0].revents)
			kvs_clear(c->ctl_fd);
		/* Exits first: an end of file is judged by whether the exit is proved. */
		for (int i = 0; i < KVS_MAX_SIDECARS; i++)
			if (fds[2 + i].revents & POLLIN)
				proc_exited(c, i);
		if (fds[1].revents && c->state != IDLE)
			session_receive(c, now);
	}
	pthread_mutex_unlock(&c->mu);
	return NULL;
}
