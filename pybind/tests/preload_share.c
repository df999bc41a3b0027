/* Linked in by --wrap: memory of the fake GPU goes to a sidecar without one as what it is, a memory file. */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "internal.h"

int __wrap_kvs_region_gpu(uint64_t addr, uint64_t bytes, struct kvs_region *out, char *error, uint32_t error_bytes);
int __wrap_kvs_region_gpu(uint64_t addr, uint64_t bytes, struct kvs_region *out, char *error, uint32_t error_bytes)
{
	int (*export)(uint64_t, int *, uint64_t *, size_t *, int *);
	uint64_t base = 0;
	size_t size = 0;
	int vmm = 0;
	*(void **)&export = dlsym(RTLD_DEFAULT, "fake_export");
	memset(out, 0, sizeof *out);
	out->fd = -1;
	if (!export || export(addr, &out->fd, &base, &size, &vmm) != 0 || addr != base || bytes != size || kvs_random(out->id, sizeof out->id) < 0) {
		snprintf(error, error_bytes, "the fake does not share it");
		return KVS_E_GPU;
	}
	out->kind = vmm ? KVS_REGION_DEVICE : KVS_REGION_MEMFD;
	out->handle[0] = 2; /* of cuMemCreate, where the kind is device */
	out->addr = addr;
	out->bytes = bytes;
	if (vmm)
		return 0;
	/* A mapping beside the fake's, which the region may unmap. */
	void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, out->fd, 0);
	if (at == MAP_FAILED) {
		snprintf(error, error_bytes, "the fake's file cannot be mapped");
		close(out->fd);
		out->fd = -1;
		return KVS_E_GPU;
	}
	out->addr = (uint64_t)(uintptr_t)at;
	return 0;
}
