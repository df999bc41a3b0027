#define _GNU_SOURCE
#include "driver.h"

#include <dlfcn.h>
#include <pthread.h>

/* Every entry point that is called: X(field, exported name, parameter list). The exported names carry the ABI version that
 * the parameter list belongs to. */
#define ENTRY_POINTS(X)                                                                                     \
	X(Init, "cuInit", (unsigned))                                                                           \
	X(GetErrorName, "cuGetErrorName", (int, const char **))                                                 \
	X(DriverGetVersion, "cuDriverGetVersion", (int *))                                                      \
	X(DeviceGetCount, "cuDeviceGetCount", (int *))                                                          \
	X(DeviceGet, "cuDeviceGet", (int *, int))                                                               \
	X(DeviceGetName, "cuDeviceGetName", (char *, int, int))                                                 \
	X(DeviceGetUuid, "cuDeviceGetUuid_v2", (unsigned char *, int))                                          \
	X(DeviceGetAttribute, "cuDeviceGetAttribute", (int *, int, int))                                        \
	X(DeviceGetPCIBusId, "cuDeviceGetPCIBusId", (char *, int, int))                                         \
	X(DeviceCanAccessPeer, "cuDeviceCanAccessPeer", (int *, int, int))                                      \
	X(DevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", (kvc_handle *, int))                              \
	X(DevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2", (int))                                       \
	X(CtxSetCurrent, "cuCtxSetCurrent", (kvc_handle))                                                       \
	X(CtxEnablePeerAccess, "cuCtxEnablePeerAccess", (kvc_handle, unsigned))                                 \
	X(CtxGetStreamPriorityRange, "cuCtxGetStreamPriorityRange", (int *, int *))                             \
	X(ModuleLoadData, "cuModuleLoadData", (kvc_handle *, const void *))                                     \
	X(ModuleUnload, "cuModuleUnload", (kvc_handle))                                                         \
	X(ModuleGetFunction, "cuModuleGetFunction", (kvc_handle *, kvc_handle, const char *))                   \
	X(LaunchKernel, "cuLaunchKernel",                                                                       \
	  (kvc_handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, kvc_handle, void **, void **)) \
	X(MemAlloc, "cuMemAlloc_v2", (kvc_ptr *, size_t))                                                       \
	X(MemFree, "cuMemFree_v2", (kvc_ptr))                                                                   \
	X(MemGetInfo, "cuMemGetInfo_v2", (size_t *, size_t *))                                                  \
	X(MemHostAlloc, "cuMemHostAlloc", (void **, size_t, unsigned))                                          \
	X(MemFreeHost, "cuMemFreeHost", (void *))                                                               \
	X(MemHostRegister, "cuMemHostRegister_v2", (void *, size_t, unsigned))                                  \
	X(MemHostUnregister, "cuMemHostUnregister", (void *))                                                   \
	X(MemHostGetDevicePointer, "cuMemHostGetDevicePointer_v2", (kvc_ptr *, void *, unsigned))               \
	X(MemGetAddressRange, "cuMemGetAddressRange_v2", (kvc_ptr *, size_t *, kvc_ptr))                        \
	X(IpcGetMemHandle, "cuIpcGetMemHandle", (struct ipc_handle *, kvc_ptr))                                 \
	X(IpcOpenMemHandle, "cuIpcOpenMemHandle_v2", (kvc_ptr *, struct ipc_handle, unsigned))                  \
	X(IpcCloseMemHandle, "cuIpcCloseMemHandle", (kvc_ptr))                                                  \
	X(MemImportFromShareableHandle, "cuMemImportFromShareableHandle", (uint64_t *, void *, int))            \
	X(MemRelease, "cuMemRelease", (uint64_t))                                                               \
	X(MemAddressReserve, "cuMemAddressReserve", (kvc_ptr *, size_t, size_t, kvc_ptr, unsigned long long))   \
	X(MemAddressFree, "cuMemAddressFree", (kvc_ptr, size_t))                                                \
	X(MemMap, "cuMemMap", (kvc_ptr, size_t, size_t, uint64_t, unsigned long long))                          \
	X(MemUnmap, "cuMemUnmap", (kvc_ptr, size_t))                                                            \
	X(MemSetAccess, "cuMemSetAccess", (kvc_ptr, size_t, const struct access *, size_t))                     \
	X(MemcpyAsync, "cuMemcpyAsync", (kvc_ptr, kvc_ptr, size_t, kvc_handle))                                 \
	X(Memcpy2DAsync, "cuMemcpy2DAsync_v2", (const struct copy_2d *, kvc_handle))                            \
	X(MemsetD32Async, "cuMemsetD32Async", (kvc_ptr, unsigned, size_t, kvc_handle))                          \
	X(StreamWriteValue64, "cuStreamWriteValue64_v2", (kvc_handle, kvc_ptr, uint64_t, unsigned))             \
	X(StreamWaitValue64, "cuStreamWaitValue64_v2", (kvc_handle, kvc_ptr, uint64_t, unsigned))               \
	X(StreamCreateWithPriority, "cuStreamCreateWithPriority", (kvc_handle *, unsigned, int))                \
	X(StreamDestroy, "cuStreamDestroy_v2", (kvc_handle))                                                    \
	X(StreamSynchronize, "cuStreamSynchronize", (kvc_handle))                                               \
	X(StreamQuery, "cuStreamQuery", (kvc_handle))                                                           \
	X(StreamWaitEvent, "cuStreamWaitEvent", (kvc_handle, kvc_handle, unsigned))                             \
	X(EventCreate, "cuEventCreate", (kvc_handle *, unsigned))                                               \
	X(EventDestroy, "cuEventDestroy_v2", (kvc_handle))                                                      \
	X(EventRecord, "cuEventRecord", (kvc_handle, kvc_handle))                                               \
	X(EventSynchronize, "cuEventSynchronize", (kvc_handle))                                                 \
	X(EventQuery, "cuEventQuery", (kvc_handle))                                                             \
	X(EventElapsedTime, "cuEventElapsedTime", (float *, kvc_handle, kvc_handle))

struct ipc_handle {
	unsigned char bytes[64];
};

struct location {
	int type, id;
};

struct access {
	struct location location;
	int flags;
};

/* CUDA_MEMCPY2D. */
struct copy_2d {
	size_t source_x, source_y;
	int source_type;
	const void *source_host;
	kvc_ptr source;
	void *source_array;
	size_t source_pitch;
	size_t destination_x, destination_y;
	int destination_type;
	void *destination_host;
	kvc_ptr destination;
	void *destination_array;
	size_t destination_pitch;
	size_t width, height;
};

/* CUmemcpyAttributes. */
struct copy_attributes {
	int source_order;
	struct location source, destination;
	unsigned flags;
};

#define DECLARE(field, name, params) int(*field) params;
static struct {
	ENTRY_POINTS(DECLARE)
	/* Optional: many copies in one call, since CUDA 12.8; the second form, since 13.0, reports no index of what failed. */
	int (*MemcpyBatchAsync)(const kvc_ptr *, const kvc_ptr *, const size_t *, size_t, struct copy_attributes *, size_t *, size_t, size_t *, kvc_handle);
	int (*MemcpyBatchAsync2)(const kvc_ptr *, const kvc_ptr *, const size_t *, size_t, struct copy_attributes *, size_t *, size_t, kvc_handle);
	/* Optional: dma-bufs, since CUDA 11.7, and the flush of what NICs have written, since 11.3. */
	int (*MemGetHandleForAddressRange)(void *, kvc_ptr, size_t, int, unsigned long long);
	int (*FlushGPUDirectRDMAWrites)(int, int);
} cu;

enum {
	STREAM_NON_BLOCKING = 1,
	EVENT_BLOCKING_SYNC = 1,
	EVENT_DISABLE_TIMING = 2,
	HOST_PORTABLE = 1,
	HOST_DEVICEMAP = 2,
	HOST_READ_ONLY = 8,
	IPC_LAZY_PEER_ACCESS = 1,
	WAIT_GEQ = 0,
	PEER_ALREADY_ENABLED = 704,
	HOST_ALREADY_REGISTERED = 712,
	HANDLE_POSIX_FD = 1,
	LOCATION_DEVICE = 1,
	ACCESS_READ_WRITE = 3,
	SOURCE_ORDER_STREAM = 1,
	MEMORY_UNIFIED = 4,
	RANGE_HANDLE_DMABUF = 1,
	FLUSH_CURRENT_CONTEXT = 0,
	FLUSH_TO_OWNER = 100,
	NOT_SUPPORTED = 801,
};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static int open_result;
static const char *open_why;

static void open_driver(void)
{
	void *lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
	if (!lib) {
		open_result = -1;
		open_why = "libcuda.so.1 was not found: no NVIDIA driver is installed on this host, or it is not mounted in this container";
		return;
	}
#define RESOLVE(field, name, params)                                                                        \
	*(void **)&cu.field = dlsym(lib, name);                                                                 \
	if (!cu.field) {                                                                                        \
		open_result = -1;                                                                                   \
		open_why = "libcuda.so.1 lacks " name ": the NVIDIA driver is older than CUDA 12";                  \
		return;                                                                                             \
	}
	ENTRY_POINTS(RESOLVE)
	*(void **)&cu.MemcpyBatchAsync = dlsym(lib, "cuMemcpyBatchAsync");
	*(void **)&cu.MemcpyBatchAsync2 = dlsym(lib, "cuMemcpyBatchAsync_v2");
	*(void **)&cu.MemGetHandleForAddressRange = dlsym(lib, "cuMemGetHandleForAddressRange");
	*(void **)&cu.FlushGPUDirectRDMAWrites = dlsym(lib, "cuFlushGPUDirectRDMAWrites");
	open_result = cu.Init(0);
}

int kvc_open(const char **why)
{
	pthread_once(&once, open_driver);
	*why = open_why;
	return open_result;
}

const char *kvc_error_name(int result)
{
	const char *name = 0;
	if (cu.GetErrorName && cu.GetErrorName(result, &name) == 0 && name)
		return name;
	return "unknown CUresult";
}

/* A goroutine may run on another thread at each call, so the context is set every time; it costs some tens of ns. */
#define IN(ctx)                                                                                             \
	do {                                                                                                    \
		int r_ = cu.CtxSetCurrent(ctx);                                                                     \
		if (r_)                                                                                             \
			return r_;                                                                                      \
	} while (0)

int kvc_driver_version(int *version) { return cu.DriverGetVersion(version); }
int kvc_device_count(int *count) { return cu.DeviceGetCount(count); }
int kvc_device_name(int dev, char *buf, int len) { return cu.DeviceGetName(buf, len, dev); }
int kvc_device_uuid(int dev, unsigned char uuid[16]) { return cu.DeviceGetUuid(uuid, dev); }
int kvc_device_attribute(int dev, int attribute, int *value) { return cu.DeviceGetAttribute(value, attribute, dev); }
int kvc_device_pci(int dev, char *buf, int len) { return cu.DeviceGetPCIBusId(buf, len, dev); }
int kvc_can_access_peer(int dev, int peer, int *yes) { return cu.DeviceCanAccessPeer(yes, dev, peer); }

int kvc_context_retain(int dev, kvc_handle *ctx) { return cu.DevicePrimaryCtxRetain(ctx, dev); }
int kvc_context_release(int dev) { return cu.DevicePrimaryCtxRelease(dev); }

int kvc_enable_peer(kvc_handle ctx, kvc_handle peer)
{
	IN(ctx);
	int r = cu.CtxEnablePeerAccess(peer, 0);
	return r == PEER_ALREADY_ENABLED ? 0 : r;
}

int kvc_stream_range(kvc_handle ctx, int *lowest, int *highest)
{
	IN(ctx);
	return cu.CtxGetStreamPriorityRange(lowest, highest);
}

int kvc_module_load(kvc_handle ctx, const void *image, kvc_handle *module)
{
	IN(ctx);
	return cu.ModuleLoadData(module, image);
}

int kvc_module_unload(kvc_handle ctx, kvc_handle module)
{
	IN(ctx);
	return cu.ModuleUnload(module);
}

int kvc_function(kvc_handle ctx, kvc_handle module, const char *name, kvc_handle *fn)
{
	IN(ctx);
	return cu.ModuleGetFunction(fn, module, name);
}

int kvc_launch(kvc_handle ctx, kvc_handle fn, unsigned grid, unsigned block, kvc_handle stream, const void *params, size_t bytes)
{
	IN(ctx);
	/* CU_LAUNCH_PARAM_BUFFER_POINTER, _SIZE and _END: one packed buffer, so that Go hands over no array of pointers. */
	void *extra[] = {(void *)1, (void *)params, (void *)2, &bytes, (void *)0};
	return cu.LaunchKernel(fn, grid, 1, 1, block, 1, 1, 0, stream, 0, extra);
}

int kvc_alloc(kvc_handle ctx, size_t bytes, kvc_ptr *p)
{
	IN(ctx);
	return cu.MemAlloc(p, bytes);
}

int kvc_free(kvc_handle ctx, kvc_ptr p)
{
	IN(ctx);
	return cu.MemFree(p);
}

int kvc_mem_info(kvc_handle ctx, size_t *free_bytes, size_t *total_bytes)
{
	IN(ctx);
	return cu.MemGetInfo(free_bytes, total_bytes);
}

int kvc_host_alloc(kvc_handle ctx, size_t bytes, void **p)
{
	IN(ctx);
	return cu.MemHostAlloc(p, bytes, HOST_PORTABLE | HOST_DEVICEMAP);
}

int kvc_host_free(kvc_handle ctx, void *p)
{
	IN(ctx);
	return cu.MemFreeHost(p);
}

int kvc_host_register(kvc_handle ctx, void *p, size_t bytes, int read_only)
{
	IN(ctx);
	return cu.MemHostRegister(p, bytes, HOST_PORTABLE | HOST_DEVICEMAP | (read_only ? HOST_READ_ONLY : 0));
}

int kvc_host_unregister(kvc_handle ctx, void *p)
{
	IN(ctx);
	return cu.MemHostUnregister(p);
}

int kvc_host_device_pointer(kvc_handle ctx, void *host, kvc_ptr *p)
{
	IN(ctx);
	return cu.MemHostGetDevicePointer(p, host, 0);
}

int kvc_address_range(kvc_handle ctx, kvc_ptr p, kvc_ptr *base, size_t *bytes)
{
	IN(ctx);
	return cu.MemGetAddressRange(base, bytes, p);
}

int kvc_ipc_export(kvc_handle ctx, kvc_ptr base, unsigned char handle[64])
{
	IN(ctx);
	return cu.IpcGetMemHandle((struct ipc_handle *)handle, base);
}

int kvc_ipc_open(kvc_handle ctx, const unsigned char handle[64], kvc_ptr *p)
{
	IN(ctx);
	return cu.IpcOpenMemHandle(p, *(const struct ipc_handle *)handle, IPC_LAZY_PEER_ACCESS);
}

int kvc_ipc_close(kvc_handle ctx, kvc_ptr p)
{
	IN(ctx);
	return cu.IpcCloseMemHandle(p);
}

int kvc_dmabuf_export(kvc_handle ctx, kvc_ptr p, size_t bytes, int *fd)
{
	if (!cu.MemGetHandleForAddressRange)
		return NOT_SUPPORTED;
	IN(ctx);
	return cu.MemGetHandleForAddressRange(fd, p, bytes, RANGE_HANDLE_DMABUF, 0);
}

int kvc_flush_rdma_writes(kvc_handle ctx)
{
	if (!cu.FlushGPUDirectRDMAWrites)
		return NOT_SUPPORTED;
	IN(ctx);
	return cu.FlushGPUDirectRDMAWrites(FLUSH_CURRENT_CONTEXT, FLUSH_TO_OWNER);
}

int kvc_import_fd(kvc_handle ctx, int dev, int fd, size_t bytes, kvc_ptr *p)
{
	uint64_t memory;
	IN(ctx);
	int r = cu.MemImportFromShareableHandle(&memory, (void *)(intptr_t)fd, HANDLE_POSIX_FD);
	if (r)
		return r;
	if (!(r = cu.MemAddressReserve(p, bytes, 0, 0, 0))) {
		struct access all = {{LOCATION_DEVICE, dev}, ACCESS_READ_WRITE};
		if (!(r = cu.MemMap(*p, bytes, 0, memory, 0)) && (r = cu.MemSetAccess(*p, bytes, &all, 1)))
			cu.MemUnmap(*p, bytes);
		if (r)
			cu.MemAddressFree(*p, bytes);
	}
	/* The mapping keeps the memory. */
	cu.MemRelease(memory);
	return r;
}

int kvc_import_close(kvc_handle ctx, kvc_ptr p, size_t bytes)
{
	IN(ctx);
	int r = cu.MemUnmap(p, bytes);
	int f = cu.MemAddressFree(p, bytes);
	return r ? r : f;
}

int kvc_copy_batch(kvc_handle ctx, const kvc_ptr *dst, const kvc_ptr *src, const size_t *bytes, size_t n, kvc_handle stream)
{
	struct copy_attributes attributes = {.source_order = SOURCE_ORDER_STREAM};
	size_t first = 0, failed;
	IN(ctx);
	if (n > 1 && cu.MemcpyBatchAsync2)
		return cu.MemcpyBatchAsync2(dst, src, bytes, n, &attributes, &first, 1, stream);
	if (n > 1 && cu.MemcpyBatchAsync)
		return cu.MemcpyBatchAsync(dst, src, bytes, n, &attributes, &first, 1, &failed, stream);
	for (size_t i = 0; i < n; i++) {
		int r = cu.MemcpyAsync(dst[i], src[i], bytes[i], stream);
		if (r)
			return r;
	}
	return 0;
}

int kvc_copy_rows(kvc_handle ctx, const struct kvc_rows *rows, size_t n, kvc_handle stream)
{
	IN(ctx);
	for (const struct kvc_rows *p = rows; p < rows + n; p++) {
		struct copy_2d c = {.source_type = MEMORY_UNIFIED, .source = p->src, .source_pitch = p->src_pitch, .destination_type = MEMORY_UNIFIED,
			.destination = p->dst, .destination_pitch = p->dst_pitch, .width = p->width, .height = p->height};
		int r = cu.Memcpy2DAsync(&c, stream);
		if (r)
			return r;
	}
	return 0;
}

int kvc_copy_async(kvc_handle ctx, kvc_ptr dst, kvc_ptr src, size_t bytes, kvc_handle stream)
{
	IN(ctx);
	return cu.MemcpyAsync(dst, src, bytes, stream);
}

int kvc_copy_sync(kvc_handle ctx, kvc_ptr dst, kvc_ptr src, size_t bytes, kvc_handle stream)
{
	IN(ctx);
	int r = cu.MemcpyAsync(dst, src, bytes, stream);
	/* Even after an error nothing of the stream may be in flight when we return. */
	int s = cu.StreamSynchronize(stream);
	return r ? r : s;
}

int kvc_set32_async(kvc_handle ctx, kvc_ptr dst, uint32_t value, size_t words, kvc_handle stream)
{
	IN(ctx);
	return cu.MemsetD32Async(dst, value, words, stream);
}

int kvc_write64(kvc_handle ctx, kvc_handle stream, kvc_ptr p, uint64_t value)
{
	IN(ctx);
	return cu.StreamWriteValue64(stream, p, value, 0);
}

int kvc_wait64(kvc_handle ctx, kvc_handle stream, kvc_ptr p, uint64_t minimum)
{
	IN(ctx);
	return cu.StreamWaitValue64(stream, p, minimum, WAIT_GEQ);
}

int kvc_stream_create(kvc_handle ctx, int priority, kvc_handle *stream)
{
	IN(ctx);
	return cu.StreamCreateWithPriority(stream, STREAM_NON_BLOCKING, priority);
}

int kvc_stream_destroy(kvc_handle ctx, kvc_handle stream)
{
	IN(ctx);
	return cu.StreamDestroy(stream);
}

int kvc_stream_sync(kvc_handle ctx, kvc_handle stream)
{
	IN(ctx);
	return cu.StreamSynchronize(stream);
}

int kvc_stream_query(kvc_handle ctx, kvc_handle stream)
{
	IN(ctx);
	return cu.StreamQuery(stream);
}

int kvc_stream_wait(kvc_handle ctx, kvc_handle stream, kvc_handle event)
{
	IN(ctx);
	return cu.StreamWaitEvent(stream, event, 0);
}

int kvc_event_create(kvc_handle ctx, int timing, int blocking, kvc_handle *event)
{
	IN(ctx);
	return cu.EventCreate(event, (timing ? 0 : EVENT_DISABLE_TIMING) | (blocking ? EVENT_BLOCKING_SYNC : 0));
}

int kvc_event_destroy(kvc_handle ctx, kvc_handle event)
{
	IN(ctx);
	return cu.EventDestroy(event);
}

int kvc_event_record(kvc_handle ctx, kvc_handle event, kvc_handle stream)
{
	IN(ctx);
	return cu.EventRecord(event, stream);
}

int kvc_event_sync(kvc_handle ctx, kvc_handle event)
{
	IN(ctx);
	return cu.EventSynchronize(event);
}

int kvc_event_query(kvc_handle ctx, kvc_handle event)
{
	IN(ctx);
	return cu.EventQuery(event);
}

int kvc_event_elapsed(kvc_handle ctx, kvc_handle start, kvc_handle end, float *ms)
{
	IN(ctx);
	return cu.EventElapsedTime(ms, start, end);
}
