/* A gate before each call in which the library could wait or take its time, linked in by --wrap. A thread that is armed reports its arrival at
 * the gate and goes on when another Python thread of the test opens the gate: an armed call that holds the interpreter's lock is stuck, however
 * fast or busy the machine is.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <unistd.h>

#define STUCK_MS 10000

#pragma GCC visibility push(default)
void gate_set(int entered_fd, int go_fd);
int gate_arm(int on);
#pragma GCC visibility pop

static int entered = -1, go = -1;
static __thread int armed, stuck;

int __real_poll(struct pollfd *fds, nfds_t n, int timeout);
ssize_t __real_read(int fd, void *buf, size_t n);

static void gate(void)
{
	uint64_t one = 1;
	int err = errno;
	if (!armed)
		return;
	struct pollfd p = {.fd = go, .events = POLLIN};
	if (write(entered, &one, sizeof one) != sizeof one || __real_poll(&p, 1, STUCK_MS) != 1 || __real_read(go, &one, sizeof one) != sizeof one) {
		stuck = 1;
		armed = 0; /* once is enough */
	}
	errno = err;
}

/* Eventfds: written at each gate; to be written for each. */
void gate_set(int entered_fd, int go_fd)
{
	entered = entered_fd;
	go = go_fd;
}

/* For this thread. Returns whether it was stuck since it was armed. */
int gate_arm(int on)
{
	int was = stuck;
	armed = on;
	stuck = 0;
	return was;
}

#define GATED(type, name, params, ...)  \
	type __real_##name params;          \
	type __wrap_##name params;          \
	type __wrap_##name params           \
	{                                   \
		gate();                         \
		return __real_##name(__VA_ARGS__); \
	}

int __wrap_poll(struct pollfd *fds, nfds_t n, int timeout);
int __wrap_poll(struct pollfd *fds, nfds_t n, int timeout) { gate(); return __real_poll(fds, n, timeout); }
ssize_t __wrap_read(int fd, void *buf, size_t n);
ssize_t __wrap_read(int fd, void *buf, size_t n) { gate(); return __real_read(fd, buf, n); }
GATED(int, pthread_mutex_lock, (pthread_mutex_t *m), m)
GATED(int, pthread_cond_wait, (pthread_cond_t *c, pthread_mutex_t *m), c, m)
GATED(int, pthread_cond_timedwait, (pthread_cond_t *c, pthread_mutex_t *m, const struct timespec *t), c, m, t)
GATED(int, pthread_join, (pthread_t t, void **out), t, out)
GATED(int, pthread_create, (pthread_t *t, const pthread_attr_t *a, void *(*f)(void *), void *x), t, a, f, x)
GATED(void *, mmap, (void *at, size_t n, int prot, int flags, int fd, off_t off), at, n, prot, flags, fd, off)
GATED(int, munmap, (void *at, size_t n), at, n)
GATED(int, madvise, (void *at, size_t n, int advice), at, n, advice)
GATED(int, memfd_create, (const char *name, unsigned flags), name, flags)
GATED(int, fallocate, (int fd, int mode, off_t at, off_t n), fd, mode, at, n)
GATED(ssize_t, pread, (int fd, void *buf, size_t n, off_t at), fd, buf, n, at)
GATED(ssize_t, pwrite, (int fd, const void *buf, size_t n, off_t at), fd, buf, n, at)
GATED(ssize_t, sendmsg, (int fd, const struct msghdr *m, int flags), fd, m, flags)
GATED(FILE *, fopen, (const char *path, const char *mode), path, mode)
GATED(void *, dlopen, (const char *path, int flags), path, flags)

int __real_open(const char *path, int flags, ...);
int __wrap_open(const char *path, int flags, ...);
int __wrap_open(const char *path, int flags, ...)
{
	va_list ap;
	va_start(ap, flags);
	int mode = flags & O_CREAT ? va_arg(ap, int) : 0;
	va_end(ap);
	gate();
	return __real_open(path, flags, mode);
}
