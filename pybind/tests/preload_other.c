/* Another library for LD_PRELOAD that defines a function of the driver, and passes the call on to the next library. */
#include <dlfcn.h>
#include <stddef.h>

typedef int load(unsigned long long, const void *, size_t, void *);
static load *next;
load cuMemcpyHtoDAsync_v2;
__attribute__((constructor)) static void init(void) { *(void **)&next = dlsym(RTLD_NEXT, "cuMemcpyHtoDAsync_v2"); }
int cuMemcpyHtoDAsync_v2(unsigned long long d, const void *h, size_t n, void *s) { return next(d, h, n, s); }
