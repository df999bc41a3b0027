/* Regions where the kernel does not do as it is asked: the answers of madvise and clone are given by a seccomp filter.
 *
 *   region_test old      no MADV_POPULATE_WRITE: the memory is there all the same
 *   region_test full     no memory: an error, and nothing is left behind
 *   region_test single   no threads: one does it all
 */
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "kvspray/kvspray.h"

#define POPULATE_WRITE 23
#define SMALL (8ull << 20)
#define LARGE (300ull << 20) /* more than one thread's part */

static void check(int ok, const char *what)
{
	if (ok)
		return;
	fprintf(stderr, "region_test: %s (errno %d)\n", what, errno);
	exit(1);
}

/* System call nr fails with err; with arg2 >= 0 only where its third argument is that. */
static void deny(int nr, int arg2, int err)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)nr, 0, 3),
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[2])),
		BPF_JUMP(BPF_JMP | (arg2 < 0 ? BPF_JGE : BPF_JEQ) | BPF_K, arg2 < 0 ? 0 : (uint32_t)arg2, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (uint32_t)err),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog prog = {sizeof code / sizeof *code, code};
	check(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &prog) == 0, "seccomp");
}

/* The lowest descriptor that is free. */
static int next_fd(void)
{
	int fd = dup(0);
	close(fd);
	return fd;
}

/* Whether a region is mapped. */
static int mapped(void)
{
	char line[512];
	int found = 0;
	FILE *f = fopen("/proc/self/maps", "r");
	check(f != NULL, "maps");
	while (fgets(line, sizeof line, f))
		found |= strstr(line, "kvspray-region") != NULL;
	fclose(f);
	return found;
}

static uint64_t blocks_of(const struct kvs_region *r)
{
	struct stat st;
	check(fstat(r->fd, &st) == 0, "fstat");
	return (uint64_t)st.st_blocks * 512;
}

static void allocated(uint64_t bytes)
{
	struct kvs_region r;
	sigset_t none, now;
	sigemptyset(&none);
	check(kvs_region_alloc(bytes, &r) == 0, "alloc");
	check(blocks_of(&r) >= bytes, "pages are missing");
	check(pthread_sigmask(SIG_BLOCK, &none, &now) == 0 && !sigismember(&now, SIGTERM), "the signal mask is not restored");
	memset((void *)(uintptr_t)r.addr, 1, bytes);
	check(mapped(), "not mapped");
	check(r.addr % (2 << 20) == 0, "huge pages could not be mapped there");
	kvs_region_free(&r);
	check(!mapped(), "still mapped");
}

/* Memory comes range after range, keeps its bytes, and is in no other range. */
static void reserved(void)
{
	struct kvs_region r;
	check(kvs_region_reserve(LARGE, &r) == 0 && r.bytes == LARGE && r.addr % (2 << 20) == 0, "reserve");
	check(blocks_of(&r) == 0, "memory that nobody asked for");
	for (uint64_t at = SMALL; at < 3 * SMALL; at += SMALL) {
		check(kvs_region_populate(&r, at, SMALL) == 0 && blocks_of(&r) == at, "populate");
		memset((char *)(uintptr_t)r.addr + at, 7, SMALL);
	}
	check(kvs_region_populate(&r, SMALL, SMALL) == 0 && blocks_of(&r) == 2 * SMALL, "populate twice");
	check(*(char *)(uintptr_t)(r.addr + 2 * SMALL - 1) == 7, "the bytes are gone");
	check(kvs_region_populate(&r, 1, SMALL) == KVS_E_ARG && kvs_region_populate(&r, LARGE, SMALL) == KVS_E_ARG &&
		      kvs_region_populate(&r, SMALL, LARGE) == KVS_E_ARG && kvs_region_populate(&r, 0, 0) == KVS_E_ARG,
	      "a range that is none");
	kvs_region_free(&r);
	check(!mapped(), "still mapped");
}

int main(int argc, char **argv)
{
	const char *what = argc > 1 ? argv[1] : "";
	allocated(SMALL);
	reserved();
	if (!strcmp(what, "old")) {
		deny(SYS_madvise, POPULATE_WRITE, EINVAL);
		allocated(SMALL);
		reserved();
	} else if (!strcmp(what, "full")) {
		struct kvs_region r;
		deny(SYS_madvise, POPULATE_WRITE, EFAULT);
		int fd = next_fd();
		check(kvs_region_alloc(LARGE, &r) == KVS_E_SYS && errno == ENOMEM, "no memory is no error");
		check(next_fd() == fd, "a descriptor is left");
		check(!mapped(), "a mapping is left");
		check(kvs_region_reserve(SMALL, &r) == 0 && kvs_region_populate(&r, 0, SMALL) == KVS_E_SYS && errno == ENOMEM, "no memory is no error");
	} else if (!strcmp(what, "single")) {
		deny(SYS_clone, -1, EAGAIN);
		deny(SYS_clone3, -1, EAGAIN);
		allocated(LARGE);
	} else {
		check(0, "usage: region_test old|full|single");
	}
	puts("ok");
	return 0;
}
