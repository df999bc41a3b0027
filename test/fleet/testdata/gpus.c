/* libcuda.so.1 and libnvidia-ml.so.1 of a host with two GPUs, on which nothing is copied. A test writes their state to files in
 * KVSPRAY_TEST_GPUS: "0" and "1" have "lost", "hot" or nothing, and the FIFO "events" has a GPU and an Xid in each line. */
#include <fcntl.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum {
	GPUS = 2,
	CUDA_VERSION = 13000,
	MULTIPROCESSORS = 16, /* attributes of CUDA */
	MAJOR = 75,
	MINOR = 76,
	TIMEOUT = 10, /* results of NVML */
	LOST = 15,
	UNSUPPORTED = 3,
	XID = 8, /* a type of event */
	THERMAL = 0x40, /* a reason for lower clocks */
};

static const unsigned char bus[GPUS] = {0x1b, 0x43};

/* ---- CUDA */

/* What needs no answer. */
#define NOTHING(X)                                                                                          \
	X(cuInit)                                                                                           \
	X(cuDevicePrimaryCtxRelease_v2)                                                                     \
	X(cuCtxSetCurrent)                                                                                  \
	X(cuCtxEnablePeerAccess)                                                                            \
	X(cuModuleUnload)                                                                                   \
	X(cuLaunchKernel)                                                                                   \
	X(cuMemHostRegister_v2)                                                                             \
	X(cuMemHostUnregister)                                                                              \
	X(cuMemRelease)                                                                                     \
	X(cuMemSetAccess)                                                                                   \
	X(cuStreamDestroy_v2)                                                                               \
	X(cuStreamSynchronize)                                                                              \
	X(cuStreamQuery)                                                                                    \
	X(cuStreamWaitEvent)                                                                                \
	X(cuEventDestroy_v2)                                                                                \
	X(cuEventRecord)                                                                                    \
	X(cuEventSynchronize)                                                                               \
	X(cuEventQuery)
#define IS_NOTHING(name)                                                                                    \
	int name(void) { return 0; }
NOTHING(IS_NOTHING)

/* What a sidecar without transfers does not call. */
#define UNUSED(X)                                                                                           \
	X(cuMemHostGetDevicePointer_v2)                                                                     \
	X(cuMemGetAddressRange_v2)                                                                          \
	X(cuIpcGetMemHandle)                                                                                \
	X(cuIpcOpenMemHandle_v2)                                                                            \
	X(cuIpcCloseMemHandle)                                                                              \
	X(cuMemcpyAsync)                                                                                    \
	X(cuMemcpy2DAsync_v2)                                                                               \
	X(cuMemsetD32Async)                                                                                 \
	X(cuStreamWriteValue64_v2)                                                                          \
	X(cuStreamWaitValue64_v2)                                                                           \
	X(cuEventElapsedTime)
#define IS_UNUSED(name)                                                                                     \
	int name(void) { abort(); }
UNUSED(IS_UNUSED)

static int one(void **handle)
{
	*handle = (void *)1;
	return 0;
}

int cuDevicePrimaryCtxRetain(void **c, int gpu) { return (void)gpu, one(c); }
int cuModuleLoadData(void **m, const void *image) { return (void)image, one(m); }
int cuModuleGetFunction(void **f, void *m, const char *name) { return (void)m, (void)name, one(f); }
int cuStreamCreateWithPriority(void **s, unsigned flags, int priority) { return (void)flags, (void)priority, one(s); }
int cuEventCreate(void **e, unsigned flags) { return (void)flags, one(e); }

int cuGetErrorName(int result, const char **name)
{
	(void)result;
	*name = "an error of the fake driver";
	return 0;
}

int cuDriverGetVersion(int *v)
{
	*v = CUDA_VERSION;
	return 0;
}

int cuDeviceGetCount(int *n)
{
	*n = GPUS;
	return 0;
}

int cuDeviceGet(int *device, int i)
{
	*device = i;
	return 0;
}

int cuDeviceGetName(char *s, int n, int gpu) { return snprintf(s, n, "fake %d", gpu), 0; }

int cuDeviceGetUuid_v2(unsigned char *id, int gpu)
{
	memset(id, gpu + 1, 16);
	return 0;
}

int cuDeviceGetPCIBusId(char *s, int n, int gpu) { return snprintf(s, n, "0000:%02X:00.0", bus[gpu]), 0; }

int cuDeviceGetAttribute(int *v, int attribute, int gpu)
{
	(void)gpu;
	*v = attribute == MULTIPROCESSORS || attribute == MAJOR || attribute == MINOR ? 9 : 0;
	return 0;
}

int cuDeviceCanAccessPeer(int *yes, int a, int b)
{
	(void)a, (void)b;
	*yes = 0;
	return 0;
}

int cuCtxGetStreamPriorityRange(int *low, int *high)
{
	*low = *high = 0;
	return 0;
}

int cuMemGetInfo_v2(size_t *left, size_t *all)
{
	*left = *all = (size_t)80 << 30;
	return 0;
}

/* Untouched pages cost nothing. */
static void *pages(size_t n, int fd)
{
	return mmap(0, n, PROT_READ | PROT_WRITE, fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED, fd, 0);
}

int cuMemAlloc_v2(void **p, size_t n) { return (*p = pages(n, -1)) == MAP_FAILED; }
int cuMemFree_v2(void *p) { return (void)p, 0; } /* at the end of the process */
int cuMemHostAlloc(void **p, size_t n, unsigned flags) { return (void)flags, cuMemAlloc_v2(p, n); }
int cuMemFreeHost(void *p) { return (void)p, 0; }

/* The handle is the descriptor: the caller maps it before it closes it. */
int cuMemImportFromShareableHandle(uint64_t *memory, void *fd, int kind)
{
	(void)kind;
	*memory = (uint64_t)fd;
	return 0;
}

int cuMemAddressReserve(void **p, size_t n, size_t align, void *at, unsigned long long flags)
{
	(void)align, (void)at, (void)flags;
	return cuMemAlloc_v2(p, n);
}

int cuMemMap(void *p, size_t n, size_t off, uint64_t memory, unsigned long long flags)
{
	(void)off, (void)flags;
	return mmap(p, n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, (int)memory, 0) == MAP_FAILED;
}

int cuMemUnmap(void *p, size_t n) { return munmap(p, n) != 0; }
int cuMemAddressFree(void *p, size_t n) { return munmap(p, n) != 0; }

/* ---- NVML. A device is the address of its bus. */

static FILE *file(const char *name, const char *mode)
{
	char path[4096];
	const char *dir = getenv("KVSPRAY_TEST_GPUS");
	if (!dir)
		abort();
	snprintf(path, sizeof path, "%s/%s", dir, name);
	return fopen(path, mode);
}

static int is(const unsigned char *gpu, const char *state)
{
	char name[2] = {(char)('0' + (gpu - bus))}, now[16] = "";
	FILE *f = file(name, "r");
	if (f && !fgets(now, sizeof now, f))
		now[0] = 0;
	if (f)
		fclose(f);
	return !strcmp(now, state);
}

static int working(const unsigned char *gpu) { return is(gpu, "lost") ? LOST : 0; }

int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlEventSetFree(void *set) { return fclose(set), 0; }
const char *nvmlErrorString(int r) { return r == LOST ? "GPU is lost" : "an error of the fake driver"; }

int nvmlDeviceGetCount_v2(unsigned *n)
{
	*n = GPUS;
	return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned i, const unsigned char **gpu)
{
	*gpu = bus + i;
	return 0;
}

struct pci {
	char old[16];
	unsigned domain, bus, device, id, subsystem;
	char name[32];
};

int nvmlDeviceGetPciInfo_v3(const unsigned char *gpu, struct pci *pci)
{
	memset(pci, 0, sizeof *pci);
	pci->bus = *gpu;
	return 0;
}

int nvmlDeviceGetName(const unsigned char *gpu, char *s, unsigned n) { return snprintf(s, n, "fake %d", (int)(gpu - bus)), 0; }
int nvmlDeviceGetUUID(const unsigned char *gpu, char *s, unsigned n) { return (void)gpu, (void)s, (void)n, UNSUPPORTED; }

int nvmlDeviceGetSupportedEventTypes(const unsigned char *gpu, unsigned long long *types)
{
	(void)gpu;
	*types = XID;
	return 0;
}

int nvmlDeviceRegisterEvents(const unsigned char *gpu, unsigned long long types, void *set)
{
	(void)gpu, (void)types, (void)set;
	return 0;
}

int nvmlEventSetCreate(FILE **set)
{
	*set = file("events", "r+"); /* as its own writer it sees no end */
	if (!*set)
		return UNSUPPORTED;
	setvbuf(*set, 0, _IONBF, 0);
	return 0;
}

struct event {
	const unsigned char *gpu;
	unsigned long long type, data;
	unsigned instance, compute;
};

int nvmlEventSetWait_v2(FILE *set, struct event *e, unsigned ms)
{
	struct pollfd p = {fileno(set), POLLIN, 0};
	unsigned gpu;
	if (poll(&p, 1, (int)ms) <= 0)
		return TIMEOUT;
	memset(e, 0, sizeof *e);
	if (fscanf(set, "%u %llu%*c", &gpu, &e->data) != 2 || gpu >= GPUS)
		abort();
	e->gpu = bus + gpu;
	e->type = XID;
	return 0;
}

int nvmlDeviceGetTotalEccErrors(const unsigned char *gpu, int kind, int counter, unsigned long long *n)
{
	(void)kind, (void)counter;
	*n = 0;
	return working(gpu);
}

int nvmlDeviceGetRemappedRows(const unsigned char *gpu, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed)
{
	*corrected = *uncorrected = *pending = *failed = 0;
	return working(gpu);
}

int nvmlDeviceGetCurrentClocksEventReasons(const unsigned char *gpu, unsigned long long *reasons)
{
	*reasons = is(gpu, "hot") ? THERMAL : 0;
	return working(gpu);
}

struct field {
	unsigned id, scope;
	long long at, took;
	int type, result;
	unsigned value[2];
};

int nvmlDeviceGetFieldValues(const unsigned char *gpu, int n, struct field *v)
{
	for (int i = 0; i < n; i++)
		v[i].result = v[i].value[0] = 0; /* no recovery action */
	return working(gpu);
}
