/* The memory of an engine that the sidecar may reach: regions. */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>

#include "internal.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

static uint64_t page_bytes(void)
{
	long n = sysconf(_SC_PAGESIZE);
	return n > 0 ? (uint64_t)n : 4096;
}

static int region_id(struct kvs_region *r)
{
	memset(r, 0, sizeof *r);
	r->fd = -1;
	return kvs_random(r->id, sizeof r->id) < 0 ? KVS_E_SYS : 0;
}

enum { POPULATE_THREADS = 16, POPULATE_PART = 256 << 20 }; /* a thread for each part, up to the first bound */
enum { HUGE = 2 << 20 }; /* bytes of a huge page (x86-64, arm64 with pages of 4 KiB) */

struct populate_part {
	pthread_t thread;
	char *at;
	size_t bytes;
	int err;
};

static void *populate_part(void *arg)
{
	struct populate_part *p = arg;
	p->err = 0;
	/* Scattered blocks miss the TLB at each small page. One small page in each huge one, of which the kernel then makes a whole one, is also
	 * ten times faster than 512 faults, and works with shmem_enabled=never. If it fails, small pages follow. */
	if (p->bytes >= HUGE) {
		for (size_t off = 0; off + HUGE <= p->bytes; off += HUGE)
			madvise(p->at + off, 1, MADV_POPULATE_WRITE);
		madvise(p->at, p->bytes / HUGE * HUGE, MADV_COLLAPSE);
	}
	while (madvise(p->at, p->bytes, MADV_POPULATE_WRITE) < 0) {
		if (errno == EINTR)
			continue;
		p->err = errno == EFAULT || errno == EHWPOISON ? ENOMEM : errno; /* EFAULT: a touch would have been SIGBUS */
		break;
	}
	return NULL;
}

/* Allocates every page of a new shared mapping of fd, which begins at offset of its file. A page that cannot be allocated later raises SIGBUS at its
 * first access, and without this the first transfer into each block pays for its page faults. 0 or an errno. */
static int populate(char *at, uint64_t bytes, int fd, uint64_t offset)
{
	struct populate_part parts[POPULATE_THREADS];
	uint64_t step = (bytes + POPULATE_THREADS - 1) / POPULATE_THREADS;
	step = step < POPULATE_PART ? POPULATE_PART : (step + HUGE - 1) / HUGE * HUGE;
	int n = 0, err = 0;
	for (uint64_t off = 0; off < bytes; off += step, n++) {
		struct populate_part *p = &parts[n];
		p->at = at + off;
		p->bytes = bytes - off < step ? bytes - off : step;
		if (off + step >= bytes || kvs_thread(&p->thread, populate_part, p) != 0) {
			populate_part(p); /* the last part, or no thread can be created: here */
			p->thread = pthread_self();
		}
	}
	bool unknown = false;
	for (int i = 0; i < n; i++) {
		if (!pthread_equal(parts[i].thread, pthread_self()))
			pthread_join(parts[i].thread, NULL);
		if (parts[i].err == EINVAL)
			unknown = true;
		else if (parts[i].err)
			err = parts[i].err;
	}
	/* Before Linux 5.14: allocate in one thread, without page table entries. */
	while (unknown && !err && fallocate(fd, 0, (off_t)offset, (off_t)bytes) < 0)
		if (errno != EINTR)
			err = errno;
	return err;
}

/* Maps fd where huge pages of it can be mapped as such: at a multiple of their size. MAP_FAILED and errno. */
static void *map_aligned(int fd, uint64_t bytes)
{
	char *span = mmap(NULL, bytes + HUGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (span == MAP_FAILED)
		return MAP_FAILED;
	uint64_t head = -(uint64_t)(uintptr_t)span & (HUGE - 1);
	char *at = mmap(span + head, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
	if (at == MAP_FAILED) {
		int err = errno;
		munmap(span, bytes + HUGE);
		errno = err;
		return MAP_FAILED;
	}
	if (head)
		munmap(span, head);
	munmap(at + bytes, HUGE - head);
	return at;
}

int kvs_region_reserve(uint64_t bytes, struct kvs_region *out)
{
	uint64_t page = page_bytes();
	if (!out || !bytes || bytes > INT64_MAX - HUGE - page)
		return KVS_E_ARG;
	bytes = (bytes + page - 1) / page * page;
	if (region_id(out) < 0)
		return KVS_E_SYS;
	int fd = kvs_memfd("kvspray-region", bytes);
	if (fd < 0)
		return KVS_E_SYS;
	void *at = map_aligned(fd, bytes);
	if (at == MAP_FAILED) {
		int err = errno;
		close(fd);
		errno = err;
		return KVS_E_SYS;
	}
	out->kind = KVS_REGION_MEMFD;
	out->fd = fd;
	out->addr = (uint64_t)(uintptr_t)at;
	out->bytes = bytes;
	return 0;
}

int kvs_region_populate(const struct kvs_region *r, uint64_t offset, uint64_t bytes)
{
	if (!r || r->kind != KVS_REGION_MEMFD || r->fd < 0 || offset % page_bytes() || !bytes || offset > r->bytes || bytes > r->bytes - offset)
		return KVS_E_ARG;
	int err = populate((char *)(uintptr_t)r->addr + offset, bytes, r->fd, r->offset + offset);
	if (err) {
		errno = err;
		return KVS_E_SYS;
	}
	return 0;
}

int kvs_region_alloc(uint64_t bytes, struct kvs_region *out)
{
	int rc = kvs_region_reserve(bytes, out);
	if (rc < 0 || (rc = kvs_region_populate(out, 0, out->bytes)) == 0)
		return rc;
	int err = errno;
	kvs_region_free(out);
	errno = err;
	return rc;
}

int kvs_region_process(uint64_t addr, uint64_t bytes, struct kvs_region *out)
{
	if (!out || !addr || !bytes || addr > UINT64_MAX - bytes)
		return KVS_E_ARG;
	if (region_id(out) < 0)
		return KVS_E_SYS;
	int fd = open("/proc/self/mem", O_RDWR | O_CLOEXEC);
	if (fd < 0)
		return KVS_E_SYS;
	/* Only both ends are checked; a read of a gap between them fails later. */
	uint8_t b;
	if (pread(fd, &b, 1, (off_t)addr) != 1 || pread(fd, &b, 1, (off_t)(addr + bytes - 1)) != 1) {
		close(fd);
		return KVS_E_ARG;
	}
	out->kind = KVS_REGION_PROCESS;
	out->fd = fd;
	out->addr = addr;
	out->bytes = bytes;
	return 0;
}

int kvs_region_part(const struct kvs_region *whole, uint64_t offset, uint64_t bytes, struct kvs_region *out)
{
	if (!whole || !out || whole->kind != KVS_REGION_MEMFD || whole->fd < 0 || offset % page_bytes() || !bytes ||
	    offset > whole->bytes || bytes > whole->bytes - offset)
		return KVS_E_ARG;
	if (region_id(out) < 0)
		return KVS_E_SYS;
	out->kind = whole->kind;
	out->fd = whole->fd;
	out->addr = whole->addr + offset;
	out->bytes = bytes;
	out->offset = whole->offset + offset;
	out->part = 1;
	return 0;
}

void kvs_region_free(struct kvs_region *r)
{
	if (!r || r->fd < 0)
		return;
	if (r->part) {
		r->fd = -1;
		return;
	}
	if (r->kind == KVS_REGION_MEMFD)
		munmap((void *)(uintptr_t)r->addr, r->bytes);
	close(r->fd);
	r->fd = -1;
}
