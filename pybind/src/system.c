/* Time, threads, shared memory, and the proof that a process has ended. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "internal.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif
#ifndef SYS_pidfd_send_signal
#define SYS_pidfd_send_signal 424
#endif

int64_t kvs_now_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

int64_t kvs_now_ms(void)
{
	return kvs_now_ns() / 1000000;
}

int kvs_thread(pthread_t *thread, void *(*run)(void *), void *arg)
{
	sigset_t all, old;
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	int err = pthread_create(thread, NULL, run, arg);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	return err;
}

int kvs_random(void *buf, size_t n)
{
	for (size_t at = 0; at < n;) {
		ssize_t got = getrandom((uint8_t *)buf + at, n - at, 0);
		if (got < 0 && errno != EINTR)
			return -1;
		at += got > 0 ? (size_t)got : 0;
	}
	return 0;
}

int kvs_memfd(const char *name, uint64_t bytes)
{
	int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (fd < 0)
		return -1;
	if (ftruncate(fd, (off_t)bytes) < 0 || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0) {
		int err = errno;
		close(fd);
		errno = err;
		return -1;
	}
	return fd;
}

void *kvs_shared(const char *name, uint64_t bytes, int *fd)
{
	*fd = kvs_memfd(name, bytes);
	if (*fd < 0)
		return NULL;
	void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0);
	if (at != MAP_FAILED)
		return at;
	int err = errno;
	close_fd(fd);
	errno = err;
	return NULL;
}

int kvs_pidfd_of_peer(int sock, uint32_t *pid)
{
	struct ucred cred;
	socklen_t len = sizeof cred;
	*pid = 0;
	if (getsockopt(sock, SOL_SOCKET, SO_PEERCRED, &cred, &len) < 0)
		return -1;
	*pid = cred.pid > 0 ? (uint32_t)cred.pid : 0;
	int fd = -1;
	len = sizeof fd;
	if (getsockopt(sock, SOL_SOCKET, SO_PEERPIDFD, &fd, &len) == 0 && fd >= 0) {
		fcntl(fd, F_SETFD, FD_CLOEXEC);
		return fd;
	}
	/* The process has exited. */
	if (errno == ESRCH || errno == ENODATA || errno == EINVAL)
		return -1;
	if (!*pid) {
		errno = EREMOTE;
		return -1;
	}
	/* Before Linux 6.5. The pid may name another process only if its own has ended by now, and with it the other end of sock, which no other process
	 * has: then WELCOME, which answers what is sent after this call, never comes, and nothing is done to the process before WELCOME. */
	return (int)syscall(SYS_pidfd_open, *pid, 0);
}

static int signal_to(int pidfd, int signal)
{
	return syscall(SYS_pidfd_send_signal, pidfd, signal, NULL, 0) == 0 ? 0 : -errno;
}

int kvs_pidfd_kill(int pidfd)
{
	return signal_to(pidfd, SIGKILL);
}

bool kvs_pidfd_killable(int pidfd)
{
	return pidfd >= 0 && signal_to(pidfd, 0) == 0;
}
