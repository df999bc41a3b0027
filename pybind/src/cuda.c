#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "cuda.h"

struct cuda cu;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static char missing[192];

static void open_driver(void)
{
	const char *name = getenv("KVSPRAY_LIBCUDA");
	void *lib = dlopen(name ? name : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
	if (!lib) {
		snprintf(missing, sizeof missing, "%s cannot be opened: kvspray needs NVIDIA's driver, it does not support ROCm or XPU", name ? name : "libcuda.so.1");
		return;
	}
#define RESOLVE(field, symbol, params)                                                          \
	if (!missing[0] && !(*(void **)&cu.field = dlsym(lib, symbol)))                             \
		snprintf(missing, sizeof missing, "the driver has no %s: it is older than CUDA 12.3", symbol);
	ENTRY_POINTS(RESOLVE)
}

const char *cuda_open(void)
{
	pthread_once(&once, open_driver);
	return missing[0] ? missing : NULL;
}

const char *cuda_error_name(int rc)
{
	const char *name = NULL;
	return cu.GetErrorName(rc, &name) == 0 && name ? name : "unknown error";
}
