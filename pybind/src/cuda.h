/* cuda.h: the CUDA driver, opened at run time. Nothing here makes or enters a context. */
#ifndef KVSPRAY_CUDA_H
#define KVSPRAY_CUDA_H

#include <stddef.h>
#include <stdint.h>

typedef void *handle;
typedef unsigned long long devptr;

/* CUgraphEdgeData */
struct graph_edge {
	unsigned char from_port, to_port, type, reserved[5];
};

/* CUstreamBatchMemOpParams, the member writeValue */
struct memop {
	unsigned operation; /* MEMOP_WRITE_VALUE_64 */
	devptr address;
	uint64_t value;
	unsigned flags;
	devptr alias;
	uint64_t pad;
};
_Static_assert(sizeof(struct memop) == 48, "the union has six words of 64 bits");

/* CUDA_BATCH_MEM_OP_NODE_PARAMS */
struct memop_node {
	handle context;
	unsigned count;
	struct memop *ops;
	unsigned flags;
};

/* CUmemLocation, CUmemAllocationProp, CUmemAccessDesc */
struct memory_location {
	int type, id;
};
struct memory_kind {
	int type, handles;
	struct memory_location location;
	void *win32;
	unsigned char compression, rdma;
	unsigned short usage;
	unsigned char reserved[4];
};
_Static_assert(sizeof(struct memory_kind) == 32, "as the driver has it");
struct memory_access {
	struct memory_location location;
	int flags;
};

/* X(field, exported name, parameters). The names carry the ABI version of their parameter lists. Source: cuda.h of CUDA 12.3. */
#define ENTRY_POINTS(X)                                                                                    \
	X(CtxGetCurrent, "cuCtxGetCurrent", (handle *))                                                        \
	X(CtxPushCurrent, "cuCtxPushCurrent_v2", (handle))                                                     \
	X(CtxPopCurrent, "cuCtxPopCurrent_v2", (handle *))                                                     \
	X(CtxGetDevice, "cuCtxGetDevice", (int *))                                                             \
	X(CtxGetStreamPriorityRange, "cuCtxGetStreamPriorityRange", (int *, int *))                            \
	X(DeviceGetAttribute, "cuDeviceGetAttribute", (int *, int, int))                                       \
	X(GetErrorName, "cuGetErrorName", (int, const char **))                                                \
	X(DeviceGetUuid, "cuDeviceGetUuid_v2", (unsigned char *, int))                                         \
	X(PointerGetAttribute, "cuPointerGetAttribute", (void *, int, devptr))                                 \
	X(MemGetAddressRange, "cuMemGetAddressRange_v2", (devptr *, size_t *, devptr))                         \
	X(IpcGetMemHandle, "cuIpcGetMemHandle", (unsigned char *, devptr))                                     \
	X(MemRetainAllocationHandle, "cuMemRetainAllocationHandle", (uint64_t *, void *))                      \
	X(MemExportToShareableHandle, "cuMemExportToShareableHandle", (void *, uint64_t, int, unsigned long long)) \
	X(MemRelease, "cuMemRelease", (uint64_t))                                                              \
	X(MemCreate, "cuMemCreate", (uint64_t *, size_t, const struct memory_kind *, unsigned long long))      \
	X(MemMap, "cuMemMap", (devptr, size_t, size_t, uint64_t, unsigned long long))                          \
	X(MemUnmap, "cuMemUnmap", (devptr, size_t))                                                            \
	X(MemSetAccess, "cuMemSetAccess", (devptr, size_t, const struct memory_access *, size_t))              \
	X(ModuleLoadData, "cuModuleLoadData", (handle *, const void *))                                        \
	X(ModuleUnload, "cuModuleUnload", (handle))                                                            \
	X(ModuleGetFunction, "cuModuleGetFunction", (handle *, handle, const char *))                          \
	X(LaunchKernel, "cuLaunchKernel",                                                                      \
	  (handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, handle, void **, void **)) \
	X(MemAlloc, "cuMemAlloc_v2", (devptr *, size_t))                                                       \
	X(MemFree, "cuMemFree_v2", (devptr))                                                                   \
	X(MemsetD32, "cuMemsetD32_v2", (devptr, unsigned, size_t))                                             \
	X(MemHostRegister, "cuMemHostRegister_v2", (void *, size_t, unsigned))                                 \
	X(MemHostUnregister, "cuMemHostUnregister", (void *))                                                  \
	X(MemHostGetDevicePointer, "cuMemHostGetDevicePointer_v2", (devptr *, void *, unsigned))               \
	X(StreamWriteValue64, "cuStreamWriteValue64_v2", (handle, devptr, uint64_t, unsigned))                 \
	X(StreamWaitValue64, "cuStreamWaitValue64_v2", (handle, devptr, uint64_t, unsigned))                   \
	X(StreamCreateWithPriority, "cuStreamCreateWithPriority", (handle *, unsigned, int))                   \
	X(StreamDestroy, "cuStreamDestroy_v2", (handle))                                                       \
	X(StreamSynchronize, "cuStreamSynchronize", (handle))                                                  \
	X(StreamIsCapturing, "cuStreamIsCapturing", (handle, int *))                                           \
	X(StreamGetCaptureInfo, "cuStreamGetCaptureInfo_v3",                                                   \
	  (handle, int *, uint64_t *, handle *, const handle **, const struct graph_edge **, size_t *))        \
	X(GraphAddBatchMemOpNode, "cuGraphAddBatchMemOpNode",                                                  \
	  (handle *, handle, const handle *, size_t, const struct memop_node *))                               \
	X(StreamWaitEvent, "cuStreamWaitEvent", (handle, handle, unsigned))                                    \
	X(EventCreate, "cuEventCreate", (handle *, unsigned))                                                  \
	X(EventDestroy, "cuEventDestroy_v2", (handle))                                                         \
	X(EventRecord, "cuEventRecord", (handle, handle))

#define DECLARE(field, name, params) int(*field) params;
struct cuda {
	ENTRY_POINTS(DECLARE)
};
extern struct cuda cu; /* filled in by cuda_open */

enum {
	HOST_PORTABLE = 1,
	HOST_DEVICEMAP = 2,
	STREAM_NON_BLOCKING = 1,
	EVENT_DISABLE_TIMING = 2,
	ATTRIBUTE_RDMA_WITH_VMM = 110, /* CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED */
	ATTRIBUTE_64_BIT_STREAM_MEM_OPS = 122, /* CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS (since 12.0 without _V1) */
	MEMOP_WRITE_VALUE_64 = 5, /* CU_STREAM_MEM_OP_WRITE_VALUE_64 */
	POINTER_DEVICE_ORDINAL = 9,
	HANDLE_POSIX_FD = 1,      /* CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR */
	MEMORY_PINNED = 1,        /* CU_MEM_ALLOCATION_TYPE_PINNED */
	LOCATION_DEVICE = 1,      /* CU_MEM_LOCATION_TYPE_DEVICE */
	ACCESS_READ_WRITE = 3,    /* CU_MEM_ACCESS_FLAGS_PROT_READWRITE */
};

/* NULL, or what there is not: the same for the whole life of the process. */
const char *cuda_open(void);
/* CUDA_ERROR_... */
const char *cuda_error_name(int rc);

#endif
