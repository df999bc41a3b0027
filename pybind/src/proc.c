/* Sidecar processes that may still access blocks of open leases. A pidfd proves that one has exited; an end of file does not. */
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
	if (!p->exit_proved) {
		p->exit_proved = true;
		if (c->proc == i)
			completions_drain_and_wake(c); /* completions that it wrote before its exit count */
		c->info.sidecar_exits++;
		log_line(c, "warn", "sidecar pid %u has exited", p->pid);
		c->backoff_ms = BACKOFF_MIN_MS; /* the next sidecar is another process */
		if (c->proc == i)
			session_break(c, "the sidecar has exited"); /* another process may hold its end of the socket open */
	}
	p->harmless = true;
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
		if (p->used && !p->exit_proved && memcmp(p->boot, boot, 16) == 0) {
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

void proc_kill(kvs_client *c, int i, int64_t now, const char *why)
{
	struct proc *p = &c->procs[i];
	if (!p->used || p->exit_proved || (p->kill_ms && now - p->kill_ms < KILL_RETRY_MS))
		return;
	p->kill_ms = now;
	int rc = p->pid == (uint32_t)getpid() ? -EPERM : p->pidfd < 0 ? -EBADF : kvs_pidfd_kill(p->pidfd);
	if (rc == 0 || rc == -ESRCH) {
		if (!p->killed) {
			c->info.kills++;
			log_error(c, "sidecar pid %u %s: killed", p->pid, why);
		}
		p->killed = true;
		p->denied = false;
		return;
	}
	p->denied = true;
	log_error(c, "sidecar pid %u %s and cannot be killed (%s): its leases stay in quarantine until it exits", p->pid, why, strerror(-rc));
}

void proc_alive(kvs_client *c, int64_t now)
{
	for (int i = 0; i < KVS_MAX_SIDECARS; i++) {
		struct proc *p = &c->procs[i];
		/* A pid is not reused before the exit of its process. */
		if (!p->used || p->exit_proved || !p->pid || p->pid != c->new_pid)
			continue;
		p->alive_ms = now;
		if (!p->stuck)
			log_line(c, "error", "sidecar pid %u runs but has not fenced late leases: until it has, their blocks are withheld, and this engine "
			             "prefills locally", p->pid);
		p->stuck = true;
	}
}

bool proc_runs(const kvs_client *c, int i, int64_t now)
{
	const struct proc *p = &c->procs[i];
	return p->used && !p->exit_proved && p->alive_ms && now < p->alive_ms + c->info.grace_ms;
}
