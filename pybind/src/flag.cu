// SPDX-License-Identifier: Apache-2.0
//
// The shim's one kernel, a node of captured graphs. internal/cuda/kernels/generate.py makes flag_ptx.h of it.

typedef unsigned long long u64;

// kvs_flag: copies the step number that the shim wrote to `step` before the graph was launched into the layer's flag, which
// lives in host-mapped memory. The fence before it orders every write that this GPU made to the layer's cache.
extern "C" __global__ void kvs_flag(const volatile u64 *step, volatile u64 *flag)
{
	__threadfence_system();
	*flag = *step;
}
