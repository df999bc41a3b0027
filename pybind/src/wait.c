/* Waits for completions. */
#include <limits.h>
#include <poll.h>
#include <sched.h>

#include "client.h"

/* A small transfer takes 100 to 300 us, and a wake-up costs a tenth to a third of that: a wait polls for about as long first. */
#define LOOK_NS 300000
/* A polling thread occupies a core: not on hosts with few. */
#ifndef LOOK_CPUS
#define LOOK_CPUS 4
#endif

bool wait_may_poll(void)
{
	cpu_set_t set;
	return sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) >= LOOK_CPUS;
}

static void pause_briefly(void)
{
	for (int i = 0; i < 16; i++)
#if defined(__x86_64__)
		__builtin_ia32_pause();
#elif defined(__aarch64__)
		__asm__ volatile("isb");
#else
		__asm__ volatile("");
#endif
}

int kvs_wait(kvs_client *c, int timeout_ms)
{
	CHECK(c);
	const int64_t began = kvs_now_ns();
	int64_t end = timeout_ms < 0 ? INT64_MAX : began + (int64_t)timeout_ms * 1000000, now = began;
	for (bool first = true;; first = false) {
		pthread_mutex_lock(&c->mu);
		completions_drain(c);
		bool closing = c->closing, there = c->ready.first != NULL;
		bool usable = session_usable(c) && c->rings, open = usable && c->open.first, late = now - began >= LOOK_NS;
		/* Only for open leases, and if the last wait was short. */
		bool look = !there && open && !late && c->may_poll && !c->wait_was_long;
		if (!first && (there || (open && late)))
			c->wait_was_long = late;
		bool again = !there && !look && usable && !kvs_ring_sleep(&c->comp);
		pthread_mutex_unlock(&c->mu);
		if (there)
			return 1;
		if (closing)
			kvs_wake(c->cq_eventfd); /* another thread may wait, too */
		if (closing || now >= end)
			return 0;
		if (look) {
			pause_briefly();
		} else if (!again) {
			struct pollfd p = {.fd = c->cq_eventfd, .events = POLLIN};
			int64_t left = end == INT64_MAX ? -1 : earlier((end - now) / 1000000 + 1, INT_MAX);
			if (poll(&p, 1, (int)left) > 0)
				kvs_clear(c->cq_eventfd);
		}
		now = kvs_now_ns();
	}
}
