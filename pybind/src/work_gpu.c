/* SPDX-License-Identifier: Apache-2.0
 *
 * What the thread has of the GPU. An error of the driver ends the work there and is logged once.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "work_state.h"

enum { IPC_LAZY_PEER_ACCESS = 1 };

bool work_fail(struct work *w, int rc, const char *call)
{
	char line[256];
	if (rc == 0)
		return false;
	snprintf(line, sizeof line, "the sidecar packs in its own context, which slows this engine: in the engine's context %s: %s (%d)", call, cuda_error_name(rc), rc);
	if (!w->off)
		w->log(w->arg, "warn", line);
	w->off = true;
	return true;
}

static bool set_up(struct work *w)
{
	static const struct {
		const char *name;
		size_t at;
	} kernels[] = {{"kvs_pack_v4", offsetof(struct work, pack)},
	               {"kvs_unpack_v4", offsetof(struct work, unpack)},
	               {"kvs_pack_uniform_v4", offsetof(struct work, pack_uniform)},
	               {"kvs_unpack_uniform_v4", offsetof(struct work, unpack_uniform)}};
	int memops = 0, least, greatest, device;
	uint32_t first = 0;
	if (w->streams[STREAMS - 1] || w->off)
		return !w->off;
	while (!w->regions[first].bytes)
		first++; /* work_start saw one */
	devptr addr = w->regions[first].addr;
	if (FAILS(w, PointerGetAttribute, &w->device, POINTER_DEVICE_ORDINAL, addr))
		return false;
	for (uint32_t i = first; i < w->region_count; i++)
		if (w->regions[i].bytes && (cu.PointerGetAttribute(&device, POINTER_DEVICE_ORDINAL, w->regions[i].addr) != 0 || device != w->device))
			w->regions[i].bytes = 0;
	/* Memory of cuMemCreate belongs to no context: use the runtime API's. */
	if (cu.PointerGetAttribute(&w->context, POINTER_CONTEXT, addr) != 0 || !w->context) {
		if (FAILS(w, DevicePrimaryCtxRetain, &w->context, w->device))
			return false;
		w->retained = true;
	}
	if (FAILS(w, CtxSetCurrent, w->context) || FAILS(w, DeviceGetAttribute, &memops, ATTRIBUTE_64_BIT_STREAM_MEM_OPS, w->device))
		return false;
	if (!memops)
		return !work_fail(w, 801 /* CUDA_ERROR_NOT_SUPPORTED */, "64-bit stream memory operations");
	void *own = mmap(NULL, sizeof *w->own, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (own == MAP_FAILED)
		return !work_fail(w, 2 /* CUDA_ERROR_OUT_OF_MEMORY */, "mmap");
	/* If the kernel does not copy pinned pages for the child of a fork, the next store here goes to a new page, and the GPU reads the old list. */
	if (madvise(own, sizeof *w->own, MADV_DONTFORK) != 0) {
		munmap(own, sizeof *w->own);
		return !work_fail(w, 2 /* CUDA_ERROR_OUT_OF_MEMORY */, "madvise");
	}
	if (FAILS(w, MemHostRegister, own, sizeof *w->own, HOST_PORTABLE | HOST_DEVICEMAP)) {
		munmap(own, sizeof *w->own);
		return false;
	}
	w->own = own;
	if (FAILS(w, MemHostGetDevicePointer, &w->own_dev, own, 0) || FAILS(w, ModuleLoadData, &w->module, cuda_kernels))
		return false;
	for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++)
		if (FAILS(w, ModuleGetFunction, (handle *)((char *)w + kernels[i].at), w->module, kernels[i].name))
			return false;
	if (FAILS(w, CtxGetStreamPriorityRange, &least, &greatest))
		return false;
	for (int i = 0; i < STREAMS; i++)
		if (FAILS(w, StreamCreateWithPriority, &w->streams[i], STREAM_NON_BLOCKING, greatest))
			return false;
	return true;
}

void work_tear_down(struct work *w)
{
	for (int i = 0; i < STREAMS; i++)
		if (w->streams[i])
			cu.StreamDestroy(w->streams[i]);
	if (w->module)
		cu.ModuleUnload(w->module);
	if (w->own) {
		cu.MemHostUnregister(w->own);
		munmap(w->own, sizeof *w->own);
	}
	if (w->context)
		cu.CtxSetCurrent(NULL);
	if (w->retained)
		cu.DevicePrimaryCtxRelease(w->device);
}

bool work_open_staging(struct work *w, struct board *b, const struct kvs_work_slot *slot, const struct kvs_work_run *list)
{
	struct ipc_handle h;
	devptr p = 0, base = 0;
	size_t size = 0;
	uint64_t bytes = READ(slot->bytes);
	if (b->registered || !bytes)
		return false;
	memcpy(&h, list, sizeof h);
	if (!set_up(w) || FAILS(w, MemHostRegister, b->at, KVS_WORK_LISTS, HOST_PORTABLE | HOST_DEVICEMAP))
		return false;
	b->registered = true;
	if (FAILS(w, MemHostGetDevicePointer, &b->first, b->at, 0))
		return false;
	if (cu.IpcOpenMemHandle(&p, h, IPC_LAZY_PEER_ACCESS) != 0)
		return false; /* an unknown handle is no error of this context */
	b->staging = p;
	/* The sidecar's length is checked: a kernel past the end would destroy the engine's context. */
	if (FAILS(w, MemGetAddressRange, &base, &size, p))
		return false;
	b->staging_bytes = base == p && bytes <= size ? bytes : 0;
	return b->staging_bytes != 0;
}

void work_forget(struct work *w, uint32_t i)
{
	w->tickets[i] = __atomic_load_n(&w->own->done[i].value, __ATOMIC_ACQUIRE);
	w->seqs[i] = 0;
}

bool work_launch(struct work *w, const struct board *b, uint32_t i, bool unpack, uint64_t seq, uint32_t blocks)
{
	const struct work_list *l = &w->own->lists[i];
	devptr list = w->own_dev + offsetof(struct own, lists) + i * sizeof *l;
	devptr bases = list + offsetof(struct work_list, bases), first = list + offsetof(struct work_list, first);
	uint64_t n = l->count, len = l->len, dense = l->runs[0].dense;
	void *by_runs[] = {&list, &first, &n}, *by_bases[] = {&bases, &n, &dense, &len};
	handle kernel = len ? unpack ? w->unpack_uniform : w->pack_uniform : unpack ? w->unpack : w->pack, stream = w->streams[i % STREAMS];
	w->tickets[i] = ++w->ticket;
	w->seqs[i] = seq;
	w->running = true;
	/* The sidecar's done word comes last: the sidecar may then post the slot again. A slot always uses the same stream. */
	if (!FAILS(w, LaunchKernel, kernel, blocks, 1, 1, PACK_THREADS, 1, 1, 0, stream, len ? by_bases : by_runs, NULL) &&
	    !FAILS(w, StreamWriteValue64, stream, w->own_dev + offsetof(struct own, done) + i * sizeof(struct kvs_flag), w->ticket, 0) &&
	    !FAILS(w, StreamWriteValue64, stream, b->first + KVS_WORK_DONE + i * sizeof(struct kvs_flag), seq, 0)) {
		w->launched++;
		return true;
	}
	cu.StreamSynchronize(stream);
	work_forget(w, i);
	return false;
}
