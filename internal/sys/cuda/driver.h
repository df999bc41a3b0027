/* The part of the CUDA driver API that kvspray calls, opened at run time. Types and values restate the API reference of
 * CUDA 12; no CUDA header and no CUDA library is needed to build or to start.
 */
#ifndef KVSPRAY_CUDA_DRIVER_H
#define KVSPRAY_CUDA_DRIVER_H

#include <stddef.h>
#include <stdint.h>

typedef uint64_t kvc_ptr; /* CUdeviceptr */
typedef void *kvc_handle; /* CUcontext, CUstream, CUevent, CUmodule, CUfunction */

/* Opens libcuda.so.1 and initialises the driver, once. 0, or a CUresult, or -1 with *why naming what is missing. */
int kvc_open(const char **why);
const char *kvc_error_name(int result);

int kvc_driver_version(int *version);
int kvc_device_count(int *count);
int kvc_device_name(int dev, char *buf, int len);
int kvc_device_uuid(int dev, unsigned char uuid[16]);
int kvc_device_attribute(int dev, int attribute, int *value);
int kvc_device_pci(int dev, char *buf, int len);
int kvc_can_access_peer(int dev, int peer, int *yes);

int kvc_context_retain(int dev, kvc_handle *ctx);
int kvc_context_release(int dev);
int kvc_enable_peer(kvc_handle ctx, kvc_handle peer);
int kvc_stream_range(kvc_handle ctx, int *lowest, int *highest);

int kvc_module_load(kvc_handle ctx, const void *image, kvc_handle *module);
int kvc_module_unload(kvc_handle ctx, kvc_handle module);
int kvc_function(kvc_handle ctx, kvc_handle module, const char *name, kvc_handle *fn);
int kvc_launch(kvc_handle ctx, kvc_handle fn, unsigned grid, unsigned block, kvc_handle stream, const void *params, size_t bytes);

int kvc_alloc(kvc_handle ctx, size_t bytes, kvc_ptr *p);
int kvc_free(kvc_handle ctx, kvc_ptr p);
int kvc_mem_info(kvc_handle ctx, size_t *free_bytes, size_t *total_bytes);
int kvc_host_alloc(kvc_handle ctx, size_t bytes, void **p);
int kvc_host_free(kvc_handle ctx, void *p);
int kvc_host_register(kvc_handle ctx, void *p, size_t bytes, int read_only);
int kvc_host_unregister(kvc_handle ctx, void *p);
int kvc_host_device_pointer(kvc_handle ctx, void *host, kvc_ptr *p);
int kvc_address_range(kvc_handle ctx, kvc_ptr p, kvc_ptr *base, size_t *bytes);
int kvc_ipc_export(kvc_handle ctx, kvc_ptr base, unsigned char handle[64]);
int kvc_ipc_open(kvc_handle ctx, const unsigned char handle[64], kvc_ptr *p);
int kvc_ipc_close(kvc_handle ctx, kvc_ptr p);

/* A dma-buf descriptor of a range, whole pages, that is the caller's; NOT_SUPPORTED where the driver has no such call (before 515). */
int kvc_dmabuf_export(kvc_handle ctx, kvc_ptr p, size_t bytes, int *fd);
/* Returns when what NICs have written is visible to the owner of the memory. */
int kvc_flush_rdma_writes(kvc_handle ctx);

/* Maps an allocation that another process exported as a descriptor, for this device; the descriptor stays the caller's. */
int kvc_import_fd(kvc_handle ctx, int dev, int fd, size_t bytes, kvc_ptr *p);
int kvc_import_close(kvc_handle ctx, kvc_ptr p, size_t bytes);

/* n copies in one call, where the driver has that; in no order among each other. */
int kvc_copy_batch(kvc_handle ctx, const kvc_ptr *dst, const kvc_ptr *src, const size_t *bytes, size_t n, kvc_handle stream);

/* Rows of width bytes, pitch bytes apart on either side: at most 2^31 - 1. */
struct kvc_rows {
	kvc_ptr dst, src;
	size_t dst_pitch, src_pitch, width, height;
};
int kvc_copy_rows(kvc_handle ctx, const struct kvc_rows *rows, size_t n, kvc_handle stream);
/* Addresses are unified: host, this device or a peer. */
int kvc_copy_async(kvc_handle ctx, kvc_ptr dst, kvc_ptr src, size_t bytes, kvc_handle stream);
int kvc_copy_sync(kvc_handle ctx, kvc_ptr dst, kvc_ptr src, size_t bytes, kvc_handle stream);
int kvc_set32_async(kvc_handle ctx, kvc_ptr dst, uint32_t value, size_t words, kvc_handle stream);
int kvc_write64(kvc_handle ctx, kvc_handle stream, kvc_ptr p, uint64_t value);
int kvc_wait64(kvc_handle ctx, kvc_handle stream, kvc_ptr p, uint64_t minimum);

int kvc_stream_create(kvc_handle ctx, int priority, kvc_handle *stream);
int kvc_stream_destroy(kvc_handle ctx, kvc_handle stream);
int kvc_stream_sync(kvc_handle ctx, kvc_handle stream);
int kvc_stream_query(kvc_handle ctx, kvc_handle stream);
int kvc_stream_wait(kvc_handle ctx, kvc_handle stream, kvc_handle event);
/* timing: measures elapsed time. blocking: kvc_event_sync sleeps instead of spinning. */
int kvc_event_create(kvc_handle ctx, int timing, int blocking, kvc_handle *event);
int kvc_event_destroy(kvc_handle ctx, kvc_handle event);
int kvc_event_record(kvc_handle ctx, kvc_handle event, kvc_handle stream);
int kvc_event_sync(kvc_handle ctx, kvc_handle event);
int kvc_event_query(kvc_handle ctx, kvc_handle event);
int kvc_event_elapsed(kvc_handle ctx, kvc_handle start, kvc_handle end, float *ms);

#endif
