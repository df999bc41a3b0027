/* SPDX-License-Identifier: Apache-2.0
 *
 * Sidecar processes that may still touch blocks of open leases. What says that one is dead is its pidfd, never an end of file.
 */
#include <errno.h>

#include "client.h"

void proc_release(struct proc *p)
{
	close_fd(&p->pidfd);
	p->used = false;
}

void proc_exited(kvs_client *c, int i)
{
	struct proc *p = &c->procs[i];
	if (!p->dead) {
		p->dead = true;
		if (c->proc == i)
			completions_drain_and_wake(c); /* what it said before it died counts */
		c->info.sidecar_exits++;
		log_line(c, "warn", "sidecar pid %u has exited", p->pid);
		loads_poison(c, proc_bit(i));
		c->backoff_ms = BACKOFF_MIN_MS; /* whoever comes next is another process */
		if (c->proc == i)
			session_break(c, "the sidecar has exited"); /* somebody else may hold its end of the socket open */
		if (c->proc == i && c->work)
			work_end(c->work);
	}
	/* A kernel that it had us launch does not die with it: until that has run, blocks are not given back. */
	if (c->work && !work_quiet(c->work))
		return;
	p->exited = true;
	leases_unbind(c, proc_bit(i), KVS_LOST, "the sidecar's exit was proved");
	if (c->proc != i)
		proc_release(p);
}

bool proc_bound(const kvs_client *c, int i)
{
	for (const struct lease *l = c->open.first; l; l = l->next)
		if (l->bound & proc_bit(i))
			return true;
	return false;
}

int proc_enter(kvs_client *c, const uint8_t boot[16], bool *known)
{
	int free_at = -1;
	*known = false;
	for (int i = 0; i < KVS_MAX_SIDECARS; i++) {
		struct proc *p = &c->procs[i];
		if (p->used && !p->dead && memcmp(p->boot, boot, 16) == 0) {
			*known = true;
			close_fd(&c->new_pidfd);
			return i;
		}
		if (p->used && !proc_bound(c, i))
			proc_release(p);
		if (!p->used && free_at < 0)
			free_at = i;
	}
	if (free_at < 0)
		return -1;
	struct proc *p = &c->procs[free_at];
	memset(p, 0, sizeof *p);
	p->used = true;
	memcpy(p->boot, boot, 16);
	p->pidfd = c->new_pidfd;
	p->pid = c->new_pid;
	c->new_pidfd = -1;
	return free_at;
}

void proc_kill(kvs_client *c, int i, int64_t now)
{
	struct proc *p = &c->procs[i];
	if (!p->used || p->dead || (p->kill_ms && now - p->kill_ms < KILL_RETRY_MS))
		return;
	p->kill_ms = now;
	int rc = p->pid == (uint32_t)getpid() ? -EPERM : p->pidfd < 0 ? -EBADF : kvs_pidfd_kill(p->pidfd);
	if (rc == 0 || rc == -ESRCH) {
		if (!p->killed) {
			c->info.kills++;
			log_error(c, "sidecar pid %u was silent past deadline and grace: killed", p->pid);
		}
		p->killed = true;
		p->denied = false;
		return;
	}
	p->denied = true;
	log_error(c, "sidecar pid %u is silent past deadline and grace and may not be killed (%s): its leases stay in quarantine until it exits",
	          p->pid, strerror(-rc));
}

void proc_alive(kvs_client *c, int64_t now)
{
	for (int i = 0; i < KVS_MAX_SIDECARS; i++) {
		struct proc *p = &c->procs[i];
		/* A pid is not used again while its process is not known to be dead. */
		if (!p->used || p->dead || !p->pid || p->pid != c->new_pid)
			continue;
		p->alive_ms = now;
		if (!p->stuck)
			log_line(c, "error", "sidecar pid %u runs, and has not fenced leases of ours that are late: until it has, their blocks stay with it, and "
			             "this engine serves alone", p->pid);
		p->stuck = true;
	}
}

bool proc_runs(const kvs_client *c, int i, int64_t now)
{
	const struct proc *p = &c->procs[i];
	return p->used && !p->dead && p->alive_ms && now < p->alive_ms + c->info.grace_ms;
}
